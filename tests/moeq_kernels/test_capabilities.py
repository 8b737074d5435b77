"""The table of what the kernels cover says what they do."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.cases import Recipe, make_layer, route
from support.comparison import compare

from moeq_kernels import CAPABILITIES
from moeq_kernels.activations import GATED, UNGATED
from moeq_kernels.formats import FORMATS


def test_one_record_per_layout() -> None:
    assert sorted((c.layout, e) for c in CAPABILITIES for e in c.elements) == sorted(FORMATS)
    assert all(dataclasses.is_dataclass(c) and hash(c) for c in CAPABILITIES)


@pytest.mark.cover(every=8)
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: c.layout)
def test_every_claimed_group_size_runs(capability, device: torch.device) -> None:
    for element in capability.elements[:1]:
        for group in capability.group_sizes or (-1,):
            dtype: torch.dtype = getattr(torch, capability.dtypes[0])
            sizes = {"experts": 2, "hidden": 256, "intermediate": 256, "group_size": group}
            packed, layer = make_layer(Recipe(capability.layout, element, dtype=dtype, **sizes), device)
            result = compare(packed, layer, route(2, 256, 2, 1, dtype=dtype, device=device))
            assert result.passed, f"groups of {group}: {result.ratio:.2f} times the error of 16-bit products"


def test_what_kernels_of_every_layout_do() -> None:
    for one in CAPABILITIES:
        assert (one.biases, one.expert_parallel, one.router_weight_on_input, one.interpreter) == (True,) * 4
        assert (one.minimum_cuda, one.rocm) == ((8, 0), ("gfx942", "gfx950"))
        assert (one.activations, one.ungated_activations) == (GATED, UNGATED)
        assert one.activation_formats == ("standard", "batched")

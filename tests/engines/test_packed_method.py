"""What the methods of both engines have in common: shapes of parameters, and what moeq's kernels get of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from load.deployments import convert
from torch import nn

from moeq.checkpoint.manifest import STACKED_ROLES
from moeq.engines.experts_source import ConvertedExpertsSource
from moeq.engines.packed_method import PackedMethod
from moeq.load.ranks import Rank, plan_places, plan_rank
from moeq.load.torch_loader import open_converted

LAYOUTS = {
    "gptq-int4-g32-qwen3moe": "marlin-wna16/1",
    "gptq-int4-g32-actorder-qwen3moe": "marlin-act-order/1",
    "mxfp4-gptoss": "marlin-mxfp4-interleaved/1",
    "ct-fp8-channel-qwen3moe": "marlin-fp8/1",
}
INT4, ACT_ORDER, MXFP4, FP8 = LAYOUTS


class Method(PackedMethod):
    """Method of an engine that asks nothing more."""

    def __init__(self, folder: Path, activations: Any = "auto", places: tuple[int, ...] | None = None) -> None:
        self.experts = ConvertedExpertsSource(open_converted(folder))
        self.entry, self.activations = self.experts.checkpoint.manifest.layers[1], activations
        self.rank = Rank(ep_rank=1, ep_size=2) if places else Rank()
        self.parts = [plan_rank(self.entry, self.rank)]
        if places:
            self.parts = plan_places(self.entry, self.rank, places)

    def served(self, layer: Any) -> Any:
        return self.parts_of(dict(layer.named_parameters()))

    def held(self, layer: Any) -> None:
        return None

    def check_reload(self, layer: Any) -> None:
        pass


@pytest.fixture(scope="module")
def folders(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("methods")
    return {name: convert(checkpoints / name, out / name, layout) for name, layout in LAYOUTS.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_parameters_have_the_shapes_of_the_converted_tensors(name: str, folders: dict[str, Path]) -> None:
    method, layer = Method(folders[name]), nn.Module()
    method.create_parameters(layer, torch.bfloat16)
    source = method.experts.checkpoint.source
    stored = {
        f"{role}_{part}": source.tensors[key]
        for role in STACKED_ROLES
        for part, key in method.part.matrices[role].stored.tensors.items()
    }
    assert {key: tuple(one.shape) for key, one in layer.named_parameters()} == {
        key: tuple(entry.shape) for key, entry in stored.items()
    }
    assert not any(one.requires_grad for one in layer.parameters())
    assert all(one.device.type == "meta" for one in method.empty(torch.bfloat16, "meta").values())
    served = method.served(layer)
    for role in STACKED_ROLES:
        for part, tensor in served[role].items():
            assert tensor.data_ptr() == getattr(layer, f"{role}_{part}").data_ptr()
    assert {f"{role}_{part}" for role, parts in served.items() for part in parts} == stored.keys()


def test_replicas_count_as_experts(folders: dict[str, Path]) -> None:
    whole, replicas = Method(folders[INT4]), Method(folders[INT4], places=(2, 2, 0))
    assert (whole.num_held, replicas.num_held) == (4, 3)
    assert replicas.part is replicas.parts[0]
    assert replicas.specs == whole.specs
    assert {len(one) for one in replicas.empty(torch.float16).values()} == {3}
    assert whole.specs.keys() == set(STACKED_ROLES)


@pytest.mark.parametrize(
    ("name", "activations", "folds", "early"),
    [
        (INT4, "auto", False, True),
        (INT4, "fp8", False, False),
        (ACT_ORDER, "auto", False, False),
        (MXFP4, "auto", False, True),
        (MXFP4, "fp8", True, False),
        (FP8, "fp8", False, False),
    ],
)
def test_when_kernels_look_at_values(name: str, activations: str, folds: bool, early: bool, folders) -> None:
    method = Method(folders[name], activations)
    assert method.folds_scales is folds
    assert method.prepares_unfilled is early


def test_one_matrix_with_an_order_is_enough(folders: dict[str, Path]) -> None:
    """A single group has none: its columns are as they were."""
    method: Any = SimpleNamespace(activations="auto", specs={})
    for orders, early in (((False, False), True), ((True, False), False), ((False, True), False)):
        method.specs = {role: SimpleNamespace(act_order=one) for role, one in zip(STACKED_ROLES, orders, strict=True)}
        assert PackedMethod.prepares_unfilled.fget(method) is early  # type: ignore[attr-defined]


@pytest.mark.parametrize("activations", ["auto", "fp8"])
def test_the_kernels_record_points_at_the_parameters(activations: str, folders: dict[str, Path]) -> None:
    method, layer = Method(folders[FP8], activations), nn.Module()
    method.create_parameters(layer, torch.bfloat16)
    packed = method.packed(dict(layer.named_parameters()))
    assert packed.w13.weight.data_ptr() == layer.w13_weight.data_ptr()
    assert packed.w2.scale.data_ptr() == layer.w2_scale.data_ptr()
    assert packed.num_experts == method.num_held == 3
    assert packed.w13.activation_dtype == packed.w2.activation_dtype == ("fp8" if activations == "fp8" else "")

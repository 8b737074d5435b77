"""The module of experts outside of transformers: which activations it finds, what it refuses, what copies leave out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from load.deployments import convert
from torch import Tensor, nn

import moeq_kernels
from moeq.checkpoint.manifest import LayerEntry
from moeq.engines.experts_module import ConvertedExperts, find_activation
from moeq.errors import MoeqError
from moeq.load.torch_loader import layer_entry, open_converted
from moeq.reference.moe import Activation, activate

GPT_OSS = Activation("swigluoai", 1.5, 5.0)


@pytest.fixture(scope="module")
def entry(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> LayerEntry:
    """A layer of a converted folder."""
    folder = convert(checkpoints / "gptq-int4-g32-qwen3moe", tmp_path_factory.mktemp("module") / "out")
    checkpoint = open_converted(folder)
    return layer_entry(checkpoint, checkpoint.info.moe_layers[0])


class Experts(nn.Module):
    """What transformers has for the experts of a layer."""

    def __init__(self, activation: Activation, *, interleaved: bool = False, config: Any = None, **more: Any) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        self.activation, self.interleaved = activation, interleaved
        self.config = config or SimpleNamespace()
        for name, value in more.items():
            setattr(self, name, value)

    def _apply_gate(self, both: Tensor) -> Tensor:
        gate, up = (both[..., ::2], both[..., 1::2]) if self.interleaved else both.chunk(2, -1)
        return activate(gate, up, self.activation)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("activation", "more"),
    [
        (Activation("gelu_tanh"), {}),
        (Activation("relu2"), {}),
        (GPT_OSS, {"alpha": 1.5, "limit": 5}),
        (GPT_OSS, {"config": SimpleNamespace(swiglu_alpha=1.5, swiglu_limit=5.0)}),
        (GPT_OSS, {"alpha": 1.5, "config": SimpleNamespace(swiglu_alpha=None, swiglu_limit=5.0)}),
        (Activation("swigluoai", 1.702, None), {"alpha": None, "limit": 7.0}),
    ],
)
def test_the_activation_is_found_by_its_numbers(
    activation: Activation, more: dict[str, Any], interleaved: bool, entry: LayerEntry
) -> None:
    assert find_activation(Experts(activation, interleaved=interleaved, **more), entry) == activation


def test_the_function_of_experts_without_a_gate(entry: LayerEntry) -> None:
    w13 = entry.matrices["w13"]
    ungated = replace(entry, matrices=entry.matrices | {"w13": replace(w13, spec=replace(w13.spec, gated=False))})
    experts = Experts(Activation(), act_fn=lambda up: torch.relu(up).square())
    assert find_activation(experts, ungated) == Activation("relu2")


def test_other_activations_are_refused(entry: LayerEntry) -> None:
    experts = Experts(Activation("swiglustep", limit=7.0))
    with pytest.raises(MoeqError, match="Experts has an activation that moeq's kernels do not compute") as refused:
        ConvertedExperts(experts, entry)
    assert refused.value.code == "answer.no-kernel"
    assert refused.value.hint == "they compute silu, gelu, gelu_tanh, relu2 and gpt-oss's clamped SwiGLU"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"post_norm": nn.Parameter(torch.ones(2)), "a": nn.Parameter(torch.ones(1))}, "weights: a, post_norm"),
        ({"has_post_expert_norm": True}, "weights: a norm"),
    ],
)
def test_a_module_that_computes_more_is_refused(more: dict[str, Any], said: str, entry: LayerEntry) -> None:
    with pytest.raises(MoeqError, match=f"Experts has more than its experts' {said}") as refused:
        ConvertedExperts(Experts(Activation(), **more), entry)
    assert refused.value.code == "answer.no-kernel"


def test_weights_become_the_checkpoints_tensors(entry: LayerEntry) -> None:
    module = Experts(Activation(), has_post_expert_norm=False)
    experts = ConvertedExperts(module, entry)
    names = {f"{role}_{part}" for role, matrix in entry.matrices.items() for part in matrix.tensors}
    assert dict(module.named_parameters()).keys() == names
    assert all(one.device.type == "meta" and not one.requires_grad for one in module.parameters())
    assert {len(one) for one in module.parameters()} == {entry.num_experts}
    assert module.converted is experts
    assert module._is_hf_initialized is True
    assert experts.run_on == "auto"


def test_experts_on_another_device_are_refused(entry: LayerEntry) -> None:
    experts = ConvertedExperts(Experts(Activation()), entry)
    with pytest.raises(MoeqError, match="experts on meta run neither in moeq's kernels") as refused:
        experts(torch.zeros(1, 8, device="meta"), torch.zeros(1, 1, device="meta"), torch.zeros(1, 1, device="meta"))
    assert refused.value.code == "environment.no-kernel"


def test_a_copy_prepares_its_own_layer(entry: LayerEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer is prepared again for another type, more tokens, and weights that are elsewhere."""
    made: list[tuple[Tensor, int]] = []

    def prepare(self: ConvertedExperts, x: Tensor, top_k: int) -> Callable[..., Any]:
        made.append((x, top_k))

        def layer(x: Tensor, weights: Tensor, ids: Tensor) -> int:
            return len(made)

        layer.max_tokens = 4  # type: ignore[attr-defined]
        return layer

    monkeypatch.setattr(ConvertedExperts, "_prepare", prepare)
    module = Experts(Activation())
    experts = ConvertedExperts(module, entry)
    experts.run_on = "kernels"
    module.w13_weight = nn.Parameter(torch.zeros(4), requires_grad=False)

    def run(tokens: int, dtype: torch.dtype = torch.float32, top_k: int = 2) -> int:
        given = torch.zeros(tokens, top_k)
        return experts(torch.zeros(tokens, 8, dtype=dtype), given, given)  # type: ignore[return-value]

    assert [run(3), run(4), run(5)] == [1, 1, 2]
    assert [run(1), run(1, torch.bfloat16), run(1, torch.bfloat16)] == [2, 3, 3]
    assert run(1, torch.bfloat16, top_k=1) == 4
    assert made[-1][1] == 1
    module.w13_weight.data = torch.zeros(4)
    assert run(1, torch.bfloat16, top_k=1) == 5
    assert experts._prepared is not None
    assert copy.copy(experts)._prepared is None
    module._hf_hook = SimpleNamespace(offload=True)
    module.w13_weight.data = torch.zeros(4)
    assert run(1, torch.bfloat16, top_k=1) == 6
    assert experts._prepared is None, "weights that are offloaded are not held"


@pytest.mark.parametrize(("tokens", "prepared"), [(0, 4096), (1, 4096), (2048, 4096), (2049, 4098), (5000, 10000)])
def test_a_layer_is_prepared_for_twice_as_many_tokens(
    tokens: int, prepared: int, entry: LayerEntry, monkeypatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(moeq_kernels, "prepare", lambda experts, **named: given.update(named, experts=experts))
    module = Experts(GPT_OSS, alpha=1.5, limit=5.0)
    experts = ConvertedExperts(module, entry)
    for name, parameter in list(module.named_parameters()):
        empty = torch.empty(parameter.shape, dtype=parameter.dtype)
        module.register_parameter(name, nn.Parameter(empty, requires_grad=False))
    experts._prepare(torch.empty(tokens, 256, dtype=torch.bfloat16), 3)
    packed = given.pop("experts")
    assert packed.w13.weight.data_ptr() == module.w13_weight.data_ptr()
    assert given == {
        "top_k": 3, "max_tokens": prepared, "dtype": torch.bfloat16, "hidden_size": 256,
        "activation": "swiglu_oai", "alpha": 1.5, "limit": 5.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("run_on", "cuda", "kernels"),
    [("auto", True, True), ("auto", False, False), ("kernels", False, True), ("reference", True, False)],
)
def test_where_experts_run(run_on: Any, cuda: bool, kernels: bool, entry: LayerEntry, monkeypatch) -> None:
    monkeypatch.setattr(ConvertedExperts, "_fused", lambda self, x, weights, ids: ("kernels", weights, ids))
    monkeypatch.setattr(ConvertedExperts, "_reference", lambda self, x, weights, ids: ("reference", weights, ids))
    experts = ConvertedExperts(Experts(Activation()), entry)
    experts.run_on = run_on
    found: Any = experts(SimpleNamespace(is_cuda=cuda), "ids", "weights")  # type: ignore[arg-type]
    assert found == ("kernels" if kernels else "reference", "weights", "ids")

"""A single layer of a checkpoint in vLLM's own classes: how it is described to them, and what fills it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines.vllm_engine import engine as engine_context
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
from vllm.platforms import current_platform
from vllm.v1.worker import workspace

import moeq
from moeq.engines.vllm import one_layer
from moeq.errors import MoeqError

CPU = torch.device("cpu")
INT4 = "gptq-int4-g32-qwen3moe"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the engine's class of a layer is made with, instead of one."""
    found: list[Any] = []

    def experts(*given: Any, **named: Any) -> Any:
        found.append((given, named))
        return nn.Module()

    experts.load_weights = lambda layer, tensors: [name for name, _ in tensors]  # type: ignore[attr-defined]
    monkeypatch.setattr(one_layer, "RoutedExperts", experts)
    return found


@pytest.mark.parametrize(
    ("name", "projections", "activation", "biases"),
    [
        (INT4, ("gate_proj", "down_proj", "up_proj"), "silu", False),
        ("gptq-int4-g128-mixtral", ("gate_proj", "down_proj", "up_proj"), "silu", False),
        ("mxfp4-gptoss", ("gate_proj", "down_proj", "up_proj"), "swigluoai", True),
    ],
)
def test_how_a_layer_is_described(name, projections, activation, biases, checkpoints: Path, made: list[Any]) -> None:
    checkpoint = moeq.open(checkpoints / name)
    with one_layer.engine(CPU):
        one_layer.empty_layer(checkpoint, 1, "method", "triton", CPU, torch.float16)
    ((prefix, dtype, moe, method, manager), names) = made[0]
    assert (prefix, dtype, method) == ("model.layers.1.mlp.experts", torch.float16, "method")
    keys = ("ckpt_gate_proj_name", "ckpt_down_proj_name", "ckpt_up_proj_name")
    assert tuple(names[key] for key in keys) == projections
    info = checkpoint.info
    assert (moe.num_experts, moe.num_local_experts, moe.num_logical_experts) == (info.num_experts,) * 3
    assert (moe.hidden_dim, moe.experts_per_token) == (info.hidden_size, info.top_k)
    assert (moe.activation, moe.has_bias) == (MoEActivation(activation), biases)
    assert (moe.in_dtype, moe.moe_backend, moe.device) == (torch.float16, "triton", "cpu")
    assert moe.routing_method == RoutingMethodType.Renormalize
    assert manager.local_num_experts == info.num_experts
    assert manager.expert_map is None


def test_projections_of_older_mixtral_files(checkpoints: Path, made: list[Any]) -> None:
    tensors = dict.fromkeys(f"model.layers.1.block_sparse_moe.experts.0.{name}.qweight" for name in ("w1", "w2", "w3"))
    checkpoint: Any = SimpleNamespace(info=moeq.open(checkpoints / INT4).info, source=SimpleNamespace(tensors=tensors))
    with one_layer.engine(CPU):
        one_layer.empty_layer(checkpoint, 1, None, "auto", CPU, torch.bfloat16)
    keys = ("ckpt_gate_proj_name", "ckpt_down_proj_name", "ckpt_up_proj_name")
    assert tuple(made[0][1][key] for key in keys) == ("w1", "w2", "w3")


def test_every_tensor_of_the_layer_is_handed_over(checkpoints: Path, made: list[Any]) -> None:
    checkpoint = moeq.open(checkpoints / INT4)
    taken: list[str] = []

    def load(layer: nn.Module, tensors: Any) -> list[str]:
        taken[:] = [name for name, tensor in tensors if tensor is not None]
        return taken

    one_layer.RoutedExperts.load_weights = load
    prefix = checkpoint.expert_prefix(1) + "."
    wanted = [name.removeprefix(prefix) for name in checkpoint.source.tensors if name.startswith(prefix)]
    assert any(name.endswith(".g_idx") for name in wanted)
    read: list[str] = []

    def reading(name: str) -> torch.Tensor:
        read.append(name)
        return checkpoint.source.read(name)

    with one_layer.engine(CPU):
        one_layer.filled_layer(checkpoint, 1, None, "auto", CPU, torch.bfloat16, read=reading)
    assert taken == [name for name in wanted if not name.endswith(".g_idx")], "newer versions read no order of columns"
    assert read == [prefix + name for name in taken]
    older = SimpleNamespace(w13_g_idx=None)
    one_layer.RoutedExperts = lambda *given, **named: older  # type: ignore[assignment, misc]
    one_layer.RoutedExperts.load_weights = load
    with one_layer.engine(CPU):
        assert one_layer.filled_layer(checkpoint, 1, None, "auto", CPU, torch.bfloat16) is older
    assert taken == wanted


def test_no_activations_are_asked_for_while_a_layer_is_made(checkpoints: Path) -> None:
    """Methods for MXFP4 look for the user's in the model's config; afterwards there is none, as before."""
    with engine_context():
        config = get_current_vllm_config()
        before = config.model_config
        with one_layer._activations_by_method():
            assert config.model_config.quantization_config is None
        assert config.model_config is before
        with pytest.raises(ValueError, match="broken"), one_layer._activations_by_method():
            raise ValueError("broken")
        assert config.model_config is before


def test_the_engines_operators_are_loaded_on_a_gpu(monkeypatch) -> None:
    loaded: list[bool] = []
    monkeypatch.setattr(type(current_platform), "import_kernels", classmethod(lambda cls: loaded.append(True)))
    monkeypatch.setattr(workspace, "is_workspace_manager_initialized", lambda: True)
    made: list[Any] = []
    monkeypatch.setattr(workspace, "init_workspace_manager", made.append)
    monkeypatch.setattr(one_layer, "DeviceConfig", lambda kind: kind)
    monkeypatch.setattr(one_layer, "VllmConfig", lambda device_config: device_config)
    monkeypatch.setattr(
        one_layer, "set_current_vllm_config", lambda config: one_layer.contextmanager(lambda: (yield))()
    )
    for kind, expected in (("cpu", []), ("cuda", [True])):
        with one_layer.engine(torch.device(kind)):
            assert loaded == expected
    assert made == [], "the engine has its buffers"
    monkeypatch.setattr(workspace, "is_workspace_manager_initialized", lambda: False)
    with one_layer.engine(CPU):
        assert made == [CPU]


@pytest.mark.parametrize(
    ("cuda", "cpu", "needs"), [(False, False, True), (True, False, False), (False, True, False), (True, True, False)]
)
def test_where_the_engine_has_kernels(cuda: bool, cpu: bool, needs: bool, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: cpu)
    assert one_layer.needs_gpu() is needs


def test_methods_of_sources(checkpoints: Path) -> None:
    kinds = {INT4: "auto_gptq", "mxfp4-gptoss": "gpt_oss_mxfp4", "modelopt-nvfp4-qwen3moe": "modelopt_fp4"}
    for name, kind in kinds.items():
        method = one_layer.source_method(moeq.open(checkpoints / name))
        assert method.packed_modules_mapping == {}
        assert method.get_name() == kind


def test_which_class_ran(checkpoints: Path) -> None:
    """Its experts', or the method's where an engine's method has no kernel object."""

    class Experts:
        pass

    class Method(SimpleNamespace):
        pass

    fields = {"skip_forward_padding": True, "is_monolithic": False, "process_weights_after_loading": lambda layer: None}
    with one_layer.engine(CPU):
        for more, expected in (
            ({"moe_kernel": SimpleNamespace(fused_experts=Experts())}, "Experts"),
            ({"moe_kernel": None}, "Method"),
            ({}, "Method"),
        ):
            layer = SimpleNamespace(quant_method=Method(**fields, **more), forward_modular=lambda x, weights, ids: x)
            name, run = one_layer.ready(layer)
            assert name == expected
            x = torch.randn(2, 6)
            assert torch.equal(run(x, torch.ones(2, 1), torch.zeros(2, 1)), x)


def test_a_layer_that_takes_no_tensors_is_refused(checkpoints: Path, made: list[Any]) -> None:
    one_layer.RoutedExperts.load_weights = lambda layer, tensors: []
    with one_layer.engine(CPU), pytest.raises(MoeqError, match="the engine took 0 of") as refused:
        one_layer.filled_layer(moeq.open(checkpoints / INT4), 1, None, "auto", CPU, torch.bfloat16)
    assert refused.value.code == "answer.engine-layer"

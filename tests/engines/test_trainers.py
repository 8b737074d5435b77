"""Weight updates of a running vLLM by the trainers' own code, where their packages are installed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines.test_vllm_models import NoAttention
from engines.test_vllm_reload import running  # noqa: F401 - a fixture
from engines.trainer_examples import printed_digests

import moeq

INT4 = "ct-int4-g128-qwen3moe"


def new_weights(layer: Any) -> list[tuple[str, torch.Tensor]]:
    """bf16 weights of all experts of a layer, and of a norm, by the names of the checkpoint."""
    spec, made = layer.specs["w13"], torch.Generator().manual_seed(0)
    half, hidden = spec.n // 2, spec.k
    shapes = {"gate": (half, hidden), "up": (half, hidden), "down": (hidden, half)}
    found = [
        (f"model.layers.{layer.layer}.mlp.experts.{expert}.{part}_proj.weight", torch.randn(shape, generator=made))
        for expert in range(layer.num_experts)
        for part, shape in shapes.items()
    ]
    return [(name, one.bfloat16()) for name, one in [*found, ("model.norm.weight", torch.full((hidden,), 2.0))]]


@pytest.fixture
def updated(running, folders) -> tuple[Any, list[tuple[str, torch.Tensor]], Callable[[], None]]:  # noqa: F811
    """A running model, new weights of its second layer, and a check that it holds them."""
    engine = running[1]
    layer = moeq.writable_layer(moeq.open(folders[INT4]), 1)
    weights, writer = new_weights(layer), moeq.Writer([layer])
    addresses = {name: one.data_ptr() for name, one in engine.parameters(1).items()}
    for name, weight in weights[:-1]:
        writer.update(1, int(name.split(".")[5]), name.split(".")[6].removesuffix("_proj"), weight)

    def check() -> None:
        for role, parts in layer.tensors.items():
            for part, tensor in parts.items():
                assert torch.equal(engine.parameters(1)[f"{role}_{part}"].data, tensor), (role, part)
        assert addresses == {name: one.data_ptr() for name, one in engine.parameters(1).items()}
        assert bool((engine.model.model.norm.weight == 2).all())

    return engine, weights, check


@pytest.mark.parametrize("running", [INT4], indirect=True)
def test_openrlhf(updated, monkeypatch) -> None:
    """Its worker receives one tensor at a time and calls `load_weights` with it."""
    wrap = pytest.importorskip("openrlhf.trainer.ray.vllm_worker_wrap", reason="OpenRLHF is not installed")
    engine, weights, check = updated
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, device=None, **more: empty(*shape, **more))  # not on `cuda`
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    worker = wrap.WorkerWrap()
    worker.model_config, worker.model_runner = engine.vllm_config.model_config, engine
    worker._model_update_with_ray = False
    for name, weight in weights:
        worker._model_update_group = SimpleNamespace(broadcast=lambda one, src, stream: one.copy_(weight))  # noqa: B023
        worker.update_weight(name, weight.dtype, weight.shape)
    check()


@pytest.mark.parametrize("running", [INT4], indirect=True)
def test_verl(updated, tmp_path) -> None:
    """Its sender's buckets reach its worker, which has the engine process all weights after the last one."""
    pytest.importorskip("verl.workers.rollout.vllm_rollout.utils", reason="verl is not installed")
    from verl_sync import sync

    engine, weights, check = updated
    sync(engine, weights, tmp_path)
    check()


@pytest.mark.parametrize("running", [INT4], indirect=True)
def test_trl(updated) -> None:
    """Its colocated mode calls `load_weights` for every parameter of the model that is trained."""
    generation = pytest.importorskip("trl.generation.vllm_generation", reason="TRL is not installed")
    engine, weights, check = updated
    trained, reset = torch.nn.Module(), []
    for name, weight in weights:
        module = trained
        for part in name.split(".")[:-1]:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter("weight", torch.nn.Parameter(weight))
    worker = SimpleNamespace(model_runner=engine)
    llm = SimpleNamespace(
        llm_engine=SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker)),
        reset_prefix_cache=lambda: reset.append(True),
    )
    sender = object.__new__(generation.VLLMGeneration)
    sender.mode, sender.enable_sleep_mode, sender.llm, sender.model = "colocate", False, llm, trained
    sender.accelerator = SimpleNamespace(is_main_process=True)
    sender._dist = SimpleNamespace(is_fsdp=False, gather_params=nullcontext)
    sender.sync_weights()
    assert reset
    check()


@pytest.mark.parametrize("script", ["verl_sync.py", "skyrl_sync.py"])
def test_examples(script, monkeypatch, capsys) -> None:
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel
    from vllm.model_executor.models import qwen3_moe

    if script.startswith("verl"):
        pytest.importorskip("verl.workers.rollout.vllm_rollout.utils", reason="verl is not installed")
    monkeypatch.setattr(qwen3_moe, "Attention", NoAttention)
    try:
        assert len(printed_digests(script, capsys)) == 2
    finally:
        destroy_model_parallel()
        destroy_distributed_environment()

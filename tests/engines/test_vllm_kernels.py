"""moeq's kernels inside vLLM's own layers, in Triton's interpreter: what is chosen, and that it computes the layer."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.vllm_engine import BACKENDS, NAMES, engine, experts_layer, loaded_layer
from load.deployments import convert, reference_layer, warmed_problems
from vllm.config.offload import OffloadConfig, PrefetchOffloadConfig
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.prepare_finalize import no_dp_ep
from vllm.model_executor.layers.fused_moe.prepare_finalize.batched import BatchedPrepareAndFinalize

import moeq
from moeq.engines.reload import ExpertReload
from moeq.engines.vllm import own_experts
from moeq.engines.vllm.engine_experts import VERSION
from moeq.engines.vllm.own_experts import (
    ACTIVATIONS,
    MoeqBatchedExperts,
    MoeqExperts,
    _prepare,
    activation_arguments,
    check_own,
)
from moeq.errors import MoeqError

pytestmark = pytest.mark.usefixtures("buffers")

INT4 = "gptq-int4-g32-qwen3moe"


def batch_of(hidden: int, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Six tokens with two choices each."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(6, hidden, generator=generator).to(torch.bfloat16)
    weights = torch.softmax(torch.randn(6, 2, generator=generator), -1)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(6)]).to(torch.int32)
    return x, weights, ids


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return batch_of(256, 4)


def run(layer: Any, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The layer as the engine's runner calls it."""
    with engine():
        return layer.forward_modular(*batch)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", list(NAMES))
def test_a_layer_in_moeqs_kernels_is_the_sources(name, folders, checkpoints, batch) -> None:
    layer = loaded_layer(folders[name], kernels="moeq")
    assert isinstance(layer.quant_method.moe_kernel.fused_experts, MoeqExperts)
    found = run(layer, batch)
    assert found.dtype == torch.bfloat16
    wanted = reference_layer(moeq.open(checkpoints / name), 1, *batch)
    # int8 activations are rounded by rows; everything else is 16 bit.
    assert error(found, wanted) < (0.03 if "w8a8" in name else 0.01)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("ct-nvfp4a16-qwen3moe", "marlin-nvfp4/1"),
        ("modelopt-nvfp4-qwen3moe", "marlin-nvfp4/1"),
        ("ct-fp8-channel-qwen3moe", "marlin-fp8/1"),
        ("ct-fp8-tensor-qwen3moe", "marlin-fp8/1"),
        ("ct-fp8-block-qwen3moe", "marlin-fp8/1"),
        ("ct-mxfp8-qwen3moe", "marlin-mxfp8/1"),
    ],
)
def test_floating_point_weights_in_moeqs_kernels(name, layout, checkpoints, tmp_path) -> None:
    """By themselves where the engine's kernels do not run, as here without a GPU; the portable ones."""
    source = moeq.open(checkpoints / name)
    batch = batch_of(source.info.hidden_size, source.info.num_experts)
    layer = loaded_layer(convert(checkpoints / name, tmp_path / "out", layout))
    assert isinstance(layer.quant_method.moe_kernel.fused_experts, MoeqExperts)
    wanted = reference_layer(source, 1, *batch)
    assert error(run(layer, batch), wanted) < 0.01


def test_the_engines_own_way_to_the_experts_gives_the_same_bits(folders, batch) -> None:
    """Through its kernel object, which the method goes past where no other rank takes part."""
    layer = loaded_layer(folders[INT4], kernels="moeq")
    kernel = layer.quant_method.moe_kernel
    assert isinstance(kernel, modular_kernel.FusedMoEKernel)
    assert isinstance(kernel.prepare_finalize, no_dp_ep.MoEPrepareAndFinalizeNoDPEPModular)
    x, weights, ids = batch
    through = kernel.apply(
        hidden_states=x, w1=layer.w13_weight, w2=layer.w2_weight, topk_weights=weights, topk_ids=ids,
        activation=layer.activation, global_num_experts=4, expert_map=None, apply_router_weight_on_input=False,
    )  # fmt: skip
    assert torch.equal(through, run(layer, batch))


@pytest.mark.skipif(VERSION < (0, 31), reason="this version has no weight cache")
def test_a_layer_takes_the_weights_of_a_preloading_process(folders, batch, tmp_path) -> None:
    """`vllm preload` and `--load-format ipc_cache`: tensors come from another process, and no file is read."""
    from vllm.model_executor.model_loader.weight_cache.protocol import check_ipc_quant_support
    from vllm.model_executor.utils import weights_already_processed

    cached = loaded_layer(folders[INT4], kernels="moeq")
    check_ipc_quant_support(cached)
    folder = shutil.copytree(folders[INT4], tmp_path / "moved")
    layer = experts_layer(folder, kernels="moeq")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    for name, parameter in cached.named_parameters():
        layer.register_parameter(name, torch.nn.Parameter(parameter.data, requires_grad=False))
    with engine(), weights_already_processed():
        layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(run(layer, batch), run(cached, batch))


@pytest.mark.skipif(VERSION < (0, 31), reason="this version has no weight cache")
def test_layers_in_the_engines_kernels_are_not_preloaded(folders, gpu) -> None:
    from vllm.model_executor.model_loader.weight_cache import protocol

    with pytest.raises(protocol.UnsupportedQuantForIPCError, match="MoeqMoEMethod"):
        protocol.check_ipc_quant_support(experts_layer(folders[INT4], kernels="engine"))


@pytest.mark.parametrize("where", ["tp", "ep"])
def test_ranks_add_up(where, folders, batch) -> None:
    whole = run(loaded_layer(folders[INT4], kernels="moeq"), batch).float()
    parts = [run(loaded_layer(folders[INT4], kernels="moeq", **{where: (rank, 2)}), batch) for rank in (0, 1)]
    assert all(error(part, whole) > 0.1 for part in parts)
    assert error(sum(part.float() for part in parts), whole) < 0.01


def test_the_router_weight_of_a_single_choice_may_multiply_the_input(folders, checkpoints, batch) -> None:
    layer = loaded_layer(folders[INT4], kernels="moeq", experts_per_token=1)
    layer.apply_router_weight_on_input = True
    x, weights, ids = batch[0], batch[1][:, :1], batch[2][:, :1]
    scaled = (x * weights.to(x.dtype), torch.ones_like(weights), ids)
    wanted = reference_layer(moeq.open(checkpoints / INT4), 1, *scaled)
    assert error(run(layer, (x, weights, ids)), wanted) < 0.01
    through = layer.quant_method.moe_kernel.apply(
        hidden_states=x, w1=layer.w13_weight, w2=layer.w2_weight, topk_weights=weights, topk_ids=ids,
        activation=layer.activation, global_num_experts=4, expert_map=None, apply_router_weight_on_input=True,
    )  # fmt: skip
    assert error(through, wanted) < 0.01


def test_tokens_without_an_expert_give_zero(folders, batch) -> None:
    """-1 marks padding of a graph (VLLM_MOE_SKIP_PADDING)."""
    x, weights, ids = batch
    found = run(loaded_layer(folders[INT4], kernels="moeq"), (x, weights, torch.where(x[:, :1] > 0, -1, ids)))
    assert torch.equal(found.abs().sum(1) == 0, x[:, 0] > 0)


def test_buffers_are_the_engines_and_large_enough_for_every_smaller_call(folders, batch, buffers) -> None:
    """What its profiling run has seen is all that is ever used."""
    layer = loaded_layer(folders[INT4], kernels="moeq", max_num_tokens=384)
    many = tuple(tensor.repeat(64, 1) for tensor in batch)
    run(layer, many)
    buffers.lock()
    for tokens in (1, 3, 17, 64, 200, 384):
        part = tuple(tensor[:tokens] for tensor in many)
        assert torch.isfinite(run(layer, part)).all()


def test_dummy_weights_are_not_read_and_give_numbers(folders, batch, tmp_path) -> None:
    for name, folder in folders.items():
        layer = experts_layer(folder, kernels="moeq", load_format="dummy")
        generator = torch.Generator().manual_seed(1)
        for parameter in layer.parameters():
            if parameter.is_floating_point():
                parameter.data.uniform_(-1e-3, 1e-3, generator=generator)
        with engine():
            layer.quant_method.process_weights_after_loading(layer)
        assert torch.isfinite(run(layer, batch)).all(), name


@pytest.mark.parametrize("where", ["tp", "ep"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", list(NAMES))
def test_what_a_rank_calls_is_what_warmup_compiles(name, ranks, where, folders, gpu) -> None:
    warmed = warmed_problems(folders[name], where, ranks)
    if warmed is None:
        return
    for rank in range(ranks):
        method = experts_layer(folders[name], kernels="moeq", **{where: (rank, ranks)}).quant_method
        packed = method.packed(method.empty(torch.bfloat16, "meta"))
        known = 4 if where == "ep" and ranks > 1 else None
        assert _prepare(method.moe, packed, known, "H200").problem in warmed


def test_batches_by_expert_run_in_moeqs_kernels(folders, checkpoints, batch, monkeypatch) -> None:
    """In the format of DeepEP's low-latency kernels; the engine's own reference makes the batches and sums them."""
    made = BatchedPrepareAndFinalize(max_num_tokens=8, num_local_experts=4, num_dispatchers=1, rank=0)
    monkeypatch.setattr(own_experts, "maybe_make_prepare_finalize", lambda **given: made)
    parallel = {"use_ep": True, "dp_size": 2, "all2all_backend": "deepep_low_latency"}
    layer = loaded_layer(folders[INT4], kernels="moeq", parallel=parallel)
    kernel = layer.quant_method.moe_kernel
    assert isinstance(kernel.fused_experts, MoeqBatchedExperts)
    x, weights, ids = batch
    with engine():
        found = kernel.apply(
            hidden_states=x, w1=layer.w13_weight, w2=layer.w2_weight, topk_weights=weights, topk_ids=ids,
            activation=layer.activation, global_num_experts=4, expert_map=None, apply_router_weight_on_input=False,
        )  # fmt: skip
    assert error(found, reference_layer(moeq.open(checkpoints / INT4), 1, *batch)) < 0.01


class TestChoice:
    def chosen(self, folder: Path, **options: Any) -> str:
        return experts_layer(folder, **options).quant_method.choice.why

    def test_without_a_hopper_gpu_the_engines_kernels_run(self, folders, gpu) -> None:
        assert "the engine's MARLIN" in self.chosen(folders[INT4])

    @pytest.mark.parametrize("name", list(NAMES))
    def test_where_there_are_kernels_for_the_gpu_moeqs_run(self, name, folders, gpu, monkeypatch) -> None:
        from moeq.engines.vllm import experts_method

        monkeypatch.setattr(experts_method, "slow_reason", lambda moe, packed: None)
        assert self.chosen(folders[name]) == "moeq's kernels for this GPU"

    def test_where_experts_are_moved_away_they_are_not_moeqs(self, folders, gpu) -> None:
        method = experts_layer(folders[INT4]).quant_method
        offload = OffloadConfig(prefetch=PrefetchOffloadConfig(offload_group_size=2))
        with engine(offload_config=offload), pytest.raises(MoeqError, match="--offload-group-size"):
            check_own(method.moe, method.entry, method.part)

    def test_the_environment_decides_where_the_option_is_silent(self, folders, gpu, monkeypatch) -> None:
        monkeypatch.setenv("MOEQ_KERNELS", "moeq")
        assert "moeq's kernels for any GPU: experts are on cpu" in self.chosen(folders[INT4])
        assert self.chosen(folders[INT4], kernels="engine") == "the engine's MARLIN, as asked for"

    def test_a_layout_that_only_moeq_reads(self, checkpoints, tmp_path) -> None:
        from load.deployments import convert

        folder = convert(checkpoints / "mxfp4-gptoss", tmp_path / "out", "triton-kernels-hopper-w4/1")
        assert "moeq's kernels for any GPU" in self.chosen(folder)
        with pytest.raises(MoeqError, match="none of vLLM's kernels reads"):
            experts_layer(folder, kernels="engine")

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"activation": MoEActivation.SWIGLUSTEP}, "activation"),
        ],
    )
    def test_what_moeqs_kernels_cannot_goes_to_the_engines(self, options, words, folders, gpu, monkeypatch) -> None:
        if "activation" in options:  # The kernels have every activation of 0.33: one of a later release is missing.
            monkeypatch.delitem(ACTIVATIONS, options["activation"])
        why = self.chosen(folders[INT4], **options)
        assert words in why
        assert "layer 1" not in why  # the log says it once for all layers that are alike
        with pytest.raises(MoeqError, match=words) as caught:
            experts_layer(folders[INT4], kernels="moeq", **options)
        assert caught.value.code == "answer.no-kernel"

    @pytest.mark.parametrize(
        ("name", "layout", "since"),
        [("gptq-int4-g32-qwen3moe", "triton-wna16/1", (0, 27)), ("ct-w8a8-qwen3moe", "int8-w8a8/1", (0, 28))],
    )
    def test_adapters_are_not_left_out_of_a_function(self, name, layout, since, checkpoints, tmp_path, gpu) -> None:
        """Triton experts of earlier releases run by way of a function that knows nothing of adapters."""
        folder = convert(checkpoints / name, tmp_path / "out", layout)
        why = self.chosen(folder, is_lora_enabled=True)
        if since <= VERSION:
            assert why.startswith("the engine's")
            return
        assert why.startswith("moeq's kernels for any GPU")
        with pytest.raises(MoeqError, match="does not support LoRA"):
            experts_layer(folder, kernels="engine", is_lora_enabled=True)

    def test_batch_invariance(self, folders, gpu, monkeypatch) -> None:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        with pytest.raises(MoeqError, match="batch invariance"):
            experts_layer(folders[INT4], kernels="moeq")

    @pytest.mark.parametrize("asked", ["marlin", 3])
    def test_nonsense_is_refused(self, asked, folders, gpu) -> None:
        with pytest.raises(MoeqError) as caught:
            experts_layer(folders[INT4], kernels=asked)
        assert caught.value.code == "usage.kernels"

    def test_the_log_says_it_once_for_layers_that_are_alike(self, folders, gpu, caplog, monkeypatch) -> None:
        from moeq.engines.vllm import experts_method

        monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
        with caplog.at_level(logging.INFO, logger="vllm.moeq"):
            for _ in range(3):
                experts_layer(folders["awq-int4-g32-qwen3moe"], kernels="moeq")
        said = [record.getMessage() for record in caplog.records if record.name == experts_method.logger.name]
        assert len(said) <= 1
        assert all("4 experts of [256, 128], marlin-wna16/1 int4, silu" in line for line in said)


def test_every_activation_is_known_to_the_kernels_with_its_constants() -> None:
    from types import SimpleNamespace

    from moeq_kernels.activations import GATED, UNGATED

    numbers = {"swiglu_limit": 5.0, "swiglu_alpha": 1.5, "swiglu_beta": 0.5}
    numbers |= {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
    found = {}
    for activation in MoEActivation:
        name = ACTIVATIONS[activation]  # none is unknown
        assert name in (GATED if activation.is_gated else UNGATED)
        found[activation.value] = activation_arguments(SimpleNamespace(activation=activation, **numbers))
        assert found[activation.value]["activation"] == name
    clamped = {"activation": "swiglu_oai", "alpha": 1.5, "beta": 0.5, "limit": 5.0}
    assert found["swigluoai_uninterleave"] == clamped
    assert found["swigluoai"] == {"activation": "swiglu_oai", "alpha": 1.702, "beta": 1.0, "limit": 7.0}
    assert [found[one]["limit"] for one in ("silu", "gelu")] == [5.0, None]
    uninterleaved = SimpleNamespace(activation=MoEActivation.SWIGLUOAI_UNINTERLEAVE, **dict.fromkeys(numbers))
    assert activation_arguments(uninterleaved) == clamped | {"alpha": 1.0, "beta": 0.0, "limit": None}
    assert found.get("situ", {"limit": 25.0})["limit"] == 25.0  # since vLLM 0.32
    if "situ" in found:
        for bound in (None, 0.0, -1.0):
            situ = SimpleNamespace(activation=MoEActivation("situ"), **numbers | {"activation_situ_linear_beta": bound})
            assert activation_arguments(situ) == {"activation": "situ", "alpha": 4.0, "limit": None}
    assert found.get("swiglustep", {"limit": 7.0})["limit"] == 7.0
    assert {backend.option for backend in BACKENDS.values()} >= {"marlin", "triton"}


def test_e4m3_activations_are_asked_for(checkpoints: Path, tmp_path: Path) -> None:
    """They imply moeq's kernels; FP8 weights have such kernels everywhere."""
    folder = convert(checkpoints / "ct-fp8-channel-qwen3moe", tmp_path / "out", "marlin-fp8/1")
    dtypes = []
    for options in ({"kernels": "moeq"}, {"activations": "fp8"}):
        layer = loaded_layer(folder, **options)
        dtypes.append(layer.quant_method.moe_kernel.fused_experts.prepared.problem.w13.activation_dtype)
        assert layer.quant_method.supports_eplb
    assert dtypes == ["", "fp8"]


@pytest.mark.parametrize("name", ["ct-mxfp4-qwen3moe", INT4])
def test_four_bit_weights_need_hopper_beside_e4m3_activations(name: str, folders: dict[str, Path]) -> None:
    with pytest.raises(MoeqError, match="fp8 activations") as caught:
        loaded_layer(folders[name], activations="fp8")
    assert caught.value.code == "answer.no-kernel"


def test_folded_scales_are_neither_moved_nor_reloaded(folders: dict[str, Path]) -> None:
    layer = experts_layer(folders["ct-mxfp4-qwen3moe"], activations="fp8")
    assert not layer.quant_method.supports_eplb
    reload = ExpertReload([layer], str(folders["ct-mxfp4-qwen3moe"]))
    with pytest.raises(MoeqError, match="read scales that were folded") as caught:
        reload.folder()
    assert caught.value.code == "usage.reload"

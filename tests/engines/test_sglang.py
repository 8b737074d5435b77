"""The SGLang plug-in inside SGLang's own Python packages, without a GPU; kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines.sglang_engine import HookRegistry, config_of, experts_layer, loaded_layer, run
from load.deployments import convert, reference_layer
from sglang.srt.arg_groups.choices import MOE_RUNNER_BACKEND_CHOICES, QUANTIZATION_CHOICES
from sglang.srt.layers.moe.token_dispatcher import standard
from sglang.srt.layers.moe.utils import resolve_moe_runner_backend
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.model_loader.loader import DefaultModelLoader

import moeq
from moeq.engines.sglang import plugin
from moeq.engines.sglang.config import MoeqConfig, MoeqMoEMethod, register_config
from moeq.errors import MoeqError

#: Those whose other layers SGLang reads on a CPU.
LAYOUTS = {
    "ct-int4-g128-qwen3moe": "marlin-wna16/1",
    "ct-int4-asym-g32-mixtral": "marlin-wna16/1",
    "ct-w8a8-qwen3moe": "int8-w8a8/1",
    "awq-int4-g32-qwen3moe": "triton-wna16/1",
}
INT4 = "ct-int4-asym-g32-mixtral"


@pytest.fixture(scope="module")
def folders(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("sglang")
    return {name: convert(checkpoints / name, out / name, layout) for name, layout in LAYOUTS.items()}


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(6, 256, generator=generator).to(torch.bfloat16)
    weights = torch.softmax(torch.randn(6, 2, generator=generator), -1)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(6)]).to(torch.int32)
    return x, weights, ids


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


def test_the_engine_knows_method_runner_and_hook() -> None:
    register_config()  # again
    assert QUANTIZATION_METHODS["moeq"] is MoeqConfig
    assert QUANTIZATION_CHOICES.count("moeq") == MOE_RUNNER_BACKEND_CHOICES.count("moeq") == 1
    assert resolve_moe_runner_backend("moeq").value == "moeq"
    assert "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_only" in HookRegistry._patched


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_layer_is_the_sources(name, folders, checkpoints, batch) -> None:
    layer = loaded_layer(folders[name])
    assert isinstance(layer.quant_method, MoeqMoEMethod)
    assert layer.runner_backend.value == "moeq"
    wanted = reference_layer(moeq.open(checkpoints / name), 1, *batch)
    assert error(run(layer, batch), wanted) < (0.03 if "w8a8" in name else 0.01)


@pytest.mark.parametrize("where", ["tp", "ep"])
def test_ranks_hold_their_bytes_and_add_up(where, folders, batch, monkeypatch) -> None:
    monkeypatch.setattr(standard, "get_device", lambda: "cpu")  # the dispatcher asks for an accelerator
    whole = run(loaded_layer(folders[INT4]), batch).float()
    summed = torch.zeros_like(whole)
    for rank in (0, 1):
        layer = loaded_layer(folders[INT4], **{where: (rank, 2)})
        wanted = moeq.load_experts(folders[INT4], 1, **{f"{where}_rank": rank, f"{where}_size": 2})
        assert torch.equal(layer.w13_weight, wanted.w13.weight)
        assert torch.equal(layer.w2_zero, wanted.w2.zero)
        summed += run(layer, batch).float()
    assert error(summed, whole) < 0.01


def test_the_routed_scaling_factor_and_padding_are_kept(folders, batch) -> None:
    x, weights, ids = batch
    plain = run(loaded_layer(folders[INT4]), batch)
    scaled = run(
        loaded_layer(folders[INT4], routed_scaling_factor=2.0), (x, weights, torch.where(x[:, :1] > 0, -1, ids))
    )
    kept = x[:, 0] <= 0
    assert torch.equal(scaled[kept], 2 * plain[kept])
    assert not scaled[~kept].any()


def test_a_model_gets_all_tensors_but_the_converted_experts(folders) -> None:
    """Through the engine's own loader, which the hook is around."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = experts_layer(folders[INT4])

        def load_weights(self, weights) -> None:
            self.seen = [name for name, _ in weights]

    model, checkpoint = Model(), moeq.open(folders[INT4])
    tensors = [(name, torch.empty(0)) for name in checkpoint.source.tensors]
    DefaultModelLoader.load_weights_only(model, iter(tensors), torch.device("cpu"))
    assert set(model.seen) == set(checkpoint.source.tensors) - checkpoint.source.expert_names
    assert len(model.seen) < len(tensors)


def test_other_layers_keep_the_method_of_the_source(folders) -> None:
    assert config_of(folders[INT4]).inner.get_name() == "compressed_tensors"


class TestRefusals:
    def refused(self, folder: Path, **options: object) -> MoeqError:
        with pytest.raises(MoeqError) as caught:
            loaded_layer(folder, **options)
        return caught.value

    def test_another_version(self, monkeypatch) -> None:
        monkeypatch.setattr(plugin, "version", lambda name: "0.5.99")
        with pytest.raises(MoeqError, match=r"SGLang 0\.5\.99") as caught:
            plugin.register()
        assert "sglang==0.5.23" in (caught.value.hint or "")

    def test_an_activation_that_the_kernels_do_not_compute(self, folders) -> None:
        assert "situ" in self.refused(folders[INT4], activation="situ").message

    def test_outputs_of_every_choice(self, folders) -> None:
        assert self.refused(folders[INT4], no_combine=True).code == "answer.no-kernel"

    def test_ranks_that_the_files_do_not_serve(self, folders) -> None:
        error = self.refused(folders[INT4], tp=(0, 4))
        assert error.code == "usage.tp"
        assert "--tp 4" in (error.hint or "")

    def test_a_layout_without_a_kernel(self, checkpoints, tmp_path) -> None:
        folder = convert(checkpoints / INT4, tmp_path / "out", "humming-wna16/1")
        assert self.refused(folder).code == "answer.no-kernel"

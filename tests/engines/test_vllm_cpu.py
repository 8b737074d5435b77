"""Converted experts in vLLM's kernels for CPUs: the same bits as after the engine's own load.

Its operators are the compiled ones. Runs where the engine's wheel for CPUs is installed, on a CPU with AMX.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines.engine_preparation import draw, layer_differences, prepared_layer
from engines.vllm_engine import engine, experts_layer, loaded_layer
from load.deployments import reference_layer

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.layouts.registry import layout_class

if not hasattr(torch.ops._C, "fused_experts_cpu") or not torch.cpu._is_amx_tile_supported():
    pytest.skip("needs vLLM's library for CPUs, and a CPU with AMX", allow_module_level=True)

#: Checkpoint to its layout, and the largest error of a layer against the dequantised source, of the layer's norm:
#: kernels for int4 and W8A8 round activations to int8.
EXACT = {
    "gptq-int4-g32-qwen3moe": ("cpu-amx-int4/1", 0.02),
    "gptq-int4-g128-mixtral": ("cpu-amx-int4/1", 0.02),
    "awq-int4-g32-qwen3moe": ("cpu-amx-int4/1", 0.02),
    "ct-int4-g128-qwen3moe": ("cpu-amx-int4/1", 0.02),
    "ct-w8a8-qwen3moe": ("cpu-amx-int8/1", 0.02),
    "ct-fp8-block-qwen3moe": ("cpu-amx-fp8/1", 0.01),
}
#: Those that the engine itself does not run on a CPU: zero points of compressed-tensors, and its Marlin for MXFP4.
BEYOND = {
    "ct-int4-asym-g32-mixtral": ("cpu-amx-int4/1", 0.02),
    "ct-mxfp4-qwen3moe": ("cpu-amx-mxfp4/1", 0.01),
    "mxfp4-gptoss": ("cpu-amx-mxfp4-interleaved/1", 0.01),
}


def converted(source: Path, folder: Path, layout: str, **deployment: Any) -> Path:
    where = Deployment(gpu=parse_gpu("x86-amx"), **deployment)
    moeq.convert(source, folder, where, layout=layout, force_layout=True)
    return folder


def routed(folder: Path, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, and the weights and numbers of their experts."""
    info, random = moeq.open(folder).info, torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, info.hidden_size, generator=random).bfloat16()
    weights, ids = torch.rand(tokens, info.num_experts, generator=random).softmax(-1).topk(info.top_k)
    return x, weights, ids.int()


def differences(ours: Any, theirs: Any) -> list[str]:
    """Without the shape of a group: its classes for GPTQ and AWQ say it in two ways, and these kernels read neither."""
    return [found for found in layer_differences(ours, theirs) if "GroupShape" not in found]


def run(layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    with engine():
        out: torch.Tensor = layer.quant_method.apply(layer, x, weights, ids, None, None)
    return out


@pytest.mark.parametrize("name", EXACT | BEYOND)
def test_a_layer_computes_what_the_source_says(name: str, checkpoints: Path, tmp_path: Path) -> None:
    layout, tolerance = (EXACT | BEYOND)[name]
    layer = loaded_layer(converted(checkpoints / name, tmp_path / "out", layout))
    theirs = prepared_layer(checkpoints / name, moe_backend="auto") if name in EXACT else None
    if theirs is not None:
        assert differences(layer, theirs) == []
    for tokens in (1, 7, 64):
        given = routed(checkpoints / name, tokens)
        out = run(layer, *given)
        if theirs is not None:
            assert torch.equal(out, run(theirs, *given))
        wanted = reference_layer(moeq.open(checkpoints / name), 1, given[0].float(), *given[1:])
        assert (out.float() - wanted).norm() < tolerance * wanted.norm()


@pytest.mark.parametrize("tp", [1, 2], ids=["whole-file", "file-by-rank"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "name", ["gptq-int4-g32-qwen3moe", "awq-int4-g32-qwen3moe", "ct-w8a8-qwen3moe", "ct-fp8-block-qwen3moe"]
)
def test_ranks_of_tensor_parallelism(name: str, rank: int, tp: int, checkpoints: Path, tmp_path: Path) -> None:
    layout, source = EXACT[name][0], checkpoints / name
    if "fp8" in name:  # half of its columns is no whole block
        source = draw(source, tmp_path / "source", 256, 256, experts=4, seed=rank)
    folder = converted(source, tmp_path / "out", layout, tp=tp)
    if layout == "cpu-amx-int8/1" and tp == 1:  # its sums run over all columns
        with pytest.raises(MoeqError, match="does not allow slices of w2 along K") as caught:
            experts_layer(folder, tp=(rank, 2))
        assert "--tp 2" in (caught.value.hint or "")
        return
    ours, theirs = loaded_layer(folder, tp=(rank, 2)), prepared_layer(source, moe_backend="auto", tp=(rank, 2))
    assert differences(ours, theirs) == []
    given = routed(source, 5)
    assert torch.equal(run(ours, *given), run(theirs, *given))


@pytest.mark.parametrize("name", EXACT | BEYOND)
def test_without_weights(name: str, checkpoints: Path, tmp_path: Path) -> None:
    """`--load-format dummy`: the kernels run on what is made up."""
    folder = converted(checkpoints / name, tmp_path / "out", (EXACT | BEYOND)[name][0])
    layer = loaded_layer(folder, load_format="dummy")
    for parameter in layer.parameters():
        if parameter.is_floating_point() and parameter.element_size() > 1:
            parameter.data.fill_(2**-10)  # as the engine does
    assert run(layer, *routed(checkpoints / name, 3)).shape == (3, 256)


class TestRefusals:
    def test_bytes_for_a_gpu(self, checkpoints: Path, tmp_path: Path) -> None:
        where = Deployment(gpu=parse_gpu("A100"))
        for layout in ("marlin-wna16/1", "humming-wna16/1"):
            folder = tmp_path / layout.partition("/")[0]
            moeq.convert(checkpoints / "gptq-int4-g32-qwen3moe", folder, where, layout=layout, force_layout=True)
            with pytest.raises(MoeqError) as caught:
                experts_layer(folder, kernels="engine")
            assert caught.value.code == "answer.no-backend"
            assert "--gpu cpu" in (caught.value.hint or "")

    def test_a_cpu_without_amx(self, checkpoints: Path, tmp_path: Path, monkeypatch) -> None:
        folder = converted(checkpoints / "gptq-int4-g32-qwen3moe", tmp_path / "out", "cpu-amx-int4/1")
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        with pytest.raises(MoeqError, match="does not run here: kernel does not support current device cpu"):
            experts_layer(folder)

    @pytest.mark.parametrize("name", EXACT)
    def test_a_rank_with_some_of_the_experts(self, name: str, checkpoints: Path, tmp_path: Path) -> None:
        """The engine's kernels stop at numbers of experts that another rank holds, or read beyond their memory."""
        layout, source = EXACT[name][0], checkpoints / name
        with pytest.raises(MoeqError) as caught:
            experts_layer(converted(source, tmp_path / "out", layout), ep=(0, 2))
        assert caught.value.code == "usage.ep"

    @pytest.mark.parametrize("name", EXACT | BEYOND)
    def test_a_dtype_that_the_kernels_do_not_take(self, name: str, checkpoints: Path, tmp_path: Path) -> None:
        layout = (EXACT | BEYOND)[name][0]
        folder = converted(checkpoints / name, tmp_path / "out", layout)
        for dtype, short in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")):
            if short in layout_class(layout).vllm_readers()[0].dtypes:
                x, *routing = routed(checkpoints / name, 4)
                assert run(loaded_layer(folder, dtype=dtype), x.to(dtype), *routing).isfinite().all()
            else:
                with pytest.raises(MoeqError) as caught:
                    experts_layer(folder, dtype=dtype)
                assert caught.value.code == "usage.dtype"

    def test_another_backend_by_name(self, checkpoints: Path, tmp_path: Path) -> None:
        folder = converted(checkpoints / "gptq-int4-g32-qwen3moe", tmp_path / "out", "cpu-amx-int4/1")
        with pytest.raises(MoeqError) as caught:
            experts_layer(folder, moe_backend="marlin")
        assert caught.value.code == "usage.moe-backend"

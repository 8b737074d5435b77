"""NVFP4, FP8 and MXFP8 in the engine's kernels: the plug-in leaves what the engine's own preparation leaves."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.engine_preparation import (
    as_deepseek,
    as_dynamic,
    draw,
    layer_differences,
    prepared_layer,
    scales_stay,
    stand_in,
)
from engines.vllm_engine import BACKENDS, loaded_layer
from load.deployments import convert
from safetensors.torch import load_file, save_file
from vllm.platforms import current_platform

from moeq.engines.vllm.engine_experts import VERSION
from moeq.errors import MoeqError
from moeq.load.activation_scales import activation_scales
from moeq.load.torch_loader import layer_entry, open_converted

#: Checkpoint and layout.
CASES = [
    ("modelopt-nvfp4-qwen3moe", "marlin-nvfp4/1"),
    ("ct-nvfp4-qwen3moe", "marlin-nvfp4/1"),
    ("ct-nvfp4a16-qwen3moe", "marlin-nvfp4/1"),
    ("ct-fp8-block-qwen3moe", "marlin-fp8/1"),
    ("ct-fp8-channel-qwen3moe", "marlin-fp8/1"),
    ("ct-fp8-tensor-qwen3moe", "marlin-fp8/1"),
    ("modelopt-fp8-qwen3moe", "marlin-fp8/1"),
    ("ct-mxfp8-qwen3moe", "marlin-mxfp8/1"),
    ("modelopt-nvfp4-qwen3moe", "marlin-nvfp4-fp16/1"),
    ("ct-fp8-block-qwen3moe", "marlin-fp8-fp16/1"),
    ("modelopt-nvfp4-qwen3moe", "trtllm-nvfp4/1"),
    ("ct-nvfp4-qwen3moe", "trtllm-nvfp4/1"),
    ("modelopt-nvfp4-qwen3moe", "flashinfer-cutlass-nvfp4/1"),
    ("ct-nvfp4-qwen3moe", "cutlass-nvfp4/1"),
    ("modelopt-nvfp4-qwen3moe", "cutlass-nvfp4/1"),
    ("ct-fp8-block-qwen3moe", "trtllm-fp8-block/1"),
    ("ct-fp8-block-qwen3moe", "flashinfer-cutlass-fp8-block/1"),
    ("ct-fp8-tensor-qwen3moe", "trtllm-fp8-tensor/1"),
    ("modelopt-fp8-qwen3moe", "trtllm-fp8-tensor/1"),
    ("ct-fp8-tensor-qwen3moe", "flashinfer-cutlass-fp8-tensor/1"),
    ("modelopt-fp8-qwen3moe", "flashinfer-cutlass-fp8-tensor/1"),
    ("ct-mxfp8-qwen3moe", "trtllm-mxfp8/1"),
    ("ct-mxfp8-qwen3moe", "deepgemm-mxfp8/1"),
    ("ct-fp8-block-qwen3moe", "deepgemm-fp8-sm100/1"),
    ("ct-fp8-block-qwen3moe", "deepgemm-fp8-sm90/1"),
    ("ct-fp8-block-qwen3moe", "aiter-fp8-block/1"),
    ("ct-fp8-channel-qwen3moe", "aiter-fp8-channel/1"),
    ("ct-fp8-tensor-qwen3moe", "aiter-fp8-tensor/1"),
    ("ct-fp8-block-qwen3moe", "aiter-fp8-block-fnuz/1"),
    ("ct-fp8-channel-qwen3moe", "aiter-fp8-channel-fnuz/1"),
    ("ct-fp8-tensor-qwen3moe", "aiter-fp8-tensor-fnuz/1"),
    ("modelopt-nvfp4-qwen3moe", "flashinfer-cutedsl-nvfp4/1"),
    ("modelopt-nvfp4-qwen3moe", "flashinfer-b12x-nvfp4/1"),
    ("ct-nvfp4a16-qwen3moe", "b12x-nvfp4-a16/1"),
    ("modelopt-nvfp4-qwen3moe", "b12x-nvfp4/1"),
    ("ct-nvfp4-qwen3moe", "b12x-nvfp4/1"),
    ("ct-mxfp8-qwen3moe", "aiter-mxfp8/1"),
    ("ct-mxfp4-qwen3moe", "cutlass-mxfp4/1"),
    ("ct-mxfp8-qwen3moe", "xpu-mxfp8/1"),
    ("ct-fp8-block-qwen3moe", "xpu-fp8-block/1"),
    ("ct-fp8-tensor-qwen3moe", "xpu-fp8-tensor/1"),
]
CASES = [case for case in CASES if case[1] in BACKENDS]

#: Up to 0.28.0 the engine pads gate and up as one block for FlashInfer (`tests/data/golden/README.md`), and is given
#: nothing to pad.
ONE_BLOCK = VERSION < (0, 29)
#: Hidden and intermediate size that the layout pads, whole or cut.
SIZES = {
    "marlin-nvfp4-fp16/1": (256, 192),
    "marlin-nvfp4/1": (256, 192),
    "marlin-fp8/1": (256, 256),
    "trtllm-nvfp4/1": (128, 256 if ONE_BLOCK else 192),
    "flashinfer-cutedsl-nvfp4/1": (128, 192),
    "b12x-nvfp4/1": (256, 96),
    "b12x-nvfp4-a16/1": (256, 96),
    "trtllm-fp8-tensor/1": (256, 96 if ONE_BLOCK else 104),
    "flashinfer-cutlass-fp8-tensor/1": (256, 96 if ONE_BLOCK else 104),
    "deepgemm-fp8-sm100/1": (1152, 256),
    "aiter-mxfp8/1": (256, 512),
}

#: What the engine requantises, and rounds.
LOSSY = (
    *("deepgemm-fp8-sm90/1", "deepgemm-fp8-sm100/1", "deepgemm-mxfp8/1", "flashinfer-b12x-nvfp4/1"),
    *("marlin-nvfp4-fp16/1", "marlin-fp8-fp16/1"),
)


def refused(layout: str, where: dict[str, Any]) -> str | None:
    """Words in the refusal of a release whose experts for a layout cannot do what is asked of them here."""
    if layout == "cutlass-nvfp4/1" and "ep" in where and VERSION < (0, 32):
        return "parallel config"
    if layout == "aiter-mxfp8/1" and (0, 27) <= VERSION < (0, 33):
        return "requires activation"
    return None


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    stand_in(monkeypatch)


@pytest.mark.cover("layout", "name", "where")
@pytest.mark.parametrize(("name", "layout"), CASES)
@pytest.mark.parametrize("where", [{}, {"ep": (1, 2)}, {"tp": (1, 2)}], ids=["whole", "ep", "tp"])
def test_the_layer_is_as_the_engine_leaves_it(
    name: str, layout: str, where: dict[str, tuple[int, int]], checkpoints: Path, tmp_path: Path, monkeypatch
) -> None:
    """Random experts: weights, every scale and size that the kernel is built from, to the bit."""
    if "fnuz" in layout:
        monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda cls: True))
        monkeypatch.setattr(type(current_platform), "fp8_dtype", classmethod(lambda cls: torch.float8_e4m3fnuz))
    if "sm90" in layout:
        scales_stay(monkeypatch)
    if layout.startswith("xpu"):
        monkeypatch.setattr(type(current_platform), "is_xpu", lambda self: True)
    if "ep" in where and "b12x" in layout:
        pytest.skip("the engine's B12X experts refuse expert parallelism")
    ranks: dict[str, Any] = {kind: size for kind, (_, size) in where.items()}
    dtype = {"dtype": "fp16"} if "fp16" in layout else {}
    sizes = SIZES.get(layout, (256, 256))
    source = draw(checkpoints / name, tmp_path / "source", *sizes, experts=4, seed=zlib.crc32(layout.encode()))
    if layout == "xpu-fp8-tensor/1":  # its kernel takes no static scales
        source = as_dynamic(source, tmp_path / "dynamic")
    folder = convert(source, tmp_path / "out", layout, allow_lossy=layout in LOSSY, **ranks, **dtype)
    options = {**where, "dtype": torch.float16 if dtype else torch.bfloat16}
    if refusal := refused(layout, where):
        with pytest.raises(ValueError, match=refusal):
            prepared_layer(source, moe_backend=BACKENDS[layout].option, **options)
        with pytest.raises(MoeqError, match=f"vLLM does not run here: .* {refusal}"):
            loaded_layer(folder, kernels="engine", **options)
        return
    ours = loaded_layer(folder, kernels="engine", **options)
    theirs = prepared_layer(source, moe_backend=BACKENDS[layout].option, **options)
    # Up to 0.27 the class for compressed-tensors shuffles for AITER and does not say so, as its other class does.
    unsaid = VERSION < (0, 28) and layout.startswith("aiter")
    assert layer_differences(ours, theirs) == [f"{role}_weight: is_shuffled" for role in ("w13", "w2") if unsaid]


@pytest.mark.parametrize("layout", ["marlin-nvfp4/1", "trtllm-nvfp4/1", "flashinfer-cutedsl-nvfp4/1", "b12x-nvfp4/1"])
@pytest.mark.parametrize("where", [{}, {"tp": (1, 2)}], ids=["whole", "tp"])
def test_one_group_of_scales(layout: str, where: dict[str, tuple[int, int]], checkpoints: Path, tmp_path: Path) -> None:
    """16 intermediate features on a rank, which the engine pads: its kernels see more than one group."""
    if layout not in BACKENDS or (ONE_BLOCK and layout == "trtllm-nvfp4/1"):
        pytest.skip("that version has no such kernel, or pads wrongly (`SIZES`)")
    ranks = where.get("tp", (0, 1))[1]
    source = draw(checkpoints / "modelopt-nvfp4-qwen3moe", tmp_path / "source", 256, 16 * ranks, experts=4, seed=9)
    folder = convert(source, tmp_path / "out", layout, tp=ranks)
    ours = loaded_layer(folder, kernels="engine", **where)
    assert layer_differences(ours, prepared_layer(source, moe_backend=BACKENDS[layout].option, **where)) == []


def of_its_own(source: Path, part: str, factor: float) -> None:
    """Make that scale of every up projection another one than the gate's."""
    found = load_file(source / "model.safetensors")
    for name in found:
        if name.endswith(f"up_proj.{part}"):
            found[name] = found[name] * factor
    save_file(found, source / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("layout", ["trtllm-fp8-tensor/1", "flashinfer-cutlass-fp8-tensor/1"])
@pytest.mark.parametrize("name", ["ct-fp8-tensor-qwen3moe", "modelopt-fp8-qwen3moe"])
@pytest.mark.parametrize("factor", [0.3, 3.7])
def test_weights_of_gate_and_up_with_a_scale_each(name: str, layout: str, factor: float, checkpoints, tmp_path) -> None:
    source = draw(checkpoints / name, tmp_path / "source", *SIZES[layout], experts=4, seed=5)
    of_its_own(source, "weight_scale", factor)
    with pytest.raises(MoeqError, match="gate and up, which have a scale each, are requantised to the larger"):
        convert(source, tmp_path / "refused", layout)
    folder = convert(source, tmp_path / "out", layout, allow_lossy=True)
    ours = loaded_layer(folder, kernels="engine")
    assert layer_differences(ours, prepared_layer(source, moe_backend=BACKENDS[layout].option)) == []


@pytest.mark.parametrize("factor", [0.3, 3.7])
def test_activations_of_gate_and_up_with_a_scale_each(factor: float, checkpoints: Path, tmp_path: Path) -> None:
    """The engine takes the last that it reads, or refuses the checkpoint; the plug-in takes the larger then."""
    layout = "flashinfer-cutlass-fp8-tensor/1"
    for name, refuses in (("modelopt-fp8-qwen3moe", False), ("ct-fp8-tensor-qwen3moe", True)):
        source = draw(checkpoints / name, tmp_path / name, *SIZES[layout], experts=4, seed=6)
        of_its_own(source, "input_scale", factor)
        folder = convert(source, tmp_path / f"{name}-out", layout)
        ours = loaded_layer(folder, kernels="engine")
        if not refuses:
            assert layer_differences(ours, prepared_layer(source, moe_backend=BACKENDS[layout].option)) == []
            continue
        with pytest.raises(ValueError, match="input_scales of w1 and w3 of a layer must be equal"):
            prepared_layer(source, moe_backend=BACKENDS[layout].option)
        stored = activation_scales(open_converted(folder), layer_entry(open_converted(folder), 1))
        assert stored is not None
        assert ours.w13_input_scale == stored.w13.max()


@pytest.mark.parametrize("layout", ["trtllm-fp8-block/1", "marlin-fp8/1", "aiter-fp8-block/1", "deepgemm-fp8-sm100/1"])
def test_blocks_as_deepseek_stores_them(layout: str, checkpoints: Path, tmp_path: Path) -> None:
    """`quant_method: fp8`, which the engine's other class for FP8 reads: `weight_scale_inv` in float32."""
    drawn = draw(checkpoints / "ct-fp8-block-qwen3moe", tmp_path / "drawn", 256, 256, experts=4, seed=7)
    source = as_deepseek(drawn, tmp_path / "source")
    folder = convert(source, tmp_path / "out", layout, allow_lossy=layout in LOSSY)
    ours = loaded_layer(folder, kernels="engine")
    theirs = prepared_layer(source, moe_backend=BACKENDS[layout].option)
    assert layer_differences(ours, theirs) == []


def test_a_difference_would_be_found(checkpoints: Path, tmp_path: Path) -> None:
    name, layout = "modelopt-nvfp4-qwen3moe", "trtllm-nvfp4/1"
    folder = convert(checkpoints / name, tmp_path / "out", layout)
    ours = loaded_layer(folder, kernels="engine")
    theirs = prepared_layer(checkpoints / name, moe_backend=BACKENDS[layout].option)
    assert layer_differences(ours, theirs) == []
    ours.w2_weight.data.view(torch.uint8)[1, 3, 5] ^= 1
    ours.quant_method.moe_quant_config.a2_gscale.mul_(2)
    ours.moe_config.hidden_dim += 256
    found = "\n".join(layer_differences(ours, theirs))
    for what in ("w2_weight: 1 of", "quant_config._a2", "moe_config.hidden_dim"):
        assert what in found


def test_without_scales_of_activations_there_is_nothing_to_quantise_with(checkpoints: Path, tmp_path: Path) -> None:
    folder = convert(checkpoints / "modelopt-nvfp4-qwen3moe", tmp_path / "out", "trtllm-nvfp4/1")
    (folder / "moeq-restore.data").unlink()
    with pytest.raises(MoeqError, match="which holds the scales of the activations"):
        loaded_layer(folder, kernels="engine")
    loaded_layer(folder, kernels="engine", load_format="dummy")


def test_power_of_two_scales_are_not_handed_to_a_kernel_that_wants_others(checkpoints, tmp_path, monkeypatch) -> None:
    folder = convert(checkpoints / "ct-fp8-block-qwen3moe", tmp_path / "out", "deepgemm-fp8-sm100/1", allow_lossy=True)
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", "0")
    with pytest.raises(MoeqError, match="VLLM_USE_DEEP_GEMM_E8M0=0"):
        loaded_layer(folder, kernels="engine")

"""NVFP4, FP8 and MXFP8 from headers to files: which backend is written for, what ranks decide, what is refused."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.oracle.engines.vllm.policy import load_policy
from moeq.pipeline.convert import convert
from moeq.pipeline.plan.decide import answer
from moeq.pipeline.plan.options import Question
from moeq.prove.restore import restore
from moeq.prove.verify import verify


def ask(folder: Path, gpu: str, **options: Any) -> Any:
    return answer(moeq.open(folder), Question(Deployment(gpu=parse_gpu(gpu), **options)))


@pytest.mark.parametrize(
    ("name", "gpu", "backend"),
    [
        ("ct-fp8-block-qwen3moe", "H100", "TRITON"),
        ("ct-fp8-channel-qwen3moe", "L40S", "TRITON"),
        ("ct-fp8-tensor-qwen3moe", "L40S", "TRITON"),
    ],
)
def test_what_the_engine_reads_as_it_is_is_not_converted_unless_another_kernel_is_asked_for(
    checkpoints: Path, name: str, gpu: str, backend: str
) -> None:
    found = ask(checkpoints / name, gpu)
    assert found.error is not None
    assert found.error.code == "answer.nothing-to-convert"
    assert f"runs {backend} here: it reads the checkpoint's weights as they are" in found.error.message
    assert "backend" in (found.error.hint or "")
    assert ask(checkpoints / name, gpu, backend="marlin").first.layout == "marlin-fp8/1"
    assert ask(checkpoints / name, "A100").first.layout == "marlin-fp8/1", "no FP8 units: the engine takes Marlin"


NVFP4_BACKENDS = [
    ("B200", "auto", "FLASHINFER_TRTLLM", "trtllm-nvfp4/1"),
    ("B200", "flashinfer_cutedsl", "FLASHINFER_CUTEDSL", "flashinfer-cutedsl-nvfp4/1"),
    ("B200", "flashinfer_cutlass", "FLASHINFER_CUTLASS", "flashinfer-cutlass-nvfp4/1"),
    ("B200", "cutlass", "VLLM_CUTLASS", "cutlass-nvfp4/1"),
    ("B200", "marlin", "MARLIN", "marlin-nvfp4/1"),
]


@pytest.mark.cover(every=5)
@pytest.mark.parametrize(("gpu", "backend", "name", "layout"), NVFP4_BACKENDS)
def test_every_kernel_with_4_bit_activations_has_its_layout(
    checkpoints: Path, tmp_path: Path, gpu: str, backend: str, name: str, layout: str
) -> None:
    """Marlin, which would keep activations at 16 bits, is written only where it is asked for."""
    source = checkpoints / "ct-nvfp4-qwen3moe"
    target = ask(source, gpu, backend=backend).first
    assert (target.backend, target.layout) == (name, layout)
    manifest = convert(source, tmp_path / "out", Deployment(gpu=parse_gpu(gpu), backend=backend)).manifest
    assert {layer.layout for layer in manifest.layers} == {layout}
    assert verify(tmp_path / "out", source).ok
    restore(tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


AITER = {"packages": (("aiter", True),), "env": (("VLLM_ROCM_USE_AITER", "1"),)}

FP8_BACKENDS: list[tuple[str, str, str, dict[str, Any], str]] = [
    ("ct-fp8-block-qwen3moe", "B200", "auto", {}, "trtllm-fp8-block/1"),
    ("ct-fp8-block-qwen3moe", "H100", "flashinfer_cutlass", {}, "flashinfer-cutlass-fp8-block/1"),
    ("ct-fp8-block-qwen3moe", "MI300X", "auto", AITER, "aiter-fp8-block-fnuz/1"),
    ("ct-fp8-block-qwen3moe", "MI355X", "auto", AITER, "aiter-fp8-block/1"),
    ("ct-fp8-channel-qwen3moe", "MI300X", "auto", AITER, "aiter-fp8-channel-fnuz/1"),
    ("ct-fp8-channel-qwen3moe", "MI355X", "aiter", AITER, "aiter-fp8-channel/1"),
    ("modelopt-fp8-qwen3moe", "B200", "auto", {}, "trtllm-fp8-tensor/1"),
    ("modelopt-fp8-qwen3moe", "H100", "auto", {}, "flashinfer-cutlass-fp8-tensor/1"),
    ("modelopt-fp8-qwen3moe", "MI300X", "auto", AITER, "aiter-fp8-tensor-fnuz/1"),
    ("ct-mxfp8-qwen3moe", "B200", "deep_gemm", {}, "deepgemm-mxfp8/1"),
]


@pytest.mark.cover(every=10)
@pytest.mark.parametrize(("name", "gpu", "backend", "more", "layout"), FP8_BACKENDS)
def test_every_kernel_with_8_bit_activations_has_its_layout(
    checkpoints: Path, tmp_path: Path, name: str, gpu: str, backend: str, more: dict[str, Any], layout: str
) -> None:
    """What shares a scale, and the FP8 of the GPU, decide between layouts of one backend."""
    source, where = checkpoints / name, Deployment(gpu=parse_gpu(gpu), backend=backend, **more)
    manifest = convert(source, tmp_path / "out", where).manifest
    assert {layer.layout for layer in manifest.layers} == {layout}
    assert verify(tmp_path / "out", source).ok
    restore(tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.cover(every=2)
@pytest.mark.parametrize(("gpu", "layout"), [("H100", "deepgemm-fp8-sm90/1"), ("B200", "deepgemm-fp8-sm100/1")])
def test_requantised_weights_take_their_layout_and_permission(
    checkpoints: Path, tmp_path: Path, gpu: str, layout: str
) -> None:
    source, where = checkpoints / "ct-fp8-block-qwen3moe", Deployment(gpu=parse_gpu(gpu), backend="deep_gemm")
    found = answer(moeq.open(source), Question(where)).error
    assert found is not None
    assert found.code == "answer.no-backend"
    assert f'which changes numbers; layout="{layout}", allow_lossy=True writes that' in found.message
    with pytest.raises(MoeqError, match="changes numbers: weights with scales other than E8M0 are requantised"):
        convert(source, tmp_path / "out", where, layout=layout)
    other = {"deepgemm-fp8-sm90/1": "deepgemm-fp8-sm100/1", "deepgemm-fp8-sm100/1": "deepgemm-fp8-sm90/1"}[layout]
    with pytest.raises(MoeqError) as caught:
        convert(source, tmp_path / "out", where, layout=other, allow_lossy=True)
    assert caught.value.code == "usage.layout-backend"
    manifest = convert(source, tmp_path / "out", where, layout=layout, allow_lossy=True).manifest
    assert sum(layer.losses for layer in manifest.layers) > 0
    restore(tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_two_scales_for_gate_and_up_are_named_before_anything_is_written(checkpoints: Path, tmp_path: Path) -> None:
    where = Deployment(gpu=parse_gpu("H100"), backend="flashinfer_cutlass")
    with pytest.raises(MoeqError, match="a scale each, are requantised to the larger") as caught:
        convert(checkpoints / "ct-fp8-tensor-qwen3moe", tmp_path / "out", where)
    assert caught.value.code == "answer.lossy"
    assert list(tmp_path.iterdir()) == []


def test_what_every_native_backend_reads_is_known_or_said() -> None:
    """One fact per backend: its layout, that it reads the checkpoint's bytes, or why there is none."""
    policy = load_policy("vllm@0.33.0")
    as_it_is, missing = set(), set()
    for family in (policy.families[name] for name in ("fp8", "nvfp4", "mxfp8", "w4a8-fp8", "w4a8-int8")):
        for backend in family.backends.values():
            reads = bool(backend.layouts)
            assert not (reads and backend.as_it_is), (family.name, backend.name)
            assert reads or backend.as_it_is or backend.no_layout, (family.name, backend.name)
            if backend.as_it_is:
                as_it_is.add((family.name, backend.name))
            elif not reads:
                missing.add((family.name, backend.name))
    # Bytes that depend on the machine or its GPU's code, and operators whose result no source says.
    assert missing == {
        *((family, "HUMMING") for family in ("fp8", "nvfp4", "mxfp8", "w4a8-fp8")),
        ("fp8", "CPU_W8A8"),
        ("nvfp4", "FLASHINFER_MOE_EP_CUTEDSL"),
        ("w4a8-fp8", "CUTLASS"),
        ("w4a8-int8", "CPU_INT4"),
    }
    # The engine's own list of FP8 backends that its conversion leaves alone (`oracle/fp8.py`), and its emulations.
    assert as_it_is == {
        *(("fp8", name) for name in ("TRITON", "BATCHED_TRITON", "VLLM_CUTLASS", "BATCHED_VLLM_CUTLASS", "HPC")),
        *(("mxfp8", name) for name in ("TRITON_MXFP8", "EMULATION")),
        ("nvfp4", "EMULATION"),
    }


@pytest.mark.parametrize(("version", "layout"), [("0.33.0", "flashinfer-cutedsl-nvfp4/1"), ("0.31.0", None)])
def test_a_layout_is_written_for_versions_that_make_it(checkpoints: Path, version: str, layout: str | None) -> None:
    found = ask(checkpoints / "ct-nvfp4-qwen3moe", "B200", backend="flashinfer_cutedsl", engine=f"vllm@{version}")
    assert (found.first.layout if found.ok else None) == layout
    assert found.ok or "before 0.32.0 the engine does not pad its weights" in found.error.message


def test_hopper_takes_marlin_for_nvfp4(checkpoints: Path) -> None:
    assert ask(checkpoints / "modelopt-nvfp4-qwen3moe", "H100").first.layout == "marlin-nvfp4/1"


@pytest.mark.parametrize(
    ("name", "b12x", "layout"),
    [
        ("modelopt-nvfp4-qwen3moe", {}, "b12x-nvfp4/1"),
        ("modelopt-nvfp4-qwen3moe", {"VLLM_B12X_MOE_FP4_FORCE_A16": "1"}, "b12x-nvfp4-a16/1"),
        ("ct-nvfp4a16-qwen3moe", {}, "b12x-nvfp4-a16/1"),
    ],
)
def test_the_layout_of_b12x_follows_the_activations(
    checkpoints: Path, name: str, b12x: dict[str, str], layout: str
) -> None:
    more = {"packages": (("b12x", True),), "env": tuple(b12x.items())}
    assert ask(checkpoints / name, "RTX5090", backend="b12x", **more).first.layout == layout


def test_a_layout_that_changes_numbers_is_never_chosen_and_takes_permission(checkpoints: Path, tmp_path: Path) -> None:
    source, layout = checkpoints / "modelopt-nvfp4-qwen3moe", "flashinfer-b12x-nvfp4/1"
    where = Deployment(gpu=parse_gpu("RTX5090"), backend="flashinfer_b12x")
    found = answer(moeq.open(source), Question(where)).error
    assert found is not None
    assert found.code == "answer.no-backend"
    assert 'rounds them, which changes numbers; layout="flashinfer-b12x-nvfp4/1", allow_lossy=True' in found.message
    with pytest.raises(MoeqError, match="changes numbers: scales are multiplied by the global scale") as caught:
        convert(source, tmp_path / "out", where, layout=layout)
    assert caught.value.code == "answer.lossy"
    manifest = convert(source, tmp_path / "out", where, layout=layout, allow_lossy=True).manifest
    assert sum(layer.losses for layer in manifest.layers) > 0
    assert verify(tmp_path / "out", source).ok
    restore(tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("dtype", "layout"), [("bf16", "marlin-nvfp4/1"), ("fp16", "marlin-nvfp4-fp16/1")])
def test_the_layout_follows_the_dtype(checkpoints: Path, dtype: str, layout: str) -> None:
    assert ask(checkpoints / "ct-nvfp4a16-qwen3moe", "A100", dtype=dtype).first.layout == layout
    own = ask(checkpoints / "ct-nvfp4a16-qwen3moe", "A100", dtype=dtype, engine="moeq").first.layout
    assert own == layout.replace("marlin-nvfp4/", "moeq-nvfp4/")  # moeq's order of bits is for bf16


def rescaled(source: Path, folder: Path, change: Callable[[str, Tensor], Tensor]) -> Path:
    """A checkpoint with some tensors changed."""
    shutil.copytree(source, folder)
    tensors = {name: change(name, tensor) for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_every_rank_has_the_factor_of_its_own_experts(checkpoints: Path, tmp_path: Path) -> None:
    """Expert e has scales 2**-e times as large; each of three ranks holds one expert."""

    def change(name: str, tensor: Tensor) -> Tensor:
        if not name.endswith("weight_scale") or ".experts." not in name:
            return tensor
        expert = int(name.split(".experts.")[1].split(".")[0])
        return (tensor.float() / 2**expert).to(tensor.dtype)

    source = rescaled(checkpoints / "ct-nvfp4a16-qwen3moe", tmp_path / "source", change)
    where = Deployment(gpu=parse_gpu("A100"), ep=3)
    manifest = convert(source, tmp_path / "out", where).manifest
    checkpoint, converted = moeq.open(source), moeq.open(tmp_path / "out")
    for layer in manifest.layers:
        assert layer.sharding.written == "ranks"
        assert "a power of two that follows from the largest one of all local experts" in layer.sharding.why
        for rank in layer.ranks:
            for role, matrix in rank.matrices.items():
                name = matrix.tensors["scale_factor"]
                entry = converted.source.tensors[name]
                stored = converted.source.read_bytes(entry.file, entry.start, entry.end)
                largest = max(
                    float(checkpoint.matrix(layer.layer, e, role).scales.float().max()) for e in range(*rank.experts)
                )
                assert struct.unpack("<f", bytes(stored)) == (2.0 ** math.floor(math.log2(448 / largest)),)
    assert verify(tmp_path / "out", source).ok
    restore(tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_gate_and_up_with_two_global_scales(checkpoints: Path, tmp_path: Path) -> None:
    """The kernel has one for both: refused, and counted where that is allowed; the source comes back all the same."""

    def change(name: str, tensor: Tensor) -> Tensor:
        return tensor * 2 if name.endswith("experts.1.up_proj.weight_scale_2") else tensor

    source = rescaled(checkpoints / "modelopt-nvfp4-qwen3moe", tmp_path / "source", change)
    where = Deployment(gpu=parse_gpu("A100"))
    with pytest.raises(MoeqError, match="expert 1: marlin-nvfp4/1 would change 64 stored values of w13") as caught:
        convert(source, tmp_path / "out", where)
    assert caught.value.code == "answer.lossy"
    manifest = convert(source, tmp_path / "out", where, allow_lossy=True).manifest
    assert sum(layer.losses for layer in manifest.layers) == 128
    assert any(name.endswith("up_proj.weight_scale_2") for name in manifest.restore.kept)
    restore(tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def nan_scale(name: str, tensor: Tensor) -> Tensor:
    if name.endswith("experts.0.up_proj.weight_scale"):
        tensor = tensor.clone()
        tensor.view(torch.uint8)[3, 1] = 0x7F
    return tensor


def replaced(suffix: str, value: Tensor) -> Callable[[str, Tensor], Tensor]:
    return lambda name, tensor: value if name.endswith(suffix) else tensor


UP = "layers.1.mlp.experts.0.up_proj"

#: Source, damage, error code, part of the message.
DAMAGED: dict[str, tuple[str, Callable[[str, Tensor], Tensor], str, str]] = {
    "a NaN scale": ("ct-nvfp4-qwen3moe", nan_scale, "source.bad-data", "1 scales are not finite, first row 3 group 1"),
    "a divisor of zero": (
        "ct-nvfp4-qwen3moe",
        replaced(f"{UP}.weight_global_scale", torch.zeros(1)),
        "source.bad-data",
        "weight_global_scale is 0.0, expected a positive number",
    ),
    "an infinite multiplier": (
        "modelopt-nvfp4-qwen3moe",
        replaced(f"{UP}.weight_scale_2", torch.tensor(float("inf"))),
        "source.bad-data",
        "the global scale is not finite",
    ),
    "scales of groups of 32": (
        "ct-nvfp4-qwen3moe",
        replaced(f"{UP}.weight_scale", torch.ones(64, 8).to(torch.float8_e4m3fn)),
        "source.inconsistent",
        "weight_scale is [64, 8], expected [64, 16] (one per 16 codes)",
    ),
    "blocks of another size": (
        "ct-fp8-block-qwen3moe",
        replaced(f"{UP}.weight_scale", torch.ones(2, 4, dtype=torch.bfloat16)),
        "source.inconsistent",
        "weight_scale is [2, 4], blocks of 128 x 128 need [1, 2]",
    ),
    "exponents of groups of 16": (
        "ct-mxfp8-qwen3moe",
        replaced(f"{UP}.weight_scale", torch.ones(64, 8, dtype=torch.uint8)),
        "source.inconsistent",
        "weight_scale is [64, 8], expected [64, 4] (one per 32 codes)",
    ),
}


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named_with_the_arithmetic(checkpoints: Path, tmp_path: Path, name: str) -> None:
    source, change, code, text = DAMAGED[name]
    folder = rescaled(checkpoints / source, tmp_path / "source", change)
    with pytest.raises(MoeqError) as caught:
        convert(folder, tmp_path / "out", Deployment(gpu=parse_gpu("A100")))
    assert caught.value.code == code
    assert text in caught.value.message
    assert "\n" not in caught.value.message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("block", [[128], [128, 0], [128, -128], [128.0, 128], [True, 128], "128", "axb", {"a": 1}])
def test_blocks_that_are_no_sizes_are_refused(checkpoints: Path, tmp_path: Path, block: object) -> None:
    folder = tmp_path / "source"
    shutil.copytree(checkpoints / "ct-fp8-block-qwen3moe", folder)
    document = json.loads((folder / "config.json").read_text())
    document["quantization_config"]["config_groups"]["group_0"]["weights"]["block_structure"] = block
    (folder / "config.json").write_text(json.dumps(document))
    with pytest.raises(MoeqError, match=r"block_structure is .*, expected two positive whole numbers") as caught:
        moeq.open(folder)
    assert caught.value.code == "source.bad-config"


def test_per_module_algorithms_of_modelopt(checkpoints: Path, tmp_path: Path) -> None:
    """`MIXED_PRECISION`: the entry of each module, or of the container of the experts, says how activations run."""
    folder = tmp_path / "source"
    shutil.copytree(checkpoints / "modelopt-nvfp4-qwen3moe", folder)
    layers = {
        "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        **{
            f"model.layers.1.mlp.experts.{expert}.{name}": {"quant_algo": "W4A16_NVFP4", "group_size": 16}
            for expert in range(2)
            for name in ("gate_proj", "up_proj", "down_proj")
        },
    }
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    document = json.loads((folder / "config.json").read_text())
    document["quantization_config"] = {"quant_method": "modelopt", **mixed}
    (folder / "config.json").write_text(json.dumps(document))
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": mixed})
    )
    checkpoint = moeq.open(folder)
    first, second = checkpoint.scheme_of(0), checkpoint.scheme_of(1)
    assert first.activation is not None
    assert (first.activation.dtype, first.checkpoint_format) == ("e2m1", "nvfp4")
    assert (second.activation, second.checkpoint_format) == (None, "w4a16_nvfp4")

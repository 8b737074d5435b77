"""Fast paths give what the reference path gives: the same bytes, the same digests, nothing to keep."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from pipeline.fast_path_cases import FAST_PATHS, OnFastPath, Sizes, fast_paths, on_reference_path, write_checkpoint
from torch import Tensor

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.layouts import words
from moeq.layouts.moeq import MAX_EXPONENT
from moeq.layouts.registry import LAYOUTS
from moeq.pipeline.convert import convert

pytest.importorskip("numba")

from moeq.pipeline.pack.fast import find, parts
from moeq.pipeline.pack.fast import path as path_module
from moeq.pipeline.pack.fast.path import Digests, FastPath

pytestmark = pytest.mark.usefixtures("fast_paths_for_small_matrices")


@pytest.mark.cover(every=6)
@pytest.mark.parametrize("name", FAST_PATHS)
def test_every_checkpoint_in_every_layout_for_every_rank(name: str, checkpoints: Path) -> None:
    checkpoint = moeq.open(checkpoints / name)
    layer = checkpoint.info.moe_layers[-1]
    last = checkpoint.num_experts(layer) - 1
    found = set()
    for layout in LAYOUTS:
        for tp in (1, 2, 4):
            try:
                plan, on = fast_paths(checkpoint, layout, layer, tp=tp)
            except MoeqError:
                continue  # the layout does not hold it, or it cannot be cut so
            if tp > 1 and len(plan.shards) == 1:
                continue  # ranks slice one packing
            assert len(on) in (0, 2)
            taken = 0
            for role, fast_path in on.items():
                packed = OnFastPath(checkpoint, plan, role, last, fast_path).packed()
                if packed is None:
                    with pytest.raises(MoeqError, match=r"would change|holds one scale per"):
                        on_reference_path(checkpoint, plan, role, last)
                    continue
                assert packed == on_reference_path(checkpoint, plan, role, last)
                taken += 1
            found |= {layout} if taken == 2 else set()
    assert found == FAST_PATHS[name]


@pytest.mark.cover(("name", "layout"), "tp")
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("layout", ["marlin-wna16/1", "triton-wna16/1"])
@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("gptq-int4-g32-qwen3moe", 16),
        ("gptq-int8-g64-qwen3moe", 32),
        ("awq-int4-g32-qwen3moe", 16),
        ("ct-int4-asym-g32-mixtral", 16),
    ],
)
def test_smaller_groups(name: str, group: int, layout: str, tp: int, checkpoints: Path) -> None:
    """Scales and zero points are repeated on the way; digests are those of the source."""
    checkpoint = moeq.open(checkpoints / name)
    try:
        plan, on = fast_paths(checkpoint, layout, checkpoint.info.moe_layers[-1], tp=tp, regroup=group)
    except MoeqError:
        assert tp > 1  # it cannot be cut so
        return
    assert plan.entry.source_group
    assert set(on) == {"w13", "w2"}
    for role, fast_path in on.items():
        case = OnFastPath(checkpoint, plan, role, 1, fast_path)
        assert case.packed() == on_reference_path(checkpoint, plan, role, 1)
        assert _damage(case) > 20


#: Kinds of random checkpoints, sizes that layouts have to fill up, layout, ranks.
ODD = [
    ("gptq-int4", Sizes(192, 96), "marlin-wna16/1", 1),
    ("gptq-int4", Sizes(320, 160), "triton-wna16/1", 1),
    ("gptq-int4-asym", Sizes(64, 96), "marlin-wna16/1", 1),
    ("gptq-int4-asym", Sizes(448, 192), "marlin-wna16/1", 2),
    ("gptq-int4-asym", Sizes(96, 32), "triton-wna16/1", 1),
    ("gptq-int8", Sizes(192, 96), "marlin-wna16/1", 1),
    ("gptq-int8", Sizes(64, 128), "marlin-wna16/1", 4),
    ("awq-int4", Sizes(128, 224), "marlin-wna16/1", 1),
    ("awq-int4", Sizes(832, 64), "triton-wna16/1", 1),
    ("w8a8-int8", Sizes(60, 20), "int8-w8a8/1", 1),
    ("w8a8-int8", Sizes(64, 80), "marlin-wna16/1", 1),
    ("mxfp4", Sizes(288, 96), "marlin-mxfp4-interleaved/1", 1),
    ("mxfp4", Sizes(544, 160), "marlin-mxfp4/1", 2),
    ("mxfp4", Sizes(544, 160), "moeq-mxfp4/1", 2),
    ("mxfp4", Sizes(288, 352), "triton-kernels-hopper/1", 1),
    ("mxfp4", Sizes(96, 224), "triton-kernels-hopper-w4/1", 2),
    ("mxfp4", Sizes(288, 96), "triton-kernels-blackwell/1", 1),
    ("mxfp4", Sizes(160, 96), "triton-kernels-cdna4/1", 1),
    ("mxfp4", Sizes(288, 96), "trtllm-mxfp4/1", 1),
    ("mxfp4", Sizes(96, 64), "deepgemm-mxfp4/1", 1),
    ("nvfp4", Sizes(128, 96), "marlin-nvfp4/1", 1),
    ("nvfp4", Sizes(384, 160), "marlin-nvfp4/1", 2),
    ("nvfp4", Sizes(256, 224), "marlin-nvfp4-fp16/1", 1),
    ("fp8-block", Sizes(128, 192), "marlin-fp8/1", 1),
    ("fp8-block", Sizes(384, 256), "marlin-fp8/1", 2),
    ("fp8-channel", Sizes(192, 96), "marlin-fp8/1", 1),
    ("fp8-channel", Sizes(320, 128), "marlin-fp8/1", 2),
    ("mxfp8", Sizes(192, 160), "marlin-mxfp8/1", 1),
    ("mxfp8", Sizes(256, 384), "trtllm-mxfp8/1", 1),
    ("mxfp8", Sizes(192, 96), "deepgemm-mxfp8/1", 1),
    ("mxfp8", Sizes(256, 512), "aiter-mxfp8/1", 1),
    ("mxfp8", Sizes(96, 160), "xpu-mxfp8/1", 1),
    ("nvfp4", Sizes(192, 64), "trtllm-nvfp4/1", 1),
    ("nvfp4", Sizes(192, 192), "flashinfer-cutlass-nvfp4/1", 1),
    ("nvfp4", Sizes(128, 128), "flashinfer-cutlass-nvfp4/1", 1),
    ("nvfp4", Sizes(64, 192), "cutlass-nvfp4/1", 3),
    ("nvfp4", Sizes(192, 96), "flashinfer-cutedsl-nvfp4/1", 1),
    ("nvfp4", Sizes(192, 96), "b12x-nvfp4-a16/1", 1),
    ("fp8-block", Sizes(256, 384), "trtllm-fp8-block/1", 1),
    ("fp8-block", Sizes(128, 256), "flashinfer-cutlass-fp8-block/1", 1),
    ("fp8-block", Sizes(384, 128), "aiter-fp8-block-fnuz/1", 1),
    ("fp8-channel", Sizes(96, 160), "aiter-fp8-channel/1", 1),
    ("fp8-channel", Sizes(96, 32), "aiter-fp8-channel-fnuz/1", 1),
]


def exponents_for(layout: str) -> Callable[[dict[str, Tensor]], None]:
    """Pulls exponents into the range that the layout holds."""
    greatest = MAX_EXPONENT if layout == "moeq-mxfp4/1" else 255

    def edit(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.endswith("proj_scales"):
                tensors[name].clamp_(max=greatest)

    return edit


@pytest.mark.cover(every=4)
@pytest.mark.parametrize(("kind", "sizes", "layout", "tp"), ODD)
def test_random_checkpoints_of_odd_sizes(kind: str, sizes: Sizes, layout: str, tp: int, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, kind, sizes, exponents_for(layout))
    plan, on = fast_paths(checkpoint, layout, tp=tp)
    assert set(on) == {"w13", "w2"}
    for role, fast_path in on.items():
        for expert in range(sizes.experts):
            assert OnFastPath(checkpoint, plan, role, expert, fast_path).packed() == on_reference_path(
                checkpoint, plan, role, expert
            )


@pytest.mark.cover(every=5)
@pytest.mark.parametrize(("kind", "sizes", "layout", "tp"), ODD)
def test_blocks_of_few_rows_give_the_same(kind, sizes, layout, tp, tmp_path, monkeypatch) -> None:
    """Matrices here fit one block; with small blocks, every part of several takes several steps, and so do digests."""
    for module in (parts, path_module, find):
        monkeypatch.setattr(module, "BLOCK", 1536)
    checkpoint = write_checkpoint(tmp_path, kind, sizes, exponents_for(layout))
    plan, on = fast_paths(checkpoint, layout, tp=tp)
    for role, fast_path in on.items():
        for part in fast_path.shards[0].parts:
            several = 0 < part.order.rows < part.shape[0] and part.row_bytes * part.shape[0] > 1536
            assert (len(part.blocks) > 1) == several
        case = OnFastPath(checkpoint, plan, role, 1, fast_path)
        assert case.packed() == on_reference_path(checkpoint, plan, role, 1)
        assert _damage(case) > 20


def test_zero_points_stored_as_they_are(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "gptq-int4-asym", Sizes(64, 64), checkpoint_format="gptq_v2")
    plan, on = fast_paths(checkpoint, "marlin-wna16/1")
    for role, fast_path in on.items():
        assert OnFastPath(checkpoint, plan, role, 1, fast_path).packed() == on_reference_path(checkpoint, plan, role, 1)


def test_a_zero_point_of_zero_that_borrowed_from_its_neighbour(tmp_path: Path) -> None:
    """Version 1 stores zero points minus one, subtracted from whole words: 0 and 3 become 15 and 1."""

    def borrow(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("qzeros"):
                tensor[:] = 0x44444430 - 0x11111111

    checkpoint = write_checkpoint(tmp_path, "gptq-int4-asym", Sizes(64, 64), borrow)
    assert checkpoint.matrix(0, 0, "w2").zeros[:8, 0].tolist() == [0, 3, 4, 4, 4, 4, 4, 4]
    plan, on = fast_paths(checkpoint, "marlin-wna16/1")
    for role, fast_path in on.items():
        assert OnFastPath(checkpoint, plan, role, 1, fast_path).packed() == on_reference_path(checkpoint, plan, role, 1)


def test_biases_of_all_types(tmp_path: Path) -> None:
    for dtype, layout in ((torch.float16, "marlin-wna16/1"), (torch.bfloat16, "int8-w8a8/1")):
        kind = "w8a8-int8" if layout.startswith("int8") else "gptq-int4"

        def add(tensors: dict[str, Tensor], dtype: torch.dtype = dtype) -> None:
            for name in [name for name in tensors if name.endswith(("scales", "weight_scale"))]:
                n = tensors[name].shape[1] if name.endswith("scales") else tensors[name].shape[0]
                tensors[f"{name.rpartition('.')[0]}.bias"] = torch.randn(n).to(dtype)

        checkpoint = write_checkpoint(tmp_path / kind, kind, Sizes(128, 64), add)
        plan, on = fast_paths(checkpoint, layout)
        assert set(on) == {"w13", "w2"}
        for role, fast_path in on.items():
            assert OnFastPath(checkpoint, plan, role, 0, fast_path).packed() == on_reference_path(
                checkpoint, plan, role, 0
            )


def _without(*words_of_names: str):  # type: ignore[no-untyped-def]
    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if any(word in name for word in words_of_names)]:
            del tensors[name]

    return edit


def _changed(suffix: str, change):  # type: ignore[no-untyped-def]
    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(suffix)]:
            tensors[name] = change(tensors[name])

    return edit


#: Variants of formats: kind, what is changed in tensors and config, layout.
VARIANTS = {
    "no group index": ("gptq-int4", _without("g_idx"), {}, "marlin-wna16/1"),
    "no zero points": ("gptq-int4", _without("qzeros"), {}, "marlin-wna16/1"),
    "no gate": ("gptq-int4", _without("gate_proj"), {}, "triton-wna16/1"),
    "wide scales": ("w8a8-int8", _changed("_scale", Tensor.float), {}, "int8-w8a8/1"),
    "half scales": ("w8a8-int8", _changed("_scale", Tensor.half), {}, "int8-w8a8/1"),
    "flat scales": ("w8a8-int8", _changed("_scale", Tensor.flatten), {}, "int8-w8a8/1"),
    "symmetric awq": (
        "awq-int4",
        _changed("qzeros", lambda zeros: torch.full_like(zeros, -0x77777778)),
        {"zero_point": False},
        "marlin-wna16/1",
    ),
    "asymmetric int8": (
        "gptq-int8",
        _changed("qzeros", lambda zeros: torch.randint_like(zeros, 1 << 30)),
        {"sym": False},
        "marlin-wna16/1",
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_formats(name: str, tmp_path: Path) -> None:
    kind, edit, quantization, layout = VARIANTS[name]
    checkpoint = write_checkpoint(tmp_path, kind, Sizes(128, 64), edit, **quantization)
    plan, on = fast_paths(checkpoint, layout)
    assert set(on) == {"w13", "w2"}
    for role, fast_path in on.items():
        assert OnFastPath(checkpoint, plan, role, 1, fast_path).packed() == on_reference_path(checkpoint, plan, role, 1)


def test_threads_share_a_fast_path(checkpoints: Path) -> None:
    checkpoint = moeq.open(checkpoints / "gptq-int4-g32-qwen3moe")
    plan, on = fast_paths(checkpoint, "marlin-wna16/1")
    wanted = [on_reference_path(checkpoint, plan, "w13", expert) for expert in range(4)]
    own = [OnFastPath(checkpoint, plan, "w13", expert, on["w13"]) for expert in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            assert list(pool.map(OnFastPath.packed, own)) == wanted


def _damage(fast_path: OnFastPath) -> int:
    """Flip bits all over the outputs, one at a time; every flip has to be seen. Returns how many were tried."""
    tried = 0
    for packed in fast_path.outputs:
        for part, out in packed.items():
            for place in {0, 1, len(out) // 3, len(out) // 2 + 1, len(out) - 1}:
                for bit in (0, 3, 4, 7):
                    out[place] ^= 1 << bit
                    assert fast_path.prove() is None, f"bit {bit} of byte {place} of {part} was not missed"
                    out[place] ^= 1 << bit
                    tried += 1
    return tried


@pytest.mark.cover(every=9)
@pytest.mark.parametrize("name", [name for name in FAST_PATHS if FAST_PATHS[name]])
def test_every_damaged_bit_is_seen(name: str, checkpoints: Path) -> None:
    checkpoint = moeq.open(checkpoints / name)
    for layout in sorted(FAST_PATHS[name]):
        plan, on = fast_paths(checkpoint, layout)
        for role, fast_path in on.items():
            case = OnFastPath(checkpoint, plan, role, 1, fast_path)
            assert case.pack()
            proof = case.prove()
            assert proof is not None
            assert _damage(case) > 20
            assert case.prove() == proof


def test_damaged_filling_is_seen(tmp_path: Path) -> None:
    """Zeros that fill up to the layout's sizes are compared as well, for every rank."""
    checkpoint = write_checkpoint(tmp_path, "mxfp4", Sizes(288, 96), exponents_for("moeq-mxfp4/1"))
    for layout in ("marlin-mxfp4/1", "moeq-mxfp4/1", "triton-kernels-hopper/1", "mxfp4-identity/1"):
        plan, on = fast_paths(checkpoint, layout, tp=2)
        for role, fast_path in on.items():
            case = OnFastPath(checkpoint, plan, role, 1, fast_path)
            assert case.pack()
            assert _damage(case) > 40


def test_a_changed_source_is_seen(checkpoints: Path) -> None:
    checkpoint = moeq.open(checkpoints / "awq-int4-g32-qwen3moe")
    plan, on = fast_paths(checkpoint, "marlin-wna16/1")
    case = OnFastPath(checkpoint, plan, "w13", 0, on["w13"])
    assert case.pack()
    for key, data in case.inputs.items():
        data[len(data) // 2] ^= 1
        assert case.prove() is None, key
        data[len(data) // 2] ^= 1
    assert case.prove() is not None


@pytest.mark.cover(("dtype", "layout"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["marlin-fp8/1", "marlin-fp8-fp16/1"])
@pytest.mark.parametrize("seed", range(6))
def test_scales_of_fp8_of_every_type_and_size(dtype, layout, seed, tmp_path: Path) -> None:
    """Whatever the scales are (zero, subnormal, out of range): the same bytes and refusals as by the reference path."""
    generator = torch.Generator().manual_seed(seed)

    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            powers = torch.randint(-26, 14, tensors[name].shape, generator=generator).float()
            numbers = (1 + torch.randint(2 if seed % 2 else 1, powers.shape, generator=generator) / 2) * powers.exp2()
            if seed > 2:
                numbers = numbers.clamp(2.0**-12, 2.0**6)
            numbers[torch.rand(powers.shape, generator=generator) < 0.1] = 0
            tensors[name] = numbers.to(dtype)

    checkpoint = write_checkpoint(tmp_path, "fp8-channel", Sizes(128, 64), edit)
    plan, on = fast_paths(checkpoint, layout)
    for role, fast_path in on.items():
        for expert in (0, 1):
            packed = OnFastPath(checkpoint, plan, role, expert, fast_path).packed()
            if packed is None:
                with pytest.raises(MoeqError) as caught:
                    on_reference_path(checkpoint, plan, role, expert)
                assert caught.value.code in ("answer.lossy", "usage.scale-range")
            else:
                assert packed == on_reference_path(checkpoint, plan, role, expert)
                assert seed < 3 or dtype != torch.float32 or packed.kept == set()


@pytest.mark.cover(every=4)
@pytest.mark.parametrize(
    ("name", "layout", "tp", "lossy"),
    [
        ("awq-int4-g32-qwen3moe", "marlin-wna16/1", 1, False),
        ("ct-w8a8-qwen3moe", "int8-w8a8/1", 1, False),
        ("gptq-int4-g32-qwen3moe", "marlin-wna16/1", 4, False),
        ("mxfp4-gptoss", "triton-kernels-hopper/1", 2, False),
        ("modelopt-fp8-qwen3moe", "marlin-fp8/1", 1, True),
    ],
)
def test_a_conversion_is_the_same_folder_either_way(
    name, layout, tp, lossy, checkpoints, tmp_path, monkeypatch
) -> None:
    deployment, taken = Deployment(gpu=parse_gpu("H100"), tp=tp), []
    options = {"layout": layout, "force_layout": True, "allow_lossy": lossy, "workers": 2}
    prove = FastPath.prove

    def counted(self, *buffers) -> Digests | None:  # type: ignore[no-untyped-def]
        taken.append(prove(self, *buffers))
        return taken[-1]

    monkeypatch.setattr(FastPath, "prove", counted)
    manifest = convert(checkpoints / name, tmp_path / "fast", deployment, **options).manifest
    assert any(entry.losses for entry in manifest.layers) is lossy
    assert len(taken) > 4
    assert all(taken)
    monkeypatch.setattr(words, "COMPILED_FROM", 1 << 60)
    before = len(taken)
    convert(checkpoints / name, tmp_path / "reference", deployment, **options)
    assert len(taken) == before
    fast_path, reference = (
        {path.name: path.read_bytes() for path in (tmp_path / way).iterdir()} for way in ("fast", "reference")
    )
    assert fast_path == reference

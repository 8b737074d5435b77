"""The fast path of transcoding against the reference path: the same files, and every number looked at."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import NUMBERS, gguf_bytes, moe_metadata, moe_tensors, random_tensor, write_model
from pipeline.mixing import content, rewritten

from moeq.errors import MoeqError
from moeq.layouts import words
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.dequantize import dequantize
from moeq.schemes.gguf_blocks import CODED
from moeq.transcode import recode_matrices as reference
from moeq.transcode import transcode_plan
from moeq.transcode.recode_fields import Mxfp4ToNvfp4
from moeq.transcode.target_formats import ENGINE_TARGETS
from moeq.transcode.transcode import check, transcode
from moeq.transcode.transcoder import Transcoder

pytest.importorskip("numba")

from moeq.layouts.float_bits import e4m3_values
from moeq.layouts.loops import blocks, recode
from moeq.transcode.fast_item import FastItem

CHECKPOINTS = (
    "awq-int4-g32-qwen3moe",
    "ct-fp8-block-qwen3moe",
    "ct-fp8-channel-qwen3moe",
    "ct-fp8-tensor-qwen3moe",
    "ct-int4-asym-g32-mixtral",
    "ct-int4-g128-qwen3moe",
    "ct-mxfp4-qwen3moe",
    "ct-mxfp8-qwen3moe",
    "ct-nvfp4-qwen3moe",
    "ct-nvfp4a16-qwen3moe",
    "ct-w8a8-qwen3moe",
    "gptq-int4-g128-mixtral",
    "gptq-int4-g32-actorder-qwen3moe",
    "gptq-int4-g32-qwen3moe",
    "gptq-int8-g64-qwen3moe",
    "modelopt-fp8-qwen3moe",
    "modelopt-nvfp4-qwen3moe",
    "mxfp4-gptoss",
)

_INTEGERS = {"compressed-tensors", "gptq", "gptq_v2"}
_FP4 = {"nvfp4", "nvfp4-compressed-tensors"}

#: Targets that the fast path takes every expert of a checkpoint to, exactly. To floats it takes all, and may round.
FAST: dict[str, set[str]] = {
    "awq-int4-g32-qwen3moe": _INTEGERS,
    "ct-fp8-block-qwen3moe": {"compressed-tensors", "fp8", "modelopt"},
    "ct-fp8-channel-qwen3moe": {"compressed-tensors"},
    "ct-fp8-tensor-qwen3moe": {"compressed-tensors", "fp8", "modelopt"},
    "ct-int4-asym-g32-mixtral": _INTEGERS,
    "ct-int4-g128-qwen3moe": {*_INTEGERS, "fp16"},
    "ct-mxfp4-qwen3moe": {"compressed-tensors", "fp8", "bf16", "fp16", *_FP4},
    "ct-mxfp8-qwen3moe": {"compressed-tensors", "modelopt", "bf16", "fp16"},
    "ct-nvfp4-qwen3moe": {"compressed-tensors", "modelopt", *_FP4},
    "ct-nvfp4a16-qwen3moe": {"compressed-tensors", "modelopt", *_FP4},
    "ct-w8a8-qwen3moe": _INTEGERS,
    "gptq-int4-g128-mixtral": _INTEGERS,
    "gptq-int4-g32-actorder-qwen3moe": {"gptq", "gptq_v2"},
    "gptq-int4-g32-qwen3moe": _INTEGERS,
    "gptq-int8-g64-qwen3moe": _INTEGERS,
    "modelopt-fp8-qwen3moe": {"compressed-tensors", "fp8", "modelopt"},
    "modelopt-nvfp4-qwen3moe": {"modelopt", "nvfp4"},  # not every float32 number is the reciprocal of one
    "mxfp4-gptoss": {"compressed-tensors", "mxfp4", "fp8", "bf16", "fp16", *_FP4},
}


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the fast path took each item it was asked for, or the reference path came after."""
    found: list[bool] = []
    transcoded, on_reference_path = FastItem.transcode, Transcoder._on_reference_path

    def fast(self: FastItem, *given: Any) -> Any:
        changes = transcoded(self, *given)
        found.append(changes is not None)
        return changes

    def slow(self: Transcoder, item: Any) -> Any:
        found.append(False)
        return on_reference_path(self, item)

    monkeypatch.setattr(FastItem, "transcode", fast)
    monkeypatch.setattr(Transcoder, "_on_reference_path", slow)
    return found


def outcome(source: Path, out: Path, target: str, **options: Any) -> dict[str, bytes] | tuple[str, str]:
    """Every file of a transcoding, or the error."""
    try:
        transcode(source, out, target, workers=1, **options)
    except MoeqError as error:
        return error.code, error.message
    return content(out)


@pytest.fixture
def equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ways: list[bool]) -> Callable[..., bool]:
    """Whether both paths come to the same; `ways` is of the fast one then."""

    def compared(source: Path, target: str, **options: Any) -> bool:
        found = []
        for path, least in (("reference", 1 << 40), ("fast", 0)):
            monkeypatch.setattr(words, "COMPILED_FROM", least)
            ways.clear()
            found.append(outcome(source, tmp_path / f"{path}-{target}", target, **options))
        return found[0] == found[1]

    return compared


@pytest.mark.cover(every=9)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_both_paths_write_the_same(name, checkpoints, tmp_path, equal, ways) -> None:
    fast = set()
    for target in ENGINE_TARGETS:
        assert equal(checkpoints / name, target), target
        if ways and all(ways) and (tmp_path / f"fast-{target}").is_dir():
            fast.add(target)
    assert fast == FAST[name] | {"fp32"}  # whose numbers are the values as they are


@pytest.mark.cover(every=36)
@pytest.mark.parametrize("target", ENGINE_TARGETS)
@pytest.mark.parametrize("options", [{"allow_lossy": True}, {"names": "stacked"}], ids=["lossy", "names"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_both_paths_write_the_same_with_options(name, options, target, checkpoints, equal, ways) -> None:
    assert equal(checkpoints / name, target, **options)
    if "allow_lossy" in options:
        assert all(ways)


@pytest.mark.cover("kind", "target")
@pytest.mark.parametrize("target", ["compressed-tensors", "fp8", "bf16", "fp16", "fp32"])
@pytest.mark.parametrize("kind", [*CODED, *blocks.NUMBERS, "f16", "bf16"])
def test_both_paths_write_the_same_of_gguf(kind, target, tmp_path, monkeypatch, equal, ways) -> None:
    monkeypatch.setattr(transcode_plan, "_ITEM_NUMBERS", 24 * 256)  # 64 rows of the embedding are three items
    source = write_model(tmp_path / "m.gguf", layers=1, experts=2, hidden=256, expert_type=kind, other_type=kind)
    assert equal(source, target, allow_lossy=True)
    assert all(ways)
    assert bool(ways) == (target != "compressed-tensors" or kind in CODED)


@pytest.mark.cover(every=12)
@pytest.mark.parametrize(("bits", "nodes"), [(4, 1), (8, 1), (8, 2)])
@pytest.mark.parametrize("name", [*(name for name in CHECKPOINTS if name != "mxfp4-gptoss"), *CODED, *blocks.NUMBERS])
def test_both_paths_write_the_same_for_ktransformers(name, bits, nodes, checkpoints, tmp_path, equal, ways) -> None:
    source = checkpoints / name
    if name not in CHECKPOINTS:
        source = write_model(tmp_path / "m.gguf", layers=1, experts=2, hidden=256, expert_type=name)
    assert equal(source, f"kt-amx-int{bits}", numa=nodes, allow_lossy=True)
    assert bool(ways) == (tmp_path / f"fast-kt-amx-int{bits}").is_dir()  # some sizes are refused
    assert all(ways)


@pytest.mark.parametrize("target", ["compressed-tensors", "bf16"])
def test_both_paths_widen_integers_of_gguf(target, tmp_path, equal, ways) -> None:
    source = write_model(tmp_path / "m.gguf", layers=1, experts=2, expert_type="q4_0", down_type="q8_0")
    assert equal(source, target, allow_lossy=True)
    assert ways
    assert all(ways)


@pytest.mark.cover("seed", every=6)
@pytest.mark.parametrize("seed", range(24))
def test_both_paths_agree_on_random_gguf(seed, tmp_path, equal) -> None:
    """Every expert tensor and every other matrix has a type of its own; sizes, architecture and target are drawn."""
    rng = np.random.default_rng(seed)
    sizes = {"layers": 2, "hidden": 256 * int(rng.integers(1, 3)), "inner": 256 * int(rng.integers(1, 3)), "experts": 2}
    tensors = moe_tensors(rng, **sizes)
    some = rng.choice([*CODED, *blocks.NUMBERS, "f16", "bf16", "f32"], 3, replace=False)
    for name, (_, shape, _) in tensors.items():
        if len(shape) > 1 and "gate_inp" not in name:
            tensors[name] = random_tensor(rng, str(rng.choice(some)), shape)
    source = tmp_path / "m.gguf"
    source.write_bytes(gguf_bytes(moe_metadata(str(rng.choice(["qwen3moe", "llama", "olmoe"])), **sizes), tensors))
    assert equal(source, str(rng.choice(list(ENGINE_TARGETS))), allow_lossy=bool(rng.random() < 0.8))


def test_both_paths_stack_mxfp4_of_gguf(tmp_path, equal, ways) -> None:
    """Rows of gate and up are interleaved, biases among them."""
    source = write_model(tmp_path / "m.gguf", "gpt-oss", layers=1, experts=2, expert_type="mxfp4", biases=True)
    assert equal(source, "mxfp4")
    assert ways
    assert all(ways)


@pytest.mark.parametrize(("kind", "target"), [("q8_0", "compressed-tensors"), ("q6_k", "bf16"), ("nvfp4", "bf16")])
def test_damaged_scales_of_gguf_are_refused_all_the_same(kind, target, tmp_path, equal) -> None:
    tensors = moe_tensors(np.random.default_rng(0), layers=1, experts=2, expert_type=kind)
    name = "blk.0.ffn_up_exps.weight"
    raw, width = bytearray(tensors[name][2]), NUMBERS[kind][2]
    start = 5 * width + (208 if kind == "q6_k" else 0)
    raw[start : start + 2] = b"\x7f\x7f" if kind == "nvfp4" else b"\x00\x7c"
    tensors[name] = (*tensors[name][:2], bytes(raw))
    source = tmp_path / "m.gguf"
    source.write_bytes(gguf_bytes(moe_metadata("qwen3moe", layers=1, hidden=256, inner=256, experts=2), tensors))
    assert equal(source, target, allow_lossy=True)
    with pytest.raises(MoeqError, match=r"finite|unsigned E4M3"):
        check(source, target, allow_lossy=True, workers=1)


@pytest.mark.cover(every=6)
@pytest.mark.parametrize("target", ["compressed-tensors", "gptq", "gptq_v2"])
@pytest.mark.parametrize(("name", "group"), [("gptq-int4-g128-mixtral", 32), ("ct-int4-asym-g32-mixtral", 16)])
def test_groups_are_repeated(name, group, target, checkpoints, tmp_path, monkeypatch, ways) -> None:
    slow = outcome(checkpoints / name, tmp_path / "slow", target, regroup=group)
    monkeypatch.setattr(words, "COMPILED_FROM", 0)
    ways.clear()
    assert outcome(checkpoints / name, tmp_path / "fast", target, regroup=group) == slow
    assert isinstance(slow, dict)
    assert ways
    assert all(ways)


def test_zero_points_of_0_are_refused_all_the_same(checkpoints, tmp_path, monkeypatch, ways) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = next(name for name in tensors if name.endswith("1.down_proj.qzeros"))
        return tensors | {name: tensors[name] & ~0xF}

    source = rewritten(checkpoints / "awq-int4-g32-qwen3moe", tmp_path / "source", change)
    monkeypatch.setattr(words, "COMPILED_FROM", 0)
    code, message = outcome(source, tmp_path / "out", "gptq")
    assert code == "answer.zero-points"
    assert "are 0; GPTQ v1 stores them minus one" in message
    assert isinstance(outcome(source, tmp_path / "v2", "gptq_v2"), dict)


def test_a_scale_that_is_no_number_is_named(checkpoints, tmp_path, monkeypatch) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = next(name for name in tensors if name.endswith("down_proj.weight_scale"))
        tensors[name][0, 0] = 255
        return tensors

    source = rewritten(checkpoints / "ct-mxfp4-qwen3moe", tmp_path / "source", change)
    monkeypatch.setattr(words, "COMPILED_FROM", 0)
    for target in ("fp8", "nvfp4", "bf16", "compressed-tensors"):
        assert outcome(source, tmp_path / target, target)[0] == "source.bad-data"


@pytest.mark.slow
def test_it_needs_no_torch(checkpoints, tmp_path) -> None:
    program = (
        "import sys; from moeq.layouts import words; words.COMPILED_FROM = 0; "
        "from moeq.transcode.transcode import transcode; transcode(sys.argv[1], sys.argv[2], 'fp8'); "
        "sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(checkpoints / "mxfp4-gptoss"), str(tmp_path / "out")]
    assert subprocess.run(command, check=False).returncode == 0


# The loops, number by number.


def drawn(seed: int) -> tuple[QuantizedMatrix, np.ndarray]:
    """MXFP4 of a random size and spread of exponents, with groups of zeros (of either sign) and single codes."""
    draw = np.random.default_rng(seed)
    n, k = int(draw.integers(1, 300)), 32 * int(draw.integers(1, 13))
    spread = int(draw.choice([0, 3, 12, 13, 14, 15, 20, 255]))
    low = 0 if spread == 255 else int(draw.choice([0, 1, 60, 110, 230]))
    exponents = draw.integers(low, min(low + spread, 254) + 1, (n, k // 32), dtype=np.uint8)
    codes = draw.integers(0, 16, (n, k), dtype=np.uint8)
    kept = draw.choice([15, 8, 9, 10, 1], (n, k // 32), p=[0.6, 0.1, 0.1, 0.1, 0.1]).astype(np.uint8)
    codes &= np.repeat(kept, 32, axis=1)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    spec = MatrixSpec("up", n, k, "e2m1", 32, "e8m0")
    return QuantizedMatrix(spec, torch.from_numpy(codes), torch.from_numpy(exponents)), np.ascontiguousarray(packed)


def flips(array: np.ndarray, seed: int) -> list[tuple[int, int]]:
    """Places of single bits, all over an array of bytes."""
    draw = np.random.default_rng(seed)
    return [(0, 0), (array.size - 1, 7), *((int(draw.integers(array.size)), int(draw.integers(8))) for _ in range(40))]


@pytest.mark.cover(every=5)
@pytest.mark.parametrize("scale", ["f32", "e8m0"])
@pytest.mark.parametrize("seed", range(40))
def test_fp8_blocks(seed: int, scale: str) -> None:
    matrix, packed = drawn(seed)
    n, k = matrix.spec.n, matrix.spec.k
    spec = replace(matrix.spec, element="e4m3", group_size=min(128, k), scale_dtype=scale)
    wanted = reference.to_fp8_blocks(matrix, spec)
    exponents = matrix.scales.numpy()
    out = np.full((n, k), 0x5A, np.uint8)
    scales = np.zeros((n, spec.num_groups), np.uint32 if scale == "f32" else np.uint8)
    recode.to_fp8_blocks(packed, exponents, out, scales)
    before, after = dequantize(matrix).numpy(), dequantize(wanted).numpy()
    equal = np.array_equal(before, after) and np.array_equal(np.signbit(before), np.signbit(after))
    held = recode.holds_fp8_blocks(packed, exponents, out, scales)
    assert equal or not held, "what is not exact is never said to be"
    spans = np.ptp(exponents.astype(int)) <= 12 and exponents.min() > 10 and exponents.max() < 240
    assert held or not spans, "what is exact in every checkpoint there is has to be said to be"
    if not held:
        return
    assert np.array_equal(out, wanted.codes.numpy())
    assert np.array_equal(scales, wanted.scales.contiguous().numpy().view(scales.dtype))
    for place, bit in flips(out, seed):
        out.flat[place] ^= 1 << bit
        assert not recode.holds_fp8_blocks(packed, exponents, out, scales)
        out.flat[place] ^= 1 << bit
    assert recode.holds_fp8_blocks(packed, exponents, out, scales)


def test_every_code_under_every_difference_of_exponents_as_fp8() -> None:
    """Each code beside a 6 under the block's largest exponent: byte for byte what decoding says."""
    values = e4m3_values()
    codes = np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, np.uint8)
    for difference in range(-30, 1):
        packed = np.stack([np.full(16, 0x77, np.uint8), codes])
        exponents = np.array([[127], [127 + difference]], np.uint8)
        out, scales = np.zeros((2, 32), np.uint8), np.zeros((2, 1), np.uint32)
        recode.to_fp8_blocks(packed, exponents, out, scales)
        scale = float(scales.view(np.float32)[0, 0])
        assert scale == 2.0**-6
        spec = MatrixSpec("up", 2, 32, "e2m1", 32, "e8m0")
        nibbles = np.stack([packed & 15, packed >> 4], axis=2).reshape(2, 32)
        wanted = dequantize(QuantizedMatrix(spec, torch.from_numpy(nibbles), torch.from_numpy(exponents))).numpy()
        exact = np.array_equal(values[out] * np.float32(scale), wanted)
        assert recode.holds_fp8_blocks(packed, exponents, out, scales) == exact == (difference >= -14)


@pytest.mark.slow
def test_every_byte_is_taken_apart_as_it_decodes() -> None:
    """All 256 E4M3 bytes against all 16 codes, for every difference of exponents that is done without tables."""
    values = e4m3_values()
    bytes_ = np.arange(256, dtype=np.uint8)
    for difference in range(-8, 10):
        for code in range(16):
            packed = np.full((256, 16), code | code << 4, np.uint8)
            exponents = np.full((256, 1), 127 + difference, np.uint8)
            scales = np.full((256, 1), 127 << 23, np.uint32)
            out = np.repeat(bytes_[:, None], 32, axis=1)
            number = recode.E2M1[code] * 2.0**difference
            for row in range(256):
                held = recode.holds_fp8_blocks(packed[row : row + 1], exponents[:1], out[row : row + 1], scales[:1])
                same = values[row] == number and np.signbit(values[row]) == np.signbit(number)
                assert held == same, (difference, code, row)


@pytest.mark.cover(every=5)
@pytest.mark.parametrize("seed", range(40))
def test_bfloat16(seed: int) -> None:
    matrix, packed = drawn(seed)
    exponents = matrix.scales.numpy()
    out = np.full((matrix.spec.n, matrix.spec.k), 0x5A5A, np.uint16)
    recode.to_bf16(packed, exponents, out)
    wanted = reference.to_floats(matrix, "bf16")
    exact = torch.equal(wanted.float(), dequantize(matrix))
    held = recode.holds_bf16(packed, exponents, out)
    assert exact or not held
    assert held or not exact or exponents.max() > 252 or exponents.min() < 2
    if not held:
        return
    assert np.array_equal(out, wanted.view(torch.int16).numpy().view(np.uint16))
    octets = out.view(np.uint8)
    for place, bit in flips(octets, seed):
        octets.flat[place] ^= 1 << bit
        assert not recode.holds_bf16(packed, exponents, out)
        octets.flat[place] ^= 1 << bit


@pytest.mark.parametrize("zeros", ["none", "one matrix", "both matrices"])
def test_gate_and_up_become_nvfp4_under_one_global_scale(zeros: str) -> None:
    """The larger exponent of both decides; matrices of zeros have none, whatever their scales say."""
    spec = MatrixSpec("up", 8, 64, "e2m1", 32, "e8m0")
    matrices, source, target = [], [], []
    for exponent, empty in ((140, zeros != "none"), (134, zeros == "both matrices")):
        codes = np.full((8, 64), 8 if empty else 2, np.uint8)
        exponents = np.full((8, 2), exponent, np.uint8)
        matrices.append(QuantizedMatrix(spec, torch.from_numpy(codes), torch.from_numpy(exponents)))
        source.append({"codes": codes[:, 0::2] | codes[:, 1::2] << 4, "scales": exponents})
        shapes = {"codes": ((8, 32), np.uint8), "scales": ((8, 4), np.uint8), "global_scale": ((1, 1), np.uint32)}
        target.append({name: np.zeros(*shape) for name, shape in shapes.items()})
    recoder = Mxfp4ToNvfp4()
    recoder.fill(source, target)
    assert recoder.holds(source, target)
    wanted = reference.to_e4m3_scales(matrices, [replace(spec, group_size=16, scale_dtype="e4m3")] * 2)
    for one, other in zip(wanted, target, strict=True):
        assert float(one.global_scale[0]) == float(other["global_scale"].view(np.float32)[0, 0])
        assert np.array_equal(one.scales.view(torch.uint8).numpy(), other["scales"])


@pytest.mark.cover(every=5)
@pytest.mark.parametrize("seed", range(40))
def test_nvfp4_scales(seed: int) -> None:
    matrix, packed = drawn(seed)
    exponents = matrix.scales.numpy()
    spec = replace(matrix.spec, group_size=16, scale_dtype="e4m3")
    (wanted,) = reference.to_e4m3_scales([matrix], [spec])
    low, high = recode.used_exponents(packed, exponents)
    shift = (0 if high < 0 else high - 127) - 8
    assert 2.0**shift == float(wanted.global_scale[0])
    out = np.zeros((spec.n, spec.num_groups), np.uint8)
    recode.to_e4m3_scales(exponents, shift, out)
    assert np.array_equal(out, wanted.scales.view(torch.uint8).numpy())
    held = recode.holds_e4m3_scales(packed, exponents, out, 2.0**shift)
    assert held == (high < 0 or low - 127 - shift >= -9)
    used = np.repeat((packed.reshape(spec.n, -1, 8) & 0x77).any(axis=2), 1)
    for place, bit in flips(out, seed):
        out.flat[place] ^= 1 << bit
        if held:
            assert recode.holds_e4m3_scales(packed, exponents, out, 2.0**shift) == (not used[place])
        out.flat[place] ^= 1 << bit

"""Every golden tensor, bit for bit, through moeq's own `pack`: one case per tensor of the manifest."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from layouts.golden import Source, lay, manifest, nibbles, pack_experts, same_bytes, tensors
from torch import Tensor

from moeq.layouts import flashinfer
from moeq.layouts.arrangement import Arrangement
from moeq.layouts.layout import Layout
from moeq.layouts.mxfp4 import TILE_128X4
from moeq.layouts.parts import Part, arrange
from moeq.layouts.registry import LAYOUTS, get_layout
from moeq.layouts.words import pack_words

Check = Callable[[], tuple[Tensor, Tensor]]

PARTS = {"w": "weight", "s": "scale", "z": "zero", "b": "bias", "gs": "global_scale"}

#: The engine's own bug (single scale order for grouped scales): the golden bytes are not what the kernel can read.
WRONG_ON_PURPOSE = ("marlin", "ct4_g64_group_eq_inter.out.s13")

MARLIN_ELEMENTS = {"ct8": "int8", "awq8": "int8", "ct4": "int4", "awq4": "int4"}

MARLIN_MXFP4 = {
    "mxfp4_bf16": "marlin-mxfp4/1",
    "mxfp4_fp16": "marlin-mxfp4-fp16/1",
    "mxfp4_fp8act": "marlin-mxfp4-fp8act/1",
}

FLASHINFER = {
    "flashinfer_trtllm_mxfp4_bf16": "trtllm-mxfp4/1",
    "flashinfer_cutlass_mxfp4_mxfp8": "flashinfer-cutlass-mxfp4-mxfp8/1",
}


# ------------------------------------------------------------------------------------------------ Marlin


def marlin_sources(tag: str) -> tuple[Source, Source]:
    found = tensors("marlin")
    if tag in MARLIN_MXFP4:
        return mxfp4_sources("marlin", tag + ".in.")

    def source(role: str, suffix: str) -> Source:
        def get(kind: str) -> Tensor | None:
            return found.get(f"{tag}.in.{kind}{suffix}")

        codes, scales = get("q"), get("s")
        assert codes is not None
        assert scales is not None
        return Source(role, MARLIN_ELEMENTS[tag.partition("_")[0]], codes, scales, get("z"), get("b"))

    return source("w13", "13"), source("w2", "2")


def mxfp4_sources(name: str, prefix: str, order: str = "gate-up") -> tuple[Source, Source]:
    found = tensors(name)

    def source(role: str, suffix: str) -> Source:
        codes, scales = nibbles(found[f"{prefix}w{suffix}"]), found[f"{prefix}s{suffix}"]
        bias = found[f"{prefix}b{suffix}"]
        if role == "w13" and order == "interleaved":
            codes, scales, bias = (torch.cat([x[:, 0::2], x[:, 1::2]], dim=1) for x in (codes, scales, bias))
        return Source(role, "e2m1", codes, scales, bias=bias)

    return source("w13", "13"), source("w2", "2")


@cache
def packed_marlin(tag: str, role: str) -> dict[str, Tensor]:
    layout = MARLIN_MXFP4.get(tag) or ("marlin-wna16-int8act/1" if "int8act" in tag else "marlin-wna16/1")
    # Allowed losses: exponents outside fp16 (the case covers all), rounded int8-activation scales.
    # MXFP4 sizes are rounded before the function that made these bytes.
    return pack_experts(lay(layout, allow_lossy=True), *marlin_sources(tag), role, pad=tag not in MARLIN_MXFP4)


def marlin(name: str) -> tuple[Tensor, Tensor]:
    tag, _, part = name.partition(".out.")
    kind, role, suffix = (part[:-2], "w13", "13") if part.endswith("13") else (part[:-1], "w2", "2")
    mine, golden = packed_marlin(tag, role)[PARTS[kind]], tensors("marlin")[f"{tag}.out.{kind}{suffix}"]
    return mine, golden.expand(mine.shape).contiguous() if kind == "gs" else golden


MARLIN_FLOAT = {
    "nvfp4": "marlin-nvfp4/1",
    "nvfp4 fp16": "marlin-nvfp4-fp16/1",
    "fp8": "marlin-fp8/1",
    "fp8 fp16": "marlin-fp8-fp16/1",
    "mxfp8": "marlin-mxfp8/1",
}


def marlin_float_sources(tag: str) -> tuple[Source, Source]:
    found = tensors("marlin_float")

    def source(role: str, suffix: str) -> Source:
        def get(kind: str) -> Tensor | None:
            return found.get(f"{tag}.in.{kind}{suffix}")

        codes, scales = get("w"), get("s")
        assert codes is not None
        assert scales is not None
        gated = "ungated" not in tag
        if "nvfp4" in tag:
            scales = scales.view(torch.float8_e4m3fn)
            return Source(role, "e2m1", nibbles(codes), scales, global_scales=get("gs"), gated=gated)
        if "block" in tag:  # a block's scale holds for all of its rows
            scales = scales.repeat_interleave(128, dim=1)[:, : codes.shape[1]]
        elif "tensor" in tag:
            scales = scales.reshape(-1, 1, 1).expand(-1, codes.shape[1], 1)
        return Source(role, "e4m3", codes, scales)

    return source("w13", "13"), source("w2", "2")


@cache
def packed_marlin_float(tag: str, role: str) -> dict[str, Tensor]:
    kind = tag.partition("_")[0] + (" fp16" if "fp16" in tag else "")
    # Allowed losses: scales that the engine rounds to the parameters' dtype, or that are too small for its bytes.
    return pack_experts(lay(MARLIN_FLOAT[kind], allow_lossy=True), *marlin_float_sources(tag), role)


def marlin_float(name: str) -> tuple[Tensor, Tensor]:
    tag, _, part = name.partition(".out.")
    kind, role = (part[:-2], "w13") if part.endswith("13") else (part[:-1], "w2")
    mine, golden = packed_marlin_float(tag, role)[PARTS[kind]], tensors("marlin_float")[name]
    return mine, golden.reshape(mine.shape) if kind == "gs" else golden


# ------------------------------------------------------------------------------------------- Triton WNA16


def wna16(name: str) -> tuple[Tensor, Tensor]:
    found = tensors("wna16_triton")
    codes, zeros = found["in.q"].T.contiguous()[None], found["in.z"].T.contiguous()[None]
    stored = name == "gptq.zp_from_stored"
    # A GPTQ v1 file stores the zero point minus one, so 16 is possible, which the engine lets carry.
    source = Source("w2", "int4", codes, torch.ones(zeros.shape, dtype=torch.bfloat16), zeros + 1 if stored else zeros)
    packed = pack_experts(lay("triton-wna16/1", allow_lossy=stored), source, source, "w2")
    return packed["weight" if name.endswith("weight") else "zero"][0], found[name]


# --------------------------------------------------------------------------------------------- FlashInfer


def flashinfer_rows(name: str) -> tuple[Tensor, Tensor]:
    order = flashinfer.ROWS_128 if name == "rows.tile128" else Arrangement("n e8 d2, k -> n d e k")
    return pack_words(order, torch.arange(256)[:, None], 64), tensors("flashinfer")[name]


def flashinfer_tile(name: str) -> tuple[Tensor, Tensor]:
    found = tensors("flashinfer")
    out = torch.empty(found[name].shape, dtype=torch.uint8)
    arrange(Part("scales", TILE_128X4, tuple(out.shape), "U8", 8, pad=(128, 4)), found["sf128x4.in"], out)
    return out, found[name]


def flashinfer_fold(name: str) -> tuple[Tensor, Tensor]:
    found = tensors("flashinfer")
    scales = found["sm90_fold.in"]
    source = Source("w2", "e2m1", torch.zeros(*scales.shape[:2], 32 * scales.shape[2], dtype=torch.uint8), scales)
    return pack_experts(lay("flashinfer-cutlass-mxfp4-bf16/1"), source, source, "w2")["scale"], found[name]


def mxint4(name: str) -> tuple[Tensor, Tensor]:
    found = tensors("flashinfer")
    w13 = Source("w13", "int4", found["mxint4.in.q13"], found["mxint4.in.s13"])
    w2 = Source("w2", "int4", found["mxint4.in.q2"], found["mxint4.in.s2"])
    role = "w13" if "gemm1" in name else "w2"
    packed = pack_experts(lay("trtllm-mxint4/1"), w13, w2, role)
    return packed["weight" if name.endswith("weights") else "scale"], found[name]


def flashinfer_mxfp4(name: str) -> tuple[Tensor, Tensor]:
    _, source, backend, part = name.split(".")
    order = "interleaved" if source == "gptoss" else "gate-up"
    sources = mxfp4_sources("flashinfer", "mxfp4.in.", order)
    role = "w13" if part.endswith("13") else "w2"
    packed = pack_experts(lay(FLASHINFER[backend]), *sources, role)
    return packed[PARTS[part[0]]], tensors("flashinfer")[name]


# ------------------------------------------------------------------------- NVFP4 with 4-bit activations

NVFP4 = {
    "VLLM_CUTLASS": "cutlass-nvfp4/1",
    "FLASHINFER_CUTEDSL_BATCHED": "cutlass-nvfp4/1",
    "FLASHINFER_CUTLASS": "flashinfer-cutlass-nvfp4/1",
    "FLASHINFER_TRTLLM": "trtllm-nvfp4/1",
    "FLASHINFER_B12X": "flashinfer-b12x-nvfp4/1",
    "cutedsl": "flashinfer-cutedsl-nvfp4/1",
    "b12x": "b12x-nvfp4/1",
    "b12x_a16": "b12x-nvfp4-a16/1",
}


def nvfp4(name: str) -> tuple[Tensor, Tensor]:
    tag, backend, _, part = name.split(".")
    found = tensors("nvfp4")

    def source(role: str) -> Source:
        w, s, gs = (found[f"{tag}.in.{kind}{role[1:]}"] for kind in ("w", "s", "gs"))
        scales = s.view(torch.float8_e4m3fn)
        return Source(role, "e2m1", nibbles(w), scales, global_scales=gs, gated=tag != "ungated")

    kind, role = (part[:-2], "w13") if part.endswith("13") else (part[:-1], "w2")
    # FlashInfer's B12X rounds scales; nothing else changes a number here.
    layout = lay(NVFP4[backend], allow_lossy=backend == "FLASHINFER_B12X")
    packed = pack_experts(layout, source("w13"), source("w2"), role)[PARTS[kind]]
    return packed.reshape(-1) if kind == "gs" else packed, found[name]


# -------------------------------------------------------------------------- FP8 with 8-bit activations

#: What made the bytes, and what shares a scale -> layout.
FP8 = {
    "flashinfer_cutlass block": "flashinfer-cutlass-fp8-block/1",
    "flashinfer_cutlass tensor": "flashinfer-cutlass-fp8-tensor/1",
    "flashinfer_trtllm block": "trtllm-fp8-block/1",
    "flashinfer_trtllm tensor": "trtllm-fp8-tensor/1",
    "flashinfer_trtllm mx": "trtllm-mxfp8/1",
    "deepgemm_sm90 block": "deepgemm-fp8-sm90/1",
    "deepgemm_sm100 block": "deepgemm-fp8-sm100/1",
    "deepgemm_sm100 mx": "deepgemm-mxfp8/1",
    "aiter_fn block": "aiter-fp8-block/1",
    "aiter_fn channel": "aiter-fp8-channel/1",
    "aiter_fn tensor": "aiter-fp8-tensor/1",
    "aiter_fnuz block": "aiter-fp8-block-fnuz/1",
    "aiter_fnuz channel": "aiter-fp8-channel-fnuz/1",
    "aiter_fnuz tensor": "aiter-fp8-tensor-fnuz/1",
    "aiter mx": "aiter-mxfp8/1",
    "xpu block": "xpu-fp8-block/1",
    "xpu tensor": "xpu-fp8-tensor/1",
    "xpu mx": "xpu-mxfp8/1",
}


def fp8(name: str, file: str = "fp8") -> tuple[Tensor, Tensor]:
    tag, backend, _, part = name.split(".")
    found, scope = tensors(file), tag.partition("_")[0]

    def source(role: str) -> Source:
        codes, scales = found[f"{tag}.in.w{role[1:]}"], found[f"{tag}.in.s{role[1:]}"]
        rows = codes.shape[1]
        if scope == "block":
            scales = scales.repeat_interleave(128, dim=1)
        elif scope == "tensor":
            scales = scales.view(-1, 1, 1).expand(-1, rows, 1)
        return Source(role, "e4m3", codes, scales.contiguous(), gated="ungated" not in tag)

    kind, role = part[0], "w13" if part.endswith("13") else "w2"
    # DeepGEMM requantises these; nothing else changes a number here.
    layout = lay(FP8[f"{backend} {scope}"], allow_lossy=backend.startswith("deepgemm"))
    packed = pack_experts(layout, source("w13"), source("w2"), role)[PARTS[kind]]
    return packed.reshape(-1) if kind == "s" and scope == "tensor" else packed, found[name]


# --------------------------------------------------------------------------------------------------- CPUs

CPU = {"int4": "cpu-amx-int4/1", "int8": "cpu-amx-int8/1", "mxfp4": "cpu-amx-mxfp4/1", "fp8": "cpu-amx-fp8/1"}
CPU_INTERLEAVED = "cpu-amx-mxfp4-interleaved/1"


def cpu(name: str) -> tuple[Tensor, Tensor]:
    tag, _, part = name.split(".")
    found, element, interleaved = tensors("cpu"), tag.partition("_")[0], tag.endswith("interleaved")

    def source(role: str) -> Source:
        given = {kind: found.get(f"{tag}.in.{kind}{role[1:]}") for kind in "wqsz"}
        if element == "int4":
            return Source(role, element, given["q"], given["s"], given["z"])
        if element == "int8":  # bytes of signed numbers; the operator takes no scales
            codes = given["q"] ^ 0x80
            return Source(role, element, codes, torch.ones(*codes.shape[:2], 1))
        if element == "mxfp4":
            rows = [nibbles(given["w"]), given["s"]]
            if interleaved and role == "w13":
                rows = [torch.cat([x[:, 0::2], x[:, 1::2]], dim=1) for x in rows]
            return Source(role, "e2m1", *rows)
        return Source(role, "e4m3", given["w"], given["s"].repeat_interleave(128, dim=1))

    role = "w13" if part.endswith("13") else "w2"
    layout = lay(CPU_INTERLEAVED if interleaved else CPU[element])
    packed = pack_experts(layout, source("w13"), source("w2"), role)[PARTS[part[0]]]
    # For int8 and for scales of MXFP4 the operators say the shape of the matrix, layouts that of their blocks.
    return packed, found[name].reshape(packed.shape)


# ----------------------------------------------------------------------------------------- triton_kernels

TRITON_KERNELS = {
    "hopper_value": ("triton-kernels-hopper/1", "weight"),
    "hopper_scale.w4": ("triton-kernels-hopper-w4/1", "scale"),
    "hopper_scale.w8": ("triton-kernels-hopper/1", "scale"),
    "blackwell_value": ("triton-kernels-blackwell/1", "weight"),
    "blackwell_scale": ("triton-kernels-blackwell/1", "scale"),
}


def triton_kernels(name: str) -> tuple[Tensor, Tensor]:
    found = tensors("triton_kernels")
    tag, _, kind = name.partition(".")
    if tag == "cdna4":
        scales, layout, part = found["cdna4.in.scale"], "triton-kernels-cdna4/1", "scale"
        codes = torch.zeros(*scales.shape[:2], 32 * scales.shape[2], dtype=torch.uint8)
    else:
        layout, part = TRITON_KERNELS[kind]
        codes, scales = nibbles(found[f"{tag}.in.value"]), found[f"{tag}.in.scale"]
    source = Source("w2", "e2m1", codes, scales)
    # The golden inputs are smaller than what the engine would pass, so nothing is rounded up before packing.
    packed = torch.stack([lay(layout).pack(source.expert(e))[part] for e in range(codes.shape[0])])
    return packed.reshape(found[name].shape), found[name]


# -------------------------------------------------------------------------------------------------- AITER


def aiter_weight(layout: str, role: str) -> Check:
    def check() -> tuple[Tensor, Tensor]:
        codes = nibbles(tensors("aiter")["in.weight"])
        scales = torch.zeros(*codes.shape[:2], codes.shape[2] // 32, dtype=torch.uint8)
        source = Source(role, "e2m1", codes, scales)
        return torch.stack([lay(layout).pack(source.expert(e))["weight"] for e in range(2)]), codes

    return check


def aiter_scale(layout: str, role: str) -> Check:
    def check() -> tuple[Tensor, Tensor]:
        scales = tensors("aiter")["in.scale"]
        codes = torch.zeros(*scales.shape[:2], 32 * scales.shape[2], dtype=torch.uint8)
        source = Source(role, "e2m1", codes, scales)
        return torch.stack([lay(layout).pack(source.expert(e))["scale"] for e in range(2)]), scales

    return check


AITER: dict[str, Check] = {
    "weight.16x16": aiter_weight("aiter-shuffle/1", "w13"),
    "weight.a16w4.gateup0": aiter_weight("aiter-a16w4/1", "w2"),
    "weight.a16w4.gateup1": aiter_weight("aiter-a16w4/1", "w13"),
    "scale.a16w4.gateup0": aiter_scale("aiter-a16w4/1", "w2"),
    "scale.a16w4.gateup1": aiter_scale("aiter-a16w4/1", "w13"),
    "scale.e8m0": aiter_scale("aiter-shuffle/1", "w13"),
    "scale.n32k4": aiter_scale("aiter-gfx1250/1", "w13"),
}


def aiter(name: str) -> tuple[Tensor, Tensor]:
    golden = tensors("aiter")[name]
    if name != "int4.packed":
        return AITER[name]()[0].reshape(golden.shape), golden
    # The golden input is already shuffled (16, 16); undo that by the formula to get what moeq starts from.
    shuffled = tensors("aiter")["in.int4"]
    n, k = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
    offset = (((n // 16) * 2 + k // 32) * 2 + (k % 32) // 16) * 256 + (n % 16) * 16 + k % 16
    codes = (shuffled.reshape(-1)[offset].to(torch.int16) + 8).to(torch.uint8)
    source = Source("w2", "int4", codes[None], torch.ones(1, 64, 2, dtype=torch.bfloat16))
    return lay("aiter-int4/1").pack(source.expert(0))["weight"].reshape(-1), golden


# ------------------------------------------------------------------------------------------------ Humming


def humming(name: str) -> tuple[Tensor, Tensor]:
    found = tensors("humming")
    if name == "e8m0_for_fp16":
        scales = torch.arange(256, dtype=torch.uint8).reshape(1, 64, 4)
        source = Source("w2", "e2m1", torch.zeros(1, 64, 128, dtype=torch.uint8), scales)
        layout = lay("humming-mxfp4-fp16/1", allow_lossy=True)
        packed = layout.pack(source.expert(0))["scale"]
        n = torch.arange(64)
        return packed[:, 64 * (n // 64) + 8 * (n % 8) + (n % 64) // 8].T.reshape(-1), found[name]
    scales = found["in.scale"][:, :, :1] if name == "scale.channel" else found["in.scale"]
    codes = torch.zeros(2, 128, 32 * scales.shape[2], dtype=torch.uint8)
    source = Source("w2", "int4", codes, scales, bias=found["in.bias"])
    return pack_experts(lay("humming-wna16/1"), source, source, "w2")[name.partition(".")[0]], found[name]


GOLDEN: dict[str, Callable[[str], tuple[Tensor, Tensor]]] = {
    "marlin": marlin,
    "marlin_float": marlin_float,
    "nvfp4": nvfp4,
    "fp8": fp8,
    "fp8_vendors": partial(fp8, file="fp8_vendors"),
    "cpu": cpu,
    "wna16_triton": wna16,
    "triton_kernels": triton_kernels,
    "aiter": aiter,
    "humming": humming,
    "flashinfer/rows": flashinfer_rows,
    "flashinfer/sf128x4": flashinfer_tile,
    "flashinfer/sm90_fold": flashinfer_fold,
    "flashinfer/mxint4": mxint4,
    "flashinfer/mxfp4": flashinfer_mxfp4,
}


def outputs() -> list[tuple[str, str]]:
    """Every tensor of the manifest that is not an input."""
    return [
        (file, name)
        for file, entry in sorted(manifest().items())
        for name in sorted(entry["tensors"])
        if "in" not in name.split(".")
    ]


@pytest.mark.parametrize(("file", "name"), outputs())
def test_golden_tensor_is_bit_exact(file: str, name: str) -> None:
    check = GOLDEN[file] if file in GOLDEN else GOLDEN[f"{file}/{name.partition('.')[0]}"]
    mine, golden = check(name)
    assert same_bytes(mine, golden) == ((file, name) != WRONG_ON_PURPOSE)


#: Layouts without golden bytes of their own, and what stands in.
WITHOUT = {
    "cutlass-mxfp4/1": "weights as stored; the scale tile has golden bytes under trtllm-mxfp4",
    "deepgemm-mxfp4/1": "weights as stored, four exponents to a word: its packing needs such a GPU",
    "int8-w8a8/1": "as stored",
    "marlin-act-order/1": "marlin-wna16 on sorted columns, checked by multiplying (tests/layouts/test_refusals.py)",
    "marlin-mxfp4-fp16-interleaved/1": "the map of marlin-mxfp4 on interleaved rows (moeq parity)",
    "marlin-mxfp4-fp8act-interleaved/1": "the map of marlin-mxfp4-fp8act on interleaved rows",
    "marlin-mxfp4-interleaved/1": "the map of marlin-mxfp4 on interleaved rows (moeq parity)",
    "marlin-wna16-fp8act/1": "the weight map of marlin-mxfp4-fp8act and scales of marlin-wna16-int8act",
    "moeq-mxfp4/1": "marlin-mxfp4 with another order of bits, which the kernels read (tests/moeq_kernels)",
    "moeq-nvfp4/1": "marlin-nvfp4 with another order of bits, which the kernels read (tests/moeq_kernels)",
    "moeq-wna16/1": "moeq's own: tests/moeq_kernels/test_few_bits.py compares with a closed form, and multiplies",
    "mxfp4-identity/1": "as stored",
    "rdna3-int4/1": "written from the engine's kernel; its packing needs such a GPU",
    "xpu-wna16/1": "as stored",
}


def test_every_layout_has_golden_bytes_or_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    used: set[str] = set()

    def noted(layout_id: str, **options: object) -> Layout:
        used.add(layout_id)
        return get_layout(layout_id, **options)

    monkeypatch.setitem(globals(), "lay", noted)
    for function in list(globals().values()):
        getattr(function, "cache_clear", lambda: None)()
    for file, name in outputs():
        (GOLDEN[file] if file in GOLDEN else GOLDEN[f"{file}/{name.partition('.')[0]}"])(name)
    assert LAYOUTS.keys() - used == WITHOUT.keys()

"""Headers that contradict themselves or the config: which format they are of, and what is said about them."""

from __future__ import annotations

from typing import Any

import pytest

from moeq.errors import MoeqError
from moeq.schemes.declared import Declared
from moeq.schemes.format import Context, Described, PartSig, codes_fill_words, matrices
from moeq.schemes.registry import FORMATS, get_format

Headers = dict[str, tuple[str, tuple[int, ...]]]


def signatures(headers: Headers) -> dict[str, PartSig]:
    return {part: PartSig(*header) for part, header in headers.items()}


def described(form: str, headers: Headers, k_hint: int | None = None, **declared: Any) -> Described:
    declared = {"method": "any", **declared}
    return get_format(form).describe(signatures(headers), Context("here", "down", Declared(**declared), k_hint))


AWQ: Headers = {"qweight": ("I32", (64, 4)), "scales": ("F16", (2, 32)), "qzeros": ("I32", (2, 4))}
GEMV: Headers = {"qweight": ("I32", (32, 8)), "qzeros": ("I32", (32, 1)), "scales": ("F16", (32, 8))}
FAST: Headers = {"qweight": ("I16", (8, 64)), "qzeros": ("F16", (8, 32)), "scales": ("F16", (8, 32))}
GPTQ: Headers = {"qweight": ("I32", (8, 32)), "scales": ("F16", (2, 32)), "qzeros": ("I32", (2, 4))}
CT_PACK: Headers = {"weight_packed": ("I32", (32, 8)), "weight_scale": ("F16", (32, 2))}
INT8: Headers = {"weight": ("I8", (32, 64)), "weight_scale": ("F32", (32, 1))}
FP8: Headers = {"weight": ("F8_E4M3", (256, 192)), "weight_scale_inv": ("F32", (2, 2))}
MXFP8: Headers = {"weight": ("F8_E4M3", (32, 64)), "weight_scale": ("U8", (32, 2))}
MXFP4: Headers = {"blocks": ("U8", (32, 2, 16)), "scales": ("U8", (32, 2))}
NVFP4: Headers = {"weight": ("U8", (32, 32)), "weight_scale": ("F8_E4M3", (32, 4)), "weight_scale_2": ("F32", ())}
MARLIN: Headers = {"B": ("I32", (4, 128)), "s": ("F16", (2, 64))}
W4AFP8: Headers = {"weight": ("I8", (32, 128)), "weight_scale_inv": ("BF16", (32, 2))}
BNB_STATE = "weight.quant_state.bitsandbytes__nf4"
BNB: Headers = {
    "weight": ("U8", (32, 32)),
    "weight.absmax": ("F32", (32,)),
    "weight.quant_map": ("F32", (16,)),
    BNB_STATE: ("U8", (90,)),
}

AO_INT: Headers = {"_weight_qdata": ("I8", (32, 64)), "_weight_scale": ("F32", (32, 2)), "_weight_bits": ("U8", (0, 4))}
AO_INT4: Headers = {
    "_weight_qdata": ("U8", (32, 32)),
    "_weight_scale": ("BF16", (2, 32)),
    "_weight_zero_point": ("BF16", (2, 32)),
    "_weight_int4": ("U8", (0, 1)),
}
AO_FP8: Headers = {"_weight_qdata": ("F8_E4M3", (32, 64)), "_weight_scale": ("F32", (32, 1))}

GOOD: list[tuple[str, Headers, dict[str, Any], tuple[int, int, int]]] = [
    ("awq", AWQ, {"bits": 4}, (32, 64, 32)),
    ("awq", AWQ | {"qweight": ("I32", (64, 8)), "qzeros": ("I32", (2, 8))}, {"writer": "GPTQModel:4"}, (32, 64, 32)),
    ("awq-gemv", GEMV, {"group_size": 8}, (32, 64, 8)),
    ("awq-gemv", GEMV, {"group_size": -1}, (32, 64, 64)),
    ("awq-gemv-fast", FAST, {"group_size": 32}, (32, 64, 32)),
    ("gptq", GPTQ, {"bits": 4}, (32, 64, 32)),
    ("ct-pack", CT_PACK, {"bits": 4}, (32, 64, 32)),
    ("ct-int8", INT8, {}, (32, 64, 64)),
    ("ct-int8", INT8 | {"weight_scale": ("F32", (32, 4))}, {}, (32, 64, 16)),
    ("fp8-block", FP8, {}, (256, 192, 128)),
    ("fp8-block", FP8 | {"weight_scale_inv": ("F32", (4, 1, 3, 1))}, {"block": (64, 64)}, (256, 192, 64)),
    ("mxfp8", MXFP8, {}, (32, 64, 32)),
    ("mxfp4", MXFP4, {}, (32, 64, 32)),
    ("nvfp4", NVFP4, {}, (32, 64, 16)),
    ("nvfp4", NVFP4 | {"weight_scale_2": ("F32", (1, 1))}, {}, (32, 64, 16)),
    ("marlin-v1", MARLIN, {}, (64, 64, 32)),
    ("w4afp8", W4AFP8, {}, (32, 256, 128)),
    ("w4afp8", {"weight": ("I8", (2, 32)), "weight_scale_inv": ("BF16", (2, 1))}, {}, (2, 64, 64)),
    ("bitsandbytes-4bit", BNB, {}, (32, 64, 64)),
    ("torchao-int", AO_INT, {}, (32, 64, 32)),
    ("torchao-int", AO_INT | {"_weight_scale": ("F32", (32, 1))}, {}, (32, 64, 64)),
    ("torchao-int", AO_INT | {"_weight_scale": ("F32", (1, 1))}, {}, (32, 64, 64)),
    ("torchao-int4", AO_INT4, {}, (32, 64, 32)),
    (
        "torchao-int4",
        AO_INT4 | {"_weight_scale": ("BF16", (1, 32)), "_weight_zero_point": ("BF16", (1, 32))},
        {},
        (32, 64, 64),
    ),
    ("torchao-float8", AO_FP8, {}, (32, 64, 64)),
    ("torchao-float8", AO_FP8 | {"_weight_scale": ("F32", (1, 1))}, {}, (32, 64, 64)),
    ("torchao-float8", AO_FP8 | {"_weight_scale": ("F32", (2, 2))}, {}, (32, 64, 32)),
    ("torchao-float8", AO_FP8 | {"_weight_scale": ("F32", (1, 2))}, {}, (32, 64, 32)),
]


@pytest.mark.parametrize(("form", "headers", "declared", "sizes"), GOOD)
def test_headers_without_a_fault(form: str, headers: Headers, declared: dict[str, Any], sizes: tuple[int, ...]) -> None:
    found = described(form, headers, **declared)
    assert (found.spec.n, found.spec.k, found.spec.group_size) == sizes
    assert found.scheme.format == form
    assert get_format(form).matches(signatures(headers), Declared("any", **declared))
    assert get_format(form).out_features(signatures(headers)) == sizes[0]


BAD: list[tuple[str, Headers, dict[str, Any], str]] = [
    *(
        ("torchao-int", AO_INT | {"_weight_scale": ("F32", shape)}, {}, f"_weight_scale is {list(shape)}, expected")
        for shape in ((32, 0), (32, 3), (16, 2), (1, 2), (32,))
    ),
    *(
        ("torchao-int4", AO_INT4 | {"_weight_scale": ("BF16", shape)}, {}, f"_weight_scale is {list(shape)}, expected")
        for shape in ((0, 32), (3, 32), (2, 31), (64,))
    ),
    *(
        ("torchao-float8", AO_FP8 | {"_weight_scale": ("F32", shape)}, {}, f"_weight_scale is {list(shape)}, expected")
        for shape in ((0, 1), (1, 0), (3, 1), (1, 3), (32, 2))
    ),
    ("awq", AWQ, {"bits": 8}, "4 words hold 32 codes of 4 bits, the config declares 8"),
    ("awq", AWQ | {"qzeros": ("I32", (3, 4))}, {}, "qzeros is [3, 4], expected [2, 4]"),
    ("awq", AWQ | {"qzeros": ("I16", (2, 4))}, {}, "qzeros is I16, expected I32"),
    ("awq", AWQ | {"scales": ("F64", (2, 32))}, {}, "scales is F64, expected F16 or BF16 or F32"),
    ("awq", AWQ | {"bias": ("F16", (64,))}, {}, "bias is [64], expected [32]"),
    ("awq", AWQ | {"bias": ("I32", (32,))}, {}, "bias is I32, expected F16 or BF16 or F32"),
    ("awq-gemv", GEMV, {"group_size": 7}, "K=64 with group_size 7 needs 10 scales, there are 8"),
    ("awq-gemv-fast", FAST | {"qweight": ("I16", (7, 64))}, {}, "qweight is [7, 64], expected [N / 4, K] with N=32"),
    ("awq-gemv-fast", FAST | {"qweight": ("I16", (8, 96))}, {}, "qweight is [8, 96], expected [N / 4, K] with N=32"),
    ("gptq", GPTQ, {}, "neither g_idx nor the config tells how many input features qweight holds"),
    ("gptq", GPTQ, {"bits": 4, "group_size": 64}, "makes 1 groups of K=64, the scales have 2 (K/2 = 32)"),
    ("gptq", GPTQ, {"bits": 4, "group_size": 24}, "makes 3 groups of K=64, the scales have 2 (K/2 = 32)"),
    ("gptq", GPTQ | {"g_idx": ("F32", (64,))}, {"bits": 4}, "g_idx is F32, expected I32 or I64"),
    ("gptq", GPTQ | {"g_idx": ("I32", (65,))}, {"bits": 4}, "8 words hold K=65 codes of 3.93846 bits"),
    ("gptq", GPTQ | {"g_idx": ("I32", (42,))}, {"bits": 6}, "6-bit codes are planar or continuous"),
    (
        "gptq",
        GPTQ | {"scales": ("F16", (3, 32)), "qzeros": ("I32", (3, 4))},
        {"bits": 4},
        "3 groups do not divide K=64",
    ),
    (
        "gptq",
        GPTQ | {"scales": ("F16", (0, 32)), "qzeros": ("I32", (0, 4))},
        {"bits": 4},
        "0 groups do not divide K=64",
    ),
    ("ct-pack", CT_PACK, {"bits": 8, "k_hint": 64}, "8 words hold K=64 codes of 4 bits, the config declares 8"),
    ("ct-pack", CT_PACK | {"weight_zero_point": ("I32", (5, 2))}, {"bits": 4}, "is I32 [5, 2], expected I32 [4, 2]"),
    ("ct-pack", CT_PACK | {"weight_zero_point": ("I8", (4, 2))}, {"bits": 4}, "is I8 [4, 2], expected I32 [4, 2]"),
    ("ct-pack", CT_PACK | {"weight_zero_point": ("I16", (32, 2))}, {"bits": 4}, "is I16 [32, 2], expected I32 [4, 2]"),
    (
        "ct-int8",
        INT8 | {"weight_scale": ("F32", (32, 3))},
        {},
        "weight_scale is [32, 3], expected [32, 1] or one number",
    ),
    ("ct-int8", INT8 | {"weight_scale": ("F32", (16, 4))}, {}, "weight_scale is [16, 4]"),
    ("ct-int8", INT8 | {"weight_zero_point": ("I32", (32, 1))}, {}, "weight_zero_point is I32, expected I8"),
    ("ct-int8", INT8, {"k_hint": 32}, "weight has K=64, the sibling projection implies 32"),
    ("fp8-block", FP8, {"block": (128, 64)}, "weight_scale_inv is [2, 2], blocks of 128 x 64 need [2, 3]"),
    ("fp8-block", FP8 | {"weight_scale_inv": ("F32", (1, 2))}, {}, "is [1, 2], blocks of 128 x 128 need [2, 2]"),
    ("mxfp8", MXFP8 | {"weight_scale": ("U8", (32, 3))}, {}, "is [32, 3], expected [32, 2] (one per 32 codes)"),
    (
        "mxfp4",
        MXFP4 | {"blocks": ("U8", (32, 2, 15))},
        {},
        "blocks [32, 2, 15] and scales [32, 2] are not [N, K / 32, 16]",
    ),
    ("mxfp4", MXFP4 | {"scales": ("U8", (32, 3))}, {}, "blocks [32, 2, 16] and scales [32, 3] are not"),
    ("nvfp4", NVFP4 | {"weight_scale_2": ("F32", (2,))}, {}, "weight_scale_2 has shape [2], expected one number"),
    ("marlin-v1", MARLIN | {"s": ("F16", (2, 32))}, {}, "N=32 is not a multiple of 64, which Marlin needs"),
    ("w4afp8", W4AFP8 | {"weight_scale_inv": ("BF16", (32, 3))}, {}, "expected [32, 2] (one per 128 codes)"),
    ("w4afp8", W4AFP8, {"k_hint": 128}, "weight has K=256, the sibling projection implies 128"),
    ("bitsandbytes-4bit", BNB | {"weight.quant_map": ("F32", (256,))}, {}, "weight.quant_map is [256], expected [16]"),
    ("bitsandbytes-4bit", BNB | {"weight.absmax": ("U8", (32,))}, {}, "weight.absmax is neither F32 nor U8"),
    ("bitsandbytes-4bit", BNB | {"weight.nested_absmax": ("F32", (1,))}, {}, "weight.absmax is neither F32 nor U8"),
    ("bitsandbytes-4bit", {part: BNB[part] for part in ("weight", "weight.absmax", BNB_STATE)}, {}, "is neither"),
    ("bitsandbytes-4bit", BNB, {"k_hint": 32}, "weight has K=64, the sibling projection implies 32"),
]


@pytest.mark.parametrize(("form", "headers", "declared", "words"), BAD)
def test_headers_with_a_fault(form: str, headers: Headers, declared: dict[str, Any], words: str) -> None:
    with pytest.raises(MoeqError) as caught:
        described(form, headers, **declared)
    assert caught.value.code == "source.inconsistent"
    assert caught.value.message.startswith("here: ")
    assert words in caught.value.message


@pytest.mark.parametrize("writer", [None, "AutoAWQ"])
def test_widths_that_writers_pack_differently(writer: str | None) -> None:
    with pytest.raises(MoeqError, match="here: writers pack 8-bit AWQ in different orders") as caught:
        described("awq", AWQ | {"qweight": ("I32", (64, 8)), "qzeros": ("I32", (2, 8))}, writer=writer)
    assert caught.value.code == "source.unsupported-format"


OTHERS: list[tuple[str, Headers, str]] = [
    ("awq", AWQ | {"qweight": ("I32", (64, 5))}, ""),
    ("awq", AWQ | {"qweight": ("I32", (1, 4))}, ""),
    ("awq", AWQ | {"scales": ("F16", (32,))}, ""),
    ("awq", AWQ, "gemv"),
    ("awq-gemv", GEMV | {"scales": ("F16", (32, 9))}, ""),
    ("awq-gemv", GEMV | {"qzeros": ("I32", (16, 1))}, ""),
    ("awq-gemv-fast", FAST | {"qweight": ("I32", (8, 64))}, ""),
    ("gptq", GPTQ | {"scales": ("F16", (2, 31))}, ""),
    ("ct-int8", INT8 | {"weight": ("U8", (32, 64))}, ""),
    ("ct-int8", INT8 | {"weight": ("I8", (32, 64, 1))}, ""),
    ("fp8", {"weight": ("F8_E4M3", (256, 192)), "weight_scale": ("F32", (2, 2))}, ""),
    ("fp8", {"weight": ("F8_E5M2", (256, 192)), "weight_scale": ("F32", ())}, ""),
    ("fp8-block", FP8 | {"weight_scale_inv": ("F32", (2, 1, 2, 2))}, ""),
    ("fp8-block", FP8 | {"weight_scale_inv": ("F32", (2,))}, ""),
    ("fp8-block", FP8 | {"weight": ("U8", (256, 192))}, ""),
    ("mxfp8", MXFP8 | {"weight_scale": ("U8", (31, 2))}, ""),
    ("mxfp4", MXFP4 | {"scales": ("I8", (32, 2))}, ""),
    ("mxfp4", MXFP4 | {"blocks": ("U8", (32, 32))}, ""),
    ("mxfp4", MXFP4 | {"scales": ("U8", (64,))}, ""),
    ("nvfp4", {part: NVFP4[part] for part in ("weight", "weight_scale")}, ""),
    ("marlin-v1", MARLIN | {"s": ("F16", (2, 63))}, ""),
    ("w4afp8", W4AFP8 | {"weight": ("I8", (1, 128)), "weight_scale_inv": ("BF16", (1, 2))}, ""),
    ("w4afp8", W4AFP8 | {"weight_scale_inv": ("BF16", (31, 2))}, ""),
    ("bitsandbytes-4bit", BNB | {"weight": ("I8", (32, 32))}, ""),
    ("bitsandbytes-4bit", {part: BNB[part] for part in ("weight", "weight.absmax", "weight.quant_map")}, ""),
]


@pytest.mark.parametrize(("form", "headers", "variant"), OTHERS)
def test_headers_of_another_format(form: str, headers: Headers, variant: str) -> None:
    assert get_format(form).matches(signatures(headers), Declared("any", variant=variant)) is False


def test_one_block_is_no_scale_per_tensor() -> None:
    headers = signatures({"weight": ("F8_E4M3", (128, 128)), "weight_scale": ("F32", (1, 1))})
    assert get_format("fp8").matches(headers, None)
    assert get_format("fp8").matches(headers, Declared("any", strategy="tensor"))
    assert not get_format("fp8").matches(headers, Declared("any", strategy="block"))


def test_matrices_by_name() -> None:
    parts = signatures({"a": ("I32", (1, 2)), "b": ("F16", (3, 4)), "c": ("F16", (3,))})
    assert matrices(parts, a=("I32",), b=()) == (parts["a"], parts["b"])
    assert matrices(parts, a=("I16",), b=()) is None
    assert matrices(parts, a=(), c=()) is None
    assert matrices(parts, a=(), d=()) is None


def test_formats_that_do_not_exist() -> None:
    with pytest.raises(MoeqError, match="no format is called 'awk'") as caught:
        get_format("awk")
    assert (caught.value.code, caught.value.hint) == ("usage.unknown-format", f"known formats: {', '.join(FORMATS)}")


@pytest.mark.parametrize(
    ("count", "bits", "fill"),
    [(8, 4, True), (16, 2, True), (4, 8, True), (7, 4, False), (32, 3, False)],
)
def test_codes_that_fill_words(count: int, bits: int, fill: bool) -> None:
    assert codes_fill_words(count, bits) is fill

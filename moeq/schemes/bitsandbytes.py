"""bitsandbytes: 4-bit codebooks (NF4, FP4) with one scale per block, and LLM.int8.

4 bits, per projection: `weight` U8, two codes per byte, the first in the high half; `weight.absmax` F32, one scale per
block of `blocksize` codes, counted through all rows; `weight.quant_map` F32 `[16]`; a JSON text of sizes in
`weight.quant_state.bitsandbytes__nf4` (or `__fp4`). With double quantisation, `weight.absmax` is U8. Such a scale is
`weight.nested_quant_map[absmax]` times one `weight.nested_absmax` per 256 scales, plus an offset. Files store `weight`
as `[N K / 2, 1]`; `moeq.model.missing_sizes` gives it the shape `[N, K / 2]`.

8 bits: `weight` I8 `[N, K]` and `SCB` F32 `[N]`, the largest magnitude of a row. Checked against bitsandbytes 0.50.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.base import Scheme
from moeq.schemes.declared import Declaration, Declared, Fields, declared_unless
from moeq.schemes.format import Context, Described, Encoding, PartRoles, Parts, ReadOnlyFormat, float_matrix

if TYPE_CHECKING:
    from torch import Tensor

METHOD = "bitsandbytes"

#: Parts that hold the sizes of a 4-bit matrix.
STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")

#: Longest text of sizes, in bytes; real ones have about 120.
MAX_STATE_BYTES = 4096

_DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class FourBitSizes:
    """Sizes of a 4-bit matrix."""

    rows: int
    columns: int
    block: int  #: codes per scale
    dtype: str  #: dtype of the matrix before quantisation, to which the library rounds dequantised numbers
    nested_block: int  #: scales per second-level scale; 0 without them
    offset: float  #: number that is added to a dequantised scale


def read_state(raw: bytes, where: str) -> FourBitSizes:
    """Parse the text of sizes. Raises MoeqError `source.bad-data` for a text that the library does not write."""
    try:
        table = json.loads(raw)
        rows, columns = table["shape"]
        block, dtype = table["blocksize"], table["dtype"]
        nested, offset = table.get("nested_blocksize", 0), table.get("nested_offset", 0.0)
        whole = all(type(size) is int and 0 < size < 1 << 24 for size in (rows, columns, block))
        fits = whole and type(nested) is int and 0 <= nested < 1 << 24 and dtype in _DTYPES
        if fits and isinstance(offset, (int, float)) and abs(offset) < 1e30 and columns % 2 == 0:
            return FourBitSizes(rows, columns, block, dtype, nested, float(offset))
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    shown = ascii(raw[:120])
    raise MoeqError("source.bad-data", f"{where}: {shown} are no sizes of a bitsandbytes matrix with an even K")


def read_config(table: Mapping[str, Any], origin: str) -> Declaration:
    """Read transformers' `BitsAndBytesConfig`; the tensors tell which modules are quantised."""
    fields = Fields(table, origin)
    variant = "nf4" if fields.flag("load_in_4bit", "_load_in_4bit") else "int8"
    declared = Declared(METHOD, variant=fields.text("bnb_4bit_quant_type") or variant, rule=origin)
    return declared_unless(fields, fields.names("llm_int8_skip_modules"), declared)


class BitsAndBytes4(ReadOnlyFormat):
    """NF4 or FP4: codes of a codebook, which moeq reads as floats because no engine's integer format can hold them."""

    id = "bitsandbytes-4bit"
    title = "bitsandbytes NF4 and FP4: codes of a codebook, one scale per block"
    parts: ClassVar[PartRoles] = {
        "weight": "codes",
        "weight.absmax": "scale",
        "weight.quant_map": "other",
        "weight.nested_absmax": "scale2",
        "weight.nested_quant_map": "other",
        **dict.fromkeys(STATES, "other"),
        "bias": "bias",
    }
    refusal = "no GPU layout holds a codebook: `moeq transcode --to bf16` (or fp8) writes a checkpoint of its numbers"

    def title_of(self, scheme: Scheme) -> str:
        return f"bitsandbytes {scheme.checkpoint_format}"

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        weight = parts.get("weight")
        stated = any(state in parts for state in STATES)
        return weight is not None and weight.dtype == "U8" and len(weight.shape) == 2 and stated

    def describe(self, parts: Parts, context: Context) -> Described:
        n, octets = parts["weight"].shape
        context.expect_input_features(octets * 2)
        context.expect_shape(parts, "weight.quant_map", (16,), ("F32",))
        nested = "weight.nested_absmax" in parts
        context.expect_shape(parts, "weight.nested_quant_map", (256,), ("F32",))
        absmax = parts["weight.absmax"].dtype if "weight.absmax" in parts else None
        complete = "weight.quant_map" in parts and nested == ("weight.nested_quant_map" in parts)
        if not complete or absmax != ("U8" if nested else "F32"):
            context.refuse("weight.absmax is neither F32 nor U8 with both of its nested parts")
        spec = context.spec(parts, n, octets * 2, "f32", octets * 2, "f32")
        kind = next(state.rpartition("__")[2] for state in STATES if state in parts)
        declared = Declared(METHOD, variant=kind, rule=context.declared.rule)
        return self._described(spec, declared, Encoding("u8-packed", "high nibble first"))

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        import torch

        name = next(state for state in STATES if state in parts)
        state = read_state(bytes(parts[name][:MAX_STATE_BYTES].tolist()), name)
        numbers = spec.n * spec.k
        absmax = parts["weight.absmax"].flatten()
        if (state.rows, state.columns) != (spec.n, spec.k) or absmax.numel() != -(-numbers // state.block):
            found = f"{absmax.numel():,} scales of blocks of {state.block} for {state.rows} x {state.columns} numbers"
            raise MoeqError("source.bad-data", f"{found}, the weight has {spec.n} x {spec.k}")
        if "weight.nested_absmax" in parts:
            second = parts["weight.nested_absmax"].flatten()
            if not state.nested_block or second.numel() != -(-absmax.numel() // state.nested_block):
                raise MoeqError("source.bad-data", f"{second.numel():,} nested scales for {absmax.numel():,} scales")
            spread = second.repeat_interleave(state.nested_block)[: absmax.numel()]
            absmax = parts["weight.nested_quant_map"][absmax.int()] * spread + state.offset
        octets = parts["weight"]
        codes = torch.stack([octets >> 4, octets & 15], dim=-1).flatten()
        values = parts["weight.quant_map"][codes.int()]
        values *= absmax.repeat_interleave(state.block)[:numbers]
        return float_matrix(spec, values.to(getattr(torch, state.dtype)).float().reshape(spec.n, spec.k), parts)


class BitsAndBytes8(ReadOnlyFormat):
    """LLM.int8: one byte per weight, and per row the largest magnitude, which code 127 stands for."""

    id = "bitsandbytes-8bit"
    title = "bitsandbytes LLM.int8: one signed byte per weight, one scale per row"
    parts: ClassVar[PartRoles] = {"weight": "codes", "SCB": "scale", "weight_format": "other", "bias": "bias"}
    refusal = "engines read its numbers in another spelling: `moeq transcode --to compressed-tensors` is exact"

    def title_of(self, scheme: Scheme) -> str:
        return "bitsandbytes int8"

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        weight = parts.get("weight")
        return "SCB" in parts and weight is not None and weight.dtype == "I8" and len(weight.shape) == 2

    def describe(self, parts: Parts, context: Context) -> Described:
        n, k = parts["weight"].shape
        context.expect_input_features(k)
        context.expect_shape(parts, "SCB", (n,), ("F32",))
        spec = context.spec(parts, n, k, "int8", k, "f32")
        declared = Declared(METHOD, variant="int8", rule=context.declared.rule)
        return self._described(spec, declared, Encoding("i8", "one signed byte per code", "channel", (1, -1)))

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        import torch

        codes = parts["weight"].view(torch.uint8) ^ 0x80
        return QuantizedMatrix(spec, codes, (parts["SCB"] / 127).reshape(-1, 1), bias=parts.get("bias"))

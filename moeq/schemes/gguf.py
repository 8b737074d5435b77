"""GGUF: blocks of llama.cpp's types, rows of whole blocks, as `moeq.gguf` presents them.

A projection is one tensor U8 `[N, bytes of a row]` whose part names the type (`gguf_q4_0`). MXFP4, NVFP4, Q4_0, Q5_0,
Q8_0 and IQ4_NL are read as codes with scales; Q5_0 and IQ4_NL become int8, which holds their numbers exactly. Every
other type is read as the floats that llama.cpp computes. Checked against `gguf.quants` 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.base import ScaleKey, Scheme
from moeq.schemes.declared import Declaration, Declared
from moeq.schemes.dequantize import dequantize
from moeq.schemes.format import Context, Described, Encoding, PartRoles, Parts, PartSig, ReadOnlyFormat
from moeq.schemes.gguf_blocks import AS_FLOAT32, CODED, FLOATS, WIDENED, CodedType, float_values, mxfp4_blocks

if TYPE_CHECKING:
    from torch import Tensor

METHOD = "gguf"

_PREFIX = "gguf_"


def part_of(kind: str) -> str:
    """Return the part that holds blocks of a type."""
    return _PREFIX + kind


def dequantized(kind: str, rows: Tensor) -> Tensor:
    """Return rows of blocks, uint8 `[N, bytes of a row]`, as float32 `[N, K]`. Raises MoeqError `source.bad-data`."""
    form, parts = Gguf(), {part_of(kind): rows}
    signatures = {part: PartSig("U8", tuple(tensor.shape)) for part, tensor in parts.items()}
    described = form.describe(signatures, Context(kind, "down", Declared(METHOD)))
    return dequantize(form.unpack(parts, described.spec, described.scheme))


def _coded(kind: str) -> CodedType | None:
    """Return the description of a type that is read as codes with scales; None for types that are read as floats."""
    return CODED.get(kind) or WIDENED.get(kind)


def read_config(table: Mapping[str, Any], origin: str) -> Declaration:
    """Read the config that `moeq.gguf` makes for a file; its `refusal` says why the file cannot be rewritten.

    A config without `experts` belongs to another checkpoint that names this method, which moeq does not read.
    """
    declared = Declared(METHOD, rule=origin)
    refusal = table.get("refusal") if "experts" in table else "quantised with gguf (GGUF weights)"
    return Declaration(METHOD, origin, declared, lambda module: declared, refusal=refusal, raw=table)


class Gguf(ReadOnlyFormat):
    """Blocks of one of llama.cpp's types."""

    id = "gguf"
    title = "GGUF: blocks of llama.cpp's types"
    parts: ClassVar[PartRoles] = {
        **{part_of(kind): "codes" for kind in (*CODED, *FLOATS, *WIDENED, *AS_FLOAT32)},
        "bias": "bias",
    }
    refusal = "GGUF has blocks that no GPU layout holds: `moeq transcode` writes a checkpoint that can be converted"

    def title_of(self, scheme: Scheme) -> str:
        return f"gguf {scheme.checkpoint_format}"

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        return any(part in self.parts and part != "bias" for part in parts) and parts.keys() <= self.parts.keys()

    def describe(self, parts: Parts, context: Context) -> Described:
        part = self.name_of("codes", parts)
        kind = part.removeprefix(_PREFIX)
        n, octets = parts[part].shape
        coded, stored = _coded(kind), AS_FLOAT32.get(kind, kind)
        known = coded or _coded(stored)
        block, width = (known.block, known.octets) if known else FLOATS[stored]
        k = octets // width * block
        context.expect_input_features(k)
        if coded:
            spec = context.spec(parts, n, k, coded.element, coded.group, coded.scale)
        else:
            element = kind if kind in ("f16", "bf16") else "f32"
            spec = context.spec(parts, n, k, element, k, "f32")
        scale2 = ScaleKey("f32", "tensor", (-1, -1)) if kind == "nvfp4" else None
        encoding = Encoding("u8-packed", f"blocks of {block}", group_shape=(1, spec.group_size), scale2=scale2)
        declared = Declared(METHOD, variant=kind, rule=context.declared.rule)
        return self._described(spec, declared, encoding)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        import torch

        rows, bias = parts[part_of(scheme.checkpoint_format)], parts.get("bias")
        kind = scheme.checkpoint_format
        coded = _coded(kind)
        if coded is None:
            values = dequantized(AS_FLOAT32[kind], rows) if kind in AS_FLOAT32 else float_values(kind, rows)
            return QuantizedMatrix(spec, values, torch.ones(spec.n, 1), bias=bias)
        codes, scales = coded.unpack(rows.reshape(-1, coded.octets))
        second = torch.ones(spec.n) if scheme.weight.scale2 else None
        shaped = scales.reshape(spec.n, spec.num_groups)
        return QuantizedMatrix(spec, codes.reshape(spec.n, spec.k), shaped, global_scale=second, bias=bias)

    def repack(self, matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
        return mxfp4_blocks(matrix.codes, matrix.scales) if part == "gguf_mxfp4" else None

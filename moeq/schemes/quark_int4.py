"""Quark int4 and uint4: nibbles in int32 words, two's complement when signed. Described and read, not converted.

Per group the matrix is transposed: `weight` I32 `[K, N / 8]`, `weight_scale` `[G, N]`; per channel it is not:
`weight` I32 `[N, K / 8]`, `weight_scale` `[N, 1]`. `pack_method` "reorder" uses AutoAWQ's nibble order, "order" the
natural one. Checked against amd-quark 0.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.awq import NIBBLE_OF_COLUMN
from moeq.schemes.base import Scheme
from moeq.schemes.declared import Declared
from moeq.schemes.format import (
    Context,
    Described,
    PartRoles,
    Parts,
    ReadOnlyFormat,
    float_name,
    group_encoding,
    inconsistent,
    make_scheme,
    matrix_spec,
    resolve_groups,
)

if TYPE_CHECKING:
    from torch import Tensor


class QuarkInt4(ReadOnlyFormat):
    """Quark 4-bit integers."""

    id = "quark-int4"
    title = "Quark int4: int32 words, two's complement nibbles"
    parts: ClassVar[PartRoles] = {
        "weight": "codes",
        "weight_scale": "scale",
        "weight_zero_point": "zeros",
        "bias": "bias",
    }
    refusal = "Quark's int4 export has never been seen on a served MoE checkpoint, so its reading has not been proven"

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        weight, scale = parts.get("weight"), parts.get("weight_scale")
        return bool(weight and scale and weight.dtype == "I32" and len(weight.shape) == len(scale.shape) == 2)

    def out_features(self, parts: Parts) -> int:
        return parts["weight"].shape[0] if _per_channel(parts) else parts["weight_scale"].shape[1]

    def describe(self, parts: Parts, context: Context) -> Described:
        rows, words = parts["weight"].shape
        n, k = (rows, words * 8) if _per_channel(parts) else (words * 8, rows)
        groups = 1 if _per_channel(parts) else parts["weight_scale"].shape[0]
        if context.declared.bits not in (None, 4):
            inconsistent(context.where, f"int32 words of nibbles, the config declares {context.declared.bits} bits")
        symmetric = "weight_zero_point" not in parts
        spec = matrix_spec(
            parts,
            context,
            n,
            k,
            element="int4",
            group_size=k if _per_channel(parts) else resolve_groups(context, k, groups),
            scale_dtype=float_name(parts, "weight_scale", context),
            symmetric=symmetric,
        )
        packing = "nibbles along K" if _per_channel(parts) else "nibbles along N, transposed"
        encoding = group_encoding(context, spec, "i32-packed", packing, "none" if symmetric else "stored")
        return Described(make_scheme(self.id, spec, context.declared, encoding), spec)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        reorder = scheme.checkpoint_format != "order"
        rows = _nibbles(parts["weight"], reorder)
        scales = parts["weight_scale"]
        zeros = _nibbles(parts["weight_zero_point"], reorder) if "weight_zero_point" in parts else None
        if rows.shape != (spec.n, spec.k):
            rows, scales = rows.t(), scales.t()
            zeros = None if zeros is None else zeros.t().contiguous()
        signed = 0 if zeros is not None else 8
        return QuantizedMatrix(spec, rows.contiguous() ^ signed, scales.contiguous(), zeros, bias=parts.get("bias"))


def _per_channel(parts: Parts) -> bool:
    return parts["weight_scale"].shape in ((parts["weight"].shape[0], 1), (parts["weight"].shape[0],))


def _nibbles(words: Tensor, reorder: bool) -> Tensor:
    from moeq.schemes.bits import stream_codes

    codes = stream_codes(words, 4, words.shape[1] * 8)
    if not reorder:
        return codes
    return codes.reshape(codes.shape[0], -1, 8)[..., list(NIBBLE_OF_COLUMN)].reshape(codes.shape)


FORMAT = QuarkInt4()

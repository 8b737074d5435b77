"""compressed-tensors `pack-quantized`: codes packed along `K` in int32 words, one row per output feature.

Tensors of one projection: `weight_packed` I32 `[N, P]`, `weight_scale` `[N, G]` (`[N, 1]` per channel),
`weight_shape` I64 `[2]`, optional `weight_zero_point` (I32 `[ceil(N * b / 32), G]`, packed along `N`; up to 0.6 I8
`[N, G]`), `weight_g_idx` I32 `[K]` (up to 0.18) and `bias` `[N]`. Codes are offset binary: signed value plus
`2**(b-1)`.

Up to 0.17 a word holds `floor(32 / b)` whole codes, from 0.18 on rows are dense bit streams; the two differ for
3, 5, 6 and 7 bits and are told apart by `P`. Checked against compressed-tensors 0.15, 0.17, 0.18, 0.19 and 0.20.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.base import Scheme
from moeq.schemes.bits import lane_codes, pack_lanes, pack_stream, stream_codes
from moeq.schemes.declared import Declared
from moeq.schemes.format import (
    INTEGERS,
    Context,
    Described,
    FastView,
    Format,
    PartRoles,
    Parts,
    PartSig,
    codes_fill_words,
    matrices,
)
from moeq.schemes.gptq import group_index, read_group_index

if TYPE_CHECKING:
    from torch import Tensor


class CtPack(Format):
    """compressed-tensors packed integers."""

    id = "ct-pack"
    title = "compressed-tensors pack-quantized: int32 words along K"
    parts: ClassVar[PartRoles] = {
        "weight_packed": "codes",
        "weight_scale": "scale",
        "weight_zero_point": "zeros",
        "weight_g_idx": "index",
        "weight_shape": "shape",
        "bias": "bias",
    }
    fast_view = FastView()
    bijective = ("codes", "scale")

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        found = matrices(parts, weight_packed=("I32",), weight_scale=())
        return found is not None and found[0].shape[0] == found[1].shape[0]

    def describe(self, parts: Parts, context: Context) -> Described:
        n, words = parts["weight_packed"].shape
        groups = parts["weight_scale"].shape[1]
        declared = context.declared
        k, bits = _input_features(parts, context, words)
        _check_zero_shape(parts, n, bits, groups, context)
        context.expect_shape(parts, "weight_g_idx", (k,), INTEGERS)
        if "weight_shape" in parts:
            context.expect_shape(parts, "weight_shape", parts["weight_shape"].shape, INTEGERS)
        size = context.resolve_groups(k, groups)
        scale_dtype = context.float_name(parts, "weight_scale")
        symmetric = "weight_zero_point" not in parts
        act_order = declared.act_order and groups > 1 and "weight_g_idx" in parts
        spec = context.spec(parts, n, k, f"int{bits}", size, scale_dtype, symmetric=symmetric, act_order=act_order)
        encoding = context.group_encoding(spec, "i32-packed", "offset binary along K, low bits first")
        return self._described(spec, declared, encoding)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        _check_stored_shape(parts.get("weight_shape"), spec)
        packed = parts["weight_packed"]
        index = read_group_index(parts.get("weight_g_idx"), spec)
        return QuantizedMatrix(
            spec=replace(spec, act_order=index is not None),
            codes=_row_codes(packed, spec.bits, spec.k, scheme.writer),
            scales=parts["weight_scale"].contiguous(),
            zeros=None if spec.symmetric else _zeros(parts["weight_zero_point"], spec, scheme.writer),
            group_index=index,
            bias=parts.get("bias"),
        )

    def repack(self, matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
        import torch

        spec = matrix.spec
        if part == "weight_packed":
            return _row_words(matrix.codes, spec.bits, sig.shape[1])
        if part == "weight_scale":
            return matrix.scales
        if part == "weight_zero_point" and matrix.zeros is not None:
            if sig.dtype == "I32":
                columns = matrix.zeros.t().to(torch.uint8).contiguous()
                return _row_words(columns, spec.bits, sig.shape[0]).t().contiguous()
            signed = matrix.zeros.to(torch.int16) - spec.symmetric_zero
            return signed.to(torch.uint8 if sig.dtype == "U8" else torch.int8)
        if part == "weight_shape" and sig.dtype in INTEGERS and sig.shape == (2,):
            return torch.tensor([spec.n, spec.k], dtype=torch.int64 if sig.dtype == "I64" else torch.int32)
        return group_index(matrix) if part == "weight_g_idx" else None

    def is_bijective(self, part: str, spec: MatrixSpec) -> bool:
        return super().is_bijective(part, spec) and (part != "weight_packed" or codes_fill_words(spec.k, spec.bits))


def _input_features(parts: Parts, context: Context, words: int) -> tuple[int, int]:
    """Return `(K, bits)` from the sibling projection, the declared bits and the number of words."""
    declared = context.declared.bits
    k = context.k_hint or (words * 32 // declared if declared else 0)
    if "weight_g_idx" in parts:
        k = parts["weight_g_idx"].shape[0]
    bits = declared or (words * 32 // k if k else 0)
    if bits not in range(2, 9) or words not in (_dense(k, bits), _lanes(k, bits)):
        implied = f"{words * 32 / k:g}" if k else "?"
        detail = f"{words} words hold K={k} codes of {implied} bits, the config declares {declared}"
        context.refuse(detail, "the config does not describe this tensor")
    return k, bits


def _dense(count: int, bits: int) -> int:
    """Return the int32 words of `count` codes in a dense bit stream."""
    return -(-count * bits // 32)


def _lanes(count: int, bits: int) -> int:
    """Return the int32 words of `count` codes with whole codes in each word."""
    return -(-count // (32 // bits))


def _check_zero_shape(parts: Parts, n: int, bits: int, groups: int, context: Context) -> None:
    zero = parts.get("weight_zero_point")
    if zero is None:
        return
    packed = zero.dtype == "I32" and zero.shape in ((_dense(n, bits), groups), (_lanes(n, bits), groups))
    if not packed and not (zero.dtype in ("I8", "U8") and zero.shape == (n, groups)):
        expected = f"I32 [{_dense(n, bits)}, {groups}]"
        context.refuse(f"weight_zero_point is {zero.dtype} {list(zero.shape)}, expected {expected}")


#: Last version of compressed-tensors, major and minor, that stored whole codes in each word.
_LAST_LANES = (0, 17)


def _row_codes(words: Tensor, bits: int, count: int, writer: str | None) -> Tensor:
    width = words.shape[-1]
    dense = width == _dense(count, bits)
    if dense and width == _lanes(count, bits) and 32 % bits:
        dense = _version(writer) > _LAST_LANES
    return stream_codes(words, bits, count) if dense else lane_codes(words, bits, count)


def _row_words(codes: Tensor, bits: int, words: int) -> Tensor:
    """Pack rows, the inverse of `_row_codes`: as a dense stream if that fills `words`, else whole codes per word."""
    dense = words == _dense(codes.shape[1], bits)
    return pack_stream(codes, bits, words) if dense else pack_lanes(codes, bits, words)


def _version(writer: str | None) -> tuple[int, ...]:
    """Return major and minor version of compressed-tensors from the config, or a number above all if it has none."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version((writer or "").rpartition(" ")[2]).release[:2]
    except InvalidVersion:
        return (1 << 30,)


def _zeros(stored: Tensor, spec: MatrixSpec, writer: str | None) -> Tensor:
    """Return unsigned zero points `[N, G]` from packed ones (offset binary along `N`) or from signed bytes."""
    import torch

    if stored.dtype == torch.int32:
        return _row_codes(stored.t().contiguous(), spec.bits, spec.n, writer).t().contiguous()
    return (stored.to(torch.int16) + spec.symmetric_zero).contiguous()


def _check_stored_shape(shape: Tensor | None, spec: MatrixSpec) -> None:
    if shape is None:
        return
    stored = [int(size) for size in shape.flatten()][-2:]
    if stored != [spec.n, spec.k]:
        detail = f"weight_shape says {stored}, the packed tensor holds {[spec.n, spec.k]}"
        raise MoeqError("source.inconsistent", detail)

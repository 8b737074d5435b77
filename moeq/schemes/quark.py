"""AMD Quark 0.13: its config (one global tensor spec, exceptions per layer pattern, exclusions), and its int4 format.

moeq describes and reads int4 and uint4, but does not convert them. Codes are nibbles in int32 words; int4 is in two's
complement. With scales per group the matrix is transposed: `weight` I32 `[K, N / 8]`, `weight_scale` `[G, N]`. With
scales per channel it is not: `weight` I32 `[N, K / 8]`, `weight_scale` `[N, 1]`. `pack_method` "reorder" uses AutoAWQ's
nibble order, "order" the natural one.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

from moeq.foreign import plain
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.awq import column_codes
from moeq.schemes.base import QuantKey, ScaleKey, Scheme
from moeq.schemes.bits import stream_codes
from moeq.schemes.declared import Declaration, Declared, Fields, group_size
from moeq.schemes.format import Context, Described, PartRoles, Parts, ReadOnlyFormat, matrices
from moeq.schemes.patterns import Patterns

if TYPE_CHECKING:
    from torch import Tensor


_BITS = {"fp4": 4, "int4": 4, "uint4": 4, "int8": 8, "uint8": 8, "fp8_e4m3": 8, "int3": 3, "int2": 2, "mx": None}
_ACTIVATIONS = {"fp8_e4m3": "e4m3", "fp4": "e2m1", "int8": "int8"}


def read_config(table: Mapping[str, Any], origin: str) -> Declaration:
    """Read a Quark `quantization_config`."""
    fields = Fields(table, origin)
    export = Fields(fields.table_of("export"), f"{origin}: export")
    default = _declared(fields.table_of("global_quant_config"), f"{origin}: global_quant_config", fields, export)
    layers = {
        pattern: _declared(value, f"{origin}: layer_quant_config[{ascii(pattern)[:60]}]", fields, export)
        for pattern, value in fields.table_of("layer_quant_config").items()
        if isinstance(value, dict)
    }
    patterns = Patterns(f"{origin}: exclude")
    entries = fields.names("exclude")
    regexes = [patterns.compile(entry[3:]) for entry in entries if entry.startswith("re:")]
    wildcards = [entry for entry in entries if not entry.startswith("re:")]

    def resolve(module: str) -> Declared | None:
        if any(fnmatchcase(module, entry) for entry in wildcards) or any(
            patterns.matches(entry, module) for entry in regexes
        ):
            return None
        return next((declared for entry, declared in layers.items() if fnmatchcase(module, entry)), default)

    return Declaration(
        method="quark",
        origin=origin,
        default=default,
        resolve=resolve,
        per_expert=any("expert" in entry for entry in layers),
        refusal=None if default is not None else "its config declares no global_quant_config",
        raw=table,
    )


def _declared(config: Mapping[str, Any], where: str, fields: Fields, export: Fields) -> Declared | None:
    spec = config.get("weight")
    # Specs of two levels of scales are lists. The first entry has the element type; the headers show the second level.
    first = spec[0] if isinstance(spec, list) and spec else spec
    if not isinstance(first, dict):
        return None
    weight = Fields(first, f"{where}.weight")
    dtype = weight.text("dtype") or ""
    channel = weight.text("qscheme") == "per_channel"
    return Declared(
        method="quark",
        variant=export.text("pack_method") or "reorder",
        bits=_BITS.get(dtype),
        group_size=-1 if channel else group_size(weight, "group_size"),
        symmetric=weight.flag("symmetric"),
        strategy=weight.text("qscheme"),
        activation=_activation(config.get("input_tensors")),
        writer=plain(f"quark {fields.table.get('version') or ''}".strip()),
        rule=where,
    )


def _activation(spec: Any) -> QuantKey | None:
    first = spec[0] if isinstance(spec, list) and spec else spec
    dtype = _ACTIVATIONS.get(str(first.get("dtype"))) if isinstance(first, dict) else None
    if dtype is None:
        return None
    scale_dtype = "e8m0" if dtype == "e2m1" else "f32"
    if first.get("qscheme") == "per_group":
        return QuantKey(dtype, "runtime", ScaleKey(scale_dtype, "group", (1, 32)))
    return QuantKey(dtype, "runtime", ScaleKey(scale_dtype, "tensor", (-1, -1)))


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
        return matrices(parts, weight=("I32",), weight_scale=()) is not None

    def out_features(self, parts: Parts) -> int:
        return parts["weight"].shape[0] if _per_channel(parts) else parts["weight_scale"].shape[1]

    def describe(self, parts: Parts, context: Context) -> Described:
        rows, words = parts["weight"].shape
        n, k = (rows, words * 8) if _per_channel(parts) else (words * 8, rows)
        groups = 1 if _per_channel(parts) else parts["weight_scale"].shape[0]
        if context.declared.bits not in (None, 4):
            context.refuse(f"weight is int32 words of nibbles, but the config declares {context.declared.bits} bits")
        symmetric = "weight_zero_point" not in parts
        size = k if _per_channel(parts) else context.resolve_groups(k, groups)
        scale_dtype = context.float_name(parts, "weight_scale")
        spec = context.spec(parts, n, k, "int4", size, scale_dtype, symmetric=symmetric)
        packing = "nibbles along K" if _per_channel(parts) else "nibbles along N, transposed"
        return self._described(spec, context.declared, context.group_encoding(spec, "i32-packed", packing))

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        unpack_words = stream_codes if scheme.checkpoint_format == "order" else column_codes
        words, scales, zeros = parts["weight"], parts["weight_scale"], parts.get("weight_zero_point")
        codes = unpack_words(words, 4, words.shape[1] * 8)
        zeros = None if zeros is None else unpack_words(zeros, 4, zeros.shape[1] * 8)
        if not _per_channel(parts):
            codes, scales = codes.t(), scales.t()
            zeros = None if zeros is None else zeros.t().contiguous()
        sign_bit = 0 if zeros is not None else 8  # codes without zero points are in two's complement
        return QuantizedMatrix(spec, codes.contiguous() ^ sign_bit, scales.contiguous(), zeros, bias=parts.get("bias"))


def _per_channel(parts: Parts | Mapping[str, Tensor]) -> bool:
    return parts["weight_scale"].shape == (parts["weight"].shape[0], 1)

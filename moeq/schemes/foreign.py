"""Formats that are recognised by their tensors and named, but not read.

E4M3FNUZ is one of them. gfx942 computes in it, but engines read E4M3 files on gfx942, too, and convert them at load
(see `aiter.py` among the layouts). No writer of served checkpoints is known to store it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.base import QuantKey, ScaleKey, Scheme
from moeq.schemes.declared import Declared
from moeq.schemes.format import Context, Described, PartRoles, Parts, ReadOnlyFormat

if TYPE_CHECKING:
    from torch import Tensor

#: Telltale part -> name of the format. A trailing dot matches any part that starts so.
_SIGNS: tuple[tuple[str, str], ...] = (
    ("weight.quant_state.", "bitsandbytes 4-bit"),
    ("weight.absmax", "bitsandbytes 4-bit"),
    ("SCB", "bitsandbytes 8-bit"),
    ("W_q", "HQQ"),
    ("weight_qdata", "torchao"),
    ("_weight_qdata", "torchao"),
    ("biases", "MLX"),
    ("weight_offset", "Ascend msModelSlim"),
    ("deq_scale", "Ascend msModelSlim"),
    ("trellis", "EXL3"),
    ("q_weight", "EXL2"),
    ("codebooks", "AQLM"),
    ("centroids", "VPTQ"),
    ("bitmask", "compressed-tensors sparse"),
    ("meta", "compressed-tensors marlin-24"),
)

#: Telltale dtype of `weight` -> name of the format.
_DTYPES: dict[str, str] = {
    "F8_E4M3FNUZ": "FP8 in the encoding of gfx942 (E4M3FNUZ: another bias, no negative zero)",
    "F8_E5M2FNUZ": "FP8 in the encoding of gfx942 (E5M2FNUZ)",
    "F8_E5M2": "FP8 with two bits of mantissa (E5M2)",
}


def foreign_name(parts: Parts) -> str | None:
    """Return the name of the foreign format whose signs the parts have, or None."""
    weight = parts.get("weight")
    if weight is not None and weight.dtype in _DTYPES:
        return _DTYPES[weight.dtype]
    for sign, name in _SIGNS:
        if sign in parts or (sign.endswith(".") and any(part.startswith(sign) for part in parts)):
            return name
    return None


class Foreign(ReadOnlyFormat):
    """Any format that is recognised but not read."""

    id = "foreign"
    title = "a format that moeq recognises but does not read"
    parts: ClassVar[PartRoles] = {}
    refusal = "moeq does not read this format"

    def title_of(self, scheme: Scheme) -> str:
        return scheme.packing

    def refusal_of(self, scheme: Scheme) -> str | None:
        return f"its experts are {scheme.packing}, which moeq does not read"

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        return foreign_name(parts) is not None

    def out_features(self, parts: Parts) -> int:
        return 0

    def describe(self, parts: Parts, context: Context) -> Described:
        name = foreign_name(parts) or "unknown"
        spec = MatrixSpec(context.role, 0, 0, "int8", 1, "f32", gated=context.gated)
        key = QuantKey("int8", name, ScaleKey("f32", "tensor", (-1, -1)))
        return Described(Scheme(self.id, key, packing=name, quant_method=context.declared.method), spec)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        raise MoeqError("source.unsupported-format", f"these weights are {scheme.packing}, which moeq does not read")

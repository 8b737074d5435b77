"""Plain floating-point expert weights: described and read, never converted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.base import QuantKey, ScaleKey, Scheme
from moeq.schemes.declared import Declared
from moeq.schemes.format import FLOAT_NAMES, Context, Described, PartRoles, Parts, ReadOnlyFormat

if TYPE_CHECKING:
    from torch import Tensor

#: Dtypes of weights that are not quantised.
PLAIN_DTYPES = ("BF16", "F16", "F32")


class Unquantized(ReadOnlyFormat):
    """One float tensor `[N, K]` per projection."""

    id = "unquantized"
    title = "not quantised"
    parts: ClassVar[PartRoles] = {"weight": "codes", "bias": "bias"}
    refusal = "its experts are not quantised"

    def title_of(self, scheme: Scheme) -> str:
        return f"{scheme.weight.dtype}, not quantised"

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        weight = parts.get("weight")
        if weight is None or weight.dtype not in PLAIN_DTYPES or len(weight.shape) != 2:
            return False
        return not parts.keys() - {"weight", "bias"}

    def describe(self, parts: Parts, context: Context) -> Described:
        weight = parts["weight"]
        n, k = weight.shape
        element = FLOAT_NAMES[weight.dtype]
        spec = context.spec(parts, n, k, element, k, "f32")
        key = QuantKey(element, element, ScaleKey("f32", "tensor", (-1, -1)))
        return Described(Scheme(self.id, key, has_bias=spec.bias_dtype is not None), spec)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        raise MoeqError("source.not-quantized", "these experts are not quantised: they have no codes")

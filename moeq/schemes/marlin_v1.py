"""Marlin v1 as a checkpoint format (AutoGPTQ `is_marlin_format`, AutoAWQ `marlin`): symmetric int4 in tiles.

Tensors: `qweight` (or `B`) I32 `[K / 16, 2 * N]`, `scales` (or `s`) F16 `[G, N]`, group size -1 or 128. moeq reads the
format and does not convert it, since it is one kernel's layout already. Checked against AutoAWQ 0.2.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.base import Scheme
from moeq.schemes.bits import stream_codes
from moeq.schemes.declared import Declared
from moeq.schemes.format import Context, Described, PartRoles, Parts, ReadOnlyFormat, matrices

if TYPE_CHECKING:
    from torch import Tensor


class MarlinV1(ReadOnlyFormat):
    """Serialised Marlin v1 weights."""

    id = "marlin-v1"
    title = "Marlin v1: int4 in 16 x 16 tiles"
    rows = ("scale", 1)
    parts: ClassVar[PartRoles] = {"qweight": "codes", "B": "codes", "scales": "scale", "s": "scale", "bias": "bias"}
    refusal = "serialised Marlin v1 is already one kernel's layout; start from the GPTQ checkpoint it was made from"

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        found = matrices(parts, **{self.name_of("codes", parts): ("I32",), self.name_of("scale", parts): ()})
        return found is not None and found[0].shape[1] == 2 * found[1].shape[1]

    def describe(self, parts: Parts, context: Context) -> Described:
        scale = self.name_of("scale", parts)
        k, (groups, n) = parts[self.name_of("codes", parts)].shape[0] * 16, parts[scale].shape
        if n % 64:
            context.refuse(f"N={n} is not a multiple of 64, which Marlin needs")
        size = context.resolve_groups(k, groups)
        spec = context.spec(parts, n, k, "int4", size, context.float_name(parts, scale))
        encoding = context.group_encoding(spec, "i32-packed", "16 x 16 tiles permuted for tensor cores")
        return self._described(spec, context.declared, encoding)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        import torch

        nibbles = stream_codes(parts[self.name_of("codes", parts)], 4, spec.n * 16).reshape(spec.k // 16, -1, 1024)
        flat = torch.empty_like(nibbles)
        flat[..., torch.tensor(_weight_order())] = nibbles
        # A strip of 16 rows is a list of 16 x 16 tiles, row-major inside a tile.
        codes = flat.reshape(spec.k // 16, spec.n // 16, 16, 16).permute(0, 2, 1, 3).reshape(spec.k, spec.n)
        stored = parts[self.name_of("scale", parts)]
        order = torch.tensor(_scale_order(grouped=spec.num_groups > 1))
        chunks = stored.reshape(stored.shape[0], -1, len(order))
        scales = torch.empty_like(chunks)
        scales[..., order] = chunks
        return QuantizedMatrix(
            spec, codes.t().contiguous(), scales.reshape(stored.shape).t().contiguous(), bias=parts.get("bias")
        )


def _weight_order() -> list[int]:
    """Return the place of every stored code: code `i` of a run of 1024 is entry `order[i]` of a list of four tiles."""
    order: list[int] = []
    for lane in range(32):
        first = [
            16 * row + lane // 4 + 8 * block
            for block in (0, 1)
            for row in (2 * (lane % 4), 2 * (lane % 4) + 1, 2 * (lane % 4 + 4), 2 * (lane % 4 + 4) + 1)
        ]
        for tile in range(4):
            order += [entry + 256 * tile for entry in first]
    interleave = (0, 2, 4, 6, 1, 3, 5, 7)
    return [order[start + step] for start in range(0, len(order), 8) for step in interleave]


def _scale_order(*, grouped: bool) -> list[int]:
    """Return the place of every stored scale: scale `i` of a run belongs to column `order[i]` of the run."""
    if grouped:
        return [lane + 8 * step for lane in range(8) for step in range(8)]
    return [2 * lane + step for lane in range(4) for step in (0, 1, 8, 9, 16, 17, 24, 25)]

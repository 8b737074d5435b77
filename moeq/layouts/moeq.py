"""Layouts for moeq's own kernels: MXFP4, NVFP4, and integers of 2 and 3 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import PaddingRule
from moeq.layouts.bits import MOEQ_MXFP4
from moeq.layouts.layout import Layout
from moeq.layouts.marlin.maps import GROUPED, SINGLE, scale_part
from moeq.layouts.marlin.mxfp4 import MarlinMXFP4
from moeq.layouts.marlin.nvfp4 import MarlinNVFP4
from moeq.layouts.mxfp4 import bias_as, refuse_exponents_above
from moeq.layouts.parts import Part, rearrange
from moeq.layouts.readers import MOEQ
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.spelling import option

if TYPE_CHECKING:
    from torch import Tensor

#: Greatest exponent byte that the kernels decode.
MAX_EXPONENT = 188


class MoeqMXFP4(MarlinMXFP4):
    """Marlin's MXFP4 for bf16 activations, with the bits of every 32-bit word of codes in another order.

    Parts are those of `marlin-mxfp4/1`. Three of the four codes in each half of a word have sign and magnitude as far
    apart as in a bf16. One mask takes them from the word itself, from the word shifted left by three bits, and from the
    word rotated left by six. The fourth code lies in the remaining four bits of the other half, and one multiplication
    moves it under the mask. So eight codes become bf16 in eight instructions, where nibbles take thirteen
    (`moeq_kernels.hopper.w4a16.device.recipes`).

    Exponent bytes above 188 (scales above 2^61) are refused: the kernels turn them into factors without clamping them.
    """

    id = "moeq-mxfp4/1"
    title = "MXFP4 for moeq's own kernels, bf16 activations"
    readers = (MOEQ("MOEQ"),)
    arch = "SM80 and newer, gfx942, gfx950"
    source = "moeq"
    exact_scales = (0, MAX_EXPONENT)
    rearranges = True

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        found = super().parts(spec)
        return {**found, "weight": replace(found["weight"], rewrite=MOEQ_MXFP4)}

    def check_values(self, matrix: QuantizedMatrix) -> None:
        super().check_values(matrix)
        why = f"{self.id} holds exponent bytes up to {MAX_EXPONENT} (scales up to 2^{MAX_EXPONENT - 127})"
        refuse_exponents_above(
            MAX_EXPONENT, matrix, why, f"marlin-mxfp4/1 ({option('backend', 'MARLIN')}) keeps every exponent"
        )


class MoeqNVFP4(MarlinNVFP4):
    """Marlin's NVFP4 for bf16 parameters, with the bits of every word of codes in the order of `moeq-mxfp4/1`.

    Other parts are those of `marlin-nvfp4/1`.
    """

    id = "moeq-nvfp4/1"
    title = "NVFP4 for moeq's own kernels, bf16 activations"
    readers = (MOEQ("MOEQ", keeps_16_bit=True),)
    arch = "SM80 and newer, gfx942, gfx950"
    source = "moeq"

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        found = super().parts(spec)
        return {**found, "weight": replace(found["weight"], rewrite=MOEQ_MXFP4)}


#: Words of the lower two bits and of the third bit: Marlin's for 4 bits, with rows of k that are 16 apart in a nibble.
_LOWER = Arrangement("n c4 o2 r8, k t2 h2 p4 q2 -> k n r p c | q o h t")
_THIRD = Arrangement("n c4 o2 r8, k t4 h2 p4 q2 -> k n r p c | q o h t")


class MoeqWNA16(Layout):
    """2- and 3-bit integers for 16-bit activations, symmetric.

    `weight` int32 `[K / 32, 2 N]` holds the lower two bits of each code, and for int3 `weight_high` int32
    `[K / 64, 2 N]` the third one. A nibble of a word has the place that Marlin's words for 4 bits give it; it holds the
    bits of two (four) rows of k that are 16 apart. So one mask and one shift turn a word into a word of Marlin's.
    `scale` `[G, N]` and `bias` `[N]` are Marlin's. No engine has a kernel for these bytes.
    """

    id = "moeq-wna16/1"
    title = "2- and 3-bit integers for moeq's own kernels, 16-bit activations"
    readers = (MOEQ("MOEQ"),)
    source = "moeq"
    elements = ("int2", "int3")
    schemes = "int2 and int3, symmetric, groups of 32, 64 or 128 or channel-wise, with bias"
    arch = "SM80 and newer, gfx942, gfx950"
    slicing = "N by 64, K by whole groups and 64"
    padding = PaddingRule(intermediate=64, whole_groups=True)
    group_sizes = (32, 64, 128)
    n_multiple = 64
    k_multiple = 64
    single_group_differs = True

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        shape = (spec.k // 32, 2 * spec.n)
        parts = {"weight": Part("codes", _LOWER, shape, "I32", 2)}
        if spec.bits == 3:
            parts["weight_high"] = Part("codes", _THIRD, (spec.k // 64, 2 * spec.n), "I32", 1)
        parts["scale"] = scale_part(spec, SINGLE, GROUPED)
        return parts | bias_as(spec, SINGLE)

    def encode(self, name: str, matrix: QuantizedMatrix) -> Tensor:
        if name == "weight":
            return matrix.codes & 3
        return matrix.codes >> 2 if name == "weight_high" else super().encode(name, matrix)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec) -> QuantizedMatrix:
        found = super().unpack(parts, spec)
        if spec.bits == 2:
            return found
        lower, third = (
            rearrange(self.parts(spec)[name], parts[name], (spec.n, spec.k)) for name in ("weight", "weight_high")
        )
        return replace(found, codes=lower | third << 2)

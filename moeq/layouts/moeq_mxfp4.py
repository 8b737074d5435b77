"""MXFP4 for moeq's own kernels: Marlin's parts, with the bits of every 32-bit word of codes in another order.

Parts are those of `marlin-mxfp4/1`. Of the four codes in each half of a word three keep sign and magnitude as far apart
as a bf16 has them, so that the word, the word three bits to the left and the word rotated by six bits to the left show
one each under a mask. The fourth, of the other half, lies in the four bits that are left, from which one multiplication
brings it under the mask. So eight codes become bf16 in eight instructions where nibbles take thirteen
(`moeq_kernels.hopper.w4a16.device.recipes`); on an H200 layers take 0.81 to 0.97 of their time with Marlin's words.

Exponent bytes above 188 (scales above 2^61) are refused: the kernels make factors of bytes without a limit. The idea is
that of `bits.MUL_FREE`, whose fourth code takes six instructions.
"""

from __future__ import annotations

from dataclasses import replace

from moeq.errors import MoeqError
from moeq.layouts.arranged import Part
from moeq.layouts.bits import DEALT
from moeq.layouts.marlin_mxfp4 import MarlinMXFP4
from moeq.matrix import MatrixSpec, QuantizedMatrix

#: Greatest exponent byte.
GREATEST = 188


class MoeqMXFP4(MarlinMXFP4):
    """bf16 activations (see the module)."""

    id = "moeq-mxfp4/1"
    title = "MXFP4 for moeq's own kernels, bf16 activations"
    arch = "SM80 and newer, gfx942, gfx950"
    source = "moeq"
    exact_scales = (0, GREATEST)
    rearranges = True

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        found = super().parts(spec)
        return {**found, "weight": replace(found["weight"], rewrite=DEALT)}

    def check_values(self, matrix: QuantizedMatrix) -> None:
        super().check_values(matrix)
        largest = int(matrix.scales.max())
        if largest > GREATEST:
            raise MoeqError(
                "usage.scale-range",
                f"{self.id} holds exponent bytes up to {GREATEST} (scales up to 2^{GREATEST - 127}); "
                f"{matrix.spec.role} has {largest}",
                "marlin-mxfp4/1 (--backend MARLIN) keeps every exponent",
            )

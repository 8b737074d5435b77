"""MXFP4 for moeq's own kernels."""

from __future__ import annotations

from dataclasses import replace

from moeq.layouts.arranged import Part
from moeq.layouts.bits import MOEQ_MXFP4
from moeq.layouts.marlin.mxfp4 import MarlinMXFP4
from moeq.layouts.mxfp4 import refuse_exponents_above
from moeq.layouts.readers import MOEQ
from moeq.matrix import MatrixSpec, QuantizedMatrix

#: Greatest exponent byte that the kernels decode.
GREATEST = 188


class MoeqMXFP4(MarlinMXFP4):
    """Marlin's MXFP4 for bf16 activations, with the bits of every 32-bit word of codes in another order.

    Parts are those of `marlin-mxfp4/1`. Three of the four codes in each half of a word have sign and magnitude as far
    apart as in a bf16. One mask takes them from the word itself, from the word shifted left by three bits, and from the
    word rotated left by six. The fourth code lies in the remaining four bits of the other half, and one multiplication
    moves it under the mask. So eight codes become bf16 in eight instructions, where nibbles take thirteen
    (`moeq_kernels.hopper.w4a16.device.recipes`). On an H200 layers take 0.81 to 0.97 of their time with Marlin's words.

    Exponent bytes above 188 (scales above 2^61) are refused, since the kernels turn exponent bytes into factors without
    clamping them. The idea is that of `bits.MUL_FREE`, whose fourth code takes six instructions.
    """

    id = "moeq-mxfp4/1"
    title = "MXFP4 for moeq's own kernels, bf16 activations"
    readers = (MOEQ("MOEQ"),)
    arch = "SM80 and newer, gfx942, gfx950"
    source = "moeq"
    exact_scales = (0, GREATEST)
    rearranges = True

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        found = super().parts(spec)
        return {**found, "weight": replace(found["weight"], rewrite=MOEQ_MXFP4)}

    def check_values(self, matrix: QuantizedMatrix) -> None:
        super().check_values(matrix)
        why = f"{self.id} holds exponent bytes up to {GREATEST} (scales up to 2^{GREATEST - 127})"
        refuse_exponents_above(GREATEST, matrix, why, "marlin-mxfp4/1 (--backend MARLIN) keeps every exponent")

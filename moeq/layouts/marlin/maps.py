"""Index maps and parts of the Marlin layouts. Source: vLLM 0.33.0 (`marlin_utils`, Marlin's kernels).

A tile is 16 (K) by 64 (N) codes, read by a warp of 32 lanes. In the patterns, `r` is the lane's column within an octet
and `p` its pair of k; a word holds k, k + 1 (`q`), k + 8 (`h`) and, for 4 bits, columns 8 apart (`o`).
"""

from __future__ import annotations

from moeq.layouts.arrangement import Arrangement
from moeq.layouts.mxfp4 import scale_as
from moeq.layouts.parts import Part
from moeq.matrix import MatrixSpec

#: Weights for 16-bit activations, by bits.
WEIGHT = {
    4: Arrangement("n c4 o2 r8, k h2 p4 q2 -> k n r p c | q o h"),
    8: Arrangement("n c4 o2 r8, k h2 p4 q2 -> k n r p c o | q h"),
}

#: Scales of several groups along K: columns in 64s, octets transposed.
GROUPED = Arrangement("n o8 r8, g -> g n r o")

#: Scales per channel, and every bias: columns in 32s.
SINGLE = Arrangement("n a4 b4 c2, g -> g n b a c")

#: Scale bytes of MXFP4, NVFP4 and MXFP8: within four columns in the order 0, 2, 1, 3.
MX_GROUPED = Arrangement("n o2 s2 t2 r8, g -> g n r o t s")
MX_SINGLE = Arrangement("n a2 u2 b4 c2, g -> g n b a c u")

#: Zero points, by bits.
ZERO = {
    4: Arrangement("n u4 v2 r8, g -> g n r | v u"),
    8: Arrangement("n o2 s2 t2 r8, g -> g n r o | t s"),
}
#: Weights for 8-bit activations, by bits.
WEIGHT_A8 = {
    4: Arrangement("n m4 r8, k h2 p4 q4 -> k n r p m | q h"),
    8: Arrangement("n m4 r8, k h2 p4 q4 -> k n r p m h | q"),
}

#: Zero points for 8-bit activations, by bits.
ZERO_A8 = {
    4: Arrangement("n o8 r8, g -> g n r | o"),
    8: Arrangement("n o2 s4 r8, g -> g n r o | s"),
}


def weight_part(spec: MatrixSpec, arrangement: Arrangement) -> Part:
    """Return the part of the codes: int32 `[K / 16, N * 16 * bits / 32]`."""
    return Part("codes", arrangement, (spec.k // 16, spec.n * spec.bits // 2), "I32", spec.bits)


def scale_part(spec: MatrixSpec, single: Arrangement, grouped: Arrangement) -> Part:
    """Return the part of the scales, `[G, N]` in the stored dtype: in the order of one group along K, or of several."""
    return scale_as(spec, single if spec.num_groups == 1 else grouped, (spec.num_groups, spec.n))


def zero_part(spec: MatrixSpec, arrangement: Arrangement) -> Part:
    """Return the part of the zero points: int32 `[G, N * bits / 32]`."""
    shape = (spec.num_groups, spec.n * spec.bits // 32)
    return Part("zeros", arrangement, shape, "I32", spec.bits, group=spec.group_size)

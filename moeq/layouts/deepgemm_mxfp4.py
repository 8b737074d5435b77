"""DeepGEMM MXFP4 (SM100): weights as they are, four exponent bytes to a word, words along N.

`weight` uint8 `[N, K / 2]`; `scale` int32 `[G / 4, N]` (both rounded up to 4, zero-filled): word (g // 4, n) holds
group g in byte g % 4. The kernel takes its transpose, the `[N, G / 4]` view with strides (1, N). `bias` as stored.
Source: DeepGEMM 54e2261, packed UE8M0 scales; vLLM 0.33.0.
"""

from __future__ import annotations

from moeq.layouts.arranged import STORED_DTYPE, Part
from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import PaddingRule
from moeq.layouts.mxfp4 import IDENTITY, IDENTITY_SCALE, MXFP4Layout, bias_as, weight_bytes
from moeq.matrix import MatrixSpec

_SCALE = Arrangement("n, g q4 -> g n | q")


class DeepGemmMXFP4(MXFP4Layout):
    """See the module."""

    id = "deepgemm-mxfp4/1"
    title = "DeepGEMM MXFP4"
    source = "DeepGEMM 54e2261, vLLM 0.33.0"
    arch = "SM100 and newer"
    slicing = "N by 4, K by 128"
    padding = PaddingRule(intermediate=128, hidden=128)
    k_multiple = 2

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        shape = (-(-spec.num_groups // 4), -(-spec.n // 4) * 4)
        return {
            "weight": weight_bytes(spec, IDENTITY),
            "scale": Part("scales", _SCALE, shape, "I32", 8, pad=(4, 4), group=spec.group_size),
            **bias_as(spec, IDENTITY_SCALE, STORED_DTYPE.get(spec.bias_dtype or "", "")),
        }

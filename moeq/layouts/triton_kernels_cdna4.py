"""triton_kernels MXFP4 on CDNA4 (gfx950): values in row order, scales for its matrix cores.

`weight` uint8 `[N, K / 2]`, `scale` uint8 `[N / 32, 32 G]` (`CDNA4MXScaleLayout`), `bias` float32. vLLM takes this
scale order only for TP up to 2 and the plain one (`mxfp4-identity/1` with interleaved rows) beyond. Source:
triton_kernels 3.5.1 (vLLM 0.33.0).
"""

from __future__ import annotations

from moeq.layouts.arranged import Part
from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import PaddingRule
from moeq.layouts.mxfp4 import IDENTITY, INTERLEAVED, by_role, scale_bytes, weight_bytes
from moeq.layouts.triton_kernels import TritonKernelsLayout
from moeq.matrix import MatrixSpec

_SCALE = Arrangement("n o2 r16, g u2 q4 -> n g q r u o")
_SCALE_W13 = Arrangement("h2 n o2 r8, g u2 q4 -> n g q r h u o")


class TritonKernelsCDNA4(TritonKernelsLayout):
    """See the module."""

    id = "triton-kernels-cdna4/1"
    title = "triton_kernels MXFP4, CDNA4 scales"
    arch = "gfx950, TP up to 2"
    slicing = "N by 32 (16 per half of w13), K by 256"
    padding = PaddingRule(intermediate=256, hidden=256)

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        shape = (spec.n // 32, 32 * spec.num_groups)
        return {
            "weight": weight_bytes(spec, by_role(INTERLEAVED, IDENTITY, spec)),
            "scale": scale_bytes(spec, by_role(_SCALE_W13, _SCALE, spec), shape),
            **self.bias(spec),
        }

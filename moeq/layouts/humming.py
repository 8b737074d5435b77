"""int4, int8 and MXFP4 for Humming, as far as its bytes can be made without the GPU they are for.

These are the bytes for 16-bit activations on SM75 to SM90. Weights are Marlin's map, scales its group order (single
order for one scale per channel), biases its single order, zero points its 8-bit-activation order. Everything else about
Humming depends on the GPU or on the data: native-dequant mode (SM100 and newer), the packed-K mode, W4A8 exponent
clamping, tuned padding.

Source: humming-kernels 0.1.19 (`transform.py` and the repack kernel).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeq.errors import MoeqError
from moeq.layouts.base import PaddingRule
from moeq.layouts.marlin.maps import GROUPED, SINGLE, WEIGHT, ZERO_A8, scale_part, weight_part
from moeq.layouts.marlin.wna16 import MarlinWNA16
from moeq.layouts.mxfp4 import MXFP4Layout, bias_as
from moeq.layouts.parts import Part
from moeq.matrix import MatrixSpec, QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor


class HummingWNA16(MarlinWNA16):
    """int4 and int8, symmetric or with int4 zero points.

    Where code 0 never occurs in all local experts, Humming stores sign and magnitude instead. Calibration finds
    such experts, and packing refuses them.
    """

    id = "humming-wna16/1"
    title = "Humming, 16-bit activations, SM75 to SM90"
    source = "humming-kernels 0.1.19"
    schemes = "int4 and int8, symmetric; int4 with zero points"
    arch = "SM75 to SM90, not native-dequant"
    calibration_scope = "Humming recodes symmetric weights in which code 0 never occurs over all local experts"
    maps = (WEIGHT, GROUPED, ZERO_A8)

    def calibrate(self, matrix: QuantizedMatrix) -> float | None:
        return float(bool((matrix.codes == 0).any())) if matrix.spec.symmetric else None

    def check_values(self, matrix: QuantizedMatrix) -> None:
        super().check_values(matrix)
        if matrix.spec.symmetric and self.calibration is None:
            raise MoeqError("usage.survey-needed", f"{self.id}: {self.calibration_scope}; calibrate first")
        if matrix.spec.symmetric and not self.calibration:
            raise MoeqError(
                "usage.data-dependent",
                f"{self.id}: code 0 never occurs in these experts, so Humming would store sign and magnitude",
                "marlin-wna16/1 holds such weights as they are",
            )


class HummingMXFP4Fp16(MXFP4Layout):
    """MXFP4 with fp16 parameters.

    Scale bytes become `clamp(exponent - 112, 0, 30) * 8`, the high byte of the fp16 power of two. Exponents outside
    112 .. 142 are lost. Scales lie in the group order without Marlin's 0, 2, 1, 3.
    """

    id = "humming-mxfp4-fp16/1"
    title = "Humming MXFP4, fp16 parameters, SM75 to SM90"
    source = "humming-kernels 0.1.19"
    arch = "SM75 to SM90, not native-dequant"
    slicing = "N by 64, K by 32 (at least 64)"
    padding = PaddingRule(intermediate=128, hidden=256)
    lossy = "scale exponents outside 112 .. 142 do not fit fp16"
    n_multiple = 64
    single_group_differs = True
    recodes_scales = True

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        parts = {"weight": weight_part(spec, WEIGHT[4]), "scale": scale_part(spec, SINGLE, GROUPED)}
        return parts | bias_as(spec, SINGLE)

    def encode(self, name: str, matrix: QuantizedMatrix) -> Tensor:
        found = super().encode(name, matrix)
        return (found.clamp(112, 142) - 112) << 3 if name == "scale" else found

    def decode(self, name: str, elements: Tensor, spec: MatrixSpec) -> Tensor:
        found = super().decode(name, elements, spec)
        return (found >> 3) + 112 if name == "scale" else found

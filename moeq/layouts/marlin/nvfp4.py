"""NVFP4 on Marlin, 16-bit activations: the 4-bit weight map of `marlin-wna16` over E2M1 codes, one scale byte per 16.

Parts of one expert: `weight` int32 `[K / 16, 2 N]`; `scale` F8_E4M3 `[K / 16, N]` in the order of `marlin-mxfp4`;
`global_scale` float32 `[1]`; `scale_factor` float32 `[1]`; `bias` `[N]` in the dtype of the parameters.

The scale bytes are not E4M3, whatever their dtype says, but E5M3 without a sign: the upper byte of the fp16 number
`scale * factor * 2**7`, shifted left by one. What is below 2 then (an E4M3 scale times factor below 2**-6) becomes 0,
and so does a negative scale. `factor` is a power of two, the same for all local experts of w13 (of w2): the largest
that keeps their largest scale within 448. So bytes depend on which experts and rows are local, packing takes two passes
(`Layout.calibrate`) and every rank gets its own. `global_scale` is the checkpoint's times `2**119 / factor` (bf16
parameters) or times `2**7` (fp16, where factor is 1): the rest of the exponent that the kernel leaves out.

`scale_factor` is moeq's own: the engine keeps the factor only inside `global_scale`.

The kernel has one global scale for gate and up. Where a checkpoint has two, the engine takes the gate's for both, which
changes the up projection; packing is refused then unless losses are allowed.

Source: vLLM 0.33.0, `marlin_utils_fp4.py` (`prepare_nvfp4_moe_layer_for_marlin`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from moeq.errors import MoeqError
from moeq.layouts.base import PaddingRule, Problem, SliceRule, TensorSpec, not_multiple
from moeq.layouts.fp8 import E4M3_MAX
from moeq.layouts.layout import Layout
from moeq.layouts.marlin.maps import MX_GROUPED, MX_SINGLE, SINGLE, WEIGHT, scale_part, weight_part
from moeq.layouts.mxfp4 import bias_as
from moeq.layouts.nvfp4 import GROUP, global_scale_of, lost_global_scales
from moeq.layouts.parts import Part
from moeq.layouts.readers import MOEQ, VLLM, Only, Reader
from moeq.matrix import MatrixSpec, QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor

#: Exponent of the power of two that multiplies stored scales, and the number below which a product becomes 0.
_SHIFT, _LEAST = 7, 2.0


class MarlinNVFP4(Layout):
    """NVFP4 for bf16 parameters."""

    id = "marlin-nvfp4/1"
    title = "Marlin NVFP4, bf16 parameters"
    readers: ClassVar[tuple[Reader, ...]] = (
        VLLM("MARLIN", "marlin", dtypes=("bf16",), weights_only=True),
        MOEQ("MARLIN", keeps_16_bit=True),
    )
    source = "vLLM 0.33.0"
    family = "nvfp4"
    elements = ("e2m1",)
    schemes = "nvfp4 (e2m1 codes, e4m3 scales of 16, float32 scale per tensor), with bias"
    arch = "SM75 and newer"
    slicing = "none (scales depend on all local experts)"
    padding = PaddingRule(intermediate=64)
    lossy = (
        "scales too small beside the largest local one become 0, negative ones too; where gate and up have different "
        "global scales, up gets the gate's"
    )
    calibration_scope: ClassVar[str | None] = (
        "scales are stored times a power of two that follows from the largest one of all local experts"
    )
    scale_dtypes = ("e4m3",)
    group_sizes = (GROUP,)
    channelwise = False
    n_multiple = 64
    k_multiple = 16
    params: ClassVar[str] = "BF16"
    #: Exponent of two in the stored global scale.
    exponent: ClassVar[int] = 126 - _SHIFT
    recodes_scales = True

    def problems(self, spec: MatrixSpec) -> list[Problem]:
        found = super().problems(spec)
        if not found and spec.role == "w2" and spec.n % 128:
            # The engine pads the intermediate size to 128 instead of 64 there.
            message = not_multiple(f"N = {spec.n} (the hidden size)", spec.n, 128)
            found.append(Problem("layout.n-multiple", message, "moeq oracle SRC lists other backends"))
        return found

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        scale = scale_part(spec, MX_SINGLE, MX_GROUPED)
        return {"weight": weight_part(spec, WEIGHT[4]), "scale": scale, **bias_as(spec, SINGLE, self.params)}

    def extra_tensors(self, spec: MatrixSpec) -> dict[str, TensorSpec]:
        return {"global_scale": TensorSpec((1,), "F32"), "scale_factor": TensorSpec((1,), "F32")}

    def fill_extra(self, matrix: QuantizedMatrix, out: Mapping[str, Tensor]) -> None:
        if "global_scale" in out:
            out["global_scale"].copy_(self._shifted(matrix))
        if "scale_factor" in out:
            out["scale_factor"].fill_(self.factor)

    def _shifted(self, matrix: QuantizedMatrix) -> Tensor:
        """Return the global scale as it is stored, float32 `[1]`."""
        return global_scale_of(matrix)[:1] * 2.0**self.exponent / self.factor

    def slices(self, spec: MatrixSpec) -> SliceRule:
        return SliceRule(None, None)

    @property
    def factor(self) -> float:
        """Power of two that multiplies all scales, from the largest scale of the local experts."""
        largest = self.calibration or 0.0
        return 2.0 ** math.floor(math.log2(E4M3_MAX / largest)) if 0 < largest < E4M3_MAX else 1.0

    def calibrate(self, matrix: QuantizedMatrix) -> float | None:
        return float(matrix.scales.float().max())

    def check_values(self, matrix: QuantizedMatrix) -> None:
        self.calibrated()
        self._check_global(matrix)
        super().check_values(matrix)

    def _check_global(self, matrix: QuantizedMatrix) -> None:
        import torch

        shared = float(global_scale_of(matrix)[0])
        if not bool(torch.isfinite(self._shifted(matrix)).all()):
            raise MoeqError(
                "usage.scale-range",
                f"{self.id} stores the global scale of {matrix.spec.role} times 2**{self.exponent} / {self.factor:g}, "
                f"which float32 cannot hold: it is {shared:g}",
                "moeq oracle SRC lists the backends that read the scales as they are",
            )

    def losses(self, matrix: QuantizedMatrix) -> int:
        return super().losses(matrix) + lost_global_scales(matrix)

    def encode(self, name: str, matrix: QuantizedMatrix) -> Tensor:
        if name != "scale":
            return super().encode(name, matrix)
        import torch

        scales = (matrix.scales.float() * self.factor).to(torch.float16) * 2.0**_SHIFT
        scales.masked_fill_(scales < _LEAST, 0)
        return (scales.view(torch.int16) >> 7).to(torch.uint8)

    def decode(self, name: str, elements: Tensor, spec: MatrixSpec) -> Tensor:
        if name != "scale":
            return super().decode(name, elements, spec)
        import torch

        halves = (elements.view(torch.uint8).to(torch.int16) << 7).view(torch.float16)
        return (halves.float() / (2.0**_SHIFT * self.factor)).to(torch.float8_e4m3fn)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec) -> QuantizedMatrix:
        factor = float(parts["scale_factor"].reshape(-1)[0])
        if not factor >= 1 or math.frexp(factor)[0] != 0.5:
            raise MoeqError("source.bad-data", f"{self.id}: scale_factor is {factor}, expected 1, 2, 4, ...")
        knowing = self.with_calibration(E4M3_MAX / factor)
        matrix = super(MarlinNVFP4, knowing).unpack(parts, spec)
        stored = parts["global_scale"].reshape(-1)[:1].double() * factor * 2.0**-self.exponent
        return replace(matrix, global_scale=stored.float().expand(spec.n).contiguous())


class MarlinNVFP4Fp16(MarlinNVFP4):
    """NVFP4 for fp16 parameters: no common factor."""

    id = "marlin-nvfp4-fp16/1"
    title = "Marlin NVFP4, fp16 parameters"
    readers = (
        VLLM("MARLIN", "marlin", dtypes=("fp16",), weights_only=True, only=Only(dtype="fp16")),
        MOEQ("MARLIN", keeps_16_bit=True),
    )
    params = "F16"
    exponent = 14 - _SHIFT
    slicing = "none (the global scale belongs to the whole)"
    calibration_scope = None
    lossy = (
        "scales below 2**-6 and negative ones become 0, biases are rounded to fp16; where gate and up have different "
        "global scales, up gets the gate's"
    )

    @property
    def factor(self) -> float:
        """The number 1: the engine rescales nothing for fp16."""
        return 1.0

    def calibrate(self, matrix: QuantizedMatrix) -> float | None:
        return None

    def check_values(self, matrix: QuantizedMatrix) -> None:
        self._check_global(matrix)
        Layout.check_values(self, matrix)

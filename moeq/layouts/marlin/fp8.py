"""FP8 and MXFP8 on Marlin, 16-bit activations: the 8-bit weight map of `marlin-wna16` over E4M3 bytes.

Parts of one expert: `weight` int32 `[K / 16, 4 N]`, `scale` `[G, N]`, `bias` `[N]`.

Source: vLLM 0.33.0, `marlin_utils_fp8.py` (`prepare_fp8_moe_layer_for_marlin`, `prepare_mxfp8_moe_layer_for_marlin`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from moeq.errors import MoeqError
from moeq.layouts.base import PaddingRule
from moeq.layouts.layout import Layout
from moeq.layouts.marlin.maps import GROUPED, MX_GROUPED, MX_SINGLE, SINGLE, WEIGHT, scale_part, weight_part
from moeq.layouts.mxfp4 import bias_as
from moeq.layouts.parts import STORED_DTYPE, Part, torch_dtype
from moeq.layouts.readers import MOEQ, VLLM, Only
from moeq.matrix import MatrixSpec, QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor


class _MarlinBytes(Layout):
    source = "vLLM 0.33.0"
    elements = ("e4m3",)
    arch = "SM75 and newer"
    padding = PaddingRule(intermediate=64, whole_groups=True)
    n_multiple = 64
    k_multiple = 16
    single_group_differs = True
    params: ClassVar[str] = "BF16"


class MarlinFp8(_MarlinBytes):
    """FP8 for bf16 parameters: one scale per block, output channel or tensor.

    Blocks become groups along K (their scale repeated for every row), a scale per tensor becomes one per channel. Where
    gate and up have different scales per tensor, the engine requantises both to the larger; here each keeps its own,
    as a scale of every one of its channels.

    Scales lie in the grouped order where there are several along K, else in the single order, in the dtype of the
    parameters. The kernel widens E4M3 by moving bits, which leaves the exponent bias out, so scales are stored times
    2**120. Scales that are no bf16 numbers are rounded as the engine rounds them: lossy, so refused unless allowed.
    """

    id = "marlin-fp8/1"
    title = "Marlin FP8, bf16 parameters"
    readers = (VLLM("MARLIN", "marlin", dtypes=("bf16",), weights_only=True), MOEQ("MARLIN", keeps_16_bit=True))
    family = "fp8"
    schemes = "fp8 (e4m3 codes), scales per 128 x 128 block, channel or tensor, with bias"
    slicing = "N by 64, K by whole groups (16 where channel-wise)"
    scale_dtypes = ("f32", "bf16", "f16", "e8m0")
    group_sizes = (128,)
    lossy = "scales and biases that are no bf16 numbers are rounded to bf16, as the engine rounds them"
    lossy_as_engine = True
    #: Exponent bias that the kernel leaves out of widened codes.
    exponent: ClassVar[int] = 120
    recodes_scales = True

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        order = SINGLE if spec.num_groups == 1 else GROUPED
        shape = (spec.num_groups, spec.n)
        scale = Part("scales", order, shape, self.params, 16, group=spec.group_size)
        return {"weight": weight_part(spec, WEIGHT[8]), "scale": scale, **bias_as(spec, SINGLE, self.params)}

    def check_values(self, matrix: QuantizedMatrix) -> None:
        import torch

        num_infinite = int((~torch.isfinite(self.encode("scale", matrix))).sum())
        if num_infinite:
            largest = float(_numbers(matrix).max())
            raise MoeqError(
                "usage.scale-range",
                f"{self.id} stores scales times 2**{self.exponent}, which is infinite for {num_infinite} of "
                f"{matrix.scales.numel()} scales of {matrix.spec.role} (the largest is {largest:g})",
                "moeq oracle SRC lists the backends that read the scales as they are",
            )
        super().check_values(matrix)

    def encode(self, name: str, matrix: QuantizedMatrix) -> Tensor:
        if name != "scale":
            return super().encode(name, matrix)
        # The product with a power of two is exact, or infinite.
        return _numbers(matrix).to(torch_dtype(self.params)) * 2.0**self.exponent

    def decode(self, name: str, elements: Tensor, spec: MatrixSpec) -> Tensor:
        if name != "scale":
            return super().decode(name, elements, spec)
        numbers = elements.view(torch_dtype(self.params)).double() * 2.0**-self.exponent
        if spec.scale_dtype == "e8m0":
            return _exponent_bytes(numbers)
        return numbers.to(torch_dtype(STORED_DTYPE[spec.scale_dtype]))


class MarlinFp8Fp16(MarlinFp8):
    """FP8 for fp16 parameters: scales are stored times 2**8 and rounded to fp16."""

    id = "marlin-fp8-fp16/1"
    title = "Marlin FP8, fp16 parameters"
    readers = (
        VLLM("MARLIN", "marlin", dtypes=("fp16",), weights_only=True, only=Only(dtype="fp16")),
        MOEQ("MARLIN", keeps_16_bit=True),
    )
    params = "F16"
    exponent = 8
    lossy = "scales and biases are rounded to fp16, and scales of 256 or more overflow, as in the engine"


class MarlinMXFP8(_MarlinBytes):
    """MXFP8 for bf16 parameters: exponent bytes per 32 codes in the order of `marlin-mxfp4`; exact."""

    id = "marlin-mxfp8/1"
    title = "Marlin MXFP8, bf16 parameters"
    readers = (VLLM("MARLIN", "marlin", dtypes=("bf16",), weights_only=True), MOEQ("MARLIN", keeps_16_bit=True))
    family = "mxfp8"
    schemes = "mxfp8 (e4m3 codes, e8m0 scales of 32), with bias"
    slicing = "N by 64, K by 32 (at least 64)"
    scale_dtypes = ("e8m0",)
    group_sizes = (32,)
    channelwise = False
    lossy = "float32 biases are rounded to bf16"

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        weight, scale = weight_part(spec, WEIGHT[8]), scale_part(spec, MX_SINGLE, MX_GROUPED)
        return {"weight": weight, "scale": scale, **bias_as(spec, SINGLE, self.params)}


def _numbers(matrix: QuantizedMatrix) -> Tensor:
    """Return the scales as numbers `[N, G]`."""
    exponents = matrix.spec.scale_dtype == "e8m0"
    return (matrix.scales.double() - 127).exp2() if exponents else matrix.scales


def _exponent_bytes(numbers: Tensor) -> Tensor:
    """Return the uint8 E8M0 of powers of two; 255 where a number is no power of two."""
    import torch

    mantissa, exponent = torch.frexp(numbers)
    biased = exponent.to(torch.int32) + 126
    return torch.where((mantissa == 0.5) & (biased >= 0) & (biased < 255), biased, 255).to(torch.uint8)

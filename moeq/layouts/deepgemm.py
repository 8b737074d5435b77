"""FP8, MXFP8 and MXFP4 for DeepGEMM: weights `[N, K]` as they lie, scales that are powers of two.

Source: DeepGEMM 54e2261 (`transform_sf_into_required_layout`), as vLLM 0.33.0 calls it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import PaddingRule
from moeq.layouts.fp8 import BLOCK, E4M3_MAX, Fp8Layout, MXFP8Layout
from moeq.layouts.mxfp4 import MXFP4Layout
from moeq.layouts.parts import STORED_DTYPE, Part, changed, torch_dtype
from moeq.layouts.readers import VLLM, Only
from moeq.matrix import MatrixSpec, QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor


#: Lower bound of a block's largest number when its scale is computed.
_LEAST = 1e-4

_WORDS = Arrangement("n, g q4 -> g n | q")


class _DeepGemm(Fp8Layout):
    """FP8 with blocks of 128 x 128, whose scales become powers of two.

    Exponent bytes (E8M0) are kept exactly. The engine requantises weights with other scales. It multiplies
    codes by scales in float32. The new scale of a block is its largest number (at least 1e-4) over 448, rounded up to a
    power of two, and the new codes are the numbers over that scale, rounded to E4M3. That changes codes and scales, so
    it is refused unless losses are allowed, and never chosen. moeq takes the logarithm on a CPU. A GPU may round that
    of a number next to a power of two differently; then the block differs.

    Source: vLLM 0.33.0, `fp8_utils.py` (`requant_weight_ue8m0_inplace`, `prepare_fp8_moe_layer_for_deepgemm`) and
    `deep_gemm.py` (`per_block_cast_to_fp8`).
    """

    source = "vLLM 0.33.0, DeepGEMM 54e2261"
    scale_dtypes = ("e8m0", "f32", "bf16", "f16")
    scope = "block"
    lossy = "weights with scales other than E8M0 are requantised to powers of two, as the engine does"
    lossy_as_engine = True

    def losses(self, matrix: QuantizedMatrix) -> int:
        if matrix.spec.scale_dtype == "e8m0":
            return 0
        stored = self.unpack(type(self)(allow_lossy=True).pack(matrix), matrix.spec)
        return changed(matrix.codes, stored.codes) + changed(matrix.scales, stored.scales)

    def written(self, matrix: QuantizedMatrix) -> QuantizedMatrix:
        return requantised(matrix)


class DeepGemmFp8Sm90(_DeepGemm):
    """FP8 on SM90: `scale` float32 `[N / 128, K / 128]`."""

    id = "deepgemm-fp8-sm90/1"
    title = "DeepGEMM FP8, blocks, power-of-two scales in float32"
    readers = (VLLM("DEEPGEMM", "deep_gemm", only=Only(devices=("cuda 9.0",)), lossy=True),)
    arch = "SM90"
    slicing = "N by 128, K by 128"

    def encode(self, name: str, matrix: QuantizedMatrix) -> Tensor:
        if name != "scale" or matrix.spec.scale_dtype != "e8m0":
            return super().encode(name, matrix)
        import torch

        return (matrix.scales[::BLOCK].to(torch.int32) << 23).view(torch.float32)

    def decode(self, name: str, elements: Tensor, spec: MatrixSpec) -> Tensor:
        if name != "scale" or spec.scale_dtype != "e8m0":
            return super().decode(name, elements, spec)
        import torch

        return (elements.view(torch.int32) >> 23).to(torch.uint8)


class DeepGemmFp8Sm100(_DeepGemm):
    """FP8 on SM100: `scale` as in `_packed_exponents`, repeated for every row of a block."""

    id = "deepgemm-fp8-sm100/1"
    title = "DeepGEMM FP8, blocks, packed E8M0 scales"
    readers = (VLLM("DEEPGEMM", "deep_gemm", only=Only(devices=("cuda 10.x", "cuda 12.x")), lossy=True),)
    arch = "SM100, SM120"
    slicing = "N by 128, K by 512"

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return super().parts(spec) | {"scale": _packed_exponents(spec)}

    def encode(self, name: str, matrix: QuantizedMatrix) -> Tensor:
        if name != "scale" or matrix.spec.scale_dtype == "e8m0":
            return super().encode(name, matrix)
        import torch

        return (matrix.scales.float().view(torch.int32) >> 23).to(torch.uint8)

    def decode(self, name: str, elements: Tensor, spec: MatrixSpec) -> Tensor:
        if name != "scale" or spec.scale_dtype == "e8m0":
            return super().decode(name, elements, spec)
        import torch

        numbers = (elements.to(torch.int32) << 23).view(torch.float32)
        return numbers.to(torch_dtype(STORED_DTYPE[spec.scale_dtype]))

    def check_values(self, matrix: QuantizedMatrix) -> None:
        self._check_shared(matrix, BLOCK)
        super().check_values(matrix)


class DeepGemmMXFP8(MXFP8Layout):
    """MXFP8: `scale` as in `_packed_exponents`; exact."""

    id = "deepgemm-mxfp8/1"
    title = "DeepGEMM MXFP8"
    readers = (VLLM("DEEPGEMM", "deep_gemm", only=Only(devices=("cuda 10.x", "cuda 12.x"))),)
    source = "vLLM 0.33.0, DeepGEMM 54e2261"
    arch = "SM100, SM120"
    slicing = "N by 4, K by 128"

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return super().parts(spec) | {"scale": _packed_exponents(spec)}


def _packed_exponents(spec: MatrixSpec) -> Part:
    """Return the part of scales int32 `[G / 4, N]`, both rounded up to 4 and zero-filled.

    Word (g // 4, n) holds the exponent byte of group g in byte g % 4. The kernel takes the transposed view,
    `[N, G / 4]` with strides (1, N).
    """
    shape = (-(-spec.num_groups // 4), -(-spec.n // 4) * 4)
    return Part("scales", _WORDS, shape, "I32", 8, pad=(4, 4), group=spec.group_size)


def requantised(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Return the matrix under power-of-two scales per block of 128 x 128, as vLLM makes them.

    Args:
        matrix: E4M3 codes `[N, K]`, both multiples of 128, scales alike within a block; E8M0 scales are kept.
    """
    import torch

    spec = matrix.spec
    if spec.scale_dtype == "e8m0":
        return matrix
    scales = matrix.scales.float().repeat_interleave(BLOCK, dim=1)[:, : spec.k]
    weights = matrix.codes.view(torch.float8_e4m3fn).float() * scales
    blocks = weights.view(spec.n // BLOCK, BLOCK, spec.k // BLOCK, BLOCK)
    largest = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(_LEAST)
    powers = torch.pow(2.0, torch.ceil(torch.log2((largest / E4M3_MAX).abs())))
    codes = (blocks * (1.0 / powers)).to(torch.float8_e4m3fn).view(spec.n, spec.k).view(torch.uint8)
    rows = powers.view(spec.n // BLOCK, spec.k // BLOCK).repeat_interleave(BLOCK, dim=0)
    return replace(matrix, spec=replace(spec, scale_dtype="f32"), codes=codes, scales=rows)


class DeepGemmMXFP4(MXFP4Layout):
    """MXFP4: `weight` uint8 `[N, K / 2]`, `scale` as in `_packed_exponents`, `bias` as stored."""

    id = "deepgemm-mxfp4/1"
    title = "DeepGEMM MXFP4"
    readers = (VLLM("DEEPGEMM_MXFP4", "deep_gemm", dtypes=("bf16",)),)
    source = "DeepGEMM 54e2261, vLLM 0.33.0"
    arch = "SM100 and newer"
    slicing = "N by 4, K by 128"
    padding = PaddingRule(intermediate=128, hidden=128)
    k_multiple = 2

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return super().parts(spec) | {"scale": _packed_exponents(spec)}

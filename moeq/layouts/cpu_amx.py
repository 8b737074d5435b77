"""int4, int8, MXFP4 and FP8 for vLLM's CPU kernels (x86 with AMX): blocks of 32 rows.

Source: vLLM 0.33.0. Golden bytes: `convert_weight_packed`, `convert_weight_packed_scale_zp` and `convert_scale_packed`
of 0.32.0.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from moeq.errors import MoeqError
from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import PaddingRule, Problem, SliceRule, TensorSpec, W13Order
from moeq.layouts.fp8 import Fp8Layout
from moeq.layouts.layout import Layout
from moeq.layouts.mxfp4 import IDENTITY_SCALE, INTERLEAVED_ROWS, Maps, MXFP4Layout, bias_as
from moeq.layouts.parts import Part
from moeq.layouts.readers import VLLM, Only
from moeq.layouts.words import block_sums
from moeq.matrix import MatrixSpec, QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor


_PER_GROUP = Arrangement("n r32, g -> n g r")

#: Bytes of the 32 int32 sums of a block.
_SUM_BYTES = 128


class _SummedBlocks(Layout):
    """Blocks of codes of 32 rows `[N / 32, ...]`, each followed by 32 int32 sums, one for each row."""

    @abstractmethod
    def sums(self, matrix: QuantizedMatrix) -> Tensor:
        """Return the int32 sums of all blocks, `[N / 32, ..., 32]`."""

    def cut_blocks(self, blocks: Tensor, spec: MatrixSpec, k: tuple[int, int]) -> Tensor:
        """Return the columns `k` of blocks `[halves, N / 32, ...]`; all of them where no slice along K is legal."""
        return blocks

    def tensors(self, spec: MatrixSpec) -> dict[str, TensorSpec]:
        found = super().tensors(spec)
        *outer, width = found["weight"].shape
        return found | {"weight": TensorSpec((*outer, width + _SUM_BYTES), "U8")}

    def pack_into(self, matrix: QuantizedMatrix, out: Mapping[str, Tensor]) -> None:
        if "weight" not in out:
            super().pack_into(matrix, out)
            return
        import torch

        codes = torch.empty(self.parts(matrix.spec)["weight"].shape, dtype=torch.uint8)
        super().pack_into(matrix, {**out, "weight": codes})
        out["weight"][..., :-_SUM_BYTES] = codes
        out["weight"][..., -_SUM_BYTES:] = self.sums(matrix).view(torch.uint8)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec) -> QuantizedMatrix:
        return super().unpack({**parts, "weight": parts["weight"][..., :-_SUM_BYTES].contiguous()}, spec)

    def slice_parts(
        self, parts: Mapping[str, Tensor], spec: MatrixSpec, *, n: tuple[int, int], k: tuple[int, int]
    ) -> dict[str, Tensor]:
        blocks = parts["weight"]
        codes = {**parts, "weight": blocks[..., :-_SUM_BYTES].contiguous()}
        cut = self.cut_parts(codes, spec, self.shard_spec(spec, n, k), n=n, k=k)
        by_half = blocks.view(spec.halves, -1, *blocks.shape[1:])[:, n[0] // 32 : n[1] // 32]
        kept = self.cut_blocks(by_half, spec, k)
        return cut | {"weight": kept.reshape(-1, *kept.shape[2:])}


class CpuAmxInt4(_SummedBlocks):
    """int4: blocks of 32 rows by B = min(group size, 128) codes, each followed by its row sums.

    `weight` uint8 `[N / 32, K / B, 16 B + 128]`: the codes of a block, then 32 int32 sums of `code - zero` over the
    block's columns; `scale` float32 `[N / 32, G, 32]`; `zero` int8 `[N / 32, G, 32]`, 8 everywhere where symmetric;
    `bias` float32. Zero points are stored as they count. vLLM reaches the same numbers by adding one to every zero
    point that is not AWQ's: GPTQ v1 files store one less, and for symmetric weights it starts from 7.
    """

    id = "cpu-amx-int4/1"
    title = "CPU AMX int4"
    readers = (VLLM("CPU", since="0.32.0"),)
    source = "vLLM 0.33.0"
    elements = ("int4",)
    schemes = "int4, symmetric or (GPTQ, AWQ) with zero points, with bias"
    arch = "x86 with AMX"
    slicing = "N by 32, K by whole groups"
    padding = PaddingRule(intermediate=32, whole_groups=True)
    zero_points = True
    n_multiple = 32

    def problems(self, spec: MatrixSpec) -> list[Problem]:
        block = _block(spec)
        if spec.num_groups == 1 and (spec.k % block or block % 4):
            message = f"K = {spec.k} is not a whole number of blocks of {block} codes, or {block} is no multiple of 4"
            return [Problem("layout.k-multiple", message, f"pad K to {-(-spec.k // 128) * 128}")]
        if spec.group_size % block or block % 4:
            message = f"groups of {spec.group_size} are not a whole number of blocks of {block} codes"
            return [Problem("layout.group-size", message, "groups of 32, 64, 128 or a multiple of 128")]
        return super().problems(spec)

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        block = _block(spec)
        order = Arrangement(f"n a2 o2 r8, k j{block // 4} x4 -> n k j a r x | o")
        shape = (spec.n // 32, spec.num_groups, 32)
        return {
            "weight": Part("codes", order, (spec.n // 32, spec.k // block, 16 * block), "U8", 4),
            "scale": Part("scales", _PER_GROUP, shape, "F32", 32, group=spec.group_size),
            "zero": Part("zeros", _PER_GROUP, shape, "I8", 8, group=spec.group_size),
            **bias_as(spec, IDENTITY_SCALE, "F32"),
        }

    def slices(self, spec: MatrixSpec) -> SliceRule:
        rule = super().slices(spec)
        if spec.num_groups > 1:
            return rule
        # A block has all of K up to 128 codes, and 128 codes of a larger K.
        return SliceRule(rule.n, 128 if spec.k > 128 else None)

    def check_values(self, matrix: QuantizedMatrix) -> None:
        if matrix.zeros is not None and int(matrix.zeros.max()) > 127:
            raise MoeqError("usage.zero-point-range", f"{self.id} stores zero points as int8")

    def encode(self, name: str, matrix: QuantizedMatrix) -> Tensor:
        if name == "zero" and matrix.zeros is None:
            import torch

            return torch.full(matrix.scales.shape, matrix.spec.symmetric_zero, dtype=torch.uint8)
        return super().encode(name, matrix)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec) -> QuantizedMatrix:
        matrix = super().unpack(parts, spec)
        return replace(matrix, zeros=None) if spec.symmetric else matrix

    def sums(self, matrix: QuantizedMatrix) -> Tensor:
        import torch

        spec, block = matrix.spec, _block(matrix.spec)
        sums = block_sums(matrix.codes, block)
        if matrix.zeros is None:
            sums -= block * spec.symmetric_zero
        else:
            sums -= block * matrix.zeros.to(torch.int32).repeat_interleave(spec.group_size // block, dim=1)
        return sums.view(spec.n // 32, 32, -1).transpose(1, 2).contiguous()

    def cut_blocks(self, blocks: Tensor, spec: MatrixSpec, k: tuple[int, int]) -> Tensor:
        unit = _block(spec)
        return blocks[:, :, k[0] // unit : k[1] // unit]


def _block(spec: MatrixSpec) -> int:
    return min(spec.group_size, 128)


_INT8_WEIGHT = Arrangement("n r32, k x4 -> n k r x")


class CpuAmxInt8(_SummedBlocks):
    """int8 W8A8: blocks of 32 rows, four columns together, each block followed by its row sums.

    `weight` uint8 `[N / 32, 32 (K + 4)]`: int8 values, then 32 int32 `128 * sum over K` (activations are offset by
    128); `scale` float32 `[N, 1]`, `bias` float32. The sums run over all of K, so nothing can be cut along K.
    Source: `CPUExpertsInt8`.
    """

    id = "cpu-amx-int8/1"
    title = "CPU int8 W8A8"
    readers = (VLLM("CPU", since="0.32.0", dtypes=("bf16",)),)
    source = "vLLM 0.33.0"
    family = "int8"
    grouped = False
    elements = ("int8",)
    schemes = "int8 with one scale per channel, activations quantised per token"
    arch = "x86 with AMX"
    slicing = "N by 32; none along K"
    padding = PaddingRule(intermediate=32)
    scale_dtypes = ("f16", "bf16", "f32")
    n_multiple = 32
    k_multiple = 32

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return {
            "weight": Part("codes", _INT8_WEIGHT, (spec.n // 32, 32 * spec.k), "U8", 8, flip=0x80),
            "scale": Part("scales", IDENTITY_SCALE, (spec.n, 1), "F32", 32, group=spec.group_size),
            **bias_as(spec, IDENTITY_SCALE, "F32"),
        }

    def slices(self, spec: MatrixSpec) -> SliceRule:
        return SliceRule(super().slices(spec).n, None)

    def sums(self, matrix: QuantizedMatrix) -> Tensor:
        spec = matrix.spec
        return (128 * (block_sums(matrix.codes, spec.k) - 128 * spec.k)).view(spec.n // 32, 32)


_MXFP4_WEIGHT = Arrangement("n y2 r16, k b2 -> n k r b | y")
# Maps for row 2 i + h of an interleaved w13: the lowest row digit gives its last bit to h.
_MXFP4_WEIGHT_PAIRS = Arrangement("h2 n y2 r8, k b2 -> n k r h b | y")
_MXFP4_SCALE_PAIRS = Arrangement("h2 n r16, g -> n g r h")


class CpuAmxMXFP4(MXFP4Layout):
    """MXFP4 in blocks of 32 rows: a byte holds the codes of rows r and r + 16 in one column.

    `weight` uint8 `[N, K / 2]`, `scale` uint8 `[N / 32, G, 32]`, `bias` float32; w13 is gate rows, then up rows.
    """

    id = "cpu-amx-mxfp4/1"
    title = "CPU AMX MXFP4"
    readers = (VLLM("CPU", since="0.32.0", dtypes=("bf16",)),)
    source = "vLLM 0.33.0"
    arch = "x86 with AMX"
    slicing = "N by 32, K by 32"
    padding = PaddingRule(intermediate=32, hidden=32)
    weight_maps: ClassVar[Maps] = (_MXFP4_WEIGHT,)
    scale_maps: ClassVar[Maps] = (_PER_GROUP,)
    bias_dtype = "F32"

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        parts = super().parts(spec)
        return parts | {"scale": replace(parts["scale"], shape=(spec.n // 32, spec.num_groups, 32))}


class CpuAmxMXFP4Interleaved(CpuAmxMXFP4):
    """MXFP4 with interleaved w13 rows, which vLLM's kernel wants for gpt-oss."""

    id = "cpu-amx-mxfp4-interleaved/1"
    title = "CPU AMX MXFP4, gate and up interleaved (gpt-oss on vLLM)"
    readers = (VLLM("CPU", since="0.32.0", dtypes=("bf16",), only=Only(activation="swigluoai")),)
    slicing = "N by 32 (16 per half of w13), K by 32"
    w13_order: ClassVar[W13Order] = "interleaved"
    weight_maps = (_MXFP4_WEIGHT_PAIRS, _MXFP4_WEIGHT)
    scale_maps = (_MXFP4_SCALE_PAIRS, _PER_GROUP)
    bias_maps = (INTERLEAVED_ROWS, IDENTITY_SCALE)


_FP8_WEIGHT = Arrangement("n r32, k b2 -> n k r b")


class CpuAmxFp8(Fp8Layout):
    """FP8 with 16-bit activations: two columns together. `weight` F8_E4M3 `[N, K]`; `scale` `[N / 128, K / 128]`.

    Source: `CPUExpertsFp8`, whose `convert_weight_packed` and kernel are `csrc/cpu/sgl-kernels/gemm.cpp` and
    `gemm_fp8.cpp`.
    """

    id = "cpu-amx-fp8/1"
    title = "CPU AMX FP8, blocks, 16-bit activations"
    readers = (VLLM("CPU", since="0.32.0", dtypes=("bf16",), only=Only(weights=("kFp8Static128BlockSym",))),)
    arch = "x86 with AMX"
    slicing = "N by 128, K by 128"
    scope = "block"
    weight_maps = (_FP8_WEIGHT,)

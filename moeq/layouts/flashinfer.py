"""FlashInfer: its TRTLLM, CUTLASS and CuteDSL kernels for MXFP4, NVFP4, MXFP8, FP8 and int4.

The TRTLLM kernels read rows shuffled for an epilogue tile of 128: new row 32 a + 8 d + e holds row 32 a + 4 e + d. w13
rows are first paired up 0, gate 0, up 1, gate 1, ..., so there the last bit of d tells gate from up.

Source: FlashInfer 0.7.2, as vLLM 0.33.0 calls it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import PaddingRule, Problem, SliceRule, not_multiple
from moeq.layouts.bits import MUL_FREE
from moeq.layouts.fp8 import Fp8Layout, MXFP8Layout, fp8_bytes, has_two_scales, to_larger_scale
from moeq.layouts.layout import Layout
from moeq.layouts.mxfp4 import (
    IDENTITY,
    IDENTITY_SCALE,
    TILE_128X4,
    TILE_128X4_UP_GATE,
    UP_GATE,
    UP_GATE_ROWS,
    MXFP4Layout,
    by_role,
)
from moeq.layouts.nvfp4 import NVFP4Layout, TiledNVFP4
from moeq.layouts.parts import Part, changed
from moeq.layouts.readers import VLLM, Only
from moeq.matrix import MatrixSpec, QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor


# Rows shuffled for TRTLLM: numbers of one word each, codes two to a byte, scales in 128 x 4 tiles.
ROWS_128 = Arrangement("n e8 d4, k -> n d e k")
ROWS_128_W13 = Arrangement("h2 n e8 d2, k -> n d ~h e k")
_SHUFFLED = Arrangement("n e8 d4, k b2 -> n d e k | b")
_SHUFFLED_W13 = Arrangement("h2 n e8 d2, k b2 -> n d ~h e k | b")
_SCALE = Arrangement("n y4 e8 d4, c x4 -> n c d e y x")
_SCALE_W13 = Arrangement("h2 n y4 e8 d2, c x4 -> n c d ~h e y x")

# TRTLLM's blocks of 128 bytes of K: codes two to a byte in shuffled rows, and bytes in rows shuffled in 16s.
_BLOCK_MAJOR = Arrangement("n e8 d4, k j128 b2 -> k n d e j | b")
_BLOCK_MAJOR_W13 = Arrangement("h2 n e8 d2, k j128 b2 -> k n d ~h e j | b")
_BLOCK_MAJOR_BYTES = Arrangement("n e8 d2, k j128 -> k n d e j")
_BLOCK_MAJOR_BYTES_W13 = Arrangement("h2 n e8 d2, k j128 -> k ~h n d e j")

# CUTLASS on SM90. Byte columns split as k (32 bytes), m v (the MMA step of 8 bytes), j, x; rows as n (16), o, r.
_SM90_WEIGHT = Arrangement("n o2 r8, k m2 v2 j2 x4 b2 -> n v r k m x | j o b")
_SM90_WEIGHT_W13 = Arrangement("h2 n o2 r8, k m2 v2 j2 x4 b2 -> ~h n v r k m x | j o b")
_SM90_SCALE = Arrangement("n y4 z16, c x4 -> n c z y x")
_SM90_SCALE_W13 = Arrangement("h2 n y4 z16, c x4 -> ~h n c z y x")

_CUTEDSL_WEIGHT_W13 = Arrangement("h2 n r64, k b2 -> n ~h r k | b")
_CUTEDSL_SCALE_W13 = Arrangement("h2 n y2 z32, c x4 -> n c z ~h y x")

_SOURCE = "vLLM 0.33.0, FlashInfer 0.7.2"


# ---------------------------------------------------------------------------------------------------------------- MXFP4


class TrtllmMXFP4(MXFP4Layout):
    """TRTLLM MXFP4: the same bytes for bf16 and for MXFP8 activations.

    `weight` uint8 `[N, K / 2]` with shuffled rows; `scale` uint8 `[N, G]`, shuffled and in 128 x 4 tiles; `bias`
    float32 in the order of the rows. gpt-oss's interleaved rows give the same result as separate gate and up. Source:
    vLLM 0.33.0, `oracle/mxfp4.py`.
    """

    id = "trtllm-mxfp4/1"
    title = "FlashInfer TRTLLM MXFP4, bf16 or MXFP8 activations"
    readers = (
        VLLM("FLASHINFER_TRTLLM_MXFP4_BF16", "flashinfer_trtllm", since="0.27.0", dtypes=("bf16",), activates=True),
        VLLM(
            "FLASHINFER_TRTLLM_MXFP4_MXFP8", "flashinfer_trtllm_afp8", since="0.27.0", dtypes=("bf16",), activates=True
        ),
    )
    source = _SOURCE
    arch = "SM100 family"
    slicing = "N by 64 per half of w13, by 128 of w2; K by 128"
    padding = PaddingRule(intermediate=128, hidden=256)
    w13_order = "up-gate"
    weight_maps = (_SHUFFLED_W13, _SHUFFLED)
    scale_maps = (_SCALE_W13, _SCALE)
    bias_maps = (ROWS_128_W13, ROWS_128)
    bias_dtype = "F32"


class FlashInferCutlassBF16(MXFP4Layout):
    """CUTLASS MXFP4 for bf16 activations (SM90 only).

    w13 is up rows, then gate rows. Weights are interleaved for the mixed-input tensor-core tile, four bytes to a 32-bit
    word, and the bits of each word are permuted so that no table is needed to decode them (`bits.MUL_FREE`): `weight`
    uint8 `[N, K / 2]`. `scale` uint8 `[N / 64, K / 128, 16, 16]`, `bias` bf16. Source: FlashInfer's mixed-input MoE
    GEMM for SM90 and `prepare.py`.
    """

    id = "flashinfer-cutlass-mxfp4-bf16/1"
    title = "FlashInfer CUTLASS MXFP4, bf16 activations"
    readers = (
        VLLM("FLASHINFER_CUTLASS_MXFP4_BF16", "flashinfer_cutlass", since="0.29.0", dtypes=("bf16",), activates=True),
    )
    source = _SOURCE
    arch = "SM90"
    slicing = "N by 64, K by 128"
    padding = PaddingRule(intermediate=128, hidden=128)
    w13_order = "up-gate"
    lossy = "biases are rounded to bf16"
    n_multiple = 64
    k_multiple = 128
    weight_maps = (_SM90_WEIGHT_W13, _SM90_WEIGHT)
    scale_maps = (_SM90_SCALE_W13, _SM90_SCALE)
    bias_maps = (UP_GATE_ROWS, IDENTITY_SCALE)
    bias_dtype = "BF16"

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        parts = super().parts(spec)
        scale = replace(parts["scale"], shape=(spec.n // 64, spec.k // 128, 16, 16))
        return parts | {"weight": replace(parts["weight"], rewrite=MUL_FREE), "scale": scale}


class FlashInferCutlassMXFP8(MXFP4Layout):
    """CUTLASS MXFP4 for MXFP8 activations (SM100 and newer, SM120).

    w13 is up rows, then gate rows; bytes stay. `weight` uint8 `[N, K / 2]`, `scale` uint8 `[N, G]` in 128 x 4 tiles,
    `bias` bf16. Source: vLLM 0.33.0, `oracle/mxfp4.py`.
    """

    id = "flashinfer-cutlass-mxfp4-mxfp8/1"
    title = "FlashInfer CUTLASS MXFP4, MXFP8 activations"
    readers = (VLLM("FLASHINFER_CUTLASS_MXFP4_MXFP8", "flashinfer_cutlass_afp8", dtypes=("bf16",), activates=True),)
    source = _SOURCE
    arch = "SM100 and newer, SM120"
    slicing = "N by 128, K by 128"
    padding = PaddingRule(intermediate=128, hidden=128)
    w13_order = "up-gate"
    lossy = "biases are rounded to bf16"
    n_multiple = 128
    k_multiple = 128
    weight_maps = (UP_GATE, IDENTITY)
    scale_maps = (TILE_128X4_UP_GATE, TILE_128X4)
    bias_maps = (UP_GATE_ROWS, IDENTITY_SCALE)
    bias_dtype = "BF16"


# ---------------------------------------------------------------------------------------------------------------- NVFP4


class TrtllmNVFP4(NVFP4Layout):
    """TRTLLM NVFP4: shuffled rows, scales in 128 x 4 tiles.

    `weight`, `scale` and `global_scale` are as in `nvfp4.py`. The intermediate size is rounded up to 64 (128 without a
    gate), the hidden size to 256. With one activation scale per token and without a gate the engine rounds it up to
    512, for which moeq has no layout. Source: vLLM 0.33.0, `flashinfer_fp4_moe.py`
    (`prepare_static_weights_for_trtllm_fp4_moe`).
    """

    id = "trtllm-nvfp4/1"
    title = "FlashInfer TRTLLM NVFP4"
    readers = (VLLM("FLASHINFER_TRTLLM", "flashinfer_trtllm"),)
    source = _SOURCE
    arch = "SM100 family"
    slicing = "N by 64 per half of w13, by 128 of w2; K by 64"
    padding = PaddingRule(intermediate=64, hidden=256, ungated=128)
    w13_order = "up-gate"
    weight_maps = (_SHUFFLED_W13, _SHUFFLED)
    scale_maps = (_SCALE_W13, _SCALE)


class CuteDslNVFP4(NVFP4Layout):
    """CuteDSL NVFP4: blocks of 64 up rows and 64 gate rows alternate, scales in 128 x 4 tiles.

    `weight`, `scale` and `global_scale` are as in `nvfp4.py`. The intermediate size is rounded up to 64 (128 without a
    gate), the hidden size to 256; before 0.32.0 the engine rounds neither. The kernel takes the scales as a view of
    these bytes. Source: vLLM 0.33.0, `flashinfer_fp4_moe.py` (`prepare_nvfp4_moe_layer_for_flashinfer_cutedsl`).
    """

    id = "flashinfer-cutedsl-nvfp4/1"
    title = "FlashInfer CuteDSL NVFP4"
    readers = (VLLM("FLASHINFER_CUTEDSL", "flashinfer_cutedsl", since="0.32.0", older_differ=True),)
    source = _SOURCE
    arch = "SM100 family"
    slicing = "N by 64 per half of w13, by 128 of w2; K by 64"
    padding = PaddingRule(intermediate=64, hidden=256, ungated=128)
    w13_order = "up-gate"
    weight_maps = (_CUTEDSL_WEIGHT_W13, IDENTITY)
    scale_maps = (_CUTEDSL_SCALE_W13, TILE_128X4)


class FlashInferCutlassNVFP4(TiledNVFP4):
    """CUTLASS NVFP4 x NVFP4: as `cutlass-nvfp4/1`, but w13 is up rows, then gate rows."""

    id = "flashinfer-cutlass-nvfp4/1"
    title = "FlashInfer CUTLASS NVFP4"
    readers = (VLLM("FLASHINFER_CUTLASS", "flashinfer_cutlass"),)
    arch = "SM100 and newer"
    padding = PaddingRule(ungated=128)
    w13_order = "up-gate"


# ---------------------------------------------------------------------------------------------------------------- MXFP8


class TrtllmMXFP8(MXFP8Layout):
    """TRTLLM MXFP8: shuffled rows, scales in 128 x 4 tiles.

    `weight` F8_E4M3 `[N, K]`; `scale` uint8 `[N, G]`. The engine rounds the intermediate size up to 128 and the hidden
    size to 256 with scales of 1, where moeq fills up with 0. So both have to be such multiples here. Source: vLLM
    0.33.0, `flashinfer_utils.py` (`_shuffle_mxfp8_moe_weights`).
    """

    id = "trtllm-mxfp8/1"
    title = "FlashInfer TRTLLM MXFP8"
    readers = (VLLM("FLASHINFER_TRTLLM", "flashinfer_trtllm"),)
    source = _SOURCE
    arch = "SM100 family"
    slicing = "I by 128, H by 256"
    w13_order = "up-gate"
    n_multiple = 128
    k_multiple = 128
    weight_maps = (ROWS_128_W13, ROWS_128)
    scale_maps = (_SCALE_W13, _SCALE)

    def problems(self, spec: MatrixSpec) -> list[Problem]:
        found = super().problems(spec)
        axis, hidden = ("n", spec.n) if spec.role == "w2" else ("k", spec.k)
        if hidden % 256:
            above = -(-hidden // 256) * 256
            message = not_multiple(f"the hidden size {hidden}", hidden, 256)
            found.append(Problem(f"layout.{axis}-multiple", message, f"the engine pads it to {above} with scales of 1"))
        return found

    def slices(self, spec: MatrixSpec) -> SliceRule:
        rule = super().slices(spec)
        return SliceRule(256, rule.k) if spec.role == "w2" else SliceRule(rule.n, 256)


# ------------------------------------------------------------------------------------------------------------------ FP8

#: Lower bound to which the engine raises scales of blocks.
MIN_BLOCK_SCALE = 1e-10


class RaisedBlocks(Fp8Layout):
    """FP8 in blocks: `weight` F8_E4M3 and `scale` float32 `[N / 128, K / 128]`, up rows, then gate rows.

    The engine raises smaller scales to 1e-10, which is lossy. Source: vLLM 0.33.0, `flashinfer_utils.py`
    (`prepare_fp8_moe_layer_for_fi`).
    """

    source = _SOURCE
    slicing = "N by 128, K by 128"
    w13_order = "up-gate"
    scope = "block"
    lossy = "scales below 1e-10 become 1e-10, as the engine raises them"
    lossy_as_engine = True
    recodes_scales = True

    def encode(self, name: str, matrix: QuantizedMatrix) -> Tensor:
        found = super().encode(name, matrix)
        return found.clamp(min=MIN_BLOCK_SCALE) if name == "scale" else found


class FlashInferCutlassFp8Block(RaisedBlocks):
    """CUTLASS FP8 in blocks (SM90): `weight` `[N, K]`."""

    id = "flashinfer-cutlass-fp8-block/1"
    title = "FlashInfer CUTLASS FP8, blocks"
    readers = (VLLM("FLASHINFER_CUTLASS", "flashinfer_cutlass", only=Only(weights=("kFp8Static128BlockSym",))),)
    arch = "SM90"

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        order = by_role((UP_GATE_ROWS, IDENTITY_SCALE), spec)
        return {"weight": fp8_bytes(spec, order), "scale": self.scale(spec, order)}


class TrtllmFp8Block(RaisedBlocks):
    """TRTLLM FP8 in blocks: `weight` `[K / 128, N, 128]`, rows shuffled in 16s, blocks of 128 bytes of K outermost."""

    id = "trtllm-fp8-block/1"
    title = "FlashInfer TRTLLM FP8, blocks"
    readers = (VLLM("FLASHINFER_TRTLLM", "flashinfer_trtllm", only=Only(weights=("kFp8Static128BlockSym",))),)
    arch = "SM100 family"

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        weight = fp8_bytes(
            spec, by_role((_BLOCK_MAJOR_BYTES_W13, _BLOCK_MAJOR_BYTES), spec), (spec.k // 128, spec.n, 128)
        )
        return {"weight": weight, "scale": self.scale(spec, by_role((UP_GATE_ROWS, IDENTITY_SCALE), spec))}


class OneScale(Fp8Layout):
    """FP8 with one scale per matrix: `weight` F8_E4M3 `[N, K]`, `scale` float32 `[1]`, up rows before gate rows.

    The engine rounds the intermediate size up to 16 (128 without a gate). Gate and up that have a scale each are
    requantised to the larger, which is lossy. Source: vLLM 0.33.0, `flashinfer_utils.py`
    (`prepare_fp8_moe_layer_for_fi`).
    """

    source = _SOURCE
    padding = PaddingRule(intermediate=16, ungated=128, same_scale=True)
    w13_order = "up-gate"
    scope = "tensor"
    k_multiple = 16
    rearranges = True  # except where gate and up have two scales, which the reference path packs
    lossy = "gate and up, which have a scale each, are requantised to the larger, as the engine does"
    rounds_jointly = True
    lossy_as_engine = True

    def losses(self, matrix: QuantizedMatrix) -> int:
        if not has_two_scales(matrix):
            return super().losses(matrix)
        written = to_larger_scale(matrix)
        return changed(matrix.codes, written.codes) + changed(matrix.scales, written.scales)

    def check_values(self, matrix: QuantizedMatrix) -> None:
        if not has_two_scales(matrix):
            super().check_values(matrix)
        elif not self.allow_lossy:
            Layout.check_values(self, matrix)  # says what would be lost

    def written(self, matrix: QuantizedMatrix) -> QuantizedMatrix:
        return to_larger_scale(matrix) if has_two_scales(matrix) else matrix


class FlashInferCutlassFp8Tensor(OneScale):
    """CUTLASS FP8 with one scale per matrix: up rows, then gate rows."""

    id = "flashinfer-cutlass-fp8-tensor/1"
    title = "FlashInfer CUTLASS FP8, one scale per matrix"
    readers = (VLLM("FLASHINFER_CUTLASS", "flashinfer_cutlass", only=Only(weights=("kFp8StaticTensorSym",))),)
    arch = "SM90 and newer"
    slicing = "N by 16, K by 16"
    n_multiple = 16
    weight_maps = (UP_GATE_ROWS, IDENTITY_SCALE)


class TrtllmFp8Tensor(OneScale):
    """TRTLLM FP8 with one scale per matrix: rows shuffled in 32s."""

    id = "trtllm-fp8-tensor/1"
    title = "FlashInfer TRTLLM FP8, one scale per matrix"
    readers = (VLLM("FLASHINFER_TRTLLM", "flashinfer_trtllm", only=Only(weights=("kFp8StaticTensorSym",))),)
    arch = "SM100 family"
    slicing = "N by 16 per half of w13, by 32 of w2; K by 16"
    weight_maps = (ROWS_128_W13, ROWS_128)


# ----------------------------------------------------------------------------------------------------------------- int4


class TrtllmMxInt4(Layout):
    """TRTLLM MxInt4: symmetric int4 in groups of 32 with bf16 scales.

    Codes become two's complement (`code xor 8`), rows are shuffled, K is cut in blocks of 256 codes: `weight` uint8
    `[K / 256, N, 128]`; `scale` bf16, flat `[N * G]`, shuffled and in 128 x 4 tiles. H and I must be multiples of 256.
    Source: vLLM 0.33.0, `flashinfer_mxint4_moe.py`.
    """

    id = "trtllm-mxint4/1"
    title = "FlashInfer TRTLLM MxInt4"
    readers = (VLLM("FLASHINFER_TRTLLM", loads=False),)
    source = _SOURCE
    elements = ("int4",)
    schemes = "int4 symmetric in groups of 32 with bf16 scales, no bias"
    arch = "SM100 family"
    slicing = "N by 256, K by 256"
    w13_order = "up-gate"
    scale_dtypes = ("bf16",)
    group_sizes = (32,)
    channelwise = False
    biased = False
    n_multiple = 256
    k_multiple = 256

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        weight, scale = by_role((_BLOCK_MAJOR_W13, _BLOCK_MAJOR), spec), by_role((_SCALE_W13, _SCALE), spec)
        shape = (spec.k // 256, spec.n, 128)
        return {
            "weight": Part("codes", weight, shape, "U8", 4, flip=8),
            "scale": Part("scales", scale, (spec.n * spec.num_groups,), "BF16", 16, group=spec.group_size),
        }

"""MXFP4 and NVFP4 for vLLM's own CUTLASS kernels: weights in the order of rows, scales in 128 x 4 tiles."""

from __future__ import annotations

from moeq.layouts.base import PaddingRule
from moeq.layouts.mxfp4 import TILE_128X4, MXFP4Layout
from moeq.layouts.nvfp4 import TiledNVFP4
from moeq.layouts.readers import VLLM


class CutlassMXFP4(MXFP4Layout):
    """MXFP4 x MXFP4: `weight` uint8 `[N, K / 2]`, `scale` uint8 `[N, G]`, `bias` as stored.

    w13 is gate rows, then up rows. Source: vLLM 0.33.0, `oracle/mxfp4.py` (CUTLASS_MXFP4_MXFP4).
    """

    id = "cutlass-mxfp4/1"
    title = "CUTLASS MXFP4 x MXFP4"
    readers = (VLLM("CUTLASS_MXFP4_MXFP4", since="0.32.0"),)
    source = "vLLM 0.33.0"
    arch = "SM100 and newer"
    slicing = "N by 128, K by 128"
    padding = PaddingRule(intermediate=128, hidden=128)
    n_multiple = 128
    k_multiple = 128
    scale_maps = (TILE_128X4,)


class CutlassNVFP4(TiledNVFP4):
    """NVFP4 x NVFP4 for vLLM's CUTLASS kernel, and for FlashInfer CuteDSL in batches.

    w13 is gate rows, then up rows. Tiles are laid over gate and up together, so each half must be a multiple of 64
    rows: the engine does not pad gated w13. It pads w13 without a gate to a multiple of 128. Source: vLLM 0.33.0,
    `flashinfer_fp4_moe.py` (`prepare_nvfp4_moe_layer_for_fi_or_cutlass`).
    """

    id = "cutlass-nvfp4/1"
    title = "CUTLASS NVFP4 (vLLM), FlashInfer CuteDSL NVFP4 in batches"
    readers = (VLLM("VLLM_CUTLASS", "cutlass"), VLLM("FLASHINFER_CUTEDSL_BATCHED", loads=False))
    arch = "SM100 and newer"
    padding = PaddingRule(ungated=128)

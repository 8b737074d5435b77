"""CUTLASS NVFP4 x NVFP4: weights in the order of rows, scales in 128 x 4 tiles (`nvfp4.py`).

* `cutlass-nvfp4/1`: gate rows, then up rows. vLLM's own CUTLASS kernel, and FlashInfer CuteDSL in batches.
* `flashinfer-cutlass-nvfp4/1`: up rows, then gate rows. FlashInfer CUTLASS.

Tiles are laid over gate and up together, so a half must be a multiple of 64 rows: the engine pads none where there is a
gate. Without one it pads to 128.

Source: vLLM 0.33.0, `flashinfer_fp4_moe.py` (`prepare_nvfp4_moe_layer_for_fi_or_cutlass`).
"""

from __future__ import annotations

from moeq.layouts.base import PaddingRule
from moeq.layouts.nvfp4 import TiledNVFP4


class CutlassNVFP4(TiledNVFP4):
    """See the module."""

    id = "cutlass-nvfp4/1"
    title = "CUTLASS NVFP4 (vLLM), FlashInfer CuteDSL NVFP4 in batches"
    arch = "SM100 and newer"
    padding = PaddingRule(ungated=128)


class FlashInferCutlassNVFP4(TiledNVFP4):
    """See the module."""

    id = "flashinfer-cutlass-nvfp4/1"
    title = "FlashInfer CUTLASS NVFP4"
    arch = "SM100 and newer"
    padding = PaddingRule(ungated=128)
    w13_order = "up-gate"

"""NVFP4 for the b12x package and for FlashInfer's b12x kernels.

`weight`, `scale` and `global_scale` are as in `nvfp4.py`, in the order of rows.
"""

from __future__ import annotations

from dataclasses import replace

from moeq.errors import MoeqError
from moeq.layouts.base import PaddingRule
from moeq.layouts.fp8 import E4M3_MAX
from moeq.layouts.nvfp4 import TiledNVFP4, global_scale_of
from moeq.layouts.parts import changed
from moeq.layouts.readers import VLLM, Only
from moeq.matrix import QuantizedMatrix


class B12xNVFP4(TiledNVFP4):
    """NVFP4 as vLLM hands it to the b12x package for 4-bit activations; the package makes its own copy from that.

    w13 is gate rows, then up rows. The intermediate size is rounded up to 64, without a gate to 128. Source: vLLM
    0.33.0, `b12x_moe.py` (`prepare_nvfp4_moe_layer_for_b12x`).
    """

    id = "b12x-nvfp4/1"
    title = "B12X NVFP4, 4-bit activations"
    readers = (VLLM("B12X", "b12x", since="0.29.0"),)
    arch = "SM120, SM121"
    padding = PaddingRule(intermediate=64, ungated=128)


class B12xNVFP4A16(TiledNVFP4):
    """NVFP4 as vLLM hands it to the b12x package for 16-bit activations: w13 is up rows, then gate rows."""

    id = "b12x-nvfp4-a16/1"
    title = "B12X NVFP4, 16-bit activations"
    readers = (
        VLLM("B12X", "b12x", since="0.29.0", weights_only=True, only=Only(activations="none")),
        VLLM("B12X", loads=False, only=Only(env="VLLM_B12X_MOE_FP4_FORCE_A16=1")),
    )
    arch = "SM120, SM121"
    padding = PaddingRule(intermediate=64, ungated=128)
    w13_order = "up-gate"


class FlashInferB12xNVFP4(TiledNVFP4):
    """FlashInfer's b12x kernels: as `flashinfer-cutlass-nvfp4/1`, with the global scale inside the scales.

    The engine's class multiplies the scales by the global scale and rounds them to E4M3; the global scale becomes 1.
    That changes numbers, so it is refused unless losses are allowed. Source: vLLM 0.33.0, `flashinfer_b12x_moe.py`
    (`process_weights_after_loading`).
    """

    id = "flashinfer-b12x-nvfp4/1"
    title = "FlashInfer B12X NVFP4"
    readers = (VLLM("FLASHINFER_B12X", "flashinfer_b12x", lossy=True),)
    source = "vLLM 0.33.0, FlashInfer 0.7.2"
    arch = "SM120, SM121"
    padding = PaddingRule(ungated=128)
    w13_order = "up-gate"
    lossy = "scales are multiplied by the global scale and rounded to E4M3, as the engine does at load"
    lossy_as_engine = True
    rounds_jointly = True

    def losses(self, matrix: QuantizedMatrix) -> int:
        baked = self.written(matrix)
        return changed(matrix.scales, baked.scales) + changed(global_scale_of(matrix), global_scale_of(baked))

    def check_values(self, matrix: QuantizedMatrix) -> None:
        products = matrix.scales.float() * global_scale_of(matrix)[0]
        num_beyond = int((~(products.abs() <= E4M3_MAX)).sum())  # how torch casts these depends on its version
        if num_beyond:
            raise MoeqError(
                "usage.scale-range",
                f"{self.id} stores scales times the global scale, which E4M3 cannot hold for {num_beyond} of "
                f"{matrix.scales.numel()} scales of {matrix.spec.role}",
                "moeq oracle SRC lists the backends that keep the global scale",
            )
        super().check_values(matrix)

    def written(self, matrix: QuantizedMatrix) -> QuantizedMatrix:
        """Return the matrix with the gate's global scale in its scales, and 1 as its global scale."""
        import torch

        shared = global_scale_of(matrix)
        scales = (matrix.scales.float() * shared[0]).to(torch.float8_e4m3fn)
        return replace(matrix, scales=scales, global_scale=torch.ones_like(shared))

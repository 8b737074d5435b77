"""FlashInfer TRTLLM MxInt4: symmetric int4 in groups of 32 with bf16 scales.

Codes become two's complement (`code xor 8`), rows are shuffled (`flashinfer.py`), K is cut in blocks of 256 codes:
`weight` uint8 `[K / 256, N, 128]`; `scale` bf16, flat `[N * G]`, shuffled and in 128 x 4 tiles. H and I must be
multiples of 256. Source: vLLM 0.33.0, `flashinfer_mxint4_moe.py`; FlashInfer 0.7.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeq.layouts.arranged import ArrangedLayout, Part
from moeq.layouts.flashinfer import BLOCK_MAJOR, BLOCK_MAJOR_W13, SCALE, SCALE_W13
from moeq.layouts.mxfp4 import by_role
from moeq.matrix import MatrixSpec

if TYPE_CHECKING:
    pass


class TrtllmMxInt4(ArrangedLayout):
    """See the module."""

    id = "trtllm-mxint4/1"
    title = "FlashInfer TRTLLM MxInt4"
    source = "vLLM 0.33.0, FlashInfer 0.7.2"
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
        weight, scale = by_role(BLOCK_MAJOR_W13, BLOCK_MAJOR, spec), by_role(SCALE_W13, SCALE, spec)
        shape = (spec.k // 256, spec.n, 128)
        return {
            "weight": Part("codes", weight, shape, "U8", 4, flip=8),
            "scale": Part("scales", scale, (spec.n * spec.num_groups,), "BF16", 16, group=spec.group_size),
        }

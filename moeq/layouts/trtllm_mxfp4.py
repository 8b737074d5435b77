"""FlashInfer TRTLLM MXFP4, for bf16 and for MXFP8 activations alike (the same bytes).

`weight` uint8 `[N, K / 2]` with shuffled rows, w13 rows paired up, gate first (`flashinfer.py`); `scale` uint8 `[N,
G]`, shuffled and in 128 x 4 tiles; `bias` float32 in the order of the rows. gpt-oss's interleaved rows give the
same result as separate gate and up. Source: vLLM 0.33.0, `oracle/mxfp4.py`; FlashInfer 0.7.2.
"""

from __future__ import annotations

from moeq.layouts.arranged import Part
from moeq.layouts.base import PaddingRule
from moeq.layouts.flashinfer import BIAS, BIAS_W13, SCALE, SCALE_W13, SHUFFLED, SHUFFLED_W13
from moeq.layouts.mxfp4 import MXFP4Layout, bias_as, by_role, scale_bytes, weight_bytes
from moeq.matrix import MatrixSpec


class TrtllmMXFP4(MXFP4Layout):
    """See the module."""

    id = "trtllm-mxfp4/1"
    title = "FlashInfer TRTLLM MXFP4, bf16 or MXFP8 activations"
    source = "vLLM 0.33.0, FlashInfer 0.7.2"
    arch = "SM100 family"
    slicing = "N by 64 per half of w13, by 128 of w2; K by 128"
    padding = PaddingRule(intermediate=128, hidden=256)
    w13_order = "up-gate"

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return {
            "weight": weight_bytes(spec, by_role(SHUFFLED_W13, SHUFFLED, spec)),
            "scale": scale_bytes(spec, by_role(SCALE_W13, SCALE, spec)),
            **bias_as(spec, by_role(BIAS_W13, BIAS, spec), "F32"),
        }

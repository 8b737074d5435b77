"""FlashInfer TRTLLM MXFP8: shuffled rows, w13 rows paired up, gate (`flashinfer.py`), scales in 128 x 4 tiles.

`weight` F8_E4M3 `[N, K]`; `scale` uint8 `[N, G]`. The engine rounds the intermediate size up to 128 and the hidden size
to 256, with scales of 1 where moeq fills up with 0, so here they have to be such multiples already.

Source: vLLM 0.33.0, `flashinfer_utils.py` (`_shuffle_mxfp8_moe_weights`); FlashInfer 0.7.2.
"""

from __future__ import annotations

from moeq.layouts.arranged import ArrangedLayout, Part
from moeq.layouts.base import Problem, SliceRule
from moeq.layouts.flashinfer import BIAS_W13, ROWS_128, SCALE, SCALE_W13
from moeq.layouts.fp8 import fp8_bytes
from moeq.layouts.mxfp4 import by_role, scale_bytes
from moeq.matrix import MatrixSpec


class TrtllmMXFP8(ArrangedLayout):
    """See the module."""

    id = "trtllm-mxfp8/1"
    title = "FlashInfer TRTLLM MXFP8"
    source = "vLLM 0.33.0, FlashInfer 0.7.2"
    elements = ("e4m3",)
    schemes = "mxfp8 (e4m3 codes, e8m0 scales of 32), no bias"
    arch = "SM100 family"
    slicing = "I by 128, H by 256"
    w13_order = "up-gate"
    scale_dtypes = ("e8m0",)
    group_sizes = (32,)
    channelwise = False
    biased = False
    n_multiple = 128
    k_multiple = 128

    def problems(self, spec: MatrixSpec) -> list[Problem]:
        found = super().problems(spec)
        axis, hidden = ("n", spec.n) if spec.role == "w2" else ("k", spec.k)
        if hidden % 256:
            above = -(-hidden // 256) * 256
            message = f"the hidden size {hidden} is not a multiple of 256 ({hidden} % 256 = {hidden % 256})"
            remedy = f"the engine pads it to {above} with scales of 1"
            found.append(Problem(f"layout.{axis}-multiple", message, remedy))
        return found

    def slices(self, spec: MatrixSpec) -> SliceRule:
        rule = super().slices(spec)
        return SliceRule(256, rule.k) if spec.role == "w2" else SliceRule(rule.n, 256)

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return {
            "weight": fp8_bytes(spec, by_role(BIAS_W13, ROWS_128, spec)),
            "scale": scale_bytes(spec, by_role(SCALE_W13, SCALE, spec)),
        }

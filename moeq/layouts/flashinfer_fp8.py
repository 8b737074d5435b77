"""FlashInfer FP8 x FP8: up rows before gate rows; TRTLLM's also shuffled (`flashinfer.py`).

`weight` F8_E4M3 and `scale` float32 (`fp8.py`).

* `flashinfer-cutlass-fp8-block/1` (SM90): `weight` `[N, K]`, `scale` `[N / 128, K / 128]`, both up, then gate.
* `trtllm-fp8-block/1`: `weight` `[K / 128, N, 128]`, rows shuffled in 16s, blocks of 128 bytes of K outermost; `scale`
  `[N / 128, K / 128]`. Both are up, then gate.
* `flashinfer-cutlass-fp8-tensor/1`: `weight` `[N, K]` up, then gate; `scale` `[1]`.
* `trtllm-fp8-tensor/1`: `weight` `[N, K]`, rows shuffled in 32s, w13 rows paired up, gate; `scale` `[1]`.

With blocks the engine raises scales below 1e-10 to that, which is lossy; with one scale it rounds the intermediate size
up to 16 (128 without a gate), and gate and up that have a scale each are requantised to the larger, which is lossy.

Source: vLLM 0.33.0, `flashinfer_utils.py` (`prepare_fp8_moe_layer_for_fi`); FlashInfer 0.7.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moeq.layouts.arranged import ArrangedLayout, Part, changed
from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import PaddingRule
from moeq.layouts.flashinfer import BIAS_W13, ROWS_128
from moeq.layouts.fp8 import PLAIN, UP_GATE, Fp8Layout, fp8_bytes, has_two_scales, to_larger_scale
from moeq.layouts.mxfp4 import by_role
from moeq.matrix import MatrixSpec, QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor

#: What the engine raises smaller scales of blocks to.
LEAST = 1e-10

#: Rows shuffled in 16s, in blocks of 128 bytes of K.
_BLOCK_MAJOR = Arrangement("n e8 d2, k j128 -> k n d e j")
_BLOCK_MAJOR_W13 = Arrangement("h2 n e8 d2, k j128 -> k ~h n d e j")


class RaisedBlocks(Fp8Layout):
    """Base of the layouts with blocks."""

    source = "vLLM 0.33.0, FlashInfer 0.7.2"
    slicing = "N by 128, K by 128"
    w13_order = "up-gate"
    scope = "block"
    lossy = "scales below 1e-10 become 1e-10, as the engine raises them"
    lossy_as_engine = True

    def recodes(self, part: Part, spec: MatrixSpec) -> bool:
        return part.field == "scales" or super().recodes(part, spec)

    def encode(self, name: str, matrix: QuantizedMatrix) -> Tensor:
        found = super().encode(name, matrix)
        return found.clamp(min=LEAST) if name == "scale" else found


class FlashInferCutlassFp8Block(RaisedBlocks):
    """See the module."""

    id = "flashinfer-cutlass-fp8-block/1"
    title = "FlashInfer CUTLASS FP8, blocks"
    arch = "SM90"

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        order = by_role(UP_GATE, PLAIN, spec)
        return {"weight": fp8_bytes(spec, order), "scale": self.scale(spec, order)}


class TrtllmFp8Block(RaisedBlocks):
    """See the module."""

    id = "trtllm-fp8-block/1"
    title = "FlashInfer TRTLLM FP8, blocks"
    arch = "SM100 family"

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        weight = fp8_bytes(spec, by_role(_BLOCK_MAJOR_W13, _BLOCK_MAJOR, spec), (spec.k // 128, spec.n, 128))
        return {"weight": weight, "scale": self.scale(spec, by_role(UP_GATE, PLAIN, spec))}


class OneScale(Fp8Layout):
    """Base of the layouts with one scale per matrix, whose sizes the engine rounds up by one rule."""

    source = "vLLM 0.33.0, FlashInfer 0.7.2"
    padding = PaddingRule(intermediate=16, ungated=128, same_scale=True)
    w13_order = "up-gate"
    scope = "tensor"
    k_multiple = 16
    rearranges = True  # but for two scales, which the fast path leaves to the reference path
    lossy = "gate and up, which have a scale each, are requantised to the larger, as the engine does"
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
            ArrangedLayout.check_values(self, matrix)  # says what would be lost

    def pack_into(self, matrix: QuantizedMatrix, out: Mapping[str, Tensor]) -> None:
        self.check(matrix.spec)
        self.check_values(matrix)
        super().pack_into(to_larger_scale(matrix) if has_two_scales(matrix) else matrix, out)


class FlashInferCutlassFp8Tensor(OneScale):
    """See the module."""

    id = "flashinfer-cutlass-fp8-tensor/1"
    title = "FlashInfer CUTLASS FP8, one scale per matrix"
    arch = "SM90 and newer"
    slicing = "N by 16, K by 16"
    n_multiple = 16

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return {"weight": fp8_bytes(spec, by_role(UP_GATE, PLAIN, spec)), "scale": self.scale(spec)}


class TrtllmFp8Tensor(OneScale):
    """See the module."""

    id = "trtllm-fp8-tensor/1"
    title = "FlashInfer TRTLLM FP8, one scale per matrix"
    arch = "SM100 family"
    slicing = "N by 16 per half of w13, by 32 of w2; K by 16"

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return {"weight": fp8_bytes(spec, by_role(BIAS_W13, ROWS_128, spec)), "scale": self.scale(spec)}

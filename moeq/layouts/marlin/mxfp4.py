"""MXFP4 on Marlin: the 4-bit weight map of `marlin-wna16`, one exponent byte per 32 codes.

vLLM keeps gpt-oss's w13 rows interleaved (gate 0, up 0, gate 1, ...), because its activation reads pairs: those are
the `-interleaved` ids. SGLang de-interleaves them and so takes the plain ids.

Source: vLLM 0.33.0, `marlin_utils_fp4.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import PaddingRule, W13Order
from moeq.layouts.marlin.maps import MX_GROUPED, MX_SINGLE, SINGLE, WEIGHT, WEIGHT_A8, scale_part, weight_part
from moeq.layouts.mxfp4 import MXFP4Layout, bias_as, refuse_exponents_above
from moeq.layouts.parts import Part
from moeq.layouts.readers import MOEQ, VLLM, Only, Reader
from moeq.matrix import MatrixSpec, QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor

# Marlin's maps for row 2 i + h of the interleaved matrix: its lowest row digit is h, so each map's lowest row digit
# (r or c) gives its last bit to h.
WEIGHT_PAIRS = Arrangement("h2 n c4 o2 r4, k e2 p4 q2 -> k n r h p c | q o e")
_WEIGHT_A8_PAIRS = Arrangement("h2 n m4 r4, k e2 p4 q4 -> k n r h p m | q e")
_GROUPED_PAIRS = Arrangement("h2 n o2 s2 t2 r4, g -> g n r h o t s")
_SINGLE_PAIRS = Arrangement("h2 n a2 u2 b4, g -> g n b a h u")
_SINGLE_A8_PAIRS = Arrangement("h2 n a4 b4, g -> g n b a h")

_FP8 = Only(env="VLLM_MARLIN_INPUT_DTYPE=fp8")


class MarlinMXFP4(MXFP4Layout):
    """MXFP4 for bf16 parameters: every exponent byte is kept.

    `weight` int32 `[K / 16, 2 N]`, `scale` uint8 `[K / 32, N]`, `bias` `[N]` in the parameters' dtype. Scales lie in
    the group order and, within four columns, in the order 0, 2, 1, 3.
    """

    id = "marlin-mxfp4/1"
    title = "Marlin MXFP4, bf16 parameters"
    readers: ClassVar[tuple[Reader, ...]] = (
        VLLM("MARLIN", "marlin", dtypes=("bf16",), weights_only=True),
        MOEQ("MARLIN"),
    )
    source = "vLLM 0.33.0"
    arch = "SM75 and newer"
    slicing = "N by 64, K by 32 (at least 64)"
    padding = PaddingRule(intermediate=128, hidden=256)
    n_multiple = 64
    single_group_differs = True
    params: ClassVar[str] = "BF16"

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        pairs = self.w13_order == "interleaved" and spec.halves == 2
        weight = WEIGHT_PAIRS if pairs else WEIGHT[4]
        orders = (_SINGLE_PAIRS, _GROUPED_PAIRS) if pairs else (MX_SINGLE, MX_GROUPED)
        bias = bias_as(spec, _SINGLE_A8_PAIRS if pairs else SINGLE, self.params)
        return {"weight": weight_part(spec, weight), "scale": scale_part(spec, *orders), **bias}


class MarlinMXFP4Interleaved(MarlinMXFP4):
    id = "marlin-mxfp4-interleaved/1"
    title = "Marlin MXFP4, bf16 parameters, gate and up interleaved (gpt-oss on vLLM)"
    readers = (VLLM("MARLIN", "marlin", dtypes=("bf16",), weights_only=True, only=Only(activation="swigluoai")), MOEQ())
    w13_order: ClassVar[W13Order] = "interleaved"


class MarlinMXFP4Fp16(MarlinMXFP4):
    """MXFP4 for fp16 parameters: exponent bytes below 103 become 0 and above 142 become 255 (fp16's range).

    vLLM's kernel decodes E8M0 scales for bf16 only.
    """

    id = "marlin-mxfp4-fp16/1"
    title = "Marlin MXFP4, fp16 parameters"
    readers = (VLLM("MARLIN", loads=False, only=Only(dtype="fp16")),)
    params = "F16"
    exact_scales: ClassVar[tuple[int, int]] = (103, 142)
    rearranges = True
    lossy = "scale exponents below 103 or above 142 saturate in fp16, and biases are rounded to fp16"
    recodes_scales = True

    def encode(self, name: str, matrix: QuantizedMatrix) -> Tensor:
        found = super().encode(name, matrix)
        if name != "scale":
            return found
        least, greatest = self.exact_scales
        return found.masked_fill(found < least, 0).masked_fill(found > greatest, 255)


class MarlinMXFP4Fp16Interleaved(MarlinMXFP4Fp16):
    id = "marlin-mxfp4-fp16-interleaved/1"
    title = "Marlin MXFP4, fp16 parameters, gate and up interleaved (gpt-oss on vLLM)"
    readers = (VLLM("MARLIN", loads=False, only=Only(dtype="fp16", activation="swigluoai")),)
    w13_order = "interleaved"


class MarlinMXFP4Fp8Act(MarlinMXFP4):
    """MXFP4 for fp8 activations: 32 x 32 tiles, single scale order without the 0, 2, 1, 3.

    Exponent bytes are stored plus 6, so 249 is the largest.
    """

    id = "marlin-mxfp4-fp8act/1"
    title = "Marlin MXFP4, bf16 parameters, fp8 activations"
    readers = (VLLM("MARLIN", "marlin", dtypes=("bf16",), weights_only=True, only=_FP8),)
    arch = "SM89 and SM12x"
    slicing = "N by 64, K by 32"
    single_group_differs = False

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        pairs = self.w13_order == "interleaved" and spec.halves == 2
        single = _SINGLE_A8_PAIRS if pairs else SINGLE
        return {
            "weight": weight_part(spec, _WEIGHT_A8_PAIRS if pairs else WEIGHT_A8[4]),
            "scale": scale_part(spec, single, single),
            **bias_as(spec, single, self.params),
        }

    def check_values(self, matrix: QuantizedMatrix) -> None:
        super().check_values(matrix)
        why = f"{self.id} stores exponents plus 6 in a byte, so 249 is the largest"
        refuse_exponents_above(249, matrix, why, "marlin-mxfp4/1 (16-bit activations) keeps every exponent")

    def encode(self, name: str, matrix: QuantizedMatrix) -> Tensor:
        found = super().encode(name, matrix)
        return found + 6 if name == "scale" else found

    def decode(self, name: str, elements: Tensor, spec: MatrixSpec) -> Tensor:
        found = super().decode(name, elements, spec)
        return found - 6 if name == "scale" else found


class MarlinMXFP4Fp8ActInterleaved(MarlinMXFP4Fp8Act):
    id = "marlin-mxfp4-fp8act-interleaved/1"
    title = "Marlin MXFP4, fp8 activations, gate and up interleaved (gpt-oss on vLLM)"
    readers = (
        VLLM("MARLIN", "marlin", dtypes=("bf16",), weights_only=True, only=replace(_FP8, activation="swigluoai")),
    )
    w13_order = "interleaved"

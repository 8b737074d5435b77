"""int4 for vLLM's RDNA3 kernel (ExLlama shuffle)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import TensorSpec
from moeq.layouts.layout import Layout
from moeq.layouts.mxfp4 import scale_as
from moeq.layouts.parts import Part
from moeq.layouts.readers import VLLM
from moeq.matrix import MatrixSpec, QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor


_WEIGHT = Arrangement("n, k y4 b2 -> k n | b y")
_SCALE = Arrangement("n, g -> g n")


class Rdna3Int4(Layout):
    """int4 words along K, whose even k fill the low half and odd k the high half.

    `weight` int32 `[K / 8, N]`, `scale` `[G, N]` as stored, `zero` int32 `[G, N / 8]` with every nibble 7 (the kernel
    adds one). Groups have to be symmetric. Source: vLLM 0.33.0 (RDNA3 WNA16), ExLlamaV2 shuffle.
    """

    id = "rdna3-int4/1"
    title = "RDNA3 int4 (ExLlama shuffle)"
    readers = (VLLM("RDNA3", loads=False),)
    source = "vLLM 0.33.0"
    elements = ("int4",)
    schemes = "int4 symmetric with groups (compressed-tensors)"
    arch = "gfx1100"
    slicing = "N by 8, K by whole groups"
    channelwise = False
    biased = False
    n_multiple = 8

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return {
            "weight": Part("codes", _WEIGHT, (spec.k // 8, spec.n), "I32", 4),
            "scale": scale_as(spec, _SCALE, (spec.num_groups, spec.n)),
        }

    def extra_tensors(self, spec: MatrixSpec) -> dict[str, TensorSpec]:
        return {"zero": TensorSpec((spec.num_groups, spec.n // 8), "I32")}

    def fill_extra(self, matrix: QuantizedMatrix, out: Mapping[str, Tensor]) -> None:
        if "zero" in out:
            out["zero"].fill_(0x77777777)

    def slice_parts(
        self, parts: Mapping[str, Tensor], spec: MatrixSpec, *, n: tuple[int, int], k: tuple[int, int]
    ) -> dict[str, Tensor]:
        cut = super().slice_parts(parts, spec, n=n, k=k)
        shape = (cut["scale"].shape[0], cut["scale"].shape[1] // 8)
        return cut | {"zero": parts["zero"].new_full(shape, 0x77777777)}

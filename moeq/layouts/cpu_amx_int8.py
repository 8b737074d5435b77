"""CPU (AMX) int8 W8A8: blocks of 32 rows, four columns together, each block followed by its row sums.

`weight` uint8 `[N / 32, 32 (K + 4)]`: int8 values, then 32 int32 `128 * sum over K` (activations are offset by 128);
`scale` float32 `[N, 1]`, `bias` float32. The sums run over all of K, so nothing can be cut along K.
Source: vLLM 0.33.0, `CPUExpertsInt8`. Golden bytes: `convert_weight_packed` of vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moeq.layouts.arranged import ArrangedLayout, Part, is_gated_w13
from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import PaddingRule, Problem, SliceRule, TensorSpec
from moeq.layouts.mxfp4 import IDENTITY_SCALE, bias_as
from moeq.layouts.words import block_sums
from moeq.matrix import MatrixSpec, QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor

_WEIGHT = Arrangement("n r32, k x4 -> n k r x")

#: Bytes of the 32 int32 sums of a block.
_SUMS = 128


class CpuAmxInt8(ArrangedLayout):
    """See the module."""

    id = "cpu-amx-int8/1"
    title = "CPU int8 W8A8"
    source = "vLLM 0.33.0"
    elements = ("int8",)
    schemes = "int8 with one scale per channel, activations quantised per token"
    arch = "x86 with AMX"
    slicing = "N by 32; none along K"
    padding = PaddingRule(intermediate=32)
    scale_dtypes = ("f16", "bf16", "f32")
    n_multiple = 32
    k_multiple = 32

    def problems(self, spec: MatrixSpec) -> list[Problem]:
        found = super().problems(spec)
        if spec.num_groups > 1:
            message = f"groups of {spec.group_size}; its kernel reads one scale per channel"
            found.append(Problem("layout.group-size", message))
        return found

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return {
            "weight": Part("codes", _WEIGHT, (spec.n // 32, 32 * spec.k), "U8", 8, flip=0x80),
            "scale": Part("scales", IDENTITY_SCALE, (spec.n, 1), "F32", 32, group=spec.group_size),
            **bias_as(spec, IDENTITY_SCALE, "F32"),
        }

    def tensors(self, spec: MatrixSpec) -> dict[str, TensorSpec]:
        found = super().tensors(spec)
        return found | {"weight": TensorSpec((spec.n // 32, 32 * spec.k + _SUMS), "U8")}

    def slices(self, spec: MatrixSpec) -> SliceRule:
        return SliceRule(super().slices(spec).n, None)

    def pack_into(self, matrix: QuantizedMatrix, out: Mapping[str, Tensor]) -> None:
        if "weight" not in out:
            super().pack_into(matrix, out)
            return
        import torch

        spec = matrix.spec
        codes = torch.empty(self.parts(spec)["weight"].shape, dtype=torch.uint8)
        super().pack_into(matrix, {**out, "weight": codes})
        sums = 128 * (block_sums(matrix.codes, spec.k) - 128 * spec.k)
        out["weight"][:, :-_SUMS] = codes
        out["weight"][:, -_SUMS:] = sums.view(spec.n // 32, 32).view(torch.uint8)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec) -> QuantizedMatrix:
        return super().unpack({**parts, "weight": parts["weight"][:, :-_SUMS].contiguous()}, spec)

    def slice_parts(
        self, parts: Mapping[str, Tensor], spec: MatrixSpec, *, n: tuple[int, int], k: tuple[int, int]
    ) -> dict[str, Tensor]:
        blocks = parts["weight"]
        codes = {**parts, "weight": blocks[:, :-_SUMS].contiguous()}
        cut = self.cut_parts(codes, spec, self.shard_spec(spec, n, k), n=n, k=k)
        by_half = blocks.view(2 if is_gated_w13(spec) else 1, -1, blocks.shape[1])[:, n[0] // 32 : n[1] // 32]
        return cut | {"weight": by_half.reshape(-1, blocks.shape[1])}

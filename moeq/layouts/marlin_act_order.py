"""Marlin with act-order (GPTQ `desc_act`): rows of K sorted by their group.

`permutation` (int32 `[K]`) is the stable argsort of the group of each input column; packed row i holds column
`permutation[i]`, and `group_index` (int32 `[K]`) is the sorted group. Weights are then the plain Marlin map and scales
the group order. Engines sort with an unstable argsort, so rows of one group may come in another order than theirs:
moeq's packing is an equivalent of an engine's own, not always its bytes; within one group any order means the same.

A projection of a single group, beside others that have more, is in order as it is: its permutation is the identity.
Along K nothing can be cut: a shard's columns may use any group, so each rank keeps all scales and the shard's rows are
sorted anew. Nothing is padded. Source: SGLang 0.5.23; vLLM up to 0.29 (newer ones have no act-order any more).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from moeq.errors import MoeqError
from moeq.layouts.arranged import ArrangedLayout, Part
from moeq.layouts.base import PaddingRule, Problem, SliceRule, TensorSpec
from moeq.layouts.marlin import GROUPED, SINGLE, WEIGHT, bias_part, scale_part, weight_part
from moeq.layouts.words import take_columns
from moeq.matrix import MatrixSpec, QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor


class MarlinActOrder(ArrangedLayout):
    """Marlin int4 / int8 with act-order (see the module)."""

    id = "marlin-act-order/1"
    title = "Marlin with act-order"
    source = "SGLang 0.5.23, vLLM 0.26.0"
    elements = ("int4", "int8")
    schemes = "gptq int4 and int8 with act-order, symmetric"
    arch = "SM75 and newer (SM75: fp16 only)"
    slicing = "N by 64; none along K"
    padding = PaddingRule()
    act_order = True
    n_multiple = 64
    k_multiple = 16

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        order = SINGLE if spec.num_groups == 1 else GROUPED
        parts = {"weight": weight_part(spec, WEIGHT[spec.bits]), "scale": scale_part(spec, order)}
        return parts | ({} if spec.bias_dtype is None else {"bias": bias_part(spec)})

    def extra_tensors(self, spec: MatrixSpec) -> dict[str, TensorSpec]:
        vector = TensorSpec((spec.k,), "I32")
        return {"permutation": vector, "group_index": vector}

    def problems(self, spec: MatrixSpec) -> list[Problem]:
        found = super().problems(spec)
        if not spec.act_order and spec.num_groups > 1:
            found.append(Problem("layout.act-order", "the matrix has no act-order", "marlin-wna16/1 is for those"))
        return found

    def slices(self, spec: MatrixSpec) -> SliceRule:
        return SliceRule(super().slices(spec).n, None)

    def check_values(self, matrix: QuantizedMatrix) -> None:
        super().check_values(matrix)
        index = _groups(matrix)
        if int(index.min()) < 0 or int(index.max()) >= matrix.spec.num_groups:
            raise MoeqError("source.bad-group-index", f"{matrix.spec.role}: group indices must lie in 0 .. groups - 1")

    def encode(self, name: str, matrix: QuantizedMatrix) -> Tensor:
        found = super().encode(name, matrix)
        return take_columns(found, _order(matrix)) if name == "weight" else found

    def fill_extra(self, matrix: QuantizedMatrix, out: Mapping[str, Tensor]) -> None:
        order = _order(matrix)
        if "permutation" in out:
            out["permutation"].copy_(order)
        if "group_index" in out:
            out["group_index"].copy_(_groups(matrix)[order])

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec) -> QuantizedMatrix:
        import torch

        matrix = super().unpack(parts, spec)
        order = parts["permutation"].long()
        back, index = torch.empty_like(order), torch.empty_like(parts["group_index"])
        back[order] = torch.arange(len(order))
        index[order] = parts["group_index"]
        return replace(matrix, codes=take_columns(matrix.codes, back), group_index=index if spec.act_order else None)

    def slice_parts(
        self, parts: Mapping[str, Tensor], spec: MatrixSpec, *, n: tuple[int, int], k: tuple[int, int]
    ) -> dict[str, Tensor]:
        cut = super().slice_parts(parts, spec, n=n, k=k)
        return cut | {name: parts[name] for name in self.extra_tensors(spec)}


def _order(matrix: QuantizedMatrix) -> Tensor:
    import torch

    return torch.argsort(_groups(matrix), stable=True)


def _groups(matrix: QuantizedMatrix) -> Tensor:
    """The group of each column."""
    import torch

    if matrix.group_index is not None:
        return matrix.group_index
    if matrix.spec.num_groups > 1:
        raise MoeqError("source.bad-group-index", f"{matrix.spec.role}: act-order without group indices")
    return torch.zeros(matrix.spec.k, dtype=torch.int32)

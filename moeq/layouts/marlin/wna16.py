"""int4 and int8 on Marlin: 16-bit activations, act-order, and 8-bit activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from moeq.errors import MoeqError
from moeq.indices import check_indices
from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import PaddingRule, Problem, SliceRule, TensorSpec, check_index_parts
from moeq.layouts.layout import Layout
from moeq.layouts.marlin.maps import (
    GROUPED,
    SINGLE,
    WEIGHT,
    WEIGHT_A8,
    ZERO,
    ZERO_A8,
    scale_part,
    weight_part,
    zero_part,
)
from moeq.layouts.mxfp4 import bias_as
from moeq.layouts.parts import STORED_DTYPE, Part, torch_dtype
from moeq.layouts.readers import MOEQ, VLLM, Only
from moeq.layouts.words import take_columns
from moeq.matrix import MatrixSpec, QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor


class _MarlinIntegers(Layout):
    """Integers in Marlin's order: codes, scales, zero points if the matrix has some, and bias."""

    elements: ClassVar[tuple[str, ...]] = ("int4", "int8")
    n_multiple = 64
    #: Index maps of weights by bits, of scales of several groups along K, and of zero points by bits.
    maps: ClassVar[tuple[Mapping[int, Arrangement], Arrangement, Mapping[int, Arrangement]]] = (WEIGHT, GROUPED, ZERO)

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        weight, grouped, zero = self.maps
        parts = {"weight": weight_part(spec, weight[spec.bits]), "scale": scale_part(spec, SINGLE, grouped)}
        if not spec.symmetric:
            parts["zero"] = zero_part(spec, zero[spec.bits])
        return parts | bias_as(spec, SINGLE)


class MarlinWNA16(_MarlinIntegers):
    """int4 and int8 weights for 16-bit activations, symmetric or with zero points.

    `weight` int32 `[K / 16, 2 N]` (int8: `[K / 16, 4 N]`), `scale` `[G, N]` in the stored dtype, `zero` int32
    `[G, N * bits / 32]`, `bias` `[N]`. int8 codes are offset by 128 and zero points are stored as they count (GPTQ's
    minus one is undone by the scheme). Batched Marlin reads the same bytes.

    Scales lie in the grouped order where the matrix has several groups along K, and in the single order where it has
    one; that is what the kernel reads. vLLM 0.33.0's own loader picks the order for w13 by comparing the group size
    with the intermediate size instead of K. So it packs w13 in the single order, which its kernel then reads as
    grouped, whenever the group size is at least the intermediate size per rank.

    Source: vLLM 0.33.0, `marlin_utils.py`, the Marlin repack kernels and `marlin_template.h`; SGLang 0.5.23 uses the
    same maps.
    """

    id = "marlin-wna16/1"
    title = "Marlin and batched Marlin, 16-bit activations"
    readers = (VLLM("MARLIN", "marlin", weights_only=True), MOEQ("MARLIN"))
    source = "vLLM 0.33.0"
    schemes = "int4 and int8, symmetric or with zero points, group-wise or channel-wise, with bias"
    arch = "SM75 and newer (SM75: fp16 only)"
    slicing = "N by 64, K by whole groups (16 where channel-wise)"
    padding = PaddingRule(intermediate=64, whole_groups=True)
    zero_points = True
    single_group_differs = True
    k_multiple = 16


class MarlinActOrder(_MarlinIntegers):
    """int4 and int8 with act-order (GPTQ `desc_act`): rows of K sorted by their group.

    `permutation` (int32 `[K]`) is the stable argsort of the group of each input column; packed row i holds column
    `permutation[i]`, and `group_index` (int32 `[K]`) is the sorted group. Weights are then the plain Marlin map and
    scales the group order. Engines sort with an unstable argsort, so rows of one group may come in another order than
    theirs: moeq's packing is equivalent to an engine's own, not always the same bytes; within one group any order
    means the same.

    A projection of a single group, beside others that have more, is in order as it is: its permutation is the identity.
    Along K nothing can be cut: a shard's columns may use any group, so each rank keeps all scales and the shard's rows
    are sorted anew. Nothing is padded. Source: SGLang 0.5.23; vLLM up to 0.29 (newer ones have no act-order any more).
    """

    id = "marlin-act-order/1"
    title = "Marlin with act-order"
    readers = (VLLM("MARLIN", "marlin", until="0.29.0", weights_only=True, shards=False, chosen=False), MOEQ("MARLIN"))
    source = "SGLang 0.5.23, vLLM 0.26.0"
    schemes = "gptq int4 and int8 with act-order, symmetric"
    arch = "SM75 and newer (SM75: fp16 only)"
    slicing = "N by 64; none along K"
    act_order = True
    k_multiple = 16

    def extra_tensors(self, spec: MatrixSpec) -> dict[str, TensorSpec]:
        vector = TensorSpec((spec.k,), "I32")
        return {"permutation": vector, "group_index": vector}

    def problems(self, spec: MatrixSpec) -> list[Problem]:
        found = super().problems(spec)
        if not spec.act_order and spec.num_groups > 1:
            found.append(Problem("layout.act-order", "the matrix has no act-order", "marlin-wna16/1 needs none"))
        return found

    def slices(self, spec: MatrixSpec) -> SliceRule:
        return SliceRule(super().slices(spec).n, None)

    def check_values(self, matrix: QuantizedMatrix) -> None:
        super().check_values(matrix)
        check_indices(_groups(matrix), matrix.spec.num_groups, f"{matrix.spec.role}: group index")

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

        check_index_parts(parts, spec, f"{self.id}: {spec.role}")
        matrix = super().unpack(parts, spec)
        order = parts["permutation"].long()
        back, index = torch.empty_like(order), torch.empty_like(parts["group_index"])
        back[order] = torch.arange(len(order))
        index[order] = parts["group_index"]
        return replace(matrix, codes=take_columns(matrix.codes, back), group_index=index if spec.act_order else None)


def _order(matrix: QuantizedMatrix) -> Tensor:
    """Return the columns sorted by their group."""
    import torch

    return torch.argsort(_groups(matrix), stable=True)


def _groups(matrix: QuantizedMatrix) -> Tensor:
    """Return the group of each column."""
    import torch

    if matrix.group_index is not None:
        return matrix.group_index
    if matrix.spec.num_groups > 1:
        raise MoeqError("source.bad-group-index", f"{matrix.spec.role}: act-order without group indices")
    return torch.zeros(matrix.spec.k, dtype=torch.int32)


#: Integer that stands for the largest group scale where activations are int8.
_STEPS = 4096


class _MarlinA8(_MarlinIntegers):
    """8-bit activations: tiles of 32 x 32 codes, scales in the single order.

    Zero points lie in the order of 16-bit activations without its interleave. Source: vLLM 0.33.0, `marlin_utils.py`
    and the repack and `marlin_int4_fp8_preprocess` kernels.
    """

    source = "vLLM 0.33.0"
    padding = PaddingRule(intermediate=64, whole_groups=True)
    zero_points = True
    k_multiple = 32
    maps = (WEIGHT_A8, SINGLE, ZERO_A8)


class MarlinInt8Act(_MarlinA8):
    """int4 and int8 weights for int8 activations.

    With several groups along K, scales become `round(s / max * 4096)` in the scale dtype, kept as int16 bits in that
    dtype, and `global_scale` (float32, one per expert, all equal) is `max / 4096`. `max` runs over all local experts of
    the tensor, so packing takes two passes (`Layout.calibrate`), differs between EP and TP degrees, and cannot be
    sliced. The rounding loses scale bits, so it must be allowed. With one scale per channel the scales stay as they
    are.
    """

    id = "marlin-wna16-int8act/1"
    title = "Marlin, int8 activations"
    readers = (VLLM("MARLIN", loads=False, only=Only(env="VLLM_MARLIN_INPUT_DTYPE=int8", configs=("gptq", "ct"))),)
    schemes = "int4 and int8, symmetric or with zero points"
    arch = "SM75 and newer"
    slicing = "none with groups (scales depend on all local experts); N by 64, K by 32 where channel-wise"
    lossy = "group scales are rounded to 1/4096 of the largest local one"
    calibration_scope = "group scales are stored relative to the largest one of all local experts"

    def extra_tensors(self, spec: MatrixSpec) -> dict[str, TensorSpec]:
        return {"global_scale": TensorSpec((1,), "F32")} if spec.num_groups > 1 else {}

    def fill_extra(self, matrix: QuantizedMatrix, out: Mapping[str, Tensor]) -> None:
        if "global_scale" in out:
            out["global_scale"].fill_(self.calibrated() / _STEPS)

    def slices(self, spec: MatrixSpec) -> SliceRule:
        return super().slices(spec) if spec.num_groups == 1 else SliceRule(None, None)

    def calibrate(self, matrix: QuantizedMatrix) -> float | None:
        return float(matrix.scales.max()) if matrix.spec.num_groups > 1 else None

    def recodes(self, part: Part, spec: MatrixSpec) -> bool:
        return part.field == "scales" and spec.num_groups > 1

    def encode(self, name: str, matrix: QuantizedMatrix) -> Tensor:
        if name != "scale" or matrix.spec.num_groups == 1:
            return super().encode(name, matrix)
        scales = matrix.scales
        # Every operation is in the scale dtype, because the engine's bytes carry that rounding.
        steps = scales / scales.new_tensor(self.calibrated()) * _STEPS
        return steps.round().to(torch_dtype("I16")).view(scales.dtype)

    def decode(self, name: str, elements: Tensor, spec: MatrixSpec) -> Tensor:
        if name != "scale" or spec.num_groups == 1:
            return super().decode(name, elements, spec)
        steps = elements.view(torch_dtype("I16")).float()
        return (steps * (self.calibrated() / _STEPS)).to(torch_dtype(STORED_DTYPE[spec.scale_dtype]))

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec) -> QuantizedMatrix:
        """Return codes and zero points exactly, and group scales as they were rounded."""
        if spec.num_groups == 1:
            return super().unpack(parts, spec)
        knowing = MarlinInt8Act(calibration=float(parts["global_scale"][0]) * _STEPS)
        return super(MarlinInt8Act, knowing).unpack(parts, spec)


class MarlinFp8Act(_MarlinA8):
    """int4 weights for fp8 (E4M3) activations.

    Codes are rewritten around the zero point z as `q - z if q >= z else 15 - q`, and scales are multiplied by 512 in
    their own dtype: exact in bf16, and in fp16 up to 127. The engine pads after rewriting: symmetric codes are
    therefore padded with 8, which is rewritten to 0.
    """

    id = "marlin-wna16-fp8act/1"
    title = "Marlin, fp8 activations"
    readers = (VLLM("MARLIN", loads=False, only=Only(env="VLLM_MARLIN_INPUT_DTYPE=fp8", configs=("gptq", "ct"))),)
    elements = ("int4",)
    schemes = "int4, symmetric or with zero points"
    arch = "SM89 and SM12x"
    slicing = "N by 64, K by whole groups (32 where channel-wise)"
    padding = PaddingRule(intermediate=64, whole_groups=True, midpoint=True)
    lossy = "fp16 scales above 127 overflow when multiplied by 512"

    def recodes(self, part: Part, spec: MatrixSpec) -> bool:
        return part.field == "scales"

    def encode(self, name: str, matrix: QuantizedMatrix) -> Tensor:
        if name == "scale":
            return matrix.scales * 512
        if name != "weight":
            return super().encode(name, matrix)
        if matrix.zeros is None:  # rewritten word by word after packing
            return matrix.codes
        spec = matrix.spec
        grouped = matrix.codes.view(spec.n, spec.num_groups, spec.group_size)
        return _around(grouped, matrix.zeros.to(grouped.dtype).unsqueeze(2)).view(spec.n, spec.k)

    def decode(self, name: str, elements: Tensor, spec: MatrixSpec) -> Tensor:
        found = super().decode(name, elements, spec)
        return found / 512 if name == "scale" else found

    def pack_into(self, matrix: QuantizedMatrix, out: Mapping[str, Tensor]) -> None:
        super().pack_into(matrix, out)
        if "weight" in out and matrix.zeros is None:
            _around_midpoint_(out["weight"])

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec) -> QuantizedMatrix:
        if spec.symmetric:
            # The rewrite is its own inverse if the top bit of each code is flipped before and after.
            words = parts["weight"] ^ _TOP_BITS
            return super().unpack({**parts, "weight": _around_midpoint_(words).bitwise_xor_(_TOP_BITS)}, spec)
        matrix = super().unpack(parts, spec)
        assert matrix.zeros is not None
        grouped = matrix.codes.view(spec.n, spec.num_groups, spec.group_size)
        codes = _back(grouped, matrix.zeros.to(grouped.dtype).unsqueeze(2)).view(spec.n, spec.k)
        return replace(matrix, codes=codes)


#: The top bit of every 4-bit code of a word (0x88888888), and the lowest one.
_TOP_BITS, _LOW_BITS = 0x88888888 - (1 << 32), 0x11111111


def _around_midpoint_(words: Tensor) -> Tensor:
    """Apply `_around` with zero point 8 to the eight codes of each int32 word, in place.

    8 .. 15 lose their top bit and 0 .. 7 are inverted: every bit flips, and the lower three flip back where the top one
    was set. Returns the words.
    """
    upper = (words >> 3).bitwise_and_(_LOW_BITS).mul_(7)
    return words.bitwise_xor_(upper).bitwise_not_()


def _around(codes: Tensor, zero: Tensor) -> Tensor:
    """Return uint8 codes counted from their uint8 zero point: up from 0 at or above it, down from 15 below it."""
    return (codes - zero).where(codes >= zero, 15 - codes)


def _back(rewritten: Tensor, zero: Tensor) -> Tensor:
    """Invert `_around`: codes at or above the zero point were rewritten to 0 .. 15 - zero."""
    return (rewritten + zero).where(rewritten <= 15 - zero, 15 - rewritten)

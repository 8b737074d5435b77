"""Layouts that are index maps: every part of the packed matrix is one `Arrangement` of one tensor of the logical one.

A subclass says in `parts` which part is which arrangement; packing, unpacking, shapes, slices and the checks of sizes
and types follow from that.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from moeq.errors import MoeqError
from moeq.layouts.arrangement import Arrangement, Block
from moeq.layouts.base import Layout, Problem, SliceRule, TensorSpec
from moeq.layouts.words import pack_words, unpack_words
from moeq.matrix import MatrixSpec, QuantizedMatrix

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: safetensors dtype and bytes of a stored scale, by `MatrixSpec.scale_dtype` (or `bias_dtype`).
STORED_DTYPE: dict[str, str] = {"f16": "F16", "bf16": "BF16", "f32": "F32", "e8m0": "U8", "e4m3": "F8_E4M3"}

_BITS = {"U8": 8, "I8": 8, "F8_E4M3": 8, "F16": 16, "BF16": 16, "I32": 32, "F32": 32}

Field = Literal["codes", "scales", "zeros", "bias"]


def torch_dtype(name: str) -> torch.dtype:
    """torch dtype of a safetensors dtype name."""
    import torch

    names = {
        "U8": torch.uint8,
        "I8": torch.int8,
        "F8_E4M3": torch.float8_e4m3fn,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I32": torch.int32,
        "F32": torch.float32,
    }
    return names[name]


@dataclass(frozen=True)
class Part:
    """One tensor of the packed matrix.

    Attributes:
        field: the logical tensor it holds; `bias` is taken as a matrix of one column.
        arrangement: index map from `[rows, columns]` to words.
        shape: stored shape of one expert.
        dtype: stored safetensors dtype; a word fills a whole number of its elements.
        bits: bits of one element within a word.
        pad: multiples that rows and columns are zero-filled to inside the layout (gate and up together for `w13`).
        group: input features per column, for the arithmetic of slices (scales: the group size; codes: 1).
    """

    field: Field
    arrangement: Arrangement
    shape: tuple[int, ...]
    dtype: str
    bits: int
    pad: tuple[int, int] = (1, 1)
    group: int = 1

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype as stored."""
        return TensorSpec(self.shape, self.dtype)

    def padded(self, rows: int, columns: int) -> tuple[int, int]:
        """Size of the matrix after padding inside the layout."""
        return -(-rows // self.pad[0]) * self.pad[0], -(-columns // self.pad[1]) * self.pad[1]


class ArrangedLayout(Layout):
    """A layout given by `parts`.

    Subclasses set, besides what `Layout` asks for:
        scale_dtypes: stored scale dtypes it can hold.
        group_sizes: group sizes its kernel reads; empty for any. One scale per channel is `channelwise`.
        channelwise: whether one scale per output channel is possible.
        zero_points, act_order, biased: whether such matrices can be held.
        n_multiple: what rows (per half of `w13`) must be a multiple of.
        k_multiple: what columns must be a multiple of.
    """

    scale_dtypes: ClassVar[tuple[str, ...]] = ("f16", "bf16")
    group_sizes: ClassVar[tuple[int, ...]] = ()
    channelwise: ClassVar[bool] = True
    zero_points: ClassVar[bool] = False
    act_order: ClassVar[bool] = False
    biased: ClassVar[bool] = True
    n_multiple: ClassVar[int] = 1
    k_multiple: ClassVar[int] = 1

    @abstractmethod
    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        """The parts of one packed expert. Called only for specs without `problems`."""

    def problems(self, spec: MatrixSpec) -> list[Problem]:
        return [*_type_problems(self, spec), *_size_problems(self, spec)]

    def tensors(self, spec: MatrixSpec) -> dict[str, TensorSpec]:
        self.check(spec)
        return {name: part.spec for name, part in self.parts(spec).items()}

    def slices(self, spec: MatrixSpec) -> SliceRule:
        n, k = self.n_multiple, self.k_multiple
        for part in self.parts(spec).values():
            per_half = 2 if part.arrangement.has_halves else 1
            n = math.lcm(n, part.arrangement.row_multiple // per_half, part.pad[0])
            if part.field != "bias" and (part.field == "codes" or spec.num_groups > 1):
                k = math.lcm(k, part.group * math.lcm(part.arrangement.column_multiple, part.pad[1]))
        return SliceRule(n, k)

    def check(self, spec: MatrixSpec) -> None:
        """Raise MoeqError `usage.layout-does-not-fit` where `problems` finds any."""
        found = self.problems(spec)
        if found:
            reasons = "; ".join(problem.message for problem in found)
            remedies = [problem.remedy for problem in found if problem.remedy]
            raise MoeqError(
                "usage.layout-does-not-fit",
                f"{spec.role} does not fit layout {self.id}: {reasons}",
                "; ".join(dict.fromkeys(remedies)) or None,
            )

    def pack(self, matrix: QuantizedMatrix) -> dict[str, Tensor]:
        import torch

        tensors = self.tensors(matrix.spec)
        out = {name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype)) for name, spec in tensors.items()}
        self.pack_into(matrix, out)
        return out

    def pack_into(self, matrix: QuantizedMatrix, out: Mapping[str, Tensor]) -> None:
        self.check(matrix.spec)
        self.check_values(matrix)
        for name, part in self.parts(matrix.spec).items():
            elements = self.encode(name, matrix)
            if part.bits * part.arrangement.fields_per_word == 64:
                raise ValueError(f"{self.id} {name}: words of 64 bits")
            pack_words(part.arrangement, _zero_fill(elements, part), part.bits, _flat_words(out[name], part))

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec) -> QuantizedMatrix:
        self.check(spec)
        found: dict[str, Tensor] = {}
        for name, part in self.parts(spec).items():
            rows, columns = self.logical_shape(part.field, spec)
            words = unpack_words(part.arrangement, parts[name], part.padded(rows, columns), part.bits)
            found[part.field] = self.decode(name, words[:rows, :columns].contiguous(), spec)
        return QuantizedMatrix(
            spec=spec,
            codes=found["codes"],
            scales=found["scales"],
            zeros=found.get("zeros"),
            bias=found["bias"].reshape(-1) if "bias" in found else None,
        )

    def encode(self, name: str, matrix: QuantizedMatrix) -> Tensor:
        """The elements `[rows, columns]` that a part arranges: of the logical tensor, unless a layout recodes it."""
        import torch

        part = self.parts(matrix.spec)[name]
        tensor: Tensor = getattr(matrix, part.field)
        if part.field == "zeros":
            tensor = tensor.to(torch.uint8)
        return tensor.unsqueeze(1) if part.field == "bias" else tensor

    def decode(self, name: str, elements: Tensor, spec: MatrixSpec) -> Tensor:
        """The inverse of `encode`, from the words of `unpack_words`."""
        import torch

        part = self.parts(spec)[name]
        if part.field == "codes":
            return elements.view(torch.uint8)
        if part.field == "zeros":
            return elements.view(torch.uint8).to(torch.int16)
        dtype = spec.bias_dtype if part.field == "bias" else spec.scale_dtype
        return elements.view(torch_dtype(STORED_DTYPE[dtype or ""]))

    def logical_shape(self, field: Field, spec: MatrixSpec) -> tuple[int, int]:
        """Size of a logical tensor as a matrix."""
        columns = {"codes": spec.k, "scales": spec.num_groups, "zeros": spec.num_groups, "bias": 1}
        return spec.n, columns[field]

    def check_values(self, matrix: QuantizedMatrix) -> None:
        """Refuse values that this layout cannot hold. Raises MoeqError `usage.zero-point-range` or `usage.lossy`."""
        spec = matrix.spec
        if matrix.zeros is not None:
            high = (1 << spec.bits) - 1
            outside = int(((matrix.zeros < 0) | (matrix.zeros > high)).sum())
            if outside:
                raise MoeqError(
                    "usage.zero-point-range",
                    f"{outside} of {matrix.zeros.numel()} zero points of {spec.role} are outside 0 .. {high}, "
                    f"which is all that {self.id} can store (GPTQ v1 files can hold {high + 1})",
                )
        lost = 0 if self.allow_lossy else self.losses(matrix)
        if lost:
            raise MoeqError(
                "usage.lossy",
                f"{self.id} would change {lost} stored values of {spec.role}: {self.lossy}",
                "allow it explicitly, or take a layout that is exact",
            )

    def slice_parts(
        self, parts: Mapping[str, Tensor], spec: MatrixSpec, *, n: tuple[int, int], k: tuple[int, int]
    ) -> dict[str, Tensor]:
        """Cut the packing of a shard out of the packing of the whole, without unpacking.

        Args:
            parts: packed expert.
            spec: its spec.
            n: `(start, stop)` of the output features, per half for a gated `w13`.
            k: `(start, stop)` of the input features.

        Returns:
            The parts of the shard, equal to `pack` of the sliced matrix.

        Raises:
            MoeqError: `usage.illegal-slice` where `slices` does not allow it.
        """
        shard = self._shard_spec(spec, n, k)
        wanted = self.tensors(shard)
        cut = {}
        for name, part in self.parts(spec).items():
            rows, columns = self.logical_shape(part.field, spec)
            first, last = (0, 1) if part.field == "bias" else (k[0] // part.group, -(-k[1] // part.group))
            if part.field in ("scales", "zeros") and spec.num_groups == 1:
                first, last = 0, 1
            shape = part.padded(rows, columns)
            width = min(-(-(last - first) // part.pad[1]) * part.pad[1], shape[1])
            block = Block(n[0], n[1] - n[0], first, width)
            words = _flat_words(parts[name].contiguous(), part)
            kept = part.arrangement.narrow(words, shape, block, 2 if is_gated_w13(spec) else 1)
            cut[name] = kept.view(torch_dtype(part.dtype)).reshape(wanted[name].shape)
        return cut

    def _shard_spec(self, spec: MatrixSpec, n: tuple[int, int], k: tuple[int, int]) -> MatrixSpec:
        rule, half = self.slices(spec), spec.n // (2 if is_gated_w13(spec) else 1)
        for axis, (start, stop), size, unit in (("N", n, half, rule.n), ("K", k, spec.k, rule.k)):
            whole = (start, stop) == (0, size)
            if not 0 <= start < stop <= size or (not whole and (unit is None or start % unit or stop % unit)):
                legal = f"multiples of {unit}" if unit else "the whole only"
                raise MoeqError(
                    "usage.illegal-slice", f"{self.id}: {axis} {start} .. {stop} of {size} is not a slice: {legal}"
                )
        if (k[1] - k[0]) < min(rule.k_least, spec.k):
            raise MoeqError(
                "usage.illegal-slice", f"{self.id}: a slice along K needs at least {rule.k_least}, not {k[1] - k[0]}"
            )
        shard = replace(spec, n=(n[1] - n[0]) * (2 if is_gated_w13(spec) else 1))
        return shard if k == (0, spec.k) else shard.with_sizes(k=k[1] - k[0])


def is_gated_w13(spec: MatrixSpec) -> bool:
    """Whether the rows are a gate half and an up half."""
    return spec.role == "w13" and spec.gated


def _zero_fill(elements: Tensor, part: Part) -> Tensor:
    import torch

    rows, columns = part.padded(*elements.shape)
    if (rows, columns) == tuple(elements.shape):
        return elements
    filled = torch.zeros((rows, columns), dtype=elements.dtype)
    filled[: elements.shape[0], : elements.shape[1]] = elements
    return filled


def _flat_words(tensor: Tensor, part: Part) -> Tensor:
    """A packed tensor as the words of its arrangement."""
    from moeq.layouts.words import word_dtype

    return tensor.view(-1).view(word_dtype(part.bits * part.arrangement.fields_per_word))


def _type_problems(layout: ArrangedLayout, spec: MatrixSpec) -> list[Problem]:
    found = []
    if spec.element not in layout.elements:
        found.append(Problem("layout.element", f"it holds {', '.join(layout.elements)} codes, not {spec.element}"))
    if spec.scale_dtype not in layout.scale_dtypes:
        known = ", ".join(layout.scale_dtypes)
        found.append(Problem("layout.scale-dtype", f"its scales are {known}, not {spec.scale_dtype}"))
    if not spec.symmetric and not layout.zero_points:
        found.append(Problem("layout.zero-point", "it has no place for zero points", "a symmetric checkpoint"))
    if spec.act_order and not layout.act_order:
        found.append(Problem("layout.act-order", "it has no place for act-order", "re-quantise with desc_act=False"))
    if spec.bias_dtype is not None and not layout.biased:
        found.append(Problem("layout.bias", "its kernel adds no expert bias"))
    return found


def _size_problems(layout: ArrangedLayout, spec: MatrixSpec) -> list[Problem]:
    found = []
    half = spec.n // 2 if is_gated_w13(spec) else spec.n
    axes = (("K", "layout.k-multiple", spec.k, layout.k_multiple), ("N", "layout.n-multiple", half, layout.n_multiple))
    for axis, code, size, multiple in axes:
        if size % multiple:
            above = -(-size // multiple) * multiple
            message = f"{axis} = {size}{' per half' if axis == 'N' and half != spec.n else ''}: {size} % {multiple} = "
            found.append(Problem(code, message + str(size % multiple), f"pad {axis} to {above}"))
    if spec.num_groups == 1:
        if not layout.channelwise and spec.k not in layout.group_sizes:
            known = ", ".join(str(size) for size in layout.group_sizes)
            found.append(Problem("layout.group-size", f"one scale per channel; its kernel reads groups of {known}"))
        return found
    if layout.group_sizes and spec.group_size not in layout.group_sizes:
        known = ", ".join(str(size) for size in layout.group_sizes)
        found.append(Problem("layout.group-size", f"groups of {spec.group_size}; its kernel reads groups of {known}"))
    if spec.k % spec.group_size:
        above = -(-spec.k // spec.group_size) * spec.group_size
        message = f"K = {spec.k} is not a whole number of groups: {spec.k} % {spec.group_size} = "
        found.append(Problem("layout.group-cut", message + str(spec.k % spec.group_size), f"pad K to {above}"))
    return found

"""Layouts: how one kernel wants the bytes of one expert's matrix, and how to get the matrix back.

A layout is one `Layout` subclass in the file of the library whose kernels own the bytes: descriptor, parts, constraints
and readers together. It says in `parts` which part of the packed matrix is which index map of a logical tensor;
packing, unpacking, shapes, slices and the checks of sizes and types follow from that. `pack` takes the logical matrix
of *one* expert; a converted checkpoint stacks the results along a leading expert axis.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Self

from moeq.errors import MoeqError
from moeq.layouts.arrangement import Block
from moeq.layouts.base import PaddingRule, Problem, SliceRule, TensorSpec, W13Order, not_multiple
from moeq.layouts.parts import (
    HALF_DTYPES,
    Field,
    Part,
    arrange,
    as_stored,
    changed,
    flat_words,
    is_common,
    logical_dtype,
    rearrange,
    repeat_rows,
    torch_dtype,
)
from moeq.layouts.readers import MOEQ, VLLM, Reader
from moeq.layouts.words import word_dtype
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.spelling import option

if TYPE_CHECKING:
    from torch import Tensor

#: Methods by which a subclass makes packing more than an index map.
_RECODING = ("encode", "decode", "written", "pack_into", "unpack", "extra_tensors", "fill_extra", "calibrate")


class Layout(ABC):
    """A kernel's byte arrangement for expert matrices.

    A layout without options is a plain class; where the bytes depend on something, each choice is an id of its own, so
    that an id in a manifest always says everything.
    """

    id: ClassVar[str]  #: versioned name, `marlin-wna16/1`. The number changes whenever the bytes do
    title: ClassVar[str]  #: one line for people
    source: ClassVar[str] = ""  #: library and version whose kernels read these bytes
    elements: ClassVar[tuple[str, ...]] = ()  #: element types of codes it holds (`moeq.matrix.ELEMENT_BITS`)
    schemes: ClassVar[str] = ""  #: schemes that it holds, for people
    arch: ClassVar[str] = ""  #: devices whose kernels read it, for people
    slicing: ClassVar[str] = ""  #: legal slices, for people (`slices` gives the numbers)
    padding: ClassVar[PaddingRule] = PaddingRule()  #: rule by which sizes are rounded up before packing
    w13_order: ClassVar[W13Order] = "gate-up"  #: order of the gate and up rows of `w13` in the packed result
    lossy: ClassVar[str | None] = None  #: what is lost for some inputs, or None where packing is always exact
    #: Whether lossy bytes depend on numbers of other rows that are not stored, so that no part is packed alone.
    rounds_jointly: ClassVar[bool] = False
    lossy_as_engine: ClassVar[bool] = False  #: whether lossy bytes are, bit for bit, the engine's own
    #: Weights as vLLM's selection functions tell them apart (`families` of the oracle's backends.toml).
    family: ClassVar[str] = "wna16"
    #: Reason why every expert must be looked at before the first is packed (`calibrate`); None where none need be.
    calibration_scope: ClassVar[str | None] = None
    #: The kernels that read these bytes; empty where nothing does. Never inherited: each class says its own.
    readers: ClassVar[tuple[Reader, ...]] = ()
    scale_dtypes: ClassVar[tuple[str, ...]] = ("f16", "bf16")  #: stored scale dtypes that fit
    group_sizes: ClassVar[tuple[int, ...]] = ()  #: group sizes its kernel reads, `channelwise` apart; empty for any
    channelwise: ClassVar[bool] = True  #: whether one scale per output channel is possible
    zero_points: ClassVar[bool] = False  #: whether matrices with zero points can be held
    act_order: ClassVar[bool] = False  #: whether matrices with act-order can be held
    biased: ClassVar[bool] = True  #: whether matrices with a bias can be held
    n_multiple: ClassVar[int] = 1  #: number of which rows (per half of `w13`) must be a multiple
    k_multiple: ClassVar[int] = 1  #: number of which columns must be a multiple
    #: Whether scales of a single group lie in another order than those of several, so that no slice may have one group.
    single_group_differs: ClassVar[bool] = False
    recodes_scales: ClassVar[bool] = False  #: whether scales are stored as other values, whatever their dtype
    grouped: ClassVar[bool] = True  #: whether its kernel reads scales of groups, not of output channels alone
    #: Least and greatest scale besides 0, as unsigned integers, that keep their value; None: all.
    exact_scales: ClassVar[tuple[int, int] | None] = None
    #: Whether packing only moves bits (within `exact_scales`), so that the fast path may do it. Derived from what a
    #: subclass overrides, unless the subclass sets it.
    rearranges: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "readers" not in cls.__dict__:
            cls.readers = ()
        if "rearranges" not in cls.__dict__:
            cls.rearranges = cls.rearranges and not any(name in cls.__dict__ for name in _RECODING)

    def __init__(self, *, allow_lossy: bool = False, calibration: float | None = None) -> None:
        self.allow_lossy = allow_lossy
        self.calibration = calibration

    def calibrate(self, matrix: QuantizedMatrix) -> float | None:
        """Return the number that this layout needs of every local expert before it packs one; None where it needs none.

        Two passes: `found = max(layout.calibrate(expert) for every local expert of w13 or w2)`, then
        `layout.with_calibration(found).pack(...)`, for w13 and w2 apart. The result depends on which experts are
        local, so such packings differ between EP (and TP) degrees.
        """
        return None

    def with_calibration(self, found: float) -> Self:
        """Return this layout with the largest `calibrate` of the local experts."""
        return type(self)(allow_lossy=self.allow_lossy, calibration=found)

    def calibrated(self) -> float:
        """Return the largest `calibrate` of the local experts. Raises MoeqError `usage.survey-needed` without one."""
        if self.calibration is None:
            raise MoeqError(
                "usage.survey-needed",
                f"{self.id}: {self.calibration_scope}; calibrate on the experts before packing them",
                "layout.with_calibration(max(layout.calibrate(expert) for every local expert))",
            )
        return self.calibration

    @classmethod
    def vllm_readers(cls) -> tuple[VLLM, ...]:
        """Return the backends of vLLM that moeq's plug-in hands these bytes to, the engine's preferred one first."""
        return tuple(reader for reader in cls.readers if isinstance(reader, VLLM) and reader.loads)

    @classmethod
    def is_read(cls) -> bool:
        """Return whether a plug-in of moeq hands these bytes to an engine, or a kernel of moeq reads them."""
        return any(isinstance(reader, MOEQ) or reader.loads for reader in cls.readers)

    @classmethod
    def own_reader(cls) -> MOEQ | None:
        """Return moeq's kernel that the oracle may choose for these bytes, or None."""
        return next((reader for reader in cls.readers if isinstance(reader, MOEQ)), None)

    @classmethod
    def how_to_allow(cls) -> str:
        """Say what a user may do where numbers would change."""
        note = (
            "the numbers that the engine itself makes of this checkpoint at every start; "
            if cls.lossy_as_engine
            else ""
        )
        return (
            f"{option('allow_lossy', True)} writes them ({note}moeq restore still gives back every byte of the source)"
        )

    @abstractmethod
    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        """Return the parts of one packed expert. Called only for specs without `problems`."""

    def extra_tensors(self, spec: MatrixSpec) -> dict[str, TensorSpec]:
        """Return the stored tensors that arrange no logical tensor; by default there are none."""
        return {}

    def fill_extra(self, matrix: QuantizedMatrix, out: Mapping[str, Tensor]) -> None:
        """Fill the tensors of `extra_tensors`."""
        return  # `extra_tensors` gives none by default

    def problems(self, spec: MatrixSpec) -> list[Problem]:
        """Return every reason why a matrix of this (already padded) spec cannot be packed; empty when it can."""
        found = _type_problems(self, spec) or _size_problems(self, spec)
        if self.grouped or spec.num_groups == 1:
            return found
        message = f"groups of {spec.group_size}; its kernel reads one scale per channel"
        return [*found, Problem("layout.group-size", message)]

    def tensors(self, spec: MatrixSpec) -> dict[str, TensorSpec]:
        """Return shape and dtype of each part of one packed expert, by part name. Needs no torch."""
        self.check(spec)
        return {name: part.spec for name, part in self.parts(spec).items()} | self.extra_tensors(spec)

    def slices(self, spec: MatrixSpec) -> SliceRule:
        """Return the legal slices of the packed matrix."""
        n, k = self.n_multiple, self.k_multiple
        for part in self.parts(spec).values():
            per_half = 2 if part.arrangement.has_halves else 1
            if not is_common(part, spec):
                n = math.lcm(n, math.lcm(part.arrangement.row_multiple, part.pad[0]) // per_half * part.rows)
            if part.field != "bias" and (part.field == "codes" or spec.num_groups > 1):
                k = math.lcm(k, part.group * math.lcm(part.arrangement.column_multiple, part.pad[1]))
        # Otherwise a slice of one group would be a matrix with one scale per channel.
        several = spec.num_groups > 1 if self.single_group_differs else not (self.channelwise or self.group_sizes)
        return SliceRule(n, k, 2 * spec.group_size if several else 0)

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
        """Return the packed parts of one expert, shaped as `tensors` says. Raises MoeqError if there are `problems`."""
        import torch

        tensors = self.tensors(matrix.spec)
        out = {name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype)) for name, spec in tensors.items()}
        self.pack_into(matrix, out)
        return out

    def pack_into(self, matrix: QuantizedMatrix, out: Mapping[str, Tensor]) -> None:
        """Pack into buffers of the caller, shaped as `tensors` says, whose memory can be reused.

        A part for which `out` has no buffer is skipped.
        """
        self.check(matrix.spec)
        self.check_values(matrix)
        matrix = self.written(matrix)
        for name, part in self.parts(matrix.spec).items():
            if name in out:
                arrange(part, self.encode(name, matrix), out[name])
        self.fill_extra(matrix, out)

    @classmethod
    def is_index_map(cls) -> bool:
        """Return whether packing arranges `encode` of each part, and nothing else."""
        return cls.pack_into is Layout.pack_into and cls.written is Layout.written

    def written(self, matrix: QuantizedMatrix) -> QuantizedMatrix:
        """Return the matrix whose parts are stored: another one where the engine requantises it at load."""
        return matrix

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec) -> QuantizedMatrix:
        """Invert `pack` exactly."""
        self.check(spec)
        found: dict[str, Tensor] = {}
        for name, part in self.parts(spec).items():
            elements = rearrange(part, parts[name], self.element_shape(part, spec))
            found[part.field] = repeat_rows(part, self.decode(name, elements, spec), spec)
        return QuantizedMatrix(
            spec=spec,
            codes=found["codes"],
            scales=found["scales"],
            zeros=found.get("zeros"),
            bias=found["bias"].reshape(-1) if "bias" in found else None,
        )

    def encode(self, name: str, matrix: QuantizedMatrix) -> Tensor:
        """Return the elements `[rows, columns]` that a part arranges: the logical tensor, or what it is recoded to."""
        part = self.parts(matrix.spec)[name]
        tensor: Tensor = getattr(matrix, part.field)
        if part.field == "zeros":
            return tensor.to(torch_dtype("U8"))
        if part.field == "bias":
            tensor = tensor.unsqueeze(1)
        tensor = tensor[:: part.rows]
        return tensor if part.field == "codes" or as_stored(part, matrix.spec) else tensor.to(torch_dtype(part.dtype))

    def decode(self, name: str, elements: Tensor, spec: MatrixSpec) -> Tensor:
        """Invert `encode` element by element, from the words of `unpack_words`; no row is repeated."""
        part = self.parts(spec)[name]
        if part.field == "codes":
            return elements.view(torch_dtype("U8"))
        if part.field == "zeros":
            return elements.view(torch_dtype("U8")).to(torch_dtype("I16"))
        logical = torch_dtype(logical_dtype(part, spec))
        return elements.view(logical if as_stored(part, spec) else torch_dtype(part.dtype)).to(logical)

    def recodes(self, part: Part, spec: MatrixSpec) -> bool:
        """Return whether a part holds other values than the logical tensor (and so might lose some)."""
        return (part.field in ("scales", "bias") and not as_stored(part, spec)) or (
            self.recodes_scales and part.field == "scales"
        )

    def rounds(self, spec: MatrixSpec) -> bool:
        """Return whether scales or biases of such matrices get a float type that holds fewer numbers than theirs.

        Values that fit are kept, and the first that does not fit is `answer.lossy`: headers cannot tell whether there
        is one.
        """
        recoded = [part for part in self.parts(spec).values() if self.recodes(part, spec)]
        return any(part.dtype in HALF_DTYPES and logical_dtype(part, spec) in (*HALF_DTYPES, "F32") for part in recoded)

    def losses(self, matrix: QuantizedMatrix) -> int:
        """Count the stored numbers of this matrix that packing would change; 0 where `unpack(pack(x)) == x`."""
        return sum(changed(before, after) for _, before, after in self._recoded(matrix))

    def _recoded(self, matrix: QuantizedMatrix) -> Iterator[tuple[Field, Tensor, Tensor]]:
        """Yield logical tensors that are stored as other values, flat, and what unpacking gives for them."""
        for name, part in self.parts(matrix.spec).items():
            if self.recodes(part, matrix.spec):
                before: Tensor = getattr(matrix, part.field)
                words = self.encode(name, matrix).contiguous().view(word_dtype(part.bits))
                after = repeat_rows(part, self.decode(name, words, matrix.spec), matrix.spec)
                yield part.field, before.reshape(-1), after.reshape(-1)

    def _describe_rounding(self, matrix: QuantizedMatrix) -> str:
        """Say how far numbers are rounded, ` (scales by at most 0.2 %)`; empty where one changes by 100 % or more."""
        changes = []
        for field, before, after in self._recoded(matrix):
            if before.is_floating_point() and changed(before, after):
                old, new = before.double(), after.double()
                largest = float(((new - old).abs() / old.abs()).nan_to_num(0).max())
                changes.append((field, largest))
        if not changes or max(largest for _, largest in changes) >= 1:
            return ""
        return f" ({', '.join(f'{field} by at most {100 * largest:.2g} %' for field, largest in changes)})"

    def logical_shape(self, field: Field, spec: MatrixSpec) -> tuple[int, int]:
        """Return the size of a logical tensor as a matrix."""
        columns = {"codes": spec.k, "scales": spec.num_groups, "zeros": spec.num_groups, "bias": 1}
        return spec.n, columns[field]

    def element_shape(self, part: Part, spec: MatrixSpec) -> tuple[int, int]:
        """Return the size of what a part holds, as a matrix."""
        rows, columns = self.logical_shape(part.field, spec)
        return -(-rows // part.rows), columns

    def check_values(self, matrix: QuantizedMatrix) -> None:
        """Refuse values that this layout cannot hold. Raises MoeqError `usage.zero-point-range` or `answer.lossy`."""
        spec = matrix.spec
        if matrix.zeros is not None:
            high = (1 << spec.bits) - 1
            num_outside = int(((matrix.zeros < 0) | (matrix.zeros > high)).sum())
            if num_outside:
                raise MoeqError(
                    "usage.zero-point-range",
                    f"{num_outside} of {matrix.zeros.numel()} zero points of {spec.role} are outside 0 .. {high}, "
                    f"which is all that {self.id} can store (GPTQ v1 files can hold {high + 1})",
                )
        num_lost = 0 if self.allow_lossy else self.losses(matrix)
        if num_lost:
            how_far = self._describe_rounding(matrix)
            raise MoeqError(
                "answer.lossy",
                f"{self.id} would change {num_lost} stored values of {spec.role}{how_far}: {self.lossy}",
                self.how_to_allow(),
            )

    def slice_parts(
        self, parts: Mapping[str, Tensor], spec: MatrixSpec, *, n: tuple[int, int], k: tuple[int, int]
    ) -> dict[str, Tensor]:
        """Cut the packing of a shard out of the packing of the whole, without unpacking: `pack` of the sliced matrix.

        `n` is `(start, stop)` of the output features, per half for a gated `w13`, and `k` that of the input features.

        Raises MoeqError `usage.illegal-slice` where `slices` does not allow it.
        """
        cut = self.cut_parts(parts, spec, self.shard_spec(spec, n, k), n=n, k=k)
        return cut | {name: parts[name] for name in self.extra_tensors(spec)}

    def cut_parts(
        self,
        parts: Mapping[str, Tensor],
        spec: MatrixSpec,
        shard: MatrixSpec,
        *,
        n: tuple[int, int],
        k: tuple[int, int],
    ) -> dict[str, Tensor]:
        """Cut the arranged parts as `slice_parts` does, without its checks."""
        wanted = self.parts(shard)
        cut = {}
        for name, part in self.parts(spec).items():
            if is_common(part, spec):
                cut[name] = parts[name]
                continue
            rows, columns = self.element_shape(part, spec)
            first, last = (0, 1) if part.field == "bias" else (k[0] // part.group, -(-k[1] // part.group))
            if part.field in ("scales", "zeros") and spec.num_groups == 1:
                first, last = 0, 1
            shape, halves = part.padded(rows, columns), spec.halves
            height, width = part.padded(halves * (n[1] - n[0]) // part.rows, last - first)
            block = Block(n[0] // part.rows, height // halves, first, width)
            words = flat_words(parts[name].contiguous(), part)
            kept = part.arrangement.narrow(words, shape, block, halves)
            cut[name] = kept.view(torch_dtype(part.dtype)).reshape(wanted[name].shape)
        return cut

    def shard_spec(self, spec: MatrixSpec, n: tuple[int, int], k: tuple[int, int]) -> MatrixSpec:
        """Return the spec of a slice. Raises MoeqError `usage.illegal-slice` where `slices` does not allow it."""
        rule, half = self.slices(spec), spec.n // spec.halves
        for axis, (start, stop), size, unit in (("N", n, half, rule.n), ("K", k, spec.k, rule.k)):
            is_whole = (start, stop) == (0, size)
            if not 0 <= start < stop <= size or (not is_whole and (unit is None or start % unit or stop % unit)):
                legal = f"multiples of {unit}" if unit else "the whole only"
                raise MoeqError(
                    "usage.illegal-slice", f"{self.id}: {axis} {start} .. {stop} of {size} is not a slice: {legal}"
                )
        if (k[1] - k[0]) < min(rule.k_least, spec.k):
            raise MoeqError(
                "usage.illegal-slice", f"{self.id}: a slice along K needs at least {rule.k_least}, not {k[1] - k[0]}"
            )
        shard = replace(spec, n=(n[1] - n[0]) * spec.halves)
        return shard if k == (0, spec.k) else shard.with_sizes(k=k[1] - k[0])


def _type_problems(layout: Layout, spec: MatrixSpec) -> list[Problem]:
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


def _size_problems(layout: Layout, spec: MatrixSpec) -> list[Problem]:
    found = list(_group_problems(layout, spec))
    n_multiple, k_multiple = _multiples(layout, spec)
    axes = [
        ("K", "layout.k-multiple", spec.k, k_multiple),
        ("N per half" if spec.halves == 2 else "N", "layout.n-multiple", spec.n // spec.halves, n_multiple),
    ]
    for axis, code, size, multiple in axes:
        if size % multiple:
            above = -(-size // multiple) * multiple
            found.append(Problem(code, not_multiple(f"{axis} = {size}", size, multiple), f"pad {axis} to {above}"))
    return found


def _multiples(layout: Layout, spec: MatrixSpec) -> tuple[int, int]:
    """Return what rows (per half) and columns must be multiples of, so that every index map applies."""
    n, k = layout.n_multiple, layout.k_multiple
    for part in layout.parts(spec).values():
        rows, columns = part.arrangement.row_multiple, part.arrangement.column_multiple
        per_half = 2 if part.arrangement.has_halves else 1
        if part.pad[0] % rows:
            # Of stacked halves only the sum has to be a multiple, but each half is cut and read alone.
            n = math.lcm(n, rows // per_half if spec.halves == 2 else rows)
        if part.field == "codes" and part.pad[1] % columns:
            k = math.lcm(k, columns)
        elif part.field in ("scales", "zeros") and columns > 1 and part.pad[1] % columns:
            k = math.lcm(k, columns * spec.group_size)
    return n, k


def _group_problems(layout: Layout, spec: MatrixSpec) -> Iterator[Problem]:
    known = ", ".join(str(size) for size in layout.group_sizes)
    if spec.num_groups == 1:
        if not layout.channelwise and spec.k not in layout.group_sizes:
            yield Problem("layout.group-size", f"one scale per channel; its kernel reads groups of {known or 'K'}")
        return
    if layout.group_sizes and spec.group_size not in layout.group_sizes:
        yield Problem("layout.group-size", f"groups of {spec.group_size}; its kernel reads groups of {known}")
    # A shard with act-order has all groups of the whole, whatever its own K.
    if spec.all_groups is None and spec.k % spec.group_size:
        above = -(-spec.k // spec.group_size) * spec.group_size
        rest = f"{spec.k} % {spec.group_size} = {spec.k % spec.group_size}"
        yield Problem("layout.group-cut", f"K = {spec.k} is not a whole number of groups ({rest})", f"pad K to {above}")

"""The logical quantised matrix: what schemes decode a checkpoint into and layouts encode from.

It says what the weights *mean* (codes, scales, zero points) and nothing about how any file or kernel arranges
them, so that every format meets every layout in one place. Both records are axis-explicit: sizes are fields and
are never read back off a tensor that some format stores transposed.

Conventions, for one projection of one expert:

* `N` output features, `K` input features, `G = ceil(K / group_size)` groups along `K`;
* codes are unsigned: an integer of `b` bits is stored as `0 .. 2**b - 1` with zero point `2**(b-1)` when symmetric
  (int8 weights are therefore offset by 128); float codes (`e2m1`, `e4m3`) are their bit patterns;
* `value[n, k] = scales[n, g(k)] * (codes[n, k] - zeros[n, g(k)])`, where `g(k) = k // group_size` unless
  `group_index` says otherwise (act-order);
* `w13` is the gate rows followed by the up rows (`N = 2 * intermediate_size`), `w2` is the down projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Role = Literal["w13", "w2", "gate", "up", "down"]

#: Bits of one code, by element type. `intB` are integers, `e2m1`/`e4m3`/`e5m2` floats, the rest plain floats.
ELEMENT_BITS: dict[str, int] = {
    **{f"int{bits}": bits for bits in range(2, 9)},
    "e2m1": 4,
    "e4m3": 8,
    "e5m2": 8,
    "bf16": 16,
    "f16": 16,
    "f32": 32,
}

#: Bits of a stored scale or bias, by `MatrixSpec.scale_dtype` and `bias_dtype`.
SCALE_BITS: dict[str, int] = {"f16": 16, "bf16": 16, "f32": 32, "e8m0": 8, "e4m3": 8}


@dataclass(frozen=True)
class MatrixSpec:
    """Everything about a quantised matrix that headers and config alone tell. Needs no torch."""

    role: Role  #: which projection this is; layouts arrange the gate and up halves of `w13` differently
    n: int  #: output features (`w13`: gate and up together)
    k: int  #: input features
    element: str  #: element type of a code, a key of `ELEMENT_BITS`
    group_size: int  #: codes along `K` that share a scale, 1 .. k; `k` itself means one scale per output channel
    scale_dtype: str  #: dtype of a stored scale: `f16`, `bf16`, `f32`, `e8m0` (one exponent byte) or `e4m3`
    symmetric: bool = True  #: whether no zero points are stored: zero is `2**(b-1)` for integers, 0 for floats
    #: whether `QuantizedMatrix.group_index` assigns columns to groups, instead of `k // group_size`
    act_order: bool = False
    bias_dtype: str | None = None  #: dtype of the bias vector `[N]`, or None where there is none
    gated: bool = True  #: whether `w13` holds gate and up (False: a single projection, `N = intermediate_size`)
    #: scales along `K` where they are not `ceil(k / group_size)`: a shard of an act-order matrix keeps every group of
    #: the whole one, since its columns may belong to any of them. None otherwise.
    all_groups: int | None = None

    @property
    def bits(self) -> int:
        """Bits per code."""
        return ELEMENT_BITS[self.element]

    @property
    def num_groups(self) -> int:
        """Scales along `K`; the last group may be partial."""
        return -(-self.k // self.group_size) if self.all_groups is None else self.all_groups

    @property
    def integer(self) -> bool:
        """Whether codes are integers with a zero point (as opposed to small floats)."""
        return self.element.startswith("int")

    @property
    def halves(self) -> int:
        """Matrices stacked in the rows: 2 for gate and up of a gated `w13`, otherwise 1."""
        return 2 if self.role == "w13" and self.gated else 1

    @property
    def symmetric_zero(self) -> int:
        """The implied zero point of a symmetric matrix."""
        return 1 << (self.bits - 1) if self.integer else 0

    def with_sizes(self, *, n: int | None = None, k: int | None = None) -> MatrixSpec:
        """Return this spec with other sizes (a shard, or padded); one scale per output channel stays one."""
        k = self.k if k is None else k
        group_size = k if self.num_groups == 1 else self.group_size
        return replace(self, n=self.n if n is None else n, k=k, group_size=group_size)

    def with_role(self, role: Role, n: int) -> MatrixSpec:
        """Return the spec of `n` of the rows as a matrix of their own."""
        return replace(self, role=role, n=n)


def projection_spec(stacked: MatrixSpec, role: Role) -> MatrixSpec:
    """Return the spec of one projection of a stacked `w13` or `w2`; the stacked spec itself for its own role."""
    if role in ("w13", "w2"):
        return stacked
    return stacked.with_role(role, stacked.n // stacked.halves)


#: Parts of a matrix that have a row for each output feature; some of them may be None.
ROW_PARTS = ("codes", "scales", "zeros", "global_scale", "bias")


@dataclass(frozen=True)
class QuantizedMatrix:
    """One quantised matrix as numbers."""

    spec: MatrixSpec  #: sizes and types
    codes: Tensor  #: uint8 `[N, K]`, unsigned codes; the numbers themselves where the element type is a plain float
    scales: Tensor  #: `[N, G]` in the stored dtype (`e8m0`: uint8 exponent bytes; `e4m3`: torch.float8_e4m3fn)
    zeros: Tensor | None = None  #: uint8 or int16 `[N, G]` effective zero points, or None when symmetric
    group_index: Tensor | None = None  #: int32 `[K]`, group of each input column; None unless `spec.act_order`
    global_scale: Tensor | None = None  #: float32 `[N]` second-level scale (NVFP4), or None
    bias: Tensor | None = None  #: `[N]`, or None

    def rows(self, start: int, stop: int, role: Role) -> QuantizedMatrix:
        """Return output features `start .. stop` as a matrix of their own (views, nothing is copied)."""
        return self.map_rows(lambda tensor: tensor[start:stop], self.spec.with_role(role, stop - start))

    def map_rows(self, function: Callable[[Tensor], Tensor], spec: MatrixSpec | None = None) -> QuantizedMatrix:
        """Apply a function to every part that has a row for each output feature.

        Args:
            function: function that selects or reorders rows.
            spec: spec of the result; None: that of this matrix.
        """
        parts = {name: getattr(self, name) for name in ROW_PARTS}
        changed = {name: function(tensor) for name, tensor in parts.items() if tensor is not None}
        return replace(self, spec=spec or self.spec, **changed)


def split_projections(matrix: QuantizedMatrix) -> Iterator[tuple[Literal["gate", "up", "down"], QuantizedMatrix]]:
    """Yield the projections of a stacked matrix: gate and up of `w13` (up alone without a gate), down of `w2`."""
    spec = matrix.spec
    if spec.role == "w2":
        yield "down", matrix.rows(0, spec.n, "down")
    elif not spec.gated:
        yield "up", matrix.rows(0, spec.n, "up")
    else:
        half = spec.n // 2
        yield "gate", matrix.rows(0, half, "gate")
        yield "up", matrix.rows(half, spec.n, "up")

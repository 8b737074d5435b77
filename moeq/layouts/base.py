"""Facts about packed matrices: names and shapes of parts, why a matrix does not fit, slices and padding. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moeq.indices import check_indices
from moeq.matrix import MatrixSpec

if TYPE_CHECKING:
    from torch import Tensor

#: Parts that a packed matrix may consist of. `moeq.json` and the converted tensors use these names as suffixes.
#: `global_scale` multiplies a whole matrix, and `scale_factor` is what the scales were multiplied by; `permutation` and
#: `group_index` belong to act-order; `compensation` holds the sums that integer CPU kernels subtract;
#: `zero_sign` says which zeros were negative.
PARTS = (
    "weight",
    "scale",
    "zero",
    "bias",
    "global_scale",
    "scale_factor",
    "permutation",
    "group_index",
    "compensation",
    "zero_sign",
)

#: Parts that kernels use as indices (`check_index_parts`).
INDEX_PARTS = ("permutation", "group_index")

W13Order = Literal["gate-up", "up-gate", "interleaved"]


def check_index_parts(parts: Mapping[str, Tensor], spec: MatrixSpec, what: str) -> None:
    """Check the parts of a matrix, or of stacked ones, that are used as indices: `permutation` and `group_index`.

    Tensors without values (device `meta`) are left out.

    Raises MoeqError `source.bad-data`.
    """
    for name in INDEX_PARTS:
        if name in parts and parts[name].device.type != "meta":
            is_order = name == "permutation"
            bound = spec.k if is_order else spec.num_groups
            check_indices(parts[name], bound, f"{what} {name}", each_once=is_order)


@dataclass(frozen=True)
class TensorSpec:
    """Shape and safetensors dtype (`I32`, `F16`, `BF16`, `U8`, ...) of a stored tensor."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Problem:
    """Reason why a layout cannot hold a matrix."""

    code: str  #: stable name, such as `layout.k-multiple`
    message: str  #: the arithmetic
    remedy: str | None = None  #: the nearest change that would work, or None


def not_multiple(what: str, size: int, multiple: int) -> str:
    """Say that a size is not a multiple, with the remainder."""
    return f"{what} is not a multiple of {multiple} ({size} % {multiple} = {size % multiple})"


@dataclass(frozen=True)
class SliceRule:
    """Smallest granularity at which the packing of a shard is a slice of the packing of the whole."""

    n: int | None  #: output features, per half for `w13`; None where slices along `N` are not legal
    k: int | None  #: input features; None where slices along `K` are not legal
    k_least: int = 0  #: fewest input features of a slice (a layout may arrange a single group of scales differently)


@dataclass(frozen=True)
class PaddingRule:
    """Multiples to which sizes are rounded up before packing (`moeq.layouts.padding` does it)."""

    intermediate: int = 1  #: multiple of the intermediate size: rows of each half of `w13`, columns of `w2`
    hidden: int = 1  #: multiple of the hidden size: columns of `w13`, rows of `w2`
    whole_groups: bool = False  #: the intermediate size is also a multiple of the group size, so that no group is cut
    midpoint: bool = False  #: codes are padded with the symmetric zero point instead of code 0
    ungated: int = 0  #: multiple of the intermediate size where experts have no gate; 0: the multiple with a gate
    #: Added rows take the scale of their half instead of 0, because the matrix has one for all rows.
    same_scale: bool = False

    def padded(self, intermediate: int, group: int | None, *, gated: bool = True) -> int:
        """Return the intermediate size of a rank, rounded up; `group` codes share a scale, None for one per channel."""
        multiple = self.intermediate if gated else self.ungated or self.intermediate
        if self.whole_groups and group:
            multiple = math.lcm(multiple, group)
        return -(-intermediate // multiple) * multiple

    @property
    def title(self) -> str:
        """Text for tables: `I to 64 and whole groups`."""
        parts = []
        if self.intermediate > 1 or self.whole_groups:
            parts.append(f"I to {self.intermediate}" + (" and whole groups" if self.whole_groups else ""))
        if self.ungated:
            parts.append(f"I to {self.ungated} without a gate")
        if self.hidden > 1:
            parts.append(f"H to {self.hidden}")
        return ", ".join(parts) or "none"

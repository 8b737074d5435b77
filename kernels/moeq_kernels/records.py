"""Packed expert weights as the kernels take them. Importing this needs neither torch nor triton."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

W13Order = Literal["gate-up", "interleaved", "ungated"]


@dataclass(frozen=True)
class PackedMatrix:
    """One projection of all local experts, in the bytes of one layout.

    Attributes:
        layout: versioned layout id, such as `marlin-wna16/1`; `capabilities.CAPABILITIES` lists them all.
        weight: packed codes `[E, ...]`, shape and dtype as the layout says.
        n: output features as stored, padding included (`w13`: gate and up together).
        k: input features as stored, padding included.
        element: type of a code: `int4`, `int8`, `e2m1`, `e4m3`, or `bf16` / `f16` where weights are not quantised.
        group_size: codes along `k` that share a scale; `k` (or anything larger, or -1) means one per output feature.
        scale: scales `[E, ...]` in the layout's order, or None for unquantised weights and where there is only a
            global scale (FP8 with one scale per tensor).
        zero: packed zero points `[E, ...]`, or None where the code's midpoint is zero.
        bias: `[E, n]` in the layout's order, or None.
        permutation: int32 `[E, k]`: row `i` of the packed matrix multiplies input column `permutation[e, i]`
            (act-order); None for the identity.
        group_index: int32 `[E, k]`, scale group of each packed row, where groups are not `row // group_size`.
        global_scale: float32 multiplying the whole matrix, `[E]` or `[E, 1]`, or `[E, 2]` for the first and the second
            half of the rows (gate and up), or None.
        input_scale: float32 `[1]` static activation scale for int8 and e4m3 activations; None quantises each row on
            its own.
        scale_factor: what `marlin-nvfp4` multiplied scales with; kernels do not need it.
        activation_dtype: `fp8` where rows of x are quantised to e4m3 on the way: with one scale for a row, or one for
            each group of the row where weights have groups; empty for activations of 16 bits (or as the layout says).
    """

    layout: str
    weight: Tensor
    n: int
    k: int
    element: str
    group_size: int
    scale: Tensor | None = None
    zero: Tensor | None = None
    bias: Tensor | None = None
    permutation: Tensor | None = None
    group_index: Tensor | None = None
    global_scale: Tensor | None = None
    input_scale: Tensor | None = None
    scale_factor: Tensor | None = None
    activation_dtype: str = ""

    @property
    def channelwise(self) -> bool:
        """Whether each output feature has a single scale."""
        return self.group_size == -1 or self.group_size >= self.k

    @property
    def num_groups(self) -> int:
        """Scales along `k`."""
        return 1 if self.channelwise else -(-self.k // self.group_size)

    @property
    def num_experts(self) -> int:
        """Experts held here."""
        return int(self.weight.shape[0])


@dataclass(frozen=True)
class PackedExperts:
    """Both projections of the local experts of one MoE layer.

    Attributes:
        w13: gate and up; `n` is twice the (padded) intermediate size, or once where ungated.
        w2: down; `k` is the (padded) intermediate size.
        w13_order: `gate-up` (gate rows, then up rows), `interleaved` (gate 0, up 0, gate 1, ...) or `ungated`.
        name: of the layer, for messages.
    """

    w13: PackedMatrix
    w2: PackedMatrix
    w13_order: W13Order = "gate-up"
    name: str = ""

    @property
    def num_experts(self) -> int:
        """Local experts."""
        return self.w13.num_experts

    @property
    def intermediate_size(self) -> int:
        """Intermediate features as stored, padding included."""
        return self.w13.n if self.w13_order == "ungated" else self.w13.n // 2

    def quantising(self, activation_dtype: str | None) -> PackedExperts:
        """The experts with another `PackedMatrix.activation_dtype`; None leaves it as it is."""
        if activation_dtype is None:
            return self
        w13, w2 = (replace(one, activation_dtype=activation_dtype) for one in (self.w13, self.w2))
        return replace(self, w13=w13, w2=w2)

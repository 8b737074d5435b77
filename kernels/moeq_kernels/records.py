"""Records of packed expert weights. Importing this module needs neither torch nor triton."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

W13Order = Literal["gate-up", "interleaved", "ungated"]


@dataclass(frozen=True)
class PackedMatrix:
    """One projection of all local experts in one layout.

    Attributes:
        layout: versioned layout id, such as `marlin-wna16/1`; `capabilities.CAPABILITIES` lists them all.
        weight: packed codes `[E, ...]`; the layout defines shape and dtype.
        n: output features as stored, padding included (`w13`: gate and up together).
        k: input features as stored, padding included.
        element: type of a code: `int2`, `int3`, `int4`, `int8`, `e2m1`, `e4m3`, or `bf16` / `f16` for unquantised
            weights.
        group_size: codes along `k` that share a scale; -1, `k` or more means one scale per output feature.
        scale: scales `[E, ...]` in the layout's order; None for unquantised weights and for FP8 with one scale per
            tensor, which has only a global scale.
        zero: packed zero points `[E, ...]`, or None where the midpoint of the codes is zero.
        bias: `[E, n]` in the layout's order, or None.
        permutation: int32 `[E, k]` of act-order weights: packed row `i` multiplies input column `permutation[e, i]`;
            None for the identity.
        group_index: int32 `[E, k]`, scale group of each packed row; None where that is `row // group_size`.
        global_scale: float32 factor of the matrix, `[E]` or `[E, 1]`, or `[E, 2]` for the two halves of its rows (gate
            and up), or None.
        input_scale: float32 `[1]`, static scale of int8 or e4m3 activations; None quantises every row with a scale of
            its own.
        scale_factor: factor by which `marlin-nvfp4` multiplied its scales; kernels do not need it. Layers prepared for
            e4m3 activations beside MXFP4 keep their factors here, float32 `[E, n]`.
        weight_high: third bit of int3 codes `[E, ...]`, whose lower two are in `weight`; otherwise None.
        exponent_shift: uint8 in the order of `scale`, shifts of e4m3 exponents in layers prepared for e4m3 activations
            beside MXFP4; otherwise None.
        activation_dtype: `fp8` if rows of x are quantised to e4m3, with one scale per row, or one per group of the
            weights; empty for the activation dtype that the layout implies.
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
    weight_high: Tensor | None = None
    exponent_shift: Tensor | None = None
    activation_dtype: str = ""

    @property
    def channelwise(self) -> bool:
        """Whether each output feature has a single scale."""
        return self.group_size == -1 or self.group_size >= self.k

    @property
    def num_groups(self) -> int:
        """Number of scales along `k`."""
        return 1 if self.channelwise else -(-self.k // self.group_size)

    @property
    def num_experts(self) -> int:
        """Number of local experts."""
        return int(self.weight.shape[0])


@dataclass(frozen=True)
class PackedExperts:
    """Both projections of the local experts of a MoE layer."""

    w13: PackedMatrix  #: gate and up projection; `n` is twice the padded intermediate size, or once if ungated
    w2: PackedMatrix  #: down projection; `k` is the padded intermediate size
    #: Order of w13's rows: `gate-up` (gate rows, then up rows), `interleaved` (gate 0, up 0, gate 1, ...) or `ungated`.
    w13_order: W13Order = "gate-up"
    name: str = ""  #: name of the layer for messages

    @property
    def num_experts(self) -> int:
        """Number of local experts."""
        return self.w13.num_experts

    @property
    def intermediate_size(self) -> int:
        """Intermediate features as stored, padding included."""
        return self.w13.n if self.w13_order == "ungated" else self.w13.n // 2

    def quantising(self, activation_dtype: str | None) -> PackedExperts:
        """Return the experts with another `PackedMatrix.activation_dtype`; None leaves it unchanged."""
        if activation_dtype is None:
            return self
        w13, w2 = (replace(one, activation_dtype=activation_dtype) for one in (self.w13, self.w2))
        return replace(self, w13=w13, w2=w2)

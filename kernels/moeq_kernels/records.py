"""Records of packed expert weights. Importing this module needs neither torch nor triton."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

W13Order = Literal["gate-up", "interleaved", "ungated"]


@dataclass(frozen=True)
class PackedMatrix:
    """One projection of all local experts in one layout."""

    layout: str  #: versioned layout id, such as `marlin-wna16/1`; `capabilities.CAPABILITIES` lists them all
    weight: Tensor  #: packed codes `[E, ...]`; the layout defines shape and dtype
    n: int  #: output features as stored, padding included (`w13`: gate and up together)
    k: int  #: input features as stored, padding included
    #: Type of a code: `int2`, `int3`, `int4`, `int8`, `e2m1`, `e4m3`, or `bf16` / `f16` for unquantised weights.
    element: str
    group_size: int  #: codes along `k` that share a scale; -1, `k` or more means one scale per output feature
    #: Scales `[E, ...]` in the layout's order; None for unquantised weights and for FP8 with one scale per tensor,
    #: which has only a global scale.
    scale: Tensor | None = None
    zero: Tensor | None = None  #: packed zero points `[E, ...]`, or None where the midpoint of the codes is zero
    bias: Tensor | None = None  #: `[E, n]` in the layout's order, or None
    #: int32 `[E, k]` of act-order weights: packed row `i` multiplies input column `permutation[e, i]`; None for the
    #: identity.
    permutation: Tensor | None = None
    #: int32 `[E, k]`, scale group of each packed row; None where that is `row // group_size`.
    group_index: Tensor | None = None
    #: float32 factor of the matrix, `[E]` or `[E, 1]`, or `[E, 2]` for the two halves of its rows (gate and up), or
    #: None.
    global_scale: Tensor | None = None
    #: float32 `[1]`, static scale of int8 or e4m3 activations; None quantises every row with a scale of its own.
    input_scale: Tensor | None = None
    #: Factor by which `marlin-nvfp4` multiplied its scales; kernels do not need it. MXFP4 layers that are prepared for
    #: e4m3 activations have float32 `[E, n]` here: factors of the output features.
    scale_factor: Tensor | None = None
    #: Third bit of int3 codes `[E, ...]`, whose lower two are in `weight`; otherwise None.
    weight_high: Tensor | None = None
    #: uint8 in the order of `scale`: shifts of e5m2 exponents, in MXFP4 layers that are prepared for e4m3 activations;
    #: otherwise None.
    exponent_shift: Tensor | None = None
    #: `fp8` if x is quantised to e4m3, with one scale per row, or per row and group of the weights; empty for the
    #: activation dtype that the layout implies.
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

"""The MoE layer in plain torch, for tests and benchmarks of the kernels: no packing, no triton, no blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layer:
    """A MoE layer as plain numbers.

    Attributes:
        w13: float32 `[E, N, H]`, gate rows then up rows (or up to `interleaved` / ungated, see `order`).
        w2: float32 `[E, H, I]`.
        b13, b2: float32 biases `[E, N]`, `[E, H]`, or None.
        order: `gate-up`, `interleaved` or `ungated`.
        activation, alpha, beta, limit: as `fused_moe`; limit None for no clamping.
    """

    w13: Tensor
    w2: Tensor
    b13: Tensor | None = None
    b2: Tensor | None = None
    order: str = "gate-up"
    activation: str = "silu"
    alpha: float = 1.702
    beta: float = 1.0
    limit: float | None = None


def activate(h: Tensor, layer: Layer) -> Tensor:
    """`[R, N]` pre-activations -> `[R, I]`."""
    if layer.order == "ungated":
        return _activation(h, layer.activation)
    if layer.order == "interleaved":
        gate, up = h[:, 0::2], h[:, 1::2]
    else:
        gate, up = h.chunk(2, dim=1)
    if layer.activation == "situ":
        up = up if layer.limit is None else layer.limit * torch.tanh(up / layer.limit)
        return layer.alpha * torch.tanh(gate / layer.alpha) * torch.sigmoid(gate) * up
    if layer.activation == "swiglu_step":
        gate = torch.nn.functional.silu(gate)
    if layer.limit is not None:
        gate, up = gate.clamp(max=layer.limit), up.clamp(-layer.limit, layer.limit)
    if layer.activation == "swiglu_step":
        return gate * up
    if layer.activation == "swiglu_oai":
        return gate * torch.sigmoid(layer.alpha * gate) * (up + layer.beta)
    return _activation(gate, layer.activation) * up


def _activation(h: Tensor, name: str) -> Tensor:
    table = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda v: torch.nn.functional.gelu(v, approximate="tanh"),
        "relu2": lambda v: torch.relu(v) ** 2,
    }
    return table[name](h)


def moe(
    x: Tensor,
    layer: Layer,
    weights: Tensor,
    ids: Tensor,
    *,
    dtype: torch.dtype | None = None,
    weight_on_input: bool = False,
    int8_activations: bool = False,
    fp8_groups: int | None = None,
) -> Tensor:
    """`[M, H]` float32 result for x `[M, H]`, weights and ids `[M, k]` (ids outside 0 .. E - 1 are skipped).

    With `dtype` None every step is float32 (the truth). With a 16-bit dtype it is what a 16-bit implementation on
    dequantised weights does: weights rounded to dtype, products of 16-bit values accumulated in float32, the
    activation's result and the final result rounded to dtype. With `int8_activations` both products take rows
    quantised to int8 (scale = max |row| / 127, to nearest even) times exact weights; with `fp8_groups` to e4m3 (scale =
    max / 448), in groups of so many columns, or the whole row where it is -1.
    """

    def product(rows: Tensor, matrix: Tensor) -> Tensor:
        if fp8_groups is not None:
            return (e4m3_rows(rows, fp8_groups).double() @ matrix.T.double()).float()
        if not int8_activations:
            return rows @ rounded(matrix).T
        top = rows.abs().amax(dim=1, keepdim=True)
        # By a tensor: torch on a GPU divides by a number through its reciprocal, whose last bit decides ties.
        scale = torch.where(top > 0, top / torch.full_like(top, 127.0), 1.0)
        return (torch.round(rows / scale).double() @ matrix.T.double()).float() * scale

    def rounded(value: Tensor) -> Tensor:
        return value if dtype is None else value.to(dtype).float()

    x32, weights32 = x.float(), weights.float()
    y = torch.zeros(x.shape[0], layer.w2.shape[1], device=x.device)
    for expert in ids.unique().tolist():
        if not 0 <= expert < layer.w13.shape[0]:
            continue
        rows, choices = (ids == expert).nonzero(as_tuple=True)
        factor = weights32[rows, choices, None]
        h = product(x32[rows], layer.w13[expert])
        h = h * factor if weight_on_input else h
        h = h if layer.b13 is None else h + layer.b13[expert]
        a = rounded(activate(h, layer))
        out = product(a, layer.w2[expert])
        out = out if layer.b2 is None else out + layer.b2[expert]
        y.index_add_(0, rows, out if weight_on_input else out * factor)
    return rounded(y)


def e4m3_rows(rows: Tensor, group: int) -> Tensor:
    """float32 rows as their e4m3 codes and scales (max |x| / 448 of each group of columns) give them back."""
    found = []
    for part in rows.float().split(rows.shape[1] if group == -1 else group, dim=1):
        top = part.abs().amax(dim=1, keepdim=True)
        scale = torch.where(top > 0, top / torch.full_like(top, 448.0), 1.0)
        found.append((part / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(found, dim=1)


def relative_error(actual: Tensor, truth: Tensor) -> float:
    """Frobenius norm of the difference over that of the truth."""
    return float((actual.float() - truth).norm() / truth.norm().clamp(min=1e-30))


def worst_row(actual: Tensor, truth: Tensor) -> float:
    """Return the largest error of a row `[.., H]`, over its norm or the rows' square mean, whichever is larger.

    In `relative_error` many good rows hide a few wrong numbers.
    """
    norms = truth.norm(dim=1)
    least = max(float(norms.square().mean().sqrt()), 1e-30)
    return float(((actual.float() - truth).norm(dim=1) / norms.clamp(min=least)).max())

"""Activation of a gate-up product and sum of down products, to which low-rank products are added."""
# mypy: ignore-errors
# (device code is Triton's language, not Python's)

import triton
import triton.language as tl

from moeq_kernels.device.activations import activate, activate_gated
from moeq_kernels.device.numerics import round_to


@triton.jit
def activate_rows(
    sums, sums_rows, gate_more, gate_rows, up_more, up_rows, out, columns, stride, MORE: tl.constexpr,
    WIDTH: tl.constexpr, EACH: tl.constexpr, UP_AT: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Compute out[pair] = activation(gate + gate_more, up + up_more) of float32 rows.

    `sums` `[R, stride]` holds gate and up of `columns` columns, one after the other or INTERLEAVED, or only up. The
    addends `gate_more` and `up_more` `[R, WIDTH]`, or None, belong to the first MORE columns: that of a column stands
    at `EACH * column`, in `up_more` at `EACH * column + UP_AT`. `sums_rows` and the like, int32, give each pair's row
    in the tensor of that name; -1 stands for a row of zeros.
    """
    pair = tl.program_id(0).to(tl.int64)
    row = tl.load(sums_rows + pair).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < columns
    inside = exists & (row >= 0)
    first = row * stride + column * (2 if INTERLEAVED else 1)
    more = exists & (column < MORE)
    up_at = first
    if GATED:
        up_at = first + 1 if INTERLEAVED else first + columns
    up = tl.load(sums + up_at, mask=inside, other=0.0)
    if up_more is not None:
        at = tl.load(up_rows + pair).to(tl.int64)
        up += tl.load(up_more + at * WIDTH + column * EACH + UP_AT, mask=more & (at >= 0), other=0.0)
    if GATED:
        gate = tl.load(sums + first, mask=inside, other=0.0)
        if gate_more is not None:
            at = tl.load(gate_rows + pair).to(tl.int64)
            gate += tl.load(gate_more + at * WIDTH + column * EACH, mask=more & (at >= 0), other=0.0)
        value = activate_gated(gate, up, ACTIVATION, ALPHA, BETA, LIMIT)
    else:
        value = activate(up, ACTIVATION)
    tl.store(out + pair * columns + column, round_to(value, out.dtype.element_ty, INTERPRET), mask=exists)


@triton.jit
def add_choices(
    outputs, outputs_rows, more, more_rows, weights, y, hidden, stride, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Compute y[token] = sum over its choices of weight * (output + addend), float32 rows, in the order of choices.

    `outputs` is `[R, stride]`, `more` `[R, hidden]` or None; rows of pairs are those of `activate_rows`.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(TOP_K):
        pair = token * TOP_K + choice
        row = tl.load(outputs_rows + pair).to(tl.int64)
        value = tl.load(outputs + row * stride + column, mask=inside & (row >= 0), other=0.0)
        if more is not None:
            at = tl.load(more_rows + pair).to(tl.int64)
            value += tl.load(more + at * hidden + column, mask=inside & (at >= 0), other=0.0)
        total += value * tl.load(weights + pair, mask=row >= 0, other=0.0)
    tl.store(y + token * hidden + column, round_to(total, y.dtype.element_ty, INTERPRET), mask=inside)

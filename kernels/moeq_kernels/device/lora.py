"""Activation of a gate-up product to which low-rank products are added."""
# mypy: ignore-errors
# (device code is Triton's language, not Python's)

import triton
import triton.language as tl

from moeq_kernels.device.activations import activate, activate_gated
from moeq_kernels.device.numerics import round_to


@triton.jit
def activate_rows(
    sums, gate_more, up_more, out, columns, stride, MORE: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Compute out[row] = activation(gate + gate_more, up + up_more) of float32 rows.

    `sums` `[R, stride]` holds gate and up of `columns` columns, one after the other or INTERLEAVED, or only up. Addends
    `[R, MORE]` belong to the first MORE columns; they may be None.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    first = row * stride + column * (2 if INTERLEAVED else 1)
    more = inside & (column < MORE)
    up_at = first
    if GATED:
        up_at = first + 1 if INTERLEAVED else first + columns
    up = tl.load(sums + up_at, mask=inside, other=0.0)
    if up_more is not None:
        up += tl.load(up_more + row * MORE + column, mask=more, other=0.0)
    if GATED:
        gate = tl.load(sums + first, mask=inside, other=0.0)
        if gate_more is not None:
            gate += tl.load(gate_more + row * MORE + column, mask=more, other=0.0)
        value = activate_gated(gate, up, ACTIVATION, ALPHA, BETA, LIMIT)
    else:
        value = activate(up, ACTIVATION)
    tl.store(out + row * columns + column, round_to(value, out.dtype.element_ty, INTERPRET), mask=inside)

"""Activation functions of the portable kernels, in float32. `moeq_kernels.activations` lists formulas and sources."""
# mypy: ignore-errors
# (device code is Triton's language, not Python's)

import triton
import triton.language as tl

from moeq_kernels.device.numerics import sigmoid


@triton.jit
def _tanh(value):
    """Return tanh; a series replaces 2 * sigmoid(2 * value) - 1 near zero, where that difference loses digits."""
    square = value * value
    higher = 0.13333333333333333 - square * 0.05396825396825397
    series = value * (1.0 + square * (square * higher - 0.3333333333333333))
    return tl.where(tl.abs(value) < 0.25, series, 2.0 * sigmoid(2.0 * value) - 1.0)


@triton.jit
def _at_most(value, limit):
    """Clamp from above; NaN stays NaN as in `torch.clamp`."""
    return tl.where(value > limit, limit, value)


@triton.jit
def _within(value, limit):
    """Clamp on both sides; NaN stays NaN as in `torch.clamp`."""
    return tl.where(value < -limit, -limit, _at_most(value, limit))


@triton.jit
def activate_gated(gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr):
    """Combine gate and up; LIMIT <= 0 disables clamping."""
    if ACTIVATION == "situ":
        gate = ALPHA * _tanh(gate * (1.0 / ALPHA)) * sigmoid(gate)
        if LIMIT > 0:
            up = LIMIT * _tanh(up * (1.0 / LIMIT))
        return gate * up
    elif ACTIVATION == "swiglu_step":
        return _at_most(gate * sigmoid(gate), LIMIT) * _within(up, LIMIT)
    else:
        if LIMIT > 0:
            gate = _at_most(gate, LIMIT)
            up = _within(up, LIMIT)
        if ACTIVATION == "swiglu_oai":
            return gate * sigmoid(gate * ALPHA) * (up + BETA)
        else:
            return activate(gate, ACTIVATION) * up


@triton.jit
def activate(value, ACTIVATION: tl.constexpr):
    """Apply an activation."""
    tl.static_assert(
        ACTIVATION == "silu" or ACTIVATION == "gelu" or ACTIVATION == "gelu_tanh" or ACTIVATION == "relu2",
        "unknown activation",
    )
    if ACTIVATION == "silu":
        return value * sigmoid(value)
    elif ACTIVATION == "gelu":
        return 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        return value * sigmoid(2.0 * inner)  # 0.5 * (1 + tanh(z)) == sigmoid(2 z)
    else:
        positive = tl.maximum(value, 0.0)
        return positive * positive

"""Activation functions of the portable kernels, in float32."""
# mypy: ignore-errors
# (device code is Triton's language, not Python's)

import triton
import triton.language as tl

from moeq_kernels.device.numerics import sigmoid


@triton.jit
def activate_gated(gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr):
    """Return activation(gate) * up; LIMIT <= 0 disables clamping."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
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

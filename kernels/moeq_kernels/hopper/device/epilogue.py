"""Epilogues of products in device code: channel scales, biases and activations on float32 sums."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl


@gluon.jit
def single_order(column):
    """Return the place of a column in Marlin's 32-column order (channel-wise scales, biases).

    The place has the column's bits 2, 1, 4, 3, 0, most significant first.

    Bit operations are used because divisions of signed numbers become hundreds of instructions.
    """
    return (column & -31) | ((column & 6) << 2) | ((column & 24) >> 2)


@gluon.jit
def affine(value, feature, scale, bias, bias_here, expert, packed, inside, UNIT: gl.constexpr = 1.0):
    """Apply channel scale and bias, `[experts, packed]` or None, to packed columns `[1, n]`.

    The value of a stored scale is the scale times UNIT.
    """
    place = expert.to(gl.int64) * packed + single_order(feature)
    if scale is not None:
        factor = gl.load(scale + place, mask=inside, other=0.0).to(gl.float32)
        if UNIT != 1.0:
            factor = factor * UNIT
        value = value * factor
    if bias is not None:
        value = value + gl.load(bias + place, mask=inside & bias_here, other=0.0).to(gl.float32)
    return value


@constexpr_function
def gated(epilogue):
    """Return whether the epilogue combines gate and up."""
    return epilogue.gated


@constexpr_function
def interleaved(epilogue):
    """Return whether gate and up columns are interleaved."""
    return epilogue.interleaved


@constexpr_function
def activation(epilogue):
    """Return the name of the activation."""
    return epilogue.activation


@constexpr_function
def constant(epilogue, name):
    """Return alpha, beta or limit."""
    return getattr(epilogue, name)


@gluon.jit
def reciprocal(value):
    """Return 1 / value to a few units in the last place."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", (value,), gl.float32, True, 1)


@gluon.jit
def logistic(value):
    """Return 1 / (1 + exp(-value)) to a few units in the last place: four instructions instead of twenty."""
    power = gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", (value * -1.4426950408889634,), gl.float32, True, 1
    )
    return reciprocal(1.0 + power)


@gluon.jit
def activate(value, NAME: gl.constexpr):
    """Apply an activation in float32."""
    gl.static_assert(NAME == "silu" or NAME == "gelu" or NAME == "gelu_tanh" or NAME == "relu2", "unknown activation")
    if NAME == "silu":
        return value * logistic(value)
    elif NAME == "gelu":
        return 0.5 * value * (1.0 + gl.erf(value * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        return value * logistic(2.0 * inner)  # 0.5 * (1 + tanh(z)) == sigmoid(2 z)
    else:
        positive = gl.maximum(value, 0.0)
        return positive * positive


@gluon.jit
def tanh(value):
    """Return tanh; a series replaces 2 * logistic(2 * value) - 1 near zero, where that difference loses digits."""
    square = value * value
    higher = 0.13333333333333333 - square * 0.05396825396825397
    series = value * (1.0 + square * (square * higher - 0.3333333333333333))
    return gl.where(gl.abs(value) < 0.25, series, 2.0 * logistic(2.0 * value) - 1.0)


@gluon.jit
def at_most(value, limit: gl.constexpr):
    """Clamp from above; NaN stays NaN as in `torch.clamp`."""
    return gl.where(value > limit, limit, value)


@gluon.jit
def within(value, limit: gl.constexpr):
    """Clamp on both sides; NaN stays NaN as in `torch.clamp`."""
    return gl.where(value < -limit, -limit, at_most(value, limit))


@gluon.jit
def activate_gated(gate, up, EPILOGUE: gl.constexpr):
    """Combine gate and up in float32; `moeq_kernels.activations` lists formulas and sources."""
    name: gl.constexpr = activation(EPILOGUE)
    limit: gl.constexpr = constant(EPILOGUE, "limit")
    alpha: gl.constexpr = constant(EPILOGUE, "alpha")
    if name == "situ":
        gate = alpha * tanh(gate * (1.0 / alpha)) * logistic(gate)
        if limit > 0:
            up = limit * tanh(up * (1.0 / limit))
        return gate * up
    elif name == "swiglu_step":
        return at_most(gate * logistic(gate), limit) * within(up, limit)
    else:
        if limit > 0:
            gate = at_most(gate, limit)
            up = within(up, limit)
        if name == "swiglu_oai":
            return gate * logistic(alpha * gate) * (up + constant(EPILOGUE, "beta"))
        else:
            return activate(gate, name) * up

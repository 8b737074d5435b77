"""The ends of products in device code: channel scales, biases and activations, on float32 sums."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl


@gluon.jit
def single_order(column):
    """Where a column's value lies in Marlin's 32-column order (channel-wise scales, biases): its bits as 2 1 4 3 0.

    By bits, since divisions of signed numbers become hundreds of instructions.
    """
    return (column & -31) | ((column & 6) << 2) | ((column & 24) >> 2)


@gluon.jit
def affine(value, feature, scale, bias, bias_here, expert, packed, inside, UNIT: gl.constexpr = 1.0):
    """value * channel scale + bias of packed columns `[1, n]`; scale and bias `[experts, packed]` or None.

    UNIT: what scales are in units of.
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
    """Whether two results make one."""
    return epilogue.gated


@constexpr_function
def interleaved(epilogue):
    """Whether gate and up are neighbouring columns."""
    return epilogue.interleaved


@constexpr_function
def activation(epilogue):
    """Its name."""
    return epilogue.activation


@constexpr_function
def constant(epilogue, name):
    """alpha, beta or limit."""
    return getattr(epilogue, name)


@gluon.jit
def reciprocal(value):
    """1 / value to a few units of the last place."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", (value,), gl.float32, True, 1)


@gluon.jit
def logistic(value):
    """1 / (1 + exp(-value)) to a few units of the last place, 0 and 1 at the ends: four instructions, not twenty."""
    power = gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", (value * -1.4426950408889634,), gl.float32, True, 1
    )
    return reciprocal(1.0 + power)


@gluon.jit
def activate(value, NAME: gl.constexpr):
    """The activation of one result, in float32."""
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
def activate_gated(gate, up, EPILOGUE: gl.constexpr):
    """activation(gate) * up in float32; NaN passes through the clamps as in `torch.clamp`."""
    limit: gl.constexpr = constant(EPILOGUE, "limit")
    if limit > 0:
        gate = gl.where(gate > limit, limit, gate)
        up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
    if activation(EPILOGUE) == "swiglu_oai":
        return gate * logistic(constant(EPILOGUE, "alpha") * gate) * (up + constant(EPILOGUE, "beta"))
    else:
        return activate(gate, activation(EPILOGUE)) * up

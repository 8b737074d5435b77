"""Operations that Triton's interpreter gets wrong, in a form that is right there and on a GPU.

`INTERPRET` is a constexpr set by the host. Behaviour of the interpreter of triton 3.6 to 3.9:

* `tl.dot` on bfloat16 multiplies the raw 16-bit integers, so operands are converted to float32;
* float32 -> bfloat16 truncates and flushes subnormals, so the bits are rounded as integers;
* `range()` over a tensor argument fails in triton 3.6 with numpy 2.4, so loop bounds are constexprs;
* inline assembly does not exist, so none is used.
"""
# mypy: ignore-errors
# (device code is Triton's language, not Python's)

import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc, INTERPRET: tl.constexpr):
    """Return acc + a @ b, accumulated in float32, or in int32 for int8 operands."""
    if INTERPRET and acc.dtype == tl.float32:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b, acc, out_dtype=acc.dtype)


@triton.jit
def round_to(value, DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """Round float32 to DTYPE, to nearest even; NaN stays NaN."""
    if INTERPRET and DTYPE == tl.bfloat16:  # noqa: SIM300
        bits = value.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nearest = tl.where(value == value, nearest, (bits >> 16) | 0x0040)
        return nearest.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(DTYPE)


@triton.jit
def e4m3_to_float(code):
    """Convert bytes of e4m3fn (bias 7, no infinity, 0x7F and 0xFF are NaN) to float32, exactly."""
    code = code.to(tl.int32)
    # Sign, exponent and mantissa moved to their places in float32 are the value times 2**-120.
    bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    value = bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def float_to_e4m3(value):
    """Round float32 to bytes of e4m3fn, to nearest even, magnitudes beyond 448 to 448; NaN stays NaN.

    Integer arithmetic is used because GPUs before sm_89 lack the conversion, and the interpreter truncates.
    """
    bits = value.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(value), 448.0)
    size_bits = size.to(tl.int32, bitcast=True)
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - 960  # (127 - 7) << 3
    # Codes of magnitudes below 2**-6 count multiples of 2**-9; adding 2**14 rounds to these.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(value == value, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _fma(a, b, c, INTERPRET: tl.constexpr):
    """Return a * b + c of float32, rounded once."""
    if INTERPRET:  # the interpreter's fma rounds the product
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def quotients(value, scale, INTERPRET: tl.constexpr):
    """Divide values by a scale in float32, with one division per scale; scales below 2^-100 count as 2^-100.

    Results are rounded correctly if values are bfloat16 or float16 and the scale is the largest of them over 127 or
    448: the remainder of the product with the inverse is exact and corrects it (Markstein, IBM J. Res. Dev. 34, 1990).
    A division per value would take twelve instructions with a branch, which do not overlap with others.
    """
    inverse = tl.div_rn(1.0, tl.maximum(scale, 7.888609052210118e-31))
    near = value * inverse
    return _fma(_fma(-near, scale, value, INTERPRET), inverse, near, INTERPRET)


@triton.jit
def round_half_even(value):
    """Round float32 to the nearest integer as float32, ties to even, for magnitudes below 2**22."""
    # The sum with 1.5 * 2**23 has no fraction bits, so the addition rounds.
    return (value + 12582912.0) - 12582912.0


@triton.jit
def round_to_int8(value):
    """Round float32 from -128 to 127 to the nearest int8, ties to even."""
    # The sum with 1.5 * 2**23 is rounded and holds the integer in its lowest bits.
    return (value + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def sigmoid(value):
    """Return 1 / (1 + exp(-value)) without overflow on either side."""
    small = tl.exp(-tl.abs(value))
    return tl.where(value >= 0, 1.0, small) / (1.0 + small)

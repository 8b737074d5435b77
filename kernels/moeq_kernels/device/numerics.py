"""The few operations that Triton's interpreter gets wrong, each in a form that is right there and on a GPU.

`INTERPRET` is a constexpr set by the host. What is handled here, measured on triton 3.6 to 3.9:

* `tl.dot` on bfloat16 multiplies the raw 16-bit integers in the interpreter: operands go through float32 there;
* float32 -> bfloat16 truncates and flushes subnormals in the interpreter: there it is done on the bits;
* `range()` over a tensor argument fails in the interpreter of 3.6 with numpy 2.4: loop bounds are constexprs;
* inline assembly does not exist in the interpreter: none is used.
"""
# mypy: ignore-errors
# (device code is Triton's language, not Python's)

import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc, INTERPRET: tl.constexpr):
    """acc + a @ b, accumulated in float32, or in int32 for int8 operands."""
    if INTERPRET and acc.dtype == tl.float32:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b, acc, out_dtype=acc.dtype)


@triton.jit
def round_to(value, DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """float32 -> DTYPE, to nearest even. NaN stays NaN."""
    if INTERPRET and DTYPE == tl.bfloat16:  # noqa: SIM300
        bits = value.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nearest = tl.where(value == value, nearest, (bits >> 16) | 0x0040)
        return nearest.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(DTYPE)


@triton.jit
def e4m3_to_float(code):
    """Bytes of e4m3fn (exponents of 4 bits, bias 7, no infinity, 0x7F and 0xFF are NaN) to float32, exactly."""
    code = code.to(tl.int32)
    # As e2m1: sign, exponent and mantissa in their places in float32 are the value times 2**-120.
    bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    value = bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def float_to_e4m3(value):
    """float32 to bytes of e4m3fn, to nearest even, magnitudes beyond 448 to 448; NaN stays NaN.

    On the bits: GPUs before sm_89 have no such conversion, and the interpreter's does not round to nearest.
    """
    bits = value.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(value), 448.0)
    size_bits = size.to(tl.int32, bitcast=True)
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - 960  # (127 - 7) << 3
    # Below 2**-6 codes count multiples of 2**-9, to which adding 2**14 rounds.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(value == value, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _fma(a, b, c, INTERPRET: tl.constexpr):
    """a * b + c of float32, rounded once."""
    if INTERPRET:  # which rounds the product
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def quotients(value, scale, INTERPRET: tl.constexpr):
    """value / scale in float32 by one division for each scale; smaller where scale is below 2^-100.

    Rounded as a division is where values are bfloat16 or float16 and scale is the largest of such over 127 or 448:
    what a product with the inverse leaves is known exactly, and corrects it (Markstein, IBM J. Res. Dev. 34, 1990). A
    division for each value would be twelve instructions with a branch, which do not overlap with others.
    """
    inverse = tl.div_rn(1.0, tl.maximum(scale, 7.888609052210118e-31))
    near = value * inverse
    return _fma(_fma(-near, scale, value, INTERPRET), inverse, near, INTERPRET)


@triton.jit
def round_half_even(value):
    """float32 -> nearest integer as float32, ties to even, for magnitudes below 2**22."""
    # Adding 1.5 * 2**23 leaves no fraction bits, so the addition itself rounds.
    return (value + 12582912.0) - 12582912.0


@triton.jit
def round_to_int8(value):
    """float32 from -128 to 127 to the nearest int8, ties to even."""
    # As above, and the integer is in the lowest bits.
    return (value + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def sigmoid(value):
    """1 / (1 + exp(-value)) without overflow on either side."""
    small = tl.exp(-tl.abs(value))
    return tl.where(value >= 0, 1.0, small) / (1.0 + small)

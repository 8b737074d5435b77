"""Readers of group scales and zero points in their stored orders, spread over a tile of codes.

Orders: `marlin-group` and `marlin-single` are Marlin's two column permutations (vLLM 0.33 `marlin_permute_scales`);
`marlin-mx` and `marlin-mx-single` add Marlin's byte order of 8-bit scales; `rows` is `[N, G]`; `blocks` is
`[ceil(N / 128), G]`; `hopper-mx8` and `hopper-mx4` are triton_kernels' HopperMXScaleLayout for 8 and 4 warps.
"""
# mypy: ignore-errors
# (device code is Triton's language, not Python's)

import triton
import triton.language as tl

from moeq_kernels.device.codecs import codes, column_of
from moeq_kernels.device.numerics import e4m3_to_float, round_to


@triton.jit
def single_order(column):
    """Return the place of a column in Marlin's 32-column order (channel-wise scales, biases)."""
    inner = column % 32
    return column - inner + 8 * ((inner % 8) // 2) + 2 * (inner // 8) + inner % 2


@triton.jit
def scale_offset(group, position, CODEC: tl.constexpr, ORDER: tl.constexpr, STRIDE: tl.constexpr):
    """Return the offset of the scale of (group, position) within one expert; STRIDE is the stored row length."""
    if ORDER == "marlin-group":
        return group * STRIDE + position  # positions of a Marlin tile are in the order of the scales
    elif ORDER == "marlin-single":
        return group * STRIDE + single_order(column_of(position, CODEC))
    elif ORDER == "marlin-mx":
        octet = position % 8  # 4 * (block // 2) + 2 * (block % 2) + half -> 4 * (block // 2) + 2 * half + block % 2
        return group * STRIDE + position - octet % 4 + 2 * (octet % 2) + (octet // 2) % 2
    elif ORDER == "marlin-mx-single":
        single = single_order(column_of(position, CODEC))
        return group * STRIDE + single - single % 4 + 2 * (single % 2) + (single // 2) % 2
    elif ORDER == "rows":
        return position * STRIDE + group
    elif ORDER == "blocks":
        return position // 128 * STRIDE + group
    else:
        tl.static_assert(ORDER == "hopper-mx8" or ORDER == "hopper-mx4", "unknown scale order")
        WARPS: tl.constexpr = 8 if ORDER == "hopper-mx8" else 4
        row = WARPS * (position // (32 * WARPS)) + (position % (16 * WARPS)) // 16
        column = 64 * (group // 2) + 32 * ((position % (32 * WARPS)) // (16 * WARPS))
        return row * STRIDE + column + 4 * (position % 8) + 2 * (group % 2) + (position % 16) // 8


@triton.jit
def scale_to_float(stored, KIND: tl.constexpr):
    """Convert a stored scale to float32.

    KIND: `float` is a number; `float-120` and `float-8` are numbers times 2**120 and 2**8 (vLLM 0.33
    `fp8_fused_exponent_bias_into_scales`); `e8m0` are exponents, 2**(byte - 127), 255 = NaN; `e4m3` are bytes of
    e4m3fn; `s0e5m3` is the upper byte of a float16 without its sign, times 2**7 (vLLM 0.33
    `nvfp4_marlin_process_scales`).
    """
    if KIND == "e8m0":
        byte = stored.to(tl.int32)
        bits = tl.where(byte == 0, 0x00400000, byte << 23)  # 2**-127 is subnormal
        return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    elif KIND == "e4m3":
        return e4m3_to_float(stored)
    elif KIND == "s0e5m3":
        bits = stored.to(tl.int32) << 20  # float32 with float16's exponent: the number times 2**(15 - 127 + 7)
        return bits.to(tl.float32, bitcast=True) * 40564819207303340847894502572032.0
    elif KIND == "float-120":
        return stored.to(tl.float32) * 7.52316384526264e-37
    elif KIND == "float-8":
        return stored.to(tl.float32) * 0.00390625
    else:
        tl.static_assert(KIND == "float", "unknown kind of scale")
        return stored.to(tl.float32)


@triton.jit
def group_rows(k0, group_index, GROUP: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, K: tl.constexpr):
    """Return the groups of rows k0 .. k0 + BK: ROWS consecutive groups, or one per row if ROWS == BK.

    Negative entries of `group_index` become the largest number, which every load of scales and zero points masks.
    """
    if group_index is not None:
        k = k0 + tl.arange(0, BK)
        groups = tl.load(group_index + k, mask=k < K, other=0)
        return tl.where(groups < 0, 0x7FFFFFFF, groups)
    elif ROWS == BK:
        return (k0 + tl.arange(0, BK)) // GROUP
    else:
        return k0 // GROUP + tl.arange(0, ROWS)


@triton.jit
def spread(values, ROWS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr):
    """Expand [ROWS, BN] so that it broadcasts against [BK, BN]; each row covers BK / ROWS rows."""
    if ROWS == 1 or ROWS == BK:
        return values
    else:
        wide = tl.broadcast_to(values[:, None, :], (ROWS, BK // ROWS, BN))
        return tl.reshape(wide, (BK, BN))


@triton.jit
def zero_points(zero, groups, p0, G: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
                CODEC: tl.constexpr, ELEMENT: tl.constexpr):
    """Load zero points as int32 [ROWS, BN]; they are 0 beyond the matrix."""
    if CODEC == "marlin4":  # a column is in word 8 tile + octet, in its 4-bit field block + 4 half
        words = p0 // 8 + tl.arange(0, BN // 8)
        mask = (groups[:, None] < G) & (words[None, :] < N // 8)
        packed = tl.load(zero + groups[:, None] * (N // 8) + words[None, :], mask=mask, other=0)
        packed = packed.to(tl.uint32, bitcast=True)
        fields = tl.join(packed, packed >> 4)  # block bit 0
        fields = tl.join(fields, fields >> 8)  # block bit 1
        fields = tl.join(fields, fields >> 16) & 15  # half
        return tl.reshape(tl.permute(fields, (0, 1, 3, 2, 4)), (ROWS, BN)).to(tl.int32)
    elif CODEC == "marlin8":  # a column is in word 16 tile + 2 octet + block // 2, in its byte 2 half + block % 2
        words = p0 // 4 + tl.arange(0, BN // 4)
        mask = (groups[:, None] < G) & (words[None, :] < N // 4)
        packed = tl.load(zero + groups[:, None] * (N // 4) + words[None, :], mask=mask, other=0)
        packed = packed.to(tl.uint32, bitcast=True)
        fields = tl.join(packed, packed >> 8)  # block % 2
        fields = tl.join(fields, fields >> 16) & 255  # half
        return tl.reshape(fields, (ROWS, BN)).to(tl.int32)
    else:
        columns = p0 + tl.arange(0, BN)
        mask = (groups[:, None] < G) & (columns[None, :] < N)
        if ELEMENT == "uint4":  # uint8 [N / 2, G], low nibble = even column
            offset = (columns[None, :] // 2) * G + groups[:, None]
            packed = tl.load(zero + offset, mask=mask, other=0).to(tl.int32)
            return (packed >> (4 * (columns[None, :] % 2))) & 15
        else:  # uint8 [N, G]
            return tl.load(zero + columns[None, :] * G + groups[:, None], mask=mask, other=0).to(tl.int32)


@triton.jit
def e2m1_to_float(code):
    """Convert e2m1 codes 0 .. 15 to float32: 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    # Sign, exponent and mantissa moved to their places in float32 are the value times 2**-126, subnormals included.
    # Triton does not flush float32 subnormals by default, so one product with a power of two is exact.
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 85070591730234615865843651857942052864.0


@triton.constexpr_function
def middle_of(element):
    """Return 2**23 + zero point of a symmetric element `uint2` .. `uint8`, which is half the number of its codes."""
    return 8388608.0 + 2.0 ** (int(element[4:]) - 1)


@triton.jit
def weight_tile(
    w, high, scale, zero, group_index, k0, p0,
    K: tl.constexpr, N: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    CODEC: tl.constexpr, ELEMENT: tl.constexpr, ORDER: tl.constexpr, STRIDE: tl.constexpr, SCALE: tl.constexpr,
    CHANNELWISE: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr, INTERPRET: tl.constexpr,
):
    """Return weights [BK, BN] as operand of a dot: DTYPE, rounded once, or int8 codes for `int8`.

    The epilogue applies channel-wise scales: integers minus zero points are exact in 16-bit floats.
    """
    code = codes(w, high, k0, p0, K, N, BK, BN, CODEC)
    if ELEMENT == "float" or ELEMENT == "int8":
        return code
    else:
        groups = group_rows(k0, group_index, GROUP, ROWS, BK, K)
        if ELEMENT == "e2m1":
            value = e2m1_to_float(code)
        elif ELEMENT == "e4m3":
            value = e4m3_to_float(code)
        else:
            # Bits of 2**23 + code, minus (2**23 + zero point): exact, and cheaper than converting integers.
            value = (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
            if zero is not None:
                points = zero_points(zero, groups, p0, G, N, ROWS, BN, CODEC, ELEMENT)
                value = value - spread((points | 0x4B000000).to(tl.float32, bitcast=True), ROWS, BK, BN)
            else:
                MIDDLE: tl.constexpr = middle_of(ELEMENT)
                value = value - MIDDLE
        if not CHANNELWISE:
            scales = group_scales(scale, groups, p0, G, N, CODEC, ORDER, STRIDE, SCALE, BN)
            value = value * spread(scales, ROWS, BK, BN)
        return round_to(value, DTYPE, INTERPRET)


@triton.jit
def group_scales(scale, groups, p0, G: tl.constexpr, N: tl.constexpr, CODEC: tl.constexpr, ORDER: tl.constexpr,
                 STRIDE: tl.constexpr, SCALE: tl.constexpr, BN: tl.constexpr):
    """Load scales of groups at positions p0 .. p0 + BN as float32 [groups, BN]."""
    positions = p0 + tl.arange(0, BN)
    offset = scale_offset(groups[:, None], positions[None, :], CODEC, ORDER, STRIDE)
    mask = (groups[:, None] < G) & (positions[None, :] < N)
    return scale_to_float(tl.load(scale + offset, mask=mask, other=0), SCALE)

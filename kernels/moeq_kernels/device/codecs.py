"""Readers of packed bytes into a tile of codes `[BK, BN]`, one per arrangement of the weights.

The columns of a tile are *positions*. If a layout permutes columns, the reader keeps the order that makes its loads
contiguous, and `column_of` gives the output feature at a position, which only the store needs. Rows are always in the
natural order of `k`. Formulas: vLLM 0.33 (Marlin repack, `moe_wna16`), triton_kernels 3.5.1 (Hopper values).
"""
# mypy: ignore-errors
# (device code is Triton's language, not Python's)

import triton
import triton.language as tl


@triton.constexpr_function
def in_marlin_order(codec):
    """Return whether positions are columns in the order of Marlin's words."""
    return codec.startswith("marlin")


@triton.jit
def column_of(position, CODEC: tl.constexpr):
    """Return the output feature at a position."""
    if in_marlin_order(CODEC):
        # position = 64 tile + 8 octet + 2 block + half; feature = 64 tile + 16 block + 8 half + octet
        inner = position % 64
        return position - inner + 16 * ((inner // 2) % 4) + 8 * (inner % 2) + inner // 8
    else:
        return position


@triton.jit
def codes(w, high, k0, p0, K: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, CODEC: tl.constexpr):
    """Read the codes of rows k0 .. k0 + BK and positions p0 .. p0 + BN; they are 0 beyond the matrix.

    `high` holds the third bits of 3-bit codes; otherwise it is None.
    """
    if CODEC == "marlin4":
        return _marlin4(w, k0, p0, K, N, BK, BN)
    elif CODEC == "marlin4-permuted":
        return _marlin4_permuted(w, k0, p0, K, N, BK, BN)
    elif CODEC == "marlin2":
        return _marlin2(w, k0, p0, K, N, BK, BN)
    elif CODEC == "marlin3":
        return _marlin2(w, k0, p0, K, N, BK, BN) | (_third_bits(high, k0, p0, K, N, BK, BN) << 2)
    elif CODEC == "marlin8":
        return _marlin8(w, k0, p0, K, N, BK, BN)
    elif CODEC == "nibbles":
        return _nibbles(w, k0, p0, K, N, BK, BN)
    elif CODEC == "hopper4":
        return _hopper4(w, k0, p0, K, N, BK, BN)
    else:
        tl.static_assert(CODEC == "rows", "unknown codec")
        return _rows(w, k0, p0, K, N, BK, BN)


@triton.jit
def _marlin_words(
    w, k0, p0, K: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, EACH: tl.constexpr,
    ROWS: tl.constexpr = 16,
):
    """Load the words of a tile, EACH per column and ROWS rows."""
    rows = k0 // ROWS + tl.arange(0, BK // ROWS)
    words = p0 * EACH + tl.arange(0, EACH * BN)
    mask = (rows[:, None] < K // ROWS) & (words[None, :] < EACH * N)
    return tl.load(w + rows[:, None] * (EACH * N) + words[None, :], mask=mask, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _marlin4(w, k0, p0, K: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr):
    """Decode int32 [K / 16, 2 N]: word 4 lane + block of a 64-column tile, lane = 4 octet + k pair."""
    packed = _marlin_words(w, k0, p0, K, N, BK, BN, 2)
    fields = tl.join(packed, packed >> 4)  # bit 0 of the field: k + 8
    fields = tl.join(fields, fields >> 8)  # bit 1: column + 8
    fields = tl.join(fields, fields >> 16)  # bit 2: k + 1
    fields = tl.reshape(fields & 15, (BK // 16, BN // 64, 8, 4, 4, 2, 2, 2))
    # (k tile, n tile, octet, k pair, block, k + 8, half, k + 1) -> k in order, then position
    return tl.reshape(tl.permute(fields, (0, 5, 3, 7, 1, 2, 4, 6)), (BK, BN))


@triton.jit
def _marlin2(w, k0, p0, K: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr):
    """Decode int32 [K / 32, 2 N]: the words of `_marlin4`, with codes of k and k + 16 in a nibble."""
    packed = _marlin_words(w, k0, p0, K, N, BK, BN, 2, 32)
    fields = tl.join(packed, packed >> 2)  # k + 16
    fields = tl.join(fields, fields >> 4)  # k + 8
    fields = tl.join(fields, fields >> 8)  # column + 8
    fields = tl.join(fields, fields >> 16)  # k + 1
    fields = tl.reshape(fields & 3, (BK // 32, BN // 64, 8, 4, 4, 2, 2, 2, 2))
    # (k tile, n tile, octet, k pair, block, k + 16, k + 8, half, k + 1) -> k in order, then position
    return tl.reshape(tl.permute(fields, (0, 5, 6, 3, 8, 1, 2, 4, 7)), (BK, BN))


@triton.jit
def _third_bits(w, k0, p0, K: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr):
    """Decode int32 [K / 64, 2 N]: the words of `_marlin4`, with bits of k, k + 16, k + 32 and k + 48 in a nibble."""
    packed = _marlin_words(w, k0, p0, K, N, BK, BN, 2, 64)
    fields = tl.join(packed, packed >> 1)  # k + 16
    fields = tl.join(fields, fields >> 2)  # k + 32
    fields = tl.join(fields, fields >> 4)  # k + 8
    fields = tl.join(fields, fields >> 8)  # column + 8
    fields = tl.join(fields, fields >> 16)  # k + 1
    fields = tl.reshape(fields & 1, (BK // 64, BN // 64, 8, 4, 4, 2, 2, 2, 2, 2))
    # (k tile, n tile, octet, k pair, block, k + 16, k + 32, k + 8, half, k + 1) -> k in order, then position
    return tl.reshape(tl.permute(fields, (0, 6, 5, 7, 3, 9, 1, 2, 4, 8)), (BK, BN))


@triton.jit
def _marlin4_permuted(w, k0, p0, K: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr):
    """Decode the words of `_marlin4` with bits permuted as in `hopper.w4a16.device.recipes`."""
    packed = _marlin_words(w, k0, p0, K, N, BK, BN, 2)
    half = tl.join(packed, packed >> 16)  # k + 1
    other = tl.join(packed >> 16, packed)
    code0 = ((half >> 12) & 8) | ((half >> 6) & 7)
    code1 = ((half >> 9) & 8) | ((half >> 3) & 7)
    code2 = ((half >> 6) & 8) | (half & 7)
    code3 = ((other >> 10) & 8) | ((other >> 9) & 6) | ((other >> 14) & 1)
    fields = tl.join(tl.join(code0, code2), tl.join(code1, code3))  # k + 8, then column + 8
    fields = tl.reshape(fields, (BK // 16, BN // 64, 8, 4, 4, 2, 2, 2))
    # (k tile, n tile, octet, k pair, block, k + 1, k + 8, half) -> k in order, then position
    return tl.reshape(tl.permute(fields, (0, 6, 3, 5, 1, 2, 4, 7)), (BK, BN))


@triton.jit
def _marlin8(w, k0, p0, K: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr):
    """Decode int32 [K / 16, 4 N]: word 8 lane + 2 block + half of a 64-column tile."""
    packed = _marlin_words(w, k0, p0, K, N, BK, BN, 4)
    fields = tl.join(packed, packed >> 8)  # bit 0 of the byte number: k + 8
    fields = tl.join(fields, fields >> 16)  # bit 1: k + 1
    fields = tl.reshape(fields & 255, (BK // 16, BN // 64, 8, 4, 4, 2, 2, 2))
    # (k tile, n tile, octet, k pair, block, half, k + 8, k + 1) -> k in order, then position
    return tl.reshape(tl.permute(fields, (0, 6, 3, 7, 1, 2, 4, 5)), (BK, BN))


@triton.jit
def _nibbles(w, k0, p0, K: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr):
    """Decode uint8 [N, K / 2], low nibble = even k."""
    columns = p0 + tl.arange(0, BN)
    pairs = k0 // 2 + tl.arange(0, BK // 2)
    mask = (columns[:, None] < N) & (pairs[None, :] < K // 2)
    packed = tl.load(w + columns[:, None] * (K // 2) + pairs[None, :], mask=mask, other=0)
    fields = tl.join(packed & 15, packed >> 4)
    return tl.trans(tl.reshape(fields, (BN, BK))).to(tl.int32)


@triton.jit
def _rows(w, k0, p0, K: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr):
    """Load unpacked values [N, K] of any dtype."""
    columns = p0 + tl.arange(0, BN)
    rows = k0 + tl.arange(0, BK)
    mask = (columns[None, :] < N) & (rows[:, None] < K)
    return tl.load(w + columns[None, :] * K + rows[:, None], mask=mask, other=0)


@triton.jit
def _hopper4(w, k0, p0, K: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr):
    """Decode int32 [N / 4, K / 2]: row = 4 (n // 16) + (n % 8) // 2, four bytes of two codes each in one word."""
    rows = p0 // 4 + tl.arange(0, BN // 4)
    words = k0 // 2 + tl.arange(0, BK // 2)
    mask = (rows[:, None] < N // 4) & (words[None, :] < K // 2)
    packed = tl.load(w + rows[:, None] * (K // 2) + words[None, :], mask=mask, other=0).to(tl.uint32, bitcast=True)
    half = tl.join(packed, packed >> 16)  # low half-word: even k
    code0 = ((half >> 12) & 8) | ((half >> 6) & 7)
    code1 = ((half >> 9) & 8) | ((half >> 3) & 7)
    code2 = ((half >> 6) & 8) | (half & 7)
    code3 = ((half >> 11) & 8) | ((half >> 9) & 6) | ((half >> 13) & 1)
    fields = tl.join(tl.join(code0, code1), tl.join(code2, code3))
    # (n // 16, n pair, k // 64, n % 2, byte % 4, byte // 8, k % 2, n + 8, byte + 4) -> k in order, n in order
    fields = tl.reshape(fields, (BN // 16, 4, BK // 64, 2, 4, 4, 2, 2, 2))
    return tl.reshape(tl.permute(fields, (2, 5, 8, 4, 6, 0, 7, 1, 3)), (BK, BN))

"""Decoding of Marlin's words of 4-bit codes into 8-bit floats, wgmma's left operand. Lanes exchange nothing.

e2m1 codes become e5m2, which holds more powers of two than e4m3; int4 codes become e4m3. A word of a lane has four
codes of column g and four of column g + 8, whose k are 2 t, 2 t + 8, 2 t + 1, 2 t + 9 within 16 rows. Tensor cores take
four adjacent k, so tokens are stored in that order of k (`w8a8.device.rows`). Rows of the operand are those of map B in
`w4a16.device.layouts`.

Words of `moeq-mxfp4/1` hold the same codes in another order of bits (`w4a16.device.recipes`), in which no four codes
are neighbours. Each code is brought to the upper byte of a float16, which is an e5m2 number, and multiplied by its
scale there.

`prmt` selects one of eight bytes in two registers by three bits of a code; with the fourth bit set it gives eight
copies of the byte's sign instead. The compiler copies constants into a register before each use, and turns a product by
2 into an addition on the pipe that all other instructions here need. To prevent both, bit 31 of `%lanemask_lt` is added
to constants: it is always 0, but the compiler does not know that.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl

from moeq_kernels.hopper.w4a16.device import layouts
from moeq_kernels.hopper.w8a8.device import common as bytes_common

#: e4m3 bytes of 0 to 7, and half of the differences between the bytes of -8 to -1 and these.
_INTEGERS = (0x00, 0x38, 0x40, 0x44, 0x48, 0x4A, 0x4C, 0x4E)
_BELOW = tuple((one - other) // 2 for one, other in zip(
    (0xD0, 0xCE, 0xCC, 0xCA, 0xC8, 0xC4, 0xC0, 0xB8), _INTEGERS, strict=True
))


@constexpr_function
def left_operand(tokens):
    """Return the layout of 8-bit weights in registers."""
    return gl.DotOperandLayout(operand_index=0, parent=bytes_common.accumulator(tokens), k_width=4)


@constexpr_function
def _register(table):
    """Return four bytes as the text of a register's value."""
    return f"0x{int.from_bytes(bytes(table), 'little'):08x}"


@constexpr_function
def _regrouped(word, h):
    """Return lines that move codes of a word's column h to the lower halves of p and (without fourth bits) of m."""
    if h:
        return ["shr.u32 p, p, 16;", "shr.u32 m, m, 16;"]
    return [f"prmt.b32 p, ${word}, zero, 0x3120;", "and.b32 m, p, 0x77777777;"]


@constexpr_function
def _tables():
    """Return lines that make eight magnitudes for each column (h, j0) by the shifts in `$12`: lo0, hi0 to lo3, hi3."""
    lines = [".reg .b32 " + ", ".join(f"lo{r}, hi{r}" for r in range(4)) + ";", "mov.b32 zero, 0;"]
    for r in range(4):
        lines.append(f"prmt.b32 s, $12, zero, 0x444{r};")
        lines.append(f"mad.lo.u32 lo{r}, s, 0x01010100, 0x0a080400;")  # 0, 0.5, 1, 1.5 times 2^-13; zero stays
        lines.append(f"mad.lo.u32 hi{r}, s, 0x01010101, 0x12100e0c;")  # 2, 3, 4, 6 times 2^-13
    return lines


@constexpr_function
def decode_e2m1():
    """Return the text from a lane's four e2m1 words of 32 rows of k to e5m2: two words (j0) of two slabs of 16 rows.

    Operands: results of h = 0 (4 registers) and of h = 1, the words, a register with the shifts of (h, j0) in its
    bytes, and three copies of it. Shifts are added to a column's eight magnitudes. Codes without a sign give 0x40,
    codes with a sign 0: twice that is the inverted sign, which the factors of `fold` compensate.
    """
    lines = [".reg .b32 p, m, s, v, zero, plus, two;", *_tables(), "mov.u32 s, %lanemask_lt;", "shr.u32 s, s, 31;"]
    lines += ["or.b32 plus, s, 0x40404040;", "or.b32 two, s, 2;"]
    for word in range(4):  # slab, j0
        for h in range(2):
            r = 2 * h + word % 2
            lines += [*_regrouped(8 + word, h), f"prmt.b32 v, lo{r}, hi{r}, m;", "prmt.b32 s, plus, plus, p;"]
            lines.append(f"mad.lo.u32 ${4 * h + word}, s, two, v;")
    return "{\n" + "\n".join(lines) + "\n}"


#: Lines that turn the eight codes of a permuted word `w` into float16 numbers, one from each half of the word: two of
#: column g (a, b) and two of column g + 8 (c, d). Their signs are bits 15, 9, 12 and 13 of a half. Their magnitudes are
#: bits 6 to 8, 0 to 2 and 3 to 5; the fourth one has bits 11, 10 and 14. Signs go to bit 15 and magnitudes to bits 9 to
#: 11: that is the code times 2^-14, also for zero and 0.5 (subnormal).
_HALVES = (
    "mul.lo.u32 l2, w, p2;", "mul.lo.u32 l3, w, p3;", "mul.lo.u32 l6, w, p6;", "mul.lo.u32 l9, w, p9;",
    "shr.u32 r5, w, 5;",
    "and.b32 m, l3, 0x0e000e00;", "and.b32 a, w, 0x80008000;", "or.b32 a, a, m;",
    "and.b32 m, l9, 0x0e000e00;", "and.b32 b, l6, 0x80008000;", "or.b32 b, b, m;",
    "and.b32 m, l6, 0x0e000e00;", "and.b32 c, l3, 0x80008000;", "or.b32 c, c, m;",
    "and.b32 m, r5, 0x02000200;", "and.b32 d, w, 0x0c000c00;", "or.b32 d, d, m;",
    "and.b32 m, l2, 0x80008000;", "or.b32 d, d, m;",
)  # fmt: skip


@constexpr_function
def decode_permuted():
    """Return the text of `decode_e2m1` for words of `moeq-mxfp4/1`; signs are as they are stored.

    A shift plus 0x40 is the upper byte of the float16 by which a column's codes are multiplied, 2 to 2^15.
    """
    lines = [".reg .b32 w, l2, l3, l6, l9, r5, m, a, b, c, d, s, zero, p2, p3, p6, p9, f0, f1, f2, f3;"]
    lines += ["mov.b32 zero, 0;", "mov.u32 s, %lanemask_lt;", "shr.u32 s, s, 31;"]
    lines += [f"or.b32 p{bits}, s, {1 << bits};" for bits in (2, 3, 6, 9)]
    lines += ["or.b32 s, $12, 0x40404040;", *(f"prmt.b32 f{r}, s, zero, 0x{r}4{r}4;" for r in range(4))]
    for word in range(4):  # slab, j0
        j0 = word % 2
        lines += [f"mov.b32 w, ${8 + word};", *_HALVES]
        lines += [f"mul.f16x2 {name}, {name}, f{2 * h + j0};" for name, h in (("a", 0), ("b", 0), ("c", 1), ("d", 1))]
        lines += [f"prmt.b32 ${word}, a, b, 0x7351;", f"prmt.b32 ${4 + word}, c, d, 0x5371;"]
    return "{\n" + "\n".join(lines) + "\n}"


@constexpr_function
def decode_int4():
    """Return the text from a lane's four words of int4 codes, which stand for code - 8, to e4m3; there are no shifts.

    Codes from 8 on are 0 to 7 by their lower bits. Codes below get twice the value of `_BELOW` added.
    """
    lines = [".reg .b32 p, m, s, v, zero, two, lo, hi, below, under;"]
    lines += ["mov.b32 zero, 0;", "mov.u32 s, %lanemask_lt;", "shr.u32 s, s, 31;", "or.b32 two, s, 2;"]
    for name, table in (("lo", _INTEGERS[:4]), ("hi", _INTEGERS[4:]), ("below", _BELOW[:4]), ("under", _BELOW[4:])):
        lines.append(f"add.u32 {name}, s, {_register(table)};")
    for word in range(4):
        for h in range(2):
            lines += [*_regrouped(8 + word, h), "prmt.b32 v, lo, hi, m;", "prmt.b32 s, below, under, p;"]
            lines.append(f"mad.lo.u32 ${4 * h + word}, s, two, v;")
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.jit
def _lanes(x):
    """Reorder two slabs of words so that a lane's 16 bytes, from (slab, j0) on, are adjacent as in its registers."""
    return x.reshape([2, 2, 8, 4, 2, 2, 4]).permute([0, 2, 3, 4, 1, 5, 6]).reshape([2, 64, 16])


@gluon.jit
def e2m1_operand(words, shifts, TOKENS: gl.constexpr, PERMUTED: gl.constexpr):
    """Decode e2m1 words, uint8 in `layouts.words` of two slabs, with stored shifts `[2, 8, 8]` to `[128, 32]`."""
    TEXT: gl.constexpr = decode_permuted() if PERMUTED else decode_e2m1()
    full: gl.constexpr = layouts.scales(True)
    x, _ = gl.broadcast(gl.expand_dims(shifts, 2), gl.full([2, 8, 4, 8], 0, gl.uint8, full))
    x = gl.join(x, x)
    x = gl.join(x, x).reshape([2, 8, 4, 2, 4, 2, 2])  # pair, g, t, j1, (h, j0), and copies for j0 and slab
    x = x.permute([0, 6, 1, 2, 3, 5, 4]).reshape([2, 2, 512])
    x = gl.convert_layout(x, layouts.words(True, 2, "e2m1"), assert_trivial=True)
    lower, upper = gl.inline_asm_elementwise(
        TEXT, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r", (_lanes(words), _lanes(x)),
        (gl.float8e5, gl.float8e5), True, 16,
    )
    return _operand(lower, upper, TOKENS)


@gluon.jit
def int4_operand(words, TOKENS: gl.constexpr):
    """Decode int4 words, uint8 in `layouts.words` of two slabs, to `[128, 32]`."""
    lower, upper = gl.inline_asm_elementwise(
        decode_int4(), "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r", (_lanes(words),), (gl.float8e4nv, gl.float8e4nv),
        True, 16,
    )
    return _operand(lower, upper, TOKENS)


@gluon.jit
def _operand(lower, upper, TOKENS: gl.constexpr):
    """Combine the results of h = 0 and h = 1 to `[128, 32]`."""
    x = gl.join(lower, upper).reshape([2, 8, 4, 2, 2, 2, 4, 2])  # pair, g, t, j1, slab, j0, byte, h
    x = x.permute([5, 0, 3, 7, 1, 4, 2, 6]).reshape([128, 32])
    return gl.convert_layout(x, left_operand(TOKENS), assert_trivial=True)


@gluon.jit
def row_scales(scales, TOKENS: gl.constexpr):
    """Reorder a group's stored scales `[2, 8, 8]` to the rows `[128]` of an operand."""
    x = scales.reshape([2, 8, 2, 2, 2])  # pair, g, j1, j0, h
    x = x.permute([3, 0, 2, 4, 1]).reshape([128])
    return gl.convert_layout(x, gl.SliceLayout(1, bytes_common.accumulator(TOKENS)), assert_trivial=True)

"""From packed words and scales to wgmma's left operand, without moving a value between lanes.

A 4-bit code v that stands in the lowest bits of a bf16 is the denormal v * 2^-133, in the next four bits
v * 2^-129 (linear even where a code's top bit reaches the exponent field). One fused multiply-add turns it into
(v - zero) * scale * 2^-21, rounded once: bit for bit the rounded product of the two, times 2^-21. Scales up to 2^15
fit. The kernels multiply results by 2^21 at the end.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moeq_kernels.hopper.device import layouts

#: What undoes the factor of the dequantised weights.
UNDO = gl.constexpr(2097152.0)


@gluon.jit
def unpack_plain(words):
    """(v - 8) * 2^-21 of symmetric codes. words: uint8, four bytes a word. Returns rows k and rows k + 8."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 s8, a0, a1, a2, a3, lm, hm, c;
        shr.u32 s8, $4, 8;
        and.b32 a0, $4, 0x000f000f;
        and.b32 a1, s8, 0x000f000f;
        and.b32 a2, $4, 0x00f000f0;
        and.b32 a3, s8, 0x00f000f0;
        mov.b32 lm, 0x77807780;
        mov.b32 hm, 0x75807580;
        mov.b32 c, 0xb680b680;
        fma.rn.bf16x2 $0, a0, lm, c;
        fma.rn.bf16x2 $1, a1, lm, c;
        fma.rn.bf16x2 $2, a2, hm, c;
        fma.rn.bf16x2 $3, a3, hm, c;
        }
        """,
        constraints="=&r,=&r,=&r,=&r,r",
        args=[words],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def unpack_scaled(words, low, high, offset):
    """(v - 8) * s * 2^-21, from s * 2^112, s * 2^108 and -s * 2^-18 beside each column's codes."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 s8, a0, a1, a2, a3;
        shr.u32 s8, $4, 8;
        and.b32 a0, $4, 0x000f000f;
        and.b32 a1, s8, 0x000f000f;
        and.b32 a2, $4, 0x00f000f0;
        and.b32 a3, s8, 0x00f000f0;
        fma.rn.bf16x2 $0, a0, $5, $9;
        fma.rn.bf16x2 $1, a1, $6, $10;
        fma.rn.bf16x2 $2, a2, $7, $9;
        fma.rn.bf16x2 $3, a3, $8, $10;
        }
        """,
        constraints="=&r,=&r,=&r,=&r,r,r,r,r,r,r,r",
        args=[words, low, high, offset],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def unpack_offset(words, offset):
    """(v - z) * 2^-21, exactly, from -z * 2^-21 beside each column's codes."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 s8, a0, a1, a2, a3, lm, hm;
        shr.u32 s8, $4, 8;
        and.b32 a0, $4, 0x000f000f;
        and.b32 a1, s8, 0x000f000f;
        and.b32 a2, $4, 0x00f000f0;
        and.b32 a3, s8, 0x00f000f0;
        mov.b32 lm, 0x77807780;
        mov.b32 hm, 0x75807580;
        fma.rn.bf16x2 $0, a0, lm, $5;
        fma.rn.bf16x2 $1, a1, lm, $6;
        fma.rn.bf16x2 $2, a2, hm, $5;
        fma.rn.bf16x2 $3, a3, hm, $6;
        }
        """,
        constraints="=&r,=&r,=&r,=&r,r,r,r",
        args=[words, offset],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def unpack_offset_scaled(words, offset, scale):
    """(v - z) * s * 2^-21: the exact difference, then one rounded product."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 s8, a0, a1, a2, a3, lm, hm;
        shr.u32 s8, $4, 8;
        and.b32 a0, $4, 0x000f000f;
        and.b32 a1, s8, 0x000f000f;
        and.b32 a2, $4, 0x00f000f0;
        and.b32 a3, s8, 0x00f000f0;
        mov.b32 lm, 0x77807780;
        mov.b32 hm, 0x75807580;
        fma.rn.bf16x2 a0, a0, lm, $5;
        fma.rn.bf16x2 a1, a1, lm, $6;
        fma.rn.bf16x2 a2, a2, hm, $5;
        fma.rn.bf16x2 a3, a3, hm, $6;
        mul.bf16x2 $0, a0, $7;
        mul.bf16x2 $1, a1, $8;
        mul.bf16x2 $2, a2, $7;
        mul.bf16x2 $3, a3, $8;
        }
        """,
        constraints="=&r,=&r,=&r,=&r,r,r,r,r,r",
        args=[words, offset, scale],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def scale_factors(scale):
    """s * 2^112, s * 2^108 and -s * 2^-18 of bf16 scales (pairs of neighbouring registers)."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 lm, hm, c;
        mov.b32 lm, 0x77807780;
        mov.b32 hm, 0x75807580;
        mov.b32 c, 0xb680b680;
        mul.bf16x2 $0, $3, lm;
        mul.bf16x2 $1, $3, hm;
        mul.bf16x2 $2, $3, c;
        }
        """,
        constraints="=&r,=&r,=&r,r",
        args=[scale],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def spread(scale, WIDE: gl.constexpr):
    """`[pair, tile and g, j and h]` -> `[pair, tile and g, t, j and h]`: the same value for all t."""
    layout: gl.constexpr = layouts.scales(WIDE)
    shape: gl.constexpr = [2, 8 if WIDE else 16, 4, 8]
    full, _ = gl.broadcast(gl.expand_dims(scale, 2), gl.full(shape, 0.0, scale.dtype, layout))
    return full


@gluon.jit
def beside_words(first, second, WIDE: gl.constexpr):
    """Spreads per-column values `[pair, tile and g, t, j and h]` over the bytes of four slabs of words.

    first and second are for the lower and the upper two slabs (the same value where one group spans all four).
    """
    x = gl.join(first, second)
    x = gl.join(x, x)
    x = gl.join(x, x)  # pair, tile and g, t, j and h, upper slabs, slab, k 0/1
    x = x.permute([0, 4, 5, 1, 2, 3, 6]).reshape([2, 4, 512 if WIDE else 1024])
    return gl.convert_layout(x, layouts.words(WIDE, 4), assert_trivial=True)


@gluon.jit
def zero_offsets(word, WIDE: gl.constexpr):
    """-z * 2^-21 `[pair, tile and g, t, j and h]` of zero-point words `[pair, tile and g, t]`.

    Wide: words `[pair, g, t, j1]` already shifted so that fields j0 = 0, h = 0 are lowest.
    """
    fields = gl.join(word, word >> 4)
    if not WIDE:
        fields = gl.join(fields, fields >> 8).permute([0, 1, 2, 4, 3])
    fields = gl.join(fields, fields >> 16) & 15  # .., j1, j0, h
    values = (fields.to(gl.float32) * (-1.0 / 2097152.0)).to(gl.bfloat16)
    return gl.convert_layout(values.reshape([2, 8 if WIDE else 16, 4, 8]), layouts.scales(WIDE), assert_trivial=True)


@gluon.jit
def as_left_operand(lower, upper, WIDE: gl.constexpr, TOKENS: gl.constexpr):
    """Dequantised words (rows k and k + 8 of each slab) as wgmma's left operand; only renames registers."""
    x = gl.join(lower, upper)
    if WIDE:
        x = x.reshape([2, 4, 8, 4, 2, 2, 2, 2, 2])  # pair slab g t j1 j0 h k0 k8
        x = x.permute([5, 0, 4, 6, 2, 1, 8, 3, 7]).reshape([128, 64])
    else:
        x = x.reshape([2, 4, 2, 8, 4, 4, 2, 2, 2])  # pair slab tile g t j h k0 k8
        x = x.permute([5, 0, 2, 6, 3, 1, 8, 4, 7]).reshape([256, 64])
    return gl.convert_layout(x, layouts.left_operand(TOKENS), assert_trivial=True)

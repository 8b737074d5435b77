"""Decoding of packed words and scales into wgmma's left operand, without moving values between lanes.

`recipes` has the arithmetic. Decoded weights lack a power of two that `undo` returns; kernels multiply sums by it. KIND
is a key of `kinds.KINDS`; HALF means float16 instead of bf16.

Scales and zero points are tensors `[pair, tile and g, t, j and h]` in `layouts.scales`; `layouts` defines the axes.
Stored scales lack the axis t.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl

from moeq_kernels.hopper.w4a16.device import layouts, recipes


@constexpr_function
def undo(kind, half, scaled):
    """Return the factor that decoded weights lack; `scaled` says whether they include the scales of groups."""
    if kind in ("e2m1", "e2m1-permuted"):
        return float(2**recipes.E2M1_SHIFT)
    if kind == "mxfp8":
        return float(2**recipes.MXFP8_SHIFT)
    if kind in ("nvfp4", "nvfp4-permuted"):
        # The stored global scale makes up for what codes lack, 2^126 (float16: 2^14); bf16 factors have 2^96 more.
        return 1.0 if half else 2.0**-recipes.NVFP4_SHIFT
    if kind == "fp8":
        return 1.0
    if not half:
        return float(2**21)
    return 1.0 if scaled else float(2**9)


@constexpr_function
def channel_unit(kind, half):
    """Return the number by which stored per-channel scales have to be multiplied."""
    if kind == "fp8":
        return 2.0**-8 if half else 2.0**-120
    return 1.0


@gluon.jit
def load_words(
    view, slot, SLAB: gl.constexpr, SLABS: gl.constexpr, KIND: gl.constexpr, WIDE: gl.constexpr, WG: gl.constexpr = 0
):
    """Load SLABS slabs of words of a slot of `common.word_views`, from slab SLAB on, in `layouts.words`.

    Codes of 2 and 3 bits become those of 4 bits, see `recipes.nibbles`. WG: a wide kernel's warpgroup.
    """
    if KIND == "uint2":
        given = (_rows_of(view, slot, SLAB // 2, SLABS // 2, KIND, WIDE, WG),)
        return _by_slab(given, 0, KIND, WIDE, SLABS)
    elif KIND == "uint3":
        high = _rows_of(view[1], slot, SLAB // 4, 1, KIND, WIDE, WG)
        if SLABS == 4:  # a row of third bits belongs to two rows of words
            high = _by_slab((high,), 0, "uint2", WIDE, 2)
        given = (_rows_of(view[0], slot, SLAB // 2, SLABS // 2, KIND, WIDE, WG), high)
        return _by_slab(given, SLAB % 4, KIND, WIDE, SLABS)
    else:
        return _rows_of(view, slot, SLAB, SLABS, KIND, WIDE, WG)


@gluon.jit
def _rows_of(
    view, slot, FIRST: gl.constexpr, COUNT: gl.constexpr, KIND: gl.constexpr, WIDE: gl.constexpr, WG: gl.constexpr
):
    """Load rows of words."""
    BYTES: gl.constexpr = layouts.tile_bytes(KIND)
    words = view.index(slot).slice(FIRST, COUNT, dim=1)
    if WIDE:
        words = words.slice(WG * BYTES, BYTES, dim=2)
    return words.load(layouts.words(WIDE, COUNT, KIND))


@gluon.jit
def _by_slab(given, AT: gl.constexpr, KIND: gl.constexpr, WIDE: gl.constexpr, SLABS: gl.constexpr):
    """Make SLABS rows of words from half as many with `recipes.nibbles`."""
    constraints: gl.constexpr = "=&r,=&r,r" if KIND == "uint2" else "=&r,=&r,r,r"
    first, second = gl.inline_asm_elementwise(
        recipes.nibbles(KIND, AT), constraints, given, (gl.uint8, gl.uint8), True, 4
    )
    x = gl.join(first, second).permute([0, 1, 3, 2]).reshape(layouts.words_shape(WIDE, SLABS, KIND))
    return gl.convert_layout(x, layouts.words(WIDE, SLABS, KIND), assert_trivial=True)


@gluon.jit
def step_operand(
    words, first_scale, second_scale, first_zero, second_zero, KIND: gl.constexpr, HALF: gl.constexpr,
    WIDE: gl.constexpr, TOKENS: gl.constexpr, SCALED: gl.constexpr, ZEROS: gl.constexpr, SLABS: gl.constexpr,
    OLD: gl.constexpr = False, OPERAND: gl.constexpr = None,
):
    """Return the left operand of SLABS slabs of 16 rows of k: (code - zero point) * scale / `undo`.

    Args:
        words: uint8 in `layouts.words`.
        first_scale, second_scale: scales of the lower and the upper 32 rows, as stored; `layouts.scales` without t.
            NVFP4 has pairs, one scale per slab. KIND e2m1 has e8m0 bytes, and they always multiply.
        first_zero, second_zero: `zero_offsets` of the lower and the upper 32 rows.
        SCALED: whether weights are multiplied by scales; otherwise the factor `scale` is missing.
        SLABS: 2 or 4; 2 slabs use the first scales and zeros only.
        OLD: whether the GPU is older than sm_90.
        OPERAND: layout of the result, or None for wgmma's.
    """
    if KIND == "nvfp4" or KIND == "nvfp4-permuted":
        factors = _expand_slabs(first_scale, second_scale, HALF, WIDE, SLABS, OLD)
        weights = _unpack((words, factors), KIND, HALF, "power", OLD)
    elif KIND == "e2m1" or KIND == "e2m1-permuted" or KIND == "mxfp8":
        operands = (words, _expand_powers(first_scale, second_scale, KIND, WIDE, SLABS, OLD))
        weights = _unpack(operands, KIND, HALF, "power", OLD)
    elif KIND == "fp8":
        if SCALED:
            factors = _expand_spread(first_scale, second_scale, KIND, WIDE, SLABS)
            weights = _unpack((words, factors), KIND, HALF, "power", OLD)
        else:
            weights = _unpack((words,), KIND, HALF, "unit", OLD)
    elif not SCALED:
        if ZEROS:
            weights = _unpack((words, _expand(first_zero, second_zero, KIND, WIDE, SLABS)), KIND, HALF, "offset", OLD)
        else:
            weights = _unpack((words,), KIND, HALF, "plain", OLD)
    elif ZEROS:
        zero = _expand(first_zero, second_zero, KIND, WIDE, SLABS)
        if first_scale.dtype == gl.float16 and not HALF:
            high, low = _expand_parts(first_scale, second_scale, KIND, WIDE, SLABS)
            weights = _unpack((words, zero, high, low), KIND, HALF, "offset split", OLD)
        else:
            scale = _expand_plain(first_scale, second_scale, KIND, HALF, WIDE, SLABS)
            weights = _unpack((words, zero, scale), KIND, HALF, "offset scaled", OLD)
    elif HALF:
        weights = _unpack(
            (words, _expand_plain(first_scale, second_scale, KIND, HALF, WIDE, SLABS)), KIND, HALF, "scaled", OLD
        )
    elif first_scale.dtype == gl.float16:
        high, low = _expand_parts(first_scale, second_scale, KIND, WIDE, SLABS)
        weights = _unpack((words, high, low), KIND, HALF, "split", OLD)
    else:
        low1, high1, zero1 = _folded(first_scale, KIND, OLD)
        low2, high2, zero2 = _folded(second_scale, KIND, OLD)
        low = _expand_spread(low1, low2, KIND, WIDE, SLABS)
        high = _expand_spread(high1, high2, KIND, WIDE, SLABS)
        weights = _unpack(
            (words, low, high, _expand_spread(zero1, zero2, KIND, WIDE, SLABS)), KIND, HALF, "folded", OLD
        )
    return _as_left_operand(weights, KIND, WIDE, TOKENS, SLABS, OPERAND)


@gluon.jit
def zero_offsets(word, KIND: gl.constexpr, HALF: gl.constexpr, WIDE: gl.constexpr):
    """Decode zero points of a lane's columns to -z in the unit of unscaled weights.

    `word` is int32 `[pair, tile and g, t, words]`. Narrow kernels pass one word per lane; of 8-bit zero points two,
    by j1. Wide kernels pass one: 4-bit words shifted so that field j0 = 0, h = 0 is lowest, or 8-bit words of one j1.
    """
    if KIND == "uint8":
        fields = gl.join(word, word >> 8)  # .., j0
        fields = gl.join(fields, fields >> 16) & 255  # .., j0, h
    else:
        fields = gl.join(word, word >> 4)
        if not WIDE:
            fields = gl.join(fields, fields >> 8).permute([0, 1, 2, 3, 5, 4])
        fields = gl.join(fields, fields >> 16) & 15  # .., j1, j0, h
    unit: gl.constexpr = -1.0 / undo("uint4", HALF, False)
    values = (fields.to(gl.float32) * unit).to(gl.float16 if HALF else gl.bfloat16)
    return gl.convert_layout(values.reshape([2, 8 if WIDE else 16, 4, 8]), layouts.scales(WIDE), assert_trivial=True)


@gluon.jit
def _unpack(operands, KIND: gl.constexpr, HALF: gl.constexpr, HOW: gl.constexpr, OLD: gl.constexpr):
    """Run a recipe on (words, ...); 4-bit codes double the last axis (k and k + 8), 8-bit codes keep it."""
    text: gl.constexpr = recipes.dequantize(KIND, HALF, HOW, OLD)
    constraints: gl.constexpr = recipes.constraints(KIND, HOW)
    if layouts.bits(KIND) == 8 and HALF:
        return gl.inline_asm_elementwise(text, constraints, operands, gl.float16, True, 4)
    elif layouts.bits(KIND) == 8:
        return gl.inline_asm_elementwise(text, constraints, operands, gl.bfloat16, True, 4)
    elif HALF:
        lower, upper = gl.inline_asm_elementwise(text, constraints, operands, (gl.float16, gl.float16), True, 4)
        return gl.join(lower, upper)
    else:
        lower, upper = gl.inline_asm_elementwise(text, constraints, operands, (gl.bfloat16, gl.bfloat16), True, 4)
        return gl.join(lower, upper)


@gluon.jit
def _folded(scale, KIND: gl.constexpr, OLD: gl.constexpr):
    """Return bf16 scales as the factors of recipe `folded`: for bits 0 to 3, for bits 4 to 7, and the zero point."""
    return gl.inline_asm_elementwise(
        recipes.scale_factors(KIND, OLD),
        "=&r,=&r,=&r,r",
        (scale,),
        (gl.bfloat16, gl.bfloat16, gl.bfloat16),
        True,
        2,
    )


@gluon.jit
def _spread(value, WIDE: gl.constexpr):
    """Broadcast along the axis t."""
    layout: gl.constexpr = layouts.scales(WIDE)
    shape: gl.constexpr = [2, 8 if WIDE else 16, 4, 8]
    full, _ = gl.broadcast(gl.expand_dims(value, 2), gl.full(shape, 0, value.dtype, layout))
    return full


@gluon.jit
def _expand(first, second, KIND: gl.constexpr, WIDE: gl.constexpr, SLABS: gl.constexpr):
    """Expand values per column to values per byte of SLABS slabs of words.

    `first` and `second` belong to the lower and the upper two slabs, and are equal if one group spans all four.
    """
    x = gl.join(first, second) if SLABS == 4 else first
    x = gl.join(x, x)
    x = gl.join(x, x)  # pair, tile and g, t, j and h, (upper slabs,) slab, 2 bytes
    if layouts.bits(KIND) == 8:
        x = gl.join(x, x)
        x = x.permute([0, 4, 5, 1, 2, 3, 6, 7] if SLABS == 4 else [0, 4, 1, 2, 3, 5, 6])
    else:
        x = x.permute([0, 4, 5, 1, 2, 3, 6] if SLABS == 4 else [0, 4, 1, 2, 3, 5])
    shape: gl.constexpr = layouts.words_shape(WIDE, SLABS, KIND)
    return gl.convert_layout(x.reshape(shape), layouts.words(WIDE, SLABS, KIND), assert_trivial=True)


@gluon.jit
def _expand_spread(first, second, KIND: gl.constexpr, WIDE: gl.constexpr, SLABS: gl.constexpr):
    return _expand(_spread(first, WIDE), _spread(second, WIDE), KIND, WIDE, SLABS)


@gluon.jit
def _expand_plain(first, second, KIND: gl.constexpr, HALF: gl.constexpr, WIDE: gl.constexpr, SLABS: gl.constexpr):
    """Expand scales in the activations' type; float16 scales (below 128) take on the 2^9 of `undo`."""
    if HALF:
        first = (first.to(gl.float32) * 512.0).to(gl.float16)
        second = (second.to(gl.float32) * 512.0).to(gl.float16)
    return _expand_spread(first, second, KIND, WIDE, SLABS)


@gluon.jit
def _expand_parts(first, second, KIND: gl.constexpr, WIDE: gl.constexpr, SLABS: gl.constexpr):
    """Expand float16 scales, each as the sum of two bf16 numbers."""
    high1, low1 = _parts(first)
    high2, low2 = _parts(second)
    return _expand_spread(high1, high2, KIND, WIDE, SLABS), _expand_spread(low1, low2, KIND, WIDE, SLABS)


@gluon.jit
def _parts(scale):
    whole = scale.to(gl.float32)
    high = whole.to(gl.bfloat16)
    return high, (whole - high.to(gl.float32)).to(gl.bfloat16)


@gluon.jit
def _expand_powers(first, second, KIND: gl.constexpr, WIDE: gl.constexpr, SLABS: gl.constexpr, OLD: gl.constexpr):
    """Expand the factors of e8m0 bytes to one per byte of SLABS slabs of words."""
    x = _powers(_spread(first, WIDE), KIND, WIDE, OLD)
    x = gl.join(x, _powers(_spread(second, WIDE), KIND, WIDE, OLD)) if SLABS == 4 else x
    x = gl.join(x, x)  # pair, tile and g, t, j and h and k, (upper slabs,) slab
    if layouts.bits(KIND) == 8:
        x = gl.join(x, x)  # two more bytes per code
        x = x.permute([0, 4, 5, 1, 2, 3, 6] if SLABS == 4 else [0, 4, 1, 2, 3, 5])
    else:
        x = x.permute([0, 4, 5, 1, 2, 3] if SLABS == 4 else [0, 4, 1, 2, 3])
    shape: gl.constexpr = layouts.words_shape(WIDE, SLABS, KIND)
    return gl.convert_layout(x.reshape(shape), layouts.words(WIDE, SLABS, KIND), assert_trivial=True)


@gluon.jit
def _expand_slabs(first, second, HALF: gl.constexpr, WIDE: gl.constexpr, SLABS: gl.constexpr, OLD: gl.constexpr):
    """Expand the factors of NVFP4's scale bytes, a pair per 32 rows, to one per byte of SLABS slabs of words."""
    lower = _factors(_spread(first[0], WIDE), HALF, WIDE, OLD)
    x = gl.join(lower, _factors(_spread(first[1], WIDE), HALF, WIDE, OLD))
    if SLABS == 4:
        lower = _factors(_spread(second[0], WIDE), HALF, WIDE, OLD)
        x = gl.join(x, gl.join(lower, _factors(_spread(second[1], WIDE), HALF, WIDE, OLD)))
        x = x.permute([0, 5, 4, 1, 2, 3])  # was: pair, tile and g, t, j and h and k, slab, upper slabs
    else:
        x = x.permute([0, 4, 1, 2, 3])
    shape: gl.constexpr = layouts.words_shape(WIDE, SLABS, "nvfp4")
    return gl.convert_layout(x.reshape(shape), layouts.words(WIDE, SLABS, "nvfp4"), assert_trivial=True)


@gluon.jit
def _factors(scale, HALF: gl.constexpr, WIDE: gl.constexpr, OLD: gl.constexpr):
    """Return factors of NVFP4's scale bytes in the order of `_powers`."""
    text: gl.constexpr = recipes.nvfp4_factors(HALF, OLD)
    if HALF:
        zero, one = gl.inline_asm_elementwise(text, "=&r,=&r,=&r,=&r,r", (scale,), (gl.float16, gl.float16), True, 4)
    else:
        zero, one = gl.inline_asm_elementwise(text, "=&r,=&r,=&r,=&r,r", (scale,), (gl.bfloat16, gl.bfloat16), True, 4)
    return _both_halves(zero, one, WIDE)


@gluon.jit
def _powers(scale, KIND: gl.constexpr, WIDE: gl.constexpr, OLD: gl.constexpr):
    """Return factors `[pair, tile, g, t, j, h, k]` of bytes `[pair, tile, g, t, j1, h, j0]`, Marlin's e8m0 order."""
    text: gl.constexpr = recipes.powers(KIND != "e2m1-permuted", OLD)
    zero, one = gl.inline_asm_elementwise(text, "=&r,=&r,=&r,=&r,r", (scale,), (gl.bfloat16, gl.bfloat16), True, 4)
    return _both_halves(zero, one, WIDE)


@gluon.jit
def _both_halves(zero, one, WIDE: gl.constexpr):
    """Join factors of h = 0 and of h = 1, and sort them as the codes are."""
    # A byte had the axes .., h, j0; its factors have j0 and k in their places, and h is joined last.
    x = gl.join(zero, one).reshape([2, 8 if WIDE else 16, 4, 2, 2, 2, 2])  # pair, tile and g, t, j1, j0, k, h
    return x.permute([0, 1, 2, 3, 4, 6, 5]).reshape([2, 8 if WIDE else 16, 4, 16])


@gluon.jit
def _as_left_operand(
    x, KIND: gl.constexpr, WIDE: gl.constexpr, TOKENS: gl.constexpr, SLABS: gl.constexpr, OPERAND: gl.constexpr
):
    """Reorder dequantised words to the left operand, which only renames registers."""
    tiles: gl.constexpr = [8, 4, 2, 2, 2] if WIDE else [2, 8, 4, 4, 2]  # g t j1 j0 h or tile g t j h
    x = x.reshape([2, SLABS, tiles[0], tiles[1], tiles[2], tiles[3], tiles[4], 2, 2])
    # axes: pair, slab, tiles.., then k 0/1 and k 0/8; for 8-bit codes k 0/8 and k 0/1
    odd: gl.constexpr = 8 if layouts.bits(KIND) == 8 else 7
    upper: gl.constexpr = 15 - odd
    if WIDE:
        x = x.permute([5, 0, 4, 6, 2, 1, upper, 3, odd]).reshape([128, 16 * SLABS])
    else:
        x = x.permute([5, 0, 2, 6, 3, 1, upper, 4, odd]).reshape([256, 16 * SLABS])
    layout: gl.constexpr = layouts.left_operand(TOKENS) if OPERAND is None else OPERAND
    return gl.convert_layout(x, layout, assert_trivial=True)

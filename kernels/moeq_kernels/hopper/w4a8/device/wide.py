"""MXFP4 words times e4m3 tokens: words become e4m3 in registers, the left operand of wgmma.

Scales are folded into the exponents of weights (`fold`), so a product of 32 rows of k is one of e4m3 numbers. A Marlin
word of a lane has four codes of column g and four of g + 8, of k as 2 t, 2 t + 8, 2 t + 1, 2 t + 9 from one row of 16
on. Tensor cores want four neighbours: tokens are stored in that order of k (`w8a8.device.rows`). They keep some 14 bits
of a sum, so those of each step of 128 are added to the others outside of them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeq_kernels.hopper.compat import barrier, reinterpret, tma_load
from moeq_kernels.hopper.device import epilogue
from moeq_kernels.hopper.w4a16.device import common, layouts
from moeq_kernels.hopper.w8a8.device import common as bytes_common

STEP = bytes_common.STEP


@constexpr_function
def left_operand(tokens):
    """e4m3 weights in registers."""
    return gl.DotOperandLayout(operand_index=0, parent=bytes_common.accumulator(tokens), k_width=4)


@constexpr_function
def _decode():
    """The text that makes e4m3 of a lane's four words of 32 rows of k: two columns' words (j0) of two slabs of 16.

    Operands: results of h = 0 (4 registers) and of h = 1, the words, a register with the shifts of (h, j0) in its bytes
    and three copies of it. Eight magnitudes of a column fit two registers, which `prmt` reads by three bits of a code.
    Shifts are added to them by `mad`, which does not run where all other instructions here do.
    """
    lines = [".reg .b32 p, q, m, s, v, zero;", ".reg .b32 " + ", ".join(f"lo{r}, hi{r}" for r in range(4)) + ";"]
    lines.append("mov.b32 zero, 0;")
    for r in range(4):
        lines.append(f"prmt.b32 s, $12, zero, 0x444{r};")
        lines.append(f"mad.lo.u32 lo{r}, s, 0x01010100, 0x14100800;")  # 0, 0.5, 1, 1.5 times 2^-5; zero stays
        lines.append(f"mad.lo.u32 hi{r}, s, 0x01010101, 0x24201c18;")  # 2, 3, 4, 6 times 2^-5
    for word in range(4):  # slab, j0
        j0 = word % 2
        lines.append(f"prmt.b32 p, ${8 + word}, zero, 0x3120;")  # codes of h = 0 below, those of h = 1 above
        lines.append("and.b32 m, p, 0x77777777;")
        lines.append("shl.b32 q, p, 4;")
        for h in range(2):
            r = 2 * h + j0
            if h:
                lines.append("shr.u32 m, m, 16;")
            lines.append(f"prmt.b32 v, lo{r}, hi{r}, m;")
            lines.append(f"prmt.b32 s, p, q, {'0x3726' if h else '0x1504'};")  # signs, at the top of bytes
            lines.append("and.b32 s, s, 0x80808080;")
            lines.append(f"or.b32 ${4 * h + word}, v, s;")
    return "{\n" + "\n".join(lines) + "\n}"


# Argument lists of twenty names, one to a line, would hide the code.
# fmt: off
@gluon.jit
def _lanes(x):
    """Bytes of two slabs of words with those of a lane, 16 from (slab, j0), behind each other, as in its registers."""
    return x.reshape([2, 2, 8, 4, 2, 2, 4]).permute([0, 2, 3, 4, 1, 5, 6]).reshape([2, 64, 16])


@gluon.jit
def operand(words, shifts, TOKENS: gl.constexpr):
    """The left operand of 32 rows of k: words uint8 `layouts.words` of two slabs, shifts as stored `[2, 8, 8]`."""
    full: gl.constexpr = layouts.scales(True)
    x, _ = gl.broadcast(gl.expand_dims(shifts, 2), gl.full([2, 8, 4, 8], 0, gl.uint8, full))
    x = gl.join(x, x)
    x = gl.join(x, x).reshape([2, 8, 4, 2, 4, 2, 2])  # pair, g, t, j1, (h, j0), and copies for j0 and slab
    x = x.permute([0, 6, 1, 2, 3, 5, 4]).reshape([2, 2, 512])
    x = gl.convert_layout(x, layouts.words(True, 2, "e2m1"), assert_trivial=True)
    lower, upper = gl.inline_asm_elementwise(
        _decode(), "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r", (_lanes(words), _lanes(x)),
        (gl.float8e4nv, gl.float8e4nv), True, 16,
    )
    x = gl.join(lower, upper).reshape([2, 8, 4, 2, 2, 2, 4, 2])  # pair, g, t, j1, slab, j0, byte, h
    x = x.permute([5, 0, 3, 7, 1, 4, 2, 6]).reshape([128, 32])
    return gl.convert_layout(x, left_operand(TOKENS), assert_trivial=True)


@gluon.jit
def _copy(given, TOKENS: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, PAIRED: gl.constexpr,
          DEPENDENT: gl.constexpr):
    """The copy warp: words, shifts, and the boxes of BOX tokens that hold any of the tile."""
    (
        w_desc, s_desc, x_desc, w_buf, s_buf, x_buf, ready, empty, tiles, num_tiles, steps, blocks, slabs, groups,
        pair_tiles,
    ) = given
    BOXES: gl.constexpr = TOKENS // BOX
    WORDS: gl.constexpr = 2 * 2 * (8 * 512 + 4 * 64)
    if DEPENDENT:
        gdc_wait()
    it = 0
    for index in range(gl.program_id(0), gl.load(num_tiles) * blocks, gl.num_programs(0)):
        expert, row, end_row, block = bytes_common.find_item(index, tiles, blocks, TOKENS)
        tile = block * (2 if PAIRED else 4)
        left = end_row - row
        for i in range(steps):
            stage = it % STAGES
            mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            for b in gl.static_range(BOXES):
                is_last = (left <= (b + 1) * BOX) | (b == BOXES - 1)
                mbarrier.expect(bar, WORDS + (b + 1) * BOX * STEP, pred=is_last & ((left > b * BOX) | (b == 0)))
            for half in gl.static_range(2):
                at = tile + half * pair_tiles
                tma_load(w_desc, [expert * slabs + i * 8, at, 0], bar, w_buf.index(2 * stage + half))
                tma_load(s_desc, [expert * groups + i * 4, at * 64], bar, s_buf.index(2 * stage + half))
            for b in gl.static_range(BOXES):
                needed = (left > b * BOX) | (b == 0)
                tma_load(x_desc, [row + b * BOX, i * STEP], bar, x_buf.index(stage * BOXES + b), pred=needed)
            it += 1


@gluon.jit
def _weights(w_view, s_view, stage, QUARTER: gl.constexpr, WG: gl.constexpr, TOKENS: gl.constexpr):
    """A quarter of a step's weights."""
    words = w_view.index(stage).slice(2 * QUARTER, 2, dim=1).slice(WG * 512, 512, dim=2)
    shifts = s_view.index(stage).slice((2 * QUARTER + WG) * 8, 8, dim=1)
    return operand(
        words.load(layouts.words(True, 2, "e2m1")), shifts.load(gl.SliceLayout(2, layouts.scales(True))), TOKENS
    )


@gluon.jit
def _multiply(given, WG: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, EPILOGUE: gl.constexpr,
              PAIRED: gl.constexpr, DEPENDENT: gl.constexpr):
    """A multiplying warpgroup: 128 rows of the weights, 64 of each half of a pair."""
    (
        w_buf, s_buf, x_buf, ready, empty, x_scale, factor, bias, out, tiles, num_tiles, steps, blocks, columns, stride,
        packed, pair_tiles,
    ) = given
    layout: gl.constexpr = bytes_common.accumulator(TOKENS)
    w_view = reinterpret(w_buf, gl.uint8, [STAGES, 2, 8, 2 * 512], layouts.plain_shared())
    s_view = reinterpret(s_buf, gl.uint8, [STAGES, 2, 4 * 2 * 8, 8], layouts.plain_shared())
    x_view = reinterpret(x_buf, x_buf.dtype, [STAGES, TOKENS, STEP], bytes_common.operand())
    t = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout))
    if DEPENDENT:
        gdc_wait()
        if WG == 0:
            gdc_launch_dependents()
    it = 0
    for index in range(gl.program_id(0), gl.load(num_tiles) * blocks, gl.num_programs(0)):
        expert, row, end_row, block = bytes_common.find_item(index, tiles, blocks, TOKENS)
        tile = block * (2 if PAIRED else 4)
        acc = gl.zeros([128, TOKENS], gl.float32, layout)
        for _ in range(steps):
            stage = it % STAGES
            mbarrier.wait(ready.index(stage), (it // STAGES) & 1)
            x = x_view.index(stage)
            part = gl.zeros([128, TOKENS], gl.float32, layout)
            one = _weights(w_view, s_view, stage, 0, WG, TOKENS)
            x1 = x.slice(0, 32, dim=1).permute((1, 0))
            part = warpgroup_mma(one, x1, part, use_acc=False, is_async=True)
            two = _weights(w_view, s_view, stage, 1, WG, TOKENS)
            part = warpgroup_mma(two, x.slice(32, 32, dim=1).permute((1, 0)), part, is_async=True)
            three = _weights(w_view, s_view, stage, 2, WG, TOKENS)
            part = warpgroup_mma(three, x.slice(64, 32, dim=1).permute((1, 0)), part, is_async=True)
            four = _weights(w_view, s_view, stage, 3, WG, TOKENS)
            part = warpgroup_mma(four, x.slice(96, 32, dim=1).permute((1, 0)), part, is_async=True)
            part = warpgroup_mma_wait(0, deps=(part,))
            mbarrier.arrive(empty.index(stage), count=1)
            acc = acc + part
            it += 1
        token_scale = gl.load(x_scale + row + t, mask=row + t < end_row, other=0.0)
        acc = acc * gl.expand_dims(token_scale, 0)
        acc = gl.convert_layout(acc, layouts.accumulator(TOKENS), assert_trivial=True)
        column = (tile + WG) * 64
        up = (tile + WG + pair_tiles) * 64
        common.store_chunks(
            acc, out, row, end_row, column, up, columns, stride, factor, bias, True, expert, packed, EPILOGUE, True,
            TOKENS, 64,
        )


@gluon.jit(do_not_specialize=["steps", "blocks", "slabs", "groups", "pair_tiles", "packed"])
def w4a8_product_wide(
    w_desc, s_desc, x_desc, x_scale, factor, bias, out, tiles, num_tiles, steps, blocks, slabs, groups, pair_tiles,
    columns, stride, packed,
    TOKENS: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, EPILOGUE: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """out[row] = epilogue(x[row] @ W[expert of row].T), see `epilogue.Epilogue`.

    Args:
        w_desc: words int32 `[E K / 16, N / 64, 128]`, block `[8, 2, 128]`.
        s_desc: shifts uint8 `[E K / 32, N]`, block `[4, 128]`.
        x_desc: e4m3 tokens `[rows, k]` sorted by expert, k in the order of words, block `[BOX, 128]`.
        x_scale: fp32 `[rows]`; factor: fp32 and bias `[E, packed]`, in Marlin's 32-column order, bias or None.
        out: `[rows, columns]` with `stride`.
        tiles: int32 `[T, 8]` and num_tiles: int32 `[1]`, of `device.routing`, of TOKENS tokens.
        steps: of 128 of k; blocks: of 128 columns where gated and not interleaved, else of 256 packed ones.
        slabs, groups: of 16 and of 32 rows of k of an expert; pair_tiles: from a tile of 64 columns to its other half.
        BOX: tokens that are copied together; REGISTERS: of multiplying threads.
        DEPENDENT: launched while the kernel before it still runs.
    """
    PAIRED: gl.constexpr = epilogue.gated(EPILOGUE) and not epilogue.interleaved(EPILOGUE)
    w_buf = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 8, 2, 128], layouts.word_buffer())
    s_buf = gl.allocate_shared_memory(gl.uint8, [STAGES * 2, 4, 128], layouts.scale_buffer(8))
    x_buf = gl.allocate_shared_memory(x_desc.dtype, [STAGES * (TOKENS // BOX), BOX, STEP], bytes_common.operand())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    barrier()
    taken = (
        w_buf, s_buf, x_buf, ready, empty, x_scale, factor, bias, out, tiles, num_tiles, steps, blocks, columns, stride,
        packed, pair_tiles,
    )
    copied = (
        w_desc, s_desc, x_desc, w_buf, s_buf, x_buf, ready, empty, tiles, num_tiles, steps, blocks, slabs, groups,
        pair_tiles,
    )
    gl.warp_specialize(
        [
            (_multiply, (taken, 0, TOKENS, STAGES, EPILOGUE, PAIRED, DEPENDENT)),
            (_multiply, (taken, 1, TOKENS, STAGES, EPILOGUE, PAIRED, DEPENDENT)),
            (_copy, (copied, TOKENS, BOX, STAGES, PAIRED, DEPENDENT)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


# fmt: on

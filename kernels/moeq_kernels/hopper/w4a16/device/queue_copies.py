"""Copy warp of the queue kernel: it draws units of work, describes them to the warpgroup, and copies their operands.

Units and copies are described in slots of `info`, 16 numbers each; `tell` writes and `get` reads them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from moeq_kernels.hopper.compat import barrier, tma_load
from moeq_kernels.hopper.w4a16.device import common, steps


@gluon.jit
def find_share(number, shares, each, count):
    """Return item, share, first step and end step of a unit; a share has `each` of the `count` steps."""
    item = number
    share = number * 0
    last = count + share
    if shares > 1:
        item = number // shares
        share = number % shares
        last = gl.minimum(share * each + each, count)
    return item, share, share * each, last


@constexpr_function
def box_of(tokens):
    """Return the tokens per copy; copies of tokens that the expert lacks are left out."""
    return max(8, tokens // 4)


#: Index of the first tile counter, in another cache line than the queue, so that waiting does not slow down drawing.
COUNTERS = gl.constexpr(32)
#: Indices of a product's numbers in its slot of `info`; these slots follow those of the steps.
SHARES, EACH, COUNT, ACROSS, BLOCKS, SLABS, GROUPS, UNITS, TOTAL, BUNDLE, PAIR = map(gl.constexpr, range(11))


@gluon.jit
def _draw(queue):
    """Start to draw the next unit in lane 0 of a copy warp; `_drawn` waits for it."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 lane;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        mov.u32 $0, 0;
        @first atom.relaxed.gpu.global.add.u32 $0, [$1], 1;
        }""",
        "=&r,l", [queue.to(gl.int64)], gl.int32, False, 1,
    )


@gluon.jit
def _drawn(ticket):
    """Return the unit that lane 0 has drawn, in all lanes."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", "=r,r", [ticket], gl.int32, False, 1
    )


@gluon.jit
def _look(counter):
    """Load a counter with acquire semantics, which do not extend to the copy engine."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [counter.to(gl.int64)], gl.int32, False, 1
    )


@gluon.jit
def fence_copies():
    """Order writes to memory before later reads by the copy engine."""
    gl.inline_asm_elementwise("fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
def get(info, place, number: gl.constexpr, WARPS: gl.constexpr):
    """Load a number from a slot of `info`, in a copy warp or a warpgroup."""
    return gl.max(info.index(place * 16 + number).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def tell(info, place, numbers, WARPS: gl.constexpr):
    """Store numbers into a slot of `info`."""
    for i in gl.static_range(len(numbers)):
        info.index(place * 16 + i).store(gl.full([1], numbers[i], gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])))
    barrier()


@gluon.jit
def _expect(bar, row, end_row, BYTES: gl.constexpr, TOKENS: gl.constexpr, STEP: gl.constexpr):
    """Set the byte count of a step's barrier: BYTES of weights, and the boxes that hold any tokens."""
    BOX: gl.constexpr = box_of(TOKENS)
    for boxes in gl.static_range(1, TOKENS // BOX + 1):
        here = row + BOX * boxes >= end_row if boxes < TOKENS // BOX else True
        if boxes > 1:
            here = here & (row + BOX * (boxes - 1) < end_row)
        mbarrier.expect(bar, BYTES + boxes * BOX * 2 * STEP, pred=here)


@gluon.jit
def _open(
    down, step, at, descriptors, w_buf, s_buf, info, ready, empty, row, end_row, w_row, s_row, block,
    PAIRED: gl.constexpr, TOKENS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    BYTES: gl.constexpr, KIND: gl.constexpr,
):
    """Wait for the slot of the at-th step, start to copy its weights, and return the slot."""
    up_w_desc, up_s_desc, down_w_desc, down_s_desc = descriptors
    slot = at % STAGES
    mbarrier.wait(empty.index(slot), ((at // STAGES) & 1) ^ 1)
    bar = ready.index(slot)
    _expect(bar, row, end_row, BYTES, TOKENS, STEP)
    if down:
        steps.load_weights(
            step, slot, bar, down_w_desc, down_s_desc, w_buf, s_buf, w_row, s_row, block * 4, 2, STEP, GROUP,
            KIND,
        )
    else:
        steps.load_weights(
            step, slot, bar, up_w_desc, up_s_desc, w_buf, s_buf, w_row, s_row, block * (2 if PAIRED else 4),
            get(info, STAGES + 1, PAIR, 1), STEP, GROUP, KIND,
        )
    return slot


@gluon.jit
def _load_tokens(
    down, step, slot, bar, x_desc, m_desc, x_buf, row, end_row, TOKENS: gl.constexpr, STEP: gl.constexpr,
):
    """Start to copy the boxes of a step that hold any tokens."""
    BOX: gl.constexpr = box_of(TOKENS)
    for part in gl.static_range(TOKENS // BOX):
        some = row + BOX * part < end_row if part else True
        for half in gl.static_range(STEP // 64):
            target = x_buf.index((STEP // 64 * slot + half) * (TOKENS // BOX) + part)
            if down:
                tma_load(m_desc, [row + BOX * part, step * STEP + 64 * half], bar, target, pred=some)
            else:
                tma_load(x_desc, [row + BOX * part, step * STEP + 64 * half], bar, target, pred=some)


@gluon.jit
def copy(
    given, TOKENS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr,
    PAIRED: gl.constexpr, WAITS: gl.constexpr,
):
    """Run the copy warp. WAITS: whether it waits for the preceding kernel before it copies its first tokens."""
    descriptors, x_desc, m_desc, w_buf, x_buf, s_buf, info, ready, empty, queue, tiles = given
    SCALE_BITS: gl.constexpr = s_buf.dtype.primitive_bitwidth
    UP: gl.constexpr = STAGES + 1
    DOWN: gl.constexpr = STAGES + 2
    BYTES: gl.constexpr = steps.weight_bytes(STEP, GROUP, KIND, SCALE_BITS)
    it = 0
    told = 0
    opened = -1
    fresh = True
    ticket = _drawn(_draw(queue))
    while ticket < get(info, UP, TOTAL, 1):
        following = _draw(queue)
        units = get(info, UP, UNITS, 1)
        down = ticket >= units
        product = gl.where(down, DOWN, UP)
        shares = get(info, product, SHARES, 1)
        item, share, first, last = find_share(
            ticket - gl.where(down, units, 0), shares, get(info, product, EACH, 1), get(info, product, COUNT, 1)
        )
        expert, row, end_row, block, number = common.find_item(item, tiles, get(info, product, ACROSS, 1), TOKENS)
        end = block + 1
        waits = down & (number != opened)
        if down:
            bundle = get(info, DOWN, BUNDLE, 1)
            block *= bundle
            end = gl.minimum(block + bundle, get(info, DOWN, BLOCKS, 1))
        if waits:
            waits = _look(queue + COUNTERS + number) < get(info, UP, BLOCKS, 1)
        w_row = expert * get(info, product, SLABS, 1)
        s_row = expert * get(info, product, GROUPS, 1)
        while block < end:
            slot = it % STAGES
            mbarrier.wait(empty.index(slot), ((it // STAGES) & 1) ^ 1)
            # A unit has at least one step, so the warpgroup still needs at most the last STAGES + 1 slots.
            tell(
                info, told % (STAGES + 1),
                (down.to(gl.int32), expert, row, end_row, block, number, first, last, item, share, shares), 1,
            )
            told += 1
            start = first
            held = waits
            if WAITS:
                held = held | fresh
            if held:
                start = gl.minimum(first + STAGES, last)
                for step in range(first, start):
                    _open(
                        down, step, it + step - first, descriptors, w_buf, s_buf, info, ready, empty, row, end_row,
                        w_row, s_row, block, PAIRED, TOKENS, STEP, STAGES, GROUP, BYTES, KIND,
                    )
                if WAITS:
                    if fresh:
                        gdc_wait()
                    fresh = False
                if waits:
                    there = _look(queue + COUNTERS + number)
                    while there < get(info, UP, BLOCKS, 1):
                        there = _look(queue + COUNTERS + number)
                    waits = False
            if down & (number != opened):
                opened = number
                fence_copies()
            if held:
                for step in range(first, start):
                    slot = (it + step - first) % STAGES
                    _load_tokens(
                        down, step, slot, ready.index(slot), x_desc, m_desc, x_buf, row, end_row, TOKENS, STEP
                    )
                it += start - first
            for step in range(start, last):
                slot = _open(
                    down, step, it, descriptors, w_buf, s_buf, info, ready, empty, row, end_row, w_row, s_row, block,
                    PAIRED, TOKENS, STEP, STAGES, GROUP, BYTES, KIND,
                )
                _load_tokens(
                    down, step, slot, ready.index(slot), x_desc, m_desc, x_buf, row, end_row, TOKENS, STEP
                )
                it += 1
            block += 1
        ticket = _drawn(following)
    if WAITS and fresh:
        gdc_wait()
    slot = it % STAGES
    mbarrier.wait(empty.index(slot), ((it // STAGES) & 1) ^ 1)
    tell(info, told % (STAGES + 1), (-1,), 1)
    mbarrier.arrive(ready.index(slot), count=1)

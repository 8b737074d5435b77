"""BLAKE3 of many messages of one length: a lane hashes a chunk of 1,024 bytes, or joins two nodes of a tree.

Source: "BLAKE3: one function, fast everywhere" (O'Connor, Aumasson, Neves, Wilcox-O'Hearn, 2020), sections 2.1 to 2.5.
Flags of a block: 1 the first of its chunk, 2 the last of its chunk, 4 a parent node, 8 the root of the tree.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mixed(a, b, c, d, x, y):
    """Return four words of the state after a quarter round with two words of the message."""
    a = a + b + x
    d = d ^ a
    d = (d >> 16) | (d << 16)
    c = c + d
    b = b ^ c
    b = (b >> 12) | (b << 20)
    a = a + b + y
    d = d ^ a
    d = (d >> 8) | (d << 24)
    c = c + d
    b = b ^ c
    b = (b >> 7) | (b << 25)
    return a, b, c, d


@triton.jit
def _first_values(LANES: tl.constexpr):
    """Return the initial chaining value, one word after the other."""
    return (
        tl.full([LANES], 0x6A09E667, tl.uint32),
        tl.full([LANES], 0xBB67AE85, tl.uint32),
        tl.full([LANES], 0x3C6EF372, tl.uint32),
        tl.full([LANES], 0xA54FF53A, tl.uint32),
        tl.full([LANES], 0x510E527F, tl.uint32),
        tl.full([LANES], 0x9B05688C, tl.uint32),
        tl.full([LANES], 0x1F83D9AB, tl.uint32),
        tl.full([LANES], 0x5BE0CD19, tl.uint32),
    )


@triton.jit
def _compressed(h, m, counter, size, flags, LANES: tl.constexpr):
    """Return the chaining value after a block of 16 words, of which `size` bytes count."""
    a0, a1, a2, a3, b0, b1, b2, b3 = h
    c0, c1, c2, c3, _c4, _c5, _c6, _c7 = _first_values(LANES)
    d0, d1, d2, d3 = counter, tl.zeros([LANES], tl.uint32), size, flags
    for _ in range(7):
        a0, b0, c0, d0 = _mixed(a0, b0, c0, d0, m[0], m[1])
        a1, b1, c1, d1 = _mixed(a1, b1, c1, d1, m[2], m[3])
        a2, b2, c2, d2 = _mixed(a2, b2, c2, d2, m[4], m[5])
        a3, b3, c3, d3 = _mixed(a3, b3, c3, d3, m[6], m[7])
        a0, b1, c2, d3 = _mixed(a0, b1, c2, d3, m[8], m[9])
        a1, b2, c3, d0 = _mixed(a1, b2, c3, d0, m[10], m[11])
        a2, b3, c0, d1 = _mixed(a2, b3, c0, d1, m[12], m[13])
        a3, b0, c1, d2 = _mixed(a3, b0, c1, d2, m[14], m[15])
        m = (m[2], m[6], m[3], m[10], m[7], m[0], m[4], m[13], m[1], m[11], m[12], m[5], m[9], m[14], m[15], m[8])
    return a0 ^ c0, a1 ^ c1, a2 ^ c2, a3 ^ c3, b0 ^ d0, b1 ^ d1, b2 ^ d2, b3 ^ d3


@triton.jit
def _words(source, live):
    """Load the 16 words of a block of each lane; 0 for lanes that are not live."""
    return (
        tl.load(source, live, 0).to(tl.uint32),
        tl.load(source + 1, live, 0).to(tl.uint32),
        tl.load(source + 2, live, 0).to(tl.uint32),
        tl.load(source + 3, live, 0).to(tl.uint32),
        tl.load(source + 4, live, 0).to(tl.uint32),
        tl.load(source + 5, live, 0).to(tl.uint32),
        tl.load(source + 6, live, 0).to(tl.uint32),
        tl.load(source + 7, live, 0).to(tl.uint32),
        tl.load(source + 8, live, 0).to(tl.uint32),
        tl.load(source + 9, live, 0).to(tl.uint32),
        tl.load(source + 10, live, 0).to(tl.uint32),
        tl.load(source + 11, live, 0).to(tl.uint32),
        tl.load(source + 12, live, 0).to(tl.uint32),
        tl.load(source + 13, live, 0).to(tl.uint32),
        tl.load(source + 14, live, 0).to(tl.uint32),
        tl.load(source + 15, live, 0).to(tl.uint32),
    )


@triton.jit
def _store(target, h, live):
    """Store the eight words of a chaining value of each lane."""
    for i in tl.static_range(8):
        tl.store(target + i, h[i].to(tl.int32), live)


@triton.jit(do_not_specialize=["count", "chunks", "length", "step", "blocks"])
def hash_chunks(
    messages,  # words of all messages, one after the other, 0 behind the end of each
    values,  # chaining value of each chunk, eight words
    count,  # chunks of all messages
    chunks,  # chunks of a message
    length,  # bytes of a message
    step,  # words from one message to the next
    blocks,  # blocks of a message's longest chunk
    LANES: tl.constexpr,
):
    """Hash chunks. The value of a message's only chunk is the message's digest."""
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = lane < count
    message, chunk = lane // chunks, lane % chunks
    source = messages + message.to(tl.int64) * step + chunk.to(tl.int64) * 256
    left = tl.minimum(length - chunk.to(tl.int64) * 1024, 1024).to(tl.int32)
    last = tl.maximum((left + 63) // 64, 1) - 1
    root = tl.where(chunks == 1, 2 + 8, 2)
    h = _first_values(LANES)
    for block in range(blocks):
        reads = live & (block <= last)
        size = tl.minimum(tl.maximum(left - 64 * block, 0), 64).to(tl.uint32)
        flags = tl.where(block == 0, 1, 0) + tl.where(block == last, root, 0)
        found = _compressed(
            h, _words(source + 16 * block, reads), chunk.to(tl.uint32), size, flags.to(tl.uint32), LANES
        )
        h = (
            tl.where(reads, found[0], h[0]),
            tl.where(reads, found[1], h[1]),
            tl.where(reads, found[2], h[2]),
            tl.where(reads, found[3], h[3]),
            tl.where(reads, found[4], h[4]),
            tl.where(reads, found[5], h[5]),
            tl.where(reads, found[6], h[6]),
            tl.where(reads, found[7], h[7]),
        )
    _store(values + lane.to(tl.int64) * 8, h, live)


@triton.jit(do_not_specialize=["count", "width"])
def join_nodes(
    nodes,  # chaining values of a level of all trees, eight words each
    parents,  # chaining values of the next level
    count,  # parents of all trees
    width,  # nodes of a tree, two or more
    LANES: tl.constexpr,
):
    """Join neighbours to parents. A last node without neighbour goes up as it is; a single parent is the digest."""
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = lane < count
    half = (width + 1) // 2
    tree, parent = lane // half, lane % half
    source = nodes + (tree.to(tl.int64) * width + 2 * parent) * 8
    pair = 2 * parent + 1 < width
    m = _words(source, live & pair)
    flags = tl.full([LANES], 4, tl.uint32) + tl.where(width == 2, 8, 0).to(tl.uint32)
    size = tl.full([LANES], 64, tl.uint32)
    h = _compressed(_first_values(LANES), m, tl.zeros([LANES], tl.uint32), size, flags, LANES)
    target = parents + lane.to(tl.int64) * 8
    _store(target, h, live & pair)
    for i in tl.static_range(8):
        tl.store(target + i, tl.load(source + i, live & (pair == 0), 0), live & (pair == 0))

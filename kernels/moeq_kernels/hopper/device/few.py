"""Functions that the kernels for very few, unsorted tokens share: experts, counters, and sums over choices."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moeq_kernels.hopper.device.epilogue import affine


@gluon.jit
def expert_of(ids, expert_map, pair, experts, known, MAPPED: gl.constexpr):
    """Return the local expert of a pair, or -1 if its expert is not local."""
    expert = gl.load(ids + pair).to(gl.int32)
    there = (expert >= 0) & (expert < known)
    if MAPPED:
        expert = gl.load(expert_map + gl.where(there, expert, 0)).to(gl.int32)
        there = there & (expert >= 0) & (expert < experts)
    return gl.where(there, expert, -1)


@gluon.jit
def clear(counters, count):
    """Set the first `count` counters to zero."""
    at = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    for begin in range(0, count, 128):
        gl.store(counters + begin + at, at * 0, mask=begin + at < count)


@gluon.jit
def sum_choices(
    y, ids, expert_map, topk_weights, parts, scale, bias, packed, token, column, hidden, stride_w, pairs, experts,
    known, MAPPED: gl.constexpr, TOP_K: gl.constexpr, SHARES: gl.constexpr, COLUMNS: gl.constexpr,
    UNIT: gl.constexpr = 1.0,
):
    """Compute y[token] = sum over choices of weight * (sum over shares * scale + bias) for COLUMNS columns, in order.

    Scales are in units of UNIT.
    """
    layout: gl.constexpr = gl.BlockedLayout([COLUMNS // 128], [32], [4], [0])
    at = column + gl.arange(0, COLUMNS, layout=layout)
    total = gl.zeros([COLUMNS], gl.float32, layout)
    for choice in gl.static_range(TOP_K):
        pair = token * TOP_K + choice
        expert = expert_of(ids, expert_map, pair, experts, known, MAPPED)
        there = (at < hidden) & (expert >= 0)
        weight = gl.load(topk_weights + token * stride_w + choice).to(gl.float32)
        weight = gl.where(expert >= 0, weight, 0.0)  # the weight of a choice without an expert may be NaN
        value = total * 0.0
        for share in gl.static_range(SHARES):
            place = parts + (share * pairs + pair).to(gl.int64) * hidden + at
            value += gl.load(place, mask=there, other=0.0, cache_modifier=".cg")
        total += weight * affine(value, at, scale, bias, True, expert, packed, there, UNIT)
    gl.store(y + token.to(gl.int64) * hidden + at, total.to(y.dtype.element_ty), mask=at < hidden)

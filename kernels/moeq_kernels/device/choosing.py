"""Kernel that turns router logits into chosen experts and their weights (`moeq_kernels.routing.Router` has the rules).

DEPENDENT: whether the kernel starts before the preceding one has ended (programmatic dependent launch, sm_90 on).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

#: Key of an expert or group that cannot be chosen, below those of all numbers; and an index beyond all others.
NEVER, BEYOND = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)


@triton.jit
def _keys(value):
    """Return int32 keys in the order of float32 values; -0.0 equals 0.0, NaN lies beyond infinity of its sign."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return tl.maximum(bits ^ ((bits >> 31) & BEYOND), NEVER + 1)


@triton.jit
def _best_groups(choice, there, GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST_TWO: tl.constexpr):
    """Mark the KEPT groups of each token `[tokens, groups, experts]` with the best score.

    That is the best score of a group, or the sum of its best two.
    """
    group = tl.arange(0, choice.shape[1])[None, :]
    member = tl.arange(0, choice.shape[2])[None, None, :]
    choice = tl.where(there, choice, float("-inf"))
    score = tl.max(choice, 2)
    if BEST_TWO:
        first = tl.min(tl.where(choice == score[:, :, None], member, BEYOND), 2)
        score += tl.max(tl.where(member == first[:, :, None], float("-inf"), choice), 2)
    key = tl.where(group < GROUPS, _keys(score), NEVER)
    kept = tl.zeros(key.shape, tl.int1)
    for _ in tl.static_range(KEPT):
        best = tl.min(tl.where(key == tl.max(key, 1)[:, None], group, BEYOND), 1)[:, None]
        kept = kept | (group == best)
        key = tl.where(group == best, NEVER, key)
    return kept


@triton.jit(do_not_specialize=["tokens"])
def choose_experts(
    logits, bias, padding, weights, ids, tokens, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    BEST_TWO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, FACTOR: tl.constexpr, TOKENS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Choose the experts of TOKENS tokens; grid: (blocks of tokens,).

    Args:
        logits: floating point `[tokens, EXPERTS]`.
        bias: floating point `[EXPERTS]` that is added to scores for choosing only, or None.
        padding: bytes `[tokens]`, not 0 for rows that are no tokens, which get the expert -1 and the weight 0; or None.
        weights, ids: float32 and int32 `[tokens, TOP_K]`, best first, ties to the lower expert.
        GROUPS, KEPT, BEST_TWO: equal groups of experts, how many of them stay, and whether a group's score is the sum
            of its best two scores.
        ROWS, COLUMNS, SLOTS: powers of two that hold the groups, the experts of a group, and TOP_K.
    """
    SIZE: tl.constexpr = EXPERTS // GROUPS
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    group = tl.arange(0, ROWS)[None, :, None]
    member = tl.arange(0, COLUMNS)[None, None, :]
    expert = group * SIZE + member
    there = (group < GROUPS) & (member < SIZE)
    slot = tl.arange(0, SLOTS)[None, :]
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    place = logits + token[:, None, None] * EXPERTS + expert
    value = tl.load(place, mask=there & (token < tokens)[:, None, None], other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-value))
    else:
        score = tl.exp(value - tl.max(tl.max(value, 2), 1)[:, None, None])
        score = score / tl.sum(tl.sum(score, 2), 1)[:, None, None]
    choice = score
    if bias is not None:
        choice += tl.load(bias + expert, mask=there, other=0.0).to(tl.float32)
    elif not SIGMOID and not BEST_TWO:
        choice = value  # in the same order, and never rounded to the same number
    key = tl.where(there, _keys(choice), NEVER)
    if GROUPS > 1:
        key = tl.where(_best_groups(choice, there, GROUPS, KEPT, BEST_TWO)[:, :, None], key, NEVER)
    # Flat, so that each search is one reduction over a warp's lanes, of integers: the GPU has an instruction for these.
    COUNT: tl.constexpr = ROWS * COLUMNS
    key = tl.reshape(key, [TOKENS, COUNT])
    bits = tl.reshape(score, [TOKENS, COUNT]).to(tl.int32, bitcast=True)
    expert, there = tl.reshape(expert, [1, COUNT]), tl.reshape(there, [1, COUNT])
    chosen = tl.full([TOKENS, SLOTS], -1, tl.int32)
    weight = tl.zeros([TOKENS, SLOTS], tl.int32)
    for choice_number in tl.static_range(TOP_K):
        best = (key == tl.max(key, 1)[:, None]) & there
        one = tl.min(tl.where(best, expert, BEYOND), 1)[:, None]
        found = (expert == one) & there
        chosen = tl.where(slot == choice_number, one, chosen)
        # Scores are not negative, so they are in the order of their bits.
        weight = tl.where(slot == choice_number, tl.max(tl.where(found, bits, 0), 1)[:, None], weight)
        key = tl.where(found, NEVER, key)
    weight = weight.to(tl.float32, bitcast=True)
    if RENORMALIZE:
        weight = weight / tl.maximum(tl.sum(weight, 1), 1e-20)[:, None]
    weight *= FACTOR
    if padding is not None:
        unused = (tl.load(padding + token, mask=token < tokens, other=1) != 0)[:, None]
        chosen = tl.where(unused, -1, chosen)
        weight = tl.where(unused, 0.0, weight)
    at = token[:, None] * TOP_K + slot
    inside = (token < tokens)[:, None] & (slot < TOP_K)
    tl.store(ids + at, chosen, mask=inside)
    tl.store(weights + at, weight, mask=inside)

"""Sorting routed tokens by expert into blocks that a grouped matrix product can take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Alignment:
    """Which pairs (token, choice) each block of rows works on.

    A pair is numbered `token * top_k + choice`; the number of pairs itself marks a padding row.

    Attributes:
        slots: int32 `[B * block]` pair numbers, in blocks of one expert each, ascending inside an expert.
        block_expert: int32 `[B]` local expert of each block, -1 for blocks without work.
        num_blocks: B.
    """

    slots: Tensor
    block_expert: Tensor
    num_blocks: int


def align(local_ids: Tensor, num_experts: int, block: int) -> Alignment:
    """Groups pairs by expert and pads every expert to a multiple of `block` rows.

    Args:
        local_ids: int32 or int64 `[P]` local expert of each pair; anything outside `0 .. num_experts - 1` is left out.
        num_experts: local experts E.
        block: rows per block.

    Nothing is read back from the device: the number of blocks is the most that P pairs can need,
    `min(P, P // block + E)`, and blocks beyond those in use carry expert -1. The order is deterministic.
    """
    count = local_ids.numel()
    device = local_ids.device
    ids = local_ids.reshape(-1).to(torch.int64)
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    ids, order = torch.sort(ids, stable=True)
    boundaries = torch.arange(num_experts + 1, device=device)
    starts = torch.searchsorted(ids, boundaries)  # first sorted position of each expert; [E] ends the last
    blocks = (starts[1:] - starts[:-1] + block - 1) // block
    last_block = torch.cumsum(blocks, 0)
    first_slot = (last_block - blocks) * block

    num_blocks = min(count, count // block + num_experts)
    if device.type == "cpu":  # no synchronisation to avoid: launch exactly what is needed
        num_blocks = int(last_block[-1]) if num_experts else 0
    slots = torch.full((num_blocks * block + 1,), count, dtype=torch.int32, device=device)
    expert = ids.clamp(max=num_experts - 1)
    position = torch.arange(count, device=device) - starts[expert] + first_slot[expert]
    position = torch.where(ids < num_experts, position, num_blocks * block)  # left-out pairs share a spare last slot
    slots[position] = order.to(torch.int32)
    block_expert = torch.searchsorted(last_block, torch.arange(num_blocks, device=device), right=True)
    block_expert = torch.where(block_expert < num_experts, block_expert, -1).to(torch.int32)
    return Alignment(slots[:-1], block_expert, num_blocks)


def align_batched(num_tokens: Tensor, max_tokens: int, block: int) -> Alignment:
    """The same for tokens already grouped as `[E, max_tokens]`: expert e has its first `num_tokens[e]` rows in use.

    Pairs are numbered `expert * max_tokens + row`.
    """
    experts = num_tokens.numel()
    device = num_tokens.device
    per_expert = -(-max_tokens // block)
    row = torch.arange(per_expert * block, device=device)
    limit = num_tokens.to(torch.int64).clamp(0, max_tokens)
    pair = torch.arange(experts, device=device)[:, None] * max_tokens + row[None, :]
    slots = torch.where(row[None, :] < limit[:, None], pair, experts * max_tokens).to(torch.int32)
    first_row = torch.arange(per_expert, device=device) * block
    expert = torch.arange(experts, dtype=torch.int32, device=device)[:, None]
    block_expert = torch.where(first_row[None, :] < limit[:, None], expert, -1).to(torch.int32)
    return Alignment(slots.reshape(-1), block_expert.reshape(-1).contiguous(), experts * per_expert)

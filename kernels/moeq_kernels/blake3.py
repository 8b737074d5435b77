"""BLAKE3 (256 bits) of many messages of one length on a device, in the order of the current stream."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from moeq_kernels import interpreter
from moeq_kernels.areas import Area
from moeq_kernels.errors import KernelArgumentError
from moeq_kernels.launch import Launch
from moeq_kernels.queued import QueuedLaunches

#: Bytes of a chunk, the leaf of a tree.
CHUNK = 1024

#: Bytes of a block; a message takes whole blocks in memory.
BLOCK = 64


def digests(messages: Tensor, length: int) -> Tensor:
    """Return the digests, uint8 `[messages, 32]`, of messages of `length` bytes.

    `messages` is uint8 `[messages, bytes]`, contiguous; bytes are a multiple of 64 and zero from `length` on.

    Raises KernelArgumentError if the messages are of another form.
    """
    fits = messages.dim() == 2 and messages.dtype == torch.uint8 and messages.is_contiguous()
    if not fits or messages.shape[1] % BLOCK or not 0 <= length <= messages.shape[1] or not messages.shape[1]:
        given = f"{messages.dtype} {list(messages.shape)}"
        raise KernelArgumentError(f"{given} does not hold messages of {length} bytes in blocks of {BLOCK}")
    count, stride = messages.shape
    queued, nodes = planned(count, stride, length)
    found = torch.empty(nodes, dtype=torch.int32, device=messages.device)
    queued.run(messages, found)
    return found[nodes - 8 * count :].view(torch.uint8).view(count, 32)


@lru_cache(maxsize=64)
def planned(count: int, stride: int, length: int) -> tuple[QueuedLaunches, int]:
    """Plan the launches for messages `stride` bytes apart, and return them with the words of all nodes."""
    width = max(1, -(-length // CHUNK))
    words = Area.of("messages", torch.int32, count * stride // 4)
    level, nodes = _level(0, count * width), 8 * count * width
    arguments: dict[str, Area | int] = {"messages": words, "values": level, "count": count * width, "chunks": width}
    arguments |= {"length": length, "step": stride // 4, "blocks": max(1, -(-min(length, CHUNK) // BLOCK))}
    launches = [_launch("hash_chunks", count * width, arguments)]
    while width > 1:
        parents = count * -(-width // 2)
        above = _level(nodes, parents)
        launches.append(
            _launch("join_nodes", parents, {"nodes": level, "parents": above, "count": parents, "width": width})
        )
        level, nodes, width = above, nodes + 8 * parents, -(-width // 2)
    return QueuedLaunches(launches, ("messages", "nodes")), nodes


def _level(first: int, count: int) -> Area:
    """Return the area of a level's chaining values, which begins at word `first` of the memory of all nodes."""
    return Area.of("nodes", torch.int32, 8 * count, offset=4 * first)


def _launch(kernel: str, count: int, arguments: dict[str, Area | int]) -> Launch:
    lanes = 4096 if interpreter.active() else 128
    return Launch(f"device.blake3:{kernel}", (-(-count // lanes),), arguments, {"LANES": lanes}, {"num_warps": 4})

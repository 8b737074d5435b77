"""BLAKE3 by kernels gives the digests of the library, for messages that end anywhere in a block, a chunk or a tree."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest
import torch
from blake3 import blake3

from moeq_kernels.blake3 import BLOCK, digests, planned
from moeq_kernels.errors import KernelArgumentError
from moeq_kernels.queued import QueuedLaunches

MEBIBYTE = 1 << 20

#: BLAKE3's first chaining value, and the words of a block by their place in the next round.
FIRST = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
ORDER = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)


def messages_of(count: int, length: int, device: torch.device) -> torch.Tensor:
    found = torch.zeros(count, -(-max(length, 1) // BLOCK) * BLOCK, dtype=torch.uint8)
    found[:, :length] = torch.randint(256, (count, length), dtype=torch.uint8)
    return found.to(device)


@pytest.mark.cover(every=16)
@pytest.mark.parametrize(
    "length",
    [65, 0, 1, 63, 64, 1023, 1024, 1025, 2048, 2049, 3072, 4097, 17 * 1024 + 5, 31 * 1024, MEBIBYTE, MEBIBYTE + 1],
)
def test_digests_are_the_librarys(length: int, device: torch.device) -> None:
    torch.manual_seed(length)
    messages = messages_of(3, length, device)
    found = digests(messages, length).cpu()
    for message, digest in zip(messages.cpu(), found, strict=True):
        assert digest.numpy().tobytes() == blake3(message[:length].numpy().data).digest()


def compressed(h: Sequence[int], words: Sequence[int], size: int, flags: int) -> list[int]:
    """BLAKE3's compression of a block at counter 0, after section 2.2 of its paper."""
    v, m = [*h, *FIRST[:4], 0, 0, size, flags], list(words)

    def mix(a: int, b: int, c: int, d: int, *given: int) -> None:
        for word, (first, second) in zip(given, ((16, 12), (8, 7)), strict=True):
            v[a] = (v[a] + v[b] + word) % 2**32
            v[d] = turned(v[d] ^ v[a], first)
            v[c] = (v[c] + v[d]) % 2**32
            v[b] = turned(v[b] ^ v[c], second)

    def turned(word: int, by: int) -> int:
        return (word >> by | word << (32 - by)) % 2**32

    for _ in range(7):
        for i in range(4):
            mix(i, 4 + i, 8 + i, 12 + i, m[2 * i], m[2 * i + 1])
        for i in range(4):
            mix(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, m[8 + 2 * i], m[9 + 2 * i])
        m = [m[place] for place in ORDER]
    return [v[i] ^ v[8 + i] for i in range(8)]


def test_nodes_are_joined_to_a_tree(device: torch.device) -> None:
    """Trees of three leaves, whose last one goes up as it is, without the sixteen blocks of each leaf."""
    block = bytes(range(64))
    assert struct.pack("<8I", *compressed(FIRST, struct.unpack("<16I", block), 64, 11)) == blake3(block).digest()
    queued, words = planned(2, 3 * 1024, 3 * 1024)
    nodes = torch.randint(-(2**31), 2**31, (words,), dtype=torch.int32).to(device)
    leaves = [word % 2**32 for word in nodes[:48].tolist()]
    QueuedLaunches(queued.launches[1:], ("messages", "nodes")).run(
        torch.zeros(2, 3 * 1024, dtype=torch.uint8).to(device), nodes
    )
    for tree in range(2):
        one, two, three = (leaves[24 * tree + 8 * i : 24 * tree + 8 * i + 8] for i in range(3))
        root = compressed(FIRST, compressed(FIRST, one + two, 64, 4) + three, 64, 12)
        assert [word % 2**32 for word in nodes[words - 16 :][8 * tree : 8 * tree + 8].tolist()] == root


@pytest.mark.parametrize(
    ("messages", "length"),
    [
        (torch.zeros(2, 64, dtype=torch.int8), 5),
        (torch.zeros(64, dtype=torch.uint8), 5),
        (torch.zeros(2, 60, dtype=torch.uint8), 5),
        (torch.zeros(2, 128, dtype=torch.uint8)[:, :64], 5),
        (torch.zeros(2, 64, dtype=torch.uint8), 65),
        (torch.zeros(2, 64, dtype=torch.uint8), -1),
        (torch.zeros(2, 0, dtype=torch.uint8), 0),
    ],
    ids=str,
)
def test_other_tensors_are_refused(messages: torch.Tensor, length: int) -> None:
    with pytest.raises(KernelArgumentError, match=f" {length} bytes in blocks of 64$"):
        digests(messages, length)

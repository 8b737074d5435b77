"""BLAKE3 by kernels gives the digests of the library, for messages that end anywhere in a block, a chunk or a tree."""

from __future__ import annotations

import pytest
import torch
from blake3 import blake3

from moeq_kernels.blake3 import BLOCK, digests
from moeq_kernels.errors import KernelArgumentError

MEBIBYTE = 1 << 20


def messages_of(count: int, length: int, device: torch.device) -> torch.Tensor:
    found = torch.zeros(count, -(-max(length, 1) // BLOCK) * BLOCK, dtype=torch.uint8)
    found[:, :length] = torch.randint(256, (count, length), dtype=torch.uint8)
    return found.to(device)


@pytest.mark.cover(every=16)
@pytest.mark.parametrize(
    "length",
    [2049, 0, 1, 63, 64, 65, 1023, 1024, 1025, 2048, 3072, 4097, 17 * 1024 + 5, 31 * 1024, MEBIBYTE, MEBIBYTE + 1],
)
def test_digests_are_the_librarys(length: int, device: torch.device) -> None:
    torch.manual_seed(length)
    messages = messages_of(3, length, device)
    found = digests(messages, length).cpu()
    for message, digest in zip(messages.cpu(), found, strict=True):
        assert digest.numpy().tobytes() == blake3(message[:length].numpy().data).digest()


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
    with pytest.raises(KernelArgumentError, match=f"^{length} bytes of"):
        digests(messages, length)

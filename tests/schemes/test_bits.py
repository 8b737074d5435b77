"""Bit streams against a definition in Python integers: all widths, odd counts, views that begin anywhere."""

from __future__ import annotations

import pytest
import torch

from moeq.schemes.bits import pack_stream, stream_codes


def stream(codes: list[int], bits: int) -> int:
    """The stream as one number."""
    return sum(code << (bits * index) for index, code in enumerate(codes))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 7, 31, 32, 33, 96])
def test_streams_both_ways(bits: int, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    codes = torch.randint(0, 2**bits, (3, count), generator=generator, dtype=torch.uint8)
    words = -(-count * bits // 32)
    packed = pack_stream(codes, bits, words)
    assert packed.shape == (3, words)
    for row, expected in zip(packed, codes, strict=True):
        assert int.from_bytes(row.numpy().tobytes(), "little") == stream(expected.tolist(), bits)
    assert torch.equal(stream_codes(packed, bits, count), codes)


@pytest.mark.parametrize("offset", range(4))
def test_views_that_begin_anywhere(offset: int) -> None:
    flat = torch.randint(0, 16, (4 * 64 + 4,), dtype=torch.uint8)
    codes = flat[offset : offset + 4 * 64].reshape(4, 64)
    packed = pack_stream(codes, 4, 8)
    assert torch.equal(packed, pack_stream(codes.clone(), 4, 8))
    columns = codes.t().contiguous().t()  # the same values, the other way round in memory
    assert torch.equal(pack_stream(columns, 4, 8), packed)
    octets = packed.view(torch.uint8)
    assert torch.equal(stream_codes(octets[:, offset:], 4, 64 - 2 * offset), codes[:, 2 * offset :])


def restrided(tensor: torch.Tensor, stride: int) -> torch.Tensor:
    """The same tensor with that stride wherever an axis has one element, as transposed views have it."""
    strides = [stride if size == 1 else old for size, old in zip(tensor.shape, tensor.stride(), strict=True)]
    found = tensor.as_strided(tensor.shape, strides)
    assert found.is_contiguous()
    return found


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("shape", [(1, 64), (64, 1), (1, 1)])
@pytest.mark.parametrize("stride", [1, 2, 7])
def test_an_axis_of_one_may_have_any_stride(bits: int, shape: tuple[int, int], stride: int) -> None:
    codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8)
    words = -(-shape[1] * bits // 32)
    packed = pack_stream(codes, bits, words)
    assert torch.equal(pack_stream(restrided(codes, stride), bits, words), packed)
    assert torch.equal(stream_codes(restrided(packed, stride), bits, shape[1]), codes)

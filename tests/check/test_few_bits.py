"""GPTQ checkpoints of 2 and 3 bits: converted for moeq's kernels, proved, and multiplied."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from load.deployments import convert
from pipeline.fast_path_cases import Sizes, write_checkpoint

import moeq
from moeq.check.run_check import CheckOptions, run_check
from moeq.schemes.bits import pack_stream


def with_bits(bits: int, tensors: dict[str, torch.Tensor]) -> None:
    """Replace 4-bit GPTQ tensors by random ones of fewer bits, symmetric."""
    generator = torch.Generator().manual_seed(bits)
    for name, tensor in tensors.items():
        rows, columns = tensor.shape[0], tensor.shape[-1]
        if name.endswith("qweight"):
            words = torch.randint(-(2**31), 2**31 - 1, (rows * bits // 4, columns), generator=generator)
            tensors[name] = words.to(torch.int32)
        elif name.endswith("qzeros"):
            middle = torch.full((rows, 8 * columns), (1 << (bits - 1)) - 1, dtype=torch.uint8)
            tensors[name] = pack_stream(middle, bits, columns * bits // 4)


@pytest.mark.parametrize("bits", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_gptq_of_few_bits(bits: int, tmp_path: Path) -> None:
    source = write_checkpoint(
        tmp_path / "source", "gptq-int4", Sizes(128, 64), lambda tensors: with_bits(bits, tensors), bits=bits
    )
    assert source.info.schemes[0].title == f"gptq int{bits} g32 sym"
    folder = convert(tmp_path / "source", tmp_path / "out", "moeq-wna16/1")
    back = moeq.open(folder)
    for name in ("gate", "up", "down"):
        assert torch.equal(back.dequantize(0, 1, name), source.dequantize(0, 1, name))
    report = run_check(folder, source=tmp_path / "source", options=CheckOptions(tokens=[3]))
    assert report.ok

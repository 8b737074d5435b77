"""HQQ: vectors that the library wrote on a CPU, decoded to its own numbers; whole checkpoints; damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from orphan_files import stored, vectors, write_hqq
from safetensors.torch import load_file

from moeq.errors import MoeqError
from moeq.model import open as open_checkpoint
from moeq.schemes.hqq import HqqSizes
from moeq.transcode.transcode import transcode

VECTORS = vectors("hqq")


@pytest.mark.parametrize("name", VECTORS)
def test_the_numbers_of_the_library(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_hqq(tmp_path / "model", VECTORS[name]))
    found = checkpoint.dequantize(0, 1, "gate")
    assert torch.equal(found, stored(VECTORS[name]["values"]).float())
    assert bool(found.any())
    (use,) = checkpoint.info.schemes
    assert use.refusal is not None
    assert use.refusal.endswith("writes its numbers")


def test_the_whole_checkpoint_in_its_own_dtype(tmp_path: Path) -> None:
    """A model that was computed in bfloat16 is exact in it, attention included, and keeps no setting."""
    vector = VECTORS["3-bit-axis0-g16-bfloat16"]
    assert transcode(write_hqq(tmp_path / "model", vector), tmp_path / "out", "bf16").exact
    written = {k: v for file in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(file).items()}
    expected = stored(vector["values"])
    assert torch.equal(written["model.layers.0.mlp.experts.0.up_proj.weight"], expected)
    assert torch.equal(written["model.layers.0.self_attn.o_proj.weight"], expected)
    assert {name.rpartition(".")[2] for name in written} == {"weight"}
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def text(value: str) -> torch.Tensor:
    return torch.tensor(list(value.encode()), dtype=torch.uint8)


def size(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int32)


@pytest.mark.parametrize(
    ("part", "tensor", "words"),
    [
        ("packing", text("5bit_u8"), "known packings|5bit_u8"),
        ("packing", None, "HQQ, which moeq does not read"),
        ("group_size", None, "group_size is missing"),
        ("packing", torch.zeros(1000, dtype=torch.uint8), "expected a small U8"),
        ("group_size", size(0), "groups of 0"),
        ("group_size", size(7), "groups of 7"),
        ("group_size", size(-8), "groups of"),
        ("axis", size(2), "axis 2"),
        ("shape", torch.tensor([16, -16]), "groups along axis"),
        ("shape", torch.tensor([1 << 40, 1 << 40]), "groups along axis"),
        ("shape", torch.tensor([8, 16]), "implies 8"),
        ("scale", torch.ones(5, 1), "scale is"),
        ("zero", None, "zero is missing"),
        ("scale", torch.full((32, 1), float("inf"), dtype=torch.bfloat16), "not finite"),
        ("W_q", torch.zeros(3, 8, dtype=torch.uint8), "W_q is U8"),
        ("W_q", torch.zeros(16, 8, dtype=torch.int64), "W_q is I64"),
    ],
)
def test_parts_that_do_not_fit(tmp_path: Path, part: str, tensor: torch.Tensor | None, words: str) -> None:
    source = write_hqq(tmp_path / "model", VECTORS["4-bit-axis1-g8-bfloat16"], **{part: tensor})
    with pytest.raises(MoeqError, match=words) as caught:
        open_checkpoint(source).dequantize(0, 0, "gate")
    assert caught.value.code.startswith("source.")


def test_sizes_that_contradict_each_other(tmp_path: Path) -> None:
    source = write_hqq(tmp_path / "model", VECTORS["4-bit-axis1-g8-bfloat16"], group_size=size(256))
    with pytest.raises(MoeqError, match="1 rows of groups are no whole bytes of 4-bit codes"):
        open_checkpoint(source).dequantize(0, 0, "gate")


MOST = 1 << 24


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        (HqqSizes(1, 8, 8, 8, 1), None),
        (HqqSizes(8, 1, 8, 8, 0), None),
        (HqqSizes(1, 1, 8, 1, 0), None),
        (HqqSizes(MOST, 1, 8, 1, 1), None),
        (HqqSizes(1, MOST, 4, MOST, 0), None),
        (HqqSizes(7, 3, 3, 7, 1), None),
        (HqqSizes(0, 8, 8, 8, 1), "sizes 0 x 8 with groups along axis 1 are out of range"),
        (HqqSizes(8, 0, 8, 8, 1), "sizes 8 x 0 with groups along axis 1 are out of range"),
        (HqqSizes(MOST + 1, 1, 8, 1, 1), f"sizes {MOST + 1} x 1 with groups along axis 1 are out of range"),
        (HqqSizes(1, MOST + 1, 8, 1, 1), f"sizes 1 x {MOST + 1} with groups along axis 1 are out of range"),
        (HqqSizes(8, 8, 8, 8, -1), "sizes 8 x 8 with groups along axis -1 are out of range"),
        (HqqSizes(2, 4, 8, 16, 1), "groups of 16 codes do not divide 2 x 4"),
        (HqqSizes(3, 8, 4, 8, 1), "3 rows of groups are no whole bytes of 4-bit codes"),
        (HqqSizes(4, 8, 1, 8, 1), "4 rows of groups are no whole bytes of 1-bit codes"),
        (HqqSizes(4, 8, 2, 8, 1), None),
    ],
)
def test_sizes_at_their_limits(sizes: HqqSizes, problem: str | None) -> None:
    assert sizes.problem() == problem

"""Contents of a conversion's folder, compared byte by byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pipeline.mixing import Tensors, rewritten

import moeq
from moeq.checkpoint.header import TensorEntry
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.model.converted import ConvertedCheckpoint
from moeq.pipeline.convert import convert
from moeq.pipeline.plan.units import CHUNK_BYTES
from moeq.prove.findings import FolderContents, piece_bytes

NAME = "model.embed_tokens.weight"
SIZE = CHUNK_BYTES + 100


@pytest.fixture(scope="module")
def converted(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> ConvertedCheckpoint:
    """A conversion with a copied tensor of two chunks."""

    def with_embedding(tensors: Tensors) -> Tensors:
        return tensors | {NAME: torch.arange(SIZE, dtype=torch.int32).to(torch.uint8)}

    folder = tmp_path_factory.mktemp("contents")
    source = rewritten(checkpoints / "ct-w8a8-qwen3moe", folder / "source", with_embedding)
    convert(source, folder / "out", Deployment(gpu=parse_gpu("A100")))
    checkpoint = moeq.open(folder / "out")
    assert isinstance(checkpoint, ConvertedCheckpoint)
    return checkpoint


@pytest.mark.parametrize("place", [None, 0, 5, CHUNK_BYTES, SIZE - 1])
def test_the_first_byte_that_differs(place: int | None, converted: ConvertedCheckpoint) -> None:
    other = bytearray((torch.arange(SIZE, dtype=torch.int32).to(torch.uint8)).numpy().tobytes())
    if place is not None:
        other[place] ^= 1
        other[-1] ^= 2
    contents = FolderContents(converted, 1)
    found = contents.first_difference(converted.source.entry(NAME), lambda start, stop: other[start:stop])
    assert found == place


def test_bytes_that_end_early_differ(converted: ConvertedCheckpoint) -> None:
    contents = FolderContents(converted, 1)
    assert contents.first_difference(converted.source.entry(NAME), lambda start, stop: b"") == 0


def test_stacks_are_hashed_expert_by_expert() -> None:
    stack = TensorEntry("w", "U8", (4, 6), "a.safetensors", 0, 24)
    assert piece_bytes(stack, stacked=True) == 6
    assert piece_bytes(stack, stacked=False) == CHUNK_BYTES
    assert piece_bytes(TensorEntry("w", "U8", (0, 6), "a.safetensors", 0, 0), stacked=True) == CHUNK_BYTES
    assert piece_bytes(TensorEntry("w", "U8", (), "a.safetensors", 0, 1), stacked=True) == CHUNK_BYTES

"""Contents of a conversion's folder, compared byte by byte."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pipeline.mixing import Tensors, rewritten
from refusing import refuses

import moeq
from moeq.checkpoint.header import TensorEntry
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.model.converted import ConvertedCheckpoint
from moeq.pipeline.convert import convert
from moeq.pipeline.plan.side_files import CARD, CARD_MARK, SOURCE_CARD
from moeq.pipeline.plan.units import CHUNK_BYTES
from moeq.prove.derived import plan_of
from moeq.prove.findings import Findings, FolderContents, piece_bytes

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


def test_what_cannot_be_read_has_no_digest(converted: ConvertedCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    contents, size = FolderContents(converted, 1), converted.source.size_of("moeq.json")
    found = contents.digest("moeq.json", size)
    assert found is not None
    assert found.bytes == size
    assert contents.digest("moeq.json", size + 1) is None
    assert contents.digest("absent", 1) is None

    def opened(error: Exception) -> None:
        def fail(name: str) -> int:
            raise error

        monkeypatch.setattr(converted.source, "open", fail)

    for error in (OSError(5, "no"), MoeqError("source.unreadable", "no")):
        opened(error)
        assert contents.digest("moeq.json", size) is None
    opened(MoeqError("source.changed", "other"))
    with refuses("source.changed", "other"):
        contents.digest("moeq.json", size)


def test_reads_that_fail_name_their_file(converted: ConvertedCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = FolderContents(converted, 2)

    def fail(*given: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("moeq.prove.findings.read_digest", fail)
    with refuses("source.unreadable", f"{converted.source.entry(NAME).file}: Input/output error"):
        contents._digest(converted.source.entry(NAME))


def test_files_of_tools_and_cards_of_moeq_are_compared_with_nothing(
    converted: ConvertedCheckpoint, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(Path(converted.source.name), tmp_path / "out"))
    for name in (".git", ".cache", "inner/.git"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").touch()
    (folder / "link").symlink_to(folder / "inner")
    contents = FolderContents(moeq.open(folder), 1)  # type: ignore[arg-type]
    assert {".git/", ".cache/", "inner/.git/file", "link"} <= contents.names
    assert ".git/file" not in contents.names
    assert contents.unproven == {".git/", ".cache/"}
    for text, known in (("a card", False), (f"a card\n{CARD_MARK}\n", True)):
        (folder / CARD).write_text(text)
        assert (CARD in FolderContents(moeq.open(folder), 1).unproven) == known  # type: ignore[arg-type]
    (folder / CARD).unlink()
    (folder / CARD).mkdir()
    (folder / CARD / SOURCE_CARD).touch()
    assert FolderContents(moeq.open(folder), 1).unproven == {".git/", ".cache/"}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("deployment", "sizes"),
    [({"tp": 0}, "tp 0, ep 1"), ({"ep": 1 << 16}, "tp 1, ep 65536"), ({"tp": 1 << 16, "ep": 2}, "tp 65536, ep 2"),
     ({"tp": 2, "ep": 0}, "tp 2, ep 0")],
)  # fmt: skip
def test_deployments_that_cannot_be(deployment: dict[str, int], sizes: str, converted, checkpoints) -> None:
    source = moeq.open(checkpoints / "ct-w8a8-qwen3moe")
    with refuses("source.bad-manifest", f"moeq.json: deployment: {sizes} are not sizes"):
        plan_of(source, replace(converted.manifest, deployment=deployment))
    layers = (replace(converted.manifest.layers[0], layer=9),)
    with refuses("source.other-layers", "the source has no experts in layer 9"):
        plan_of(source, replace(converted.manifest, layers=layers))


class Names(Findings):
    """The checks of names alone."""

    def check(self, *, slow: bool) -> None:
        self.check_names()


def test_files_behind_links_and_tensors_in_two_files_are_found(converted: ConvertedCheckpoint, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("{}")
    folder = Path(shutil.copytree(Path(converted.source.name), tmp_path / "out"))
    (folder / "inner").mkdir()
    (folder / "notes.txt").symlink_to(outside)
    checkpoint = moeq.open(folder)
    assert isinstance(checkpoint, ConvertedCheckpoint)
    steps: list[tuple[int, int, str]] = []
    found = Names(checkpoint, 1, lambda *step: steps.append(step))
    assert "notes.txt" in found.contents.names
    found.check(slow=False)
    (row,) = found.found
    assert (row.kind, row.name) == ("file", "notes.txt")
    assert "notes.txt" in row.text
    (home, *_) = sorted(found.contents.headers)
    twice, lost = sorted(found.contents.headers[home])[:2]
    found.contents.headers["another.safetensors"] = {twice: found.contents.headers[home][twice]}
    checkpoint.source.tensors = {name: one for name, one in checkpoint.source.tensors.items() if name != lost}
    found.found.clear()
    found.check(slow=False)
    assert [(row.kind, row.name, row.text) for row in found.found[1:]] == [
        ("tensor", lost, f"tensor {lost} of {home} is not the one that the index names"),
        ("tensor", twice, f"tensor {twice} of another.safetensors is not the one that the index names"),
    ]
    found.add_unexpected(["b", "a"], "nobody knows it")
    assert [row.text for row in found.found[3:]] == [f"{name} does not belong here: nobody knows it" for name in "ab"]
    found.total = 2
    for _ in range(3):
        found.advance("x")
    assert steps == [(1, 2, "x"), (2, 2, "x"), (2, 2, "x")]

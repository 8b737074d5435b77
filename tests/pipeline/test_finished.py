"""Repeating a command whose work is done: the same job is recognised, any other is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moeq.checkpoint.manifest import MANIFEST_NAME
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.pipeline.convert import convert
from moeq.transcode.transcode import transcode

A100 = Deployment(gpu=parse_gpu("A100"))
NAME = "gptq-int4-g32-qwen3moe"


@pytest.fixture
def source(checkpoints: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints / NAME, tmp_path / "source"))


def state(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def change_byte(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_the_same_job_writes_nothing(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = convert(source, out, A100)
    before = state(out)
    again = convert(source, out, A100)
    assert again.already_done
    assert again.manifest is not None
    assert first.manifest is not None
    assert again.manifest.layers == first.manifest.layers
    assert convert(source, out, A100, shard="1/3").already_done
    assert convert(source, out, A100, dry_run=True).already_done
    assert convert(source, out, A100, "marlin").already_done  # the backend that `auto` took
    assert state(out) == before
    assert not convert(source, out, A100, force=True).already_done
    assert state(out) != before


def differing(source: Path, out: Path, where: Deployment, **options: object) -> list[str]:
    """The differences that are named where the finished output is another job's."""
    with pytest.raises(MoeqError, match="already holds a conversion, which is not what this would give") as caught:
        convert(source, out, where, **options)  # type: ignore[arg-type]
    assert caught.value.code == "usage.destination-exists"
    return caught.value.message.partition("would give: ")[2].split(", ")


def test_what_is_different_is_named(source: Path, tmp_path: Path) -> None:
    """Another GPU is told by its name alone."""
    convert(source, tmp_path / "out", A100)
    other = parse_gpu("H100")
    gpu = "deployment.gpu.name 'A100' there"
    assert [text for text in differing(source, tmp_path / "out", Deployment(other)) if ".gpu." in text] == [gpu]
    more = replace(A100.gpu, memory_gib=A100.gpu.memory_gib + 1)
    assert [text for text in differing(source, tmp_path / "out", Deployment(more)) if ".gpu." in text] == [
        f"deployment.gpu.memory_gib {A100.gpu.memory_gib} there"
    ]


def test_a_copy_of_the_source_is_the_same_source(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", A100)
    shutil.copytree(source, tmp_path / "copy")
    assert convert(tmp_path / "copy", tmp_path / "out", A100).already_done


CHANGES: dict[str, Callable[[Path], None]] = {
    "weights are not what they were": lambda folder: change_byte(folder / "model.safetensors", -1),
    "generation_config.json is not what it was": lambda folder: change_byte(folder / "generation_config.json", 5),
    "other files beside the weights": lambda folder: (folder / "NOTES.md").write_text("new") and None,
}


@pytest.mark.cover(every=3)
@pytest.mark.parametrize("text", CHANGES)
def test_a_changed_source_is_another_job(source: Path, tmp_path: Path, text: str) -> None:
    (source / "generation_config.json").write_text('{"top_p": 1}')
    convert(source, tmp_path / "out", A100)
    CHANGES[text](source)
    with pytest.raises(MoeqError, match=text) as caught:
        convert(source, tmp_path / "out", A100)
    assert caught.value.code == "usage.destination-exists"


@pytest.mark.cover(every=3)
@pytest.mark.parametrize("options", [{"no_code": True}, {"skip_unfit": True}, {"force_layout": True}])
def test_other_options_are_another_job(source: Path, tmp_path: Path, options: dict[str, object]) -> None:
    convert(source, tmp_path / "out", A100)
    with pytest.raises(MoeqError, match=next(iter(options))) as caught:
        convert(source, tmp_path / "out", A100, **options)  # type: ignore[arg-type]
    assert caught.value.code == "usage.destination-exists"


def test_a_damaged_result_is_not_done(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(source, out, A100)
    weights = max(out.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(MoeqError, match=f"{weights.name} is not as moeq.json records it"):
        convert(source, out, A100)


def test_a_manifest_of_an_older_version_is_not_compared(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", A100)
    path = tmp_path / "out" / MANIFEST_NAME
    document = json.loads(path.read_text())
    del document["job"]
    path.write_text(json.dumps(document))
    with pytest.raises(MoeqError, match="did not record what it was asked for"):
        convert(source, tmp_path / "out", A100)


def test_a_transcoding(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = transcode(source, out, "fp16", allow_lossy=True)
    before = state(out)
    again = transcode(source, out, "fp16", allow_lossy=True)
    assert again.already_done
    assert (again.losses, again.projections) == (first.losses, first.projections)
    assert state(out) == before
    change_byte(source / "model.safetensors", -1)
    with pytest.raises(MoeqError) as caught:
        transcode(source, out, "fp16", allow_lossy=True)
    assert caught.value.code == "usage.destination-exists"

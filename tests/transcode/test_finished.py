"""A transcoding that is finished already is recognised, and nothing else is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moeq.errors import MoeqError
from moeq.transcode.transcode import REPORT_NAME, transcode

NAME = "gptq-int4-g32-qwen3moe"


@pytest.fixture(scope="module")
def source(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(checkpoints / NAME, tmp_path_factory.mktemp("source") / "source"))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


@pytest.fixture(scope="module")
def done(source: Path) -> Path:
    out = source.with_name("out")
    assert not transcode(source, out, "compressed-tensors").already_done
    return out


@pytest.fixture
def out(done: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(done, tmp_path / "out"))


def test_the_same_job_is_done(out: Path, source: Path) -> None:
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.iterdir()}
    found = transcode(source, out, "compressed-tensors")
    assert (found.already_done, found.written, found.exact) == (True, True, True)
    assert found.projections == transcode(source, out, "compressed-tensors", force=True).projections > 24
    assert before.keys() == {path.name for path in out.iterdir()}


def report_of(**changes: object) -> Callable[[Path], object]:
    def change(out: Path) -> None:
        document = json.loads((out / REPORT_NAME).read_text())
        (out / REPORT_NAME).write_text(json.dumps({**document, **changes}))

    return change


def weights_grow(out: Path) -> None:
    with next(out.glob("*.safetensors")).open("ab") as file:
        file.write(b"\0")


def becomes_a_link(out: Path) -> None:
    out.rename(out.with_name("elsewhere"))
    out.symlink_to(out.with_name("elsewhere"))


CHANGES: dict[str, Callable[[Path], object]] = {
    "no report": lambda out: (out / REPORT_NAME).unlink(),
    "another plan": report_of(plan="0" * 64),
    "another source": report_of(sample="0" * 64),
    "other files": report_of(files=["config.json"]),
    "weights gone": lambda out: next(out.glob("*.safetensors")).unlink(),
    "weights of another size": weights_grow,
    "side file gone": lambda out: (out / "tokenizer.json").unlink(),
    "side file changed": lambda out: (out / "tokenizer.json").write_text('{"model": []}'),
    "a link": becomes_a_link,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_that_job_is_not_replaced(change: str, out: Path, source: Path) -> None:
    CHANGES[change](out)
    with pytest.raises(MoeqError) as caught:
        transcode(source, out, "compressed-tensors")
    assert caught.value.code.startswith("usage.destination")


def test_another_job_is_not_done(out: Path, source: Path, checkpoints: Path) -> None:
    for other, target in ((source, "gptq"), (checkpoints / "gptq-int4-g128-mixtral", "compressed-tensors")):
        with pytest.raises(MoeqError) as caught:
            transcode(other, out, target)
        assert caught.value.code == "usage.destination-exists"


def test_force_does_not_call_a_folder_with_other_files_done(out: Path, source: Path) -> None:
    (out / "notes.txt").write_text("mine")
    for force in (True, False):
        with pytest.raises(MoeqError) as caught:
            transcode(source, out, "gptq" if force else "fp16", force=force, allow_lossy=True)
        assert caught.value.code == ("usage.foreign-files" if force else "usage.destination-exists")
    with pytest.raises(MoeqError) as caught:
        transcode(source, out, "compressed-tensors", force=True)
    assert caught.value.code == "usage.foreign-files"
    assert (out / "notes.txt").read_text() == "mine"

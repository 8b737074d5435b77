"""The engine's files for `make engine-tests`: what is unpacked, and what an index that does not answer leads to."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

import engine_site

FILES = {
    "pkg/__init__.py": b"x = 1\n",
    "pkg/configs/one.json": b"{}",
    "pkg/_C.abi3.so": b"\x7fELF",
    "pkg-1.0.dist-info/METADATA": b"Version: 1.0\n",
    "../outside.py": b"y = 1\n",
    "/outside.py": b"y = 1\n",
}


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_of_a_wheel_python_json_and_metadata_are_kept(tmp_path: Path) -> None:
    site = tmp_path / "a" / "site"
    site.mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / "pkg-1.0-py3-none-any.whl", "w") as wheel:
        for name, data in FILES.items():
            wheel.writestr(name, data)
    engine_site.unpack(tmp_path / "pkg-1.0-py3-none-any.whl", site, "pkg")
    assert names(site.parent) == {f"site/{name}" for name in list(FILES)[:2]} | {"site/pkg-1.0.dist-info/METADATA"}


def test_of_a_source_archive_the_package_is_kept(tmp_path: Path) -> None:
    site = tmp_path / "a" / "site"
    site.mkdir(parents=True)
    with tarfile.open(tmp_path / "pkg-1.0.tar.gz", "w:gz") as archive:
        for name, data in {f"pkg-1.0/{name}": data for name, data in FILES.items()}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    engine_site.unpack(tmp_path / "pkg-1.0.tar.gz", site, "pkg")
    assert names(site.parent) == {"site/pkg/__init__.py", "site/pkg/configs/one.json"}


def test_every_package_is_pinned() -> None:
    wanted = engine_site.requirements(engine_site.WANTED.read_text(encoding="utf-8"))
    assert set(wanted) == {"engine", "sglang", "libraries"}
    every = [one for section in wanted.values() for one in section]
    assert all(one.count("==") == 1 for one in every)
    assert {one.partition("==")[0] for one in every} > {*engine_site.UNPACKED, "compressed-tensors"}


@pytest.mark.slow
def test_an_index_that_does_not_answer_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"INDEX_URL": "http://127.0.0.1:9/", "RETRIES": "0", "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    for _ in range(2):  # a second run does not take the empty folder for a whole one
        assert engine_site.main(tmp_path / "engines") == 1
        assert "the package index does not answer, so no test ran" in capsys.readouterr().err

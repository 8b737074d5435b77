"""What a user gets: the built wheel holds `moeq` and `moeq_kernels` and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_top_level_names(wheel: zipfile.ZipFile) -> None:
    # A top-level package called `kernels` would overwrite Hugging Face's package of that name.
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"moeq", "moeq_kernels"}


def test_every_source_file_and_data_file_is_there(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for package in (ROOT / "moeq", ROOT / "kernels" / "moeq_kernels"):
        for path in package.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert str(path.relative_to(package.parent)) in names


#: Folder of the wheel -> the kinds of files in it. Whatever serves only those who work on moeq stays out.
HOLDS = {
    **{
        f"moeq/{room}": {"py"}
        for room in ("api", "check", "checkpoint", "deploy", "engines", "gguf", "layouts", "load", "model")
    },
    **{f"moeq/{room}": {"py"} for room in ("pipeline", "prove", "reference", "schemes", "transcode", "update")},
    "moeq": {"py", "typed"},
    "moeq/cli": {"py", "toml"},
    "moeq/oracle": {"py", "json", "toml"},
    "moeq/report": {"py", "json", "html", "css", "md"},
    "moeq_kernels": {"py", "typed"},
    "moeq_kernels/device": {"py"},
    "moeq_kernels/hopper": {"py", "json"},
    "moeq_kernels/mma": {"py"},
}

#: Upper bound of all files of the two packages together, unpacked.
MAX_BYTES = 5_600_000


def test_nothing_else_is_in_it(wheel: zipfile.ZipFile) -> None:
    found: dict[str, set[str]] = {}
    files = [info for info in wheel.infolist() if ".dist-info/" not in info.filename]
    for info in files:
        folders, _, name = info.filename.rpartition("/")
        found.setdefault("/".join(folders.split("/")[:2]), set()).add(name.rpartition(".")[2])
    assert found == HOLDS
    assert sum(info.file_size for info in files) < MAX_BYTES


def test_licence_and_entry_point(wheel: zipfile.ZipFile) -> None:
    (info,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    assert "moeq = moeq.__main__:main" in wheel.read(f"{info}/entry_points.txt").decode()

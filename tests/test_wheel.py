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


def test_licence_and_entry_point(wheel: zipfile.ZipFile) -> None:
    (info,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    assert "moeq = moeq.__main__:main" in wheel.read(f"{info}/entry_points.txt").decode()

"""`make` does not bring gigabytes of GPU libraries where it can be helped."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import install_torch

ROOT = Path(__file__).parents[1]

#: Requirements of torch 2.13.0 for Linux as PyPI and torch's CPU index have it.
PYPI = (
    "filelock",
    'cuda-toolkit[cublas,cudart]==13.0.3; platform_system == "Linux"',
    'nvidia-cudnn-cu13==9.20.0.48; platform_system == "Linux"',
)
CPU = ("filelock", "typing-extensions>=4.10.0", "setuptools", "sympy>=1.13.3", "networkx>=2.5.1", "jinja2", "fsspec")


def test_builds_with_gpu_libraries_are_told_by_their_requirements() -> None:
    assert install_torch.brings_gpu_packages(PYPI)
    assert not install_torch.brings_gpu_packages(CPU)


def test_torch_is_pinned() -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert install_torch.pinned(constraints).startswith("torch==2.")


def test_a_server_that_does_not_answer_is_waited_for_for_seconds() -> None:
    started = time.monotonic()
    assert not install_torch.answers("http://127.0.0.1:9/whl/cpu/torch/")
    assert not install_torch.answers("not a url")
    assert time.monotonic() - started < 2 * install_torch.SECONDS


def test_the_makefile_installs_it_so() -> None:
    assert "tools/install_torch.py constraints.txt" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_it_needs_nothing_but_the_standard_library() -> None:
    command = [sys.executable, "-S", "-c", "import runpy; runpy.run_path('tools/install_torch.py', run_name='module')"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0

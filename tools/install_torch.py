"""Install the pinned torch without GPU libraries where that is possible, and say which build it is.

    python tools/install_torch.py constraints.txt

PyPI's build for Linux brings 2.5 GiB of GPU libraries, which the tests do not use. In this order: what pip finds by
itself if that is a build for CPUs; the build on torch's own index if that answers within seconds; else what pip finds.
On a machine with an NVIDIA GPU pip's own choice is right.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SECONDS = 5

_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def pinned(constraints: str) -> str:
    """Return the requirement of torch in a constraints file, such as `torch==2.13.0`."""
    return next(line.strip() for line in constraints.splitlines() if line.startswith("torch=="))


def brings_gpu_packages(requires: Iterable[str]) -> bool:
    """Say whether a build's requirements include GPU libraries."""
    return any(name.startswith(("nvidia-", "cuda-")) for name in requires)


def found_by_pip(requirement: str) -> dict[str, Any] | None:
    """Return what pip would install, without installing it; None where pip finds nothing."""
    options = ("install", "--dry-run", "--quiet", "--no-deps", "--ignore-installed", "--report", "-", requirement)
    result = subprocess.run([*_PIP, *options], capture_output=True, text=True, check=False)
    if result.returncode:
        return None
    row: dict[str, Any] = json.loads(result.stdout)["install"][0]
    return row


def answers(url: str) -> bool:
    """Say whether a server answers within seconds."""
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def main(constraints: Path) -> int:
    """Install it."""
    requirement = pinned(constraints.read_text(encoding="utf-8"))
    found = found_by_pip(requirement)
    heavy = found is None or brings_gpu_packages(found["metadata"].get("requires_dist", ()))
    index: tuple[str, ...] = ()
    if not heavy:
        said = f"pip finds a build for CPUs, {found['metadata']['version'] if found else ''}"
    elif shutil.which("nvidia-smi"):
        said = "the build with GPU libraries, since this machine has an NVIDIA GPU"
    elif answers(f"{CPU_INDEX}/torch/"):
        said, index = f"the build for CPUs from {CPU_INDEX}", ("--index-url", CPU_INDEX, "--no-deps")
    else:
        said = f"what pip finds, with GPU libraries of 2.5 GiB: {CPU_INDEX} does not answer"
    sys.stdout.write(f"{requirement}: {said}\n")
    sys.stdout.flush()
    options = ("install", "--quiet", "--constraint", str(constraints), *index, requirement)
    return subprocess.run([*_PIP, *options], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

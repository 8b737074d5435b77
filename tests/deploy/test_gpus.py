"""The GPU table, names as people type them, and local detection."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moeq.deploy import detect
from moeq.deploy.deployment import Gpu
from moeq.deploy.gpus import find_by_device_name, known_gpus, parse_gpu
from moeq.errors import MoeqError


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("V100", (7, 0)),
        ("T4", (7, 5)),
        ("A100", (8, 0)),
        ("A30", (8, 0)),
        ("A10", (8, 6)),
        ("A40", (8, 6)),
        ("RTX 3090", (8, 6)),
        ("A6000", (8, 6)),
        ("Orin", (8, 7)),
        ("L4", (8, 9)),
        ("L40S", (8, 9)),
        ("RTX 4090", (8, 9)),
        ("RTX 6000 Ada", (8, 9)),
        ("H100", (9, 0)),
        ("H200", (9, 0)),
        ("H20", (9, 0)),
        ("GH200", (9, 0)),
        ("B200", (10, 0)),
        ("GB200", (10, 0)),
        ("B300", (10, 3)),
        ("GB300", (10, 3)),
        ("Jetson Thor", (11, 0)),
        ("RTX 5090", (12, 0)),
        ("RTX PRO 6000", (12, 0)),
        ("GB10", (12, 1)),
    ],
)
def test_cuda_capability(name: str, capability: tuple[int, int]) -> None:
    gpu = parse_gpu(name)
    assert (gpu.platform, gpu.capability) == ("cuda", capability)
    assert gpu.arch == f"sm{capability[0]}{capability[1]}"


@pytest.mark.parametrize(
    ("name", "arch"),
    [("MI250X", "gfx90a"), ("MI300X", "gfx942"), ("MI325X", "gfx942"), ("MI355X", "gfx950"), ("RX 7900", "gfx1100")],
)
def test_rocm_has_no_capability(name: str, arch: str) -> None:
    gpu = parse_gpu(name)
    assert (gpu.platform, gpu.arch, gpu.capability) == ("rocm", arch, None)


@pytest.mark.parametrize("spelling", ["rtx5090", "RTX-5090", "NVIDIA GeForce RTX 5090", "geforce_rtx_5090"])
def test_spelling_does_not_matter(spelling: str) -> None:
    assert parse_gpu(spelling).name == "RTX 5090"


@pytest.mark.parametrize(
    ("name", "platform", "arch"),
    [
        ("sm90", "cuda", "sm90"),
        ("sm_120", "cuda", "sm120"),
        ("sm90a", "cuda", "sm90"),
        ("gfx942", "rocm", "gfx942"),
        ("gfx90a", "rocm", "gfx90a"),
        ("x86-amx", "cpu", "x86-amx"),
        ("cpu", "cpu", "x86-amx"),
        ("arm64", "cpu", "arm64"),
        ("XPU", "xpu", "xpu"),
    ],
)
def test_architectures(name: str, platform: str, arch: str) -> None:
    gpu = parse_gpu(name)
    assert (gpu.platform, gpu.arch) == (platform, arch)


@pytest.mark.parametrize(("name", "near"), [("h1000", "H100"), ("mi300", "MI300X"), ("rtx 5091", "RTX 5090")])
def test_unknown_names_are_refused_with_near_matches(name: str, near: str) -> None:
    with pytest.raises(MoeqError) as raised:
        parse_gpu(name)
    assert raised.value.code == "usage.unknown-gpu"
    assert near in str(raised.value.hint)


def test_names_are_unique_and_complete() -> None:
    assert len(known_gpus()) >= 50
    for name, gpu in known_gpus().items():
        assert parse_gpu(name) == gpu
        assert (gpu.capability is not None) == (gpu.platform == "cuda")


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA RTX PRO 6000 Blackwell", "RTX PRO 6000"),
    ],
)
def test_driver_names(reported: str, name: str) -> None:
    found = find_by_device_name(reported)
    assert found is not None
    assert found.name == name


def test_no_driver_means_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(detect, "_KFD", tmp_path / "absent")
    assert detect.detect_gpu() is None


def test_amd_driver_topology(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for node, version in (("0", 0), ("1", 90402)):
        (tmp_path / node).mkdir()
        (tmp_path / node / "properties").write_text(f"cpu_cores_count 0\ngfx_target_version {version}\n")
    monkeypatch.setattr(detect, "_KFD", tmp_path)
    monkeypatch.setattr(detect, "_PROBES", (detect._rocm,))
    assert detect.detect_gpu() == Gpu("gfx942", "rocm", "gfx942")


def test_cpu_kind_is_known() -> None:
    assert detect.detect_cpu().platform == "cpu"


DRIVER = """
#include <string.h>
int cuInit(unsigned flags) {{ return flags; }}
int cuDeviceGet(int *device, int number) {{ *device = 40 + number; return 0; }}
int cuDeviceGetAttribute(int *value, int attribute, int device) {{
    if (device != 40) return 101;
    if (attribute == 75) {{ *value = {major}; return 0; }}
    if (attribute == 76) {{ *value = {minor}; return 0; }}
    return 1;
}}
int cuDeviceGetName(char *name, int length, int device) {{
    if (device != 40) return 101;
    strncpy(name, "{name}", length);
    return {status};
}}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize(
    ("name", "major", "minor", "status", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 9, 0, 0, "H100 cuda sm90"),
        ("NVIDIA GeForce RTX 4090", 8, 9, 0, "RTX 4090 cuda sm89"),
        ("NVIDIA H100 80GB HBM3", 8, 0, 0, "sm80 cuda sm80"),  # a name that another generation has as well
        ("A GPU that is not in the table", 12, 1, 0, "sm121 cuda sm121"),
        ("NVIDIA H100 80GB HBM3", 9, 0, 3, "None"),
    ],
)
def test_nvidia_driver(name: str, major: int, minor: int, status: int, expected: str, tmp_path: Path) -> None:
    """Ask a driver library that answers as the CUDA driver API 13.0 says, in a process that finds it first."""
    source = tmp_path / "driver.c"
    source.write_text(DRIVER.format(name=name, major=major, minor=minor, status=status))
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(tmp_path / "libcuda.so.1")], check=True)
    program = (
        "from moeq.deploy.detect import _cuda; gpu = _cuda(); "
        "print(gpu if gpu is None else f'{gpu.name} {gpu.platform} {gpu.arch}')"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == expected


@pytest.mark.gpu
def test_the_driver_and_torch_name_one_gpu() -> None:
    torch = pytest.importorskip("torch")
    if torch.version.hip or not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    found = detect.detect_gpu()
    assert found is not None
    assert found.capability == torch.cuda.get_device_capability(0)

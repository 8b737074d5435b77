"""The GPU table, names as people type them, and local detection."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moeq.deploy import detect
from moeq.deploy.deployment import Gpu
from moeq.deploy.gpus import find_by_device_name, known_gpus, parse_gpu
from moeq.errors import MoeqError

#: Products by architecture, with the GiB of memory of the makers' data sheets.
PRODUCTS = """
sm70: V100 16
sm75: T4 16, RTX 2070 8, RTX 2080 8, RTX 2080 Ti 11, Quadro RTX 6000 24, Quadro RTX 8000 48
sm80: A100 80, A100-40GB 40, A800 80, A30 24
sm86: A2 16, A10 24, A10G 24, A16 16, A40 48, A6000 48, RTX A4000 16, RTX A5000 24, RTX A6000 48, RTX 3060 12,
 RTX 3070 8, RTX 3080 10, RTX 3090 24
sm87: Orin 64
sm89: L4 24, L20 48, L40 48, L40S 48, RTX 4060 8, RTX 4070 12, RTX 4080 16, RTX 4090 24, RTX 5000 Ada 32,
 RTX 6000 Ada 48
sm90: H100 80, H100 NVL 94, H200 141, H20 96, H800 80, GH200 96
sm100: B200 180, GB200 186
sm103: B300 288, GB300 288
sm110: Thor 128
sm120: RTX 5060 8, RTX 5070 12, RTX 5080 16, RTX 5090 32, RTX PRO 4000 24, RTX PRO 4500 32, RTX PRO 5000 48,
 RTX PRO 6000 96
sm121: GB10 128, DGX Spark 128
gfx90a: MI210 64, MI250 128, MI250X 128, MI200 64
gfx942: MI300A 128, MI300X 192, MI325X 256
gfx950: MI350 288, MI350X 288, MI355X 288
gfx1100: RX 7900 XTX 24, RX 7900 20, W7900 48
gfx1200: RX 9060 XT 16
gfx1201: RX 9070 16, RX 9070 XT 16, R9700 32
xpu: Arc B580 12, Arc Pro B60 24, Max 1550 128
"""


def products() -> dict[str, Gpu]:
    found = {}
    for line in PRODUCTS.replace(",\n", ",").strip().splitlines():
        arch, _, rest = line.partition(": ")
        capability = (int(arch[2:-1]), int(arch[-1])) if arch.startswith("sm") else None
        platform = "cuda" if capability else "rocm" if arch.startswith("gfx") else "xpu"
        for one in rest.split(", "):
            name, _, memory = one.strip().rpartition(" ")
            found[name] = Gpu(name, platform, arch, capability, int(memory))
    return found


def test_products_architectures_and_memory() -> None:
    assert {name: gpu for name, gpu in known_gpus().items() if gpu.memory_gib is not None} == products()
    for name, gpu in products().items():
        assert parse_gpu(name) == gpu


def test_architectures_without_a_product() -> None:
    """Every capability that NVIDIA and every target that LLVM has for AMD is a name, and no other one."""

    def known(name: str) -> bool:
        try:
            return parse_gpu(name).arch == name
        except MoeqError:
            return False

    nvidia = {f"sm{major}{minor}" for major in range(1, 14) for minor in range(10) if known(f"sm{major}{minor}")}
    extra = {"sm50", "sm52", "sm53", "sm60", "sm61", "sm62", "sm72", "sm88", "sm101"}
    assert nvidia == {gpu.arch for gpu in products().values() if gpu.platform == "cuda"} | extra
    assert all(known(f"gfx{name}") for name in ("900", "906", "908", "90a", "1030", "1036", "1103", "1151", "1250"))
    assert not any(known(f"gfx{name}") for name in ("90b", "999", "1300"))
    assert parse_gpu("sm88").capability == (8, 8)
    assert parse_gpu("sm121").capability == (12, 1)


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


def test_a_name_like_no_other_gets_the_first_names_of_the_table() -> None:
    with pytest.raises(MoeqError) as raised:
        parse_gpu("?")
    first = "V100, T4, RTX 2070, RTX 2080, RTX 2080 Ti, Quadro RTX 6000, Quadro RTX 8000, A100, ...;"
    assert str(raised.value.hint).startswith(f"nearest known: {first}")


def test_names_are_unique_and_complete() -> None:
    assert len(known_gpus()) >= 50
    for name, gpu in known_gpus().items():
        assert parse_gpu(name) == gpu
        assert (gpu.capability is not None) == (gpu.platform == "cuda")


@pytest.mark.parametrize(
    ("reported", "name", "memory"),
    [
        ("NVIDIA H100 80GB HBM3", "H100", 80),
        ("NVIDIA A100-SXM4-40GB", "A100", 40),
        ("Tesla V100-SXM2-32GB", "V100", 32),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX 2080 Ti", 11),
        ("NVIDIA GH200 480GB", "GH200", 96),
        ("NVIDIA GH200 400GB", "GH200", 96),
        ("NVIDIA H200 399GB", "H200", 399),
        ("H200 engineering sample", "H200", 141),
        ("NVIDIA RTX PRO 6000 Blackwell", "RTX PRO 6000", 96),
    ],
)
def test_driver_names(reported: str, name: str, memory: int) -> None:
    found = find_by_device_name(reported)
    assert found == replace(parse_gpu(name), memory_gib=memory)
    assert parse_gpu(reported) == found


def test_a_driver_name_that_is_in_no_table() -> None:
    assert find_by_device_name("Some H100 80GB") is None


def test_no_driver_means_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(detect, "_KFD", tmp_path / "absent")
    assert detect.detect_gpu() is None
    assert detect.cuda_driver() is None


@pytest.mark.parametrize(
    ("versions", "arch"),
    [
        ((0, 90402), "gfx942"),
        ((90010, 90402), "gfx90a"),
        ((110000,), "gfx1100"),
        ((110501,), "gfx1151"),
        ((0,), None),
        ((), None),
    ],
)
def test_amd_driver_topology(versions, arch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for node, version in enumerate(versions):
        (tmp_path / str(node)).mkdir()
        text = f"cpu_cores_count 0\ngfx_target_version {version}\nempty\nthree words here\n"
        (tmp_path / str(node) / "properties").write_text(text)
    (tmp_path / "00" / "properties").mkdir(parents=True)  # a node that cannot be read comes first
    monkeypatch.setattr(detect, "_KFD", tmp_path)
    monkeypatch.setattr(detect, "_PROBES", (detect._rocm,))
    assert detect.detect_gpu() == (arch and Gpu(arch, "rocm", arch))


@pytest.mark.parametrize("available", [True, False])
def test_an_intel_gpu_is_asked_of_torch(available, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(xpu=SimpleNamespace(is_available=lambda: available))
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert detect._xpu() == (parse_gpu("XPU") if available else None)
    monkeypatch.delitem(sys.modules, "torch")
    assert detect._xpu() is None


@pytest.mark.parametrize(
    ("machine", "info", "arch"),
    [
        ("aarch64", "", "arm64"),
        ("ARM64", "amx_tile", "arm64"),
        ("ppc64le", "", "ppc64le"),
        ("x86_64", "GenuineIntel avx512f amx_tile", "x86-amx"),
        ("x86_64", "AuthenticAMD avx512f", "x86-zen"),
        ("x86_64", "AuthenticAMD avx2", "x86"),
        ("x86_64", "GenuineIntel avx512f", "x86"),
        ("x86_64", None, "x86"),
    ],
)
def test_the_kind_of_cpu(machine, info, arch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if info is not None:
        (tmp_path / "cpuinfo").write_text(info)
    monkeypatch.setattr(detect, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("platform.machine", lambda: machine)
    found = detect.detect_cpu()
    assert (found.platform, found.arch) == ("cpu", arch)


DRIVER = """
#include <string.h>
int cuInit(unsigned flags) {{ return flags; }}
int cuDriverGetVersion(int *version) {{ *version = 12090; return {status}; }}
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


@pytest.mark.cover(every=2)
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
        "from moeq.deploy.detect import _cuda, cuda_driver; gpu = _cuda(); "
        "print(gpu if gpu is None else f'{gpu.name} {gpu.platform} {gpu.arch}'); print(cuda_driver())"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == [expected, "None" if status else "12.9"]


MEMINFO = "MemTotal:       65970188 kB\nMemFree:         1000000 kB\nMemAvailable:    8388608 kB\nHugePages_Total:  0\n"


@pytest.mark.parametrize(("text", "words"), [(MEMINFO, "62.9 GiB of memory, 8.0 GiB free"), (None, "memory unknown")])
def test_the_words_about_this_machine(text, words, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "meminfo").write_text(text)
    monkeypatch.setattr(detect, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(detect, "_PROBES", (lambda: None, lambda: parse_gpu("RTX 4090"), lambda: parse_gpu("H100")))
    monkeypatch.setattr(detect, "cuda_driver", lambda: "12.9")
    monkeypatch.setattr(detect, "detect_cpu", lambda: parse_gpu("x86-zen"))
    monkeypatch.setattr("os.cpu_count", lambda: 7)
    monkeypatch.setattr(detect, "PACKAGES", ("pytest", "no-such-package"))
    found = detect.environment()
    assert found["packages"] == f"pytest {pytest.__version__}, no-such-package absent"
    assert found["GPU"] == "RTX 4090 (sm89), CUDA driver 12.9"
    assert found["CPU"] == f"x86-zen, 7 cores, {words}"
    assert found["moeq"].partition(", ")[2] == f"Python {platform.python_version()}, {platform.platform()}"
    monkeypatch.setattr(detect, "_PROBES", ())
    assert detect.environment()["GPU"] == "none found"
    monkeypatch.setattr(detect, "_PROBES", (lambda: parse_gpu("gfx942"),))
    monkeypatch.setattr(detect, "cuda_driver", lambda: None)
    assert detect.environment()["GPU"] == "gfx942 (gfx942), CUDA driver unknown"


@pytest.mark.gpu
def test_the_driver_and_torch_name_one_gpu() -> None:
    torch = pytest.importorskip("torch")
    if torch.version.hip or not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    found = detect.detect_gpu()
    assert found is not None
    assert found.capability == torch.cuda.get_device_capability(0)

"""Detect the device of this machine by asking the drivers, and describe the machine for reports. Imports no torch."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from moeq.deploy.deployment import Gpu
from moeq.deploy.gpus import find_by_device_name, parse_gpu

#: Numbers of the attributes of `cuDeviceGetAttribute` that hold the compute capability.
_CUDA_MAJOR, _CUDA_MINOR = 75, 76
_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")
_KFD = Path("/sys/class/kfd/kfd/topology/nodes")


def detect_gpu() -> Gpu | None:
    """Return the first GPU that the CUDA driver, the AMD kernel driver or a loaded torch reports, or None.

    A CPU is never returned: the user decides whether a model is meant to run on the CPU.
    """
    for probe in _PROBES:
        gpu = probe()
        if gpu is not None:
            return gpu
    return None


def detect_cpu() -> Gpu:
    """Return the kind of this machine's processor (`x86-amx`, `x86`, `arm64`, `ppc64le`, `x86-zen`)."""
    machine = platform.machine().lower()
    if machine in ("aarch64", "arm64"):
        return parse_gpu("arm64")
    if machine.startswith("ppc64"):
        return parse_gpu("ppc64le")
    try:
        info = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return parse_gpu("x86")
    if "amx_tile" in info:
        return parse_gpu("x86-amx")
    return parse_gpu("x86-zen") if "AuthenticAMD" in info and "avx512" in info else parse_gpu("x86")


def _cuda() -> Gpu | None:
    """Return the GPU that libcuda reports, or None. The driver installs libcuda: no toolkit and no torch is needed."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(128)
    calls: tuple[Callable[[], int], ...] = (
        lambda: driver.cuInit(0),
        lambda: driver.cuDeviceGet(ctypes.byref(device), 0),
        lambda: driver.cuDeviceGetAttribute(ctypes.byref(major), _CUDA_MAJOR, device),
        lambda: driver.cuDeviceGetAttribute(ctypes.byref(minor), _CUDA_MINOR, device),
        lambda: driver.cuDeviceGetName(name, len(name), device),
    )
    if any(call() != 0 for call in calls):
        return None
    capability = (major.value, minor.value)
    named = find_by_device_name(name.value.decode(errors="replace"))
    if named is not None and named.capability == capability:
        return named
    return parse_gpu(f"sm{capability[0]}{capability[1]}")


def _rocm() -> Gpu | None:
    """Return the GPU in the AMD kernel driver's topology, or None: `gfx_target_version 90402` is gfx942."""
    for node in sorted(_KFD.glob("*/properties")) if _KFD.is_dir() else ():
        try:
            fields = dict(line.split(maxsplit=1) for line in node.read_text().splitlines() if " " in line)
        except OSError:
            continue
        version = int(fields.get("gfx_target_version", "0"))
        if version:
            major, minor, step = version // 10000, version // 100 % 100, version % 100
            return parse_gpu(f"gfx{major}{minor:x}{step:x}")
    return None


def _xpu() -> Gpu | None:
    """Return the Intel GPU that torch reports, if torch is loaded already; importing torch would take seconds."""
    torch = sys.modules.get("torch")
    xpu = getattr(torch, "xpu", None)
    return parse_gpu("XPU") if xpu is not None and xpu.is_available() else None


_PROBES: tuple[Callable[[], Gpu | None], ...] = (_cuda, _rocm, _xpu)


#: Packages that matter to a conversion or to the loaders of its output.
PACKAGES = ("torch", "triton", "numba", "vllm", "sglang", "transformers", "safetensors", "huggingface_hub")


def environment() -> dict[str, str]:
    """Describe moeq, Python, packages, GPU and driver, processor and memory, each under its name."""
    gpu, cores = detect_gpu(), os.cpu_count()
    return {
        "moeq": f"{installed('moeq') or 'from a checkout'}, Python {platform.python_version()}, {platform.platform()}",
        "packages": ", ".join(f"{name} {installed(name) or 'absent'}" for name in PACKAGES),
        "GPU": "none found" if gpu is None else f"{gpu.name} ({gpu.arch}), CUDA driver {cuda_driver() or 'unknown'}",
        "CPU": f"{detect_cpu().arch}, {cores} cores, {memory()}",
    }


def installed(package: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cuda_driver() -> str | None:
    """Return the newest CUDA version that the driver serves, as `13.0`; None without a driver."""
    found = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    if driver.cuDriverGetVersion(ctypes.byref(found)) != 0:
        return None
    return f"{found.value // 1000}.{found.value % 1000 // 10}"


def memory() -> str:
    """Describe the memory of this machine in words."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return "memory unknown"
    kibibytes = {name: int(rest.split()[0]) for name, _, rest in (text.partition(":") for text in lines)}
    return f"{kibibytes['MemTotal'] / 2**20:.1f} GiB of memory, {kibibytes['MemAvailable'] / 2**20:.1f} GiB free"

"""Describe this machine for reports. Versions come from package metadata; nothing heavy is imported."""

from __future__ import annotations

import ctypes
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from moeq.deploy.detect import detect_cpu, detect_gpu

#: Packages that matter to a conversion or to what loads it.
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
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return "memory unknown"
    kibibytes = {name: int(rest.split()[0]) for name, _, rest in (text.partition(":") for text in lines)}
    return f"{kibibytes['MemTotal'] / 2**20:.1f} GiB of memory, {kibibytes['MemAvailable'] / 2**20:.1f} GiB free"

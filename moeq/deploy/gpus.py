"""GPU table: product names with their architectures, and the matching of user spellings."""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from functools import cache
from typing import Literal

from moeq.deploy.deployment import Gpu
from moeq.errors import MoeqError

#: Compute capability -> product names with memory in GiB; the smallest one if a product has several sizes.
_CUDA: dict[tuple[int, int], dict[str, int | None]] = {
    (7, 0): {"V100": 16},
    (7, 5): {"T4": 16, "RTX 2070": 8, "RTX 2080": 8, "RTX 2080 Ti": 11, "Quadro RTX 6000": 24, "Quadro RTX 8000": 48},
    (8, 0): {"A100": 80, "A100-40GB": 40, "A800": 80, "A30": 24},
    (8, 6): {
        "A2": 16,
        "A10": 24,
        "A10G": 24,
        "A16": 16,
        "A40": 48,
        "A6000": 48,
        "RTX A4000": 16,
        "RTX A5000": 24,
        "RTX A6000": 48,
        "RTX 3060": 12,
        "RTX 3070": 8,
        "RTX 3080": 10,
        "RTX 3090": 24,
    },
    (8, 7): {"Orin": 64},
    (8, 9): {
        "L4": 24,
        "L20": 48,
        "L40": 48,
        "L40S": 48,
        "RTX 4060": 8,
        "RTX 4070": 12,
        "RTX 4080": 16,
        "RTX 4090": 24,
        "RTX 5000 Ada": 32,
        "RTX 6000 Ada": 48,
    },
    (9, 0): {"H100": 80, "H100 NVL": 94, "H200": 141, "H20": 96, "H800": 80, "GH200": 96},
    (10, 0): {"B200": 180, "GB200": 186},
    (10, 3): {"B300": 288, "GB300": 288},
    (11, 0): {"Thor": 128},
    (12, 0): {
        "RTX 5060": 8,
        "RTX 5070": 12,
        "RTX 5080": 16,
        "RTX 5090": 32,
        "RTX PRO 4000": 24,
        "RTX PRO 4500": 32,
        "RTX PRO 5000": 48,
        "RTX PRO 6000": 96,
    },
    (12, 1): {"GB10": 128, "DGX Spark": 128},
}

#: ROCm architecture -> product names with memory in GiB.
_ROCM: dict[str, dict[str, int | None]] = {
    "gfx90a": {"MI210": 64, "MI250": 128, "MI250X": 128, "MI200": 64},
    "gfx942": {"MI300A": 128, "MI300X": 192, "MI325X": 256},
    "gfx950": {"MI350": 288, "MI350X": 288, "MI355X": 288},
    "gfx1100": {"RX 7900 XTX": 24, "RX 7900": 20, "W7900": 48},
    "gfx1200": {"RX 9060 XT": 16},
    "gfx1201": {"RX 9070": 16, "RX 9070 XT": 16, "R9700": 32},
    "gfx1250": {"gfx1250": None},
}

#: Product names of Intel GPUs with memory in GiB.
_XPU: dict[str, int | None] = {"XPU": None, "Arc B580": 12, "Arc Pro B60": 24, "Max 1550": 128}

#: Architectures without a product in the tables above. Source: NVIDIA's and AMD's lists (CUDA 13, LLVM's AMDGPU).
_OTHER_CUDA = ((5, 0), (5, 2), (5, 3), (6, 0), (6, 1), (6, 2), (7, 2), (8, 8), (10, 1))
_OTHER_ROCM = (
    *("gfx900", "gfx906", "gfx908", "gfx940", "gfx941", "gfx1010", "gfx1012", "gfx1030", "gfx1031", "gfx1032"),
    *("gfx1034", "gfx1035", "gfx1036", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153"),
)

#: CPU kind -> names for it. Kinds are instruction sets, because kernels depend on them.
_CPU: dict[str, tuple[str, ...]] = {
    "x86-amx": ("CPU", "CPU-AMX", "Sapphire Rapids", "Granite Rapids"),
    "x86": ("CPU-x86",),
    "x86-zen": ("CPU-Zen", "EPYC"),
    "arm64": ("CPU-ARM", "Graviton", "Grace"),
    "ppc64le": ("CPU-Power",),
}


@cache
def known_gpus() -> dict[str, Gpu]:
    """Return every named device by its product name."""
    table: dict[str, Gpu] = {}
    for capability, rows in _CUDA.items():
        arch = f"sm{capability[0]}{capability[1]}"
        table.update({name: Gpu(name, "cuda", arch, capability, memory) for name, memory in rows.items()})
    for arch, rows in _ROCM.items():
        table.update({name: Gpu(name, "rocm", arch, None, memory) for name, memory in rows.items()})
    table.update({name: Gpu(name, "xpu", "xpu", None, memory) for name, memory in _XPU.items()})
    for arch, names in _CPU.items():
        table.update({name: Gpu(name, "cpu", arch) for name in names})
    return table


def _key(name: str) -> str:
    """Normalise a spelling: drop case, spaces, dashes and the prefix of the maker."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(nvidia|geforce|jetson|amd|instinct|radeon|intel|tesla)+", "", plain)


@cache
def _by_key() -> dict[str, Gpu]:
    return {_key(name): gpu for name, gpu in known_gpus().items()}


def parse_gpu(name: str) -> Gpu:
    """Return the device of a name: a product, a name that a driver reports, `smXY`, `gfxNNN`, or a CPU kind.

    Raises:
        MoeqError: `usage.unknown-gpu`, naming the nearest known products.
    """
    key = _key(name)
    if key in _by_key():
        return _by_key()[key]
    if match := re.fullmatch(r"sm(\d+)(\d)a?", key):
        capability = (int(match[1]), int(match[2]))
        if capability in _CUDA or capability in _OTHER_CUDA:
            return Gpu(f"sm{match[1]}{match[2]}", "cuda", f"sm{match[1]}{match[2]}", capability)
    if key in _ROCM or key in _OTHER_ROCM:
        return Gpu(key, "rocm", key)
    reported = find_by_device_name(name)
    if reported is not None:
        return reported
    if key in {_key(arch) for arch in _CPU}:
        arch = next(arch for arch in _CPU if _key(arch) == key)
        return Gpu(arch, "cpu", arch)
    near = difflib.get_close_matches(key, _by_key(), n=4, cutoff=0.5)
    names = ", ".join(_by_key()[match].name for match in near) or ", ".join(list(known_gpus())[:8]) + ", ..."
    raise MoeqError(
        "usage.unknown-gpu",
        f"no GPU is known as '{name}'",
        f"nearest known: {names}; an architecture works too: sm90, gfx942, x86-amx; moeq gpus lists all names",
    )


def default_dtype(gpu: Gpu) -> Literal["bf16", "fp16"]:
    """Return the activation dtype that engines choose by default: bf16 on hardware that supports it, else fp16."""
    return "fp16" if gpu.capability is not None and gpu.capability < (8, 0) else "bf16"


def find_by_device_name(reported: str) -> Gpu | None:
    """Look up a name that a driver reports (`NVIDIA H100 80GB HBM3`, `Tesla V100-SXM2-16GB`); None if unknown.

    The longest known sequence of words from the left decides. Memory in the name replaces the memory of the table.
    """
    words = re.findall(r"[A-Za-z0-9]+", reported)
    for count in range(len(words), 0, -1):
        found = _by_key().get(_key("".join(words[:count])))
        if found is not None:
            stated = re.search(r"\b(\d+) ?GB\b", reported)
            # "GH200 480GB" states the memory of its CPU.
            return replace(found, memory_gib=int(stated[1])) if stated and int(stated[1]) < 400 else found
    return None

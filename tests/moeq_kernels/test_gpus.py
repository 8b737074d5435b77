"""What plans know of GPUs: data sheets, and what torch says of a device that is here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeq_kernels import gpu
from moeq_kernels.gpu import GPUS, H200

#: Streaming multiprocessors or compute units, KiB of shared memory, MiB of L2 cache, TB/s where plans ask for it.
SHEETS = {
    "H200": ((9, 0), 132, 227, 60, 4.8),
    "H100": ((9, 0), 132, 227, 50, 3.35),
    "H100-PCIe": ((9, 0), 114, 227, 50, 2.0),
    "H100-NVL": ((9, 0), 132, 227, 50, 3.9),
    "H20": ((9, 0), 78, 227, 60, 4.0),
    "GH200": ((9, 0), 132, 227, 60, 4.0),
    "A100": ((8, 0), 108, 163, 40, 0),
    "A10": ((8, 6), 72, 99, 6, 0),
    "A40": ((8, 6), 84, 99, 6, 0),
    "RTX-3090": ((8, 6), 82, 99, 6, 0),
    "L4": ((8, 9), 58, 99, 48, 0),
    "L40S": ((8, 9), 142, 99, 96, 0),
    "RTX-4090": ((8, 9), 128, 99, 72, 0),
    "B200": ((10, 0), 148, 227, 126, 0),
    "RTX-5090": ((12, 0), 170, 99, 96, 0),
    "MI300X": ((0, 0), 304, 64, 4, 0),
    "MI350X": ((0, 0), 256, 160, 4, 0),
}


def test_data_sheets() -> None:
    found = {
        name: (
            *(one.capability, one.multiprocessors, one.shared_bytes / 1024),
            *(one.l2_bytes / 2**20, one.memory_rate / 1e12),
        )
        for name, one in GPUS.items()
    }
    assert found == SHEETS
    for one in GPUS.values():
        is_amd = one.name.startswith("MI")
        assert (one.backend, one.warp) == (("hip", 64) if is_amd else ("cuda", 32))
        assert is_amd or one.arch == 10 * one.capability[0] + one.capability[1]
    assert (GPUS["MI300X"].arch, GPUS["MI350X"].arch) == ("gfx942", "gfx950")
    assert {name for name, one in GPUS.items() if one.slow_memory} == {"H100", "H100-PCIe", "H100-NVL", "GH200"}


@pytest.mark.parametrize("amd", [False, True])
def test_a_device_is_as_torch_says(amd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, Any] = {
        "name": "some GPU", "major": 9, "minor": 3, "multi_processor_count": 7, "L2_cache_size": 5, "warp_size": 64,
        "gcnArchName": "gfx942:sramecc+:xnack-", "memory_clock_rate": 1000, "memory_bus_width": 512,
    }  # fmt: skip
    asked = []

    def properties(index: int) -> Any:
        asked.append(index)
        return SimpleNamespace(**said)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.version, "hip", "6.4" if amd else None)
    gpu._read.cache_clear()
    try:
        found = gpu.gpu_of(torch.device("cuda"))
        assert gpu.gpu_of(torch.device("cuda", 3)) is found
        said["shared_memory_per_block_optin"] = 99
        del said["memory_clock_rate"]
        other = gpu.gpu_of(torch.device("cuda", 1))
    finally:
        gpu._read.cache_clear()
    assert asked == [3, 1]
    assert (found.capability, found.arch) == (((0, 0), "gfx942") if amd else ((9, 3), 93))
    assert (found.name, found.multiprocessors, found.l2_bytes, found.warp) == ("some GPU", 7, 5, 64)
    assert (found.shared_bytes, found.memory_rate) == (65536, 2 * 1e6 * 512 / 8)
    assert (other.shared_bytes, other.memory_rate, other.slow_memory) == (99, 0, False)
    assert gpu.gpu_of(torch.device("cpu")) is H200

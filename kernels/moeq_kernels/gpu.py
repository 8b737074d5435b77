"""Properties of GPUs that plans depend on. Importing this module needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import device as Device


#: Bytes a second for each multiprocessor below which memory counts as slow: an H100 has 25e9, an H200 36e9.
SLOW_MEMORY = 31e9


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU that plans depend on."""

    name: str  #: common name
    capability: tuple[int, int]  #: compute capability of an NVIDIA GPU; (0, 0) for others
    multiprocessors: int  #: number of SMs (NVIDIA) or compute units (AMD)
    shared_bytes: int  #: upper bound of shared memory per program
    l2_bytes: int  #: size of the L2 cache
    arch: int | str  #: target of Triton's compiler: 90, or `gfx942`
    warp: int = 32  #: threads per warp
    memory_rate: float = 0.0  #: bytes per second by the data sheet; 0 where unknown

    @property
    def slow_memory(self) -> bool:
        """Whether memory delivers fewer bytes per second and multiprocessor than SLOW_MEMORY, as on an H100."""
        return 0.0 < self.memory_rate < SLOW_MEMORY * self.multiprocessors

    @property
    def backend(self) -> str:
        """Name of Triton's backend."""
        return "cuda" if isinstance(self.arch, int) else "hip"


def _nvidia(name: str, arch: int, multiprocessors: int, shared: int, l2: int, memory_rate: float = 0.0) -> Gpu:
    capability = divmod(arch, 10)
    return Gpu(name, capability, multiprocessors, shared * 1024, l2 << 20, arch, memory_rate=memory_rate)


#: GPUs for which layers can be planned and compiled on another machine. Source: vendors' data sheets, and for shared
#: memory the table of compute capabilities in the CUDA programming guide. A present device is queried instead.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _nvidia("H200", 90, 132, 227, 60, 4.8e12),
        _nvidia("H100", 90, 132, 227, 50, 3.35e12),
        _nvidia("H100-PCIe", 90, 114, 227, 50, 2.0e12),
        _nvidia("H100-NVL", 90, 132, 227, 50, 3.9e12),
        _nvidia("H20", 90, 78, 227, 60, 4.0e12),
        _nvidia("GH200", 90, 132, 227, 60, 4.0e12),
        _nvidia("A100", 80, 108, 163, 40),
        _nvidia("A10", 86, 72, 99, 6),
        _nvidia("A40", 86, 84, 99, 6),
        _nvidia("RTX-3090", 86, 82, 99, 6),
        _nvidia("L4", 89, 58, 99, 48),
        _nvidia("L40S", 89, 142, 99, 96),
        _nvidia("RTX-4090", 89, 128, 99, 72),
        _nvidia("B200", 100, 148, 227, 126),
        _nvidia("RTX-5090", 120, 170, 99, 96),
        Gpu("MI300X", (0, 0), 304, 64 * 1024, 4 << 20, "gfx942", 64),
        Gpu("MI350X", (0, 0), 256, 160 * 1024, 4 << 20, "gfx950", 64),
    )
}
H200 = GPUS["H200"]


def gpu_of(device: Device) -> Gpu:
    """Query the properties of a device; a CPU, which only plans and interprets kernels, counts as an H200."""
    if device.type != "cuda":
        return H200
    import torch

    return _read(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _read(index: int) -> Gpu:
    import torch

    found = torch.cuda.get_device_properties(index)
    amd = torch.version.hip is not None
    # kHz and bits; 0 where torch does not know them.
    clock, width = (getattr(found, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return Gpu(
        name=found.name,
        capability=(0, 0) if amd else (found.major, found.minor),
        multiprocessors=found.multi_processor_count,
        shared_bytes=int(getattr(found, "shared_memory_per_block_optin", 64 * 1024)),
        l2_bytes=int(found.L2_cache_size),
        arch=found.gcnArchName.split(":")[0] if amd else 10 * found.major + found.minor,
        warp=found.warp_size,
        memory_rate=2e3 * clock * width / 8,  # two words per clock
    )

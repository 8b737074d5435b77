"""What a GPU gives at most: the rates with which all benchmarks count their floors."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache

import torch

#: The GPU whose rates count where there is none.
H200 = "NVIDIA H200"
#: Bytes a second that a kernel reads from memory (`measured_read`), by the name that torch has for the GPU.
READ = {H200: 4.4e12, "NVIDIA H100 80GB HBM3": 3.05e12}
#: Additions and multiplications a second of the tensor cores in bf16, measured on both; twice that in 8 bits.
BF16, BYTES = 790e12, 1580e12


@cache
def read_rate() -> float:
    """Bytes a second of the GPU that is here: the known one, else as measured now."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else H200
    return READ.get(name) or measured_read()


def measured_read() -> float:
    """Bytes a second of reading 8 GiB."""
    big = torch.empty(2 << 30, dtype=torch.int32, device="cuda").random_()
    return 4 * big.numel() / median_us(lambda: torch.max(big), 10) * 1e6


def median_us(call: Callable[[], object], times: int) -> float:
    """Microseconds of a call on the GPU, after three that do not count."""
    found = []
    for _ in range(times + 3):
        one, two = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        one.record()
        call()
        two.record()
        two.synchronize()
        found.append(one.elapsed_time(two) * 1e3)
    return statistics.median(found[3:])

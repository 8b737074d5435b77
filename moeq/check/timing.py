"""Time the fused layer on a GPU and compare it with the roofline of its memory traffic and arithmetic.

Each call is timed as in a program, including launches, which dominate for a few tokens. The benchmarks of the kernels
leave launches out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from moeq.check.inputs import Inputs
from moeq.check.kernel_calls import fused_experts
from moeq.check.results import Run, Timing
from moeq.reference.moe import Activation

if TYPE_CHECKING:
    from moeq.load.packed_sample import PackedPart
    from moeq_kernels import PackedMatrix

#: Count of timed calls of a run, and of calls before them that compile and warm up.
REPEATS, WARMUPS = 20, 3

#: Bytes that are written before every timed call to flush the cache: more than a cache holds.
FLUSH_BYTES = 256 * 2**20

#: Part of a device's name to (bandwidth in bytes/s, dense 16-bit FLOP/s), from the vendors' data sheets.
PEAKS: dict[str, tuple[float, float]] = {
    "B200": (8.0e12, 2250e12),
    "H200": (4.8e12, 989e12),
    "H100 PCIe": (2.0e12, 756e12),
    "H100": (3.35e12, 989e12),
    "A100-SXM4-80GB": (2.039e12, 312e12),
    "A100": (1.555e12, 312e12),
    "L40S": (0.864e12, 362e12),
    "RTX 4090": (1.008e12, 165e12),
    "MI300X": (5.3e12, 1307e12),
    "MI355X": (8.0e12, 2500e12),
}


def time_runs(parts: Sequence[PackedPart], inputs: Inputs, activation: Activation, layer: int) -> tuple[Timing, ...]:
    """Measure the median time of every run with the model's own routing, with weights read from memory each time.

    A layer that is written rank by rank is not timed: its ranks would run one after another here.
    """
    if len(parts) > 1:
        return ()
    flush = flush_buffer(inputs.x.device)
    return tuple(
        _time_run(parts[0], inputs, (run, part), activation, layer, flush)
        for run, part in inputs.runs
        if run.routing == "router"
    )


def _time_run(
    part: PackedPart,
    inputs: Inputs,
    run: tuple[Run, slice],
    activation: Activation,
    layer: int,
    flush: torch.Tensor,
) -> Timing:
    x, weights, ids = (tensor[run[1]] for tensor in (inputs.x, inputs.weights, inputs.ids))
    packed, ids = part.experts, part.local_ids(ids)
    median = timed_us(lambda: fused_experts(packed, x, weights, ids, activation), flush)
    weight_bytes = len(torch.unique(ids)) * (expert_bytes(packed.w13) + expert_bytes(packed.w2))
    pairs = ids.numel()
    total = weight_bytes + 2 * 2 * x.numel() + 2 * 2 * pairs * packed.intermediate_size
    flops = 2 * pairs * (packed.w13.n * packed.w13.k + packed.w2.n * packed.w2.k)
    peak = next((peaks for name, peaks in PEAKS.items() if name in torch.cuda.get_device_name(x.device)), None)
    floor = None if peak is None else max(total / peak[0], flops / peak[1]) * 1e6
    return Timing(layer, run[0].title, median, weight_bytes, total, flops, floor)


def flush_buffer(device: torch.device) -> torch.Tensor:
    """Allocate the memory that is written before every timed call, so that no weights are left in the cache."""
    return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)


def timed_us(call: Callable[[], object], flush: torch.Tensor) -> float:
    """Return the median microseconds of a call, launches included."""
    times = []
    for _ in range(WARMUPS + REPEATS):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    median: float = statistics.median(times[WARMUPS:])
    return median


def expert_bytes(matrix: PackedMatrix) -> int:
    """Return the bytes of one packed expert."""
    parts = (matrix.weight, matrix.scale, matrix.zero, matrix.bias, matrix.permutation, matrix.group_index)
    return sum(part[0].numel() * part.element_size() for part in parts if part is not None)

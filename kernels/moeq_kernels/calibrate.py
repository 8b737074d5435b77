"""Measure the rates of this machine's GPU in about ten seconds: `python -m moeq_kernels.calibrate [--out FILE]`.

Prints one JSON object: the fields of `gpu.Gpu`, and under `measured` the measured rates, in bytes and operations a
second, and latencies, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from moeq_kernels.gpu import gpu_of

#: Bytes that exceed every L2 cache; bytes that fit every L2 cache; rows, columns and depth of the matrix products.
BEYOND_L2_BYTES, WITHIN_L2_BYTES, SIZE = 4 << 30, 16 << 20, 8192


def replayed_us(call: Callable[[], object], count: int) -> float:
    """Return the median microseconds of a replayed graph of `count` calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    times = []
    for _ in range(11):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[2:])


def call_us(call: Callable[[], object], count: int) -> float:
    """Return the microseconds of a call that follows others in a graph."""
    return (replayed_us(call, count + 1) - replayed_us(call, 1)) / count


def measure(device: torch.device) -> dict[str, object]:
    """Return the fields of a CUDA device's `Gpu`, and the rates that were measured on it."""
    beyond_l2 = torch.ones(BEYOND_L2_BYTES // 4, dtype=torch.int32, device=device)
    within_l2, word = beyond_l2[: WITHIN_L2_BYTES // 4], beyond_l2[:1].clone()
    matrix, scale = torch.randn(SIZE, SIZE, device=device), torch.ones((), device=device)
    bf16, int8, e4m3 = matrix.bfloat16(), (40 * matrix).to(torch.int8), matrix.to(torch.float8_e4m3fn)
    handover = call_us(lambda: word.add_(1), 200)
    measured = {
        "read": 1e6 * BEYOND_L2_BYTES / call_us(lambda: torch.max(beyond_l2), 2),
        "l2": 1e6 * WITHIN_L2_BYTES / max(1e-3, call_us(lambda: torch.max(within_l2), 50) - 2 * handover),
        "bf16": 2e6 * SIZE**3 / call_us(lambda: bf16 @ bf16.T, 4),
        "int8": 2e6 * SIZE**3 / call_us(lambda: torch._int_mm(int8, int8.T), 4),
        "e4m3": 2e6 * SIZE**3
        / call_us(lambda: torch._scaled_mm(e4m3, e4m3.T, scale, scale, out_dtype=torch.bfloat16), 4),
        "launch": replayed_us(lambda: word.add_(1), 1),
        "handover": handover,
    }  # fmt: skip
    return {**asdict(gpu_of(device)), "measured": measured}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the JSON object to this file, too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU: torch.cuda.is_available() is False")
    text = json.dumps(measure(torch.device("cuda")), indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""What the benchmarks of Hopper kernels share: layers of real models, inputs, timing in CUDA graphs, rows of results.

Cold: a graph holds a call for each of several copies of the weights, so that weights are not in the L2 cache; hot: one
copy.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from bench.routing import choose_experts
from moeq_kernels import PackedExperts

#: Bytes that the L2 cache of an H200 may keep.
L2 = 60e6


@dataclass(frozen=True)
class Shape:
    """A MoE layer on one GPU; gpt_oss: interleaved gate and up, SwiGLU-OAI, biases."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    gpt_oss: bool = False


SHAPES = {
    "mixtral": Shape(8, 2, 4096, 14336),
    "mixtral-tp8": Shape(8, 2, 4096, 1792),
    "qwen3-30b": Shape(128, 8, 2048, 768),
    "qwen3-235b-tp4": Shape(128, 8, 4096, 384),
    "deepseek-v3-tp8": Shape(256, 8, 7168, 256),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, gpt_oss=True),
}


@dataclass(frozen=True)
class Inputs:
    """One call's inputs."""

    x: Tensor
    weights: Tensor
    ids: Tensor


def inputs(
    shape: Shape, tokens: int, seed: int, dtype: torch.dtype = torch.bfloat16, routing: str = "uniform"
) -> Inputs:
    """Normal tokens, and their experts drawn as `choose_experts` says."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(tokens, shape.hidden, generator=generator, device="cuda").to(dtype)
    ids = choose_experts(routing, tokens, shape.experts, shape.top_k, generator)
    weights = torch.rand(tokens, shape.top_k, generator=generator, device="cuda")
    return Inputs(x, weights / weights.sum(1, keepdim=True), ids)


def graph_us(calls: list[Callable[[], object]], milliseconds: float) -> float:
    """Median time of a call, from replays of a graph that holds all calls."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    graph.replay()
    torch.cuda.synchronize()
    times: list[float] = []
    begin = time.monotonic()
    while len(times) < 5 or (len(times) < 200 and time.monotonic() - begin < milliseconds / 1e3):
        one, two = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        one.record()
        graph.replay()
        two.record()
        two.synchronize()
        times.append(one.elapsed_time(two))
    del kept, graph
    return statistics.median(times) * 1e3 / len(calls)


def print_kernels(call: Callable[[], object]) -> None:
    """Average time of each kernel of a call, run back to back without a graph."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(10):
            call()
        torch.cuda.synchronize()
    for event in sorted(profile.key_averages(), key=lambda e: -e.device_time_total)[:6]:
        print(f"      {event.device_time_total / 10:9.1f} us  {event.key[:60]}", flush=True)


Call = Callable[[Inputs, PackedExperts], object]


def copies_needed(hit_bytes: float) -> int:
    """Copies of the weights that keep them cold, where a call reads so many bytes of them.

    Not more than 24 where those take twice the L2 cache at least.
    """
    most = max(24, math.ceil(2 * L2 / hit_bytes))
    return max(2, min(most, int(4 * L2 / hit_bytes) + 2))


def call_us(call: Call, given: list[Inputs], copies: list[PackedExperts], milliseconds: float, cold: bool) -> float:
    """Median time of a call, over inputs and copies of the weights or (hot) always the first ones."""
    pairs = zip(given, copies, strict=False)
    calls = [partial(call, one, two) if cold else partial(call, given[0], copies[0]) for one, two in pairs]
    return graph_us(calls, milliseconds)


def print_row(row: dict[str, Any], name: str, best: int) -> None:
    """One number of tokens: its times, and the best ones of a sweep."""
    text = " ".join(f"{key} {value:8.1f}" for key, value in row.items() if key.endswith("_us"))
    share = row["floor_us"] / row["cold_us"]
    print(f"{name} M={row['tokens']:5d} hit {row['hit']:3d} {text} floor/cold {share:.2f} {row['plan']}", flush=True)
    for key, value in sorted(row.get("sweep", {}).items(), key=lambda item: item[1])[:best]:
        print(f"      {value:9.1f}  {key}", flush=True)


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    """Rows with what they were measured on."""
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")

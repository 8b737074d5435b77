"""Timing on a GPU: inputs of calls, CUDA graphs of cold calls, and the rates of the GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache

import torch
from support.cases import Routed
from support.routing import choose_experts

from bench.shapes import H200, READ, Shape


def inputs(
    shape: Shape, tokens: int, seed: int, routing: str = "uniform", device: torch.device | str = "cuda"
) -> Routed:
    """Draw normal tokens and distinct experts (`support.routing.ROUTINGS`); weights are float32, ids int32."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(tokens, shape.hidden, generator=generator, device=device).to(torch.bfloat16)
    ids = choose_experts(routing, tokens, shape.experts, shape.top_k, generator)
    weights = torch.rand(tokens, shape.top_k, generator=generator, device=device)
    return Routed(x, weights / weights.sum(1, keepdim=True), ids)


def captured(calls: list[Callable[[], object]]) -> tuple[torch.cuda.CUDAGraph, list[object]]:
    """Capture all calls in one graph, replayed once; return it with their results, which it writes to."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    graph.replay()
    torch.cuda.synchronize()
    return graph, kept


def graph_us(calls: list[Callable[[], object]], milliseconds: float) -> float:
    """Return the median microseconds of a call, from replays of a graph that holds all calls."""
    graph, kept = captured(calls)
    times: list[float] = []
    begin = time.monotonic()
    while len(times) < 5 or (len(times) < 200 and time.monotonic() - begin < milliseconds / 1e3):
        times.append(event_us(graph.replay))
    del kept, graph
    return statistics.median(times) / len(calls)


def event_us(call: Callable[[], object]) -> float:
    """Return the microseconds between two events around a call."""
    one, two = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    one.record()
    call()
    two.record()
    two.synchronize()
    return one.elapsed_time(two) * 1e3


def median_us(call: Callable[[], object], times: int) -> float:
    """Return the median microseconds of a call on the GPU, after three calls that do not count."""
    return statistics.median([event_us(call) for _ in range(times + 3)][3:])


def gpu_works() -> bool:
    """Return whether this process can still use its GPU, which no process can after a kernel's bad access."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


@cache
def read_rate() -> float:
    """Return the bytes a second that this GPU reads: the known rate (`shapes.READ`), else as measured now."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else H200
    return READ.get(name) or measured_read()


def measured_read() -> float:
    """Measure the bytes a second of reading 8 GiB."""
    big = torch.empty(2 << 30, dtype=torch.int32, device="cuda").random_()
    return 4 * big.numel() / median_us(lambda: torch.max(big), 10) * 1e6

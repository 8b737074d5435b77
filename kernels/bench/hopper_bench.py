"""Times the Hopper kernels on whole MoE layers of real models, int4 in groups of 128, in CUDA graphs.

    PYTHONPATH=.:kernels python kernels/bench/hopper_bench.py --shapes mixtral,qwen3-30b --tokens 1,64,4096 [--sweep]

Timed: from (x, topk_ids, topk_weights) to y. Cold: a graph holds a call for each of several copies of the weights, so
that weights are not in the L2 cache; hot: one copy. Floor: the larger of the bytes of the experts hit (words and
scales), x, y and the middle activations at 4.4 TB/s and the multiplications at 790 TFLOP/s, both measured on an H200.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bench.hopper_check import describe
from moeq_kernels import PackedExperts, PackedMatrix, fused_moe
from moeq_kernels.hopper.launch import hopper_moe
from moeq_kernels.hopper.plan import Narrow, Plan, Wide, choose


@dataclass(frozen=True)
class Shape:
    """A MoE layer on one GPU."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int


SHAPES = {
    "mixtral": Shape(8, 2, 4096, 14336),
    "mixtral-tp8": Shape(8, 2, 4096, 1792),
    "qwen3-30b": Shape(128, 8, 2048, 768),
    "qwen3-235b-tp4": Shape(128, 8, 4096, 384),
    "deepseek-v3-tp8": Shape(256, 8, 7168, 256),
}
GROUP = 128
L2 = 60e6


def random_experts(shape: Shape) -> PackedExperts:
    """Random words and scales: every word is a valid one."""

    def matrix(n: int, k: int) -> PackedMatrix:
        words = torch.randint(-(2**31), 2**31 - 1, (shape.experts, k // 16, 2 * n), dtype=torch.int32, device="cuda")
        scale = (torch.rand(shape.experts, k // GROUP, n, device="cuda") + 0.5) / (4.6 * k**0.5)
        return PackedMatrix("marlin-wna16/1", words, n, k, "int4", GROUP, scale.to(torch.bfloat16))

    return PackedExperts(matrix(2 * shape.intermediate, shape.hidden), matrix(shape.hidden, shape.intermediate))


def weight_bytes(shape: Shape, experts: float) -> float:
    """Words and scales of that many experts."""
    return experts * 3 * shape.hidden * shape.intermediate * (0.5 + 2 / GROUP)


def floor_us(shape: Shape, tokens: int, hit: float) -> float:
    """Least time on an H200."""
    pairs = tokens * shape.top_k
    moved = weight_bytes(shape, hit) + 4 * tokens * shape.hidden + 4 * pairs * shape.intermediate
    operations = 6 * shape.hidden * shape.intermediate * pairs
    return max(moved / 4.4e12, operations / 790e12) * 1e6


@dataclass(frozen=True)
class Inputs:
    """One call's inputs."""

    x: Tensor
    weights: Tensor
    ids: Tensor


def inputs(shape: Shape, tokens: int, seed: int) -> Inputs:
    """Normal tokens, uniform routing."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(tokens, shape.hidden, generator=generator, device="cuda").to(torch.bfloat16)
    weights, ids = torch.rand(tokens, shape.experts, generator=generator, device="cuda").topk(shape.top_k, dim=1)
    return Inputs(x, weights / weights.sum(1, keepdim=True), ids.to(torch.int32))


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


def candidates(shape: Shape, tokens: int) -> list[Plan | None]:
    """Plans around the chosen one."""
    pairs = tokens * shape.top_k
    chosen = choose(pairs, shape.experts, shape.hidden, shape.intermediate, GROUP)
    mean = pairs / min(shape.experts, pairs)
    result: list[Plan | None] = []
    if mean <= 24:
        for base in (Narrow(8, 3, True, 128), Narrow(8, 4, True, 128), Narrow(16, 3, True), Narrow(16, 3, False, 128),
                     Narrow(32, 2, False)):  # fmt: skip
            if mean / 4 <= base.tokens <= max(8, mean * 4):
                one, two = max(1, chosen.gate_up_splits), max(1, chosen.down_splits)
                for a, b in {(one, two), (max(1, one // 2), max(1, two // 2)), (1, 1)}:
                    result.append(Plan(base, a, b))
    if mean >= 4:
        result += [Plan(k) for k in (Wide(32, 6, 2, 232), Wide(32, 6, 4, 120), Wide(64, 6, 4, 120), Wide(64, 6, 2, 232),
                                     Wide(128, 5, 2, 232)) if mean / 4 <= k.tokens <= mean * 6]  # fmt: skip
    return result


def main() -> int:
    """Prints a line for each shape and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,8,32,128,512,4096")
    parser.add_argument("--sweep", action="store_true", help="time other plans too")
    parser.add_argument("--kernels", action="store_true", help="show the time of each kernel")
    parser.add_argument("--portable", action="store_true", help="time the portable kernels too")
    parser.add_argument("--milliseconds", type=float, default=60)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    begin = time.monotonic()
    for name in options.shapes.split(","):
        shape = SHAPES[name]
        copies = [random_experts(shape)]
        for tokens in map(int, options.tokens.split(",")):
            if time.monotonic() - begin > options.seconds:
                print("out of time at", name, tokens)
                break
            hit = inputs(shape, tokens, 0).ids.unique().numel()
            needed = max(2, min(24, int(4 * L2 / weight_bytes(shape, hit)) + 2))
            while len(copies) < needed:
                copies.append(random_experts(shape))
            given = [inputs(shape, tokens, seed) for seed in range(needed)]
            floor = floor_us(shape, tokens, hit)

            def time_plan(
                call: Callable[[Inputs, PackedExperts], object], pairs: list[tuple[Inputs, PackedExperts]]
            ) -> float:
                return graph_us([lambda one=one, two=two: call(one, two) for one, two in pairs], options.milliseconds)

            def ours(plan: Plan | None, dependent: bool = True) -> Callable[[Inputs, PackedExperts], object]:
                return lambda i, e: hopper_moe(i.x, e, i.weights, i.ids, plan=plan, dependent=dependent)

            cold = list(zip(given, copies, strict=False))
            hot = [(given[0], copies[0]) for _ in given]
            row = {
                "shape": name,
                "tokens": tokens,
                "hit": hit,
                "floor_us": floor,
                "plan": describe(choose(tokens * shape.top_k, shape.experts, shape.hidden, shape.intermediate, GROUP)),
            }
            row["cold_us"] = time_plan(ours(None), cold)
            row["hot_us"] = time_plan(ours(None), hot)
            row["cold_independent_us"] = time_plan(ours(None, False), cold)
            if options.portable:
                row["portable_us"] = time_plan(lambda i, e: fused_moe(i.x, e, i.weights, i.ids), cold)
            if options.kernels:
                print_kernels(
                    lambda: hopper_moe(given[0].x, copies[0], given[0].weights, given[0].ids, dependent=False)
                )
            if options.sweep:
                swept = {}
                for plan in candidates(shape, tokens):
                    key = f"{describe(plan)} {plan.kernel}"
                    try:
                        swept[key] = time_plan(ours(plan), cold)
                    except Exception as error:  # noqa: BLE001 - a plan that does not fit is a result too
                        swept[key] = float("inf")
                        print("  failed", key, type(error).__name__, str(error)[:150])
                row["sweep"] = swept
            rows.append(row)
            text = " ".join(f"{k} {v:9.1f}" for k, v in row.items() if k.endswith("_us"))
            print(
                f"{name:16s} M={tokens:5d} hit {hit:3d} {text} floor/cold {floor / row['cold_us']:.2f} {row['plan']}",
                flush=True,
            )
            for key, value in sorted(row.get("sweep", {}).items(), key=lambda kv: kv[1])[:6]:
                print(f"      {value:9.1f}  {key}", flush=True)
        del copies
    if options.out:
        options.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A contender in a process of its own: takes commands on stdin and answers on stdout, one JSON line each.

The process that gives the orders is `bench.peers.conduct`. A crash here loses one group of cells, not the run.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import statistics
import sys
import time
import traceback
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from bench.ceilings import measured_read, median_us, read_rate
from bench.peers import contenders
from bench.peers.problem import Truth, make_problem, route, truth
from bench.peers.shapes import L2, Group, weight_bytes

#: Bytes of weights that cold copies may take; calls also differ in their routing, so fewer copies are still cold.
COPIES = 10e9


@dataclass
class Opened:
    """A group that is set up.

    Attributes:
        copies: the weights, and further copies of them for cold calls.
        truths: what calls should give, by token count, as far as it was asked for.
        graphs: captured calls by kind (`cold`, `hot`), and how many calls a graph holds.
    """

    problem: Any
    copies: list[Any]
    truths: dict[int, Truth] = field(default_factory=dict)
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = field(default_factory=dict)


class Worker:
    """Answers orders."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.contender = contenders.make(name)
        self.opened: Opened | None = None

    def hello(self) -> dict[str, Any]:
        """What takes part."""
        return {"versions": self.contender.versions}

    def open(self, format: str, shape: str, routing: str = "uniform") -> dict[str, Any]:
        """Set a group up."""
        self.close()
        begin = time.monotonic()
        problem = make_problem(Group(format, shape), routing=routing)
        self.opened = Opened(problem, [self.contender.prepare(problem)])
        torch.cuda.synchronize()
        return {"gigabytes": torch.cuda.memory_allocated() / 1e9, "seconds": round(time.monotonic() - begin, 2)}

    def check(self, tokens: int) -> dict[str, Any]:
        """One call against the reference; two calls against each other."""
        assert self.opened is not None
        if tokens not in self.opened.truths:
            self.opened.truths[tokens] = truth(self.opened.problem, tokens)
        weights, found = self.opened.copies[0], self.opened.truths[tokens]
        inputs = self.contender.inputs(weights, route(self.opened.problem, tokens, 0))
        hidden = self.opened.problem.shape.hidden
        one = self.contender.run(weights, inputs)[:, :hidden].clone()
        two = self.contender.run(weights, inputs)[:, :hidden]
        error = found.error(one)
        return {
            "error": error,
            "plain_error": found.plain_error,
            "right": error <= self.contender.factor * found.plain_error,
            "repeats": torch.equal(one, two),
            "hit": found.hit,
            "about": self.contender.about(weights, inputs),
        }

    def warm(self, tokens: int) -> dict[str, Any]:
        """One call, so that everything is compiled."""
        assert self.opened is not None
        weights = self.opened.copies[0]
        self.contender.run(weights, self.contender.inputs(weights, route(self.opened.problem, tokens, 0)))
        torch.cuda.synchronize()
        return {}

    def capture(self, tokens: int, hit: int) -> dict[str, Any]:
        """Graphs of cold calls (each with weights and routing of its own) and of hot ones."""
        assert self.opened is not None
        here = self.opened
        group = here.problem.group
        fmt, shape = here.problem.format, here.problem.shape
        wanted = int(4 * L2 / weight_bytes(fmt, shape, hit)) + 2
        copies = max(2, min(wanted, 24, int(COPIES / weight_bytes(fmt, shape, shape.experts))))
        while len(here.copies) < copies:
            here.copies.append(self.contender.duplicate(here.copies[0]))
        routed = [route(here.problem, tokens, seed) for seed in range(copies)]
        given = [self.contender.inputs(here.copies[0], one) for one in routed]
        cold = [partial(self.contender.run, one, two) for one, two in zip(here.copies, given, strict=False)]
        here.graphs = {"cold": _graph(cold), "hot": _graph([cold[0]] * min(4, copies))}
        hits = statistics.mean(one.ids.unique().numel() for one in routed)
        return {"copies": copies, "hit": hits, "group": [group.format, group.shape]}

    def time(self, kind: str, milliseconds: float) -> dict[str, Any]:
        """Microseconds of a call, from replays for about so long."""
        assert self.opened is not None
        graph, calls = self.opened.graphs[kind]
        graph.replay()
        torch.cuda.synchronize()
        times: list[float] = []
        begin = time.monotonic()
        while not times or (len(times) < 100 and time.monotonic() - begin < enough(len(times), milliseconds)):
            one, two = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            one.record()
            graph.replay()
            two.record()
            two.synchronize()
            times.append(one.elapsed_time(two) * 1e3 / calls)
        return {"median": statistics.median(times), "least": min(times), "replays": len(times)}

    def close(self) -> dict[str, Any]:
        """Give the memory back."""
        self.opened = None
        gc.collect()
        torch.cuda.empty_cache()
        return {}

    def peak(self) -> dict[str, Any]:
        """What this GPU gives today: bf16 products, and reading memory; and the rate of reading that floors count."""
        square = [torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        products = median_us(lambda: square[0] @ square[1], 20)
        return {
            "bf16_tflops": 2 * 8192**3 / products / 1e6,
            "read_tbs": measured_read() / 1e12,
            "floor_read_tbs": read_rate() / 1e12,
        }


def enough(replays: int, milliseconds: float) -> float:
    """Seconds after which to stop: three replays are worth four times the time."""
    return milliseconds / 1e3 * (4 if replays < 3 else 1)


def _graph(calls: list[Any]) -> tuple[torch.cuda.CUDAGraph, int]:
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph, len(calls)


def main() -> int:
    """Orders come on standard input; answers go to what standard output was; libraries print to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(document: dict[str, Any]) -> None:
        print(json.dumps(document), file=answers, flush=True)

    try:
        worker = Worker(sys.argv[1])
    except contenders.Absent as error:
        answer({"absent": str(error)})
        return 0
    answer({"ok": worker.hello()})
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer({"ok": getattr(worker, order.pop("do"))(**order)})
        except Exception as error:  # noqa: BLE001 - whatever a peer raises is its result
            traceback.print_exc()
            answer({"failed": f"{type(error).__name__}: {str(error)[:300]}"})
            if "CUDA error" in str(error):
                return 1  # this process cannot use the GPU any more
    with contextlib.suppress(BrokenPipeError):
        answers.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Run a contender in a process of its own: orders come on stdin, answers go to stdout, one JSON line each.

`bench.peers.conduct` gives the orders. A crash here loses one group of cells, not the run.
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

from bench.peers import contenders
from bench.peers.problem import Truth, make_problem, route, truth
from bench.shapes import L2, Group, weight_bytes
from bench.timing import captured, event_us, gpu_works, measured_read, median_us, read_rate

#: Largest bytes of all copies of the weights; calls also differ in their routing, so fewer copies are still cold.
COPIES = 10e9


@dataclass
class Opened:
    """A group that is set up.

    Attributes:
        copies: the weights, and further copies of them for cold calls.
        truths: the reference's results by token count.
        graphs: captured calls by kind (`cold`, `hot`), and the number of calls in the graph.
    """

    problem: Any
    copies: list[Any]
    truths: dict[int, Truth] = field(default_factory=dict)
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = field(default_factory=dict)


class Worker:
    """The side of a contender that answers orders."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.contender = contenders.make(name)
        self.opened: Opened | None = None

    def hello(self) -> dict[str, Any]:
        """Return the versions of the contender's packages."""
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
        """Compare a call with the reference, and two calls with each other."""
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
        """Call once, so that everything is compiled."""
        assert self.opened is not None
        weights = self.opened.copies[0]
        self.contender.run(weights, self.contender.inputs(weights, route(self.opened.problem, tokens, 0)))
        torch.cuda.synchronize()
        return {}

    def capture(self, tokens: int, hit: int) -> dict[str, Any]:
        """Capture graphs of cold calls, each with its own weights and routing, and of hot calls."""
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
        hot = [cold[0]] * min(4, copies)
        here.graphs = {name: (captured(calls)[0], len(calls)) for name, calls in (("cold", cold), ("hot", hot))}
        hits = statistics.mean(one.ids.unique().numel() for one in routed)
        return {"copies": copies, "hit": hits, "group": [group.format, group.shape]}

    def time(self, kind: str, milliseconds: float) -> dict[str, Any]:
        """Return the microseconds of a call, from replays for about so long."""
        assert self.opened is not None
        graph, calls = self.opened.graphs[kind]
        graph.replay()
        torch.cuda.synchronize()
        times: list[float] = []
        begin = time.monotonic()
        while not times or (len(times) < 100 and time.monotonic() - begin < enough(len(times), milliseconds)):
            times.append(event_us(graph.replay) / calls)
        return {"median": statistics.median(times), "least": min(times), "replays": len(times)}

    def close(self) -> dict[str, Any]:
        """Free the memory of the group."""
        self.opened = None
        gc.collect()
        torch.cuda.empty_cache()
        return {}

    def peak(self) -> dict[str, Any]:
        """Measure this GPU's rates of bf16 products and of reading; add the rate of reading that floors count."""
        square = [torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        products = median_us(lambda: square[0] @ square[1], 20)
        return {
            "bf16_tflops": 2 * 8192**3 / products / 1e6,
            "read_tbs": measured_read() / 1e12,
            "floor_read_tbs": read_rate() / 1e12,
        }


def enough(replays: int, milliseconds: float) -> float:
    """Return the seconds after which to stop; three replays are worth four times the time."""
    return milliseconds / 1e3 * (4 if replays < 3 else 1)


def main() -> int:
    """Answer the orders; whatever libraries print goes to standard error."""
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
            works = gpu_works()
            answer({"failed": f"{type(error).__name__}: {str(error)[:300]}", "ends": not works})
            if not works:
                return 1
    with contextlib.suppress(BrokenPipeError):
        answers.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measure what launches cost the host, call by call of the driver.

    python -m bench.launch_cost --out results.json [--cases qwen3-30b-a3b:int4:8] [--dry-run]

For a prepared layer: whole calls with and without replays, its launches alone, also without the attribute for
dependent launches, and the same launches as a graph (launching it, setting parameters of its nodes, its time on the
GPU). What fails is noted and skipped.
Host times are medians of rounds that begin with an idle device. `--dry-run` needs no GPU: the driver does nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support import pretended_driver

from bench.plan_cells import model_layer
from bench.timing import inputs
from moeq_kernels.compiling import compile_all, specialise
from moeq_kernels.cuda import LaunchConfig, driver
from moeq_kernels.prepared import prepare_for
from moeq_kernels.replay import NON_BLOCKING, RELAXED, NodeParams
from moeq_kernels.schedules import schedule

CASES = "qwen3-30b-a3b:int4:8,qwen3-30b-a3b:int4:200,mixtral-8x7b-tp8:int4:64,qwen3-30b-a3b:w8a8:200"
P = c_void_p
#: Functions of the driver besides the product's own, with the parameters of cuda.h of CUDA 13.0.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuDriverGetVersion": (P,),
    "cuCtxSynchronize": (),
    "cuStreamCreate": (P, c_uint),
    "cuStreamBeginCapture_v2": (P, c_int),
    "cuStreamEndCapture": (P, P),
    "cuEventCreate": (P, c_uint),
    "cuEventRecord": (P, P),
    "cuEventElapsedTime": (P, P, P),
    "cuLaunchKernelEx": (P, P, P, P),
    "cuGraphGetNodes": (P, P, P),
    "cuGraphInstantiateWithFlags": (P, P, c_uint64),
    "cuGraphLaunch": (P, P),
    "cuGraphExecKernelNodeSetParams_v2": (P, P, P),
    "cuGraphExecDestroy": (P,),
    "cuGraphDestroy": (P,),
}
#: Functions that the driver of `support.pretended_driver` lacks.
STAND_IN = """
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuEventCreate(void **e, unsigned f) { *e = (void *)5; return 0; }
int cuEventRecord(void *e, void *s) { return 0; }
int cuEventElapsedTime(float *ms, void *a, void *b) { *ms = 0.5f; return 0; }
"""


class Refused(Exception):
    """A call of the driver failed."""


class Cuda:
    """Functions of the driver; a call that fails raises Refused."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        for name, types in SIGNATURES.items():
            function = getattr(self.library, name, None)
            if function is not None:
                function.argtypes = list(types)

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self.library, name, None)
        if function is None:
            raise Refused(f"{name}: this driver has none")

        def checked(*given: Any) -> None:
            status = function(*given)
            if status:
                text = c_char_p()
                self.library.cuGetErrorString(status, byref(text))
                raise Refused(f"{name}: {(text.value or b'?').decode()} ({status})")

        return checked

    def made(self, name: str, *given: Any) -> int:
        """Return the handle that a call hands out through its first parameter."""
        handle = c_void_p()
        getattr(self, name)(byref(handle), *given)
        return handle.value or 0


class Bench:
    """Timing, and the document that results go into."""

    def __init__(self, out: Path | None, seconds: float, dry: bool) -> None:
        self.cuda, self.out, self.dry = Cuda(), out, dry
        self.until = time.monotonic() + seconds
        self.found: dict[str, Any] = {}
        self.rounds = 3 if dry else 25
        self.events = [self.cuda.made("cuEventCreate", 0) for _ in range(2)]
        self.sync = self.cuda.cuCtxSynchronize

    def sleep(self) -> None:
        """Keep the GPU busy on torch's stream for some 2 ms."""
        if not self.dry:
            torch.cuda._sleep(3_600_000)

    def note(self, path: str, what: Callable[[], Any]) -> Any:
        """Write down a result, or why there is none, at a path like `case/graph/launch`."""
        *folders, name = path.split("/")
        place = self.found
        for folder in folders:
            place = place.setdefault(folder, {})
        if time.monotonic() > self.until:
            place[name] = "left out: the time was over"
            return None
        try:
            place[name] = what()
        except Exception as error:  # noqa: BLE001 - the rest still says something
            place[name] = f"{type(error).__name__}: {error}"
        shown = place[name]
        print(f"{path:60s} {round(shown, 2) if isinstance(shown, float) else shown}", flush=True)
        if self.out:
            self.out.write_text(json.dumps(self.found, indent=1) + "\n")
        return place[name]

    def host_us(self, call: Callable[[], Any], calls: int = 10, busy: bool = False) -> float:
        """Return the microseconds until a call returns, the median of rounds; `busy` queues other work before them."""
        times = []
        call()
        for _ in range(self.rounds):
            self.sync()
            if busy:
                self.sleep()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            times.append((time.perf_counter() - begin) / calls * 1e6)
        self.sync()
        return statistics.median(times)

    def gpu_us(self, call: Callable[[], Any], calls: int, queued: bool) -> float:
        """Return the GPU's microseconds of a call; with `queued`, all calls are in the stream before one runs."""
        times, ms, (one, two) = [], c_float(), self.events
        for _ in range(min(9, self.rounds)):
            self.sync()
            if queued:
                self.sleep()
            self.cuda.cuEventRecord(one, 0)
            for _ in range(calls):
                call()
            self.cuda.cuEventRecord(two, 0)
            self.sync()
            self.cuda.cuEventElapsedTime(byref(ms), one, two)
            times.append(ms.value / calls * 1e3)
        return statistics.median(times)


def alone(bench: Bench, call: Callable[[], int]) -> None:
    """Run a call. Raises Refused where a launch fails, also later on the device."""
    status = call()
    if status:
        raise Refused(f"status {status}")
    bench.sync()


class Case:
    """A prepared layer with one number of tokens."""

    def __init__(self, bench: Bench, name: str, stored: str, tokens: int) -> None:
        model, device = model_layer(name, stored), "meta" if bench.dry else "cuda"
        assert model is not None
        shape = model.shape
        x = torch.empty(0, shape.hidden, dtype=torch.bfloat16, device=device)
        gpu = "H200" if bench.dry else None
        experts = model.random_experts(device)
        self.layer = layer = prepare_for(x, experts, shape.top_k, 512, model.epilogue, None, gpu=gpu)
        if bench.dry:
            pretended_driver.take_cpu(layer)
            x = torch.zeros(tokens, shape.hidden, dtype=torch.bfloat16)
            weights, ids = torch.zeros(tokens, shape.top_k), torch.zeros(tokens, shape.top_k, dtype=torch.int32)
            self.given = [(x, weights, ids), (x.clone(), weights.clone(), ids)]
        else:
            self.given = [(one.x, one.weights, one.ids) for one in (inputs(shape, tokens, seed) for seed in (1, 2))]
        self.outs = [torch.empty_like(one[0]) for one in self.given]
        self.workspace = torch.zeros(layer.workspace_bytes(tokens), dtype=torch.uint8, device=self.outs[0].device)
        planned = schedule(layer.family, layer.problem, tokens, None)
        self.kernels = [one.kernel.rpartition(":")[2] for one in planned.launches]
        compile_all([specialise(one) for one in planned.launches], layer.problem.gpu)
        self.call()
        bench.sync()
        self.bound = layer._program.bounds[tokens]
        self.replaying(False)
        self.launches = list(self.bound._launches)
        self.configs = list(self.bound._configs)
        self.addresses = [
            [*(one.data_ptr() for one in tensors), out.data_ptr(), self.workspace.data_ptr(), 0, *layer._weights]
            for tensors, out in zip(self.given, self.outs, strict=True)
        ]

    def call(self, which: int = 0) -> None:
        """Call the layer as users do."""
        self.layer(*self.given[which], out=self.outs[which], workspace=self.workspace)

    def replaying(self, on: bool) -> None:
        """Allow or forbid that calls are replayed as graphs."""
        self.bound._replays._off = not on

    def run(self, stream: int = 0, which: int = 0) -> None:
        """Call the layer without the checks of its arguments."""
        self.bound.run(self.addresses[which], self.layer._maps, stream)

    def fill(self, stream: int = 0, which: int = 0) -> None:
        """Write the addresses into the launches' parameters, and launch nothing."""
        self.bound._launches = []
        self.run(stream, which)
        self.bound._launches = list(self.launches)

    def direct(self) -> int:
        """Launch with the parameters that `fill` wrote."""
        launch, status = driver().launch, 0
        for address, function, parameters in self.launches:
            status = status or launch(address, function, parameters, None)
        return int(status)


class Graph:
    """The launches of a case as a graph."""

    def __init__(self, bench: Bench, case: Case) -> None:
        cuda = self.cuda = bench.cuda
        stream = cuda.made("cuStreamCreate", NON_BLOCKING)
        self.stream, self.case = stream, case
        self.graph = self.captured()
        count = c_size_t()
        cuda.cuGraphGetNodes(self.graph, None, byref(count))
        nodes = (c_void_p * count.value)()
        cuda.cuGraphGetNodes(self.graph, nodes, byref(count))
        self.nodes = list(nodes)
        if len(self.nodes) != len(case.launches):
            raise Refused(f"{len(self.nodes)} nodes of {len(case.launches)} launches")
        self.exec = cuda.made("cuGraphInstantiateWithFlags", self.graph, 0)
        self.params = []
        for config, (_, function, parameters) in zip(case.configs, case.launches, strict=True):
            grid, block = ([getattr(config, f"{what}_{axis}") for axis in "xyz"] for what in ("grid", "block"))
            self.params.append(
                NodeParams(function, (c_uint * 3)(*grid), (c_uint * 3)(*block), config.shared, parameters, None)
            )

    def captured(self) -> int:
        """Capture the launches with the addresses that were filled in last."""
        self.case.fill(self.stream)
        self.cuda.cuStreamBeginCapture_v2(self.stream, RELAXED)
        status, handle = self.case.direct(), c_void_p()
        self.cuda.cuStreamEndCapture(self.stream, byref(handle))
        self.case.fill()
        if status:
            raise Refused(f"capturing a launch: {status}")
        return handle.value or 0

    def launch(self) -> int:
        """Replay the graph on torch's stream."""
        return int(self.cuda.library.cuGraphLaunch(self.exec, 0))

    def update(self) -> int:
        """Set the parameters of all nodes."""
        status, change = 0, self.cuda.library.cuGraphExecKernelNodeSetParams_v2
        for node, params in zip(self.nodes, self.params, strict=True):
            status = status or change(self.exec, node, byref(params))
        return int(status)

    def both(self) -> None:
        """Set the parameters of all nodes, then replay."""
        self.update()
        self.launch()


def dependent(configs: Sequence[LaunchConfig], numbers: Sequence[int]) -> None:
    """Set how many attributes each launch has."""
    for config, number in zip(configs, numbers, strict=True):
        config.number = number


def launching(bench: Bench, case: Case, where: str) -> None:
    """Time a layer's calls and its launches alone."""

    def note(name: str, what: Callable[[], Any]) -> Any:
        return bench.note(f"{where}/{name}", what)

    note("kernels", lambda: case.kernels)
    note("call", lambda: bench.host_us(case.call))
    note("call without checks of its arguments", lambda: bench.host_us(case.run))
    case.replaying(True)
    note("call, replayed", lambda: bench.host_us(case.call))
    turns = itertools.cycle((0, 1))
    note("call, replayed, alternating tensors", lambda: bench.host_us(lambda: case.call(next(turns))))
    case.replaying(False)
    note("call behind a busy GPU", lambda: bench.host_us(case.call, 10, busy=True))
    case.fill()
    note("launches alone", lambda: bench.host_us(case.direct))
    usual = [config.number for config in case.configs]
    dependent(case.configs, [0] * len(usual))
    note("launches alone, none dependent", lambda: bench.host_us(case.direct))
    dependent(case.configs, usual)


def as_graph(bench: Bench, case: Case, where: str) -> None:
    """Time the same launches as a graph, and check its numbers."""

    def note(name: str, what: Callable[[], Any]) -> Any:
        return bench.note(f"{where}/{name}", what)

    graphs: list[Graph] = []
    note("made", lambda: graphs.append(Graph(bench, case)))
    if not graphs:
        return
    graph = graphs[0]
    note("launching works", lambda: alone(bench, graph.launch))
    note("launch", lambda: bench.host_us(graph.launch))
    note("launch behind a busy GPU", lambda: bench.host_us(graph.launch, 10, busy=True))
    note("setting works", lambda: alone(bench, graph.update))
    note("set all nodes", lambda: bench.host_us(graph.update))
    note("set all nodes and launch", lambda: bench.host_us(graph.both))
    note("capture", lambda: bench.host_us(lambda: bench.cuda.cuGraphDestroy(graph.captured()), 2))

    def instantiate() -> None:
        bench.cuda.cuGraphExecDestroy(bench.cuda.made("cuGraphInstantiateWithFlags", graph.graph, 0))

    note("instantiate and destroy", lambda: bench.host_us(instantiate, 2))
    plans: dict[str, Callable[[], Any]] = {"launches": case.direct, "graph": graph.launch, "set and graph": graph.both}
    for name, call in plans.items():
        note(f"gpu/{name}, alone on an idle stream", lambda call=call: bench.gpu_us(call, 1, queued=False))
        note(f"gpu/{name}, one of 20 queued", lambda call=call: bench.gpu_us(call, 20, queued=True))
    if not bench.dry:
        note(
            "same numbers with addresses that change", lambda: [repeated(bench, case, graph, one) for one in (0, 1, 0)]
        )
    note("freed", lambda: (bench.cuda.cuGraphExecDestroy(graph.exec), bench.cuda.cuGraphDestroy(graph.graph))[0])


def repeated(bench: Bench, case: Case, graph: Graph, which: int) -> bool:
    """Return whether the graph gives the numbers of a call with these tensors."""
    case.call(which)
    bench.sync()
    wanted = case.outs[which].clone()
    case.outs[which].zero_()
    case.fill(0, which)
    graph.both()
    bench.sync()
    return bool(torch.equal(wanted, case.outs[which]))


def one_case(bench: Bench, text: str) -> None:
    """Time all parts of a case, `layer:format:tokens`."""
    name, stored, tokens = text.split(":")
    case = Case(bench, name, stored, int(tokens))
    launching(bench, case, text)
    as_graph(bench, case, f"{text}/graph")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", default=CASES, help="LAYER:FORMAT:TOKENS,... as in plan_sweep")
    parser.add_argument("--seconds", type=float, default=22, help="parts that would begin later are left out")
    parser.add_argument("--dry-run", action="store_true", help="with a driver that does nothing")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if given.dry_run:
            pretended_driver.pretend_cuda()
            pretended_driver.driver(folder, STAND_IN)
        else:
            torch.zeros(1, device="cuda")
        bench, version = Bench(given.out, given.seconds, given.dry_run), c_int()
        bench.cuda.cuDriverGetVersion(byref(version))
        bench.note("device", lambda: "none" if given.dry_run else torch.cuda.get_device_name())
        bench.note("driver", lambda: version.value)
        bench.note(
            "a ctypes call", lambda: bench.host_us(lambda: bench.cuda.library.cuDriverGetVersion(byref(version)))
        )
        for text in given.cases.split(","):
            bench.note(f"{text}/over", partial(one_case, bench, text))
    return 0


if __name__ == "__main__":
    sys.exit(main())

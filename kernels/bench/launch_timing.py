"""The CUDA driver for `launch_cost.py`, each call checked, a stand-in for it, timing, and a layer as a graph."""

from __future__ import annotations

import ctypes
import json
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint8, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch
from support import pretended_driver

from moeq_kernels.compiling import compile_all, specialise
from moeq_kernels.cuda import driver, load
from moeq_kernels.prepared import prepare_for
from moeq_kernels.replay import NON_BLOCKING, RELAXED, NodeParams
from moeq_kernels.schedules import schedule

P = c_void_p
#: What is called besides the product's own calls, as cuda.h of CUDA 13.0 has it.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuDriverGetVersion": (P,),
    "cuCtxGetCurrent": (P,),
    "cuCtxSynchronize": (),
    "cuModuleLoadData": (P, c_char_p),
    "cuModuleGetFunction": (P, P, c_char_p),
    "cuFuncSetAttribute": (P, c_int, c_int),
    "cuFuncGetParamInfo": (P, c_size_t, P, P),
    "cuStreamCreate": (P, c_uint),
    "cuStreamIsCapturing": (P, P),
    "cuStreamBeginCapture_v2": (P, c_int),
    "cuStreamEndCapture": (P, P),
    "cuEventCreate": (P, c_uint),
    "cuEventRecord": (P, P),
    "cuEventElapsedTime": (P, P, P),
    "cuLaunchKernel": (P, *[c_uint] * 7, P, P, P),
    "cuLaunchKernelEx": (P, P, P, P),
    "cuGraphGetNodes": (P, P, P),
    "cuGraphGetEdges_v2": (P, P, P, P, P),
    "cuGraphKernelNodeGetParams_v2": (P, P),
    "cuGraphInstantiateWithFlags": (P, P, c_uint64),
    "cuGraphUpload": (P, P),
    "cuGraphLaunch": (P, P),
    "cuGraphExecKernelNodeSetParams_v2": (P, P, P),
    "cuGraphExecUpdate_v2": (P, P, P),
    "cuGraphExecDestroy": (P,),
    "cuGraphDestroy": (P,),
}

#: What the stand-in has besides that of `support.pretended_driver`.
STAND_IN = """
#include <stddef.h>
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuFuncGetParamInfo(void *f, size_t i, size_t *offset, size_t *size) { *offset = 128 * i; *size = 4; return 0; }
int cuEventCreate(void **e, unsigned f) { *e = (void *)5; return 0; }
int cuEventRecord(void *e, void *s) { return 0; }
int cuEventElapsedTime(float *ms, void *a, void *b) { *ms = 0.5f; return 0; }
int cuLaunchKernel(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned shared,
    void *s, void **parameters, void **extra) { return 0; }
int cuGraphKernelNodeGetParams_v2(void *n, void *p) { return 0; }
int cuGraphUpload(void *x, void *s) { return 0; }
int cuGraphExecUpdate_v2(void *x, void *g, void *info) { return 801; }
"""


class Refused(Exception):
    """A call of the driver that failed."""


class Cuda:
    """The driver's functions, each checked."""

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
        """The handle that a call hands out through its first parameter."""
        handle = c_void_p()
        getattr(self, name)(byref(handle), *given)
        return handle.value or 0


class Bench:
    """Timing and where results go."""

    def __init__(self, out: Path | None, seconds: float, dry: bool) -> None:
        self.cuda, self.out, self.dry = Cuda(), out, dry
        self.until = time.monotonic() + seconds
        self.found: dict[str, Any] = {}
        self.rounds = 3 if dry else 25
        self.events = [self.cuda.made("cuEventCreate", 0) for _ in range(2)]
        self.sync = self.cuda.cuCtxSynchronize

    def sleep(self) -> None:
        """Keeps the GPU busy on torch's stream for some 2 ms."""
        if not self.dry:
            torch.cuda._sleep(3_600_000)

    def note(self, path: str, what: Callable[[], Any]) -> Any:
        """The result of a part, written down under a dotted name, or why there is none."""
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
        """Microseconds of a call until it returns: median of rounds. busy: behind a GPU that does something else."""
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
        """Microseconds between events around calls on torch's stream; queued: all wait there before the first runs."""
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

    def latency_us(self, call: Callable[[], Any]) -> float:
        """Microseconds from the beginning of a call on an idle device until the device is idle again."""
        times = []
        for _ in range(2 * self.rounds):
            self.sync()
            begin = time.perf_counter()
            call()
            self.sync()
            times.append((time.perf_counter() - begin) * 1e6)
        return statistics.median(times)

    def processor(self, call: Callable[[], Any], calls: int = 20) -> dict[str, float]:
        """User and system time of a call in us, that of waiting for the device left out: who spends it."""
        used = [0.0, 0.0]
        rounds = self.rounds * 4
        for _ in range(rounds):
            self.sync()
            before = resource.getrusage(resource.RUSAGE_SELF)
            for _ in range(calls):
                call()
            after = resource.getrusage(resource.RUSAGE_SELF)
            used[0] += after.ru_utime - before.ru_utime
            used[1] += after.ru_stime - before.ru_stime
        return {name: round(one / rounds / calls * 1e6, 2) for name, one in zip(("user", "system"), used, strict=True)}


def alone(bench: Bench, call: Callable[[], int]) -> None:
    """Raises Refused if a launch fails, also later on the device."""
    status = call()
    if status:
        raise Refused(f"status {status}")
    bench.sync()


def in_turn(launch: Callable[..., int], launches: Sequence[tuple[Any, ...]]) -> Callable[[], int]:
    """A call of `launch` with the arguments of each of `launches`; it returns the first status that is an error."""

    def call() -> int:
        status = 0
        for one in launches:
            status = status or launch(*one)
        return int(status)

    return call


class Case:
    """A prepared layer with one number of tokens."""

    def __init__(self, bench: Bench, name: str, stored: str, tokens: int) -> None:
        from bench import hopper_bench, w8a8_bench
        from bench.timing import SHAPES, inputs

        shape, device = SHAPES[name], "meta" if bench.dry else "cuda"
        if stored == "w8a8":
            experts = w8a8_bench.random_experts(shape, "int8", device)
        else:
            experts = hopper_bench.random_experts(shape, hopper_bench.FORMATS[stored], device)
        x = torch.empty(0, shape.hidden, dtype=torch.bfloat16, device=device)
        gpu = "H200" if bench.dry else None
        epilogue = hopper_bench.epilogue_of(shape)
        self.layer = layer = prepare_for(x, experts, shape.top_k, 512, epilogue, None, gpu=gpu)
        if bench.dry:
            pretended_driver.take_cpu(layer)
            x = torch.zeros(tokens, shape.hidden, dtype=torch.bfloat16)
            ids = torch.zeros(tokens, shape.top_k, dtype=torch.int32)
            given = [(x, torch.zeros(tokens, shape.top_k), ids), (x.clone(), torch.zeros(tokens, shape.top_k), ids)]
        else:
            drawn = [inputs(shape, tokens, seed) for seed in (1, 2)]
            given = [(one.x, one.weights, one.ids) for one in drawn]
        self.given = given
        self.outs = [torch.empty_like(one[0]) for one in given]
        self.workspace = torch.zeros(layer.workspace_bytes(tokens), dtype=torch.uint8, device=self.outs[0].device)
        planned = schedule(layer.family, layer.problem, tokens, None)
        begin = time.perf_counter()
        wanted = [specialise(one) for one in planned.launches]
        compile_all(wanted, layer.problem.gpu)
        self.compiling = time.perf_counter() - begin
        self.first = []
        for _ in range(3):
            begin = time.perf_counter()
            self.call()
            self.first.append(round((time.perf_counter() - begin) * 1e6, 1))
            bench.sync()
        self.bound = layer._program.bounds[tokens]
        self.replaying(False)
        self.codes = [load(one, layer.problem.gpu, 0) for one in wanted]
        self.names = [code.name for code, _ in self.codes]
        self.launches = list(self.bound._launches)
        self.configs = list(self.bound._configs)
        weights = layer._weights
        self.addresses = [
            [*(one.data_ptr() for one in tensors), out.data_ptr(), self.workspace.data_ptr(), 0, *weights]
            for tensors, out in zip(given, self.outs, strict=True)
        ]

    def call(self, which: int = 0) -> None:
        """A call as users make it."""
        self.layer(*self.given[which], out=self.outs[which], workspace=self.workspace)

    def replaying(self, on: bool) -> None:
        """Whether calls may go through graphs of the product's own."""
        self.bound._replays._off = not on

    def run(self, stream: int = 0, which: int = 0) -> None:
        """The same without what Python checks around it."""
        self.bound.run(self.addresses[which], self.layer._maps, stream)

    def fill(self, stream: int = 0, which: int = 0) -> None:
        """Writes the addresses without launching."""
        self.bound._launches = []
        self.run(stream, which)
        self.bound._launches = list(self.launches)

    def direct(self) -> int:
        """The launches with what `fill` wrote."""
        launch, status = driver().launch, 0
        for address, function, parameters in self.launches:
            status = status or launch(address, function, parameters, None)
        return int(status)


class Graph:
    """A case's launches, captured."""

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
        """A graph of the launches with the addresses that were filled in last."""
        self.case.fill(self.stream)
        self.cuda.cuStreamBeginCapture_v2(self.stream, RELAXED)
        status, handle = self.case.direct(), c_void_p()
        self.cuda.cuStreamEndCapture(self.stream, byref(handle))
        self.case.fill()
        if status:
            raise Refused(f"capturing a launch: {status}")
        return handle.value or 0

    def about(self) -> dict[str, Any]:
        """Whether nodes come in the order of launches, and the kinds of edges."""
        order, found = [], NodeParams()
        for node in self.nodes:
            self.cuda.cuGraphKernelNodeGetParams_v2(node, byref(found))
            order.append(found.function)
        count = c_size_t()
        self.cuda.cuGraphGetEdges_v2(self.graph, None, None, None, byref(count))
        one, two = (c_void_p * count.value)(), (c_void_p * count.value)()
        data = (c_uint8 * (8 * count.value))()
        self.cuda.cuGraphGetEdges_v2(self.graph, one, two, data, byref(count))
        edges = [
            {"from": self.nodes.index(a), "to": self.nodes.index(b), "data": list(data[8 * i : 8 * i + 3])}
            for i, (a, b) in enumerate(zip(one, two, strict=True))
        ]
        return {"in order": order == [one[1] for one in self.case.launches], "edges (ports, type)": edges}

    def launch(self) -> int:
        """Replays it on torch's stream."""
        return int(self.cuda.library.cuGraphLaunch(self.exec, 0))

    def update(self) -> int:
        """Sets the parameters of all nodes."""
        status, change = 0, self.cuda.library.cuGraphExecKernelNodeSetParams_v2
        for node, params in zip(self.nodes, self.params, strict=True):
            status = status or change(self.exec, node, byref(params))
        return int(status)

    def both(self) -> None:
        """Parameters, then replays."""
        self.update()
        self.launch()

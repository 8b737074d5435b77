"""What a launch costs the host, and what would cost less: the driver's calls by themselves, one thing changed at once.

    python kernels/bench/launch_cost.py --out results.json [--cases qwen3-30b:int4:8] [--dry-run]

Of a prepared layer's real launches: as they are, without the attribute for dependent launches, through cuLaunchKernel,
with parameters in one buffer, from C, on other streams, with more or fewer calls under way, behind a GPU that is kept
busy, and as a graph (launching it, setting parameters of its nodes, its time on the GPU). Of empty kernels: the same by
bytes of parameters, shared memory and modules. What fails is noted and the rest goes on.

Host times are medians of rounds that begin with an idle device. `--dry-run`: a driver that does nothing, no GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_size_t, c_uint8, c_uint64, c_void_p
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support import pretended_driver

from bench.launch_timing import NON_BLOCKING, STAND_IN, Bench, Case, Graph, alone, in_turn
from moeq_kernels.cuda import LaunchAttribute, LaunchConfig, driver

CASES = "qwen3-30b:int4:8,qwen3-30b:int4:200,mixtral-tp8:int4:64,qwen3-30b:w8a8:200"
PER_THREAD = 2
BUFFER_POINTER, BUFFER_SIZE = 1, 2

LOOP = """
typedef int (*launch)(const void *, void *, void **, void **);
int sequence(launch call, long count, void **what) {
    for (long i = 0; i < count; i++) {
        int status = call(what[3 * i], what[3 * i + 1], (void **)what[3 * i + 2], 0);
        if (status) return status;
    }
    return 0;
}
"""
_SIZES = (0, 64, 256, 512, 1024, 2048, 4000)
PTX = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry p0() { ret; }\n" + "".join(
    f".visible .entry p{size}(.param .align 64 .b8 a[{size}]) {{ ret; }}\n" for size in _SIZES[1:]
)


def machine(bench: Bench) -> dict[str, Any]:
    """Processor, driver and settings."""
    version = c_int()
    bench.cuda.cuDriverGetVersion(byref(version))
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")
    flags = next((line for line in lines if line.startswith("flags")), "")
    nvidia = Path("/proc/driver/nvidia/version")
    return {
        "processor": model,
        "hypervisor": " hypervisor" in flags,
        "cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "driver": version.value,
        "nvidia": next(iter(re.findall(r"\b\d+\.\d+\.\d+\b", nvidia.read_text())), "?") if nvidia.exists() else "?",
        "settings": {name: value for name, value in os.environ.items() if name.startswith("CUDA_")},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": "none" if bench.dry else torch.cuda.get_device_name(),
    }


def basics(bench: Bench, where: str) -> None:
    """What the measuring itself costs, and calls that do next to nothing."""
    cuda, value, handle = bench.cuda.library, c_int(), c_void_p()
    calls: dict[str, Callable[[], Any]] = {
        "perf_counter": time.perf_counter,
        "a ctypes call (cuDriverGetVersion)": lambda: cuda.cuDriverGetVersion(byref(value)),
        "cuCtxGetCurrent": lambda: cuda.cuCtxGetCurrent(byref(handle)),
        "cuStreamIsCapturing": lambda: cuda.cuStreamIsCapturing(0, byref(value)),
        "cuEventRecord": lambda: cuda.cuEventRecord(bench.events[0], 0),
        "1000 turns of a loop": lambda: sum(range(1000)),
    }
    for name, call in calls.items():
        bench.note(f"{where}/{name}", lambda call=call: bench.host_us(call, 50))


def compiled_loop(folder: Path) -> Any:
    """`sequence` of LOOP; raises OSError where there is no compiler."""
    (folder / "loop.c").write_text(LOOP)
    built = folder / "loop.so"
    subprocess.run(["gcc", "-O2", "-w", "-shared", "-fPIC", folder / "loop.c", "-o", built], check=True)
    function = ctypes.CDLL(str(built)).sequence
    function.argtypes = [c_void_p, ctypes.c_long, c_void_p]
    return function


def from_c(sequence: Any, launches: Sequence[Sequence[Any]]) -> Callable[[], int]:
    """The launches in one call of C."""
    flat = [int(one or 0) for launch in launches for one in launch[:3]]
    what = (c_void_p * len(flat))(*flat)
    address = ctypes.cast(driver().launch, c_void_p).value
    return lambda: sequence(address, len(launches), what)


def dependent(configs: Sequence[LaunchConfig], numbers: Sequence[int]) -> None:
    """Sets how many attributes each launch has."""
    for config, number in zip(configs, numbers, strict=True):
        config.number = number


def each(bench: Bench, case: Case) -> list[dict[str, float]]:
    """Microseconds of each launch of a call."""
    launch, times = driver().launch, [list[float]() for _ in case.launches]
    for number in range(bench.rounds * 10):
        if number % 10 == 0:
            bench.sync()
        for place, (address, function, parameters) in enumerate(case.launches):
            begin = time.perf_counter()
            launch(address, function, parameters, None)
            times[place].append((time.perf_counter() - begin) * 1e6)
    return [{"median": round(statistics.median(one), 2), "least": round(min(one), 2)} for one in times]


def launching(bench: Bench, case: Case, where: str, sequence: Any) -> None:
    """Part (a) and (c) of a layer's launches."""

    def note(name: str, what: Callable[[], Any]) -> Any:
        return bench.note(f"{where}/{name}", what)

    usual = [config.number for config in case.configs]
    kernels = [
        {"name": code.name, "parameters": len(code.parameters), "bytes": sum(code.parameters), "maps": len(code.boxes),
         "shared": code.shared, "programs": config.grid_x * config.grid_y * config.grid_z, "dependent": number}
        for (code, _), config, number in zip(case.codes, case.configs, usual, strict=True)
    ]  # fmt: skip
    note("kernels", lambda: kernels)
    note("compiling_s", lambda: case.compiling)
    note("first, second, third call", lambda: case.first)
    note("call", lambda: bench.host_us(case.call))
    note("Bound.run", lambda: bench.host_us(case.run))
    case.replaying(True)
    note("call, replayed", lambda: bench.host_us(case.call))
    turns = itertools.cycle((0, 1))
    note("call, replayed, tensors in turns", lambda: bench.host_us(lambda: case.call(next(turns))))
    case.replaying(False)
    case.fill()
    note("launches alone", lambda: bench.host_us(case.direct))
    note("launches alone, processor time", lambda: bench.processor(case.direct))

    def python_only() -> float:
        case.bound._launches = []
        try:
            return bench.host_us(case.call)
        finally:
            case.bound._launches = list(case.launches)

    note("call without launches", python_only)
    for calls in (1, 2, 5, 20, 50, 150):
        note(f"calls under way/{calls}", lambda calls=calls: bench.host_us(case.call, calls))
    note("calls under way/10 behind a busy GPU", lambda: bench.host_us(case.call, 10, busy=True))

    note("each launch", lambda: each(bench, case))
    if sequence is not None:
        note("launches alone, from C", lambda: bench.host_us(from_c(sequence, case.launches)))


def otherwise(bench: Bench, case: Case, where: str) -> None:
    """The same launches in other ways."""

    def note(name: str, what: Callable[[], Any]) -> Any:
        return bench.note(f"{where}/{name}", what)

    usual = [config.number for config in case.configs]
    dependent(case.configs, [0] * len(usual))
    note("no dependent launches", lambda: bench.host_us(case.direct))
    note("no dependent launches, each", lambda: each(bench, case))
    dependent(case.configs, usual)

    plain = [
        (c_void_p(function), *(getattr(config, f"{what}_{axis}") for what in ("grid", "block") for axis in "xyz"),
         config.shared, 0, c_void_p(parameters), None)
        for config, (_, function, parameters) in zip(case.configs, case.launches, strict=True)
    ]  # fmt: skip

    def through_plain() -> None:
        for one in plain:
            bench.cuda.library.cuLaunchKernel(*one)

    note("cuLaunchKernel", lambda: bench.host_us(through_plain))

    def in_buffers() -> float:
        kept, launches, offset, size = [], [], c_size_t(), c_size_t()
        for (code, _), (address, function, parameters) in zip(case.codes, case.launches, strict=True):
            pointers = (c_void_p * len(code.parameters)).from_address(parameters)
            memory, end = (c_uint8 * 4352)(), 0
            for place, source in enumerate(pointers):
                bench.cuda.cuFuncGetParamInfo(function, place, byref(offset), byref(size))
                ctypes.memmove(ctypes.addressof(memory) + offset.value, source, code.parameters[place])
                end = max(end, offset.value + code.parameters[place])
            count = c_size_t(end)
            extra = (c_void_p * 5)(BUFFER_POINTER, ctypes.addressof(memory), BUFFER_SIZE, ctypes.addressof(count), 0)
            kept.append((memory, count, extra))
            launches.append((address, function, None, ctypes.addressof(extra)))
        call = in_turn(driver().launch, launches)
        alone(bench, call)
        return bench.host_us(call)

    note("parameters in one buffer", in_buffers)
    streams = {"per thread": PER_THREAD}
    for name, flag in (("another blocking", 0), ("another non-blocking", NON_BLOCKING)):
        made = note(f"streams/{name}, handle", lambda flag=flag: bench.cuda.made("cuStreamCreate", flag))
        if isinstance(made, int):
            streams[name] = made
    for name, stream in streams.items():
        case.fill(stream)
        note(f"streams/{name}", lambda: bench.host_us(case.direct))
    case.fill()


def many(bench: Bench, graph: Graph, count: int = 32) -> dict[str, float]:
    """Executable graphs of the same launches, as layers would have them: their memory, and launching them in turns."""

    def free() -> int:
        return 0 if bench.dry else torch.cuda.mem_get_info()[0]

    cuda, before, begin = bench.cuda, free(), time.perf_counter()
    made = [cuda.made("cuGraphInstantiateWithFlags", graph.graph, 0) for _ in range(count)]
    took = (time.perf_counter() - begin) / count * 1e6
    launch = cuda.library.cuGraphLaunch

    def call() -> None:
        for one in made:
            launch(one, 0)

    call()
    bench.sync()
    used = (before - free()) / count
    host = bench.host_us(call, 1) / count
    for one in made:
        cuda.cuGraphExecDestroy(one)
    return {"instantiating_us": round(took, 1), "bytes of the device": used, "launch_us": round(host, 2)}


def as_graph(bench: Bench, case: Case, where: str) -> None:
    """Part (b)."""

    def note(name: str, what: Callable[[], Any]) -> Any:
        return bench.note(f"{where}/{name}", what)

    graphs: list[Graph] = []
    note("made", lambda: graphs.append(Graph(bench, case)))
    if not graphs:
        return
    graph = graphs[0]
    note("about", graph.about)
    note("upload", lambda: bench.host_us(lambda: graph.cuda.cuGraphUpload(graph.exec, 0), 1))
    note("launching works", lambda: alone(bench, graph.launch))
    for calls in (1, 2, 5, 10, 20, 50):
        note(f"launch/{calls} under way", lambda calls=calls: bench.host_us(graph.launch, calls))
    note("launch/10 behind a busy GPU", lambda: bench.host_us(graph.launch, 10, busy=True))
    note("launch, processor time", lambda: bench.processor(graph.launch))
    note("setting works", lambda: alone(bench, graph.update))
    note("set all nodes", lambda: bench.host_us(graph.update))
    for place, node in enumerate(graph.nodes):
        one = (graph.exec, node, byref(graph.params[place]))
        change = bench.cuda.library.cuGraphExecKernelNodeSetParams_v2
        note(f"set node {place}", lambda one=one, change=change: bench.host_us(lambda: change(*one)))
    note("set all nodes and launch", lambda: bench.host_us(graph.both))
    note("capture", lambda: bench.host_us(lambda: bench.cuda.cuGraphDestroy(graph.captured()), 2))

    def instantiate() -> None:
        bench.cuda.cuGraphExecDestroy(bench.cuda.made("cuGraphInstantiateWithFlags", graph.graph, 0))

    note("instantiate and destroy", lambda: bench.host_us(instantiate, 2))
    info = (c_uint64 * 4)()
    note("update from the graph", lambda: bench.host_us(
        lambda: bench.cuda.cuGraphExecUpdate_v2(graph.exec, graph.graph, info), 2))  # fmt: skip
    note("many", lambda: many(bench, graph))
    plans: dict[str, Callable[[], Any]] = {"launches": case.direct, "graph": graph.launch, "set and graph": graph.both}
    for name, call in plans.items():
        note(f"gpu/{name}, alone on an idle stream", lambda call=call: bench.gpu_us(call, 1, queued=False))
        note(f"gpu/{name}, alone behind others", lambda call=call: bench.gpu_us(call, 1, queued=True))
        note(f"gpu/{name}, one of 20 behind others", lambda call=call: bench.gpu_us(call, 20, queued=True))
        note(f"gpu/{name}, one of 20 as they come", lambda call=call: bench.gpu_us(call, 20, queued=False))
        note(f"latency/{name}", lambda call=call: bench.latency_us(call))

    def right() -> list[bool] | str:
        if bench.dry:
            return "there are none"
        results = []
        for which in (0, 1, 0):
            case.call(which)
            bench.sync()
            wanted = case.outs[which].clone()
            case.outs[which].zero_()
            case.fill(0, which)
            graph.both()
            bench.sync()
            results.append(bool(torch.equal(wanted, case.outs[which])))
        case.fill()
        graph.update()
        return results

    note("same numbers with addresses that change", right)
    note("freed", lambda: (bench.cuda.cuGraphExecDestroy(graph.exec), bench.cuda.cuGraphDestroy(graph.graph))[0])


def empties(bench: Bench, where: str, sequence: Any) -> None:
    """Launches of kernels that do nothing."""
    cuda, launch, count = bench.cuda, driver().launch, 10
    module = cuda.made("cuModuleLoadData", PTX.encode())
    other = cuda.made("cuModuleLoadData", PTX.encode())
    functions = {size: cuda.made("cuModuleGetFunction", module, f"p{size}".encode()) for size in _SIZES}
    second = cuda.made("cuModuleGetFunction", other, b"p0")
    cuda.cuFuncSetAttribute(functions[64], 8, 200_000)
    memory = (c_uint8 * 4096)()
    parameters = (c_void_p * 1)(ctypes.addressof(memory))
    attribute = LaunchAttribute(6, 0, 1)

    def row(function: int, number: int = 0, shared: int = 0, programs: int = 132, stream: int = 0) -> tuple[Any, ...]:
        config = LaunchConfig(programs, 1, 1, 128, 1, 1, shared, stream, ctypes.pointer(attribute), number)
        kept.append(config)
        return ctypes.addressof(config), function, ctypes.addressof(parameters), None

    kept: list[LaunchConfig] = []
    first = functions[0]
    rows = {f"{size} bytes": [row(functions[size])] for size in _SIZES}
    rows |= {f"{size} bytes, dependent": [row(functions[size], 1)] for size in (0, 512)}
    rows["one program"] = [row(first, programs=1)]
    rows["200 KB of shared memory"] = [row(functions[64], shared=200_000)]
    rows["200 KB and none in turns"] = [row(functions[64], shared=200_000), row(first)]
    rows["two functions in turns"] = [row(first), row(functions[256])]
    rows["two modules in turns"] = [row(first), row(second)]
    rows["dependent and not in turns"] = [row(first, 1), row(first)]
    rows["stream of the thread"] = [row(first, stream=PER_THREAD)]
    rows["another stream"] = [row(first, stream=cuda.made("cuStreamCreate", NON_BLOCKING))]

    def timed(launches: list[tuple[Any, ...]], busy: bool = False) -> float:
        turns = [one for _ in range(count // len(launches)) for one in launches]
        call = in_turn(launch, turns)
        alone(bench, call)
        return bench.host_us(call, 4, busy) / len(turns)

    for name, launches in rows.items():
        bench.note(f"{where}/{name}", lambda launches=launches: timed(launches))
    bench.note(f"{where}/0 bytes, behind a busy GPU", lambda: timed(rows["0 bytes"], busy=True))
    if sequence is not None:
        turns = rows["0 bytes"] * count
        bench.note(f"{where}/0 bytes, from C", lambda: bench.host_us(from_c(sequence, turns), 4) / count)


def one_case(bench: Bench, text: str, sequence: Any) -> None:
    """All parts of `shape:format:tokens`."""
    name, stored, tokens = text.split(":")
    case = Case(bench, name, stored, int(tokens))
    launching(bench, case, text, sequence)
    otherwise(bench, case, text)
    as_graph(bench, case, f"{text}/graph")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", default=CASES, help="shape:format:tokens; formats of hopper_bench.py, or w8a8")
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
        bench = Bench(given.out, given.seconds, given.dry_run)
        bench.note("machine", lambda: machine(bench))
        basics(bench, "basics")
        loops: list[Any] = []
        bench.note("loop in C", lambda: loops.append(compiled_loop(folder)))
        sequence = loops[0] if loops else None
        for number, text in enumerate(given.cases.split(",")):
            bench.note(f"{text}/over", partial(one_case, bench, text, sequence))
            if number == 0:
                bench.note("empty kernels/over", partial(empties, bench, "empty kernels", sequence))
    return 0


if __name__ == "__main__":
    sys.exit(main())

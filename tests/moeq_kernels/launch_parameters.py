"""Every parameter of every launch, as its kernel would read it from the memory that the driver is handed.

A stand-in takes the driver's place, since there is none here, and nothing is compiled. It keeps parameters as the
driver does: of a launch those of that moment, of a graph those that were captured or set last. `test_warming.py` runs
this in a process without Triton's interpreter.
"""

from __future__ import annotations

import ctypes
import itertools
import linecache
import random
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from support.cases import meta_experts

from moeq_kernels import cuda, prepare, replay
from moeq_kernels.areas import Area, Box
from moeq_kernels.cuda import MOVING, Bound, LaunchConfig, arguments_of
from moeq_kernels.programs import Program
from moeq_kernels.schedules import schedule


class Driver(replay.Graphs):
    """Keeps what it is told; functions are numbered from 1 on, as the launches of a call."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, tuple[int, ...], int, list[tuple[int, int]]]] = []
        self.described: dict[int, int] = {}  # descriptor to base
        self.arguments: list[list[Any]] = []  # of each function
        self.captured: list[Any] | None = None
        self.busy: set[int] = set()  # streams that somebody captures
        self.graphs: dict[int, list[Any]] = {}
        self.priorities: dict[int, int] = {}
        self.capturing_on = self.replayed = self.destroyed = self.changed = self.mode = 0
        self.refusing, self.interrupting = "", False
        self.building = threading.Lock()
        self.functions = {name: self.function(name) for name in replay._HANDLES}
        self.asked, self.change = (
            self.functions[name] for name in ("cuStreamIsCapturing", "cuGraphExecKernelNodeSetParams_v2")
        )

    def context(self, device: int) -> int:
        return 1 + device

    def set_context(self, context: Any) -> int:
        return 0

    def check(self, status: int, what: str) -> None:
        assert status == 0

    def encode(self, address: int, kind: int, rank: int, base: int, *more: Any) -> int:
        self.described[address] = base
        return 0

    def values(self, function: int, parameters: int) -> list[tuple[int, int]]:
        """Where each parameter is, and what is there now."""
        arguments = self.arguments[function - 1]
        places = (ctypes.c_uint64 * len(arguments)).from_address(parameters)
        found = []
        for place, argument in zip(places, arguments, strict=True):
            if isinstance(argument, Box):
                found.append((place, self.described.get(place, 0)))
            else:
                kind = ctypes.c_uint64 if isinstance(argument, Area) else type(argument)
                found.append((place, kind.from_address(place).value))
        return found

    def launch_one(self, config: int, function: int, parameters: int, extra: None) -> int:
        """cuLaunchKernelEx."""
        read = LaunchConfig.from_address(config)
        grid, values = (read.grid_x, read.grid_y, read.grid_z), self.values(function, parameters)
        if self.captured is not None and read.stream == self.capturing_on:
            if self.interrupting:
                self.interrupting = False
                raise KeyboardInterrupt
            self.captured.append((function, grid, values))
        else:
            self.launched.append((function, grid, read.stream or 0, values))
        return 0

    def function(self, name: str) -> Callable[..., int]:
        """One of the driver's, by name."""

        def called(*given: Any) -> int:
            if name == self.refusing:
                return 801
            getattr(self, f"_{name}")(*given)
            return 0

        return called

    def launch(self, *given: Any) -> int:  # type: ignore[override]
        """cuLaunchKernelEx or cuGraphLaunch: what `Bound` and `Replay` take from a driver has one name."""
        return self.launch_one(*given) if len(given) == 4 else self.functions["cuGraphLaunch"](*given)

    def _cuStreamGetPriority(self, stream: int, out: Any) -> None:
        out._obj.value = -3 if stream == 72 else 0

    def _cuStreamCreateWithPriority(self, out: Any, flags: int, priority: int) -> None:
        assert flags == 1
        out._obj.value = 999 - priority

    def _cuStreamIsCapturing(self, stream: int, out: Any) -> None:
        assert stream > 1, "asked for the legacy stream"
        out._obj.value = int(stream in self.busy)

    def _cuThreadExchangeStreamCaptureMode(self, mode: Any) -> None:
        mode._obj.value, self.mode = self.mode, mode._obj.value

    def _cuStreamBeginCapture_v2(self, stream: int, mode: int) -> None:
        assert (mode, self.mode, self.captured) == (2, 2, None)
        self.captured, self.capturing_on = [], stream

    def _cuStreamEndCapture(self, stream: int, out: Any) -> None:
        assert self.captured is not None
        out._obj.value = len(self.graphs) + 1
        self.priorities[len(self.graphs) + 1] = 999 - stream
        self.graphs[len(self.graphs) + 1], self.captured = self.captured, None

    def _cuGraphGetNodes(self, graph: int, nodes: Any, count: Any) -> None:
        count._obj.value = len(self.graphs[graph])
        for place in range(len(nodes or ())):
            nodes[place] = 1000 + len(nodes) - 1 - place  # backwards: the order is that of the edges

    def _cuGraphGetEdges_v2(self, graph: int, before: Any, after: Any, kinds: Any, count: Any) -> None:
        count._obj.value = len(self.graphs[graph]) - 1
        for place in range(len(before or ())):
            before[place], after[place] = 1000 + place, 1001 + place

    def _cuGraphInstantiateWithFlags(self, out: Any, graph: int, flags: int) -> None:
        out._obj.value = len(self.graphs) + 1
        self.priorities[len(self.graphs) + 1] = self.priorities[graph]
        self.graphs[len(self.graphs) + 1] = list(self.graphs[graph])

    def _cuGraphExecKernelNodeSetParams_v2(self, graph: int, node: int, params: int) -> None:
        read = replay.NodeParams.from_address(params)
        function, grid, _ = self.graphs[graph][node - 1000]
        assert (read.function, tuple(read.grid), read.extra, read.kernel) == (function, grid, None, None)
        self.graphs[graph][node - 1000] = function, grid, self.values(function, read.parameters)
        self.changed += 1

    def _cuGraphLaunch(self, graph: int, stream: int) -> None:
        assert self.priorities[graph] == (-3 if stream == 72 else 0), "nodes have another stream's priority"
        self.launched += [(function, grid, stream, values) for function, grid, values in self.graphs[graph]]
        self.replayed += 1

    def _cuGraphExecDestroy(self, graph: int) -> None:
        assert self.mode == 2
        self.destroyed += 1

    def _cuGraphDestroy(self, graph: int) -> None:
        pass


class Calls:
    """Launches of a family's layers for so many tokens, and what their parameters have to be."""

    def __init__(self, family: str, tokens: int) -> None:
        self.driver = driver = Driver()
        cuda.driver = lambda: driver  # type: ignore[assignment]
        replay.graphs = lambda: driver  # type: ignore[assignment]
        replay._capture_stream.cache_clear()
        problem = prepare(meta_experts(8, 512, 256), top_k=2, max_tokens=tokens, gpu="H200").problem
        planned = schedule(family, problem, tokens)
        self.launches = [launch for launch in planned.launches if 0 not in launch.programs]
        driver.arguments = [arguments_of(launch, cuda.specialise(launch)) for launch in self.launches]
        numbers = iter(range(len(self.launches)))

        def load(*_: Any) -> tuple[Any, Any]:
            number = next(numbers)
            arguments = driver.arguments[number]
            boxes = [(0, value.area.shape) for value in arguments if isinstance(value, Box)]
            sizes = tuple(cuda.size_of(one) for one in arguments)
            code = SimpleNamespace(boxes=boxes, parameters=sizes, warps=4, shared=0, name="kernel")
            return code, ctypes.c_void_p(number + 1)

        cuda.load = load  # type: ignore[assignment]
        self.roots = Program(family, problem, 0, None, None).roots
        self.maps: dict[Any, int] = {}
        self.bound = Bound(planned, self.roots, self.maps, problem.gpu, 0)
        self.described: dict[int, list[int]] = {}
        self.looked, self.wrong = 0, list[str]()

    def call(self, layer: int, tensors: int, stream: int, out: int = 0) -> None:
        """A call of a layer, with tensors (and another `out`) elsewhere, and a look at its parameters."""
        moved = {name: tensors << 24 for name in MOVING} | {"out": (tensors + out) << 24}
        addresses = [
            (layer << 40) * (name not in MOVING) + (number << 32) + moved.get(name, 0)
            for number, name in enumerate(self.roots)
        ]
        many = [(layer << 20) + 128 * number for number in range(len(self.maps))]
        described = self.described.setdefault(layer, many)  # a layer keeps its list
        self.driver.launched.clear()
        self.bound.run(addresses, described, stream)
        assert [function for function, *_ in self.driver.launched] == [n + 1 for n in range(len(self.launches))]
        for (number, grid, on, values), launch in zip(self.driver.launched, self.launches, strict=True):
            assert grid == (*launch.programs, 1, 1)[:3]
            assert on == stream
            for argument, (place, found) in zip(self.driver.arguments[number - 1], values, strict=True):
                if isinstance(argument, Area):
                    expected = addresses[self.roots.index(argument.root)] + argument.offset
                elif isinstance(argument, Box) and argument.area.root in MOVING:
                    expected = addresses[self.roots.index(argument.area.root)] + argument.area.offset
                elif isinstance(argument, Box):
                    expected, found = described[self.maps[argument.area, 0, argument.area.shape]], place
                else:
                    expected = argument.value
                self.looked += 1
                if found != expected:
                    self.wrong.append(f"{launch.kernel} of {number}: {found:#x}, not {expected:#x}")


def wrong_parameters(family: str, tokens: int) -> tuple[int, list[str]]:
    """How many parameters were looked at, and those that are not what the schedule says."""
    calls = Calls(family, tokens)
    for layer in (1, 2, 1):  # other addresses, other descriptors, another stream
        calls.call(layer, layer, 70 + layer)
    assert calls.driver.replayed == 0
    return calls.looked, calls.wrong


def wrong_replays(family: str, tokens: int) -> tuple[int, list[str]]:
    """Replays of graphs and wrong parameters, over calls that change layers, tensors and streams at random."""
    calls, draw = Calls(family, tokens), random.Random(tokens)
    driver = calls.driver
    stream = 0
    for number in range(300):
        stream = draw.choice((0, 71, 72, 73)) if draw.random() < 0.1 else stream
        driver.busy = {stream} if stream and draw.random() < 0.1 else set()
        before = driver.replayed
        calls.call(draw.choice((1, 1, 2)), draw.choice((1, 1, 1, 2, 3)), stream)
        if driver.busy:
            assert driver.replayed == before, f"call {number} replayed into a capture"
    replayed, stream, driver.busy = driver.replayed, next(iter(calls.bound._replays._by_stream)), set()
    calls.call(1, 1, stream)
    before, changed = driver.replayed, driver.changed
    for _ in range(5):
        calls.call(1, 1, stream)
    assert driver.replayed == before + 5
    assert driver.changed == changed, "nodes are set again though nothing changed"
    changed = driver.changed
    calls.call(1, 1, stream, out=5)
    writing = sum(any(isinstance(one, Area) and one.root == "out" for one in given) for given in driver.arguments)
    assert driver.changed - changed == writing, "not just the nodes that write to out"
    driver.refusing = "cuGraphExecKernelNodeSetParams_v2"
    made = len(driver.graphs)
    for tensors in range(12):  # a driver that refuses: launches one by one
        calls.call(1, 10 + tensors, stream)
    assert len(driver.graphs) == made
    return replayed, calls.wrong


def wrong_after_interrupts(tokens: int) -> tuple[int, int, list[str]]:
    """Replays, interrupts and wrong parameters, where each line of a call is interrupted once and others follow.

    They are interrupted where something has changed: layer, tensors and stream, one of which has a graph.
    """
    calls, files, replay.MAX_KEPT_STREAMS = Calls("hopper-w4a16", tokens), {cuda.__file__, replay.__file__}, 1
    calls.driver.interrupting = True
    for number in range(2 * replay.REPLAY_AFTER):
        with suppress(KeyboardInterrupt):
            calls.call(1, 1, 71)
        assert calls.driver.captured is None, f"call {number} has left a stream in its capture"
    interrupts, done = 0, False
    while not done:
        done = True
        for stream, skipped in itertools.product((71, 74), (0, 1)):
            left = interrupts

            def trace(frame: Any, event: str, _argument: Any) -> Any:
                nonlocal left
                if frame.f_code.co_filename not in files:
                    return None
                # Not where a `with` ends, before it gives its lock back: Python is not interrupted there.
                line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
                left -= event == "line" and not line.lstrip().startswith("with ")
                if left < 0:
                    raise KeyboardInterrupt
                return trace

            sys.settrace(trace)
            try:
                calls.call(2, 2, stream)
            except KeyboardInterrupt:
                done = False
            finally:
                sys.settrace(None)
            for layer, other in ((1, 75), (1, 71), (2, 71), (1, 71), (1, 75))[skipped:]:
                calls.call(layer, layer, other)
        interrupts += 1
    return calls.driver.replayed, interrupts, calls.wrong


def graphs_left(streams: int, kept: int) -> tuple[int, int, int]:
    """Graphs that were made, given back, and wrong parameters, where so many may be kept."""
    replay.MAX_KEPT_GRAPHS, replay.MAX_KEPT_STREAMS = kept, streams
    calls = Calls("hopper-w4a16", 33)
    for number in range(3 * streams):
        for _ in range(replay.REPLAY_AFTER + 2):
            calls.call(1, 1, number % streams + 71)
    made = len(calls.driver.graphs) // 2
    return made, calls.driver.destroyed, len(calls.wrong)

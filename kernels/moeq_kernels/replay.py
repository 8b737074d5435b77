"""Replay of a call's launches as one executable graph, which costs the host less than two launches.

Setting the parameters of a node costs a fifth of a launch, so one graph serves calls with other addresses and all
layers with the same launches. Structures follow cuda.h of CUDA 12, and a test compares them with the header.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from ctypes import Structure, byref, c_int, c_size_t, c_uint, c_uint8, c_uint64, c_void_p
from functools import cache
from typing import Any, ClassVar

from moeq_kernels.errors import KernelEnvironmentError

#: Consecutive calls on one stream before a graph is built, which takes as long as two calls.
REPLAY_AFTER = 4
#: Upper bound of the streams with a graph of their own, per number of tokens.
MAX_KEPT_STREAMS = 2
#: Upper bound of the graphs of a process, each of 64 to 128 KiB of device memory; the oldest is evicted first.
MAX_KEPT_GRAPHS = 128

NON_BLOCKING = 1
RELAXED = 2
#: Handles of the legacy default stream, which is never captured; a query fails while another stream is.
LEGACY_STREAMS = (0, 1)
_HANDLES = {
    "cuStreamGetPriority": (c_void_p, c_void_p),
    "cuStreamCreateWithPriority": (c_void_p, c_uint, c_int),
    "cuStreamIsCapturing": (c_void_p, c_void_p),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, c_void_p),
    "cuThreadExchangeStreamCaptureMode": (c_void_p,),
    "cuGraphGetNodes": (c_void_p, c_void_p, c_void_p),
    "cuGraphGetEdges_v2": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    "cuGraphInstantiateWithFlags": (c_void_p, c_void_p, c_uint64),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphExecKernelNodeSetParams_v2": (c_void_p, c_void_p, c_void_p),
    "cuGraphExecDestroy": (c_void_p,),
    "cuGraphDestroy": (c_void_p,),
}


@contextmanager
def relaxed(exchange: Callable[..., int]) -> Iterator[None]:
    """Relax this thread's capture mode, so that its calls do not invalidate a capture of any thread.

    `exchange` is cuThreadExchangeStreamCaptureMode. Raises KernelEnvironmentError if it fails.
    """
    mode = c_int(RELAXED)
    status = exchange(byref(mode))
    if status:
        raise KernelEnvironmentError(f"the capture mode of a thread cannot be changed (CUDA error {status})")
    try:
        yield
    finally:
        exchange(byref(mode))


class NodeParams(Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("parameters", c_void_p),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


class Graphs:
    """Driver functions for graphs, from CUDA 12.3 on. Raises KernelEnvironmentError if one is missing."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
            functions = {name: getattr(library, name) for name in _HANDLES}
        except (OSError, AttributeError) as error:
            raise KernelEnvironmentError(f"the CUDA driver has no such graphs: {error}") from None
        for name, types in _HANDLES.items():
            functions[name].argtypes = list(types)
        self.functions: dict[str, Callable[..., int]] = functions
        self.launch = functions["cuGraphLaunch"]
        self.change = functions["cuGraphExecKernelNodeSetParams_v2"]
        self.asked, self.building = functions["cuStreamIsCapturing"], threading.Lock()

    def call(self, name: str, *given: Any) -> None:
        """Call a driver function. Raises KernelEnvironmentError if it fails."""
        status = self.functions[name](*given)
        if status:
            raise KernelEnvironmentError(f"{name} failed (CUDA error {status})")

    def made(self, name: str, *given: Any) -> int:
        """Call a driver function and return the handle that it stores through its first parameter."""
        handle = c_void_p()
        self.call(name, byref(handle), *given)
        return handle.value or 0

    def capturing(self, stream: int) -> bool:
        """Return whether a stream is being captured, or its state is unknown."""
        if stream in LEGACY_STREAMS:
            return False
        state = c_int()
        return bool(self.asked(stream, byref(state)) or state.value)

    def relaxed(self) -> AbstractContextManager[None]:
        """Call the module-level `relaxed` with this driver."""
        return relaxed(self.functions["cuThreadExchangeStreamCaptureMode"])


@cache
def graphs() -> Graphs | None:
    """Load the functions once; None if the driver lacks them, or if MOEQ_KERNEL_REPLAY=0 disables replay."""
    if os.environ.get("MOEQ_KERNEL_REPLAY") == "0":
        return None
    try:
        return Graphs()
    except KernelEnvironmentError:
        return None


@cache
def _capture_stream(context: int | None, priority: int) -> int:
    """Create a stream for captures in the current context; graph nodes inherit its priority."""
    found = graphs()
    assert found is not None
    return found.made("cuStreamCreateWithPriority", NON_BLOCKING, priority)


class Replay:
    """Launches as an executable graph for one stream.

    Launches of one executable graph wait for each other on all streams, so every stream has a graph of its own.
    Parameters that are set while the graph runs take effect in its next launch.

    `configs` holds the CUlaunchConfig of each launch, whose streams are changed, `launches` the address of the
    configuration, function, and address of the parameters of each, and `users` per root a bit mask of the launches that
    depend on its address.

    Raises KernelEnvironmentError if the driver cannot build the graph.
    """

    def __init__(
        self, configs: Sequence[Any], launches: Sequence[tuple[int, int | None, int]], users: Sequence[int],
        launch: Callable[..., int], context: int | None, stream: int,
    ) -> None:  # fmt: skip
        found = graphs()
        assert found is not None
        self._cuda, self._users = found, users
        self._addresses: list[int] = []
        self._graph = self._exec = 0
        with found.building, found.relaxed():
            priority = c_int()
            found.call("cuStreamGetPriority", stream, byref(priority))
            self._graph = self._captured(configs, launches, launch, _capture_stream(context, priority.value))
            self._exec = found.made("cuGraphInstantiateWithFlags", self._graph, 0)
            nodes = self._nodes()
        if len(nodes) != len(launches):
            raise KernelEnvironmentError(f"a graph of {len(launches)} launches has {len(nodes)} nodes in a row")
        self._params = [
            NodeParams(
                function,
                (one.grid_x, one.grid_y, one.grid_z),
                (one.block_x, one.block_y, one.block_z),
                one.shared,
                parameters,
            )
            for one, (_, function, parameters) in zip(configs, launches, strict=True)
        ]
        self._changes = [
            (1 << place, self._exec, node, ctypes.addressof(params))
            for place, (node, params) in enumerate(zip(nodes, self._params, strict=True))
        ]

    def _captured(self, configs: Sequence[Any], launches: Sequence[Any], launch: Any, stream: int) -> int:
        for config in configs:
            config.stream = stream
        self._cuda.call("cuStreamBeginCapture_v2", stream, RELAXED)
        status, handle = 0, c_void_p()
        try:
            for address, function, parameters in launches:
                status = status or launch(address, function, parameters, None)
        finally:  # otherwise the stream would stay in its capture
            self._cuda.call("cuStreamEndCapture", stream, byref(handle))
            self._graph = handle.value or 0
        if status:
            raise KernelEnvironmentError(f"a launch cannot be captured (CUDA error {status})")
        return self._graph

    def _nodes(self) -> list[int]:
        """Return the nodes in the order of the launches; every node depends on the preceding one only."""
        count = c_size_t()
        self._cuda.call("cuGraphGetNodes", self._graph, None, byref(count))
        nodes = (c_void_p * count.value)()
        self._cuda.call("cuGraphGetNodes", self._graph, nodes, byref(count))
        self._cuda.call("cuGraphGetEdges_v2", self._graph, None, None, None, byref(count))
        edges = [(c_void_p * count.value)() for _ in range(2)]
        kinds = (c_uint8 * (8 * count.value))()
        self._cuda.call("cuGraphGetEdges_v2", self._graph, *edges, kinds, byref(count))
        following = dict(zip(*edges, strict=True))
        found = [one for one in nodes if one not in following.values()][:1]
        while found and found[-1] in following:
            found.append(following[found[-1]])
        return found

    def run(self, addresses: Sequence[int], stream: int) -> int:
        """Launch the graph on a stream with the parameters that are in memory now, and return the driver's status.

        `addresses` are those of the roots: only nodes that depend on a changed address are updated.
        """
        if addresses != self._addresses:
            stale, last = 0, self._addresses or [-1] * len(addresses)
            self._addresses = []  # an exception may leave some nodes updated
            for users, one, other in zip(self._users, addresses, last, strict=True):
                if one != other:
                    stale |= users
            change = self._cuda.change
            for bit, *node in self._changes:
                if stale & bit and (status := change(*node)):
                    return status
            self._addresses = list(addresses)
        return self._cuda.launch(self._exec, stream)

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Destroy the graph; the driver defers that until it no longer runs."""
        if finalizing() or not getattr(self, "_graph", 0):
            return
        try:
            with self._cuda.relaxed():
                if self._exec:
                    self._cuda.functions["cuGraphExecDestroy"](self._exec)
                self._cuda.functions["cuGraphDestroy"](self._graph)
        except KernelEnvironmentError:  # the driver has shut down, and with it the graph
            pass


class Replays:
    """Graphs of one number of tokens by stream; the owner's lock protects them."""

    _ages: ClassVar[deque[tuple[Replays, int]]] = deque()  # all graphs of the process, oldest first: owner, stream

    def __init__(self, users: Sequence[int]) -> None:
        self._users = users
        self._by_stream: dict[int, Replay] = {}
        self._stream, self._calls = -1, 0
        self._off = False

    def run(self, addresses: Sequence[int], stream: int, make: Callable[..., Replay]) -> bool:
        """Replay; return False instead for a stream's first calls, in a capture, and after a failure of graphs."""
        cuda = graphs()
        if self._off or cuda is None:
            return False
        replay = self._by_stream.get(stream)
        if replay is None and not self._soon(stream):
            return False
        if cuda.capturing(stream):
            return False
        try:
            if replay is None:
                replay = self._made(stream, make)
            status = replay.run(addresses, stream)
            if status:
                raise KernelEnvironmentError(f"a graph failed (CUDA error {status})")
        except KernelEnvironmentError:  # single launches will report the cause, if there is one
            self._off, self._by_stream = True, {}
            return False
        return True

    def _soon(self, stream: int) -> bool:
        """Return whether this call should build a graph."""
        if len(self._by_stream) >= MAX_KEPT_STREAMS:
            return False
        self._calls = self._calls + 1 if stream == self._stream else 1
        self._stream = stream
        return self._calls > REPLAY_AFTER

    def _made(self, stream: int, make: Callable[..., Replay]) -> Replay:
        found = make(self._users, stream)
        self._by_stream[stream] = found
        self._calls = 0
        self._ages.append((self, stream))
        while len(self._ages) > MAX_KEPT_GRAPHS:
            other, oldest = self._ages.popleft()
            other._by_stream.pop(oldest, None)  # lock-free: a call that uses the graph holds a reference to it
        return found

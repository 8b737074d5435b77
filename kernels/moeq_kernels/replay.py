"""A call's launches as one executable graph, which the driver launches for less than it takes for two of them.

Setting the parameters of a node costs a fifth of a launch, so a graph serves calls with other addresses too, of any
layer that has the same launches. Structures follow cuda.h of CUDA 12; a test compares them with the header.
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

#: Calls in a row on one stream before they are made a graph, which takes as long as two calls.
REPLAY_AFTER = 4
#: Streams that have a graph of their own, for each number of tokens.
KEPT_STREAMS = 2
#: Graphs of a process, of which the oldest goes first: one takes 64 to 128 KiB of the device.
KEPT_GRAPHS = 128

NON_BLOCKING = 1
RELAXED = 2
#: Handles of the legacy default stream, which is never captured (asking fails while another is).
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
    """What this thread does meanwhile leaves captures alone that it or another thread has begun.

    exchange: cuThreadExchangeStreamCaptureMode. Raises KernelEnvironmentError where it fails.
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
    """The driver's functions for graphs, from CUDA 12.3 on. Raises KernelEnvironmentError where one is missing."""

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
        """Calls a function. Raises KernelEnvironmentError where it fails."""
        status = self.functions[name](*given)
        if status:
            raise KernelEnvironmentError(f"{name} failed (CUDA error {status})")

    def made(self, name: str, *given: Any) -> int:
        """The handle that a function hands out through its first parameter."""
        handle = c_void_p()
        self.call(name, byref(handle), *given)
        return handle.value or 0

    def capturing(self, stream: int) -> bool:
        """Whether what is launched on a stream goes to somebody's graph (or its state cannot be told)."""
        if stream in LEGACY_STREAMS:
            return False
        state = c_int()
        return bool(self.asked(stream, byref(state)) or state.value)

    def relaxed(self) -> AbstractContextManager[None]:
        """As the function of this name."""
        return relaxed(self.functions["cuThreadExchangeStreamCaptureMode"])


@cache
def graphs() -> Graphs | None:
    """The functions, loaded once; None where the driver has none, or MOEQ_KERNEL_REPLAY=0 says not to use them."""
    if os.environ.get("MOEQ_KERNEL_REPLAY") == "0":
        return None
    try:
        return Graphs()
    except KernelEnvironmentError:
        return None


@cache
def _capture_stream(context: int | None, priority: int) -> int:
    """A stream to capture on, one for each context, which has to be current, and priority, which nodes take from it."""
    found = graphs()
    assert found is not None
    return found.made("cuStreamCreateWithPriority", NON_BLOCKING, priority)


class Replay:
    """Launches as an executable graph, for one stream.

    Launches of one executable graph wait for each other, whatever streams they are on; so a stream has its own, and
    streams stay as independent as with launches one by one. Parameters that are set while it runs are those of its next
    launch.

    Args:
        configs: CUlaunchConfig of each launch, whose stream is changed.
        launches: addresses of configuration and parameters, and the function between them.
        users: by root, launches that read what depends on its address, as bits.
        launch: cuLaunchKernelEx.
        context: the current one.
        stream: that it will be launched on.

    Raises KernelEnvironmentError where the driver cannot make it.
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
        finally:  # always, or the stream stays in its capture
            self._cuda.call("cuStreamEndCapture", stream, byref(handle))
            self._graph = handle.value or 0
        if status:
            raise KernelEnvironmentError(f"a launch cannot be captured (CUDA error {status})")
        return self._graph

    def _nodes(self) -> list[int]:
        """Nodes in the order of the launches: each waits for the one before alone."""
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
        """Launches it on a stream with the parameters as they are in memory now; the driver's status.

        addresses: what they were made from: only nodes that read what lies elsewhere than the last time are changed.
        A descriptor says nothing but what its address is made from.
        """
        if addresses != self._addresses:
            stale, last = 0, self._addresses or [-1] * len(addresses)
            self._addresses = []  # whoever interrupts this leaves some nodes changed
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
        """Gives it back; the driver waits with that until it no longer runs."""
        if finalizing() or not getattr(self, "_graph", 0):
            return
        try:
            with self._cuda.relaxed():
                if self._exec:
                    self._cuda.functions["cuGraphExecDestroy"](self._exec)
                self._cuda.functions["cuGraphDestroy"](self._graph)
        except KernelEnvironmentError:  # the driver has ended, and with it the graph
            pass


class Replays:
    """The graphs of one number of tokens, by stream. Used under its owner's lock."""

    _ages: ClassVar[deque[tuple[Replays, int]]] = deque()  # of all graphs of the process: whose, and the stream

    def __init__(self, users: Sequence[int]) -> None:
        self._users = users
        self._by_stream: dict[int, Replay] = {}
        self._stream, self._calls = -1, 0
        self._off = False

    def run(self, addresses: Sequence[int], stream: int, make: Callable[..., Replay]) -> bool:
        """Replays, or says False: for the first calls on a stream, while it is captured, and where graphs fail."""
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
        except KernelEnvironmentError:  # launches one by one say what is wrong, if anything is
            self._off, self._by_stream = True, {}
            return False
        return True

    def _soon(self, stream: int) -> bool:
        """Whether this is the call to make a graph in."""
        if len(self._by_stream) >= KEPT_STREAMS:
            return False
        self._calls = self._calls + 1 if stream == self._stream else 1
        self._stream = stream
        return self._calls > REPLAY_AFTER

    def _made(self, stream: int, make: Callable[..., Replay]) -> Replay:
        found = make(self._users, stream)
        self._by_stream[stream] = found
        self._calls = 0
        self._ages.append((self, stream))
        while len(self._ages) > KEPT_GRAPHS:
            other, oldest = self._ages.popleft()
            other._by_stream.pop(oldest, None)  # without its owner's lock: a call that is using it holds it
        return found

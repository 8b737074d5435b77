"""Graphs of launches: what the driver is told to capture, set and launch, and when; without a GPU."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from ctypes import c_int, c_size_t, c_uint, c_uint32, c_void_p
from typing import Any

import pytest
from support.recording_driver import STORED, Library, array, install

from moeq_kernels import replay
from moeq_kernels.cuda import LaunchConfig
from moeq_kernels.errors import KernelEnvironmentError
from moeq_kernels.replay import LEGACY_STREAMS, Graphs, NodeParams, Replay, Replays, relaxed

CAPTURE, GRAPH, RUNNABLE = (
    STORED[name][2] for name in ("cuStreamCreateWithPriority", "cuStreamEndCapture", "cuGraphInstantiateWithFlags")
)
STREAM = 0x6000_0000_0001


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """A driver whose graphs have three nodes; it lists them backwards."""
    found = install(monkeypatch, Library())

    def nodes(graph: int, places: int | None, count: int) -> None:
        c_size_t.from_address(count).value = 3
        if places:
            (c_void_p * 3).from_address(places)[:] = [103, 102, 101]

    def edges(graph: int, before: int | None, after: int | None, kinds: int | None, count: int) -> None:
        c_size_t.from_address(count).value = 2
        if before and after:
            (c_void_p * 2).from_address(before)[:] = [102, 101]
            (c_void_p * 2).from_address(after)[:] = [103, 102]
            assert kinds is not None
            ctypes.memset(kinds, 0xFF, 16)  # CUgraphEdgeData has eight bytes

    found.watched |= {"cuGraphGetNodes": nodes, "cuGraphGetEdges_v2": edges}
    return found


def launches() -> tuple[list[LaunchConfig], list[tuple[int, int, int]]]:
    configs = [LaunchConfig(2 + n, 3, 4, 128, 2, 1, 1000 + n, None, None, 0) for n in range(3)]
    return configs, [(ctypes.addressof(one), 700 + n, 900 + n) for n, one in enumerate(configs)]


def replay_of(library: Library, users: tuple[int, ...] = (0b001, 0b110), context: int = 1) -> tuple[Replay, list[Any]]:
    configs, made = launches()
    return Replay(configs, made, users, library.cuLaunchKernelEx, context, STREAM), configs  # type: ignore[attr-defined]


def test_a_graph_is_captured_in_a_stream_of_its_own(library: Library) -> None:
    built, configs = replay_of(library)
    assert built.run([1, 2], STREAM) == 0
    assert library.names() == [
        "cuThreadExchangeStreamCaptureMode", "cuStreamGetPriority", "cuStreamCreateWithPriority",
        "cuStreamBeginCapture_v2", *["cuLaunchKernelEx"] * 3, "cuStreamEndCapture", "cuGraphInstantiateWithFlags",
        *["cuGraphGetNodes"] * 2, *["cuGraphGetEdges_v2"] * 2, "cuThreadExchangeStreamCaptureMode",
        *["cuGraphExecKernelNodeSetParams_v2"] * 3, "cuGraphLaunch",
    ]  # fmt: skip
    assert library.given("cuStreamGetPriority")[0][0] == STREAM
    assert library.given("cuStreamCreateWithPriority")[0][1:] == [1, -3]  # CU_STREAM_NON_BLOCKING, STREAM's priority
    assert library.given("cuStreamBeginCapture_v2") == [[CAPTURE, 2]]  # CU_STREAM_CAPTURE_MODE_RELAXED
    assert library.given("cuLaunchKernelEx") == [[*one, None] for one in launches_of(configs)]
    assert {one.stream for one in configs} == {CAPTURE}
    assert library.given("cuStreamEndCapture")[0][0] == CAPTURE
    assert library.given("cuGraphInstantiateWithFlags")[0][1:] == [GRAPH, 0]
    assert library.given("cuGraphLaunch") == [[RUNNABLE, STREAM]]
    assert library.modes[:12] == [2] * 12
    assert library.mode == 0
    del built
    gc.collect()
    assert library.given("cuGraphExecDestroy") == [[RUNNABLE]]
    assert library.given("cuGraphDestroy") == [[GRAPH]]
    assert library.modes[-2:] == [2, 2]


def launches_of(configs: list[LaunchConfig]) -> list[list[int]]:
    return [[ctypes.addressof(one), 700 + n, 900 + n] for n, one in enumerate(configs)]


def test_only_nodes_whose_addresses_change_are_set(library: Library) -> None:
    built, _ = replay_of(library)
    found = []

    def set_params(graph: int, node: int, params: int) -> None:
        read = NodeParams.from_address(params)
        assert (graph, read.extra, read.kernel, read.context) == (RUNNABLE, None, None, None)
        found.append((node, read.function, array(c_uint32, ctypes.addressof(read.grid), 3),
                      array(c_uint, ctypes.addressof(read.block), 3), read.shared, read.parameters))  # fmt: skip

    library.watched["cuGraphExecKernelNodeSetParams_v2"] = set_params
    every = [(101 + n, 700 + n, [2 + n, 3, 4], [128, 2, 1], 1000 + n, 900 + n) for n in range(3)]
    for addresses, changed in (([4, 0], every), ([4, 0], []), ([5, 0], every[:1]), ([5, 6], every[1:])):
        found.clear()
        assert built.run(addresses, STREAM) == 0
        assert found == changed
    library.statuses["cuGraphExecKernelNodeSetParams_v2"] = 801
    launched = library.names().count("cuGraphLaunch")
    assert built.run([7, 6], STREAM) == 801
    assert library.names().count("cuGraphLaunch") == launched
    library.statuses.clear()
    found.clear()
    assert built.run([7, 6], STREAM) == 0
    assert found == every  # some may have been set before
    library.statuses["cuGraphLaunch"] = 719
    assert built.run([7, 6], STREAM) == 719


def test_streams_for_captures_are_made_once_for_a_context_and_priority(library: Library) -> None:
    for context in (1, 1, 2):
        replay_of(library, context=context)
    assert library.names().count("cuStreamCreateWithPriority") == 2
    library.stored["cuStreamGetPriority"] = (1, c_int, 0)
    replay_of(library)
    assert library.given("cuStreamCreateWithPriority")[2][1:] == [1, 0]


def test_a_launch_that_cannot_be_captured_ends_the_capture(library: Library) -> None:
    library.statuses["cuLaunchKernelEx"] = 900
    with pytest.raises(KernelEnvironmentError, match=r"^a launch cannot be captured \(CUDA error 900\)$"):
        replay_of(library)
    gc.collect()
    names = library.names()
    assert names.count("cuLaunchKernelEx") == 1  # no more after the first that fails
    assert names.count("cuStreamEndCapture") == 1
    assert library.given("cuGraphDestroy") == [[GRAPH]]
    assert "cuGraphExecDestroy" not in names
    assert library.mode == 0


def test_a_graph_that_is_no_chain_is_refused(library: Library) -> None:
    def edges(graph: int, before: int | None, after: int | None, kinds: int | None, count: int) -> None:
        c_size_t.from_address(count).value = 1
        if before and after:
            c_void_p.from_address(before).value = 102
            c_void_p.from_address(after).value = 103

    library.watched["cuGraphGetEdges_v2"] = edges
    with pytest.raises(KernelEnvironmentError, match=r"^a graph of 3 launches has 2 nodes in a row$"):
        replay_of(library)


@pytest.mark.parametrize("name", ["cuStreamGetPriority", "cuStreamBeginCapture_v2", "cuStreamEndCapture",
                                  "cuGraphInstantiateWithFlags", "cuGraphGetNodes", "cuGraphGetEdges_v2"])  # fmt: skip
def test_a_function_that_fails_is_named(name: str, library: Library) -> None:
    library.statuses[name] = 801
    with pytest.raises(KernelEnvironmentError, match=rf"^{name} failed \(CUDA error 801\)$"):
        replay_of(library)


def test_a_capture_mode_that_cannot_change_is_an_error(library: Library) -> None:
    exchange = library.cuThreadExchangeStreamCaptureMode  # type: ignore[attr-defined]
    modes = []
    with suppress(ZeroDivisionError), relaxed(exchange):
        modes.append(library.mode)
        raise ZeroDivisionError
    assert modes == [2]
    assert library.mode == 0
    library.statuses["cuThreadExchangeStreamCaptureMode"] = 999
    with (
        pytest.raises(KernelEnvironmentError, match=r"capture mode of a thread cannot be changed \(CUDA error 999\)"),
        relaxed(exchange),
    ):
        raise AssertionError("it goes on")


def test_a_graph_is_not_destroyed_after_the_driver_or_while_python_ends(library: Library) -> None:
    built, _ = replay_of(library)
    built.__del__(lambda: True)
    assert "cuGraphDestroy" not in library.names()
    library.statuses["cuThreadExchangeStreamCaptureMode"] = 4  # CUDA_ERROR_DEINITIALIZED
    built.__del__()
    assert "cuGraphDestroy" not in library.names()


def test_a_stream_is_asked_whether_it_is_captured(library: Library) -> None:
    found = Graphs()
    assert LEGACY_STREAMS == (0, 1)
    assert [found.capturing(stream) for stream in (0, 1)] == [False, False]
    assert library.told == []
    for state, captured in ((0, False), (1, True), (2, True)):
        library.stored["cuStreamIsCapturing"] = (1, c_int, state)
        assert found.capturing(STREAM) is captured
    assert [one[0] for one in library.given("cuStreamIsCapturing")] == [STREAM] * 3
    del library.stored["cuStreamIsCapturing"]
    library.statuses["cuStreamIsCapturing"] = 906  # its state is unknown
    assert found.capturing(STREAM) is True


def test_graphs_need_every_function_and_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Library())
    assert isinstance(replay.graphs(), Graphs)
    assert replay.graphs() is replay.graphs()
    for name in replay._HANDLES:
        install(monkeypatch, Library(name))
        with pytest.raises(KernelEnvironmentError, match=r"^the CUDA driver has no such graphs"):
            Graphs()
        assert replay.graphs() is None
    for value, off in (("0", True), ("1", False), ("", False)):
        install(monkeypatch, Library())
        monkeypatch.setenv("MOEQ_KERNEL_REPLAY", value)
        assert (replay.graphs() is None) is off


class Made:
    """A graph that was made for a stream and ends with this status."""

    def __init__(self, stream: int, status: int) -> None:
        self.stream, self.status = stream, status

    def run(self, addresses: list[int], stream: int) -> int:
        assert (addresses, stream) == ([self.stream + 1], self.stream)
        return self.status


@pytest.fixture
def ages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replays, "_ages", type(Replays._ages)())


def called(replays: Replays, streams: list[int], status: int = 0) -> tuple[list[bool], list[int]]:
    """Call on streams; return which calls were replayed, and the streams for which graphs were made."""
    made = []

    def make(users: Any, stream: int) -> Any:
        assert users == [3]
        made.append(stream)
        return Made(stream, status)

    return [replays.run([stream + 1], stream, make) for stream in streams], made


@pytest.mark.usefixtures("library", "ages")
def test_the_fifth_call_in_a_row_on_a_stream_builds_its_graph() -> None:
    assert replay.REPLAY_AFTER == 4
    assert called(Replays([3]), [7] * 6) == ([False] * 4 + [True] * 2, [7])
    streams = [7] * 4 + [8] * 5 + [7] * 2
    assert called(Replays([3]), streams) == ([False] * 8 + [True] + [False] * 2, [8])


@pytest.mark.usefixtures("library", "ages")
def test_only_two_streams_have_graphs() -> None:
    streams = [7] * 5 + [8] * 5 + [9] * 9 + [7, 8]
    found, made = called(Replays([3]), streams)
    assert made == [7, 8]
    assert found == ([False] * 4 + [True]) * 2 + [False] * 9 + [True] * 2


@pytest.mark.usefixtures("ages")
def test_nothing_is_replayed_into_a_capture_or_after_a_failure(library: Library) -> None:
    replays = Replays([3])
    library.stored["cuStreamIsCapturing"] = (1, c_int, 1)
    assert called(replays, [7] * 6) == ([False] * 6, [])
    library.stored["cuStreamIsCapturing"] = (1, c_int, 0)
    assert called(replays, [7] * 2) == ([True] * 2, [7])
    library.stored["cuStreamIsCapturing"] = (1, c_int, 1)
    assert called(replays, [7]) == ([False], [])
    library.stored["cuStreamIsCapturing"] = (1, c_int, 0)
    failing = Replays([3])
    assert called(failing, [8] * 9, 719) == ([False] * 9, [8])  # off: not made again
    assert called(failing, [9] * 9) == ([False] * 9, [])


@pytest.mark.usefixtures("library", "ages")
def test_the_oldest_graph_of_the_process_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_KEPT_GRAPHS", 2)
    owners = [Replays([3]) for _ in range(3)]
    for owner in owners:
        assert called(owner, [7] * 5)[1] == [7]
    assert [list(owner._by_stream) for owner in owners] == [[], [7], [7]]
    assert called(owners[1], [7]) == ([True], [])
    assert called(owners[0], [7] * 5) == ([False] * 4 + [True], [7])  # counted from the beginning


@pytest.mark.usefixtures("ages")
def test_without_graphs_nothing_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Library("cuGraphLaunch"))
    assert called(Replays([3]), [7] * 9) == ([False] * 9, [])

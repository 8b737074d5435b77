"""What the CUDA driver is told for descriptors, builds and launches, by a driver that keeps it; without a GPU."""

from __future__ import annotations

import ctypes
import struct
import threading
from ctypes import c_uint32, c_uint64, c_void_p
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launch_parameters import graphs_left, wrong_after_interrupts, wrong_parameters, wrong_replays
from support.recording_driver import Library, array, install

from moeq_kernels import cuda
from moeq_kernels.areas import Area, Box
from moeq_kernels.compiling import Binary, Specialisation
from moeq_kernels.errors import KernelEnvironmentError
from moeq_kernels.gpu import GPUS
from moeq_kernels.launch import Launch, Schedule

WANTED = Specialisation("module:kernel", (), (), frozenset(), ())


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return install(monkeypatch, Library())


def code(*parameters: int, shared: int = 0, boxes: tuple[Any, ...] = (), warps: int = 4) -> Binary:
    return Binary(b"machine code", "kernel_0", warps, shared, boxes, parameters)


@pytest.mark.parametrize("family", ["hopper-w4a16", "mma-w4a16", "portable"])
def test_every_parameter_of_every_launch_is_the_schedules(family: str, planned_launches: None) -> None:
    for tokens in (1, 33, 700):
        looked, wrong = wrong_parameters(family, tokens)
        assert looked > 60
        assert wrong == []


@pytest.mark.parametrize("family", ["hopper-w4a16", "mma-w4a16", "portable"])
def test_replayed_graphs_have_the_parameters_of_the_call(family: str, planned_launches: None) -> None:
    for tokens in (1, 33, 700):
        replayed, wrong = wrong_replays(family, tokens)
        assert replayed > 50
        assert wrong == []


def test_no_more_graphs_are_kept_than_may_be(planned_launches: None) -> None:
    assert graphs_left(2, 100) == (2, 0, 0)
    made, destroyed, wrong = graphs_left(4, 3)
    assert made > 4
    assert made - destroyed == 3
    assert not wrong


@pytest.mark.slow
def test_a_call_that_is_interrupted_anywhere_leaves_the_next_ones_right(planned_launches: None) -> None:
    replayed, interrupts, wrong = wrong_after_interrupts(33)
    assert replayed > interrupts > 20
    assert wrong == []


def test_an_error_has_the_drivers_words(library: Library) -> None:
    library.statuses["cuDeviceGet"] = 101
    with pytest.raises(KernelEnvironmentError, match=r"^asking for the device failed: out of luck \(CUDA error 101\)$"):
        cuda.driver().context(0)
    assert library.given("cuGetErrorString")[0][0] == 101
    library.statuses["cuGetErrorString"] = 1  # it writes nothing
    with pytest.raises(KernelEnvironmentError, match=r"^asking for the device failed: \? \(CUDA error 101\)$"):
        cuda.driver().context(0)
    library.statuses = {"cuDevicePrimaryCtxRetain": 2}
    with pytest.raises(KernelEnvironmentError, match="asking for the context failed"):
        cuda.driver().context(0)
    library.statuses = {"cuCtxSetCurrent": 201}
    for _ in range(2):  # it is not taken for entered
        with pytest.raises(KernelEnvironmentError, match="choosing the context failed"):
            cuda.enter(0)


def test_a_context_is_retained_once_and_entered_once_a_thread(library: Library) -> None:
    cuda.enter(3)
    cuda.enter(3)
    assert library.names() == ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    assert library.given("cuDeviceGet")[0][1] == 3
    assert library.given("cuDevicePrimaryCtxRetain")[0][1] == 40  # the handle, not the number
    assert library.given("cuCtxSetCurrent") == [[0x5000_0000_0003]]
    thread = threading.Thread(target=cuda.enter, args=(3,))
    thread.start()
    thread.join()
    cuda.enter(1)
    cuda.enter(3)
    assert library.names().count("cuDevicePrimaryCtxRetain") == 2
    assert library.names().count("cuCtxSetCurrent") == 4


@pytest.mark.parametrize("shared", [0, 48 * 1024, 48 * 1024 + 1, 200 * 1024])
def test_a_build_is_loaded_once_and_asks_for_much_shared_memory(
    shared: int, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    monkeypatch.setattr(cuda, "binary", lambda wanted, gpu: built.append((wanted, gpu)) or code(shared=shared))
    for _ in range(2):
        found, function = cuda.load(WANTED, GPUS["H200"], 0)
        assert (found, function.value) == (code(shared=shared), 0x5000_0000_0002)
    assert built == [(WANTED, GPUS["H200"])]
    assert library.given("cuModuleLoadData")[0][1] == b"machine code"
    assert library.given("cuModuleGetFunction")[0][1:] == [0x5000_0000_0001, b"kernel_0"]
    much = shared > 48 * 1024
    # CU_FUNC_CACHE_PREFER_SHARED and CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES of cuda.h
    assert library.given("cuFuncSetCacheConfig") == [[0x5000_0000_0002, 1]] * much
    assert library.given("cuFuncSetAttribute") == [[0x5000_0000_0002, 8, shared]] * much
    relaxed = len(library.given("cuModuleLoadData") + library.given("cuModuleGetFunction")) + 2 * much
    assert library.modes == [0, 0, 0] + [2] * relaxed  # CU_STREAM_CAPTURE_MODE_RELAXED, after the context
    assert library.mode == 0


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("cuModuleLoadData", "loading kernel_0"),
        ("cuModuleGetFunction", "finding kernel_0"),
        ("cuFuncSetCacheConfig", "preparing kernel_0"),
        ("cuFuncSetAttribute", "preparing kernel_0"),
    ],
)
def test_what_cannot_be_loaded_is_named(
    name: str, what: str, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "binary", lambda wanted, gpu: code(shared=1 << 16))
    library.statuses[name] = 218
    with pytest.raises(KernelEnvironmentError, match=f"^{what} failed"):
        cuda.load(WANTED, GPUS["H200"], 0)
    assert library.mode == 0


def test_slow_memory_gets_longer_promotions() -> None:
    assert [cuda.promotion_of(GPUS[name]) for name in ("H100", "H200", "A100")] == [256, 128, 128]


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.uint8, 0), (torch.int8, 0), (torch.float8_e4m3fn, 0), (torch.int32, 3), (torch.float16, 6),
     (torch.float32, 7), (torch.bfloat16, 9)],
)  # fmt: skip
def test_a_descriptor_says_where_an_area_lies(dtype: torch.dtype, kind: int, library: Library) -> None:
    """As CUtensorMap is encoded: the fastest axis first, strides in bytes without the first; enumerators of cuda.h."""
    area = Area("w13.weight", dtype, (6, 40, 64), (5120, 128, 1))
    found = cuda.TensorMap(area, 3, (1, 8, 64), 256)
    assert found.base == 0
    found.at(1 << 45)
    assert found.base == 1 << 45
    address, told, rank, base, sizes, strides, block, steps, *rest = library.given("cuTensorMapEncodeTiled")[0]
    assert (address, told, rank, base) == (found.address, kind, 3, 1 << 45)
    assert address % 64 == 0
    memory = ctypes.addressof(found._memory)
    assert memory <= address
    assert address + 128 <= memory + ctypes.sizeof(found._memory)
    assert array(c_uint64, sizes, 3) == [64, 40, 6]
    assert array(c_uint64, strides, 2) == [128 * dtype.itemsize, 5120 * dtype.itemsize]
    assert array(c_uint32, block, 3) == [64, 8, 1]
    assert array(c_uint32, steps, 3) == [1, 1, 1]
    assert rest == [0, 3, 3, 0]  # no interleaving, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, zeros outside


def test_a_descriptor_that_is_refused_is_named(library: Library) -> None:
    line = cuda.TensorMap(Area.of("x", torch.float32, 64), 0, (16,), 0)
    library.statuses["cuTensorMapEncodeTiled"] = 1
    with pytest.raises(KernelEnvironmentError, match=r"describing Area\(root='x'.* to the copy engine failed"):
        line.at(4096)
    assert line.base == 0
    assert array(c_uint64, library.given("cuTensorMapEncodeTiled")[0][4], 1) == [64]
    assert [cuda.L2_PROMOTIONS[size] for size in (0, 64, 128, 256)] == [0, 1, 2, 3]


def test_descriptors_of_an_area_that_moves_are_kept_and_the_oldest_made_anew(library: Library) -> None:
    area = Area.of("x", torch.bfloat16, 64, 128)
    moving = cuda.MovingMap(area, 3, (32, 64), 128)
    encoded = lambda: [one[3] for one in library.given("cuTensorMapEncodeTiled")]  # noqa: E731
    addresses = [moving.at(base) for base in range(16, 16 * 9, 16)]
    assert len(set(addresses)) == 8 == cuda.MAX_KEPT_MAPS
    assert encoded() == list(range(16, 16 * 9, 16))
    assert moving.at(16) == addresses[0]  # used again: it is no longer the oldest
    assert len(encoded()) == 8
    assert moving.at(1024) == addresses[1]
    assert encoded()[8:] == [1024]
    assert [moving.at(base) for base in (16, 48, 64)] == [addresses[0], addresses[2], addresses[3]]
    assert len(encoded()) == 9
    library.statuses["cuTensorMapEncodeTiled"] = 1
    with pytest.raises(KernelEnvironmentError):
        moving.at(2048)
    library.statuses.clear()
    assert moving.at(2048) not in (addresses[0], addresses[2], addresses[3])


def parameters(*kinds: tuple[str, bool]) -> list[Any]:
    return [SimpleNamespace(name=name, do_not_specialize=plain) for name, plain in kinds]


class Handmade(Launch):
    """A launch of a kernel that nobody wrote, with these parameters."""

    @property
    def function(self) -> Any:
        return SimpleNamespace(params=parameters(*((name, name.startswith("count")) for name in self.arguments)))


def test_arguments_of_a_build_are_in_its_order() -> None:
    area = Area.of("x", torch.float16, 5, 8)
    given = {"x": area, "size": 7, "many": 1 << 40, "box": Box(area, (1, 8), None), "one": 1, "no": None}
    launch = Handmade("a:b", (1,), given, {})
    wanted = cuda.specialise(launch)
    found = cuda.arguments_of(launch, wanted)
    kinds = [type(one).__name__ for one in found]
    assert kinds == ["Area", "c_int", "c_long", "Box", "c_int", "c_int", "c_long", "c_long", "c_ulong", "c_ulong"]
    assert [one.value for one in found if not isinstance(one, Area | Box)] == [7, 1 << 40, 5, 8, 8, 1, 0, 0]
    assert [cuda.size_of(one) for one in found] == [8, 4, 8, 128, 4, 4, 8, 8, 8, 8]


class Launched:
    """Stream, grid, block, attributes and parameter bytes of each launch, as the kernels read them."""

    def __init__(self, library: Library, sizes: tuple[int, ...]) -> None:
        self.found: list[Any] = []
        self.sizes = sizes
        library.watched["cuLaunchKernelEx"] = self

    def __call__(self, config: int, function: int, places: int, extra: int | None) -> None:
        read = cuda.LaunchConfig.from_address(config)
        grid, block = (read.grid_x, read.grid_y, read.grid_z), (read.block_x, read.block_y, read.block_z)
        attribute = read.attributes.contents
        values = [
            ctypes.string_at(place, size)
            for place, size in zip(array(c_void_p, places, len(self.sizes)), self.sizes, strict=True)
        ]
        self.found.append((read.stream, grid, block, read.shared, read.number, (attribute.id, attribute.value), values))
        assert (function, extra) == (0x5000_0000_0002, None)


def test_a_launch_has_its_grid_its_attribute_and_its_parameters(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = ("x", "topk_weights", "topk_ids", "out", "workspace", "expert_map", "w2.weight")
    inner = Area.of("workspace", torch.uint8, 64, offset=256)
    weight = Area.of("w2.weight", torch.uint8, 4, 64)
    given = {"x": Area.of("x", torch.uint8, 64), "inner": inner, "box": Box(weight, (1, 64), None), "count": 3}
    sizes = (8, 8, 128, 4, 4, 8, 8, 4, 8, 8)
    monkeypatch.setattr(cuda, "binary", lambda *_: code(*sizes, boxes=((3, (1, 64)),), shared=1024, warps=8))
    launches = (
        Handmade("a:b", (5, 6), given, {}),
        Handmade("a:c", (5, 0), given, {}),  # no programs
        Handmade("a:d", (7,), given, {}, {"launch_pdl": True}),
    )
    maps: dict[Any, int] = {}
    bound = cuda.Bound(Schedule(launches, 512), roots, maps, GPUS["H200"], 0)
    assert bound.workspace_bytes == 512
    assert maps == {(weight, 3, (1, 64)): 0}
    launched = Launched(library, (8, 8, 0, 4, 4, 8, 8, 4))
    addresses = [0x1000, 0x2000, 0x3000, 0x4000, 0x5000, 0, 0x7000]
    described = [0x900040]
    for stream in (77, 78):
        bound.run(addresses, described, stream)
        values = [struct.pack("<Q", 0x1000), struct.pack("<Q", 0x5100), b"", struct.pack("<i", 4),
                  struct.pack("<i", 64), struct.pack("<q", 64), struct.pack("<q", 1), struct.pack("<i", 3)]  # fmt: skip
        first, second = launched.found[-2:]
        assert first[:5] == (stream, (5, 6, 1), (256, 1, 1), 1024, 0)
        assert second[:5] == (stream, (7, 1, 1), (256, 1, 1), 1024, 1)
        assert second[5] == (6, 1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION is allowed
        assert first[6] == second[6] == values
        assert array(c_void_p, library.given("cuLaunchKernelEx")[-1][2], 3)[2] == 0x900040
    bound.run(addresses, [0x900080], 78)
    assert array(c_void_p, library.given("cuLaunchKernelEx")[-1][2], 3)[2] == 0x900080
    library.statuses["cuLaunchKernelEx"] = 700
    with pytest.raises(KernelEnvironmentError, match="launching a kernel failed"):
        bound.run(addresses, described, 79)


def test_parts_of_the_workspace_and_of_other_roots_follow_their_own_roots(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Roots before and after the workspace, whose addresses change one by one."""
    roots = ("x", "workspace", "out")
    places = (("workspace", 512), ("out", 32), ("x", 64), ("workspace", 256), ("out", 16), ("x", 0))
    given = {f"{root} {offset}": Area.of(root, torch.uint8, 8, offset=offset) for root, offset in places}
    monkeypatch.setattr(cuda, "binary", lambda *_: code(*[8] * len(given), 8, 8))
    bound = cuda.Bound(Schedule((Handmade("a:b", (1,), given, {}),), 0), roots, {}, GPUS["H200"], 0)
    launched = Launched(library, (8,) * len(given))
    for addresses in ([0x1000, 0x2000, 0x3000], [0x1000, 0x5000, 0x3000], [0x6000, 0x5000, 0x7000]):
        bound.run(addresses, (), 5)
        found = [struct.unpack("<Q", value)[0] for value in launched.found[-1][6]]
        assert found == [addresses[roots.index(root)] + offset for root, offset in places]


def test_a_launch_enters_the_context_of_its_device_in_each_thread(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "binary", lambda *_: code(4, 8, 8))
    bound = cuda.Bound(Schedule((Handmade("a:b", (1,), {"count": 3}, {}),), 0), ("workspace",), {}, GPUS["H200"], 0)
    before = len(library.told)
    bound.run([0], (), 5)
    bound.run([0], (), 5)
    assert library.names()[before:].count("cuLaunchKernelEx") == 2
    assert "cuCtxSetCurrent" not in library.names()[before:]
    thread = threading.Thread(target=bound.run, args=([0], (), 5))
    thread.start()
    thread.join()
    assert library.names()[-2:] == ["cuCtxSetCurrent", "cuLaunchKernelEx"]


def test_another_triton_that_passes_other_parameters_is_told(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "binary", lambda *_: code(4, 8))
    launch = Handmade("a:b", (1,), {"count": 3}, {})
    with pytest.raises(KernelEnvironmentError, match=r"takes parameters of \(4, 8\) bytes, not of \(4, 8, 8\)"):
        cuda.Bound(Schedule((launch,), 0), ("workspace",), {}, GPUS["H200"], 0)

"""Launches through the CUDA driver with minimal host time.

A launch by Triton costs the host 10 to 30 us: it binds arguments and looks up builds and descriptors. `Bound` does all
work that depends on the number of tokens only once; a call then writes addresses and launches. Structures follow cuda.h
of CUDA 12, and a test compares them with the header.

ctypes is used because cuda-bindings would save nothing: with a driver that does nothing, either of them takes the host
0.5 us per launch and 0.4 us per graph launch, and cuda-bindings comes with torch's CUDA wheels only.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_int, c_int32, c_int64, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch

from moeq_kernels.areas import Area, Box
from moeq_kernels.compiling import Binary, Specialisation, binary, specialise
from moeq_kernels.errors import KernelEnvironmentError
from moeq_kernels.gpu import Gpu
from moeq_kernels.launch import Launch, Schedule
from moeq_kernels.replay import Replay, Replays, relaxed

#: Values of CUlaunchAttributeID, CUfunction_attribute and CUfunc_cache.
PROGRAMMATIC_STREAM_SERIALIZATION = 6
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
PREFER_SHARED = 1
#: Bytes of shared memory that a kernel gets without the attribute.
SHARED_WITHOUT_ASKING = 48 * 1024
#: CUtensorMapL2promotion by bytes that a miss brings into the L2 cache.
L2_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
MAP_BYTES = 128
#: CUtensorMapDataType by torch dtype; the copy engine moves bytes, so signs do not matter.
MAP_TYPES = {
    torch.uint8: 0,
    torch.int8: 0,
    torch.float8_e4m3fn: 0,
    torch.int32: 3,
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
}

#: Roots whose addresses change from call to call.
MOVING = ("x", "topk_weights", "topk_ids", "out", "workspace", "expert_map")
#: Descriptors kept per area whose address changes: an engine has few input buffers.
MAX_KEPT_MAPS = 8
#: Key of a descriptor: area, swizzle and block.
MapKey = tuple[Area, int, tuple[int, ...]]


class LaunchAttribute(Structure):
    """CUlaunchAttribute: an id and a union of 64 bytes, of which the first four are used."""

    _fields_ = (("id", c_int32), ("pad", c_int32), ("value", c_int32), ("rest", c_int32 * 15))


class LaunchConfig(Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid_x", c_uint),
        ("grid_y", c_uint),
        ("grid_z", c_uint),
        ("block_x", c_uint),
        ("block_y", c_uint),
        ("block_z", c_uint),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(LaunchAttribute)),
        ("number", c_uint),
    )


class Driver:
    """Driver functions for loading and launching. Raises KernelEnvironmentError if there is no driver."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise KernelEnvironmentError(f"the CUDA driver cannot be loaded: {error}") from None
        names = ("cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuFuncSetCacheConfig")
        self.load, self.find, self.set_attribute, self.set_cache = (getattr(library, name) for name in names)
        self.device, self.retain = library.cuDeviceGet, library.cuDevicePrimaryCtxRetain
        self.set_context, self.exchange = library.cuCtxSetCurrent, library.cuThreadExchangeStreamCaptureMode
        self.set_context.argtypes = [c_void_p]
        self.launch = library.cuLaunchKernelEx
        self.launch.argtypes = [c_void_p, c_void_p, c_void_p, c_void_p]
        self.encode = library.cuTensorMapEncodeTiled
        self.encode.argtypes = [
            c_void_p, c_int, c_uint32, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_int, c_int,
        ]  # fmt: skip
        self._text = library.cuGetErrorString
        self._contexts: dict[int, int | None] = {}

    def check(self, status: int, what: str) -> None:
        """Raise KernelEnvironmentError with the driver's message unless status is 0."""
        if status:
            text = ctypes.c_char_p()
            self._text(status, byref(text))
            raise KernelEnvironmentError(f"{what} failed: {(text.value or b'?').decode()} (CUDA error {status})")

    def context(self, device: int) -> int | None:
        """Return the primary context of a device, which torch shares; it is retained until the process ends."""
        if device not in self._contexts:
            number, context = c_int(), c_void_p()
            self.check(self.device(byref(number), device), "asking for the device")
            self.check(self.retain(byref(context), number), "asking for the context")
            self._contexts[device] = context.value
        return self._contexts[device]


@cache
def driver() -> Driver:
    """Load the driver once."""
    return Driver()


_THREAD = threading.local()


def enter(device: int) -> None:
    """Make the context of torch's current device current in this thread, unless the thread has done so before.

    A device is current for torch before the thread has a context. The thread gets one in its first call of the CUDA
    runtime, which may come after its first call of a layer, because torch's allocator caches memory.
    """
    if getattr(_THREAD, "device", None) != device:
        driver().check(driver().set_context(driver().context(device)), "choosing the context")
        _THREAD.device = device


@cache
def load(wanted: Specialisation, gpu: Gpu, device: int) -> tuple[Binary, c_void_p]:
    """Load a build on the current device, and return it with its function; compile it first if the cache lacks it.

    The capture mode is relaxed meanwhile, because loading would invalidate a capture of any thread.
    """
    code, cuda = binary(wanted, gpu), driver()
    module, function = c_void_p(), c_void_p()
    enter(device)
    with relaxed(cuda.exchange):
        cuda.check(cuda.load(byref(module), code.code), f"loading {code.name}")
        cuda.check(cuda.find(byref(function), module, code.name.encode()), f"finding {code.name}")
        if code.shared > SHARED_WITHOUT_ASKING:
            told = f"preparing {code.name}"
            cuda.check(cuda.set_cache(function, PREFER_SHARED), told)
            cuda.check(cuda.set_attribute(function, MAX_DYNAMIC_SHARED_SIZE_BYTES, code.shared), told)
    return code, function


def promotion_of(gpu: Gpu) -> int:
    """Return the bytes that a miss of the copy engine brings into the L2 cache.

    With 256 bytes a copy also fetches the next step of a row of 8-bit codes, which saves 4 % of the time of W8A8 on an
    H100 and costs 1 % on an H200.
    """
    return 256 if gpu.slow_memory else 128


class TensorMap:
    """Descriptor of the copy engine, encoded again when its address changes; `promotion_of` gives its promotion."""

    def __init__(self, area: Area, swizzle: int, block: Sequence[int], promotion: int) -> None:
        rank = len(block)
        self.area = area
        self._memory = (ctypes.c_char * (MAP_BYTES + 64))()
        self.address = -(-ctypes.addressof(self._memory) // 64) * 64
        self.base = 0
        sizes = (c_uint64 * rank)(*reversed(area.shape))
        strides = (c_uint64 * max(1, rank - 1))(*(area.itemsize * one for one in reversed(area.strides[:-1])))
        blocks, steps = (c_uint32 * rank)(*reversed(block)), (c_uint32 * rank)(*[1] * rank)
        self._kept = (sizes, strides, blocks, steps)
        addresses = tuple(ctypes.addressof(one) for one in self._kept)
        self._leading = (self.address, MAP_TYPES[area.dtype], rank)
        self._trailing = (*addresses, 0, swizzle, L2_PROMOTIONS[promotion], 0)

    def at(self, base: int) -> None:
        """Point the descriptor at the address `base`."""
        cuda = driver()
        status = cuda.encode(*self._leading, base, *self._trailing)
        cuda.check(status, f"describing {self.area} to the copy engine")
        self.base = base


class MovingMap:
    """Cache of descriptors for an area whose address changes: encoding one costs more than the rest of a launch."""

    def __init__(self, area: Area, swizzle: int, block: Sequence[int], promotion: int) -> None:
        self._given = area, swizzle, block, promotion
        self._maps: dict[int, TensorMap] = {}  # by address, most recently used last

    def at(self, base: int) -> int:
        """Return the address of a cached or newly encoded descriptor for the area at `base`."""
        found = self._maps.pop(base, None)
        if found is None:
            full = len(self._maps) >= MAX_KEPT_MAPS
            found = self._maps.pop(next(iter(self._maps))) if full else TensorMap(*self._given)
            found.at(base)
        self._maps[base] = found
        return found.address


def arguments_of(launch: Launch, wanted: Specialisation) -> list[Any]:
    """Return the arguments of a build in order: areas for pointers, boxes for descriptors, ctypes integers."""
    result: list[Any] = []
    for name, kind in wanted.types:
        value = launch.arguments[name]
        if isinstance(value, Box):
            area = value.area
            result += [value, *map(c_int32, area.shape), *map(c_int64, area.strides)]
        elif isinstance(value, Area):
            result.append(value)
        else:
            assert value is not None
            result.append(c_int32(value) if kind == "i32" else c_int64(value))
    return [*result, c_uint64(0), c_uint64(0)]  # no scratch memory for the compiler and its profiler


def size_of(argument: Any) -> int:
    """Return the bytes of a kernel parameter."""
    if isinstance(argument, Box):
        return MAP_BYTES
    return 8 if isinstance(argument, Area) else ctypes.sizeof(argument)


class Bound:
    """Schedule bound to a device: all arguments but the addresses of its roots.

    Args:
        roots: names of roots in the order of the addresses that `run` gets.
        maps: numbers of the weight boxes of all schedules of a problem; new boxes are added.
    """

    def __init__(
        self, schedule: Schedule, roots: Sequence[str], maps: dict[MapKey, int], gpu: Gpu, device: int
    ) -> None:
        self.workspace_bytes = schedule.workspace_bytes
        self._device = device
        self._lock = threading.Lock()
        self._launch = driver().launch
        number = {name: i for i, name in enumerate(roots)}
        # Descriptors of arguments and workspace: last address, descriptors, parameters and place, root and offset.
        self._moving: list[list[Any]] = []
        self._fixed: list[tuple[Any, int, int]] = []  # descriptors of weights: parameters, place, number of the map
        self._configs: list[LaunchConfig] = []
        self._launches: list[tuple[int, int | None, int]] = []
        self._stream = 0  # stream in the configurations
        pointers: list[tuple[Any, int, tuple[int, int]]] = []  # parameters, place, root and offset
        self._kept: list[Any] = []
        users = [0] * len(roots)  # bit mask of the launches that read each root
        for launch in schedule.launches:
            if 0 in launch.programs:
                continue
            wanted, bit = specialise(launch), 1 << len(self._launches)
            code, function = load(wanted, gpu, device)
            boxes = iter(code.boxes)
            arguments = arguments_of(launch, wanted)
            parameters = (c_void_p * len(arguments))()
            for place, value in enumerate(arguments):
                if isinstance(value, Area | Box):
                    root = (value.area if isinstance(value, Box) else value).root
                    users[number[root]] |= bit
                if isinstance(value, Area):
                    pointers.append((parameters, place, (number[value.root], value.offset)))
                elif isinstance(value, Box):
                    area, (swizzle, block) = value.area, next(boxes)
                    if area.root in MOVING:
                        moving = MovingMap(area, swizzle, block, promotion_of(gpu))
                        self._moving.append([0, moving, parameters, place, number[area.root], area.offset])
                    else:
                        self._fixed.append((parameters, place, maps.setdefault((area, swizzle, block), len(maps))))
                else:
                    self._kept.append(value)
                    parameters[place] = ctypes.addressof(value)
            sizes = tuple(size_of(one) for one in arguments)
            if sizes != code.parameters:
                told = f"{code.name} takes parameters of {code.parameters} bytes, not of {sizes}"
                raise KernelEnvironmentError(told, "another release of Triton passes other parameters")
            attribute = LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
            dependent = bool(launch.options.get("launch_pdl"))
            x, y, z = (*launch.programs, 1, 1)[:3]
            config = LaunchConfig(x, y, z, 32 * code.warps, 1, 1, code.shared, 0, ctypes.pointer(attribute), dependent)
            self._kept += [attribute, config]
            self._kept += [parameters]
            self._configs.append(config)
            self._launches.append((ctypes.addressof(config), function.value, ctypes.addressof(parameters)))
        self._replays = Replays(users)
        self._addresses: Sequence[int] = ()  # addresses written last
        # Order of `_pointers`: the roots, then offsets within the workspace, then offsets within other roots.
        self._workspace = number["workspace"]
        inner = {key for *_, key in pointers if key[1]}  # root and offset
        inner_keys = sorted(inner, key=lambda key: (key[0] != self._workspace, key))
        self._offsets = [offset for root, offset in inner_keys if root == self._workspace]
        self._workspace_address = -1  # last address of the workspace
        self._workspace_pointers = list[int]()  # addresses within it
        self._maps: Sequence[int] | None = None  # descriptors of the layer that was called last
        self._others = inner_keys[len(self._offsets) :]
        index = {(root, 0): root for root in range(len(roots))}
        index |= {key: len(roots) + i for i, key in enumerate(inner_keys)}
        self._pointers = (c_uint64 * len(index))()
        self._pack: Callable[..., None] = struct.Struct(f"{len(index)}Q").pack_into
        for parameters, place, key in pointers:
            parameters[place] = ctypes.addressof(self._pointers) + 8 * index[key]

    def run(self, addresses: Sequence[int], maps: Sequence[int], stream: int) -> None:
        """Launch on a stream, with the addresses of the roots and of the layer's weight descriptors."""
        if getattr(_THREAD, "device", None) != self._device:
            enter(self._device)
        with self._lock:
            if addresses != self._addresses:
                self._point(addresses)
            # A cached value is cleared before it changes, because an exception may interrupt the call.
            if maps is not self._maps:
                self._maps = None
                for parameters, at, which in self._fixed:
                    parameters[at] = maps[which]
                self._maps = maps
            if self._replays.run(addresses, stream, self._replay):
                return
            if stream != self._stream:
                self._stream = -1
                for config in self._configs:
                    config.stream = stream
                self._stream = stream
            launch = self._launch
            for address, function, parameters in self._launches:
                status = launch(address, function, parameters, None)
                if status:
                    driver().check(status, "launching a kernel")

    def _point(self, addresses: Sequence[int]) -> None:
        """Write the addresses of the roots, and of everything within them, where the parameters point."""
        self._addresses = ()
        workspace = addresses[self._workspace]
        if workspace != self._workspace_address:
            self._workspace_address = workspace
            self._workspace_pointers = [workspace + offset for offset in self._offsets]
        others = [addresses[root] + offset for root, offset in self._others] if self._others else ()
        self._pack(self._pointers, 0, *addresses, *self._workspace_pointers, *others)
        for one in self._moving:
            last, moving, parameters, at, root, offset = one
            base = addresses[root] + offset
            if base != last:
                one[0], parameters[at] = base, moving.at(base)
        self._addresses = list(addresses)

    def _replay(self, users: Sequence[int], stream: int) -> Replay:
        """Capture the launches with the addresses written last as a graph for a stream."""
        self._stream = -1  # the capture changes the stream of the configurations
        return Replay(self._configs, self._launches, users, self._launch, driver().context(self._device), stream)

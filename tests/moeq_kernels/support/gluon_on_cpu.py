"""Run Gluon kernels on a CPU: the same device code, with torch in place of the compiler.

The code of a kernel and of all that it calls is taken as it is; only the names that it looks up are others. Layouts say
nothing here, since they only say which lane has what: `assert_trivial` conversions, lanes and copies are the compiler's
business, but a layout that it would refuse fails here as well (`layout_checks`). `ptx_on_cpu` runs PTX texts. Shared
memory is full of NaN before it is written, and copies that are masked write zeros, as cp.async does. Warps that
specialise are threads, which wait for each other at mbarriers.
"""

from __future__ import annotations

import itertools
import threading
import types
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language
from triton.experimental.gluon._runtime import GluonJITFunction

from moeq_kernels import areas
from moeq_kernels.launch import Launch, run_with_triton
from support.layout_checks import WARPS, in_registers, in_shared_memory, is_power
from support.mbarriers_on_cpu import Barriers, seen
from support.ptx_on_cpu import Value, inline_asm, value


class Pointer:
    """An address in a flat tensor, or many."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, value(self.offset + more))

    def to(self, dtype: Any) -> Pointer:
        """Itself, for PTX that takes addresses as integers."""
        return self

    def load(self, mask: Any = None, other: Any = 0) -> Value:
        """Load the elements; `other` where the mask does not hold."""
        places = value(self.offset)
        there = value(True if mask is None else mask).expand(torch.broadcast_shapes(places.shape, value(mask).shape)
                                                             if mask is not None else places.shape)  # fmt: skip
        places = places.expand(there.shape)
        inside = places[there]
        assert not len(inside) or (int(inside.min()) >= 0 and int(inside.max()) < len(self.memory)), "out of bounds"
        found = torch.full(there.shape, other, dtype=self.memory.dtype)
        found[there] = self.memory[inside]
        return value(found)

    def store(self, content: Any, mask: Any = None) -> None:
        """Store where the mask holds."""
        content = value(content)
        there = value(True if mask is None else mask).expand(content.shape)
        places = value(self.offset).expand(content.shape)[there]
        assert not len(places) or (int(places.min()) >= 0 and int(places.max()) < len(self.memory)), "out of bounds"
        self.memory[places] = content[there].to(self.memory.dtype)


class Dtype:
    """A dtype that knows its bits, as Triton's."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.primitive_bitwidth = dtype, 8 * dtype.itemsize

    def __eq__(self, other: object) -> bool:
        return self.dtype == _torch(other)

    def __hash__(self) -> int:
        return hash(self.dtype)


def _torch(dtype: Any) -> Any:
    return dtype.dtype if isinstance(dtype, Dtype) else dtype


class Shared:
    """Shared memory."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.dtype = memory, Dtype(memory.dtype)

    def store(self, content: Tensor) -> None:
        seen("write", self)
        self.memory.copy_(content)

    def index(self, number: Any) -> Shared:
        return Shared(self.memory[int(number)])

    def slice(self, start: int, size: int, dim: int) -> Shared:
        return Shared(self.memory.narrow(dim, int(start), int(size)))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.memory.permute(order))

    def load(self, layout: Any) -> Value:
        in_registers(layout, self.memory.shape)
        seen("read", self)
        return value(self.memory.clone())


class Box:
    """What the copy engine moves a block of: an area, beyond which there are zeros."""

    def __init__(self, area: Tensor, block: tuple[int, ...]) -> None:
        self.area, self.block, self.dtype = area, block, Dtype(area.dtype)

    def load(self, place: list[Any]) -> Tensor:
        """Return the block at these offsets."""
        found = torch.zeros(self.block, dtype=self.area.dtype)
        starts = [int(one) for one in place]
        ends = [min(start + size, have) for start, size, have in zip(starts, self.block, self.area.shape, strict=True)]
        if all(start < end for start, end in zip(starts, ends, strict=True)):
            source = tuple(slice(start, end) for start, end in zip(starts, ends, strict=True))
            found[tuple(slice(0, end - start) for start, end in zip(starts, ends, strict=True))] = self.area[source]
        return found


def tma_load(box: Box, place: list[Any], bar: Shared, target: Shared, pred: Any = True) -> None:
    """Copy as the copy engine does."""
    if pred:
        seen("copy", target, bar, target.memory.numel() * target.memory.itemsize)
        target.memory.copy_(box.load(place))
        LANGUAGE.barriers.copied(bar, target.memory.numel() * target.memory.itemsize)


def reinterpret(shared: Shared, dtype: Any, shape: list[int], layout: Any) -> Shared:
    """View the memory as another type and shape."""
    in_shared_memory(layout, shape, _torch(dtype).itemsize)
    return Shared(shared.memory.view(-1).view(torch.uint8).view(_torch(dtype)).view(shape))


def allocate(dtype: Any, shape: list[int], layout: Any) -> Shared:
    """Shared memory, full of NaN."""
    dtype = _torch(dtype)
    in_shared_memory(layout, shape, dtype.itemsize)
    bits = torch.full((*shape, dtype.itemsize), 255, dtype=torch.uint8)
    return Shared(bits.view(dtype).reshape(shape))


def rows_load(shared: Shared, pointer: Pointer, mask: Any = None) -> None:
    """cp.async: masked elements become 0."""
    seen("gather", shared)
    shared.memory.copy_(pointer.load(mask, 0))


def _nothing(*_given: Any) -> None:
    return None


class Language:
    """What device code calls `gl`, for one program of a grid."""

    bfloat16, float16, float32 = torch.bfloat16, torch.float16, torch.float32
    int8, uint8, int16, int32, int64 = torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64
    float8e4nv = torch.float8_e4m3fn
    float8e5 = torch.float8_e5m2
    static_range = range
    SliceLayout, BlockedLayout = language.SliceLayout, language.BlockedLayout
    SwizzledSharedLayout = language.SwizzledSharedLayout
    allocate_shared_memory = staticmethod(allocate)

    def __init__(self) -> None:
        self.program: tuple[int, ...] = ()
        self.grid: tuple[int, ...] = ()
        self.barriers = Barriers()
        self.counting = threading.Lock()

    def inline_asm_elementwise(
        self, text: str, constraints: str, given: Any, dtypes: Any, pure: bool, pack: int
    ) -> Any:
        """Run a PTX text; of the two that take an address, one adds 1 there and the other reads."""
        acts = any(word in text for word in ("atom.", "ld.acquire", "fence.", "shfl."))
        assert not (pure and acts), "the compiler may leave out or merge a text that is said to be pure"
        if "fence.proxy.async.global" in text:
            seen("global fence")
        if given and isinstance(given[0], Pointer):
            return self.atomic_add(given[0], 1, "relaxed") if "atom." in text else given[0].load()
        return inline_asm(text, constraints, tuple(given), dtypes, pure, pack)

    def program_id(self, axis: int) -> Value:
        return value(self.program[axis])

    def num_programs(self, axis: int) -> Value:
        return value(self.grid[axis])

    @staticmethod
    def arange(start: int, end: int, layout: Any) -> Value:
        found = value(torch.arange(start, end))
        found.layout_here = in_registers(layout, found.shape)  # type: ignore[attr-defined]
        return found

    @staticmethod
    def zeros(shape: list[int], dtype: Any, layout: Any) -> Value:
        in_registers(layout, shape)
        return value(torch.zeros(shape, dtype=_torch(dtype)))

    @staticmethod
    def full(shape: list[int], content: Any, dtype: torch.dtype, layout: Any) -> Value:
        in_registers(layout, shape)
        return value(value(content).to(dtype).expand(shape).clone())

    @staticmethod
    def zeros_like(x: Value) -> Value:
        return torch.zeros_like(x)

    @staticmethod
    def join(one: Value, other: Value) -> Value:
        return value(torch.stack((one, other), -1))

    @staticmethod
    def split(x: Value) -> tuple[Value, Value]:
        return x[..., 0], x[..., 1]

    @staticmethod
    def expand_dims(x: Value, axis: int) -> Value:
        layout = getattr(x, "layout_here", None)
        assert layout is None or layout.dim == axis, f"{layout} leaves out another axis than {axis}"
        return x.unsqueeze(axis)

    @staticmethod
    def broadcast(one: Value, other: Value) -> tuple[Value, ...]:
        return tuple(torch.broadcast_tensors(one, other))

    @staticmethod
    def convert_layout(x: Value, layout: Any, assert_trivial: bool = False) -> Value:
        in_registers(layout, x.shape)
        return x

    @staticmethod
    def where(condition: Any, one: Any, other: Any) -> Value:
        return value(torch.where(condition, one, other))

    @staticmethod
    def minimum(one: Any, other: Any) -> Value:
        return value(torch.minimum(value(one), value(other)))

    @staticmethod
    def maximum(one: Any, other: Any) -> Value:
        return value(torch.maximum(value(one), value(other)))

    @staticmethod
    def abs(x: Value) -> Value:
        return x.abs()

    @staticmethod
    def div_rn(one: Value, other: Value) -> Value:
        return one / other

    @staticmethod
    def erf(x: Value) -> Value:
        return torch.erf(x)

    @staticmethod
    def static_assert(condition: bool, message: str = "") -> None:
        assert condition, message

    @staticmethod
    def load(
        pointer: Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = "", eviction_policy: Any = ""
    ) -> Value:
        return pointer.load(mask, other)

    @staticmethod
    def store(pointer: Pointer, content: Any, mask: Any = None, eviction_policy: Any = "") -> None:
        pointer.store(content, mask)

    def atomic_add(self, pointer: Pointer, more: int, sem: str, scope: str = "gpu") -> Value:
        with self.counting:
            before = pointer.load()
            pointer.store(before + more)
        return before

    @staticmethod
    def sum(x: Value, axis: int) -> Value:
        return x.sum(axis)

    @staticmethod
    def max(x: Value, axis: int) -> Value:
        return x.amax(axis)

    @staticmethod
    def warp_specialize(partitions: list[tuple[Any, Any]], warps: list[int], registers: list[int]) -> None:
        """Each partition in a thread of its own."""
        assert all(map(is_power, warps))
        assert len(registers) == len(warps) == len(partitions) - 1
        assert all(24 <= count <= 256 and count % 8 == 0 for count in registers)
        counts = [WARPS.count, *warps]

        def start(number: int) -> None:
            seen.warps.partition, WARPS.count = number, counts[number]
            function, given = partitions[number]
            try:
                function(*given)
            finally:
                LANGUAGE.barriers.run_on(-1)

        LANGUAGE.barriers.run_on(len(partitions) - 1)
        with ThreadPoolExecutor(len(partitions)) as threads:
            for future in [threads.submit(start, number) for number in range(len(partitions))]:
                future.result()
        LANGUAGE.barriers.run_on(1)


LANGUAGE = Language()


def warpgroup_mma(a: Any, b: Shared, acc: Value, use_acc: bool = True, is_async: bool = False) -> Value:
    """Run wgmma with its right operand in shared memory, and the left one there or in registers."""
    for operand in (a, b):
        if isinstance(operand, Shared):
            seen("product", operand)
    left = a.memory.clone() if isinstance(a, Shared) else a
    return mma(left, value(b.memory.clone()), acc if use_acc else value(torch.zeros_like(acc)))


def warpgroup_mma_wait(number: int, deps: tuple[Value, ...]) -> Any:
    """Return the operands that were waited for."""
    seen("products", number=number)
    return deps[0] if len(deps) == 1 else deps


def mma(a: Tensor, b: Tensor, acc: Value) -> Value:
    """Return acc + a @ b: of 16-bit numbers in float32, of int8 exactly, of e4m3 as Hopper's tensor cores add them."""
    if a.dtype == torch.int8:
        return value(acc + (a.double() @ b.double()).to(acc.dtype))
    if a.dtype == torch.float8_e4m3fn:
        return value(_e4m3_sums(a.float(), b.float(), acc.as_subclass(torch.Tensor)))
    return value(acc + a.float() @ b.float())


#: Bits behind the point of the largest addend that a wgmma of e4m3 codes keeps (DeepSeek-V3 Technical Report, 3.5.2:
#: "around 14 bits").
E4M3_BITS = 13


def _e4m3_sums(a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
    """32 products at a time and what there was before, cut off below the last bit that the largest of them leaves."""
    for k in range(0, a.shape[1], 32):
        addends = torch.cat((a[:, k : k + 32, None] * b[None, k : k + 32], acc[:, None]), 1)
        unit = torch.exp2(torch.frexp(addends.abs().amax(1)).exponent - 1.0 - E4M3_BITS)
        acc = torch.trunc(addends / unit[:, None]).sum(1) * unit
    return acc


class _Module:
    """A module of device code whose functions run here."""

    def __init__(self, name: str) -> None:
        self._source = import_module(name)
        self._names = {one: self._translated(one, found) for one, found in vars(self._source).items()}
        self._names["range"] = lambda *ends: map(value, range(*ends))  # loops count in tensors

    def _translated(self, name: str, found: Any) -> Any:
        if name in _OTHERS:
            return _OTHERS[name]
        if isinstance(found, types.ModuleType) and found.__name__.startswith("moeq_kernels."):
            return _module(found.__name__)
        if type(found).__name__ == "constexpr":
            return found.value
        plain = getattr(found, "fn", None)
        if plain is None or not hasattr(found, "arg_names"):
            return found
        if plain.__module__ != self._source.__name__:
            return getattr(_module(plain.__module__), plain.__name__)
        # Its names are those of this module, most of which are still to come.
        return lambda *given, **named: self._function(plain)(*given, **named)

    @cache  # noqa: B019 - modules stay
    def _function(self, plain: Any) -> Any:
        return types.FunctionType(plain.__code__, self._names, plain.__name__, plain.__defaults__)

    def __getattr__(self, name: str) -> Any:
        return self._names[name]


class _Mbarrier:
    """The module `mbarrier`, for the program that runs."""

    def __getattr__(self, name: str) -> Any:
        return getattr(LANGUAGE.barriers, name)


_OTHERS: dict[str, Any] = {
    "gl": LANGUAGE,
    "rows_load": rows_load,
    "tma_load": tma_load,
    "reinterpret": reinterpret,
    "mma_v2": mma,
    "warpgroup_mma": warpgroup_mma,
    "warpgroup_mma_wait": warpgroup_mma_wait,
    "mbarrier": _Mbarrier(),
    "async_copy": types.SimpleNamespace(
        commit_group=lambda: seen("commit"), wait_group=lambda number: seen("committed", number=number)
    ),
    "fence_async_shared": lambda: seen("fence"),
    "gdc_wait": lambda: seen("grids"),
    **dict.fromkeys(("barrier", "gdc_launch_dependents"), _nothing),
}


@cache
def _module(name: str) -> _Module:
    return _Module(name)


def device_function(name: str) -> Any:
    """Return a function of device code, `module:function` relative to `moeq_kernels`, to be called with values."""
    module, _, function = name.partition(":")
    return getattr(_module(f"moeq_kernels.{module}"), function)


def run_all(launches: Iterable[Launch], roots: Mapping[str, Tensor]) -> None:
    """Run launches in order: Gluon kernels here, others in Triton's interpreter."""
    for launch in launches:
        if isinstance(launch.function, GluonJITFunction):
            run(launch, roots)
        else:
            run_with_triton([launch], roots)


def run(launch: Launch, roots: Mapping[str, Tensor]) -> None:
    """All programs of a launch, one after the other."""
    kernel = device_function(launch.kernel)
    given: dict[str, Any] = {}
    for key, argument in launch.arguments.items():
        given[key] = argument
        if isinstance(argument, areas.Area):
            root = roots[argument.root].view(-1).view(torch.uint8)
            end = argument.offset + argument.numel() * argument.itemsize
            given[key] = Pointer(root[argument.offset : end].view(argument.dtype))
        elif isinstance(argument, areas.Box):
            given[key] = Box(argument.area.bind(roots), argument.block)
        elif isinstance(argument, int):
            given[key] = value(argument)
    constants = {key: getattr(one, "value", one) for key, one in launch.constants.items()}
    LANGUAGE.grid, WARPS.count = (*launch.programs, 1, 1)[:3], launch.options.get("num_warps", 4)
    for place in itertools.product(*map(range, reversed(LANGUAGE.grid))):
        LANGUAGE.program, LANGUAGE.barriers = place[::-1], Barriers()
        seen.warps.partition = None
        if seen.listener is not None:
            seen.listener.begin(launch.kernel.rpartition(":")[2])
        kernel(**given, **constants)
        LANGUAGE.barriers.end()

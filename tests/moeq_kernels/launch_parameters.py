"""Every parameter of every launch, as its kernel would read it from the memory that the driver is handed.

A stand-in takes the driver's place, since there is none here, and nothing is compiled. `test_prepared.py` runs this in
a process without Triton's interpreter.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

from test_prepared import meta_experts

from moeq_kernels import cuda, prepare
from moeq_kernels.areas import Area, Box
from moeq_kernels.cuda import MOVING, Bound, LaunchConfig, arguments_of
from moeq_kernels.prepared import Program
from moeq_kernels.schedules import schedule


class Driver:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, int]] = []  # configuration, parameters
        self.described: dict[int, int] = {}  # descriptor to base

    def get_context(self, context: Any) -> int:
        return 0

    set_context = get_context

    def check(self, status: int, what: str) -> None:
        assert status == 0

    def launch(self, config: int, function: int, parameters: int, extra: None) -> int:
        self.launched.append((config, parameters))
        return 0

    def encode(self, address: int, kind: int, rank: int, base: int, *more: Any) -> int:
        self.described[address] = base
        return 0


def wrong_parameters(family: str, tokens: int) -> tuple[int, list[str]]:
    """How many parameters were looked at, and those that are not what the schedule says."""
    driver = Driver()
    cuda.driver = lambda: driver  # type: ignore[assignment]
    problem = prepare(meta_experts(8, 512, 256), top_k=2, max_tokens=tokens, gpu="H200").problem
    planned = schedule(family, problem, tokens)
    launches = [launch for launch in planned.launches if 0 not in launch.programs]
    wanted = [arguments_of(launch, cuda.specialise(launch)) for launch in launches]
    codes = iter(wanted)

    def load(*_: Any) -> tuple[Any, Any]:
        arguments = next(codes)
        boxes = [(0, value.area.shape) for value in arguments if isinstance(value, Box)]
        sizes = tuple(cuda.size_of(one) for one in arguments)
        return SimpleNamespace(boxes=boxes, parameters=sizes, warps=4, shared=0, name="kernel"), ctypes.c_void_p(1)

    cuda.load = load  # type: ignore[assignment]
    roots = Program(family, problem, 0, None).roots
    maps: dict[Any, int] = {}
    bound = Bound(planned, roots, maps, problem.gpu, 0)
    looked, wrong = 0, []
    for layer in (1, 2, 1):  # other addresses, other descriptors, another stream
        addresses = [(layer << 40) + (number << 32) for number in range(len(roots))]
        described = [(layer << 20) + 128 * number for number in range(len(maps))]
        driver.launched.clear()
        bound.run(addresses, described, stream=70 + layer)
        assert len(driver.launched) == len(launches)
        for (config, parameters), launch, arguments in zip(driver.launched, launches, wanted, strict=True):
            read = LaunchConfig.from_address(config)
            assert (read.grid_x, read.grid_y, read.grid_z) == (*launch.programs, 1, 1)[:3]
            assert read.stream == 70 + layer
            places = (ctypes.c_uint64 * len(arguments)).from_address(parameters)
            for number, (place, argument) in enumerate(zip(places, arguments, strict=True)):
                if isinstance(argument, Area):
                    expected = addresses[roots.index(argument.root)] + argument.offset
                    found = ctypes.c_uint64.from_address(place).value
                elif isinstance(argument, Box) and argument.area.root in MOVING:
                    expected = addresses[roots.index(argument.area.root)] + argument.area.offset
                    found = driver.described[place]
                elif isinstance(argument, Box):
                    expected, found = described[maps[argument.area, 0, argument.area.shape]], place
                else:
                    expected, found = argument.value, type(argument).from_address(place).value
                looked += 1
                if found != expected:
                    wrong.append(f"{launch.kernel} parameter {number}: {found:#x}, not {expected:#x}")
    return looked, wrong

"""Builds of kernels: what a build depends on, the cache on disk, and parallel compilation.

A build depends on types, on constants, and on which integers are 1 or multiples of 16, as in Triton's own launcher.
Integers that a kernel lists in `do_not_specialize` do not matter: they change with the number of tokens.

`code_cache()` holds one file per build. Its key covers this package's source, Triton's version, the build and the
GPU's architecture, so that machines of one user can share the folder or copies of it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeq_kernels.code_cache import CodeCache, given_cache, user_cache
from moeq_kernels.errors import KernelEnvironmentError
from moeq_kernels.gpu import Gpu

if TYPE_CHECKING:  # processes that only compile do without torch
    from moeq_kernels.areas import Area
    from moeq_kernels.launch import Argument, Launch

_TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "float8_e4m3fn": "fp8e4nv",
}


@dataclass(frozen=True)
class Specialisation:
    """Description of a kernel's build."""

    kernel: str  #: device function as in `Launch.kernel`
    types: tuple[tuple[str, str], ...]  #: Triton types by parameter; all other parameters are constants
    constants: tuple[tuple[str, Any], ...]  #: values of constants by parameter
    aligned: frozenset[str]  #: parameters that are multiples of 16
    options: tuple[tuple[str, Any], ...]  #: options for Triton's compiler


@dataclass(frozen=True)
class Warmed:
    """Result of a warm-up."""

    kernels: int  #: number of builds that are needed
    compiled: int  #: number of builds that were missing in the cache
    seconds: float  #: duration
    #: Whether the cache holds the builds now; without a writable folder every process compiles them again.
    kept: bool = True

    def __add__(self, other: Warmed) -> Warmed:
        return Warmed(
            self.kernels + other.kernels,
            self.compiled + other.compiled,
            self.seconds + other.seconds,
            self.kept and other.kept,
        )


def specialise(launch: Launch) -> Specialisation:
    """Return the build that a launch needs."""
    types: list[tuple[str, str]] = []
    constants: dict[str, Any] = dict(launch.constants)
    aligned = set()
    for parameter in launch.function.params:
        name = parameter.name
        if name in constants:
            continue
        kind, divisible = _type_of(launch.arguments[name], bool(parameter.do_not_specialize))
        if kind is None:
            constants[name] = launch.arguments[name]
            continue
        types.append((name, kind))
        if divisible:
            aligned.add(name)
    options = tuple(sorted(launch.options.items()))
    return Specialisation(launch.kernel, tuple(types), tuple(sorted(constants.items())), frozenset(aligned), options)


def _type_of(value: Argument, plain: bool) -> tuple[str | None, bool]:
    """Return the type (None for a constant) and whether 16 divides the value; `plain` ones are not specialised."""
    from moeq_kernels.areas import Area, Box

    if value is None:
        return None, False
    if isinstance(value, Area):
        return f"*{_name(value)}", value.offset % 16 == 0
    if isinstance(value, Box):
        return f"tensordesc<{_name(value.area)}[{', '.join(map(str, value.block))}],{value.layout!r}>", False
    if value == 1 and not plain:
        return None, False
    return "i32" if -(2**31) <= value < 2**31 else "i64", value % 16 == 0 and not plain


def _name(area: Area) -> str:
    return _TYPES[str(area.dtype).removeprefix("torch.")]


def compile_one(wanted: Specialisation, gpu: Gpu) -> Any:
    """Compile with Triton, which looks into its own cache first; needs no GPU.

    Raises KernelEnvironmentError if this process interprets kernels.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = _function(wanted)
    types = dict(wanted.types)
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(function.arg_names) if name in wanted.aligned
    }
    source_of = _gluon_source() if function.is_gluon() else ASTSource
    source = source_of(function, signature, constexprs=dict(wanted.constants), attrs=attributes)
    return triton.compile(source, target=GPUTarget(gpu.backend, gpu.arch, gpu.warp), options=dict(wanted.options))


@dataclass(frozen=True)
class Binary:
    """Machine code for an NVIDIA GPU and its launch parameters."""

    code: bytes  #: cubin
    name: str  #: name of the kernel in the cubin
    warps: int  #: warps per program
    shared: int  #: bytes of dynamic shared memory per program
    #: Swizzle (CUtensorMapSwizzle) and block of each descriptor of the copy engine.
    boxes: tuple[tuple[int, tuple[int, ...]], ...]
    parameters: tuple[int, ...]  #: bytes of each kernel parameter


def parameters_of(ptx: str) -> tuple[int, ...]:
    """Return the bytes of each kernel parameter in a PTX text."""
    begin = ptx.index(".entry")
    head = ptx[begin : ptx.index(")", begin)]
    found = re.findall(r"\.param (?:\.align \d+ )?\.[a-z](\d+)[^\[,]*(?:\[(\d+)\])?", head)
    return tuple(int(count) if count else int(bits) // 8 for bits, count in found)


def code_cache() -> CodeCache | None:
    """Open the cache folder, MOEQ_KERNEL_CACHE or `moeq/gpu` in the user's cache folder; None if it is not usable."""
    return given_cache("MOEQ_KERNEL_CACHE") if os.environ.get("MOEQ_KERNEL_CACHE") else user_cache("moeq", "gpu")


@cache
def _source_key() -> str:
    """Hash the source of this package.

    Triton's `cache_key` of a kernel does not suit: if called functions read constants, the key depends on which other
    keys were computed before, so that one process would not find what another has compiled.
    """
    folder = Path(__file__).parent
    files = sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*.py"))
    found = hashlib.sha256()
    for name, path in files:
        found.update(repr((name, path.read_bytes())).encode())
    return found.hexdigest()


def _file(wanted: Specialisation, gpu: Gpu) -> str:
    """Return the name of a build's file."""
    import triton
    from triton._C import libtriton

    settings = sorted(libtriton.get_cache_invalidating_env_vars().items())
    parts = (_source_key(), triton.__version__, settings, gpu.arch, wanted.types, wanted.constants)
    text = repr((*parts, sorted(wanted.aligned), wanted.options))
    name = wanted.kernel.rpartition(":")[2]
    return f"{name}-sm{gpu.arch}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def stored(wanted: Specialisation, gpu: Gpu) -> Binary | None:
    """Read a build from the cache folder; None if it is missing, unreadable or damaged."""
    folder = code_cache()
    content = None if folder is None else folder.read(_file(wanted, gpu))
    return None if content is None else _parse(content)


def _parse(content: bytes) -> Binary | None:
    """Read a build from a file's content; None if it is damaged."""
    digest, _, rest = content.partition(b"\n")
    if digest != _digest(rest):
        return None
    head, _, code = rest.partition(b"\n")
    try:
        about = json.loads(head)
        boxes = tuple((int(swizzle), tuple(map(int, block))) for swizzle, block in about["boxes"])
        sizes = int(about["warps"]), int(about["shared"])
        return Binary(code, str(about["name"]), *sizes, boxes, tuple(map(int, about["parameters"])))
    except (ValueError, TypeError, LookupError, RecursionError):
        return None


def _digest(rest: bytes) -> bytes:
    """Return the digest of a cache file's other lines, which its first line holds."""
    return hashlib.sha256(rest).hexdigest().encode()


def binary(wanted: Specialisation, gpu: Gpu) -> Binary:
    """Read a build from the cache folder, or compile and store it. Raises the errors of `compile_one`."""
    found = stored(wanted, gpu)
    if found is not None:
        return found
    built = compile_one(wanted, gpu)
    metadata = built.metadata
    if getattr(metadata, "global_scratch_size", 0) or getattr(metadata, "profile_scratch_size", 0):
        raise KernelEnvironmentError(f"{wanted.kernel} needs scratch memory, which these launches do not provide")
    boxes = tuple(
        (box["swizzle"], tuple(box["block_size"])) for box in getattr(metadata, "tensordesc_meta", None) or ()
    )
    parameters = parameters_of(built.asm["ptx"])
    found = Binary(built.asm["cubin"], metadata.name, metadata.num_warps, metadata.shared, boxes, parameters)
    about = {"name": found.name, "warps": found.warps, "shared": found.shared, "boxes": found.boxes}
    about["parameters"] = found.parameters
    rest = json.dumps(about).encode() + b"\n" + found.code
    folder = code_cache()
    if folder is not None:
        folder.write(_file(wanted, gpu), _digest(rest) + b"\n" + rest)
    return found


def _function(wanted: Specialisation) -> Any:
    module, _, name = wanted.kernel.partition(":")
    function = getattr(import_module(f"moeq_kernels.{module}"), name)
    if not hasattr(function, "cache_key"):
        raise KernelEnvironmentError("kernels cannot be compiled in the interpreter", "unset TRITON_INTERPRET")
    return function


@cache
def _gluon_source() -> Any:
    """Return the source class of Gluon kernels, which is public from Triton 3.9 on."""
    gluon = import_module("triton.experimental.gluon")
    return getattr(gluon, "GluonASTSource", None) or import_module(f"{gluon.__name__}._runtime").GluonASTSource


def compile_all(wanted: Iterable[Specialisation], gpu: Gpu, workers: int | None = None) -> Warmed:
    """Compile the builds that the cache folder lacks, in one process per CPU (or in `workers` processes).

    Raises KernelEnvironmentError with the message of a process that failed.
    """
    begin = time.monotonic()
    builds = set(wanted)
    # Longest builds first; kernels with more parameters tend to take longer.
    missing = (one for one in builds if stored(one, gpu) is None)
    tasks = sorted(missing, key=lambda one: -len(one.types) - len(one.constants))
    workers = min(len(tasks), workers or len(os.sched_getaffinity(0)))
    if not tasks:
        return Warmed(len(builds), 0, time.monotonic() - begin)
    queue = deque(tasks)
    with ThreadPoolExecutor(workers) as threads:  # every thread feeds one process
        try:
            done = list(threads.map(lambda _: _feed(queue, gpu), range(workers)))
        except BaseException:  # interruption or failure: the other processes finish their current build
            queue.clear()
            raise
    return Warmed(len(builds), sum(done), time.monotonic() - begin, stored(tasks[0], gpu) is not None)


_WORKER = "from moeq_kernels.compiling import work; work()"


def _feed(tasks: deque[Specialisation], gpu: Gpu) -> int:
    """Feed one process with tasks until none are left, and return how many builds it compiled."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "CUDA_VISIBLE_DEVICES": ""}
    # A new session keeps Ctrl-C away: an interrupted assembler would print all of its input. The process ends at the
    # end of its standard input.
    process = subprocess.Popen(
        [sys.executable, "-c", _WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    compiled = 0
    try:
        while True:
            try:
                task = tasks.popleft()  # atomic
            except IndexError:
                break
            pickle.dump((task, gpu), process.stdin)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
            if isinstance(answer, str):
                raise KernelEnvironmentError(f"{task.kernel} does not compile: {answer}")
            compiled += answer
    except (EOFError, BrokenPipeError):
        code = process.wait()
        raise KernelEnvironmentError(f"a process that compiled kernels ended early, with exit code {code}") from None
    finally:
        with suppress(BrokenPipeError):  # the process ended without reading everything
            process.stdin.close()
        process.wait()
        process.stdout.close()
    return compiled


def work() -> None:
    """Compile the tasks that `_feed` sends until standard input ends."""
    logging.getLogger("moeq_kernels.code_cache").disabled = True  # the other process has warned
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # compilers print to stderr, so that stdout holds answers only
    while True:
        try:
            task, gpu = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: bool | str
        try:
            answer = stored(task, gpu) is None
            binary(task, gpu)
        except Exception as error:  # noqa: BLE001 - the other process raises it
            answer = f"{type(error).__name__}: {str(error)[:500]}"
        pickle.dump(answer, answers)
        answers.flush()

"""Machine code of loops, which numba compiles once (`moeq.layouts.loops.compiler`) and a cache keeps.

Importing numba takes longer than all the rest of a start, so loops that are in the cache are loaded without it. The
cache is a private folder of object files (`moeq_kernels.code_cache`) in `NUMBA_CACHE_DIR`, or else in the user's cache
folder. A file counts if it begins with the digest of the rest and of what the rest depends on: the sources, the
versions of what compiled them, the processor. Every other file is compiled again, and replaced.
"""

from __future__ import annotations

import ctypes
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from struct import pack
from threading import RLock, local
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numpy as np
from blake3 import blake3

from moeq.layouts.loops.target import Kind, processor, target_machine
from moeq_kernels.code_cache import CodeCache, user_cache

Array = np.ndarray[Any, Any]

_DIGEST_BYTES = 32

#: Bits of numpy's `ndarray.flags.num`: C order, Fortran's order, aligned, writeable.
_FLAGS = 0x1 | 0x2 | 0x100 | 0x400

_INTEGER = np.dtype(np.int64)

#: Imports of moeq's modules at the top of a source.
_IMPORTS = re.compile(r"^from (moeq(?:\.\w+)*) import (?:\(([^)]*)\)|(.*))", re.MULTILINE)

#: Bytes of arrays up to which a loop keeps the interpreter's lock: giving it away and getting it back takes longer.
_SHORT_BYTES = 128 * 1024

#: Machine code called with and without the interpreter's lock.
_Functions = tuple[Callable[[bytes], int], Callable[[bytes], int]]

#: Function that is called after every loop with its machine code without the lock, its arguments and its result.
Watcher = Callable[[Callable[[bytes], int], Sequence[Any], int], None]


class _Here(local):
    """Limits and watcher of the current thread."""

    only_cached = False
    watcher: Watcher | None = None


#: Held while machine code is compiled or added to `engine()`, which only one thread may do at a time.
code_lock = RLock()
_here = _Here()

_address = ctypes.pythonapi.PyCapsule_GetPointer
_address.argtypes, _address.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p


class NotCachedError(Exception):
    """A loop would have to be compiled, where only those in the cache were allowed."""


@contextmanager
def only_cached() -> Iterator[None]:
    """Let this thread run only loops that are in the cache: others raise `NotCachedError` and are not compiled."""
    _here.only_cached = True
    try:
        yield
    finally:
        _here.only_cached = False


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Call a function after every loop that this thread runs in this block."""
    _here.watcher = watcher
    try:
        yield
    finally:
        _here.watcher = None


class Loop:
    """A loop that is called with arrays and integers. Results are integers, also where the loop returns a bool.

    Machine code takes 64 bits for each argument: the number, or the address of the array's `PyArrayInterface`. It runs
    without the interpreter's lock, unless its arrays are small.
    """

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name
        self._compiled: dict[tuple[Any, ...], _Functions] = {}

    def __call__(self, *arguments: Any) -> int:
        # Kept short: some loops take no longer than a dozen lines of Python.
        key: list[Any] = []
        words, kept, size = [], [], 0
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                interface = argument.__array_struct__
                kept.append(interface)
                words.append(_address(interface, None))
                size += argument.nbytes
                key += argument.dtype, argument.ndim, argument.flags.num & _FLAGS
            else:
                words.append(argument)
                key.append(_INTEGER if isinstance(argument, int) else argument.dtype)
        functions = self._compiled.get(tuple(key)) or self._prepare(tuple(key), [_kind(item) for item in arguments])
        result = functions[size > _SHORT_BYTES](pack(f"{len(words)}q", *words))
        if _here.watcher is not None:
            _here.watcher(functions[1], arguments, result)
        return result

    def _prepare(self, key: tuple[Any, ...], kinds: list[Kind]) -> _Functions:
        with code_lock:
            if key not in self._compiled:
                self._compiled[key] = load(self.module, self.name, kinds)
            return self._compiled[key]


class Loops:
    """The loops of a module, by name. The module is imported when one of them has to be compiled."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Loop:
        if name.startswith("_"):
            raise AttributeError(name)
        loop = Loop(self._module, name)
        setattr(self, name, loop)
        return loop


def _kind(argument: Any) -> Kind:
    if not isinstance(argument, np.ndarray):
        return Kind(_INTEGER if isinstance(argument, int) else argument.dtype)
    flags = argument.flags
    layout = "C" if flags.c_contiguous else "F" if flags.f_contiguous else "A"
    return Kind(argument.dtype, argument.ndim, layout, flags.aligned, flags.writeable)


def available() -> bool:
    """Return whether loops can be run: they can be compiled, or the cache has some for what is installed now."""
    if find_spec("numba") is None:
        return False
    if cached():
        return True
    try:
        import moeq.layouts.loops.compiler  # noqa: F401 - numba raises ImportError where it does not fit numpy
    except ImportError:
        return False
    return True


def cached() -> bool:
    """Return whether the cache has loops for what is installed now. Needs no numba."""
    folder = code_cache()
    return folder is not None and any(name.endswith(f".{_environment_digest()}.o") for name in folder.names())


def load(module: str, name: str, kinds: list[Kind]) -> _Functions:
    """Return the machine code of a loop, from the cache or compiled now: with the interpreter's lock, and without."""
    spelled = " ".join(kind.spell() for kind in kinds)
    about = "\n".join((module, name, spelled, _environment(), _source_digest(module)))
    symbol = f"moeq_{blake3(f'{module}.{name} {spelled}'.encode()).hexdigest()[:16]}"
    folder = code_cache()
    file = f"{module.rpartition('.')[2]}.{name}.{symbol}.{_environment_digest()}.o"
    code = None if folder is None else _opened(folder.read(file), about)
    if not code:
        if _here.only_cached:
            raise NotCachedError(f"{module}.{name}")
        from moeq.layouts.loops.compiler import compile_loop

        function, code = compile_loop(module, name, kinds, symbol)
        if code is None:
            warnings.warn(
                f"{module}.{name} needs numba to run: every process compiles it", RuntimeWarning, stacklevel=4
            )
        elif folder is not None:
            folder.write(file, _seal(about, code) + code)
        return function, function
    engine().add_object_file(llvm.ObjectFileRef.from_data(code))
    address, signature = engine().get_function_address(symbol), (ctypes.c_int64, ctypes.c_void_p)
    return ctypes.PYFUNCTYPE(*signature)(address), ctypes.CFUNCTYPE(*signature)(address)


def code_cache() -> CodeCache | None:
    """Open the folder of object files of these sources; None where nothing can be kept.

    Two copies of moeq share it if their loops are the same, and do not replace each other's files if not.
    """
    return user_cache("moeq", f"loops-{_folder_digest(Path(__file__).parent)}", variable="NUMBA_CACHE_DIR")


@lru_cache(maxsize=1)
def _folder_digest(folder: Path) -> str:
    """Digest all modules of a folder."""
    return _digest("\0".join(path.read_text() for path in sorted(folder.glob("*.py"))))


def _opened(content: bytes | None, about: str) -> bytes | None:
    """Return the object code in a file of the cache; None where its digest is wrong."""
    if content is None:
        return None
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if digest == _seal(about, code) else None


def _seal(about: str, code: bytes) -> bytes:
    return blake3(about.encode() + b"\0" + code).digest(_DIGEST_BYTES)


def _digest(text: str) -> str:
    return blake3(text.encode()).hexdigest()[:16]


@lru_cache(maxsize=1)
def _environment() -> str:
    """Return the versions of Python, numpy and the compilers, and the processor, as lines."""
    versions = sys.version, np.__version__, llvmlite.__version__, version("numba")
    return "\n".join((*versions, llvm.get_process_triple(), *processor()))


@lru_cache(maxsize=1)
def _environment_digest() -> str:
    return _digest(_environment())


@lru_cache(maxsize=16)
def _source_digest(module: str) -> str:
    """Digest the source of a module and all of moeq that it imports, since constants are compiled in."""
    sources: dict[Path, bytes] = {}
    _add_sources(module, sources)
    return blake3(b"\0".join(sources.values())).hexdigest()


def _add_sources(module: str, sources: dict[Path, bytes]) -> None:
    path = Path(__file__).parents[3].joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if path in sources or not path.exists():
        return
    sources[path] = path.read_bytes()
    for imported, several, one in _IMPORTS.findall(sources[path].decode()):
        _add_sources(imported, sources)
        for name in re.findall(r"\w+", several or one):
            _add_sources(f"{imported}.{name}", sources)


@lru_cache(maxsize=1)
def engine() -> Any:
    """Return LLVM's engine, which holds the machine code of this process. The caller holds `code_lock`."""
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())

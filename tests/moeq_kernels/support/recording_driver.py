"""A CUDA driver in Python behind ctypes, as a library has it: it keeps what it is told, and answers what a test plans.

Numbers and addresses go through C's types, so that what ctypes would cut off or confuse is cut off here as well.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

from moeq_kernels import cuda, replay

#: Parameters of the driver's functions, as cuda.h of CUDA 12 has them.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuModuleLoadData": (c_void_p, c_char_p),
    "cuModuleGetFunction": (c_void_p, c_void_p, c_char_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuFuncSetCacheConfig": (c_void_p, c_int),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuGetErrorString": (c_int, c_void_p),
    "cuLaunchKernelEx": (c_void_p,) * 4,
    "cuTensorMapEncodeTiled": (c_void_p, c_int, c_uint32, *(c_void_p,) * 5, *(c_int,) * 4),
    "cuStreamGetPriority": (c_void_p, c_void_p),
    "cuStreamCreateWithPriority": (c_void_p, c_uint, c_int),
    "cuStreamIsCapturing": (c_void_p, c_void_p),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, c_void_p),
    "cuThreadExchangeStreamCaptureMode": (c_void_p,),
    "cuGraphGetNodes": (c_void_p,) * 3,
    "cuGraphGetEdges_v2": (c_void_p,) * 5,
    "cuGraphInstantiateWithFlags": (c_void_p, c_void_p, c_uint64),
    "cuGraphLaunch": (c_void_p,) * 2,
    "cuGraphExecKernelNodeSetParams_v2": (c_void_p,) * 3,
    "cuGraphExecDestroy": (c_void_p,),
    "cuGraphDestroy": (c_void_p,),
}

#: Results that are stored through a parameter unless a test plans others: the parameter, its type, and the value.
STORED: dict[str, tuple[int, Any, int]] = {
    "cuModuleLoadData": (0, c_void_p, 0x5000_0000_0001),
    "cuModuleGetFunction": (0, c_void_p, 0x5000_0000_0002),
    "cuDeviceGet": (0, c_int, 40),
    "cuDevicePrimaryCtxRetain": (0, c_void_p, 0x5000_0000_0003),
    "cuStreamGetPriority": (1, c_int, -3),
    "cuStreamCreateWithPriority": (0, c_void_p, 0x5000_0000_0004),
    "cuStreamEndCapture": (1, c_void_p, 0x5000_0000_0005),
    "cuGraphInstantiateWithFlags": (0, c_void_p, 0x5000_0000_0006),
}

#: The text of every error.
ERROR = ctypes.c_char_p(b"out of luck")


class Library:
    """What `ctypes.CDLL` gives for the driver's name.

    Attributes:
        told: calls in order: the function's name, and its arguments as C has them.
        statuses: what functions return in place of 0.
        stored: see STORED.
        modes: capture mode of the thread at every call but those that change it.
        watched: called before a function returns.
    """

    def __init__(self, *missing: str) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.statuses: dict[str, int] = {}
        self.stored = dict(STORED)
        self.modes: list[int] = []
        self.watched: dict[str, Callable[..., None]] = {}
        self.mode = 0
        for name, types in SIGNATURES.items():
            if name not in missing:
                setattr(self, name, ctypes.CFUNCTYPE(c_int, *types)(self._function(name)))

    def names(self) -> list[str]:
        """Names of the functions that were called."""
        return [name for name, *_ in self.told]

    def given(self, name: str) -> list[tuple[Any, ...]]:
        """Arguments of all calls of a function."""
        return [arguments for called, *arguments in self.told if called == name]  # type: ignore[misc]

    def _function(self, name: str) -> Callable[..., int]:
        def called(*given: Any) -> int:
            self.told.append((name, *given))
            if name in self.statuses:
                return self.statuses[name]
            if name == "cuThreadExchangeStreamCaptureMode":
                mode = c_int.from_address(given[0])
                mode.value, self.mode = self.mode, mode.value
                return 0
            self.modes.append(self.mode)
            if name == "cuGetErrorString":
                c_void_p.from_address(given[1]).value = ctypes.cast(ERROR, c_void_p).value
            if name in self.stored:
                place, kind, value = self.stored[name]
                kind.from_address(given[place]).value = value
            if name in self.watched:
                self.watched[name](*given)
            return 0

        return called


def array(kind: Any, address: int, count: int) -> list[int]:
    """Read an array of C's."""
    return list((kind * count).from_address(address))


def install(monkeypatch: Any, library: Library) -> Library:
    """Give a test this driver in place of the machine's, and a thread that has not met it."""

    def opened(name: str) -> Library:
        assert name == "libcuda.so.1"
        return library

    monkeypatch.setattr(ctypes, "CDLL", opened)
    monkeypatch.setattr(cuda, "_THREAD", threading.local())
    monkeypatch.delenv("MOEQ_KERNEL_REPLAY", raising=False)
    for module, name in ((cuda, "driver"), (cuda, "load"), (replay, "graphs"), (replay, "_capture_stream")):
        monkeypatch.setattr(module, name, cache(getattr(module, name).__wrapped__))
    return library

"""Compiling and loading what prepared layers need, before anything calls them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from moeq_kernels.compiling import Specialisation, Warmed, compile_all
from moeq_kernels.gpu import Gpu
from moeq_kernels.problem import Problem
from moeq_kernels.schedules import builds


class Layer(Protocol):
    """What of a prepared layer says which kernels it needs, and where."""

    family: str
    problem: Problem
    device: torch.device
    max_tokens: int
    _direct: bool


def warmup(layers: Iterable[Layer], max_tokens: int | None = None) -> Warmed:
    """Compiles every kernel that layers need for 1 to max_tokens tokens (default: their own), in parallel.

    Layers of one shape and format share kernels. Machine code goes to `compiling.cache_folder()`; on a GPU it is loaded
    as well. In the interpreter there is nothing to do, nor for AMD's GPUs, whose kernels Triton compiles when they are
    first called. Raises KernelEnvironmentError where a kernel does not compile.
    """
    problems: dict[tuple[str, Problem], int] = {}
    on: dict[torch.device, set[tuple[str, Problem]]] = {}
    for layer in layers:
        key = (layer.family, layer.problem)
        tokens = layer.max_tokens if max_tokens is None else max_tokens
        problems[key] = max(tokens, problems.get(key, 0))
        if layer._direct:
            on.setdefault(layer.device, set()).add(key)
    found = {
        (family, problem): builds(family, problem, tokens)
        for (family, problem), tokens in problems.items()
        if not problem.interpret and problem.gpu.backend == "cuda"
    }
    wanted: dict[Gpu, set[Specialisation]] = {}
    for (_, problem), needed in found.items():
        wanted.setdefault(problem.gpu, set()).update(needed)
    total = Warmed(0, 0, 0.0)
    for gpu, needed in wanted.items():
        total += compile_all(needed, gpu)
    for device, keys in on.items():
        _load({(one, problem.gpu) for family, problem in keys for one in found[family, problem]}, device)
    return total


def _load(wanted: Iterable[tuple[Specialisation, Gpu]], device: torch.device) -> None:
    from moeq_kernels.cuda import load

    with torch.cuda.device(device):
        for one, gpu in wanted:
            load(one, gpu, device.index)

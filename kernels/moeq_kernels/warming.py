"""Warm-up: compile and load the kernels of prepared layers before the first call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from moeq_kernels.compiling import Specialisation, Warmed, compile_all
from moeq_kernels.gpu import Gpu
from moeq_kernels.problem import Problem
from moeq_kernels.schedules import builds


class Layer(Protocol):
    """Attributes of a prepared layer, whose module imports this one, that determine its kernels and their device."""

    family: str
    problem: Problem
    device: torch.device
    max_tokens: int
    is_direct: bool


def warmup(layers: Iterable[Layer], max_tokens: int | None = None) -> Warmed:
    """Compile all kernels that layers need for 1 to max_tokens tokens (default: their own) in parallel.

    Layers of equal shape and format share kernels. Machine code goes to `compiling.code_cache()`, and is loaded if
    the layers are on a GPU. The interpreter needs no warm-up; kernels for AMD GPUs are compiled by Triton in their
    first call. Raises KernelEnvironmentError if a kernel does not compile.
    """
    problems: dict[tuple[str, Problem], int] = {}
    on: dict[torch.device, set[tuple[str, Problem]]] = {}
    for layer in layers:
        key = (layer.family, layer.problem)
        tokens = layer.max_tokens if max_tokens is None else max_tokens
        problems[key] = max(tokens, problems.get(key, 0))
        if layer.is_direct:
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

"""Kernel launches as data, which are planned without memory.

NVIDIA GPUs run them through `compiling.py` and `cuda.py`, the interpreter and AMD GPUs through Triton's launcher.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from moeq_kernels.areas import Area, Box

Argument = Area | Box | int | None


@dataclass(frozen=True)
class Launch:
    """Kernel launch."""

    kernel: str  #: device function as `module:function`, relative to `moeq_kernels`
    programs: tuple[int, ...]  #: size of the grid along up to three axes
    arguments: Mapping[str, Argument]  #: run-time arguments by parameter name
    constants: Mapping[str, Any]  #: constexpr arguments by parameter name
    #: Options for Triton's compiler: `num_warps`, `num_stages`, `maxnreg`, `launch_pdl`.
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def function(self) -> Any:
        """Device function."""
        module, _, name = self.kernel.partition(":")
        return getattr(import_module(f"moeq_kernels.{module}"), name)


@dataclass(frozen=True)
class Schedule:
    """Launches of a call in order, and the workspace bytes that they share."""

    launches: tuple[Launch, ...]
    workspace_bytes: int


def run_with_triton(launches: Iterable[Launch], roots: Mapping[str, Tensor]) -> None:
    """Launch kernels through Triton's launcher on the device of the roots."""
    device = next(iter(roots.values())).device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # Triton launches on the current device
        for launch in launches:
            if 0 in launch.programs:
                continue
            values = {
                name: value.bind(roots) if isinstance(value, Area | Box) else value
                for name, value in launch.arguments.items()
            }
            launch.function[launch.programs](**values, **launch.constants, **launch.options)


def triton_dtype(dtype: torch.dtype) -> Any:
    """Return the `triton.language` dtype for a torch dtype."""
    import triton.language as tl

    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]

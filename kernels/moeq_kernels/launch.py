"""A kernel launch as data: planned without memory, then run by Triton's launcher, or compiled and launched directly.

`compiling.py` and `cuda.py` are the direct way; Triton's launcher is what the interpreter and AMD's GPUs use.
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
    """One kernel launch.

    Attributes:
        kernel: `module:function` below `moeq_kernels`.
        programs: grid.
        arguments: by parameter.
        constants: constexpr parameters.
        options: of Triton's compiler: `num_warps`, `num_stages`, `maxnreg`, `launch_pdl`.
    """

    kernel: str
    programs: tuple[int, ...]
    arguments: Mapping[str, Argument]
    constants: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def function(self) -> Any:
        """The device function."""
        module, _, name = self.kernel.partition(":")
        return getattr(import_module(f"moeq_kernels.{module}"), name)


@dataclass(frozen=True)
class Schedule:
    """The launches of a call, in order, and the bytes of workspace that they share."""

    launches: tuple[Launch, ...]
    workspace_bytes: int


def run_with_triton(launches: Iterable[Launch], roots: Mapping[str, Tensor]) -> None:
    """Launches through Triton's launcher, on the device of the roots."""
    device = next(iter(roots.values())).device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # launches go to the current device
        for launch in launches:
            if 0 in launch.programs:
                continue
            values = {
                name: value.bind(roots) if isinstance(value, Area | Box) else value
                for name, value in launch.arguments.items()
            }
            launch.function[launch.programs](**values, **launch.constants, **launch.options)


def triton_dtype(dtype: torch.dtype) -> Any:
    """The triton.language dtype of a torch dtype."""
    import triton.language as tl

    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]

"""Call `moeq_kernels` for a check, on the device of the packed experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moeq.errors import MoeqError
from moeq.load.activation import activation_arguments
from moeq.load.kernel_experts import check_e4m3
from moeq.load.packed_sample import PackedPart
from moeq.reference.moe import Activation
from moeq.spelling import option

if TYPE_CHECKING:
    from moeq_kernels import PackedExperts
    from moeq_kernels.tuning import Blocks


def activations_of(layout: str, element: str, asked: str = "") -> str:
    """Return the type to which the kernels of a check quantise activations: `int8`, `fp8` (if asked for) or empty.

    Only prepared layers multiply 4-bit weights with e4m3 activations, so a check runs them with 16-bit activations.

    Raises MoeqError `answer.no-kernel` where no kernel reads the layout, or none with e4m3 activations.
    """
    from moeq_kernels.errors import KernelUnsupportedError
    from moeq_kernels.formats import find_format

    try:
        found = find_format(layout, element)
        if asked == "fp8":
            check_e4m3(layout, element)
        return "int8" if found.int8_activations else asked if found.fp8_activations else ""
    except KernelUnsupportedError as error:
        raise MoeqError(
            "answer.no-kernel",
            f"moeq has no kernel that reads {element} weights in layout {layout}: {error.hint}",
            f"`moeq verify` proves the bytes without one; {option('kernels', False)} checks the digests",
        ) from error


@contextmanager
def kernel_errors() -> Iterator[None]:
    """Turn errors of the kernel package into errors of moeq: an uncovered case is an answer, not a bug.

    Raises MoeqError `answer.no-kernel` for a layout, dtype or size that no kernel covers; `environment.kernels` where
    triton is missing.
    """
    from moeq_kernels import KernelEnvironmentError
    from moeq_kernels.errors import KernelUnsupportedError

    try:
        yield
    except KernelUnsupportedError as error:
        raise MoeqError("answer.no-kernel", f"moeq has no kernel for this: {error.message}", error.hint) from error
    except KernelEnvironmentError as error:
        raise MoeqError("environment.kernels", error.message, error.hint) from error


def fused_layer(parts: Sequence[PackedPart], x: Tensor, weights: Tensor, ids: Tensor, activation: Activation) -> Tensor:
    """Run the fused layer and return `[M, H]`, in x's dtype for one rank, or as the float32 sum over several ranks."""
    outputs = [fused_experts(part.experts, x, weights, part.local_ids(ids), activation) for part in parts]
    return outputs[0] if len(outputs) == 1 else torch.stack([output.float() for output in outputs]).sum(dim=0)


def fused_experts(experts: PackedExperts, x: Tensor, weights: Tensor, ids: Tensor, activation: Activation) -> Tensor:
    """Run the fused layer on one rank's experts, on a CPU with tiles that suit Triton's interpreter."""
    from moeq_kernels import fused_moe

    return fused_moe(x, experts, weights, ids, blocks=_blocks(ids), **activation_arguments(activation))


def _blocks(ids: Tensor) -> Blocks | None:
    """Return tiles for the interpreter, whose cost is per program, that hold all rows of an expert; None on a GPU."""
    from moeq_kernels.tuning import Blocks, next_power_of_two

    if ids.device.type != "cpu":
        return None
    rows = int(torch.bincount(ids[ids >= 0].flatten(), minlength=1).max())
    return Blocks(min(64, max(16, next_power_of_two(rows))), 256, 256)


def first_products(parts: Sequence[PackedPart], x: Tensor, ids: Tensor, width: int) -> dict[str, Tensor]:
    """Compute `gate` (if there is one) and `up` of every pair: float32 `[pairs, width]`, without padding."""
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, values in _first(part.experts, x, part.local_ids(ids)).items():
            whole = found.setdefault(name, torch.zeros(ids.numel(), width, device=x.device))
            columns = part.intermediate
            whole[:, columns] += values[:, : columns.stop - columns.start]
    return found


def _first(experts: PackedExperts, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
    from moeq_kernels import expert_products

    both = expert_products(x, experts.w13, ids, blocks=_blocks(ids))
    half = both.shape[1] // 2
    if experts.w13_order == "ungated":
        return {"up": both}
    if experts.w13_order == "interleaved":
        return {"gate": both[:, 0::2], "up": both[:, 1::2]}
    return {"gate": both[:, :half], "up": both[:, half:]}


def down_products(parts: Sequence[PackedPart], hidden: Tensor, ids: Tensor, width: int) -> Tensor:
    """Compute `down` of every pair from its own row of `hidden` `[pairs, I]`: float32 `[pairs, width]`."""
    from moeq_kernels import expert_products

    total = torch.zeros(hidden.shape[0], width, device=hidden.device)
    for part in parts:
        local = part.local_ids(ids).reshape(-1, 1)
        total += expert_products(hidden[:, part.intermediate], part.experts.w2, local, blocks=_blocks(local))[:, :width]
    return total

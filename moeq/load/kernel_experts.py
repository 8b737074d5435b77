"""Turn the stacked tensors of a converted layer into records of `moeq_kernels`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from moeq.checkpoint.manifest import StackedRole
from moeq.errors import MoeqError
from moeq.layouts.base import check_index_parts
from moeq.layouts.parts import torch_dtype
from moeq.layouts.registry import get_layout, layout_class
from moeq.matrix import MatrixSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from moeq_kernels import PackedExperts, PreparedLayer


def row_order(layout: str) -> Literal["gate-up", "interleaved"]:
    """Return the order of gate and up rows. Raises MoeqError `answer.no-kernel` if up rows come first."""
    order = layout_class(layout).w13_order
    if order == "up-gate":
        raise MoeqError("answer.no-kernel", f"moeq has no kernel that reads {layout}, whose up rows come first")
    return order


def check_e4m3(layout: str, element: str) -> None:
    """Check that some kernel multiplies these weights with e4m3 activations.

    Raises MoeqError `answer.no-kernel` if no kernel does; KernelUnsupportedError if no kernel reads the layout at all.
    """
    from moeq_kernels.formats import FORMATS, find_format
    from moeq_kernels.hopper.support import W4A8

    if find_format(layout, element).fp8_activations or (layout, element) in W4A8:
        return
    readable = [one.layout for one in FORMATS.values() if one.fp8_activations]
    readable += [one for one, _ in W4A8]
    raise MoeqError(
        "answer.no-kernel",
        f"moeq has no kernel that multiplies {element} weights in layout {layout} with e4m3 activations",
        f"layouts that have one: {', '.join(readable)}",
    )


def prepared_layer(experts: PackedExperts, **options: Any) -> PreparedLayer:
    """Prepare a layer in the kernels; for the options see `moeq_kernels.prepare`.

    Raises MoeqError `answer.no-kernel` if no kernel runs it with these options.
    """
    from moeq_kernels import KernelUnsupportedError, prepare

    try:
        return prepare(experts, **options)
    except KernelUnsupportedError as error:
        raise MoeqError("answer.no-kernel", f"moeq has no kernel for this: {error.message}", error.hint) from error


def kernel_experts(
    layout: str,
    specs: Mapping[StackedRole, MatrixSpec],
    tensors: Mapping[StackedRole, Mapping[str, Tensor]],
    name: str = "",
) -> PackedExperts:
    """Build the kernels' record of a layer from its stacked tensors.

    Args:
        specs: specs of `w13` and `w2`, padding included.
        tensors: parts of `w13` and `w2` by name, `[experts, ...]` each.
        name: name of the layer for the kernels' messages.

    Raises MoeqError `answer.no-kernel` if up rows come before gate rows, `source.bad-data` if indices are out of range.
    """
    from moeq_kernels import PackedExperts, PackedMatrix

    for role, spec in specs.items():
        check_index_parts(tensors[role], spec, f"{name or layout}: {role}")

    order = row_order(layout)
    w13, w2 = (
        PackedMatrix(
            layout=layout,
            n=specs[role].n,
            k=specs[role].k,
            element=specs[role].element,
            group_size=specs[role].group_size,
            **dict[str, Any](tensors[role]),
        )
        for role in ("w13", "w2")
    )
    return PackedExperts(w13, w2, w13_order=order if specs["w13"].gated else "ungated", name=name)


def empty_parts(
    layout: str, specs: Mapping[StackedRole, MatrixSpec], experts: int, device: str | None, floats: torch.dtype | None
) -> dict[StackedRole, dict[str, Tensor]]:
    """Allocate the stacked tensors of a layer, `[experts, ...]` each, without filling them.

    Args:
        device: device of the tensors; None: torch's default.
        floats: dtype of floating-point scales and biases that engines round to the dtype of the activations: those of
            int4, int8 and MXFP4 weights with 16-bit activations. None: the stored dtype.
    """
    import torch

    found: dict[StackedRole, dict[str, Tensor]] = {}
    for role, spec in specs.items():
        parts = found[role] = {}
        for part, tensor in get_layout(layout).tensors(spec).items():
            dtype = torch_dtype(tensor.dtype)
            if floats is not None and dtype.is_floating_point and not _as_stored(layout, spec):
                dtype = floats
            parts[part] = torch.empty(experts, *tensor.shape, dtype=dtype, device=device)
    return found


def dummy_parts(parts: Mapping[str, Tensor]) -> None:
    """Fill tensors by `{role}_{part}` with numbers that any kernel accepts, for an engine that reads no weights.

    Floating-point tensors are left alone: engines fill these in all layers.
    """
    import torch

    for part, tensor in parts.items():
        if part.endswith("permutation"):
            tensor.copy_(torch.arange(tensor.shape[-1], device=tensor.device).expand_as(tensor))
        elif part.endswith("group_index"):
            tensor.zero_()
        elif part.endswith("scale") and tensor.dtype == torch.uint8:
            tensor.fill_(117)  # 2^-10
        elif not tensor.is_floating_point():
            tensor.view(torch.uint8).random_(0, 256)


def _as_stored(layout: str, spec: MatrixSpec) -> bool:
    """Return whether engines keep the floating-point scales as stored."""
    return layout in ("int8-w8a8/1", "cpu-amx-int8/1") or "e4m3" in (spec.element, spec.scale_dtype)

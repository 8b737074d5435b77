"""Whether the Hopper kernels can run a call, and if not, why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from moeq_kernels.records import PackedExperts, PackedMatrix

#: Triton versions that the kernels were compiled with; each release changes Gluon.
TRITON_FIRST, TRITON_LAST = (3, 6), (3, 9)
GROUP_SIZES = (32, 64, 128)
#: (layout, element) of weights, and the dtypes of their scales that are read.
SCALES: dict[tuple[str, str], tuple[torch.dtype, ...]] = {
    ("marlin-wna16/1", "int4"): (torch.bfloat16, torch.float16),
    ("marlin-wna16/1", "int8"): (torch.bfloat16, torch.float16),
    ("marlin-mxfp4/1", "e2m1"): (torch.uint8,),
    ("marlin-mxfp4-interleaved/1", "e2m1"): (torch.uint8,),
}
#: Experts whose pairs one program can count at a time (`sorting.place`).
MOST_EXPERTS = 8192
#: Features of a row that one program can hold to quantise it (`w8a8.device.rows`).
INT8_MOST_FEATURES = 16384
#: What the kernels for int8 weights and activations read.
W8A8 = ("int8-w8a8/1", "int8")


def unsupported_reason(
    x: Tensor,
    experts: PackedExperts,
    *,
    router_weight_on_input: bool = False,
) -> str | None:
    """Why `fused_moe` uses the portable kernels for such a call on this machine; None where it uses the Hopper ones.

    Shapes are taken to fit together already.
    """
    reasons = _machine_reasons(x)
    if (experts.w13.layout, experts.w13.element) == W8A8:
        return next(chain(reasons, _int8_reasons(x, experts, router_weight_on_input)), None)
    return next(chain(reasons, _reasons(x, experts, router_weight_on_input)), None)


def _machine_reasons(x: Tensor) -> Iterator[str]:
    if x.device.type != "cuda" or torch.version.hip:
        yield f"x is on {x.device}, not on an NVIDIA GPU"
        return
    capability = torch.cuda.get_device_capability(x.device)
    if capability != (9, 0):
        yield f"the GPU has compute capability {capability[0]}.{capability[1]}; these kernels are for 9.0 (Hopper)"
    reason = triton_reason()
    if reason:
        yield reason


def _int8_reasons(x: Tensor, experts: PackedExperts, weight_on_input: bool) -> Iterator[str]:
    """Reasons against the kernels for int8 weights and activations."""
    if x.stride(-1) != 1:
        yield f"the features of x have stride {x.stride(-1)}; these kernels need 1"
    if experts.w13_order == "ungated":
        yield "w13 has no gate; int8 kernels multiply with gate and up"
    if weight_on_input:
        yield "router weights multiply the input; these kernels multiply the output"
    if experts.num_experts > MOST_EXPERTS:
        yield f"{experts.num_experts} experts; these kernels sort pairs among at most {MOST_EXPERTS}"
    widest = max(x.shape[-1], experts.intermediate_size)
    if widest > INT8_MOST_FEATURES:
        yield f"rows have {widest} features; int8 kernels quantise at most {INT8_MOST_FEATURES}"
    for name, matrix in (("w13", experts.w13), ("w2", experts.w2)):
        if (matrix.layout, matrix.element) != W8A8:
            yield f"{name} is {matrix.layout} {matrix.element}; these kernels read {' '.join(W8A8)}"
        if matrix.weight.dtype != torch.int8:  # the tensor cores' instruction would take unsigned bytes as signed ones
            yield f"{name}.weight is {str(matrix.weight.dtype).removeprefix('torch.')}; these kernels read int8"
        if matrix.k % 16 or matrix.weight.data_ptr() % 16:
            yield f"{name} has k = {matrix.k}, address {matrix.weight.data_ptr():#x}; both must be multiples of 16"
        if matrix.global_scale is not None:
            yield f"{name} has a global_scale, which these kernels do not apply"


def _reasons(x: Tensor, experts: PackedExperts, weight_on_input: bool) -> Iterator[str]:
    if x.stride(-1) != 1 or x.shape[-1] % 8:
        yield f"x has {x.shape[-1]} features, stride {x.stride(-1)}; the copy engine needs a multiple of 8, stride 1"
    if weight_on_input:
        yield "router weights multiply the input; these kernels multiply the output"
    if experts.num_experts > MOST_EXPERTS:
        yield f"{experts.num_experts} experts; these kernels sort pairs among at most {MOST_EXPERTS}"
    yield from _matrix_reasons("w13", experts.w13)
    yield from _matrix_reasons("w2", experts.w2)


def _matrix_reasons(name: str, matrix: PackedMatrix) -> Iterator[str]:
    dtypes = SCALES.get((matrix.layout, matrix.element))
    if dtypes is None:
        known = ", ".join(f"{layout} {element}" for layout, element in SCALES)
        yield f"{name} is {matrix.layout} {matrix.element}; these kernels read {known}"
        return
    if not matrix.channelwise and matrix.group_size not in GROUP_SIZES:
        yield f"{name} has groups of {matrix.group_size}; these kernels read 32, 64, 128 and one scale for each channel"
    if matrix.scale is not None and matrix.scale.dtype not in dtypes:
        one, other = (str(kind).removeprefix("torch.") for kind in (matrix.scale.dtype, dtypes[0]))
        yield f"{name}.scale is {one}; these kernels read {other}" + (" or float16" if len(dtypes) > 1 else "")
    for part in ("permutation", "group_index", "global_scale"):
        if getattr(matrix, part) is not None:
            yield f"{name} has a {part}, which these kernels do not apply"


def triton_reason() -> str | None:
    """Why the installed triton does not suit, or None."""
    try:
        import triton
    except ImportError:
        return "triton is not installed"
    found = re.match(r"(\d+)\.(\d+)", triton.__version__)
    version = tuple(map(int, found.groups())) if found else (0, 0)
    if TRITON_FIRST <= version <= TRITON_LAST:
        return None
    first, last = (".".join(map(str, one)) for one in (TRITON_FIRST, TRITON_LAST))
    return f"triton is {triton.__version__}; these kernels are checked with {first} to {last}"

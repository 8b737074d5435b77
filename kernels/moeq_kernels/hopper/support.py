"""Whether the Hopper kernels can run a call, and if not, why."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from moeq_kernels.records import PackedExperts, PackedMatrix

#: Triton versions that the kernels were compiled with; each release changes Gluon.
TRITON_FIRST, TRITON_LAST = (3, 6), (3, 9)
GROUP_SIZES = (32, 64, 128)
#: Sizes up to (and down to) which results were compared with a reference on a GPU.
MOST_EXPERTS = 256
LEAST_K = 128


def unsupported_reason(
    x: Tensor,
    experts: PackedExperts,
    activation: str = "silu",
    *,
    limit: float | None = None,
    router_weight_on_input: bool = False,
) -> str | None:
    """Why `fused_moe` uses the portable kernels for such a call on this machine; None where it uses the Hopper ones.

    Shapes are taken to fit together already.
    """
    return next(_reasons(x, experts, activation, limit, router_weight_on_input), None)


def _reasons(
    x: Tensor, experts: PackedExperts, activation: str, limit: float | None, weight_on_input: bool
) -> Iterator[str]:
    if x.device.type != "cuda" or torch.version.hip:
        yield f"x is on {x.device}, not on an NVIDIA GPU"
        return
    capability = torch.cuda.get_device_capability(x.device)
    if capability != (9, 0):
        yield f"the GPU has compute capability {capability[0]}.{capability[1]}; these kernels are for 9.0 (Hopper)"
    reason = triton_reason()
    if reason:
        yield reason
    if x.dtype != torch.bfloat16:
        yield f"x is {str(x.dtype).removeprefix('torch.')}; these kernels take bfloat16"
    if x.stride(-1) != 1 or x.shape[-1] % 8:
        yield f"x has {x.shape[-1]} features, stride {x.stride(-1)}; the copy engine needs a multiple of 8, stride 1"
    if experts.w13_order != "gate-up" or activation != "silu" or limit is not None:
        yield f"{activation} of {experts.w13_order} rows, limit {limit}; these kernels do silu of gate-up without limit"
    if weight_on_input:
        yield "router weights multiply the input; these kernels multiply the output"
    if experts.num_experts > MOST_EXPERTS:
        yield f"{experts.num_experts} experts; these kernels are checked with at most {MOST_EXPERTS}"
    yield from _matrix_reasons("w13", experts.w13)
    yield from _matrix_reasons("w2", experts.w2)


def _matrix_reasons(name: str, matrix: PackedMatrix) -> Iterator[str]:
    if (matrix.layout, matrix.element) != ("marlin-wna16/1", "int4"):
        yield f"{name} is {matrix.layout} {matrix.element}; these kernels read marlin-wna16/1 int4"
    if matrix.channelwise or matrix.group_size not in GROUP_SIZES:
        yield f"{name} has groups of {matrix.group_size} of {matrix.k}; these kernels read 32, 64, 128 below k"
    if matrix.k < LEAST_K:
        yield f"{name} has k = {matrix.k}; these kernels are checked from {LEAST_K} on"
    if matrix.scale is not None and matrix.scale.dtype != torch.bfloat16:
        yield f"{name}.scale is {str(matrix.scale.dtype).removeprefix('torch.')}; these kernels read bfloat16"
    for part in ("bias", "permutation", "group_index", "global_scale"):
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

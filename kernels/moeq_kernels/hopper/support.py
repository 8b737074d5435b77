"""Reasons why the Hopper kernels cannot run a layer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain

import torch

from moeq_kernels.errors import KernelUnsupportedError
from moeq_kernels.formats import FORMATS
from moeq_kernels.hopper.w4a16.kinds import KINDS
from moeq_kernels.hopper.w4a16.product_launches import kind_of, only_second_is_channelwise, share_constants
from moeq_kernels.problem import Problem
from moeq_kernels.records import PackedExperts, PackedMatrix

#: Oldest and newest Triton version that compiles the kernels; every release changes Gluon.
TRITON_FIRST, TRITON_LAST = (3, 6), (3, 9)
GROUP_SIZES = (32, 64, 128)
#: Formats of the kernels for 16-bit activations by (layout, element), with the dtypes of scales that they read.
READ: dict[tuple[str, str], tuple[torch.dtype, ...]] = {
    key: tuple(getattr(torch, name) for name in row.hopper_scales) for key, row in FORMATS.items() if row.hopper_scales
}
#: Formats of `READ` that are NVFP4, FP8 or MXFP8.
FLOATS = {key: read for key, read in READ.items() if key[1] == "e4m3" or FORMATS[key].global_scale == "required"}
#: The other formats of `READ`: integers and MXFP4.
INTEGERS_AND_MXFP4 = {key: read for key, read in READ.items() if key not in FLOATS}
#: Formats whose codes have 4 or 8 bits, which the `mma.sync` kernels read as well.
WHOLE_NIBBLES = {key: read for key, read in READ.items() if key[1] not in ("int2", "int3")}
#: Upper bound of the experts whose pairs one program counts at a time (`device.routing.place_pairs`).
MAX_EXPERTS = 8192
#: Upper bound of the features in a row that one program quantises (`w8a8.device.rows`).
MAX_QUANTISED_FEATURES = 16384
#: Format of the kernels for int8 weights and activations.
W8A8 = ("int8-w8a8/1", "int8")
#: Formats of the kernels for e4m3 weights and activations.
FP8 = (("fp8-identity/1", "e4m3"), ("fp8-block-identity/1", "e4m3"))

#: Formats of the kernels for 4-bit weights and e4m3 activations, with the dtypes of scales.
W4A8 = {
    key: dtypes for key, dtypes in INTEGERS_AND_MXFP4.items() if FORMATS[key].codec in ("marlin4", "marlin4-permuted")
}


def asks_w4a8(experts: PackedExperts) -> bool:
    """Return whether both projections are MXFP4 or int4 in Marlin's order and ask for e4m3 activations."""
    matrices = (experts.w13, experts.w2)
    return all((one.layout, one.element) in W4A8 and one.activation_dtype == "fp8" for one in matrices)


def family(problem: Problem) -> str:
    """Return the Hopper kernel family for a problem."""
    key = (problem.w13.layout, problem.w13.element)
    if key == W8A8:
        return "hopper-w8a8"
    return "hopper-fp8" if key in FP8 and problem.w13.activation_dtype == "fp8" else "hopper-w4a16"


def unsupported_reason(problem: Problem) -> str | None:
    """Return why the Hopper kernels cannot run a layer, or None if they can; shapes have been checked before."""
    of_layer = {"hopper-w8a8": int8_reasons, "hopper-fp8": fp8_reasons}.get(family(problem), reasons)
    return next(chain(machine_reasons(problem), of_layer(problem)), None)


def machine_reasons(problem: Problem) -> Iterator[str]:
    """Yield reasons that lie in the machine."""
    gpu = problem.gpu
    if problem.interpret:
        yield "x is on cpu, not on an NVIDIA GPU"
    elif gpu.backend != "cuda":
        yield f"{gpu.name} is not an NVIDIA GPU"
    elif gpu.capability != (9, 0):
        major, minor = gpu.capability
        yield f"{gpu.name} has compute capability {major}.{minor}; these kernels are for 9.0 (Hopper)"
    reason = triton_reason()
    if reason:
        yield reason


def _common_reasons(problem: Problem) -> Iterator[str]:
    if problem.weight_on_input:
        yield "router weights multiply the input; these kernels multiply the output"
    if problem.experts > MAX_EXPERTS:
        yield f"{problem.experts} experts; these kernels sort pairs among at most {MAX_EXPERTS}"


def _bytes_reasons(problem: Problem) -> Iterator[str]:
    """Yield reasons against the kernels for 8-bit weights and activations."""
    yield from _common_reasons(problem)
    if not problem.epilogue.gated:
        yield "w13 has no gate; these kernels multiply with gate and up"
    widest = max(problem.hidden, problem.intermediate)
    if widest > MAX_QUANTISED_FEATURES:
        yield f"rows have {widest} features; these kernels quantise at most {MAX_QUANTISED_FEATURES}"
    for name, matrix in (("w13", problem.w13), ("w2", problem.w2)):
        if matrix.k % 16:
            yield f"{name} has k = {matrix.k}; the copy engine needs a multiple of 16"
        if matrix.global_scale is not None:
            yield f"{name} has a global_scale, which these kernels do not apply"


def fp8_reasons(problem: Problem) -> Iterator[str]:
    """Yield reasons against the kernels for e4m3 weights and activations."""
    yield from _bytes_reasons(problem)
    for name, matrix in (("w13", problem.w13), ("w2", problem.w2)):
        if (matrix.layout, matrix.element) not in FP8:
            known = ", ".join(layout for layout, _ in FP8)
            yield f"{name} is {matrix.layout} {matrix.element}; these kernels read {known}"
        if matrix.activation_dtype != "fp8":
            yield f"{name} does not ask for fp8 activations, which these kernels multiply"
    w13 = problem.w13
    if not w13.channelwise and -(-problem.hidden // w13.group_size) < w13.num_groups:
        yield (
            f"x has {problem.hidden} features, which end before the last group of w13 (k = {w13.k}, groups of "
            f"{w13.group_size}); these kernels read a scale of x for each group"
        )


def require_w4a8(problem: Problem) -> None:
    """Raise KernelUnsupportedError if the kernels for 4-bit weights and e4m3 activations cannot run a layer."""
    reason = next(chain(machine_reasons(problem), w4a8_reasons(problem)), None)
    if reason is not None:
        kind = f"{problem.w13.layout} {problem.w13.element}"
        raise KernelUnsupportedError(
            f"fp8 activations beside {kind} weights: {reason}", 'activation_dtype="" multiplies 16-bit activations'
        )


def w4a8_reasons(problem: Problem) -> Iterator[str]:
    """Yield reasons against the kernels for 4-bit weights and e4m3 activations, before MXFP4's scales are folded."""
    yield from _common_reasons(problem)
    if problem.hidden % 16:
        yield f"x has {problem.hidden} features; these kernels order them in sixteens"
    if problem.w13.element != problem.w2.element:
        yield f"w13 is {problem.w13.element}, but w2 is {problem.w2.element}; these kernels read one format in a layer"
    if max(problem.hidden, problem.intermediate) > MAX_QUANTISED_FEATURES:
        yield f"rows have more than {MAX_QUANTISED_FEATURES} features; these kernels quantise at most that many"
    for name, matrix in (("w13", problem.w13), ("w2", problem.w2)):
        if matrix.zero is not None:
            yield f"{name} has zero points; these kernels read codes around 8"
        yield from matrix_reasons(name, matrix, W4A8)


def int8_reasons(problem: Problem) -> Iterator[str]:
    """Yield reasons against the kernels for int8 weights and activations."""
    yield from _bytes_reasons(problem)
    for name, matrix in (("w13", problem.w13), ("w2", problem.w2)):
        if (matrix.layout, matrix.element) != W8A8:
            yield f"{name} is {matrix.layout} {matrix.element}; these kernels read {' '.join(W8A8)}"
        if matrix.weight.dtype != torch.int8:  # the tensor cores would read unsigned bytes as signed
            yield f"{name}.weight is {str(matrix.weight.dtype).removeprefix('torch.')}; these kernels read int8"


def reasons(problem: Problem) -> Iterator[str]:
    """Yield reasons against the kernels for 16-bit activations."""
    yield from _common_reasons(problem)
    if problem.hidden % 8:
        yield f"x has {problem.hidden} features; the copy engine needs a multiple of 8"
    yield from matrix_reasons("w13", problem.w13, READ)
    yield from matrix_reasons("w2", problem.w2, READ)
    yield from mixture_reasons(problem.w13, problem.w2)


def mixture_reasons(w13: PackedMatrix, w2: PackedMatrix) -> Iterator[str]:
    """Yield a reason if both formats are supported, but not in one layer."""
    are_read = {(one.layout, one.element) for one in (w13, w2)} <= READ.keys()
    if not are_read or share_constants(w13, w2) or only_second_is_channelwise(w13, w2):
        return
    if not (KINDS[kind_of(w13)].is_mixable and KINDS[kind_of(w2)].is_mixable):
        first, second = (f"{one.layout} {one.element}, groups of {one.group_size}" for one in (w13, w2))
        yield (
            f"w13 is {first}, but w2 is {second}; of different formats these kernels read int4, int8 and MXFP4 in one "
            "layer"
        )


def matrix_reasons(
    name: str, matrix: PackedMatrix, read: Mapping[tuple[str, str], tuple[torch.dtype, ...]] = INTEGERS_AND_MXFP4
) -> Iterator[str]:
    """Yield reasons that lie in one projection; `read` holds the formats of the family and dtypes of their scales."""
    key = (matrix.layout, matrix.element)
    dtypes = read.get(key)
    if dtypes is None:
        known = ", ".join(f"{layout} {element}" for layout, element in read)
        yield f"{name} is {matrix.layout} {matrix.element}; these kernels read {known}"
        return
    if matrix.activation_dtype:
        yield f"{name} asks for {matrix.activation_dtype} activations; these kernels multiply 16-bit ones"
    if matrix.channelwise and matrix.scale is not None and matrix.scale.itemsize == 1:
        yield f"{name} has one group of k = {matrix.k} codes; these kernels read such scales from two groups on"
    if key not in FLOATS and not matrix.channelwise and matrix.group_size not in GROUP_SIZES:
        yield f"{name} has groups of {matrix.group_size}; these kernels read 32, 64, 128 and one scale for each channel"
    if matrix.scale is not None and matrix.scale.dtype not in dtypes:
        one, other = (str(kind).removeprefix("torch.") for kind in (matrix.scale.dtype, dtypes[0]))
        yield f"{name}.scale is {one}; these kernels read {other}" + (" or float16" if len(dtypes) > 1 else "")
    for part in ("permutation", "group_index", "global_scale"):
        if getattr(matrix, part) is not None and (part != "global_scale" or key not in FLOATS):
            yield f"{name} has a {part}, which these kernels do not apply"
    if key in FLOATS and matrix.global_scale is not None and matrix.global_scale.numel() != matrix.num_experts:
        each = matrix.global_scale.numel() // matrix.num_experts
        yield f"{name} has {each} global scales for an expert; these kernels apply one"


def triton_reason() -> str | None:
    """Return why the installed triton does not suit, or None if it does."""
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

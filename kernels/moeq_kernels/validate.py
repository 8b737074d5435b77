"""Argument checks of the host wrappers. Every message says what was given and what is needed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from moeq_kernels.activations import ACTIVATIONS, GATED, UNGATED, Activation
from moeq_kernels.epilogue import Epilogue
from moeq_kernels.errors import KernelArgumentError, KernelEnvironmentError, KernelUnsupportedError
from moeq_kernels.formats import FORMATS, Format, find_format
from moeq_kernels.hopper.support import W4A8
from moeq_kernels.records import PackedExperts, PackedMatrix

#: Index tensors whose values were checked, with their version and bound.
_checked: WeakIdKeyDictionary = WeakIdKeyDictionary()


def shape_of(tensor: Tensor) -> str:
    """Describe a tensor, as in `bfloat16 [3, 4]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def require_runnable(device: torch.device) -> None:
    """Raise KernelEnvironmentError if triton is missing, or if the device is a CPU without the interpreter."""
    from moeq_kernels import interpreter

    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise KernelEnvironmentError(
            "the kernels need triton, which is not installed here", "pip install 'triton>=3.6,<3.10' (Linux only)"
        ) from error
    if device.type == "cpu" and not interpreter.active():
        raise KernelEnvironmentError(
            "x is on the CPU, where kernels only run in Triton's interpreter, and that is not enabled",
            "move the tensors to a GPU, or call moeq_kernels.interpreter.enable() before triton is imported "
            "(or set TRITON_INTERPRET=1)",
        )


def require(condition: bool, message: str, hint: str | None = None) -> None:
    """Raise KernelArgumentError unless the condition holds."""
    if not condition:
        raise KernelArgumentError(message, hint)


def check_routing(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> None:
    """Check shapes, dtypes and devices of a call. Dtypes tell swapped weights and ids apart."""
    require(x.dim() == 2, f"x is {shape_of(x)}; it must be [tokens, hidden_size]")
    swapped = "the order is fused_moe(x, experts, topk_weights, topk_ids)"
    require(
        topk_weights.is_floating_point(),
        f"topk_weights is {shape_of(topk_weights)}; it must be floating point",
        swapped,
    )
    require(
        topk_ids.dtype in (torch.int32, torch.int64),
        f"topk_ids is {shape_of(topk_ids)}; it must be int32 or int64",
        swapped,
    )
    for name, tensor in (("topk_weights", topk_weights), ("topk_ids", topk_ids)):
        require(
            tensor.dim() == 2 and tensor.shape[0] == x.shape[0],
            f"{name} is {shape_of(tensor)}; with x {shape_of(x)} it must be [{x.shape[0]}, top_k]",
        )
        require(tensor.device == x.device, f"{name} is on {tensor.device}, but x is on {x.device}")
    require(
        topk_weights.shape == topk_ids.shape,
        f"topk_weights is {shape_of(topk_weights)}, but topk_ids is {shape_of(topk_ids)}; they must have one shape",
    )
    require(topk_ids.shape[1] >= 1, f"topk_ids is {shape_of(topk_ids)}; top_k must be at least 1")


def check_experts(x: Tensor, experts: PackedExperts, activation: str) -> tuple[Format, Format]:
    """Check both projections against each other, x and the activation, and return the formats of w13 and w2."""
    check_activation(activation, experts.w13_order)
    gated = experts.w13_order != "ungated"
    require(experts.num_experts >= 1, "w13.weight holds no experts", "a rank without experts adds zeros by itself")
    require(
        experts.w13.num_experts == experts.w2.num_experts,
        f"w13 holds {experts.w13.num_experts} experts, but w2 holds {experts.w2.num_experts}",
    )
    require(not gated or experts.w13.n % 2 == 0, f"w13.n = {experts.w13.n} is odd, but holds gate and up")
    require(
        experts.w2.k == experts.intermediate_size,
        f"w2.k = {experts.w2.k}, but w13 (n = {experts.w13.n}, {experts.w13_order}) makes "
        f"{experts.intermediate_size} intermediate features",
    )
    hidden = x.shape[-1]
    require(hidden <= experts.w13.k, f"x is {shape_of(x)}, but w13.k = {experts.w13.k} is smaller than its last size")
    require(hidden <= experts.w2.n, f"x is {shape_of(x)}, but w2.n = {experts.w2.n} is smaller than its last size")
    halves = 2 if experts.w13_order == "gate-up" else 1
    return check_matrix("w13", x, experts.w13, halves), check_matrix("w2", x, experts.w2, 1)


def check_activation(activation: str, order: str) -> Activation:
    """Check the name of an activation for an order of w13's rows and return its row of the table."""
    known = {"gate-up": GATED, "interleaved": GATED, "ungated": UNGATED}
    require(order in known, f"unknown w13_order '{order}'", f"known: {', '.join(known)}")
    require(
        activation in known[order],
        f"unknown activation '{activation}' for w13_order '{order}'",
        f"known: {', '.join(known[order])}",
    )
    return ACTIVATIONS[activation]


def check_matrix(name: str, x: Tensor, matrix: PackedMatrix, halves: int) -> Format:
    """Check the parts of a packed matrix against its sizes and return its format; n holds `halves` halves."""
    fmt = find_format(matrix.layout, matrix.element)
    experts, n, k = matrix.num_experts, matrix.n, matrix.k
    kind = f"{fmt.layout} {fmt.element}"
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype not in fmt.dtypes:
        raise KernelUnsupportedError(f"x is {dtype}, but {kind} kernels take {' or '.join(fmt.dtypes)}")
    require(
        n % (fmt.n_multiple * halves) == 0 and k % fmt.k_multiple == 0,
        f"{name} is n = {n}, k = {k}; {kind} needs n a multiple of {fmt.n_multiple * halves} and k of {fmt.k_multiple}",
    )
    require(
        halves == 1 or (n // 2) % fmt.block_rows == 0,
        f"{name} is n = {n}; halves of {n // 2} rows share a block of {fmt.block_rows} rows",
        "pad the intermediate size to a multiple of the block",
    )
    dtypes = ("float8_e4m3fn", "uint8") if fmt.weight_dtype == "float8_e4m3fn" else (fmt.weight_dtype,)
    _check_tensor(f"{name}.weight", x, matrix.weight, (experts, *fmt.weight_shape(n, k)), dtypes)
    require(
        (matrix.weight_high is not None) == (fmt.high_shape is not None),
        f"{name}.weight_high is {'missing' if fmt.high_shape else 'given'}; only int3 codes have a third bit",
    )
    if matrix.weight_high is not None and fmt.high_shape is not None:
        shape = (experts, *fmt.high_shape(n, k))
        _check_tensor(f"{name}.weight_high", x, matrix.weight_high, shape, (fmt.weight_dtype,))
    if not matrix.channelwise and matrix.group_size not in fmt.group_sizes:
        raise KernelUnsupportedError(
            f"{name} has groups of {matrix.group_size}; {kind} kernels read {', '.join(map(str, fmt.group_sizes))}"
        )
    if fmt.group_order is None and fmt.single_order is None:
        require(matrix.scale is None, f"{name}.scale is given, but {kind} weights have no scales")
    elif fmt.global_scale != "instead" or matrix.scale is not None or matrix.global_scale is None:
        require(matrix.scale is not None, f"{name}.scale is missing; {kind} weights need scales")
        _check_scale(name, x, matrix, fmt)
    require(matrix.zero is None or fmt.zero_points, f"{name}.zero is given, but {kind} has no zero points")
    if matrix.zero is not None:
        shape = (experts, *fmt.zero_shape(n, matrix.num_groups))
        _check_tensor(f"{name}.zero", x, matrix.zero, shape, (fmt.zero_dtype,))
    if matrix.bias is not None:
        _check_tensor(f"{name}.bias", x, matrix.bias, (experts, n), ("bfloat16", "float16", "float32"))
    for part in ("permutation", "group_index"):
        tensor = getattr(matrix, part)
        if tensor is not None:
            _check_tensor(f"{name}.{part}", x, tensor, (experts, k), ("int32",))
            _check_indices(f"{name}.{part}", tensor, k if part == "permutation" else matrix.num_groups)
    require(
        not fmt.act_order or (matrix.permutation is not None and matrix.group_index is not None),
        f"{name}.permutation or {name}.group_index is missing; {kind} weights need both",
    )
    _check_second_scales(name, x, matrix, fmt)
    return fmt


def _check_indices(name: str, tensor: Tensor, bound: int) -> None:
    """Check that indices are in range, once per tensor: on a GPU this synchronises, so not while a graph is captured.

    Kernels mask indices out of range, so nothing is read beyond the tensors if a check is left out.
    """
    state = (0 if tensor.is_inference() else tensor._version), bound
    if tensor.device.type == "meta" or _checked.get(tensor) == state:
        return
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    if tensor.numel():
        low, high = int(tensor.min()), int(tensor.max())
        require(low >= 0 and high < bound, f"{name} ranges from {low} to {high}; indices are 0 to {bound - 1}")
    _checked[tensor] = state


def _check_second_scales(name: str, x: Tensor, matrix: PackedMatrix, fmt: Format) -> None:
    """Check the global scale and the dtype to which rows of x are quantised."""
    kind, experts = f"{fmt.layout} {fmt.element}", matrix.num_experts
    require(
        fmt.global_scale != "required" or matrix.global_scale is not None,
        f"{name}.global_scale is missing; {kind} weights need one",
    )
    if matrix.global_scale is not None:
        found = tuple(matrix.global_scale.shape)
        shares = 2 if found == (experts, 2) and matrix.n % 2 == 0 else 1
        shape = (experts,) if len(found) == 1 else (experts, shares)
        _check_tensor(f"{name}.global_scale", x, matrix.global_scale, shape, ("float32",))
    asked = matrix.activation_dtype
    require(asked in ("", "fp8"), f"unknown activation_dtype '{asked}' of {name}", "known: fp8, or nothing")
    if asked and not fmt.fp8_activations:
        readable = ", ".join(layout for (layout, _), one in FORMATS.items() if one.fp8_activations)
        hint = f"layouts that have them: {readable}"
        prepared = [layout for layout, element in W4A8 if element == matrix.element]
        if matrix.layout in prepared:
            hint = f"a layer of `prepare` has them on Hopper; {hint}"
        elif prepared:
            hint += f"; of {matrix.element}, in layers of `prepare` on Hopper: {', '.join(prepared)}"
        raise KernelUnsupportedError(f"{name} asks for {asked} activations, which {kind} kernels do not have", hint)
    quantises = fmt.int8_activations or asked == "fp8"
    require(
        matrix.input_scale is None or quantises,
        f"{name}.input_scale is given, but {kind} does not quantise activations",
    )
    if matrix.input_scale is not None:
        _check_tensor(f"{name}.input_scale", x, matrix.input_scale, (1,), ("float32",))


def _check_scale(name: str, x: Tensor, matrix: PackedMatrix, fmt: Format) -> None:
    scale = matrix.scale
    assert scale is not None  # checked by the caller
    order = fmt.single_order if matrix.channelwise else fmt.group_order
    if order is None:
        raise KernelUnsupportedError(f"{name} has groups of {matrix.group_size}, which {fmt.layout} does not store")
    shape = (matrix.num_experts, *fmt.scale_shape(order, matrix.n, matrix.num_groups))
    _check_tensor(f"{name}.scale", x, scale, shape, fmt.scale_dtypes)


def _check_tensor(name: str, x: Tensor, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    wanted = f"it must be {' or '.join(dtypes)} {list(shape)}"
    dtype = str(tensor.dtype).removeprefix("torch.")
    require(dtype in dtypes and tuple(tensor.shape) == shape, f"{name} is {shape_of(tensor)}; {wanted}")
    require(tensor.is_contiguous(), f"{name} has strides {tensor.stride()}; it must be contiguous")
    require(tensor.device == x.device, f"{name} is on {tensor.device}, but x is on {x.device}")


def epilogue_of(
    experts: PackedExperts,
    activation: str,
    alpha: float | None,
    beta: float | None,
    limit: float | None,
    weight_first: bool,
) -> Epilogue:
    """Build the epilogue of the gate-up product with defaults for the activation's parameters."""
    row = check_activation(activation, experts.w13_order)
    given = {"alpha": alpha, "beta": beta}
    for name, value in given.items():
        takers = ", ".join(one.name for one in ACTIVATIONS.values() if getattr(one, name) is not None)
        require(value is None or getattr(row, name) is not None, f"{name} belongs to {takers}, not to {activation}")
    require(not row.alpha_required or bool(alpha), f"{activation} needs an alpha other than 0", f"it is {row.gated}")
    constants = {name: getattr(row, name) if value is None else value for name, value in given.items()}
    require(limit is None or limit > 0, f"limit is {limit}; it must be positive", "leave it out for no limit")
    require(limit is None or experts.w13_order != "ungated", "limit clamps gate and up, but w13_order is 'ungated'")
    return Epilogue(
        activation=activation,
        gated=experts.w13_order != "ungated",
        interleaved=experts.w13_order == "interleaved",
        limit=row.default_limit if limit is None else float(limit),
        weight="first" if weight_first else "",
        **{name: float(value) for name, value in constants.items() if value is not None},
    )


def check_ids(topk_ids: Tensor, known: int) -> None:
    """Raise KernelArgumentError if ids on a CPU name no expert; a check on a GPU would synchronise."""
    if topk_ids.device.type == "cpu" and topk_ids.numel():
        low, high = int(topk_ids.min()), int(topk_ids.max())
        require(low >= -1 and high < known, f"topk_ids run from {low} to {high}, but experts from 0 to {known - 1}")


def as_int32(index: Tensor, bound: int) -> Tensor:
    """Convert expert numbers to int32; those below -1 become -1, those of `bound` and more become `bound`.

    Kernels take both for no expert. A plain cast would cut an int64 to another expert's number, and numbers on a
    GPU are not checked before.
    """
    return index if index.dtype == torch.int32 else index.clamp(-1, bound).to(torch.int32)


def check_map(expert_map: Tensor, device: torch.device, known: int | None = None, experts: int | None = None) -> None:
    """Check dtype, size and device of an expert map; on a CPU, where it needs no synchronisation, also its values."""
    size = "global experts" if known is None else str(known)
    require(
        expert_map.dim() == 1
        and expert_map.dtype in (torch.int32, torch.int64)
        and known in (None, expert_map.shape[0]),
        f"expert_map is {shape_of(expert_map)}; it must be int32 or int64 [{size}]",
    )
    require(expert_map.device == device, f"expert_map is on {expert_map.device}, but x is on {device}")
    if experts is not None and device.type == "cpu" and expert_map.numel():
        least, most = int(expert_map.min()), int(expert_map.max())
        require(least >= -1, f"expert_map holds {least}; -1 is an expert on another rank")
        require(most < experts, f"expert_map names local expert {most}, but there are experts 0 to {experts - 1} here")

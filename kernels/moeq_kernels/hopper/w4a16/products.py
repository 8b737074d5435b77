"""Launching one grouped product with a Hopper kernel: descriptors of the copy engine, sizes, constants."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from moeq_kernels.epilogue import PLAIN, Epilogue
from moeq_kernels.formats import find_format
from moeq_kernels.gpu import gpu_of
from moeq_kernels.hopper.call import after
from moeq_kernels.hopper.sorting import Routed
from moeq_kernels.hopper.w4a16.plan import Narrow, Plan, Queue, Wide
from moeq_kernels.records import PackedExperts, PackedMatrix

#: Steps of a share of the queue kernel's products at least, and of a unit of several tiles.
LEAST_UP, LEAST_DOWN, BUNDLED_STEPS = 4, 4, 8
#: What the kernel for both products takes for each of them.
_OF_A_PRODUCT = (
    "w_desc", "s_desc", "zero", "slabs", "groups", "columns", "stride", "zero_words", "scale", "bias", "packed",
)  # fmt: skip


def product(
    plan: Plan, matrix: PackedMatrix, routed: Routed, x: Tensor, out: Tensor, epilogue: Epilogue, dependent: bool
) -> None:
    """One grouped product, over the tiles of `routed`."""
    launch = {Narrow: launch_narrow, Wide: launch_wide}[type(plan.kernel)]
    launch(plan, matrix, routed, x, out, epilogue, dependent)


def launch_narrow(
    plan: Plan, matrix: PackedMatrix, routed: Routed, x: Tensor, out: Tensor, epilogue: Epilogue, dependent: bool
) -> None:
    """Launches `device.narrow.expert_product_narrow`."""
    kernel = plan.kernel
    assert isinstance(kernel, Narrow)
    function = import_module("moeq_kernels.hopper.w4a16.device.narrow").expert_product_narrow
    splits = plan.down_splits if epilogue == PLAIN else plan.gate_up_splits
    columns = out.shape[-1]
    blocks = -(-columns // (128 if epilogue.gated else 256))
    rows = x.shape[0]
    partial = None
    if epilogue.gated and splits > 1:
        partial = torch.empty(splits, rows, 2 * columns, dtype=torch.float32, device=x.device)
    function[(blocks * splits, routed.tiles.numel() // 8)](
        **_common(matrix, x, out, epilogue, dependent, kernel.step, 2, kernel.tokens),
        partial=partial,
        arrived=routed.arrived,
        tiles=routed.tiles,
        count=_steps(matrix, x, kernel.step),
        rows=rows,
        TOKENS=kernel.tokens,
        STEP=kernel.step,
        STAGES=kernel.stages,
        SPLITS=splits,
        AFTER=kernel.after,
        **({"maxnreg": kernel.registers} if kernel.registers else {}),
    )


def launch_queue(
    plan: Plan, experts: PackedExperts, routed: Routed, middle: Tensor, out: Tensor, epilogue: Epilogue, dependent: bool
) -> None:
    """Launches `device.queue.expert_layer`: both products of x, of w13 to middle, of w2 to out."""
    kernel = plan.kernel
    assert isinstance(kernel, Queue)
    assert routed.x is not None
    function = import_module("moeq_kernels.hopper.w4a16.device.queue").expert_layer
    programs = gpu_of(out.device).multiprocessors * kernel.resident
    up = _common(experts.w13, routed.x, middle, epilogue, dependent, kernel.step, 2, 8)
    down = _common(experts.w2, middle, out, PLAIN, dependent, kernel.step, 2, 8)
    count = _steps(experts.w2, middle, kernel.step)
    bundle = max(1, BUNDLED_STEPS // count)
    shares = (kernel.up + kernel.down) * programs
    function[(programs,)](
        **{f"up_{name}": up[name] for name in _OF_A_PRODUCT},
        **{f"down_{name}": down[name] for name in _OF_A_PRODUCT},
        **{name: up[name] for name in ("x_desc", "GROUP", "ZEROS", "KIND", "EPILOGUE", "DEPENDENT", "num_warps")},
        **after(dependent),
        m_desc=down["x_desc"],
        middle=middle,
        out=out,
        partial=torch.empty(shares, 256 * kernel.tokens, dtype=torch.float32, device=out.device),
        counters=routed.arrived,
        tiles=routed.tiles,
        num_tiles=routed.num_tiles,
        most=routed.tiles.numel() // 8,
        wanted_up=kernel.up * programs,
        least_up=LEAST_UP,
        wanted_down=kernel.down * programs,
        least_down=LEAST_DOWN if bundle == 1 else count + 1,
        bundle=bundle,
        up_pair_tiles=up["pair_tiles"],
        up_count=_steps(experts.w13, routed.x, kernel.step),
        up_blocks=-(-middle.shape[-1] // (128 if epilogue.gated else 256)),
        down_count=count,
        down_blocks=-(-out.shape[-1] // 256),
        TOKENS=kernel.tokens,
        STEP=kernel.step,
        STAGES=kernel.stages,
        AFTER=kernel.after,
        ROWS=kernel.rows,
        EARLY=routed.early,
        maxnreg=kernel.registers,
    )


def launch_wide(
    plan: Plan, matrix: PackedMatrix, routed: Routed, x: Tensor, out: Tensor, epilogue: Epilogue, dependent: bool
) -> None:
    """Launches `device.wide.expert_product_wide`, one program per multiprocessor."""
    kernel = plan.kernel
    assert isinstance(kernel, Wide)
    function = import_module("moeq_kernels.hopper.w4a16.device.wide").expert_product_wide
    groups = kernel.warpgroups
    down = epilogue == PLAIN
    gather = routed.x is None and not down
    rows = routed.pair_of_row.numel()
    function[(gpu_of(x.device).multiprocessors,)](
        **_common(matrix, x, out, epilogue, dependent, 64, groups, 32),
        queue=routed.arrived[1:] if down else routed.arrived,
        done=routed.arrived[2:],
        needed=routed.signals,
        tiles=routed.tiles,
        num_tiles=routed.num_tiles,
        x=x,
        pair_of_row=routed.pair_of_row,
        top_k=rows // x.shape[0] if gather else 1,
        stride_x=x.stride(0),
        steps=_steps(matrix, x, 64),
        blocks=-(-out.shape[-1] // (64 * groups if epilogue.gated else 128 * groups)),
        splits=plan.down_splits if down else 1,
        rows=rows,
        TOKENS=kernel.tokens,
        STAGES=kernel.stages,
        GATHER=gather,
        GROUPS_OF_WARPS=groups,
        REGISTERS=kernel.registers,
        EARLY=routed.early or down,
        FOLLOWS=down,
    )


def _common(
    matrix: PackedMatrix,
    x: Tensor,
    out: Tensor,
    epilogue: Epilogue,
    dependent: bool,
    step: int,
    tiles: int,
    tokens: int,
) -> dict[str, Any]:
    """What the three kernels take by the same names; step: rows of k of a box, tiles and tokens: of one."""
    words, rows, scales = descriptors(matrix, x, step, tiles, tokens)
    columns = out.shape[-1]
    return {
        **weight_arguments(matrix),
        "w_desc": words,
        "x_desc": rows,
        "s_desc": scales,
        "out": out,
        "pair_tiles": columns // 64 if epilogue.gated and not epilogue.interleaved else tiles,
        "columns": columns,
        "stride": out.stride(-2),
        "scale": channel_scale(matrix),
        "bias": matrix.bias,
        "packed": matrix.n,
        "EPILOGUE": epilogue,
        "DEPENDENT": dependent,
        "num_warps": 4,
        **after(dependent),
    }


def weight_arguments(matrix: PackedMatrix) -> dict[str, Any]:
    """What every kernel takes to find an expert's weights and to turn words into numbers."""
    return {
        "zero": matrix.zero,
        "slabs": matrix.k // 16,
        "groups": matrix.num_groups,
        "zero_words": 0 if matrix.zero is None else matrix.zero.shape[-1],
        "GROUP": group_of(matrix),
        "ZEROS": matrix.zero is not None,
        "KIND": kind_of(matrix),
    }


def alike(one: PackedMatrix, other: PackedMatrix) -> bool:
    """Whether the same constants read both, as kernels for both products need."""
    formats = [
        (kind_of(matrix), group_of(matrix), matrix.zero is None, None if matrix.scale is None else matrix.scale.dtype)
        for matrix in (one, other)
    ]
    return formats[0] == formats[1]


def channel_scale(matrix: PackedMatrix) -> Tensor | None:
    """Scales that follow the product: those of output features, where groups have none."""
    return matrix.scale if matrix.channelwise else None


def _steps(matrix: PackedMatrix, x: Tensor, step: int) -> int:
    """Steps of k: padding of the weights beyond the tokens' width is not read."""
    return -(-min(matrix.k, x.shape[1]) // step)


def kind_of(matrix: PackedMatrix) -> str:
    """What the device code calls the codes: `uint4`, `uint8` or `e2m1`."""
    return find_format(matrix.layout, matrix.element).kind


def group_of(matrix: PackedMatrix) -> int:
    """Weights that share a scale, as the device code takes it: 0 for one scale for each output feature."""
    return 0 if matrix.channelwise else matrix.group_size


def descriptors(matrix: PackedMatrix, x: Tensor, step: int, tiles: int, tokens: int) -> tuple[Any, Any, Any]:
    """Descriptors of words, tokens and scales; step: rows of k, tiles and tokens: of a box."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layouts = import_module("moeq_kernels.hopper.w4a16.device.layouts")
    assert matrix.scale is not None
    words = layouts.tile_bytes(kind_of(matrix)) // 4
    weight = matrix.weight.view(-1, matrix.n // 64, words)
    scale = matrix.scale.view(-1, matrix.n)
    groups = layouts.groups_of(step, group_of(matrix))
    make = TensorDescriptor.from_tensor
    return (
        make(weight, [step // 16, tiles, words], layouts.word_buffer()),
        make(x, [tokens, 64], layouts.token_buffer()),
        make(scale, [groups, 64 * tiles], layouts.scale_buffer(8 * scale.element_size())),
    )

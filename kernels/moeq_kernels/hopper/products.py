"""Launching one grouped product with a Hopper kernel: descriptors of the copy engine, sizes, constants."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from moeq_kernels.formats import find_format
from moeq_kernels.hopper.finish import PLAIN, Finish
from moeq_kernels.hopper.plan import Narrow, Plan, Stream, Wide
from moeq_kernels.hopper.sorting import Routed, after, programs_on
from moeq_kernels.records import PackedMatrix


def product(
    plan: Plan, matrix: PackedMatrix, routed: Routed, x: Tensor, out: Tensor, finish: Finish, dependent: bool
) -> None:
    """One grouped product, over the tiles of `routed`."""
    launch = {Narrow: launch_narrow, Stream: launch_stream, Wide: launch_wide}[type(plan.kernel)]
    launch(plan, matrix, routed, x, out, finish, dependent)


def launch_narrow(
    plan: Plan, matrix: PackedMatrix, routed: Routed, x: Tensor, out: Tensor, finish: Finish, dependent: bool
) -> None:
    """Launches `device.narrow.expert_product_narrow`."""
    kernel = plan.kernel
    assert isinstance(kernel, Narrow)
    function = import_module("moeq_kernels.hopper.device.narrow").expert_product_narrow
    splits = plan.down_splits if finish == PLAIN else plan.gate_up_splits
    columns = out.shape[-1]
    blocks = -(-columns // (128 if finish.gated else 256))
    rows = x.shape[0]
    partial = None
    if finish.gated and splits > 1:
        partial = torch.empty(splits, rows, 2 * columns, dtype=torch.float32, device=x.device)
    options: dict[str, Any] = {"num_warps": 4}
    options |= {"maxnreg": kernel.registers} if kernel.registers else {}
    options |= after(dependent)
    function[(blocks * splits, routed.tiles.numel() // 8)](
        *descriptors(matrix, x, kernel.step, 2, kernel.tokens),
        matrix.zero,
        out,
        partial,
        routed.arrived,
        routed.tiles,
        matrix.k // 16,
        matrix.num_groups,
        -(-min(matrix.k, x.shape[1]) // kernel.step),
        columns // 64 if finish.gated and not finish.interleaved else 2,
        columns,
        out.stride(-2),
        rows,
        0 if matrix.zero is None else matrix.zero.shape[-1],
        matrix.scale if matrix.channelwise else None,
        matrix.bias,
        matrix.n,
        TOKENS=kernel.tokens,
        STEP=kernel.step,
        STAGES=kernel.stages,
        GROUP=group_of(matrix),
        ZEROS=matrix.zero is not None,
        KIND=kind_of(matrix),
        FINISH=finish,
        SPLITS=splits,
        AFTER=kernel.after,
        DEPENDENT=dependent,
        **options,
    )


def launch_stream(
    plan: Plan, matrix: PackedMatrix, routed: Routed, x: Tensor, out: Tensor, finish: Finish, dependent: bool
) -> None:
    """Launches `device.stream.expert_product_stream`."""
    kernel = plan.kernel
    assert isinstance(kernel, Stream)
    function = import_module("moeq_kernels.hopper.device.stream").expert_product_stream
    columns = out.shape[-1]
    programs = programs_on(x.device)
    takers = programs * kernel.pairs
    partial = torch.empty(2 * takers, 256 * kernel.tokens, dtype=torch.float32, device=x.device)
    down = finish == PLAIN
    function[(programs,)](
        *descriptors(matrix, x, kernel.step, 2, kernel.tokens),
        matrix.zero,
        out,
        partial,
        routed.arrived[takers:] if down else routed.arrived,
        routed.tiles,
        routed.num_tiles,
        matrix.k // 16,
        matrix.num_groups,
        -(-min(matrix.k, x.shape[1]) // kernel.step),
        -(-columns // (128 if finish.gated else 256)),
        columns // 64 if finish.gated and not finish.interleaved else 2,
        columns,
        out.stride(-2),
        0 if matrix.zero is None else matrix.zero.shape[-1],
        matrix.scale if matrix.channelwise else None,
        matrix.bias,
        matrix.n,
        PAIRS=kernel.pairs,
        TOKENS=kernel.tokens,
        STEP=kernel.step,
        STAGES=kernel.stages,
        REGISTERS=kernel.registers,
        GROUP=group_of(matrix),
        ZEROS=matrix.zero is not None,
        KIND=kind_of(matrix),
        AFTER=kernel.after,
        FINISH=finish,
        DEPENDENT=dependent,
        EARLY=routed.early or down,
        num_warps=4,
        **after(dependent),
    )


def launch_wide(
    plan: Plan, matrix: PackedMatrix, routed: Routed, x: Tensor, out: Tensor, finish: Finish, dependent: bool
) -> None:
    """Launches `device.wide.expert_product_wide`, one program per multiprocessor."""
    kernel = plan.kernel
    assert isinstance(kernel, Wide)
    function = import_module("moeq_kernels.hopper.device.wide").expert_product_wide
    groups = kernel.warpgroups
    columns = out.shape[-1]
    blocks = -(-columns // (64 * groups if finish.gated else 128 * groups))
    splits = plan.down_splits if finish == PLAIN else 1
    gather = routed.x is None and finish != PLAIN
    function[(programs_on(x.device),)](
        *descriptors(matrix, x, 64, groups, 32),
        matrix.zero,
        out,
        routed.tiles,
        routed.num_tiles,
        x,
        routed.pair_of_row,
        routed.pair_of_row.numel() // x.shape[0] if gather else 1,
        x.stride(0),
        matrix.k // 16,
        matrix.num_groups,
        -(-min(matrix.k, x.shape[1]) // 64),
        blocks,
        splits,
        routed.pair_of_row.numel(),
        columns // 64 if finish.gated and not finish.interleaved else groups,
        columns,
        out.stride(-2),
        0 if matrix.zero is None else matrix.zero.shape[-1],
        matrix.scale if matrix.channelwise else None,
        matrix.bias,
        matrix.n,
        TOKENS=kernel.tokens,
        STAGES=kernel.stages,
        GROUP=group_of(matrix),
        ZEROS=matrix.zero is not None,
        KIND=kind_of(matrix),
        FINISH=finish,
        GATHER=gather,
        GROUPS_OF_WARPS=groups,
        REGISTERS=kernel.registers,
        DEPENDENT=dependent,
        EARLY=routed.early or finish == PLAIN,
        num_warps=4,
        **after(dependent),
    )


def kind_of(matrix: PackedMatrix) -> str:
    """What the device code calls the codes: `uint4`, `uint8` or `e2m1`."""
    return find_format(matrix.layout, matrix.element).kind


def group_of(matrix: PackedMatrix) -> int:
    """Weights that share a scale, as the device code takes it: 0 for one scale for each output feature."""
    return 0 if matrix.channelwise else matrix.group_size


def descriptors(matrix: PackedMatrix, x: Tensor, step: int, tiles: int, tokens: int) -> tuple[Any, Any, Any]:
    """Descriptors of words, tokens and scales; step: rows of k, tiles and tokens: of a box."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layouts = import_module("moeq_kernels.hopper.device.layouts")
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

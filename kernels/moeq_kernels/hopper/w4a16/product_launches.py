"""Launches of one grouped product of the W4A16 kernels: boxes of the copy engine, sizes, constants."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from moeq_kernels.areas import Area, Arena, Box
from moeq_kernels.epilogue import PLAIN, Epilogue
from moeq_kernels.formats import find_format
from moeq_kernels.hopper.w4a16.kinds import KINDS, kind_of_format
from moeq_kernels.hopper.w4a16.w4a16_plan import Narrow, Plan, Queue, Wide
from moeq_kernels.launch import Argument, Launch
from moeq_kernels.problem import Problem
from moeq_kernels.records import PackedMatrix
from moeq_kernels.sorting import Sorted

#: Queue kernel: lower bounds of the steps in a share of the gate-up product, in a share of the down product, and in a
#: unit of several tiles. A step here is STEP_BYTES of words.
MIN_UP_STEPS, MIN_DOWN_STEPS, BUNDLED_STEPS = 4, 4, 8
STEP_BYTES = 16384
#: Arguments that the kernel for both products takes once per product.
_PER_PRODUCT = (
    "w_desc", "h_desc", "s_desc", "zero", "slabs", "groups", "columns", "stride", "zero_words", "scale", "bias",
    "global_scale", "packed",
)  # fmt: skip


def product_launch(
    problem: Problem, plan: Plan, matrix: PackedMatrix, rows: Sorted, x: Area, out: Area, arena: Arena,
    gather: bool, early: bool,
) -> Launch:  # fmt: skip
    """Return the launch of one grouped product.

    `gather`: x holds unsorted tokens. `early`: the preceding kernel only writes x, so weights are read before it ends.
    """
    epilogue = problem.epilogue if matrix is problem.w13 else PLAIN
    if isinstance(plan.kernel, Narrow):
        return _narrow(problem, plan, plan.kernel, matrix, epilogue, rows, x, out, arena)
    assert isinstance(plan.kernel, Wide)
    return _wide(problem, plan, plan.kernel, matrix, epilogue, rows, x, out, gather, early)


def _narrow(
    problem: Problem, plan: Plan, kernel: Narrow, matrix: PackedMatrix, epilogue: Epilogue, rows: Sorted, x: Area,
    out: Area, arena: Arena,
) -> Launch:  # fmt: skip
    splits = plan.down_splits if matrix is problem.w2 else plan.gate_up_splits
    columns, pairs = out.shape[-1], x.shape[0]
    blocks = -(-columns // (128 if epilogue.gated else 256))
    is_split = epilogue.gated and splits > 1
    arguments, constants = _common(matrix, x, out, epilogue, kernel.step, 2, kernel.tokens)
    arguments |= {
        "partial": arena.take(torch.float32, splits, pairs, 2 * columns) if is_split else None,
        "arrived": rows.cleared,
        "tiles": rows.tiles,
        "count": _steps(matrix, x, kernel.step),
        "rows": pairs,
    }
    constants |= {"TOKENS": kernel.tokens, "STEP": kernel.step, "STAGES": kernel.stages, "SPLITS": splits}
    constants["AFTER"] = kernel.after
    register_limit = {"maxnreg": kernel.registers} if kernel.registers else {}
    name = "hopper.w4a16.device.narrow:expert_product_narrow"
    return problem.launch(name, (blocks * splits, rows.most), arguments, constants, num_warps=4, **register_limit)


def queue_launch(
    problem: Problem, kernel: Queue, rows: Sorted, x: Area, middle: Area, parts: Area, arena: Arena, early: bool
) -> Launch:
    """Return the launch of both products: of w13 from x to middle, of w2 from middle to parts `[1, P, H]`."""
    programs = problem.gpu.multiprocessors * kernel.resident
    out = parts.view(*parts.shape[1:])
    box = import_module("moeq_kernels.hopper.w4a16.device.queue_copies").box_of(kernel.tokens)
    up, constants = _common(problem.w13, x, middle, problem.epilogue, kernel.step, 2, box)
    down, _ = _common(problem.w2, middle, out, PLAIN, kernel.step, 2, box)
    count = _steps(problem.w2, middle, kernel.step)
    steps_per_block = max(1, STEP_BYTES // (32 * KINDS[kind_of(problem.w13)].bits * kernel.step))
    bundle = max(1, BUNDLED_STEPS * steps_per_block // count)
    shares = (kernel.up + kernel.down) * programs
    arguments = {
        **{f"up_{name}": up[name] for name in _PER_PRODUCT},
        **{f"down_{name}": down[name] for name in _PER_PRODUCT},
        "x_desc": up["x_desc"],
        "m_desc": down["x_desc"],
        "middle": middle,
        "out": out,
        "partial": arena.take(torch.float32, shares, 256 * kernel.tokens),
        "counters": rows.cleared,
        "tiles": rows.tiles,
        "num_tiles": rows.num_tiles,
        "most": rows.most,
        "wanted_up": kernel.up * programs,
        "least_up": MIN_UP_STEPS * steps_per_block,
        "wanted_down": kernel.down * programs,
        # Units of several tiles are not cut: a lower bound above `count` allows one share only.
        "least_down": MIN_DOWN_STEPS * steps_per_block if bundle == 1 else count + 1,
        "bundle": bundle,
        "up_pair_tiles": up["pair_tiles"],
        "up_count": _steps(problem.w13, x, kernel.step),
        "up_blocks": -(-middle.shape[-1] // (128 if problem.epilogue.gated else 256)),
        "down_count": count,
        "down_blocks": -(-out.shape[-1] // 256),
    }
    constants |= {"TOKENS": kernel.tokens, "STEP": kernel.step, "STAGES": kernel.stages, "AFTER": kernel.after}
    constants |= {"ROWS": kernel.rows, "EARLY": early, "LEAST": kernel.least or kernel.tokens}
    name = "hopper.w4a16.device.queue:expert_layer"
    return problem.launch(name, (programs,), arguments, constants, num_warps=4, maxnreg=kernel.registers)


def _wide(
    problem: Problem, plan: Plan, kernel: Wide, matrix: PackedMatrix, epilogue: Epilogue, rows: Sorted, x: Area,
    out: Area, gather: bool, early: bool,
) -> Launch:  # fmt: skip
    """Return a launch of the wide kernel with one program per SM."""
    groups, down = kernel.warpgroups, matrix is problem.w2
    arguments, constants = _common(matrix, x, out, epilogue, 64, groups, 32)
    # A tile of tokens is finished after this many signals: one per warpgroup and block of columns of gate-up.
    signals = -(-problem.intermediate // ((64 if problem.epilogue.gated else 128) * groups)) * groups
    arguments |= {
        "queue": rows.cleared.part(0, 1 if down else 0, 1),
        "done": rows.cleared.part(0, 2, problem.experts),
        "needed": signals,
        "tiles": rows.tiles,
        "num_tiles": rows.num_tiles,
        "x": x,
        "pair_of_row": rows.pair_of_row,
        "top_k": problem.top_k if gather else 1,
        "stride_x": x.strides[0],
        "steps": _steps(matrix, x, 64),
        "blocks": -(-out.shape[-1] // (64 * groups if epilogue.gated else 128 * groups)),
        "splits": plan.down_splits if down else 1,
        "rows": rows.pair_of_row.numel(),
    }
    constants |= {"TOKENS": kernel.tokens, "STAGES": kernel.stages, "GATHER": gather, "GROUPS_OF_WARPS": groups}
    constants |= {"REGISTERS": kernel.registers, "EARLY": early or down, "FOLLOWS": down, "FINE": kernel.fine}
    name = "hopper.w4a16.device.wide:expert_product_wide"
    return problem.launch(name, (problem.gpu.multiprocessors,), arguments, constants, num_warps=4)


def _common(
    matrix: PackedMatrix, x: Area, out: Area, epilogue: Epilogue, step: int, tiles: int, tokens: int
) -> tuple[dict[str, Argument], dict[str, Any]]:
    """Return the arguments and constants that all kernels share; `step`, `tiles` and `tokens` are those of `boxes`."""
    words, high, rows, scales = boxes(matrix, x, step, tiles, tokens)
    columns = out.shape[-1]
    arguments, constants = weight_arguments(matrix)
    arguments |= {
        "w_desc": words,
        "h_desc": high,
        "x_desc": rows,
        "s_desc": scales,
        "out": out,
        "pair_tiles": columns // 64 if epilogue.gated and not epilogue.interleaved else tiles,
        "columns": columns,
        "stride": out.strides[-2],
        "scale": channel_scale(matrix),
        "bias": matrix.bias,
        "packed": matrix.n,
    }
    return arguments, {**constants, "EPILOGUE": epilogue}


def weight_arguments(matrix: PackedMatrix) -> tuple[dict[str, Argument], dict[str, Any]]:
    """Return the arguments and constants with which kernels find an expert's weights and decode words."""
    arguments = {
        "zero": matrix.zero,
        "global_scale": matrix.global_scale,
        "slabs": matrix.weight.shape[-2],
        "groups": matrix.num_groups,
        "zero_words": 0 if matrix.zero is None else matrix.zero.shape[-1],
    }
    return arguments, {"GROUP": group_of(matrix), "ZEROS": matrix.zero is not None, "KIND": kind_of(matrix)}


def share_constants(one: PackedMatrix, other: PackedMatrix) -> bool:
    """Return whether the same constants read both matrices, as one kernel for both products needs."""
    return group_of(one) == group_of(other) and _constants_key(one) == _constants_key(other)


def _constants_key(matrix: PackedMatrix) -> tuple[str, bool, Any]:
    return kind_of(matrix), matrix.zero is None, None if matrix.scale is None else matrix.scale.dtype


def only_second_is_channelwise(first: PackedMatrix, second: PackedMatrix) -> bool:
    """Return whether the matrices differ only in that `second` has one scale per output feature."""
    return not group_of(second) and _constants_key(first) == _constants_key(second)


def channel_scale(matrix: PackedMatrix) -> Area | None:
    """Return scales of output features, which multiply sums, or None if groups have scales."""
    return matrix.scale if matrix.channelwise else None


def group_scale(matrix: PackedMatrix) -> Area | None:
    """Return scales of groups along k, 8-bit scales as bytes, or None if output features have scales."""
    return None if matrix.channelwise or matrix.scale is None else matrix.scale.as_bytes()


def _steps(matrix: PackedMatrix, x: Area, step: int) -> int:
    """Return the number of steps of k; padding of the weights beyond the width of x is not read."""
    return -(-min(matrix.k, x.shape[1]) // step)


def kind_of(matrix: PackedMatrix) -> str:
    """Return the kind of a matrix, a key of `kinds.KINDS`."""
    return kind_of_format(find_format(matrix.layout, matrix.element))


def group_of(matrix: PackedMatrix) -> int:
    """Return the group size as the device code takes it: 0 for one scale per output feature."""
    return 0 if matrix.channelwise else matrix.group_size


def boxes(matrix: PackedMatrix, x: Area, step: int, tiles: int, tokens: int) -> tuple[Box, Box | None, Box, Box]:
    """Return the boxes of words, third bits, tokens and scales: `step` rows of k, `tiles` tiles, `tokens` tokens.

    Only 3-bit codes have third bits.
    """
    layouts = import_module("moeq_kernels.hopper.w4a16.device.layouts")
    assert matrix.scale is not None
    kind, shared = kind_of(matrix), layouts.word_buffer()
    words, high = layouts.tile_bytes(kind) // 4, None
    if matrix.weight_high is not None:
        high = Box(matrix.weight_high.view(-1, matrix.n // 64, words), (step // 64, tiles, words), shared)
    block = (step // layouts.word_rows(kind), tiles, words)
    groups = layouts.groups_of(step, group_of(matrix))
    scale: Area = matrix.scale.as_bytes()
    return (
        Box(matrix.weight.view(-1, matrix.n // 64, words), block, shared),
        high,
        Box(x, (tokens, 64), layouts.token_buffer()),
        Box(scale.view(-1, matrix.n), (groups, 64 * tiles), layouts.scale_buffer(8 * scale.itemsize)),
    )

"""Running a MoE layer with the Hopper kernels: buffers, descriptors of the copy engine, launches."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from moeq_kernels.formats import find_format
from moeq_kernels.hopper.finish import PLAIN, SILU, Finish
from moeq_kernels.hopper.plan import Direct, Narrow, Plan, Stream, Wide, choose
from moeq_kernels.records import PackedExperts, PackedMatrix
from moeq_kernels.tuning import next_power_of_two

#: Elements of the buffer of sorted tokens (and of expert outputs); longer calls go through it in pieces.
WORKSPACE_ELEMENTS = 1 << 30
#: Pairs up to which one kernel does all the routing.
FEW_PAIRS = 4096
#: Pairs up to which expert outputs are kept in float32.
EXACT_PAIRS = 1024
#: Rows of an expert, on average, up to which that kernel also copies tokens.
ROWS_COPIED = 4


@dataclass(frozen=True)
class Routed:
    """Sorted pairs on the device; see `device.routing` for the contents.

    Attributes:
        x: `[P, K]` tokens by expert, or None where the kernel gathers them itself.
        pair_of_row: int32 `[P]`.
        inverse: int32 `[P]`.
        tiles: int32 `[T, 8]`.
        num_tiles: int32 `[1]`.
        arrived: int32 zeros, to count arrivals with.
        early: whether the last kernel only made x, so that weights can be read while it runs.
    """

    x: Tensor | None
    pair_of_row: Tensor
    inverse: Tensor
    tiles: Tensor
    num_tiles: Tensor
    arrived: Tensor
    early: bool = False


def hopper_moe(
    x: Tensor,
    experts: PackedExperts,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    finish: Finish = SILU,
    expert_map: Tensor | None = None,
    plan: Plan | None = None,
    dependent: bool = True,
) -> Tensor:
    """`fused_moe` for what `support.unsupported_reason` accepts (checked by the caller).

    Args:
        x: bf16 or float16 `[M, H]`, last axis contiguous.
        topk_weights, topk_ids: `[M, top_k]`.
        finish: activation of the gate-up product, fitting `experts.w13_order`.
        plan: kernel and sizes, where the default choice should not be used.
        dependent: let each kernel start while the one before it ends (programmatic dependent launch).

    Returns `[M, H]` in x's dtype. Nothing is read back from the device; results do not vary from run to run. Tokens'
    results are summed in float32 in the order of topk_ids; with more than EXACT_PAIRS pairs each is rounded to x's
    dtype before that, except beside MXFP4 weights and for float16.
    """
    tokens, hidden = x.shape
    top_k = topk_ids.shape[1]
    y = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    piece = max(1, WORKSPACE_ELEMENTS // (top_k * hidden))
    for start in range(0, tokens, piece):
        part = slice(start, start + piece)
        with torch.cuda.device(x.device):  # triton launches on the current device
            _some_tokens(
                x[part], experts, topk_weights[part], topk_ids[part], finish, expert_map, plan, dependent, y[part]
            )
    return y


def _some_tokens(
    x: Tensor,
    experts: PackedExperts,
    topk_weights: Tensor,
    topk_ids: Tensor,
    finish: Finish,
    expert_map: Tensor | None,
    plan: Plan | None,
    dependent: bool,
    y: Tensor,
) -> None:
    tokens, hidden = x.shape
    top_k = topk_ids.shape[1]
    pairs = tokens * top_k
    intermediate = experts.intermediate_size
    first = experts.w13
    if plan is None:
        plain = not finish.interleaved and first.bias is None and experts.w2.bias is None
        kind, group = kind_of(first), group_of(first)
        plan = choose(pairs, experts.num_experts, first.k, intermediate, group, kind, finish.gated, plain)
    if isinstance(plan.kernel, Direct):
        launch_direct(plan, x, experts, topk_weights, topk_ids, finish, expert_map, dependent, y)
        return
    routed = sort_pairs(x, experts, topk_ids, expert_map, plan, gathers(plan, x, finish), dependent)
    middle = torch.empty(pairs, intermediate, dtype=x.dtype, device=x.device)
    exact = isinstance(plan.kernel, Narrow) or plan.down_splits > 1 or pairs <= EXACT_PAIRS
    # Weights of MXFP4 are exact: one more rounding would show. Outputs may exceed float16 before they are weighted.
    exact = exact or kind_of(experts.w2) == "e2m1" or x.dtype == torch.float16
    parts_type = torch.float32 if exact else x.dtype
    parts = torch.empty(plan.down_splits, pairs, hidden, dtype=parts_type, device=x.device)
    product(plan, experts.w13, routed, x if routed.x is None else routed.x, middle, finish, dependent)
    product(plan, experts.w2, routed, middle, parts, PLAIN, dependent)
    sum_parts(parts, routed.inverse, topk_weights, y, top_k, dependent)


def sort_pairs(
    x: Tensor,
    experts: PackedExperts,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    plan: Plan,
    gathered: bool,
    dependent: bool,
) -> Routed:
    """Sorts pairs by expert and, unless the product gathers them itself, copies tokens into that order."""
    routing = import_module("moeq_kernels.hopper.device.routing")
    tokens, hidden = x.shape
    top_k = topk_ids.shape[1]
    pairs = tokens * top_k
    count = experts.num_experts
    tile = plan.kernel.tokens
    most = min(pairs, pairs // tile + count)
    device = x.device
    to_clear = counters(plan, most, experts, device)
    sorted_x = None if gathered else torch.empty(pairs, hidden, dtype=x.dtype, device=device)
    numbers = torch.empty(2 * pairs + 8 * most + 8 + to_clear, dtype=torch.int32, device=device)
    pair_of_row, inverse, tiles, num_tiles, arrived = torch.split(numbers, [pairs, pairs, 8 * most, 8, to_clear])
    bins = next_power_of_two(count + 1)
    known = count if expert_map is None else expert_map.numel()
    mapped = expert_map is not None
    which = (count, known, most)
    common = {"MAPPED": mapped, "BINS": bins, "TILE": tile}
    ids = topk_ids
    pdl = after(dependent)
    if pairs <= FEW_PAIRS:
        copy = not gathered and pairs <= ROWS_COPIED * count
        columns = min(1024, next_power_of_two(hidden))
        routing.route_few[(count, 1 + -(-hidden // columns) if copy else 1)](
            ids,
            expert_map,
            x,
            sorted_x,
            pair_of_row,
            inverse,
            tiles,
            num_tiles,
            arrived,
            to_clear,
            pairs,
            top_k,
            hidden,
            x.stride(0),
            *which,
            PAIRS=next_power_of_two(max(pairs, 16)),
            COPY=copy,
            COLUMNS=columns,
            **common,
            **pdl,
        )
        if copy or gathered:
            return Routed(sorted_x, pair_of_row, inverse, tiles, num_tiles, arrived)
    else:
        block = 256 if pairs <= 16384 else 512
        blocks = -(-pairs // block)
        counts = torch.empty(blocks, bins, dtype=torch.int32, device=device)
        routing.count_pairs[(blocks,)](
            ids,
            expert_map,
            counts,
            arrived,
            to_clear,
            pairs,
            count,
            known,
            MAPPED=mapped,
            BLOCK=block,
            BINS=bins,
            **pdl,
        )
        routing.place_pairs[(blocks,)](
            ids,
            expert_map,
            counts,
            pair_of_row,
            inverse,
            tiles,
            num_tiles,
            pairs,
            *which,
            BLOCK=block,
            GROUP=max(1, 4096 // bins),
            **common,
            **pdl,
        )
        if gathered:
            return Routed(sorted_x, pair_of_row, inverse, tiles, num_tiles, arrived)
    rows, columns = 8, min(1024, next_power_of_two(hidden))
    routing.gather_rows[(-(-pairs // rows), -(-hidden // columns))](
        x,
        sorted_x,
        pair_of_row,
        tiles,
        num_tiles,
        pairs,
        top_k,
        hidden,
        x.stride(0),
        ROWS=rows,
        COLUMNS=columns,
        **pdl,
    )
    return Routed(sorted_x, pair_of_row, inverse, tiles, num_tiles, arrived, early=True)


def gathers(plan: Plan, x: Tensor, finish: Finish) -> bool:
    """Whether the gate-up product picks tokens itself: the wide kernel with two warpgroups, in whole steps of k."""
    kernel = plan.kernel
    return isinstance(kernel, Wide) and kernel.warpgroups == 2 and x.shape[1] % 64 == 0 and finish != PLAIN


def counters(plan: Plan, most: int, experts: PackedExperts, device: torch.device) -> int:
    """How many integers the kernels of the plan count arrivals with, for `most` tiles."""
    if isinstance(plan.kernel, Stream):
        return 2 * plan.kernel.pairs * programs_on(device)  # for each product
    return most * -(-experts.intermediate_size // 128) if plan.gate_up_splits > 1 else 0


def programs_on(device: torch.device) -> int:
    """Programs of a persistent kernel: one for each multiprocessor."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def after(dependent: bool) -> dict[str, Any]:
    """Launch options of a kernel that may start while the one before it ends."""
    return {"launch_pdl": True} if dependent else {}


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


def launch_direct(
    plan: Plan,
    x: Tensor,
    experts: PackedExperts,
    topk_weights: Tensor,
    topk_ids: Tensor,
    finish: Finish,
    expert_map: Tensor | None,
    dependent: bool,
    y: Tensor,
) -> None:
    """Launches both kernels of `device.direct`."""
    direct = import_module("moeq_kernels.hopper.device.direct")
    kernel = plan.kernel
    assert isinstance(kernel, Direct)
    tokens, hidden = x.shape
    top_k = topk_ids.shape[1]
    pairs = tokens * top_k
    w13, w2 = experts.w13, experts.w2
    columns = experts.intermediate_size
    up_steps, down_steps = (-(-size // kernel.step) for size in (min(w13.k, hidden), min(w2.k, columns)))
    up_share, share = -(-up_steps // plan.gate_up_splits), -(-down_steps // plan.down_splits)
    up_shares, shares = -(-up_steps // up_share), -(-down_steps // share)
    blocks = -(-hidden // 256)
    partial = torch.empty(up_shares, pairs, 2 * columns, dtype=torch.float32, device=x.device)
    parts = torch.empty(shares, pairs, hidden, dtype=torch.float32, device=x.device)
    arrived = torch.empty(tokens * blocks, dtype=torch.int32, device=x.device)
    known = experts.num_experts if expert_map is None else expert_map.numel()
    common = {
        "MAPPED": expert_map is not None,
        "STEP": kernel.step,
        "AFTER": kernel.after,
        "DEPENDENT": dependent,
        "num_warps": 4,
        **after(dependent),
    }
    words, tokens_box, scales = descriptors(w13, x, kernel.step, 2, 8)
    direct.few_gate_up[(-(-columns // 128), pairs, up_shares)](
        words,
        tokens_box,
        scales,
        w13.zero,
        topk_ids,
        expert_map,
        partial,
        arrived,
        arrived.numel(),
        w13.k // 16,
        w13.num_groups,
        up_steps,
        columns,
        0 if w13.zero is None else w13.zero.shape[-1],
        top_k,
        pairs,
        experts.num_experts,
        known,
        SHARE=up_share,
        STAGES=min(kernel.stages, up_share),
        GROUP=group_of(w13),
        ZEROS=w13.zero is not None,
        KIND=kind_of(w13),
        **common,
    )
    words, _, scales = descriptors(w2, x, kernel.step, 2, 8)
    direct.few_down[(blocks, pairs, shares)](
        words,
        scales,
        w2.zero,
        topk_ids,
        expert_map,
        topk_weights,
        partial,
        parts,
        arrived,
        y,
        w2.k // 16,
        w2.num_groups,
        down_steps,
        columns,
        hidden,
        topk_weights.stride(0),
        0 if w2.zero is None else w2.zero.shape[-1],
        pairs,
        experts.num_experts,
        known,
        TOP_K=top_k,
        UP_SHARES=up_shares,
        SHARES=shares,
        SHARE=share,
        STAGES=min(kernel.stages, share),
        GROUP=group_of(w2),
        ZEROS=w2.zero is not None,
        KIND=kind_of(w2),
        FINISH=finish,
        **common,
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


def sum_parts(parts: Tensor, inverse: Tensor, weights: Tensor, y: Tensor, top_k: int, dependent: bool) -> None:
    """Launches `device.routing.sum_rows`."""
    routing = import_module("moeq_kernels.hopper.device.routing")
    tokens, hidden = y.shape
    splits, rows, _ = parts.shape
    block = 1 if tokens < 512 else 2
    columns = min(256 if tokens < 64 else 1024, next_power_of_two(hidden))
    options = after(dependent)
    routing.sum_rows[(-(-tokens // block), -(-hidden // columns))](
        parts,
        inverse,
        weights,
        y,
        tokens,
        hidden,
        rows,
        weights.stride(0),
        TOP_K=top_k,
        SPLITS=splits,
        COLUMNS=columns,
        TOKENS=block,
        num_warps=max(1, columns // 256),
        **options,
    )

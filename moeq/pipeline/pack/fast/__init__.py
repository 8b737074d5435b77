"""Fast paths: packing experts without ever unpacking their codes.

The reference path decodes an expert into a `QuantizedMatrix`, one byte per code, and packs that. It handles every
format and layout. A fast path turns the stored bytes of one expert into packed bytes in the caller's buffers, allocates
nothing in proportion to the data, and gives the same bytes, digests and refusals, many times faster. Its two halves
meet in matrices of packed codes, so that any format combines with any layout: `formats` reads what is stored, `parts`
fills what is packed.

Fast paths cover the common, regular cases. Everything else, unusual values included, is left to the reference path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeq.layouts.words import use_compiled

if TYPE_CHECKING:
    from moeq.checkpoint.manifest import StackedRole
    from moeq.layouts.layout import Layout
    from moeq.matrix import MatrixSpec
    from moeq.model.expert_kinds import Experts
    from moeq.pipeline.pack.fast.path import FastPath
    from moeq.pipeline.plan.layer_plan import ShardPlan


def find_fast_path(
    experts: Experts, role: StackedRole, layout: Layout, shards: Sequence[ShardPlan], written: MatrixSpec
) -> FastPath | None:
    """Find the fast path of one layer's `w13` or `w2`; None leaves it to the reference path.

    `shards` are what is packed for every rank, or the one plan that holds everything; `written` is the whole matrix, in
    the groups that are written.
    """
    spec = shards[0].padding.w2 if role == "w2" else shards[0].padding.w13
    if not use_compiled(spec.n * spec.k):
        return None
    from moeq.pipeline.pack.fast.find import build_fast_path

    return build_fast_path(experts, role, layout, shards, written)

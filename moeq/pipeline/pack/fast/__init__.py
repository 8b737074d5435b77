"""Direct roads: packing experts without ever unpacking their codes.

The general path decodes an expert into a `QuantizedMatrix`, one byte per code, and packs that; it takes every format to
every layout. A road takes the stored bytes of one expert to packed bytes in buffers of the caller, allocates nothing in
proportion to the data, and gives the same bytes, the same digests and the same refusals, many times faster. It is made
of two halves that meet in matrices of packed codes, so that every format reaches every layout: `formats` reads what is
stored, `parts` fills what is packed.

Roads exist for what is common and regular. Everything else, and every value that is odd, is left to the general path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeq.layouts.words import use_compiled
from moeq.pipeline.pack.fast.base import Proof, Road

if TYPE_CHECKING:
    from moeq.checkpoint.manifest import StackedRole
    from moeq.layouts.base import Layout
    from moeq.model.experts import Experts
    from moeq.pipeline.plan.layers import ShardPlan

__all__ = ["Proof", "Road", "find_road"]


def find_road(experts: Experts, role: StackedRole, layout: Layout, shards: Sequence[ShardPlan]) -> Road | None:
    """The road of one layer's `w13` or `w2`, or None where there is none: then the general path packs it.

    Args:
        experts: the layer as it is stored.
        role: which matrix.
        layout: the layout that packs it.
        shards: what is packed for every rank, or the one plan that holds everything.
    """
    spec = shards[0].padding.w2 if role == "w2" else shards[0].padding.w13
    if not use_compiled(spec.n * spec.k):
        return None
    from moeq.pipeline.pack.fast.find import bind

    return bind(experts, role, layout, shards)

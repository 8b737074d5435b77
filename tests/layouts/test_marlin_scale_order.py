"""vLLM 0.33.0 packs w13 scales in an order that its own kernel does not read, when a group is as wide as I.

The golden case `ct4_g64_group_eq_inter` (H 128, I 64, groups of 64) shows it: w13 has two groups along K, so the kernel
reads the grouped order, but the engine's loader compares the group with I and packs the single order.
"""

from __future__ import annotations

import torch
from layouts.golden import lay, pack_experts, same_bytes, tensors
from layouts.test_golden import marlin_sources
from torch import Tensor

TAG = "ct4_g64_group_eq_inter"


def kernel_reads(packed: Tensor, n: int) -> Tensor:
    """`[G, N]` scales as Marlin reads them with several groups: column n of a tile of 64 from 8 (n % 8) + n // 8."""
    column = torch.arange(n)
    return packed[..., 64 * (column // 64) + 8 * (column % 8) + (column % 64) // 8]


def test_moeq_packs_what_the_kernel_reads_and_the_engine_does_not() -> None:
    w13, w2 = marlin_sources(TAG)
    mine = pack_experts(lay("marlin-wna16/1"), w13, w2, "w13")["scale"]
    golden = tensors("marlin")[f"{TAG}.out.s13"]
    true = w13.scales.transpose(1, 2)
    assert w13.spec().num_groups == 2
    assert torch.equal(kernel_reads(mine, 128), true)
    assert not torch.equal(kernel_reads(golden, 128), true)
    assert not same_bytes(mine, golden)


def test_engine_and_moeq_agree_where_the_group_is_narrower() -> None:
    tag = "ct4_g32_bf16_bias"
    mine = pack_experts(lay("marlin-wna16/1"), *marlin_sources(tag), "w13")["scale"]
    assert same_bytes(mine, tensors("marlin")[f"{tag}.out.s13"])


def test_the_same_weights_pack_alike_whatever_the_intermediate_size() -> None:
    """Gate rows 0 .. 64 of a wider model are the same bytes as those of the narrow one: no size but K decides."""
    w13, _ = marlin_sources(TAG)
    layout = lay("marlin-wna16/1")
    whole = layout.pack(w13.expert(0))["scale"]
    wide = w13.expert(0)
    doubled = type(wide)(
        spec=wide.spec.with_sizes(n=256),
        codes=wide.codes.repeat(2, 1),
        scales=wide.scales.repeat(2, 1),
    )
    assert torch.equal(layout.pack(doubled)["scale"][:, :128], whole)

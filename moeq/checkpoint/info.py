"""Records about a model that do not depend on how it is quantised. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoutingInfo:
    """A model's routing rule.

    Attributes:
        scoring: how router logits become scores: `softmax`, `sigmoid`, `sqrtsoftplus`, `topk-softmax` (top-k of the
            logits, then softmax), `topk-sigmoid`, `sparsemixer`.
        renormalize: the chosen scores are divided by their sum.
        scaling_factor: multiplies the weights at the end.
        num_groups: experts are split into this many equal groups.
        topk_groups: groups that stay eligible.
        group_score: a group is ranked by its best score (`max`) or its best two (`top2`).
        correction_bias: a per-expert bias takes part in choosing (not in weighting).
    """

    scoring: str = "softmax"
    renormalize: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_score: str = "max"
    correction_bias: bool = False


@dataclass(frozen=True)
class ModuleUse:
    """What is quantised in one part of the model.

    Attributes:
        part: `experts`, `shared experts`, `router`, `attention`, `dense mlp`, `lm_head`, `embeddings`, `mtp`, `other`.
        quantized: number of quantised modules (linear layers).
        plain: number of modules that are not quantised.
        bytes: bytes of all their tensors.
    """

    part: str
    quantized: int
    plain: int
    bytes: int

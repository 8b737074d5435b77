"""Router rules against a loop over tokens written from the models' definitions."""

from __future__ import annotations

import math

import pytest
import torch

from moeq_kernels import KernelArgumentError, Router, fused_moe, route

LOGITS = torch.randn(6, 16, generator=torch.Generator().manual_seed(3)) * 2
BIAS = torch.randn(16, generator=torch.Generator().manual_seed(4))


def expected(logits: list[float], router: Router, bias: list[float]) -> dict[int, float]:
    """{expert: weight} of one token."""
    if router.scoring == "softmax":
        total = sum(math.exp(v) for v in logits)
        scores = [math.exp(v) / total for v in logits]
    else:
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    choice = [score + extra for score, extra in zip(scores, bias, strict=True)]
    size = len(choice) // router.num_groups
    groups = [choice[i * size : (i + 1) * size] for i in range(router.num_groups)]
    count = 2 if router.group_score == "top2" else 1
    ranks = sorted(range(router.num_groups), key=lambda g: -sum(sorted(groups[g])[-count:]))
    kept = ranks[: router.topk_groups]
    best = sorted((e for e in range(len(choice)) if e // size in kept), key=lambda e: -choice[e])[: router.top_k]
    divisor = sum(scores[e] for e in best) if router.renormalize else 1.0
    return {e: scores[e] / divisor * router.scaling_factor for e in best}


@pytest.mark.parametrize(
    "router",
    [
        Router(4),
        Router(4, renormalize=False),
        Router(1, scoring="sigmoid", renormalize=False),
        Router(6, scoring="sigmoid", scaling_factor=2.5, num_groups=4, topk_groups=2, group_score="top2"),
        Router(3, num_groups=8, topk_groups=3, renormalize=False, scaling_factor=16.0),
    ],
    ids=["mixtral", "no-renormalise", "llama4", "deepseek-v3", "deepseek-v2"],
)
@pytest.mark.parametrize("bias", [None, BIAS], ids=["plain", "bias"])
def test_rules(router: Router, bias: torch.Tensor | None) -> None:
    weights, ids = route(LOGITS, router, bias)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    for token in range(len(LOGITS)):
        wanted = expected(LOGITS[token].tolist(), router, [0.0] * 16 if bias is None else bias.tolist())
        assert ids[token].tolist() == list(wanted)
        assert weights[token].tolist() == pytest.approx(list(wanted.values()), rel=1e-5)


def test_ties_go_to_the_lower_expert() -> None:
    assert route(torch.zeros(2, 8), Router(3))[1].tolist() == [[0, 1, 2]] * 2


def test_sizes_are_checked() -> None:
    for logits in (LOGITS[0], LOGITS.int()):
        with pytest.raises(KernelArgumentError, match=r"they must be \[M, E\]"):
            route(logits, Router(2))
    with pytest.raises(KernelArgumentError, match="top_k is 5, but 4 experts can be chosen"):
        route(LOGITS, Router(5, num_groups=4, topk_groups=1))
    with pytest.raises(KernelArgumentError, match=r"correction_bias is float32 \[3\]"):
        route(LOGITS, Router(2), BIAS[:3])
    with pytest.raises(KernelArgumentError, match="in 0 groups of which 1 stay"):
        route(LOGITS, Router(2, num_groups=0))
    with pytest.raises(KernelArgumentError, match="unknown group_score 'top3'"):
        route(LOGITS, Router(2, num_groups=2, group_score="top3"))  # type: ignore[arg-type]


def test_the_result_is_what_fused_moe_takes(device: torch.device) -> None:
    from support.cases import Recipe, Routed, make_layer
    from support.cases import route as random_input
    from support.comparison import compare

    packed, layer = make_layer(Recipe(experts=16), device)
    x = random_input(6, 128, 16, 1, device=device).x
    weights, ids = route(LOGITS.to(device), Router(4))
    assert compare(packed, layer, Routed(x, weights, ids)).passed
    with pytest.raises(KernelArgumentError):
        fused_moe(x, packed, ids, weights)

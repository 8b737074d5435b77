from __future__ import annotations

import math

import pytest
import torch

from moeq.reference.routing import RoutingRule, known_scoring, route


def test_softmax_top_k_renormalised() -> None:
    logits = torch.log(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    routed = route(logits, RoutingRule(top_k=2))
    assert routed.ids.tolist() == [[3, 2]]
    assert routed.weights[0].tolist() == pytest.approx([4 / 7, 3 / 7])


def test_softmax_without_renormalisation_and_scaled() -> None:
    logits = torch.log(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    routed = route(logits, RoutingRule(top_k=2, renormalize=False, scaling_factor=2.0))
    assert routed.weights[0].tolist() == pytest.approx([0.8, 0.6])


def test_the_correction_bias_chooses_but_does_not_weigh() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    bias = torch.tensor([0.0, 0.0, 10.0])
    routed = route(logits, RoutingRule(top_k=1, scoring="sigmoid", renormalize=False), bias)
    assert routed.ids.tolist() == [[2]]
    assert routed.weights[0].tolist() == pytest.approx([0.5])


@pytest.mark.parametrize(("group_score", "expected"), [("max", {4, 5}), ("top2", {0, 1})])
def test_groups_are_ranked_by_their_best_or_best_two(group_score: str, expected: set[int]) -> None:
    scores = torch.tensor([[0.6, 0.55, 0.1, 0.1, 0.7, 0.2, 0.1, 0.1]])
    logits = torch.logit(scores)
    rule = RoutingRule(top_k=2, scoring="sigmoid", num_groups=2, topk_groups=1, group_score=group_score)  # type: ignore[arg-type]
    assert set(route(logits, rule).ids[0].tolist()) == expected


def test_the_third_best_of_a_group_does_not_count() -> None:
    logits = torch.logit(torch.tensor([[0.6, 0.55, 0.01, 0.01, 0.62, 0.5, 0.3, 0.3]]))
    rule = RoutingRule(top_k=2, scoring="sigmoid", num_groups=2, group_score="top2")  # by default one group is kept
    assert set(route(logits, rule).ids[0].tolist()) == {0, 1}
    assert set(route(logits, RoutingRule(top_k=2, scoring="sigmoid")).ids[0].tolist()) == {4, 0}


def test_sqrtsoftplus() -> None:
    routed = route(torch.tensor([[1.0, 3.0]]), RoutingRule(top_k=1, scoring="sqrtsoftplus", renormalize=False))
    assert routed.weights.item() == pytest.approx(math.sqrt(math.log1p(math.exp(3.0))))


def test_a_scoring_that_is_not_known_is_run_as_softmax() -> None:
    names = ("softmax", "sigmoid", "sqrtsoftplus", "another")
    assert [known_scoring(name) for name in names] == ["softmax", "sigmoid", "sqrtsoftplus", "softmax"]


@pytest.mark.parametrize(
    ("scoring", "renormalize", "weights"),
    [
        ("topk-softmax", False, [4 / 7, 3 / 7]),
        ("topk-softmax", True, [4 / 7, 3 / 7]),
        ("topk-sigmoid", False, [4 / 5, 3 / 4]),
        ("topk-sigmoid", True, [16 / 31, 15 / 31]),
    ],
)
def test_scores_of_the_chosen_alone(scoring: str, renormalize: bool, weights: list[float]) -> None:
    rule = RoutingRule(top_k=2, scoring=scoring, renormalize=renormalize)  # type: ignore[arg-type]
    routed = route(torch.log(torch.tensor([[1.0, 2.0, 3.0, 4.0]])), rule)
    assert routed.ids.tolist() == [[3, 2]]
    assert routed.weights[0].tolist() == pytest.approx(weights)
    assert known_scoring(scoring) == scoring
    assert RoutingRule(2) == RoutingRule(2, "softmax", True, 1.0, 1, 1, "max")


def test_several_groups_are_kept() -> None:
    logits = torch.logit(torch.tensor([[0.6, 0.1, 0.5, 0.4, 0.3, 0.2]]))
    rule = RoutingRule(top_k=3, scoring="sigmoid", num_groups=3, topk_groups=2)
    assert route(logits, rule).ids.tolist() == [[0, 2, 3]]
    assert route(logits, RoutingRule(3, "sigmoid", num_groups=3, topk_groups=1)).ids[0, :2].tolist() == [0, 1]

from __future__ import annotations

import pytest
import torch

from moeq.reference.moe import Activation, Biases, activate, moe


def by_hand(x, gate, up, down, weights, ids):
    """One token at a time, one expert at a time, in float64."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for m in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            e = int(ids[m, slot])
            g, u = gate[e].double() @ x[m].double(), up[e].double() @ x[m].double()
            y[m] += float(weights[m, slot]) * (down[e].double() @ (g / (1 + torch.exp(-g)) * u))
    return y


def test_against_a_loop_over_tokens() -> None:
    torch.manual_seed(0)
    experts, hidden, inter, tokens = 4, 8, 6, 5
    gate, up = torch.randn(experts, inter, hidden), torch.randn(experts, inter, hidden)
    down = torch.randn(experts, hidden, inter)
    x, weights = torch.randn(tokens, hidden), torch.rand(tokens, 2)
    ids = torch.tensor([[0, 1], [1, 0], [3, 0], [0, 3], [3, 1]])  # expert 2 gets no token
    matrices = {"gate": gate, "up": up, "down": down}
    result = moe(x, lambda e, name: matrices[name][e], weights, ids)
    torch.testing.assert_close(result.y.double(), by_hand(x, gate, up, down, weights, ids), rtol=1e-5, atol=1e-5)
    assert [trace.expert for trace in result.traces] == [0, 1, 3]
    assert sum(len(trace.tokens) for trace in result.traces) == tokens * 2


def test_biases_are_added_before_the_activation() -> None:
    x = torch.zeros(1, 2)
    weights = {"gate": torch.zeros(1, 2), "up": torch.zeros(1, 2), "down": torch.ones(2, 1)}
    biases = {"gate": torch.tensor([2.0]), "up": torch.tensor([3.0]), "down": torch.tensor([0.5, 0.25])}
    result = moe(
        x, lambda e, name: weights[name], torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64),
        biases=Biases(lambda e, name: biases[name]),
    )  # fmt: skip
    silu = 2.0 / (1 + torch.exp(torch.tensor(-2.0))).item()
    assert result.y[0].tolist() == pytest.approx([silu * 3 + 0.5, silu * 3 + 0.25])


def test_swigluoai_clamps_and_shifts() -> None:
    gate, up = torch.tensor([[9.0, -9.0, 1.0]]), torch.tensor([[9.0, -9.0, 0.5]])
    got = activate(gate, up, Activation("swigluoai"))
    g, u = torch.tensor([[7.0, -9.0, 1.0]]), torch.tensor([[7.0, -7.0, 0.5]])
    torch.testing.assert_close(got, g * torch.sigmoid(1.702 * g) * (u + 1))


def test_experts_without_a_gate() -> None:
    x = torch.tensor([[1.0, -1.0]])
    weights = {"up": torch.tensor([[2.0, 0.0], [0.0, 2.0]]), "down": torch.eye(2)}
    result = moe(
        x, lambda e, name: weights[name], torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64),
        activation=Activation("relu2"), gated=False,
    )  # fmt: skip
    assert result.y.tolist() == [[4.0, 0.0]]

from __future__ import annotations

import math

import pytest
import torch

from moeq.reference.moe import Activation, Expert, Linear, activate, moe, run_expert


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
    asked = []

    def expert(e: int) -> Expert:
        asked.append(e)
        return Expert(Linear(gate[e]), Linear(up[e]), Linear(down[e]))

    y = moe(x, expert, weights, ids)
    torch.testing.assert_close(y.double(), by_hand(x, gate, up, down, weights, ids), rtol=1e-5, atol=1e-5)
    assert asked == [0, 1, 3]


def test_biases_are_added_before_the_activation() -> None:
    expert = Expert(
        Linear(torch.zeros(1, 2), torch.tensor([2.0])),
        Linear(torch.zeros(1, 2), torch.tensor([3.0])),
        Linear(torch.ones(2, 1), torch.tensor([0.5, 0.25])),
    )
    trace = run_expert(torch.zeros(1, 2), expert, Activation())
    silu = 2.0 / (1 + torch.exp(torch.tensor(-2.0))).item()
    assert trace.down[0].tolist() == pytest.approx([silu * 3 + 0.5, silu * 3 + 0.25])


def test_swigluoai_clamps_and_shifts() -> None:
    gate, up = torch.tensor([[9.0, -9.0, 1.0]]), torch.tensor([[9.0, -9.0, 0.5]])
    got = activate(gate, up, Activation("swigluoai", limit=7.0))
    g, u = torch.tensor([[7.0, -9.0, 1.0]]), torch.tensor([[7.0, -7.0, 0.5]])
    torch.testing.assert_close(got, g * torch.sigmoid(1.702 * g) * (u + 1))


def test_other_activations() -> None:
    """Numbers from the definitions, with Python's own functions."""
    gate, up = torch.tensor([[2.0, -1.5]]), torch.tensor([[5.0, -0.5]])
    sigmoid = [1 / (1 + math.exp(-value)) for value in (2.0, -1.5)]
    tanh = [math.tanh(math.sqrt(2 / math.pi) * (value + 0.044715 * value**3)) for value in (2.0, -1.5)]
    wanted = {
        ("silu", None): [2 * sigmoid[0] * 5, -1.5 * sigmoid[1] * -0.5],
        ("silu", 1.0): [1 / (1 + math.exp(-1)), -1.5 * sigmoid[1] * -0.5],
        ("gelu", None): [(1 + math.erf(2**0.5)) * 5, 0.75 * (1 - math.erf(1.5 / 2**0.5)) * 0.5],
        ("gelu_tanh", None): [(1 + tanh[0]) * 5, 0.75 * (1 + tanh[1]) * 0.5],
        ("swiglustep", 1.0): [1.0, -1.5 * sigmoid[1] * -0.5],
        ("situ", None): [1.5 * math.tanh(2 / 1.5) * sigmoid[0] * 5, 1.5 * math.tanh(-1) * sigmoid[1] * -0.5],
        ("situ", 4.0): [
            1.5 * math.tanh(2 / 1.5) * sigmoid[0] * 4 * math.tanh(5 / 4),
            1.5 * math.tanh(-1) * sigmoid[1] * 4 * math.tanh(-0.5 / 4),
        ],
    }
    for (name, limit), values in wanted.items():
        assert activate(gate, up, Activation(name, 1.5, limit))[0].tolist() == pytest.approx(values, rel=1e-5), name
    with pytest.raises(ValueError, match="situ needs gate and up"):
        activate(None, up, Activation("situ"))


def test_experts_without_a_gate() -> None:
    expert = Expert(None, Linear(torch.tensor([[2.0, 0.0], [0.0, 2.0]])), Linear(torch.eye(2)))
    trace = run_expert(torch.tensor([[1.0, -1.0]]), expert, Activation("relu2"))
    assert trace.down.tolist() == [[4.0, 0.0]]
    assert trace.gate is None


def test_a_dtype_rounds_weights_and_the_hidden_values() -> None:
    value = 1 + 2.0**-10  # bf16 has 8 bits of mantissa
    one = Expert(None, Linear(torch.tensor([[value]])), Linear(torch.tensor([[1.0]])))
    exact = run_expert(torch.tensor([[1.0]]), one, Activation("relu2"))
    plain = run_expert(torch.tensor([[1.0]]), one, Activation("relu2"), torch.bfloat16)
    assert exact.up.item() == value
    assert plain.up.item() == 1.0
    assert one.down(torch.tensor([[value]]), torch.bfloat16).item() == 1.0
    assert exact.hidden.item() == pytest.approx(value**2)
    inexact = run_expert(
        torch.tensor([[1.0]]),
        Expert(None, Linear(torch.tensor([[1.0078125]])), one.down),
        Activation("relu2"),
        torch.bfloat16,
    )
    assert inexact.hidden.item() == torch.tensor(1.0078125**2).bfloat16().item()

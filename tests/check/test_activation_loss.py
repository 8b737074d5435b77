"""What e4m3 rows cost a layer, computed here by hand; and parts of a layer's check that only such rows reach."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeq.check import layer_check
from moeq.check.activation_loss import LIMIT, RULE, ActivationLoss
from moeq.check.comparison import FP8_LAYER_RULE, INT8_LAYER_RULE, LAYER_RULE, NORM_RULE
from moeq.check.inputs import Inputs
from moeq.check.layer_check import LayerCheck, _groups, _suspects, emulated_input
from moeq.check.results import Run, Sample
from moeq.check.run_check import _derivation
from moeq.check.whole_layer import pass_16bit, pass_fp8, pass_int8
from moeq.errors import MoeqError
from moeq.reference.arithmetic import describe_bound, emulate_fp8, emulate_int8, quantize_rows, quantize_rows_e4m3
from moeq.reference.moe import Activation, Expert, Linear, activate, rounded

GENERATOR = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


def through(x: torch.Tensor, group: int) -> torch.Tensor:
    codes, scale = quantize_rows_e4m3(x, group)
    return codes.double() * scale.double().repeat_interleave(group, 1)[:, : x.shape[1]]


@pytest.mark.parametrize("gated", [True, False])
def test_the_loss_is_that_of_quantised_rows(gated: bool) -> None:
    x = drawn(3, 32).bfloat16()
    ids, weights = torch.tensor([[0, 1], [1, 0], [1, 2]]), drawn(3, 2)
    inputs = Inputs(x, weights, ids, ((Run(3), slice(0, 3)),))
    experts = [
        Expert(Linear(drawn(16, 32)) if gated else None, Linear(drawn(16, 32)), Linear(drawn(8, 16))) for _ in "12"
    ]
    loss = ActivationLoss(inputs, 8, torch.bfloat16, (16, 8))
    total = torch.zeros(2, 3, 8, dtype=torch.float64)
    alone = []

    def combine(gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
        return activate(gate, up, Activation("gelu"))

    for number, expert in enumerate(experts):
        tokens, slots = torch.where(ids == number)
        loss.add(number + 5, expert, combine, tokens, slots)

        def first(rows: torch.Tensor, expert: Expert = expert) -> torch.Tensor:
            return combine(expert.gate.exact(rows) if expert.gate else None, expert.up.exact(rows))

        exact = expert.down.exact(first(x[tokens].double()))
        hidden = rounded(first(through(x[tokens], 16)), torch.bfloat16)
        found = expert.down.exact(through(hidden, 8))
        for side, one in enumerate((exact, found)):
            total[side].index_add_(0, tokens, one * weights[tokens, slots].double()[:, None])
        alone.append((exact, found, tokens))
    result = loss.result(4, 32)
    assert (result.layer, result.name, result.k, result.tolerance) == (4, "e4m3 loss", 32, LIMIT)
    assert result.arithmetic == "e4m3 rows against unquantised ones"
    assert result.relative == pytest.approx(float((total[1] - total[0]).norm() / total[0].norm()))
    assert 0.01 < result.relative < LIMIT
    worst = int((total[1] - total[0]).abs().argmax())
    assert result.worst_element == (worst // 8, worst % 8)
    for one, (exact, found, tokens), number in zip(result.experts, alone, (5, 6), strict=True):
        error = (found - exact).abs()
        place = int(error.argmax())
        assert (one.expert, one.rows) == (number, len(tokens))
        assert one.relative == pytest.approx(float(error.norm() / exact.norm()))
        assert one.element == (int(tokens[place // 8]), place % 8)
        assert (one.tolerance, one.exceedance) == (2 * LIMIT, pytest.approx(one.relative / (2 * LIMIT)))


def check(**more: Any) -> Any:
    matrix = SimpleNamespace(spec=SimpleNamespace(k=32, group_size=16, gated=True, n=16))
    entry = SimpleNamespace(layer=7, matrices={"w13": matrix, "w2": matrix})
    fields: dict[str, Any] = {
        "converted": None, "reference": None, "entry": entry, "sample": Sample(7, (4, 6, 9), (), 2, False),
        "device": torch.device("cpu"), "dtype": torch.bfloat16, "seed": 0, "activation": Activation(),
    }  # fmt: skip
    return LayerCheck(**fields | more)


def test_features_that_share_a_scale_in_e4m3() -> None:
    matrices = {
        role: SimpleNamespace(spec=SimpleNamespace(k=k, group_size=group, element="e4m3", gated=True, n=16))
        for role, k, group in (("w13", 64, 32), ("w2", 48, 16))
    }
    entry = SimpleNamespace(layer=7, layout="marlin-fp8/1", matrices=matrices)
    assert check(entry=entry).e4m3_groups() == (64, 48)
    quantised = check(entry=entry, activation_dtype="fp8")
    assert quantised.e4m3_groups() == (32, 16)
    assert (quantised.activations("up"), check(entry=entry).activations("down")) == ("fp8", "")
    assert quantised.widths == {"gate": 8, "up": 8, "down": 16}
    matrices["w13"].spec.gated = False
    assert quantised.widths == {"up": 16, "down": 16}


def test_products_are_emulated_as_kernels_compute_them() -> None:
    x, linear = drawn(3, 32), Linear(drawn(8, 32))
    for kind, wanted in (("fp8", emulate_fp8(x, linear, 16, tensor_cores=False)), ("int8", emulate_int8(x, linear))):
        found = check().emulate("up", x, linear, kind)
        assert [one.title for one in found] == [one.title for one in wanted]
        assert all(torch.equal(one.value, other.value) for one, other in zip(found, wanted, strict=True))
    kinds = {}
    for layout, element, asked in (
        ("int8-w8a8/1", "int8", ""),
        ("marlin-fp8/1", "e4m3", "fp8"),
        ("marlin-wna16/1", "int4", ""),
    ):
        spec = SimpleNamespace(element=element, group_size=16)
        entry = SimpleNamespace(layout=layout, matrices={"w13": SimpleNamespace(spec=spec)})
        own = check(entry=entry, activation_dtype=asked)  # without a kind: the kernels' own
        kinds[layout] = [one.title for one in own.emulate("up", x, linear)]
        assert kinds[layout] == [one.title for one in own.emulate("up", x, linear, own.activations("up"))]
        assert [one.title for one in own.emulate("up", x, linear, "")] == [
            "weights rounded to bfloat16", "weights not rounded",
        ]  # fmt: skip
    assert kinds == {
        "int8-w8a8/1": ["int8 activations, exact integer sums"],
        "marlin-fp8/1": ["e4m3 activations"],
        "marlin-wna16/1": ["weights rounded to bfloat16", "weights not rounded"],
    }
    assert torch.equal(emulated_input(x, "", 16), x)
    codes, scale = quantize_rows(x)
    assert torch.equal(emulated_input(x, "int8", 16), codes * scale)
    torch.testing.assert_close(emulated_input(x[:, :24], "fp8", 16).double(), through(x[:, :24], 16))


def test_passages_by_the_kind_of_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    for through_layer in (pass_fp8, pass_int8, pass_16bit):
        name = through_layer.__name__
        monkeypatch.setattr(layer_check, name, lambda *given, name=name, **more: told.append((name, len(given), more)))
    for kind in ("fp8", "int8", ""):
        layer_check.passage(check(), kind, drawn(1, 1), None, {})  # type: ignore[arg-type]
    assert told == [
        ("pass_fp8", 5, {"group": 16, "tensor_cores": False}), ("pass_int8", 5, {}), ("pass_16bit", 5, {}),
    ]  # fmt: skip


def test_a_fused_layer_is_timed_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(layer_check, "time_runs", lambda *given: told.append(given) or ("a time",))
    on_gpu = check(device=torch.device("cuda"))
    assert layer_check._timings(on_gpu, ["part"], "inputs") == ("a time",)  # type: ignore[arg-type, list-item]
    assert told == [(["part"], "inputs", Activation(), 7)]
    for other in (check(), check(device=torch.device("cuda"), fused=False)):
        assert layer_check._timings(other, [], "inputs") == ()  # type: ignore[arg-type]
    assert len(told) == 1


def runs_of_tokens(*counts: int) -> Inputs:
    stops = list(itertools.accumulate(counts))
    runs = tuple((Run(count), slice(stop - count, stop)) for count, stop in zip(counts, stops, strict=True))
    total, generator = stops[-1], torch.Generator().manual_seed(0)
    ids = torch.randint(3, (total, 2), generator=generator)
    return Inputs(torch.randn(total, 32, generator=generator).bfloat16(), torch.ones(total, 2), ids, runs)


@pytest.mark.parametrize(("device", "repeated"), [("cpu", 1), ("cuda", 3)])
def test_runs_that_are_repeated(device: str, repeated: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU repeats every run, Triton's interpreter the first one, whose second call differs here in one bit."""
    calls: list[int] = []

    def fused(packed: Any, x: torch.Tensor, weights: Any, ids: Any, activation: Any) -> torch.Tensor:
        calls.append(len(x))
        return torch.full((len(x), 20), 1.0 if len(calls) == 2 else 1.0078125).bfloat16()

    monkeypatch.setattr(layer_check, "fused_layer", fused)
    labels: list[str] = []
    asked = check(device=torch.device(device))
    output, unequal, count = layer_check._run_fused(asked, [], runs_of_tokens(1, 4, 3), labels.append)
    assert (output.shape, unequal, count) == ((8, 16), ("1 token",), repeated)
    assert calls == ([1, 1, 4, 4, 3, 3] if device == "cuda" else [1, 1, 4, 3])
    assert labels == ["layer 7, 1 token", "layer 7, 4 tokens", "layer 7, 3 tokens"]


@pytest.mark.parametrize(("device", "launches"), [("cpu", [8]), ("cuda", [1, 4, 3])])
def test_products_run_by_run_or_at_once(device: str, launches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch costs most in the interpreter; numbers that are none become 0 before they go into down."""
    calls: list[tuple[int, int]] = []

    def first(packed: Any, x: torch.Tensor, ids: torch.Tensor, width: int) -> dict[str, torch.Tensor]:
        pairs = x.float().repeat_interleave(ids.shape[1], dim=0)[:, :width]
        return {"gate": pairs, "up": pairs.masked_fill(pairs > 1, float("inf"))}

    def down(packed: Any, hidden: torch.Tensor, ids: torch.Tensor, width: int) -> torch.Tensor:
        calls.append((len(hidden), len(ids)))
        return hidden.float() * 2

    monkeypatch.setattr(layer_check, "first_products", first)
    monkeypatch.setattr(layer_check, "down_products", down)
    asked, inputs = check(device=torch.device(device)), runs_of_tokens(1, 4, 3)
    found = layer_check._run_products(asked, [], inputs)
    assert calls == [(2 * tokens, tokens) for tokens in launches]
    gate = inputs.x.float().repeat_interleave(2, dim=0)[:, :8]
    hidden = (torch.nn.functional.silu(gate) * gate).masked_fill(gate > 1, 0.0).bfloat16()
    assert torch.equal(found.hidden, hidden)
    assert torch.equal(found.actual["down"], 2 * hidden.float())
    assert torch.equal(found.actual["gate"], gate)
    assert sorted(found.actual) == ["down", "gate", "up"]


@pytest.mark.parametrize("gated", [True, False])
def test_every_product_of_an_expert_is_compared_for_its_pairs(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a gate there are two; down starts from the kernels' own hidden rows."""
    names = ("gate", "up", "down") if gated else ("up", "down")
    added: dict[str, tuple[Any, ...]] = {}

    class Comparison:
        def __init__(self, name: str) -> None:
            self.name = name

        def add(self, *given: Any) -> None:
            added[self.name] = given

    monkeypatch.setattr(LayerCheck, "emulate", lambda self, name, rows, linear: (name, rows, linear))
    inputs, linears = runs_of_tokens(3), {name: Linear(drawn(8, 8)) for name in names}
    actual = {name: drawn(6, 8) for name in names}
    products = layer_check.Products(actual, drawn(6, 8).bfloat16())  # type: ignore[arg-type]
    expert = Expert(linears.get("gate"), linears["up"], linears["down"])
    tokens, slots, pairs = torch.tensor([0, 2]), torch.tensor([1, 0]), [1, 4]
    place, comparisons = (inputs, tokens, slots), {name: Comparison(name) for name in names}
    first = layer_check._compare_expert(check(), comparisons, products, expert, place, 9)  # type: ignore[arg-type]
    assert tuple(added) == names
    assert tuple(first) == names[:-1]
    for name, (number, found, (asked, rows, linear), where) in added.items():
        assert (number, asked, where.tolist()) == (9, name, pairs)
        assert linear is linears[name]
        assert torch.equal(found, actual[name][pairs])
        assert torch.equal(rows, products.hidden[pairs].float() if name == "down" else inputs.x[[0, 2]].float())


def test_what_a_failing_expert_is_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other projection first, then those of the other experts; `down` has only its own kind."""
    monkeypatch.setattr(LayerCheck, "linear", lambda self, expert, name: (expert, name))
    monkeypatch.setattr(LayerCheck, "emulate", lambda self, name, rows, linear: (name, rows.shape[1], linear))

    def suspects(name: Any) -> list[tuple[str, Any]]:
        return [*_suspects(check(), 6, name, drawn(1, 32))]

    assert [title for title, _ in suspects("up")] == [
        "expert 6 gate", "expert 4 gate", "expert 4 up", "expert 9 gate", "expert 9 up",
    ]  # fmt: skip
    assert suspects("down") == [(f"expert {other} down", ("down", 32, (other, "down"))) for other in (4, 9)]
    monkeypatch.setattr(layer_check, "MAX_SUSPECTS", 2)
    assert [title for title, _ in suspects("gate")] == ["expert 6 up", "expert 4 gate"]


def test_groups_of_input_features() -> None:
    spec = SimpleNamespace(k=6, group_size=4)
    for index, wanted in ((None, [0, 0, 0, 0, 1, 1]), (torch.tensor([1, 0, 1]), [1, 0, 1])):
        asked: list[Any] = []
        matrix = SimpleNamespace(spec=spec, group_index=index)
        reference = SimpleNamespace(matrix=lambda *given, asked=asked, matrix=matrix: asked.append(given) or matrix)
        assert _groups(check(reference=reference), 4, "up").tolist() == wanted
        assert asked == [(7, 4, "up")]


@pytest.mark.parametrize(("parts", "group", "refused"), [(2, 48, True), (1, 48, False), (2, 16, False)])
def test_ranks_that_quantise_their_own_share_of_a_row(parts, group, refused, monkeypatch) -> None:
    """Two ranks would find other scales of a row of down than one: its whole row shares one."""
    spec = {"gated": True, "n": 16, "element": "e4m3"}
    matrices = {
        "w13": SimpleNamespace(spec=SimpleNamespace(k=64, group_size=32, **spec)),
        "w2": SimpleNamespace(spec=SimpleNamespace(k=48, group_size=group, **spec)),
    }
    entry = SimpleNamespace(layer=7, layout="marlin-fp8/1", matrices=matrices)
    monkeypatch.setattr(layer_check, "make_inputs", lambda *given: runs_of_tokens(1))
    monkeypatch.setattr(layer_check, "load_packed", lambda *given: [None] * parts)
    with pytest.raises(MoeqError if refused else AttributeError) as caught:  # None has nothing to quantise
        layer_check.check_layer(check(entry=entry, activation_dtype="fp8"), lambda label: None)
    if refused:
        assert (caught.value.code, caught.value.hint) == ("answer.no-kernel", "check a conversion for one rank")


def test_rules_are_told_by_the_kind_of_activations() -> None:
    def rules(**more: Any) -> tuple[str, ...]:
        spec = {"k": 32, "group_size": 16, "gated": True, "n": 16, "element": more.pop("element")}
        matrix = SimpleNamespace(spec=SimpleNamespace(**spec))
        entry = SimpleNamespace(layer=7, layout=more.pop("layout"), matrices={"w13": matrix, "w2": matrix})
        return _derivation([check(entry=entry, **more)])

    plain = rules(layout="marlin-wna16/1", element="int4")
    assert (plain[0], plain[-1]) == (NORM_RULE, LAYER_RULE)
    assert plain[1:-1] == (f"gate, up, down: {describe_bound(32)}",)
    assert rules(layout="int8-w8a8/1", element="int8")[-1] == INT8_LAYER_RULE
    assert rules(layout="marlin-fp8/1", element="e4m3", activation_dtype="fp8")[-2:] == (FP8_LAYER_RULE, RULE)
    assert rules(layout="marlin-fp8/1", element="e4m3")[-1] == LAYER_RULE
    assert _derivation([]) == ()

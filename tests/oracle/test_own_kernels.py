"""Verdicts on moeq's own kernels: names, rules at their edges, and what is said where none runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from oracle.asking import ask, candidate, gpu
from oracle.examples import SHAPE, every_scheme, scheme

from moeq.oracle.engines.moeq import builtin_policy, is_fastest, report_of_layout
from moeq.oracle.records import Verdict

SCHEMES = {name: one for name, (one, _) in every_scheme().items()}


def own(one: Any = None, name: str = "H100", shape: Any = SHAPE, **fields: Any) -> Verdict:
    return ask(one or scheme("gptq"), gpu(name, engine="moeq", **fields), shape)


def reasons(verdict: Verdict, code: str) -> set[tuple[str, str | None]]:
    return {(why.text, why.remedy) for row in verdict.candidates for why in row.reasons if why.code == code}


def test_names_of_backends() -> None:
    plain = own()
    assert plain.selected is not None
    assert (plain.selected.backend, plain.candidates[0].backend) == ("MARLIN", "MOEQ")
    assert [row.flag for row in plain.candidates] == [row.backend.lower() for row in plain.candidates]
    names = sorted(row.backend.lower() for row in plain.candidates)
    asked = own(backend="nobody")
    assert asked.error is not None
    assert (asked.error.error, asked.error.kind) == ("MoeqError", "OVERRIDE_UNKNOWN")
    assert asked.error.text == f"'nobody' names no kernel of moeq; known: {', '.join(names)}"
    works = ", ".join(row.backend.lower() for row in plain.candidates if row.supported)
    assert asked.error.hint == f"works here: {works}"
    assert own(backend="marlin").selected == plain.selected
    assert len({row.backend for row in plain.candidates}) == len(plain.candidates)


def test_a_backend_that_does_not_run_it() -> None:
    refused = next(row.backend.lower() for row in own().candidates if not row.supported)
    found = own(backend=refused)
    assert found.error is not None
    assert found.error.kind == "OVERRIDE_UNSUPPORTED"
    assert found.error.text.startswith(f"no kernel of moeq runs this: {refused.upper()}: ")
    assert "; " not in found.error.text.replace(", ", "")
    nothing = own(name="V100", dtype="fp16")
    assert nothing.error is not None
    assert (nothing.error.kind, nothing.error.hint) == ("NO_BACKEND", None)
    assert (nothing.sizes, nothing.convert, nothing.runs_as, nothing.gates) == (None, None, None, ())
    assert nothing.transient_bytes is None
    fewest = min(len(row.reasons) for row in nothing.candidates)
    for row in nothing.candidates:
        assert (f"{row.backend}: " in nothing.error.text) is (len(row.reasons) == fewest)


def test_devices() -> None:
    for name, fits in (("A100", True), ("V100", False), ("T4", False), ("MI300X", True), ("MI250X", False)):
        found = own(name=name, dtype="bf16" if fits else "fp16")
        wanted = " or ".join(term.text for term in builtin_policy().devices)
        assert (not reasons(found, "K01_DEVICE")) is fits
        assert fits or {remedy for _, remedy in reasons(found, "K01_DEVICE")} == {f"a device of kind {wanted}"}
    assert own(name="CPU").notes == ("on a CPU the kernels run in Triton's interpreter: for checks, not for serving",)
    assert own().notes == ()


def test_words_of_single_rules() -> None:
    texts = {text for text, _ in reasons(own(scheme("gptq", group=48)), "K04_GROUP")}
    assert "group size 48 is not one of 32, 64, 128, channel" in texts
    row = report_of_layout(scheme("gptq"), SHAPE, gpu("H100", engine="moeq"), "marlin-act-order/1")
    assert row is not None
    assert [why.text for why in row.reasons] == ["only for checkpoints with act-order"]
    ordered = own(scheme("gptq", act_order=True), tp=2)
    assert ("act-order with tp 2: any row may use any group", "ep 2") in reasons(ordered, "K07_ACT_ORDER")
    assert not any("tp 1" in text for text, _ in reasons(own(scheme("gptq", act_order=True)), "K07_ACT_ORDER"))
    assert own(scheme("gptq", act_order=True), tp=2, ep=2).ok
    unknown = own(shape=replace(SHAPE, activation="nobody's"))
    assert any(text.startswith("activation nobody's is not one of ") for text, _ in reasons(unknown, "K09_ACTIVATION"))
    w8a8 = own(SCHEMES["ct int8 w8a8"])
    assert (w8a8.runs_as, w8a8.activation_key) == ("W8A8", "int8")
    assert ("the checkpoint asks for int8 activations, this kernel runs 16-bit", None) in reasons(
        w8a8, "K08_ACTIVATION_TYPE"
    )
    row = report_of_layout(scheme("gptq", "int8"), SHAPE, gpu("H100", engine="moeq"), "int8-w8a8/1")
    assert row is not None
    assert "the checkpoint asks for 16-bit activations, this kernel runs int8" in [why.text for why in row.reasons]
    assert (own().runs_as, own().activation_key, own().transient_bytes) == ("W4A16", None, 0)


@pytest.mark.parametrize(
    ("fields", "experts", "said"),
    [
        ({"tp": 7}, 128, {("intermediate size 768 does not divide by tp 7", "another tp")}),
        ({"tp": 3}, 128, set()),
        ({"ep": 128}, 128, set()),
        ({"ep": 129}, 128, {("ep 129 is more than 128 experts", "a smaller ep")}),
        ({"redundant_experts": 2}, 128, {
            ("2 redundant experts need expert load balancing, which is off", "eplb=True, or no redundant experts")}),
        ({"eplb": True}, 128, {(
            "expert load balancing needs expert parallelism over more than one rank",
            "ep above 1, or no expert load balancing")}),
        ({"eplb": True, "ep": 2}, 128, set()),
        ({"eplb": True, "ep": 5, "redundant_experts": 1}, 128, {(
            "load balancing spreads experts evenly: 129 do not divide by ep 5", "2 redundant experts")}),
        ({"eplb": True, "ep": 5, "redundant_experts": 2}, 128, set()),
    ],
)  # fmt: skip
def test_divisions(fields: dict[str, Any], experts: int, said: set[tuple[str, str]]) -> None:
    assert reasons(own(shape=replace(SHAPE, num_experts=experts), **fields), "K12_DIVISION") == said


@pytest.mark.parametrize(
    ("tp", "remedy"),
    [(4, "tp 2 (384 per rank) or ep 4"), (8, "tp 2 (384 per rank) or ep 8"), (16, "tp 2 (384 per rank) or ep 16")],
)
def test_the_nearest_ranks_that_cut_no_group(tp: int, remedy: str) -> None:
    assert {remedy for _, remedy in reasons(own(tp=tp), "K05_GROUP_CUT")} == {remedy}
    odd = own(scheme("gptq", group=128), tp=3, shape=replace(SHAPE, intermediate_size=192))
    assert {remedy for _, remedy in reasons(odd, "K05_GROUP_CUT")} == {None}


def test_sizes() -> None:
    found = own(ep=4, shape=replace(SHAPE, num_experts=130, hidden_size=2080, intermediate_size=800))
    sizes = found.sizes
    assert sizes is None or sizes.local_experts == 33
    plain = own(tp=2)
    assert plain.sizes is not None
    assert (plain.sizes.hidden, plain.sizes.intermediate, plain.sizes.local_experts) == (2048, 384, 128)
    assert plain.gates[0].text == plain.sizes.text


def test_which_kernels_are_the_fastest() -> None:
    h100, layout = gpu("H100"), own().selected.layout or ""  # type: ignore[union-attr]
    assert is_fastest(scheme("gptq"), h100, layout)
    assert is_fastest(scheme("gptq", "int8"), h100, layout) is is_fastest(scheme("gptq", "int8"), gpu("H200"), layout)
    for one, where, kind in (
        (scheme("gptq"), gpu("A100"), layout), (scheme("gptq"), gpu("B200"), layout),
        (scheme("gptq"), h100, "nobody/1"),
        (scheme("gptq", "int3"), h100, layout), (scheme("gptq", "int2"), h100, layout),
        (scheme("gptq", activation="int8"), h100, layout), (scheme("gptq"), gpu("MI300X"), layout),
    ):  # fmt: skip
        assert not is_fastest(one, where, kind)


def test_the_closest_kernel_of_a_layout() -> None:
    layout = own().selected.layout or ""  # type: ignore[union-attr]
    where = gpu("H100", engine="moeq")
    found = report_of_layout(scheme("gptq"), SHAPE, where, layout)
    assert found == candidate(own(), "MARLIN")
    other = report_of_layout(scheme("gptq", "int8"), SHAPE, where, layout)
    assert other is not None
    assert other.supported == (own(scheme("gptq", "int8")).selected is not None)


def test_scales_of_kernels_are_listed_with_f16_first() -> None:
    rows = [row for row in builtin_policy().kernels if not row.keeps_16_bit and len(row.scales) > 1]
    assert rows
    assert {row.scales[0] for row in rows if "f16" in row.scales} == {"f16"}

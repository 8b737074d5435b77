"""What is answered for whole checkpoints: refusals with their hints, and what an answer says of its layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.layouts.registry import layout_class
from moeq.oracle.loaders import Loader
from moeq.pipeline.plan.candidates import LayoutChoice
from moeq.pipeline.plan.decide import (
    _given_up,
    _part,
    _preference,
    answer,
    convertible_problem,
    refusal,
    without_loss,
)
from moeq.pipeline.plan.layer_verdict import judge_checkpoint
from moeq.pipeline.plan.options import ConvertOptions, Question
from moeq.schemes.registry import get_format

A100 = Deployment(gpu=parse_gpu("A100"))
NAME = "gptq-int4-g32-qwen3moe"
SKIP = "skip_unfit=True copies it unchanged"


def error(number: int, hint: str | None = "h") -> MoeqError:
    return MoeqError(f"usage.c{number}", f"m{number}", hint)


@pytest.mark.parametrize(
    ("count", "skip", "some_fit", "expected"),
    [
        (1, False, False, ("usage.c1", "m1", "h")),
        (1, False, True, ("usage.c1", "m1", f"h; {SKIP}")),
        (2, False, True, ("usage.c1", "m1 (and 1 more layers)", f"h; {SKIP}")),
        (3, False, True, ("usage.c1", "m1 (and 2 more layers)", f"h; {SKIP}")),
        (3, False, False, ("usage.c1", "m1", "h")),
        (3, True, False, ("usage.c1", "m1", "h")),
        (3, True, True, None),
    ],
)
def test_the_first_refused_layer_is_told(
    count: int, skip: bool, some_fit: bool, expected: tuple[str, str, str] | None
) -> None:
    found = refusal({number: error(number) for number in range(1, count + 1)}, skip, some_fit=some_fit)
    assert (found and (found.code, found.message, found.hint)) == expected


def test_hints_of_refusals() -> None:
    bare = refusal({1: error(1, None)}, False, some_fit=True)
    assert bare is not None
    assert bare.hint == SKIP
    without = refusal({1: error(1, None)}, False, some_fit=False)
    assert without is not None
    assert without.hint is None
    said = refusal({1: error(1, "skip_unfit=True helps")}, False, some_fit=True)
    assert said is not None
    assert said.hint == "skip_unfit=True helps"


def test_an_answer_of_layers(checkpoints: Path) -> None:
    found = answer(moeq.open(checkpoints / NAME), Question(A100))
    assert found.ok
    assert (list(found.layouts), set(found.layouts.values())) == ([0, 1], {"marlin-wna16/1"})
    assert (found.backend, found.first.layout, found.overridden) == ("MARLIN", "marlin-wna16/1", ())
    assert found.rank_bytes == sum(choice.rank_bytes for choice in found.choices.values()) > 0
    assert [loader.name for loader in found.loaders][:1] == ["vllm"]
    no = found.refused(error(1))
    assert (no.ok, no.choices, no.error) == (False, {}, no.error)
    assert no.verdict.convert is None
    assert no.verdict.no_convert == "m1"
    assert [part.layers for part in no.parts] == [part.layers for part in found.parts]
    again = no.refused(error(2))
    assert again.verdict.no_convert == "m1", "a layer that is not converted keeps its reason"


def test_a_group_of_layers_has_a_choice_or_an_error(checkpoints: Path) -> None:
    checkpoint = moeq.open(checkpoints / NAME)
    verdict = judge_checkpoint(checkpoint, A100, 0)
    refused = _part([0, 1], verdict, error(1))
    assert (refused.layers, refused.choice) == ((0, 1), None)
    assert (refused.verdict.convert, refused.verdict.no_convert) == (None, "m1")
    assert refused.error is not None
    choice = answer(checkpoint, Question(A100)).first
    taken = _part([1], replace(verdict, no_convert="x"), choice)
    assert (taken.layers, taken.choice, taken.error, taken.verdict.no_convert) == ((1,), choice, None, None)
    target = taken.verdict.convert
    assert target is not None
    assert (target.backend, target.layout, target.sizes) == (choice.backend, choice.layout, choice.sizes)
    assert target.experts == next(row.experts for row in verdict.candidates if row.backend == "MARLIN")


def test_a_layout_that_no_loader_hands_over(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_class("marlin-wna16/1"), "is_read", classmethod(lambda cls: False))
    checkpoint = moeq.open(checkpoints / NAME)
    found = answer(checkpoint, Question(A100))
    assert found.error is not None
    assert (found.error.code, found.error.hint) == ("usage.layout-unread", "force_layout=True writes it anyway")
    assert found.error.message == (
        "MARLIN reads marlin-wna16/1, but no plug-in of moeq hands it these bytes and no kernel of moeq reads them"
    )
    assert answer(checkpoint, Question(A100, ConvertOptions(force_layout=True))).ok


def test_sources_that_are_never_converted(checkpoints: Path) -> None:
    assert convertible_problem(moeq.open(checkpoints / NAME)) is None
    made = moeq.open(checkpoints / NAME)
    made.info = replace(made.info, refusals=("its experts are odd",))
    found = convertible_problem(made)
    assert found is not None
    assert (found.code, found.message) == ("answer.not-convertible", f"{made.info.name}: its experts are odd")
    refused = answer(made, Question(A100))
    assert refused.error is not None
    assert refused.error.message == found.message
    made.info = replace(made.info, schemes=())
    nothing = convertible_problem(made)
    assert nothing is not None
    message = f"{made.info.name}: the experts are not quantised"
    assert (nothing.code, nothing.message) == ("answer.nothing-to-convert", message)
    assert nothing.hint == "there is nothing to repack: serve it as it is"


def test_an_answer_without_a_loss_stays(checkpoints: Path) -> None:
    exact = moeq.open(checkpoints / NAME)
    found = answer(exact, Question(A100))
    assert without_loss(exact, found) is found
    refused = found.refused(error(1))
    assert without_loss(exact, refused) is refused
    lossy = moeq.open(checkpoints / "ct-fp8-tensor-qwen3moe")
    where = Question(Deployment(gpu=parse_gpu("H100")))
    told = without_loss(lossy, answer(lossy, where))
    assert told.error is not None
    assert told.error.code == "answer.lossy"
    assert told.error.message.startswith("layer 0 expert 0: flashinfer-cutlass-fp8-tensor/1 would change ")
    assert "works" in (told.error.hint or "")


def test_an_unknown_layout_is_refused_at_once(checkpoints: Path) -> None:
    with pytest.raises(MoeqError, match="no layout is called 'x/1'") as caught:
        answer(moeq.open(checkpoints / NAME), Question(A100, ConvertOptions(layout="x/1")))
    assert caught.value.code == "usage.unknown-layout"


def test_decisions_raise_only_where_a_backend_is_named(checkpoints: Path) -> None:
    made = checkpoints / "gptq-int4-g32-actorder-qwen3moe"
    assert not moeq.decide(made, gpu="H100").ok
    with pytest.raises(MoeqError):
        moeq.decide(made, gpu="H100", backend="marlin")


def test_a_layer_whose_format_no_layout_holds(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = moeq.open(checkpoints / NAME)
    monkeypatch.setattr(type(get_format("gptq")), "refusal_of", lambda self, scheme: "it is odd")
    found = answer(made, Question(A100))
    assert found.error is not None
    assert (found.error.code, found.error.message) == ("answer.not-convertible", "gptq int4 g32 sym: it is odd")


def choice(*loaders: str) -> LayoutChoice:
    return LayoutChoice("marlin-wna16/1", "MARLIN", loaders=tuple(Loader(name, name.upper()) for name in loaders))


@pytest.mark.parametrize(
    ("engine", "expected"),
    [("vllm@0.33.0", (0, 1, 1, 2)), ("sglang@0.5.23", (1, 0, 1, 2)), ("moeq", (1, 1, 0, 2))],
)
def test_what_the_named_engine_loads_goes_first(engine: str, expected: tuple[int, ...]) -> None:
    deployment = replace(A100, engine=engine)
    choices = (choice("vllm"), choice("transformers", "sglang"), choice("load_experts"), choice())
    assert tuple(_preference(one, deployment) for one in choices) == expected


def test_layouts_that_are_passed_over_are_told_with_their_loaders() -> None:
    assert _given_up([choice()]) == "the engine prefers MARLIN (marlin-wna16/1), which loads in nothing yet"
    other = replace(choice("sglang", "vllm"), backend="B", layout="l/1")
    text = "the engine prefers MARLIN (marlin-wna16/1) and B (l/1), which load in VLLM, SGLANG only"
    assert _given_up([choice("vllm"), other]) == text

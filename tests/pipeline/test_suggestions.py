"""Which changes are tried when the answer is no, in which order, and which of those that work are shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.pipeline.plan.decide import advised
from moeq.pipeline.plan.options import ConvertOptions, Question
from moeq.pipeline.plan.suggestions import MAX_SUGGESTIONS, nearest
from moeq.pipeline.plan.units import joined

GPTQ = "gptq-int4-g128-mixtral"


def question(options: ConvertOptions | None = None, **deployment: Any) -> Question:
    return Question(Deployment(gpu=parse_gpu("A100"), **deployment), options or ConvertOptions())


def tried(folder: Path, asked: Question, most: int | None = None) -> list[str]:
    """The options of every change that is asked about, in order, up to the last resort."""
    found: list[Question] = []

    def no(changed: Question) -> None:
        found.append(changed)

    assert nearest(moeq.open(folder), asked, no) == ()
    return [_difference(asked, one) for one in found[:most]]


def _difference(one: Question, other: Question) -> str:
    """The fields that differ."""
    fields = {}
    for before, after in ((one.deployment, other.deployment), (one.options, other.options)):
        fields |= {name: value for name, value in vars(after).items() if value != getattr(before, name)}
    return " ".join(f"{name}={getattr(value, 'name', value)}" for name, value in fields.items())


#: What is tried on any number of ranks after the sizes: named backends, then other devices.
ELSEWHERE = [
    *(
        "skip_unfit=True",
        "engine=moeq",
        "backend=rdna3",
        "backend=flashinfer_trtllm",
        "backend=marlin",
        "backend=triton",
    ),
    *("gpu=H100", "gpu=B200", "gpu=MI300X", "gpu=CPU"),
]


def test_sizes_nearest_first_then_whole_experts_then_smaller_groups(checkpoints: Path) -> None:
    sizes = ["tp=3", "tp=5", "tp=2", "tp=6", "tp=1", "tp=7", "tp=8", "tp=1"]
    groups = ["regroup=64", "regroup=32", "regroup=16"]
    found = tried(checkpoints / GPTQ, question(tp=4), 22)
    assert found == [*sizes, "ep=4", *groups, "dtype=fp16", *ELSEWHERE[:-1]]


def test_fewer_ranks_of_experts_that_the_tensor_parallel_ones_divide(checkpoints: Path) -> None:
    found = tried(checkpoints / "gptq-int4-g32-qwen3moe", question(tp=2, ep=4, dp=2), 13)
    assert found == ["ep=2 dp=1", "ep=1 dp=1", "dtype=fp16", *ELSEWHERE]


def test_what_was_asked_for_is_left_out_first(checkpoints: Path) -> None:
    options = ConvertOptions(layout="marlin-wna16/1", force_layout=True, regroup=32)
    found = tried(
        checkpoints / GPTQ, question(options, lora=True, eplb=True, batched=True, backend="marlin", dtype="fp16"), 12
    )
    without = "layout=None force_layout=False"
    assert found[:3] == [without, "backend=auto", f"backend=auto {without}"]
    assert found[5:12] == [
        *("dtype=bf16", "lora=False", "eplb=False", "batched=False", "regroup=None", "skip_unfit=True", "engine=moeq")
    ]


def test_what_is_so_already_is_not_tried(checkpoints: Path) -> None:
    found = tried(checkpoints / GPTQ, question(ConvertOptions(skip_unfit=True), engine="moeq", dtype="fp16"))
    assert "skip_unfit=True" not in found
    assert "engine=moeq" not in found


@pytest.mark.parametrize(
    ("asked", "texts"),
    [
        (
            question(tp=4),
            ["tp=3", "regroup=64 (the same values, groups of 128 cut into groups of 64)", 'dtype="fp16"'],
        ),
        (
            question(ConvertOptions(layout="marlin-wna16/1", force_layout=True), backend="marlin"),
            ["leaving out layout and force_layout", "tp=2", 'dtype="fp16"'],
        ),
        (question(backend="marlin"), ['backend="auto" (KERNEL)', "tp=2", 'dtype="fp16"']),
        (question(tp=2, ep=4), ["ep=2", 'dtype="fp16"', "skip_unfit=True (copies the layers that do not fit)"]),
    ],
)
def test_one_of_each_kind_is_shown(asked: Question, texts: list[str], checkpoints: Path) -> None:
    found = nearest(moeq.open(checkpoints / GPTQ), asked, lambda changed: "KERNEL")
    assert len(found) == MAX_SUGGESTIONS
    assert [one.text for one in found] == texts


def test_several_changes_at_once_where_no_single_one_helps(checkpoints: Path) -> None:
    def answer(changed: Question) -> str | None:
        where, options = changed.deployment, changed.options
        works = where.tp == 1 and where.gpu.name != "A100" and not where.lora and options.layout is None
        return "KERNEL" if works else None

    asked = question(ConvertOptions(layout="marlin-wna16/1", regroup=32), tp=2, lora=True)
    (found,) = nearest(moeq.open(checkpoints / GPTQ), asked, answer)
    assert found.text == 'leaving out layout and regroup and with tp=1, lora=False, gpu="H100"'


def test_spans_that_touch_are_joined_and_empty_ones_left_out() -> None:
    assert joined([(4, 6), (0, 2), (2, 3), (8, 8), (5, 9)]) == ((0, 3), (4, 9))
    assert joined([(0, 1), (2, 3)]) == ((0, 1), (2, 3))
    assert joined([(3, 3)]) == ()


@pytest.mark.parametrize(
    ("name", "layout", "hint"),
    [
        ("gptq-int4-g32-actorder-qwen3moe", None, 'engine="moeq" (moeq\'s own kernels) works'),
        ("gptq-int4-g32-qwen3moe", "rdna3-int4/1", "leaving out layout works; force_layout=True writes it anyway"),
    ],
)
def test_a_refusal_ends_with_what_works(name: str, layout: str | None, hint: str, checkpoints: Path) -> None:
    error = advised(moeq.open(checkpoints / name), question(ConvertOptions(layout=layout))).error
    assert error is not None
    assert error.hint == hint


def test_every_backend_is_tried_and_none_explained_unless_asked(checkpoints: Path) -> None:
    checkpoint = moeq.open(checkpoints / "gptq-int4-g32-qwen3moe")

    def candidates(asked: Question, **options: bool) -> Any:
        verdict = advised(checkpoint, asked, **options).verdict
        assert verdict is not None
        return verdict.candidates

    usual, other, cut = question(), question(backend="flashinfer_trtllm"), question(tp=4)
    for asked in (usual, other):
        assert candidates(asked) == candidates(asked, explain=False) != candidates(asked, explain=True)
    assert candidates(cut) == candidates(cut, brief=False) != candidates(cut, brief=True)


def test_every_smaller_number_of_ranks_of_experts(checkpoints: Path) -> None:
    found = tried(checkpoints / "gptq-int4-g32-qwen3moe", question(ep=4, dp=4), 4)
    assert found == ["ep=3 dp=1", "ep=2 dp=1", "ep=1 dp=1", "dtype=fp16"]

"""Whole verdicts on questions that reach every line of the engines' rules: each field, reason and hint of each.

    PYTHONPATH=.:kernels:tests:tools python tests/oracle/test_whole_verdicts.py            (what is said now)
    PYTHONPATH=.:kernels:tests:tools python tests/oracle/test_whole_verdicts.py --choose   (more, for new lines)

Questions are those that the engines themselves were asked, and neighbours of them, each of which noticed a mutant that
the others had let pass. `differential` and `loads` hold the decisions against the engines' own.
"""

from __future__ import annotations

import json
import lzma
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from oracle.differential import samples
from oracle.differential.compare import question_of
from oracle.differential_sglang import samples as sglang
from oracle.examples import CHECKPOINTS, every_scheme
from oracle.loads import cases as loads
from oracle.loads import files

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.oracle.engines.vllm.configs.question import PREFIX
from moeq.oracle.judge import judge, judge_config
from moeq.oracle.quantization_config import config_of
from moeq.oracle.records import MoeShape, Verdict
from moeq.oracle.versions import versions
from moeq.pipeline.plan.layer_verdict import judge_checkpoint

Row = dict[str, Any]
PATH = Path(__file__).parents[1] / "data" / "oracle" / "verdicts.json.xz"

#: Of so many questions that are chosen, one is put with single changes as well.
EXPLAINED = 7
#: Seed of the small checkpoints whose experts' tensors are compared with what an engine loads.
LOADS = "o33b"

#: Tests that questions are dealt out to.
SHARES = 12

#: Devices of the questions to moeq's own kernels.
DEVICES = ("V100", "A100", "MI300X")
OPTIONS: tuple[Row, ...] = (
    {}, {"tp": 2}, {"tp": 7}, {"ep": 4}, {"ep": 4, "eplb": True, "redundant_experts": 3}, {"lora": True},
    {"ep": 130, "redundant_experts": 3}, {"eplb": True},
    {"batched": True}, {"backend": "triton"}, {"dtype": "fp16", "dp": 2},
)  # fmt: skip
#: Devices of the questions about stored checkpoints.
STORED_ON = ("A100", "H100", "MI300X", "CPU")


class Question(NamedTuple):
    engine: str
    world: Row
    case: Row
    explain: bool = False


def said(question: Question) -> Row:
    """The verdict on a question, or the error, as JSON has it."""
    engine, world, case, explain = question
    try:
        if engine == "config":
            return config_of(every_scheme()[case["scheme"]][0])
        if engine == "stored":
            where = Deployment(parse_gpu(case["gpu"]), tp=case["tp"], engine=case["engine"])
            verdict = judge_checkpoint(moeq.open(CHECKPOINTS / case["name"]), where, explain=False)
            return _as_json(verdict)
        if engine == "load":
            return _as_json(_of_load(loads.case(LOADS, case["number"]), case))
        if engine == "moeq":
            scheme, shape = every_scheme()[case["scheme"]]
            shape = replace(shape, **case.get("shape", {}))
            deployment = Deployment(parse_gpu(case["gpu"]), engine=engine, **case["options"])
            verdict = judge(scheme, shape, deployment)
        elif engine == "sglang":
            verdict = judge_config(case["config"], *_asked_of_sglang(case))
        else:
            config, shape, deployment = question_of(world, case)
            where = Deployment(**{**vars(deployment), "engine": f"vllm@{engine}"})
            prefix = case.get("prefix") or PREFIX
            verdict = judge_config(config, shape, where, prefix=prefix, explain=explain)
    except MoeqError as error:
        return {"code": error.code, "message": error.message, "hint": error.hint}
    return _as_json(verdict)


def _of_load(stored: Row, case: Row) -> Verdict:
    given = {**stored["deployment"], **case.get("options", {})}
    ranks = given["tp"] * given["dp"]
    where = Deployment(
        parse_gpu(given["gpu"]), tp=given["tp"], dp=given["dp"], ep=ranks if given["ep"] else 1,
        backend=given["backend"], quantization=given["quantization"], engine=f"vllm@{case['version']}",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        return judge_checkpoint(moeq.open(files.write(Path(folder, "source"), stored)), where, explain=False)


def _as_json(verdict: Verdict) -> Row:
    found: Row = json.loads(json.dumps(verdict.to_json()))
    return {name: value for name, value in found.items() if name not in ("deployment", "shape")}


def _asked_of_sglang(case: Row) -> tuple[MoeShape, Deployment]:
    major, minor = case["capability"]
    shape = MoeShape(case["hidden"], case["inter"], case["experts"], case["topk"], case["act"], **case.get("shape", {}))
    tp, options = case["tp"], case.get("options", {})
    where = Deployment(
        parse_gpu(f"sm{major}{minor}"), tp=tp, ep=tp if case["ep"] else 1, dtype=case["dtype"], backend=case["runner"],
        quantization=case["quantization"], engine="sglang@0.5.23",
    )  # fmt: skip
    return shape, Deployment(**{**vars(where), **options})


def asked() -> Iterator[Question]:
    """The questions to choose from: most are about the newest version."""
    *older, newest = versions("vllm")
    yield from (Question(newest, world, case) for world, case, _ in samples.load(newest)[1])
    for number, version in enumerate(older):
        yield from (Question(version, world, case) for world, case, _ in samples.load(version)[1][number::20])
    yield from (Question(version, world, case) for version, world, case, _ in samples.load_dialects()[::4])
    yield from (Question(version, world, case) for version, world, case, _ in samples.load_options()[::4])
    for path in (sglang.PATH, sglang.FLOATS):
        for case, _ in sglang.load(path)[1][::4]:
            yield Question("sglang", {}, {**case, "shape": {"model_type": "qwen3_moe"}})


def always() -> Iterator[Question]:
    """Questions that are not chosen: stored checkpoints, moeq's own kernels, and the config that a scheme gives."""
    for path in sorted(CHECKPOINTS.glob("*/config.json")):
        for gpu, tp, engine in product(STORED_ON, (1, 2), ("vllm@0.33.0", "vllm@0.27.1")):
            if tp == 1 or engine.endswith("33.0"):
                yield Question("stored", {}, {"name": path.parent.name, "gpu": gpu, "tp": tp, "engine": engine})
    for name, gpu, options in product(every_scheme(), DEVICES, OPTIONS):
        yield Question("moeq", {}, {"scheme": name, "gpu": gpu, "options": options})
    yield from (Question("config", {}, {"scheme": name}) for name in every_scheme())


def choose(kept: Sequence[Question], questions: Sequence[Question], times: int) -> list[Question]:
    """Few more questions, with which every line is reached, and every jump between two, as often as that if any do."""
    import coverage

    measured = coverage.Coverage(data_file=None, branch=True, include=["*/moeq/oracle/*"], messages=False)
    order = random.Random(0).sample(range(len(questions)), len(questions))
    reached: dict[tuple[str, tuple[int, int]], int] = {}
    chosen = []
    for number, question in [*((-1, one) for one in kept), *((number, questions[number]) for number in order)]:
        measured.erase()
        measured.start()
        said(question._replace(explain=False))
        measured.stop()
        data = measured.get_data()
        found = {(file, arc) for file in data.measured_files() for arc in data.arcs(file) or ()}
        if any(reached.get(one, 0) < times for one in found):
            chosen += [number] if number >= 0 else []
            for one in found:
                reached[one] = reached.get(one, 0) + 1
    more = [questions[number] for number in sorted(chosen)]
    return [one._replace(explain=number % EXPLAINED == 0) for number, one in enumerate(more)]


def load() -> list[tuple[Question, Row]]:
    """The questions, and what is to be said."""
    return [(Question(*question), verdict) for question, verdict in json.loads(lzma.decompress(PATH.read_bytes()))]


@pytest.mark.parametrize("share", range(SHARES))
def test_verdicts_are_as_they_were(share: int) -> None:
    rows = load()
    assert len(rows) > 1500
    for question, wanted in rows[share::SHARES]:
        found = said(question)
        assert found.keys() == wanted.keys(), question
        differing = {name: (value, wanted[name]) for name, value in found.items() if value != wanted[name]}
        assert not differing, question


if __name__ == "__main__":
    kept = [question for question, _ in load()]
    kept += choose(kept, list(asked()), 4) if "--choose" in sys.argv else []
    fixed = list(always())
    kept = [*(one for one in kept if one.engine not in ("config", "stored") and one not in fixed), *fixed]
    answers = [said(question) for question in kept]
    text = json.dumps([[question, answer] for question, answer in zip(kept, answers, strict=True)])
    PATH.write_bytes(lzma.compress(text.encode(), preset=9))
    print(f"{len(kept)} questions, {len(text):,} characters, {PATH.stat().st_size:,} bytes")

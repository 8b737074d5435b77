"""Advisories are about versions: the range of each is what the engine of each version did, executed or recorded."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from oracle.differential import defects, samples
from oracle.differential.compare import moeq_outcome

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.oracle.engines.vllm.advisories import CONDITIONS, advisories_for, has_defect
from moeq.oracle.engines.vllm.policy import backend_facts, load_policy
from moeq.oracle.judge import judge_config
from moeq.oracle.records import MoeShape
from moeq.oracle.upgrade import steps
from moeq.oracle.versions import release, versions

Row = dict[str, Any]
ROWS: dict[str, Row] = {row["code"]: row for row in backend_facts("vllm")["advisories"]}
SHAPE = MoeShape(2048, 768, 128, 8)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


def refused(*words: str) -> Callable[[Row], bool]:
    """An answer that is an error of one of these types or kinds."""
    return lambda answer: answer["answer"][0] == "error" and bool(set(words) & set(answer["answer"][1:]))


def chose(*names: str) -> Callable[[Row], bool]:
    """An answer that is a choice of one of these backends or classes, of any where none is named."""
    return lambda answer: (
        answer["answer"][0] == "choice" and (not names or bool(set(names) & set(answer["answer"][1:])))
    )


def stopped(answer: Row) -> bool:
    """A choice whose weights or kernel the engine then could not make."""
    return chose()(answer) and not (answer.get("create", True) and answer.get("validate", True))


#: What the engine's answer to a case looks like where it meets the defect.
RECORDED: dict[str, Callable[[Row], bool]] = {
    "lora-ignored": chose("TritonWNA16Experts"),
    "channel-scales-assertion": refused("AssertionError", "TypeError"),
    "mxfp4-bypasses-oracle": lambda answer: answer["answer"] == ["choice", "MARLIN", "CutlassExpertsMxfp4"],
    "awq-alias-lost": refused("CONFIG"),
    "gptq-asymmetric-refused": refused("CONFIG"),
    "negative-group-count": stopped,
    "gptq-bias-assumed": refused("OVERRIDE_UNSUPPORTED"),
    "gpt-oss-lora-rocm": refused("NO_BACKEND"),
    "backend-never-works": refused("OVERRIDE_UNKNOWN", "OVERRIDE_UNSUPPORTED", "NO_BACKEND"),
    "bare-assertion": refused("BARE_ASSERTION"),
    "selected-then-fails": stopped,
    "runs-weight-only": chose("TritonExperts"),
    "activation-precision-differs": chose(),
    "override-breaks-unquantised-layers": refused("OVERRIDE_UNKNOWN"),
    "quark-mx-first-class": chose(),
    "integer-key-unprintable": refused("KeyError"),
}


@cache
def met(version: str) -> Counter[tuple[str, bool]]:
    """How many recorded cases of a version meet an advisory's condition, whatever its range, by whether the engine's
    answer shows it."""
    found: Counter[tuple[str, bool]] = Counter()
    policy = load_policy(f"vllm@{version}")
    for world, case, answer in samples.load(version)[1]:
        outcome = moeq_outcome(policy, world, case)
        for code, shows in RECORDED.items():
            if CONDITIONS[ROWS[code]["when"]](outcome):
                found[code, shows(answer)] += 1
    return found


def test_every_advisory_says_how_it_was_shown() -> None:
    kinds = {code: row["shown"].partition(":")[0].partition(" ")[0] for code, row in ROWS.items()}
    assert {code for code, kind in kinds.items() if kind == "recorded"} == set(RECORDED)
    assert {code for code, kind in kinds.items() if kind == "executed"} == set(defects.SHOWN)
    for code, row in ROWS.items():
        assert kinds[code] in ("recorded", "executed", "read", "reported"), code
        assert kinds[code] != "read" or re.fullmatch(r"read: [a-z0-9_/]+\.py:[A-Za-z0-9_.]+", row["shown"]), code
        assert kinds[code] != "reported" or row["issue"], code
        assert row["check"], code
        assert row["first"] in versions("vllm"), code
        assert row.get("last", versions("vllm")[-1]) in versions("vllm"), code
        assert release(row["first"]) <= release(row.get("last", versions("vllm")[-1])), code


@pytest.mark.parametrize("version", versions("vllm"))
def test_executed_defects_are_those_of_the_version(version: str) -> None:
    kept = json.loads(defects.RESULTS.read_text(encoding="utf-8"))
    policy = load_policy(f"vllm@{version}")
    assert kept[version] == {code: has_defect(policy, ROWS[code]) for code in defects.SHOWN}


@pytest.mark.slow  # all recorded cases of all versions are decided first
@pytest.mark.parametrize("code", RECORDED)
def test_recorded_answers_show_it(code: str) -> None:
    """In its versions the engine's answers look like the defect; in others no case meets the condition at all."""
    inside = [version for version in versions("vllm") if has_defect(load_policy(f"vllm@{version}"), ROWS[code])]
    assert sum(met(version)[code, True] for version in inside)
    for version in set(versions("vllm")) - set(inside):
        assert not met(version)[code, True], version


def test_advisories_of_other_versions_are_left_out() -> None:
    deployment = Deployment(parse_gpu("V100"), dtype="fp16")
    found = {
        version: {row.code: row.versions for row in judge_config(
            GPTQ, SHAPE, replace(deployment, engine=f"vllm@{version}"), explain=False).advisories}
        for version in ("0.26.0", "0.28.0", "0.33.0")
    }  # fmt: skip
    assert found["0.26.0"]["emulation-zeros-not-integers"] == "vllm 0.26.0"
    assert "emulation-zero-off-by-one" not in found["0.26.0"]
    for version in ("0.28.0", "0.33.0"):
        assert "emulation-zeros-not-integers" not in found[version]
        assert found[version]["emulation-zero-off-by-one"] == "vllm 0.27.1 and newer"


def test_an_upgrade_says_which_defects_come_and_go() -> None:
    deployment = Deployment(parse_gpu("V100"), dtype="fp16")

    def verdict(engine: str) -> Any:
        return judge_config(GPTQ, SHAPE, replace(deployment, engine=engine), explain=False)

    changed = {step.engine: {row.what: (row.before, row.after) for row in step.differences}
               for step in steps(verdict, "vllm@0.26.0..0.33.0")}  # fmt: skip
    before, after = changed["vllm@0.27.1"]["advisories"]
    assert "emulation-zeros-not-integers" in before
    assert "emulation-zero-off-by-one" not in before
    assert "emulation-zeros-not-integers" not in after
    assert "emulation-zero-off-by-one" in after


@pytest.mark.parametrize(("gpu", "tp"), [("H100", 8), ("B200", 8)])
def test_nvfp4_shards_that_cut_groups(gpu: str, tp: int) -> None:
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": []}
    shape = replace(SHAPE, intermediate_size=1856)  # 232 on each of 8 ranks
    for ranks, hit in ((tp, True), (4, False)):
        deployment = Deployment(parse_gpu(gpu), tp=ranks, engine="vllm@0.33.0", backend="emulation")
        codes = {row.code for row in judge_config(config, shape, deployment, explain=False).advisories}
        assert ("nvfp4-shard-splits-groups" in codes) is hit


@pytest.mark.parametrize(
    ("config", "gpu", "backend", "fits"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, "B200", "flashinfer_trtllm", 64),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "H100", "flashinfer_cutlass", 16),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "B200", "flashinfer_trtllm", 16),
    ],
)
def test_flashinfer_padding_up_to_0_28(config: dict[str, Any], gpu: str, backend: str, fits: int) -> None:
    """Only where gate and up have to be filled up, and only in the versions that do it as one block."""
    for width, version, hit in ((fits - 8, "0.28.0", True), (fits - 8, "0.30.0", False), (fits, "0.28.0", False)):
        deployment = Deployment(parse_gpu(gpu), tp=8, engine=f"vllm@{version}", backend=backend)
        verdict = judge_config(config, replace(SHAPE, intermediate_size=8 * width), deployment, explain=False)
        assert verdict.chosen is not None
        codes = {row.code for row in verdict.advisories}
        assert ("flashinfer-padding-mixes-halves" in codes) is hit, (width, version)


def test_ranges_bind_every_condition() -> None:
    """A version outside of every range meets no advisory, whatever the conditions say."""
    policy = load_policy("vllm@0.33.0")
    world, case, _ = samples.load("0.33.0")[1][0]
    outcome = moeq_outcome(
        replace(policy, advisories=tuple({**row, "last": "0.25.0"} for row in policy.advisories)), world, case
    )
    assert advisories_for(outcome) == ()


@pytest.mark.parametrize(("intermediate", "tp", "hit"), [(128, 1, True), (256, 1, False), (256, 2, False)])
@pytest.mark.parametrize(("version", "has"), [("0.26.0", True), ("0.28.0", True), ("0.30.0", False)])
def test_act_order_of_one_group(version: str, has: bool, intermediate: int, tp: int, hit: bool) -> None:
    """Marlin's kernel asks for more groups than one where the whole of K is on the rank; later versions have none."""
    deployment = Deployment(parse_gpu("A100"), tp=tp, engine=f"vllm@{version}")
    shape = MoeShape(2048, intermediate, 128, 8)
    found = judge_config({**GPTQ, "desc_act": True}, shape, deployment, explain=False)
    codes = {row.code for row in found.advisories}
    assert ("marlin-act-order-one-group" in codes) == (hit and has)


@pytest.mark.parametrize(("version", "hit"), [("0.26.0", True), ("0.27.1", True), ("0.28.0", False)])
def test_gemma4_beside_newer_transformers(version: str, hit: bool) -> None:
    """vLLM 0.26.0 to 0.27.1 read one `head_dim` of a config that has one for each layer (transformers 5.15.1)."""
    where, shape = (
        Deployment(parse_gpu("H100"), engine=f"vllm@{version}"),
        replace(SHAPE, architecture="Gemma4ForCausalLM"),
    )
    codes = {row.code for row in judge_config(GPTQ, shape, where, explain=False).advisories}
    assert ("gemma4-new-transformers" in codes) is hit

"""What the oracle prints behind an arrow works: each unlock is followed, and the engine runs the backend."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from oracle.asking import ct, gptq
from oracle.differential import cases
from oracle.differential.compare import Row, question_of

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.oracle.engines.vllm.counterfactuals import _configs as configs
from moeq.oracle.engines.vllm.counterfactuals import changes, with_env, with_package
from moeq.oracle.engines.vllm.outcome import derive_dp, resolve
from moeq.oracle.engines.vllm.policy import load_policy
from moeq.oracle.engines.vllm.unlocks import on_kind
from moeq.oracle.judge import judge_config
from moeq.oracle.records import MoeShape, Verdict

Question = tuple[Row, MoeShape, Deployment]

#: Option or package that an unlock names -> the deployment that has it.
FOLLOWED: tuple[tuple[str, Callable[[Deployment, str], Deployment]], ...] = (
    (r"tp (\d+)", lambda d, value: replace(d, tp=int(value))),
    (r"ep (\d+)(?: \(whole experts per rank\))?", lambda d, value: replace(d, ep=int(value))),
    (r"dp (1)", lambda d, value: replace(d, dp=1)),
    (r"all-to-all (allgather_reducescatter)", lambda d, value: replace(d, all2all=None)),
    (r"no (LoRA) on experts", lambda d, value: replace(d, lora=False)),
    (r"no (expert load balancing)", lambda d, value: replace(d, eplb=False, redundant_experts=0)),
    (r"(\d+) redundant experts", lambda d, value: replace(d, redundant_experts=int(value))),
    (r"no (redundant) experts", lambda d, value: replace(d, redundant_experts=0)),
    (r"eplb=(True)", lambda d, value: replace(d, eplb=True)),
    (r"dtype (\w+)", lambda d, value: replace(d, dtype="fp16" if value == "fp16" else "bf16")),
    (r"install (\w+)", lambda d, value: with_package(d, value, True)),
    (r"set (\w+=\S+)", lambda d, value: with_env(d, *value.split("=", 1))),
    (r"unset (\w+)", lambda d, value: with_env(d, value, None)),
    (r'quantization="(\w+)"', lambda d, value: replace(d, quantization=value)),
    (r"--moe-backend (\w+)", lambda d, value: replace(d, backend=value)),
)


def followed(deployment: Deployment, words: list[str]) -> Deployment | None:
    """Return the deployment that the words describe; None if some of them ask for another checkpoint."""
    for word in words:
        found = next(((how, m[1]) for pattern, how in FOLLOWED if (m := re.fullmatch(pattern, word))), None)
        if found is None:
            return None
        deployment = found[0](deployment, found[1])
    return derive_dp(deployment)


def places(question: Question, prefix: str, unlock: str) -> list[list[Question]]:
    """List what an unlock describes: a question for each kind of device that it names, or those of equal words."""
    config, shape, deployment = question
    words = unlock.split(" and ")
    kinds = words[0].removeprefix("a device of kind ").split(", ") if words[0].startswith("a device") else []
    wheres = [on_kind(deployment, kind) for kind in kinds] or [deployment]
    moved = [followed(where, words[1:] if kinds else words) for where in wheres]
    if all(moved):
        return [[(config, shape, where)] for where in moved if where]
    # Another checkpoint: its config is not in the words.
    outcome = resolve(load_policy(deployment.engine), config, shape, deployment, prefix=prefix)
    # The same words may stand for one group of the config or another.
    found = [one for one in changes(outcome) if unlock == one.text or unlock.startswith(f"{one.text} and --moe")]
    asked = unlock.partition("--moe-backend ")[2] or "auto"
    return [[(dict(one.config), one.shape, replace(one.deployment, backend=asked)) for one in found]]


def runs(question: Question, prefix: str, backend: str, flag: str | None) -> bool:
    """Whether the engine runs a backend, by itself or asked by name."""

    def verdict(where: Deployment) -> Verdict:
        return judge_config(question[0], question[1], where, prefix=prefix, explain=False)

    tried = [question[2], *([replace(question[2], backend=flag)] if flag else [])]
    return any(found.chosen is not None and found.chosen.backend == backend for found in map(verdict, tried))


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("version", ["0.33.0", "0.28.0"])
@pytest.mark.parametrize("count", [8, pytest.param(250, marks=pytest.mark.slow)])
def test_every_arrow_works(version: str, count: int) -> None:
    kinds: tuple[dict[str, bool], ...] = ({}, {"dialects": True})
    jobs = [job for kind in kinds for job in cases.jobs(f"arrows {count}", 6, 1, **kind)]
    rows = [(world, case) for world, part in jobs for case in part]
    tried = 0
    for world, case in Random(count).sample(rows, count):
        config, shape, deployment = question_of(world, case)
        deployment = replace(deployment, engine=f"vllm@{version}")
        verdict = judge_config(config, shape, deployment, prefix=case["prefix"])
        plain = config, shape, derive_dp(replace(deployment, backend="auto"))
        for row in verdict.candidates:
            for place in places(plain, case["prefix"], row.unlock) if row.unlock else ():
                tried += 1
                works = [runs(one, case["prefix"], row.backend, row.flag) for one in place]
                assert any(works), (case["id"], row.backend, row.unlock)
    assert tried > count


def test_a_device_is_named_only_where_the_backend_runs_there() -> None:
    """AITER on gfx942 wants its package and its variable; both are said, and no kind on which they do not help."""
    where = Deployment(parse_gpu("H100"))
    shape = MoeShape(2048, 768, 128, 8)
    verdict = judge_config({"quant_method": "fp8", "activation_scheme": "dynamic"}, shape, where)
    aiter = next(row for row in verdict.candidates if row.backend == "AITER")
    assert aiter.unlock is not None
    assert "install aiter and set VLLM_ROCM_USE_AITER=1" in aiter.unlock
    assert parse_gpu("V100").arch not in aiter.unlock


@pytest.mark.parametrize(
    ("config", "texts"),
    [
        (ct(64), ["group size 128", "group size 32"]),
        (ct(64, symmetric=False), ["group size 128", "group size 32", "a symmetric checkpoint"]),
        (gptq(), ["group size 64", "group size 32"]),
        (gptq(sym=False), ["group size 64", "group size 32", "a symmetric checkpoint"]),
        (gptq(desc_act=True), ["group size 64", "group size 32", "a checkpoint without act-order"]),
        (gptq(quant_method="awq", zero_point=True),
         ["group size 64", "group size 32", "a checkpoint without zero points"]),
        ({"quant_method": "fp8"}, []),
    ],
)  # fmt: skip
def test_other_checkpoints_that_are_tried(config: dict[str, Any], texts: list[str]) -> None:
    tried = list(configs(config))
    assert [text for text, _ in tried] == texts
    assert all(changed != config for _, changed in tried)

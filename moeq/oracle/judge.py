"""The oracle's front door: scheme, shape and deployment in, verdict out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from moeq.deploy.deployment import Deployment
from moeq.errors import MoeqError
from moeq.oracle.engines.moeq import judge_builtin
from moeq.oracle.engines.sglang.verdict import is_sglang, judge_sglang
from moeq.oracle.engines.vllm.configs.question import PREFIX
from moeq.oracle.engines.vllm.counterfactuals import nearest_yes, suggested
from moeq.oracle.engines.vllm.outcome import Outcome
from moeq.oracle.engines.vllm.policy import load_policy
from moeq.oracle.engines.vllm.verdict import derive_dp, resolve, sensitivity, verdict_of
from moeq.oracle.quantization_config import checked, config_of
from moeq.oracle.records import MoeShape, Verdict
from moeq.oracle.versions import BUILTIN, choose_engine
from moeq.schemes.base import Scheme


def judge(
    scheme: Scheme,
    shape: MoeShape,
    deployment: Deployment,
    *,
    config: Mapping[str, Any] | None = None,
    prefix: str = PREFIX,
    explain: bool = True,
    admits: Callable[[Deployment], bool] | None = None,
) -> Verdict:
    """Judge every backend for a scheme on a deployment. A refusal is a verdict too.

    Args:
        scheme: how the experts are encoded.
        shape: sizes of the layer; biases of the scheme count as well.
        deployment: where it is to run; `engine` names the policy that decides.
        config: the checkpoint's own `quantization_config`, where at hand: per-module rules are read from it.
        prefix: module path of the layer's experts, which those rules are matched against.
        explain: also try single changes: which change makes each backend work, and which packages and variables
            mattered.
        admits: False for a deployment that must not be suggested, for reasons outside the experts.

    Raises:
        MoeqError: `usage.unknown-engine`.
    """
    shape = replace(shape, has_bias=shape.has_bias or scheme.has_bias)
    if deployment.engine == BUILTIN:
        return judge_builtin(scheme, shape, deployment)
    read = config if config is not None else config_of(scheme)
    return judge_config(read, shape, deployment, scheme.title, prefix=prefix, explain=explain, admits=admits)


def judge_config(
    config: Mapping[str, Any],
    shape: MoeShape,
    deployment: Deployment,
    title: str = "",
    *,
    prefix: str = PREFIX,
    explain: bool = True,
    admits: Callable[[Deployment], bool] | None = None,
) -> Verdict:
    """Judge a `quantization_config` under an engine policy (see `judge`)."""
    config = checked(config)
    if is_sglang(deployment.engine):
        return judge_sglang(config, shape, deployment, title)
    choice = choose_engine(deployment.engine)
    policy = load_policy(choice.policy)
    notes = list(choice.notes)
    deployment = derive_dp(deployment, notes)
    outcome = resolve(policy, config, shape, deployment, prefix=prefix)
    if choice.other is not None:
        notes.append(_beside(outcome, resolve(load_policy(choice.other), config, shape, deployment, prefix=prefix)))
    verdict = verdict_of(outcome, title, tuple(notes))
    if not explain:
        return verdict

    def again(asked: Mapping[str, Any], layer: MoeShape, where: Deployment) -> Outcome:
        return resolve(policy, asked, layer, where, prefix=prefix, brief=True)

    mattered = sensitivity(outcome, lambda other: again(config, shape, other))
    candidates = suggested(outcome, shape, again, admits)
    works = None if verdict.ok else nearest_yes(outcome, shape, again, admits)
    return replace(verdict, mattered=mattered, candidates=candidates, works=works.text if works else None)


def _beside(outcome: Outcome, other: Outcome) -> str:
    """What the next known version decides, for one between the two."""
    name = other.case.policy.name
    if outcome.runs == other.runs:
        return f"{name} decides the same"
    return f"{name} decides otherwise: {other.runs or 'it refuses'}"


def decide(
    scheme: Scheme,
    shape: MoeShape,
    deployment: Deployment,
    *,
    config: Mapping[str, Any] | None = None,
    prefix: str = PREFIX,
    explain: bool = True,
) -> Verdict:
    """`judge`, with a backend that was asked for and cannot work as an error.

    Raises:
        MoeqError: `answer.backend-unsupported` with the reasons and the alternatives; `usage.unknown-engine`.
    """
    verdict = judge(scheme, shape, deployment, config=config, prefix=prefix, explain=explain)
    if deployment.backend != "auto" and not verdict.ok:
        raise MoeqError("answer.backend-unsupported", verdict.refusal, verdict.nearest)
    return verdict

"""The oracle's front door: scheme, shape and deployment in, verdict out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from moeq.deploy.deployment import Deployment
from moeq.oracle.engines.moeq import judge_builtin
from moeq.oracle.engines.sglang.verdict import is_sglang, judge_sglang
from moeq.oracle.engines.vllm.configs.question import PREFIX
from moeq.oracle.engines.vllm.verdict import judge_vllm
from moeq.oracle.quantization_config import checked, config_of
from moeq.oracle.records import MoeShape, Verdict
from moeq.oracle.versions import BUILTIN
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
    return judge_vllm(config, shape, deployment, title, prefix=prefix, explain=explain, admits=admits)

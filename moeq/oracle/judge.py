"""Front door of the oracle: `judge` takes a scheme, a layer's shape and a deployment, and returns a verdict.

Each engine has a package under `engines/`: vLLM is judged by tables that are extracted from each version, SGLang and
moeq's own kernels by rules in code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from moeq.deploy.deployment import Deployment
from moeq.oracle.engines.moeq import judge_builtin
from moeq.oracle.engines.sglang.verdict import is_sglang, judge_sglang
from moeq.oracle.engines.vllm.case import Method
from moeq.oracle.engines.vllm.configs.question import PREFIX
from moeq.oracle.engines.vllm.counterfactuals import Admits, admit_all
from moeq.oracle.engines.vllm.outcome import method_of
from moeq.oracle.engines.vllm.policy import load_policy
from moeq.oracle.engines.vllm.verdict import judge_vllm
from moeq.oracle.quantization_config import config_of
from moeq.oracle.records import MoeShape, StoredTensor, Verdict
from moeq.oracle.versions import BUILTIN, choose_engine
from moeq.schemes.base import Scheme
from moeq.schemes.config_types import checked


def judge(
    scheme: Scheme,
    shape: MoeShape,
    deployment: Deployment,
    *,
    config: Mapping[str, Any] | None = None,
    prefix: str = PREFIX,
    explain: bool = True,
    admits: Admits = admit_all,
    tensors: Sequence[StoredTensor] = (),
) -> Verdict:
    """Judge every backend for a scheme on a deployment. A refusal is a verdict too.

    Args:
        scheme: encoding of the experts.
        shape: sizes of the layer; it has biases also if the scheme has them.
        deployment: target; its `engine` decides.
        config: `quantization_config` of the checkpoint with its per-module rules; None makes one from the scheme.
        prefix: module path of the layer's experts, which per-module rules are matched against.
        explain: whether to try single changes, too, which show what makes each backend work and which packages and
            variables mattered.
        admits: function that returns False for deployments that must not be suggested.
        tensors: headers of the layer's experts in the file, if they are to be compared with what the engine loads.

    Raises:
        MoeqError: `usage.unknown-engine`.
    """
    shape = replace(shape, has_bias=shape.has_bias or scheme.has_bias)
    if deployment.engine == BUILTIN:
        return judge_builtin(scheme, shape, deployment)
    read = config if config is not None else config_of(scheme)
    return judge_config(
        read, shape, deployment, scheme.title, prefix=prefix, explain=explain, admits=admits, tensors=tensors
    )


def method_for(config: Mapping[str, Any], shape: MoeShape, deployment: Deployment, prefix: str) -> Method | str | None:
    """Return the method that vLLM takes for one layer, or the text of its refusal; None for other engines."""
    if deployment.engine == BUILTIN or is_sglang(deployment.engine):
        return None
    policy = load_policy(choose_engine(deployment.engine).policy)
    return method_of(policy, checked(config), shape, deployment, prefix)


def judge_config(
    config: Mapping[str, Any],
    shape: MoeShape,
    deployment: Deployment,
    title: str = "",
    *,
    prefix: str = PREFIX,
    explain: bool = True,
    admits: Admits = admit_all,
    tensors: Sequence[StoredTensor] = (),
) -> Verdict:
    """Judge a `quantization_config` under an engine policy (see `judge`)."""
    config = checked(config)
    if is_sglang(deployment.engine):
        return judge_sglang(config, shape, deployment, title)
    return judge_vllm(config, shape, deployment, title, prefix=prefix, explain=explain, admits=admits, tensors=tensors)

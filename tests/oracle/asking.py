"""Short ways to ask the oracle: deployments, configs, and what to look at in a verdict."""

from __future__ import annotations

from typing import Any

from oracle.examples import SHAPE

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.oracle.engines.vllm.policy import load_policy
from moeq.oracle.judge import judge
from moeq.oracle.records import MoeShape, Verdict

POLICY = load_policy("vllm@0.33.0")


def gpu(name: str, **fields: Any) -> Deployment:
    packages = tuple(sorted(fields.pop("packages", {}).items()))
    env = tuple(sorted(fields.pop("env", {}).items()))
    return Deployment(parse_gpu(name), packages=packages, env=env, **fields)


def ask(one: Any, where: Deployment, shape: MoeShape = SHAPE, config: dict[str, Any] | None = None) -> Verdict:
    return judge(one, shape, where, config=config)


def codes(verdict: Verdict) -> set[str]:
    return {advisory.code for advisory in verdict.advisories}


def candidate(verdict: Verdict, backend: str) -> Any:
    return next(row for row in verdict.candidates if row.backend == backend)


def gptq(**keys: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, **keys}


def ct(group: int = 128, **weights: Any) -> dict[str, Any]:
    block = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": block, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": [], "config_groups": groups}

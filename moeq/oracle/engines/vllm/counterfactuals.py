"""Counterfactuals: single changes to a question, each tried, that make a backend or the whole engine work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moeq.deploy.deployment import Deployment
from moeq.oracle.engines.vllm.case import DEFAULT_ALL2ALL, Case
from moeq.oracle.engines.vllm.outcome import Outcome, derive_dp
from moeq.oracle.engines.vllm.tables import ExpertsClass, Variant
from moeq.oracle.records import MoeShape
from moeq.spelling import option

Config = Mapping[str, Any]
#: Decides a changed question.
Again = Callable[[Config, MoeShape, Deployment], Outcome]
#: Tells whether a change may suggest a deployment.
Admits = Callable[[Deployment], bool]


def admit_all(_: Deployment) -> bool:
    """Admit every deployment."""
    return True


#: Tensor-parallel sizes and group sizes that are tried.
TP_SIZES = (1, 2, 4, 8, 16)
GROUP_SIZES = (128, 64, 32)


@dataclass(frozen=True)
class Change:
    """One change that a user can make (`text` describes it), and the changed question."""

    text: str
    config: Config
    shape: MoeShape
    deployment: Deployment


def nearest_yes(outcome: Outcome, again: Again, admits: Admits = admit_all) -> Change | None:
    """Return the first change with which the engine runs with any backend; None if no single change helps.

    Every change is tried as a whole: config, selection and every gate.
    """
    for change in (*_asked(outcome), *changes(outcome)):
        if admits(change.deployment) and again(change.config, change.shape, change.deployment).runs is not None:
            return change
    return None


def _asked(outcome: Outcome) -> Iterator[Change]:
    """Yield changes of the request: drop the named backend or method, or name a backend."""
    deployment, shape, config = outcome.case.deployment, outcome.case.shape, outcome.config
    flag = outcome.case.policy.backend_flag
    if deployment.backend != "auto":
        yield Change(f"no {flag}", config, shape, replace(deployment, backend="auto"))
    if deployment.quantization is not None and config:
        yield Change(f"no {option('quantization')}", config, shape, replace(deployment, quantization=None))
    if deployment.backend == "auto":
        for name in dict.fromkeys(row.flag for row in outcome.selection.candidates if row.flag):
            yield Change(f"{flag} {name}", config, shape, replace(deployment, backend=name))


def changes(outcome: Outcome) -> Iterator[Change]:
    """Yield single changes, the nearest first: options of the start, installed packages, then the checkpoint."""
    deployment, shape, config = outcome.case.deployment, outcome.case.shape, outcome.config
    for text, other in _deployments(outcome.case, deployment):
        yield Change(text, config, shape, other)
    if config.get("quant_method") in ("gptq", "awq") and deployment.quantization is None:
        yield Change(option("quantization", "moe_wna16"), config, shape, replace(deployment, quantization="moe_wna16"))
    for text, asked in _configs(config):
        yield Change(text, asked, shape, deployment)
    if shape.has_bias:
        yield Change("a checkpoint without expert biases", config, replace(shape, has_bias=False), deployment)
    if shape.router_dtype == "fp32":
        yield Change("bf16 router logits", config, replace(shape, router_dtype=None), deployment)


def _deployments(case: Case, deployment: Deployment) -> Iterator[tuple[str, Deployment]]:
    if deployment.ep == 1:
        fits = [tp for tp in TP_SIZES if tp != deployment.tp and case.shape.intermediate_size % tp == 0]
        for tp in sorted(fits, key=lambda size: (abs(size - deployment.tp), size)):
            yield f"tp {tp}", replace(deployment, tp=tp)
        if deployment.tp > 1:
            yield f"ep {deployment.tp} (whole experts per rank)", derive_dp(replace(deployment, ep=deployment.tp))
        if deployment.dp > 1:
            yield "dp 1", replace(deployment, dp=1)
    else:
        yield "ep 1 and dp 1" if deployment.dp > 1 else "ep 1", replace(deployment, ep=1, dp=1)
        if deployment.dp > 1 and deployment.tp > 1:
            yield f"ep {deployment.tp} and dp 1", replace(deployment, ep=deployment.tp, dp=1)
    if deployment.batched or deployment.all2all:
        words = [f"all-to-all {DEFAULT_ALL2ALL}"] if deployment.all2all else []
        words += [option("batched", False)] if deployment.batched else []
        yield " and ".join(words), replace(deployment, batched=False, all2all=None)
    if deployment.lora:
        yield "no LoRA on experts", replace(deployment, lora=False)
    if deployment.eplb:
        yield "no expert load balancing", replace(deployment, eplb=False, redundant_experts=0)
        replicas = deployment.redundant_experts + -case.physical_experts % deployment.ep
        yield f"{replicas} redundant experts", replace(deployment, redundant_experts=replicas)
    elif deployment.redundant_experts:
        yield option("eplb", True), replace(deployment, eplb=True)
        yield "no redundant experts", replace(deployment, redundant_experts=0)
    if deployment.dtype == "bf16":
        yield "dtype fp16", replace(deployment, dtype="fp16")
    else:
        yield "dtype bf16", replace(deployment, dtype="bf16")
    yield from _switches(case, deployment)


def _switches(case: Case, deployment: Deployment) -> Iterator[tuple[str, Deployment]]:
    rows = candidate_variants(case)
    for name in sorted({package for row in rows for package in row.packages}):
        if not case.package(name):
            yield f"install {name}", with_package(deployment, name, True)
    wanted = {(name, allowed[0]) for row in rows for name, allowed in row.env if case.flag(name) not in allowed}
    wanted |= {("VLLM_HUMMING_MOE_GEMM_TYPE", row.gemm_type) for row in _classes(case) if row.gemm_type is not None}
    for name, value in sorted(wanted, key=str):
        if case.env(name) != value:
            yield f"set {name}={value}" if value is not None else f"unset {name}", with_env(deployment, name, value)
    for name, _ in deployment.env:
        yield f"unset {name}", with_env(deployment, name, None)
    yield from equipped(case, deployment, rows)


def equipped(case: Case, deployment: Deployment, rows: Iterable[Variant]) -> Iterator[tuple[str, Deployment]]:
    """Yield, for each variant, words and deployment with all packages and variables that the variant lacks."""
    for row in rows:
        packages = [name for name in row.packages if not case.package(name)]
        unmet = [(name, allowed[0]) for name, allowed in row.env if case.flag(name) not in allowed]
        if not packages and not unmet:
            continue
        words, changed = [f"install {name}" for name in packages], deployment
        for name in packages:
            changed = with_package(changed, name, True)
        for name, value in unmet:
            words.append(f"unset {name}" if value is None else f"set {name}={value}")
            changed = with_env(changed, name, value)
        yield " and ".join(words), changed


def _configs(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield configs with other group sizes and symmetry, in the config's own spelling."""
    method = config.get("quant_method")
    if method in ("gptq", "awq", "auto-round"):
        for group in GROUP_SIZES:
            if config.get("group_size") not in (None, group):
                yield f"group size {group}", {**config, "group_size": group}
        if config.get("sym") is False:
            yield "a symmetric checkpoint", {**config, "sym": True}
        if config.get("zero_point"):
            yield "a checkpoint without zero points", {**config, "zero_point": False}
        if config.get("desc_act"):
            yield "a checkpoint without act-order", {**config, "desc_act": False}
    if method == "compressed-tensors":
        yield from _ct_configs(config)


def _ct_configs(config: Config) -> Iterator[tuple[str, Config]]:
    groups = config.get("config_groups") or {}
    for key, group in groups.items():
        weights = group.get("weights") or {}
        if weights.get("type", "int") != "int":
            continue
        options: list[tuple[str, dict[str, Any]]] = []
        if group.get("input_activations") is None:
            options += [
                (f"group size {size}", {"group_size": size, "strategy": "group"})
                for size in GROUP_SIZES
                if weights.get("group_size") != size
            ]
        if weights.get("symmetric") is False:
            options.append(("a symmetric checkpoint", {"symmetric": True}))
        for text, change in options:
            yield text, {**config, "config_groups": {**groups, key: {**group, "weights": {**weights, **change}}}}


# ------------------------------------------------------------------------------------------------ what mattered


def sensitivity(outcome: Outcome, again: Callable[[Deployment], Outcome]) -> tuple[tuple[str, str], ...]:
    """Return (name, present value) of the variables and packages with which another value changes what runs."""
    case = outcome.case
    found: list[tuple[str, str]] = []
    rows = candidate_variants(case)
    for package in sorted({name for row in rows for name in row.packages}):
        present = case.package(package)
        if again(with_package(case.deployment, package, not present)).runs != outcome.runs:
            found.append((package, "present" if present else "absent"))
    # A set variable is tried unset; an unset one is tried with a value that some class asks for.
    others: dict[str, str | None] = {name: allowed[0] for row in rows for name, allowed in row.env}
    others.update({name: None for name, _ in case.deployment.env})
    for name, value in sorted(others.items()):
        if again(with_env(case.deployment, name, value)).runs != outcome.runs:
            found.append((name, case.env(name) or "unset"))
    return tuple(found)


def candidate_variants(case: Case) -> list[Variant]:
    """List the variants of the family's classes on this device; no switch makes a class of another device run."""
    return [variant for row in _classes(case) for variant in row.variants.get(case.device, ())]


def _classes(case: Case) -> list[ExpertsClass]:
    """List the classes of the family by name."""
    backends = case.policy.families[case.method.family].backends.values()
    names = {name for row in backends for name in row.classes}
    return [case.policy.classes[name] for name in sorted(names)]


def with_package(deployment: Deployment, name: str, present: bool) -> Deployment:
    """Return the deployment with a package present or absent."""
    return replace(deployment, packages=tuple(sorted({**dict(deployment.packages), name: present}.items())))


def with_env(deployment: Deployment, name: str, value: str | None) -> Deployment:
    """Return the deployment with an environment variable set; None unsets it."""
    env = {key: old for key, old in deployment.env if key != name}
    return replace(deployment, env=tuple(sorted({**env, name: value}.items() if value is not None else env.items())))

"""What to do with a checkpoint on a deployment: the verdict, how to start the engine, known defects, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moeq.oracle.engines.sglang.verdict import is_sglang, launch_flags
from moeq.oracle.loaders import loads_in
from moeq.pipeline.plan.calibration import is_weight_only
from moeq.report.text import human_bytes
from moeq.report.verdict_text import deployment_text

if TYPE_CHECKING:
    from moeq.deploy.deployment import Deployment
    from moeq.model import Checkpoint
    from moeq.oracle.records import Verdict
    from moeq.pipeline.plan.decide import Answer

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def advice(src: str, checkpoint: Checkpoint, answer: Answer) -> dict[str, Any]:
    """Return facts by name, and `lines` of label and text for people."""
    verdict = answer.verdict
    facts: dict[str, Any] = {
        "engine": verdict.engine,
        "backend": verdict.chosen.backend if verdict.chosen else None,
        "converts": answer.ok,
        "layout": answer.first.layout if answer.ok else None,
        "loads_in": [loader.title for loader in answer.loaders],
        "serve": serve_command(src, verdict) if verdict.ok and not _harmed(checkpoint, answer) else None,
        "convert": convert_command(src, answer) if answer.ok else None,
        "advisories": [
            {name: getattr(row, name) for name in ("code", "versions", "symptom", "workaround", "check", "issue")}
            for row in verdict.advisories
        ],
        "memory": _memory(checkpoint, answer),
    }
    return {**facts, "lines": list(_lines(answer, facts))}


def _harmed(checkpoint: Checkpoint, answer: Answer) -> bool:
    """Return whether the engine runs 4- or 8-bit activations of experts whose static scales are at fault."""
    parts = (part for part in answer.parts if not is_weight_only(part.verdict))
    return any(checkpoint.scale_faults(layer) for part in parts for layer in part.layers)


def _lines(answer: Answer, facts: dict[str, Any]) -> list[tuple[str, str]]:
    verdict = answer.verdict
    chosen = facts["backend"] or f"no backend: {verdict.refusal}"
    rows = [("verdict", f"{verdict.engine} on {deployment_text(verdict.deployment)} → {chosen}")]
    if answer.ok:
        rows += [("layout", f"{facts['layout']} for {answer.first.backend}"), ("loads in", loads_in(answer.loaders))]
    for row in facts["advisories"]:
        issue = f" ({row['issue']})" if row["issue"] else ""
        text = f"{row['code']}{issue}, {row['versions']}: {row['symptom']}; what helps: {row['workaround']}"
        rows.append(("advisory", f"{text}; to check: {row['check']}"))
    memory = facts["memory"]
    if memory is not None:
        at_rest = human_bytes(memory["experts_per_rank"] + memory["rest_per_rank"])
        parts = f"experts {human_bytes(memory['experts_per_rank'])}, the rest {human_bytes(memory['rest_per_rank'])}"
        rows.append(("memory", f"{at_rest} of weights per rank ({parts}), key-value cache and activations beside them"))
        if memory["engine_repack_bytes"]:
            more = human_bytes(memory["engine_repack_bytes"])
            rows.append(("", f"{more} more while the engine repacks the source at load, none for a converted folder"))
        if memory["gpu_bytes"]:
            rows.append(("", f"the GPU has {human_bytes(memory['gpu_bytes'])}"))
    if facts["convert"]:
        rows.append(("next", facts["convert"]))
    if facts["serve"]:
        rows.append(("or serve", f"{facts['serve']} (the source as it is)"))
    return rows


def _flags(deployment: Deployment) -> list[str]:
    flags = [f"--tensor-parallel-size {deployment.tp}"] if deployment.tp > 1 else []
    flags += [f"--data-parallel-size {deployment.dp}"] if deployment.dp > 1 else []
    flags += ["--enable-expert-parallel"] if deployment.ep > 1 else []
    return [*flags, f"--dtype {_DTYPES[deployment.dtype]}"]


def serve_command(src: str, verdict: Verdict) -> str | None:
    """Say how to serve the source with the engine's own choice."""
    if is_sglang(verdict.engine):
        return f"python -m sglang.launch_server --model-path {src} {launch_flags(verdict.deployment)}"
    if not verdict.engine.startswith("vllm"):
        return None
    deployment = verdict.deployment
    asked = [f"--moe-backend {deployment.backend}"] if deployment.backend != "auto" else []
    env = [f"{name}={value}" for name, value in deployment.env]
    return " ".join([*env, "vllm serve", src, *_flags(deployment), *asked])


def convert_command(src: str, answer: Answer) -> str:
    """Say how to convert, and to load the result."""
    names = {loader.name for loader in answer.loaders}
    deployment = answer.question.deployment
    options = [f"--gpu '{deployment.gpu.name}'" if " " in deployment.gpu.name else f"--gpu {deployment.gpu.name}"]
    options += [f"--{name} {size}" for name in ("tp", "ep", "dp") if (size := getattr(deployment, name)) > 1]
    options += [f"--dtype {deployment.dtype}"] if deployment.dtype != "bf16" else []
    options += [f"--engine {deployment.engine}"] if deployment.engine == "moeq" else []
    options += [f"--backend {deployment.backend}"] if deployment.backend != "auto" else []
    command = " ".join(["moeq convert", src, "DST", *options])
    if "vllm" in names:
        return f"{command}, then {' '.join(['vllm serve DST', *_flags(answer.verdict.deployment)])}"
    if "transformers" in names:
        return f"{command}, then `import moeq.engines.transformers` and from_pretrained('DST')"
    return f"{command}, then moeq.load_experts('DST', layer)" if names else command


def _memory(checkpoint: Checkpoint, answer: Answer) -> dict[str, int] | None:
    """Return the weight bytes of the fullest rank, as they are written."""
    if not answer.ok:
        return None
    memory = answer.verdict.deployment.gpu.memory_gib
    return {
        "experts_per_rank": answer.rank_bytes,
        "rest_per_rank": checkpoint.info.other_bytes // answer.question.deployment.tp,
        "engine_repack_bytes": answer.verdict.transient_bytes or 0,
        "gpu_bytes": (memory or 0) << 30,
    }

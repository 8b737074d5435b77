"""What to do with a checkpoint on a deployment: the verdict, how to start the engine, known defects, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moeq.oracle.loaders import loads_in
from moeq.pipeline.plan.commands import convert_command, next_command, serve_source
from moeq.report.text import human_bytes
from moeq.report.verdict_text import deployment_text

if TYPE_CHECKING:
    from moeq.model import Checkpoint
    from moeq.pipeline.plan.decide import Answer


def advice(src: str, checkpoint: Checkpoint, answer: Answer) -> dict[str, Any]:
    """Return facts by name, and `lines` of label and text for people."""
    verdict = answer.verdict
    facts: dict[str, Any] = {
        "engine": verdict.engine,
        "backend": verdict.chosen.backend if verdict.chosen else None,
        "converts": answer.ok,
        "layout": answer.first.layout if answer.ok else None,
        "loads_in": [loader.title for loader in answer.loaders],
        "serve": serve_source(src, checkpoint, answer) if verdict.ok else None,
        "convert": convert_command(src, answer) if answer.ok else None,
        "next": next_command(src, checkpoint, answer),
        "advisories": [
            {name: getattr(row, name) for name in ("code", "versions", "symptom", "workaround", "check", "issue")}
            for row in verdict.advisories
        ],
        "memory": _memory(checkpoint, answer),
    }
    return {**facts, "lines": list(_lines(answer, facts))}


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
            extra = human_bytes(memory["engine_repack_bytes"])
            rows.append(("", f"{extra} more while the engine repacks the source at load, none for a converted folder"))
        if memory["gpu_bytes"]:
            rows.append(("", f"the GPU has {human_bytes(memory['gpu_bytes'])}"))
    if facts["convert"] and facts["serve"]:
        rows.append(("or", f"{facts['serve']} (the source in the engine's kernels)"))
    if facts["next"]:
        rows.append(("next", facts["next"]))
    return rows


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

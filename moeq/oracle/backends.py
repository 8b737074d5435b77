"""Tables about backends and verdicts: rows for `moeq backends`, and the Markdown of `docs/reference/backends.md`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.layouts.registry import LAYOUTS
from moeq.oracle.engines.moeq import builtin_policy
from moeq.oracle.engines.vllm.experts_classes import ExpertsClass, Variant
from moeq.oracle.engines.vllm.filters import FILTERS
from moeq.oracle.engines.vllm.policy import Backend, EnginePolicy, Family, load_policy
from moeq.oracle.judge import judge
from moeq.oracle.records import AS_IT_IS, MoeShape, Verdict
from moeq.oracle.sweep import Cell
from moeq.oracle.versions import BUILTIN, choose_engine
from moeq.schemes.base import Scheme

# ------------------------------------------------------------------------------------------------ backends


def backend_rows(engine: str, family: str | None = None) -> list[dict[str, Any]]:
    """One row per backend: family, name, flag, devices, limits and layouts.

    Raises:
        MoeqError: `usage.unknown-engine`, `usage.unknown-family`.
    """
    if engine == BUILTIN:
        return _builtin_rows()
    policy = load_policy(choose_engine(engine).policy)
    if family is not None and family not in policy.families:
        known = ", ".join(policy.families)
        raise MoeqError("usage.unknown-family", f"no family is called '{family}'", f"known: {known}")
    wanted = [policy.families[family]] if family else list(policy.families.values())
    return [_row(policy, one, backend) for one in wanted for backend in one.backends.values()]


def _row(policy: EnginePolicy, family: Family, backend: Backend) -> dict[str, Any]:
    classes = [policy.classes[name] for name in backend.classes]
    choices = [choice.layout for choice in backend.layouts if not choice.lossy] + [backend.layout]
    layouts = list(dict.fromkeys(layout for layout in choices if layout))
    return {
        "family": family.name,
        "title": family.title,
        "backend": backend.name,
        "flag": backend.flag,
        "classes": [row.short for row in classes],
        "devices": list(dict.fromkeys(device for row in classes for device in row.variants)),
        "needs": list(dict.fromkeys(name for row in classes for item in _variants(row) for name in item.packages)),
        "limits": _limits(backend, classes),
        "layouts": [layout for layout in layouts if layout in LAYOUTS],
        "no_layout": AS_IT_IS if backend.as_it_is else backend.no_layout or "moeq has none yet",
    }


def _limits(backend: Backend, classes: Sequence[ExpertsClass]) -> list[str]:
    """What a backend asks for beyond its device, in words."""
    words = [FILTERS[name].title for name in backend.filters]
    if all(row.format == "batched" for row in classes):
        words.append("batched activations")
    variants = [item for row in classes for item in _variants(row)]
    if variants and not any(item.lora for item in variants):
        words.append("no LoRA")
    words += [f"package {name}" for name in dict.fromkeys(name for item in variants for name in item.packages)]
    words += [f"{name}={allowed[0]}" for name, allowed in dict.fromkeys(pair for item in variants for pair in item.env)]
    limits = {item.max_experts for item in variants}
    known = [limit for limit in limits if limit is not None]
    if known == list(limits) and known:
        words.append(f"at most {max(known)} experts")
    return words


def _variants(row: ExpertsClass) -> list[Variant]:
    return list(dict.fromkeys(item for found in row.variants.values() for item in found))


def _builtin_rows() -> list[dict[str, Any]]:
    policy = builtin_policy()
    return [
        {
            "family": BUILTIN,
            "title": "moeq's built-in kernels",
            "backend": row.backend,
            "flag": row.backend.lower(),
            "classes": ["moeq_kernels.fused_moe"],
            "devices": [term.text for term in policy.devices],
            "needs": ["triton"],
            "limits": [f"{row.element}", f"groups {', '.join(map(str, row.group_sizes))}", "no LoRA"],
            "layouts": [row.layout] if row.layout in LAYOUTS else [],
            "no_layout": "moeq has none yet",
        }
        for row in policy.kernels
    ]


# ------------------------------------------------------------------------------------------------ matrices


def matrix(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a sweep: one row per GPU, one column per TP and EP; `*` marks advisories."""
    forms = list(dict.fromkeys((cell.tp, cell.ep) for cell in cells))
    columns = ["GPU", *(f"TP{tp}" + (f" EP{ep}" if ep > 1 else "") for tp, ep in forms)]
    by_key = {(cell.gpu, cell.tp, cell.ep): cell for cell in cells}
    rows = []
    for gpu in dict.fromkeys(cell.gpu for cell in cells):
        words = [by_key[gpu, tp, ep] for tp, ep in forms]
        rows.append(
            [gpu, *(cell.word + ("*" if cell.verdict.advisories and cell.verdict.ok else "") for cell in words)]
        )
    return columns, rows


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(columns)} |", f"|{'|'.join(' --- ' for _ in columns)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def matrix_markdown(cells: Sequence[Cell]) -> str:
    """A sweep as a Markdown table."""
    return markdown(*matrix(cells))


# ------------------------------------------------------------------------------------------------ the docs page


@dataclass(frozen=True)
class Example:
    """One checkpoint of the docs table: its name, and what the oracle is asked."""

    name: str
    scheme: Scheme
    shape: MoeShape
    config: Mapping[str, Any] | None = None


#: Columns of the docs table: title, device, packages.
DEVICES: tuple[tuple[str, str, tuple[tuple[str, bool], ...]], ...] = (
    ("A100", "A100", ()),
    ("H100", "H100", ()),
    ("H100, no Humming", "H100", (("humming", False),)),
    ("B200", "B200", ()),
    ("RTX 5090", "RTX 5090", ()),
    ("MI300X", "MI300X", ()),
    ("MI355X", "MI355X", ()),
    ("CPU (AMX)", "CPU", ()),
)


def verdict_words(verdict: Verdict) -> str:
    """A verdict in a table cell: what runs, and what convert writes."""
    if verdict.chosen is None:
        kind = verdict.error.kind if verdict.error else next(gate.kind for gate in verdict.gates if not gate.passed)
        text = f"**no** ({str(kind).lower().replace('_', ' ')})"
    else:
        text = verdict.chosen.backend
    if verdict.convert is None:
        return text
    flag = f", `{verdict.convert.flag}`" if verdict.convert.flag else ""
    return f"{text}<br>→ {verdict.convert.layout}{flag}"


def verdict_table(examples: Iterable[Example], engine: str) -> str:
    """Checkpoints x devices under one policy, as Markdown."""
    rows = []
    for example in examples:
        words = [f"`{example.name}`"]
        for _, gpu, packages in DEVICES:
            where = Deployment(parse_gpu(gpu), engine=engine, packages=packages)
            verdict = judge(example.scheme, example.shape, where, config=example.config, explain=False)
            words.append(verdict_words(verdict))
        rows.append(words)
    return markdown(["checkpoint", *(title for title, _, _ in DEVICES)], rows)


def _builtin_table(examples: Iterable[Example]) -> str:
    """What moeq's built-in kernels read of each checkpoint, the first choice first."""
    rows = []
    for example in examples:
        where = Deployment(parse_gpu("H100"), engine=BUILTIN)
        verdict = judge(example.scheme, example.shape, where, explain=False)
        fits = [f"{row.backend} ({row.layout or 'no offline layout'})" for row in verdict.candidates if row.supported]
        rows.append([f"`{example.name}`", ", ".join(fits) or f"**no**: {verdict.refusal}", verdict.runs_as or ""])
    return markdown(["checkpoint", "kernels", "runs as"], rows)


def backends_page(examples: Sequence[Example]) -> str:
    """The whole of `docs/reference/backends.md`."""
    parts = [
        "# Backends",
        "<!-- Generated by moeq.oracle.backends.backends_page; a test checks that it is up to date. -->",
        "Which backend runs which checkpoint, and what `moeq convert` writes for it (`→ layout`, with the flag "
        "to start the engine with where that is not its own choice). `moeq oracle SRC --gpu ...` gives every reason; "
        "`moeq explain CODE` explains one.",
        "## vLLM 0.33.0, one GPU, bf16",
        verdict_table(examples, "vllm@0.33.0"),
        "## moeq's built-in kernels",
        "The same on every device they run on (sm_80 and newer, gfx942, gfx950; a CPU in Triton's interpreter):",
        _builtin_table(examples),
        "## Families",
        _families("vllm@0.33.0"),
    ]
    return "\n\n".join(parts) + "\n"


def _families(engine: str) -> str:
    rows = []
    for row in backend_rows(engine):
        layouts = ", ".join(row["layouts"]) or f"none: {row['no_layout']}"
        flag = f"`{row['flag']}`" if row["flag"] else ""
        rows.append([row["family"], row["backend"], flag, ", ".join(row["devices"]), "; ".join(row["limits"]), layouts])
    return markdown(["family", "backend", "flag", "device", "limits", "offline layout"], rows)

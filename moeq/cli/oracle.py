"""`moeq oracle`: the backend for one deployment with every reason, or a matrix over GPUs, TP and EP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from moeq.cli import options
from moeq.cli.out import Output
from moeq.errors import MoeqError

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.deploy.deployment import Deployment
    from moeq.oracle.records import MoeShape, Verdict
    from moeq.oracle.sweep import Cell
    from moeq.schemes.base import Scheme

_DEPLOY = options.DEPLOY


def command(
    ctx: typer.Context,
    src: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint folder, or Hub repository org/name.")],
    revision: options.RevisionOption = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="One device or several: a100,h100,gfx942.", rich_help_panel=_DEPLOY)
    ] = None,
    tp: Annotated[
        str | None, typer.Option("--tp", help="One size or several: 1,2,4,8.", rich_help_panel=_DEPLOY)
    ] = None,
    ep: Annotated[str | None, typer.Option("--ep", help="One size or several: 1,8.", rich_help_panel=_DEPLOY)] = None,
    dp: Annotated[
        int | None, typer.Option("--dp", help="Data-parallel size (default: 1).", rich_help_panel=_DEPLOY)
    ] = None,
    all2all: Annotated[
        str | None, typer.Option("--all2all", help="All-to-all kind of the engine.", rich_help_panel=_DEPLOY)
    ] = None,
    batched: options.BatchedOption = None,
    lora: options.LoraOption = None,
    eplb: Annotated[
        bool | None, typer.Option("--eplb/--no-eplb", help="Expert load balancing.", rich_help_panel=_DEPLOY)
    ] = None,
    dtype: options.DtypeOption = None,
    backend: options.BackendOption = None,
    engine: options.EngineOption = None,
    quantization: Annotated[
        str | None, typer.Option("--quantization", help="Method named to the engine.", rich_help_panel=_DEPLOY)
    ] = None,
    package: Annotated[
        list[str] | None, typer.Option("--package", help="humming=no, aiter=yes ...", rich_help_panel=_DEPLOY)
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", help="NAME=VALUE of the engine.", rich_help_panel=_DEPLOY)
    ] = None,
    deploy: options.DeployOption = None,
    require: Annotated[
        list[str] | None,
        typer.Option("--require", help="Cell that must have a backend: H100/tp8, H100/tp8=MARLIN, all."),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="The matrix as a Markdown table.")] = False,
    brief: Annotated[bool, typer.Option("--brief", help="Only the first reason of each backend.")] = False,
    json: options.JsonOption = False,
) -> int:
    """Decide the kernel backend for a deployment, with every reason. Several values of --gpu, --tp, --ep: a matrix."""
    gpus, tps, eps = _names(gpu), _sizes("tp", tp), _sizes("ep", ep)
    base = options.deployment(
        deploy, gpu=gpus[0] if gpus else None, tp=tps[0] if tps else None, ep=eps[0] if eps else None, dp=dp,
        all2all=all2all, batched=batched, lora=lora, eplb=eplb, dtype=dtype, backend=backend, engine=engine,
        quantization=quantization, packages=_packages(package), env=_pairs("env", env),
    )  # fmt: skip
    out: Output = ctx.obj
    many = max(len(gpus), len(tps), len(eps)) > 1 or bool(require) or markdown
    if not many:
        return _single(out, src, revision, base, brief=brief)
    return _matrix(out, src, revision, base, (gpus, tps, eps), require or [], markdown)


class LayerQuestion(NamedTuple):
    """What the oracle is asked about the layers of a checkpoint that share a scheme."""

    layers: list[int]
    scheme: Scheme
    shape: MoeShape
    config: dict[str, Any] | None
    prefix: str


def _questions(src: str, revision: str | None) -> list[LayerQuestion]:
    """One question per scheme, the first quantised layer's first. Per-module rules of the config are read per layer."""
    from moeq.model import open as open_checkpoint
    from moeq.pipeline.plan.decision import first_layer, moe_shape

    checkpoint = open_checkpoint(src, revision=revision)
    if checkpoint.kind == "converted":
        raise MoeqError("usage.converted", f"{src} is already converted", "ask about its source")
    declared = checkpoint.source.config.get("quantization_config")
    first = first_layer(checkpoint)
    found: dict[Scheme, LayerQuestion] = {}
    for layer in (first, *(one for one in checkpoint.info.moe_layers if one != first)):
        scheme = checkpoint.scheme_of(layer)
        if scheme in found:
            found[scheme].layers.append(layer)
            continue
        config = declared if isinstance(declared, dict) else None
        shape, prefix = moe_shape(checkpoint, layer), checkpoint.expert_prefix(layer)
        found[scheme] = LayerQuestion([layer], scheme, shape, config, prefix)
    return list(found.values())


def _single(out: Output, src: str, revision: str | None, deployment: Deployment, *, brief: bool) -> int:
    from moeq.oracle.decide import judge

    asked = _questions(src, revision)
    verdicts = [judge(q.scheme, q.shape, deployment, config=q.config, prefix=q.prefix) for q in asked]
    ok = all(verdict.ok for verdict in verdicts)

    def render(console: Console) -> None:
        from moeq.report.text import ranges
        from moeq.report.verdict_text import render_summary

        for question, verdict in zip(asked, verdicts, strict=True):
            layers = f"  layers {ranges(sorted(question.layers))}" if len(asked) > 1 else ""
            console.print(f"{src}  {verdict.scheme}{layers}", style="bold")
            render_summary(console, verdict, verbose=not brief)
            _details(console, verdict)

    others = [
        {"layers": sorted(question.layers), "verdict": verdict.to_json()}
        for question, verdict in zip(asked[1:], verdicts[1:], strict=True)
    ]
    out.answer({"source": src, "verdict": verdicts[0].to_json(), "other_schemes": others}, render, ok=ok)
    return 0 if ok else 1


def _details(console: Console, verdict: Verdict) -> None:
    """The rest of a verdict: asked, keys, sizes, memory, what mattered, gates, notes."""
    from moeq.report.text import human_bytes

    facts = [("asked", verdict.asked), ("method", verdict.method), ("keys", verdict.weight_key)]
    if verdict.sizes:
        s = verdict.sizes
        padded = (
            f"hidden {s.hidden} -> {s.padded_hidden}, intermediate per rank {s.intermediate} -> {s.padded_intermediate}"
        )
        facts.append(("sizes", f"{padded}, {s.local_experts} experts per rank"))
    if verdict.transient_bytes:
        facts.append(("repack", f"{human_bytes(verdict.transient_bytes)} extra per layer while the engine loads"))
    if verdict.mattered:
        facts.append(("mattered", ", ".join(f"{name} {value}" for name, value in verdict.mattered)))
    facts += [("gate", f"{gate.code} {gate.stage}: {gate.text}") for gate in verdict.gates if not gate.passed]
    facts += [("note", note) for note in verdict.notes]
    for label, text in facts:
        if text:
            console.print(f"  {label:<10} {text}")


def _matrix(
    out: Output,
    src: str,
    revision: str | None,
    base: Deployment,
    axes: tuple[list[str], list[int], list[int]],
    require: Sequence[str],
    markdown: bool,
) -> int:
    from moeq.deploy.gpus import parse_gpu
    from moeq.oracle.sweep import sweep, unmet
    from moeq.oracle.table import matrix_markdown

    gpus = [parse_gpu(name) for name in axes[0]] or [base.gpu]
    tps, eps = axes[1] or [base.tp], axes[2] or [base.ep]
    tables = [
        (q.scheme.title, sweep(q.scheme, q.shape, base, gpus, tps, eps, q.config, q.prefix))
        for q in _questions(src, revision)
    ]
    failures = [text for _, cells in tables for text in unmet(cells, require)]
    document = {
        "source": src,
        "schemes": [title for title, _ in tables],
        "cells": [{"scheme": title, **_cell(cell)} for title, cells in tables for cell in cells],
        "required": list(require),
        "unmet": failures,
    }

    def render(console: Console) -> None:
        for title, cells in tables:
            if markdown:
                for line in matrix_markdown(cells).splitlines():
                    console.print(line, soft_wrap=True)
            else:
                _table(console, title, cells)
        for failure in failures:
            out.note(f"required: {failure}")

    out.answer(document, render, ok=not failures)
    return 1 if failures else 0


def _cell(cell: Cell) -> dict[str, Any]:
    verdict = cell.verdict
    return {
        "gpu": cell.gpu,
        "tp": cell.tp,
        "ep": cell.ep,
        "ok": verdict.ok,
        "backend": verdict.chosen.backend if verdict.chosen else None,
        "experts": verdict.chosen.experts if verdict.chosen else None,
        "convert": verdict.convert.layout if verdict.convert else None,
        "flag": verdict.convert.flag if verdict.convert else None,
        "advisories": [advisory.code for advisory in verdict.advisories],
        "refusal": verdict.refusal or None,
    }


def _table(console: Console, title: str, cells: Sequence[Cell]) -> None:
    from rich.table import Table
    from rich.text import Text

    from moeq.oracle.table import matrix

    columns, rows = matrix(cells)
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(Text(word, style="red" if word == "-" else "") for word in row))
    console.print(table)
    noted = {advisory.code for cell in cells for advisory in cell.verdict.advisories}
    if noted:
        console.print(f"* with advisories: {', '.join(sorted(noted))} (moeq explain CODE)")


def _names(text: str | None) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()] if text else []


def _sizes(name: str, text: str | None) -> list[int]:
    try:
        return [int(part) for part in _names(text)]
    except ValueError:
        raise MoeqError("usage.deployment", f"--{name} {text}: sizes are integers, separated by commas") from None


def _pairs(name: str, given: list[str] | None) -> dict[str, str] | None:
    if not given:
        return None
    split = [text.partition("=") for text in given]
    if any(not sign for _, sign, _ in split):
        raise MoeqError("usage.deployment", f"--{name} takes NAME=VALUE, not {' '.join(given)}")
    return {key: value for key, _, value in split}


_WORDS = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


def _packages(given: list[str] | None) -> dict[str, bool] | None:
    pairs = _pairs("package", given)
    if pairs is None:
        return None
    wrong = [value for value in pairs.values() if value.lower() not in _WORDS]
    if wrong:
        raise MoeqError("usage.deployment", f"--package takes NAME=yes or NAME=no, not {wrong[0]}")
    return {key: _WORDS[value.lower()] for key, value in pairs.items()}

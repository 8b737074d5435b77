"""`moeq oracle`: the backend for one deployment with every reason, or a matrix over GPUs, TP and EP."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeq.cli import options
from moeq.cli.files import require_writable, write_text
from moeq.cli.inspect import verdict_document
from moeq.cli.out import Output
from moeq.deploy.gpus import parse_gpu
from moeq.errors import ExitCode, MoeqError
from moeq.oracle.sweep import Cell, deployments, matrix, matrix_markdown, unmet
from moeq.pipeline.plan.options import Question
from moeq.report.backend_matrix import TP_SIZES
from moeq.report.text import human_bytes, line, ranges

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.deploy.deployment import Deployment, Gpu
    from moeq.model import Checkpoint
    from moeq.oracle.records import Verdict
    from moeq.pipeline.plan.decide import Answer


def _several(name: str, help_: str) -> Any:
    return Annotated[str | None, typer.Option(f"--{name}", help=help_, rich_help_panel=options.DEPLOY)]


@options.with_deployment(
    gpu=_several("gpu", "One device or several: a100,h100,gfx942."),
    tp=_several("tp", "One size or several: 1,2,4,8."),
    ep=_several("ep", "One size or several: 1,8."),
)
def command(
    ctx: typer.Context,
    src: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint folder, or Hub repository org/name.")],
    given: Any,
    revision: options.RevisionOption = None,
    require: Annotated[
        list[str] | None,
        typer.Option(
            "--require",
            help="Cell that must work: a backend runs it, and `convert` writes for it unless there is nothing to "
            "convert: H100/tp8, H100/tp8=MARLIN, all. GPUs and sizes not given as options are taken from the cells.",
        ),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="The matrix as a Markdown table.")] = False,
    brief: Annotated[bool, typer.Option("--brief", help="Only the first reason of each backend.")] = False,
    rank: Annotated[
        bool, typer.Option("--rank", help="Rank the backends that work by measured times (H100, H200).")
    ] = False,
    html: options.HtmlOption = None,
    json: options.JsonOption = False,
) -> int:
    """Decide the kernel backend for a deployment, with every reason. Several values of --gpu, --tp, --ep: a matrix."""
    from moeq.model import open as open_checkpoint

    gpus, tps, eps = (_names(given.options["gpu"]), *(_sizes(name, given.options[name]) for name in ("tp", "ep")))
    if require:
        from moeq.oracle.sweep import required_axes

        named_gpus, named_tps, named_eps = required_axes(require)
        gpus, tps, eps = gpus or named_gpus, tps or named_tps, eps or named_eps
    base = given.make(gpu=gpus[0] if gpus else None, tp=tps[0] if tps else None, ep=eps[0] if eps else None)
    out: Output = ctx.obj
    if html is not None:
        require_writable(html)
    checkpoint = open_checkpoint(src, revision=revision)
    checkpoint.require_source()
    if html is not None:
        write_text(html, _page(checkpoint, base, gpus, tps))
    if ".." in base.engine:
        return _upgrade(out, src, checkpoint, base)
    is_matrix = max(len(gpus), len(tps), len(eps)) > 1 or bool(require) or markdown
    if not is_matrix:
        return _single(out, src, checkpoint, base, brief=brief, rank=rank)
    if rank:
        raise MoeqError("usage.deployment", "--rank ranks backends of one GPU, TP and EP", "name one of each")
    return _matrix(out, src, checkpoint, base, (gpus, tps, eps), require or [], markdown)


def _page(checkpoint: Checkpoint, base: Deployment, gpus: list[str], sizes: list[int]) -> str:
    """Render backends by GPU and size; sizes that were not given are the usual ones."""
    from moeq.report.oracle_page import render

    return render(checkpoint, base, [parse_gpu(name) for name in gpus] or [base.gpu], sizes or TP_SIZES)


def _single(out: Output, src: str, checkpoint: Checkpoint, deployment: Deployment, *, brief: bool, rank: bool) -> int:
    from moeq.pipeline.plan.commands import next_command
    from moeq.pipeline.plan.decide import advised, rank_backends
    from moeq.transcode.advise import advise

    found = advised(checkpoint, Question(deployment), explain=True)
    unknown = found.verdict.error is not None and found.verdict.error.kind == "OVERRIDE_UNKNOWN"
    if unknown and found.error is not None:
        raise found.error
    ok = all(part.verdict.ok for part in found.parts)
    transcoding = None if ok else advise(checkpoint, deployment, src)
    rankings = [rank_backends(checkpoint, found, part) for part in found.parts] if rank else []

    def render(console: Console) -> None:
        from moeq.report.verdict_text import render_part, render_ranking

        for part in found.parts:
            layers = f"  layers {ranges(part.layers)}" if len(found.parts) > 1 else ""
            console.print(f"{src}  {part.verdict.scheme}{layers}", style="bold")
            render_part(console, found, part, verbose=not brief)
            _details(console, part.verdict)
        for ranking in rankings:
            render_ranking(console, ranking)
        if found.error is not None and found.error.hint:
            line(console, "nearest", found.error.hint)
        if transcoding is not None:
            line(console, "transcode", transcoding.text)
        if following is not None:
            line(console, "next", following)

    following = next_command(shlex.quote(src), checkpoint, found)
    first, *others = ({"layers": part.layers, "verdict": verdict_document(found, part)} for part in found.parts)
    document = {
        "source": src,
        "verdict": first["verdict"],
        "other_schemes": others,
        "converts": found.ok,
        "loads_in": [loader.title for loader in found.loaders],
        "next": following,
        "transcode": None if transcoding is None else transcoding.to_json(),
        "rankings": [ranking.to_json() for ranking in rankings] if rank else None,
    }
    out.answer(document, render, ok=ok)
    return _exit_code([part.verdict for part in found.parts])


def _upgrade(out: Output, src: str, checkpoint: Checkpoint, deployment: Deployment) -> int:
    """Show what each version of a range decides and what changed; the answer is no if the newest one refuses."""
    from functools import cache

    from moeq.oracle.upgrade import steps
    from moeq.oracle.versions import version_range
    from moeq.pipeline.plan.decide import answer

    @cache
    def answer_for(engine: str) -> Answer:
        return answer(checkpoint, Question(replace(deployment, engine=engine)), explain=False)

    def decided(index: int) -> Callable[[str], Verdict]:
        return lambda engine: answer_for(engine).parts[index].verdict

    layers = [part.layers for part in answer_for(version_range(deployment.engine)[-1]).parts]
    found = [steps(decided(index), deployment.engine) for index in range(len(layers))]
    ok = all(rows[-1].verdict.ok for rows in found)

    def render(console: Console) -> None:
        from rich.table import Table

        from moeq.oracle.upgrade import table

        for rows in found:
            columns, cells = table(rows)
            shown = Table(title=rows[-1].verdict.scheme, title_justify="left")
            for column in columns:
                shown.add_column(column, overflow="fold")
            for row in cells:
                shown.add_row(*row)
            console.print(shown)
            for step in rows:
                for change in step.differences:
                    before, after = change.before or "none", change.after or "none"
                    console.print(f"  {step.engine}  {change.what}: {before} -> {after}")

    schemes = [
        {"scheme": rows[-1].verdict.scheme, "layers": part, "versions": [step.to_json() for step in rows]}
        for part, rows in zip(layers, found, strict=True)
    ]
    out.answer({"source": src, "engines": deployment.engine, "schemes": schemes}, render, ok=ok)
    return _exit_code([rows[-1].verdict for rows in found])


def _exit_code(verdicts: Sequence[Verdict]) -> ExitCode:
    """Return the code of an answer: a no counts more than an answer that is not known."""
    if all(verdict.ok for verdict in verdicts):
        return ExitCode.OK
    return ExitCode.NO if any(not verdict.ok and verdict.known for verdict in verdicts) else ExitCode.UNKNOWN


def _details(console: Console, verdict: Verdict) -> None:
    """Print the rest of a verdict: asked, keys, sizes, memory, what mattered, gates, notes."""
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
    facts += [
        ("gate", f"{gate.code} {gate.stage}: {gate.text}{f' → {gate.remedy}' if gate.remedy else ''}")
        for gate in verdict.gates
        if not gate.passed
    ]
    facts += [("note", note) for note in verdict.notes]
    for label, text in facts:
        if text:
            line(console, label, text)


def _matrix(
    out: Output,
    src: str,
    checkpoint: Checkpoint,
    base: Deployment,
    axes: tuple[list[str], list[int], list[int]],
    require: Sequence[str],
    markdown: bool,
) -> int:
    gpus = [parse_gpu(name) for name in axes[0]] or [base.gpu]
    swept = _cells(checkpoint, base, gpus, axes[1] or [base.tp], axes[2] or [base.ep])
    tables = list(swept.items())
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
                for row in matrix_markdown(cells).splitlines():
                    console.print(row, soft_wrap=True)
            else:
                _table(console, title, cells)
        for failure in failures:
            out.note(f"required: {failure}")

    out.answer(document, render, ok=not failures)
    for failure in failures:
        out.annotate("error", "--require", failure)
    return 1 if failures else 0


def _cells(
    checkpoint: Checkpoint, base: Deployment, gpus: Sequence[Gpu], tps: Sequence[int], eps: Sequence[int]
) -> dict[str, list[Cell]]:
    """Decide every cell of GPUs x TP x EP, by scheme. Impossible cells are refusals, never exceptions."""
    from moeq.pipeline.plan.decide import answer

    found: dict[str, list[Cell]] = {}
    for deployment in deployments(base, gpus, tps, eps):
        answered = answer(checkpoint, Question(deployment), brief=True)
        is_empty = answered.error is not None and answered.error.code == "answer.nothing-to-convert"
        for part in answered.parts:
            error = part.error or answered.error
            refused = None if error is None or is_empty else error.message
            loaders = tuple(loader.title for loader in part.choice.loaders) if part.choice else ()
            cell = Cell(deployment.gpu.name, deployment.tp, deployment.ep, part.verdict, refused, loaders)
            found.setdefault(part.verdict.scheme, []).append(cell)
    return found


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
        "refusal": verdict.refusal or cell.refused,
        "converts": verdict.convert is not None,
        "loads_in": list(cell.loads_in),
    }


def _table(console: Console, title: str, cells: Sequence[Cell]) -> None:
    from rich.table import Table
    from rich.text import Text

    columns, rows = matrix(cells)
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")  # a name that is cut could be one of several
    for row in rows:
        table.add_row(*(Text(word, style="red" if word == "-" else "") for word in row))
    console.print(table)
    noted = {advisory.code for cell in cells for advisory in cell.verdict.advisories}
    if noted:
        console.print(f"* with advisories: {', '.join(sorted(noted))} (moeq explain CODE)")
    for cell in cells:
        if cell.refused is not None and cell.verdict.ok:
            console.print(f"{cell.name}: runs, and convert cannot write for it: {cell.refused}")


def _names(text: str | None) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()] if text else []


def _sizes(name: str, text: str | None) -> list[int]:
    try:
        return [int(part) for part in _names(text)]
    except ValueError:
        raise MoeqError("usage.deployment", f"--{name} {text}: sizes are integers, separated by commas") from None

"""`inspect`'s answer for a terminal: one screen that a person reads in ten seconds, more with `verbose`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

from moeq.model.converted import ConvertedCheckpoint
from moeq.pipeline.plan.commands import next_command, next_of_converted, serve_source
from moeq.report.conversion_facts import conversion_facts
from moeq.report.text import counted, human_bytes, line, print_hanging, ranges
from moeq.report.verdict_text import answer_text, ranking_line, render_candidates, render_conversion
from moeq.schemes.gguf_blocks import CODED, exactness

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.checkpoint.manifest import Manifest
    from moeq.checkpoint.warning import CheckpointWarning
    from moeq.model import Checkpoint
    from moeq.model.info import CheckpointInfo, SchemeUse
    from moeq.oracle.ranking import Ranking
    from moeq.pipeline.plan.decide import Answer, Degree

_ZERO_POINTS = {
    "none": "no zero points stored",
    "stored": "zero points stored as they are",
    "stored-minus-one": "zero points stored minus one",
}


@dataclass(frozen=True)
class Inspection:
    """Findings of `inspect`."""

    checkpoint: Checkpoint
    answer: Answer | None  #: answer to what `convert` would write, or None
    no_answer: str | None  #: reason why there is no answer
    degrees: tuple[Degree, ...] = ()  #: tensor-parallel degrees; empty for a converted checkpoint
    found: Iterable[CheckpointWarning] = ()  #: warnings of a scan of the data
    #: Labels and texts that say whether a converted checkpoint runs where it was asked about.
    fit: Sequence[tuple[str, str]] = ()
    ranking: Ranking | None = None


def render(console: Console, inspection: Inspection, *, verbose: bool) -> None:
    """Print the answer and the next step; then what the checkpoint holds, how, and which backends are near."""
    checkpoint, info = inspection.checkpoint, inspection.checkpoint.info
    print_hanging(console, _answer(inspection), 2)
    for label, text in (*(inspection.fit or next_steps(inspection)), *_fastest(inspection)):
        line(console, label, text)
    line(console, "checkpoint", Text(info.name, style="bold"))
    for label, text in checkpoint_facts(info, verbose):
        line(console, label, text)
    if info.quant_method == "gguf":
        line(console, "types", _gguf_types(checkpoint.quantization_config or {}))
    if inspection.degrees:
        degrees = [f"{one.tp}: {one.intermediate if one.fits else 'no'}" for one in inspection.degrees]
        line(console, "convert TP", "; ".join(degrees))
        for degree in inspection.degrees if verbose else ():
            if degree.why:
                line(console, "", f"TP {degree.tp}: {degree.why}")
    if isinstance(checkpoint, ConvertedCheckpoint):
        for label, text in _conversion(checkpoint.manifest):
            line(console, label, text)
    for warning in (*info.warnings, *inspection.found):
        line(console, "odd", f"{warning.message} ({warning.code})", "yellow")
    for refusal in info.refusals:
        line(console, "no convert", refusal, "red")
    if inspection.answer is not None:
        part = inspection.answer.parts[0]
        render_conversion(console, inspection.answer, part)
        render_candidates(console, part.verdict, verbose=verbose, near=not verbose)


def _answer(inspection: Inspection) -> Text:
    """Return the first line: the verdict, what the folder is a conversion for, or why there is no verdict."""
    checkpoint = inspection.checkpoint
    if isinstance(checkpoint, ConvertedCheckpoint):
        facts = conversion_facts(checkpoint.manifest)
        return Text(f"Converted for {facts.deployment}: {', '.join(facts.layouts)}", style="bold")
    if inspection.answer is None:
        return Text(f"No verdict: {inspection.no_answer or 'none'}")
    return answer_text(inspection.answer.verdict)


def _fastest(inspection: Inspection) -> Iterator[tuple[str, str]]:
    """Yield the fastest measured backends, where there are any."""
    if inspection.ranking is not None and inspection.ranking.ranks:
        yield "fastest", f"{ranking_line(inspection.ranking)} (estimated: oracle --rank)"


def next_steps(inspection: Inspection) -> Iterator[tuple[str, str]]:
    """Yield the command that a user most probably wants next, and the alternative to it."""
    checkpoint, answer = inspection.checkpoint, inspection.answer
    name = shlex.quote(checkpoint.info.name)
    if isinstance(checkpoint, ConvertedCheckpoint):
        yield "next", next_of_converted(name, checkpoint)
    elif checkpoint.info.quant_method == "gguf":
        yield "next", _from_gguf(name, checkpoint.info)
    elif answer is None:
        yield "next", f"moeq inspect {name} --gpu NAME"
    elif following := next_command(name, checkpoint, answer):
        yield "next", following
        if answer.ok and answer.verdict.ok and (serve := serve_source(name, checkpoint, answer)):
            yield "or", f"{serve} (the source in the engine's kernels)"
        if answer.error is not None and answer.error.code == "answer.lossy" and answer.error.hint:
            yield "or", answer.error.hint
    else:
        hint = answer.error.hint if answer.error is not None else None
        yield "next", hint or f"moeq oracle {name} has all reasons"


def _gguf_types(table: Mapping[str, Any]) -> str:
    """Count the tensors of a GGUF file by type."""
    counts = [
        f"{part} " + ", ".join(f"{kind} {count}" for kind, count in table[key].items())
        for part, key in (("experts", "experts"), ("the rest", "others"))
    ]
    return "; ".join(counts)


def _from_gguf(name: str, info: CheckpointInfo) -> str:
    """Return the command that writes the same values for engines, or that only compares them if none load them."""
    coded = all(use.scheme.checkpoint_format in CODED for use in info.schemes)
    if coded:
        return f"moeq transcode {name} DST --to compressed-tensors"
    return f"moeq transcode {name} DST --to bf16 --check-only (fp32 is exact)"


def _conversion(manifest: Manifest) -> Iterable[tuple[str, str]]:
    facts = conversion_facts(manifest)
    revision = f", revision {manifest.source.revision}" if manifest.source.revision else ""
    yield "converted", f"by moeq {manifest.moeq_version} from {manifest.source.name}{revision}"
    yield "layout", f"{', '.join(facts.layouts)} for {manifest.backend}"
    yield "for", facts.deployment
    for text in dict.fromkeys(layer.sharding.why for layer in manifest.layers if layer.sharding.why):
        yield "ranks", text
    if manifest.copied:
        yield "copied", f"layers {facts.copied} unchanged"
    yield "loads in", ", ".join(manifest.loads_in) or "nothing yet"


def checkpoint_facts(info: CheckpointInfo, verbose: bool) -> Iterable[tuple[str, str]]:
    """Yield labelled lines about model, sizes, schemes and bytes."""
    family = f"{info.family}, told from tensor names" if info.family_from_names else info.family
    yield "model", f"{info.architecture} ({family})"
    yield "layers", _layers(info)
    shared = f", {info.shared_experts} shared" if info.shared_experts else ""
    yield "experts", f"{info.num_experts} per layer, top {info.top_k or '?'}{shared}, activation {info.activation}"
    inner = f" (experts read {info.expert_input_size})" if info.expert_input_size != info.hidden_size else ""
    yield "sizes", f"hidden {info.hidden_size}{inner}, expert intermediate {info.intermediate_size}"
    rule = info.routing
    renormalised = "renormalised" if rule.renormalize else "not renormalised"
    if verbose:
        yield "routing", f"{rule.scoring}, {renormalised}, scaled by {rule.scaling_factor:g}, {rule.num_groups} groups"
    for use in info.schemes:
        yield "scheme", _scheme(use, len(info.moe_layers))
        yield "", _storage(use)
    total = info.expert_bytes + info.other_bytes
    share = 100 * info.expert_bytes / max(total, 1)
    yield (
        "bytes",
        f"experts {human_bytes(info.expert_bytes)} ({share:.0f} %), the rest {human_bytes(info.other_bytes)}; "
        f"{info.num_tensors:,} tensors in {counted(info.num_files, 'file')}",
    )
    if info.modules:
        yield "quantised", ", ".join(f"{use.part} {use.quantized}/{use.quantized + use.plain}" for use in info.modules)


def _layers(info: CheckpointInfo) -> str:
    dense = f", dense {ranges(info.dense_layers)}" if info.dense_layers else ""
    mtp = f", multi-token prediction {ranges(info.mtp_layers)}" if info.mtp_layers else ""
    return f"{info.num_layers}, experts in {ranges(info.moe_layers)}{dense}{mtp}"


def _scheme(use: SchemeUse, layers: int) -> str:
    where = "" if len(use.layers) == layers else f" in layers {ranges(use.layers)}"
    part = "" if len(use.projections) > 1 else f" ({', '.join(use.projections)})"
    scheme = use.scheme
    if scheme.format == "gguf":
        return f"{use.title}{part}{where}"
    order = "act-order" if scheme.act_order else "no act-order"
    symmetry = "symmetric" if scheme.weight.symmetric else "with zero points"
    group = (
        f"group {scheme.group_size}" if scheme.group_size > 0 else f"one scale per {scheme.weight.scale.granularity}"
    )
    activation = f", {scheme.activation.dtype} activations" if scheme.activation else ""
    return f"{scheme.format} {scheme.weight.dtype}, {group}, {symmetry}, {order}{activation}{part}{where}"


def _storage(use: SchemeUse) -> str:
    scheme = use.scheme
    if scheme.format == "gguf":
        return exactness(scheme.checkpoint_format)
    unused = ", unused" if scheme.weight.symmetric and scheme.zero_point != "none" else ""
    writer = f", written by {scheme.writer}" if scheme.writer else ""
    return f"scales {scheme.weight.scale.dtype}, {_ZERO_POINTS[scheme.zero_point]}{unused}{writer}"

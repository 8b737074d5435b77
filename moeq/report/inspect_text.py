"""`inspect`'s answer for a terminal: one screen that a person reads in ten seconds, more with `verbose`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.text import Text

from moeq.model.sharding import ShardFit, shard_fits
from moeq.report.text import human_bytes, ranges

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.checkpoint.warning import CheckpointWarning
    from moeq.model import Checkpoint
    from moeq.model.info import CheckpointInfo, SchemeUse
    from moeq.oracle.records import Verdict

_ZERO_POINTS = {
    "none": "no zero points stored",
    "stored": "zero points stored as they are",
    "stored-minus-one": "zero points stored minus one",
}


def render(
    console: Console,
    checkpoint: Checkpoint,
    verdict: Verdict | None,
    no_verdict: str | None,
    *,
    verbose: bool,
    found: Iterable[CheckpointWarning] = (),
) -> None:
    """What it is, how it is quantised, what is odd, how large; then the verdict.

    Args:
        console: where to draw.
        checkpoint: what was inspected.
        verdict: the oracle's answer, or None.
        no_verdict: why there is none.
        verbose: everything instead of one screen.
        found: what a scan of the data found.
    """
    info = checkpoint.info
    console.print(Text(info.name, style="bold"))
    for label, text in _facts(info, verbose):
        _line(console, label, text)
    fits = shard_fits(checkpoint.spec(info.moe_layers[0], "w2"))
    _line(console, "TP shards", "; ".join(map(_short_fit, fits)))
    if verbose:
        for fit in fits:
            _line(console, "", f"TP {fit.tp}: {fit.arithmetic}")
    if checkpoint.kind == "converted":
        _line(console, "kind", "an output of `moeq convert`")
    for warning in (*info.warnings, *found):
        _line(console, "odd", f"{warning.message} ({warning.code})", "yellow")
    for refusal in info.refusals:
        _line(console, "no convert", refusal, "red")
    if verdict is None:
        _line(console, "verdict", no_verdict or "none")
        return
    from moeq.report.verdict_text import render_summary

    render_summary(console, verdict, verbose=verbose)


def _short_fit(fit: ShardFit) -> str:
    """`4: 192`, `8: 96 pads to 128`, `16: 48 cuts a scale group`."""
    if fit.intermediate is None:
        return f"{fit.tp}: does not divide"
    if not fit.groups_whole:
        return f"{fit.tp}: {fit.intermediate} cuts a scale group"
    return f"{fit.tp}: {fit.intermediate}" + ("" if fit.tiles_whole else f" pads to {fit.padded}")


def _facts(info: CheckpointInfo, verbose: bool) -> Iterable[tuple[str, str]]:
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
        f"{info.num_tensors:,} tensors in {info.num_files} file{'s' if info.num_files != 1 else ''}",
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
    order = "act-order" if scheme.act_order else "no act-order"
    symmetry = "symmetric" if scheme.weight.symmetric else "with zero points"
    group = (
        f"group {scheme.group_size}" if scheme.group_size > 0 else f"one scale per {scheme.weight.scale.granularity}"
    )
    activation = f", {scheme.activation.dtype} activations" if scheme.activation else ""
    return f"{scheme.format} {scheme.weight.dtype}, {group}, {symmetry}, {order}{activation}{part}{where}"


def _storage(use: SchemeUse) -> str:
    scheme = use.scheme
    unused = ", unused" if scheme.weight.symmetric and scheme.zero_point != "none" else ""
    writer = f", written by {scheme.writer}" if scheme.writer else ""
    return f"scales {scheme.weight.scale.dtype}, {_ZERO_POINTS[scheme.zero_point]}{unused}{writer}"


def _line(console: Console, label: str, text: str, style: str = "") -> None:
    console.print(Text.assemble((f"  {label:<10} ", "dim"), (text, style)))

"""Whether an engine's model class knows the names and forms under which experts are stored."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from moeq.checkpoint.names import FUSED, LayerExperts
from moeq.errors import listed
from moeq.model import Checkpoint
from moeq.model.expert_kinds import WHOLE_PARTS, Experts, is_whole
from moeq.oracle.engines.vllm.expert_names import EXPERT, ClassNames, StoredName, names_of_class
from moeq.oracle.engines.vllm.facts import versions_with
from moeq.oracle.loaders import version_ranges
from moeq.oracle.records import Gate, Reason, Verdict
from moeq.schemes.unquantized import PLAIN_DTYPES
from moeq.spelling import option


def with_names(checkpoint: Checkpoint, verdict: Verdict, layer: int) -> Verdict:
    """Return the verdict, with a failed gate if the engine's class does not load the names of the experts.

    No change of the deployment helps then. If the class is not known, the verdict gets a note. `convert` stays, since
    plug-ins load converted experts under names of their own.
    """
    verdict = _with_stale_gate(checkpoint, _with_class_gate(checkpoint, verdict))
    problem = unloaded(checkpoint.experts(layer).layer) or names_problem(checkpoint, verdict.engine, layer)
    listed = checkpoint.experts(layer).layer.listed and verdict.engine.startswith("sglang")
    vllm = verdict.engine.startswith("vllm")
    architecture = checkpoint.info.architecture
    if problem is None and vllm and known_class(architecture, verdict.engine) is None:
        note = f"names of experts were not checked: those that {architecture or 'the class'} loads are not known here"
        return replace(verdict, notes=(*verdict.notes, note))
    if problem is None or not (vllm or listed):
        return verdict
    return _with_gate(replace(verdict, works=None), problem, "moeq transcode")


def _with_gate(verdict: Verdict, text: str, remedy: str) -> Verdict:
    """Return the verdict with a failed gate. Only the backends that read a layout of moeq still work."""
    gate = Gate("G12", "names of experts", False, text, "ValueError", "LOADING", remedy)
    reason = Reason(gate.code, gate.text)
    rows = tuple(
        replace(row, supported=False, reasons=(reason,)) if row.supported and row.layout is None else row
        for row in verdict.candidates
    )
    rows = tuple(replace(row, unlock=None) for row in rows)
    return replace(verdict, gates=(*verdict.gates, gate), candidates=rows)


def _with_class_gate(checkpoint: Checkpoint, verdict: Verdict) -> Verdict:
    """Return the verdict, with a failed gate if only other versions of vLLM have a class for the model."""
    name, _, version = verdict.engine.partition("@")
    versions = versions_with(checkpoint.info.architecture) if name == "vllm" else None
    if versions is None or version in versions:
        return verdict
    text = f"vLLM {version} has no class {checkpoint.info.architecture}, which {version_ranges(versions)} have"
    return _with_gate(verdict, text, option("engine", f"vllm@{versions[-1]}"))


def _with_stale_gate(checkpoint: Checkpoint, verdict: Verdict) -> Verdict:
    """Return the verdict, with a failed gate if the engine loads other tensors than the index names."""
    tensors = checkpoint.source.tensors
    # Classes skip many names that they do not know, but no unknown name of an expert.
    harmful = [entry for entry in checkpoint.source.stale if entry.name in tensors or ".experts." in entry.name]
    stale = sorted(harmful, key=lambda entry: entry.name not in tensors)
    if not stale or not verdict.engine.startswith(("vllm", "sglang")):
        return verdict
    named = tensors.get(stale[0].name)
    instead = f"in place of the one in {named.file}" if named else "which the index does not name"
    read = listed((f"{entry.name} of {entry.file}" for entry in stale), 1)
    text = f"the engine reads every tensor of every listed file: {read}, {instead}"
    return _with_gate(verdict, text, "moeq convert SRC DST, which leaves stale copies out")


def names_problem(checkpoint: Checkpoint, engine: str, layer: int) -> str | None:
    """Return why an engine's model class does not load a layer's experts as the source stores them.

    The result is None if the class loads them, and if moeq does not know the class.
    """
    experts, known = checkpoint.experts(layer), known_class(checkpoint.info.architecture, engine)
    if known is None:
        return None
    problem = known.stack_problem(experts.layer.stack)
    if known.architecture in _NO_BIASES and any(part == "bias" for _, part in experts.layer.parts):
        problem = problem or f"{known.architecture} loads no biases of experts"
    return problem or known.problem(stored_names(experts))


#: Ends of stacked tensors that no class loads: the engine puts `gate_up_proj` into `w13_weight` and keeps the rest of
#: the name, so that scales look for `w13_weight_weight_scale` (vLLM 0.33.0, `RoutedExperts.load_weights`).
_UNLOADED = re.compile(r"\.(\w*proj|w13|w2)_(weight_(scale|scale_2|scale_inv|packed|global_scale)|input_scale)$")


#: Classes that pass over biases of experts, and then look for them among other parameters (vLLM 0.26.0 to 0.33.0).
_NO_BIASES = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")


def unloaded(layer: LayerExperts) -> str | None:
    """Return why no class loads a layer's experts: a list per projection, stacked scales, or a repeated wrapper."""
    if layer.listed:
        return f"no class loads lists of experts per projection such as {layer.module(next(iter(layer.spelling)), 0)}"
    for entries in layer.parts.values():
        entry = entries.get(FUSED)
        if entry is not None and _UNLOADED.search(entry.name):
            return f"no class loads stacked scales such as {entry.name.removeprefix(layer.prefix).lstrip('.')}"
    words = layer.stack.split(".")
    repeated = next((word for word in words if words.count(word) > 1), None)
    if repeated is not None:
        return f"no class has {repeated!r} {words.count(repeated)} times above its layers, as in {layer.stack}"
    return None


def known_class(architecture: str, engine: str) -> ClassNames | None:
    """Return which names an engine's class loads; None if moeq does not know."""
    name, _, version = engine.partition("@")
    return names_of_class(version, architecture) if name == "vllm" else None


def below_layer(layer: LayerExperts) -> str:
    """Return the path of the experts below their layer, such as `mlp.experts`."""
    return layer.prefix.removeprefix(f"{layer.stack}.{layer.layer}.")


def order_of(*, alternate: bool, transposed: bool, known: bool) -> str | None:
    """Return the order of the rows of a stacked tensor; None if it is not `known`, because formats differ in it."""
    if known and transposed:
        return "transposed"
    if alternate:
        return "interleaved"
    return "halves" if known else None


def stored_names(experts: Experts) -> Iterable[StoredName]:
    """Yield names and forms under which a layer stores its experts."""
    layer, path = experts.layer, below_layer(experts.layer)
    interleaved = experts.kind(0).interleaved
    weights = [entries for (_, part), entries in layer.parts.items() if part == "weight"]
    plain = bool(weights) and all(entry.dtype in PLAIN_DTYPES for entries in weights for entry in entries.values())
    packed = not weights  # packed weights have other part names, and are always stored row by row
    seen: set[str] = set()
    for (projection, part), entries in layer.parts.items():
        entry = entries.get(FUSED)
        if entry is None:
            name = layer.spelling[projection]
            found = StoredName(f"{path}.{name}.{EXPERT}" if layer.listed else f"{path}.{EXPERT}.{name}")
        elif part not in WHOLE_PARTS and is_whole(part, entry):  # one number for all: no rows to cut
            continue
        else:
            alternate = projection == "gate_up" and bool(interleaved)
            order = order_of(alternate=alternate, transposed=plain and experts.transposed, known=plain or packed)
            found = StoredName(path + entry.name.removeprefix(layer.prefix), order)
        if found.path not in seen:
            seen.add(found.path)
            yield found

"""Which layout each layer gets: decided per scheme, so that mixed checkpoints are handled layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moeq.checkpoint.manifest import CopiedLayer
from moeq.deploy.deployment import Deployment
from moeq.errors import MoeqError
from moeq.layouts.registry import get_layout
from moeq.model import Checkpoint
from moeq.oracle.decide import judge
from moeq.oracle.records import Verdict
from moeq.pipeline.plan.decision import decide, first_layer, is_quantised, moe_shape
from moeq.schemes.base import Scheme
from moeq.schemes.registry import get_format


@dataclass(frozen=True)
class Targets:
    """What to make of every layer.

    Attributes:
        verdict: the oracle's verdict for the first quantised layer.
        backend: backend whose kernel reads the result; the layout's id where no backend of the engine does.
        layouts: layer to layout id, for the layers to convert.
        copied: layers to copy unchanged, with the reason.
        refused: layers that cannot be converted, with the error that says why.
    """

    verdict: Verdict
    backend: str
    layouts: Mapping[int, str]
    copied: tuple[CopiedLayer, ...] = ()
    refused: Mapping[int, MoeqError] | None = None


def choose_targets(checkpoint: Checkpoint, deployment: Deployment, layout: str | None = None) -> Targets:
    """Ask the oracle for every scheme of the checkpoint.

    Args:
        checkpoint: the source.
        deployment: where it is to run.
        layout: a layout asked for by id; overrides the choice for every layer.

    Raises:
        MoeqError: `source.not-quantized`, `source.not-convertible`, `answer.backend-unsupported`,
            `answer.no-backend`, `usage.unknown-layout`.
    """
    _require_convertible(checkpoint)
    first = first_layer(checkpoint)
    if layout is not None:
        get_layout(layout)
        verdict = _verdict(checkpoint, deployment)
        backend = _backend_of(verdict, layout)
    else:
        verdict = decide(checkpoint, deployment)
        if verdict.convert is None:
            raise MoeqError("answer.no-backend", verdict.refusal, verdict.nearest)
        backend = verdict.convert.backend
    layouts: dict[int, str] = {}
    copied: list[CopiedLayer] = []
    refused: dict[int, MoeqError] = {}
    found: dict[Scheme, str | MoeqError] = {}
    for layer in checkpoint.info.moe_layers:
        if not is_quantised(checkpoint, layer):
            copied.append(CopiedLayer(layer, "its experts are not quantised"))
            continue
        scheme = checkpoint.scheme_of(layer)
        if scheme not in found:
            usual = layer == first and verdict.convert is not None
            chosen = layout or (verdict.convert.layout if usual and verdict.convert else None)
            found[scheme] = _refusal(checkpoint, scheme) or chosen or _layout_for(checkpoint, deployment, layer)
        target = found[scheme]
        if isinstance(target, MoeqError):
            refused[layer] = target
        else:
            layouts[layer] = target
    return Targets(verdict, backend, layouts, tuple(copied), refused)


def _require_convertible(checkpoint: Checkpoint) -> None:
    """Refuse checkpoints of which nothing can be converted, by name and with the reason."""
    info = checkpoint.info
    if not any(is_quantised(checkpoint, layer) for layer in info.moe_layers):
        raise MoeqError(
            "source.not-quantized", f"{info.name}: the experts are not quantised", "there is nothing to repack"
        )
    of_schemes = {use.refusal for use in info.schemes}
    general = [reason for reason in info.refusals if reason not in of_schemes]
    quantised = [use for use in info.schemes if use.scheme.format != "unquantized"]
    if general or all(use.refusal for use in quantised):
        reasons = dict.fromkeys([*general, *(use.refusal for use in quantised if use.refusal)])
        raise MoeqError("source.not-convertible", f"{info.name}: {'; '.join(reasons)}")


def _refusal(checkpoint: Checkpoint, scheme: Scheme) -> MoeqError | None:
    reason = get_format(scheme.format).refusal
    if reason is None:
        return None
    return MoeqError("source.not-convertible", f"{scheme.title}: {reason}", "--skip-unfit copies such layers unchanged")


def _layout_for(checkpoint: Checkpoint, deployment: Deployment, layer: int) -> str | MoeqError:
    """Layout of a layer that is encoded differently from the first."""
    try:
        verdict = decide(checkpoint, deployment, layer)
    except MoeqError as error:
        return error
    if verdict.convert is None:
        return MoeqError("answer.no-backend", verdict.refusal, verdict.nearest)
    return verdict.convert.layout


def _verdict(checkpoint: Checkpoint, deployment: Deployment) -> Verdict:
    """The verdict whatever it is: a layout was asked for, so that no backend has to fit."""
    layer = first_layer(checkpoint)
    config, prefix = checkpoint.quantization_config, checkpoint.expert_prefix(layer)
    return judge(checkpoint.scheme_of(layer), moe_shape(checkpoint), deployment, config=config, prefix=prefix)


def _backend_of(verdict: Verdict, layout: str) -> str:
    rows = [row for row in verdict.candidates if row.layout == layout]
    rows.sort(key=lambda row: not row.supported)
    return rows[0].backend if rows else layout

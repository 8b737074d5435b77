"""Which layout each layer gets, or the error that says why there is none and what would work instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moeq.checkpoint.manifest import CopiedLayer
from moeq.model import Checkpoint
from moeq.oracle.loaders import Loader
from moeq.oracle.records import Verdict
from moeq.pipeline.plan.candidates import Ask
from moeq.pipeline.plan.decide import Answer
from moeq.pipeline.plan.suggestions import advised


@dataclass(frozen=True)
class Targets:
    """What to make of every layer.

    Attributes:
        verdict: the engine's view of the first quantised layer.
        backend: backend whose kernel reads the result; the layout's id where no backend of the engine does.
        layouts: layer to layout id, for the layers to convert.
        copied: layers to copy unchanged, with the reason.
        loaders: what loads the result.
        overridden: what speaks against the layout and was overridden by force.
    """

    verdict: Verdict
    backend: str
    layouts: Mapping[int, str]
    copied: tuple[CopiedLayer, ...] = ()
    loaders: tuple[Loader, ...] = ()
    overridden: tuple[str, ...] = ()


def choose_targets(checkpoint: Checkpoint, ask: Ask) -> Targets:
    """The targets of a conversion: the layout of every layer, and which layers are copied.

    Raises:
        MoeqError: the answer's error where it is no (`answer.nothing-to-convert`, `answer.not-convertible`,
            `answer.no-backend`, `answer.backend-unsupported`, `usage.tp`, `usage.group-cut`, ...), with the nearest
            things that work as its hint; and what `moeq.pipeline.plan.decide.answer` raises.
    """
    found = advised(checkpoint, ask, brief=True)
    if found.error is not None:
        raise found.error
    return targets_of(found)


def targets_of(found: Answer) -> Targets:
    """The targets of an answer that is yes."""
    return Targets(
        verdict=found.verdict,
        backend=found.first.backend,
        layouts={layer: target.layout for layer, target in found.targets.items()},
        copied=found.copied,
        loaders=found.loaders,
        overridden=tuple(dict.fromkeys(text for target in found.targets.values() for text in target.overridden)),
    )

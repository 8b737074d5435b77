"""The options of a conversion: one record for the command line, Python, plans and journals. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from moeq.deploy.deployment import Deployment


@dataclass(frozen=True)
class ConvertOptions:
    """Choices that decide the bytes of a conversion, beside its source and its deployment."""

    #: Id of the layout to write, which a backend of the engine has to read on the GPU; None: the layout that fits best.
    layout: str | None = None
    #: Write `layout` even if no backend reads it on the GPU; the layout still has to fit the weights.
    force_layout: bool = False
    #: Weights per scale to write; scales and zero points are repeated. None keeps the groups of the source.
    regroup: int | None = None
    skip_unfit: bool = False  #: copy layers that cannot be converted instead of refusing the checkpoint
    allow_lossy: bool = False  #: allow layouts that change stored numbers; the manifest counts the changes
    #: Leave out Python files, pickles and `auto_map`; by default everything beside the weights is copied.
    no_code: bool = False


class ConvertKeywords(TypedDict, total=False):
    """Types of the fields of `ConvertOptions`, for functions that take them as keywords."""

    layout: str | None
    force_layout: bool
    regroup: int | None
    skip_unfit: bool
    allow_lossy: bool
    no_code: bool


@dataclass(frozen=True)
class Ranks:
    """Numbers of ranks that experts are divided among."""

    tp: int = 1  #: ranks that share every expert; 1 under expert parallelism, which keeps experts whole
    ep: int = 1  #: ranks among which the experts are divided

    @classmethod
    def of(cls, tp: int, ep: int) -> Ranks:
        """Return the ranks of a deployment: expert parallelism keeps experts whole."""
        return cls(1 if ep > 1 else tp, ep)


#: Default options, and the ranks of a single process.
DEFAULTS, ONE_RANK = ConvertOptions(), Ranks()


@dataclass(frozen=True)
class Question:
    """A question that `moeq.pipeline.plan.decide` answers: whether and how to convert for a deployment."""

    deployment: Deployment  #: where the checkpoint is to run
    options: ConvertOptions = DEFAULTS  #: options of the conversion

    @property
    def ranks(self) -> Ranks:
        """Ranks that experts are divided among."""
        return Ranks.of(self.deployment.tp, self.deployment.ep)

    def with_deployment(self, **deployment: Any) -> Question:
        """Return the question with other values in its deployment."""
        return replace(self, deployment=replace(self.deployment, **deployment))

    def with_options(self, **options: Any) -> Question:
        """Return the question with other options."""
        return replace(self, options=replace(self.options, **options))

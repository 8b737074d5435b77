"""Where an engine's packed experts come from: a converted checkpoint, or a source that is packed while it is loaded."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from moeq.checkpoint.manifest import STACKED_ROLES, LayerEntry, not_converted
from moeq.errors import MoeqError
from moeq.load.activation_scales import ActivationScales, activation_scales, stored_scales
from moeq.load.ranks import Rank, RankPart, plan_rank
from moeq.load.torch_loader import fill_parts, layer_entry, open_converted, require_arch
from moeq.model import Checkpoint
from moeq.model import open as open_checkpoint
from moeq.pipeline.in_memory import Proof, RankPacker
from moeq.pipeline.loss_probe import find_loss
from moeq.pipeline.plan.commands import convert_command
from moeq.pipeline.plan.decide import Answer, advised, convertible_problem
from moeq.pipeline.plan.layer_plan import plan_layer
from moeq.pipeline.plan.options import Question

if TYPE_CHECKING:
    from torch import Tensor

    from moeq.deploy.deployment import Deployment
    from moeq.model.converted import ConvertedCheckpoint


#: Engines make models with the GPU as torch's default device. Packing and its checks make their tensors on the CPU.
_ON_CPU = torch.device("cpu")


class ExpertsSource(ABC):
    """Packed experts of a model that an engine serves."""

    checkpoint: Checkpoint  #: the checkpoint that is served

    @property
    @abstractmethod
    def names(self) -> frozenset[str]:
        """Names of the tensors that model classes do not get."""

    @property
    @abstractmethod
    def backend(self) -> str:
        """Backend that the layout was chosen for."""

    @property
    def is_filling(self) -> bool:
        """Whether filling takes long and layers are left: kernels can be compiled meanwhile."""
        return False

    @property
    def begins_filling(self) -> bool:
        """Whether filling takes long and the next layer is the first."""
        return False

    @abstractmethod
    def entry(self, layer: int) -> LayerEntry | None:
        """Return how a layer is packed; None for layers that stay as the source has them."""

    @abstractmethod
    def require_arch(self, arch: str) -> None:
        """Raise MoeqError `environment.gpu-mismatch` if the bytes are for another architecture."""

    @abstractmethod
    def check_parts(self, entry: LayerEntry, parts: Sequence[RankPart], rank: Rank) -> None:
        """Raise MoeqError `usage.eplb` if this source cannot fill the replicas of a rank."""

    @abstractmethod
    def fill(self, entry: LayerEntry, parts: Sequence[RankPart], rank: Rank, tensors: Mapping[str, Tensor]) -> None:
        """Fill the tensors of a layer on one rank, by `{role}_{part}`, with its packed experts.

        The tensors hold the rows of one part after the other: several parts if the rank holds replicas.
        """

    @abstractmethod
    def activation_scales(self, entry: LayerEntry) -> ActivationScales | None:
        """Read the scales of a layer's static activations; None if the source stores none."""


class ConvertedExpertsSource(ExpertsSource):
    """Experts of a converted checkpoint, which are read as they are."""

    def __init__(self, checkpoint: ConvertedCheckpoint) -> None:
        self.checkpoint: ConvertedCheckpoint = checkpoint

    @property
    def names(self) -> frozenset[str]:
        return self.checkpoint.source.expert_names

    @property
    def backend(self) -> str:
        return self.checkpoint.manifest.backend

    def entry(self, layer: int) -> LayerEntry | None:
        return layer_entry(self.checkpoint, layer) if self.checkpoint.is_packed(layer) else None

    def require_arch(self, arch: str) -> None:
        require_arch(self.checkpoint, arch)

    def check_parts(self, entry: LayerEntry, parts: Sequence[RankPart], rank: Rank) -> None:
        """Accept all parts: a rank can read the files of every rank."""

    def fill(self, entry: LayerEntry, parts: Sequence[RankPart], rank: Rank, tensors: Mapping[str, Tensor]) -> None:
        first = 0
        for part in parts:
            rows = slice(first, first + part.experts[1] - part.experts[0])
            for role in STACKED_ROLES:
                targets = {name: tensors[f"{role}_{name}"][rows] for name in part.matrices[role].stored.tensors}
                fill_parts(self.checkpoint, entry, part, part.matrices[role], targets)
            first = rows.stop

    def activation_scales(self, entry: LayerEntry) -> ActivationScales | None:
        with _ON_CPU:
            return activation_scales(self.checkpoint, entry)


class PackingExpertsSource(ExpertsSource):
    """Experts of a source checkpoint, which are packed while the engine loads it.

    `decide` has to be called first, in the process of the rank.

    Raises MoeqError `answer.nothing-to-convert`, `answer.not-convertible` if its experts are packed for no deployment.
    """

    def __init__(self, checkpoint: Checkpoint, log: logging.Logger) -> None:
        problem = convertible_problem(checkpoint)
        if problem is not None:
            raise problem
        self.checkpoint = checkpoint
        self.prove: Proof = "sample"
        self._log = log
        self._answer: Answer | None = None
        self._packer: RankPacker | None = None
        self._unfilled: set[int] = set()
        self._seconds = 0.0

    def decide(self, deployment: Deployment, prove: Proof) -> None:
        """Decide on layouts, as `convert` does. Raises MoeqError as `convert` does before it writes anything."""
        if self._answer is not None and self._answer.question.deployment == deployment:
            return
        with _ON_CPU:
            found = advised(self.checkpoint, Question(deployment), brief=True)
            error = found.error or find_loss(self.checkpoint, found.question, found.layouts)
        if error is not None:
            raise error
        self._answer, self.prove = found, prove

    @property
    def answer(self) -> Answer:
        """Layouts of the deployment."""
        assert self._answer is not None  # `decide` is called before any layer is made
        return self._answer

    @cached_property
    def names(self) -> frozenset[str]:
        layers = [self.checkpoint.experts(layer).layer for layer in self.answer.layouts]
        return frozenset(entry.name for layer in layers for entry in layer.tensors())

    @property
    def backend(self) -> str:
        return self.answer.backend

    @property
    def is_filling(self) -> bool:
        return self._packer is not None

    @property
    def begins_filling(self) -> bool:
        return self._packer is None and bool(self._unfilled)

    def entry(self, layer: int) -> LayerEntry | None:
        layout = self.answer.layouts.get(layer)
        if layout is None:
            return None
        self._unfilled.add(layer)
        return plan_layer(self.checkpoint, layer, layout, self.answer.question.ranks).entry

    def require_arch(self, arch: str) -> None:
        """Accept every architecture: layouts are chosen for the GPU of this process."""

    def check_parts(self, entry: LayerEntry, parts: Sequence[RankPart], rank: Rank) -> None:
        if [part.experts for part in parts] != [plan_rank(entry, rank).experts]:
            raise MoeqError(
                "usage.eplb",
                f"layer {entry.layer}: a rank that packs its source while it loads holds no replicas of other ranks",
                f"convert first: {convert_command(self.checkpoint.source.name, self.answer)}; or start without "
                "redundant experts",
            )

    def fill(self, entry: LayerEntry, parts: Sequence[RankPart], rank: Rank, tensors: Mapping[str, Tensor]) -> None:
        begun, ranks = time.monotonic(), self.answer.question.ranks
        number = rank.ep_rank if ranks.ep > 1 else rank.tp_rank
        if self._packer is None:
            self._packer = RankPacker(self.checkpoint, self.answer.layouts, ranks, number, self.prove)
        with _ON_CPU:
            self._packer.pack(entry.layer, tensors)
        self._unfilled.discard(entry.layer)
        self._seconds += time.monotonic() - begun
        if not self._unfilled:
            self._packer = None  # frees its buffers
            if number == 0:
                self._log_savings()

    def _log_savings(self) -> None:
        command = convert_command(self.checkpoint.source.name, self.answer)
        self._log.info(
            "moeq: packing the experts of %d layers took %.1f s of this start, as it will of each; "
            "a converted folder is read as it is: %s",
            *(len(self.answer.layouts), self._seconds, command),
        )

    def activation_scales(self, entry: LayerEntry) -> ActivationScales | None:
        with _ON_CPU:
            return stored_scales(self.checkpoint.source, self.checkpoint.experts(entry.layer).layer, entry)


def open_experts(where: str, revision: str | None, log: logging.Logger, *, converted: bool) -> ExpertsSource:
    """Open the checkpoint that an engine serves.

    Raises MoeqError `usage.not-converted`, `source.*`, and for a source the errors of `PackingExpertsSource`.
    """
    checkpoint = open_checkpoint(where, revision)
    if checkpoint.kind == "converted":
        return ConvertedExpertsSource(open_converted(checkpoint))
    if converted:
        raise not_converted(checkpoint.source.name)
    return PackingExpertsSource(checkpoint, log)

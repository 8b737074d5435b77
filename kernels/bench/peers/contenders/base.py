"""What a contender does."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any

import torch
from support.cases import Routed
from torch import Tensor

from bench.peers.problem import Problem


class Absent(Exception):
    """What the contender runs is not installed here."""


class Contender(ABC):
    """A way to compute a MoE layer. Constructing one imports what it runs and raises ImportError where that is absent.

    Attributes:
        versions: packages and their versions.
        factor: how many times the error of plain bf16 arithmetic its error may be; more counts as wrong. Peers round
            more often (the first product, every choice before the sum), which was seen to cost up to 2.5 times.
    """

    versions: dict[str, str]
    factor = 3.0

    @abstractmethod
    def prepare(self, problem: Problem) -> Any:
        """The weights as its kernels take them. Not timed."""

    def inputs(self, weights: Any, routed: Routed) -> Any:
        """A call's inputs as its kernels take them: sizes rounded up, types changed. Not timed."""
        return routed

    @abstractmethod
    def run(self, weights: Any, inputs: Any) -> Tensor:
        """`[M, hidden or more]`. Timed."""

    def duplicate(self, weights: Any) -> Any:
        """The same weights in other memory."""
        return copy.deepcopy(weights)

    def about(self, weights: Any, inputs: Any) -> str:
        """What runs, in a few words."""
        return ""


def widened(x: Tensor, hidden: int) -> Tensor:
    """x with columns of zeros up to a rounded-up size."""
    return x if x.shape[1] == hidden else torch.nn.functional.pad(x, (0, hidden - x.shape[1])).contiguous()


def round_up(value: int, multiple: int) -> int:
    """The next multiple."""
    return -(-value // multiple) * multiple

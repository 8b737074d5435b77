"""Launches of a prepared layer's calls, which all layers of one problem share."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import fields
from functools import cache
from typing import Any

import torch

from moeq_kernels.areas import Area
from moeq_kernels.problem import Problem
from moeq_kernels.routing import Choosing
from moeq_kernels.schedules import schedule

#: Upper bound of the token counts whose launches are kept per problem; the oldest is evicted first.
MAX_KEPT_COUNTS = 4096


class Program:
    """Launches of all layers of one problem on one device, by number of tokens."""

    def __init__(self, family: str, problem: Problem, device: int, plan: Any, choosing: Choosing | None) -> None:
        self.family, self.problem, self.device, self.plan = family, problem, device, plan
        self.choosing = choosing
        self.weights = [f"{name}.{field.name}" for name, matrix in (("w13", problem.w13), ("w2", problem.w2))
                        for field in fields(matrix) if isinstance(getattr(matrix, field.name), Area)]  # fmt: skip
        from moeq_kernels.cuda import MOVING

        self.roots = (*MOVING, *(choosing.roots if choosing else ()), *self.weights)
        # A program that chooses experts shares the descriptors of weights with the one that does not.
        base = program_of(family, problem, device, plan, None) if choosing else None
        self.maps: dict[Any, int] = base.maps if base else {}
        self.lock = base.lock if base else threading.Lock()
        self.bounds: OrderedDict[int, Any] = OrderedDict()

    def bind(self, tokens: int) -> Any:
        """Plan, load and keep the launches for a new number of tokens."""
        from moeq_kernels.cuda import Bound

        planned = schedule(self.family, self.problem, tokens, self.plan)
        if self.choosing:
            planned = self.choosing.before(planned, self.problem, tokens)
        with self.lock, torch.cuda.device(self.device):
            found = self.bounds[tokens] = Bound(planned, self.roots, self.maps, self.problem.gpu, self.device)
            while len(self.bounds) > MAX_KEPT_COUNTS:
                self.bounds.popitem(last=False)
        return found


@cache
def program_of(family: str, problem: Problem, device: int, plan: Any, choosing: Choosing | None) -> Program:
    """Return the program that all layers of a problem share; with `choosing` its first kernel chooses experts."""
    return Program(family, problem, device, plan, choosing)

"""The Hopper kernels for 16-bit activations with those for few tokens of an expert in every format.

`layer` gives NVFP4, FP8 and MXFP8 to the `mma.sync` kernels there, until a GPU has timed both.
"""

from __future__ import annotations

from moeq_kernels.hopper.w4a16.layer import EXACT_EDGES, launches, planned
from moeq_kernels.hopper.w4a16.plan import Plan
from moeq_kernels.mma.plan import MmaPlan
from moeq_kernels.problem import Problem

__all__ = ["EXACT_EDGES", "launches", "plan_for"]


def plan_for(problem: Problem, tokens: int) -> Plan | MmaPlan:
    """Kernels and sizes for so many tokens; `mma.sync` ones only where both projections differ in format."""
    return planned(problem, tokens, few=True)

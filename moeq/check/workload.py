"""Estimate how long a check takes on a CPU, and the smallest check that says something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moeq.check.layer_check import LayerCheck
from moeq.check.sampling import expert_weights

#: Seconds per weight and run in Triton's interpreter, reference included: int4 experts of Qwen3-30B-A3B, one Xeon core.
_SECONDS_PER_WEIGHT = 1.7e-6

#: Seconds per weight to unpack and hash an expert on one core.
_SECONDS_PER_DIGEST = 4.5e-9

#: A check that is expected to take longer is announced, with a smaller one.
ANNOUNCED_SECONDS = 60.0


@dataclass(frozen=True)
class Workload:
    """Time that a check takes, roughly: kernels in the interpreter, and digests."""

    seconds: float  #: estimated wall time
    smallest: str  #: options of the smallest check: one layer, one or two experts, one token
    smallest_seconds: float  #: estimated wall time of the smallest check


def workload(checks: Sequence[LayerCheck], digests: int, jobs: int) -> Workload:
    """Estimate a check on a CPU.

    Args:
        checks: layers that go through the kernels, at least one.
        digests: weights whose digests are recomputed.
    """
    samples = ((check.sample, expert_weights(check.entry)) for check in checks)
    runs = sum(weights * len(sample.experts) * len(sample.runs) for sample, weights in samples)
    one = expert_weights(checks[0].entry)
    experts = 2 if 4 * one * _SECONDS_PER_WEIGHT <= ANNOUNCED_SECONDS else 1
    options = f"--layers {checks[0].entry.layer} --experts {'0,1' if experts == 2 else '0'} --tokens 1 --no-digests"
    # A single token count makes two runs: by the router, and all tokens to the same experts.
    smallest = 2 * experts * one * _SECONDS_PER_WEIGHT
    return Workload(runs * _SECONDS_PER_WEIGHT / jobs + digests * _SECONDS_PER_DIGEST, options, smallest)

"""How wrong a correct kernel may be: measured on the same inputs, not guessed.

A kernel that multiplies 16-bit activations with dequantised weights cannot be exact in float32. What it may lose is
what the plain way loses: weights rounded to the activation dtype, products summed in float32, results rounded where
the fused layer rounds. That error is computed for the very tensors under test, and a kernel passes within
FACTOR times of it.
"""

from __future__ import annotations

#: Headroom over the plain 16-bit computation, for another order of summation.
FACTOR = 1.2

#: A single expert sees few tokens, so its measured error scatters more around the mean.
EXPERT_FACTOR = 2.0

#: Errors below this are rounding of float32 sums themselves (exact products leave a baseline of zero).
FLOOR = 2.0**-20

RULE = (
    f"relative error (norm of the error over norm of the reference) at most {FACTOR} x that of the same products in "
    f"16-bit torch on dequantised weights, at most {EXPERT_FACTOR} x for a single expert"
)


def tolerance(baseline: float, factor: float = FACTOR) -> float:
    """Largest relative error that passes, for a measured baseline."""
    return max(factor * baseline, FLOOR)

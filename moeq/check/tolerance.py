"""Error bounds for a correct kernel: one measured on the same inputs, one derived from the arithmetic.

The norm of the error may be 1.2 times what the plain way loses: weights rounded to the activation dtype, products
summed in float32, results rounded where the fused layer rounds. That loss is computed for the very tensors under test.
An error of a few weights hides in that norm, so every element is also held against a bound of its own
(`moeq.reference.arithmetic`).
"""

from __future__ import annotations

#: Headroom over the plain 16-bit computation, for another order of summation.
FACTOR = 1.2

#: A single expert sees few tokens, so its measured error scatters more around the mean.
EXPERT_FACTOR = 2.0

NORM_RULE = (
    f"norm: relative error at most {FACTOR} x that of the same products in 16-bit torch on dequantised weights "
    f"({EXPERT_FACTOR} x for a single expert), and never less than the norm of the element bounds"
)
LAYER_RULE = (
    "whole layer: weights, intermediate and output each round once, independently: |error| <= "
    "6 x root of the sum of their squares through the layer + 2^-8 |y| (fp16: 2^-11 |y|) per element"
)
INT8_LAYER_RULE = (
    "whole layer: against int8 emulation from input to output; up to 4 intermediate codes may round the other way, "
    "and the output rounds once"
)

FP8_LAYER_RULE = (
    "whole layer: against e4m3 emulation from input to output; up to 4 intermediate codes may round the other way, "
    "and the output rounds once"
)


def tolerance(baseline: float, floor: float, factor: float = FACTOR) -> float:
    """Largest relative error that passes.

    Args:
        baseline: measured relative error of the plain 16-bit computation.
        floor: norm of the element bounds over the norm of the reference: what float32 sums themselves may lose, where
            operands are exact in 16 bits and the baseline is nothing.
        factor: headroom over the baseline.
    """
    return max(factor * baseline, floor)

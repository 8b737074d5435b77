"""What the triton_kernels layouts share. Source: triton_kernels as vendored in vLLM 0.33.0 (generation 3.5.1).

Shapes are those of the memory, contiguous, one expert; the kernel takes the transposed view. w13 rows are
interleaved (gate 0, up 0, gate 1, ...), as the SwiGLU epilogue reads pairs, and biases are float32. The layouts are
a function of the installed triton_kernels: newer generations pad more; these ids mean generation 3.5.1.

vLLM 0.33.0 interleaves the last dimension, not the rows, of models other than gpt-oss on this backend, which does not
fit the kernel; moeq writes interleaved rows for every model.
"""

from __future__ import annotations

from moeq.layouts.arranged import Part
from moeq.layouts.base import PaddingRule
from moeq.layouts.mxfp4 import IDENTITY_SCALE, INTERLEAVED_ROWS, MXFP4Layout, bias_as, by_role
from moeq.matrix import MatrixSpec


class TritonKernelsLayout(MXFP4Layout):
    """Base of the layouts of triton_kernels."""

    source = "triton_kernels 3.5.1 (vLLM 0.33.0)"
    padding = PaddingRule(intermediate=64)
    w13_order = "interleaved"

    def bias(self, spec: MatrixSpec) -> dict[str, Part]:
        """float32 `[N]` in row order."""
        return bias_as(spec, by_role(INTERLEAVED_ROWS, IDENTITY_SCALE, spec), "F32")

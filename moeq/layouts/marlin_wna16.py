"""Marlin with 16-bit activations: int4 and int8 weights, symmetric or with zero points.

Parts of one expert: `weight` int32 `[K / 16, 2 N]` (int8: `[K / 16, 4 N]`), `scale` `[G, N]` in the stored dtype,
`zero` int32 `[G, N * bits / 32]`, `bias` `[N]`. int8 codes are offset by 128 and zero points are stored as they count
(GPTQ's minus one is undone by the scheme). Batched Marlin reads the same bytes.

Scales lie in the grouped order where the matrix has several groups along K, and in the single order where it has one;
that is what the kernel reads. vLLM 0.33.0's own loader picks the order for w13 by comparing the group size with the
intermediate size instead of K, so it packs w13 in the single order, which its kernel then reads as grouped, whenever
the group size is at least the intermediate size per rank.

Source: vLLM 0.33.0, `marlin_utils.py`, the Marlin repack kernels and `marlin_template.h`; SGLang 0.5.23 uses the same
maps.
"""

from __future__ import annotations

from moeq.layouts.arranged import ArrangedLayout, Part
from moeq.layouts.base import PaddingRule, SliceRule
from moeq.layouts.marlin import GROUPED, SINGLE, WEIGHT, ZERO, bias_part, scale_part, weight_part, zero_part
from moeq.matrix import MatrixSpec


class MarlinWNA16(ArrangedLayout):
    """Marlin int4 / int8 weights for 16-bit activations (see the module)."""

    id = "marlin-wna16/1"
    title = "Marlin and batched Marlin, 16-bit activations"
    source = "vLLM 0.33.0"
    elements = ("int4", "int8")
    schemes = "int4 and int8, symmetric or with zero points, group-wise or channel-wise, with bias"
    arch = "SM75 and newer (SM75: fp16 only)"
    slicing = "N by 64, K by whole groups (16 where channel-wise)"
    padding = PaddingRule(intermediate=64, whole_groups=True)
    zero_points = True
    n_multiple = 64
    k_multiple = 16

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        order = SINGLE if spec.num_groups == 1 else GROUPED
        parts = {"weight": weight_part(spec, WEIGHT[spec.bits]), "scale": scale_part(spec, order)}
        if not spec.symmetric:
            parts["zero"] = zero_part(spec, ZERO[spec.bits])
        if spec.bias_dtype is not None:
            parts["bias"] = bias_part(spec)
        return parts

    def slices(self, spec: MatrixSpec) -> SliceRule:
        rule = super().slices(spec)
        # A slice of a single group would be packed in the single order, which no slice of the grouped order is.
        return SliceRule(rule.n, rule.k, 2 * spec.group_size if spec.num_groups > 1 else 0)

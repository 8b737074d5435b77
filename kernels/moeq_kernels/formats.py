"""What the kernels can read: one record per (layout, element), as data. Needs neither torch nor triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moeq_kernels.errors import KernelUnsupportedError

Shape = tuple[int, ...]
ShapeOf = Callable[[int, int], Shape]


@dataclass(frozen=True)
class Format:
    """How one layout stores one element type, in the terms of the device code.

    Attributes:
        layout: layout id.
        element: element of `PackedMatrix.element`.
        codec: reader of `device.codecs`.
        kind: element kind of `device.scales.weight_tile`: `uint4`, `uint8`, `e2m1`, `int8` or `float`.
        weight_shape: shape of one packed expert from (n, k), in elements of `weight_dtype`.
        weight_dtype: torch dtype name of the packed weights.
        group_order: order of group scales, or None where the format has none.
        single_order: order of scales when there is one per output feature, or None where that is not a case.
        scale_dtypes: torch dtype names of scales.
        group_sizes: group sizes read; -1 is one scale per output feature.
        zero_points: whether packed zero points are read.
        bias_single: whether biases lie in Marlin's 32-column order.
        n_multiple, k_multiple: what n (per half, for gate and up) and k must be multiples of.
        dtypes: dtypes of x.
        int8_activations: whether rows of x are quantised to int8 on the way.
    """

    layout: str
    element: str
    codec: str
    kind: str
    weight_shape: ShapeOf
    weight_dtype: str
    group_order: str | None
    single_order: str | None
    scale_dtypes: tuple[str, ...]
    group_sizes: tuple[int, ...]
    zero_points: bool = False
    bias_single: bool = False
    n_multiple: int = 1
    k_multiple: int = 1
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    int8_activations: bool = False


_FLOATS = ("bfloat16", "float16", "float32")
_GROUPS = (16, 32, 64, 128, 256, -1)


def _marlin(element: str, codec: str, words: int) -> Format:
    return Format(
        layout="marlin-wna16/1",
        element=element,
        codec=codec,
        kind=f"u{element}",
        weight_shape=lambda n, k: (k // 16, n * words),
        weight_dtype="int32",
        group_order="marlin-group",
        single_order="marlin-single",
        scale_dtypes=_FLOATS,
        group_sizes=_GROUPS,
        zero_points=True,
        bias_single=True,
        n_multiple=64,
        k_multiple=16,
    )


_TABLE = (_marlin("int4", "marlin4", 2), _marlin("int8", "marlin8", 4))

#: Every format that `fused_moe` reads, by (layout id, element).
FORMATS: dict[tuple[str, str], Format] = {(entry.layout, entry.element): entry for entry in _TABLE}


def find_format(layout: str, element: str) -> Format:
    """The format of a packed matrix. Raises KernelUnsupportedError naming the known ones."""
    found = FORMATS.get((layout, element))
    if found is None:
        known = ", ".join(f"{one} {kind}" for one, kind in FORMATS)
        raise KernelUnsupportedError(
            f"no kernel reads {element} weights in layout '{layout}'", f"kernels read: {known}"
        )
    return found

"""Kinds of weights: codes and the scales that multiply them. Importing this module needs neither torch nor triton."""

from __future__ import annotations

from dataclasses import dataclass

from moeq_kernels.formats import Format


@dataclass(frozen=True)
class Kind:
    """Kind of weights, in the terms of the device code and the plans."""

    bits: int  #: bits per code
    scale_bytes: int  #: bytes of a scale that codes along k share
    #: Whether outputs that are rounded before they are summed keep one more bit than bfloat16; weights of this kind are
    #: so exact that rounding to bfloat16 would add a visible error.
    keeps_extra_bit: bool
    #: Whether the Hopper kernels run it beside another kind in one layer; otherwise the `mma.sync` kernels do.
    is_mixable: bool = False

    @property
    def is_small_float(self) -> bool:
        """Whether codes are e2m1, which have many scales and take much integer work unless their bits are permuted."""
        return self.bits == 4 and self.keeps_extra_bit


KINDS: dict[str, Kind] = {
    "uint2": Kind(2, 2, False),
    "uint3": Kind(3, 2, False),
    "uint4": Kind(4, 2, False, is_mixable=True),
    "uint8": Kind(8, 2, True, is_mixable=True),
    "e2m1": Kind(4, 1, True, is_mixable=True),  # MXFP4
    "e2m1-permuted": Kind(4, 1, True, is_mixable=True),  # MXFP4 with permuted bits, see `recipes`
    "nvfp4": Kind(4, 1, True),
    "nvfp4-permuted": Kind(4, 1, True),
    "fp8": Kind(8, 2, True),
    "mxfp8": Kind(8, 1, True),
}
#: Kinds by element kind and encoding of scales, where the former alone does not determine them.
_BY_SCALE = {
    ("e2m1", "s0e5m3"): "nvfp4",
    ("e4m3", "float-120"): "fp8",
    ("e4m3", "float-8"): "fp8",
    ("e4m3", "e8m0"): "mxfp8",
}


def kind_of_format(fmt: Format) -> str:
    """Return the key of KINDS for a format of the Hopper and `mma.sync` kernels."""
    kind = _BY_SCALE.get((fmt.kind, fmt.scale_kind), fmt.kind)
    return f"{kind}-permuted" if fmt.codec == "marlin4-permuted" else kind

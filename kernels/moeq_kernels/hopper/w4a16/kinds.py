"""What the fast kernels call codes together with the scales that multiply them. Needs neither torch nor triton."""

from __future__ import annotations

from dataclasses import dataclass

from moeq_kernels.formats import Format


@dataclass(frozen=True)
class Kind:
    """One way to store weights, as the device code and the plans see it.

    Attributes:
        bits: of a code.
        scale_bytes: of a scale that codes along k share.
        finer: whether outputs that are rounded before they are summed keep a bit more than bfloat16 has: weights have
            so many bits that nothing else would hide that rounding.
        light: whether codes of 4 bits take so few instructions that plans count their bytes alone.
        mixes: whether the Hopper kernels take it beside another kind in one layer; else those of `mma.sync` do.
    """

    bits: int
    scale_bytes: int
    finer: bool
    light: bool = False
    mixes: bool = False

    @property
    def small_float(self) -> bool:
        """Whether codes are e2m1: their scales are many, and unless they are light their integer work counts, too."""
        return self.bits == 4 and self.finer


KINDS: dict[str, Kind] = {
    "uint4": Kind(4, 2, False, light=True, mixes=True),
    "uint8": Kind(8, 2, True, mixes=True),
    "e2m1": Kind(4, 1, True, mixes=True),  # MXFP4
    "e2m1-permuted": Kind(4, 1, True, light=True, mixes=True),  # the same with bits in another order, see `recipes`
    "nvfp4": Kind(4, 1, True),
    "fp8": Kind(8, 2, True),
    "mxfp8": Kind(8, 1, True),
}
#: Kinds of formats whose codes alone do not say it.
_BY_SCALE = {
    ("e2m1", "s0e5m3"): "nvfp4",
    ("e4m3", "float-120"): "fp8",
    ("e4m3", "float-8"): "fp8",
    ("e4m3", "e8m0"): "mxfp8",
}


def kind_of_format(fmt: Format) -> str:
    """The key of KINDS for a format that the fast kernels read."""
    if fmt.codec == "marlin4-permuted":
        return "e2m1-permuted"
    return _BY_SCALE.get((fmt.kind, fmt.scale_kind), fmt.kind)

"""Marlin with 8-bit activations: tiles of 32 x 32 codes, single scale order, recoded scales.

`marlin-wna16-int8act/1` (int8 activations, int4 or int8 weights). With several groups along K, scales become
`round(s / max * 4096)` in the scale dtype, kept as int16 bits in that dtype, and `global_scale` (float32, one per
expert, all equal) is `max / 4096`. `max` runs over all local experts of the tensor, so packing takes two passes
(`Layout.calibrate`), differs between EP and TP degrees, and cannot be sliced. The rounding loses scale bits, so it must
be allowed. With one scale per channel the scales stay as they are.

`marlin-wna16-fp8act/1` (fp8 e4m3 activations, int4 weights). Codes are rewritten around the zero point z as
`q - z if q >= z else 15 - q`, and scales are multiplied by 512 in their own dtype: exact in bf16, and in fp16 up to
127. The engine pads after rewriting: symmetric codes are therefore padded with 8, which is rewritten to 0.

Zero points lie in the order of 16-bit activations without its interleave. Source: vLLM 0.33.0, `marlin_utils.py`
and the repack and `marlin_int4_fp8_preprocess` kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from moeq.errors import MoeqError
from moeq.layouts.arranged import STORED_DTYPE, ArrangedLayout, Part, torch_dtype
from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import PaddingRule, SliceRule, TensorSpec
from moeq.layouts.marlin import SINGLE, bias_part, scale_part, weight_part, zero_part
from moeq.matrix import MatrixSpec, QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor

#: Weights, by bits.
WEIGHT_A8 = {
    4: Arrangement("n m4 r8, k h2 p4 q4 -> k n r p m | q h"),
    8: Arrangement("n m4 r8, k h2 p4 q4 -> k n r p m h | q"),
}

#: Zero points, by bits.
ZERO_A8 = {
    4: Arrangement("n o8 r8, g -> g n r | o"),
    8: Arrangement("n o2 s4 r8, g -> g n r o | s"),
}

#: Scales of int8 activations are integers below this.
_STEPS = 4096


class _MarlinA8(ArrangedLayout):
    """What both kinds share."""

    source = "vLLM 0.33.0"
    padding = PaddingRule(intermediate=64, whole_groups=True)
    zero_points = True
    n_multiple = 64
    k_multiple = 32

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        parts = {"weight": weight_part(spec, WEIGHT_A8[spec.bits]), "scale": scale_part(spec, SINGLE)}
        if not spec.symmetric:
            parts["zero"] = zero_part(spec, ZERO_A8[spec.bits])
        if spec.bias_dtype is not None:
            parts["bias"] = bias_part(spec)
        return parts


class MarlinInt8Act(_MarlinA8):
    """int4 / int8 weights for int8 activations (see the module)."""

    id = "marlin-wna16-int8act/1"
    title = "Marlin, int8 activations"
    elements = ("int4", "int8")
    schemes = "int4 and int8, symmetric or with zero points"
    arch = "SM75 and newer"
    slicing = "none with groups (scales depend on all local experts); N by 64, K by 32 where channel-wise"
    lossy = "group scales are rounded to 1/4096 of the largest local one"
    calibration_scope = "group scales are stored relative to the largest one of all local experts"

    def extra_tensors(self, spec: MatrixSpec) -> dict[str, TensorSpec]:
        return {"global_scale": TensorSpec((1,), "F32")} if spec.num_groups > 1 else {}

    def fill_extra(self, matrix: QuantizedMatrix, out: Mapping[str, Tensor]) -> None:
        if "global_scale" in out:
            out["global_scale"].fill_(self._largest() / _STEPS)

    def slices(self, spec: MatrixSpec) -> SliceRule:
        return super().slices(spec) if spec.num_groups == 1 else SliceRule(None, None)

    def calibrate(self, matrix: QuantizedMatrix) -> float | None:
        return float(matrix.scales.max()) if matrix.spec.num_groups > 1 else None

    def _largest(self) -> float:
        if self.calibration is None:
            raise MoeqError(
                "usage.survey-needed",
                f"{self.id}: {self.calibration_scope}; calibrate on the experts before packing them",
                "layout.with_calibration(max(layout.calibrate(expert) for every local expert))",
            )
        return self.calibration

    def recodes(self, part: Part, spec: MatrixSpec) -> bool:
        return part.field == "scales" and spec.num_groups > 1

    def encode(self, name: str, matrix: QuantizedMatrix) -> Tensor:
        if name != "scale" or matrix.spec.num_groups == 1:
            return super().encode(name, matrix)
        scales = matrix.scales
        # In the scale dtype, operation by operation: the engine's bytes carry that rounding.
        steps = scales / scales.new_tensor(self._largest()) * _STEPS
        return steps.round().to(torch_dtype("I16")).view(scales.dtype)

    def decode(self, name: str, elements: Tensor, spec: MatrixSpec) -> Tensor:
        if name != "scale" or spec.num_groups == 1:
            return super().decode(name, elements, spec)
        steps = elements.view(torch_dtype("I16")).float()
        return (steps * (self._largest() / _STEPS)).to(torch_dtype(STORED_DTYPE[spec.scale_dtype]))

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec) -> QuantizedMatrix:
        """Codes and zero points exactly; group scales as rounded."""
        if spec.num_groups == 1:
            return super().unpack(parts, spec)
        knowing = MarlinInt8Act(calibration=float(parts["global_scale"][0]) * _STEPS)
        return super(MarlinInt8Act, knowing).unpack(parts, spec)


class MarlinFp8Act(_MarlinA8):
    """int4 weights for fp8 activations (see the module)."""

    id = "marlin-wna16-fp8act/1"
    title = "Marlin, fp8 activations"
    elements = ("int4",)
    schemes = "int4, symmetric or with zero points"
    arch = "SM89 and SM12x"
    slicing = "N by 64, K by whole groups (32 where channel-wise)"
    padding = PaddingRule(intermediate=64, whole_groups=True, midpoint=True)
    lossy = "fp16 scales above 127 overflow when multiplied by 512"

    def recodes(self, part: Part, spec: MatrixSpec) -> bool:
        return part.field == "scales"

    def encode(self, name: str, matrix: QuantizedMatrix) -> Tensor:
        if name == "scale":
            return matrix.scales * 512
        if name != "weight":
            return super().encode(name, matrix)
        if matrix.zeros is None:  # rewritten word by word after packing
            return matrix.codes
        spec = matrix.spec
        grouped = matrix.codes.view(spec.n, spec.num_groups, spec.group_size)
        return _around(grouped, matrix.zeros.to(grouped.dtype).unsqueeze(2)).view(spec.n, spec.k)

    def decode(self, name: str, elements: Tensor, spec: MatrixSpec) -> Tensor:
        found = super().decode(name, elements, spec)
        return found / 512 if name == "scale" else found

    def pack_into(self, matrix: QuantizedMatrix, out: Mapping[str, Tensor]) -> None:
        super().pack_into(matrix, out)
        if "weight" in out and matrix.zeros is None:
            _around_midpoint_(out["weight"])

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec) -> QuantizedMatrix:
        if spec.symmetric:
            # The rewrite undoes itself but for the top bit of each code, before and after.
            words = parts["weight"] ^ _TOP_BITS
            return super().unpack({**parts, "weight": _around_midpoint_(words).bitwise_xor_(_TOP_BITS)}, spec)
        matrix = super().unpack(parts, spec)
        if matrix.zeros is None:
            raise MoeqError("source.missing-part", f"{self.id}: zero points are missing")
        grouped = matrix.codes.view(spec.n, spec.num_groups, spec.group_size)
        codes = _back(grouped, matrix.zeros.to(grouped.dtype).unsqueeze(2)).view(spec.n, spec.k)
        return replace(matrix, codes=codes)


#: The top bit of every 4-bit code of a word (0x88888888), and the lowest one.
_TOP_BITS, _LOW_BITS = 0x88888888 - (1 << 32), 0x11111111


def _around_midpoint_(words: Tensor) -> Tensor:
    """`_around` the zero point 8 for the eight codes of each int32 word, in place.

    8 .. 15 lose their top bit and 0 .. 7 are inverted: every bit flips, and the lower three flip back where the top one
    was set. Returns the words.
    """
    upper = (words >> 3).bitwise_and_(_LOW_BITS).mul_(7)
    return words.bitwise_xor_(upper).bitwise_not_()


def _around(codes: Tensor, zero: Tensor) -> Tensor:
    """Codes counted from their zero point: up from 0 at or above it, down from 15 below. Codes and zeros are uint8."""
    return (codes - zero).where(codes >= zero, 15 - codes)


def _back(rewritten: Tensor, zero: Tensor) -> Tensor:
    """The inverse: codes at or above the zero point were rewritten to 0 .. 15 - zero."""
    return (rewritten + zero).where(rewritten <= 15 - zero, 15 - rewritten)

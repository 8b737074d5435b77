"""AITER FP8: weights shuffled (16, 16) as bytes, scales as the engine keeps them (`fp8.py`); w13 is gate, then up.

* `aiter-fp8-block/1`, `aiter-fp8-channel/1`, `aiter-fp8-tensor/1`: `weight` F8_E4M3 `[N, K]`, for gfx950 (E4M3 as most
  checkpoints have it).
* `aiter-fp8-block-fnuz/1`, `-channel-fnuz/1`, `-tensor-fnuz/1`: for gfx942, whose FP8 has another bias and no negative
  zero. `weight` uint8, the bytes of E4M3FNUZ: the same bits stand for half the value, so scales are doubled; 0x80 would
  be NaN and becomes 0. `zero_sign` uint8 `[N, K / 8]` is moeq's own, for the way back: bit k % 8 of byte k // 8 says
  that code k was 0x80.

Source: AITER 0.1.7 (`shuffle_weight`, as in e4048607); vLLM 0.33.0, `oracle/fp8.py` and `w8a8_utils.py`
(`normalize_e4m3fn_to_e4m3fnuz`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from moeq.errors import MoeqError
from moeq.layouts.arranged import Part, is_gated_w13
from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import TensorSpec
from moeq.layouts.fp8 import Fp8Layout, fp8_bytes
from moeq.matrix import MatrixSpec, QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor

#: (16, 16): rows in 16s, K in 32s of two 16s.
SHUFFLED = Arrangement("n r16, k u2 x16 -> n k u r x")

#: Negative zero in E4M3, NaN in E4M3FNUZ.
NEGATIVE_ZERO = 0x80


class _Aiter(Fp8Layout):
    source = "AITER 0.1.7, vLLM 0.33.0"
    arch = "gfx950"
    slicing = "N by 16, K by 32"

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return {"weight": fp8_bytes(spec, SHUFFLED), "scale": self.scale(spec)}


class AiterFp8Block(_Aiter):
    """See the module."""

    id = "aiter-fp8-block/1"
    title = "AITER FP8, blocks"
    slicing = "N by 128, K by 128"
    scope = "block"


class AiterFp8Channel(_Aiter):
    """See the module."""

    id = "aiter-fp8-channel/1"
    title = "AITER FP8, one scale per channel"
    scope = "channel"


class AiterFp8Tensor(_Aiter):
    """See the module."""

    id = "aiter-fp8-tensor/1"
    title = "AITER FP8, one scale per matrix"
    scope = "tensor"


class AiterFnuz(_Aiter):
    """What gfx942 changes in each of them."""

    arch = "gfx942"

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        parts = super().parts(spec)
        return parts | {"weight": replace(parts["weight"], dtype="U8")}

    def extra_tensors(self, spec: MatrixSpec) -> dict[str, TensorSpec]:
        return {"zero_sign": TensorSpec((spec.n, spec.k // 8), "U8")}

    def fill_extra(self, matrix: QuantizedMatrix, out: Mapping[str, Tensor]) -> None:
        if "zero_sign" in out:
            out["zero_sign"].copy_(_bits(matrix.codes == NEGATIVE_ZERO))

    def encode(self, name: str, matrix: QuantizedMatrix) -> Tensor:
        found = super().encode(name, matrix)
        return found * 2.0 if name == "scale" else found.masked_fill(found == NEGATIVE_ZERO, 0)

    def decode(self, name: str, elements: Tensor, spec: MatrixSpec) -> Tensor:
        if name == "scale":
            import torch

            elements = (elements.view(torch.float32) / 2.0).view(elements.dtype)
        return super().decode(name, elements, spec)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec) -> QuantizedMatrix:
        matrix = super().unpack(parts, spec)
        signed = _flags(parts["zero_sign"])
        wrong = int((matrix.codes[signed] != 0).sum())
        if wrong:
            text = f"{self.id}: zero_sign names {wrong} codes of {spec.role} that are not 0"
            raise MoeqError("source.bad-data", text)
        return replace(matrix, codes=matrix.codes.masked_fill(signed, NEGATIVE_ZERO))

    def check_values(self, matrix: QuantizedMatrix) -> None:
        import torch

        beyond = int((~torch.isfinite(self.encode("scale", matrix))).sum())
        if beyond:
            raise MoeqError(
                "usage.scale-range",
                f"{self.id} stores scales times 2, which is infinite for {beyond} scales of {matrix.spec.role}",
                "moeq oracle SRC lists the backends that read the scales as they are",
            )
        super().check_values(matrix)

    def slice_parts(
        self, parts: Mapping[str, Tensor], spec: MatrixSpec, *, n: tuple[int, int], k: tuple[int, int]
    ) -> dict[str, Tensor]:
        cut = super().slice_parts(parts, spec, n=n, k=k)
        halves = 2 if is_gated_w13(spec) else 1
        flags = parts["zero_sign"].view(halves, spec.n // halves, -1)[:, n[0] : n[1], k[0] // 8 : k[1] // 8]
        return cut | {"zero_sign": flags.reshape(-1, flags.shape[2]).contiguous()}


class AiterFp8BlockFnuz(AiterFnuz, AiterFp8Block):
    """See the module."""

    id = "aiter-fp8-block-fnuz/1"
    title = "AITER FP8 (E4M3FNUZ), blocks"


class AiterFp8ChannelFnuz(AiterFnuz, AiterFp8Channel):
    """See the module."""

    id = "aiter-fp8-channel-fnuz/1"
    title = "AITER FP8 (E4M3FNUZ), one scale per channel"


class AiterFp8TensorFnuz(AiterFnuz, AiterFp8Tensor):
    """See the module."""

    id = "aiter-fp8-tensor-fnuz/1"
    title = "AITER FP8 (E4M3FNUZ), one scale per matrix"


def _bits(flags: Tensor) -> Tensor:
    """uint8 `[N, K / 8]` of booleans `[N, K]`, the first in the lowest bit."""
    import torch

    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8)
    return (flags.view(flags.shape[0], -1, 8) * weights).sum(dim=2, dtype=torch.uint8)


def _flags(octets: Tensor) -> Tensor:
    """The inverse of `_bits`."""
    import torch

    return ((octets.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1).bool()

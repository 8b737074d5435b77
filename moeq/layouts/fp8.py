"""Layouts of FP8 weights for FP8 activations: one E4M3 byte per code, float32 scales as the engine keeps them.

Scales are per block of 128 x 128 (`[N / 128, K / 128]`), per output channel (`[N, 1]`) or per matrix (`[1]`). The sizes
of a checkpoint do not tell which of the three it has. Every layout holds one of them, and packing is refused where the
scales of a block, or of a matrix, differ. w13 has one scale per matrix for gate and up together. Where a checkpoint has
two, the engine requantises both halves to the larger one; `to_larger_scale` does the same in layouts for NVIDIA's GPUs.
What AMD's and Intel's operators do is not known; their layouts refuse such a checkpoint.

With one scale per matrix the engine also converts its weights to float16 and back to E4M3. Scales from 2**-15 to 146
return every code (all codes tried). Smaller ones lose subnormal codes, and larger ones overflow the largest codes.
These layouts keep the checkpoint's codes in any case.

Scales of activations are no part of a matrix; they stay as they are in the source.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from moeq.errors import MoeqError
from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import Problem
from moeq.layouts.layout import Layout
from moeq.layouts.mxfp4 import IDENTITY_SCALE, Maps, by_role, scale_bytes
from moeq.layouts.parts import Part
from moeq.layouts.words import word_dtype
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.spelling import option

if TYPE_CHECKING:
    from torch import Tensor

#: Rows and columns of a block.
BLOCK = 128

#: Largest E4M3 number.
E4M3_MAX = 448.0

Scope = Literal["block", "channel", "tensor"]
_SCHEMES: dict[Scope, str] = {
    "block": "fp8 (e4m3 codes), one scale per block of 128 x 128, no bias",
    "channel": "fp8 (e4m3 codes), one scale per output channel, no bias",
    "tensor": "fp8 (e4m3 codes), one scale per matrix (gate and up together), no bias",
}


class Fp8Layout(Layout):
    """FP8 weights. Subclasses set `scope`, what shares a scale."""

    source = "vLLM 0.33.0"
    family = "fp8"
    elements = ("e4m3",)
    scale_dtypes: ClassVar[tuple[str, ...]] = ("f32", "bf16", "f16")
    biased = False
    scope: ClassVar[Scope]
    weight_maps: ClassVar[Maps] = (IDENTITY_SCALE,)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        scope = cls.__dict__.get("scope")
        if scope is None:
            return
        cls.schemes = _SCHEMES[scope]
        if scope == "block":
            cls.group_sizes, cls.channelwise = (BLOCK,), False
            cls.n_multiple = cls.k_multiple = BLOCK

    def problems(self, spec: MatrixSpec) -> list[Problem]:
        found = super().problems(spec)
        if not found and self.scope != "block" and spec.num_groups > 1:
            what = "output channel" if self.scope == "channel" else "matrix"
            found.append(Problem("layout.group-size", f"groups of {spec.group_size}; it holds one scale per {what}"))
        return found

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return {"weight": fp8_bytes(spec, by_role(self.weight_maps, spec)), "scale": self.scale(spec)}

    def scale(
        self, spec: MatrixSpec, arrangement: Arrangement = IDENTITY_SCALE, shape: tuple[int, ...] | None = None
    ) -> Part:
        """Return the part of the float32 scales.

        `arrangement` and `shape` are for blocks and channels; the default shape is `[N / 128, K / 128]` or `[N, 1]`.
        """
        if self.scope == "tensor":
            return Part("scales", IDENTITY_SCALE, (1,), "F32", 32, group=spec.group_size, rows=spec.n)
        rows = BLOCK if self.scope == "block" else 1
        shape = shape or (spec.n // rows, spec.num_groups)
        return Part("scales", arrangement, shape, "F32", 32, group=spec.group_size, rows=rows)

    def check_values(self, matrix: QuantizedMatrix) -> None:
        for part in self.parts(matrix.spec).values():
            if part.rows > 1:
                self._check_shared(matrix, part.rows)
        super().check_values(matrix)

    def _check_shared(self, matrix: QuantizedMatrix, rows: int) -> None:
        scales = matrix.scales
        bits = scales.contiguous().view(word_dtype(8 * scales.element_size()))  # 0 is not -0
        expected = bits[::rows].repeat_interleave(rows, dim=0)[: len(bits)]
        num_different = int((bits != expected).any(dim=1).sum())
        if not num_different:
            return
        if self.scope == "tensor":
            text = f"{matrix.spec.role} has several scales: {_first_scales(scales)}"
        else:
            text = f"{num_different} rows of {matrix.spec.role} have other scales than the first of their {rows}"
        raise MoeqError(
            "usage.scales-not-shared",
            f"{self.id} holds one scale per {'matrix' if self.scope == 'tensor' else 'block'}, but {text}",
            f"moeq oracle SRC lists the backends; {option('backend', 'marlin')} keeps every scale",
        )


class MXFP8Layout(Layout):
    """MXFP8 weights: E4M3 codes with an E8M0 scale byte per 32 of them, no bias."""

    source = "vLLM 0.33.0"
    family = "mxfp8"
    elements = ("e4m3",)
    schemes = "mxfp8 (e4m3 codes, e8m0 scales of 32), no bias"
    scale_dtypes = ("e8m0",)
    group_sizes = (32,)
    channelwise = False
    biased = False
    weight_maps: ClassVar[Maps] = (IDENTITY_SCALE,)
    scale_maps: ClassVar[Maps] = (IDENTITY_SCALE,)

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        weight = fp8_bytes(spec, by_role(self.weight_maps, spec))
        return {"weight": weight, "scale": scale_bytes(spec, by_role(self.scale_maps, spec))}


def has_two_scales(matrix: QuantizedMatrix) -> bool:
    """Return whether gate and up have one scale each, and the two differ."""
    if matrix.spec.halves == 1 or matrix.spec.num_groups > 1:
        return False
    gate, up = matrix.scales.reshape(2, -1)
    return bool((gate == gate[0]).all() and (up == up[0]).all() and gate[0] != up[0])


def to_larger_scale(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Return the matrix under the larger of its two scales, as vLLM makes it on an NVIDIA GPU.

    Codes are multiplied by their scale, rounded to float16, in float16. The products are multiplied by the float32
    reciprocal of the larger scale in float32, limited to what E4M3 holds (NaN becomes 448), and rounded to nearest
    even: `process_fp8_weight_tensor_strategy_moe` of `fp8_utils.py` and `scaled_fp8_conversion` of
    `csrc/quantization/w8a8/fp8/common.cuh`. No GPU has confirmed these bytes.
    """
    import torch

    scales = matrix.scales.float()
    larger = scales.max()
    weights = matrix.codes.view(torch.float8_e4m3fn).half() * scales.half()
    numbers = (weights.float() * (1.0 / larger)).nan_to_num(nan=E4M3_MAX).clamp(-E4M3_MAX, E4M3_MAX)
    codes = numbers.to(torch.float8_e4m3fn).view(torch.uint8)
    return replace(matrix, codes=codes, scales=larger.to(matrix.scales.dtype).expand_as(matrix.scales).contiguous())


def fp8_bytes(spec: MatrixSpec, arrangement: Arrangement, shape: tuple[int, ...] | None = None) -> Part:
    """Return the part of the codes: F8_E4M3 `[N, K]` unless `shape` says otherwise."""
    return Part("codes", arrangement, shape or (spec.n, spec.k), "F8_E4M3", 8)


def _first_scales(scales: Tensor) -> str:
    numbers = sorted(set(scales.double().flatten().tolist()))
    return ", ".join(f"{number:g}" for number in numbers[:3]) + (", ..." if len(numbers) > 3 else "")

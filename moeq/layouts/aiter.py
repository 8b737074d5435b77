"""AITER: MXFP4, MXFP8, FP8 and int4 on AMD GPUs.

Weights lie in tiles of 16 rows, and scales of E8M0 as `e8m0_shuffle` puts them. Source: AITER e4048607
(`aiter/ops/shuffle.py`), as vLLM 0.33.0 calls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from moeq.errors import MoeqError
from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import PaddingRule, Problem, SliceRule, TensorSpec, not_multiple
from moeq.layouts.fp8 import Fp8Layout, MXFP8Layout
from moeq.layouts.layout import Layout
from moeq.layouts.mxfp4 import MXFP4Layout, scale_bytes
from moeq.layouts.parts import Part
from moeq.layouts.readers import VLLM, Only
from moeq.matrix import MatrixSpec, QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor

# Shuffle (16, 16): rows in tiles of 16, bytes of K in blocks of 32 that are two halves of 16.
_SHUFFLED = Arrangement("n r16, k u2 x16 b2 -> n k u r x | b")
_SHUFFLED_BYTES = Arrangement("n r16, k u2 x16 -> n k u r x")

# a16w4: rows in tiles of 16, bytes of K in blocks of 64 that are four of 16. Tiles of gate and up alternate.
_A16W4 = Arrangement("n r16, k m4 x16 b2 -> n k m r x | b")
_A16W4_W13 = Arrangement("h2 n r16, k m4 x16 b2 -> n h k m r x | b")
_A16W4_BYTES = Arrangement("n r16, k m4 x16 -> n k m r x")
_A16W4_BYTES_W13 = Arrangement("h2 n r16, k m4 x16 -> n h k m r x")

# `e8m0_shuffle`: 32 rows by 8 groups, of gate and up 16 rows each. `n32k4`: 32 rows by 4 groups.
_E8M0 = Arrangement("n o2 r16, g u2 q4 -> n g q r u o")
_E8M0_W13 = Arrangement("h2 n r16, g u2 q4 -> n g q r u h")
_N32K4 = Arrangement("n r32, g q4 -> n g r q")

_INT4_WEIGHT = Arrangement("n r16, k u2 y2 f2 b4 -> n k u r y b | f")
_INT4_SCALE = Arrangement("n, g s2 -> g n s")


# ---------------------------------------------------------------------------------------------------------------- MXFP4


class AiterA16W4(MXFP4Layout):
    """MXFP4 for bf16 activations (a16w4).

    `weight` uint8 `[N, K / 2]`, `scale` uint8 `[N, G]`, `bias` float32. Tiles of gate and up alternate in weights and
    scales; biases are gate, then up. Source: `shuffle_weight_a16w4` and `shuffle_scale_a16w4`.
    """

    id = "aiter-a16w4/1"
    title = "AITER MXFP4, bf16 activations"
    readers = (VLLM("AITER_MXFP4_BF16", "aiter", dtypes=("bf16",), activates=True),)
    source = "AITER e4048607, vLLM 0.33.0"
    arch = "gfx942, gfx950"
    slicing = "N by 16 per half of w13, by 32 of w2; K by 256"
    padding = PaddingRule(intermediate=256, hidden=256)
    weight_maps = (_A16W4_W13, _A16W4)
    scale_maps = (_E8M0_W13, _E8M0)
    bias_dtype = "F32"


class AiterShuffle(MXFP4Layout):
    """MXFP4 x MXFP4 (CK): weights shuffled (16, 16), scales by `e8m0_shuffle`.

    `weight` uint8 `[N, K / 2]`, `scale` uint8 `[N, G]`, `bias` float32; w13 is gate rows, then up rows. The engine
    pads scales with uninitialised memory, to 256 rows of all experts together and to 8 groups. Here K must be a
    multiple of 256, so that nothing is padded.
    """

    id = "aiter-shuffle/1"
    title = "AITER MXFP4, (16, 16)"
    readers = (VLLM("AITER_MXFP4_MXFP4", "aiter_mxfp4_mxfp4", since="0.28.0", dtypes=("bf16",)),)
    source = "AITER e4048607, vLLM 0.33.0"
    arch = "gfx950"
    slicing = "N by 32, K by 256"
    padding = PaddingRule(intermediate=256, hidden=256)
    weight_maps = (_SHUFFLED,)
    scale_maps = (_E8M0,)
    bias_dtype = "F32"


class AiterGfx1250(MXFP4Layout):
    """MXFP4 x MXFP4 in Triton on gfx1250: values in row order, scales in tiles of 32 rows by 4 groups (n32k4).

    `weight` uint8 `[N, K / 2]` (the kernel takes the transposed view), `scale` uint8 `[N / 32, 32 G]`, `bias` float32;
    w13 is gate rows, then up rows. Source: `shuffle_scale_n32k4`.
    """

    id = "aiter-gfx1250/1"
    title = "AITER Triton MXFP4, n32k4 scales"
    readers = (VLLM("AITER_TRITON_MXFP4_MXFP4", "aiter_triton_mxfp4_mxfp4", since="0.33.0", dtypes=("bf16",)),)
    source = "AITER e4048607, vLLM 0.33.0"
    arch = "gfx1250"
    slicing = "N by 32, K by 128"
    padding = PaddingRule(intermediate=256, hidden=256)
    bias_dtype = "F32"

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return super().parts(spec) | {"scale": scale_bytes(spec, _N32K4, (spec.n // 32, 32 * spec.num_groups))}


# ----------------------------------------------------------------------------------------------------------------- int4


class AiterInt4(Layout):
    """int4 for FlyDSL: two's complement codes shuffled (16, 16) as bytes, then eight values packed to four bytes.

    Of eight consecutive shuffled values, v0 .. v3 take the low nibbles of four bytes and v4 .. v7 the high ones:
    `weight` uint8 `[N, K / 2]`. `scale` bf16 `[G / 2, N, 2]`. Source: `pack_int8_to_packed_int4`.
    """

    id = "aiter-int4/1"
    title = "AITER FlyDSL int4"
    source = "AITER e4048607"
    elements = ("int4",)
    schemes = "int4 symmetric with groups and bf16 scales"
    arch = "gfx942, gfx950"
    slicing = "N by 16, K by two groups"
    scale_dtypes = ("bf16",)
    channelwise = False
    biased = False

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        shape = (spec.num_groups // 2, spec.n, 2)
        return {
            "weight": Part("codes", _INT4_WEIGHT, (spec.n, spec.k // 2), "U8", 4, flip=8),
            "scale": Part("scales", _INT4_SCALE, shape, "BF16", 16, group=spec.group_size),
        }


# ---------------------------------------------------------------------------------------------------------------- MXFP8


class AiterMXFP8(MXFP8Layout):
    """MXFP8 for FlyDSL: bytes in the order of `aiter-a16w4`; tiles of 16 rows of gate and up alternate in w13.

    `weight` F8_E4M3 `[N, K]`, `scale` uint8 `[N, G]`. AITER pads the scales of w2 with uninitialised memory, to 256
    rows of all experts together and to 8 groups. Here the hidden and the intermediate size have to be multiples of 256,
    so that nothing is padded. AITER reads the halves of w13 as gate and up, so experts need both.

    Source: `shuffle_weight`, `shuffle_scale`; vLLM 0.33.0, `_aiter_ops.py` (`shuffle_mxfp8_moe_weights`).
    """

    id = "aiter-mxfp8/1"
    title = "AITER MXFP8"
    readers = (VLLM("AITER_MXFP8", "aiter"),)
    source = "AITER e4048607, vLLM 0.33.0"
    schemes = "mxfp8 (e4m3 codes, e8m0 scales of 32), with a gate, no bias"
    arch = "gfx950"
    slicing = "I by 256, H by 256"
    weight_maps = (_A16W4_BYTES_W13, _A16W4_BYTES)
    scale_maps = (_E8M0_W13, _E8M0)

    def problems(self, spec: MatrixSpec) -> list[Problem]:
        found = super().problems(spec)
        if spec.role == "w13" and not spec.gated:
            found.append(Problem("layout.gate", "its kernel needs gate and up rows in w13"))
        if spec.role == "w2" and spec.n % 256:
            found.append(Problem("layout.n-multiple", not_multiple(f"N = {spec.n}", spec.n, 256)))
        return found

    def slices(self, spec: MatrixSpec) -> SliceRule:
        return SliceRule(256, super().slices(spec).k)


# ------------------------------------------------------------------------------------------------------------------ FP8

#: Code of negative zero in E4M3, and of NaN in E4M3FNUZ.
NEGATIVE_ZERO = 0x80


class _AiterFp8(Fp8Layout):
    """FP8: weights F8_E4M3 `[N, K]` shuffled (16, 16) as bytes, scales as in `fp8.py`; w13 is gate, then up.

    Source: AITER 0.1.7 (`shuffle_weight`, as in e4048607); vLLM 0.33.0, `oracle/fp8.py`.
    """

    source = "AITER 0.1.7, vLLM 0.33.0"
    arch = "gfx950"
    slicing = "N by 16, K by 32"
    weight_maps = (_SHUFFLED_BYTES,)


class AiterFp8Block(_AiterFp8):
    id = "aiter-fp8-block/1"
    title = "AITER FP8, blocks"
    readers = (VLLM("AITER", "aiter", only=Only(weights=("kFp8Static128BlockSym",))),)
    slicing = "N by 128, K by 128"
    scope = "block"


class AiterFp8Channel(_AiterFp8):
    id = "aiter-fp8-channel/1"
    title = "AITER FP8, one scale per channel"
    readers = (VLLM("AITER", "aiter", only=Only(weights=("kFp8StaticChannelSym",))),)
    scope = "channel"


class AiterFp8Tensor(_AiterFp8):
    id = "aiter-fp8-tensor/1"
    title = "AITER FP8, one scale per matrix"
    readers = (VLLM("AITER", "aiter", only=Only(weights=("kFp8StaticTensorSym",))),)
    scope = "tensor"


class AiterFnuz(_AiterFp8):
    """FP8 for gfx942, whose E4M3FNUZ has another bias than E4M3 and no negative zero.

    `weight` uint8: the same bits stand for half the value, so scales are doubled; 0x80 would be NaN and becomes 0.
    `zero_sign` uint8 `[N, K / 8]` is moeq's own, for the way back: bit k % 8 of byte k // 8 says that code k was 0x80.
    Source: vLLM 0.33.0, `w8a8_utils.py` (`normalize_e4m3fn_to_e4m3fnuz`).
    """

    arch = "gfx942"

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        parts = super().parts(spec)
        return parts | {"weight": replace(parts["weight"], dtype="U8")}

    def extra_tensors(self, spec: MatrixSpec) -> dict[str, TensorSpec]:
        return {"zero_sign": TensorSpec((spec.n, spec.k // 8), "U8")}

    def fill_extra(self, matrix: QuantizedMatrix, out: Mapping[str, Tensor]) -> None:
        if "zero_sign" in out:
            out["zero_sign"].copy_(_packed_bits(matrix.codes == NEGATIVE_ZERO))

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
        signed = _unpacked_bits(parts["zero_sign"])
        num_wrong = int((matrix.codes[signed] != 0).sum())
        if num_wrong:
            text = f"{self.id}: zero_sign names {num_wrong} codes of {spec.role} that are not 0"
            raise MoeqError("source.bad-data", text)
        return replace(matrix, codes=matrix.codes.masked_fill(signed, NEGATIVE_ZERO))

    def check_values(self, matrix: QuantizedMatrix) -> None:
        import torch

        num_infinite = int((~torch.isfinite(self.encode("scale", matrix))).sum())
        if num_infinite:
            raise MoeqError(
                "usage.scale-range",
                f"{self.id} stores scales times 2, which is infinite for {num_infinite} scales of {matrix.spec.role}",
                "moeq oracle SRC lists the backends that read the scales as they are",
            )
        super().check_values(matrix)

    def slice_parts(
        self, parts: Mapping[str, Tensor], spec: MatrixSpec, *, n: tuple[int, int], k: tuple[int, int]
    ) -> dict[str, Tensor]:
        cut = super().slice_parts(parts, spec, n=n, k=k)
        flags = parts["zero_sign"].view(spec.halves, spec.n // spec.halves, -1)[:, n[0] : n[1], k[0] // 8 : k[1] // 8]
        return cut | {"zero_sign": flags.reshape(-1, flags.shape[2]).contiguous()}


class AiterFp8BlockFnuz(AiterFnuz, AiterFp8Block):
    id = "aiter-fp8-block-fnuz/1"
    title = "AITER FP8 (E4M3FNUZ), blocks"
    readers = (VLLM("AITER", "aiter", only=Only(weights=("kFp8Static128BlockSym",), devices=("rocm gfx942",))),)


class AiterFp8ChannelFnuz(AiterFnuz, AiterFp8Channel):
    id = "aiter-fp8-channel-fnuz/1"
    title = "AITER FP8 (E4M3FNUZ), one scale per channel"
    readers = (VLLM("AITER", "aiter", only=Only(weights=("kFp8StaticChannelSym",), devices=("rocm gfx942",))),)


class AiterFp8TensorFnuz(AiterFnuz, AiterFp8Tensor):
    id = "aiter-fp8-tensor-fnuz/1"
    title = "AITER FP8 (E4M3FNUZ), one scale per matrix"
    readers = (VLLM("AITER", "aiter", only=Only(weights=("kFp8StaticTensorSym",), devices=("rocm gfx942",))),)


def _packed_bits(flags: Tensor) -> Tensor:
    """Return uint8 `[N, K / 8]` of booleans `[N, K]`, the first in the lowest bit."""
    import torch

    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8)
    return (flags.view(flags.shape[0], -1, 8) * weights).sum(dim=2, dtype=torch.uint8)


def _unpacked_bits(octets: Tensor) -> Tensor:
    """Invert `_packed_bits`."""
    import torch

    return ((octets.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1).bool()

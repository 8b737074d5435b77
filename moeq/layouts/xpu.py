"""int4, FP8, MXFP8 and MXFP4 for Intel's XPU kernels. Source: vLLM 0.33.0."""

from __future__ import annotations

from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import PaddingRule
from moeq.layouts.fp8 import BLOCK, Fp8Layout, MXFP8Layout, fp8_bytes
from moeq.layouts.layout import Layout
from moeq.layouts.mxfp4 import IDENTITY, IDENTITY_SCALE, MXFP4Layout, scale_as, scale_bytes
from moeq.layouts.parts import Part
from moeq.layouts.readers import MOEQ, VLLM, Only
from moeq.matrix import MatrixSpec


class IdentityMXFP4(MXFP4Layout):
    """MXFP4 in the checkpoint's own order, for XPU, B12X and emulation.

    `weight` uint8 `[N, K / 2]`, low nibble first, `scale` uint8 `[N, G]`, `bias` as stored; w13 is gate rows, then up
    rows. Source: vLLM 0.33.0, `oracle/mxfp4.py`.
    """

    id = "mxfp4-identity/1"
    title = "MXFP4 as stored (XPU, B12X, emulation)"
    readers = (
        VLLM("XPU", "xpu", dtypes=("bf16",)),
        VLLM("B12X_MXFP4_MXFP8", "b12x", since="0.29.0", dtypes=("bf16",)),
        VLLM("B12X_MXFP4_BF16", "b12x", since="0.29.0", dtypes=("bf16",)),
        VLLM("EMULATION", loads=False),
        MOEQ("MXFP4_PLAIN"),
    )
    source = "vLLM 0.33.0"
    arch = "any"
    slicing = "N by 1, K by 32"
    padding = PaddingRule(intermediate=32)


_TRANSPOSED = Arrangement("n, k -> k n")


class XpuFp8Tensor(Fp8Layout):
    """FP8 with one scale per matrix: `weight` F8_E4M3 `[K, N]`, `scale` float32 `[1]`.

    w13 columns are gate, then up. Source: vLLM 0.33.0, `xpu_moe.py` (`prepare_fp8_moe_layer_for_xpu`).
    """

    id = "xpu-fp8-tensor/1"
    title = "XPU FP8, one scale per matrix"
    readers = (VLLM("XPU", only=Only(weights=("kFp8StaticTensorSym",))),)
    arch = "Intel XPU"
    slicing = "N by 1, K by 1"
    scope = "tensor"

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return {"weight": fp8_bytes(spec, _TRANSPOSED, (spec.k, spec.n)), "scale": self.scale(spec)}


class XpuFp8Block(Fp8Layout):
    """FP8 in blocks: as `xpu-fp8-tensor/1`, but `scale` is float32 `[K / 128, N / 128]`."""

    id = "xpu-fp8-block/1"
    title = "XPU FP8, blocks"
    readers = (VLLM("XPU", only=Only(weights=("kFp8Static128BlockSym",))),)
    arch = "Intel XPU"
    slicing = "N by 128, K by 128"
    scope = "block"

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        scale = self.scale(spec, _TRANSPOSED, (spec.num_groups, spec.n // BLOCK))
        return {"weight": fp8_bytes(spec, _TRANSPOSED, (spec.k, spec.n)), "scale": scale}


class XpuMXFP8(MXFP8Layout):
    """MXFP8: `weight` F8_E4M3 `[K, N]`, `scale` uint8 `[K / 32, N]`; w13 columns are gate, then up."""

    id = "xpu-mxfp8/1"
    title = "XPU MXFP8"
    readers = (VLLM("XPU", "xpu"),)
    arch = "Intel XPU"
    slicing = "N by 1, K by 32"

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return {
            "weight": fp8_bytes(spec, _TRANSPOSED, (spec.k, spec.n)),
            "scale": scale_bytes(spec, _TRANSPOSED, (spec.num_groups, spec.n)),
        }


class XpuWNA16(Layout):
    """int4 in the checkpoint's own order: `weight` uint8 `[N, K / 2]`, low nibble first; `scale` `[N, G]` as stored.

    The backend drops zero points, so the layout has no place for them. Source: vLLM 0.33.0, `XPUExpertsWNA16`.
    """

    id = "xpu-wna16/1"
    title = "XPU int4 as stored"
    readers = (VLLM("XPU", loads=False),)
    source = "vLLM 0.33.0"
    elements = ("int4",)
    schemes = "int4 symmetric"
    arch = "Intel XPU"
    slicing = "N by 1, K by whole groups"
    biased = False

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return {
            "weight": Part("codes", IDENTITY, (spec.n, spec.k // 2), "U8", 4),
            "scale": scale_as(spec, IDENTITY_SCALE, (spec.n, spec.num_groups)),
        }

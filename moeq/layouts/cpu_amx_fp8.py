"""CPU (AMX) FP8 with 16-bit activations: blocks of 32 rows, two columns together.

`weight` F8_E4M3 `[N, K]`; `scale` float32 `[N / 128, K / 128]` as stored. Source: vLLM 0.33.0, `CPUExpertsFp8`, whose
`convert_weight_packed` and kernel are `csrc/cpu/sgl-kernels/gemm.cpp` and `gemm_fp8.cpp`. Golden bytes: the operator of
vLLM 0.32.0.
"""

from __future__ import annotations

from moeq.layouts.arranged import Part
from moeq.layouts.arrangement import Arrangement
from moeq.layouts.fp8 import Fp8Layout, fp8_bytes
from moeq.matrix import MatrixSpec

_WEIGHT = Arrangement("n r32, k b2 -> n k r b")


class CpuAmxFp8(Fp8Layout):
    """See the module."""

    id = "cpu-amx-fp8/1"
    title = "CPU AMX FP8, blocks, 16-bit activations"
    arch = "x86 with AMX"
    slicing = "N by 128, K by 128"
    scope = "block"

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return {"weight": fp8_bytes(spec, _WEIGHT), "scale": self.scale(spec)}

"""Layouts by id. Importing this, and the layouts it names, needs no torch, so that the oracle can describe them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

from moeq.errors import MoeqError
from moeq.layouts.base import Layout

#: layout id -> "module:class", imported on first use.
LAYOUTS: dict[str, str] = {
    "marlin-wna16/1": "marlin.wna16:MarlinWNA16",
    "marlin-wna16-int8act/1": "marlin.wna16:MarlinInt8Act",
    "marlin-wna16-fp8act/1": "marlin.wna16:MarlinFp8Act",
    "marlin-act-order/1": "marlin.wna16:MarlinActOrder",
    "marlin-mxfp4/1": "marlin.mxfp4:MarlinMXFP4",
    "marlin-mxfp4-interleaved/1": "marlin.mxfp4:MarlinMXFP4Interleaved",
    "marlin-mxfp4-fp16/1": "marlin.mxfp4:MarlinMXFP4Fp16",
    "marlin-mxfp4-fp16-interleaved/1": "marlin.mxfp4:MarlinMXFP4Fp16Interleaved",
    "marlin-mxfp4-fp8act/1": "marlin.mxfp4:MarlinMXFP4Fp8Act",
    "marlin-mxfp4-fp8act-interleaved/1": "marlin.mxfp4:MarlinMXFP4Fp8ActInterleaved",
    "moeq-mxfp4/1": "moeq:MoeqMXFP4",
    "marlin-nvfp4/1": "marlin.nvfp4:MarlinNVFP4",
    "marlin-nvfp4-fp16/1": "marlin.nvfp4:MarlinNVFP4Fp16",
    "trtllm-nvfp4/1": "flashinfer:TrtllmNVFP4",
    "flashinfer-cutlass-nvfp4/1": "flashinfer:FlashInferCutlassNVFP4",
    "cutlass-nvfp4/1": "cutlass:CutlassNVFP4",
    "flashinfer-cutedsl-nvfp4/1": "flashinfer:CuteDslNVFP4",
    "b12x-nvfp4/1": "b12x:B12xNVFP4",
    "b12x-nvfp4-a16/1": "b12x:B12xNVFP4A16",
    "flashinfer-b12x-nvfp4/1": "b12x:FlashInferB12xNVFP4",
    "marlin-fp8/1": "marlin.fp8:MarlinFp8",
    "marlin-fp8-fp16/1": "marlin.fp8:MarlinFp8Fp16",
    "marlin-mxfp8/1": "marlin.fp8:MarlinMXFP8",
    "trtllm-fp8-block/1": "flashinfer:TrtllmFp8Block",
    "trtllm-fp8-tensor/1": "flashinfer:TrtllmFp8Tensor",
    "flashinfer-cutlass-fp8-block/1": "flashinfer:FlashInferCutlassFp8Block",
    "flashinfer-cutlass-fp8-tensor/1": "flashinfer:FlashInferCutlassFp8Tensor",
    "deepgemm-fp8-sm90/1": "deepgemm:DeepGemmFp8Sm90",
    "deepgemm-fp8-sm100/1": "deepgemm:DeepGemmFp8Sm100",
    "aiter-fp8-block/1": "aiter:AiterFp8Block",
    "aiter-fp8-block-fnuz/1": "aiter:AiterFp8BlockFnuz",
    "aiter-fp8-channel/1": "aiter:AiterFp8Channel",
    "aiter-fp8-channel-fnuz/1": "aiter:AiterFp8ChannelFnuz",
    "aiter-fp8-tensor/1": "aiter:AiterFp8Tensor",
    "aiter-fp8-tensor-fnuz/1": "aiter:AiterFp8TensorFnuz",
    "trtllm-mxfp8/1": "flashinfer:TrtllmMXFP8",
    "deepgemm-mxfp8/1": "deepgemm:DeepGemmMXFP8",
    "aiter-mxfp8/1": "aiter:AiterMXFP8",
    "xpu-fp8-block/1": "xpu:XpuFp8Block",
    "xpu-fp8-tensor/1": "xpu:XpuFp8Tensor",
    "xpu-mxfp8/1": "xpu:XpuMXFP8",
    "cpu-amx-fp8/1": "cpu_amx:CpuAmxFp8",
    "triton-wna16/1": "vllm_triton:TritonWNA16",
    "int8-w8a8/1": "vllm_triton:Int8W8A8",
    "trtllm-mxint4/1": "flashinfer:TrtllmMxInt4",
    "trtllm-mxfp4/1": "flashinfer:TrtllmMXFP4",
    "flashinfer-cutlass-mxfp4-bf16/1": "flashinfer:FlashInferCutlassBF16",
    "flashinfer-cutlass-mxfp4-mxfp8/1": "flashinfer:FlashInferCutlassMXFP8",
    "cutlass-mxfp4/1": "cutlass:CutlassMXFP4",
    "deepgemm-mxfp4/1": "deepgemm:DeepGemmMXFP4",
    "triton-kernels-hopper/1": "triton_kernels:TritonKernelsHopper",
    "triton-kernels-hopper-w4/1": "triton_kernels:TritonKernelsHopper4",
    "triton-kernels-blackwell/1": "triton_kernels:TritonKernelsBlackwell",
    "triton-kernels-cdna4/1": "triton_kernels:TritonKernelsCDNA4",
    "aiter-shuffle/1": "aiter:AiterShuffle",
    "aiter-a16w4/1": "aiter:AiterA16W4",
    "aiter-gfx1250/1": "aiter:AiterGfx1250",
    "aiter-int4/1": "aiter:AiterInt4",
    "cpu-amx-int4/1": "cpu_amx:CpuAmxInt4",
    "cpu-amx-int8/1": "cpu_amx:CpuAmxInt8",
    "cpu-amx-mxfp4/1": "cpu_amx:CpuAmxMXFP4",
    "cpu-amx-mxfp4-interleaved/1": "cpu_amx:CpuAmxMXFP4Interleaved",
    "rdna3-int4/1": "rdna3:Rdna3Int4",
    "xpu-wna16/1": "xpu:XpuWNA16",
    "mxfp4-identity/1": "xpu:IdentityMXFP4",
    "humming-wna16/1": "humming:HummingWNA16",
    "humming-mxfp4-fp16/1": "humming:HummingMXFP4Fp16",
}

#: What cannot be packed offline, and why.
NOT_OFFLINE: dict[str, str] = {
    "Humming, other modes": "native-dequant, packed-K and W4A8 modes depend on the GPU's SM version, the compiler, "
    "tuned configurations and extremes of the local shard",
    "Zen CPU": "the bytes come from an opaque operator of zentorch",
    "CUTLASS W4A8": "its group scales are rounded to E4M3 by an operator of the GPU, which was not tried; the order of "
    "its weights is `n o2 r8, k h2 q4 i4 -> k n r q h o i`, as CUTLASS's own templates say when compiled for a CPU",
    "FP8 x FP8 on a CPU": "only CPUs with AMX-FP8 run it, and on others the engine's operator arranges w13 otherwise",
    "int4 on an Arm CPU": "the bytes come from an operator of PyTorch, which differ with the CPU it was built for",
    "FlashInfer megakernels (MoE-EP)": "they arrange the checkpoint's tensors in code for their GPU",
    "FP8 with a scale each for gate and up, in AITER's and Intel's kernels": "the engine requantises both to the "
    "larger with an operator of the GPU, which was not read",
    "WNA16 emulation": "experts are dequantised to bf16 at load: nothing is packed",
    "Machete": "dense layers only; no MoE kernel reads it",
}


@dataclass(frozen=True)
class LayoutFacts:
    """A row of the support table.

    Attributes:
        id: layout id.
        title: one line.
        schemes: what it holds.
        arch: devices whose kernels read it.
        source: library and version.
        slicing: legal slices.
        padding: how sizes are rounded up.
        w13_order: order of gate and up rows.
        lossy: what may be lost (refused unless allowed), or None.
        survey: why all local experts must be looked at first, or None.
    """

    id: str
    title: str
    schemes: str
    arch: str
    source: str
    slicing: str
    padding: str
    w13_order: str
    lossy: str | None
    survey: str | None


def layout_class(layout_id: str) -> type[Layout]:
    """The class of that id. Raises MoeqError `usage.unknown-layout`, naming the known ones."""
    if layout_id not in LAYOUTS:
        known = ", ".join(sorted(LAYOUTS))
        raise MoeqError("usage.unknown-layout", f"no layout is called '{layout_id}'", f"known layouts: {known}")
    module, _, name = LAYOUTS[layout_id].partition(":")
    found: type[Layout] = getattr(import_module(f"moeq.layouts.{module}"), name)
    return found


def get_layout(layout_id: str, *, allow_lossy: bool = False) -> Layout:
    """The layout of that id; `allow_lossy` lets it pack what it cannot hold exactly (`Layout.losses` counts).

    Raises:
        MoeqError: `usage.unknown-layout`, naming the known ones.
    """
    return layout_class(layout_id)(allow_lossy=allow_lossy)


def layout_facts() -> Iterator[LayoutFacts]:
    """The support table, one row per layout."""
    for layout_id in LAYOUTS:
        kind = layout_class(layout_id)
        yield LayoutFacts(
            id=kind.id,
            title=kind.title,
            schemes=kind.schemes,
            arch=kind.arch,
            source=kind.source,
            slicing=kind.slicing,
            padding=kind.padding.title,
            w13_order=kind.w13_order,
            lossy=kind.lossy,
            survey=kind.calibration_scope,
        )

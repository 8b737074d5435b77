"""Set up vLLM's experts for x86 CPUs with AMX on bytes in their own order (0.32.0, 0.33.0).

For int8 weights and MXFP4 scales the engine's tensors have the shape of the matrix and the layouts' the shape of their
blocks, with the same bytes. The engine's int4 scales and biases are float32 numbers, first rounded to the dtype of
the activations. FP8 is in `float_experts.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsModular
from vllm.model_executor.layers.fused_moe.oracle import int8, int_wna16, mxfp4
from vllm.model_executor.layers.quantization.utils import quant_utils

from moeq.checkpoint.manifest import STACKED_ROLES
from moeq.engines.vllm.engine_experts import (
    GPT_OSS,
    Clamp,
    Constructor,
    EngineExperts,
    RankWeights,
    ReadScales,
    Tensors,
    set_parameter,
    widen_biases,
)
from moeq.errors import MoeqError
from moeq.layouts.readers import VLLM


def routed_inside(weights: RankWeights) -> str | None:
    """Return the reason why the experts of this version are not used, or None."""
    if issubclass(cpu_moe.CPUExpertsInt4, FusedMoEExpertsModular):
        return None
    return "these experts route tokens themselves, which moeq never ran; those of vLLM 0.30.0 and newer do not"


def _unbiased(key: Any, activation: Any, weights: RankWeights) -> tuple[Any, Any]:
    if weights.w13.bias_dtype is not None:
        raise MoeqError(
            "answer.no-backend",
            f"vLLM's CPU kernels for {weights.w13.element} take no biases, and these experts have some",
            "serve the checkpoint on a GPU: moeq oracle SRC --gpu NAME",
        )
    return key, activation


def _in_float32(layer: Any, weights: RankWeights, scales: ReadScales) -> None:
    for role in STACKED_ROLES:
        set_parameter(layer, f"{role}_scale", getattr(layer, f"{role}_scale").data.float())


def _by_rows(layer: Any, weights: RankWeights, scales: ReadScales) -> None:
    """View weights by rows `[experts, N, K + 4]`: K values, then the four bytes that the kernel adds for the row."""
    for role, spec in zip(STACKED_ROLES, (weights.w13, weights.w2), strict=True):
        weight = getattr(layer, f"{role}_weight").data.view(torch.int8)
        set_parameter(layer, f"{role}_weight", weight.view(len(weight), spec.n, spec.k + 4))


def _mxfp4_settled(layer: Any, weights: RankWeights, scales: ReadScales) -> None:
    for role, spec in zip(STACKED_ROLES, (weights.w13, weights.w2), strict=True):
        scale = getattr(layer, f"{role}_scale").data
        set_parameter(layer, f"{role}_scale", scale.view(len(scale), spec.n, spec.num_groups))
    widen_biases(layer)


def _int4_config(tensors: Tensors, weights: RankWeights, clamp: Clamp) -> Any:
    return int_wna16.make_wna16_moe_quant_config(
        w1_scale=tensors["w13_scale"],
        w2_scale=tensors["w2_scale"],
        group_size=weights.w13.group_size,
        num_bits=4,
        w1_zp=tensors["w13_zero"],
        w2_zp=tensors["w2_zero"],
        **clamp,
    )


def _int8_config(tensors: Tensors, weights: RankWeights, clamp: Clamp) -> Any:
    return int8.make_int8_moe_quant_config(
        int8_backend=int8.Int8MoeBackend.CPU,
        w1_scale=tensors["w13_scale"],
        w2_scale=tensors["w2_scale"],
        a1_scale=None,
        a2_scale=None,
        per_act_token_quant=True,
    )


def _mxfp4_config(constants: Clamp | None, tensors: Tensors, weights: RankWeights, clamp: Clamp) -> Any:
    constants = constants or clamp
    return mxfp4.make_mxfp4_moe_quant_config(
        mxfp4_backend=mxfp4.Mxfp4MoeBackend.CPU,
        w1_scale=tensors["w13_scale"].view(torch.uint8),
        w2_scale=tensors["w2_scale"].view(torch.uint8),
        w1_bias=tensors.get("w13_bias"),
        w2_bias=tensors.get("w2_bias"),
        gemm1_alpha=constants["gemm1_alpha"],
        gemm1_beta=constants["gemm1_beta"],
        swiglu_limit=constants["gemm1_clamp_limit"],
    )


def _row(reader: VLLM, title: str, **more: Any) -> EngineExperts:
    """Make experts for a CPU, which has no `--moe-backend`. Its kernels end the process at other activation dtypes."""
    return EngineExperts(title=f"CPU ({title})", reader=reader, spreads=False, obstacle=routed_inside, **more)


def _int4(reader: VLLM) -> EngineExperts:
    return _row(
        reader,
        "int4",
        classes=lambda: [cpu_moe.CPUExpertsInt4],
        # The class knows this key alone; its kernel subtracts any zero points.
        keys=partial(_unbiased, quant_utils.kInt4Static, None),
        quant_config=_int4_config,
        kernel=partial(int_wna16.make_wna16_moe_kernel, backend=int_wna16.WNA16MoEBackend.CPU),
        settle=_in_float32,
    )


def _int8(reader: VLLM) -> EngineExperts:
    return _row(
        reader,
        "int8 W8A8",
        classes=lambda: [cpu_moe.CPUExpertsInt8],
        keys=partial(_unbiased, quant_utils.kInt8StaticChannelSym, quant_utils.kInt8DynamicTokenSym),
        quant_config=_int8_config,
        kernel=partial(int8.make_int8_moe_kernel, int8.Int8MoeBackend.CPU),
        settle=_by_rows,
        finishes=False,  # the class would pack the weights
    )


def _mxfp4(reader: VLLM, constants: Clamp | None = None) -> EngineExperts:
    return _row(
        reader,
        "MXFP4",
        classes=lambda: [cpu_moe.CPUExpertsMxfp4],
        keys=lambda weights: (quant_utils.kMxfp4Static, None),
        quant_config=partial(_mxfp4_config, constants),
        kernel=partial(mxfp4.make_mxfp4_moe_kernel, mxfp4_backend=mxfp4.Mxfp4MoeBackend.CPU),
        settle=_mxfp4_settled,
        rounds_sizes=True,
    )


#: Functions that make the experts for a layout, by layout id.
CPUS: dict[str, Constructor] = {
    "cpu-amx-int4/1": _int4,
    "cpu-amx-int8/1": _int8,
    "cpu-amx-mxfp4/1": _mxfp4,
    "cpu-amx-mxfp4-interleaved/1": partial(_mxfp4, constants=GPT_OSS),
}

"""Set up vLLM's experts for NVFP4, FP8 and MXFP8 on bytes that already lie as its kernels read them.

The engine's own functions make the records of scales and the kernels (`fused_moe/oracle/nvfp4.py`, `fp8.py`). This
module replaces its `process_weights_after_loading`: it sets the scales of static activations, reduced as the engine
reduces them, and sizes after padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from vllm import envs
from vllm.model_executor.layers.fused_moe.oracle import fp8, mxfp8, nvfp4
from vllm.model_executor.layers.quantization.utils import quant_utils

from moeq.engines.vllm.cpu_experts import routed_inside
from moeq.engines.vllm.engine_experts import (
    Clamp,
    Constructor,
    EngineExperts,
    RankWeights,
    ReadScales,
    Tensors,
    accepts,
    set_parameter,
)
from moeq.errors import MoeqError
from moeq.layouts.readers import VLLM
from moeq.load.activation_scales import ActivationScales

#: Function that views stored scales as the engine's kernel takes them.
Form = Callable[[Any], Any]

_FN, _FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz

_FP8_WEIGHTS = {
    "block": quant_utils.kFp8Static128BlockSym,
    "channel": quant_utils.kFp8StaticChannelSym,
    "tensor": quant_utils.kFp8StaticTensorSym,
}
#: The engine's keys of FP8 activations, by the granularity of their scales and whether these are dynamic.
_FP8_ACTIVATIONS = {
    ("group", True): quant_utils.kFp8Dynamic128Sym,
    ("token", True): quant_utils.kFp8DynamicTokenSym,
    ("tensor", True): quant_utils.kFp8DynamicTensorSym,
    ("tensor", False): quant_utils.kFp8StaticTensorSym,
}


def _clamped(clamp: Clamp, alpha: str, beta: str) -> dict[str, float | None]:
    return {"swiglu_limit": clamp["gemm1_clamp_limit"], alpha: clamp["gemm1_alpha"], beta: clamp["gemm1_beta"]}


def as_it_is(scale: Any) -> Any:
    """Return the stored scales."""
    return scale


def _one_number(scale: Any) -> Any:
    """View scales `[experts, 1]` as `[experts]`."""
    return scale.view(-1)


def all_rows(scale: Any) -> Any:
    """View scales `[experts, N, K / 32]` as `[experts * N, K / 32]`."""
    return scale.flatten(0, 1)


def exponents(scale: Any) -> Any:
    """View bytes as the engine's dtype of exponents."""
    return scale.view(torch.float8_e8m0fnu)


def transposed(scale: Any) -> Any:
    """View words of four exponents as `[experts, N, K / 512]` with rows contiguous in memory."""
    return scale.mT


def named_scales(scale: Form, layer: Any, weights: RankWeights, scales: ReadScales) -> None:
    """Add scales to the layer under the engine's names, where its warm-up of kernels looks for them."""
    for role in ("w13", "w2"):
        set_parameter(layer, f"{role}_weight_scale", scale(getattr(layer, f"{role}_scale").data))


def _stored(scales: ReadScales, title: str) -> ActivationScales:
    found = scales()
    if found is None:
        raise MoeqError(
            "answer.no-backend",
            f"{title} quantises activations with stored scales, and the source stores none",
            "moeq oracle SRC lists the backends that quantise weights alone",
        )
    return found


# ------------------------------------------------------------------------------------------------------------ NVFP4


def _nvfp4_keys(weights: RankWeights) -> tuple[Any, Any]:
    return quant_utils.kNvfp4Static, None if weights.scheme.activation is None else quant_utils.kNvfp4Dynamic


def _nvfp4_config(backend: Any, tensors: Tensors, weights: RankWeights, clamp: Clamp, **more: Any) -> Any:
    """Make the record of scales from the layer's own global scales, which the engine's experts multiply in place."""
    limits = _clamped(clamp, "swiglu_alpha", "swiglu_beta")
    if not accepts(nvfp4.make_nvfp4_moe_quant_config, "swiglu_alpha"):  # these experts read the layer's record
        limits = {"swiglu_limit": limits["swiglu_limit"]}
    return nvfp4.make_nvfp4_moe_quant_config(
        backend=backend,
        w13_scale=tensors["w13_weight_scale"],
        w2_scale=tensors["w2_weight_scale"],
        w13_scale_2=tensors["w13_weight_scale_2"],
        w2_scale_2=tensors["w2_weight_scale_2"],
        a13_scale=tensors.get("w13_input_scale"),
        a2_scale=tensors.get("w2_input_scale"),
        **limits,
        **more,
    )


def _nvfp4_scales(layer: Any, weights: RankWeights, scales: ReadScales) -> None:
    """Add all scales to the layer under the engine's names; they share the memory of the stored ones."""
    named_scales(as_it_is, layer, weights, scales)
    for role in ("w13", "w2"):
        set_parameter(layer, f"{role}_weight_scale_2", getattr(layer, f"{role}_global_scale").data.view(-1))


def _nvfp4_settled(backend: Any, padded: tuple[str, ...], layer: Any, weights: RankWeights, scales: ReadScales) -> None:
    _nvfp4_scales(layer, weights, scales)
    stored = _stored(scales, backend.value)
    start, stop = weights.experts
    is_global = nvfp4.is_global_sf_supported_for_nvfp4_backend(backend)
    # For such a backend the engine's class for ModelOpt loads the scales of all experts, its class for
    # compressed-tensors those of its rank.
    held = slice(None) if is_global and stored.part == "input_scale" else slice(start, stop)
    for role, values in (("w13", stored.w13[held]), ("w2", stored.w2[held])):
        by_expert = values.amax(dim=1) if role == "w13" else values
        input_scale = values.max().repeat(stop - start) if is_global else by_expert
        set_parameter(layer, f"{role}_input_scale", input_scale.to(layer.w13_weight.device))
    _padded_sizes(layer, weights, padded)


def _padded_sizes(layer: Any, weights: RankWeights, padded: tuple[str, ...]) -> None:
    """Write padded sizes into the engine's record of the layer, as its own preparation does."""
    moe = layer.moe_config
    if "hidden_dim_unpadded" in padded and moe.hidden_dim_unpadded is None:
        moe.hidden_dim_unpadded = moe.hidden_dim
    if "hidden_dim" in padded:
        moe.hidden_dim = weights.w2.n
    if "intermediate_size_per_partition" in padded:
        moe.intermediate_size_per_partition = weights.w2.k


def _nvfp4(reader: VLLM, padded: tuple[str, ...] = ()) -> EngineExperts:
    """Make experts for 4-bit activations."""
    backend = nvfp4.NvFp4MoeBackend[reader.backend]
    return EngineExperts(
        title=f"{reader.backend} (NVFP4)",
        reader=reader,
        classes=partial(nvfp4.backend_to_kernel_cls, backend),
        keys=_nvfp4_keys,
        quant_config=partial(_nvfp4_config, backend),
        kernel=partial(nvfp4.make_nvfp4_moe_kernel, backend=backend),
        settle=partial(_nvfp4_settled, backend, padded),
    )


def _marlin_nvfp4(reader: VLLM) -> EngineExperts:
    """Make experts that quantise weights alone."""
    return replace(_nvfp4(reader), settle=_nvfp4_scales)


def _b12x(reader: VLLM) -> EngineExperts:
    """Make experts whose class hands the layer's tensors to the b12x package, which arranges them once more."""
    row = _nvfp4(reader)
    if not reader.weights_only:
        return replace(row, obstacle=b12x_is_16_bit)
    config = partial(_nvfp4_config, nvfp4.NvFp4MoeBackend[reader.backend], use_a16=True)
    return replace(row, keys=lambda weights: (_nvfp4_keys(weights)[0], None), quant_config=config, settle=_nvfp4_scales)


def b12x_is_16_bit(weights: RankWeights) -> str | None:
    """Return why an environment variable rules out these experts, or None."""
    forced = envs.VLLM_B12X_MOE_FP4_FORCE_A16
    return (
        "VLLM_B12X_MOE_FP4_FORCE_A16=1 asks for 16-bit activations, whose weights have another layout"
        if forced
        else None
    )


# ---------------------------------------------------------------------------------------------------- FP8 and MXFP8


def _fp8_keys(weights: RankWeights) -> tuple[Any, Any]:
    scale, activation = weights.scheme.weight.scale, weights.scheme.activation
    found = activation and (activation.scale.granularity, activation.scale.dynamic)
    return _FP8_WEIGHTS.get(scale.granularity), _FP8_ACTIVATIONS.get(found) if found else None


def _mxfp8_keys(weights: RankWeights) -> tuple[Any, Any]:
    return quant_utils.kMxfp8Static, quant_utils.kMxfp8Dynamic


def _fp8_config(backend: Any, tensors: Tensors, weights: RankWeights, clamp: Clamp) -> Any:
    rows, columns = weights.scheme.weight.scale.group_shape
    activation = weights.scheme.activation
    by_token = activation is not None and activation.scale.granularity == "token"
    return fp8.make_fp8_moe_quant_config(
        fp8_backend=backend,
        w1_scale=tensors["w13_weight_scale"],
        w2_scale=tensors["w2_weight_scale"],
        a1_scale=tensors.get("w13_input_scale"),
        a2_scale=tensors.get("w2_input_scale"),
        w1_bias=tensors.get("w13_bias"),
        w2_bias=tensors.get("w2_bias"),
        block_shape=[rows, columns] if columns > 0 else None,
        per_act_token_quant=by_token,
        per_out_ch_quant=by_token,
        **_clamped(clamp, "gemm1_alpha", "gemm1_beta"),
    )


def _static_scales(layer: Any, weights: RankWeights, scales: ReadScales) -> None:
    """Set one scale for all experts of the rank: the largest."""
    activation = weights.scheme.activation
    if activation is None or activation.scale.dynamic:
        return
    stored, held = _stored(scales, "FP8"), slice(*weights.experts)
    gate, up = stored.w13[held, 0], stored.w13[held, -1]
    # The engine's loader keeps the last of the two by name, except that it refuses a checkpoint of compressed-tensors
    # whose scales differ. The larger scale is safe there: it clips no more activations than the smaller one.
    differ = (gate != 1) & ((gate - up).abs() > 1e-5)
    is_checked = weights.scheme.quant_method == "compressed-tensors"
    w13 = torch.where(differ, torch.maximum(gate, up), up) if is_checked else up
    set_parameter(layer, "w13_input_scale", w13.max().to(layer.w13_weight.device))
    set_parameter(layer, "w2_input_scale", stored.w2[held].max().to(layer.w13_weight.device))


def _fp8_settled(scale: Form, padded: tuple[str, ...], layer: Any, weights: RankWeights, scales: ReadScales) -> None:
    named_scales(scale, layer, weights, scales)
    _static_scales(layer, weights, scales)
    _padded_sizes(layer, weights, padded)


def _shuffled(scale: Form, dtype: torch.dtype, layer: Any, weights: RankWeights, scales: ReadScales) -> None:
    """Set the attribute by which AITER knows shuffled weights; double activation scales of E4M3FNUZ codes.

    The same code means half as much in E4M3FNUZ as in E4M3FN.
    """
    _fp8_settled(scale, (), layer, weights, scales)
    for role in ("w13", "w2"):
        weight = getattr(layer, f"{role}_weight")
        weight.data = weight.data.view(dtype)
        weight.is_shuffled = True
        if dtype == _FNUZ and hasattr(layer, f"{role}_input_scale"):
            getattr(layer, f"{role}_input_scale").data.mul_(2)


def _e8m0_is_off(weights: RankWeights) -> str | None:
    return None if envs.VLLM_USE_DEEP_GEMM_E8M0 else "VLLM_USE_DEEP_GEMM_E8M0=0 asks for scales that are no powers of 2"


def _fp8(reader: VLLM, scale: Form = as_it_is, padded: tuple[str, ...] = (), **more: Any) -> EngineExperts:
    backend = fp8.Fp8MoeBackend[reader.backend]
    row = EngineExperts(
        title=f"{reader.backend} (FP8)",
        reader=reader,
        classes=partial(fp8.backend_to_kernel_cls, backend),
        keys=_fp8_keys,
        quant_config=partial(_fp8_config, backend),
        kernel=partial(fp8.make_fp8_moe_kernel, fp8_backend=backend),
        settle=partial(_fp8_settled, scale, padded),
    )
    return replace(row, **more)


def _mxfp8(reader: VLLM, scale: Form = as_it_is, **more: Any) -> EngineExperts:
    classes = partial(mxfp8._mxfp8_backend_to_kernel_cls, fp8.Fp8MoeBackend[reader.backend])
    return _fp8(reader, scale, title=f"{reader.backend} (MXFP8)", classes=classes, keys=_mxfp8_keys, **more)


#: Fields of the engine's record of a layer that get padded sizes: the intermediate size alone, or the hidden one too.
_INTERMEDIATE = ("intermediate_size_per_partition",)
_ALL = ("hidden_dim_unpadded", "hidden_dim", *_INTERMEDIATE)


def _aiter(scale: Form, dtype: torch.dtype) -> Constructor:
    return partial(_fp8, settle=partial(_shuffled, scale, dtype))


def _marlin_fp8(reader: VLLM) -> EngineExperts:
    """Make Marlin's experts, which never quantise activations."""
    return _fp8(reader, settle=partial(named_scales, as_it_is))


#: Functions that make the experts for a layout, by layout id.
FLOATS: dict[str, Constructor] = {
    "marlin-nvfp4/1": _marlin_nvfp4,
    "marlin-nvfp4-fp16/1": _marlin_nvfp4,
    "marlin-fp8/1": _marlin_fp8,
    "marlin-fp8-fp16/1": _marlin_fp8,
    "marlin-mxfp8/1": partial(_mxfp8, scale=exponents),
    "trtllm-nvfp4/1": partial(_nvfp4, padded=_ALL),
    "flashinfer-cutlass-nvfp4/1": _nvfp4,
    "flashinfer-cutedsl-nvfp4/1": partial(_nvfp4, padded=_ALL),
    "cutlass-nvfp4/1": _nvfp4,
    "b12x-nvfp4/1": _b12x,
    "b12x-nvfp4-a16/1": _b12x,
    "flashinfer-b12x-nvfp4/1": _nvfp4,
    "trtllm-fp8-block/1": _fp8,
    "trtllm-fp8-tensor/1": partial(_fp8, scale=_one_number, padded=_INTERMEDIATE),
    "trtllm-mxfp8/1": _mxfp8,
    "flashinfer-cutlass-fp8-block/1": _fp8,
    "flashinfer-cutlass-fp8-tensor/1": partial(_fp8, scale=_one_number, padded=_INTERMEDIATE),
    "deepgemm-fp8-sm90/1": partial(_fp8, obstacle=_e8m0_is_off),
    "deepgemm-fp8-sm100/1": partial(_fp8, scale=transposed, obstacle=_e8m0_is_off),
    "deepgemm-mxfp8/1": partial(_mxfp8, scale=transposed),
    "aiter-fp8-block/1": _aiter(as_it_is, _FN),
    "aiter-fp8-block-fnuz/1": _aiter(as_it_is, _FNUZ),
    "aiter-fp8-channel/1": _aiter(as_it_is, _FN),
    "aiter-fp8-channel-fnuz/1": _aiter(as_it_is, _FNUZ),
    "aiter-fp8-tensor/1": _aiter(_one_number, _FN),
    "aiter-fp8-tensor-fnuz/1": _aiter(_one_number, _FNUZ),
    "aiter-mxfp8/1": partial(_mxfp8, scale=all_rows, settle=partial(_shuffled, all_rows, _FN)),
    "xpu-fp8-block/1": _fp8,
    "xpu-fp8-tensor/1": partial(_fp8, scale=_one_number),
    "xpu-mxfp8/1": _mxfp8,
    "cpu-amx-fp8/1": partial(_fp8, spreads=False, obstacle=routed_inside),
}

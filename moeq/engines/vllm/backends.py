"""Set up vLLM's own experts for each layout that they read.

The engine's constructors get tensors that are already in the order of its kernels; this module changes no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from vllm.model_executor.layers.fused_moe.config import int8_w8a8_moe_quant_config
from vllm.model_executor.layers.fused_moe.oracle import int8, int_wna16
from vllm.model_executor.layers.quantization.utils import quant_utils

from moeq.engines.vllm.cpu_experts import CPUS
from moeq.engines.vllm.engine_experts import RELEASE, VERSION, Clamp, Constructor, EngineExperts, RankWeights, Tensors
from moeq.engines.vllm.float_experts import FLOATS
from moeq.engines.vllm.mxfp4_experts import MXFP4S
from moeq.layouts.readers import VLLM
from moeq.layouts.registry import LAYOUTS
from moeq.matrix import MatrixSpec

_WNA16_KEYS = {
    ("int4", True): quant_utils.kInt4Static,
    ("int4", False): quant_utils.kInt4StaticAsym,
    ("int8", True): quant_utils.kInt8Static,
}


def _wna16_keys(weights: RankWeights) -> tuple[Any, Any]:
    return _WNA16_KEYS.get((weights.w13.element, weights.w13.symmetric)), None


def _wna16_config(tensors: Tensors, weights: RankWeights, clamp: Clamp) -> Any:
    spec = weights.w13
    return _grouped_config(tensors, spec, -1 if _channelwise(spec) else spec.group_size, clamp)


def _triton_config(tensors: Tensors, weights: RankWeights, clamp: Clamp) -> Any:
    """Make the record of scales; the kernel divides by the group size, so a single group is as long as the longer K."""
    spec = weights.w13
    return _grouped_config(tensors, spec, max(spec.k, spec.n // 2) if _channelwise(spec) else spec.group_size, clamp)


def _channelwise(spec: MatrixSpec) -> bool:
    return spec.num_groups == 1 and spec.group_size == spec.k


def _grouped_config(tensors: Tensors, spec: MatrixSpec, group_size: int, clamp: Clamp) -> Any:
    return int_wna16.make_wna16_moe_quant_config(
        w1_scale=tensors["w13_scale"],
        w2_scale=tensors["w2_scale"],
        group_size=group_size,
        num_bits=spec.bits,
        w1_zp=tensors.get("w13_zero"),
        w2_zp=tensors.get("w2_zero"),
        w1_bias=tensors.get("w13_bias"),
        w2_bias=tensors.get("w2_bias"),
        **clamp,
    )


def _wna16(reader: VLLM) -> EngineExperts:
    backend = int_wna16.WNA16MoEBackend[reader.backend]
    return EngineExperts(
        title=reader.backend,
        reader=reader,
        classes=lambda: int_wna16.backend_to_kernel_cls(backend),
        keys=_wna16_keys,
        quant_config=_wna16_config,
        kernel=partial(int_wna16.make_wna16_moe_kernel, backend=backend),
    )


def _triton_wna16(reader: VLLM) -> EngineExperts:
    """Make Triton's experts through the engine's oracle, if that knows them in this version."""
    if hasattr(int_wna16.WNA16MoEBackend, "TRITON"):
        return replace(_wna16(reader), quant_config=_triton_config)
    from moeq.engines.vllm.older_versions import AskableWNA16Experts, triton_kernel

    return EngineExperts(
        title=reader.backend,
        reader=reader,
        classes=lambda: [AskableWNA16Experts],
        keys=_wna16_keys,
        quant_config=_triton_config,
        kernel=triton_kernel,
    )


def _act_order(reader: VLLM) -> EngineExperts:
    from moeq.engines.vllm.older_versions import act_order_arguments

    return replace(_wna16(reader), kernel_arguments=act_order_arguments)


def _int8(reader: VLLM) -> EngineExperts:
    if VERSION < (0, 28):  # its expert class asserts that activations are floating-point
        from moeq.engines.vllm.older_versions import FunctionalExperts, triton_kernel

        classes, kernel = lambda: [FunctionalExperts], triton_kernel
    else:
        triton = int8.Int8MoeBackend.TRITON
        classes, kernel = partial(int8.backend_to_kernel_cls, triton), partial(int8.make_int8_moe_kernel, triton)
    return EngineExperts(
        title="TRITON (int8 W8A8)",
        reader=reader,
        classes=classes,
        keys=lambda weights: (quant_utils.kInt8StaticChannelSym, quant_utils.kInt8DynamicTokenSym),
        # The oracle of 0.26.0 mistakes dynamic activation scales for no scales and would run W8A16.
        quant_config=lambda tensors, weights, clamp: int8_w8a8_moe_quant_config(
            w1_scale=tensors["w13_scale"],
            w2_scale=tensors["w2_scale"],
            a1_scale=None,
            a2_scale=None,
            w1_bias=tensors.get("w13_bias"),
            w2_bias=tensors.get("w2_bias"),
            per_act_token_quant=True,
        ),
        kernel=kernel,
    )


#: Functions that make the experts for a layout, in any version, by layout id.
CONSTRUCTORS: dict[str, Constructor] = {
    "marlin-wna16/1": _wna16,
    "marlin-act-order/1": _act_order,
    "triton-wna16/1": _triton_wna16,
    "int8-w8a8/1": _int8,
    **CPUS,
    **FLOATS,
    **MXFP4S,
}


def _backends() -> Iterator[tuple[str, EngineExperts]]:
    """Yield the layouts that this version reads, by their `readers`, with the experts that read them."""
    for layout, kind in LAYOUTS.items():
        readers = [reader for reader in kind.vllm_readers() if RELEASE in reader.versions]
        if readers:
            first, *instead = map(CONSTRUCTORS[layout], readers)
            yield layout, replace(first, instead=tuple(instead))


#: Experts of this version by the id of the layout that they read.
BACKENDS: dict[str, EngineExperts] = dict(_backends())

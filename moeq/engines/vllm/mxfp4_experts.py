"""Set up vLLM's experts for MXFP4 on bytes in their own order.

The engine's own functions make the records of scales and the kernels (`fused_moe/oracle/mxfp4.py`). Tensors of
triton_kernels know their arrangement: the engine's own preparation makes them without memory (device `meta`), and the
stored bytes then become their memory.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.oracle import mxfp4
from vllm.model_executor.layers.quantization.utils import mxfp4_utils, quant_utils

from moeq.checkpoint.manifest import STACKED_ROLES
from moeq.engines.vllm.engine_experts import (
    GPT_OSS,
    RECORDS,
    Clamp,
    Constructor,
    EngineExperts,
    RankWeights,
    ReadScales,
    Tensors,
    UnpaddedSides,
    widen_biases,
)
from moeq.engines.vllm.float_experts import all_rows, as_it_is, b12x_is_16_bit, exponents, named_scales, transposed
from moeq.errors import MoeqError
from moeq.layouts.readers import VLLM

_WEIGHTS = quant_utils.kMxfp4Static
_16_BIT, _MXFP8, _MXFP4 = None, quant_utils.kMxfp8Dynamic, quant_utils.kMxfp4Dynamic


def _config(backend: Any, tensors: Tensors, weights: RankWeights, clamp: Clamp) -> Any:
    limits = GPT_OSS if weights.activation == "swigluoai" else clamp
    return mxfp4.make_mxfp4_moe_quant_config(
        backend,
        tensors["w13_weight_scale"],
        tensors["w2_weight_scale"],
        gemm1_alpha=limits["gemm1_alpha"],
        gemm1_beta=limits["gemm1_beta"],
        swiglu_limit=limits["gemm1_clamp_limit"],
        w1_bias=tensors.get("w13_bias"),
        w2_bias=tensors.get("w2_bias"),
    )


def _row(reader: VLLM, activation: Any = _16_BIT, **more: Any) -> EngineExperts:
    """Make experts whose sizes are rounded up before weights are made."""
    backend = mxfp4.Mxfp4MoeBackend[reader.backend]
    row = EngineExperts(
        title=f"{reader.backend} (MXFP4)",
        reader=reader,
        classes=partial(mxfp4.backend_to_kernel_cls, backend),
        keys=lambda weights: (_WEIGHTS, activation),
        quant_config=partial(_config, backend),
        kernel=partial(mxfp4.make_mxfp4_moe_kernel, mxfp4_backend=backend),
        settle=partial(named_scales, as_it_is),
        rounds_sizes=True,
    )
    return replace(row, **more)


# ----------------------------------------------------------------------------------------------- FlashInfer, DeepGEMM


def _as_e4m3(scale: Any) -> Any:
    """View exponents as e4m3, FlashInfer's dtype for all bytes of scales."""
    return scale.view(torch.float8_e4m3fn)


def _trtllm_settled(layer: Any, weights: RankWeights, scales: ReadScales) -> None:
    named_scales(_as_e4m3, layer, weights, scales)
    widen_biases(layer)


def _trtllm(reader: VLLM) -> EngineExperts:
    if reader.backend == "FLASHINFER_TRTLLM_MXFP4_BF16":
        return _row(reader, settle=_trtllm_settled, unpadded=UnpaddedSides(results=True))
    return _row(reader, _MXFP8, settle=_trtllm_settled, unpadded=UnpaddedSides(tokens=True, results=True))


# --------------------------------------------------------------------------------------------------------------- AITER


def _aiter_settled(flat: bool, layer: Any, weights: RankWeights, scales: ReadScales) -> None:
    """Mark weights as shuffled, for which AITER looks; its bf16 kernel takes scales of all experts as a matrix."""
    named_scales(all_rows if flat else as_it_is, layer, weights, scales)
    widen_biases(layer)
    for role in STACKED_ROLES:
        weight = getattr(layer, f"{role}_weight")
        weight.data = weight.data.view(torch.float4_e2m1fn_x2)
        weight.is_shuffled = True


def _columns_first(layer: Any, weights: RankWeights, scales: ReadScales) -> None:
    """Set transposed views `[experts, K, N]` of weights and of tiles of scales, for the kernel of gfx1250."""
    named_scales(transposed, layer, weights, scales)
    widen_biases(layer)
    for role in STACKED_ROLES:
        weight = getattr(layer, f"{role}_weight")
        weight.data = weight.data.mT


# ------------------------------------------------------------------------------------------------------ triton_kernels


def _swizzled(weights: RankWeights, experts: int) -> dict[str, tuple[Any, Any, Any]]:
    """Run the engine's preparation on empty weights: values, their record and scales of both matrices."""
    found: dict[str, tuple[Any, Any, Any]] = {}
    for role, spec in zip(STACKED_ROLES, (weights.w13, weights.w2), strict=True):
        shape = (experts, spec.n, spec.k // 2), (experts, spec.n, spec.num_groups)
        empty = (torch.empty(size, dtype=torch.uint8, device="meta") for size in shape)
        found[role] = mxfp4_utils._swizzle_mxfp4(*empty)
    return found


def _other_arrangement(wanted: tuple[str | None, str], weights: RankWeights) -> str | None:
    from triton_kernels import tensor

    if hasattr(tensor, "SparseMatrix"):
        return "triton_kernels is newer than generation 3.5.1, which is what the bytes are arranged for"
    values, _, scale = _swizzled(weights, 1)["w2"]
    found = values.storage.layout.name, scale.storage.layout.name
    if found != wanted:
        return (
            f"triton_kernels arranges weights and scales as {found} on this GPU and with these ranks, not as {wanted}"
        )
    return None


def _wrapped(layer: Any, weights: RankWeights, scales: ReadScales) -> None:
    """Make the engine's tensors on the stored memory, and its records of scales."""
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig

    records = {}
    for role, (values, flex, scale) in _swizzled(weights, len(layer.w13_weight)).items():
        for made, part in ((values, "weight"), (scale, "scale")):
            _fill(made, getattr(layer, f"{role}_{part}").data, f"{role}_{part}")
        # The engine's attribute is a tensor of triton_kernels, not a parameter.
        delattr(layer, f"{role}_weight")
        setattr(layer, f"{role}_weight", values)
        flexible = FlexCtx(rhs_data=flex)
        records[f"{role}_weight_scale"] = PrecisionConfig(weight_scale=scale, flex_ctx=flexible)
    setattr(layer, RECORDS, records)
    widen_biases(layer)


def _fill(made: Any, stored: Any, name: str) -> None:
    """Make stored memory the memory of a tensor that the engine's preparation made without memory."""
    data = made.storage.data
    if data.numel() != stored.numel():
        raise MoeqError(
            "environment.engine-version",
            f"{name} holds {stored.numel()} bytes, and triton_kernels makes {data.numel()} of it ({tuple(data.shape)})",
            "install the triton_kernels that this vLLM names, or let moeq's kernels run the experts",
        )
    made.storage.data = stored.view(-1).as_strided(data.shape, data.stride())


def _triton_kernels(values: str | None, scales: str) -> Constructor:
    return partial(_row, settle=_wrapped, obstacle=partial(_other_arrangement, (values, scales)))


# ----------------------------------------------------------------------------------------------------------- the table


def _as_stored(reader: VLLM) -> EngineExperts:
    """Make experts that read the checkpoint's own order. B12X gets the sizes of the model, without padding."""
    if reader.backend == "XPU":
        return _row(reader)
    if reader.backend == "B12X_MXFP4_BF16":
        return _row(reader, rounds_sizes=False)
    return _row(reader, _MXFP8, rounds_sizes=False, obstacle=b12x_is_16_bit)


_marlin = partial(_row, settle=partial(named_scales, exponents))
_marlin_fp8 = partial(_marlin, title="MARLIN (MXFP4, FP8 activations)", marlin_input="fp8")

#: Functions that make the experts for a layout, by layout id.
MXFP4S: dict[str, Constructor] = {
    "marlin-mxfp4/1": _marlin,
    "marlin-mxfp4-interleaved/1": _marlin,
    "marlin-mxfp4-fp8act/1": _marlin_fp8,
    "marlin-mxfp4-fp8act-interleaved/1": _marlin_fp8,
    "trtllm-mxfp4/1": _trtllm,
    "flashinfer-cutlass-mxfp4-bf16/1": _row,
    "flashinfer-cutlass-mxfp4-mxfp8/1": partial(_row, activation=_MXFP8),
    "cutlass-mxfp4/1": partial(_row, activation=_MXFP4),
    "deepgemm-mxfp4/1": partial(
        _row, activation=quant_utils.kFp8Dynamic128Sym, settle=partial(named_scales, transposed)
    ),
    "triton-kernels-hopper/1": _triton_kernels("HOPPER_VALUE", "HOPPER_SCALE"),
    "triton-kernels-blackwell/1": _triton_kernels("BLACKWELL_VALUE", "BLACKWELL_SCALE"),
    "triton-kernels-cdna4/1": _triton_kernels(None, "CDNA4_SCALE"),
    "aiter-a16w4/1": partial(_row, settle=partial(_aiter_settled, True)),
    "aiter-shuffle/1": partial(_row, activation=_MXFP4, settle=partial(_aiter_settled, False)),
    "aiter-gfx1250/1": partial(_row, activation=_MXFP4, settle=_columns_first),
    "mxfp4-identity/1": _as_stored,
}

"""How `make_checkpoint.py` stores experts: the tensors and the config of each checkpoint format, with random values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import numpy as np

WIDTHS = {"I32": 4, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I8": 1, "U8": 1, "F8_E4M3": 1}

#: Gives the bytes of a tensor, one chunk at a time: `(random bits of that many bytes, first byte) -> bytes`.
Fill = Callable[[np.ndarray, int], np.ndarray]


@dataclass(frozen=True)
class Tensor:
    """A tensor to write; `fill` turns random bits into its values."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fill: Fill

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * WIDTHS[self.dtype]


def any_bits(bits: np.ndarray, start: int) -> np.ndarray:
    """Packed codes, int8 weights: every bit pattern is a value."""
    return bits


def masked(dtype: str, random: int, fixed: int) -> Fill:
    """Numbers whose exponent is fixed, so that none is infinite, tiny or not a number."""
    return lambda bits, start: (bits.view(dtype) & dtype_of(dtype, random)) | dtype_of(dtype, fixed)


def dtype_of(dtype: str, value: int) -> np.generic:
    return np.dtype(dtype).type(value)


SCALES_F16 = masked("<u2", 0x03FF, 0x2000)  # 2^-7 to 2^-6
SCALES_BF16 = masked("<u2", 0x007F, 0x3C00)  # 2^-7 to 2^-6
SCALES_F32 = masked("<u4", 0x007FFFFF, 0x3C000000)  # 2^-7 to 2^-6
SCALES_E4M3 = masked("u1", 0x1F, 0x30)  # 2^-1 to 2^3
CODES_E4M3 = masked("u1", 0xBF, 0x00)  # up to 1.875, no NaN
SCALES_E8M0 = masked("u1", 0x07, 0x70)  # 2^-15 to 2^-8
SCALES_MXFP8 = masked("u1", 0x07, 0x78)  # 2^-7 to 1
WEIGHTS_BF16 = masked("<u2", 0x807F, 0x3C00)


def constant(value: int, dtype: str = "<u4") -> Fill:
    return lambda bits, start: np.full(bits.size // np.dtype(dtype).itemsize, value, dtype)


def group_index(group: int) -> Fill:
    return lambda bits, start: np.arange(start // 4, (start + bits.size) // 4, dtype="<i4") // group


def sizes(n: int, k: int) -> Fill:
    return lambda bits, start: np.array([n, k], "<i8")


def gptq(name: str, n: int, k: int) -> Iterator[Tensor]:
    """GPTQ int4 groups of 128, symmetric: zero points are 8, stored minus one."""
    groups = ceil(k / 128)
    yield Tensor(f"{name}.qweight", "I32", (k // 8, n), any_bits)
    yield Tensor(f"{name}.qzeros", "I32", (groups, n // 8), constant(0x77777777))
    yield Tensor(f"{name}.scales", "F16", (groups, n), SCALES_F16)
    yield Tensor(f"{name}.g_idx", "I32", (k,), group_index(128))


def awq(name: str, n: int, k: int) -> Iterator[Tensor]:
    """AWQ int4 groups of 128, with zero points."""
    groups = ceil(k / 128)
    yield Tensor(f"{name}.qweight", "I32", (k, n // 8), any_bits)
    yield Tensor(f"{name}.qzeros", "I32", (groups, n // 8), any_bits)
    yield Tensor(f"{name}.scales", "F16", (groups, n), SCALES_F16)


def ct_int4(name: str, n: int, k: int) -> Iterator[Tensor]:
    """compressed-tensors pack-quantized int4, groups of 32, as Kimi-K2-Thinking stores its experts."""
    yield Tensor(f"{name}.weight_packed", "I32", (n, k // 8), any_bits)
    yield Tensor(f"{name}.weight_scale", "BF16", (n, k // 32), SCALES_BF16)
    yield Tensor(f"{name}.weight_shape", "I64", (2,), sizes(n, k))


def w8a8(name: str, n: int, k: int) -> Iterator[Tensor]:
    """compressed-tensors int8, one scale per channel."""
    yield Tensor(f"{name}.weight", "I8", (n, k), any_bits)
    yield Tensor(f"{name}.weight_scale", "BF16", (n, 1), SCALES_BF16)


def nvfp4(name: str, n: int, k: int) -> Iterator[Tensor]:
    """ModelOpt's NVFP4, weights only."""
    yield Tensor(f"{name}.weight", "U8", (n, k // 2), any_bits)
    yield Tensor(f"{name}.weight_scale", "F8_E4M3", (n, k // 16), SCALES_E4M3)
    yield Tensor(f"{name}.weight_scale_2", "F32", (), constant(0x3B800000))  # 2^-8


def fp8_tensor(name: str, n: int, k: int) -> Iterator[Tensor]:
    """compressed-tensors FP8, one scale per tensor."""
    yield Tensor(f"{name}.weight", "F8_E4M3", (n, k), CODES_E4M3)
    yield Tensor(f"{name}.weight_scale", "BF16", (1,), SCALES_BF16)


def fp8_channel(name: str, n: int, k: int) -> Iterator[Tensor]:
    """compressed-tensors FP8, one scale per channel."""
    yield Tensor(f"{name}.weight", "F8_E4M3", (n, k), CODES_E4M3)
    yield Tensor(f"{name}.weight_scale", "BF16", (n, 1), SCALES_BF16)


def fp8_block(name: str, n: int, k: int) -> Iterator[Tensor]:
    """Blocks of 128 x 128 with bfloat16 scales, as Qwen stores them."""
    yield Tensor(f"{name}.weight", "F8_E4M3", (n, k), CODES_E4M3)
    yield Tensor(f"{name}.weight_scale_inv", "BF16", (ceil(n / 128), ceil(k / 128)), SCALES_BF16)


def fp8_block_f32(name: str, n: int, k: int) -> Iterator[Tensor]:
    """Store FP8 blocks with float32 scales, as DeepSeek does."""
    yield Tensor(f"{name}.weight", "F8_E4M3", (n, k), CODES_E4M3)
    yield Tensor(f"{name}.weight_scale_inv", "F32", (ceil(n / 128), ceil(k / 128)), SCALES_F32)


def mxfp8(name: str, n: int, k: int) -> Iterator[Tensor]:
    """ModelOpt's MXFP8."""
    yield Tensor(f"{name}.weight", "F8_E4M3", (n, k), CODES_E4M3)
    yield Tensor(f"{name}.weight_scale", "U8", (n, k // 32), SCALES_MXFP8)


#: Tensors of one projection: `(module, n, k)`.
Projection = Callable[[str, int, int], Iterator[Tensor]]


def _ct(scheme: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    weights = {"type": "int", "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": weights, **more}
    ignore = [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*gate$",
        "re:.*shared_experts.*",
        "re:.*layers[.]0[.]mlp[.](gate|up|down)_proj$",
    ]
    return {
        "quant_method": "compressed-tensors",
        "format": scheme,
        "ignore": ignore,
        "config_groups": {"group_0": group},
    }


@dataclass(frozen=True)
class Format:
    """How experts are stored: the tensors of one projection (None: stacked), and what the config says about them."""

    projection: Projection | None
    config: dict[str, Any]


_PLAIN_PATTERNS = ["lm_head", "*self_attn*", "*mlp.gate*", "*moe.gate*", "*shared_experts*"]

_FP8_TOKENS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
_INT8_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}

_FP8_BLOCK = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}

FORMATS = {
    "gptq": Format(
        gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
        | {"checkpoint_format": "gptq"},
    ),
    "awq": Format(
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
        | {"modules_to_not_convert": ["self_attn", "mlp.gate", "moe.gate", "shared_experts", "lm_head"]},
    ),
    "ct-int4": Format(ct_int4, _ct("pack-quantized", {"num_bits": 4, "group_size": 32, "strategy": "group"})),
    "w8a8": Format(w8a8, _ct("int-quantized", {"num_bits": 8, "strategy": "channel"}, input_activations=_INT8_TOKENS)),
    "nvfp4": Format(
        nvfp4,
        {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16, "ignore": _PLAIN_PATTERNS},
    ),
    "fp8-tensor": Format(
        fp8_tensor,
        _ct(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "tensor"},
            input_activations={**_FP8_TOKENS, "strategy": "tensor"},
        ),
    ),
    "fp8-channel": Format(
        fp8_channel,
        _ct("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, input_activations=_FP8_TOKENS),
    ),
    "fp8-block": Format(fp8_block, _FP8_BLOCK),
    "fp8-block-f32": Format(fp8_block_f32, _FP8_BLOCK),
    "mxfp8": Format(
        mxfp8,
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 32, "ignore": _PLAIN_PATTERNS},
    ),
    "mxfp4": Format(
        None,
        {"quant_method": "mxfp4"}
        | {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]},
    ),
}

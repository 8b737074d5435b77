"""Builders of golden vectors: stored tensors of `tests/data/formats/vectors.json`, with what they mean.

`test_vectors.py` decodes every vector; those that it cannot are listed in `NOT_READ` with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeq.schemes.declared import Declared
from moeq.schemes.dequantize import E2M1_VALUES

VECTORS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "formats" / "vectors.json").read_text()
)["vectors"]

DTYPES = {
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
}


@dataclass
class Case:
    """Stored tensors of one projection, what a config would say, and what they mean."""

    format: str
    parts: dict[str, Tensor]
    declared: Declared
    codes: Tensor
    k: int
    zeros: Tensor | None = None
    values: Tensor | None = None

    @property
    def computed_in_bf16(self) -> bool:
        """Whether the recording library computed values in bfloat16, the dtype of its scales."""
        return any(tensor.dtype is torch.bfloat16 for tensor in self.parts.values())


def i32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(torch.int32)


def u8(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def gptq(vector: Mapping[str, Any], *, version: str, zeros: str) -> Case:
    parts = {
        "qweight": i32(vector["qweight"]),
        "qzeros": i32(vector[zeros]),
        "scales": torch.tensor(vector.get("scales_g_out", [[1.0] * 32] * len(vector[zeros])), dtype=torch.float16),
    }
    index = vector.get("g_idx")
    act_order = index is not None and index != sorted(index)
    if index is not None:
        parts["g_idx"] = i32(index)
    zero_points = torch.tensor(vector.get("zero_points_g_out", vector.get("zero_points"))).t()
    symmetric = bool(vector.get("sym", False))
    writer = vector["producer"].replace("==", ":") if "producer" in vector else None
    declared = Declared("gptq", version, vector["bits"], vector["group_size"], symmetric, act_order, writer=writer)
    codes = u8(vector["codes_in_out"]).t()
    return Case("gptq", parts, declared, codes, codes.shape[1], None if symmetric else zero_points)


def gptqmodel(name: str, vector: Mapping[str, Any]) -> Iterator[tuple[str, Case]]:
    planar = vector["format"] == "gptq_p"
    yield f"{name}-v2", gptq(vector, version="gptq_p" if planar else "gptq_v2", zeros="qzeros_v2")
    if not planar:
        yield f"{name}-v1", gptq(vector, version="gptq", zeros="qzeros_v1")


def autogptq(name: str, vector: Mapping[str, Any]) -> Iterator[tuple[str, Case]]:
    yield name, gptq(vector, version="gptq", zeros="qzeros_v1")


def autoround(name: str, vector: Mapping[str, Any]) -> Iterator[tuple[str, Case]]:
    raw = name.endswith("raw_zp")
    case = gptq(vector, version="auto_round" if raw else "auto_round:auto_gptq", zeros="qzeros")
    yield name, case


def awq(name: str, vector: Mapping[str, Any]) -> Iterator[tuple[str, Case]]:
    codes = u8(vector["codes_in_out"]).t()
    zeros = torch.tensor(vector["zero_points_g_out"]).t()
    scales = torch.tensor(vector["scales_g_out"], dtype=torch.float16)
    kind = name.removeprefix("autoawq_").rpartition("_w4")[0]
    declared = Declared("awq", kind, 4, vector["group_size"], False)
    if kind == "gemm":
        parts = {"qweight": i32(vector["qweight"]), "qzeros": i32(vector["qzeros"]), "scales": scales}
        yield name, Case("awq", parts, declared, codes, codes.shape[1], zeros)
        return
    padded = vector["tensors"]["scales"][1]
    if kind == "gemv":
        stored = torch.zeros(padded, dtype=torch.float16)
        stored[:, : scales.shape[0]] = scales.t()
        parts = {"qweight": i32(vector["qweight"]), "qzeros": i32(vector["qzeros"]), "scales": stored}
        yield name, Case("awq-gemv", parts, declared, codes, codes.shape[1], zeros)
        return
    stored = torch.zeros(padded, dtype=torch.float16)
    stored[: scales.shape[0]] = scales
    parts = {
        "qweight": torch.tensor(vector["qweight_int16"], dtype=torch.int16),
        "qzeros": torch.tensor(vector["qzeros_f16"], dtype=torch.float16),
        "scales": stored,
    }
    yield name, Case("awq-gemv-fast", parts, declared, codes, codes.shape[1], zeros)


def marlin(name: str, vector: Mapping[str, Any]) -> Iterator[tuple[str, Case]]:
    codes = u8(vector["codes_in_out"]).t()
    parts = {
        "qweight": i32(vector["qweight"]),
        "scales": torch.tensor(vector["scales_permuted"], dtype=torch.float16),
    }
    declared = Declared("gptq", "marlin", 4, vector["group_size"], True)
    scales = torch.tensor(vector["scales_g_out"], dtype=torch.float16).t().float()
    values = (codes.float() - 8) * scales.repeat_interleave(vector["group_size"], dim=1)
    yield name, Case("marlin-v1", parts, declared, codes, codes.shape[1], values=values)


def ct_codes(name: str, vector: Mapping[str, Any]) -> Iterator[tuple[str, Case]]:
    codes = u8(vector["unsigned_codes"])
    writer = "compressed-tensors " + name.split("_")[1]
    declared = Declared("compressed-tensors", "pack-quantized", vector["bits"], -1, True, writer=writer)
    parts = {"weight_packed": i32(vector["packed"]), "weight_scale": torch.ones(codes.shape[0], 1)}
    yield name, Case("ct-pack", parts, declared, codes, codes.shape[1])


def ct_zeros(name: str, vector: Mapping[str, Any]) -> Iterator[tuple[str, Case]]:
    zeros = u8(vector["unsigned_codes"])
    n, groups = zeros.shape
    bits, size = vector["bits"], 32
    parts = {
        "weight_packed": torch.zeros(n, groups * bits, dtype=torch.int32),
        "weight_scale": torch.ones(n, groups),
        "weight_zero_point": i32(vector["packed"]),
    }
    declared = Declared("compressed-tensors", "pack-quantized", bits, size, False)
    codes = torch.zeros(n, groups * size, dtype=torch.uint8)
    yield name, Case("ct-pack", parts, declared, codes, groups * size, zeros)


_CT_FORMATS = {
    "pack-quantized": "ct-pack",
    "int-quantized": "ct-int8",
    "float-quantized": "fp8",
    "nvfp4-pack-quantized": "nvfp4",
    "mxfp4-pack-quantized": "ct-mxfp4",
    "mxfp8-quantized": "mxfp8",
}


def ct_full(name: str, vector: Mapping[str, Any]) -> Iterator[tuple[str, Case]]:
    parts = {part: stored_tensor(stored) for part, stored in vector["stored"].items()}
    weights = vector["quant_args"]["weights"]
    size = -1 if weights["strategy"] == "channel" else weights["group_size"]
    declared = Declared("compressed-tensors", vector["format"], weights["num_bits"], size, weights["symmetric"])
    if weights["strategy"] == "block":
        declared = replace(declared, block=tuple(weights["block_structure"]))
    format_id = "fp8-block" if declared.block else _CT_FORMATS[vector["format"]]
    values = torch.tensor(vector["dequantized"])
    yield name, Case(format_id, parts, declared, torch.empty(0), values.shape[1], values=values)


def stored_tensor(stored: Mapping[str, Any]) -> Tensor:
    dtype = getattr(torch, stored["dtype"].removeprefix("torch."))
    if dtype is torch.float8_e4m3fn:
        values = torch.tensor(stored["values"])
        # Recorded either as bytes or as values.
        return u8(stored["values"]).view(dtype) if values.dtype is torch.int64 else values.to(dtype)
    return torch.tensor(stored["values"], dtype=dtype)


def gptoss(name: str, vector: Mapping[str, Any]) -> Iterator[tuple[str, Case]]:
    values = torch.tensor(vector["dequantized_E_H_rows"])
    for expert, codes in enumerate(vector["codes_E_rows_H"]):
        parts = {
            "blocks": u8(vector["blocks_u8_E_rows_G_16"][expert]),
            "scales": u8(vector["scales_u8_E_rows_G"][expert]),
        }
        declared = Declared("mxfp4", "mxfp4", 4, 32, True)
        yield f"{name}-{expert}", Case("mxfp4", parts, declared, u8(codes), 64, values=values[expert].t())


def modelopt_int4(name: str, vector: Mapping[str, Any]) -> Iterator[tuple[str, Case]]:
    codes = torch.tensor(vector["signed_codes"]) + 8
    scales = torch.tensor(vector["scales"])
    parts = {"weight": u8(vector["packed_u8"]), "weight_scale": scales}
    values = (codes - 8).float() * scales.repeat_interleave(vector["block_size"], dim=1)
    declared = Declared("modelopt", "w4a16_awq", 4, vector["block_size"], True)
    yield name, Case("modelopt-int4", parts, declared, codes.to(torch.uint8), 8, values=values)


def modelopt_nvfp4(name: str, vector: Mapping[str, Any]) -> Iterator[tuple[str, Case]]:
    parts = {
        "weight": u8(vector["weight_u8"]),
        "weight_scale": torch.tensor(vector["weight_scale_e4m3_value"]).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(vector["weight_scale_2"]),
    }
    scales = torch.tensor(vector["weight_scale_e4m3_value"]).repeat_interleave(16, dim=1)
    values = e2m1(vector["codes"]) * scales * vector["weight_scale_2"]
    yield name, Case("nvfp4", parts, Declared("modelopt", "nvfp4"), torch.empty(0), 32, values=values)


def sglang_w4afp8(name: str, vector: Mapping[str, Any]) -> Iterator[tuple[str, Case]]:
    codes, scales = torch.tensor(vector["signed_codes"]), torch.tensor(vector["scales"])
    values = codes.float() * scales.repeat_interleave(vector["group_size"], dim=1)
    parts = {"weight": torch.tensor(vector["packed_i8"], dtype=torch.int8), "weight_scale_inv": scales}
    declared = Declared("w4afp8", "w4afp8", 4, vector["group_size"], True)
    yield name, Case("w4afp8", parts, declared, (codes + 8).to(torch.uint8), codes.shape[1], values=values)


def e2m1(codes: Any) -> Tensor:
    """Values of recorded codes. ModelOpt records codes before it drops the sign of zero, so codes are not compared."""
    return torch.tensor(E2M1_VALUES)[torch.tensor(codes)]


def byte_mxfp4(name: str, vector: Mapping[str, Any]) -> Iterator[tuple[str, Case]]:
    codes = u8(vector["codes"])
    scales = (
        u8(vector["scale_u8"]).reshape(codes.shape[0], -1)
        if "scale_u8" in vector
        else torch.full((codes.shape[0], codes.shape[1] // 32), 127, dtype=torch.uint8)
    )
    parts = {"weight": u8(vector.get("weight_u8") or vector["packed_u8"]), "weight_scale": scales}
    values = e2m1(vector["codes"]) * torch.exp2(scales.float() - 127).repeat_interleave(32, dim=1)
    yield (
        name,
        Case("ct-mxfp4", parts, Declared("quark", "reorder", 4, 32), torch.empty(0), codes.shape[1], values=values),
    )


def deepseek(name: str, vector: Mapping[str, Any]) -> Iterator[tuple[str, Case]]:
    """The bytes of another MXFP4 writer under DeepSeek's names and dtypes."""
    for label, case in byte_mxfp4(name, vector):
        yield label, case
        parts = {"weight": case.parts["weight"].view(torch.int8), "scale": case.parts["weight_scale"]}
        declared = Declared("fp8", "", 4, 32)
        yield f"{label}-deepseek", Case("deepseek-fp4", parts, declared, torch.empty(0), case.k, values=case.values)


def quark_int4(name: str, vector: Mapping[str, Any]) -> Iterator[tuple[str, Case]]:
    signed = "signed_codes_out_in" in vector
    codes = torch.tensor(vector["signed_codes_out_in"] if signed else vector["codes_out_in"]) + (8 if signed else 0)
    n, k = codes.shape
    channel = "per_channel" in name
    method = "order" if name.endswith("_order") else "reorder"
    parts = {
        "weight": i32(vector["packed"]),
        "weight_scale": torch.ones(n, 1) if channel else torch.ones(1, n),
    }
    zeros = None
    if not signed:
        # The packing of zero points is that of codes; the vector records codes only.
        parts["weight_zero_point"] = i32(vector["packed"])[:1]
        zeros = codes[:, :1]
    declared = Declared("quark", method, 4, -1 if channel else k, signed)
    yield name, Case("quark-int4", parts, declared, codes.to(torch.uint8), k, zeros)


BUILDERS: tuple[tuple[str, Callable[[str, Mapping[str, Any]], Iterator[tuple[str, Case]]]], ...] = (
    ("gptq_w", gptqmodel),
    ("gptq_p_w", gptqmodel),
    ("autogptq_v1_w4_g16", autogptq),
    ("autogptq_v1_w8", autogptq),
    ("autoround_", autoround),
    ("autoawq_", awq),
    ("marlin_", marlin),
    ("ct_pack_quantized", ct_full),
    ("ct_int_quantized", ct_full),
    ("ct_float_quantized", ct_full),
    ("ct_nvfp4", ct_full),
    ("ct_mxfp", ct_full),
    ("gptoss_", gptoss),
    ("modelopt_int4", modelopt_int4),
    ("sglang_w4afp8", sglang_w4afp8),
    ("modelopt_nvfp4", modelopt_nvfp4),
    ("modelopt_mxfp4", byte_mxfp4),
    ("quark_fp4", deepseek),
    ("quark_int4", quark_int4),
    ("quark_uint4", quark_int4),
)

#: Vectors that no format decodes as a matrix: tested by functions of their own below, or foreign.
NOT_READ = {
    "autogptq_v1_w4_zero_point_zero_hazard": "refused: the zero points cannot be recovered",
    "gptq_v1_zero_point_zero_three_writers": "one word of zero points, tested below",
    "ct_pack_w4_3d_experts": "a stacked tensor, tested below",
    "quark_e8m0_scale": "scales only, tested below",
    "hqq_4bit_u8": "codes without settings; `test_hqq.py` has vectors of its own",
    "bnb_nf4": "a block without sizes; `test_bitsandbytes.py` has vectors of its own",
}


def build(name: str) -> list[tuple[str, Case]]:
    vector = VECTORS[name]
    if name.startswith("ct_0."):
        return list((ct_zeros if "_zp_" in name else ct_codes)(name, vector))
    for prefix, builder in BUILDERS:
        if name.startswith(prefix):
            return list(builder(name, vector))
    return []

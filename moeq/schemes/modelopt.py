"""NVIDIA ModelOpt 0.47: its config in either of its two forms (one algorithm, or one per module), and its int4 format.

int4 (W4A16_AWQ, W4A8_AWQ) is described and read, not converted. `weight` U8 `[N / 2, K]` has two's complement codes,
row `2 r` in the low nibble and row `2 r + 1` in the high nibble; `weight_scale` is `[N, K / g]`. `pre_quant_scale`
`[K]` divides the activations' channels before the product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.base import FP8_PER_GROUP, FP8_PER_TOKEN, FP8_STATIC, MXFP8, NVFP4, Scheme
from moeq.schemes.declared import Declaration, Declared, Fields, names_module
from moeq.schemes.format import Context, Described, PartRoles, Parts, ReadOnlyFormat, matrices

if TYPE_CHECKING:
    from torch import Tensor


#: Algorithm -> type of the activations that it quantises; weight-only algorithms are absent.
_ACTIVATIONS = {
    "fp8": FP8_STATIC,
    "fp8_per_channel_per_token": FP8_PER_TOKEN,
    "fp8_pb_wo": FP8_PER_GROUP,  # despite the name, engines quantise activations in groups of 128
    "fp8_block_scales": FP8_PER_GROUP,
    "mxfp8": MXFP8,
    "nvfp4": NVFP4,
    "nvfp4_awq": NVFP4,
    "nvfp4_svd": NVFP4,
    "w4a8_awq": FP8_STATIC,
    "w4a8_nvfp4_fp8": FP8_STATIC,
    "w4a8_mxfp4_fp8": FP8_STATIC,
}


def read_config(table: Mapping[str, Any], origin: str) -> Declaration:
    """Read a ModelOpt config, with one algorithm or with one per module."""
    nested = table.get("quantization")
    fields = Fields(nested if isinstance(nested, dict) else table, origin)
    producer = Fields(Fields(table, origin).table_of("producer"), f"{origin}: producer")
    writer = f"{producer.text('name') or 'modelopt'} {producer.text('version') or ''}".strip()
    algorithm = fields.text("quant_algo") or ""
    default = _declared(algorithm, writer, origin)
    skipped = fields.names("exclude_modules", "ignore")
    layers = fields.table_of("quantized_layers")
    mixed = algorithm == "mixed_precision"

    def resolve(module: str) -> Declared | None:
        if any(names_module(entry, module) for entry in skipped):
            return None
        return _of_module(module, layers, writer, origin) if mixed else default

    return Declaration(
        method="modelopt",
        origin=origin,
        default=None if mixed else default,
        resolve=resolve,
        per_expert=mixed and any("experts." in name for name in layers),
        raw=table,
    )


def _declared(algorithm: str, writer: str, rule: str) -> Declared:
    return Declared(
        method="modelopt",
        variant=algorithm,
        symmetric=True,
        activation=_ACTIVATIONS.get(algorithm),
        writer=writer,
        rule=rule,
    )


def _of_module(module: str, layers: Mapping[str, Any], writer: str, origin: str) -> Declared | None:
    """Return the declaration of a module or of the nearest enclosing module that has one (`layers.3.ffn.experts`)."""
    name = module
    while name:
        entry = layers.get(name)
        if isinstance(entry, Mapping):
            return _declared(str(entry.get("quant_algo", "")).lower(), writer, f"{origin}: quantized_layers[{name!r}]")
        name = name.rpartition(".")[0]
    return None


class ModelOptInt4(ReadOnlyFormat):
    """ModelOpt int4 weights."""

    id = "modelopt-int4"
    title = "ModelOpt int4 AWQ: two rows per byte"
    rows = ("scale", 0)
    parts: ClassVar[PartRoles] = {
        "weight": "codes",
        "weight_scale": "scale",
        "pre_quant_scale": "other",
        "input_scale": "other",
        "bias": "bias",
    }
    refusal = "ModelOpt's int4 AWQ scales activations per channel (pre_quant_scale), which no layout of moeq carries"

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        found = matrices(parts, weight=("U8",), weight_scale=("F32", "F16", "BF16"))
        return found is not None and found[1].shape[0] == 2 * found[0].shape[0]

    def describe(self, parts: Parts, context: Context) -> Described:
        n, groups = parts["weight_scale"].shape
        k = parts["weight"].shape[1]
        context.expect_input_features(k)
        size = context.resolve_groups(k, groups)
        scale_dtype = context.float_name(parts, "weight_scale")
        spec = context.spec(parts, n, k, "int4", size, scale_dtype)
        encoding = context.group_encoding(spec, "u8-packed", "two rows per byte, two's complement")
        return self._described(spec, context.declared, encoding)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        import torch

        octets = parts["weight"]
        rows = torch.stack([octets & 15, octets >> 4], dim=1).reshape(spec.n, spec.k)
        # Two's complement to offset binary: flip the sign bit.
        return QuantizedMatrix(spec, rows ^ 8, parts["weight_scale"].contiguous(), bias=parts.get("bias"))

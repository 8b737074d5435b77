"""torchao: integers in bytes, packed int4, float8, MX and NVFP4, as `flatten_tensor_state_dict` writes them.

`Int8Tensor`, `IntxUnpackedToInt8Tensor`: `_weight_qdata` I8 `[N, K]`, `_weight_scale` and `_weight_zero_point` I8,
`[N, K / group]`, or `[1, 1]` for the whole matrix. `moeq.model.missing_sizes` adds `_weight_bits`, a tensor without
bytes whose shape is `(0, bits)`, from the file's metadata.

`Int4Tensor`: `_weight_qdata` `[N, K / 2]` bytes, low half first, two's complement, `_weight_scale` and
`_weight_zero_point` `[K / group, N]`. A number is `code * scale + zero_point`. Zero points are 0 where activations are
float8. There `moeq.model.missing_sizes` adds `_weight_int4` of shape `(0, 1)`, elsewhere of shape `(0, 0)`.

`Float8Tensor`: `_weight_qdata` F8_E4M3 `[N, K]`, `_weight_scale` F32 `[N, 1]`, `[1, 1]`, or one per block.

`MXTensor`: `_weight_qdata` F8_E4M3 `[N, K]` or U8 `[N, K / 2]`, low half first, `_weight_scale` F8_E8M0 `[N, K / 32]`.
`NVFP4Tensor`: `_weight_qdata` U8 as in `MXTensor`, `_weight_scale` F8_E4M3 `[N, K / 16]` and perhaps one
`_weight_per_tensor_scale`. Scales of both may be in cuBLAS's order, `[32 ceil(N / 128), 16 ceil(G / 4)]`: blocks of
128 x 4 as 32 rows of four runs (`to_blocked`).

Checked against torchao 0.18; packing of `Int4Tensor` is that of FBGEMM 1.9 (`pack_int4`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.base import FP8_PER_TOKEN, MXFP8, NVFP4, Granularity, QuantKey, ScaleKey, Scheme
from moeq.schemes.bits import nibble_codes
from moeq.schemes.declared import Declaration, Declared, Fields, names_module
from moeq.schemes.format import (
    Context,
    Described,
    Encoding,
    Format,
    PartRoles,
    Parts,
    ReadOnlyFormat,
    float_matrix,
    matrices,
)
from moeq.schemes.fp8 import Fp8, Fp8Block, Mxfp8
from moeq.schemes.mxfp4 import Mxfp4Packed
from moeq.schemes.nvfp4 import Nvfp4
from moeq.schemes.patterns import Patterns

if TYPE_CHECKING:
    from torch import Tensor

METHOD = "torchao"

#: Part that `moeq.model.missing_sizes` adds to integers in bytes; its last size is the number of bits.
BITS = "_weight_bits"

#: Part that `moeq.model.missing_sizes` adds to packed int4; its last size is 1 if all zero points are 0, else 0.
INT4 = "_weight_int4"

#: Part that `moeq.model.missing_sizes` adds to matrices with one scale per 32 or 16 numbers.
MX = "_weight_mx"

#: Parts of other kinds of matrices, which change what the layer computes.
_UNREAD = ("_weight_act_pre_scale", "_weight_act_quant_scale", "_weight_act_quant_zero_point")

_INT8 = QuantKey("int8", "i8", ScaleKey("f32", "token", (1, -1), dynamic=True))


def read_config(table: Mapping[str, Any], origin: str) -> Declaration:
    """Read transformers' `TorchAoConfig`: one config for all modules, or one by name or pattern (`FqnToConfig`)."""
    fields = Fields(table, origin)
    skipped = tuple(fields.names("modules_to_not_convert"))
    whole = Fields(fields.table_of("quant_type"), origin).table_of("default")
    by_name = _data(whole).get("fqn_to_config") or _data(whole).get("module_fqn_to_config")
    rules = {name: _declared(rule, origin) for name, rule in by_name.items()} if isinstance(by_name, dict) else {}
    default = rules.get("_default") if rules else _declared(whole, origin)
    matcher = Patterns(origin)
    patterns = {name: matcher.compile(rf"(?:{name[3:]})\Z") for name in rules if name.startswith("re:")}

    def resolve(module: str) -> Declared | None:
        if any(names_module(entry, module) for entry in skipped):
            return None
        names = (f"{module}.weight", module)
        exact = next((rules[name] for name in names if name in rules), None)
        if exact is not None:
            return exact
        for rule, pattern in patterns.items():
            if any(matcher.matches(pattern, name) for name in names):
                return rules[rule]
        return default

    return Declaration(METHOD, origin, default, resolve, per_expert=bool(rules), raw=table)


def _declared(config: object, origin: str) -> Declared:
    """Read the config of one kind of matrix. Raises MoeqError `source.bad-config` for what torchao does not write."""
    if not isinstance(config, dict) or not isinstance(config.get("_type"), str):
        raise MoeqError("source.bad-config", f"{origin}: {ascii(config)[:80]} is no config of torchao")
    kind, data = config["_type"][:100], _data(config)
    mapping = _data_name(data, "mapping_type") or _data_name(data, "weight_mapping_type")
    # Weights of int8 configs are always symmetric; `act_mapping_type` describes the activations.
    symmetric = kind.startswith("Int8") and "Intx" not in kind if mapping is None else mapping.startswith("SYMMETRIC")
    activation = None
    if kind.startswith("Int8DynamicActivation"):
        asymmetric = "Intx" in kind or _data_name(data, "act_mapping_type") == "ASYMMETRIC"
        activation = replace(_INT8, symmetric=not asymmetric)
    elif kind.startswith("Float8DynamicActivation"):
        activation = FP8_PER_TOKEN
    elif kind.startswith("MXDynamicActivation"):
        fp4 = _data_name(data, "activation_dtype") == "float4_e2m1fn_x2"
        activation = replace(MXFP8, dtype="e2m1") if fp4 else MXFP8
    elif kind.startswith("NVFP4DynamicActivation"):
        activation = NVFP4
    return Declared(METHOD, variant=kind, symmetric=symmetric, activation=activation, rule=origin)


def _data(config: Mapping[str, Any]) -> Mapping[str, Any]:
    data = config.get("_data")
    return data if isinstance(data, dict) else {}


def _data_name(data: Mapping[str, Any], key: str) -> str | None:
    """Return the name of an enumeration's member, `{"_type": ..., "_data": name}`."""
    value = data.get(key)
    name = value.get("_data") if isinstance(value, dict) else None
    return name if isinstance(name, str) else None


class _TorchAo(ReadOnlyFormat):
    """Base of torchao's formats: a row of the codes is an output feature."""

    refusal = "engines read its numbers in another spelling: `moeq transcode --to compressed-tensors` is exact"


class TorchAoInt(_TorchAo):
    """Integers of 1 to 8 bits with scales and integer zero points, as in the formats of engines."""

    id = "torchao-int"
    title = "torchao: integers in bytes (`Int8Tensor`, `IntxUnpackedToInt8Tensor`)"
    parts: ClassVar[PartRoles] = {
        "_weight_qdata": "codes",
        "_weight_scale": "scale",
        "_weight_zero_point": "zeros",
        BITS: "other",
        **dict.fromkeys(_UNREAD, "other"),
        "bias": "bias",
    }

    def title_of(self, scheme: Scheme) -> str:
        return f"torchao {scheme.weight.dtype} {scheme.weight.scale.granularity}"

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        codes = parts.get("_weight_qdata")
        return BITS in parts and codes is not None and codes.dtype == "I8" and len(codes.shape) == 2

    def describe(self, parts: Parts, context: Context) -> Described:
        n, k = parts["_weight_qdata"].shape
        context.expect_input_features(k)
        unread = [part for part in _UNREAD if part in parts]
        if unread:
            context.refuse(f"{unread[0]} changes what the layer computes, and moeq does not apply it")
        scale = parts["_weight_scale"].shape if "_weight_scale" in parts else ()
        whole = scale == (1, 1) and n > 1
        groups = 1 if whole or len(scale) != 2 else scale[1]
        if len(scale) != 2 or not (whole or scale[0] == n) or groups == 0 or k % groups:
            context.refuse(f"_weight_scale is {list(scale)}, expected {[n, 1]}, {[n, 'K / group']} or [1, 1]")
        context.expect_shape(parts, "_weight_zero_point", scale, ("I8",))
        scale_dtype = context.float_name(parts, "_weight_scale")
        symmetric = "_weight_zero_point" not in parts or context.declared.symmetric is True
        element = f"int{max(2, parts[BITS].shape[1])}"
        spec = context.spec(parts, n, k, element, k // groups, scale_dtype, symmetric=symmetric)
        granularity: Granularity = "tensor" if whole else "channel" if groups == 1 else "group"
        extent = {"tensor": (-1, -1), "channel": (1, -1), "group": (1, k // groups)}[granularity]
        encoding = Encoding("i8", "one signed byte per code", granularity, extent)
        return self._described(spec, context.declared, encoding)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        import torch

        half = 1 << (spec.bits - 1)
        codes = parts["_weight_qdata"].to(torch.int16) + half
        if not bool(((codes >= 0) & (codes < 2 * half)).all()):
            raise MoeqError("source.bad-data", f"some codes do not fit {spec.bits} bits, {-half} to {half - 1}")
        shape = (spec.n, spec.num_groups)
        stored = parts.get("_weight_zero_point")
        zeros = None
        if spec.symmetric and stored is not None and bool(stored.any()):
            detail = "some zero points are not 0, and the config says that weights are symmetric"
            raise MoeqError("source.bad-data", detail)
        if not spec.symmetric and stored is not None:
            zeros = (stored.to(torch.int16) + half).expand(shape).contiguous()
        scales = parts["_weight_scale"].expand(shape).contiguous()
        return QuantizedMatrix(spec, codes.to(torch.uint8), scales, zeros, bias=parts.get("bias"))


class TorchAoInt4(_TorchAo):
    """Packed int4 for one kernel on a GPU; zero points are floats, unless all are 0."""

    id = "torchao-int4"
    title = "torchao: packed int4 (`Int4Tensor`)"
    parts: ClassVar[PartRoles] = {
        "_weight_qdata": "codes",
        "_weight_scale": "scale",
        "_weight_zero_point": "zeros",
        INT4: "other",
        "_weight_act_pre_scale": "other",
        "bias": "bias",
    }
    refusal = "engines read its numbers in another spelling: `moeq transcode` writes one"

    def title_of(self, scheme: Scheme) -> str:
        return f"torchao Int4Tensor, {scheme.checkpoint_format}"

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        codes = parts.get("_weight_qdata")
        return INT4 in parts and codes is not None and codes.dtype in ("I8", "U8") and len(codes.shape) == 2

    def describe(self, parts: Parts, context: Context) -> Described:
        n, octets = parts["_weight_qdata"].shape
        k = 2 * octets
        context.expect_input_features(k)
        if "_weight_act_pre_scale" in parts:
            context.refuse("_weight_act_pre_scale changes what the layer computes, and moeq does not apply it")
        scale = parts["_weight_scale"].shape if "_weight_scale" in parts else ()
        if len(scale) != 2 or scale[1] != n or scale[0] == 0 or k % scale[0] or "_weight_zero_point" not in parts:
            context.refuse(f"_weight_scale is {list(scale)}, expected ['K / group', {n}], with zero points")
        context.expect_shape(parts, "_weight_zero_point", scale)
        dtype = context.float_name(parts, "_weight_scale")
        context.float_name(parts, "_weight_zero_point")
        group = k // scale[0]
        if parts[INT4].shape[1]:
            spec = context.spec(parts, n, k, "int4", group, dtype)
            variant = f"groups of {group}"
        else:
            spec = context.spec(parts, n, k, "f32", k, "f32")
            variant = f"groups of {group}, zero points in floats"
        encoding = Encoding("u8-packed", "two codes per byte along K, low half first", group_shape=(1, spec.group_size))
        declared = replace(context.declared, variant=variant)
        return self._described(spec, declared, encoding)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        codes = nibble_codes(parts["_weight_qdata"]) ^ 8
        scales, zeros = (parts[part].t().contiguous() for part in ("_weight_scale", "_weight_zero_point"))
        if spec.integer:
            if bool(zeros.any()):
                raise MoeqError("source.bad-data", "some zero points are not 0, and activations are float8")
            return QuantizedMatrix(spec, codes, scales, bias=parts.get("bias"))
        numbers = (codes.float() - 8).reshape(spec.n, scales.shape[1], -1)
        values = (numbers * scales.float().unsqueeze(2) + zeros.float().unsqueeze(2)).reshape(spec.n, spec.k)
        return float_matrix(spec, values, parts)


class TorchAoFloat8(_TorchAo):
    """FP8 with one scale per row, per matrix or per block."""

    id = "torchao-float8"
    title = "torchao: FP8 (`Float8Tensor`)"
    parts: ClassVar[PartRoles] = {"_weight_qdata": "codes", "_weight_scale": "scale", "bias": "bias"}

    def title_of(self, scheme: Scheme) -> str:
        return f"torchao float8 {scheme.weight.scale.granularity}"

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        codes, scale = parts.get("_weight_qdata"), parts.get("_weight_scale")
        if codes is None or scale is None or codes.dtype != "F8_E4M3" or scale.dtype not in ("F32", "BF16", "F16"):
            return False
        return len(codes.shape) == 2 and len(scale.shape) in (0, 2)

    def describe(self, parts: Parts, context: Context) -> Described:
        plain = _plain(parts)
        n, k = plain["weight"].shape
        scale = plain["weight_scale"].shape
        if scale in ((n, 1), (1, 1), ()):
            found = Fp8().describe(plain, context)
        elif scale[0] == 0 or scale[1] == 0 or n % scale[0] or k % scale[1] or n == scale[0]:
            context.refuse(f"_weight_scale is {list(scale)}, expected {[n, 1]}, [1, 1] or one per block of rows")
        else:
            block = (n // scale[0], k // scale[1])
            found = Fp8Block().describe(plain, replace(context, declared=replace(context.declared, block=block)))
        return Described(replace(found.scheme, format=self.id), found.spec)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        blocks = scheme.weight.scale.granularity == "block"
        return (Fp8Block() if blocks else Fp8()).unpack(_plain(parts), spec, scheme)


class TorchAoMx(_TorchAo):
    """FP8 or FP4 with one scale per 32 or 16 numbers."""

    id = "torchao-mx"
    title = "torchao: MXFP8, MXFP4 and NVFP4 (`MXTensor`, `NVFP4Tensor`)"
    parts: ClassVar[PartRoles] = {
        "_weight_qdata": "codes",
        "_weight_scale": "scale",
        "_weight_per_tensor_scale": "scale2",
        "_weight_act_per_tensor_scale": "other",
        MX: "other",
        "bias": "bias",
    }

    def title_of(self, scheme: Scheme) -> str:
        return f"torchao {scheme.weight.dtype}, {scheme.weight.scale.dtype} scales"

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        return (
            MX in parts and matrices(parts, _weight_qdata=(), _weight_scale=()) is not None and _kind(parts) in _TWINS
        )

    def describe(self, parts: Parts, context: Context) -> Described:
        plain, scale = _plain(parts), parts["_weight_scale"]
        twin, octets_per_scale = _TWINS[_kind(parts)]
        n, octets = parts["_weight_qdata"].shape
        groups = -(-octets // octets_per_scale)
        if scale.shape == _blocked_shape(n, groups):
            plain["weight_scale"] = scale._replace(shape=(n, groups))
        found = twin.describe(plain, context)
        return Described(replace(found.scheme, format=self.id), found.spec)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        import torch

        plain, shape = _plain(parts), (spec.n, spec.num_groups)
        if plain["weight_scale"].shape == _blocked_shape(*shape):
            plain["weight_scale"] = _from_blocked(plain["weight_scale"], *shape)
        plain.setdefault("weight_scale_2", torch.ones(1))
        return _TWINS[spec.element, spec.scale_dtype][0].unpack(plain, spec, scheme)


#: Dtypes of codes and scales -> format with the same codes and scales, and the bytes of codes that share a scale.
_TWINS: dict[tuple[str, str], tuple[Format, int]] = {
    ("e4m3", "e8m0"): (Mxfp8(), 32),
    ("e2m1", "e8m0"): (Mxfp4Packed(), 16),
    ("e2m1", "e4m3"): (Nvfp4(), 8),
}

_DTYPES = {"U8": "e2m1", "F8_E4M3": "e4m3", "F8_E8M0": "e8m0"}


def _kind(parts: Parts) -> tuple[str, str]:
    """Return the dtypes of codes and scales."""
    codes, scales = (_DTYPES.get(parts[part].dtype, "") for part in ("_weight_qdata", "_weight_scale"))
    return codes, scales


def _blocked_shape(n: int, groups: int) -> tuple[int, int]:
    """Return the shape of `[N, G]` scales in cuBLAS's order, which is never `[N, G]` itself."""
    return 32 * -(-n // 128), 16 * -(-groups // 4)


def _from_blocked(scales: Tensor, n: int, groups: int) -> Tensor:
    """Return scales `[N, G]` from cuBLAS's order (`torchao.prototype.mx_formats.utils.from_blocked`)."""
    import torch

    rows, columns = -(-n // 128), -(-groups // 4)
    blocks = scales.contiguous().view(torch.uint8).reshape(rows, columns, 32, 4, 4)
    found = blocks.permute(0, 3, 2, 1, 4).reshape(128 * rows, 4 * columns)
    return found[:n, :groups].contiguous().view(scales.dtype)


_Part = TypeVar("_Part")


def _plain(parts: Mapping[str, _Part]) -> dict[str, _Part]:
    """Return the parts of a float matrix by the names of `moeq.schemes.fp8` and `moeq.schemes.nvfp4`."""
    names = {
        "_weight_qdata": "weight",
        "_weight_scale": "weight_scale",
        "_weight_per_tensor_scale": "weight_scale_2",
        "bias": "bias",
    }
    return {names[part]: found for part, found in parts.items() if part in names}

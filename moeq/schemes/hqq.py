"""HQQ: codes of 1 to 8 bits with scales and zero points that are floats, grouped along either axis.

Per projection, as `HQQLinear.state_dict` writes it: `W_q`, `scale`, `zero`, and a small tensor per setting. The matrix
`[N, K]` is reshaped to `[N K / group, group]` (axis 1) or `[group, N K / group]` (axis 0). Its rows are cut into as
many runs as codes fit into a byte (or ten 3-bit codes into an int32); the first run is in the highest bits. `W_q` may
have a float dtype, whose bytes are these bytes. A value is `(code - zero) * scale`, rounded after each step to the
dtype of the scales.

`moeq.model.missing_sizes` adds `hqq_sizes`, a tensor without bytes; its shape is 0 and the fields of `HqqSizes`.
Checked with hqq 0.2.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.base import Scheme
from moeq.schemes.declared import Declaration, Declared, Fields, declared_unless
from moeq.schemes.format import Context, Described, Encoding, PartRoles, Parts, ReadOnlyFormat, float_matrix

if TYPE_CHECKING:
    from torch import Tensor

METHOD = "hqq"

#: Part that `moeq.model.missing_sizes` adds; its shape is 0, then the fields of `HqqSizes`.
SIZES = "hqq_sizes"

#: Library's name of a packing -> bits of a code.
PACKINGS = {"8bit_u8": 8, "4bit_u8": 4, "3bit_32": 3, "2bit_u8": 2, "1bit_u8": 1}

#: Largest number of features of a matrix; larger sizes are refused.
MAX_FEATURES = 1 << 24


class HqqSizes(NamedTuple):
    """Sizes of a matrix."""

    rows: int
    columns: int
    bits: int
    group: int  #: codes per scale
    axis: int  #: axis of the groups in the reshaped matrix, 0 or 1

    @property
    def grouped(self) -> tuple[int, int]:
        """Shape of the reshaped matrix."""
        groups = self.rows * self.columns // self.group
        return (groups, self.group) if self.axis == 1 else (self.group, groups)

    @property
    def codes_per_element(self) -> int:
        """Number of codes in a byte, or of 3-bit codes in an int32."""
        return 10 if self.bits == 3 else 8 // self.bits

    @property
    def packed(self) -> tuple[int, int]:
        """Shape of the packed codes, stored as integers."""
        rows, columns = self.grouped
        return -(-rows // self.codes_per_element), columns

    @property
    def scales(self) -> tuple[int, int]:
        """Shape of scales and zero points."""
        rows, columns = self.grouped
        return (rows, 1) if self.axis == 1 else (1, columns)

    def problem(self) -> str | None:
        """Return why the library does not write such a matrix, or None."""
        numbers = self.rows * self.columns
        if not all(0 < size <= MAX_FEATURES for size in (self.rows, self.columns)) or self.axis not in (0, 1):
            return f"sizes {self.rows} x {self.columns} with groups along axis {self.axis} are out of range"
        if not 0 < self.group <= numbers or numbers % self.group:
            return f"groups of {self.group} codes do not divide {self.rows} x {self.columns}"
        if self.bits != 3 and self.grouped[0] % self.codes_per_element:
            return f"{self.grouped[0]} rows of groups are no whole bytes of {self.bits}-bit codes"
        return None


def read_config(table: Mapping[str, Any], origin: str) -> Declaration:
    """Read transformers' `HqqConfig`; sizes and settings are stored beside each matrix."""
    fields = Fields(table, origin)
    return declared_unless(fields, fields.names("skip_modules"), Declared(METHOD, rule=origin))


class Hqq(ReadOnlyFormat):
    """HQQ, whose zero points are no integers: read as the floats that the library computes."""

    id = "hqq"
    title = "HQQ: codes of 1 to 8 bits, scales and zero points in floats"
    parts: ClassVar[PartRoles] = {
        "W_q": "codes",
        "scale": "scale",
        "zero": "zeros",
        "bias": "bias",
        **dict.fromkeys(
            (
                *(SIZES, "nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float"),
                *("quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict"),
                *("stores_quant_config", "channel_wise", "optimize", "round_zero"),
            ),
            "other",
        ),
    }
    refusal = "no layout has zero points in floats: `moeq transcode --to bf16` (or fp8) writes its numbers"

    def title_of(self, scheme: Scheme) -> str:
        return f"hqq {scheme.checkpoint_format}"

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        return "W_q" in parts and SIZES in parts

    def out_features(self, parts: Parts) -> int:
        return _sizes(parts[SIZES].shape).rows

    def describe(self, parts: Parts, context: Context) -> Described:
        sizes = _sizes(parts[SIZES].shape)
        context.expect_input_features(sizes.columns)
        for part in ("scale", "zero"):
            if part not in parts:
                context.refuse(f"{part} is missing")
            context.expect_shape(parts, part, sizes.scales)
        element = context.float_name(parts, "scale")
        context.float_name(parts, "zero")
        _check_codes(parts, sizes, context)
        spec = context.spec(parts, sizes.rows, sizes.columns, "f32", sizes.columns, "f32")
        variant = f"int{sizes.bits} g{sizes.group} axis {sizes.axis}, computed in {element}"
        encoding = Encoding("u8-packed", f"{sizes.bits}-bit codes, groups along axis {sizes.axis}")
        return self._described(spec, Declared(METHOD, variant=variant, rule=context.declared.rule), encoding)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        import torch

        sizes = _sizes(tuple(parts[SIZES].shape))
        if tuple(parts["shape"].tolist()) != sizes[:2]:
            detail = f"shape is {parts['shape'].tolist()}, other matrices of the same sizes have {list(sizes[:2])}"
            raise MoeqError("source.bad-data", detail)
        scale = parts["scale"]
        packed = parts["W_q"].view(torch.int32 if sizes.bits == 3 else torch.uint8)
        mask = (1 << sizes.bits) - 1
        shifts = range(sizes.bits * (sizes.codes_per_element - 1), -1, -sizes.bits)
        codes = torch.cat([(packed >> shift & mask).to(scale.dtype) for shift in shifts])[: sizes.grouped[0]]
        values = ((codes - parts["zero"].to(scale.dtype)) * scale).reshape(spec.n, spec.k).float()
        return float_matrix(spec, values, parts)


def _sizes(shape: tuple[int, ...]) -> HqqSizes:
    return HqqSizes(*shape[1:])


def _check_codes(parts: Parts, sizes: HqqSizes, context: Context) -> None:
    """Refuse packed codes unless they have the expected bytes, stored as integers or as floats."""
    codes = parts["W_q"]
    stored = {"U8": 1, "I32": 4, "F16": 2, "BF16": 2, "F32": 4}.get(codes.dtype)
    as_floats = codes.dtype not in ("U8", "I32")
    integer, width = ("I32", 4) if sizes.bits == 3 else ("U8", 1)
    rows, columns = sizes.packed
    expected = (rows, columns * width // stored) if stored else ()
    if codes.shape != expected or not (as_floats or codes.dtype == integer):
        found = f"W_q is {codes.dtype}{list(codes.shape)}"
        context.refuse(
            f"{found}, {sizes.rows} x {sizes.columns} codes of {sizes.bits} bits are {integer}{[rows, columns]}"
        )

"""AWQ in its three packings, and the config that names them. Checked against AutoAWQ 0.2.9.

"gemm": codes packed along `N` in int32 words, eight nibbles in a fixed shuffled order. `qweight` I32 `[K, N / 8]`,
`qzeros` I32 `[G, N / 8]` (absent where symmetric), `scales` `[G, N]`, optional `bias` `[N]`. Zero points are stored
without an offset. GPTQModel and AutoRound write the same packing.

"gemv": codes packed along `K`, nibbles in natural order, scales and zero points padded to whole words. `qweight` I32
`[N, K / 8]`, `qzeros` I32 `[N, Z]`, `scales` F16 `[N, 8 * Z]`, where `Z` is the number of words that hold `G` nibbles,
rounded up.

"gemv_fast": int16 words over four rows, zero points stored as `-scale * zero`. `qweight` I16 `[N / 4, K]`, `qzeros` F16
`[Gp, N]`, `scales` F16 `[Gp, N]`, `Gp >= G` padded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moeq.errors import MoeqError
from moeq.foreign import plain
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.base import Scheme, ZeroPoint
from moeq.schemes.bits import pack_stream, stream_codes
from moeq.schemes.declared import Declaration, Declared, Fields, group_size
from moeq.schemes.format import Context, Described, FastView, Format, PartRoles, Parts, PartSig, matrices
from moeq.schemes.gptq import zero_fields

if TYPE_CHECKING:
    from torch import Tensor


#: Parts of a projection, the same in every packing.
PARTS: PartRoles = {"qweight": "codes", "scales": "scale", "qzeros": "zeros", "bias": "bias"}

#: Nibble of a word that holds column `8 * c + j`, for `j` = 0 .. 7.
NIBBLE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)

#: Other names of packings in configs. exllama is a runtime kernel for the gemm packing.
_VARIANTS = {"exllama": "gemm", "llm-awq": "gemv_fast"}


def read_config(table: Mapping[str, Any], origin: str) -> Declaration:
    """Read an AWQ config (AutoAWQ, llm-awq, GPTQModel, AutoRound export)."""
    fields = Fields(table, origin)
    variant = fields.text("version", "checkpoint_format", "format") or "gemm"
    zero_point = fields.flag("zero_point")
    symmetric = fields.flag("sym")
    default = Declared(
        method="awq",
        variant=_VARIANTS.get(variant, variant),
        bits=fields.integer("bits", "w_bit", low=1, high=16),
        group_size=group_size(fields, "group_size", "q_group_size"),
        symmetric=symmetric if zero_point is None else not zero_point,
        writer=_writer(table),
        rule=origin,
    )
    skipped = tuple(fields.names("modules_to_not_convert"))

    def resolve(module: str) -> Declared | None:
        # Substring semantics, as in AutoAWQ; "gate" therefore hits "gate_proj" too, and headers overrule it.
        return None if any(name in module for name in skipped) else default

    return Declaration("awq", origin, default, resolve, raw=table)


def _writer(table: Mapping[str, Any]) -> str | None:
    meta = table.get("meta")
    quantizer = meta.get("quantizer") if isinstance(meta, Mapping) else None
    found = ", ".join(map(str, quantizer)) if isinstance(quantizer, list) else quantizer
    return plain(found or table.get("provider") or table.get("backend") or "") or None


class Awq(Format):
    """AWQ weights in the gemm packing."""

    id = "awq"
    title = "AWQ gemm: int32 words along N, nibbles in AutoAWQ's order"
    rows = ("scale", 1)
    parts = PARTS
    fast_view = FastView(transposed=True, nibble_of_column=NIBBLE_OF_COLUMN)
    # Words along N are always full; zero points of symmetric weights are a constant of the writer's choice.
    bijective = ("codes", "scale")

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        found = matrices(parts, qweight=("I32",), scales=())
        if found is None or (declared and declared.variant == "gemv"):
            return False
        weight, scales = (sig.shape for sig in found)
        return any(weight[1] * (32 // bits) == scales[1] for bits in (2, 4, 8)) and weight[0] >= scales[0]

    def describe(self, parts: Parts, context: Context) -> Described:
        k, words = parts["qweight"].shape
        groups, n = parts["scales"].shape
        bits = 32 * words // n
        declared = context.declared
        if declared.bits not in (None, bits):
            context.refuse(f"{words} words hold {n} codes of {bits} bits, the config declares {declared.bits}")
        _check_width(bits, context)
        context.expect_shape(parts, "qzeros", (groups, words), ("I32",))
        symmetric = "qzeros" not in parts if declared.symmetric is None else declared.symmetric
        size = context.resolve_groups(k, groups)
        scale_dtype = context.float_name(parts, "scales")
        spec = context.spec(parts, n, k, f"int{bits}", size, scale_dtype, symmetric=symmetric)
        zero_point: ZeroPoint = "stored" if "qzeros" in parts else "none"
        packing = "nibbles along N, order 0 2 4 6 1 3 5 7" if bits == 4 else "bytes along N"
        return self._described(spec, declared, context.group_encoding(spec, "i32-packed", packing), zero_point)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        zeros = column_codes(parts["qzeros"], spec.bits, spec.n) if "qzeros" in parts else None
        if spec.symmetric and zeros is not None:
            check_constant(zeros, spec)
            zeros = None
        return QuantizedMatrix(
            spec=spec,
            codes=column_codes(parts["qweight"], spec.bits, spec.n).t().contiguous(),
            scales=parts["scales"].t().contiguous(),
            zeros=None if zeros is None else zeros.t().contiguous(),
            bias=parts.get("bias"),
        )

    def repack(self, matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
        bits = matrix.spec.bits
        if part == "qweight":
            return column_words(matrix.codes.t().contiguous(), bits, sig.shape[1])
        if part == "scales":
            return matrix.scales.t().contiguous()
        return column_words(zero_fields(matrix, sig.shape[0]).contiguous(), bits, sig.shape[1])


def _check_width(bits: int, context: Context) -> None:
    """Refuse widths that writers pack differently: all pack 4 bits alike, and only GPTQModel's 8 bits are known."""
    if bits == 4 or (bits == 8 and "gptqmodel" in (context.declared.writer or "").lower()):
        return
    raise MoeqError(
        "source.unsupported-format",
        f"{context.where}: writers pack {bits}-bit AWQ in different orders, and the config does not say which",
        "use the 4-bit checkpoint, or GPTQ for 8 bits",
    )


def check_constant(zeros: Tensor, spec: MatrixSpec) -> None:
    """Verify that stored zero points of a symmetric matrix are the symmetric constant."""
    if not bool((zeros == spec.symmetric_zero).all()):
        raise MoeqError(
            "source.zero-points",
            f"the config says symmetric, but stored zero points range from {int(zeros.min())} to {int(zeros.max())} "
            f"where the symmetric constant is {spec.symmetric_zero}",
            "set zero_point to true in config.json if the weights are asymmetric",
        )


def column_codes(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpack int32 words that are packed along columns: uint8 `[rows, count]`."""
    codes = stream_codes(words, bits, count)
    if bits != 4:
        return codes
    return codes.reshape(codes.shape[0], -1, 8)[..., list(NIBBLE_OF_COLUMN)].reshape(codes.shape[0], count)


def column_words(codes: Tensor, bits: int, words: int) -> Tensor:
    """Pack codes `[rows, columns]` along columns, the inverse of `column_codes`: int32 `[rows, words]`."""
    if bits == 4:
        column_of_nibble = sorted(range(8), key=NIBBLE_OF_COLUMN.__getitem__)
        codes = codes.reshape(codes.shape[0], -1, 8)[..., column_of_nibble].flatten(1)
    return pack_stream(codes, bits, words)


class _PaddedAwq(Format):
    """Base of the gemv packings, whose rows of scales are filled with zeros: only the config tells the group size."""

    parts = PARTS
    padded_scales = True

    def _describe_padded(
        self, parts: Parts, context: Context, n: int, k: int, scales: int, storage: str, packing: str
    ) -> Described:
        """Describe `[n, k]` codes of 4 bits with `scales` stored scales per row."""
        size = padded_group_size(context, k, scales)
        scale_dtype = context.float_name(parts, "scales")
        spec = context.spec(parts, n, k, "int4", size, scale_dtype, symmetric=False)
        return self._described(spec, context.declared, context.group_encoding(spec, storage, packing))


class AwqGemv(_PaddedAwq):
    """AWQ weights in the gemv packing."""

    id = "awq-gemv"
    title = "AWQ gemv: int32 words along K, padded scales"

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        found = matrices(parts, qweight=("I32",), qzeros=(), scales=())
        if found is None or len({sig.shape[0] for sig in found}) != 1:
            return False
        _, zeros, scales = found
        return scales.shape[1] == 8 * zeros.shape[1]

    def describe(self, parts: Parts, context: Context) -> Described:
        n, words = parts["qweight"].shape
        k = words * 8
        padded = parts["scales"].shape[1]
        return self._describe_padded(parts, context, n, k, padded, "i32-packed", "nibbles along K, low first")

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        return QuantizedMatrix(
            spec=spec,
            codes=stream_codes(parts["qweight"], 4, spec.k),
            scales=parts["scales"][:, : spec.num_groups].contiguous(),
            zeros=stream_codes(parts["qzeros"], 4, spec.num_groups),
            bias=parts.get("bias"),
        )

    def repack(self, matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
        import torch

        if part == "scales":
            return torch.nn.functional.pad(matrix.scales, (0, sig.shape[1] - matrix.spec.num_groups))
        codes = matrix.codes if part == "qweight" else matrix.zeros
        return None if codes is None else pack_stream(codes.to(torch.uint8), 4, sig.shape[1])


def padded_group_size(context: Context, k: int, scales: int) -> int:
    """Return the declared group size, which the number of stored scales (`scales`, padded) cannot tell."""
    size = context.declared.group_size
    if size is None:
        context.refuse("scales are padded, so the group size has to be declared, and it is not")
    size = k if size == -1 else size
    if -(-k // size) > scales:
        context.refuse(f"K={k} with group_size {size} needs {-(-k // size)} scales, there are {scales}")
    return size


class AwqGemvFast(_PaddedAwq):
    """AWQ weights in the gemv_fast packing."""

    id = "awq-gemv-fast"
    title = "AWQ gemv_fast: int16 words over four rows"
    rows = ("scale", 1)

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        return matrices(parts, qweight=("I16",), scales=()) is not None

    def describe(self, parts: Parts, context: Context) -> Described:
        rows, k = parts["qweight"].shape
        padded, n = parts["scales"].shape
        if rows * 4 != n or k % 64:
            context.refuse(f"qweight is {[rows, k]}, expected [N / 4, K] with N={n} and K a multiple of 64")
        return self._describe_padded(parts, context, n, k, padded, "i16-packed", "nibbles over four rows")

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        import torch

        scales = parts["scales"][: spec.num_groups].t().contiguous()
        offsets = parts["qzeros"][: spec.num_groups].t().float()
        zeros = torch.round(-offsets / scales.float())
        if not bool(((zeros >= 0) & (zeros <= 15)).all()):
            raise MoeqError("source.zero-points", "stored offsets are not scale times a zero point from 0 to 15")
        return QuantizedMatrix(
            spec, _fast_codes(parts["qweight"], spec), scales, zeros.to(torch.uint8), bias=parts.get("bias")
        )

    def repack(self, matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
        import torch

        if part == "qweight":
            return _fast_words(matrix.codes)
        rows = matrix.scales
        if part == "qzeros":
            if matrix.zeros is None:
                return None
            rows = -(matrix.scales * matrix.zeros)
        return torch.nn.functional.pad(rows, (0, sig.shape[0] - matrix.spec.num_groups)).t().contiguous()


def _fast_codes(words: Tensor, spec: MatrixSpec) -> Tensor:
    """Unpack the words of gemv_fast: uint8 `[N, K]`.

    Nibble `t` of word `(r, 64 * b + j)` is slot `4 * (j % 16) + t` of row `4 * r + j // 16` in block `b`; within 32
    codes, slot `8 * c + 4 * d + a` holds column `8 * a + 2 * c + d`.
    """
    import torch

    nibbles = torch.stack([(words >> shift) & 15 for shift in (0, 4, 8, 12)], dim=-1).to(torch.uint8)
    blocks = nibbles.reshape(spec.n // 4, spec.k // 64, 4, 16, 4)
    slots = blocks.permute(0, 2, 1, 3, 4).reshape(spec.n, spec.k // 32, 4, 2, 4)
    return slots.permute(0, 1, 4, 2, 3).reshape(spec.n, spec.k).contiguous()


def _fast_words(codes: Tensor) -> Tensor:
    """Pack codes as gemv_fast, the inverse of `_fast_codes`: int16 `[N / 4, K]`."""
    import torch

    n, k = codes.shape
    slots = codes.reshape(n, k // 32, 4, 4, 2).permute(0, 1, 3, 4, 2)
    blocks = slots.reshape(n // 4, 4, k // 64, 16, 4).permute(0, 2, 1, 3, 4)
    nibbles = blocks.reshape(n // 4, k, 4).to(torch.int32)
    joined = nibbles[..., 0] | nibbles[..., 1] << 4 | nibbles[..., 2] << 8 | nibbles[..., 3] << 12
    return joined.to(torch.int16)

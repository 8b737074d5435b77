"""GPTQ: codes packed along `K` in int32 words, per-group scales and zero points (AutoGPTQ, GPTQModel, AutoRound).

Tensors of one projection: `qweight` I32 `[ceil(K * b / 32), N]`, `qzeros` I32 `[G, ceil(N * b / 32)]`, `scales`
`[G, N]`, optional `g_idx` I32 `[K]` and `bias` `[N]`. Checked against GPTQModel 7.7, AutoGPTQ 0.7.1 and AutoRound
0.16.1.

Zero points are the dangerous part. Version 1 stores `z - 1`, and GPTQModel subtracts from the whole word, so a zero
point of 0 borrows from its neighbour; only adding to the whole word undoes that. Version 2 stores `z`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from moeq.errors import MoeqError
from moeq.foreign import plain
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.base import Scheme, ZeroPoint
from moeq.schemes.bits import PLANES, pack_stream, planar_codes, stream_codes
from moeq.schemes.declared import Declaration, Declared, Fields, group_size
from moeq.schemes.format import (
    INTEGERS,
    Context,
    Described,
    FastView,
    Format,
    PartRoles,
    Parts,
    PartSig,
    codes_fill_words,
    matrices,
)
from moeq.schemes.patterns import Patterns

if TYPE_CHECKING:
    from torch import Tensor

#: Variants that store zero points without an offset; all other variants store them minus one.
_RAW_ZEROS = frozenset({"gptq_v2", "gptq_p", "auto_round", "auto_round:gptqmodel", "auto_round:auto_round"})

#: Variants that store odd widths as one continuous bit stream.
_CONTINUOUS = frozenset({"gptq", "gptq_v2", "auto_round:gptq", "auto_round:auto_gptq", *_RAW_ZEROS}) - {"gptq_p"}

#: Checkpoint formats that a GPTQ config may name but that are other formats, or change the mathematics.
_OTHER_FORMATS = {
    "marlin": "serialised Marlin v1 weights",
    "bitblas": "BitBLAS weights",
    "qqq": "QQQ weights (a second scale and int8 activations)",
    "exl3": "EXL3 weights",
    "gguf": "GGUF weights",
    "vptq": "VPTQ weights",
    "paroquant": "ParoQuant weights (rotated)",
}


def read_config(table: Mapping[str, Any], origin: str) -> Declaration:
    """Read a GPTQ `quantization_config` or `quantize_config.json` (AutoGPTQ, GPTQModel, optimum, AutoRound export)."""
    fields = Fields(table, origin)
    variant = fields.text("checkpoint_format", "format") or "gptq"
    if fields.flag("is_marlin_format"):
        variant = "marlin"
    null_group = "group_size" in table and table["group_size"] is None
    default = Declared(
        method="gptq",
        variant=variant,
        bits=fields.integer("bits", "w_bit", "wbits", low=1, high=16),
        group_size=-1 if null_group else group_size(fields, "group_size", "q_group_size"),
        symmetric=not fields.flag("zero_point") if (symmetric := fields.flag("sym")) is None else symmetric,
        act_order=bool(fields.flag("desc_act")),
        writer=_writer(table),
        rule=origin,
    )
    rules = _dynamic_rules(fields, default)
    patterns = Patterns(f"{origin}: dynamic")
    compiled = [(patterns.compile(text), declared) for text, declared in rules]

    def resolve(module: str) -> Declared | None:
        for pattern, declared in compiled:
            if patterns.matches(pattern, module):
                return declared
        return default

    return Declaration(
        method="gptq",
        origin=origin,
        default=default,
        resolve=resolve,
        per_expert=any("expert" in text for text, _ in rules),
        refusal=_refusal(fields, variant),
        raw=table,
    )


def _writer(table: Mapping[str, Any]) -> str | None:
    meta = table.get("meta")
    quantizer = meta.get("quantizer") if isinstance(meta, Mapping) else None
    if isinstance(quantizer, list):
        return plain(", ".join(str(item) for item in quantizer)) or None
    found = quantizer or table.get("provider") or table.get("autoround_version")
    return plain(found) if found else None


def _refusal(fields: Fields, variant: str) -> str | None:
    rotation = fields.table.get("rotation")
    if rotation not in (None, False, ""):
        return f"its weights are rotated (rotation: {ascii(rotation)[:60]}), which changes the model's mathematics"
    pack_dtype = fields.text("pack_dtype")
    if pack_dtype not in (None, "int32"):
        return f"codes are packed into {pack_dtype}, moeq reads int32"
    if variant in _OTHER_FORMATS:
        return f"it holds {_OTHER_FORMATS[variant]}"
    return None


def _dynamic_rules(fields: Fields, default: Declared) -> list[tuple[str, Declared | None]]:
    """Return the rules of GPTQModel's `dynamic` table: excluding ones (`-:`) first, the others in file order."""
    rules: list[tuple[str, Declared | None]] = []
    for text, overrides in fields.table_of("dynamic").items():
        pattern = text[2:] if text.startswith(("-:", "+:")) else text
        if text.startswith("-:") or overrides is False:
            rules.append((pattern, None))
            continue
        if not isinstance(overrides, dict):
            raise fields.refuse(f"dynamic[{ascii(text)[:80]}]", overrides, "expected an object of overrides")
        inner = Fields(overrides, f"{fields.where}: dynamic[{text!r}]")
        declared = default.overridden(
            rule=inner.where[:200],
            bits=inner.integer("bits", low=1, high=16),
            group_size=group_size(inner, "group_size"),
            symmetric=inner.flag("sym"),
            act_order=inner.flag("desc_act"),
            variant=inner.text("checkpoint_format", "format") or None,
        )
        rules.append((pattern, declared))
    return sorted(rules, key=lambda rule: rule[1] is not None)


class Gptq(Format):
    """GPTQ weights packed along `K`."""

    id = "gptq"
    title = "GPTQ: int32 words along K, scales and zero points per group"
    rows = ("codes", 1)
    parts: ClassVar[PartRoles] = {
        "qweight": "codes",
        "scales": "scale",
        "qzeros": "zeros",
        "g_idx": "index",
        "bias": "bias",
    }
    fast_view = FastView(transposed=True)
    bijective = ("codes", "scale")

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        found = matrices(parts, qweight=("I32",), scales=())
        if found is None or (declared and declared.method == "awq" and declared.variant == "gemv"):
            return False
        return found[0].shape[1] == found[1].shape[1]

    def describe(self, parts: Parts, context: Context) -> Described:
        words, n = parts["qweight"].shape
        groups = parts["scales"].shape[0]
        declared = context.declared
        k = _input_features(parts, context, words)
        bits = _bits(context, words, k)
        context.expect_shape(parts, "qzeros", (groups, -(-n * bits // 32)), ("I32",))
        context.expect_shape(parts, "g_idx", (k,), INTEGERS)
        size = context.resolve_groups(k, groups)
        scale_dtype = context.float_name(parts, "scales")
        symmetric = declared.symmetric if declared.symmetric is not None else "qzeros" not in parts
        act_order = declared.act_order and groups > 1 and "g_idx" in parts
        spec = context.spec(parts, n, k, f"int{bits}", size, scale_dtype, symmetric=symmetric, act_order=act_order)
        zero_point: ZeroPoint = "stored" if declared.variant in _RAW_ZEROS else "stored-minus-one"
        packing = "bit planes along K" if declared.variant == "gptq_p" else "bit stream along K, low bits first"
        encoding = context.group_encoding(spec, "i32-packed", packing)
        return self._described(spec, declared, encoding, zero_point if "qzeros" in parts else "none")

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        import torch

        codes = _codes(parts["qweight"].t(), spec.bits, spec.k, scheme.checkpoint_format)
        zeros = _zeros(parts["qzeros"], spec, scheme) if "qzeros" in parts else None
        index = read_group_index(parts.get("g_idx"), spec)
        return QuantizedMatrix(
            spec=replace(spec, act_order=index is not None),
            codes=codes,
            scales=parts["scales"].t().contiguous(),
            zeros=None if spec.symmetric or zeros is None else zeros.to(torch.int16),
            group_index=index,
            bias=parts.get("bias"),
        )

    def repack(self, matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
        spec = matrix.spec
        if scheme.checkpoint_format == "gptq_p" and 8 % spec.bits:
            return None  # bit planes are not rebuilt
        if part == "qweight":
            return pack_stream(matrix.codes, spec.bits, sig.shape[0]).t().contiguous()
        if part == "scales":
            return matrix.scales.t().contiguous()
        if part == "g_idx":
            return group_index(matrix)
        return _packed_zeros(matrix, sig, raw=scheme.zero_point == "stored") if part == "qzeros" else None

    def is_bijective(self, part: str, spec: MatrixSpec) -> bool:
        return super().is_bijective(part, spec) and (part != "qweight" or codes_fill_words(spec.k, spec.bits))


def _input_features(parts: Parts, context: Context, words: int) -> int:
    if "g_idx" in parts and len(parts["g_idx"].shape) == 1:
        return parts["g_idx"].shape[0]
    if context.k_hint is not None:
        return context.k_hint
    if context.declared.bits:
        return words * 32 // context.declared.bits
    return context.refuse("neither g_idx nor the config tells how many input features qweight holds")


def _bits(context: Context, words: int, k: int) -> int:
    declared = context.declared.bits
    implied = words * 32 // k if k else 0
    bits = declared if declared is not None else implied
    if bits not in range(2, 9) or -(-k * bits // 32) != words:
        detail = (
            f"{words} words hold K={k} codes of {words * 32 / k if k else 0:g} bits, the config declares {declared}"
        )
        context.refuse(detail, "the config does not describe this tensor")
    planar = context.declared.variant == "gptq_p"
    if bits in (5, 6, 7) and not planar and context.declared.variant not in _CONTINUOUS - {"gptq", "gptq_v2"}:
        detail = f"{bits}-bit codes are planar or continuous with equal shapes, and the config does not say which"
        context.refuse(detail, "set checkpoint_format in config.json: gptq_p for planar codes")
    return bits


def _codes(words: Tensor, bits: int, count: int, variant: str) -> Tensor:
    """Unpack int32 words `[rows, W]`: uint8 `[rows, count]`."""
    if variant == "gptq_p" and bits in PLANES:
        return planar_codes(words.contiguous(), bits, count)
    return stream_codes(words, bits, count)


def stored_zeros(qzeros: Tensor, spec: MatrixSpec, scheme: Scheme) -> Tensor:
    """Unpack zero-point fields as they are stored: uint8 `[G, N]`."""
    return _codes(qzeros, spec.bits, spec.n, scheme.checkpoint_format)


def _zeros(qzeros: Tensor, spec: MatrixSpec, scheme: Scheme) -> Tensor:
    """Return effective zero points, uint8 `[N, G]`; refuse a symmetric matrix's unless they are the constant."""
    stored = stored_zeros(qzeros, spec, scheme)
    raw = scheme.zero_point == "stored"
    if spec.symmetric:
        _check_symmetric(stored, spec, raw)
        return stored.t()
    if raw:
        return stored.t().contiguous()
    _check_corruption(qzeros, spec.bits)
    if 32 % spec.bits and "gptqmodel" not in (scheme.writer or "").lower():
        # Fields straddle words; AutoGPTQ and AutoRound subtracted from each field by itself.
        return ((stored + 1) & ((1 << spec.bits) - 1)).t().contiguous()
    # Whole words: a zero point of 0 borrowed from its neighbour when GPTQModel subtracted.
    words = qzeros + _ones(spec.bits, qzeros.shape[1])
    return _codes(words, spec.bits, spec.n, scheme.checkpoint_format).t().contiguous()


def _packed_zeros(matrix: QuantizedMatrix, sig: PartSig, *, raw: bool) -> Tensor:
    """Pack zero points along N; version 1 subtracts one from every field of the whole word, borrows included."""
    groups, words = sig.shape
    packed = pack_stream(zero_fields(matrix, groups), matrix.spec.bits, words)
    return packed if raw else packed - _ones(matrix.spec.bits, words)


def zero_fields(matrix: QuantizedMatrix, groups: int) -> Tensor:
    """Return effective zero points, uint8 `[G, N]`: stored ones, or the symmetric constant."""
    import torch

    if matrix.zeros is None:
        return torch.full((groups, matrix.spec.n), matrix.spec.symmetric_zero, dtype=torch.uint8)
    return matrix.zeros.t().to(torch.uint8)


def group_index(matrix: QuantizedMatrix) -> Tensor:
    """Return the group of every column: int32 `[K]`."""
    import torch

    if matrix.group_index is not None:
        return matrix.group_index.to(torch.int32)
    return torch.arange(matrix.spec.k, dtype=torch.int32) // matrix.spec.group_size


def _ones(bits: int, count: int) -> Tensor:
    """Make words of a bit stream in which every field is 1: int32 `[count]`."""
    import torch

    starts = range(0, 32 * count, bits)
    words = [0] * count
    for start in starts:
        words[start // 32] |= 1 << (start % 32)
    return torch.tensor([word - (1 << 32) if word >> 31 else word for word in words], dtype=torch.int32)


def _check_symmetric(stored: Tensor, spec: MatrixSpec, raw: bool) -> None:
    constant = spec.symmetric_zero - (0 if raw else 1)
    if bool((stored == constant).all()):
        return
    other = spec.symmetric_zero - (1 if raw else 0)
    if bool((stored == other).all()):
        version, found = ("gptq_v2", "gptq") if raw else ("gptq", "gptq_v2")
        raise MoeqError(
            "source.zero-points",
            f"zero-point convention mismatch: the config says {version}, whose symmetric zero points are stored as "
            f"{constant}, but every stored field is {other}, as in {found}",
            f"set checkpoint_format to {found} in config.json if that is what wrote it",
        )
    raise MoeqError(
        "source.zero-points",
        f"the config says symmetric, but stored zero points range from {int(stored.min())} to {int(stored.max())} "
        f"where the symmetric constant is {constant}",
        "set sym to false in config.json if the weights are asymmetric",
    )


def _check_corruption(qzeros: Tensor, bits: int) -> None:
    """Refuse words whose higher fields are all ones: AutoGPTQ 0.7 overwrote them where a zero point was 0."""
    import torch

    if 32 % bits:
        return
    words = qzeros.to(torch.int64) & 0xFFFFFFFF
    top = (1 << 32) - (1 << (32 - 3 * bits)) if bits * 3 <= 32 else 0xFFFFFFFF
    damaged = (words & top) == top
    if bool(damaged.any()):
        raise MoeqError(
            "source.zero-points",
            f"zero points corrupted by AutoGPTQ: {int(damaged.sum())} words end in fields of all ones, which a zero "
            "point of 0 leaves behind",
            "re-quantise with GPTQModel, or symmetrically",
        )


def read_group_index(g_idx: Tensor | None, spec: MatrixSpec) -> Tensor | None:
    """Return the stored group index where it differs from `k // group_size` (or act-order is declared).

    An index of zeros without act-order is a placeholder for that order, as exllama reads it.
    """
    import torch

    if g_idx is None or spec.num_groups == 1:
        return None
    index = g_idx.to(torch.int32)
    trivial = torch.arange(spec.k, dtype=torch.int32) // spec.group_size
    if not spec.act_order and (torch.equal(index, trivial) or not bool(index.any())):
        return None
    problem = impossible_groups(index.tolist(), spec.num_groups, spec.group_size)
    if problem is not None:
        hint = "the file is damaged, or its writer has another meaning for it: download or quantise it again"
        raise MoeqError("source.bad-data", f"g_idx {problem}", hint)
    return index


def impossible_groups(index: list[int], num_groups: int, group_size: int) -> str | None:
    """Return why no quantiser writes this group index (groups that do not exist or have wrong sizes), or None."""
    low, high = min(index), max(index)
    if low < 0 or high >= num_groups:
        return f"ranges from {low} to {high}; indices are 0 to {num_groups - 1}"
    if low == high:
        return f"is {low} for all {len(index)} columns, of which every group of {num_groups} has at most {group_size}"
    counts = Counter(index)
    group, count = next(
        ((group, counts[group]) for group in range(num_groups - 1) if counts[group] != group_size), (None, 0)
    )
    return None if group is None else f"has {count} of {len(index)} columns in group {group}; a group has {group_size}"

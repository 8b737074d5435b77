"""Base classes of checkpoint formats: recognise, describe, decode and rebuild one projection of one expert.

A format is one `Format` (or `ReadOnlyFormat`) subclass and one row in the registry. `matches` and `describe` look at
headers and config only and import no torch; `unpack` and `repack` read data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, NoReturn

from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec, QuantizedMatrix, Role
from moeq.schemes.base import Granularity, QuantKey, ScaleKey, Scheme, ZeroPoint
from moeq.schemes.declared import Declared

if TYPE_CHECKING:
    from torch import Tensor

#: Part that holds the static scale of a projection's activations -> whether it holds the scale's reciprocal.
ACTIVATION_SCALES = {"input_scale": False, "input_global_scale": True}


class PartSig(NamedTuple):
    """Header facts of one part: safetensors dtype and shape."""

    dtype: str
    shape: tuple[int, ...]


#: Part name to header facts, for one projection of one expert.
Parts = Mapping[str, PartSig]


#: `MatrixSpec` dtype name of a stored float, by safetensors dtype.
FLOAT_NAMES: dict[str, str] = {
    "F16": "f16",
    "BF16": "bf16",
    "F32": "f32",
    "F8_E4M3": "e4m3",
    "F8_E8M0": "e8m0",
    "U8": "e8m0",
}


@dataclass(frozen=True)
class Context:
    """Facts that a format may use beside the headers of the parts."""

    where: str  #: module name, for messages
    role: Role
    declared: Declared
    k_hint: int | None = None  #: input features as the sibling projection's headers imply them, or None where unknown
    gated: bool = True

    def refuse(self, detail: str, hint: str | None = None) -> NoReturn:
        """Raise MoeqError `source.inconsistent` for headers and config that contradict each other."""
        inconsistent(self.where, detail, hint)

    def expect_shape(self, parts: Parts, part: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = ()) -> None:
        """Check a part's shape, and dtype where `dtypes` are given, if the part exists."""
        found = parts.get(part)
        if found is not None and dtypes and found.dtype not in dtypes:
            self.refuse(f"{part} is {found.dtype}, expected {' or '.join(dtypes)}")
        if found is not None and found.shape != shape:
            self.refuse(f"{part} is {list(found.shape)}, expected {list(shape)}")

    def expect_input_features(self, k: int) -> None:
        """Check `K`, as the shape of `weight` gives it, against the sibling projection."""
        if self.k_hint not in (None, k):
            self.refuse(f"weight has K={k}, the sibling projection implies {self.k_hint}")

    def float_name(self, parts: Parts, part: str, allowed: tuple[str, ...] = ("F16", "BF16", "F32")) -> str:
        """Return the dtype name of a float part, which must be one of the allowed safetensors dtypes."""
        dtype = parts[part].dtype
        if dtype not in allowed:
            self.refuse(f"{part} is {dtype}, expected {' or '.join(allowed)}")
        return FLOAT_NAMES[dtype]

    def bias_dtype(self, parts: Parts, n: int) -> str | None:
        """Return the dtype of the bias vector, or None."""
        if "bias" not in parts:
            return None
        self.expect_shape(parts, "bias", (n,))
        return self.float_name(parts, "bias")

    def spec(
        self,
        parts: Parts,
        n: int,
        k: int,
        element: str,
        group_size: int,
        scale_dtype: str,
        *,
        symmetric: bool = True,
        act_order: bool = False,
    ) -> MatrixSpec:
        """Make the spec of a projection; `role`, `gated` and the bias are found in the same way for every format."""
        return MatrixSpec(
            role=self.role,
            n=n,
            k=k,
            element=element,
            group_size=group_size,
            scale_dtype=scale_dtype,
            symmetric=symmetric,
            act_order=act_order,
            bias_dtype=self.bias_dtype(parts, n),
            gated=self.gated,
        )

    def resolve_groups(self, k: int, groups: int) -> int:
        """Return the group size: the declared one, checked against the number of groups; the last group may be partial.

        Raises MoeqError `source.inconsistent` with both numbers.
        """
        declared = self.declared.group_size
        if declared is None:
            if groups == 0 or k % groups:
                self.refuse(f"{groups} groups do not divide K={k}, and no group size is declared")
            return k // groups
        size = k if declared == -1 else min(declared, k)
        expected = -(-k // size)
        if expected != groups:
            implied = f"K/{groups} = {k // groups}" if groups and k % groups == 0 else f"{groups} groups"
            detail = f"group_size {declared} makes {expected} groups of K={k}, the scales have {groups} ({implied})"
            self.refuse(detail, "the config does not describe this tensor; was one of them replaced?")
        return size

    def group_encoding(self, spec: MatrixSpec, storage: str, packing: str) -> Encoding:
        """Describe one scale per group, or per channel where the config says so or one group covers the row.

        The declared group size is kept where a projection is narrower than a group, so that `w13` and `w2` of one
        checkpoint have one scheme.
        """
        size = self.declared.group_size
        channel = size == -1 or (size is None and spec.group_size == spec.k)
        shape = (1, -1) if channel else (1, size or spec.group_size)
        return Encoding(storage, packing, "channel" if channel else "group", shape)


def inconsistent(where: str, detail: str, hint: str | None = None) -> NoReturn:
    """Raise MoeqError `source.inconsistent` for facts about `where` that contradict each other."""
    raise MoeqError("source.inconsistent", f"{where}: {detail}", hint)


#: Content of a part. `scale2` is a second-level scale, `index` the group of each column, `other` is ignored.
PartRole = Literal["codes", "scale", "scale2", "zeros", "index", "shape", "bias", "other"]

#: Part name to content, for all parts of a format.
PartRoles = Mapping[str, PartRole]


@dataclass(frozen=True)
class FastView:
    """Description of stored bytes that the fast path can read as matrices of codes, scales and zero points.

    Codes are 4 or 8 bits wide, in little-endian words along K; zero points are packed likewise along N.
    """

    transposed: bool = False  #: whether stored matrices have their rows along K (or groups) instead of along N
    #: Position in the word of each of 8 columns' nibbles, where eight codes along N are packed into a word; else None.
    nibble_of_column: tuple[int, ...] | None = None
    signed: bool = False  #: whether codes are two's complement bytes; logical codes add 128 to them
    repeated_scales: bool = False  #: whether several rows may share one stored scale, as the scheme's group shape says
    divisors: tuple[str, ...] = ()  #: parts that hold the reciprocal of a second-level scale


@dataclass(frozen=True)
class Described:
    """One projection as headers and config describe it."""

    scheme: Scheme
    spec: MatrixSpec


@dataclass(frozen=True)
class Encoding:
    """What a format knows of a `Scheme` beside the sizes."""

    storage: str  #: container of a code
    packing: str  #: place of a code in its container, in words
    granularity: Granularity = "group"
    group_shape: tuple[int, int] = (1, -1)  #: `(rows, columns)` that share a scale, -1 for a whole axis
    scale2: ScaleKey | None = None


class Format(ABC):
    """A checkpoint format that can be converted, and converted back."""

    id: ClassVar[str]  #: registry id, `Scheme.format`
    title: ClassVar[str]  #: one line for people
    parts: ClassVar[PartRoles]  #: content of every part that a projection may have. No other part is ever read
    #: Storage as the fast path reads it, or None where only the reference path can.
    fast_view: ClassVar[FastView | None] = None
    rows: ClassVar[tuple[PartRole, int]] = ("codes", 0)  #: content of the part whose shape tells `N`, and its axis
    #: Roles of the parts whose every stored bit is in the matrix: `repack` must give them back unchanged.
    bijective: ClassVar[tuple[PartRole, ...]] = ()
    padded_scales: ClassVar[bool] = False  #: whether the writer fills rows of scales with zeros
    refusal: ClassVar[str | None] = None  #: reason why the format is not converted; None for all but `ReadOnlyFormat`

    def title_of(self, scheme: Scheme) -> str:
        """Return the short name of a scheme for people."""
        return scheme.title

    def refusal_of(self, scheme: Scheme) -> str | None:
        """Say why a scheme of this format is not converted, or return None."""
        return self.refusal

    @abstractmethod
    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        """Return whether the parts are of this format by names, dtypes and ranks; the config only breaks ties."""

    def out_features(self, parts: Parts) -> int:
        """Return `N` from the headers alone, which suffice in every format."""
        role, axis = self.rows
        return parts[self.name_of(role, parts)].shape[axis]

    def name_of(self, role: PartRole, parts: Mapping[str, object]) -> str:
        """Return the name under which the parts have this content, or "" if they have it under none."""
        return next((name for name, content in self.parts.items() if content == role and name in parts), "")

    @abstractmethod
    def describe(self, parts: Parts, context: Context) -> Described:
        """Return scheme and sizes. Raises MoeqError `source.inconsistent` where headers and config disagree."""

    def _described(
        self, spec: MatrixSpec, declared: Declared, encoding: Encoding, zero_point: ZeroPoint | None = None
    ) -> Described:
        """Return the scheme made from the sizes, the config's declaration and the format's encoding, with its spec.

        Without `zero_point`, the zero points of an asymmetric matrix are stored without an offset.
        """
        scale = ScaleKey(spec.scale_dtype, encoding.granularity, encoding.group_shape)
        scheme = Scheme(
            format=self.id,
            weight=QuantKey(spec.element, encoding.storage, scale, spec.symmetric, encoding.scale2),
            activation=declared.activation,
            packing=encoding.packing,
            zero_point=zero_point or ("none" if spec.symmetric else "stored"),
            # An order has no effect where all columns share a scale, though configs declare one (`desc_act`, group -1).
            act_order=declared.act_order and encoding.granularity == "group",
            has_bias=spec.bias_dtype is not None,
            quant_method=declared.method,
            checkpoint_format=declared.variant,
            writer=declared.writer,
        )
        return Described(scheme, spec)

    @abstractmethod
    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        """Decode the parts of one projection. Raises MoeqError `source.bad-data` for impossible values."""

    @abstractmethod
    def repack(self, matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
        """Return the stored tensor of one part, the inverse of `unpack`; None if the matrix does not determine it.

        The result is not trusted: conversion compares it with the source and keeps every tensor that differs, except
        where `is_bijective` says that none can differ.

        Args:
            matrix: the projection as it is stored; a fused gate/up tensor has all its rows, in stored order.
            part: name of the part, never the bias.
            sig: dtype and shape of the part in the source.
        """

    def is_bijective(self, part: str, spec: MatrixSpec) -> bool:
        """Return whether a matrix of these sizes holds every stored bit of the part (see `bijective`)."""
        return self.parts.get(part) in self.bijective

    def fast_view_of(self, scheme: Scheme) -> FastView | None:
        """Return how the fast path reads this scheme, or None; formats override it for schemes that it cannot read."""
        return self.fast_view

    def rebuild(self, matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
        """Call `repack`, or return the bias; None where the part cannot be rebuilt in its stored shape."""
        if part not in self.parts:
            return None
        found = matrix.bias if self.parts[part] == "bias" else self.repack(matrix, part, sig, scheme)
        return found if found is None or tuple(found.shape) == sig.shape else None


class ReadOnlyFormat(Format):
    """A checkpoint format that is described and decoded but not converted.

    Subclasses set `refusal`: why not, as the end of the sentence "moeq does not convert it: ...".
    """

    def __init_subclass__(cls) -> None:
        if not cls.refusal:
            raise TypeError(f"{cls.__name__} has to say in `refusal` why it is not converted")

    def repack(self, matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
        return None


def matrices(parts: Parts, **wanted: tuple[str, ...]) -> tuple[PartSig, ...] | None:
    """Return the named parts if all have two axes and one of their accepted dtypes (empty: any); otherwise None."""
    found = tuple(sig for name in wanted if (sig := parts.get(name)) is not None and len(sig.shape) == 2)
    fits = all(not dtypes or sig.dtype in dtypes for sig, dtypes in zip(found, wanted.values(), strict=False))
    return found if fits and len(found) == len(wanted) else None


#: Dtypes of index tensors.
INTEGERS = ("I32", "I64")


def float_matrix(spec: MatrixSpec, values: Tensor, parts: Mapping[str, Tensor]) -> QuantizedMatrix:
    """Make a matrix of floats with scales of 1. Raises MoeqError `source.bad-data` if some are not finite."""
    import torch

    if not bool(torch.isfinite(values).all()):
        raise MoeqError("source.bad-data", "some numbers are not finite", "the checkpoint is damaged")
    return QuantizedMatrix(spec, values, torch.ones(spec.n, 1), bias=parts.get("bias"))


def codes_fill_words(count: int, bits: int) -> bool:
    """Return whether `count` codes fill whole int32 words, each code inside one byte: no stored bit is unused."""
    return 8 % bits == 0 and count * bits % 32 == 0

"""Find the scheme of every expert from tensor headers and config. Imports no torch.

A checkpoint has tens of thousands of experts of a few kinds. A kind is described once and shared by all experts with
the same headers and the same declaration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NoReturn

from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.names import FUSED, LayerExperts, StoredName
from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec, Role
from moeq.schemes.base import Scheme
from moeq.schemes.declared import Declaration, Declared
from moeq.schemes.format import Context, Described, Format, PartSig, inconsistent
from moeq.schemes.registry import match_format
from moeq.schemes.unquantized import PLAIN_DTYPES

#: Parts that describe a whole fused tensor and have no leading axis of experts.
WHOLE_PARTS = frozenset({"weight_shape"})

#: Projections in the order of messages.
_ORDER: tuple[StoredName, ...] = ("gate", "up", "gate_up", "down")

#: Reason why fused gate/up tensors of an unknown family are not split.
UNKNOWN_ORDER = "gate and up are one tensor, and nothing says whether their rows are two halves or alternate"

#: Tensors of one expert, by projection and part.
Unit = Mapping[StoredName, Mapping[str, TensorEntry]]


@dataclass(frozen=True)
class ExpertKind:
    """Schemes of an expert's projections, found from headers and config."""

    projections: Mapping[StoredName, Described]  #: `gate`, `up`, `down`, or `gate_up` where gate and up are one tensor
    #: Whether gate and up rows of a `gate_up` tensor are interleaved instead of two halves; None if unknown.
    interleaved: bool | None = False

    @property
    def gated(self) -> bool:
        """Whether the expert has a gate projection."""
        return "gate" in self.projections or "gate_up" in self.projections

    @property
    def scheme(self) -> Scheme:
        """Scheme of the input projections (gate, up)."""
        return self.projection("up").scheme

    @property
    def schemes(self) -> list[Scheme]:
        """Distinct schemes of the projections."""
        return list(dict.fromkeys(described.scheme for described in self.projections.values()))

    def problems(self) -> list[str]:
        """List the reasons, other than its formats, why this kind cannot be converted."""
        if self.interleaved is None and "gate_up" in self.projections:
            return [UNKNOWN_ORDER]
        try:
            self.spec("w13")
        except MoeqError as error:
            return [error.message]
        return []

    def projection(self, role: Role) -> Described:
        """Return the stored projection that holds a role."""
        wanted: dict[Role, tuple[StoredName, ...]] = {
            "gate": ("gate", "gate_up"),
            "up": ("up", "gate_up"),
            "w13": ("gate_up", "up"),
            "down": ("down",),
            "w2": ("down",),
        }
        for name in wanted[role]:
            if name in self.projections:
                return self.projections[name]
        raise MoeqError("source.incomplete-experts", f"these experts have no {role} projection")

    def spec(self, role: Role) -> MatrixSpec:
        """Return the spec of a role. Raises MoeqError `source.inconsistent` if gate and up cannot share `w13`."""
        found = self.projection(role).spec
        if "gate_up" in self.projections and role in ("gate", "up"):
            return replace(found, role=role, n=found.n // 2)
        if role == "w13" and "gate" in self.projections:
            return _joined_spec(self.projections["gate"].spec, found)
        return replace(found, role=role)


def _joined_spec(gate: MatrixSpec, up: MatrixSpec) -> MatrixSpec:
    joined = replace(gate, role="w13", n=gate.n + up.n)
    if replace(up, role="w13", n=joined.n) != joined:
        inconsistent("gate and up projections", f"differ and cannot be fused: gate {gate}, up {up}")
    return joined


@dataclass(frozen=True)
class KindGroup:
    """Experts of a layer that share a kind."""

    kind: ExpertKind
    experts: tuple[int, ...]


class Experts:
    """Experts of one layer with their kinds.

    Attributes:
        num_experts: number of experts found.
        flat: whether experts are stacked along the rows of 2-D tensors (DBRX) instead of an axis of their own.
        transposed: whether stacked tensors that are not quantised are stored transposed.
    """

    def __init__(
        self,
        layer: LayerExperts,
        declaration: Declaration | None,
        interleaved: bool | None,
        declared_experts: int | None = None,
        *,
        transposed: bool = False,
        declared_sets: tuple[int, ...] = (),
    ) -> None:
        self.layer = layer
        self._declared_sets = declared_sets
        self.num_experts = _expert_count(layer, declared_experts)
        self.flat = layer.fused and _is_flat(layer)
        self.transposed = layer.fused and transposed
        self._declaration = declaration
        self._interleaved = interleaved
        self._kinds: dict[object, ExpertKind] = {}
        self._by_expert: dict[int, ExpertKind] = {}
        self._uniform = not (declaration and declaration.per_expert) and _is_uniform(layer, self.num_experts)

    def kind(self, expert: int) -> ExpertKind:
        """Return the kind of an expert. Raises MoeqError `usage.no-such-expert`, and the errors of `describe`."""
        if not 0 <= expert < self.num_experts:
            detail = f"layer {self.layer.layer} has experts 0 .. {self.num_experts - 1}, there is no {expert}"
            raise MoeqError("usage.no-such-expert", detail)
        known = self._kinds.get(None) if self._uniform else self._by_expert.get(expert)
        if known is None:
            known = self._by_expert[expert] = self._look_up(expert)
        return known

    def _look_up(self, expert: int) -> ExpertKind:
        """Find the kind of an expert, and describe it if no other expert has the same headers and declaration."""
        unit = self.layer.unit(expert)
        declared = {projection: self._declared(projection, expert) for projection in unit}
        key = None if self._uniform else (_signature(unit), tuple(declared.values()))
        if key not in self._kinds:
            self._kinds[key] = self._describe(unit, declared, expert)
        return self._kinds[key]

    def kinds(self) -> list[KindGroup]:
        """List every kind in the layer with its experts, in order of first appearance."""
        if self._uniform:
            return [KindGroup(self.kind(0), tuple(range(self.num_experts)))] if self.num_experts else []
        members: dict[int, list[int]] = {}
        kinds: dict[int, ExpertKind] = {}
        for expert in range(self.num_experts):
            kind = self.kind(expert)
            kinds[id(kind)] = kind
            members.setdefault(id(kind), []).append(expert)
        return [KindGroup(kinds[key], tuple(experts)) for key, experts in members.items()]

    @cached_property
    def sets(self) -> tuple[range, ...]:
        """Sets of experts, more than one where the config declares several or their intermediate sizes differ."""
        if sum(self._declared_sets) == self.num_experts:
            ends = tuple(accumulate(self._declared_sets, initial=0))
            return tuple(map(range, ends[:-1], ends[1:]))
        sizes: dict[int, list[int]] = {}
        for group in self.kinds():
            sizes.setdefault(group.kind.spec("w2").k, []).extend(group.experts)
        found = tuple(range(min(experts), max(experts) + 1) for experts in sizes.values())
        return found if sum(map(len, found)) == self.num_experts else (range(self.num_experts),)

    @property
    def set_text(self) -> str:
        """Description of the sets: `experts 0-3 have 192 intermediate features, 4-7 have 64`."""
        ranges = (f"{one.start}-{one.stop - 1} have {self.kind(one.start).spec('w2').k}" for one in self.sets)
        return "experts " + " intermediate features, ".join(ranges)

    def _declared(self, projection: StoredName, expert: int) -> Declared | None:
        if self._declaration is None:
            return None
        return self._declaration.resolve(self.layer.module(projection, expert))

    def _describe(self, unit: Unit, declared: Mapping[StoredName, Declared | None], expert: int) -> ExpertKind:
        sigs = {projection: _sigs(self, parts) for projection, parts in unit.items()}
        formats: dict[StoredName, Format] = {}
        for projection in (name for name in _ORDER if name in sigs):
            found = match_format(sigs[projection], declared[projection])
            if found is None:
                method = self._declaration.method if self._declaration else None
                _refuse_unknown(self.layer.module(projection, expert), sigs[projection], method)
            formats[projection] = found
        hints = _k_hints({projection: formats[projection].out_features(sigs[projection]) for projection in formats})
        gated = "gate" in formats or "gate_up" in formats
        described = {}
        for projection, chosen in formats.items():
            context = Context(
                where=self.layer.module(projection, expert),
                role="w13" if projection == "gate_up" else projection,
                declared=declared[projection] or _headers_only(self._declaration),
                k_hint=hints.get(projection),
                gated=gated,
            )
            described[projection] = chosen.describe(sigs[projection], context)
        return ExpertKind(described, self._interleaved)


def is_whole(part: str, entry: TensorEntry) -> bool:
    """Return whether a tensor of a stack has no leading axis of experts: it describes the stack, or is one number.

    ModelOpt 0.47 writes such numbers for the experts of Llama 4 and gpt-oss (`gate_up_proj_input_scale` `[]`).
    """
    return part in WHOLE_PARTS or prod(entry.shape) == 1


def _headers_only(declaration: Declaration | None) -> Declared:
    """Return the declaration of tensors that are quantised although the config does not say so."""
    if declaration and declaration.default:
        return declaration.default
    return Declared(method=declaration.method if declaration else "", rule="tensor headers")


def _sigs(owner: Experts, parts: Mapping[str, TensorEntry]) -> dict[str, PartSig]:
    """Return the headers of one expert's parts: without the leading axis of tensors that stack all experts."""
    if not owner.layer.fused:
        return {part: PartSig(entry.dtype, entry.shape) for part, entry in parts.items()}
    if owner.flat:
        count = owner.num_experts
        return {
            part: PartSig(entry.dtype, (entry.shape[0] // count, *entry.shape[1:])) for part, entry in parts.items()
        }
    return {
        part: PartSig(entry.dtype, entry.shape if is_whole(part, entry) else _row_shape(owner, part, entry))
        for part, entry in parts.items()
    }


def _row_shape(owner: Experts, part: str, entry: TensorEntry) -> tuple[int, ...]:
    """Return the shape `[N, K]` of one expert's row of a stack, which may be stored transposed."""
    row = entry.shape[1:]
    return row[::-1] if owner.transposed and part == "weight" and entry.dtype in PLAIN_DTYPES else row


def _signature(unit: Unit) -> tuple[tuple[str, str, str, tuple[int, ...]], ...]:
    return tuple(
        (projection, part, entry.dtype, entry.shape)
        for projection, parts in unit.items()
        for part, entry in parts.items()
    )


def _is_uniform(layer: LayerExperts, count: int) -> bool:
    """Return whether all experts have the same parts with the same dtypes and shapes."""
    if layer.fused:
        return True
    return all(
        len(entries) == count and len({entry[1:3] for entry in entries.values()}) == 1
        for entries in layer.parts.values()
    )


def _is_flat(layer: LayerExperts) -> bool:
    weights = [entries[FUSED] for (_, part), entries in layer.parts.items() if part == "weight" and FUSED in entries]
    return bool(weights) and all(len(entry.shape) == 2 for entry in weights)


def _expert_count(layer: LayerExperts, declared: int | None) -> int:
    if layer.fused and _is_flat(layer):
        rows = {entry.shape[0] for entry in layer.tensors()}
        if not declared or len(rows) != 1 or rows.pop() % declared:
            detail = f"rows {sorted(entry.shape[0] for entry in layer.tensors())} do not split into {declared} experts"
            inconsistent(layer.prefix, detail)
        return declared
    if layer.fused:
        sizes = {
            entries[FUSED].shape[0] if entries[FUSED].shape else 0
            for (_, part), entries in layer.parts.items()
            if FUSED in entries and not is_whole(part, entries[FUSED])
        }
        if len(sizes) != 1:
            inconsistent(layer.prefix, f"stacked tensors disagree about the number of experts: {sorted(sizes)}")
        return sizes.pop()
    ids = layer.expert_ids
    count = max(ids) + 1
    if len(ids) != count:
        missing = sorted(set(range(count)) - ids)
        shown = ", ".join(map(str, missing[:8]))
        raise MoeqError(
            "source.incomplete-experts",
            f"{layer.prefix}: experts 0 .. {count - 1} are named, {len(missing):,} of them have no tensors: {shown}",
        )
    return count


def _k_hints(outputs: Mapping[StoredName, int]) -> dict[StoredName, int]:
    """Return the input features of each projection, which are its sibling's output features."""
    hints: dict[StoredName, int] = {}
    up = outputs.get("up") or outputs.get("gate") or (outputs["gate_up"] // 2 if "gate_up" in outputs else None)
    down = outputs.get("down")
    if up is not None:
        hints["down"] = up
    if down is not None:
        hints |= {"gate": down, "up": down, "gate_up": down}
    return hints


def _refuse_unknown(module: str, parts: Mapping[str, PartSig], method: str | None) -> NoReturn:
    shown = ", ".join(f"{part} {sig.dtype}{list(sig.shape)}" for part, sig in sorted(parts.items()))
    declared = f"the config says {method}, and " if method else ""
    detail = f"{module}: {declared}no format that moeq knows has the tensors {shown[:400]}"
    raise MoeqError("source.unsupported-format", detail)

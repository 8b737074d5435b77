"""What a checkpoint holds and what a target makes of it: every quantised module, inside the experts and outside."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypedDict

from moeq.checkpoint.facts import Facts
from moeq.checkpoint.families import ModelFamily, find_family
from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.names import StoredName
from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec
from moeq.model import Checkpoint
from moeq.model.activation_scales import missing_scales
from moeq.model.describe import model_type
from moeq.model.expert_kinds import Experts, KindGroup
from moeq.model.quantized_modules import QuantizedModule, quantized_modules
from moeq.pipeline.plan.units import signature_of
from moeq.schemes.format import ACTIVATION_SCALES, Described, PartSig
from moeq.schemes.registry import get_format
from moeq.spelling import option
from moeq.transcode.activations import StaticScale, static_part
from moeq.transcode.configs import Contents, Quantisation, weights_of
from moeq.transcode.naming import NamesOption, Naming, choose_naming, rename
from moeq.transcode.spellings import KT_AMX, MAX_NUMA_NODES, SPELLINGS
from moeq.transcode.target_formats import TargetFormat, kind_of

#: Words in names of modules that hold a matrix but multiply nothing.
_NO_LINEAR = ("embed", "wte", "tok_embeddings", "norm", "conv", "rotary")


@dataclass(frozen=True)
class TranscodeRequest:
    """A request for a transcoding, which decides the bytes together with the source. Picklable."""

    src: str  #: source folder or Hub repository
    to: str  #: id of the target format
    revision: str | None = None  #: Hub revision of `src`
    regroup: int | None = None  #: new size of the groups of integer codes, a divisor of the source's; None: unchanged
    names: NamesOption = "source"  #: spelling of the experts' names
    allow_lossy: bool = False  #: write the nearest values where some do not fit the target, and report them
    #: Sort GPTQ columns in activation order into groups; the intermediate features of an expert are then in another
    #: order, in all three projections.
    sort_act_order: bool = False
    numa: int = 2  #: NUMA nodes that ktransformers' experts are cut for


class TranscodeKeywords(TypedDict, total=False):
    """Types of the fields of `TranscodeRequest` that have a default of their own, for functions with such keywords."""

    regroup: int | None
    names: NamesOption
    allow_lossy: bool
    sort_act_order: bool
    numa: int


@dataclass(frozen=True)
class RecodedProjection:
    """One projection in the source and in the target."""

    source: Described  #: the source's description
    spelling: str  #: stored form in the target
    spec: MatrixSpec
    weights: Quantisation  #: the config's view of the target
    activation: StaticScale | None = None  #: static scale of its activations, if it is carried over

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash of all fields, kept because it is looked up with every expert."""
        return hash((self.source, self.spelling, self.spec, self.weights, self.activation))

    def __getstate__(self) -> dict[str, object]:
        # Strings hash differently in another process.
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    @cached_property
    def signatures(self) -> dict[str, PartSig]:
        """Dtype and shape of everything that is written."""
        found = SPELLINGS[self.spelling].signatures(self.spec)
        return found if self.activation is None else {**found, self.activation.target: self.activation.written}


@dataclass(frozen=True)
class LayerSurvey:
    """The experts of a layer."""

    layer: int  #: layer number, as `Checkpoint` counts layers
    naming: Naming  #: names of the written tensors
    kinds: Mapping[int, Mapping[StoredName, RecodedProjection]]  #: expert to its projections as they are written

    def modules(self) -> Iterator[tuple[str, StoredName, RecodedProjection]]:
        """Yield (written module, projection name, projection) of every projection, expert by expert."""
        for expert, projections in self.kinds.items():
            for name, projected in projections.items():
                yield self.naming.module(name, expert), name, projected


@dataclass(frozen=True)
class ModuleSurvey:
    """A quantised module that is no routed expert."""

    source: QuantizedModule
    written: str  #: name of the written module
    projected: RecodedProjection  #: its matrix in the source and in the target


@dataclass(frozen=True)
class Survey:
    """Contents of a checkpoint that a target has to store."""

    layers: tuple[LayerSurvey, ...]  #: layers whose experts are transcoded
    modules: tuple[ModuleSurvey, ...]  #: other quantised modules
    copied: tuple[TensorEntry, ...]  #: tensors that stay as they are
    contents: Contents  #: what the target's config has to describe
    family: ModelFamily | None
    renamed: tuple[tuple[str, str], ...]  #: containers of experts whose name changes, and their new names


def survey(
    checkpoint: Checkpoint, target: TargetFormat, request: TranscodeRequest, floats: Container[str] = ()
) -> Survey:
    """Return what becomes of every tensor, judged by its header.

    `floats` names modules that become floats although the target would quantise them.

    Raises MoeqError `usage.target`, `usage.regroup`, `usage.names`, `usage.act-order` if something does not fit, with
    the module; `source.not-quantized` if nothing is to be transcoded.
    """
    info = checkpoint.info
    if checkpoint.declaration and checkpoint.declaration.refusal:
        raise MoeqError("source.not-convertible", f"{info.name}: {checkpoint.declaration.refusal}")
    found = model_type(Facts(checkpoint.source.config))
    if target.model_types and found not in target.model_types:
        raise MoeqError(
            "usage.target",
            f"{option('to', target.id)} is read by {', '.join(target.model_types)} only; {info.name} is {found}",
            option("to", "compressed-tensors"),
        )
    return _Surveyor(checkpoint, target, request, find_family(found), floats).survey()


@dataclass(frozen=True)
class _Surveyor:
    """Looks at one checkpoint for one request."""

    checkpoint: Checkpoint
    target: TargetFormat
    request: TranscodeRequest
    family: ModelFamily | None
    floats: Container[str]  #: names of modules that become floats

    def survey(self) -> Survey:
        info, target = self.checkpoint.info, self.target
        numbers = info.moe_layers if target.experts_only else (*info.moe_layers, *info.mtp_layers)
        layers = tuple(layer for layer in map(self.layer, numbers) if layer is not None)
        renamed = tuple(layer.naming.renamed for layer in layers if layer.naming.renamed)
        consumed = {entry.name for layer in layers for entry in self.checkpoint.experts(layer.layer).layer.tensors()}
        rest = [entry for entry in self.checkpoint.source.tensors.values() if entry.name not in consumed]
        if target.experts_only:
            rest = []
        modules = tuple(self.modules(rest, renamed))
        if not layers and not modules:
            raise MoeqError(
                "source.not-quantized", f"{info.name}: nothing in it is quantised", "there is nothing to do"
            )
        taken = {entry.name for module in modules for entry in module.source.parts.values()}
        copied = tuple(entry for entry in rest if entry.name not in taken)
        plain = [rename(name, renamed) for name in _plain_modules(copied)]
        if target.element is None:
            floats = (module.written for module in modules if module.projected.spelling == "plain")
            plain += (name for name in floats if not _is_no_linear(name.rpartition(".")[2]))
        return Survey(layers, modules, copied, _contents(layers, modules, tuple(plain)), self.family, renamed)

    def layer(self, number: int) -> LayerSurvey | None:
        """Survey the experts of a layer; None if they are not quantised."""
        experts = self.checkpoint.experts(number)
        groups = experts.kinds()
        plain = [all(scheme.format == "unquantized" for scheme in group.kind.schemes) for group in groups]
        if all(plain) and not self.target.experts_only:
            return None
        where = experts.layer.prefix
        if any(plain) and not all(plain):
            group = groups[plain.index(True)]
            raise MoeqError(
                "usage.mixed-experts",
                f"{where}: expert {group.experts[0]} is not quantised, others are",
                "re-quantise the layer with one scheme for all its experts",
            )
        naming = choose_naming(experts, self.family, self.target, self.request.names)
        if naming.stacked and self.request.sort_act_order:
            raise MoeqError(
                "usage.names",
                f"{option('sort_act_order', True)} cannot be combined with {option('names', 'stacked')}",
                option("names", "per-expert"),
            )
        found: dict[int, Mapping[StoredName, RecodedProjection]] = {}
        for group in groups:
            found.update(dict.fromkeys(group.experts, self.experts(experts, group, naming)))
        if naming.stacked and len(groups) > 1:
            raise MoeqError(
                "usage.mixed-experts",
                f"{where}: its experts are quantised in {len(groups)} ways and cannot be stacked",
                option("names", "per-expert"),
            )
        return LayerSurvey(number, naming, found)

    def experts(self, experts: Experts, group: KindGroup, naming: Naming) -> Mapping[StoredName, RecodedProjection]:
        """Describe the projections of some experts as they are written."""
        kind, where = group.kind, f"{experts.layer.prefix} expert {group.experts[0]}"
        if problems := kind.problems():
            raise MoeqError("source.not-convertible", f"{where}: {problems[0]}")
        names: tuple[StoredName, ...] = ("gate", "up", "down") if kind.gated else ("up", "down")
        if naming.stacked:
            names = ("gate_up", "down")
        found: dict[StoredName, RecodedProjection] = {}
        incomplete = bool(missing_scales(experts))
        for name in names:
            stored = "w13" if name == "gate_up" else name
            described = Described(kind.projection(stored).scheme, kind.spec(stored))
            parts = _parts_of_all(experts, group.experts, name) if not naming.stacked else {}
            if incomplete:  # engines quantise the activations of all experts of a layer alike
                parts = {part: signature for part, signature in parts.items() if part not in ACTIVATION_SCALES}
            projected = self.project(described, parts, f"{where} {name}")
            found[name] = replace(projected, spelling="plain-transposed") if naming.transposed else projected
        return found

    def modules(self, rest: Sequence[TensorEntry], renamed: Sequence[tuple[str, str]]) -> Iterator[ModuleSurvey]:
        """Yield the quantised modules among the tensors outside routed experts."""
        for module in quantized_modules(rest, self.checkpoint.declaration):
            signatures = {part: PartSig(entry.dtype, entry.shape) for part, entry in module.parts.items()}
            plain = _stays_float(module, self.target) or module.name in self.floats
            projected = self.project(module.described, signatures, module.name, plain=plain)
            # Parts that belong to no format (scales of a KV cache) are not part of the matrix.
            known = get_format(module.described.scheme.format).parts
            parts = {part: entry for part, entry in module.parts.items() if part in known}
            yield ModuleSurvey(replace(module, parts=parts), rename(module.name, renamed), projected)

    def project(
        self, described: Described, parts: Mapping[str, PartSig], where: str, *, plain: bool = False
    ) -> RecodedProjection:
        """Describe what the target makes of one projection.

        Args:
            parts: stored parts that are tensors of their own.
            plain: write floats, whatever the target does with experts.
        """
        static = static_part(parts, described.scheme)
        spelling = "plain" if plain else self.target.spelling(described, where, static=static is not None)
        if self.target.experts_only and described.spec.bias_dtype is not None:
            reason = ": ktransformers' kernels take weights, scales and zero points alone" if spelling in KT_AMX else ""
            detail = f"{where} has a bias, and {option('to', self.target.id)} has no place for it{reason}"
            raise MoeqError("usage.target", detail)
        if spelling in KT_AMX:
            if not 1 <= self.request.numa <= MAX_NUMA_NODES:
                detail = f"{option('numa', self.request.numa)}: experts are cut for 1 to {MAX_NUMA_NODES} NUMA nodes"
                raise MoeqError("usage.target", detail)
            spelling = f"{spelling}/{self.request.numa}"
        place = SPELLINGS[spelling].activation
        activation = None
        if static is not None and place is not None:
            dtype = static[1] if spelling == "ct-fp8-tensor" else "F32"
            activation = StaticScale(*static, place[0], PartSig(dtype, place[1]))
        if self.request.sort_act_order:
            described = replace(described, spec=replace(described.spec, act_order=False))
        spec = self.target.spec(described, spelling, self.request.regroup)
        declared = described.scheme.group_size
        if spelling in ("ct-pack", "gptq"):
            if self.request.regroup and spec.group_size != described.spec.group_size:
                _check_regroup(described.spec, spec.group_size, where)
            declared = self.request.regroup or declared
        elif self.request.regroup and not plain:
            detail = f"{where} becomes {spelling}, whose groups have one size; {option('regroup')} is for integer codes"
            raise MoeqError("usage.regroup", detail, f"leave out {option('regroup')}")
        if spelling == "ct-pack":
            declared = _whole_groups(spec, declared, where)
        if described.spec.act_order and spelling == "ct-pack":
            raise MoeqError(
                "usage.act-order",
                f"{where}: its columns are in activation order (g_idx), which compressed-tensors dropped in 0.19 and "
                "vLLM 0.33 refuses",
                f"{option('to', 'gptq_v2')} keeps g_idx",
            )
        quantised = activation is not None or (spelling == "ct-mxfp8" and described.scheme.activation is not None)
        weights = weights_of(spelling, spec, declared, activations=quantised)
        return RecodedProjection(described, spelling, spec, weights, activation)


def _parts_of_all(experts: Experts, numbers: Iterable[int], name: StoredName) -> dict[str, PartSig]:
    """Return the parts of a stored projection whose dtype and shape are the same for all of these experts."""
    if experts.layer.fused:
        unit = experts.layer.unit(0)
        return {
            part: signature_of(entry, part, fused=True)
            for part, entry in (unit.get(name) or unit.get("gate_up", {})).items()
        }
    units = [experts.layer.unit(number).get(name, {}) for number in numbers]
    first = {part: PartSig(entry.dtype, entry.shape) for part, entry in units[0].items()}
    return {
        part: signature
        for part, signature in first.items()
        if all(part in unit and unit[part][1:3] == signature for unit in units)
    }


def _check_regroup(spec: MatrixSpec, group_size: int, where: str) -> None:
    """Refuse group sizes that scales cannot be repeated to. Raises MoeqError `usage.regroup`."""
    if spec.group_size % group_size:
        fits = [size for size in (128, 64, 32, 16) if spec.group_size % size == 0]
        raise MoeqError(
            "usage.regroup",
            f"{where}: groups of {spec.group_size} are not made of whole groups of {group_size} "
            f"({spec.group_size} / {group_size} = {spec.group_size / group_size:g})",
            " or ".join(option("regroup", size) for size in fits) or None,
        )
    if spec.act_order:
        raise MoeqError(
            "usage.regroup",
            f"{where}: columns are assigned to groups in activation order, so that groups are no runs of columns",
            f"leave out {option('regroup')}",
        )


def _whole_groups(spec: MatrixSpec, declared: int, where: str) -> int:
    """Return the group size for a compressed-tensors config, whose readers want K to be a multiple of it.

    A projection narrower than a group is one group of its own size.
    """
    if declared == -1 or spec.k % spec.group_size == 0:
        return declared if declared == -1 else spec.group_size
    fits = [size for size in (64, 32, 16, 8) if spec.k % size == 0 and spec.group_size % size == 0]
    raise MoeqError(
        "usage.target",
        f"{where}: K={spec.k} is {spec.k / spec.group_size:g} groups of {spec.group_size}, and readers of "
        "compressed-tensors take whole groups only",
        option("regroup", fits[0]) if fits else None,
    )


def _stays_float(module: QuantizedModule, target: TargetFormat) -> bool:
    """Return whether a GGUF, bitsandbytes or HQQ module becomes floats: embeddings, and kinds the target lacks."""
    if module.described.scheme.format not in ("gguf", "bitsandbytes-4bit", "hqq"):
        return False
    leaf = module.name.rpartition(".")[2]
    return leaf == "lm_head" or _is_no_linear(leaf) or kind_of(module.described) not in target.spellings


def _is_no_linear(leaf: str) -> bool:
    return any(word in leaf for word in _NO_LINEAR)


def _plain_modules(copied: tuple[TensorEntry, ...]) -> Iterator[str]:
    """Yield names of linear layers that are not quantised: modules with a matrix `weight`, except embeddings."""
    for entry in copied:
        name, _, part = entry.name.rpartition(".")
        leaf = name.rpartition(".")[2]
        if part == "weight" and len(entry.shape) == 2 and not _is_no_linear(leaf):
            yield name


def _contents(layers: Iterable[LayerSurvey], modules: Iterable[ModuleSurvey], plain: tuple[str, ...]) -> Contents:
    found: dict[Quantisation, list[str]] = {}
    for layer in layers:
        for module, _, projected in layer.modules():
            found.setdefault(projected.weights, []).append(module)
    for other in modules:
        if other.projected.spelling != "plain":
            found.setdefault(other.projected.weights, []).append(other.written)
    ranked = sorted(found.items(), key=lambda row: -len(row[1]))
    return Contents({weights: tuple(dict.fromkeys(names)) for weights, names in ranked}, plain)

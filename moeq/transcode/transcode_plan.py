"""What a transcoding writes, known from headers alone: files, tensors, units of work, the config.

Files are cut as `moeq convert` cuts them: one per layer of experts, and files of bounded size for everything else.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.manifest import STACKED_ROLES, StackedRole, stacked_role
from moeq.checkpoint.names import FUSED, StoredName
from moeq.checkpoint.writer import FileForm, tensor_bytes
from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec
from moeq.model import Checkpoint
from moeq.pipeline.plan.conversion_plan import (
    PLAN_VERSION,
    FilePlan,
    Plan,
    TensorForms,
    bounded_files,
    file_names,
    in_source_order,
)
from moeq.pipeline.plan.layer_plan import LayerPlan
from moeq.pipeline.plan.units import Piece, Span, Unit, copy_units, joined
from moeq.schemes.declared import Declaration, Declared
from moeq.schemes.format import Context, Described, PartSig
from moeq.schemes.registry import match_format, read_dialect
from moeq.spelling import option
from moeq.transcode.activations import static_part
from moeq.transcode.expert_pack import PACK_NAME, plan_pack
from moeq.transcode.naming import rename
from moeq.transcode.spellings import SPELLINGS
from moeq.transcode.survey import LayerSurvey, ModuleSurvey, RecodedProjection, Survey, TranscodeRequest, survey
from moeq.transcode.target_formats import TargetFormat, get_target

#: Largest count of numbers that are decoded at once, for a module whose rows can be decoded separately.
_ITEM_NUMBERS = 8 * 2**20

#: Largest unit of modules outside the experts, in written bytes, unless a single module is larger.
_UNIT_BYTES = 256 * 2**20


@dataclass(frozen=True)
class WrittenProjection:
    """One projection as it is written."""

    module: str  #: name of the written module
    described: Described  #: description by a reader of the written config and headers
    #: Part to its span in the output file; parts that the first expert writes for a whole stack are left out.
    places: Mapping[str, Span]
    projected: RecodedProjection  #: the projection that it is made of

    @property
    def signatures(self) -> Mapping[str, PartSig]:
        """Dtype and shape of every part."""
        return self.projected.signatures

    @property
    def packed(self) -> dict[str, PartSig]:
        """Parts that hold the matrix: all except the static scale of its activations."""
        carried = self.projected.activation
        return {part: signature for part, signature in self.signatures.items() if not carried or part != carried.target}


@dataclass(frozen=True)
class ExpertItem:
    """Input projections (`w13`) or the output projection (`w2`) of one expert."""

    layer: int
    expert: int
    role: StackedRole


@dataclass(frozen=True)
class ModuleItem:
    """A quantised module that is no routed expert, or some of its rows."""

    name: str
    rows: Span | None = None  #: first row and the row after the last; None for all


Item = ExpertItem | ModuleItem


@dataclass(frozen=True)
class TranscodeUnit(Unit):
    """Projections that are transcoded."""

    places: tuple[Span, ...]  #: bytes of `file`, piece by piece, in the order in which they are written
    items: tuple[Item, ...]  #: experts or modules that are transcoded, in order

    def pieces(self, form: FileForm, layer: LayerPlan | None) -> Iterator[Piece]:
        tensors = sorted((start, name) for name, (start, _) in form.ranges.items())
        for start, stop in self.places:
            _, name = tensors[bisect_right(tensors, (start, chr(0x10FFFF))) - 1]
            yield Piece(name, start, stop, stop - start)


@dataclass(frozen=True)
class TranscodePlan(Plan):
    """A whole transcoding."""

    request: TranscodeRequest
    target: TargetFormat
    survey: Survey
    config: Mapping[str, Any] | None  #: the target's quantisation config, or None for floats
    layers_by_number: Mapping[int, LayerSurvey] = field(repr=False)
    modules_by_name: Mapping[str, ModuleSurvey] = field(repr=False)
    described: Mapping[tuple[RecodedProjection, str], Described] = field(repr=False)
    floats: tuple[str, ...] = ()  #: modules that become floats because vLLM cannot load them in the target's format

    def outputs(self, item: Item, form: FileForm) -> dict[StoredName, WrittenProjection]:
        """Return the projections that are written for an item, by their stored names."""
        if isinstance(item, ModuleItem):
            module = self.modules_by_name[item.name]
            places = {part: form.ranges[f"{module.written}.{part}"] for part in module.projected.signatures}
            described = self.described[module.projected, ""]
            whole = WrittenProjection(module.written, described, places, module.projected)
            return {"down": whole if item.rows is None else _some_rows(whole, item.rows)}
        layer = self.layers_by_number[item.layer]
        found: dict[StoredName, WrittenProjection] = {}
        for projection in _of_role(layer, item.expert, item.role):
            projected = layer.kinds[item.expert][projection]
            places = {
                part: _place(layer, projection, item.expert, part, form)
                for part in projected.signatures
                if not layer.naming.stacked or layer.naming.is_row(part) or item.expert == 0
            }
            described = self.described[projected, projection]
            module_name = layer.naming.module(projection, item.expert)
            found[projection] = WrittenProjection(module_name, described, places, projected)
        return found


def make_transcode_plan(
    checkpoint: Checkpoint, request: TranscodeRequest, floats: tuple[str, ...] = ()
) -> TranscodePlan:
    """Plan a transcoding in which the modules named by `floats` become floats.

    Raises MoeqError as `survey` does; `bug.config` if readers would misunderstand the written config.
    """
    target = get_target(request.to)
    found = survey(checkpoint, target, request, floats)
    config = None if target.config is None else target.config(found.contents)
    before = checkpoint.declaration
    if config and before and before.method == config["quant_method"] == "compressed-tensors":
        config["kv_cache_scheme"] = before.raw.get("kv_cache_scheme")
    declaration = None if config is None else read_dialect(str(config["quant_method"]), config, "written config")
    described = _described(found, declaration)
    files, kinds = _files(checkpoint, found, request)
    plan = TranscodePlan(
        files=tuple(files),
        units=(),
        copied=(),
        expert_bytes_in=sum(entry.nbytes for entry in _consumed(checkpoint, found)),
        digest=_digest(checkpoint, files, request),
        request=request,
        target=target,
        survey=found,
        config=config,
        layers_by_number={layer.layer: layer for layer in found.layers},
        modules_by_name={module.source.name: module for module in found.modules},
        described=described,
        floats=floats,
    )
    return replace(plan, units=tuple(_units(checkpoint, plan, kinds)))


def item_specs(plan: TranscodePlan, item: Item) -> list[MatrixSpec]:
    """Return the specs of the projections that are written for an item."""
    if isinstance(item, ModuleItem):
        spec = plan.modules_by_name[item.name].projected.spec
        return [spec if item.rows is None else spec.with_sizes(n=item.rows[1] - item.rows[0])]
    layer = plan.layers_by_number[item.layer]
    return [layer.kinds[item.expert][name].spec for name in _of_role(layer, item.expert, item.role)]


def _some_rows(whole: WrittenProjection, rows: Span) -> WrittenProjection:
    """Return some rows of a written projection, whose parts all have one row per output feature."""
    start, stop = rows
    count, projected, described = whole.described.spec.n, whole.projected, whole.described

    def place(span: Span) -> Span:
        size = (span[1] - span[0]) // count
        return span[0] + start * size, span[0] + stop * size

    def cut(spec: MatrixSpec) -> MatrixSpec:
        return spec.with_sizes(n=stop - start)

    source = replace(projected.source, spec=cut(projected.source.spec))
    return WrittenProjection(
        f"{whole.module} rows {start}..{stop - 1}",
        replace(described, spec=cut(described.spec)),
        {part: place(span) for part, span in whole.places.items()},
        replace(projected, source=source, spec=cut(projected.spec)),
    )


def _of_role(layer: LayerSurvey, expert: int, role: StackedRole) -> list[StoredName]:
    """Return the written projections that a stacked matrix holds."""
    return [name for name in layer.kinds[expert] if stacked_role(name) == role]


def _place(layer: LayerSurvey, projection: StoredName, expert: int, part: str, form: FileForm) -> Span:
    start, stop = form.ranges[layer.naming.tensor(projection, expert, part)]
    if not layer.naming.is_row(part):
        return start, stop
    size = (stop - start) // len(layer.kinds)
    return start + expert * size, start + (expert + 1) * size


def _described(found: Survey, declaration: Declaration | None) -> dict[tuple[RecodedProjection, str], Described]:
    """Describe every kind of projection as a reader of the written config and headers does."""
    modules: dict[tuple[RecodedProjection, str], str] = {}  # the first of each kind
    for layer in found.layers:
        for module, name, projected in layer.modules():
            modules.setdefault((projected, name), module)
    for other in found.modules:
        modules.setdefault((other.projected, ""), other.written)
    return {kind: _as_read(kind[0], module, declaration) for kind, module in modules.items()}


def _as_read(projected: RecodedProjection, module: str, declaration: Declaration | None) -> Described:
    """Describe a written projection as a reader of its headers and of the written config does.

    Raises MoeqError `bug.config` if this description is not that of the plan.
    """
    # Readers transpose such stacks back before anything else.
    plain = projected.spelling == "plain-transposed"
    signatures = replace(projected, spelling="plain").signatures if plain else projected.signatures
    declared = declaration.resolve(module) if declaration else None
    spelling = SPELLINGS[projected.spelling]
    matched = match_format(signatures, declared)
    known = declared or Declared(method="", rule="tensor headers")
    spec = projected.spec
    context = Context(module, spec.role, known, k_hint=spec.k, gated=spec.gated)
    expected = declaration is None or declared is not None or spelling.id == "plain"
    if matched is not None and matched.id == spelling.format and expected:
        described = matched.describe(signatures, context)
        static = static_part(signatures, described.scheme)
        if described.spec == spec and (static is None) == (projected.activation is None):
            return described
    raise MoeqError(
        "bug.config",
        f"{module}: the config to be written does not describe it as {spelling.id}, {spec}",
        "report this as a bug in moeq",
    )


def _consumed(checkpoint: Checkpoint, found: Survey) -> Iterator[TensorEntry]:
    for layer in found.layers:
        yield from checkpoint.experts(layer.layer).layer.tensors()
    for module in found.modules:
        yield from module.source.parts.values()


def _files(
    checkpoint: Checkpoint, found: Survey, request: TranscodeRequest
) -> tuple[list[FilePlan], dict[str, Literal["layer", "modules", "copies"]]]:
    """Plan output files and return the kind of each by name: copied tensors, modules, or a layer.

    Names are numbered as every tool numbers shards.
    """
    copies = in_source_order(checkpoint.source, found.copied)
    copied: list[TensorForms] = [{rename(entry.name, found.renamed): (entry.shape, entry.dtype)} for entry in copies]
    modules, layers = [*map(_module_tensors, found.modules)], [dict(_layer_tensors(layer)) for layer in found.layers]
    _require_distinct(name for tensors in (*copied, *modules, *layers) for name in tensors)
    if get_target(request.to).pack:
        return [plan_pack(checkpoint, found.layers, layers)], {PACK_NAME: "layer"}
    groups: list[tuple[Literal["layer", "modules", "copies"], TensorForms]] = [
        *(("copies", group) for group in bounded_files(copied)),
        *(("modules", group) for group in bounded_files(modules)),
        *(("layer", tensors) for tensors in layers),
    ]
    names = file_names(len(groups))
    files = [FilePlan(name, tensors, None) for name, (_, tensors) in zip(names, groups, strict=True)]
    return files, {name: kind for name, (kind, _) in zip(names, groups, strict=True)}


def _require_distinct(names: Iterable[str]) -> None:
    """Refuse names that two tensors would have. Raises MoeqError `usage.names`."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise MoeqError(
                "usage.names", f"two tensors would be called {name}", f"{option('names', 'source')} keeps names"
            )
        seen.add(name)


def _module_tensors(module: ModuleSurvey) -> TensorForms:
    signatures = module.projected.signatures
    return {f"{module.written}.{part}": (signature.shape, signature.dtype) for part, signature in signatures.items()}


def _layer_tensors(layer: LayerSurvey) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
    naming = layer.naming
    for expert, projections in layer.kinds.items():
        for projection, projected in projections.items():
            for part, signature in projected.signatures.items():
                # A stack has a dimension in front for the experts; a part that lists its sizes has one more number.
                shape = signature.shape
                if naming.stacked:
                    shape = (len(layer.kinds), *shape) if naming.is_row(part) else (shape[0] + 1,)
                yield naming.tensor(projection, expert, part), (shape, signature.dtype)
        if naming.stacked:
            return


def _units(
    checkpoint: Checkpoint, plan: TranscodePlan, kinds: Mapping[str, Literal["layer", "modules", "copies"]]
) -> Iterator[Unit]:
    counts: dict[str, int] = {}
    sources = {rename(entry.name, plan.survey.renamed): entry for entry in plan.survey.copied}
    if plan.target.pack:
        yield from (
            unit for layer in plan.survey.layers for unit in _layer_units(checkpoint, plan, layer, plan.files[0])
        )
        return
    layers, modules = iter(plan.survey.layers), iter(plan.survey.modules)
    for file in plan.files:
        if kinds[file.name] == "copies":
            yield from copy_units({name: sources[name] for name in file.tensors}, file.name, file.form, counts)
        elif kinds[file.name] == "layer":
            yield from _layer_units(checkpoint, plan, next(layers), file)
        else:
            yield from _module_units(plan, modules, file)


def _layer_units(
    checkpoint: Checkpoint, plan: TranscodePlan, layer: LayerSurvey, file: FilePlan
) -> Iterator[TranscodeUnit]:
    parts = checkpoint.experts(layer.layer).layer.parts
    for role in STACKED_ROLES:
        items = tuple(ExpertItem(layer.layer, expert, role) for expert in layer.kinds)
        entries = [
            entry
            for (projection, _), found in parts.items()
            if stacked_role(projection) == role
            for entry in ([found[FUSED]] if FUSED in found else found.values())
        ]
        yield _unit(f"layer-{layer.layer}/{role}", plan, file, items, entries)


def _module_units(plan: TranscodePlan, modules: Iterator[ModuleSurvey], file: FilePlan) -> Iterator[TranscodeUnit]:
    """Yield units of about equal size for the modules of a file, which holds whole modules in order."""
    left, group, size = len(file.tensors), list[ModuleSurvey](), 0
    while left:
        module = next(modules)
        signatures = module.projected.signatures
        nbytes = sum(tensor_bytes(signature.shape, signature.dtype) for signature in signatures.values())
        if group and size + nbytes > _UNIT_BYTES:
            yield _modules_unit(plan, file, group)
            group, size = [], 0
        group.append(module)
        size += nbytes
        left -= len(signatures)
    if group:
        yield _modules_unit(plan, file, group)


def _modules_unit(plan: TranscodePlan, file: FilePlan, modules: Sequence[ModuleSurvey]) -> TranscodeUnit:
    entries = [entry for module in modules for entry in module.source.parts.values()]
    items = tuple(item for module in modules for item in _module_items(module))
    return _unit(f"modules/{modules[0].source.name}", plan, file, items, entries)


def _module_items(module: ModuleSurvey) -> Iterator[ModuleItem]:
    """Yield a module as one item, or in runs of rows that fit in memory where GGUF blocks become floats."""
    spec, name = module.projected.spec, module.source.name
    rows = max(1, _ITEM_NUMBERS // spec.k)
    if module.source.described.scheme.format != "gguf" or module.projected.spelling != "plain" or spec.n <= rows:
        yield ModuleItem(name)
        return
    for start in range(0, spec.n, rows):
        yield ModuleItem(name, (start, min(start + rows, spec.n)))


def _unit(
    unit_id: str, plan: TranscodePlan, file: FilePlan, items: tuple[Item, ...], entries: Sequence[TensorEntry]
) -> TranscodeUnit:
    outputs = (output for item in items for output in plan.outputs(item, file.form).values())
    places = tuple(place for output in outputs for place in output.places.values())
    inputs: dict[str, list[Span]] = {}
    for entry in entries:
        inputs.setdefault(entry.file, []).append((entry.start, entry.end))
    return TranscodeUnit(
        id=unit_id,
        file=file.name,
        inputs={name: joined(spans) for name, spans in sorted(inputs.items())},
        outputs=joined(list(places)),
        padding_bytes=0,
        places=places,
        items=items,
    )


def _digest(checkpoint: Checkpoint, files: Sequence[FilePlan], request: TranscodeRequest) -> str:
    """Compute the digest that names the job: source, request, and every output tensor."""
    options = {key: value for key, value in asdict(request).items() if key != "src"}
    job = {
        "version": ["transcode", PLAN_VERSION],
        "source": checkpoint.source.identity(),
        "request": options,
        "files": [
            [file.name, {name: [list(shape), dtype] for name, (shape, dtype) in file.tensors.items()}] for file in files
        ],
    }
    return hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()

"""Derive what a conversion of a source has to contain, by packing the source again in memory.

The manifest gives only the user's choices: the deployment, and the layout of each layer. Everything else (the tensors
with all their bytes, digests, names of the kept tensors) is derived from the source and the layouts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from moeq.checkpoint.manifest import LayerEntry, Manifest, TensorDigest
from moeq.errors import MoeqError
from moeq.model import Checkpoint
from moeq.model.info import CheckpointInfo
from moeq.pipeline.plan.conversion_plan import Plan, make_plan
from moeq.pipeline.plan.job import Work
from moeq.pipeline.plan.options import ConvertOptions, Ranks
from moeq.pipeline.run.execution import recompute
from moeq.pipeline.run.resources import plan_memory
from moeq.pipeline.state.publish import layer_entry, tensors_of
from moeq.typed import read_as

#: Fields of `CheckpointInfo` that describe files, or that hold sentences.
_FILES_AND_SENTENCES = {"expert_bytes", "other_bytes", "num_tensors", "num_files", "warnings", "refusals"}


@dataclass(frozen=True)
class _Sizes:
    """Numbers of ranks in a deployment, which decide bytes."""

    tp: int = 1
    ep: int = 1


@dataclass(frozen=True)
class Derived:
    """Contents that a conversion of a source has to have."""

    source: Checkpoint  #: the source
    plan: Plan  #: files, tensors and units
    layers: tuple[LayerEntry, ...]  #: the manifest's entries of the converted layers
    tensors: Mapping[str, TensorDigest]  #: digest of every tensor, by name
    kept: tuple[str, ...]  #: names of expert tensors that have to be kept verbatim

    @property
    def losses(self) -> int:
        """Count of stored numbers that the layouts change."""
        return sum(entry.losses for entry in self.layers)


def plan_of(source: Checkpoint, manifest: Manifest) -> Plan:
    """Plan the conversion of a source with a manifest's choices.

    Raises MoeqError `source.bad-manifest` for sizes that no deployment has, `source.other-layers` for layers that the
    source lacks, and the errors of `make_plan` if layers do not fit the layouts.
    """
    sizes = read_as(_Sizes, manifest.deployment, "moeq.json: deployment")
    if not (0 < sizes.tp < 1 << 16 and 0 < sizes.ep < 1 << 16):
        raise MoeqError("source.bad-manifest", f"moeq.json: deployment: tp {sizes.tp}, ep {sizes.ep} are not sizes")
    layouts = {entry.layer: entry.layout for entry in manifest.layers}
    unknown = sorted(layouts.keys() - {*source.info.moe_layers})
    if unknown:
        raise MoeqError("source.other-layers", f"the source has no experts in layer {unknown[0]}")
    cut = (entry.matrices["w2"].spec.group_size for entry in manifest.layers if entry.source_group is not None)
    options = ConvertOptions(allow_lossy=True, regroup=next(cut, None))
    return make_plan(source, layouts, manifest.copied, Ranks.of(sizes.tp, sizes.ep), options)


def derive(source: Checkpoint, plan: Plan, workers: int, advance: Callable[[int, str], None]) -> Derived:
    """Pack all units again in memory, and return the contents. Raises MoeqError as `recompute`."""
    work = Work(source, plan)
    memory = plan_memory(work, plan.units, workers)
    records = recompute(work, plan.units, memory.workers, advance, memory.spare())
    kept = sorted({name for record in records.values() for name in record.kept})
    layers = tuple(layer_entry(plan, layer, records) for layer in plan.layers)
    return Derived(source, plan, layers, tensors_of(plan, records), tuple(kept))


def entry_differences(recorded: LayerEntry, derived: LayerEntry) -> list[str]:
    """List the fields, except sentences and digests, in which a manifest's layer differs from the derived one."""

    def comparable(entry: LayerEntry) -> dict[str, Any]:
        return asdict(replace(entry, digests={}, sharding=replace(entry.sharding, why="")))

    ours, theirs = comparable(recorded), comparable(derived)
    return [name for name in ours if ours[name] != theirs[name]]


def info_differences(recorded: CheckpointInfo, derived: CheckpointInfo) -> list[str]:
    """List the fields in which a manifest's model differs from the source's."""
    left_out = {"name", "revision", *_FILES_AND_SENTENCES}
    names = [field.name for field in fields(CheckpointInfo) if field.name not in left_out]
    return [name for name in names if _plain(getattr(recorded, name)) != _plain(getattr(derived, name))]


def _plain(value: Any) -> str:
    return json.dumps(value, default=asdict, sort_keys=True)

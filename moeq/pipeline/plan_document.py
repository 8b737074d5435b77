"""The plan as a document, `moeq.plan/1`: every unit with its byte ranges, and what the conversion needs. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moeq.checkpoint.disk import disk_errors
from moeq.checkpoint.hub import HubSource
from moeq.checkpoint.jsonfile import MAX_INDEX_BYTES, read_object
from moeq.checkpoint.source import LocalSource, Source
from moeq.errors import MoeqError
from moeq.pipeline.pack.memory import Way
from moeq.pipeline.plan.job import Job, JobRequest
from moeq.pipeline.plan.side_files import OTHER_WEIGHTS
from moeq.pipeline.plan.units import CopyUnit, PackUnit, Unit
from moeq.pipeline.run.resources import RATES, Memory, need_of, ways_of
from moeq.pipeline.run.streaming import Schedule, unit_schedule

PLAN_SCHEMA = "moeq.plan/1"


#: Names of ways in documents, which are older than the names in the code.
_WAYS: dict[str, str] = {"fast": "road", "reference": "general", "copy": "copy"}


@dataclass(frozen=True)
class UnitKind:
    """Units that are alike, for tables."""

    title: str  #: `w13 of 48 layers`, `copies`
    way: Way  #: `fast`, `reference` or `copy`
    count: int  #: how many
    bytes_in: int  #: bytes that all of them read
    bytes_out: int  #: bytes that all of them write
    padding_bytes: int  #: bytes of these that are padding
    memory: int  #: bytes that a thread needs for one


@dataclass(frozen=True)
class Needs:
    """Memory, disk and time that a conversion takes."""

    memory: Memory  #: memory and workers
    disk_bytes: int  #: bytes that the output files take, the restore data and copies of side files included
    seconds: float  #: time at `RATES`; an estimate
    ways: Mapping[str, Way]  #: unit id to the way that it takes
    kinds: tuple[UnitKind, ...]  #: units by kind
    #: Order in which `--stream-source` fetches and drops a repository's files; None for sources on disk.
    stream: Schedule[Unit] | None = None


def needs_of(job: Job, memory: Memory) -> Needs:
    """Compute what a conversion needs, with the workers of `memory`."""
    plan = job.plan
    ways = ways_of(job)
    disk = sum(file.form.size for file in plan.files) + _beside_bytes(job.checkpoint.source)
    seconds = sum(unit.bytes_in / RATES[ways[unit.id]] for unit in plan.units) / memory.workers
    stream = unit_schedule(plan.units, job.checkpoint.source) if isinstance(job.checkpoint.source, HubSource) else None
    return Needs(memory, disk, seconds, ways, _kinds(job, ways), stream)


def _beside_bytes(source: Source) -> int:
    """Estimate the bytes written beside the weights: the source's headers (kept for `moeq restore`) and its side files.

    Side files of a repository are not counted: they are small, and their sizes would have to be asked for.
    """
    headers = sum(file.size for file in source.files) - sum(entry.nbytes for entry in source.tensors.values())
    if not isinstance(source, LocalSource):
        return headers
    sides = [*source.side_files(), *([source.index] if source.index else [])]
    return headers + sum(source.size_of(name) for name in sides if not name.endswith(OTHER_WEIGHTS[2:]))


def plan_document(job: Job, needs: Needs) -> dict[str, Any]:
    """Make the document, without its `schema`.

    `digest` names the job: the same source, deployment, options and version give the same digest and the same bytes.
    `memory`, `disk` and `time` depend on the workers and are not part of the digest.
    """
    plan, source, memory = job.plan, job.checkpoint.source, needs.memory
    return {
        "digest": plan.digest,
        "source": {"name": source.name, "revision": source.revision, "identity": source.identity()},
        "deployment": asdict(job.request.deployment),
        "request": job.request.to_json(),
        "backend": job.answer.backend,
        "loads_in": [loader.title for loader in job.answer.loaders],
        "overridden": list(job.answer.overridden),
        "rounding": job.answer.first.rounding,
        "layouts": list(dict.fromkeys(layer.entry.layout for layer in plan.layers)),
        "totals": {
            "files": len(plan.files),
            "units": len(plan.units),
            "bytes_in": sum(unit.bytes_in for unit in plan.units),
            "bytes_out": plan.bytes_out,
            "expert_bytes_in": plan.expert_bytes_in,
            "expert_bytes_out": plan.expert_bytes_out,
            "rest_bytes": plan.rest_bytes,
            "padding_bytes": plan.padding_bytes,
        },
        "memory": {**asdict(memory), "peak": memory.peak},
        "disk": {"bytes": needs.disk_bytes},
        "stream_source": None if needs.stream is None else _stream(needs.stream),
        "time": {
            "estimate": True,
            "seconds": round(needs.seconds, 1),
            "assumed_bytes_per_second_and_worker": {_WAYS[way]: int(rate) for way, rate in RATES.items()},
        },
        "copied": [asdict(row) for row in plan.copied],
        "files": [
            {"name": file.name, "bytes": file.form.size, "layer": file.layer.entry.layer if file.layer else None}
            for file in plan.files
        ],
        "units": [_unit(unit, needs.ways[unit.id]) for unit in plan.units],
    }


def write_plan(path: Path, document: Mapping[str, Any]) -> None:
    """Write the document to a file. Raises MoeqError `environment.write`, `resources.disk-full`."""
    with disk_errors(path):
        path.write_text(json.dumps({"schema": PLAN_SCHEMA, **document}, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class PlanFile:
    """Facts of a plan's file that a conversion has to know."""

    digest: str  #: the plan's digest
    request: JobRequest | None  #: the request that was planned; None in files of older versions


def read_plan(path: Path) -> PlanFile:
    """Read a plan's file. Raises MoeqError `usage.plan-file` if it is no plan."""
    document = read_object(path, str(path), MAX_INDEX_BYTES, "usage.plan-file")
    digest, request = document.get("digest"), document.get("request")
    if document.get("schema") != PLAN_SCHEMA or not isinstance(digest, str):
        raise MoeqError("usage.plan-file", f"{path} is not a plan ({PLAN_SCHEMA})", "moeq plan SRC -o FILE writes one")
    known = None if request is None else JobRequest.from_json(request, f"{path}: request", "usage.plan-file")
    return PlanFile(digest, known)


def _stream(schedule: Schedule[Unit]) -> dict[str, int]:
    files = sum(len(step.fetch) for step in schedule.steps)
    return {"files": files, "fetched_bytes": schedule.fetched_bytes, "peak_bytes": schedule.peak_bytes}


def _unit(unit: Unit, way: Way) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": unit.id,
        "way": _WAYS[way],
        "file": unit.file,
        "inputs": {file: [list(span) for span in spans] for file, spans in unit.inputs.items()},
        "outputs": [list(span) for span in unit.outputs],
        "bytes_in": unit.bytes_in,
        "bytes_out": unit.bytes_out,
        "padding_bytes": unit.padding_bytes,
    }
    if isinstance(unit, PackUnit):
        experts = [unit.experts.start, unit.experts.stop]
        row |= {"layer": unit.layer, "role": unit.role, "experts": experts, "ranks": list(unit.ranks)}
    return row


def _kinds(job: Job, ways: Mapping[str, Way]) -> tuple[UnitKind, ...]:
    groups: dict[tuple[str, Way, int], list[Unit]] = {}
    for unit in job.plan.units:
        name = unit.role if isinstance(unit, PackUnit) else "copies"
        size = 0 if isinstance(unit, CopyUnit) else unit.bytes_out
        groups.setdefault((name, ways[unit.id], size), []).append(unit)
    return tuple(_kind(job, name, way, units) for (name, way, _), units in groups.items())


def _kind(job: Job, name: str, way: Way, units: Sequence[Unit]) -> UnitKind:
    layers = {unit.layer for unit in units if isinstance(unit, PackUnit)}
    title = f"{name} of {len(layers)} layer{'s' if len(layers) > 1 else ''}" if layers else name
    return UnitKind(
        title=title,
        way=way,
        count=len(units),
        bytes_in=sum(unit.bytes_in for unit in units),
        bytes_out=sum(unit.bytes_out for unit in units),
        padding_bytes=sum(unit.padding_bytes for unit in units),
        memory=need_of(job, units[0]).total,
    )

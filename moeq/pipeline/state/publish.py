"""Publish a conversion: manifest, side files and restore data from the records of all units, then the rename."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from moeq.checkpoint.disk import closing_fd, disk_errors
from moeq.checkpoint.header import parse_header, raw_header
from moeq.checkpoint.index import INDEX_NAME
from moeq.checkpoint.manifest import (
    MANIFEST_NAME,
    FileDigest,
    JobEntry,
    LayerEntry,
    Manifest,
    Projection,
    SourceEntry,
    TensorDigest,
)
from moeq.checkpoint.outputs import OutputFolder
from moeq.checkpoint.source import CONFIG_NAME, Source
from moeq.checkpoint.writer import require_free_space
from moeq.digest import DIGEST_NAME
from moeq.errors import MoeqError, listed
from moeq.model import Checkpoint
from moeq.oracle.loaders import TRANSFORMERS_GUARD
from moeq.pipeline.plan.conversion_plan import Plan
from moeq.pipeline.plan.job import Job
from moeq.pipeline.plan.layer_plan import LayerPlan
from moeq.pipeline.plan.side_files import RESTORE_DATA_NAME, SIGNATURE_NAME, SideFiles, stripped_file, without_code
from moeq.pipeline.plan.units import CHUNK_BYTES, PackUnit
from moeq.pipeline.state.folder import WorkFolder
from moeq.pipeline.state.journal import require_untouched
from moeq.pipeline.state.records import UnitRecord, open_file_digest
from moeq.pipeline.state.restore_data import write_restore_data
from moeq.pipeline.state.signature import Signer
from moeq.pipeline.state.stamps import job_stamp
from moeq.spelling import option
from moeq.version import __version__


def finish(job: Job, folder: WorkFolder, records: Mapping[str, UnitRecord], signer: Signer | None = None) -> Manifest:
    """Write all files except the weights, with `moeq.json` last, publish the folder, and return the manifest.

    No unit is executed. Raises MoeqError `answer.units-missing` with the units whose records are missing or do not fit;
    `source.changed` if the source was written to meanwhile; `resources.disk-full`.
    """
    require_complete(job.plan, records, "convert")
    require_untouched(folder.stamp, job_stamp(job), folder.path)
    found, checkpoint, source = job.answer, job.checkpoint, job.checkpoint.source
    sizes = {file.name: file.size for file in source.files}
    kept = {name for unit in job.plan.units for name in records[unit.id].kept}
    manifest = Manifest(
        moeq_version=__version__,
        source=SourceEntry(source.name, source.revision, sizes, source.identity()),
        model=checkpoint.info.to_json(),
        backend=found.backend,
        deployment=asdict(job.request.deployment),
        layers=tuple(layer_entry(job.plan, layer, records) for layer in job.plan.layers),
        digest=DIGEST_NAME,
        advisories=tuple(advisory.code for advisory in found.verdict.advisories),
        copied=job.plan.copied,
        restore=write_restore_data(checkpoint, job.side_files, kept, folder.files),
        loads_in=tuple(loader.title for loader in found.loaders),
        job=JobEntry(job.plan.digest, folder.stamp.sample, asdict(job.request.options)),
    )
    files = folder.files
    _read_kept_scales(checkpoint, files)
    sync_files(files, job.plan)
    copy_side_files(source, job.side_files, files)
    write_json(files, INDEX_NAME, index_of(job.plan))
    write_json(files, CONFIG_NAME, converted_config(checkpoint, manifest))
    manifest = replace(manifest, files=_file_digests(job, records, files))
    source.require_unchanged()
    write_json(files, MANIFEST_NAME, manifest.to_json())
    if signer is not None:
        files.write_file(SIGNATURE_NAME, signer.sign(files.read_file(MANIFEST_NAME)))
    else:
        files.remove(SIGNATURE_NAME)  # left by an earlier attempt
    folder.publish()
    return manifest


def _read_kept_scales(checkpoint: Checkpoint, files: OutputFolder) -> None:
    """Read activation scales that were not read yet from the restore data, since a source on the Hub is slow."""
    with closing_fd(files.open(RESTORE_DATA_NAME, os.O_RDONLY)) as fd:
        size = os.fstat(fd).st_size
        kept = parse_header(raw_header(fd, RESTORE_DATA_NAME)[8:], RESTORE_DATA_NAME, size).tensors
    checkpoint.read_activation_scales(
        lambda entry: kept.get(f"tensor/{entry.name}"), lambda name: files.open(name, os.O_RDONLY)
    )


def sign_folder(folder: Path, signer: Signer) -> None:
    """Sign the manifest of a finished conversion. Raises MoeqError `resources.disk-full`, `environment.write`."""
    with disk_errors(folder), OutputFolder(folder) as files:
        files.write_file(SIGNATURE_NAME, signer.sign(files.read_file(MANIFEST_NAME)))


def require_units(plan: Plan, have: Container[str], what: str, hint: str) -> None:
    """Refuse to go on unless `have` holds all units. Raises MoeqError `answer.units-missing`.

    `what` completes the sentence about the missing units, such as `are not finished`.
    """
    missing = [unit.id for unit in plan.units if unit.id not in have]
    if missing:
        detail = f"{len(missing)} of {len(plan.units)} units {what}: {listed(missing)}"
        raise MoeqError("answer.units-missing", detail, hint)


def require_complete(plan: Plan, records: Mapping[str, UnitRecord], command: str) -> None:
    """Refuse to publish unless there are fitting records of all units. Raises MoeqError `answer.units-missing`."""
    complete = {unit.id for unit in plan.units if unit.id in records and records[unit.id].fits(unit)}
    require_units(plan, complete, "are not finished", f"{command} without {option('shard')} does what is left")


def layer_entry(plan: Plan, layer: LayerPlan, records: Mapping[str, UnitRecord]) -> LayerEntry:
    """Make the manifest's entry of a layer, with the digests of its experts in order, whichever units packed them."""
    units = [unit for unit in plan.units if isinstance(unit, PackUnit) and unit.layer == layer.entry.layer]
    digests: dict[Projection, list[str]] = {}
    for unit in sorted(units, key=lambda unit: (unit.role == "w2", unit.experts.start)):
        for projection, values in records[unit.id].digests.items():
            digests.setdefault(projection, []).extend(values)
    losses = sum(records[unit.id].losses for unit in units)
    return replace(layer.entry, digests={name: tuple(values) for name, values in digests.items()}, losses=losses)


def sync_files(folder: OutputFolder, plan: Plan) -> None:
    """Sync weight files to disk. Tensors were synced with their units, but a rewritten header may not have been.

    Raises MoeqError `environment.write`, `resources.disk-full`.
    """
    with disk_errors(folder.path):
        for file in plan.files:
            folder.sync_file(file.name)


def tensors_of(plan: Plan, records: Mapping[str, UnitRecord]) -> dict[str, TensorDigest]:
    """Collect the digest of every tensor of a plan. Empty tensors are in no unit; they get the digest of no bytes."""
    empty = TensorDigest(CHUNK_BYTES, blake3().hexdigest())
    found = {name: digest for unit in plan.units for name, digest in records[unit.id].tensors.items()}
    return {name: found.get(name, empty) for file in plan.files for name in file.tensors}


def copy_side_files(
    source: Source, side_files: SideFiles, folder: OutputFolder, leave_out: Container[str] = ()
) -> None:
    """Write the side files of a source, except those that the output replaces (`leave_out`).

    Raises MoeqError `resources.disk-full`, `environment.write`, `source.*`.
    """
    sizes = {name: size for name, size in side_files.sizes.items() if name not in leave_out}
    require_free_space(folder, sizes)
    for name in sizes:
        with closing_fd(source.open(name)) as fd:
            folder.copy_file(fd, name)
    for name in side_files.stripped:
        folder.write_file(name, stripped_file(source, name))


def _file_digests(job: Job, records: Mapping[str, UnitRecord], folder: OutputFolder) -> dict[str, FileDigest]:
    """Return the digest of every file except the manifest. Weight files are not read: records have their digests."""
    plan = job.plan
    tensors, found = tensors_of(plan, records), dict[str, FileDigest]()
    for file in plan.files:
        held = {name: tensors[name] for name in file.tensors}
        found[file.name] = FileDigest(file.form.size, blake3(file.form.header).hexdigest(), held)
    with disk_errors(folder.path):
        for name in sorted({*job.outputs} - {MANIFEST_NAME, SIGNATURE_NAME, *found}):
            with closing_fd(folder.open(name, os.O_RDONLY)) as fd:
                found[name] = open_file_digest(fd)
    return found


def index_of(plan: Plan) -> dict[str, Any]:
    weight_map = {tensor: file.name for file in plan.files for tensor in file.tensors}
    return {"metadata": {"total_size": plan.bytes_out}, "weight_map": weight_map}


def converted_config(checkpoint: Checkpoint, manifest: Manifest) -> dict[str, Any]:
    """Make `config.json`: the source's, with its quantisation config kept inside the new one.

    Copies of the quantisation config in sub-configs are dropped: engines would misread packed experts by them. The name
    in `experts_implementation` makes transformers without moeq refuse the folder.
    """
    original = checkpoint.quantization_config
    config = checkpoint.source.config
    return {
        **without_quantization(without_code(config) if manifest.restore and manifest.restore.no_code else config),
        "experts_implementation": TRANSFORMERS_GUARD,
        "quantization_config": {
            "quant_method": "moeq",
            "manifest": MANIFEST_NAME,
            "layouts": sorted({layer.layout for layer in manifest.layers}),
            "original": None if original is None else dict(original),
        },
    }


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Remove every quantisation config from a config and its sub-configs."""
    kept = {key: value for key, value in config.items() if key not in ("quantization_config", "compression_config")}
    return {key: without_quantization(value) if isinstance(value, dict) else value for key, value in kept.items()}


def write_json(folder: OutputFolder, name: str, document: Mapping[str, Any]) -> None:
    """Write a JSON file and sync it to disk. Raises MoeqError `resources.disk-full`, `environment.write`."""
    folder.write_file(name, (json.dumps(document, indent=2) + "\n").encode())

"""Check a conversion against its source: derive every file from the source again, and compare it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.index import INDEX_NAME
from moeq.checkpoint.jsonfile import MAX_INDEX_BYTES, parse_object
from moeq.checkpoint.manifest import MANIFEST_NAME, FileDigest, TensorDigest
from moeq.checkpoint.source import CONFIG_NAME
from moeq.digest import DigestDifference, check_digests
from moeq.errors import MoeqError
from moeq.model import Checkpoint
from moeq.model.converted import ConvertedCheckpoint
from moeq.pipeline.events import Advance
from moeq.pipeline.plan.conversion_plan import Plan
from moeq.pipeline.plan.side_files import RESTORE_DATA_NAME, SideFiles, copied_files, plan_side_files, stripped_file
from moeq.pipeline.plan.units import CopyUnit, PackUnit
from moeq.pipeline.state.publish import converted_config, index_of
from moeq.pipeline.state.records import file_digest
from moeq.pipeline.state.restore_data import restore_contents, restore_data_of, restore_entry, restore_header
from moeq.prove.derived import Derived, derive, entry_differences, info_differences, plan_of
from moeq.prove.findings import Findings, values_mismatch


class AgainstSource(Findings):
    """Findings from comparing a conversion with one derived from its source (`moeq.prove.derived`).

    The manifest is compared as well, not trusted.
    """

    def __init__(self, converted: ConvertedCheckpoint, workers: int, progress: Advance, original: Checkpoint) -> None:
        super().__init__(converted, workers, progress)
        self._original = original

    def check(self, *, slow: bool) -> None:
        """Check everything; `slow`: also unpack all experts of the conversion and decode all experts of the source."""
        original = self._original
        experts = sum(entry.num_experts for entry in self.manifest.layers)
        if original.source.identity() != self.manifest.source.identity:
            name = original.source.name
            recorded = self.manifest.source.name
            self.add("identity", name, f"{name} is not what was converted: config or tensors differ from {recorded}")
        try:
            plan = plan_of(original, self.manifest)
            self.total += _steps(plan) + (2 * experts if slow else 0)
            digests = self.contents.tensor_digests(self.advance)
            derived = derive(original, plan, self.workers, lambda count, label: self.advance(label))
        except MoeqError as error:
            if error.code.startswith(("source.unreadable", "source.truncated", "resources.", "environment.")):
                raise
            self.add("manifest", MANIFEST_NAME, f"this conversion cannot be derived from the source: {error.message}")
            return
        self.check_names()
        self.counts["losses"] = derived.losses
        self._check_manifest(derived)
        self._weights(derived, digests)
        self._side_files(derived)
        self._restore_data(derived)
        self._recorded(derived)
        if slow:
            self._decoded()

    def _check_manifest(self, derived: Derived) -> None:
        """Compare the manifest with the one that the source gives."""
        manifest, source = self.manifest, derived.source
        for recorded, entry in zip(sorted(manifest.layers, key=lambda row: row.layer), derived.layers, strict=True):
            name = f"layer {entry.layer}"
            for field in entry_differences(recorded, entry):
                self.add("manifest", MANIFEST_NAME, f"moeq.json: {field} of {name} is not what the source gives")
            for projection, values in entry.digests.items():
                claimed = recorded.digests.get(projection, ())
                for expert, value in enumerate(values):
                    self.counts["source_units"] += 1
                    if claimed[expert : expert + 1] != (value,):
                        difference = DigestDifference(entry.layer, expert, projection)
                        self.found.append(
                            values_mismatch("source-values", difference, "of the source is not what was converted")
                        )
        copied = sorted({*source.info.moe_layers} - {entry.layer for entry in derived.layers})
        wrong = info_differences(self.converted.info, source.info)
        if sorted(row.layer for row in manifest.copied) != copied:
            wrong.append("copied")
        if manifest.source.files != {file.name: file.size for file in source.source.files}:
            wrong.append("source.files")
        if manifest.restore is not None and manifest.restore != restore_entry(
            source.source, self._plan_side_files(derived), derived.kept
        ):
            wrong.append("restore")
        for field in wrong:
            self.add("manifest", MANIFEST_NAME, f"moeq.json: {field} is not what the source gives")

    def _weights(self, derived: Derived, digests: Mapping[str, TensorDigest]) -> None:
        ours = self.converted.source.tensors
        wanted = {name: form for file in derived.plan.files for name, form in file.tensors.items()}
        damaged: set[int] = set()
        layers = {name: entry.layer for entry in derived.layers for name in entry.tensors}
        for name, (shape, dtype) in wanted.items():
            found = ours.get(name)
            self.counts["tensors"] += name not in layers
            if found is None:
                self.add("tensor", name, f"tensor {name} of the source is missing")
            elif (found.dtype, found.shape) != (dtype, shape):
                text = f"is {found.dtype} {list(found.shape)}, the source gives {dtype} {list(shape)}"
                self.add("tensor", name, f"tensor {name} {text}")
            elif digests[name] != derived.tensors[name]:
                if name in layers:
                    damaged.add(layers[name])
                else:
                    self.add("tensor", name, self._where(derived.source, name, found))
        for name in sorted(ours.keys() - wanted.keys()):
            self.add("tensor", name, f"tensor {name} is not in the source")
        for file in derived.plan.files:
            header = self.contents.headers.get(file.name)
            first = b"" if header is None else self.converted.source.read_bytes(file.name, 0, len(file.form.header))
            if first != file.form.header:
                self.add("file", file.name, f"the header of {file.name} is not the one that belongs to these tensors")
        self._damaged(derived, damaged)

    def _damaged(self, derived: Derived, layers: set[int]) -> None:
        """Add a finding for every expert that differs in these layers, or one about padding if all values are right."""
        for entry in derived.layers:
            projections = len(entry.projections) * entry.num_experts
            if entry.layer not in layers:
                self.counts["units"] += projections
                continue
            before = len(self.found)
            self.check_unpacked([entry])
            if len(self.found) == before:
                text = f"layer {entry.layer}: padding bytes differ from those that the source gives"
                self.add("values", f"layer {entry.layer}", text)

    def _where(self, source: Checkpoint, name: str, found: TensorEntry) -> str:
        entry = source.source.tensors.get(name)
        if entry is None:
            return f"tensor {name} is not in the source"

        def source_bytes(start: int, stop: int) -> bytearray:
            return source.source.read_bytes(entry.file, entry.start + start, entry.start + stop)

        at = self.contents.first_difference(found, source_bytes)
        return f"tensor {name} differs from the source's" + ("" if at is None else f" at byte {at:,}")

    def _side_files(self, derived: Derived) -> None:
        """Compare every file without weights, and add a finding for every file that should not be there."""
        here, there = self.converted.source, derived.source.source
        plan = self._plan_side_files(derived)
        copied = copied_files(here, plan)
        for name in (*plan.sizes, *plan.stripped):
            self.counts["files"] += 1
            if name not in copied:
                self.add("file", name, f"{name} is missing")
                continue
            raw = stripped_file(there, name) if name in plan.stripped else None
            wanted = file_digest(there.path(name)) if raw is None else FileDigest(len(raw), blake3(raw).hexdigest())
            if self.contents.digest(copied[name], wanted.bytes) != wanted:
                self.add("file", name, f"{name} differs from the source's")
        expected = converted_config(derived.source, self.manifest)
        # Older versions of moeq do not write this key.
        older = {key: value for key, value in expected.items() if key != "experts_implementation"}
        if not any(_equal(here.config, one) for one in (expected, older)):
            self.add("file", CONFIG_NAME, f"{CONFIG_NAME} was changed")
        index = parse_object(here.read_file(INDEX_NAME, MAX_INDEX_BYTES), INDEX_NAME, "source.bad-index")
        if not _equal(index, index_of(derived.plan)):
            self.add("file", INDEX_NAME, f"{INDEX_NAME} is not the index of these tensors")
        own = {MANIFEST_NAME, CONFIG_NAME, INDEX_NAME, *(file.name for file in derived.plan.files), *copied.values()}
        own |= {self.manifest.restore.file} if self.manifest.restore else set()
        self.add_unexpected(self.contents.names - own - self.contents.unproven, "the source does not give this file")

    def _plan_side_files(self, derived: Derived) -> SideFiles:
        restore = self.manifest.restore
        return plan_side_files(derived.source.source, no_code=restore is not None and restore.no_code)

    def _restore_data(self, derived: Derived) -> None:
        """Compare the restore data with those that the source gives."""
        if self.manifest.restore is None:
            if self.manifest.files is not None:  # every version that recorded files wrote restore data
                self.add("kept", RESTORE_DATA_NAME, "moeq.json does not name the restore data")
            return
        try:
            held = restore_data_of(self.converted)
        except MoeqError as error:
            self.add("kept", self.manifest.restore.file, error.message)
            return
        wanted = restore_contents(derived.source, self._plan_side_files(derived), derived.kept)
        read = derived.source.source.read_bytes
        for name, one in wanted.items():
            shown = name.partition("/")[2] if name.startswith(("text/", "tensor/")) else name.replace("/", " of ", 1)
            if name not in held:
                self.add("kept", shown, f"{shown} was to be kept and is missing")
            elif held.size_of(name) != (len(one) if isinstance(one, bytes) else one.nbytes) or held.read(name) != (
                one if isinstance(one, bytes) else read(one.file, one.start, one.end)
            ):
                self.add("kept", shown, f"{shown} is not what the source holds")
        for name in sorted(held.names - wanted.keys()):
            self.add("kept", name, f"{name} in {held.path.name} is not part of the restore data")
        header = restore_header(wanted)
        if held.first_bytes(len(header)) != header:
            self.add("kept", held.path.name, f"the header of {held.path.name} does not fit the restore data")

    def _recorded(self, derived: Derived) -> None:
        """Compare the manifest's digests with the files, so that checking without the source gives the same result.

        After any earlier finding nothing is compared: the digest of the damaged file would differ as well.
        """
        if self.found:
            return
        if not self.manifest.intact:
            self.add("manifest", MANIFEST_NAME, f"{MANIFEST_NAME} was changed after it was written")
        recorded = self.manifest.files
        if recorded is None:
            return
        wanted: dict[str, FileDigest | None] = {
            file.name: FileDigest(
                file.form.size,
                blake3(file.form.header).hexdigest(),
                {name: derived.tensors[name] for name in file.tensors},
            )
            for file in derived.plan.files
        }
        others = (self.contents.names | recorded.keys()) - wanted.keys() - {MANIFEST_NAME}
        others -= self.contents.unproven - recorded.keys()
        for name in others:
            size = recorded[name].bytes if name in recorded else -1
            wanted[name] = self.contents.digest(name, size) if name in self.contents.names else None
        for name in sorted(wanted):
            if name not in recorded or recorded[name] != wanted[name]:
                text = f"moeq.json: the digest of {name} is not that of the file"
                self.add("manifest", MANIFEST_NAME, text)

    def _decoded(self) -> None:
        """Unpack the conversion and decode the source, and compare both with the manifest's digests."""
        lossless = [entry for entry in self.manifest.layers if not entry.losses]
        _, ours = check_digests(self.converted, self.manifest.layers, self.advance, self.workers)
        _, theirs = check_digests(self._original, lossless, self.advance, self.workers)
        now, then = "no longer holds the values that were converted", "of the source is not what was converted"
        self.found += [values_mismatch("values", row, now) for row in ours]
        self.found += [values_mismatch("source-values", row, then) for row in theirs]


def _equal(one: Any, other: Any) -> bool:
    """Return whether two JSON documents are the same. Plain `==` would take `1`, `1.0` and `true` for equal."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _steps(plan: Plan) -> int:
    """Return how often `derive` reports progress."""
    packed = sum(unit.experts.size for unit in plan.units if isinstance(unit, PackUnit))
    return packed + sum(1 for unit in plan.units if isinstance(unit, CopyUnit) for _ in unit.chunks())

"""Prove that a conversion still means what was converted, without its source or with it.

Without the source, the manifest's digests are what is compared with: that proves that nothing was changed since, and a
signature that the manifest is somebody's. With the source nothing in the manifest is believed: what the folder has to
hold is derived from the source (`moeq.prove.derived`), and every file in it has to be accounted for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.index import INDEX_NAME
from moeq.checkpoint.jsonfile import MAX_INDEX_BYTES, read_object
from moeq.checkpoint.manifest import MANIFEST_NAME, FileDigest, LayerEntry, TensorDigest
from moeq.checkpoint.source import CONFIG_NAME
from moeq.digest import DIGEST_NAME, DigestDifference, check_digests, default_workers, require_complete
from moeq.errors import MoeqError
from moeq.model import Checkpoint
from moeq.model import open as open_checkpoint
from moeq.model.converted import ConvertedCheckpoint
from moeq.pipeline.plan.plan import Plan
from moeq.pipeline.plan.units import CopyUnit, PackUnit
from moeq.pipeline.state.publish import converted_config, index_of
from moeq.pipeline.state.records import file_digest
from moeq.pipeline.state.restore_data import restore_contents, restore_data_of, restore_entry
from moeq.pipeline.state.side_files import SideFiles, copied_files, plan_side_files, stripped_file
from moeq.pipeline.state.signature import SIGNATURE_NAME, check_signature
from moeq.prove.derived import Derived, derive, entry_differences, info_differences, plan_of
from moeq.prove.holdings import Holdings

#: Called with steps done, steps in all, and a label.
Advance = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Mismatch:
    """One thing that is not as it was, or not as it has to be.

    Attributes:
        kind: `values` (packed experts), `source-values` (the manifest's digests are not the source's), `tensor`,
            `file`, `kept` (what leads back), `manifest`, `identity`, `signature`.
        name: what differs: an expert projection, a tensor or a file.
        text: one line for people.
    """

    kind: str
    name: str
    text: str


@dataclass(frozen=True)
class Verification:
    """What `verify` found.

    Attributes:
        destination: the conversion.
        source: the source compared with, or None.
        units: expert projections that were proven from the packed tensors.
        source_units: expert projections that were packed again from the source.
        tensors: other tensors compared with the source, byte for byte.
        files: files that hold no weights, compared with the source or with their digests.
        bytes: bytes of tensors that were hashed.
        losses: stored numbers that packing was allowed to change; digests are then of what is stored.
        signed: whether the manifest is signed by the key that was given; None where none was.
        unproven: files that nothing was compared with; no loader reads them.
        notes: what was not checked, or is not proven by this.
        mismatches: everything that differs.
    """

    destination: str
    source: str | None
    units: int
    source_units: int
    tensors: int
    files: int
    bytes: int
    losses: int
    signed: bool | None
    unproven: tuple[str, ...]
    notes: tuple[str, ...]
    mismatches: tuple[Mismatch, ...]

    @property
    def ok(self) -> bool:
        """Nothing differs, and something was checked."""
        return not self.mismatches and self.units > 0

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON document."""
        return asdict(self)


def verify(
    dst: str | Path,
    source: str | Path | None = None,
    *,
    revision: str | None = None,
    signed_by: str | None = None,
    slow: bool = False,
    workers: int | None = None,
    progress: Advance | None = None,
) -> Verification:
    """Check every byte of a conversion: against its manifest, or with the source against what that gives.

    Args:
        dst: output of `moeq convert`.
        source: the checkpoint it came from.
        revision: Hub revision of `source`.
        signed_by: minisign public key (a file, or the key) that has to have signed the manifest.
        slow: also unpack every packed tensor, with the source decode all of its experts too, and compare the digests
            of their values: a second path that shares no code with packing.
        workers: threads; None takes the cores there are, at most 8.
        progress: called with steps done, steps in all and a label.

    Raises:
        MoeqError: `usage.not-converted`, `usage.already-converted` for a source that is a conversion, `usage.sign-key`,
            and `source.*` for folders that cannot be read at all. What differs is no error but the answer.
    """
    converted = open_checkpoint(dst)
    if not isinstance(converted, ConvertedCheckpoint):
        raise MoeqError(
            "usage.not-converted", f"{dst} is not an output of `moeq convert`", "moeq diff compares sources"
        )
    if converted.manifest.digest != DIGEST_NAME:
        raise MoeqError(
            "environment.digest",
            f"{dst} records digests of the kind {converted.manifest.digest!r}, this version computes {DIGEST_NAME!r}",
            "use the version of moeq that converted it, or convert again",
        )
    for entry in converted.manifest.layers:
        require_complete(entry)
    original = None if source is None else _open_source(source, revision)
    job = _Verifier(converted, original, workers or default_workers(), progress or (lambda done, total, label: None))
    job.sign(signed_by)
    job.check(slow=slow)
    return job.result(str(dst), None if source is None else str(source))


def _open_source(source: str | Path, revision: str | None) -> Checkpoint:
    original = open_checkpoint(source, revision=revision)
    if original.kind == "converted":
        raise MoeqError(
            "usage.already-converted",
            f"--source {source} is itself a conversion",
            "moeq diff compares any two checkpoints",
        )
    return original


#: What is said where it is so.
_OLD = (
    "moeq.json is of a version that kept no digests of files: without --source only the experts were checked, "
    "not other tensors, config.json, tokenizer or code"
)
_INTEGRITY = (
    "this proves integrity, not origin: whoever changes a folder can change moeq.json with it; --source or --signed-by "
    "proves more"
)
_CHOSEN = "taken from moeq.json, since no source tells it: deployment, backend, advisories, version"


class _Verifier:
    """One verification."""

    def __init__(
        self, converted: ConvertedCheckpoint, original: Checkpoint | None, workers: int, progress: Advance
    ) -> None:
        self._converted = converted
        self._manifest = converted.manifest
        self._original = original
        self._workers = workers
        self._progress = progress
        self._holdings = Holdings(converted, workers)
        self._found: list[Mismatch] = []
        self._touched: list[str] = []
        self._counts = {"units": 0, "source_units": 0, "tensors": 0, "files": 0, "bytes": 0, "losses": 0}
        self._notes: list[str] = []
        self._signed: bool | None = None
        self._done = 0
        self._total = len(converted.source.tensors)

    def result(self, destination: str, source: str | None) -> Verification:
        """What was found."""
        recorded = (self._manifest.files or {}).keys() if self._original is None else ()
        proven = {*recorded, *([SIGNATURE_NAME] if self._signed else [])}
        unproven = tuple(sorted(self._holdings.unproven - proven))
        mismatches = tuple({mismatch: None for mismatch in self._found})
        return Verification(
            destination,
            source,
            signed=self._signed,
            unproven=unproven,
            notes=tuple(self._notes),
            mismatches=mismatches,
            **self._counts,
        )

    def sign(self, key: str | None) -> None:
        """Check the signature, where one is asked for."""
        if key is None:
            return
        holdings = self._holdings
        wrong = check_signature(holdings.path(MANIFEST_NAME), holdings.path(SIGNATURE_NAME), key)
        self._signed = not wrong
        if wrong:
            self._add("signature", SIGNATURE_NAME, wrong)

    def check(self, *, slow: bool) -> None:
        """Check everything."""
        manifest, original = self._manifest, self._original
        experts = sum(entry.num_experts for entry in manifest.layers)
        if original is None:
            self._total += experts if slow or manifest.files is None else 0
            digests = self._holdings.tensor_digests(self._advance)
            self._what_loaders_see()
            self._recorded(digests)
            self._values(slow=slow or manifest.files is None)
            self._notes += [_OLD] if manifest.files is None else []
            self._notes += [] if self._signed else [_INTEGRITY]
            self._counts["losses"] = sum(entry.losses for entry in manifest.layers)
        else:
            self._with_source(original, experts, slow=slow)
            self._notes.append(_CHOSEN)
        self._counts["bytes"] = sum(entry.nbytes for entry in self._converted.source.tensors.values())

    def _add(self, kind: str, name: str, text: str) -> None:
        self._found.append(Mismatch(kind, name, text))

    def _advance(self, label: str) -> None:
        self._done += 1
        self._progress(min(self._done, self._total), self._total, label)

    # Without the source.

    def _what_loaders_see(self) -> None:
        """Each tensor is in one file, the one that the index names; loaders pick files by rules of their own."""
        seen: dict[str, str] = {}
        for file, tensors in self._holdings.headers.items():
            for name in tensors:
                home = self._converted.source.tensors.get(name)
                if home is None or home.file != file or name in seen:
                    self._add("tensor", name, f"tensor {name} of {file} is not the one that the index names")
                seen[name] = file

    def _recorded(self, digests: Mapping[str, TensorDigest]) -> None:
        """Compare every file with its digest in the manifest."""
        files = self._manifest.files
        if files is None:
            return
        known = files.keys() | {MANIFEST_NAME} | self._holdings.unproven
        self._strangers(self._holdings.names - known, "moeq.json does not know it")
        for name, recorded in files.items():
            if name not in self._holdings.names:
                self._add("file", name, f"{name} is missing")
            elif name in self._holdings.headers:
                self._recorded_weights(name, recorded, digests)
            else:
                self._counts["files"] += 1
                if self._holdings.digest(name) != recorded:
                    self._add("file", name, f"{name} is not the file that was written")

    def _recorded_weights(self, name: str, recorded: FileDigest, digests: Mapping[str, TensorDigest]) -> None:
        if self._holdings.header_digest(name) != replace(recorded, tensors={}):
            self._add("file", name, f"the header or the size of {name} is not what was written")
        held = self._holdings.headers[name]
        for tensor in sorted(held.keys() | recorded.tensors.keys()):
            if tensor not in self._converted.source.expert_names:
                self._counts["tensors"] += 1
            if tensor not in held or tensor not in recorded.tensors:
                where = "missing from" if tensor not in held else "not known of"
                self._add("tensor", tensor, f"tensor {tensor} is {where} {name}")
            elif digests.get(tensor) != recorded.tensors[tensor]:
                if tensor in self._converted.source.expert_names:
                    self._touched.append(tensor)  # which experts that is, unpacking tells
                    continue
                self._add("tensor", tensor, f"the bytes of tensor {tensor} are not those that were written")

    def _values(self, *, slow: bool) -> None:
        """What is in the packed tensors: as their bytes tell, and unpacked where those changed, or always if `slow`."""
        if not self._manifest.intact:
            self._add("manifest", MANIFEST_NAME, f"{MANIFEST_NAME} was changed after it was written")
        touched = [entry for entry in self._manifest.layers if slow or not self._unchanged(entry)]
        self._counts["units"] += sum(
            len(entry.projections) * entry.num_experts for entry in self._manifest.layers if entry not in touched
        )
        self._unpacked(touched)
        named = {mismatch.name.split(" expert ")[0] for mismatch in self._found if mismatch.kind == "values"}
        # Bytes that changed although every value in their layer is right: padding, say.
        for entry in touched:
            for name in self._touched:
                if name in entry.tensors and f"layer {entry.layer}" not in named:
                    self._add("tensor", name, f"the bytes of tensor {name} are not those that were written")

    def _unchanged(self, entry: LayerEntry) -> bool:
        """Whether all packed tensors of a layer have the bytes that the manifest knows, in files that it knows."""
        files = self._manifest.files or {}
        known = {name for file in files.values() for name in file.tensors}
        return known.issuperset(entry.tensors) and not known.intersection(self._touched).intersection(entry.tensors)

    def _strangers(self, names: Iterable[str], why: str) -> None:
        for name in sorted(names):
            self._add("file", name, f"{name} does not belong here: {why}")

    def _unpacked(self, layers: Iterable[LayerEntry], kind: str = "values") -> None:
        """Recompute the digest of every expert from the packed tensors."""
        units, found = check_digests(self._converted, layers, self._advance, self._workers)
        self._counts["units"] += units
        self._found += [_values(kind, row, "no longer holds the values that were converted") for row in found]

    # With the source.

    def _with_source(self, original: Checkpoint, experts: int, *, slow: bool) -> None:
        if original.source.identity() != self._manifest.source.identity:
            name = original.source.name
            recorded = self._manifest.source.name
            self._add("identity", name, f"{name} is not what was converted: config or tensors differ from {recorded}")
        try:
            plan = plan_of(original, self._manifest)
            self._total += _steps(plan) + (2 * experts if slow else 0)
            digests = self._holdings.tensor_digests(self._advance)
            derived = derive(original, plan, self._workers, lambda count, label: self._advance(label))
        except MoeqError as error:
            if error.code.startswith(("source.unreadable", "source.truncated", "resources.", "environment.")):
                raise
            self._add("manifest", MANIFEST_NAME, f"the source does not give such a conversion: {error.message}")
            return
        self._what_loaders_see()
        self._counts["losses"] = derived.losses
        self._manifest_of(derived)
        self._weights(derived, digests)
        self._side_files(derived)
        self._way_back(derived)
        if slow:
            self._decoded(original)

    def _manifest_of(self, derived: Derived) -> None:
        """What the manifest says, against what the source gives."""
        manifest, source = self._manifest, derived.source
        for recorded, entry in zip(sorted(manifest.layers, key=lambda row: row.layer), derived.layers, strict=True):
            name = f"layer {entry.layer}"
            for field in entry_differences(recorded, entry):
                self._add("manifest", MANIFEST_NAME, f"moeq.json: {field} of {name} is not what the source gives")
            for projection, values in entry.digests.items():
                claimed = recorded.digests.get(projection, ())
                for expert, value in enumerate(values):
                    self._counts["source_units"] += 1
                    if claimed[expert : expert + 1] != (value,):
                        difference = DigestDifference(entry.layer, expert, projection)
                        self._found.append(
                            _values("source-values", difference, "of the source is not what was converted")
                        )
        copied = sorted({*source.info.moe_layers} - {entry.layer for entry in derived.layers})
        wrong = info_differences(self._converted.info, source.info)
        if sorted(row.layer for row in manifest.copied) != copied:
            wrong.append("copied")
        if manifest.source.files != {file.name: file.size for file in source.source.files}:
            wrong.append("source.files")
        if manifest.restore is not None and manifest.restore != restore_entry(
            source.source, self._plan_side_files(derived), derived.kept
        ):
            wrong.append("restore")
        for field in wrong:
            self._add("manifest", MANIFEST_NAME, f"moeq.json: {field} is not what the source gives")

    def _weights(self, derived: Derived, digests: Mapping[str, TensorDigest]) -> None:
        """Every tensor and every weight file."""
        ours = self._converted.source.tensors
        wanted = {name: form for file in derived.plan.files for name, form in file.tensors.items()}
        damaged: set[int] = set()
        layers = {name: entry.layer for entry in derived.layers for name in entry.tensors}
        for name, (shape, dtype) in wanted.items():
            found = ours.get(name)
            self._counts["tensors"] += name not in layers
            if found is None:
                self._add("tensor", name, f"tensor {name} of the source is missing")
            elif (found.dtype, found.shape) != (dtype, shape):
                text = f"is {found.dtype} {list(found.shape)}, the source gives {dtype} {list(shape)}"
                self._add("tensor", name, f"tensor {name} {text}")
            elif digests[name] != derived.tensors[name]:
                if name in layers:
                    damaged.add(layers[name])
                else:
                    self._add("tensor", name, self._where(derived.source, name, found))
        for name in sorted(ours.keys() - wanted.keys()):
            self._add("tensor", name, f"tensor {name} is not in the source")
        for file in derived.plan.files:
            header = self._holdings.headers.get(file.name)
            first = b"" if header is None else self._converted.source.read_bytes(file.name, 0, len(file.form.header))
            if first != file.form.header:
                self._add("file", file.name, f"the header of {file.name} is not the one that belongs to these tensors")
        self._damaged(derived, damaged)

    def _damaged(self, derived: Derived, layers: set[int]) -> None:
        """Name the experts of layers that differ; where all their values are right, what differs is padding."""
        for entry in derived.layers:
            projections = len(entry.projections) * entry.num_experts
            if entry.layer not in layers:
                self._counts["units"] += projections
                continue
            before = len(self._found)
            self._unpacked([entry])
            if len(self._found) == before:
                text = f"layer {entry.layer}: packed bytes differ from what the source gives, where no value is stored"
                self._add("values", f"layer {entry.layer}", text)

    def _where(self, source: Checkpoint, name: str, found: TensorEntry) -> str:
        entry = source.source.tensors.get(name)
        if entry is None:
            return f"tensor {name} is not in the source"

        def theirs(start: int, stop: int) -> bytearray:
            return source.source.read_bytes(entry.file, entry.start + start, entry.start + stop)

        at = self._holdings.first_difference(found, theirs)
        return f"tensor {name} differs from the source's" + ("" if at is None else f" at byte {at:,}")

    def _side_files(self, derived: Derived) -> None:
        """Every file that holds no weights, and every file that should not be there."""
        here, there = self._converted.source, derived.source.source
        plan = self._plan_side_files(derived)
        copied = copied_files(here, plan)
        for name in (*plan.sizes, *plan.stripped):
            self._counts["files"] += 1
            if name not in copied:
                self._add("file", name, f"{name} is missing")
                continue
            raw = stripped_file(there, name) if name in plan.stripped else None
            wanted = file_digest(there.path(name)) if raw is None else FileDigest(len(raw), blake3(raw).hexdigest())
            if self._holdings.digest(copied[name]) != wanted:
                self._add("file", name, f"{name} differs from the source's")
        expected = converted_config(derived.source, self._manifest)
        before = {key: value for key, value in expected.items() if key != "experts_implementation"}  # older versions
        if here.config not in (expected, before):
            self._add("file", CONFIG_NAME, f"{CONFIG_NAME} was changed")
        index = self._holdings.path(INDEX_NAME)
        if read_object(index, INDEX_NAME, MAX_INDEX_BYTES, "source.bad-index") != index_of(derived.plan):
            self._add("file", INDEX_NAME, f"{INDEX_NAME} is not the index of these tensors")
        own = {MANIFEST_NAME, CONFIG_NAME, INDEX_NAME, *(file.name for file in derived.plan.files), *copied.values()}
        own |= {self._manifest.restore.file} if self._manifest.restore else set()
        self._strangers(self._holdings.names - own - self._holdings.unproven, "nothing of the source gives it")

    def _plan_side_files(self, derived: Derived) -> SideFiles:
        restore = self._manifest.restore
        return plan_side_files(derived.source.source, no_code=restore is not None and restore.no_code)

    def _way_back(self, derived: Derived) -> None:
        """What leads back to the source: exactly what the source gives, and nothing else."""
        if self._manifest.restore is None:
            return
        try:
            held = restore_data_of(self._converted)
        except MoeqError as error:
            self._add("kept", self._manifest.restore.file, error.message)
            return
        wanted = restore_contents(derived.source, self._plan_side_files(derived), derived.kept)
        read = derived.source.source.read_bytes
        for name, one in wanted.items():
            shown = name.partition("/")[2] if name.startswith(("text/", "tensor/")) else name.replace("/", " of ", 1)
            if name not in held:
                self._add("kept", shown, f"{shown} was to be kept and is missing")
            elif held.read(name) != (one if isinstance(one, bytes) else read(one.file, one.start, one.end)):
                self._add("kept", shown, f"{shown} is not what the source holds")
        for name in sorted(held.names - wanted.keys()):
            self._add("kept", name, f"{name} in {held.path.name} is nothing that has to be kept")

    def _decoded(self, original: Checkpoint) -> None:
        """The slow path: unpack the conversion, decode the source, compare both with the manifest's digests."""
        lossless = [entry for entry in self._manifest.layers if not entry.losses]
        _, ours = check_digests(self._converted, self._manifest.layers, self._advance, self._workers)
        _, theirs = check_digests(original, lossless, self._advance, self._workers)
        self._found += [_values("values", row, "no longer holds the values that were converted") for row in ours]
        self._found += [_values("source-values", row, "of the source is not what was converted") for row in theirs]


def _steps(plan: Plan) -> int:
    """How often `derive` tells of progress."""
    packed = sum(unit.experts.size for unit in plan.units if isinstance(unit, PackUnit))
    return packed + sum(1 for unit in plan.units if isinstance(unit, CopyUnit) for _ in unit.chunks())


def _values(kind: str, row: DigestDifference, text: str) -> Mismatch:
    name = f"layer {row.layer} expert {row.expert} {row.projection}"
    swap = f"; it holds the values of {row.looks_like}" if row.looks_like else ""
    return Mismatch(kind, name, f"{name} {text}{swap}")

"""Prove that a conversion holds what was converted: against its manifest alone, or against its source.

Without the source, every byte is compared with the manifest's digests. This proves that nothing has changed since the
conversion; a signature also proves whose manifest it is. With the source nothing in the manifest is trusted: the
contents of the folder are derived from the source (`moeq.prove.derived`), and no other file may be in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moeq.checkpoint.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    FileDigest,
    LayerEntry,
    TensorDigest,
    not_converted,
)
from moeq.digest import DIGEST_NAME, default_workers, require_complete
from moeq.errors import MoeqError
from moeq.model import open as open_checkpoint
from moeq.model.converted import ConvertedCheckpoint
from moeq.pipeline.events import Advance
from moeq.pipeline.plan.side_files import SIGNATURE_NAME
from moeq.pipeline.state.signature import check_signature
from moeq.prove.against_source import AgainstSource
from moeq.prove.findings import Findings, Mismatch
from moeq.spelling import option

__all__ = ["Mismatch", "Verification", "verify"]

_CHOSEN = (
    "taken from moeq.json, since no source tells it: deployment, options, backend, advisories, version, what loads it, "
    "and sentences"
)


@dataclass(frozen=True)
class Verification:
    """Result of `verify`."""

    destination: str  #: the conversion
    source: str | None  #: the source that the conversion was compared with, or None
    units: int  #: number of expert projections whose packed tensors were compared, by their bytes or their values
    source_units: int  #: number of expert projections that were packed again from the source
    tensors: int  #: number of other tensors that were compared, byte for byte
    files: int  #: number of files without weights that were compared
    bytes: int  #: bytes of tensors that were hashed
    losses: int  #: number of stored numbers that packing was allowed to change; digests are those of the stored numbers
    signed: bool | None  #: whether the manifest is signed by the given key; None if none was given
    unproven: tuple[str, ...]  #: files that could not be compared with anything; no loader reads them
    notes: tuple[str, ...]  #: sentences about what was not checked, or is not proven
    mismatches: tuple[Mismatch, ...]  #: everything that differs

    @property
    def ok(self) -> bool:
        """Whether something was checked and no difference found."""
        return not self.mismatches and self.units > 0

    def to_json(self) -> dict[str, Any]:
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
    """Check every byte of a conversion. `moeq.verify` documents the arguments and errors."""
    converted = open_checkpoint(dst)
    if not isinstance(converted, ConvertedCheckpoint):
        raise not_converted(str(dst))
    if converted.manifest.digest != DIGEST_NAME:
        raise MoeqError(
            "environment.digest",
            f"{dst} records digests of the kind {converted.manifest.digest!r}, this version computes {DIGEST_NAME!r}",
            "use the version of moeq that converted it, or convert again",
        )
    for entry in converted.manifest.layers:
        require_complete(entry)
    given = converted, workers or default_workers(), progress or (lambda done, total, label: None)
    if source is None:
        check: Findings = AgainstManifest(*given)
    else:
        original = open_checkpoint(source, revision=revision)
        original.require_source()
        check = AgainstSource(*given, original)
    check.check(slow=slow)
    signed = None if signed_by is None else _signed(check, signed_by)
    converted.source.require_unchanged()
    recorded = (check.manifest.files or {}).keys() if source is None else ()
    proven = {*recorded, *([SIGNATURE_NAME] if signed else [])}
    wrong = {found.name for found in check.found if found.kind == "values" and " expert " in found.name}
    check.counts["units"] -= len(wrong)  # projections with wrong values were compared but not proven
    return Verification(
        str(dst),
        None if source is None else str(source),
        signed=signed,
        bytes=sum(entry.nbytes for entry in converted.source.tensors.values()),
        unproven=tuple(sorted(check.contents.unproven - proven)),
        notes=tuple(_notes(check, source is None, slow, signed)),
        mismatches=tuple(dict.fromkeys(check.found)),
        **check.counts,
    )


def _signed(check: Findings, key: str) -> bool:
    source = check.converted.source
    manifest = source.read_file(MANIFEST_NAME, MAX_MANIFEST_BYTES)  # the same bytes that were parsed
    wrong = check_signature(manifest, source.path(SIGNATURE_NAME), key)
    if wrong:
        check.add("signature", SIGNATURE_NAME, wrong)
    return not wrong


def _notes(check: Findings, alone: bool, slow: bool, signed: bool | None) -> Iterator[str]:
    """List what was not checked, or is not proven."""
    if not alone:
        yield _CHOSEN
        return
    if check.manifest.files is None:
        source = option("source")
        yield (
            f"moeq.json was written by a version without file digests: without {source} only the experts were checked, "
            "not other tensors, config.json, tokenizer or code"
        )
    elif not slow and not signed:
        yield (
            "bytes were compared with moeq.json's digests of bytes; its digests of the experts' values were not: "
            f"{option('slow')} decodes the experts and compares these as well"
        )
    if not signed:
        more = f"{option('source')} or {option('signed_by')} proves more"
        yield (
            "the digests in moeq.json themselves were trusted. This proves integrity, not origin: whoever changes a "
            f"folder can change moeq.json with it; {more}"
        )


class AgainstManifest(Findings):
    """Findings from comparing every file, header and tensor with the digests in `moeq.json`."""

    def __init__(self, converted: ConvertedCheckpoint, workers: int, progress: Advance) -> None:
        super().__init__(converted, workers, progress)
        self._changed_tensors: list[str] = []

    def check(self, *, slow: bool) -> None:
        """Check everything; `slow`: unpack the experts of all layers, not only of those whose bytes have changed."""
        slow = slow or self.manifest.files is None
        self.total += sum(entry.num_experts for entry in self.manifest.layers) if slow else 0
        digests = self.contents.tensor_digests(self.advance)
        self.check_names()
        self._recorded(digests)
        self._values(slow=slow)
        self.counts["losses"] = sum(entry.losses for entry in self.manifest.layers)

    def _recorded(self, digests: Mapping[str, TensorDigest]) -> None:
        """Compare every file with its digest in the manifest."""
        files = self.manifest.files
        if files is None:
            return
        known = files.keys() | {MANIFEST_NAME} | self.contents.unproven
        self.add_unexpected(self.contents.names - known, "moeq.json does not know it")
        for name, recorded in files.items():
            if name not in self.contents.names:
                self.add("file", name, f"{name} is missing")
            elif name in self.contents.headers:
                self._recorded_weights(name, recorded, digests)
            else:
                self.counts["files"] += 1
                if self.contents.digest(name, recorded.bytes) != recorded:
                    self.add("file", name, f"{name} is not the file that was written")

    def _recorded_weights(self, name: str, recorded: FileDigest, digests: Mapping[str, TensorDigest]) -> None:
        if self.contents.header_digest(name) != replace(recorded, tensors={}):
            self.add("file", name, f"the header or the size of {name} is not what was written")
        held = self.contents.headers[name]
        for tensor in sorted(held.keys() | recorded.tensors.keys()):
            if tensor not in self.converted.source.expert_names:
                self.counts["tensors"] += 1
            if tensor not in held or tensor not in recorded.tensors:
                where = "missing from" if tensor not in held else "not known of"
                self.add("tensor", tensor, f"tensor {tensor} is {where} {name}")
            elif digests.get(tensor) != recorded.tensors[tensor]:
                if tensor in self.converted.source.expert_names:
                    self._changed_tensors.append(tensor)  # unpacking tells which experts have changed
                    continue
                self.add("tensor", tensor, f"the bytes of tensor {tensor} are not those that were written")

    def _values(self, *, slow: bool) -> None:
        """Check the values of packed tensors: unpack those whose bytes have changed, or all if `slow`."""
        if not self.manifest.intact:
            self.add("manifest", MANIFEST_NAME, f"{MANIFEST_NAME} was changed after it was written")
        suspects = [entry for entry in self.manifest.layers if slow or not self._unchanged(entry)]
        self.counts["units"] += sum(
            len(entry.projections) * entry.num_experts for entry in self.manifest.layers if entry not in suspects
        )
        self.check_unpacked(suspects)
        named = {mismatch.name.split(" expert ")[0] for mismatch in self.found if mismatch.kind == "values"}
        # Bytes may change where no value is stored: in padding.
        for entry in suspects:
            for name in self._changed_tensors:
                if name in entry.tensors and f"layer {entry.layer}" not in named:
                    self.add("tensor", name, f"the bytes of tensor {name} are not those that were written")

    def _unchanged(self, entry: LayerEntry) -> bool:
        """Return whether all packed tensors of a layer have the bytes and the files that the manifest records."""
        files = self.manifest.files or {}
        unchanged = {name for file in files.values() for name in file.tensors}.difference(self._changed_tensors)
        return unchanged.issuperset(entry.tensors)

"""Prove that a conversion still means what was converted, without its source or with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moeq.checkpoint.manifest import MANIFEST_NAME
from moeq.checkpoint.source import CONFIG_NAME, Source
from moeq.digest import DIGEST_NAME, DigestDifference, check_digests, default_workers
from moeq.errors import MoeqError
from moeq.model import Checkpoint
from moeq.model import open as open_checkpoint
from moeq.model.converted import ConvertedCheckpoint
from moeq.pipeline.state.publish import converted_config
from moeq.pipeline.state.restore_data import OTHER_WEIGHTS, RestoreData
from moeq.pipeline.state.side_files import HUB_SETTINGS, copied_files

_CHUNK = 16 * 2**20

#: Called with steps done, steps in all, and a label.
Advance = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Mismatch:
    """One thing that is not as it was.

    Attributes:
        kind: `values` (packed experts), `source-values` (the source's experts), `tensor`, `file`, `kept`, `identity`.
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
        units: expert projections whose logical digest was recomputed from the packed tensors.
        source_units: the same of the source.
        tensors: other tensors compared with the source, byte for byte.
        files: side files compared with the source.
        losses: stored numbers that packing was allowed to change; digests are then of what is stored.
        mismatches: everything that differs.
    """

    destination: str
    source: str | None
    units: int
    source_units: int
    tensors: int
    files: int
    losses: int
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
    workers: int | None = None,
    progress: Advance | None = None,
) -> Verification:
    """Recompute the digest of every expert; with the source also compare everything that was only copied.

    Args:
        dst: output of `moeq convert`.
        source: the checkpoint it came from.
        revision: Hub revision of `source`.
        workers: threads; None takes the cores there are, at most 8.
        progress: called with steps done, steps in all and a label.

    Raises:
        MoeqError: `usage.not-converted`, `usage.already-converted` for a source that is a conversion, and `source.*`
            for folders that cannot be read at all. What differs is no error but the answer.
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
    original = None if source is None else _open_source(source, revision)
    job = _Verifier(converted, original, workers or default_workers(), progress or (lambda done, total, label: None))
    return job.run(str(dst), None if source is None else str(source))


def _open_source(source: str | Path, revision: str | None) -> Checkpoint:
    original = open_checkpoint(source, revision=revision)
    if original.kind == "converted":
        raise MoeqError(
            "usage.already-converted",
            f"--source {source} is itself a conversion",
            "moeq diff compares any two checkpoints",
        )
    return original


class _Verifier:
    """One verification."""

    def __init__(
        self, converted: ConvertedCheckpoint, original: Checkpoint | None, workers: int, progress: Advance
    ) -> None:
        self._converted = converted
        self._original = original
        self._workers = workers
        self._progress = progress
        self._done = 0
        steps = sum(entry.num_experts for entry in converted.manifest.layers)
        rest = 0 if original is None else len(original.source.tensors)
        self._total = steps if original is None else 2 * steps + rest

    def run(self, destination: str, source: str | None) -> Verification:
        layers = self._converted.manifest.layers
        losses = sum(entry.losses for entry in layers)
        units, found = check_digests(self._converted, layers, self._advance, self._workers)
        mismatches = [_values("values", row, "no longer holds the values that were converted") for row in found]
        counts = {"source_units": 0, "tensors": 0, "files": 0}
        if self._original is not None:
            mismatches += self._identity(self._original)
            counts["source_units"], rows = self._source_values(self._original)
            mismatches += rows
            for name, texts in (("tensors", self._tensors(self._original)), ("files", self._files(self._original))):
                for mismatch in texts:
                    counts[name] += 1
                    mismatches += [mismatch] if mismatch else []
        return Verification(destination, source, units, losses=losses, mismatches=tuple(mismatches), **counts)

    def _advance(self, label: str) -> None:
        self._done += 1
        self._progress(min(self._done, self._total), self._total, label)

    def _identity(self, original: Checkpoint) -> list[Mismatch]:
        recorded = self._converted.manifest.source
        if original.source.identity() == recorded.identity:
            return []
        text = f"{original.source.name} is not what was converted: config or tensors differ from {recorded.name}"
        return [Mismatch("identity", original.source.name, text)]

    def _source_values(self, original: Checkpoint) -> tuple[int, list[Mismatch]]:
        """Digests of the source's own experts; layers that were packed with losses have others on purpose."""
        known = {*original.info.moe_layers}
        layers = [entry for entry in self._converted.manifest.layers if entry.layer in known and not entry.losses]
        fitting = [entry for entry in layers if original.num_experts(entry.layer) == entry.num_experts]
        units, found = check_digests(original, fitting, self._advance, self._workers)
        rows = [_values("source-values", row, "of the source is not what was converted") for row in found]
        for entry in self._converted.manifest.layers:
            if entry not in fitting and not entry.losses:
                name = f"layer {entry.layer}"
                rows.append(Mismatch("source-values", name, f"{name}: the source has other experts, or none"))
        return units, rows

    def _tensors(self, original: Checkpoint) -> Iterator[Mismatch | None]:
        """Every tensor that was copied, and every one that was kept verbatim, byte for byte."""
        source, converted = original.source, self._converted
        packed = {entry.layer for entry in converted.manifest.layers} & {*original.info.moe_layers}
        consumed = {entry.name for layer in packed for entry in original.experts(layer).layer.tensors()}
        kept = converted.manifest.restore.kept if converted.manifest.restore else ()
        restore_data = None if converted.manifest.restore is None else _restore_data(converted)
        for name, entry in source.tensors.items():
            self._advance(name)
            if name in kept:
                place = (
                    restore_data.place(f"tensor/{name}") if restore_data and f"tensor/{name}" in restore_data else None
                )
                yield _compare_place("kept", name, source, place)
            elif name not in consumed:
                found = converted.source.tensors.get(name)
                if found is None:
                    yield Mismatch("tensor", name, f"tensor {name} of the source is missing")
                elif (found.dtype, found.shape) != (entry.dtype, entry.shape):
                    text = f"is {found.dtype} {list(found.shape)}, in the source {entry.dtype} {list(entry.shape)}"
                    yield Mismatch("tensor", name, f"tensor {name} {text}")
                else:
                    yield _compare_place("tensor", name, source, (converted.source.path(found.file), found.start))
        for name in converted.source.tensors.keys() - source.tensors.keys() - converted.source.expert_names:
            yield Mismatch("tensor", name, f"tensor {name} is not in the source")

    def _files(self, original: Checkpoint) -> Iterator[Mismatch | None]:
        """Side files, and the source's config and index as they were kept."""
        here, there = self._converted.source, original.source
        restore_data = None if self._converted.manifest.restore is None else _restore_data(self._converted)
        wanted = {name for name in there.side_files() if name != CONFIG_NAME and not name.endswith(OTHER_WEIGHTS)}
        copied = copied_files(here)
        for name in sorted(wanted | (copied.keys() - {HUB_SETTINGS})):
            if name not in copied or name not in wanted:
                yield Mismatch("file", name, f"{name} is {'missing' if name in wanted else 'not in the source'}")
            else:
                same = here.path(copied[name]).read_bytes() == there.path(name).read_bytes()
                yield None if same else Mismatch("file", name, f"{name} differs from the source's")
        for name, text in (restore_data.texts if restore_data else {}).items():
            held = {*there.side_files(), there.index}
            same = name in held and there.path(name).read_bytes() == text
            yield None if same else Mismatch("kept", name, f"{name} is not what the source holds")
        for name, raw in (restore_data.raw_headers if restore_data else {}).items():
            held = {file.name for file in there.files}
            same = name in held and there.read_bytes(name, 0, len(raw)) == raw
            yield None if same else Mismatch("kept", f"header of {name}", f"the header of {name} is not the source's")
        expected = converted_config(original, self._converted.manifest)
        yield None if here.config == expected else Mismatch("file", CONFIG_NAME, f"{CONFIG_NAME} was changed")


def _restore_data(converted: ConvertedCheckpoint) -> RestoreData:
    return RestoreData(converted.source.path(MANIFEST_NAME).parent, converted.manifest.restore)


def _values(kind: str, row: DigestDifference, text: str) -> Mismatch:
    name = f"layer {row.layer} expert {row.expert} {row.projection}"
    swap = f"; it holds the values of {row.looks_like}" if row.looks_like else ""
    return Mismatch(kind, name, f"{name} {text}{swap}")


def _compare_place(kind: str, name: str, source: Source, place: tuple[Path, int] | None) -> Mismatch | None:
    """Compare a tensor of the source with bytes of a file."""
    if place is None:
        return Mismatch(kind, name, f"tensor {name} was to be kept and is missing")
    entry = source.entry(name)
    path, start = place
    with path.open("rb") as file:
        file.seek(start)
        for offset in range(0, entry.nbytes, _CHUNK):
            count = min(_CHUNK, entry.nbytes - offset)
            theirs = source.read_bytes(entry.file, entry.start + offset, entry.start + offset + count)
            ours = file.read(count)
            if ours != theirs:
                first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
                return Mismatch(kind, name, f"tensor {name} differs from the source's at byte {offset + first:,}")
    return None

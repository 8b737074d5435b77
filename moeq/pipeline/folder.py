"""The output folder of a conversion: built beside its final name, resumed where left, published by one rename."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from moeq.checkpoint.manifest import MANIFEST_NAME, Manifest, Projection
from moeq.checkpoint.source import CONFIG_NAME
from moeq.errors import MoeqError
from moeq.pipeline.keepsake import OTHER_WEIGHTS

if TYPE_CHECKING:
    from moeq.model import Checkpoint
    from moeq.pipeline.plan import FilePlan, Plan

Digests = dict[Projection, tuple[str, ...]]

JOURNAL_NAME = "moeq-journal.jsonl"
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class FileRecord:
    """What is known of a finished output file.

    Attributes:
        digests: projection to one logical digest per expert, for a layer's file.
        kept: source tensors that cannot be rebuilt from it.
        losses: stored numbers that packing changed.
    """

    digests: Digests = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    losses: int = 0


class WorkFolder:
    """`<DST>.moeq-partial` until `publish`, then DST.

    The journal in it names the job and lists every finished file with the digests of its units, one line each,
    written after the file itself is on disk: what the journal says is done, is done.

    Args:
        destination: final folder.
        job: digest of the plan.
        force: replace an existing output of moeq.
    """

    def __init__(self, destination: Path, job: str, *, force: bool = False) -> None:
        self.destination = destination
        self.path = destination.with_name(destination.name + ".moeq-partial")
        self.job = job
        self.force = force
        self._journal: dict[str, FileRecord] = {}

    def check(self, source: Path) -> None:
        """Refuse a destination that would lose somebody's data.

        Args:
            source: folder of the source checkpoint.

        Raises:
            MoeqError: `usage.destination-exists`, `usage.destination-is-source`, `usage.no-parent`.
        """
        destination = self.destination
        if not destination.name:
            raise MoeqError("usage.no-parent", f"'{destination}' is not a folder that can be created")
        if not destination.parent.is_dir():
            raise MoeqError(
                "usage.no-parent",
                f"{destination.parent} does not exist",
                f"create it first: mkdir -p {destination.parent}",
            )
        if destination.resolve() in (source.resolve(), *source.resolve().parents):
            raise MoeqError(
                "usage.destination-is-source", f"{destination} is, or holds, the source itself", "name another folder"
            )
        if not destination.exists() or (destination.is_dir() and not any(destination.iterdir())):
            return
        if not (destination / MANIFEST_NAME).is_file():
            raise MoeqError(
                "usage.destination-exists",
                f"{destination} exists and is not an output of moeq",
                "name another folder; --force replaces only what moeq itself wrote",
            )
        if not self.force:
            raise MoeqError(
                "usage.destination-exists", f"{destination} already holds a conversion", "--force replaces it"
            )

    def __enter__(self) -> WorkFolder:
        try:
            self.path.mkdir(exist_ok=True)
            if not self._resume():
                shutil.rmtree(self.path)
                self.path.mkdir()
                self._append({"job": self.job})
        except OSError as error:
            raise MoeqError("environment.write", f"cannot write {self.path}: {error.strerror}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Keep partial work of interruptions and full disks, which the same command continues; else remove it."""
        keep = isinstance(error, KeyboardInterrupt) or (
            isinstance(error, MoeqError) and error.code.startswith(("resources.", "interrupted."))
        )
        if error is not None and not keep:
            shutil.rmtree(self.path, ignore_errors=True)

    def finished(self, file: FilePlan) -> FileRecord | None:
        """What is known of a file that an earlier run finished, or None."""
        return self._journal.get(file.name)

    def record(self, file: FilePlan, record: FileRecord) -> None:
        """Note that a file is complete and on disk."""
        size = (self.path / file.name).stat().st_size
        self._append({"file": file.name, "size": size, **asdict(record)})

    def publish(self) -> None:
        """Give the finished folder its name. With `force` the old one is removed only after the new one stands."""
        (self.path / JOURNAL_NAME).unlink()
        _fsync_folder(self.path)
        old = None
        if self.destination.exists():
            old = self.destination.with_name(self.destination.name + ".moeq-old")
            shutil.rmtree(old, ignore_errors=True)
            os.replace(self.destination, old)
        os.replace(self.path, self.destination)
        _fsync_folder(self.destination.parent)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def _resume(self) -> bool:
        """Read the journal of an interrupted run; False where it is of another job or unreadable."""
        try:
            lines = (self.path / JOURNAL_NAME).read_text(encoding="utf-8").splitlines()
            records = [json.loads(line) for line in lines]
        except (OSError, ValueError):
            return False
        if not records or records[0].get("job") != self.job:
            return False
        try:
            for record in records[1:]:
                path = self.path / record["file"]
                if path.is_file() and path.stat().st_size == record["size"]:
                    digests = {name: tuple(values) for name, values in record["digests"].items()}
                    self._journal[record["file"]] = FileRecord(digests, tuple(record["kept"]), record["losses"])
        except (KeyError, TypeError, AttributeError):
            return False
        return True

    def _append(self, record: Mapping[str, Any]) -> None:
        with (self.path / JOURNAL_NAME).open("a", encoding="utf-8") as journal:
            journal.write(json.dumps(record) + "\n")
            journal.flush()
            os.fsync(journal.fileno())


def write_side_files(checkpoint: Checkpoint, plan: Plan, manifest: Manifest, folder: Path) -> None:
    """Everything that is not a weight file: copied files, index, `config.json`, and `moeq.json` last."""
    for name in checkpoint.source.side_files():
        if name != CONFIG_NAME and not name.endswith(OTHER_WEIGHTS):
            shutil.copyfile(checkpoint.source.path(name), folder / name)
    weight_map = {tensor: file.name for file in plan.files for tensor in file.tensors}
    _write_json(folder / INDEX_NAME, {"metadata": {"total_size": plan.bytes_out}, "weight_map": weight_map})
    _write_json(folder / CONFIG_NAME, converted_config(checkpoint, manifest))
    _write_json(folder / MANIFEST_NAME, manifest.to_json())


def converted_config(checkpoint: Checkpoint, manifest: Manifest) -> dict[str, Any]:
    """The source's `config.json` with the quantisation config that counts kept inside the new one.

    Other copies of it (in the language model's sub-config, say) are dropped: an engine that finds one would read
    packed experts by it.
    """
    original = checkpoint.quantization_config
    return {
        **_without_quantization(checkpoint.source.config),
        "quantization_config": {
            "quant_method": "moeq",
            "manifest": MANIFEST_NAME,
            "layouts": sorted({layer.layout for layer in manifest.layers}),
            "original": None if original is None else dict(original),
        },
    }


def _without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key not in ("quantization_config", "compression_config")}
    return {key: _without_quantization(value) if isinstance(value, dict) else value for key, value in kept.items()}


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _fsync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""Check a conversion against its own manifest: whether anything has changed since it was written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moeq.checkpoint.manifest import MANIFEST_NAME, FileDigest, LayerEntry, TensorDigest
from moeq.model.converted import ConvertedCheckpoint
from moeq.prove.findings import Advance, Findings


class AgainstManifest(Findings):
    """Findings from comparing every file, header and tensor with the digests in `moeq.json`."""

    def __init__(self, converted: ConvertedCheckpoint, workers: int, progress: Advance) -> None:
        super().__init__(converted, workers, progress)
        self._changed_tensors: list[str] = []

    def check(self, *, slow: bool) -> None:
        """Check everything.

        Args:
            slow: unpack the experts of all layers, not only of those whose bytes have changed.
        """
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

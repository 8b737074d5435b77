"""Check a conversion against its own manifest: nothing has changed since it was written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moeq.checkpoint.manifest import MANIFEST_NAME, FileDigest, LayerEntry, TensorDigest
from moeq.model.converted import ConvertedCheckpoint
from moeq.prove.findings import Advance, Findings


class AgainstManifest(Findings):
    """Compares every file, header and tensor with the digests in `moeq.json`."""

    def __init__(self, converted: ConvertedCheckpoint, workers: int, progress: Advance) -> None:
        super().__init__(converted, workers, progress)
        self._touched: list[str] = []

    def check(self, *, slow: bool) -> None:
        """Check everything. `slow`: unpack the experts of all layers, not only of those whose bytes changed."""
        slow = slow or self.manifest.files is None
        self.total += sum(entry.num_experts for entry in self.manifest.layers) if slow else 0
        digests = self.holdings.tensor_digests(self.advance)
        self.what_loaders_see()
        self._recorded(digests)
        self._values(slow=slow)
        self.counts["losses"] = sum(entry.losses for entry in self.manifest.layers)

    def _recorded(self, digests: Mapping[str, TensorDigest]) -> None:
        """Compare every file with its digest in the manifest."""
        files = self.manifest.files
        if files is None:
            return
        known = files.keys() | {MANIFEST_NAME} | self.holdings.unproven
        self.add_unexpected(self.holdings.names - known, "moeq.json does not know it")
        for name, recorded in files.items():
            if name not in self.holdings.names:
                self.add("file", name, f"{name} is missing")
            elif name in self.holdings.headers:
                self._recorded_weights(name, recorded, digests)
            else:
                self.counts["files"] += 1
                if self.holdings.digest(name, recorded.bytes) != recorded:
                    self.add("file", name, f"{name} is not the file that was written")

    def _recorded_weights(self, name: str, recorded: FileDigest, digests: Mapping[str, TensorDigest]) -> None:
        if self.holdings.header_digest(name) != replace(recorded, tensors={}):
            self.add("file", name, f"the header or the size of {name} is not what was written")
        held = self.holdings.headers[name]
        for tensor in sorted(held.keys() | recorded.tensors.keys()):
            if tensor not in self.converted.source.expert_names:
                self.counts["tensors"] += 1
            if tensor not in held or tensor not in recorded.tensors:
                where = "missing from" if tensor not in held else "not known of"
                self.add("tensor", tensor, f"tensor {tensor} is {where} {name}")
            elif digests.get(tensor) != recorded.tensors[tensor]:
                if tensor in self.converted.source.expert_names:
                    self._touched.append(tensor)  # which experts that is, unpacking tells
                    continue
                self.add("tensor", tensor, f"the bytes of tensor {tensor} are not those that were written")

    def _values(self, *, slow: bool) -> None:
        """What is in the packed tensors: as their bytes tell, and unpacked where those changed, or always if `slow`."""
        if not self.manifest.intact:
            self.add("manifest", MANIFEST_NAME, f"{MANIFEST_NAME} was changed after it was written")
        touched = [entry for entry in self.manifest.layers if slow or not self._unchanged(entry)]
        self.counts["units"] += sum(
            len(entry.projections) * entry.num_experts for entry in self.manifest.layers if entry not in touched
        )
        self.check_unpacked(touched)
        named = {mismatch.name.split(" expert ")[0] for mismatch in self.found if mismatch.kind == "values"}
        # Bytes that changed although every value in their layer is right: padding, say.
        for entry in touched:
            for name in self._touched:
                if name in entry.tensors and f"layer {entry.layer}" not in named:
                    self.add("tensor", name, f"the bytes of tensor {name} are not those that were written")

    def _unchanged(self, entry: LayerEntry) -> bool:
        """Whether all packed tensors of a layer have the bytes that the manifest knows, in files that it knows."""
        files = self.manifest.files or {}
        known = {name for file in files.values() for name in file.tensors}
        return known.issuperset(entry.tensors) and not known.intersection(self._touched).intersection(entry.tensors)

"""Re-prove the logical digests of a converted checkpoint: do its bytes still mean what was converted?"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from moeq.check.records import DigestMismatch
from moeq.checkpoint.manifest import LayerEntry, Manifest
from moeq.digest import logical_digest
from moeq.errors import MoeqError
from moeq.model import Checkpoint


def check_digests(
    checkpoint: Checkpoint, manifest: Manifest, layers: Iterable[int], advance: Callable[[str], None]
) -> tuple[int, list[DigestMismatch]]:
    """Recompute the digest of every projection of the given layers.

    Returns:
        How many were checked, and which differ from the manifest.

    Raises:
        MoeqError: `source.bad-manifest` where the manifest lacks digests for an expert.
    """
    checked, mismatches = 0, []
    for layer in layers:
        entry = manifest.layer(layer)
        homes = {
            value: f"expert {e} {name}" for name, values in entry.digests.items() for e, value in enumerate(values)
        }
        for expert in range(entry.num_experts):
            for projection in entry.digests:
                expected = _recorded(entry, projection, expert)
                found = logical_digest(checkpoint.matrix(layer, expert, projection))
                checked += 1
                if found != expected:
                    mismatches.append(DigestMismatch(layer, expert, projection, homes.get(found)))
            advance(f"layer {layer} expert {expert}")
    return checked, mismatches


def _recorded(entry: LayerEntry, projection: str, expert: int) -> str:
    values = entry.digests[projection]  # type: ignore[index]
    if len(values) != entry.num_experts:
        raise MoeqError(
            "source.bad-manifest",
            f"moeq.json records {len(values)} digests of {projection} in layer {entry.layer}, "
            f"which has {entry.num_experts} experts",
            "convert the source again",
        )
    return values[expert]

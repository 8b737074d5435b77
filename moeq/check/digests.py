"""Recompute the logical digests of a converted checkpoint and compare them with those of its manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import moeq.digest as digest
from moeq.check.results import DigestMismatch
from moeq.checkpoint.manifest import Manifest
from moeq.model import Checkpoint


def check_digests(
    checkpoint: Checkpoint, manifest: Manifest, layers: Iterable[int], advance: Callable[[str], None], workers: int = 1
) -> tuple[int, list[DigestMismatch]]:
    """Recompute the digest of every projection of the given layers (`moeq.digest.check_digests`).

    Returns:
        How many were checked, and which differ from the manifest.

    Raises:
        MoeqError: `source.bad-manifest` where the manifest lacks digests for an expert.
    """
    entries = [manifest.layer(layer) for layer in layers]
    checked, found = digest.check_digests(checkpoint, entries, advance, workers)
    return checked, [DigestMismatch(row.layer, row.expert, row.projection, row.looks_like) for row in found]

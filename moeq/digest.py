"""Digest of a matrix's logical values, independent of how they are packed.

The digest covers codes, scales, zero points, group indices and bias of one logical matrix, so the source and every
layout it is converted to share it. It is stronger than a digest of dequantised values (two code/scale pairs may give
one product) and hashes an eighth of the bytes.

It is BLAKE3, since every converted byte is hashed: it takes a third of the time of sha256, even on processors with
instructions for that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from blake3 import blake3

from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec, QuantizedMatrix, Role, split_projections

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

#: Recorded in manifests; changes whenever the definition below changes.
DIGEST_NAME = "blake3/moeq-logical-2"

_ROLES: dict[str, Literal["w13", "w2"]] = {"gate": "w13", "up": "w13", "down": "w2"}


class MatrixSource(Protocol):
    """A source of logical matrices: a checkpoint, whatever its packing."""

    def matrix(self, layer: int, expert: int, role: Role) -> QuantizedMatrix:
        """Return one logical matrix."""


class RecordedLayer(Protocol):
    """A layer with recorded digests: a manifest's entry."""

    @property
    def layer(self) -> int:
        """Layer number."""

    @property
    def num_experts(self) -> int:
        """Number of experts of the layer."""

    @property
    def digests(self) -> Mapping[Any, Sequence[str]]:
        """Digests by projection, one per expert."""

    @property
    def projections(self) -> Sequence[str]:
        """Projections of which an expert consists."""


@dataclass(frozen=True)
class DigestDifference:
    """A projection whose values are not those that were recorded."""

    layer: int  #: layer number
    expert: int  #: expert number
    projection: str  #: `gate`, `up` or `down`
    #: projection that has this digest instead (`expert 3 gate`), which names a swap; else None
    looks_like: str | None = None

    @property
    def name(self) -> str:
        """Projection for people: `layer 0 expert 3 gate`."""
        return f"layer {self.layer} expert {self.expert} {self.projection}"

    @property
    def swap(self) -> str:
        """Clause that names a swap, for the end of a sentence; empty without one."""
        return f"; it holds the values of {self.looks_like}" if self.looks_like else ""

    @property
    def text(self) -> str:
        """Sentence for people."""
        return f"{self.name}: not the values recorded{self.swap}"


def logical_digest(matrix: QuantizedMatrix) -> str:
    """Return the hex BLAKE3 (256 bits) of a logical matrix.

    The hash runs over a JSON header (sizes and types), then each present tensor as `name`, byte count (8 bytes LE)
    and little-endian contiguous bytes. 4-bit codes are hashed two to a byte, even `k` in the low nibble.
    """
    import torch

    spec, digest = matrix.spec, new_digest(matrix.spec)
    codes = matrix.codes
    if spec.bits == 4 and spec.k % 2 == 0:
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    _update(digest, "codes", codes)
    _update(digest, "scales", matrix.scales)
    if matrix.zeros is not None:
        _update(digest, "zeros", matrix.zeros.to(torch.int16))
    if matrix.group_index is not None:
        _update(digest, "group_index", matrix.group_index.to(torch.int32))
    if matrix.global_scale is not None:
        _update(digest, "global_scale", matrix.global_scale.to(torch.float32))
    if matrix.bias is not None:
        _update(digest, "bias", matrix.bias)
    return digest.hexdigest()


def new_digest(spec: MatrixSpec) -> blake3:
    """Begin the digest of a matrix, before its first tensor (see `logical_digest`)."""
    return blake3(header_of(spec))


@lru_cache(maxsize=256)
def header_of(spec: MatrixSpec) -> bytes:
    """Return the bytes that are hashed before the first tensor."""
    header = {
        "n": spec.n,
        "k": spec.k,
        "element": spec.element,
        "group_size": spec.group_size,
        "scale_dtype": spec.scale_dtype,
        "symmetric": spec.symmetric,
        "act_order": spec.act_order,
    }
    return json.dumps(header, sort_keys=True).encode()


def field_header(name: str, nbytes: int) -> bytes:
    """Return the bytes that are hashed before those of a tensor."""
    return name.encode() + nbytes.to_bytes(8, "little")


def _update(digest: blake3, name: str, tensor: Tensor) -> None:
    import torch

    data = tensor.contiguous().view(-1).view(torch.uint8)
    digest.update(field_header(name, data.numel()))
    digest.update(data.numpy().data)


def check_digests(
    matrices: MatrixSource, entries: Iterable[RecordedLayer], advance: Callable[[str], None], workers: int = 1
) -> tuple[int, list[DigestDifference]]:
    """Recompute the digest of every projection of the given layers. Each matrix is read and unpacked once.

    Args:
        matrices: the checkpoint.
        entries: layers with their recorded digests.
        advance: called once per expert, in order, with a label.
        workers: number of threads. Reading, unpacking and hashing release the interpreter's lock, so they overlap.

    Returns:
        The number of digests checked, and the differences found.

    Raises:
        MoeqError: `source.bad-manifest` where digests are missing for an expert, and the errors of reading.
    """
    checked, differences = 0, []
    for entry in entries:
        require_complete(entry)
        place_of_digest = {
            digest: f"expert {expert} {projection}"
            for projection, digests in entry.digests.items()
            for expert, digest in enumerate(digests)
        }

        def digests_of(expert: int, entry: RecordedLayer = entry) -> dict[str, str]:
            return expert_digests(matrices, entry.layer, expert, entry.digests)

        with closing(map_in_order(digests_of, range(entry.num_experts), workers)) as results:
            for expert, digests in enumerate(results):
                for projection, digest in digests.items():
                    checked += 1
                    if digest != entry.digests[projection][expert]:
                        place = place_of_digest.get(digest)
                        differences.append(DigestDifference(entry.layer, expert, projection, place))
                advance(f"layer {entry.layer} expert {expert}")
    return checked, differences


def expert_digests(matrices: MatrixSource, layer: int, expert: int, projections: Iterable[str]) -> dict[str, str]:
    """Return the digest of each of an expert's projections."""
    wanted = list(projections)
    digests: dict[str, str] = {}
    for role in dict.fromkeys(_ROLES[projection] for projection in wanted):
        for projection, part in split_projections(matrices.matrix(layer, expert, role)):
            digests[projection] = logical_digest(part)
    return {projection: digests.get(projection, "") for projection in wanted}


def require_complete(entry: RecordedLayer) -> None:
    """Refuse a layer that lacks digests. Raises MoeqError `source.bad-manifest`."""
    missing = {*entry.projections} - entry.digests.keys()
    if missing:
        what = " and ".join(sorted(missing))
        raise MoeqError("source.bad-manifest", f"moeq.json records no digests of {what} of layer {entry.layer}")
    for projection, values in entry.digests.items():
        if projection not in entry.projections or len(values) != entry.num_experts:
            raise MoeqError(
                "source.bad-manifest",
                f"moeq.json records {len(values)} digests of {projection} in layer {entry.layer}, "
                f"which has {entry.num_experts} experts",
                "convert the source again",
            )


def map_in_order(function: Callable[[int], T], items: Iterable[int], workers: int) -> Generator[T, None, None]:
    """Map over a few threads and yield the results in order.

    Close the generator (`contextlib.closing`) before its inputs are released. In these threads torch starts no threads
    of its own, which would only wait for each other.
    """
    import torch

    threads_before = torch.get_num_threads()
    pool = ThreadPoolExecutor(max(workers, 1), initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield from pool.map(function, items)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(threads_before)


def default_workers() -> int:
    """Return the number of cores, at most 8: beyond that, disks and memory are the limit."""
    return min(8, os.cpu_count() or 1)

"""SGLang's expert pack: one file with the routed experts of DeepSeek-V4, expert by expert, and a hash of each matrix.

The file has a header, an index entry per matrix, and an aligned object for every expert: gate, up and down as rows of
ggml's MXFP4 blocks. SGLang reads experts from it while serving, and everything else from a GGUF file of the same model.

Transcribed from SGLang 0.5.23, `srt/model_loader/expert_pack/format.py` and `build.py` (`SGLANG-EXPERTPACK-v1`), and
checked against its reader, `srt/layers/moe/expert_pack.py`. Its builder takes only GGUF, and its index names bytes of
that file; here the index names the bytes that a GGUF tensor of the same experts would have.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from moeq.checkpoint.disk import closing_fd, disk_errors, read_at, write_at
from moeq.checkpoint.manifest import Projection
from moeq.checkpoint.outputs import OutputFolder
from moeq.checkpoint.writer import BLOCK, FileForm, tensor_bytes
from moeq.digest import default_workers
from moeq.errors import MoeqError
from moeq.model import Checkpoint
from moeq.pipeline.plan.conversion_plan import FilePlan
from moeq.spelling import option
from moeq.transcode.survey import LayerSurvey
from moeq.version import __version__

PACK_NAME = "DeepSeek-V4-Flash.expert-pack"
MANIFEST_NAME = f"{PACK_NAME}.manifest.json"
LOADER_NAME = "loader-config.json"

#: Name, in the loader's config, of the GGUF file that holds the rest of the model.
GGUF_NAME = "DeepSeek-V4-Flash.gguf"

FORMAT = "SGLANG-EXPERTPACK-v1"

_HEADER = struct.Struct("<24sIIIIQQQIIII32s32s32s")
_ENTRY = struct.Struct("<HHBBH16s80sQQQQQQ32s32s32s4Q16s16sQQ")

#: Flags of the header: matrices hold the source's bytes (1), and the matrices of an expert are adjacent (2).
_FLAGS = 3

#: ggml's number of MXFP4.
_MXFP4 = 39

_ROLES: tuple[Projection, ...] = ("gate", "up", "down")

_CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class PackPlan(FilePlan):
    """The pack as one output file."""

    num_layers: int
    num_experts: int
    top_k: int
    sizes: tuple[tuple[int, int], ...]  #: columns and rows of each projection, in the order of `_ROLES`

    @property
    def matrix_bytes(self) -> int:
        """Bytes of one projection of one expert."""
        return next(tensor_bytes(*form) for form in self.tensors.values())

    @property
    def stride(self) -> int:
        """Bytes from one expert to the next."""
        return _aligned(len(_ROLES) * self.matrix_bytes)

    @property
    def data_start(self) -> int:
        """Byte of the file at which the first expert begins."""
        return _aligned(_HEADER.size + len(self.tensors) * _ENTRY.size)

    @cached_property
    def form(self) -> FileForm:
        """Places of all matrices. The header is left out here: it is written last, with the hashes of all matrices."""
        size, ranges = self.matrix_bytes, dict[str, tuple[int, int]]()
        for number, name in enumerate(self.tensors):
            expert, role = divmod(number, len(_ROLES))
            start = self.data_start + expert * self.stride + role * size
            ranges[name] = (start, start + size)
        return FileForm(b"", ranges, self.data_start + len(self.tensors) // len(_ROLES) * self.stride)


def plan_pack(
    checkpoint: Checkpoint,
    layers: Sequence[LayerSurvey],
    tensors: Sequence[Mapping[str, tuple[tuple[int, ...], str]]],
) -> PackPlan:
    """Plan the pack of a checkpoint. `tensors` has, for each layer, shape and dtype of every matrix, expert by expert.

    Raises MoeqError `usage.target` if the reader cannot take the model.
    """
    info, first = checkpoint.info, layers[0].kinds[0]
    counts = {len(layer.kinds) for layer in layers}
    if [layer.layer for layer in layers] != list(range(len(layers))) or len(counts) != 1 or tuple(first) != _ROLES:
        detail = "an expert pack has the same number of experts, with gate, up and down, in every layer from layer 0 on"
        raise MoeqError("usage.target", f"{info.name}: {detail}", option("to", "deepseek-v4"))
    if info.top_k is None:
        raise MoeqError("source.bad-config", f"{info.name}: config.json has no num_experts_per_tok")
    specs = [first[role].spec for role in _ROLES]
    sizes = tuple((spec.k, spec.n) for spec in specs)
    return PackPlan(
        name=PACK_NAME,
        tensors={name: form for layer in tensors for name, form in layer.items()},
        layer=None,
        num_layers=len(layers),
        num_experts=counts.pop(),
        top_k=info.top_k,
        sizes=sizes,
    )


def finish_pack(
    folder: OutputFolder, pack: PackPlan, checkpoint: Checkpoint, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Write header and index into a file that already holds all experts; return the manifest.

    Raises MoeqError `resources.disk-full`, `environment.write`.
    """
    source, model = hashlib.sha256(checkpoint.source.identity().encode()), hashlib.sha256()
    digests = source.hexdigest(), hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    model.update(":".join(("sglang-deepseek-expert-pack-v1", *digests)).encode())
    identity = model.hexdigest()
    with disk_errors(folder.path), closing_fd(folder.open(pack.name, os.O_RDWR)) as fd:
        with ThreadPoolExecutor(default_workers()) as threads:
            hashes = list(threads.map(lambda place: _sha256(fd, *place), pack.form.ranges.values()))
        index = b"".join(_entries(pack, hashes, identity, digests[0]))
        header = _header(pack, identity, *digests)
        write_at(fd, header + index + bytes(pack.data_start - len(header) - len(index)), 0)
        whole = _sha256(fd, 0, pack.form.size).hex()
        os.fsync(fd)
    objects = pack.num_layers * pack.num_experts
    payload = len(_ROLES) * pack.matrix_bytes
    return {
        "format": FORMAT,
        "version": 1,
        "complete": True,
        "layout": "triplet_identity",
        "role_order": list(_ROLES),
        "alignment": BLOCK,
        "pack_path": pack.name,
        "pack_size": pack.form.size,
        "pack_sha256": whole,
        "header_bytes": _HEADER.size,
        "index_count": len(pack.tensors),
        "index_entry_bytes": _ENTRY.size,
        "index_sha256": hashlib.sha256(index).hexdigest(),
        "data_start": pack.data_start,
        "object_count": objects,
        "object_payload_bytes": payload,
        "object_stride": pack.stride,
        "role_bytes": pack.matrix_bytes,
        "payload_bytes": objects * payload,
        "padding_bytes": pack.form.size - pack.data_start - objects * payload,
        "model": {
            "ref": checkpoint.info.name,
            "model_identity_sha256": identity,
            "config_sha256": digests[1],
            "num_layers": pack.num_layers,
            "num_routed_experts": pack.num_experts,
            "top_k": pack.top_k,
            "single_gpu": True,
        },
        "source": {"path": GGUF_NAME, "sha256": digests[0]},
        "builder": {"moeq": __version__},
    }


def loader_config(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the content of SGLang's `--model-loader-extra-config` for a pack in the current folder."""
    return {
        "pack_path": PACK_NAME,
        "manifest_path": MANIFEST_NAME,
        "source_path": GGUF_NAME,
        "source_sha256": manifest["source"]["sha256"],
        "model_identity_sha256": manifest["model"]["model_identity_sha256"],
        "config_sha256": manifest["model"]["config_sha256"],
    }


def _header(pack: PackPlan, identity: str, source: str, config: str) -> bytes:
    counts = pack.num_layers, pack.num_experts, pack.top_k, len(_ROLES)
    places = len(pack.tensors), pack.data_start, BLOCK
    hashes = (bytes.fromhex(digest) for digest in (identity, source, config))
    return _HEADER.pack(FORMAT.encode(), 1, _HEADER.size, _ENTRY.size, _FLAGS, *places, *counts, *hashes)


def _entries(pack: PackPlan, hashes: Sequence[bytes], identity: str, source: str) -> Iterator[bytes]:
    size = pack.matrix_bytes
    for number, ((start, _), digest) in enumerate(zip(pack.form.ranges.values(), hashes, strict=True)):
        place, role = divmod(number, len(_ROLES))
        layer, expert = divmod(place, pack.num_experts)
        generation = hashlib.sha256(f"{identity}:{source}:{layer}:{expert}".encode()).digest()[:8]
        tensor = f"blk.{layer}.ffn_{_ROLES[role]}_exps.weight".encode()
        yield _ENTRY.pack(
            *(layer, expert, role, 2, _MXFP4, b"MXFP4", tensor),
            *(0, pack.num_experts * size, expert * size, size),  # offset and size of the GGUF tensor, and of the expert
            *(start, size),  # offset and size in the pack
            *(bytes(32), digest, digest),  # the first would be the hash of a GGUF tensor, which does not exist here
            *(*pack.sizes[role], 0, 0, b"MXFP4", b"identity-v1", 32),
            int.from_bytes(generation, "little") or 1,
        )


def _sha256(fd: int, start: int, stop: int) -> bytes:
    digest, memory = hashlib.sha256(), bytearray(min(_CHUNK_BYTES, stop - start))
    for place in range(start, stop, _CHUNK_BYTES):
        data = memoryview(memory)[: min(_CHUNK_BYTES, stop - place)]
        if read_at(fd, data, place) < len(data):
            raise OSError(f"the expert pack ends before byte {stop:,}")
        digest.update(data)
    return digest.digest()


def _aligned(size: int) -> int:
    return -(-size // BLOCK) * BLOCK

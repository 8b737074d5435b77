"""Bytes that no file has: tensors as they were before llama.cpp's converter rearranged them, made on opening."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from moeq.checkpoint.header import TensorEntry
from moeq.errors import MoeqError
from moeq.gguf.header import GgufTensor
from moeq.gguf.names import Change
from moeq.schemes.gguf import dequantized, part_of

if TYPE_CHECKING:
    from torch import Tensor

#: Reads bytes of a file of the checkpoint: its name, the first byte, the byte after the last.
Reader = Callable[[str, int, int], bytearray]


class MadeFile(Protocol):
    """A file that is made when it is opened."""

    def content(self, read: Reader) -> memoryview:
        """Return its bytes. Raises MoeqError as `read`."""


@dataclass(frozen=True)
class UnpermutedTensor:
    """A tensor whose rows llama.cpp interleaved (`LlamaModel.permute`), in the model's order."""

    stored: TensorEntry  #: the tensor as it is stored
    heads: int  #: heads that the rows belong to; each one's two halves are interleaved

    def content(self, read: Reader) -> memoryview:
        import numpy as np

        data = np.frombuffer(read(self.stored.file, self.stored.start, self.stored.end), np.uint8)
        rows = data.reshape(self.heads, -1, 2, self.stored.nbytes // self.stored.shape[0])
        return np.ascontiguousarray(rows.swapaxes(1, 2)).data.cast("B")


@dataclass(frozen=True)
class ReorderedTensor:
    """A tensor of Qwen3.5's linear attention, as the model has it.

    Where llama.cpp stores value heads by their number within a key head, the model groups them by key head
    (transformers 5.23, `integrations.gguf.gguf_conversion_mapping`).
    """

    file: str
    stored: GgufTensor
    change: Change  #: what the converter did
    heads: tuple[int, int, int]  #: key heads, value heads per key head, and rows (or columns) per value head

    @property
    def moves_bytes(self) -> bool:
        """Whether rows keep their bytes; else the tensor becomes float32."""
        return self.change in ("values", "value-heads", "value-tail", "conv-tail")

    @property
    def reordered(self) -> int:
        """Rows or columns that change their places, the last ones."""
        keys, per_key, size = self.heads
        return keys * per_key * size

    def content(self, read: Reader) -> memoryview:
        import torch

        octets = torch.frombuffer(read(self.file, self.stored.start, self.stored.end), dtype=torch.uint8)
        rows = octets.reshape(self.stored.shape[0] if len(self.stored.shape) > 1 or self.moves_bytes else 1, -1)
        if not self.moves_bytes:
            rows = dequantized(self.stored.type, rows)
            rows = (_logarithm(rows, self.file) if self.change == "value-logarithm" else rows).T
        keys, per_key, size = self.heads
        tail = rows[rows.shape[0] - self.reordered :].reshape(per_key, keys, size, -1).transpose(0, 1)
        found = torch.cat([rows[: rows.shape[0] - self.reordered], tail.reshape(self.reordered, -1)])
        found = found.T if self.change == "value-columns" else found
        return found.contiguous().numpy().data.cast("B")


@dataclass(frozen=True)
class ChangedNumbers:
    """A tensor whose every number llama.cpp changes, float32."""

    file: str
    stored: GgufTensor
    logarithm: bool  #: numbers are `-exp(x)` of the model's; otherwise 1 was added

    def content(self, read: Reader) -> memoryview:
        rows = numbers_in(read, self.file, self.stored)
        return (_logarithm(rows, self.file) if self.logarithm else rows - 1).numpy().data.cast("B")


@dataclass(frozen=True)
class JoinedRows:
    """A projection whose rows llama.cpp keeps in two tensors: their bytes if both have one type, else float32."""

    file: str
    tensors: tuple[GgufTensor, GgufTensor]  #: both tensors, `[rows, K]`
    heads: int  #: groups of rows; each takes the next rows of every run
    runs: tuple[tuple[int, int], ...]  #: per run, the tensor and how many of its rows

    @property
    def keeps_bytes(self) -> bool:
        """Whether rows keep their bytes."""
        return self.tensors[0].type == self.tensors[1].type

    def content(self, read: Reader) -> memoryview:
        import torch

        found = [self._rows(read, tensor) for tensor in self.tensors]
        starts, cut = [0, 0], list[torch.Tensor]()
        for which, count in self.runs:
            rows = found[which][starts[which] : starts[which] + count]
            cut.append(rows.reshape(self.heads, count // self.heads, -1))
            starts[which] += count
        return torch.cat(cut, dim=1).contiguous().numpy().data.cast("B")

    def _rows(self, read: Reader, tensor: GgufTensor) -> Tensor:
        import torch

        if not self.keeps_bytes:
            return numbers_in(read, self.file, tensor)
        return torch.frombuffer(read(self.file, tensor.start, tensor.end), dtype=torch.uint8).view(tensor.shape[0], -1)


@dataclass(frozen=True)
class LatentProjection:
    """`kv_b_proj` of multi-head latent attention, float32, from the halves that llama.cpp keeps for its kernels."""

    file: str
    keys: GgufTensor  #: `attn_k_b` `[heads, rank, key rows]`, each head transposed
    values: GgufTensor  #: `attn_v_b` `[heads, value rows, rank]`

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole: for every head its key rows, then its value rows."""
        (heads, rank, rows), more = self.keys.shape, self.values.shape[1]
        return heads * (rows + more), rank

    def content(self, read: Reader) -> memoryview:
        import torch

        keys, values = (numbers_in(read, self.file, one).reshape(one.shape) for one in (self.keys, self.values))
        joined = torch.cat([keys.transpose(1, 2), values], dim=1).contiguous()
        return joined.numpy().data.cast("B")


def numbers_in(read: Reader, file: str, tensor: GgufTensor) -> Tensor:
    """Return the numbers of a tensor, float32 `[rows, K]`. Raises MoeqError as `read`, and `source.bad-data`."""
    import torch

    octets = torch.frombuffer(read(file, tensor.start, tensor.end), dtype=torch.uint8)
    return dequantized(tensor.type, octets.reshape(prod(tensor.shape[:-1]), -1))


def _logarithm(numbers: Tensor, file: str) -> Tensor:
    """Return `log(-x)` of numbers. Raises MoeqError `source.bad-data` if one is not negative."""
    import torch

    if not bool((numbers < 0).all()):
        raise MoeqError("source.bad-data", f"{file}: a decay (ssm_a) is not negative", "the file is damaged")
    return torch.log(-numbers)


def open_made(content: memoryview) -> int:
    """Return the descriptor of a file that holds some bytes and has no name."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        return os.dup(file.fileno())


def derive(
    change: Change, entry: TensorEntry, stored: GgufTensor, config: Mapping[str, Any], where: str
) -> tuple[TensorEntry, MadeFile | None]:
    """Return the entry of a tensor as the model has it, and the file that it is in if no file has it so.

    Args:
        entry: the tensor as stored, under its Hugging Face name.
        stored: the tensor in the file.

    Raises:
        MoeqError: `source.inconsistent` if shape and config do not fit.
    """
    if change == "row":
        return entry._replace(shape=(1, *entry.shape)) if len(entry.shape) == 1 else entry, None
    if change == "channels":
        rows, *rest = entry.shape or (0,)
        return entry._replace(shape=(rows, 1, *rest)) if len(rest) == 1 else entry, None
    if change in ("minus-one", "logarithm"):
        file = f"{where} of {entry.file}"
        changed = TensorEntry(entry.name, "F32", stored.shape, file, 0, 4 * prod(stored.shape))
        return changed, ChangedNumbers(entry.file, stored, change == "logarithm")
    if change != "rotary":
        return _reordered(change, entry, stored, config, where)
    heads = config.get("num_key_value_heads" if "attn_k" in where else "num_attention_heads")
    rows = entry.shape[0] if entry.shape else 0
    if type(heads) is not int or heads <= 0 or not rows or rows % (2 * heads):
        raise MoeqError("source.inconsistent", f"{where}: {rows} rows are no pairs of {ascii(heads)[:20]} heads")
    place = f"{where} of {entry.file}"
    return entry._replace(file=place, start=0, end=entry.nbytes), UnpermutedTensor(entry, heads)


def _reordered(
    change: Change, entry: TensorEntry, stored: GgufTensor, config: Mapping[str, Any], where: str
) -> tuple[TensorEntry, MadeFile]:
    """Return entry and file of a tensor that only Qwen3.5's converter changes."""
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim")
    counts = [value for name in names if type(value := config.get(name)) is int and 0 < value < 1 << 16]
    if len(counts) < len(names) or counts[1] % counts[0]:
        raise MoeqError("source.inconsistent", f"{where}: {', '.join(names)} are {counts}, which do not fit")
    keys, values, size = counts
    single = change in ("value-heads", "value-logarithm")
    made = ReorderedTensor(entry.file, stored, change, (keys, values // keys, 1 if single else size))
    axis = len(stored.shape) - 1 if change == "value-columns" else 0
    if not stored.shape or stored.shape[axis] < made.reordered:
        detail = f"{where}: shape {list(stored.shape)} has no {made.reordered} rows of value heads"
        raise MoeqError("source.inconsistent", detail)
    file = f"{where} of {entry.file}"
    if made.moves_bytes:
        shape = (entry.shape[0], 1, *entry.shape[1:]) if change == "conv-tail" else entry.shape
        return entry._replace(file=file, start=0, end=entry.nbytes, shape=shape), made
    nbytes = 4 * prod(stored.shape)
    if change == "value-columns":
        name = entry.name.rpartition(".")[0] + "." + part_of("f32")
        return TensorEntry(name, "U8", (stored.shape[0], 4 * stored.shape[1]), file, 0, nbytes), made
    return TensorEntry(entry.name, "F32", stored.shape, file, 0, nbytes), made


def join(
    file: str, first: GgufTensor, second: GgufTensor, config: Mapping[str, Any], where: str
) -> tuple[JoinedRows, GgufTensor]:
    """Return a projection whose rows are in two tensors, and the tensor that it would be stored as.

    Shared experts' gate and up follow each other. Qwen3-Next has, for each key head, its rows of queries, keys, values
    (all in the first tensor, in this order) and gates (the second).
    Raises MoeqError `source.inconsistent` if shapes, or shapes and config, do not fit.
    """
    (rows, columns), (more, others) = (
        tensor.shape if len(tensor.shape) == 2 else (0, -1) for tensor in (first, second)
    )
    runs: tuple[tuple[int, int], ...] = ((0, rows), (1, more))
    heads = 1
    if first.name.endswith("attn_qkv.weight"):
        heads, size = config.get("linear_num_key_heads", 0), config.get("linear_key_head_dim", 0)
        queries = heads * size if type(heads) is type(size) is int else 0
        runs = ((0, queries), (0, queries), (0, rows - 2 * queries), (1, more))
    if columns != others or columns <= 0 or heads <= 0 or any(count <= 0 or count % heads for _, count in runs):
        detail = f"{where}: {first.name} {list(first.shape)} and {second.name} {list(second.shape)} do not fit together"
        raise MoeqError("source.inconsistent", detail)
    made = JoinedRows(file, (first, second), heads, runs)
    kind = first.type if made.keeps_bytes else "f32"
    nbytes = first.end - first.start + second.end - second.start if made.keeps_bytes else 4 * (rows + more) * columns
    return made, GgufTensor(where, kind, (rows + more, columns), 0, nbytes)


def latent_entry(name: str, made: LatentProjection, where: str) -> TensorEntry:
    """Return the entry of a whole `kv_b_proj`.

    Raises MoeqError `source.inconsistent` if the halves do not fit together.
    """
    keys, values = made.keys.shape, made.values.shape
    if len(keys) != 3 or len(values) != 3 or keys[0] != values[0] or keys[1] != values[2]:
        detail = f"{where}: attn_k_b {list(keys)} and attn_v_b {list(values)} are no halves of one projection"
        raise MoeqError("source.inconsistent", detail)
    rows, columns = made.shape
    return TensorEntry(name, "U8", (rows, 4 * columns), f"{where}.attn_kv_b of {made.file}", 0, 4 * rows * columns)

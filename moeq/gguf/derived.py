"""Bytes that no file has: tensors that llama.cpp's converter rearranged, turned back, made when they are opened."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from moeq.checkpoint.header import TensorEntry
from moeq.errors import MoeqError
from moeq.gguf.header import GgufTensor
from moeq.gguf.names import Change
from moeq.schemes.gguf import dequantized

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
    """A tensor whose rows llama.cpp interleaved (`LlamaModel.permute`), in the model's order.

    Attributes:
        stored: the tensor as it is stored.
        heads: heads that the rows belong to; each one's two halves are interleaved.
    """

    stored: TensorEntry
    heads: int

    def content(self, read: Reader) -> memoryview:
        import numpy as np

        data = np.frombuffer(read(self.stored.file, self.stored.start, self.stored.end), np.uint8)
        rows = data.reshape(self.heads, -1, 2, self.stored.nbytes // self.stored.shape[0])
        return np.ascontiguousarray(rows.swapaxes(1, 2)).data.cast("B")


@dataclass(frozen=True)
class LatentProjection:
    """`kv_b_proj` of multi-head latent attention, float32, from the halves that llama.cpp keeps for its kernels.

    Attributes:
        file: file of both halves.
        keys: `attn_k_b` `[heads, rank, key rows]`, each head transposed.
        values: `attn_v_b` `[heads, value rows, rank]`.
    """

    file: str
    keys: GgufTensor
    values: GgufTensor

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole: for every head its key rows, then its value rows."""
        (heads, rank, rows), more = self.keys.shape, self.values.shape[1]
        return heads * (rows + more), rank

    def content(self, read: Reader) -> memoryview:
        import torch

        keys, values = (self._numbers(read, tensor) for tensor in (self.keys, self.values))
        joined = torch.cat([keys.transpose(1, 2), values], dim=1).contiguous()
        return joined.numpy().data.cast("B")

    def _numbers(self, read: Reader, tensor: GgufTensor) -> Tensor:
        import torch

        octets = torch.frombuffer(read(self.file, tensor.start, tensor.end), dtype=torch.uint8)
        rows = tensor.shape[0] * tensor.shape[1]
        return dequantized(tensor.type, octets.reshape(rows, -1)).reshape(tensor.shape)


def open_made(content: memoryview) -> int:
    """Return the descriptor of a file that holds some bytes and has no name."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        return os.dup(file.fileno())


def derive(
    change: Change, entry: TensorEntry, config: Mapping[str, Any], where: str
) -> tuple[TensorEntry, MadeFile | None]:
    """Return the entry of a tensor as the model has it, and the file that it is in if no file has it so.

    Args:
        change: what the converter did.
        entry: the tensor as stored, under its Hugging Face name.
        config: `config.json`.
        where: its name in the file.

    Raises:
        MoeqError: `source.inconsistent` if shape and config do not fit.
    """
    if change == "row":
        return entry._replace(shape=(1, *entry.shape)) if len(entry.shape) == 1 else entry, None
    heads = config.get("num_key_value_heads" if "attn_k" in where else "num_attention_heads")
    rows = entry.shape[0] if entry.shape else 0
    if type(heads) is not int or heads <= 0 or rows % (2 * heads):
        raise MoeqError("source.inconsistent", f"{where}: {rows} rows are no pairs of {ascii(heads)[:20]} heads")
    place = f"{where} of {entry.file}"
    return entry._replace(file=place, start=0, end=entry.nbytes), UnpermutedTensor(entry, heads)


def latent_entry(name: str, made: LatentProjection, where: str) -> TensorEntry:
    """Return the entry of a whole `kv_b_proj`.

    Raises:
        MoeqError: `source.inconsistent` if the halves do not fit together.
    """
    keys, values = made.keys.shape, made.values.shape
    if len(keys) != 3 or len(values) != 3 or keys[0] != values[0] or keys[1] != values[2]:
        detail = f"{where}: attn_k_b {list(keys)} and attn_v_b {list(values)} are no halves of one projection"
        raise MoeqError("source.inconsistent", detail)
    rows, columns = made.shape
    return TensorEntry(name, "U8", (rows, 4 * columns), f"{where}.attn_kv_b of {made.file}", 0, 4 * rows * columns)

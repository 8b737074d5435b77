"""Tensors that llama.cpp's converter rearranged, turned back: bytes that no file has, made when they are opened."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moeq.checkpoint.disk import read_at
from moeq.checkpoint.header import TensorEntry
from moeq.errors import MoeqError
from moeq.gguf.names import Change


@dataclass(frozen=True)
class UnpermutedTensor:
    """A file that no disk has: a tensor whose rows llama.cpp interleaved (`LlamaModel.permute`), in the model's order.

    Attributes:
        stored: the tensor as it is stored.
        heads: heads that the rows belong to; each one's two halves are interleaved.
    """

    stored: TensorEntry
    heads: int

    def open(self, opener: Callable[[str], int]) -> int:
        """Return the descriptor of a file that holds the bytes and has no name.

        Raises:
            MoeqError: as `opener`; `source.truncated`.
        """
        import numpy as np

        data = np.empty(self.stored.nbytes, np.uint8)
        fd = opener(self.stored.file)
        try:
            if read_at(fd, data.data, self.stored.start) < data.nbytes:
                raise MoeqError("source.truncated", f"{self.stored.file}: ended before byte {self.stored.end:,}")
        finally:
            os.close(fd)
        rows = data.reshape(self.heads, -1, 2, self.stored.nbytes // self.stored.shape[0])
        with tempfile.TemporaryFile() as file:
            file.write(np.ascontiguousarray(rows.swapaxes(1, 2)).data)
            file.flush()
            return os.dup(file.fileno())


def derive(
    change: Change, entry: TensorEntry, config: Mapping[str, Any], where: str
) -> tuple[TensorEntry, UnpermutedTensor | None]:
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

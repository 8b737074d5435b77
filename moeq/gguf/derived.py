"""Files that are made when they are opened: tensors as they were before llama.cpp's converter rearranged them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from moeq.checkpoint.header import TensorEntry
from moeq.errors import MoeqError
from moeq.gguf.header import GgufTensor
from moeq.gguf.names import Change
from moeq.schemes.gguf import dequantized, part_of

if TYPE_CHECKING:
    from torch import Tensor

#: Reads bytes of a file of the checkpoint: its name, the first byte, the byte after the last.
Reader = Callable[[str, int, int], bytearray]

#: Makes the bytes of a file when it is opened. Raises MoeqError as the reader that it is given, and `source.bad-data`.
Make = Callable[[Reader], memoryview]


def numbers_in(read: Reader, file: str, tensor: GgufTensor) -> Tensor:
    """Return the numbers of a tensor, float32 `[rows, K]`. Raises MoeqError as `read`, and `source.bad-data`."""
    return dequantized(tensor.type, _octets(read, file, tensor).reshape(prod(tensor.shape[:-1]), -1))


def _octets(read: Reader, file: str, tensor: GgufTensor) -> Tensor:
    import torch

    return torch.frombuffer(read(file, tensor.start, tensor.end), dtype=torch.uint8)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().numpy().data.cast("B")


def _logarithm(numbers: Tensor, file: str) -> Tensor:
    """Return `log(-x)` of numbers. Raises MoeqError `source.bad-data` if one is not negative."""
    import torch

    if not bool((numbers < 0).all()):
        raise MoeqError("source.bad-data", f"{file}: a decay (ssm_a) is not negative", "the file is damaged")
    return torch.log(-numbers)


def open_in_memory(content: memoryview) -> int:
    """Return the descriptor of a file that holds some bytes and has no name."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        return os.dup(file.fileno())


def derive(
    change: Change, entry: TensorEntry, stored: GgufTensor, config: Mapping[str, Any], where: str
) -> tuple[TensorEntry, Make | None]:
    """Return the entry of a tensor in the model's arrangement, and the maker of its file; None if it is stored so.

    `entry` is the tensor as it is stored, under its Hugging Face name.

    Raises MoeqError `source.inconsistent` if shape and config do not fit.
    """
    if change == "row":
        return entry._replace(shape=(1, *entry.shape)) if len(entry.shape) == 1 else entry, None
    if change == "channels":
        rows, *rest = entry.shape or (0,)
        return entry._replace(shape=(rows, 1, *rest)) if len(rest) == 1 else entry, None
    if change in ("minus-one", "logarithm"):

        def changed(read: Reader) -> memoryview:
            numbers = numbers_in(read, entry.file, stored)
            return _bytes(_logarithm(numbers, entry.file) if change == "logarithm" else numbers - 1)

        return TensorEntry(entry.name, "F32", stored.shape, f"{where} of {entry.file}", 0, _floats(stored)), changed
    if change == "rotary":
        return _unpermuted(entry, config, where)
    return _reordered(change, entry, stored, config, where)


def _floats(tensor: GgufTensor) -> int:
    return 4 * prod(tensor.shape)


def _unpermuted(entry: TensorEntry, config: Mapping[str, Any], where: str) -> tuple[TensorEntry, Make]:
    """Return the entry and the file's maker for a tensor in which llama.cpp interleaved the halves of each head's rows.

    Source: `LlamaModel.permute` of its converter.
    """
    heads = config.get("num_key_value_heads" if "attn_k" in where else "num_attention_heads")
    rows = entry.shape[0] if entry.shape else 0
    if type(heads) is not int or heads <= 0 or not rows or rows % (2 * heads):
        detail = f"{where}: {rows} rows do not divide into pairs for {ascii(heads)[:20]} heads"
        raise MoeqError("source.inconsistent", detail)

    def make(read: Reader) -> memoryview:
        import numpy as np

        octets = np.frombuffer(read(entry.file, entry.start, entry.end), np.uint8)
        pairs = octets.reshape(heads, -1, 2, entry.nbytes // rows)
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).data.cast("B")

    return entry._replace(file=f"{where} of {entry.file}", start=0, end=entry.nbytes), make


def _reordered(
    change: Change, entry: TensorEntry, stored: GgufTensor, config: Mapping[str, Any], where: str
) -> tuple[TensorEntry, Make]:
    """Return the entry and the file's maker for a tensor of Qwen3.5's linear attention.

    Where llama.cpp stores value heads by their number within a key head, the model groups them by key head
    (transformers 5.23, `integrations.gguf.gguf_conversion_mapping`).
    """
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim")
    counts = [value for name in names if type(value := config.get(name)) is int and 0 < value < 1 << 16]
    if len(counts) < len(names) or counts[1] % counts[0]:
        raise MoeqError("source.inconsistent", f"{where}: {', '.join(names)} are {counts}, which do not fit together")
    keys, values, head_size = counts
    per_key, size = values // keys, 1 if change in ("value-heads", "value-logarithm") else head_size
    moved = keys * per_key * size  # count of the last rows or columns, which are reordered
    axis = len(stored.shape) - 1 if change == "value-columns" else 0
    if not stored.shape or stored.shape[axis] < moved:
        detail = f"{where}: shape {list(stored.shape)} has no {moved} rows of value heads"
        raise MoeqError("source.inconsistent", detail)
    file, moves_bytes = f"{where} of {entry.file}", change not in ("value-columns", "value-logarithm")

    def make(read: Reader) -> memoryview:
        import torch

        octets = _octets(read, entry.file, stored)
        rows = octets.reshape(stored.shape[0] if len(stored.shape) > 1 or moves_bytes else 1, -1)
        if not moves_bytes:
            rows = dequantized(stored.type, rows)
            rows = (_logarithm(rows, entry.file) if change == "value-logarithm" else rows).T
        first = rows.shape[0] - moved
        tail = rows[first:].reshape(per_key, keys, size, -1).transpose(0, 1)
        found = torch.cat([rows[:first], tail.reshape(moved, -1)])
        return _bytes(found.T if change == "value-columns" else found)

    if moves_bytes:
        shape = (entry.shape[0], 1, *entry.shape[1:]) if change == "conv-tail" else entry.shape
        return entry._replace(file=file, start=0, end=entry.nbytes, shape=shape), make
    if change == "value-columns":
        name = entry.name.rpartition(".")[0] + "." + part_of("f32")
        return TensorEntry(name, "U8", (stored.shape[0], 4 * stored.shape[1]), file, 0, _floats(stored)), make
    return TensorEntry(entry.name, "F32", stored.shape, file, 0, _floats(stored)), make


def join(
    file: str, first: GgufTensor, second: GgufTensor, config: Mapping[str, Any], where: str
) -> tuple[GgufTensor, Make]:
    """Return a projection whose rows are in two tensors as one tensor: their bytes if both have one type, else float32.

    Gate and up rows of shared experts follow each other. Qwen3-Next's rows are grouped by key head: queries, keys and
    values (from the first tensor, in this order), then gates (from the second).
    Raises MoeqError `source.inconsistent` if shapes, or shapes and config, do not fit.
    """
    (rows, columns), (more_rows, more_columns) = (
        tensor.shape if len(tensor.shape) == 2 else (0, -1) for tensor in (first, second)
    )
    runs: tuple[tuple[int, int], ...] = ((0, rows), (1, more_rows))  # number of the tensor, count of its rows
    heads = 1  # groups of rows; each takes the next rows of every run
    if first.name.endswith("attn_qkv.weight"):
        named = (config.get(key) for key in ("linear_num_key_heads", "linear_key_head_dim"))
        heads, size = (number if type(number) is int else 0 for number in named)
        runs = ((0, heads * size), (0, heads * size), (0, rows - 2 * heads * size), (1, more_rows))
    counts = [count for _, count in runs]
    if columns != more_columns or min(columns, heads, *counts) <= 0 or any(count % heads for count in counts):
        detail = f"{where}: {first.name} {list(first.shape)} and {second.name} {list(second.shape)} do not fit together"
        raise MoeqError("source.inconsistent", detail)
    keeps_bytes = first.type == second.type

    def make(read: Reader) -> memoryview:
        import torch

        read_rows = _octets if keeps_bytes else numbers_in
        found = [read_rows(read, file, tensor).view(tensor.shape[0], -1) for tensor in (first, second)]
        starts, cut = [0, 0], []
        for which, count in runs:
            taken = found[which][starts[which] : starts[which] + count]
            cut.append(taken.reshape(heads, count // heads, -1))
            starts[which] += count
        return _bytes(torch.cat(cut, dim=1))

    shape = (rows + more_rows, columns)
    if keeps_bytes:
        return GgufTensor(where, first.type, shape, 0, first.end - first.start + second.end - second.start), make
    return GgufTensor(where, "f32", shape, 0, 4 * prod(shape)), make


def join_latent(name: str, file: str, keys: GgufTensor, values: GgufTensor, where: str) -> tuple[TensorEntry, Make]:
    """Return entry and file's maker for `kv_b_proj` of latent attention, float32: keys of a head, then its values.

    Args:
        keys: `attn_k_b` `[heads, rank, key rows]`, each head transposed; llama.cpp keeps both halves for its kernels.
        values: `attn_v_b` `[heads, value rows, rank]`.

    Raises MoeqError `source.inconsistent` if the halves do not fit together.
    """
    if len(keys.shape) != 3 or len(values.shape) != 3 or keys.shape[:2] != values.shape[::2]:
        detail = (
            f"{where}: attn_k_b {list(keys.shape)} and attn_v_b {list(values.shape)} are no halves of one projection"
        )
        raise MoeqError("source.inconsistent", detail)

    def make(read: Reader) -> memoryview:
        import torch

        halves = [numbers_in(read, file, one).reshape(one.shape) for one in (keys, values)]
        return _bytes(torch.cat([halves[0].transpose(1, 2), halves[1]], dim=1))

    heads, rank, rows = keys.shape
    shape = (heads * (rows + values.shape[1]), 4 * rank)
    return TensorEntry(name, "U8", shape, f"{where}.attn_kv_b of {file}", 0, prod(shape)), make

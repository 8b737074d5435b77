"""Digests of the experts in a layer's tensors: computed on the tensors' device where a layout is an index map.

On a GPU the numbers of many experts are gathered into the messages that `moeq.digest.logical_digest` hashes, and hashed
there; only digests come to the host. Other layouts, and tensors on a CPU, are unpacked and hashed expert by expert.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from moeq.checkpoint.manifest import STACKED_ROLES, Projection, StackedRole
from moeq.digest import field_header, header_of, logical_digest
from moeq.layouts.layout import Layout
from moeq.layouts.parts import torch_dtype
from moeq.layouts.words import word_dtype
from moeq.matrix import MatrixSpec, QuantizedMatrix, split_projections
from moeq.model.regroup import ungroup
from moeq.update.layers import WritableLayer, snapshot_digest
from moeq.update.placing import reading_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from moeq_kernels.placement import Elements

#: Upper bound of the bytes that are gathered at a time on a GPU, unless one expert has more.
SCRATCH_BYTES = 1 << 27

#: Upper bound of the readers that are cached; a layer needs two.
MAX_KEPT_READERS = 256

#: Digest of a projection, by expert and projection.
Digests = dict[tuple[int, str], str]


def snapshot(layer: WritableLayer) -> str:
    """Read all experts that a rank holds and return the layer's digest; undamaged tensors give `Writer.digest`."""
    return layer_digest(layer, read_digests(layer, ()))


def layer_digest(layer: WritableLayer, digests: Digests) -> str:
    """Return the digest of a layer, computed from the digests of its projections."""
    return snapshot_digest(layer.layer, iter((*key, value) for key, value in sorted(digests.items())))


def read_digests(layer: WritableLayer, known: Container[tuple[int, str]], *, gather: bool | None = None) -> Digests:
    """Compute the digests of all projections that are not known from the tensors.

    Args:
        layer: the layer.
        known: expert and projection of digests that are not needed.
        gather: whether kernels read what they can; None: on a GPU only. True on a CPU: in Triton's interpreter.
    """
    wanted = layer.device.type == "cuda" if gather is None else gather
    found: Digests = {}
    keys: list[tuple[int, str]] = []
    hashed: list[Tensor] = []
    for role in STACKED_ROLES:
        names = layer.names(role)
        rows = [row for row, expert in enumerate(layer.experts) if any((expert, name) not in known for name in names)]
        if wanted and is_gathered(layer):
            from moeq_kernels.blake3 import digests

            for run in runs_of(rows, layer, role):
                keys += [(expert, name) for expert in layer.experts[run] for name in names]
                messages, length = messages_of(layer, role, run)
                hashed.append(digests(messages.flatten(0, 1), length))
            continue
        for row in rows:
            for name, digest in digests_of(layer, role, read_matrix(layer, role, row)):
                found[layer.experts[row], name] = digest
    if hashed:
        import torch

        text = torch.cat(hashed).cpu().numpy().tobytes().hex()  # the only wait for the device
        found |= {key: text[64 * i : 64 * i + 64] for i, key in enumerate(keys)}
    return found


def read_matrix(layer: WritableLayer, role: StackedRole, row: int) -> QuantizedMatrix:
    """Unpack one row of the stacked tensors: the rank's part of an expert's `w13` or `w2`, without padding."""
    return layer.padding.unpad(layer.layout.unpack(stored_row(layer, role, row), layer.padded(role)))


def stored_row(layer: WritableLayer, role: StackedRole, row: int) -> dict[str, Tensor]:
    """Return the parts of a row in the layout's dtypes, on the CPU; engines hold some scales and biases in others."""
    wanted = layer.layout.tensors(layer.padded(role))
    return {
        name: tensor[row].to("cpu", torch_dtype(wanted[name].dtype)) for name, tensor in layer.tensors[role].items()
    }


def as_source(layer: WritableLayer, role: StackedRole, matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Return the matrix with the source's group size."""
    group = layer.specs[role].group_size
    return matrix if group == layer.written[role].group_size else ungroup(matrix, group)


def digests_of(layer: WritableLayer, role: StackedRole, matrix: QuantizedMatrix) -> list[tuple[Projection, str]]:
    """Return the digest of each projection of a rank's matrix."""
    return [(name, logical_digest(part)) for name, part in split_projections(as_source(layer, role, matrix))]


def is_gathered(layer: WritableLayer) -> bool:
    """Return whether kernels can read a layer: its layout has to be an index map of numbers that are decoded alone."""
    return type(layer.layout).unpack is Layout.unpack


def runs_of(rows: Sequence[int], layer: WritableLayer, role: StackedRole) -> Iterator[slice]:
    """Cut rows into runs of consecutive rows that fit the scratch memory."""
    spec = layer.own(role)
    most = max(1, SCRATCH_BYTES // (spec.n * spec.k * max(spec.bits, 4) // 8))
    start = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1 or i - start == most:
            yield slice(rows[start], rows[i - 1] + 1)
            start = i


def messages_of(layer: WritableLayer, role: StackedRole, rows: slice) -> tuple[Tensor, int]:
    """Gather the messages that `logical_digest` hashes for some rows, `[rows, projections, stride]`.

    The second result is the length of each message in bytes; the stride is that length rounded up to whole blocks.
    """
    group, written = layer.specs[role].group_size, layer.written[role].group_size
    reader = _reader(layer.layout, layer.padded(role), layer.own(role), None if group == written else group)
    return reader.messages({name: tensor[rows] for name, tensor in layer.tensors[role].items()})


class _Reader:
    """Reader of the stacked tensors of a layout, some rows at a time.

    Args:
        spec: spec of the matrix of one row, padding included.
        own: spec of that matrix without padding.
        group: group size of the source if the packed matrix has another, else None.
    """

    def __init__(self, layout: Layout, spec: MatrixSpec, own: MatrixSpec, group: int | None) -> None:
        self._layout, self._spec, self._own, self._group = layout, spec, own, group
        self._projections = spec.halves
        self._n, self._step = own.n // self._projections, spec.n // self._projections
        stored = layout.tensors(spec)
        self._parts = {
            name: (part, torch_dtype(stored[name].dtype), reading_of(part, layout.element_shape(part, spec)))
            for name, part in layout.parts(spec).items()
        }
        self._headers: dict[torch.device, list[tuple[int, Tensor]]] = {}  #: device to (place, bytes) of each header

    def messages(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        """Gather the messages of all projections of some rows, `[rows, projections, stride]`, and their length."""
        import torch

        from moeq_kernels.blake3 import BLOCK
        from moeq_kernels.placement import Elements

        words = {name: tensors[name].to(dtype) for name, (_, dtype, _) in self._parts.items()}
        numbers, spec = self._numbers(words)
        pairs = spec.bits == 4 and spec.k % 2 == 0
        width = spec.k // 2 if pairs else spec.k
        sizes = {"codes": self._n * width} | {field: one.shape[2] for field, one in numbers.items()}
        texts = [field_header(field, size) for field, size in sizes.items()]
        texts[0] = header_of(spec) + texts[0]
        length = sum(map(len, texts)) + sum(sizes.values())
        codes = next(name for name, (part, *_) in self._parts.items() if part.field == "codes")
        count, device = len(words[codes]), words[codes].device
        stride = -(-length // BLOCK) * BLOCK
        messages = torch.empty(count, self._projections, stride, dtype=torch.uint8, device=device)
        at, places = 0, []
        for text, (field, size) in zip(texts, sizes.items(), strict=True):
            places.append((at, text))
            at += len(text)
            if field != "codes":
                messages[:, :, at : at + size] = numbers[field]
            else:
                for half in range(self._projections):
                    into = Elements(self._n, width, half * stride + at, self._projections * stride)
                    self._read(words, codes, messages, half * self._step, into, pairs)
            at += size
        places.append((at, bytes(stride - at)))
        if device not in self._headers:
            self._headers[device] = [
                (place, torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device))
                for place, text in places
                if text
            ]
        for place, header in self._headers[device]:
            messages[:, :, place : place + len(header)] = header
        return messages, length

    def _numbers(self, words: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], MatrixSpec]:
        """Return the bytes of scales, zero points and bias, `[rows, projections, bytes]`, in the order of hashing.

        The second result is the spec of a projection in the groups of the source.
        """
        import torch

        found = {
            part.field: self._decoded(words, name) for name, (part, *_) in self._parts.items() if part.field != "codes"
        }
        tall = QuantizedMatrix(self._own, codes=found["scales"], scales=found["scales"], zeros=found.get("zeros"))
        matrix = ungroup(tall, self._group)  # ungroup never looks at codes
        numbers = {"scales": matrix.scales, "zeros": matrix.zeros, "bias": found.get("bias")}
        shape = len(matrix.scales) // self._own.n, self._projections, -1
        data = {
            field: one.contiguous().view(-1).view(torch.uint8).view(shape)
            for field, one in numbers.items()
            if one is not None
        }
        return data, matrix.spec.with_sizes(n=self._n)

    def _decoded(self, words: Mapping[str, Tensor], name: str) -> Tensor:
        """Return the numbers of a part, `[rows * N, columns]`."""
        import torch

        from moeq_kernels.placement import Elements

        part, _, _ = self._parts[name]
        count, n, columns = len(words[name]), self._n, 1 if part.field == "bias" else self._own.num_groups
        dtype = torch.uint8 if part.arrangement.fields_per_word > 1 else word_dtype(part.bits)
        found = torch.empty(count * self._own.n, columns, dtype=dtype, device=words[name].device)
        for half in range(self._projections):
            into = Elements(n, columns, half * n * columns, self._projections * n * columns)
            self._read(words, name, found, half * self._step, into)
        return self._layout.decode(name, found, self._spec)

    def _read(
        self, words: Mapping[str, Tensor], name: str, into: Tensor, first: int, elements: Elements, pairs: bool = False
    ) -> None:
        from moeq_kernels.placement import read

        read(words[name], into, self._parts[name][2], first, elements, pairs=pairs)


@lru_cache(maxsize=MAX_KEPT_READERS)
def _reader(layout: Layout, spec: MatrixSpec, own: MatrixSpec, group: int | None) -> _Reader:
    """Return the cached reader of a stacked matrix."""
    return _Reader(layout, spec, own, group)

"""Digests of the experts that a layer's tensors hold: read on the device of the tensors where a layout is an index map.

On a GPU the numbers of many experts are gathered into the messages that `moeq.digest.logical_digest` hashes, and hashed
there; only digests come to the host. Other layouts, and tensors on a CPU, are unpacked and hashed expert by expert.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING

from moeq.checkpoint.manifest import STACKED_ROLES, Projection, StackedRole
from moeq.digest import field_header, header_of, logical_digest
from moeq.layouts.arranged import ArrangedLayout, Part, torch_dtype
from moeq.layouts.words import word_dtype
from moeq.matrix import MatrixSpec, QuantizedMatrix, projection_spec, split_projections
from moeq.model.regroup import ungroup
from moeq.update.layers import WritableLayer, snapshot_digest
from moeq.update.placing import reading_of

if TYPE_CHECKING:
    from torch import Tensor

    from moeq_kernels.placement import Elements

#: Upper bound of the bytes that are gathered at a time on a GPU, unless one expert has more.
SCRATCH_BYTES = 1 << 27

#: Digest of a projection, by expert and projection.
Digests = dict[tuple[int, str], str]


def snapshot(layer: WritableLayer) -> str:
    """Read all experts that a rank holds and return the layer's digest, equal to `Writer.digest` of true weights."""
    return layer_digest(layer, read_digests(layer, ()))


def layer_digest(layer: WritableLayer, digests: Digests) -> str:
    """Return the digest of a layer from those of its projections."""
    return snapshot_digest(layer.layer, iter((*key, value) for key, value in sorted(digests.items())))


def read_digests(layer: WritableLayer, known: Container[tuple[int, str]], *, gather: bool | None = None) -> Digests:
    """Return the digests of projections that are not known, read from the tensors.

    Args:
        layer: the layer.
        known: expert and projection of digests that are not needed.
        gather: whether kernels read what they can; None: on a GPU. On a CPU they run in Triton's interpreter.
    """
    wanted = layer.device.type == "cuda" if gather is None else gather
    found: Digests = {}
    for role in STACKED_ROLES:
        names = layer.names(role)
        rows = [row for row, expert in enumerate(layer.experts) if any((expert, name) not in known for name in names)]
        if wanted and is_gathered(layer):
            for run in runs_of(rows, layer, role):
                found |= _gathered(layer, role, names, run)
            continue
        for row in rows:
            for name, digest in digests_of(layer, role, read_matrix(layer, role, row)):
                found[layer.experts[row], name] = digest
    return found


def read_matrix(layer: WritableLayer, role: StackedRole, row: int) -> QuantizedMatrix:
    """Unpack one row of the stacked tensors: the rank's part of an expert's `w13` or `w2`, without padding."""
    return layer.padding.unpad(layer.layout.unpack(stored_row(layer, role, row), layer.padded(role)))


def stored_row(layer: WritableLayer, role: StackedRole, row: int) -> dict[str, Tensor]:
    """Return the parts of a row in the dtypes of the layout; engines round some scales and biases."""
    wanted = layer.layout.tensors(layer.padded(role))
    return {
        name: tensor[row].to("cpu", torch_dtype(wanted[name].dtype)) for name, tensor in layer.tensors[role].items()
    }


def as_source(layer: WritableLayer, role: StackedRole, matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Return the matrix in the groups of the source."""
    group = layer.specs[role].group_size
    return matrix if group == layer.written[role].group_size else ungroup(matrix, group)


def digests_of(layer: WritableLayer, role: StackedRole, matrix: QuantizedMatrix) -> list[tuple[Projection, str]]:
    """Return the digest of each projection of a rank's matrix."""
    return [(name, logical_digest(part)) for name, part in split_projections(as_source(layer, role, matrix))]


def is_gathered(layer: WritableLayer) -> bool:
    """Return whether kernels read a layer: its layout is an index map of numbers that are decoded one by one."""
    return type(layer.layout).unpack is ArrangedLayout.unpack


def runs_of(rows: Sequence[int], layer: WritableLayer, role: StackedRole) -> Iterator[slice]:
    """Cut rows into runs that follow each other and fit the scratch memory."""
    spec = layer.own(role)
    most = max(1, SCRATCH_BYTES // (spec.n * spec.k * max(spec.bits, 4) // 8))
    start = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1 or i - start == most:
            yield slice(rows[start], rows[i - 1] + 1)
            start = i


def _gathered(layer: WritableLayer, role: StackedRole, names: Sequence[Projection], rows: slice) -> Digests:
    """Read and hash the projections of some rows on the device of the tensors."""
    from moeq_kernels.blake3 import digests

    found: Digests = {}
    for name in names:
        messages, length = messages_of(layer, role, name, rows)
        for expert, digest in zip(layer.experts[rows], digests(messages, length).cpu().numpy(), strict=True):
            found[expert, name] = digest.tobytes().hex()
    return found


def messages_of(layer: WritableLayer, role: StackedRole, name: Projection, rows: slice) -> tuple[Tensor, int]:
    """Gather what `logical_digest` hashes of a projection of some rows, `[rows, bytes]`, and return its length."""
    import torch

    from moeq_kernels.blake3 import BLOCK

    reader = _Reader(layer, role, name, rows)
    numbers, spec = reader.numbers()
    pairs = spec.bits == 4 and spec.k % 2 == 0
    width = spec.k // 2 if pairs else spec.k
    sizes = {"codes": spec.n * width} | {field: one.shape[1] for field, one in numbers.items()}
    texts = [header_of(spec), *(field_header(field, size) for field, size in sizes.items())]
    length = sum(map(len, texts)) + sum(sizes.values())
    count = rows.stop - rows.start
    messages = torch.empty(count, -(-length // BLOCK) * BLOCK, dtype=torch.uint8, device=layer.device)
    constants = torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8).to(layer.device)
    at = taken = len(texts[0])
    messages[:, :at] = constants[:at]
    for text, (field, size) in zip(texts[1:], sizes.items(), strict=True):
        messages[:, at : at + len(text)] = constants[taken : taken + len(text)]
        at, taken = at + len(text), taken + len(text)
        if field == "codes":
            reader.codes(messages, at, width, pairs)
        else:
            messages[:, at : at + size] = numbers[field]
        at += size
    messages[:, at:] = 0
    return messages, length


class _Reader:
    """Reader of one projection of some rows of the stacked tensors.

    Args:
        layer: the layer.
        role: stacked matrix.
        name: projection.
        rows: rows of the stacked tensors.
    """

    def __init__(self, layer: WritableLayer, role: StackedRole, name: Projection, rows: slice) -> None:
        self._layer, self._role, self._name = layer, role, name
        self._layout, self._spec, self._own = layer.layout, layer.padded(role), layer.own(role)
        self._n = projection_spec(self._own, name).n
        self._first = self._spec.n // 2 if name == "up" and self._spec.gated else 0
        wanted = layer.layout.tensors(self._spec)
        self._parts = self._layout.parts(self._spec)
        self._words = {
            name: layer.tensors[role][name][rows].to(torch_dtype(wanted[name].dtype)) for name in self._parts
        }

    def codes(self, messages: Tensor, at: int, width: int, pairs: bool) -> None:
        """Write codes into messages from byte `at` on, `width` bytes a row."""
        from moeq_kernels.placement import Elements

        name = next(name for name, part in self._parts.items() if part.field == "codes")
        self._read(name, messages, Elements(self._n, width, at, messages.shape[1]), pairs)

    def numbers(self) -> tuple[dict[str, Tensor], MatrixSpec]:
        """Return the bytes of scales, zero points and bias, `[rows, bytes]`, in the order in which they are hashed.

        The spec is that of the projection in the groups of the source.
        """
        import torch

        found = {part.field: self._decoded(name, part) for name, part in self._parts.items() if part.field != "codes"}
        tall = QuantizedMatrix(self._own, codes=found["scales"], scales=found["scales"], zeros=found.get("zeros"))
        matrix = as_source(self._layer, self._role, tall)  # does not look at codes
        numbers = {"scales": matrix.scales, "zeros": matrix.zeros, "bias": found.get("bias")}
        rows = len(matrix.scales) // self._n
        data = {
            field: one.contiguous().view(-1).view(torch.uint8).view(rows, -1)
            for field, one in numbers.items()
            if one is not None
        }
        return data, projection_spec(matrix.spec, self._name)

    def _decoded(self, name: str, part: Part) -> Tensor:
        """Return the numbers of a part, `[rows * N, columns]`."""
        import torch

        from moeq_kernels.placement import Elements

        columns = 1 if part.field == "bias" else self._own.num_groups
        dtype = torch.uint8 if part.arrangement.fields_per_word > 1 else word_dtype(part.bits)
        words = self._words[name]
        found = torch.empty(len(words) * self._n, columns, dtype=dtype, device=words.device)
        self._read(name, found, Elements(self._n, columns, 0, self._n * columns))
        return self._layout.decode(name, found, self._spec)

    def _read(self, name: str, into: Tensor, elements: Elements, pairs: bool = False) -> None:
        from moeq_kernels.placement import read

        part = self._parts[name]
        reading = reading_of(part, self._layout.element_shape(part, self._spec))
        read(self._words[name], into, reading, self._first, elements, pairs=pairs)

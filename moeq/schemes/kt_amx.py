"""ktransformers' expert files for CPUs: int4 or int8 in the order of AMX tiles, one scale per row, cut by NUMA node.

One projection of one expert is, for each node `i`, `numa.i.weight` I8 and `numa.i.scale` F32. Gate and up are cut into
runs of rows, down into runs of columns, so that down has a scale per row and node. A run `[rows, K]` of bytes is stored
by blocks of rows, then blocks of columns, then steps of 32 rows and 64 bytes; within a step, 16 rows are 16 x 16 words
of 32 bits, transposed. An int4 byte has column `c` in its low half and `c + 64` in its high half, as two's complement.
An int8 value is `code * scale`, an int4 value `16 * code * scale`, since kernels shift codes into the high half.

Transcribed from kt-kernel 0.7.2, `operators/amx/la` (`BufferBInt4Impl`, `GemmKernel224Int8::BufferB`) and
`scripts/convert_cpu_weights.py`; compared with that C++, compiled with emulated AVX-512.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.base import Scheme
from moeq.schemes.declared import Declaration, Declared, Fields
from moeq.schemes.format import Context, Described, Encoding, Format, PartRole, Parts, PartSig
from moeq.spelling import option

if TYPE_CHECKING:
    from torch import Tensor

#: Largest number of NUMA nodes that a file is cut for.
MAX_NODES = 8

#: Rows of a step, and bytes of each row in a step.
_ROWS, _BYTES = 32, 64


def weight_part(node: int) -> str:
    """Return the part that holds a node's codes."""
    return f"numa.{node}.weight"


def scale_part(node: int) -> str:
    """Return the part that holds a node's scales."""
    return f"numa.{node}.scale"


def read_config(table: Mapping[str, Any], origin: str) -> Declaration:
    """Read the config that moeq writes beside such experts."""
    declared = Declared(Fields(table, origin).text("quant_method") or "", rule=origin)
    return Declaration(declared.method, origin, declared, lambda module: declared, raw=table)


class KtAmx(Format):
    """Base of the int4 and int8 formats."""

    bits: ClassVar[int]  #: bits of a code
    step: ClassVar[int]  #: value of a code of 1 under a scale of 1
    row_block: ClassVar[int]  #: rows of a block
    column_block: ClassVar[int]  #: bytes of a row of a block
    parts: ClassVar[Mapping[str, PartRole]] = {
        **{weight_part(node): "codes" for node in range(MAX_NODES)},
        **{scale_part(node): "scale" for node in range(MAX_NODES)},
    }
    refusal = "these are files for ktransformers' kernels; convert the checkpoint they were made of"

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        return declared is not None and declared.method == self.id and parts.keys() <= self.parts.keys()

    def out_features(self, parts: Parts) -> int:
        return sum(parts[scale_part(node)].shape[0] for node in range(len(parts) // 2))

    def signatures(self, spec: MatrixSpec, nodes: int) -> dict[str, PartSig]:
        """Return dtype and shape of every part. Raises MoeqError `usage.target` for sizes that kernels do not take."""
        rows, columns = _node_sizes(spec, nodes)
        step = _BYTES * 8 // self.bits
        if rows * columns * nodes != spec.n * spec.k or rows % _ROWS or columns % step:
            detail = f"{nodes} NUMA nodes of {spec.n} x {spec.k}: each needs a multiple of {_ROWS} rows, {step} columns"
            raise MoeqError("usage.target", f"{spec.role}: {detail}", f"choose another {option('numa')}")
        found = {}
        for node in range(nodes):
            found[weight_part(node)] = PartSig("I8", (rows * columns * self.bits // 8,))
            found[scale_part(node)] = PartSig("F32", (rows,))
        return found

    def describe(self, parts: Parts, context: Context) -> Described:
        nodes = len(parts) // 2
        rows = parts[scale_part(0)].shape[0]
        columns = parts[weight_part(0)].shape[0] * 8 // self.bits // rows
        down = context.role in ("down", "w2")
        n, k = (rows, columns * nodes) if down else (rows * nodes, columns)
        spec = context.spec(parts, n, k, f"int{self.bits}", columns, "f32")
        encoding = Encoding("i8", "AMX tiles", "group" if down and nodes > 1 else "channel", (1, spec.group_size))
        return self._described(spec, context.declared, encoding)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        import torch

        nodes = sum(part.endswith(".scale") for part in parts)
        rows, columns = _node_sizes(spec, nodes)
        along = 1 if spec.role in ("down", "w2") else 0
        octets = [self._rows_of(parts[weight_part(node)], rows, columns) for node in range(nodes)]
        scales = [parts[scale_part(node)].unsqueeze(1) * self.step for node in range(nodes)]
        codes = [found ^ 0x80 if self.bits == 8 else _from_nibbles(found) ^ 8 for found in octets]
        return QuantizedMatrix(spec, torch.cat(codes, dim=along), torch.cat(scales, dim=along))

    def repack(self, matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
        import torch

        node = int(part.split(".")[1])
        spec = matrix.spec
        down = spec.role in ("down", "w2")
        stored_rows = sig.shape[0] if part.endswith("scale") else sig.shape[0] * 8 // self.bits // spec.k
        nodes = spec.num_groups if down else spec.n // stored_rows
        rows, columns = _node_sizes(spec, nodes)
        first, column = (0, node * columns) if down else (node * rows, 0)
        if part.endswith("scale"):
            return (matrix.scales[first : first + rows, node if down else 0] / self.step).contiguous()
        codes = matrix.codes[first : first + rows, column : column + columns]
        octets = codes ^ 0x80 if self.bits == 8 else _to_nibbles(codes ^ 8)
        return self._tiled(octets).view(torch.int8)

    def _tiled(self, octets: Tensor) -> Tensor:
        """Return bytes `[rows, bytes of a row]` in the order of tiles, as one axis."""
        import torch

        pieces = [
            block.reshape(-1, 2, 16, block.shape[1] // _BYTES, 16, 4).permute(0, 3, 1, 4, 2, 5).reshape(-1)
            for rows in torch.split(octets, self.row_block)
            for block in torch.split(rows, self.column_block, dim=1)
        ]
        return torch.cat(pieces)

    def _rows_of(self, stored: Tensor, rows: int, columns: int) -> Tensor:
        """Return the bytes of stored tiles as `[rows, bytes of a row]`."""
        import torch

        octets = torch.empty(rows, columns * self.bits // 8, dtype=torch.uint8)
        left = stored.view(torch.uint8)
        for rows_of_block in torch.split(octets, self.row_block):
            for block in torch.split(rows_of_block, self.column_block, dim=1):
                tiles, left = left[: block.numel()], left[block.numel() :]
                steps = block.shape[1] // _BYTES
                block.copy_(tiles.reshape(-1, steps, 2, 16, 16, 4).permute(0, 2, 4, 1, 3, 5).reshape(block.shape))
        return octets


def _node_sizes(spec: MatrixSpec, nodes: int) -> tuple[int, int]:
    """Return rows and columns of one node's run."""
    return (spec.n, spec.k // nodes) if spec.role in ("down", "w2") else (spec.n // nodes, spec.k)


def _to_nibbles(codes: Tensor) -> Tensor:
    halves = codes.reshape(codes.shape[0], -1, 2, _BYTES)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1)


def _from_nibbles(octets: Tensor) -> Tensor:
    import torch

    halves = octets.reshape(octets.shape[0], -1, _BYTES)
    return torch.stack([halves & 15, halves >> 4], dim=2).flatten(1)


class KtAmxInt4(KtAmx):
    """`INT4`: codes -7 to 7."""

    id = "kt-amx-int4"
    title = "ktransformers' AMX int4 experts"
    bits = 4
    step = 16
    row_block = 128
    column_block = 3584 // 2


class KtAmxInt8(KtAmx):
    """`INT8`: codes -127 to 127."""

    id = "kt-amx-int8"
    title = "ktransformers' AMX int8 experts"
    bits = 8
    step = 1
    row_block = 64
    column_block = 3584


def quantized(values: Tensor, spec: MatrixSpec) -> QuantizedMatrix:
    """Quantise as ktransformers does: round to bfloat16, then to int8 with one scale per row (of each node).

    The largest magnitude of a row becomes code 127. For int4 it becomes 112, and the high half of the int8 code is
    kept, rounded half away from zero. Rows whose scale has no finite inverse (magnitudes below 1e-36) become zeros; the
    library writes -128 there, whatever the value.

    Args:
        values: float32 `[N, K]`.
    """
    import torch

    rounded = values.to(torch.bfloat16).float().reshape(spec.n, spec.num_groups, -1)
    largest = rounded.abs().amax(dim=2, keepdim=True)
    if not bool(torch.isfinite(largest).all()):
        raise MoeqError("source.bad-data", "some numbers are not finite in bfloat16")
    scales = (largest.double() / 112).float() if spec.bits == 4 else largest / 127
    inverse = (1 / scales).nan_to_num(posinf=0.0)
    codes = torch.round(rounded * inverse).clamp(-128, 127).to(torch.int16)
    if spec.bits == 4:
        codes = codes.sign() * ((codes.abs() + 8) >> 4)
        scales = scales * 16
    offset = (codes + spec.symmetric_zero).to(torch.uint8).reshape(spec.n, spec.k)
    return QuantizedMatrix(spec, offset, scales.squeeze(2))

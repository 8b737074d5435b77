"""Compare everything but routed experts: quantised modules by their values, everything else byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.source import Source
from moeq.model import Checkpoint
from moeq.model.quantized_modules import QuantizedModule, quantized_modules, read_module
from moeq.prove.diff_bytes import equal_bytes

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 16 * 2**20

#: Number of rows that are dequantised at once.
_ROWS = 256

#: Function that gives the values of some rows of a module, from `start` to `stop`.
_Rows = Callable[[int, int], "Tensor"]


def compare_rest(a: Checkpoint, b: Checkpoint) -> tuple[int, list[str]]:
    """Compare everything else and return how many tensors and modules there were, and one line for each difference.

    Modules that are quantised in either checkpoint and not stored alike are compared as numbers. Containers of experts
    may have different names in the two checkpoints (`mlp`, `block_sparse_moe`).
    """
    left, right = _rest(a, {}), _rest(b, _renamed(a, b))
    if [*left] == [*right] == [entry.name for entry in right.values()] and equal_bytes(a.source, b.source, left):
        return len(left), []
    modules = [_modules(checkpoint, rest) for checkpoint, rest in ((a, left), (b, right))]
    names = dict.fromkeys([*modules[0], *modules[1]])
    count, lines, done = 0, list[str](), set[str]()
    for name in names:
        ours, theirs = _parts(left, name), _parts(right, name)
        if not ours or not theirs or _alike(a.source, ours, b.source, theirs):
            continue
        count += 1
        done |= {f"{name}.{part}" for part in (*ours, *theirs)}
        lines += _compare_values(a.source, modules[0].get(name) or ours, b.source, modules[1].get(name) or theirs, name)
    for name in dict.fromkeys([*left, *right]):
        if name in done:
            continue
        count += 1
        if name not in left or name not in right:
            lines.append(f"{name} is in {(a if name in left else b).source.name} only")
        else:
            lines += _compare_tensor(a.source, left[name], b.source, right[name])
    return count, lines


def _renamed(a: Checkpoint, b: Checkpoint) -> dict[str, str]:
    """Map names of containers of experts in the second checkpoint to names in the first, where they differ."""
    pairs = [(b.expert_prefix(n), a.expert_prefix(n)) for n in a.info.moe_layers if n in b.info.moe_layers]
    containers = [(theirs.rpartition(".")[0], ours.rpartition(".")[0]) for theirs, ours in pairs]
    return {theirs: ours for theirs, ours in containers if theirs != ours}


def _rest(checkpoint: Checkpoint, renamed: Mapping[str, str]) -> dict[str, TensorEntry]:
    """Return all tensors that hold no routed expert of the decoder, by the name that they are compared under."""
    names = set(checkpoint.source.expert_names)
    for layer in checkpoint.info.moe_layers:
        if checkpoint.kind == "source" or not checkpoint.is_packed(layer):
            names |= {entry.name for entry in checkpoint.experts(layer).layer.tensors()}
    found: dict[str, TensorEntry] = {}
    for name, entry in checkpoint.source.tensors.items():
        if name not in names:
            before = next((key for key in renamed if name.startswith(f"{key}.")), None)
            found[name if before is None else renamed[before] + name[len(before) :]] = entry
    return found


def _modules(checkpoint: Checkpoint, rest: Mapping[str, TensorEntry]) -> dict[str, QuantizedModule]:
    compared_as = {entry.name: name for name, entry in rest.items()}
    found = quantized_modules(rest.values(), checkpoint.declaration)
    return {compared_as[next(iter(row.parts.values())).name].rpartition(".")[0]: row for row in found}


def _parts(rest: Mapping[str, TensorEntry], module: str) -> dict[str, TensorEntry]:
    """Return the tensors of a module by part."""
    start = len(module) + 1
    parts = {name[start:]: entry for name, entry in rest.items() if name.startswith(f"{module}.")}
    return {part: entry for part, entry in parts.items() if "." not in part}


def _alike(a: Source, ours: Mapping[str, TensorEntry], b: Source, theirs: Mapping[str, TensorEntry]) -> bool:
    """Return whether two modules are stored in the same bytes."""
    return ours.keys() == theirs.keys() and not any(
        line for part in ours for line in _compare_tensor(a, ours[part], b, theirs[part])
    )


_Stored = QuantizedModule | Mapping[str, TensorEntry]


def _compare_values(a: Source, ours: _Stored, b: Source, theirs: _Stored, name: str) -> Iterator[str]:
    """Describe how two modules' numbers differ, if they do (0.0 and -0.0 are the same)."""
    left, right = _values(a, ours), _values(b, theirs)
    if left is None or right is None or left[1] != right[1]:
        yield f"{name} is {_shown(left)} and {_shown(right)}"
        return
    rows, columns = left[1]
    differing, largest = 0, 0.0
    for start in range(0, rows, _ROWS):
        one, other = (side[0](start, min(start + _ROWS, rows)) for side in (left, right))
        unequal = one != other
        if bool(unequal.any()):
            differing += int(unequal.sum())
            distance = (one.double() - other.double()).abs()[unequal].nan_to_num(nan=float("inf"))
            largest = max(largest, float(distance.max()))
    if differing:
        yield f"{name}: {differing:,} of {rows * columns:,} numbers differ, by up to {largest:g}"


def _shown(side: tuple[_Rows, tuple[int, int]] | None) -> str:
    return "no matrix" if side is None else str(list(side[1]))


def _values(source: Source, stored: _Stored) -> tuple[_Rows, tuple[int, int]] | None:
    """Return a function that reads a module's numbers, and their shape; None if it is not a matrix."""
    from moeq.schemes.dequantize import dequantize

    if isinstance(stored, QuantizedModule):
        matrix = read_module(source, stored)
        spec = matrix.spec
        return (lambda start, stop: dequantize(matrix.rows(start, stop, spec.role))), (spec.n, spec.k)
    entry = stored.get("weight")
    if entry is None or len(entry.shape) != 2:
        return None
    weight = source.read(entry.name)
    return (lambda start, stop: weight[start:stop].float()), (entry.shape[0], entry.shape[1])


def _compare_tensor(a: Source, left: TensorEntry, b: Source, right: TensorEntry) -> Iterator[str]:
    """Describe how two tensors differ in type, shape or bytes, if they do."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        yield f"{left.name} is {left.dtype} {list(left.shape)} and {right.dtype} {list(right.shape)}"
        return
    for offset in range(0, left.nbytes, _CHUNK):
        stop = min(offset + _CHUNK, left.nbytes)
        ours = a.read_bytes(left.file, left.start + offset, left.start + stop)
        theirs = b.read_bytes(right.file, right.start + offset, right.start + stop)
        if ours != theirs:
            first = next(i for i, (x, y) in enumerate(zip(ours, theirs, strict=True)) if x != y)
            yield f"{left.name} differs at byte {offset + first:,}"
            return

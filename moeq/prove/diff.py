"""Compare two checkpoints, each a source or a conversion in any format.

Experts and other quantised modules are compared by their values, however packed; everything else byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.manifest import Projection
from moeq.checkpoint.source import Source
from moeq.digest import default_workers, map_in_order
from moeq.matrix import QuantizedMatrix
from moeq.model import Checkpoint
from moeq.model import open as open_checkpoint
from moeq.model.quantized_modules import QuantizedModule, quantized_modules, read_module
from moeq.pipeline.events import Advance
from moeq.prove.diff_bytes import equal_bytes, same_layer
from moeq.schemes.dequantize import dequantize
from moeq.typed import spell_floats

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Place:
    """One number that differs between two checkpoints."""

    row: int  #: output feature
    column: int | None  #: input feature; None for a bias
    left: float  #: value in the first checkpoint
    right: float  #: value in the second checkpoint

    @property
    def text(self) -> str:
        """Description for people: `[3, 17]: 0.5 and 0.25`."""
        where = f"bias [{self.row}]" if self.column is None else f"[{self.row}, {self.column}]"
        return f"{where}: {self.left:g} and {self.right:g}"


@dataclass(frozen=True)
class ProjectionDifference:
    """Differences of one projection between two checkpoints."""

    layer: int  #: layer number
    expert: int  #: expert number
    projection: str  #: `gate`, `up` or `down`
    differing: int  #: count of numbers that differ
    numbers: int  #: count of all numbers
    max_abs: float  #: largest absolute difference
    relative: float  #: norm of the difference over the norm of the first projection
    first: Place | None = None  #: first difference in row-major order
    worst: Place | None = None  #: largest difference
    shapes: str | None = None  #: both shapes if they differ, so that no numbers can be compared; else None

    @property
    def name(self) -> str:
        """Name for people: `layer 0 expert 3 gate`."""
        return f"layer {self.layer} expert {self.expert} {self.projection}"


@dataclass(frozen=True)
class Difference:
    """Result of `diff`."""

    left: str  #: first checkpoint
    right: str  #: second checkpoint
    projections: int  #: count of projections that were compared
    differing: tuple[ProjectionDifference, ...]  #: projections that differ, in order
    missing: tuple[str, ...]  #: sentences about layers or experts that only one checkpoint has
    tensors: int  #: count of other tensors that were compared
    other: tuple[str, ...]  #: sentences about other tensors that differ

    @property
    def equal(self) -> bool:
        """Whether something was compared and no difference found."""
        return not (self.differing or self.missing or self.other) and self.projections > 0

    @property
    def worst(self) -> ProjectionDifference | None:
        """Projection with the largest relative difference."""
        return max(self.differing, key=lambda row: row.relative, default=None)

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values for JSON; numbers that are not finite become texts."""
        worst = self.worst
        document: dict[str, Any] = spell_floats({**asdict(self), "worst": asdict(worst) if worst else None})
        return document


def diff(
    left: str | Path,
    right: str | Path,
    *,
    experts_only: bool = False,
    workers: int | None = None,
    progress: Advance | None = None,
) -> Difference:
    """Compare two checkpoints. `moeq.diff` documents the arguments and errors."""
    a, b = open_checkpoint(left), open_checkpoint(right)
    report = progress or (lambda done, total, label: None)
    layers = [layer for layer in a.info.moe_layers if layer in b.info.moe_layers]
    missing = [
        f"layer {layer} has experts in {(left if layer in a.info.moe_layers else right)} only"
        for layer in sorted({*a.info.moe_layers} ^ {*b.info.moe_layers})
    ]
    total = sum(min(a.num_experts(layer), b.num_experts(layer)) for layer in layers)
    count, done = 0, 0
    found: list[ProjectionDifference] = []
    for layer in layers:
        if a.num_experts(layer) != b.num_experts(layer):
            missing.append(f"layer {layer} has {a.num_experts(layer)} and {b.num_experts(layer)} experts")
        experts = range(min(a.num_experts(layer), b.num_experts(layer)))

        if same_layer(a, b, layer):
            done += len(experts)
            count += len(experts) * len(_projections(a, b))
            report(done, total, f"layer {layer}")
            continue

        def compare(expert: int, layer: int = layer) -> list[ProjectionDifference | None]:
            return [_compare(a, b, layer, expert, projection) for projection in _projections(a, b)]

        with closing(map_in_order(compare, experts, workers or default_workers())) as results:
            for expert, rows in enumerate(results):
                done += 1
                count += len(rows)
                found += [row for row in rows if row is not None]
                report(done, total, f"layer {layer} expert {expert}")
    tensors, other = (0, []) if experts_only else compare_rest(a, b)
    return Difference(str(left), str(right), count, tuple(found), tuple(missing), tensors, tuple(other))


def _projections(a: Checkpoint, b: Checkpoint) -> Sequence[Projection]:
    return ("gate", "up", "down") if a.info.gated and b.info.gated else ("up", "down")


def _compare(
    a: Checkpoint, b: Checkpoint, layer: int, expert: int, projection: Projection
) -> ProjectionDifference | None:
    """Return the differences of one projection; None if all numbers are equal (0.0 equals -0.0, NaN equals NaN)."""
    import torch

    left, left_bias = numbers(a, layer, expert, projection)
    right, right_bias = numbers(b, layer, expert, projection)
    empty = ProjectionDifference(layer, expert, projection, 0, left.numel(), 0.0, 0.0)
    if left.shape != right.shape or (left_bias is None) != (right_bias is None):
        shapes = f"{_shape(left, left_bias)} and {_shape(right, right_bias)}"
        return replace(empty, differing=left.numel(), max_abs=float("inf"), relative=float("inf"), shapes=shapes)
    if left_bias is not None and right_bias is not None:
        # The bias becomes the last column: one comparison finds the first and the worst of both.
        left = torch.cat([left, left_bias.float().unsqueeze(1)], dim=1)
        right = torch.cat([right, right_bias.float().unsqueeze(1)], dim=1)
    unequal = (left != right) & ~(left.isnan() & right.isnan())
    if not bool(unequal.any()):
        return None
    distance = (left.double() - right.double()).abs()
    distance = torch.where(unequal, distance.nan_to_num(nan=float("inf"), posinf=float("inf")), 0.0)
    norm = float(left.double().nan_to_num(0, 0, 0).norm())
    columns = left.shape[1] - (0 if left_bias is None else 1)

    def place(index: int) -> Place:
        row, column = divmod(index, left.shape[1])
        return Place(row, column if column < columns else None, float(left[row, column]), float(right[row, column]))

    return replace(
        empty,
        differing=int(unequal.sum()),
        numbers=left.numel(),
        max_abs=float(distance.max()),
        relative=float(distance.norm()) / norm if norm else float("inf"),
        first=place(int(unequal.flatten().int().argmax())),
        worst=place(int(distance.flatten().argmax())),
    )


def numbers(checkpoint: Checkpoint, layer: int, expert: int, projection: Projection) -> tuple[Tensor, Tensor | None]:
    """Read one projection as float32 `[N, K]` and its bias `[N]`, dequantised if it is quantised."""
    if checkpoint.scheme_of(layer, expert, projection).format == "unquantized":
        return _plain(checkpoint, layer, expert, projection)
    matrix: QuantizedMatrix = checkpoint.matrix(layer, expert, projection)
    return dequantize(matrix), matrix.bias


def _plain(checkpoint: Checkpoint, layer: int, expert: int, projection: Projection) -> tuple[Tensor, Tensor | None]:
    """Read a projection in floating point; gate and up may be two halves of one tensor, or interleaved rows of it."""
    experts = checkpoint.experts(layer)
    unit, kind, fused = experts.layer.unit(expert), experts.kind(expert), experts.layer.fused
    home: Literal["gate", "up", "down", "gate_up"] = projection if projection in unit else "gate_up"
    parts = {
        part: checkpoint.source.read_row(entry, expert) if fused else checkpoint.source.read(entry.name)
        for part, entry in unit[home].items()
    }

    def rows(tensor: Tensor) -> Tensor:
        if home == projection:
            return tensor
        first, half = projection == "gate", tensor.shape[0] // 2
        if kind.interleaved:
            return tensor[0 if first else 1 :: 2]
        return tensor[:half] if first else tensor[half:]

    bias, weight = parts.get("bias"), parts["weight"]
    return rows(weight.t() if experts.transposed else weight).float(), None if bias is None else rows(bias)


def _shape(weight: Tensor, bias: Tensor | None) -> str:
    return f"{list(weight.shape)}{'' if bias is None else ' with a bias'}"


#: Bytes of a tensor that are compared at once.
_CHUNK = 16 * 2**20

#: Number of rows that are dequantised at once.
_ROWS = 256

#: Function that gives the values of some rows of a module, from `start` to `stop`.
_Rows = Callable[[int, int], "Tensor"]


def compare_rest(a: Checkpoint, b: Checkpoint) -> tuple[int, list[str]]:
    """Compare all tensors outside routed experts; return the count of tensors and modules, and a line per difference.

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
    """Map names of containers of experts in the second checkpoint to names in the first, where they differ.

    Pairs are left out if one name is within the other, such as Granite's: these containers were not renamed.
    """
    pairs = [(b.expert_prefix(n), a.expert_prefix(n)) for n in a.info.moe_layers if n in b.info.moe_layers]
    containers = [(theirs.rpartition(".")[0], ours.rpartition(".")[0]) for theirs, ours in pairs]
    return {
        theirs: ours
        for theirs, ours in containers
        if not f"{theirs}.".startswith(f"{ours}.") and not f"{ours}.".startswith(f"{theirs}.")
    }


def _rest(checkpoint: Checkpoint, renamed: Mapping[str, str]) -> dict[str, TensorEntry]:
    """Return all tensors outside the decoder's routed experts, by the names under which they are compared."""
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
    """Yield a line about how two modules' numbers differ, or nothing; 0.0 and -0.0 are the same."""
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
    """Yield a line about how two tensors differ in type, shape or bytes, or nothing."""
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

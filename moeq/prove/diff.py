"""Compare two checkpoints by the values of their experts, however packed: any format, source or conversion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moeq.checkpoint.manifest import Projection
from moeq.digest import default_workers, in_order
from moeq.matrix import QuantizedMatrix
from moeq.model import Checkpoint
from moeq.model import open as open_checkpoint
from moeq.prove.diff_bytes import same_layer
from moeq.prove.diff_rest import compare_rest
from moeq.typed import spell_floats

if TYPE_CHECKING:
    from torch import Tensor

#: Called with steps done, steps in all, and a label.
Advance = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Place:
    """Number that differs.

    Attributes:
        row: output feature.
        column: input feature; None for a bias.
        left: value in the first checkpoint.
        right: value in the second checkpoint.
    """

    row: int
    column: int | None
    left: float
    right: float

    @property
    def text(self) -> str:
        """Description for people: `[3, 17]: 0.5 and 0.25`."""
        where = f"bias [{self.row}]" if self.column is None else f"[{self.row}, {self.column}]"
        return f"{where}: {self.left:g} and {self.right:g}"


@dataclass(frozen=True)
class ProjectionDifference:
    """Projection that differs.

    Attributes:
        layer: layer number.
        expert: expert number.
        projection: `gate`, `up` or `down`.
        differing: count of numbers that differ.
        numbers: count of all numbers.
        max_abs: largest absolute difference.
        relative: norm of the difference over the norm of the first projection.
        first: first difference in row-major order.
        worst: largest difference.
        shapes: both shapes if they differ, so that no numbers can be compared; else None.
    """

    layer: int
    expert: int
    projection: str
    differing: int
    numbers: int
    max_abs: float
    relative: float
    first: Place | None = None
    worst: Place | None = None
    shapes: str | None = None

    @property
    def name(self) -> str:
        """Name for people: `layer 0 expert 3 gate`."""
        return f"layer {self.layer} expert {self.expert} {self.projection}"


@dataclass(frozen=True)
class Difference:
    """Result of `diff`.

    Attributes:
        left: first checkpoint.
        right: second checkpoint.
        projections: count of projections that were compared.
        differing: projections that differ, in order.
        missing: sentences about layers or experts that only one checkpoint has.
        tensors: count of other tensors that were compared.
        other: sentences about other tensors that differ.
    """

    left: str
    right: str
    projections: int
    differing: tuple[ProjectionDifference, ...]
    missing: tuple[str, ...]
    tensors: int
    other: tuple[str, ...]

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
    """Compare two checkpoints: experts by dequantised values, everything else byte for byte.

    Layers that are stored in the same bytes are equal without dequantising.

    Args:
        left: a checkpoint, source or converted.
        right: another checkpoint.
        experts_only: compare routed experts alone.
        workers: threads; None takes the cores there are, at most 8.
        progress: called with steps done, steps in all and a label.

    Raises:
        MoeqError: `source.*` for checkpoints that cannot be read; a difference is no error but the answer.
    """
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

        with closing(in_order(compare, experts, workers or default_workers())) as results:
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
    """Compare one projection; None if all numbers are equal (0.0 and -0.0 are, and so are NaN and NaN)."""
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
    from moeq.schemes.dequantize import dequantize

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

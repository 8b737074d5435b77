"""Write single experts of a layer in place: the same bytes as a fresh conversion of the updated checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moeq.checkpoint.manifest import STACKED_ROLES, Projection, StackedRole, stacked_role
from moeq.deploy.deployment import Deployment
from moeq.errors import MoeqError
from moeq.layouts.layout import Layout
from moeq.matrix import QuantizedMatrix, split_projections
from moeq.model.shards import Range
from moeq.schemes.dequantize import dequantize
from moeq.update.device import Gather, obstacle
from moeq.update.incoming import (
    PROJECTIONS,
    NewWeights,
    Parts,
    ProjectionBlock,
    check_block,
    merged_tensors,
    named_tensors,
    quantize_layer,
    read_layer,
    read_update,
    wanted_spec,
    whole_block,
)
from moeq.update.layers import WritableLayer, sharing_memory
from moeq.update.merge import merged_matrix, regrouped, whole_matrix
from moeq.update.packing import Copies, calibrations_of, check_reversible, pack, write_all
from moeq.update.progress import Progress
from moeq.update.quantize import Rule, under_scales
from moeq.update.snapshot import Digests, as_source, digests_of, layer_digest, read_digests, read_matrix

if TYPE_CHECKING:
    from torch import Tensor

    from moeq_kernels.placement import Write


@dataclass(frozen=True)
class RoundingLoss:
    """Norm of the error of rounding float weights to codes, relative to the norm of the weights.

    Attributes:
        new_scales: under the scales that were written with the codes.
        old_scales: under the scales that the expert had before; None for slices and shards.
    """

    new_scales: float
    old_scales: float | None


@dataclass(frozen=True)
class Update:
    """Result of writing one projection.

    Attributes:
        digest: digest of the layer after the update; None where the gather kernel wrote it without waiting for the
            device, and `Writer.digest` has to read it.
        projections: logical digests by projection, for the written projections whose digest this rank knows.
        rows: rows of the stacked tensors that were written; empty if other ranks hold the expert.
        written_bytes: bytes that were written on this rank.
        losses: stored numbers that the layout changed, for layouts that need `--allow-lossy`.
        loss: what rounding cost, by projection, where the update was float weights; else empty.
    """

    digest: str | None
    projections: Mapping[str, str]
    rows: tuple[int, ...]
    written_bytes: int
    losses: int
    loss: Mapping[Projection, RoundingLoss]


@dataclass
class _Prepared:
    """New bytes of one stacked matrix of an expert, before any is written."""

    role: StackedRole
    names: Sequence[Projection]  #: projections that the update names
    copies: Copies = ()  #: finished tensors
    writes: Sequence[Write] = ()  #: what the gather kernel does
    digests: Mapping[str, str] | None = None  #: digest of every projection; None where the gather kernel writes
    losses: int = 0
    loss: Mapping[Projection, RoundingLoss] = field(default_factory=dict)
    calibrations: list[float] | None = None  #: calibrations of all rows, where the layout has a common factor


class Writer:
    """Writer of experts into the tensors of served layers, which keep their addresses.

    Every update is decoded, packed, unpacked and compared in scratch memory of one expert, and only then copied. If a
    copy fails, the bytes that were copied are taken back: readers find the old expert or the new one. Threads that
    read the tensors while one is written have to be kept out by the caller.

    On a GPU, whole `w13` and `w2` of layouts that are index maps are written by the gather kernel
    (`moeq.update.device`) on the current stream, once the whole update is checked and its kernels are compiled. All
    other updates are packed on the CPU and copied.

    Args:
        layers: the layers, one `moeq.writable_layer` each.
        deployment: the deployment that the tensors serve; None: not checked.
        rule: library by whose arithmetic float weights are quantised; None: ModelOpt's for its own checkpoints, else
            that of compressed-tensors.
        gather: whether the gather kernel writes what it can; None: on a GPU only. True on a CPU: in Triton's
            interpreter.

    Raises:
        MoeqError: `usage.update-target` if two layers have one number or share memory, or a layer is that of another
            deployment.
    """

    def __init__(
        self,
        layers: Iterable[WritableLayer],
        deployment: Deployment | None = None,
        *,
        rule: Rule | None = None,
        gather: bool | None = None,
    ) -> None:
        self.layers: dict[int, WritableLayer] = {}
        for layer in layers:
            if layer.layer in self.layers:
                raise layer.unsuitable("this number was given twice")
            self.layers[layer.layer] = layer
            _check_deployment(layer, deployment)
        held = (
            (one.layer, part)
            for one in self.layers.values()
            for parts in one.tensors.values()
            for part in parts.values()
        )
        for number, other in sharing_memory(held):
            what = f"layers {number} and {other} share memory"
            raise MoeqError("usage.update-target", what, "give every layer tensors of its own")
        self._rule, self._gather = rule, gather
        self._digests: dict[int, Digests] = {
            number: {
                (expert, name): known[expert] for name, known in one.digests.items() for expert in set(one.experts)
            }
            for number, one in self.layers.items()
        }
        self._calibrations: dict[tuple[int, StackedRole], list[float]] = {}
        self._gathers: dict[tuple[int, StackedRole], Gather | None] = {}

    def update(
        self,
        layer: int,
        expert: int,
        projection: str,
        tensors: Tensor | Parts | Mapping[str, Tensor | Parts],
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
        expected: str | None = None,
    ) -> Update:
        """Write one projection of one expert, or some of its rows and columns.

        Args:
            layer: layer number.
            expert: expert, as the model counts them.
            projection: `gate`, `up` or `down`; `w13` with a mapping of both `gate` and `up`; `gate_up` for a tensor
                that the checkpoint stores fused.
            tensors: parts as the source stores them (`qweight` and so on) or float weights `[N, K]`, alone or as
                `weight` beside `bias`. Without a bias the old one stays. With `rows` or `columns`, that block alone.
            rows: `(start, stop)` of the output features that the tensors hold; None: all.
            columns: `(start, stop)` of the input features, in whole groups; None: all.
            expected: digest that the layer must have before the update; None: not checked.

        Raises:
            MoeqError: `usage.no-such-layer`, `usage.no-such-expert`, `usage.no-such-projection`; `usage.stale-digest`;
                `usage.illegal-slice`; `usage.update-tensors` for tensors of another form; `usage.shared-tensor` if
                what other weights share would change; `answer.lossy` and its like where the layout cannot hold the
                values; `source.*` for values that no checkpoint has. Nothing was written then.
        """
        found = self._checked(layer, expert, expected)
        block = _block(found, projection, rows, columns)
        return self._write(found, expert, named_tensors(found, projection, tensors), block)

    def update_expert(
        self, layer: int, expert: int, projections: Mapping[str, Any], *, expected: str | None = None
    ) -> Update:
        """Write several projections of one expert together: all of them, or none if one is refused.

        Args:
            layer: layer number.
            expert: expert, as the model counts them.
            projections: what `update` takes as `tensors`, by projection. `gate` and `up` are written as `w13`.
            expected: digest that the layer must have before the update; None: not checked.

        Raises:
            MoeqError: as `update`.
        """
        found = self._checked(layer, expert, expected)
        given: dict[str, Parts] = {}
        for projection, tensors in projections.items():
            given = merged_tensors(found, given, named_tensors(found, projection, tensors))
        return self._write(found, expert, given, None)

    def update_layer(
        self, layer: int, projection: str, weights: Tensor | Mapping[str, Tensor], *, expected: str | None = None
    ) -> Update:
        """Write one projection of all experts that this rank holds, from float weights.

        Where the gather kernel writes whole matrices without padding, experts are quantised together and one launch
        writes each part. Others are written one by one, as by `update`: if one fails, those before it are written.

        Args:
            layer: layer number.
            projection: `down`, `w13` with a mapping of `gate` and `up`, `gate_up`, `gate` or `up`.
            weights: bf16, fp16 or float32 `[experts, N, K]`, the rank's experts by their number.
            expected: digest that the layer must have before the update; None: not checked.

        Returns:
            One result for all experts. Its `projections` and `loss` are empty: rounding losses are not measured.

        Raises:
            MoeqError: as `update`.
        """
        found = self._layer(layer)
        self._check_digest(layer, expected)
        names, floats = read_layer(found, projection, weights)
        role = stacked_role(names[0])
        experts = sorted(set(found.experts))
        gather = self._gather_of(found, role)
        if gather is not None and gather.writes_all_experts_at_once and tuple(names) == found.names(role):
            with found.device:
                tall = quantize_layer(found, role, floats.to(found.device), self._rule_of(found))
                write_all((), gather.encoded_layer(regrouped(found, role, tall)))
            self._forget(found, experts, names)
            rows = tuple(range(len(found.experts)))
            return Update(None, {}, rows, len(rows) * found.row_bytes(role), 0, {})
        done = []
        with Progress() as progress:
            for expert, weight in zip(experts, floats, strict=True):
                tensors = dict(zip(names, weight.tensor_split(len(names)), strict=True))
                done.append(self.update_expert(layer, expert, tensors))
                progress.wrote(layer, [expert])
        rows = tuple(sorted(row for one in done for row in one.rows))
        written, losses = (sum(getattr(one, name) for one in done) for name in ("written_bytes", "losses"))
        digest = None if any(one.digest is None for one in done) else self.digest(layer)
        return Update(digest, {}, rows, written, losses, {})

    def digest(self, layer: int) -> str:
        """Return the digest of a layer as it was last written; unlike `snapshot` it reads no weights after the first.

        Ranks that hold whole experts begin with the digests of `moeq.json`. Others read their weights once.
        """
        found = self._layer(layer)
        held = self._digests[layer]
        held.update(read_digests(found, held))
        return layer_digest(found, held)

    def _forget(self, layer: WritableLayer, experts: Iterable[int], names: Iterable[Projection]) -> None:
        """Forget the digests of projections that were written."""
        for key in itertools.product(experts, names):
            self._digests[layer.layer].pop(key, None)

    def _gather_of(self, layer: WritableLayer, role: StackedRole) -> Gather | None:
        """Return the gather of a stacked matrix; None if none is wanted, or the gather kernel cannot write it."""
        key = (layer.layer, role)
        if key not in self._gathers:
            wanted = layer.device.type == "cuda" if self._gather is None else self._gather
            self._gathers[key] = Gather(layer, role) if wanted and obstacle(layer, role) is None else None
        return self._gathers[key]

    def _write(
        self, layer: WritableLayer, expert: int, given: Mapping[str, Parts], block: ProjectionBlock | None
    ) -> Update:
        """Prepare all of an update to an expert, then write it."""
        import torch

        places, cpu = layer.rows(expert), torch.device("cpu")
        prepared = []
        for role in STACKED_ROLES:
            tensors = {name: parts for name, parts in given.items() if stacked_role(name) == role}
            if not tensors:
                continue
            found = self._gathered(layer, role, places, tensors) if places and block is None else None
            if found is None:
                with cpu:  # only this way keeps the old bias if the update has none
                    new = read_update(layer, tensors, block, self._rule_of(layer), cpu)
                    found = self._packed(layer, role, places, new, block) if places else None
            if found is not None:
                prepared.append(found)
        queued = any(one.digests is None for one in prepared)
        if not queued:
            self.digest(layer.layer)  # reads all digests before a byte changes
        copies = [pair for one in prepared for pair in one.copies]
        write_all(copies, [write for one in prepared for write in one.writes])
        digests: dict[str, str] = {}
        known = self._digests[layer.layer]
        for one in prepared:
            if one.calibrations is not None:
                self._calibrations[layer.layer, one.role] = one.calibrations
            digests |= one.digests or {}
            self._forget(layer, [expert], one.names)
        known |= {(expert, name): digest for name, digest in digests.items()}
        return Update(
            digest=None if queued else self.digest(layer.layer),
            projections=digests,
            rows=tuple(places),
            written_bytes=len(places) * sum(layer.row_bytes(one.role) for one in prepared),
            losses=sum(one.losses for one in prepared),
            loss={name: loss for one in prepared for name, loss in one.loss.items()},
        )

    def _gathered(
        self, layer: WritableLayer, role: StackedRole, places: Sequence[int], given: Mapping[str, Parts]
    ) -> _Prepared | None:
        """Prepare an update of whole matrices for the gather kernel; None if that kernel cannot write it."""
        gather = self._gather_of(layer, role)
        if gather is None or not gather.is_whole(given):
            return None
        stored = gather.stored(given, places)
        if stored is not None:
            return _Prepared(role, layer.names(role), writes=stored)
        with layer.device:
            new = whole_matrix(layer, role, read_update(layer, given, None, self._rule_of(layer), layer.device))
            if new is None:
                return None
            return _Prepared(role, layer.names(role), *gather.encoded(new, places))

    def _packed(
        self,
        layer: WritableLayer,
        role: StackedRole,
        places: Sequence[int],
        given: Mapping[Projection, NewWeights],
        block: ProjectionBlock | None,
    ) -> _Prepared:
        """Prepare an update on the CPU."""
        new = whole_matrix(layer, role, given) if block is None else None
        rounded = any(one.weight is not None for one in given.values())
        old = read_matrix(layer, role, places[0]) if new is None or rounded else None
        loss = _rounding_losses(
            given, as_source(layer, role, old) if block is None and layer.is_whole and old else None
        )
        if new is None:
            assert old is not None  # read just above
            check_reversible(layer, role, old, places[0])
            new = merged_matrix(layer, role, old, given, block)
        layout, calibrations = self._calibrated(layer, role, places, new)
        packed, held, losses = pack(layer, layout, role, new)
        copies = [(layer.tensors[role][name][row], tensor) for row in places for name, tensor in packed.items()]
        digests: dict[str, str] = {name: value for name, value in digests_of(layer, role, held) if name in given}
        return _Prepared(role, tuple(given), copies, (), digests, losses, loss, calibrations)

    def _calibrated(
        self, layer: WritableLayer, role: StackedRole, places: Sequence[int], new: QuantizedMatrix
    ) -> tuple[Layout, list[float] | None]:
        """Return the calibrated layout and the calibrations of all rows; None where the layout needs none.

        Raises MoeqError `usage.shared-tensor` if the update would change a factor that all experts share.
        """
        if layer.layout.calibration_scope is None:
            return layer.layout, None
        padded = layer.padding.pad(new)
        value = layer.layout.calibrate(padded)
        if value is None:
            return layer.layout, None
        known = self._calibrations.get((layer.layer, role)) or calibrations_of(layer, role)
        found = list(known)
        for place in places:
            found[place] = value
        before, after = layer.layout.with_calibration(max(known)), layer.layout.with_calibration(max(found))
        shared = ("scale_factor", "global_scale")
        old_parts, new_parts = before.pack(padded), after.pack(padded)
        if any(bool((old_parts[name] != new_parts[name]).any()) for name in shared if name in old_parts):
            raise MoeqError(
                "usage.shared-tensor",
                f"layer {layer.layer} {role}: {layer.layout.calibration_scope}, and this update changes the largest "
                f"from {max(known):g} to {max(found):g}, so every expert would have to be packed anew",
                "convert the updated checkpoint again, or serve a layout without a common factor",
            )
        return after, found

    def _layer(self, layer: int) -> WritableLayer:
        if layer not in self.layers:
            known = ", ".join(map(str, sorted(self.layers)))
            raise MoeqError("usage.no-such-layer", f"this writer has no layer {layer!r}", f"its layers: {known}")
        return self.layers[layer]

    def _checked(self, layer: int, expert: int, expected: str | None) -> WritableLayer:
        """Return the layer of an update. Raises MoeqError if the layer, the expert or the digest is wrong."""
        found = self._layer(layer)
        if isinstance(expert, bool) or not isinstance(expert, int) or not 0 <= expert < found.num_experts:
            last = found.num_experts - 1
            raise MoeqError("usage.no-such-expert", f"layer {layer} has experts 0 to {last}, not {expert!r}")
        self._check_digest(layer, expected)
        return found

    def _rule_of(self, layer: WritableLayer) -> Rule:
        return self._rule or ("modelopt" if layer.scheme.quant_method == "modelopt" else "compressed-tensors")

    def _check_digest(self, layer: int, expected: str | None) -> None:
        if expected is not None and expected != self.digest(layer):
            raise MoeqError(
                "usage.stale-digest",
                f"layer {layer} has digest {self.digest(layer)[:16]}..., the update expects {expected[:16]}...",
                "an earlier update is missing or was written twice: send the whole layer",
            )


def _block(
    layer: WritableLayer, projection: str, rows: tuple[int, int] | None, columns: tuple[int, int] | None
) -> ProjectionBlock | None:
    """Check and return the block of a projection that an update writes; None for the whole projection."""
    if rows is None and columns is None:
        return None
    names = PROJECTIONS.get(projection, ())
    if len(names) != 1:
        raise MoeqError(
            "usage.illegal-slice", f"rows and columns need one projection, not {projection!r}", "name gate, up or down"
        )
    spec = wanted_spec(layer, names[0])
    block = ProjectionBlock(Range(*(rows or (0, spec.n))), Range(*(columns or (0, spec.k))))
    check_block(layer, names[0], block)
    return None if block == whole_block(spec) else block


def _check_deployment(layer: WritableLayer, deployment: Deployment | None) -> None:
    if deployment is None:
        return
    sizes = {"tp": layer.rank.tp_size, "ep": layer.rank.ep_size}
    for name, size in sizes.items():
        if getattr(deployment, name) != size:
            raise layer.unsuitable(f"the deployment has {name} {getattr(deployment, name)}, the tensors {name} {size}")


def _rounding_losses(
    given: Mapping[Projection, NewWeights], old: QuantizedMatrix | None
) -> dict[Projection, RoundingLoss]:
    """Measure the loss of every projection that was float weights.

    `old` is the stacked matrix before the update, from a rank that holds whole experts; None leaves out `old_scales`.
    """
    before = dict(split_projections(old)) if old is not None else {}
    found = {}
    for name, new in given.items():
        if new.weight is not None:
            known = _error(under_scales(new.weight, before[name]), new.weight) if name in before else None
            found[name] = RoundingLoss(_error(new.matrix, new.weight), known)
    return found


def _error(matrix: QuantizedMatrix, exact: Tensor) -> float:
    """Return the norm of a matrix's error, relative to the norm of the exact weights."""
    norm = float(exact.double().norm())
    return float((dequantize(matrix).double() - exact.double()).norm()) / norm if norm else 0.0

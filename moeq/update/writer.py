"""Write single experts of a layer in place: the same bytes as a fresh conversion of the updated checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from moeq.checkpoint.manifest import Projection, StackedRole
from moeq.deploy.deployment import Deployment
from moeq.errors import MoeqError
from moeq.layouts.base import Layout
from moeq.matrix import QuantizedMatrix
from moeq.model.shards import Range
from moeq.model.tensor_bytes import reshaped, same_matrix
from moeq.update.device import obstacle, place_all, place_matrix, places_all
from moeq.update.incoming import (
    PROJECTIONS,
    Incoming,
    Parts,
    ProjectionBlock,
    check_block,
    quantize_layer,
    read_layer,
    read_update,
)
from moeq.update.layers import WritableLayer
from moeq.update.loss import RoundingLoss, measure
from moeq.update.merge import merged_matrix, regrouped, whole_matrix
from moeq.update.quantize import Rule
from moeq.update.snapshot import Digests, as_source, digests_of, layer_digest, read_digests, read_matrix, stored_row

if TYPE_CHECKING:
    from torch import Tensor

Packed = Mapping[str, "Tensor"]


@dataclass(frozen=True)
class Update:
    """Result of writing one projection.

    Attributes:
        digest: digest of the layer after the update; None where the gather kernel wrote it without waiting for the
            device, and `Writer.digest` has to read it.
        projections: logical digest of every projection that was written, as far as this rank holds it and knows it.
        rows: rows of the stacked tensors that were written; none if other ranks hold the expert.
        written_bytes: bytes that were written.
        losses: stored numbers that the layout changed, for layouts that need `--allow-lossy`.
        loss: what rounding cost, by projection, where the update was float weights; else empty.
    """

    digest: str | None
    projections: Mapping[str, str]
    rows: tuple[int, ...]
    written_bytes: int
    losses: int
    loss: Mapping[Projection, RoundingLoss]


class Writer:
    """Writer of experts into the tensors of served layers, which keep their addresses.

    Every update is decoded, packed, unpacked and compared in scratch memory of one expert, and only then copied. If a
    copy fails, the bytes that were copied are taken back: readers find the old expert or the new one. Threads that
    read the tensors while one is written have to be kept out by the caller.

    On a GPU, whole `w13` and `w2` of layouts that are index maps are written by the gather kernel
    (`moeq.update.device`), in the order of the current stream. All other updates are packed on the CPU and copied.

    Args:
        layers: the layers, one `moeq.writable_layer` each.
        deployment: the deployment that the tensors serve; None: not checked.
        rule: library by whose arithmetic float weights are quantised; None: ModelOpt's for its own checkpoints, else
            that of compressed-tensors.
        gather: whether the gather kernel writes what it can; None: on a GPU. On a CPU it runs in Triton's interpreter.

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
        _check_shared_memory(self.layers.values())
        self._rule, self._gather = rule, gather
        self._digests: dict[int, Digests] = {number: _known_digests(layer) for number, layer in self.layers.items()}
        self._calibrations: dict[tuple[int, StackedRole], list[float]] = {}

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
                `weight` beside `bias`. Without a bias the old one stays. With `rows` or `columns`, only these.
            rows: `(start, stop)` of the output features that the tensors hold; None: all.
            columns: `(start, stop)` of the input features, in whole groups; None: all.
            expected: digest that the layer must have before the update; None: not checked.

        Raises:
            MoeqError: `usage.no-such-layer`, `usage.no-such-expert`, `usage.no-such-projection`; `usage.stale-digest`;
                `usage.illegal-slice`; `usage.update-tensors` for tensors of another form; `usage.shared-tensor` if
                what other weights share would change; `answer.lossy` and its like where the layout cannot hold the
                values; `source.*` for values that no checkpoint has. Nothing was written then.
        """
        import torch

        found = self._layer(layer)
        self._check_expert(found, expert)
        self._check_digest(layer, expected)
        block = _block(found, projection, rows, columns)
        rule = self._rule_of(found)
        places = found.rows(expert)
        if places and self._gathers(found, projection, block):
            with torch.device(found.device):
                given = read_update(found, projection, tensors, block, rule)
                role: StackedRole = "w2" if "down" in given else "w13"
                whole = whole_matrix(found, role, given)
            if whole is not None:
                return self._place(found, expert, role, places, given, whole)
        with torch.device("cpu"):  # also keeps a bias that an update leaves out
            given = read_update(found, projection, tensors, block, rule)
            role = "w2" if "down" in given else "w13"
            if not places:
                return Update(self.digest(layer), {}, (), 0, 0, {})
            return self._write(found, expert, role, places, given, block)

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
            All rows and bytes that were written. What rounding cost is not measured.

        Raises:
            MoeqError: as `update`.
        """
        import torch

        found = self._layer(layer)
        self._check_digest(layer, expected)
        names, floats = read_layer(found, projection, weights)
        role: StackedRole = "w2" if "down" in names else "w13"
        experts = sorted(set(found.experts))
        if self._gathers(found, projection, None) and places_all(found, role):
            with torch.device(found.device):
                tall = quantize_layer(found, role, floats.to(found.device), self._rule_of(found))
                place_all(found, role, regrouped(found, role, tall))
            for expert in experts:
                for name in names:
                    self._digests[layer].pop((expert, name), None)
            written = sum(tensor.nbytes for tensor in found.tensors[role].values())
            return Update(None, {}, tuple(range(len(found.experts))), written, 0, {})
        done = []
        for expert, weight in zip(experts, floats, strict=True):
            parts = weight.tensor_split(len(names))
            tensors = dict(zip(names, parts, strict=True)) if len(names) > 1 else parts[0]
            done.append(self.update(layer, expert, "w13" if len(names) > 1 else names[0], tensors))
        rows = sorted(row for one in done for row in one.rows)
        written, losses = (sum(getattr(one, name) for one in done) for name in ("written_bytes", "losses"))
        digest = None if any(one.digest is None for one in done) else self.digest(layer)
        return Update(digest, {}, tuple(rows), written, losses, {})

    def digest(self, layer: int) -> str:
        """Return the digest of a layer as it was last written; unlike `snapshot` it reads no weights after the first.

        Ranks that hold whole experts begin with the digests of `moeq.json`. Others read their weights once.
        """
        found = self._layer(layer)
        held = self._digests[layer]
        held.update(read_digests(found, held))
        return layer_digest(found, held)

    def _gathers(self, layer: WritableLayer, projection: str, block: ProjectionBlock | None) -> bool:
        """Return whether the gather kernel writes an update: it writes whole stacked matrices."""
        asked = layer.device.type == "cuda" if self._gather is None else self._gather
        names = {name for name in PROJECTIONS.get(projection, ()) if name in layer.projections}
        role: StackedRole = "w2" if "down" in names else "w13"
        whole = names in ({"down"}, {*layer.projections} - {"down"})
        return asked and block is None and whole and obstacle(layer, role) is None

    def _place(
        self,
        layer: WritableLayer,
        expert: int,
        role: StackedRole,
        places: Sequence[int],
        given: Mapping[Projection, Incoming],
        new: QuantizedMatrix,
    ) -> Update:
        """Queue the writes of a whole matrix, which lies on the device of the tensors."""
        place_matrix(layer, role, places, new)
        for name in given:
            self._digests[layer.layer].pop((expert, name), None)
        written = len(places) * sum(tensor[0].nbytes for tensor in layer.tensors[role].values())
        return Update(None, {}, tuple(places), written, 0, {})

    def _write(
        self,
        layer: WritableLayer,
        expert: int,
        role: StackedRole,
        places: Sequence[int],
        given: Mapping[Projection, Incoming],
        block: ProjectionBlock | None,
    ) -> Update:
        new = whole_matrix(layer, role, given) if block is None else None
        rounded = any(one.weight is not None for one in given.values())
        old = read_matrix(layer, role, places[0]) if new is None or rounded else None
        loss = measure(given, as_source(layer, role, old) if block is None and layer.is_whole and old else None)
        if new is None:
            assert old is not None  # read just above
            _check_reversible(layer, role, old, places[0])
            new = merged_matrix(layer, role, old, given, block)
        layout, calibrations = self._calibrated(layer, role, places, new)
        packed, held, losses = pack(layer, layout, role, new)
        self.digest(layer.layer)  # known before a byte changes
        _replace(layer, role, places, packed)
        if calibrations is not None:
            self._calibrations[layer.layer, role] = calibrations
        digests: dict[str, str] = {name: value for name, value in digests_of(layer, role, held) if name in given}
        self._digests[layer.layer] |= {(expert, name): value for name, value in digests.items()}
        written = len(places) * sum(tensor[0].nbytes for tensor in layer.tensors[role].values())
        return Update(self.digest(layer.layer), digests, tuple(places), written, losses, loss)

    def _calibrated(
        self, layer: WritableLayer, role: StackedRole, places: Sequence[int], new: QuantizedMatrix
    ) -> tuple[Layout, list[float] | None]:
        """Return the layout with what it must know of all experts, which this update must not change."""
        if layer.layout.calibration_scope is None:
            return layer.layout, None
        padded = layer.padding.pad(new)
        value = layer.layout.calibrate(padded)
        if value is None:
            return layer.layout, None
        known = self._calibrations.get((layer.layer, role)) or _calibrations(layer, role)
        found = list(known)
        for place in places:
            found[place] = value
        before, after = layer.layout.with_calibration(max(known)), layer.layout.with_calibration(max(found))
        shared = ("scale_factor", "global_scale")
        one, other = before.pack(padded), after.pack(padded)
        if any(bool((one[name] != other[name]).any()) for name in shared if name in one):
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

    def _rule_of(self, layer: WritableLayer) -> Rule:
        return self._rule or ("modelopt" if layer.scheme.quant_method == "modelopt" else "compressed-tensors")

    def _check_digest(self, layer: int, expected: str | None) -> None:
        if expected is not None and expected != self.digest(layer):
            raise MoeqError(
                "usage.stale-digest",
                f"layer {layer} has digest {self.digest(layer)[:16]}..., the update expects {expected[:16]}...",
                "an earlier update is missing or was written twice: send the whole layer",
            )

    def _check_expert(self, layer: WritableLayer, expert: int) -> None:
        if isinstance(expert, bool) or not isinstance(expert, int) or not 0 <= expert < layer.num_experts:
            last = layer.num_experts - 1
            raise MoeqError("usage.no-such-expert", f"layer {layer.layer} has experts 0 to {last}, not {expert!r}")


def pack(
    layer: WritableLayer, layout: Layout, role: StackedRole, matrix: QuantizedMatrix
) -> tuple[Packed, QuantizedMatrix, int]:
    """Pack a rank's matrix and prove the result.

    Returns:
        The packed parts, the matrix that they hold, and the stored numbers that differ from the given one.

    Raises:
        MoeqError: `bug.round-trip` if packing changed numbers without leave, and the errors of `Layout.pack`.
    """
    padded = layer.padding.pad(matrix)
    shapes = layout.tensors(padded.spec)
    packed = {name: reshaped(tensor, shapes[name].shape) for name, tensor in layout.pack(padded).items()}
    unpacked = layout.unpack(packed, padded.spec)
    if same_matrix(unpacked, padded):
        return packed, matrix, 0
    losses = layout.losses(padded) if layout.allow_lossy else 0
    if not losses:
        raise MoeqError(
            "bug.round-trip",
            f"layer {layer.layer} {role}: the packed bytes do not unpack to the update's values",
            "nothing was written; report this as a bug in moeq",
        )
    return packed, layer.padding.unpad(unpacked), losses


def _check_reversible(layer: WritableLayer, role: StackedRole, old: QuantizedMatrix, row: int) -> None:
    """Check that weights which stay keep their bytes, where packing rounds.

    Raises:
        MoeqError: `usage.shared-tensor` if packing the current values again would give other bytes.
    """
    import torch

    if not layer.layout.allow_lossy or (layer.layout.calibration_scope is not None and layer.layout.lossy is None):
        return
    layout = layer.layout
    if not layout.rounds_jointly:
        stored = stored_row(layer, role, row)
        padded = layer.padding.pad(old)
        value = layout.calibrate(padded) if layout.calibration_scope is not None else None
        again = (layout if value is None else layout.with_calibration(value)).pack(padded)
        if all(
            torch.equal(again[name].contiguous().view(-1).view(torch.uint8), stored[name].view(-1).view(torch.uint8))
            for name in stored
        ):
            return
    raise MoeqError(
        "usage.shared-tensor",
        f"layer {layer.layer} {role}: {layout.id} has rounded the weights that stay, and rounding them "
        f"again would change them: {layout.lossy}",
        f"write all of {role} in one update: projection '{role}' without rows and columns",
    )


def _replace(layer: WritableLayer, role: StackedRole, places: Sequence[int], packed: Packed) -> None:
    """Copy packed parts to their rows. If one copy fails, take the others back and raise its error."""
    import torch

    targets = [(layer.tensors[role][name][row], tensor) for row in places for name, tensor in packed.items()]
    done: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        try:
            for target, tensor in targets:
                done.append((target, target.clone()))
                target.copy_(tensor)
        except BaseException:
            for target, before in done:
                target.copy_(before)
            raise


def _known_digests(layer: WritableLayer) -> dict[tuple[int, str], str]:
    return {(expert, name): values[expert] for name, values in layer.digests.items() for expert in set(layer.experts)}


def _calibrations(layer: WritableLayer, role: StackedRole) -> list[float]:
    found = []
    for row in range(len(layer.experts)):
        value = layer.layout.calibrate(layer.padding.pad(read_matrix(layer, role, row)))
        assert value is not None  # the caller's matrix has one, and experts are alike
        found.append(value)
    return found


def _block(
    layer: WritableLayer, projection: str, rows: tuple[int, int] | None, columns: tuple[int, int] | None
) -> ProjectionBlock | None:
    """Return the block of a projection that an update writes, checked; None for all of it."""
    if rows is None and columns is None:
        return None
    names = PROJECTIONS.get(projection, ())
    if len(names) != 1:
        raise MoeqError(
            "usage.illegal-slice", f"rows and columns are those of one projection, not {projection!r}", "gate, up, down"
        )
    spec = layer.specs["w2" if names[0] == "down" else "w13"]
    n = spec.n // (2 if names[0] != "down" and spec.gated else 1)
    block = ProjectionBlock(Range(*(rows or (0, n))), Range(*(columns or (0, spec.k))))
    check_block(layer, names[0], block)
    return None if block == ProjectionBlock(Range(0, n), Range(0, spec.k)) else block


def _check_deployment(layer: WritableLayer, deployment: Deployment | None) -> None:
    if deployment is None:
        return
    sizes = {"tp": layer.rank.tp_size, "ep": layer.rank.ep_size}
    for name, size in sizes.items():
        if getattr(deployment, name) != size:
            raise layer.unsuitable(f"the deployment has {name} {getattr(deployment, name)}, the tensors {name} {size}")


def _check_shared_memory(layers: Iterable[WritableLayer]) -> None:
    """Check that no two layers share memory, as tied layers do."""
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, layer.layer)
        for layer in layers
        for parts in layer.tensors.values()
        for tensor in parts.values()
        if tensor.device.type != "meta" and tensor.nbytes
    )
    for (_, stop, one), (start, _, other) in pairwise(spans):
        if start < stop:
            raise MoeqError(
                "usage.update-target", f"layers {one} and {other} share memory", "give every layer tensors of its own"
            )

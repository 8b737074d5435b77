"""One item of a unit: read, decode, write in the target's spelling, decode what was written, compare. Any thread.

Most items take the fast path (`moeq.transcode.fast_item`), which gives the same bytes. An item that it does not handle,
or cannot handle exactly, takes the reference path, which decodes to logical matrices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from moeq.checkpoint.disk import read_at
from moeq.checkpoint.header import DTYPE_BITS
from moeq.checkpoint.names import StoredName
from moeq.checkpoint.writer import Sink, tensor_bytes
from moeq.errors import MoeqError
from moeq.model import Checkpoint
from moeq.model.expert_kinds import WHOLE_PARTS
from moeq.model.quantized_modules import read_module
from moeq.model.regroup import repeat_groups
from moeq.pipeline.pack.inputs import Buffers, InputFile, Writes, read_places
from moeq.pipeline.pack.memory import Need, SpareMemory
from moeq.pipeline.pack.unit_worker import UnitWorker
from moeq.pipeline.plan.job import Work
from moeq.pipeline.state.records import Bytes, piece_digest
from moeq.schemes.registry import get_format
from moeq.spelling import option
from moeq.transcode import act_order
from moeq.transcode.compare import Loss, compare, measured_loss
from moeq.transcode.find_fast_item import FastPaths
from moeq.transcode.spellings import BLOCK, FP8_BLOCKS, KT_AMX, pack
from moeq.transcode.transcode_plan import ExpertItem, Item, TranscodePlan, TranscodeUnit, WrittenProjection, item_specs

if TYPE_CHECKING:
    from torch import Tensor

    from moeq.matrix import QuantizedMatrix
    from moeq.pipeline.pack.fast.path import Inputs
    from moeq.transcode.fast_item import CachedItem, FastItem

    #: A fast path and the stored bytes that it reads.
    Fetched = tuple[FastItem | CachedItem, Inputs]


#: Peak bytes that one thread holds per number of a projection: codes and words of both sides, and buffers of packing.
_NUMBER_BYTES = 12


@dataclass(frozen=True)
class TranscodedItem:
    """Result of transcoding one item."""

    written: int  #: bytes
    hashes: tuple[bytes, ...]  #: BLAKE3 of every piece, in order
    losses: tuple[Loss, ...]  #: changes of projections and of static scales


class Transcoder(UnitWorker[TranscodeUnit, Item]):
    """Executes one `TranscodeUnit`, item by item."""

    _plan: TranscodePlan

    def __init__(
        self, work: Work, unit: TranscodeUnit, inputs: Mapping[str, InputFile], output: Sink, spare: SpareMemory
    ) -> None:
        super().__init__(work, unit, inputs, output, spare)
        self._form = self._plan.file(unit.file).form
        self._paths = FastPaths(self._checkpoint, self._plan, self._form)

    @classmethod
    def need(cls, work: Work, unit: TranscodeUnit) -> Need:
        assert isinstance(work.plan, TranscodePlan)
        # Experts of a unit are alike; modules are not.
        distinct = unit.items[:1] if isinstance(unit.items[0], ExpertItem) else unit.items
        numbers = max(sum(spec.n * spec.k for spec in item_specs(work.plan, item)) for item in distinct)
        return Need("transcode", reference=_NUMBER_BYTES * numbers)

    @property
    def items(self) -> Sequence[Item]:
        return self._unit.items

    def label(self, item: Item) -> str:
        return f"layer {item.layer} {item.role} expert {item.expert}" if isinstance(item, ExpertItem) else item.name

    def read(self, item: Item, buffers: Buffers, slot: int) -> Fetched | None:
        path = self._paths.find(item)
        if path is None:
            return None
        data = read_places(self._inputs, self._paths.places(item, path.reads), buffers, slot)
        return path, dict(zip(path.reads, data, strict=True))

    def pack(self, item: Item, data: Fetched | None, buffers: Buffers, slot: int) -> tuple[TranscodedItem, Writes]:
        """Transcode one item and prove it. Raises MoeqError, `answer.not-exact` too unless losses are allowed."""
        found = None if data is None else self._on_fast_path(item, *data, buffers, slot)
        return (self._on_reference_path(item), ()) if found is None else found

    def _on_fast_path(
        self, item: Item, path: FastItem | CachedItem, inputs: Inputs, buffers: Buffers, slot: int
    ) -> tuple[TranscodedItem, Writes] | None:
        """Transcode an item by its fast path; None if the result is not proven."""
        outputs = self._plan.outputs(item, self._form)
        keys = [(name, part) for name, output in outputs.items() for part in output.signatures]
        signatures = (outputs[name].signatures[part] for name, part in keys)
        sizes = [tensor_bytes(signature.shape, signature.dtype) for signature in signatures]
        places = [outputs[name].places.get(part, (0, 0))[0] for name, part in keys]
        memory = dict(zip(keys, buffers.take_many(f"output {slot}", sizes, places), strict=True))
        changes = path.transcode(inputs, memory, buffers.take("scratch", path.scratch_bytes))
        if changes is None:
            return None
        found = []
        for output, change in zip(outputs.values(), changes, strict=True):
            spec = output.projected.spec
            found.append(measured_loss(output.module, change, (spec.n, spec.k), _block(output)))
        if any(found) and not self._plan.request.allow_lossy:
            return None
        carried, changed = self._carried(item, outputs)
        losses = [loss for loss in found if loss is not None] + changed
        written = []
        for name, output in outputs.items():
            for part, (start, stop) in output.places.items():
                data = carried.get((name, part))
                if data is None:
                    data = self._with_experts(item, part, output, memory[name, part])
                _require_size(output, part, data, stop - start)
                written.append((data, start))
        hashes = tuple(piece_digest(data) for data, _ in written)
        return TranscodedItem(sum(data.nbytes for data, _ in written), hashes, tuple(losses)), tuple(written)

    def _carried(
        self, item: Item, outputs: Mapping[StoredName, WrittenProjection]
    ) -> tuple[dict[tuple[StoredName, str], Bytes], list[Loss]]:
        """Convert static scales of activations; return their bytes by projection and part, and the scales' losses.

        Raises MoeqError `answer.not-exact` if one changes and that was not allowed; `source.bad-data`.
        """
        found: dict[tuple[StoredName, str], Bytes] = {}
        losses: list[Loss] = []
        for name, output in outputs.items():
            scale = output.projected.activation
            if scale is None:
                continue
            file, start, stop = self._paths.places(item, [(name, scale.source)])[0]
            stored = np.empty(stop - start, np.uint8)
            if read_at(self._inputs[file].fd, stored.data, start) < stored.nbytes:
                raise MoeqError("source.truncated", f"{file}: ended before byte {stop:,} while being read")
            found[name, scale.target], loss = scale.converted(stored, output.module)
            if loss is not None:
                losses.append(loss)
        if losses and not self._plan.request.allow_lossy:
            raise _not_exact(losses[0], self._plan)
        return found, losses

    def _with_experts(self, item: Item, part: str, output: WrittenProjection, data: Bytes) -> Bytes:
        """Put the number of experts in front of a stored shape if experts are stacked; return other parts unchanged."""
        if part not in WHOLE_PARTS or not isinstance(item, ExpertItem):
            return data
        layer = self._plan.layers_by_number[item.layer]
        if not layer.naming.stacked:
            return data
        width = DTYPE_BITS[output.signatures[part].dtype] // 8
        return np.concatenate([np.frombuffer(len(layer.kinds).to_bytes(width, "little"), np.uint8), data])

    def _on_reference_path(self, item: Item) -> TranscodedItem:
        from moeq.model.tensor_bytes import as_bytes, one_torch_thread

        one_torch_thread()
        outputs = self._plan.outputs(item, self._form)
        carried, changed = self._carried(item, outputs)
        matrices = read_item(self._checkpoint, self._plan, item, list(outputs))
        stored: dict[StoredName, dict[str, Tensor]] = {}
        losses: list[Loss] = []
        for name, recoded in _recoded(self._plan, outputs, matrices).items():
            output, before = outputs[name], matrices[name]
            stored[name] = _stored(output, recoded, before.bias)
            loss = compare(output.module, before, decode(output, stored[name]), _block(output))
            if loss is not None and not self._plan.request.allow_lossy:
                raise _not_exact(loss, self._plan)
            losses += [] if loss is None else [loss]
        written, hashes = 0, list[bytes]()
        for name, output in outputs.items():
            for part, (start, stop) in output.places.items():
                data = carried.get((name, part))
                if data is None:
                    octets = np.frombuffer(as_bytes(stored[name][part]), np.uint8)
                    data = self._with_experts(item, part, output, octets)
                _require_size(output, part, data, stop - start)
                self._output.write(data.data, start)
                hashes.append(piece_digest(data))
                written += data.nbytes
        return TranscodedItem(written, tuple(hashes), (*losses, *changed))

    def _findings(self, results: Sequence[TranscodedItem]) -> dict[str, Any]:
        losses = [loss for result in results for loss in result.losses]
        return {
            "losses": sum(loss.numbers for loss in losses),
            "differences": tuple(loss.to_json() for loss in losses),
        }


def _require_size(output: WrittenProjection, part: str, data: Bytes, size: int) -> None:
    if data.nbytes != size:
        raise ValueError(f"{output.module}.{part} has {data.nbytes} bytes, but its place has {size}")


def read_item(
    checkpoint: Checkpoint, plan: TranscodePlan, item: Item, projections: Sequence[StoredName]
) -> dict[StoredName, QuantizedMatrix]:
    """Read the source's matrices, with rows in the target's order. Raises MoeqError as `Checkpoint.matrix`."""
    from moeq.model.stored_parts import interleaved

    if not isinstance(item, ExpertItem):
        matrix = read_module(checkpoint.source, plan.modules_by_name[item.name].source, item.rows)
        return {"down": act_order.require_sorted(matrix, item.name) if plan.request.sort_act_order else matrix}
    layer, expert = item.layer, item.expert
    naming = plan.layers_by_number[layer].naming
    found: dict[StoredName, QuantizedMatrix] = {}
    for projection in projections:
        if projection == "gate_up":
            joined = checkpoint.matrix(layer, expert, "w13")
            found[projection] = interleaved(joined) if naming.interleaved else joined
        else:
            found[projection] = checkpoint.matrix(layer, expert, projection)
    return _sorted(checkpoint, item, found) if plan.request.sort_act_order else found


def _sorted(
    checkpoint: Checkpoint, item: ExpertItem, matrices: dict[StoredName, QuantizedMatrix]
) -> dict[StoredName, QuantizedMatrix]:
    """Sort columns of the down projection in the order of their groups, or rows of gate and up in that same order."""
    where = f"{checkpoint.expert_prefix(item.layer)} expert {item.expert}"
    if item.role == "w2":
        down = matrices["down"]
        return {"down": act_order.sort_columns(down, act_order.column_order(down))}
    order = act_order.column_order(checkpoint.matrix(item.layer, item.expert, "down"))
    return {
        name: act_order.sort_rows(act_order.require_sorted(matrix, f"{where} {name}"), order)
        for name, matrix in matrices.items()
    }


def _recoded(
    plan: TranscodePlan, outputs: Mapping[StoredName, WrittenProjection], matrices: Mapping[StoredName, QuantizedMatrix]
) -> dict[StoredName, QuantizedMatrix | Tensor]:
    """Recode matrices to the target's codes and scales, or to floats."""
    from moeq.transcode import recode_matrices as recode

    first = next(iter(outputs.values())).projected
    if "nvfp4" in first.spelling and first.source.spec.scale_dtype == "e8m0":
        names = list(outputs)
        specs = [outputs[name].projected.spec for name in names]
        found = recode.to_e4m3_scales([matrices[name] for name in names], specs)
        return dict(zip(names, found, strict=True))
    results: dict[StoredName, QuantizedMatrix | Tensor] = {}
    for name, output in outputs.items():
        matrix, spec = matrices[name], output.projected.spec
        _check_order(matrix, output)
        if output.projected.spec.bits > 8:
            results[name] = recode.to_floats(matrix, spec.element)
        elif output.projected.spelling.startswith(KT_AMX):
            results[name] = recode.to_kt_amx(matrix, spec)
        elif output.projected.spelling in FP8_BLOCKS:
            results[name] = recode.to_fp8_blocks(matrix, spec)
        elif spec.group_size != matrix.spec.group_size:
            results[name] = repeat_groups(matrix, spec)
        elif spec.scale_dtype != matrix.spec.scale_dtype:
            results[name] = replace(matrix, spec=spec, scales=matrix.scales.float())
        else:
            results[name] = replace(matrix, spec=spec)
    return results


def _check_order(matrix: QuantizedMatrix, output: WrittenProjection) -> None:
    """Require the columns to be in the order that headers and config promised."""
    if matrix.group_index is not None and not output.projected.source.spec.act_order:
        raise MoeqError(
            "source.inconsistent",
            f"{output.module}: g_idx is out of order although the config says desc_act: false",
            "correct the quantisation config: desc_act has to be true",
        )


def _stored(output: WrittenProjection, recoded: QuantizedMatrix | Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    from moeq.matrix import QuantizedMatrix

    if isinstance(recoded, QuantizedMatrix):
        _check_zeros(recoded, output)
        return pack(recoded, output.packed, output.described.scheme, output.module)
    weight = recoded.t().contiguous() if output.projected.spelling == "plain-transposed" else recoded
    return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}


def _check_zeros(matrix: QuantizedMatrix, output: WrittenProjection) -> None:
    """Refuse zero points of 0 in GPTQ v1, which stores them minus one: readers disagree about them.

    Raises MoeqError `answer.zero-points`.
    """
    if matrix.zeros is None or output.described.scheme.zero_point != "stored-minus-one":
        return
    zero = int((matrix.zeros == 0).sum())
    if zero:
        raise MoeqError(
            "answer.zero-points",
            f"{output.module}: {zero:,} of {matrix.zeros.numel():,} zero points are 0; GPTQ v1 stores them minus one, "
            "and its readers disagree about -1",
            f"{option('to', 'gptq_v2')} stores zero points as they are",
        )


def decode(output: WrittenProjection, stored: Mapping[str, Tensor]) -> QuantizedMatrix | Tensor:
    """Decode the bytes of a projection's tensors as its reader does. Raises ValueError if sizes differ (a bug)."""
    from moeq.checkpoint.source import tensor_of
    from moeq.model.tensor_bytes import as_bytes

    found = {
        part: tensor_of(bytearray(as_bytes(stored[part])), signature.dtype, signature.shape, part)
        for part, signature in output.packed.items()
    }
    if output.projected.spec.bits > 8:
        return found["weight"].t() if output.projected.spelling == "plain-transposed" else found["weight"]
    scheme = output.described.scheme
    return get_format(scheme.format).unpack(found, output.described.spec, scheme)


def _block(output: WrittenProjection) -> tuple[int, int]:
    """Return rows and columns that share a scale in the target; for floats, in the source."""
    if output.projected.spelling in FP8_BLOCKS:
        return BLOCK, BLOCK
    spec = output.projected.source.spec if output.projected.spec.bits > 8 else output.projected.spec
    return 1, spec.group_size


def _not_exact(loss: Loss, plan: TranscodePlan) -> MoeqError:
    return MoeqError(
        "answer.not-exact",
        f"{option('to', plan.target.id)} cannot hold all values: {loss.text}",
        f"{option('allow_lossy', True)} writes the nearest values and reports every projection; "
        f"{option('check_only', True)} counts them all",
    )

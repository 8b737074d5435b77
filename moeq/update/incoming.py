"""Turn the tensors of an update into logical matrices: packed as the checkpoint packs them, or floats to quantise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moeq.checkpoint.manifest import Projection, StackedRole, stacked_role
from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec, QuantizedMatrix, Role, projection_spec
from moeq.model.quantized_modules import decode
from moeq.model.shards import Range
from moeq.schemes.base import Scheme
from moeq.schemes.declared import Declared
from moeq.schemes.dequantize import check_matrix
from moeq.schemes.format import Context, PartSig
from moeq.schemes.joining import select_rows
from moeq.schemes.registry import get_format
from moeq.update.layers import WritableLayer
from moeq.update.quantize import Rule, nvfp4_global_scale, quantize

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Tensors of one projection by part (`qweight`, `weight_packed`, ...), or its float weights `[N, K]` alone.
Parts = Mapping[str, "Tensor"]

#: Projections by what an update may name: `w13` takes a mapping of `gate` and `up`, `gate_up` one fused tensor.
PROJECTIONS: Mapping[str, tuple[Projection, ...]] = {
    "gate": ("gate",),
    "up": ("up",),
    "down": ("down",),
    "w2": ("down",),
    "w13": ("gate", "up"),
    "gate_up": ("gate", "up"),
}


@dataclass(frozen=True)
class NewWeights:
    """New weights of one projection.

    Attributes:
        matrix: the codes and scales that are written.
        weight: the float weights `[N, K]` of which they were made, or None.
    """

    matrix: QuantizedMatrix
    weight: Tensor | None = None


@dataclass(frozen=True)
class ProjectionBlock:
    """Output features `rows` and input features `columns` of one projection."""

    rows: Range
    columns: Range

    def spec_of(self, spec: MatrixSpec) -> MatrixSpec:
        """Return the spec of this block of a projection. Groups are whole, except for the last of the matrix."""
        found = replace(spec, n=self.rows.size)
        if self.columns.size == spec.k:
            return found
        return replace(found, k=self.columns.size, group_size=min(spec.group_size, self.columns.size))


def whole_block(spec: MatrixSpec) -> ProjectionBlock:
    """Return the block that is the whole projection."""
    return ProjectionBlock(Range(0, spec.n), Range(0, spec.k))


def check_block(layer: WritableLayer, projection: str, block: ProjectionBlock) -> None:
    """Check that a block can be written by itself.

    Raises MoeqError `usage.illegal-slice` for bounds outside the matrix or inside a group, `usage.shared-tensor` where
    the rest of the matrix shares a scale or an order with the block.
    """
    spec = wanted_spec(layer, projection)
    where = f"layer {layer.layer} {projection}"
    for axis, part, size in (("row", block.rows, spec.n), ("column", block.columns, spec.k)):
        if not 0 <= part.start < part.stop <= size:
            detail = f"{where}: {axis}s {part.start} .. {part.stop} are empty or outside 0 .. {size}"
            raise MoeqError("usage.illegal-slice", detail)
    if block == whole_block(spec):
        return
    if spec.act_order:
        raise _shared(where, "act-order sorts all columns of the matrix in one order")
    columns, rows = block.columns, layer.scheme.weight.scale.group_shape[0]
    if columns.size < spec.k and spec.num_groups == 1:
        raise _shared(where, "one scale belongs to all columns of a row")
    _check_units(where, "column", columns, spec.k, spec.group_size)
    if rows < 0:
        raise _shared(where, "one scale belongs to the whole matrix")
    _check_units(where, "row", block.rows, spec.n, rows)


def _check_units(where: str, axis: str, part: Range, size: int, unit: int) -> None:
    if part.start % unit or (part.stop % unit and part.stop != size):
        raise MoeqError(
            "usage.illegal-slice",
            f"{where}: {axis}s {part.start} .. {part.stop} cut a scale's block of {unit} "
            f"({part.start} % {unit} = {part.start % unit}, {part.stop} % {unit} = {part.stop % unit})",
            f"{axis}s {part.start // unit * unit} .. {min(-(-part.stop // unit) * unit, size)} are whole blocks",
        )


def _shared(where: str, why: str) -> MoeqError:
    return MoeqError("usage.shared-tensor", f"{where} has no slices: {why}", "write the whole projection")


def named_tensors(layer: WritableLayer, projection: str, tensors: object) -> dict[str, Parts]:
    """Return the tensors of an update by projection: `gate`, `up`, `down`, or `gate_up` for a fused tensor.

    `projection` is a key of `PROJECTIONS`. `tensors` are parts by name or a float tensor `[N, K]`; for `w13` a mapping
    of both halves to such tensors.

    Raises MoeqError `usage.no-such-projection`; `usage.update-tensors` for what is no tensor.
    """
    names = _names(layer, projection)
    if projection == "gate_up" and len(names) == 2:
        return {"gate_up": _parts(layer, "gate_up", tensors)}
    if projection != "w13":
        return {names[0]: _parts(layer, names[0], tensors)}
    if not isinstance(tensors, Mapping) or tensors.keys() != set(names):
        raise _unfit(layer, "w13", f"pass a mapping with the tensors of {' and '.join(names)}")
    return {name: _parts(layer, name, tensors[name]) for name in names}


def merged_tensors(layer: WritableLayer, given: Mapping[str, Parts], more: Mapping[str, Parts]) -> dict[str, Parts]:
    """Merge two mappings of tensors. Raises MoeqError `usage.update-tensors` if a projection is in both."""
    named = [{"gate", "up"} if name == "gate_up" else {name} for name in (*given, *more)]
    if sum(map(len, named)) > len(set().union(*named)):
        raise _unfit(layer, " and ".join([*given, *more]), "a projection is given twice")
    return {**given, **more}


def _parts(layer: WritableLayer, name: str, tensors: object) -> Parts:
    import torch

    if isinstance(tensors, torch.Tensor):
        tensors = {"weight": tensors}
    if not isinstance(tensors, Mapping) or not all(isinstance(one, torch.Tensor) for one in tensors.values()):
        raise _unfit(layer, name, f"a tensor or tensors by part are needed, not {type(tensors).__name__}")
    return {part: one.detach() for part, one in tensors.items()}


def read_update(
    layer: WritableLayer,
    given: Mapping[str, Parts],
    block: ProjectionBlock | None,
    rule: Rule,
    device: torch.device,
) -> dict[Projection, NewWeights]:
    """Decode or quantise the tensors of an update to `w13` or `w2`, and return new weights by projection.

    Args:
        given: tensors as `named_tensors` returns them.
        block: part of the projection that the tensors hold; None: all of it.
        device: device that decodes or quantises; the caller has made it torch's default.

    Raises MoeqError `usage.update-tensors` if the tensors are not the checkpoint's own form; `source.*` for values that
    no checkpoint has.
    """
    here = {name: {part: one.to(device) for part, one in parts.items()} for name, parts in given.items()}
    if "gate_up" in here:
        return _fused(layer, here["gate_up"], rule)
    shared = _common_global_scale(layer, here, rule) if len(here) > 1 else None
    return {name: _matrix(layer, name, parts, block, rule, shared) for name, parts in here.items()}  # type: ignore[misc]


def read_layer(
    layer: WritableLayer, projection: str, weights: Tensor | Mapping[str, Tensor]
) -> tuple[list[Projection], Tensor]:
    """Return projections and their float weights `[experts, rows, K]`, with rows in the order of the stacked matrix.

    `projection` is a key of `PROJECTIONS`. `weights` are `[experts, N, K]` for all experts of a rank; for `w13` a
    mapping with a tensor for `gate` and one for `up`. Raises MoeqError `usage.no-such-projection`,
    `usage.update-tensors`.
    """
    import torch

    names = _names(layer, projection)
    fused = projection == "gate_up" and len(names) == 2
    wanted: list[str] = ["gate_up"] if fused else [*names]
    given = dict(weights) if isinstance(weights, Mapping) else {wanted[0]: weights}
    if given.keys() != set(wanted):
        raise _unfit(layer, projection, f"pass the weights of {' and '.join(wanted)}")
    spec, held = wanted_spec(layer, wanted[0]), len(set(layer.experts))
    for name, tensor in given.items():
        shape = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        if shape != [held, spec.n, spec.k] or tensor.dtype not in _float_dtypes():
            raise _unfit(layer, name, f"float weights {[held, spec.n, spec.k]} are needed, not {shape}")
    found = torch.cat([given[name].detach() for name in wanted], dim=1)
    if not fused:
        return names, found
    if layer.interleaved is None:
        raise _unordered(layer)
    return names, torch.cat([found[:, ::2], found[:, 1::2]], dim=1) if layer.interleaved else found


def quantize_layer(layer: WritableLayer, role: StackedRole, weights: Tensor, rule: Rule) -> QuantizedMatrix:
    """Quantise the float weights of many experts, `[experts, N, K]`, as one matrix `[experts * N, K]`."""
    tall = weights.flatten(0, 1)
    rows = layer.scheme.weight.scale.group_shape[0]
    found = quantize(tall, replace(layer.specs[role], n=len(tall)), rule, rows=rows)
    check_matrix(found, f"layer {layer.layer} {role}")
    return found


def _common_global_scale(layer: WritableLayer, given: Mapping[str, Parts], rule: Rule) -> Tensor | None:
    """Return the second-level scale that NVFP4 gives to float gate and up rows together; None in other cases."""
    import torch

    if layer.scheme.weight.scale2 is None or not all(is_float(parts) for parts in given.values()):
        return None
    scales = torch.cat([nvfp4_global_scale(parts["weight"], rule) for parts in given.values()])
    return (scales.max() if rule == "modelopt" else scales.min()).reshape(1)


def _fused(layer: WritableLayer, tensors: Parts, rule: Rule) -> dict[Projection, NewWeights]:
    """Read a tensor of gate and up rows, in the order in which the source's family stores them."""
    if layer.interleaved is None:
        raise _unordered(layer)
    found: dict[Projection, NewWeights] = {}
    read = _matrix(layer, "gate_up", tensors, None, rule)
    half = read.matrix.spec.n // 2
    order: tuple[tuple[Projection, int], ...] = (("gate", 0), ("up", 1))
    for name, start in order:
        spec = wanted_spec(layer, name)
        matrix = select_rows(read.matrix, spec, first=name == "gate", interleaved=layer.interleaved)
        rows = slice(start, None, 2) if layer.interleaved else slice(start * half, (start + 1) * half)
        found[name] = NewWeights(matrix, None if read.weight is None else read.weight[rows])
    return found


def _names(layer: WritableLayer, projection: str) -> list[Projection]:
    """Return the projections of an expert that an update names."""
    names = [name for name in PROJECTIONS.get(projection, ()) if name in layer.projections]
    if not names:
        known = ", ".join(PROJECTIONS)
        raise MoeqError(
            "usage.no-such-projection", f"an expert has no projection {projection!r}", f"projections: {known}"
        )
    return names


def _unordered(layer: WritableLayer) -> MoeqError:
    return _unfit(layer, "gate_up", "nothing says whether its rows are two halves or alternate; pass w13")


def wanted_spec(layer: WritableLayer, name: str) -> MatrixSpec:
    """Return the spec of `gate`, `up`, `down` or `gate_up` of a whole expert."""
    role: Role = "w13" if name == "gate_up" else name  # type: ignore[assignment]
    return projection_spec(layer.specs[stacked_role(name)], role)


def _matrix(
    layer: WritableLayer,
    name: str,
    tensors: Parts,
    block: ProjectionBlock | None,
    rule: Rule,
    shared: Tensor | None = None,
) -> NewWeights:
    whole = wanted_spec(layer, name)
    wanted = whole if block is None else block.spec_of(whole)
    if is_float(tensors) and wanted.bits <= 8:
        return _quantized(layer, name, tensors, wanted, rule, shared)
    return NewWeights(_decoded(layer, name, tensors, wanted))


def is_float(tensors: Parts) -> bool:
    """Return whether a projection is given as float weights, which have to be quantised."""
    return "weight" in tensors and tensors["weight"].dtype in _float_dtypes()


def _float_dtypes() -> tuple[torch.dtype, ...]:
    """Return the dtypes of weights that are not quantised."""
    import torch

    return (torch.bfloat16, torch.float16, torch.float32)


def _quantized(
    layer: WritableLayer,
    projection: str,
    tensors: Parts,
    wanted: MatrixSpec,
    rule: Rule,
    shared: Tensor | None,
) -> NewWeights:
    weight, more = tensors["weight"], tensors.keys() - {"weight", "bias"}
    if more:
        raise _unfit(layer, projection, f"float weights must come without {', '.join(sorted(more))}")
    if tuple(weight.shape) != (wanted.n, wanted.k):
        raise _unfit(layer, projection, f"the weights are {list(weight.shape)}, not {[wanted.n, wanted.k]}")
    bias = tensors.get("bias")
    if bias is not None and (tuple(bias.shape) != (wanted.n,) or wanted.bias_dtype is None):
        raise _unfit(layer, projection, f"bias is {list(bias.shape)}, the layer has {wanted.bias_dtype} [{wanted.n}]")
    rows = layer.scheme.weight.scale.group_shape[0]
    found = replace(quantize(weight, wanted, rule, rows=rows, global_scale=shared), bias=bias)
    check_matrix(found, f"layer {layer.layer} {projection}")
    return NewWeights(found, weight)


def _decoded(layer: WritableLayer, name: str, tensors: Parts, wanted: MatrixSpec) -> QuantizedMatrix:
    """Decode tensors in the checkpoint's own form, after checking that their headers describe the wanted matrix."""
    found = check_form(layer, name, tensors, wanted)
    where = f"layer {layer.layer} {name}"
    matrix = decode(tensors, replace(wanted, bias_dtype=found.bias_dtype), layer.scheme, where)
    if matrix.spec.act_order != wanted.act_order:
        raise _unfit(layer, name, "g_idx and the act-order of the layer contradict each other")
    return replace(matrix, spec=wanted)


def check_form(layer: WritableLayer, name: str, tensors: Parts, wanted: MatrixSpec) -> MatrixSpec:
    """Return the spec that the dtypes and shapes of stored tensors describe.

    Raises MoeqError `usage.update-tensors` unless it is the wanted one, with or without a bias.
    """
    known, where = get_format(layer.scheme.format), f"layer {layer.layer} {name}"
    sigs = {part: PartSig(_stored_dtype(tensor), tuple(tensor.shape)) for part, tensor in tensors.items()}
    context = Context(where, wanted.role, _declared(layer.scheme), wanted.k, wanted.gated)
    if not known.matches(sigs, context.declared):
        shown = ", ".join(f"{part} {sig.dtype}{list(sig.shape)}" for part, sig in sorted(sigs.items())) or "nothing"
        raise _unfit(layer, name, f"the layer's form is {known.title}, these tensors are {shown}")
    try:
        found = known.describe(sigs, context).spec
    except MoeqError as error:
        raise MoeqError("usage.update-tensors", error.message, error.hint) from None
    if "bias" not in sigs:
        found = replace(found, bias_dtype=wanted.bias_dtype)
    if replace(found, act_order=wanted.act_order, role=wanted.role, gated=wanted.gated) != wanted:
        raise _unfit(layer, name, f"the tensors hold {_text(found)}, but the layer holds {_text(wanted)}")
    return found


def _text(spec: MatrixSpec) -> str:
    zeros = "symmetric" if spec.symmetric else "with zero points"
    return (
        f"{spec.element} [{spec.n}, {spec.k}] {zeros} in groups of {spec.group_size}, {spec.scale_dtype} scales, "
        f"bias {spec.bias_dtype}"
    )


def _unfit(layer: WritableLayer, projection: str, why: str) -> MoeqError:
    return MoeqError(
        "usage.update-tensors",
        f"layer {layer.layer} {projection}: {why}",
        f"pass the parts as the source stores them ({layer.scheme.title}), or float weights [N, K]",
    )


def _stored_dtype(tensor: Tensor) -> str:
    import torch

    names = {
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e8m0fnu: "F8_E8M0",
        torch.uint8: "U8",
        torch.int8: "I8",
        torch.int16: "I16",
        torch.int32: "I32",
        torch.int64: "I64",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float32: "F32",
    }
    return names.get(tensor.dtype, str(tensor.dtype))


def _declared(scheme: Scheme) -> Declared:
    """Return what a config would declare for a scheme."""
    rows, group = scheme.weight.scale.group_shape
    blocks = scheme.weight.scale.granularity == "block"
    return Declared(
        method=scheme.quant_method,
        variant=scheme.checkpoint_format,
        bits=scheme.bits,
        group_size=None if blocks else group,
        symmetric=scheme.weight.symmetric,
        act_order=scheme.act_order,
        strategy=scheme.weight.scale.granularity,
        block=(rows, group) if blocks else None,
        activation=scheme.activation,
        writer=scheme.writer,
        rule="the converted checkpoint",
    )

"""Write experts into tensors on a GPU by the gather kernel, without copying packed experts or waiting for the writes.

Work is queued on the current stream, so that later kernels of that stream, captured graphs included, read the new
weights. Other streams have to wait for an event of this one, as for any tensor that is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from moeq.checkpoint.manifest import StackedRole
from moeq.layouts.fp8 import Fp8Layout
from moeq.layouts.layout import Layout
from moeq.layouts.marlin.wna16 import MarlinActOrder
from moeq.layouts.parts import as_stored, torch_dtype
from moeq.matrix import QuantizedMatrix
from moeq.schemes.registry import get_format
from moeq.update.incoming import Parts, check_form, is_float, wanted_spec
from moeq.update.layers import WritableLayer
from moeq.update.packing import Copies
from moeq.update.placing import placement_of

if TYPE_CHECKING:
    from torch import Tensor

    from moeq_kernels.index_maps import Placement
    from moeq_kernels.placement import Write


def obstacle(layer: WritableLayer, role: StackedRole) -> str | None:
    """Return why the gather kernel cannot write a stacked matrix, which is then packed on the CPU; None if it can."""
    layout, spec = layer.layout, layer.padded(role)
    if not layout.is_index_map():
        return f"{layout.id} is more than an index map"
    if layout.calibration_scope is not None:
        return layout.calibration_scope
    if isinstance(layout, MarlinActOrder):
        return "act-order sorts the columns of every expert"
    if layout.lossy is not None and not layout.rearranges:
        return f"values may not fit, so that they have to be looked at: {layout.lossy}"
    if any(placement is None for placement in placements(layer, role).values()):
        return f"{layout.id} stores up rows before gate rows, or padding between them"
    stored = layout.tensors(spec)
    for name, tensor in layer.tensors[role].items():
        if tensor.dtype != torch_dtype(stored[name].dtype):
            return f"{role}_{name} is {tensor.dtype}, but the layout stores {stored[name].dtype}"
    return None


def placements(layer: WritableLayer, role: StackedRole) -> dict[str, Placement | None]:
    """Return where the gather kernel writes the words of every part of a stacked matrix; None for parts it cannot."""
    layout, spec = layer.layout, layer.padded(role)
    return {name: placement_of(part, layout.element_shape(part, spec)) for name, part in layout.parts(spec).items()}


class Gather:
    """Planner of the gather kernel's writes into one stacked matrix that has no `obstacle`."""

    def __init__(self, layer: WritableLayer, role: StackedRole) -> None:
        self._layer, self._role = layer, role
        names: tuple[str, ...] = layer.names(role)
        self._specs = {name: wanted_spec(layer, name) for name in (*names, *(["gate_up"] if len(names) == 2 else []))}
        self._forms: set[object] = set()  #: dtypes and shapes of stored tensors that fit

    def is_whole(self, given: Mapping[str, Parts]) -> bool:
        """Return whether an update names all rows of the matrix."""
        return sum(self._specs[name].n for name in given) == self._layer.specs[self._role].n

    @cached_property
    def writes_all_experts_at_once(self) -> bool:
        """Whether the experts of a rank are quantised and written together, one launch for each part.

        The rows of all experts then make up one tall matrix: nothing is padded or cut, and no number belongs to a
        whole expert.
        """
        layer, role = self._layer, self._role
        weight = layer.scheme.weight
        shared_rows = weight.scale.group_shape[0]
        return (
            layer.padded(role) == layer.written[role]
            and layer.specs[role].bias_dtype is None
            and weight.scale2 is None
            and shared_rows > 0
            and self._specs[layer.names(role)[0]].n % shared_rows == 0
            and not layer.layout.extra_tensors(layer.padded(role))
            and list(layer.experts) == sorted(set(layer.experts))
        )

    @cached_property
    def _placements(self) -> dict[str, Placement]:
        return {name: one for name, one in placements(self._layer, self._role).items() if one is not None}

    def encoded(self, matrix: QuantizedMatrix, rows: Sequence[int]) -> tuple[Copies, list[Write]]:
        """Return the copies and writes of a rank's matrix, on the tensors' device, into some rows of the tensors.

        Raises MoeqError: the errors of `Layout.check_values`.
        """
        import torch

        from moeq_kernels.placement import Write

        layout, padded = self._layer.layout, self._layer.padding.pad(matrix)
        targets = self._layer.tensors[self._role]
        layout.check_values(padded)
        found = []
        for name, placement in self._placements.items():
            elements = layout.encode(name, padded)
            found += [Write(elements, targets[name][row], placement, _shape(elements)) for row in rows]
        extra = {name: torch.empty_like(targets[name][rows[0]]) for name in layout.extra_tensors(padded.spec)}
        layout.fill_extra(padded, extra)
        return [(targets[name][row], tensor) for name, tensor in extra.items() for row in rows], found

    def encoded_layer(self, tall: QuantizedMatrix) -> list[Write]:
        """Return the writes of all experts of a rank (`writes_all_experts_at_once`), given as `[experts * N, K]`."""
        from moeq_kernels.placement import Write

        layout, targets = self._layer.layout, self._layer.tensors[self._role]
        layout.check_values(tall)
        found = []
        for name, placement in self._placements.items():
            rows = layout.encode(name, tall)
            elements = rows.view(len(self._layer.experts), -1, rows.shape[1])
            found.append(Write(elements, targets[name], placement, _shape(elements[0])))
        return found

    def stored(self, given: Mapping[str, Parts], rows: Sequence[int]) -> list[Write] | None:
        """Return the writes of a whole matrix that the kernel reads as the checkpoint stores it, without decoding.

        Return None if the matrix has to be decoded, or holds a value that decoding will refuse. Raises MoeqError
        `usage.update-tensors` if the tensors are not in the checkpoint's own form.
        """
        import torch

        from moeq_kernels.index_maps import Packing
        from moeq_kernels.placement import UNPACKED, Write

        layer, parts = self._layer, self._stored_parts
        if not parts or ("gate_up" in given and layer.interleaved is not False):
            return None
        if any(is_float(tensors) for tensors in given.values()):
            return None
        known = get_format(layer.scheme.format)
        roles, view = known.parts, known.fast_view_of(layer.scheme)
        assert view is not None  # `_stored_parts` is empty without one
        found: dict[str, list[Tensor]] = {"codes": [], "scale": []}
        for name in sorted(given):  # gate rows come before up rows
            spec = self._specs[name]
            self._check_form(name, given[name])
            for part, tensor in given[name].items():
                role = roles.get(part)
                if role in found:
                    here = tensor.to(layer.device)
                    found[role].append(here.view(torch.uint8) if here.itemsize == 1 else here)
                elif role != "other" and (role != "shape" or tensor.tolist() != [spec.n, spec.k]):
                    return None
        _, scale_shape, _ = parts["scales"]
        if sum(one.numel() for one in found["scale"]) != math.prod(scale_shape):
            return None
        codes, scales = (ones[0] if len(ones) == 1 else torch.cat(ones) for ones in found.values())
        if not self._scales_fit(scales):
            return None
        targets = layer.tensors[self._role]
        if scales.is_floating_point():
            scales = scales.to(targets[parts["scales"][0]].dtype)  # float32 holds every 16-bit scale
        sources = {
            "codes": (
                codes.flatten(1),
                Packing(8 * codes.itemsize // layer.scheme.bits, sign=0x80 if view.signed else 0),
            ),
            "scales": (scales.reshape(scale_shape), UNPACKED),
        }
        writes = []
        for field, (source, packing) in sources.items():
            name, shape, placement = parts[field]
            writes += [Write(source, targets[name][row], placement, shape, packing) for row in rows]
        return writes

    def _check_form(self, name: str, tensors: Parts) -> None:
        """Call `check_form` on stored tensors, unless tensors of the same dtypes and shapes were checked before."""
        form = (name, *((part, tensor.dtype, tensor.shape) for part, tensor in tensors.items()))
        if form not in self._forms:
            check_form(self._layer, name, tensors, self._specs[name])
            self._forms.add(form)

    @cached_property
    def _stored_parts(self) -> dict[str, tuple[str, tuple[int, int], Placement]]:
        """Field (`codes`, `scales`) to the name, shape and placement of the part that holds it.

        Empty unless stored codes and scales are the whole matrix, row by row, in bits that the layout only moves.
        """
        layer, role = self._layer, self._role
        layout, spec, scheme = layer.layout, layer.padded(role), layer.scheme
        view = get_format(scheme.format).fast_view_of(scheme)
        alike = spec == layer.own(role) == layer.written[role] == layer.specs[role]
        parts = layout.parts(spec)
        fields = {part.field: name for name, part in parts.items()}
        bits_move = layout.rearranges and not layout.recodes_scales and not layout.extra_tensors(spec)
        checks = (Layout.check_values, Fp8Layout.check_values)  # the latter: rows that share a scale agree
        checked = layout.exact_scales is not None or type(layout).check_values in checks
        plain = view is not None and not view.transposed and view.nibble_of_column is None
        if not (alike and plain and bits_move and checked and len(parts) == 2 and fields.keys() == {"codes", "scales"}):
            return {}
        scale, height = parts[fields["scales"]], self._specs[layer.names(role)[0]].n
        shared = scheme.weight.scale.group_shape[0]
        if not spec.symmetric or spec.bits not in (4, 8) or scheme.weight.scale2 is not None or spec.act_order:
            return {}
        if not (as_stored(scale, spec) or scale.dtype == "F32") or scale.rows != shared or height % shared:
            return {}
        return {
            field: (name, layout.element_shape(parts[name], spec), self._placements[name])
            for field, name in fields.items()
        }

    def _scales_fit(self, scales: Tensor) -> bool:
        """Return whether all scales are finite, and exponents are in the layout's range. Waits for the device."""
        import torch

        if scales.dtype == torch.uint8:
            least, greatest = self._layer.layout.exact_scales or (0, 254)
            return least == 0 and int(scales.amax()) <= greatest
        return math.isfinite(float(torch.linalg.vector_norm(scales, math.inf)))


def _shape(elements: Tensor) -> tuple[int, int]:
    return elements.shape[0], elements.shape[1]

"""Static scales of activations: which experts lack one, and which have one that no kernel can use. Imports no torch.

Experts that no token reached during calibration have no scale, or a scale of 0, infinity or NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import isinf, isnan, prod

from moeq.checkpoint.disk import closing_fd
from moeq.checkpoint.files import read_exactly
from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.names import FUSED, StoredName
from moeq.errors import listed
from moeq.model.expert_kinds import Experts
from moeq.schemes.base import Scheme
from moeq.schemes.format import ACTIVATION_SCALES, FLOAT_NAMES

#: Safetensors dtype of scales -> numpy's unsigned integer of the same width.
_DTYPES = {"F32": "<u4", "F16": "<u2", "BF16": "<u2"}

#: Returns the place of a source tensor in the files that are read, or None if it is not in them.
Find = Callable[[TensorEntry], TensorEntry | None]
#: Opens a file by name and returns its descriptor.
Open = Callable[[str], int]

#: Largest tensor of a scale, in bytes: one float32 for each of 65,536 experts.
_MAX_BYTES = 1 << 18


@dataclass(frozen=True)
class ScaleFault:
    """Experts of a layer whose static activation scale is missing or unusable in one way."""

    layer: int
    part: str  #: name of the scale, a key of `ACTIVATION_SCALES`
    what: str  #: the fault in words before the name of the scale: `no`, `a zero`, `an infinite`, `a NaN`, `a negative`
    experts: tuple[int, ...]  #: the experts, sorted
    projections: tuple[StoredName, ...]  #: projections with the fault, sorted; empty for all

    @property
    def is_stored(self) -> bool:
        """Whether the scale is in the file and unusable; False if it is missing."""
        return self.what != "no"

    @property
    def text(self) -> str:
        """Sentence about the fault: `layer 0: experts 2, 5 have a zero input_scale of down`."""
        owners = f" of {', '.join(self.projections)}" if self.projections else ""
        return f"layer {self.layer}: experts {listed(self.experts, 8)} have {self.what} {self.part}{owners}"


def has_static_scale(scheme: Scheme) -> bool:
    """Return whether engines multiply a scheme's activations by a scale that the checkpoint stores."""
    activation = scheme.activation
    if activation is None:
        return False
    if scheme.format == "nvfp4":
        return activation.dtype == "e2m1"
    return not activation.scale.dynamic and activation.scale.granularity == "tensor"


def missing_scales(experts: Experts) -> list[ScaleFault]:
    """Find the experts of a layer without the static activation scale that they need, from headers."""
    parts = experts.layer.parts
    every = set(range(experts.num_experts))
    found: list[tuple[str, str, StoredName, set[int]]] = []
    for part in ACTIVATION_SCALES:
        for projection in {name for name, _ in parts}:
            held = parts.get((projection, part), {})
            absent = set() if FUSED in held else every - set(held)
            found.append((part, "no", projection, absent))
    stored = {part for part, _, _, absent in found if len(absent) < len(every)}
    needed = {part for part in stored or {"input_scale"} if stored or has_static_scale(experts.kind(0).scheme)}
    return _joined(experts, [row for row in found if row[0] in needed])


def unusable_scales(experts: Experts, find: Find, open_file: Open) -> tuple[list[ScaleFault], tuple[int, ...]]:
    """Read the static activation scales of a layer and find those that are no positive finite numbers.

    Only scales that engines use are read. Returns the faults, and the experts whose gate and up have scales that differ
    by more than 0.00001. A gate's scale of 1.0 never differs, as in the comparison of vLLM's loader.

    Raises:
        MoeqError: `source.truncated`, `source.unreadable`.
    """
    if not any(has_static_scale(scheme) for group in experts.kinds() for scheme in group.kind.schemes):
        return [], ()
    wanted = [
        (part, projection, expert, place)
        for (projection, part), entries in experts.layer.parts.items()
        if part in ACTIVATION_SCALES
        for expert, entry in entries.items()
        if entry.nbytes <= _MAX_BYTES and entry.dtype in _DTYPES and (place := find(entry)) is not None
    ]
    values = _read(open_file, [place for *_, place in wanted])
    rows: list[tuple[str, str, StoredName, set[int]]] = []
    gates: dict[int, float] = {}
    ups: dict[int, float] = {}
    for part, projection, expert, entry in wanted:
        if part == "input_scale" and projection in ("gate", "up") and len(values[entry.name]) == 1:
            (gates if projection == "gate" else ups)[expert] = values[entry.name][0]
        for number, owners in _owners(values[entry.name], expert, entry, experts.num_experts):
            what = _fault(number)
            if what is not None:
                rows.append((part, what, projection, owners))
    both = sorted(gates.keys() & ups.keys())
    unequal = tuple(number for number in both if gates[number] != 1 and abs(gates[number] - ups[number]) > 1e-5)
    return _joined(experts, rows), unequal


def _owners(numbers: list[float], expert: int, entry: TensorEntry, count: int) -> Iterator[tuple[float, set[int]]]:
    """Yield every number of a tensor with the experts that it belongs to."""
    if expert != FUSED:
        yield from ((number, {expert}) for number in numbers)
    elif prod(entry.shape) == 1:
        yield from ((number, set(range(count))) for number in numbers)
    else:
        each = max(1, len(numbers) // max(1, entry.shape[0]))
        yield from ((number, {index // each}) for index, number in enumerate(numbers))


def _fault(number: float) -> str | None:
    if isnan(number):
        return "a NaN"
    if isinf(number):
        return "an infinite"
    return "a zero" if number == 0 else "a negative" if number < 0 else None


def _joined(experts: Experts, rows: Iterable[tuple[str, str, StoredName, set[int]]]) -> list[ScaleFault]:
    """Return the faults of `(part, what, projection, experts)` rows; projections of the same experts share a fault."""
    owners: dict[tuple[str, str, StoredName], set[int]] = {}
    for part, what, projection, numbers in rows:
        owners.setdefault((part, what, projection), set()).update(numbers)
    alike: dict[tuple[str, str, tuple[int, ...]], set[StoredName]] = {}
    for (part, what, projection), found in owners.items():
        if found:
            alike.setdefault((part, what, tuple(sorted(found))), set()).add(projection)
    every = {name for name, _ in experts.layer.parts}
    return [
        ScaleFault(experts.layer.layer, part, what, found, () if names == every else tuple(sorted(names)))
        for (part, what, found), names in alike.items()
    ]


def _read(open_file: Open, entries: list[TensorEntry]) -> dict[str, list[float]]:
    """Read small float tensors, opening every file once: tensor name to its numbers."""
    import numpy as np

    from moeq.layouts.float_bits import numbers_of

    found: dict[str, list[float]] = {}
    by_file: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        by_file.setdefault(entry.file, []).append(entry)
    for file, group in by_file.items():
        with closing_fd(open_file(file)) as fd:
            for entry in sorted(group, key=lambda one: one.start):
                data = bytearray(entry.nbytes)
                read_exactly(fd, memoryview(data), entry.start, file)
                bits = np.frombuffer(data, _DTYPES[entry.dtype])
                found[entry.name] = numbers_of(bits, FLOAT_NAMES[entry.dtype]).tolist()
    return found

"""Tensor names: which of them are expert weights, and of which layer, expert and projection.

Families spell the same thing in many ways (`mlp.experts.3.gate_proj.qweight`, `block_sparse_moe.experts.3.w1.qweight`,
`mlp.experts.gate_up_proj_blocks`), and tools re-spell it again, so every spelling is accepted for every family. Names
are taken apart with plain splits: the largest checkpoints have half a million of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from moeq.checkpoint.header import TensorEntry
from moeq.errors import MoeqError

#: Expert number of a tensor that stacks all experts of a layer.
FUSED = -1

StoredName = Literal["gate", "up", "down", "gate_up"]

#: Projection names of per-expert modules. DBRX forks use w1/v1/w2, Grok linear/linear_v/linear_1.
PROJECTIONS: dict[str, StoredName] = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
    "v1": "up",
    "linear": "gate",
    "linear_v": "up",
    "linear_1": "down",
    "gate_up_proj": "gate_up",
}

#: Parameters that hold all experts of a layer, longest first so that prefixes cannot win.
FUSED_PARAMETERS: tuple[tuple[str, StoredName], ...] = (
    ("gate_up_proj", "gate_up"),
    ("output_linear", "down"),
    ("input_linear", "gate_up"),
    ("gate_proj", "gate"),
    ("down_proj", "down"),
    ("up_proj", "up"),
    ("w13", "gate_up"),
    ("fc1", "gate_up"),
    ("fc2", "down"),
    ("w1", "gate"),
    ("v1", "up"),
    ("w3", "up"),
    ("w2", "down"),
)

#: Part suffixes of fused parameters (no `.weight` leaf) in the spelling of per-expert modules.
_FUSED_PARTS = {
    "": "weight",
    "packed": "weight_packed",
    "scale": "weight_scale",
    "scale_inv": "weight_scale_inv",
    "shape": "weight_shape",
    "zero_point": "weight_zero_point",
    "g_idx": "weight_g_idx",
    "global_scale": "weight_global_scale",
    "scale_2": "weight_scale_2",
}

_LAYER_CONTAINERS = frozenset({"layers", "blocks", "layer", "h", "mtp"})

#: Modules that hold fused experts without being called `experts` (Step, Granite-MoE, MLX).
_FUSED_MODULES = (".moe.", ".block_sparse_moe.", ".switch_mlp.")


@dataclass
class LayerExperts:
    """All expert tensors of one layer."""

    stack: str  #: path of the list of layers that holds this one, such as `model.layers`
    layer: int  #: number within the stack
    prefix: str  #: path of the experts' module, such as `model.layers.0.mlp.experts`
    #: Tensors by `(projection, part)` and by expert number, which is FUSED for a tensor of all experts.
    parts: dict[tuple[StoredName, str], dict[int, TensorEntry]] = field(default_factory=dict)
    spelling: dict[StoredName, str] = field(default_factory=dict)  #: projection to the name used for it in tensor names
    #: Whether each projection is a list of experts (`experts.gate_proj.0` instead of `experts.0.gate_proj`).
    listed: bool = False

    @property
    def fused(self) -> bool:
        """Whether tensors stack all experts."""
        return any(FUSED in entries for entries in self.parts.values())

    @property
    def expert_ids(self) -> set[int]:
        """Numbers of the experts found; empty when fused."""
        found: set[int] = set()
        for entries in self.parts.values():
            found.update(entries)
        return found - {FUSED}

    def tensors(self) -> Iterator[TensorEntry]:
        """Yield every expert tensor of the layer."""
        for entries in self.parts.values():
            yield from entries.values()

    def unit(self, expert: int) -> dict[StoredName, dict[str, TensorEntry]]:
        """Return the tensors of one expert, projection to part to tensor; fused tensors are returned whole."""
        unit: dict[StoredName, dict[str, TensorEntry]] = {}
        for (projection, part), entries in self.parts.items():
            entry = entries.get(expert) or entries.get(FUSED)
            if entry is not None:
                unit.setdefault(projection, {})[part] = entry
        return unit

    def module(self, projection: StoredName, expert: int) -> str:
        """Return the module name of a projection, as configs spell it."""
        spelled = self.spelling.get(projection, projection)
        if self.fused:
            return f"{self.prefix}.{spelled}"
        return f"{self.prefix}.{spelled}.{expert}" if self.listed else f"{self.prefix}.{expert}.{spelled}"


def index_experts(tensors: Mapping[str, TensorEntry]) -> list[LayerExperts]:
    """Find the expert tensors, grouped by layer, in order of appearance.

    Raises MoeqError `source.bad-names` for expert or layer numbers that no writer produces (`experts.007`) and for
    layers that spell one projection in two ways.
    """
    index = _Indexer()
    numbers = index.numbers
    groups = index.groups
    for name, entry in tensors.items():
        head, found, tail = name.partition(".experts.")
        if not found:
            if len(entry.shape) == 3:
                index.add_outside_experts(entry)
            continue
        expert, _, rest = tail.partition(".")
        number = numbers.get(expert)
        if number is None:
            number = index.number(expert, name)
            if number == FUSED:
                index.add_fused(f"{head}.experts", tail, entry)
                continue
        projection, _, part = rest.partition(".")
        group = groups.get((head, projection, part))
        if group is None:
            group = index.open_group(head, f"{head}.experts", projection, part)
        group[number] = entry
    return list(index.layers.values())


class _Indexer:
    """State of one pass over the names."""

    def __init__(self) -> None:
        #: Layers by the prefix of their experts.
        self.layers: dict[str, LayerExperts] = {}
        #: Tensors by expert number, for each path above `experts`, projection and part.
        self.groups: dict[tuple[str, str, str], dict[int, TensorEntry]] = {}
        #: Expert numbers by their spelling.
        self.numbers: dict[str, int] = {}

    def number(self, text: str, name: str) -> int:
        """Parse an expert number, FUSED for other text. Refuses numbers that no writer produces."""
        digits = text.removeprefix("-")
        if not digits.isnumeric():
            return FUSED
        if text != digits or not _is_canonical(digits) or len(digits) > 6:
            _refuse(name, f"expert number {text!a}")
        value = self.numbers[text] = int(digits)
        return value

    def open_group(self, head: str, prefix: str, projection: str, part: str) -> dict[int, TensorEntry]:
        """Make the group of a new `(projection, part)`; tensors of no known projection get a group in no layer."""
        role = PROJECTIONS.get(projection)
        layer = self._layer(prefix) if role else None
        group: dict[int, TensorEntry] = {}
        if role and layer:
            group = self._group(layer, role, projection, part or "weight")
        self.groups[head, projection, part] = group
        return group

    def add_fused(self, prefix: str, tail: str, entry: TensorEntry) -> None:
        """Add a tensor of all experts: `gate_up_proj_blocks`, `w13_weight`, `mlp.w1`, `gate_up_proj.weight`."""
        # DBRX puts its stacked parameters one level deeper; forks put numbered experts there.
        inner = tail.removeprefix("mlp.")
        expert, _, rest = inner.partition(".")
        number = self.number(expert, entry.name) if inner != tail else FUSED
        if number != FUSED:
            projection, _, part = rest.partition(".")
            known = self.groups.get((f"{prefix}.mlp", projection, part))
            group = self.open_group(f"{prefix}.mlp", f"{prefix}.mlp", projection, part) if known is None else known
            group[number] = entry
            return
        if self._add_listed(prefix, expert, rest, entry):
            return
        # torchao writes `_gate_up_proj_qdata` for stacks as it writes `_weight_qdata` for modules.
        is_torchao = inner.startswith("_")
        plain = inner.removeprefix("_")
        for parameter, role in FUSED_PARAMETERS:
            if plain.startswith(parameter):
                suffix = plain[len(parameter) :].lstrip("._")
                part = f"_weight_{suffix}" if is_torchao else _FUSED_PARTS.get(suffix, suffix)
                layer = self._layer(prefix)
                if layer:
                    self._group(layer, role, parameter, part)[FUSED] = entry
                return

    def _add_listed(self, prefix: str, projection: str, rest: str, entry: TensorEntry) -> bool:
        """Add a tensor of a list of experts per projection, `gate_proj.0.weight`; return whether it is one.

        ModelOpt writes them for experts that it takes out of stacks, Unsloth for gpt-oss (`gate_up_projs.0.weight`).
        """
        role = PROJECTIONS.get(projection.removesuffix("s"))
        expert, _, part = rest.partition(".")
        number = self.number(expert, entry.name) if role else FUSED
        layer = self._layer(prefix) if number != FUSED else None
        if role is None or layer is None:
            return False
        if layer.parts and not layer.listed:
            _refuse(entry.name, "a list of experts beside experts that are named in another way")
        layer.listed = True
        self._group(layer, role, projection, part or "weight")[number] = entry
        return True

    def add_outside_experts(self, entry: TensorEntry) -> None:
        """Add a 3-D tensor outside a module called `experts`."""
        for module in _FUSED_MODULES:
            head, found, tail = entry.name.partition(module)
            if found:
                self.add_fused(head + module.rstrip("."), tail, entry)
                return

    def _group(self, layer: LayerExperts, role: StoredName, spelled: str, part: str) -> dict[int, TensorEntry]:
        known = layer.spelling.setdefault(role, spelled)
        if known != spelled:
            _refuse(f"{layer.prefix}.*.{spelled}", f"a second spelling of the {role} projection, next to {known},")
        return layer.parts.setdefault((role, part), {})

    def _layer(self, prefix: str) -> LayerExperts | None:
        if prefix not in self.layers:
            place = _locate(prefix)
            if place is None:
                return None
            self.layers[prefix] = LayerExperts(place[0], place[1], prefix)
        return self.layers[prefix]


def _locate(prefix: str) -> tuple[str, int] | None:
    """Find stack path and layer number of an experts module: the last number that follows a layer container."""
    parts = prefix.split(".")
    for position in range(len(parts) - 1, 0, -1):
        digits = parts[position]
        if digits.isnumeric() and parts[position - 1] in _LAYER_CONTAINERS:
            if not _is_canonical(digits) or len(digits) > 6:
                _refuse(prefix, f"layer number {digits!a}")
            return ".".join(parts[:position]), int(digits)
    return None


def _is_canonical(digits: str) -> bool:
    return digits.isascii() and digits.isdigit() and (digits == "0" or digits[0] != "0")


def _refuse(name: str, what: str) -> NoReturn:
    raise MoeqError("source.bad-names", f"tensor {name}: {what} is not something a checkpoint writer produces")

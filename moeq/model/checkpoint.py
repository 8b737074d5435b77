"""An opened checkpoint: its description, and the matrix of any expert.

Only headers are read and torch is not imported before data is asked for.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from moeq.checkpoint.facts import Facts
from moeq.checkpoint.families import find_family
from moeq.checkpoint.names import StoredName, index_experts
from moeq.checkpoint.source import Source
from moeq.display import DisplayedRecord
from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec, QuantizedMatrix, Role
from moeq.model.activation_scales import Find, Open, ScaleFault, missing_scales, unusable_scales
from moeq.model.declaration import find_declaration
from moeq.model.describe import Model, describe, model_type, split_stacks
from moeq.model.expert_kinds import UNKNOWN_ORDER, ExpertKind, Experts, is_whole
from moeq.model.info import CheckpointInfo
from moeq.model.quantized_modules import decode
from moeq.schemes.base import Scheme
from moeq.schemes.config_types import checked
from moeq.schemes.declared import Declaration
from moeq.schemes.dequantize import dequantize
from moeq.schemes.joining import concatenate_rows, select_rows
from moeq.schemes.registry import get_format

if TYPE_CHECKING:
    from torch import Tensor


class Checkpoint(DisplayedRecord):
    """A checkpoint that was opened.

    Attributes:
        source: its files: configs, tensor headers, bytes on request.
        kind: `source`, or `converted` for an output of `moeq convert`.
        info: the description that `moeq inspect` prints.
        declaration: the quantisation config as read, or None.
    """

    kind: Literal["source", "converted"] = "source"
    declaration: Declaration | None = None

    def __init__(self, source: Source) -> None:
        self.source = source
        facts = Facts(source.config)
        layers = index_experts(source.tensors)
        stacks = split_stacks(layers, facts.layers())
        declaration, warnings = find_declaration(source.config, source.side_configs)
        if not stacks.main:
            raise _not_moe(source, facts, declaration)
        source.warnings.extend(warnings)
        self.declaration = declaration
        family = find_family(model_type(facts))
        interleaved = family.interleaved if family else None
        transposed = family is not None and family.transposed
        declared = facts.experts()
        self._experts: dict[int, Experts] = {
            number: Experts(
                layer, declaration, interleaved, declared, transposed=transposed, declared_sets=facts.expert_sets()
            )
            for number, layer in (*stacks.main.items(), *stacks.mtp.items())
        }
        self._scale_faults: dict[int, tuple[ScaleFault, ...]] = {}
        self._unequal_scales: dict[int, tuple[int, ...]] = {}
        self._scales_read = False
        source.expert_names = frozenset(entry.name for layer in stacks.main.values() for entry in layer.tensors())
        self.info: CheckpointInfo = describe(Model(source, facts, family, stacks, self._experts, declaration))

    @property
    def quantization_config(self) -> Mapping[str, Any] | None:
        """Quantisation config that takes effect, from `info.quant_origin`; None if there is none."""
        return self.declaration.raw if self.declaration else None

    @cached_property
    def checked_config(self) -> Mapping[str, Any] | None:
        """`quantization_config` with its types checked. Raises MoeqError `source.bad-config`."""
        return None if self.quantization_config is None else checked(self.quantization_config)

    def scale_faults(self, layer: int) -> tuple[ScaleFault, ...]:
        """Return the faults of a layer's static activation scales: missing ones and, once read, unusable ones."""
        if layer not in self._scale_faults:
            self._scale_faults[layer] = tuple(missing_scales(self.experts(layer)))
        return self._scale_faults[layer]

    def unequal_scales(self, layer: int) -> tuple[int, ...]:
        """Return the experts of a layer whose gate and up have unequal activation scales; none if they are not read."""
        return self._unequal_scales.get(layer, ())

    def read_activation_scales(self, find: Find = lambda entry: entry, opened: Open | None = None) -> None:
        """Read the static activation scales of all layers, so that `scale_faults` tells of their values as well.

        Args:
            find: function from a source tensor to its place in the files that are read; None if it is not in them.
            opened: function that opens a file by name and returns its descriptor; None for the files of the source.

        Raises:
            MoeqError: `source.truncated`, `source.unreadable`.
        """
        if self._scales_read:
            return
        for layer in self.info.moe_layers:
            found, unequal = unusable_scales(self.experts(layer), find, opened or self.source.open)
            self._unequal_scales[layer] = unequal
            self._scale_faults[layer] = (*missing_scales(self.experts(layer)), *found)
        self._scales_read = True

    def expert_prefix(self, layer: int) -> str:
        """Return the module path of a layer's experts, such as `model.layers.0.mlp.experts`."""
        return self.experts(layer).layer.prefix

    def num_experts(self, layer: int) -> int:
        """Return the number of routed experts of a layer."""
        return self.experts(layer).num_experts

    def is_packed(self, layer: int) -> bool:
        """Return whether a layer's experts are in a kernel layout."""
        return False

    def scheme_of(self, layer: int, expert: int = 0, role: Role = "w13") -> Scheme:
        """Return the scheme of an expert's weights."""
        return self.kind_of(layer, expert).projection(role).scheme

    def spec(self, layer: int, role: Role, expert: int = 0) -> MatrixSpec:
        """Return sizes and types of a matrix, from headers alone.

        Args:
            role: `gate`, `up`, `down`, `w13` (gate rows, then up rows) or `w2` (the same matrix as `down`).
        """
        return self.kind_of(layer, expert).spec(role)

    def matrix(self, layer: int, expert: int, role: Role) -> QuantizedMatrix:
        """Read one logical matrix, and no other tensors.

        Raises:
            MoeqError: `source.not-quantized`, `source.bad-data` if the data is impossible, `source.inconsistent` if
                gate and up cannot be joined into `w13`.
        """
        check_role(role)
        kind = self.kind_of(layer, expert)
        wanted = kind.spec(role)
        if role in ("gate", "up") and "gate_up" in kind.projections:
            if kind.interleaved is None:
                raise MoeqError("source.unknown-order", f"{self.expert_prefix(layer)}: {UNKNOWN_ORDER}")
            stored = self._read(layer, expert, "gate_up", kind)
            return select_rows(stored, wanted, first=role == "gate", interleaved=kind.interleaved)
        if role == "w13" and "gate_up" in kind.projections and kind.interleaved is not False:
            gate, up = self.matrix(layer, expert, "gate"), self.matrix(layer, expert, "up")
            return concatenate_rows(gate, up, wanted)
        if role == "w13" and "gate" in kind.projections:
            gate, up = (self._read(layer, expert, projection, kind) for projection in ("gate", "up"))
            return concatenate_rows(gate, up, wanted)
        projection: StoredName = "gate_up" if role == "w13" and kind.gated else _PROJECTION[role]
        return self._read(layer, expert, projection, kind, role)

    def dequantize(self, layer: int, expert: int, projection: Literal["gate", "up", "down"]) -> Tensor:
        """Return float32 `[N, K]`, the exact product `scale * (code - zero)`."""
        return dequantize(self.matrix(layer, expert, projection))

    def experts(self, layer: int) -> Experts:
        """Return a layer's experts as they are stored: tensors, and the kind of every expert."""
        if layer not in self._experts:
            known = ", ".join(map(str, self._experts))
            raise MoeqError("usage.no-such-layer", f"layer {layer} has no routed experts", f"MoE layers: {known}")
        return self._experts[layer]

    def require_source(self) -> None:
        """Refuse an output of `moeq convert`. Raises MoeqError `usage.already-converted`, naming its source."""

    def kind_of(self, layer: int, expert: int) -> ExpertKind:
        """Return how an expert is encoded, for each projection as it is stored."""
        return self.experts(layer).kind(expert)

    def module(self, layer: int, expert: int, projection: StoredName) -> str:
        """Return the module name of a projection, by which tensors and configs call it."""
        return self.experts(layer).layer.module(projection, expert)

    def parts(
        self, layer: int, expert: int, projection: StoredName, wanted: Container[str] | None = None
    ) -> dict[str, Tensor]:
        """Read the stored tensors of one projection of one expert, by part; of stacked tensors the expert's slice.

        Args:
            wanted: names of the parts to read; None: all.
        """
        source, experts = self.source, self.experts(layer)
        parts: dict[str, Tensor] = {}
        for part, entry in experts.layer.unit(expert)[projection].items():
            if wanted is not None and part not in wanted:
                continue
            whole = not experts.layer.fused or is_whole(part, entry)
            parts[part] = source.read(entry.name) if whole else source.read_row(entry, expert)
        return parts

    def _read(
        self, layer: int, expert: int, projection: StoredName, kind: ExpertKind, role: Role | None = None
    ) -> QuantizedMatrix:
        """Decode one stored projection."""
        described = kind.projections[projection]
        spec = kind.spec(role) if role else described.spec
        parts = self.parts(layer, expert, projection, get_format(described.scheme.format).parts)
        return decode(parts, spec, described.scheme, self.module(layer, expert, projection))


_PROJECTION: dict[Role, StoredName] = {"gate": "gate", "up": "up", "down": "down", "w2": "down", "w13": "up"}


def check_role(role: str) -> None:
    """Raise MoeqError `usage.no-such-projection` for an unknown role."""
    if role not in _PROJECTION:
        known = ", ".join(_PROJECTION)
        raise MoeqError("usage.no-such-projection", f"an expert has no projection {role!r}", f"projections: {known}")


def _not_moe(source: Source, facts: Facts, declaration: Declaration | None) -> MoeqError:
    declared = facts.experts()
    if declared and declaration and declaration.refusal:
        message = f"{source.name}: {declaration.refusal} ({declaration.origin})"
        hint = "look for a checkpoint in GPTQ, AWQ, compressed-tensors or MXFP4"
        return MoeqError("source.unsupported-format", message, hint)
    detail = "its config declares no experts" if not declared else f"its config declares {declared} experts"
    # A model that declares no experts is dense, not broken.
    return MoeqError(
        "source.not-moe" if declared else "answer.not-moe",
        f"{source.name}: no routed experts among {len(source.tensors):,} tensors, and {detail}",
        "moeq looks for tensors named like `layers.0.mlp.experts.0.gate_proj.*` and stacked ones like "
        "`experts.gate_up_proj`; dense models need no moeq",
    )

"""Check a checkpoint's data: the small tensors of every expert (scales, zero points, group indices, biases).

`moeq inspect` reads headers only; `--scan` adds this check. Findings with the same code become one warning with their
count and the first tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from moeq.checkpoint.names import StoredName
from moeq.checkpoint.warning import CheckpointWarning
from moeq.model.checkpoint import Checkpoint
from moeq.model.expert_kinds import ExpertKind
from moeq.schemes.format import Described, PartRole
from moeq.schemes.gptq import impossible_groups, stored_zeros
from moeq.schemes.registry import get_format

if TYPE_CHECKING:
    from torch import Tensor

#: Parts that are checked. Codes are large and may have any value.
_SMALL: frozenset[PartRole] = frozenset({"scale", "scale2", "zeros", "index", "bias"})

#: Relative difference of gate and up second-level scales above which merging them costs accuracy.
_SCALE_TOLERANCE = 1e-3

_ACTIVATION_SCALE = "data.activation-scale"

#: Code of a finding -> its sentence.
MESSAGES = {
    "data.scale-nonfinite": "scales are NaN or infinite",
    "data.scale-negative": "scales are negative",
    "data.scale-zero": "scales are zero",
    "data.all-zero": "tensors of scales are zero throughout: a placeholder upload or a file of zeros",
    "data.e8m0-nan": "exponent bytes are 255, which is NaN",
    "data.e8m0-zero": "exponent bytes are 0, the smallest scale there is",
    "data.zeros-convention": "zero points of a symmetric checkpoint are stored in the other GPTQ version's convention",
    "data.zeros-not-constant": "zero points of a symmetric checkpoint are not the symmetric constant",
    "data.zeros-of-zero": "stored zero points are all ones: a zero point of 0, which readers decode differently",
    "data.act-order-trivial": "g_idx is k // group_size: act-order is declared but changes nothing",
    "data.act-order": "g_idx reorders columns",
    "data.act-order-undeclared": "g_idx reorders columns although the config declares no act-order",
    "data.g-idx-placeholder": "g_idx is zero throughout, a placeholder: columns are in natural order",
    "data.g-idx-range": "g_idx is none that a quantiser writes: groups that do not exist, or of wrong sizes",
    "data.gate-up-order": "gate and up have different g_idx and cannot be fused",
    "data.gate-up-scale": "gate and up have different second-level scales, of which engines keep one",
    _ACTIVATION_SCALE: "static activation scales are zero, infinite, NaN or negative: 4- and 8-bit activations "
    "come out as NaN or wrong, weight-only kernels such as Marlin do not use them",
    "data.bias-zero": "biases are zero throughout and can be dropped",
}


class _Findings:
    """Findings by code: their count and the first tensor."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def add(self, code: str, where: str) -> None:
        self._count[code] += 1
        self._first.setdefault(code, where)

    def warnings(self) -> list[CheckpointWarning]:
        return [
            CheckpointWarning(code, f"{MESSAGES[code]} ({self._count[code]:,} tensors, first {first})")
            for code, first in self._first.items()
        ]


def scan(checkpoint: Checkpoint, progress: Callable[[int, int], None] | None = None) -> list[CheckpointWarning]:
    """Check the data of every expert of a source checkpoint; `progress` gets the layers done and all layers."""
    findings = _Findings()
    layers = checkpoint.info.moe_layers
    for done, layer in enumerate(layers):
        if progress:
            progress(done, len(layers))
        for expert in range(checkpoint.num_experts(layer)):
            _scan_expert(checkpoint, layer, expert, findings)
    if progress:
        progress(len(layers), len(layers))
    checkpoint.read_activation_scales()
    faults = [fault for layer in layers for fault in checkpoint.scale_faults(layer) if fault.is_stored]
    return [*findings.warnings(), *(CheckpointWarning(_ACTIVATION_SCALE, fault.text) for fault in faults)]


def _scan_expert(checkpoint: Checkpoint, layer: int, expert: int, findings: _Findings) -> None:
    kind = checkpoint.kind_of(layer, expert)
    parts: dict[StoredName, dict[str, Tensor]] = {}
    for projection, described in kind.projections.items():
        where = checkpoint.module(layer, expert, projection)
        stored = checkpoint.parts(layer, expert, projection, _parts_of(described, *_SMALL))
        parts[projection] = stored
        _scan_scales(stored, described, where, findings)
        _scan_zeros(stored, described, where, findings)
        _scan_order(stored, described, where, findings)
        bias = stored.get("bias")
        if bias is not None and not bool(bias.any()):
            findings.add("data.bias-zero", where)
    _scan_pair(kind, parts, checkpoint.module(layer, expert, "gate"), findings)


def _parts_of(described: Described, *roles: PartRole) -> list[str]:
    """Return the names of a format's parts that have these roles."""
    return [part for part, role in get_format(described.scheme.format).parts.items() if role in roles]


def _scan_scales(parts: Mapping[str, Tensor], described: Described, where: str, findings: _Findings) -> None:
    import torch

    for part in _parts_of(described, "scale", "scale2"):
        stored = parts.get(part)
        if stored is None:
            continue
        name = f"{where}.{part}"
        if stored.dtype == torch.uint8:
            _report(findings, name, {"data.e8m0-nan": stored == 255, "data.e8m0-zero": stored == 0})
            continue
        values = stored.float()
        if not bool(values.any()):
            findings.add("data.all-zero", name)
            continue
        padded = get_format(described.scheme.format).padded_scales
        zero = torch.zeros_like(values, dtype=torch.bool) if padded else values == 0
        found = {
            "data.scale-nonfinite": ~torch.isfinite(values),
            "data.scale-negative": values < 0,
            "data.scale-zero": zero,
        }
        _report(findings, name, found)


def _report(findings: _Findings, name: str, found: Mapping[str, Tensor]) -> None:
    for code, mask in found.items():
        if bool(mask.any()):
            findings.add(code, name)


def _scan_zeros(parts: Mapping[str, Tensor], described: Described, where: str, findings: _Findings) -> None:
    scheme, spec = described.scheme, described.spec
    if scheme.format != "gptq" or "qzeros" not in parts:
        return
    stored = stored_zeros(parts["qzeros"], spec, scheme)
    minus = 1 if scheme.zero_point == "stored-minus-one" else 0
    if not spec.symmetric:
        if minus and bool((stored == (1 << spec.bits) - 1).any()):
            findings.add("data.zeros-of-zero", f"{where}.qzeros")
        return
    constant = spec.symmetric_zero - minus
    if bool((stored == constant).all()):
        return
    other = spec.symmetric_zero - 1 + minus
    convention = bool((stored == other).all())
    findings.add("data.zeros-convention" if convention else "data.zeros-not-constant", f"{where}.qzeros")


def _scan_order(parts: Mapping[str, Tensor], described: Described, where: str, findings: _Findings) -> None:
    import torch

    part = next((part for part in _parts_of(described, "index") if part in parts), None)
    spec = described.spec
    if part is None or spec.num_groups == 1:
        return
    name, index = f"{where}.{part}", parts[part]
    if not spec.act_order and not bool(index.any()):
        findings.add("data.g-idx-placeholder", name)
        return
    if impossible_groups(index.tolist(), spec.num_groups, spec.group_size) is not None:
        findings.add("data.g-idx-range", name)
        return
    trivial = torch.equal(index.long(), torch.arange(spec.k) // spec.group_size)
    if trivial and spec.act_order:
        findings.add("data.act-order-trivial", name)
    if not trivial:
        findings.add("data.act-order" if spec.act_order else "data.act-order-undeclared", name)


def _scan_pair(
    kind: ExpertKind, parts: Mapping[StoredName, Mapping[str, Tensor]], where: str, findings: _Findings
) -> None:
    import torch

    if "gate" not in kind.projections or "up" not in kind.projections:
        return
    gate, up, described = parts["gate"], parts["up"], kind.projections["up"]
    if described.spec.num_groups > 1:
        for part in _parts_of(described, "index"):
            if part in gate and part in up and not torch.equal(gate[part], up[part]):
                findings.add("data.gate-up-order", where)
    for part in _parts_of(described, "scale2"):
        if part in gate and part in up:
            first, second = float(gate[part].flatten()[0]), float(up[part].flatten()[0])
            if abs(first - second) > _SCALE_TOLERANCE * max(abs(first), abs(second)):
                findings.add("data.gate-up-scale", f"{where} ({first:g} and {second:g})")

"""The config of compressed-tensors (llm-compressor, Kimi, Red Hat AI): groups of targets with per-tensor arguments.

Checked against compressed-tensors 0.6 to 0.20. A field that is null counts as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeq.foreign import plain
from moeq.schemes.base import Granularity, QuantKey, ScaleKey
from moeq.schemes.declared import Declaration, Declared, Fields, group_size
from moeq.schemes.patterns import Patterns

#: Preset that may stand in for a config group -> arguments of its weights.
_PRESETS: dict[str, dict[str, Any]] = {
    "W8A16": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "W4A16": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True},
    "W4A16_ASYM": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": False},
    "W8A8": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "INT8": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "FP8": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
    "FP8_DYNAMIC": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    "NVFP4A16": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "NVFP4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "MXFP4A16": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    "MXFP4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
}

_DYNAMIC_INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
#: Preset -> arguments of its activations, where it quantises integers.
_PRESET_ACTIVATIONS: dict[str, dict[str, Any]] = {"W8A8": _DYNAMIC_INT8, "INT8": _DYNAMIC_INT8}

#: Strategy -> granularity.
_GRANULARITY: dict[str, Granularity] = {
    "tensor": "tensor",
    "channel": "channel",
    "token": "token",
    "group": "group",
    "tensor_group": "group",
    "block": "block",
}

#: Formats of sparse tensors, whose bytes differ under similar names.
_SPARSE = frozenset({"marlin-24", "sparse-24-bitmask", "sparse-bitmask"})


def read_config(table: Mapping[str, Any], origin: str) -> Declaration:
    """Read a `quantization_config` (or, before 0.7, `compression_config`) of compressed-tensors."""
    fields = Fields(table, origin)
    patterns = Patterns(origin)
    groups = [_group(name, value, fields) for name, value in fields.table_of("config_groups").items()]
    ignored = _Targets(fields.names("ignore"), patterns)
    targets = [(_Targets(names, patterns), declared) for names, declared in groups]

    def resolve(module: str) -> Declared | None:
        if ignored.names(module):
            return None
        for target, declared in targets:
            if target.names(module):
                return declared
        # Tensor names do not tell a module's class: a group that targets a class ("Linear") takes all other modules.
        return next((declared for target, declared in targets if target.classes), None)

    return Declaration(
        method="compressed-tensors",
        origin=origin,
        default=targets[0][1] if targets else None,
        resolve=resolve,
        per_expert=any(target.names_experts() for target, _ in targets) or ignored.names_experts(),
        refusal=_refusal(fields),
        raw=table,
    )


class _Targets:
    """Targets or ignore entries: exact module names, `re:` patterns, class names."""

    def __init__(self, entries: list[str], patterns: Patterns) -> None:
        self._patterns = patterns
        self._exact = frozenset(entry for entry in entries if not entry.startswith("re:"))
        self._compiled = [patterns.compile(entry[3:]) for entry in entries if entry.startswith("re:")]
        self.classes = any("." not in entry and entry[:1].isupper() for entry in self._exact)

    def names(self, module: str) -> bool:
        """Return whether an entry names the module."""
        return module in self._exact or any(self._patterns.matches(pattern, module) for pattern in self._compiled)

    def names_experts(self) -> bool:
        """Return whether an entry has `expert` in it, so that experts may be treated one by one."""
        single = any("expert" in entry for entry in self._exact)
        return single or any(_singles_out(pattern.pattern) for pattern in self._compiled)


def _singles_out(pattern: str) -> bool:
    """Return whether a pattern about experts has a digit or class in it that could pick some and leave others."""
    _, found, rest = pattern.partition("expert")
    return bool(found) and any(character.isdigit() or character in "[(\\|" for character in rest.replace("\\.", "."))


def preset_group(name: str, targets: Any) -> dict[str, Any] | None:
    """Return the config group that a preset with a list of targets stands for; None if it is no preset."""
    if not isinstance(targets, list) or name not in _PRESETS:
        return None
    return {"targets": targets, "weights": _PRESETS[name], "input_activations": _PRESET_ACTIVATIONS.get(name)}


def _group(name: str, value: Any, fields: Fields) -> tuple[list[str], Declared]:
    """Return the targets of one config group, and its declaration."""
    where = f"{fields.where}: config_groups[{ascii(name)[:60]}]"
    group = value if isinstance(value, dict) else preset_group(name, value)
    if group is None:
        raise fields.refuse(f"config_groups[{ascii(name)[:60]}]", value, "expected an object")
    inner = Fields(group, where)
    weights = Fields(inner.table_of("weights"), f"{where}.weights")
    variant = inner.text("format") or fields.text("format") or ""
    size = group_size(weights, "group_size")
    strategy = weights.text("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    declared = Declared(
        method="compressed-tensors",
        variant=variant,
        bits=weights.integer("num_bits", low=1, high=16),
        group_size=-1 if strategy == "channel" else size,
        symmetric=weights.flag("symmetric") is not False,
        act_order=_act_order(weights),
        strategy=strategy,
        block=weights.block("block_structure"),
        activation=_activation(Fields(inner.table_of("input_activations"), f"{where}.input_activations")),
        writer=plain(f"compressed-tensors {fields.table.get('version') or ''}".strip()),
        rule=where,
    )
    return inner.names("targets"), declared


def _act_order(weights: Fields) -> bool:
    """Return whether `weight_g_idx` is stored: for `group`, `dynamic` or true, not for `weight` and `static`."""
    value = weights.table.get("actorder")
    if value in (None, False, "weight", "static"):
        return False
    if value in (True, "group", "dynamic"):
        return True
    raise weights.refuse("actorder", value, "expected group, weight, static, dynamic or null")


def _activation(arguments: Fields) -> QuantKey | None:
    if not arguments.table:
        return None
    bits = arguments.integer("num_bits", low=1, high=16) or 8
    kind = arguments.text("type") or "int"
    strategy = arguments.text("strategy") or "tensor"
    granularity = _GRANULARITY.get(strategy, "tensor")
    size = group_size(arguments, "group_size") or -1
    dynamic = arguments.table.get("dynamic") in (True, "local")
    dtype = {(8, "float"): "e4m3", (4, "float"): "e2m1"}.get((bits, kind), f"int{bits}")
    shape = {"tensor": (-1, -1), "token": (1, -1), "channel": (1, -1)}.get(granularity, (1, size))
    symmetric = arguments.flag("symmetric") is not False
    return QuantKey(dtype, "runtime", ScaleKey("f32", granularity, shape, dynamic), symmetric)


def _refusal(fields: Fields) -> str | None:
    # An empty one is written as {"config_groups": {}}.
    if any(fields.table_of("transform_config").values()):
        return "its weights are transformed (transform_config), which changes the model's mathematics"
    sparsity = fields.table_of("sparsity_config").get("format")
    variant = fields.text("format")
    if variant in _SPARSE or sparsity not in (None, "dense"):
        return f"its weights are sparse ({variant if variant in _SPARSE else ascii(sparsity)[:40]})"
    return None

"""Types of a quantisation config, checked once before any engine's rules read it: configs are untrusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeq.typed import read_as

_TABLE = dict[str, Any] | None
_NAMES = list[str] | None
#: Quark's tensors have one table of facts, or one for each level of scales.
_LEVELS = dict[str, Any] | list[dict[str, Any]] | None
_ROWS = dict[str, dict[str, Any]] | None

#: What rules walk through, wherever it is in a config. Single values they read are checked where they are read.
_KINDS: dict[str, Any] = {
    "dynamic": dict[str, dict[str, Any] | bool] | None,
    "config_groups": _ROWS,
    "layer_quant_config": _ROWS,
    "quantized_layers": _ROWS,
    "extra_config": _ROWS,
    "global_quant_config": _TABLE,
    "weight": _LEVELS,
    "weights": _TABLE,
    "input_tensors": _LEVELS,
    "input_activations": _TABLE,
    "quantization": _TABLE,
    "ignore": _NAMES,
    "ignored_layers": _NAMES,
    "targets": _NAMES,
    "modules_to_not_convert": _NAMES,
    "exclude": _NAMES,
    "exclude_modules": _NAMES,
}

#: Tables of arguments of compressed-tensors.
_ARGUMENT_TABLES = ("weights", "input_activations")

#: Arguments of compressed-tensors, in which null and absent are the same.
_ARGUMENTS: dict[str, Any] = {
    "num_bits": int | None,
    "type": str | None,
    "strategy": str | None,
    "symmetric": bool | None,
    "group_size": int | None,
    "dynamic": bool | str | None,
    "actorder": bool | str | None,
}


def checked(config: Mapping[str, Any], where: str = "quantization_config") -> dict[str, Any]:
    """A config without what is null, in which everything that rules walk through has its type.

    Raises:
        MoeqError: `source.bad-config`, with the place.
    """
    found: dict[str, Any] = {}
    for name, value in config.items():
        place = f"{where}.{ascii(name)[1:-1][:80]}"
        argument = name in _ARGUMENTS and where.endswith(_ARGUMENT_TABLES)  # `dynamic: local` there, checked below
        if name in _KINDS and not argument and (name != "dynamic" or not isinstance(value, bool)):
            value = read_as(_KINDS[name], value, place, "source.bad-config")
            if value is None:
                continue
        if name in _ARGUMENT_TABLES and isinstance(value, dict):
            for key in value.keys() & _ARGUMENTS.keys():
                read_as(_ARGUMENTS[key], value[key], f"{place}.{key}", "source.bad-config")
            value = {key: one for key, one in value.items() if one is not None}
        found[name] = checked(value, place) if isinstance(value, dict) else value
    return found

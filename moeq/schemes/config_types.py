"""Check the types of a `quantization_config` before rules of engines iterate over it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeq.schemes.compressed_tensors import preset_group
from moeq.typed import read_as

_TABLE = dict[str, Any] | None
_NAMES = list[str] | None
#: Quark describes a tensor by one table, or by one table per level of scales.
_LEVELS = dict[str, Any] | list[dict[str, Any]] | None
_ROWS = dict[str, dict[str, Any]] | None

#: Key at any depth -> type of the container that rules iterate over. Readers check single values themselves.
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
    "block_name_to_quantize": _NAMES | str,
    "to_quant_block_names": _NAMES | str,
    "modules_in_block_to_quantize": list[str | list[str]] | None,
    "export": _TABLE,
}

#: Names of compressed-tensors' tables of arguments.
_ARGUMENT_TABLES = ("weights", "input_activations")

#: Arguments of compressed-tensors, for which null means absent.
_ARGUMENTS: dict[str, Any] = {
    "num_bits": int | None,
    "type": str | None,
    "strategy": str | None,
    "symmetric": bool | None,
    "group_size": int | None,
    "dynamic": bool | str | None,
    "actorder": bool | str | None,
}


class CheckedConfig(dict[str, Any]):
    """A `quantization_config` whose types were checked."""


def checked(config: Mapping[str, Any]) -> CheckedConfig:
    """Return a config with checked types of everything that rules iterate over, and without null entries.

    Raises MoeqError `source.bad-config`, with the path of the wrong entry.
    """
    return config if isinstance(config, CheckedConfig) else CheckedConfig(_table(config, "quantization_config"))


def _table(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return one table of a config, checked with the tables in it."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        place = f"{where}.{ascii(name)[1:-1][:80]}"
        # In a table of arguments `dynamic` may be `local`: it is checked below.
        argument = name in _ARGUMENTS and where.endswith(_ARGUMENT_TABLES)
        if name == "config_groups" and isinstance(value, Mapping):
            value = {key: _group(key, group) for key, group in value.items()}
        if name in _KINDS and not argument and (name != "dynamic" or not isinstance(value, bool)):
            value = read_as(_KINDS[name], value, place, "source.bad-config")
            if value is None:
                continue
        if name in _ARGUMENT_TABLES and isinstance(value, dict):
            for key in value.keys() & _ARGUMENTS.keys():
                read_as(_ARGUMENTS[key], value[key], f"{place}.{key}", "source.bad-config")
            value = {key: one for key, one in value.items() if one is not None}
        found[name] = _table(value, place) if isinstance(value, dict) else value
    return found


def _group(name: str, group: Any) -> Any:
    """Return a config group; a group made from a preset has the key `preset`, since engines refuse presets."""
    preset = preset_group(name, group)
    return group if preset is None else {**preset, "preset": name}

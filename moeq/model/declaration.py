"""Find the quantisation config of a checkpoint, in `config.json` or in a side file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moeq.checkpoint.facts import TEXT_CONFIGS, descend
from moeq.checkpoint.warning import CheckpointWarning
from moeq.errors import MoeqError
from moeq.schemes.declared import Declaration
from moeq.schemes.registry import read_dialect

#: Keys of `config.json` (and of its language-model sub-configs) that hold a quantisation config.
_KEYS = ("quantization_config", "compression_config")

#: Side file -> method if the file does not name one.
_SIDE_METHODS = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "quantization_config.json": "auto-round",
    "hf_quant_config.json": "modelopt",
    "quant_model_description.json": "ascend",
}

#: Other name of a method in configs -> name in moeq.
_ALIASES = {
    "compressed_tensors": "compressed-tensors",
    "sparseml": "compressed-tensors",
    "intel/auto-round": "auto-round",
    "inc": "auto-round",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "nvfp4": "modelopt",
    # Names of engine kernels in hand-edited configs.
    "gptq_marlin": "gptq",
    "awq_marlin": "awq",
}

#: Keys that have to agree in all copies of a config; a difference is a warning.
_COMPARED = (
    "bits",
    "group_size",
    "sym",
    "desc_act",
    "checkpoint_format",
    "version",
    "zero_point",
    "extra_config",
    "dynamic",
)


def find_declaration(
    config: Mapping[str, Any], side_configs: Mapping[str, Mapping[str, Any]]
) -> tuple[Declaration | None, list[CheckpointWarning]]:
    """Return the quantisation config that takes effect, and warnings about copies that differ from it.

    `config.json` takes precedence over side files. The config is None if nothing declares a quantisation.
    """
    found = list(_candidates(config, side_configs))
    if not found:
        return None, []
    origin, method, table = found[0]
    warnings = [warning for other in found[1:] for warning in _differences(found[0], other)]
    declaration = read_dialect(method, table, origin)
    if declaration is None:
        declaration = Declaration(
            method=method,
            origin=origin,
            default=None,
            resolve=lambda module: None,
            refusal=f"moeq does not read the format {method!r}",
            raw=table,
        )
    return declaration, warnings


def _candidates(
    config: Mapping[str, Any], side_configs: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield `(origin, method, table)` of every quantisation config, the one that takes effect first."""
    for prefix, scope in _scopes(config):
        for key in _KEYS:
            table = scope.get(key)
            if table is None or table == {}:
                continue
            origin = f"config.json: {prefix}{key}"
            if not isinstance(table, Mapping):
                raise MoeqError("source.bad-config", f"{origin} is {ascii(table)[:60]}, expected an object")
            yield origin, _method(table, "compressed-tensors" if key == "compression_config" else None, origin), table
    mlx = config.get("quantization")
    if isinstance(mlx, Mapping) and "bits" in mlx:
        yield "config.json: quantization", "mlx", mlx
    for file, table in side_configs.items():
        if file in _SIDE_METHODS and table:
            yield file, _method(table, _SIDE_METHODS[file], file), table


def _scopes(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "", config
    for path in TEXT_CONFIGS:
        if isinstance(scope := descend(config, path), Mapping):
            yield f"{path}.", scope


def _method(table: Mapping[str, Any], default: str | None, origin: str) -> str:
    value = table.get("quant_method") or table.get("method") or default
    if value is None and (table.get("load_in_4bit") or table.get("load_in_8bit")):
        value = "bitsandbytes"
    if not isinstance(value, str) or not value.isprintable() or len(value) > 100:
        raise MoeqError("source.bad-config", f"{origin}: quant_method is {ascii(value)[:60]}, expected a name")
    lowered = value.lower()
    return _ALIASES.get(lowered, lowered)


def _differences(
    first: tuple[str, str, Mapping[str, Any]], other: tuple[str, str, Mapping[str, Any]]
) -> Iterator[CheckpointWarning]:
    if first[1] != other[1]:
        message = f"{first[0]} says {first[1]}, {other[0]} says {other[1]}; the first counts"
        yield CheckpointWarning("config.copies-differ", message)
        return
    for key in _COMPARED:
        here, there = first[2].get(key), other[2].get(key)
        if key in first[2] and key in other[2] and here != there:
            shown = f"{_brief(here)} in {first[0]} and {_brief(there)} in {other[0]}"
            yield CheckpointWarning("config.copies-differ", f"{key} is {shown}; the first counts")


def _brief(value: Any) -> str:
    return f"{len(value)} rules" if isinstance(value, (dict, list)) else ascii(value)[:40]

"""Hostile checkpoints: configs that are not what they should be.

Each input ends in one clear line, or is read and described. The numbers in the names are those of the project's list
of inputs seen in practice; 1, 2, 54, 55 and 56 need a server (`test_hub.py`), 57 and 58 concern writing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint.builder import (
    config,
    quantization,
    write,
)
from checkpoint.refusals import refused


@pytest.mark.parametrize(
    "pattern", ["(", "[z-a]", "(a+)+$", "(.*)*x", "(x|xx)*y{2,}(z+)+", "a" * 5000, ".*.*.*.*.*.*.*x"]
)
def test_case_41_patterns(tmp_path: Path, pattern: str) -> None:
    table = quantization(dynamic={pattern: {"bits": 8}})
    refused(write(tmp_path, None, config(quantization_config=table)), "source.bad-pattern", "dynamic")
    ignore = config(quantization_config={"quant_method": "compressed-tensors", "ignore": [f"re:{pattern}"]})
    refused(write(tmp_path, None, ignore), "source.bad-pattern")


CONFIGS: dict[str, bytes] = {
    "empty": b"",
    "not an object": b"[]",
    "byte order mark": b"\xef\xbb\xbf{}",
    "comments": b'{"a": 1} // comment',
    "trailing comma": b'{"a": 1,}',
    "NaN": b'{"hidden_size": NaN}',
    "duplicate keys": b'{"hidden_size": 1, "hidden_size": 2}',
    "huge integer": b'{"hidden_size": ' + b"9" * 5000 + b"}",
    "deep nesting": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "not UTF-8": b'{"a": "\xff"}',
    "cut off": b'{"a": {"b": 1',
}


@pytest.mark.parametrize("name", CONFIGS)
def test_case_42_config_is_not_json(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path)
    (folder / "config.json").write_bytes(CONFIGS[name])
    refused(folder, "source.bad-config", "config.json")


def test_case_42_config_of_a_hundred_megabytes(tmp_path: Path) -> None:
    folder = write(tmp_path)
    with (folder / "config.json").open("wb") as stream:
        stream.truncate(100 << 20)
    refused(folder, "source.too-large", "config.json", "104,857,600")


@pytest.mark.parametrize("value", ["4", 4.0, True, [4], {}, 0, -4, 3.04, 10**9])
def test_case_43_bits_of_the_wrong_type(tmp_path: Path, value: Any) -> None:
    folder = write(tmp_path, None, config(quantization_config=quantization(bits=value)))
    refused(folder, "source.bad-config", "bits", ascii(value)[:60])


@pytest.mark.parametrize("value", ["128", 0, -2, 32.0, True, [128]])
def test_case_43_group_size_of_the_wrong_type(tmp_path: Path, value: Any) -> None:
    folder = write(tmp_path, None, config(quantization_config=quantization(group_size=value)))
    refused(folder, "source.bad-config", "group_size", ascii(value))


@pytest.mark.parametrize("key", ["hidden_size", "num_experts", "num_hidden_layers", "num_experts_per_tok"])
@pytest.mark.parametrize("value", ["64", 64.5, True, -1, {}, float("inf")])
def test_case_43_sizes_of_the_wrong_type(tmp_path: Path, key: str, value: Any) -> None:
    refused(write(tmp_path, None, config(**{key: value})), "source.bad-config", key)


@pytest.mark.parametrize("value", ["x", 5, [], [1]])
def test_case_43_quantisation_config_of_the_wrong_type(tmp_path: Path, value: Any) -> None:
    refused(write(tmp_path, None, config(quantization_config=value)), "source.bad-config", "quantization_config")


@pytest.mark.parametrize("key", ["num_experts", "num_hidden_layers", "hidden_size", "moe_intermediate_size"])
def test_case_44_enormous_sizes(tmp_path: Path, key: str) -> None:
    refused(write(tmp_path, None, config(**{key: 10**9})), "source.bad-config", key, "1000000000")

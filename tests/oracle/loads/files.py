"""Writes a case as a checkpoint folder. Values fit their dtype and are never what a fresh parameter holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from oracle.loads.formats import Part, Row

#: Random bits of each dtype: numpy type, lowest and highest pattern. Floats are between 0.5 and 2, and no code is the
#: largest integer, with which torch fills fresh memory in deterministic mode.
_PATTERNS: dict[str, tuple[str, int, int]] = {
    "F32": ("<u4", 0x3F000000, 0x3F7FFFFF),
    "F16": ("<u2", 0x3800, 0x3BFF),
    "BF16": ("<u2", 0x3F00, 0x3F7F),
    "F8_E4M3": ("u1", 0x30, 0x37),
    "F8_E8M0": ("u1", 0x70, 0x7D),
    "U8": ("u1", 0x02, 0x7D),
    "I8": ("u1", 0x02, 0x7D),
    "I32": ("<u4", 0x01010101, 0x77777777),
    "I64": ("<u8", 1, 1000),
}
_NUMBERS = {"F32": "<f4", "F16": "<f2", "I32": "<i4", "I64": "<i8"}


def _bytes(rng: np.random.Generator, dtype: str, shape: tuple[int, ...], values: Any) -> bytes:
    kind, low, high = _PATTERNS[dtype]
    if isinstance(values, list) and values and isinstance(values[0], str):  # `g_idx`: its kind, weights per group
        groups = np.arange(shape[-1], dtype="<i4") // values[1]
        kinds = {
            "zeros": groups * 0,
            "sorted": rng.permutation(groups),
            "constant": groups * 0 + 5,
            "reversed": groups[::-1],
        }
        found = kinds.get(values[0], groups)
        return np.resize(found.astype("<i4"), shape).tobytes()
    if isinstance(values, list) and dtype in _NUMBERS:
        return np.resize(np.array(values, _NUMBERS[dtype]), shape).tobytes()
    if isinstance(values, list) and dtype == "BF16":
        bits = np.array(values, "<f4").view("<u4") >> 16
        return np.resize(bits.astype("<u2"), shape).tobytes()
    if isinstance(values, list):  # a constant: one that no dtype rounds, since engines compare scales
        return np.full(shape, (low + high) // 2, kind).tobytes()
    return rng.integers(low, high, shape, dtype=np.dtype(kind)).tobytes()


def write(folder: Path, case: Row) -> Path:
    """Write config.json, side files and safetensors files; equal cases give equal bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(case["config"]))
    for name, body in case["side"].items():
        (folder / f"{name}.json").write_text(json.dumps(body))
    rng = np.random.default_rng(case["id"])
    if not case["stale"]:
        _write_tensors(folder / "model.safetensors", case["tensors"], rng)
        return folder
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    last = next(name for name in case["tensors"] if name.endswith("head.weight"))
    _write_tensors(folder / first, {name: row for name, row in case["tensors"].items() if name != last}, rng)
    _write_tensors(folder / second, {**case["stale"], last: case["tensors"][last]}, rng)
    places = {name: second if name == last else first for name in case["tensors"]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def _write_tensors(path: Path, tensors: dict[str, Part], rng: np.random.Generator) -> None:
    header: Row = {"__metadata__": {"format": "pt"}}
    blobs = []
    position = 0
    for name, (dtype, shape, values) in tensors.items():
        blob = _bytes(rng, dtype, tuple(shape), values)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + len(blob)]}
        position += len(blob)
        blobs.append(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))

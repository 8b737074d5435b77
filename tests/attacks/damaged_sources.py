"""Random damage to checkpoints for `moeq transcode`: headers, configs, index, data, links, names, destinations.

Every kind of damage takes a copy of a checkpoint and a generator of random numbers, and changes files in place. Kinds
say nothing about the answer: some damage is harmless.
"""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attacks.mutations import REMOVED, places, with_value

#: Values that are put into configs: what a careless writer or an attacker would write.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 5, 7, 8, 16, 24, 100, 1 << 31, 1 << 63, 1.5, float("nan"), float("inf"), "", "4",
    "../x", "group", "channel", "tensor", "float", "int", "gptq", "awq", "fp8", [], [1], {}, {"a": 1}, REMOVED,
)  # fmt: skip
DTYPES = ("BF16", "F16", "F32", "I32", "U8", "I8", "F8_E4M3", "F8_E8M0", "I64", "BOOL", "F4", "X9", 7, None)


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def write_header(path: Path, header: Any, data: bytes) -> None:
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def shard(folder: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(folder.glob("*.safetensors")))


def _tensor(header: dict[str, Any], rng: random.Random) -> str:
    names = sorted(name for name in header if name != "__metadata__")
    experts = [name for name in names if "expert" in name]
    return rng.choice(experts if experts and rng.random() < 0.8 else names)


def header_bytes(folder: Path, rng: random.Random) -> None:
    path = shard(folder, rng)
    data = bytearray(path.read_bytes())
    size = struct.unpack("<Q", data[:8])[0]
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(8 + size)] = rng.randrange(256)
    path.write_bytes(data)


def header_entry(folder: Path, rng: random.Random) -> None:
    path = shard(folder, rng)
    header, data = header_of(path)
    entry = header[_tensor(header, rng)]
    kind = rng.randrange(4)
    if kind == 0:
        entry["dtype"] = rng.choice(DTYPES)
    elif kind == 1:
        where = rng.randrange(len(entry["shape"]) + 1)
        entry["shape"].insert(where, rng.choice((0, 1, 2, -1, 1 << 40, 1.5, "3")))
    elif kind == 2 and entry["shape"]:
        entry["shape"][rng.randrange(len(entry["shape"]))] = rng.choice((0, 1, 3, 31, 1 << 62, None))
    else:
        entry["data_offsets"] = [rng.choice((0, 1, -8, 1 << 50)), rng.choice((8, 0, 1 << 51))]
    write_header(path, header, data)


def header_like(folder: Path, rng: random.Random) -> None:
    """Another dtype of the same size, or another shape of as many numbers: the bytes still fit."""
    path = shard(folder, rng)
    header, data = header_of(path)
    entry = header[_tensor(header, rng)]
    same = {"BF16": ("F16", "I16"), "F16": ("BF16",), "I32": ("F32", "U32"), "F32": ("I32",), "U8": ("I8", "F8_E4M3")}
    same |= {"F8_E4M3": ("U8", "I8", "F8_E5M2", "F8_E8M0"), "I8": ("U8", "F8_E4M3"), "I64": ("U64", "F64")}
    if rng.random() < 0.5:
        entry["dtype"] = rng.choice(same.get(entry["dtype"], ("U8",)))
    else:
        entry["shape"] = rng.choice((entry["shape"][::-1], [*entry["shape"], 1], [1, *entry["shape"]]))
    write_header(path, header, data)


def tensor_names(folder: Path, rng: random.Random) -> None:
    """A tensor is lost, renamed to something odd, or doubled under another name."""
    path = shard(folder, rng)
    header, data = header_of(path)
    name = _tensor(header, rng)
    odd = ("", "..", "a/../../b", "\x1b[2J", "\u202e" + name, "\ud800", name + "\n", "x" * 70_000, name.upper())
    odd += (name.replace("experts.0", "experts.00"), name.replace(".0.", ".99999."), name.replace("experts", "expert"))
    entry = header[name] if rng.random() < 0.2 else header.pop(name)
    if rng.random() < 0.8:
        header[rng.choice(odd)] = entry
    write_header(path, header, data)


def config_value(folder: Path, rng: random.Random) -> None:
    path = folder / "config.json"
    document = json.loads(path.read_text())
    inside = [place for place in places(document) if place[0] == "quantization_config"]
    where = rng.choice(inside if inside and rng.random() < 0.7 else list(places(document)))
    path.write_text(json.dumps(with_value(document, where, rng.choice(VALUES))))


def config_bytes(folder: Path, rng: random.Random) -> None:
    path = folder / "config.json"
    kinds: tuple[bytes, ...] = (b"", b"null", b"[]", b'{"a": NaN}', b"\xff\xfe", b"[" * 3000, path.read_bytes()[:-40])
    path.write_bytes(rng.choice(kinds))


def index(folder: Path, rng: random.Random) -> None:
    path = folder / "model.safetensors.index.json"
    names = sorted(name for file in folder.glob("*.safetensors") for name in header_of(file)[0] if name[0] != "_")
    file = sorted(folder.glob("*.safetensors"))[0].name
    listed: dict[str, Any] = dict.fromkeys(names, file)
    wrong = rng.choice(("missing.safetensors", "../" + file, "/etc/passwd", 7, None, "config.json", "", "x\x00y"))
    kinds: tuple[Any, ...] = (
        {"weight_map": {**listed, rng.choice(names): wrong}},
        {"weight_map": {**listed, "more": file}},
        {"weight_map": dict(list(listed.items())[:3])},
        {"weight_map": {}},
        {"weight_map": [names]},
        {},
        [],
    )
    path.write_text(json.dumps(rng.choice(kinds)))


def truncated(folder: Path, rng: random.Random) -> None:
    path = shard(folder, rng)
    size = path.stat().st_size
    os.truncate(path, rng.choice((0, 4, 8, size - 1, size // 2, size + 9, size - 4096)))


def data_bytes(folder: Path, rng: random.Random) -> None:
    """All bytes of one part of an expert become one value: NaN scales, zero points and indices out of range."""
    path = shard(folder, rng)
    header, data = header_of(path)
    body = bytearray(data)
    parts = ("scales", "weight_scale", "weight_scale_inv", "qzeros", "weight_zero_point", "g_idx", "weight_shape")
    parts += ("weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale", "weight_packed", "weight")
    named = [n for n in sorted(header) if n.rpartition(".")[2] in parts or n.endswith(("_scales", "_blocks"))]
    name = rng.choice(named or sorted(n for n in header if n[0] != "_"))
    start, stop = header[name]["data_offsets"]
    value = rng.choice((0x00, 0xFF, 0x7F, 0x80, 0x7C, 0xF8, 0x01))
    for position in range(start, stop if rng.random() < 0.6 else min(start + 8, stop)):
        body[position] = value if rng.random() < 0.9 else rng.randrange(256)
    write_header(path, header, bytes(body))


def links(folder: Path, rng: random.Random) -> None:
    """A file is a link: to itself, to nothing, to a folder, a device, a file elsewhere; or a pipe, or a folder."""
    path = rng.choice(sorted(p for p in folder.iterdir() if p.name != "README.md"))
    kept = folder.parent / f"elsewhere-{path.name}"
    kind = rng.randrange(7)
    path.rename(kept)
    if kind == 0:
        path.symlink_to(path.name)
    elif kind == 1:
        path.symlink_to("nothing")
    elif kind == 2:
        path.symlink_to(folder)
    elif kind == 3:
        path.symlink_to("/dev/zero")
    elif kind == 4:
        path.symlink_to(kept)
    elif kind == 5:
        os.mkfifo(path)
    else:
        path.mkdir()


KINDS: tuple[Callable[[Path, random.Random], None], ...] = (
    header_bytes, header_entry, header_like, tensor_names, config_value, config_bytes, index, truncated, data_bytes,
    links,
)  # fmt: skip

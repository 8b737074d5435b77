"""Small checkpoints made from scratch, for tests that need one thing about them to be wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

WIDTHS = {
    "I32": 4,
    "F16": 2,
    "BF16": 2,
    "F32": 4,
    "I64": 8,
    "I8": 1,
    "U8": 1,
    "F8_E4M3": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U32": 4,
}

HIDDEN, INTERMEDIATE, EXPERTS, GROUP = 64, 32, 2, 32


class Stored(NamedTuple):
    """A tensor to write: zero bytes where no data is given."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes = b""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * WIDTHS[self.dtype]

    @property
    def bytes(self) -> bytes:
        return self.data or bytes(self.nbytes)


Tensors = dict[str, Stored]


def header_of(tensors: Mapping[str, Stored]) -> dict[str, Any]:
    """The JSON header of a well-formed file."""
    header: dict[str, Any] = {}
    offset = 0
    for name, stored in tensors.items():
        header[name] = {
            "dtype": stored.dtype,
            "shape": list(stored.shape),
            "data_offsets": [offset, offset + stored.nbytes],
        }
        offset += stored.nbytes
    return header


def file_bytes(header: bytes | dict[str, Any], data: bytes = b"") -> bytes:
    """A file with that header, however wrong."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def write_file(path: Path, tensors: Mapping[str, Stored]) -> None:
    """A well-formed safetensors file."""
    path.write_bytes(file_bytes(header_of(tensors), b"".join(stored.bytes for stored in tensors.values())))


def words(value: int, count: int) -> bytes:
    """`count` equal 32-bit words."""
    return struct.pack("<I", value) * count


def halves(value: float, count: int) -> bytes:
    """`count` equal float16 values."""
    return struct.pack("<e", value) * count


def gptq(n: int, k: int, *, bits: int = 4, group: int = GROUP, zeros: int | None = None, scale: float = 0.5) -> Tensors:
    """Parts of one GPTQ projection (version 1, symmetric unless `zeros` says otherwise)."""
    groups = -(-k // group)
    zero = zeros if zeros is not None else {4: 0x77777777, 8: 0x7F7F7F7F, 2: 0x55555555}[bits]
    index = struct.pack(f"<{k}i", *(column // group for column in range(k)))
    return {
        "qweight": Stored("I32", (k * bits // 32, n)),
        "qzeros": Stored("I32", (groups, n * bits // 32), words(zero, groups * (n * bits // 32))),
        "scales": Stored("F16", (groups, n), halves(scale, groups * n)),
        "g_idx": Stored("I32", (k,), index),
    }


def experts(
    prefix: str = "model.layers.0.mlp.experts",
    count: int = EXPERTS,
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    make: Any = gptq,
    **more: Any,
) -> Tensors:
    """The experts of one layer, one module per projection; an empty name leaves the projection out."""
    tensors: Tensors = {}
    for expert in range(count):
        for name, (n, k) in zip(names, ((intermediate, hidden),) * 2 + ((hidden, intermediate),), strict=True):
            if name:
                tensors |= {f"{prefix}.{expert}.{name}.{part}": stored for part, stored in make(n, k, **more).items()}
    return tensors


def quantization(**changes: Any) -> dict[str, Any]:
    """A GPTQ config."""
    base = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
    return {**base, "checkpoint_format": "gptq", **changes}


def config(**changes: Any) -> dict[str, Any]:
    """A Qwen3-MoE config of one layer; a value of None removes the key."""
    base = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INTERMEDIATE,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "quantization_config": quantization(),
    }
    return {key: value for key, value in {**base, **changes}.items() if value is not None}


def ct(bits: int, words_per_row: int | None = None, **more: Stored) -> Any:
    """Maker of compressed-tensors pack-quantized projections, one scale per channel."""

    def make(n: int, k: int) -> Tensors:
        return {
            "weight_packed": Stored("I32", (n, words_per_row or k * bits // 32)),
            "weight_scale": Stored("BF16", (n, 1), struct.pack("<H", 0x3F80) * n),
            "weight_shape": Stored("I64", (2,), struct.pack("<qq", n, k)),
            **more,
        }

    return make


def ct_config(**weights: Any) -> dict[str, Any]:
    """A config for `ct`; `weights` changes its arguments."""
    base = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": {**base, **weights}}
    table = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    return config(quantization_config=table)


def router(layer: int = 0, count: int = EXPERTS) -> Tensors:
    """An unquantised router."""
    return {f"model.layers.{layer}.mlp.gate.weight": Stored("BF16", (count, HIDDEN))}


def write(folder: Path, tensors: Mapping[str, Stored] | None = None, document: Mapping[str, Any] | None = None) -> Path:
    """A checkpoint in one file."""
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "model.safetensors", {**router(), **experts()} if tensors is None else tensors)
    (folder / "config.json").write_text(json.dumps(config() if document is None else document))
    return folder


def write_sharded(folder: Path, shards: Mapping[str, Mapping[str, Stored]], **index: Any) -> Path:
    """A checkpoint in several files with an index; `index` replaces entries of the index document."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for file, tensors in shards.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        write_file(folder / file, tensors)
        weight_map |= {name: file for name in tensors if name not in weight_map}
    total = sum(stored.nbytes for tensors in shards.values() for stored in tensors.values())
    document = {"metadata": {"total_size": total}, "weight_map": weight_map, **index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    (folder / "config.json").write_text(json.dumps(config()))
    return folder


def halved() -> Iterator[Tensors]:
    """The default tensors, in two halves."""
    tensors = list({**router(), **experts()}.items())
    middle = len(tensors) // 2
    yield dict(tensors[:middle])
    yield dict(tensors[middle:])

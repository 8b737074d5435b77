"""Write a random GGUF file with the tensor names and shapes of a real model, of any number of layers.

    python examples/bench/make_gguf.py FILE --model qwen3-30b-a3b --type q8_0 [--layers N] [--experts N]

Experts are blocks of the type, whose scales are small; everything else is bfloat16. Sizes are `make_checkpoint.py`'s.
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from make_checkpoint import MODELS, Model, Size

CHUNK_BLOCKS = 1 << 17


class BlockType(NamedTuple):
    """A type: its number, elements and bytes of a block, and where it has float16 scales (or one exponent byte)."""

    number: int
    block: int
    octets: int
    scales: tuple[int, ...] = ()


TYPES = {
    "f32": BlockType(0, 1, 4),
    "bf16": BlockType(30, 1, 2),
    "q4_0": BlockType(2, 32, 18, (0,)),
    "q8_0": BlockType(8, 32, 34, (0,)),
    "q4_k": BlockType(12, 256, 144, (0, 2)),
    "q6_k": BlockType(14, 256, 210, (208,)),
    "mxfp4": BlockType(39, 32, 17),
}

#: llama.cpp's architectures and names of attention projections.
ARCHITECTURES = {"qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}
NAMES = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}


def tensors(model: Model, kind: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, type and row-major shape of every tensor."""
    yield "token_embd.weight", "bf16", (model.vocab, model.hidden)
    for layer in range(model.layers):
        block = f"blk.{layer}"
        for norm in ("attn_norm", "ffn_norm"):
            yield f"{block}.{norm}.weight", "f32", (model.hidden,)
        for name, shape in model.attention.items():
            yield f"{block}.{NAMES[name]}.weight", "bf16", shape
        yield f"{block}.ffn_gate_inp.weight", "f32", (model.num_experts, model.hidden)
        for name in ("gate", "up"):
            yield f"{block}.ffn_{name}_exps.weight", kind, (model.num_experts, model.intermediate, model.hidden)
        yield f"{block}.ffn_down_exps.weight", kind, (model.num_experts, model.hidden, model.intermediate)
    yield "output_norm.weight", "f32", (model.hidden,)
    yield "output.weight", "bf16", (model.vocab, model.hidden)


def random_blocks(generator: np.random.SFC64, kind: str, count: int) -> np.ndarray:
    """Blocks of random bits, uint8 `[count, bytes]`."""
    _, _, octets, scales = TYPES[kind]
    blocks = generator.random_raw(-(-count * octets // 8)).view(np.uint8)[: count * octets].reshape(count, octets)
    if kind in ("f32", "bf16"):
        blocks[:, -1] = 0x3C  # of the size of 2^-7
    for at in scales:
        blocks[:, at + 1] = 0x20 | blocks[:, at + 1] & 3  # 2^-7 to 2^-6
    if kind == "mxfp4":
        blocks[:, 0] = 0x70 | blocks[:, 0] & 7
    return blocks


def metadata(model: Model) -> dict[str, str | int]:
    """What a reader needs to know of the model."""
    name = ARCHITECTURES[model.config["model_type"]]
    sizes = {
        "block_count": model.layers,
        "embedding_length": model.hidden,
        "expert_feed_forward_length": model.intermediate,
        "expert_count": model.num_experts,
        "expert_used_count": model.config["num_experts_per_tok"],
        "attention.head_count": model.config["num_attention_heads"],
        "attention.head_count_kv": model.config["num_key_value_heads"],
    }
    return {"general.architecture": name, **{f"{name}.{key}": value for key, value in sizes.items()}}


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def write_gguf(path: Path, model: Model, kind: str, seed: int = 0) -> None:
    """Write a file of version 3."""
    found, values, offset = list(tensors(model, kind)), metadata(model), 0
    head = b"GGUF" + struct.pack("<IQQ", 3, len(found), len(values))
    for key, value in values.items():
        head += text(key)
        head += struct.pack("<I", 8) + text(value) if isinstance(value, str) else struct.pack("<II", 4, value)
    for name, own, shape in found:
        number, block, octets, _ = TYPES[own]
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], number, offset)
        offset += -(-prod(shape) // block * octets // 32) * 32
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % 32))
        generator = np.random.SFC64(seed)
        for _, own, shape in found:
            count = prod(shape) // TYPES[own].block
            for start in range(0, count, CHUNK_BLOCKS):
                file.write(random_blocks(generator, own, min(CHUNK_BLOCKS, count - start)).data)
            file.write(bytes(-file.tell() % 32))


def main() -> None:
    """Write the file that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="file to create")
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b-a3b")
    parser.add_argument("--type", choices=TYPES, default="q8_0", help="type of the experts [q8_0]")
    parser.add_argument("--layers", type=int, default=1, help="layers [1]")
    parser.add_argument("--experts", type=int, help="experts per layer [as the model]")
    options = parser.parse_args()
    model = Size(options.layers, options.experts).of(MODELS[options.model])
    write_gguf(options.file, model, options.type)
    print(f"{options.file}: {options.file.stat().st_size / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()

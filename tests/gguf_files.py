"""Small GGUF files: a writer of the container, random blocks of any type, and models of llama.cpp's architectures."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from moeq.gguf.header import TYPES

NUMBERS = {title: (number, block, octets) for number, (title, block, octets) in TYPES.items()}

#: Offsets of the float16 numbers in a block, by type; other bytes may have any value.
HALVES = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q2_k": (80, 82), "q3_k": (108,),
    "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "iq2_xxs": (0,), "iq2_xs": (0,), "iq2_s": (0,), "iq3_xxs": (0,),
    "iq3_s": (0,), "iq1_s": (0,), "iq4_nl": (0,), "iq4_xs": (0,), "tq1_0": (52,), "tq2_0": (64,),
}  # fmt: skip

Tensor = tuple[str, tuple[int, ...], bytes]


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value_of(value: Any) -> bytes:
    """Spell a metadata value with its type."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    return struct.pack("<IIQ", 9, 5, len(value)) + np.array(value, "<i4").tobytes()


def gguf_bytes(metadata: dict[str, Any], tensors: dict[str, Tensor], alignment: int = 32, hole: int = 0) -> bytes:
    """Return a file of version 3. Tensors are `(type, row-major shape, data)` by name.

    Offsets count a `hole` of so many bytes before the first tensor, which is left out.
    """
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(text(key) + value_of(value) for key, value in metadata.items())
    offset, data = hole, b""
    for name, (kind, shape, raw) in tensors.items():
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += text(name) + dims + struct.pack("<IQ", NUMBERS[kind][0], offset)
        padded = raw + bytes(-len(raw) % alignment)
        data += padded
        offset += len(padded)
    return head + bytes(-len(head) % alignment) + data


def random_tensor(rng: np.random.Generator, kind: str, shape: tuple[int, ...], *, small: bool = False) -> Tensor:
    """Make a tensor of random blocks whose scales are finite; `small` leaves few enough bits for bfloat16."""
    count = int(np.prod(shape))
    if kind in ("f32", "f16", "bf16"):
        values = rng.standard_normal(count).astype(np.float32)
        if kind == "bf16" or small:
            values = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
        raw = values.astype(np.float16) if kind == "f16" else values
        return kind, shape, (values.view(np.uint32) >> 16).astype("<u2").tobytes() if kind == "bf16" else raw.tobytes()
    _, block, octets = NUMBERS[kind]
    blocks = rng.integers(0, 256, (count // block, octets), np.uint8)
    for at in HALVES.get(kind, ()):
        scales = (rng.standard_normal(len(blocks)) * 0.02).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    if kind == "mxfp4":
        blocks[:, 0] = rng.integers(100, 130, len(blocks))
    if kind == "nvfp4":
        blocks[:, :4] = rng.integers(0, 127, (len(blocks), 4))
    if kind == "iq1_m":  # the four high nibbles of its scales are one float16
        half = (rng.standard_normal(len(blocks)) * 0.02).astype(np.float16).view(np.uint16)
        for part in range(4):
            high = blocks[:, 49 + 2 * part]
            blocks[:, 49 + 2 * part] = (high & 15) | (((half >> (4 * part)) & 15) << 4).astype(np.uint8)
    return kind, shape, blocks.tobytes()


def moe_metadata(
    architecture: str, *, layers: int, hidden: int, inner: int, experts: int, **more: Any
) -> dict[str, Any]:
    keys = {
        "block_count": layers,
        "context_length": 4096,
        "embedding_length": hidden,
        "feed_forward_length": inner,
        "expert_feed_forward_length": inner,
        "expert_count": experts,
        "expert_used_count": 2,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": hidden // 4,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
        **more,
    }
    tokens = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["<s>", "</s>", *map(chr, range(ord("A"), ord("z") + 1)), "ab", "abc", "ca", "bc"],
        "tokenizer.ggml.token_type": [3, 3, *[1] * 62],
        "tokenizer.ggml.merges": ["a b", "ab c"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in keys.items()},
        **tokens,
    }


def moe_tensors(
    rng: np.random.Generator,
    *,
    layers: int = 2,
    hidden: int = 256,
    inner: int = 256,
    experts: int = 4,
    expert_type: str = "q4_0",
    down_type: str | None = None,
    other_type: str = "q8_0",
    small: bool = True,
    biases: bool = False,
) -> dict[str, Tensor]:
    """Make the tensors of a model with the usual names; `biases` are those of experts."""

    def tensor(kind: str, *shape: int) -> Tensor:
        return random_tensor(rng, kind, shape, small=small)

    found = {
        "token_embd.weight": tensor(other_type, 64, hidden),
        "output_norm.weight": tensor("f32", hidden),
        "output.weight": tensor(other_type, 64, hidden),
    }
    for layer in range(layers):
        block = f"blk.{layer}."
        found |= {
            f"{block}attn_norm.weight": tensor("f32", hidden),
            f"{block}attn_q.weight": tensor(other_type, hidden, hidden),
            f"{block}attn_k.weight": tensor(other_type, hidden // 2, hidden),
            f"{block}attn_v.weight": tensor(other_type, hidden // 2, hidden),
            f"{block}attn_output.weight": tensor(other_type, hidden, hidden),
            f"{block}ffn_norm.weight": tensor("f32", hidden),
            f"{block}ffn_gate_inp.weight": tensor("f32", experts, hidden),
            f"{block}ffn_gate_exps.weight": tensor(expert_type, experts, inner, hidden),
            f"{block}ffn_up_exps.weight": tensor(expert_type, experts, inner, hidden),
            f"{block}ffn_down_exps.weight": tensor(down_type or expert_type, experts, hidden, inner),
        }
        if biases:
            sizes = {"gate": inner, "up": inner, "down": hidden}
            found |= {f"{block}ffn_{name}_exps.bias": tensor("f32", experts, size) for name, size in sizes.items()}
    return found


def write_model(path: Path, architecture: str = "qwen3moe", seed: int = 0, **options: Any) -> Path:
    """Write a whole model; options are those of `moe_tensors`."""
    sizes = {key: options.get(key, default) for key, default in SIZES.items()}
    tensors = moe_tensors(np.random.default_rng(seed), **options)
    path.write_bytes(gguf_bytes(moe_metadata(architecture, **sizes), tensors))
    return path


SIZES = {"layers": 2, "hidden": 256, "inner": 256, "experts": 4}

"""Random GGUF files against the gguf package: architectures, types, parts, alignments and metadata are drawn.

The package reads the same files on its own: every tensor is there under one name, with its very numbers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import Tensor, gguf_bytes, moe_metadata, moe_tensors, random_tensor

from moeq.gguf.names import ARCHITECTURES
from moeq.model import open as open_checkpoint
from moeq.schemes.dequantize import dequantize
from moeq.schemes.gguf import dequantized
from moeq.schemes.gguf_blocks import CODED, FLOATS

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")

#: Architectures whose tensors keep their bytes, whatever their types.
RENAMED = ("qwen2moe", "qwen3moe", "glm4moe", "dots1", "gpt-oss", "minimax-m2", "hunyuan-moe", "olmoe", "phimoe")
SPLIT_NAME = "m-{:05d}-of-{:05d}.gguf"


def drawn(seed: int) -> tuple[dict[str, Any], dict[str, Tensor], int, int]:
    """Metadata, tensors, number of parts and alignment of a file."""
    rng = np.random.default_rng(seed)
    kinds = [*CODED, *FLOATS]
    architecture = str(rng.choice(RENAMED))
    sizes = {"layers": int(rng.integers(1, 4)), "hidden": 256, "inner": 256 * int(rng.integers(1, 3))}
    experts = int(rng.integers(2, 6))
    tensors = moe_tensors(rng, **sizes, experts=experts, small=False)
    for name, (_, shape, _) in tensors.items():
        if len(shape) > 1 and "gate_inp" not in name:
            tensors[name] = random_tensor(rng, str(rng.choice(kinds)), shape)
    for layer in range(sizes["layers"]):
        if rng.random() < 0.3:
            tensors[f"blk.{layer}.attn_q.bias"] = random_tensor(rng, "f32", (256,))
        if architecture in ("glm4moe", "dots1", "minimax-m2"):
            tensors[f"blk.{layer}.exp_probs_b.bias"] = random_tensor(rng, "f32", (experts,))
    if rng.random() < 0.3:
        del tensors["output.weight"]
    order = list(tensors)
    rng.shuffle(order)
    odd: dict[str, Any] = {
        "general.name": "Ünïcödé — \U0001f99c" * int(rng.integers(0, 5)),
        "general.tags": ["text-generation", "", "moe"],
        "general.file_type": int(rng.integers(0, 40)),
        "general.quantization_version": 2,
        "quantize.imatrix.chunks_count": 125,
        f"{architecture}.vendor.unknown": bool(rng.random() < 0.5),
        f"{architecture}.vendor.list": [int(n) for n in rng.integers(-9, 9, int(rng.integers(1, 5)))],
    }
    alignment = int(rng.choice([32, 64, 4096]))
    if alignment != 32:
        odd["general.alignment"] = alignment
    metadata = {**odd, **moe_metadata(architecture, **sizes, experts=experts)}
    keys = list(metadata)
    rng.shuffle(keys)
    return (
        {key: metadata[key] for key in keys},
        {name: tensors[name] for name in order},
        int(rng.integers(1, 4)),
        alignment,
    )


def write(folder: Path, seed: int) -> tuple[list[Path], dict[str, Tensor]]:
    metadata, tensors, parts, alignment = drawn(seed)
    names = list(tensors)
    paths = []
    for number in range(parts):
        held = {name: tensors[name] for name in names[number::parts]}
        split = {"split.no": number, "split.count": parts, "split.tensors.count": len(names)} if parts > 1 else {}
        paths.append(folder / (SPLIT_NAME.format(number + 1, parts) if parts > 1 else "m.gguf"))
        kept = metadata if number == 0 else {key: metadata[key] for key in metadata if key == "general.alignment"}
        paths[-1].write_bytes(gguf_bytes({**kept, **split}, held, alignment))
    return paths, tensors


def numbers_of(checkpoint: Any, name: str) -> np.ndarray:
    """All numbers of a tensor as moeq reads it, float32, flat."""
    entry = checkpoint.source.tensors[name]
    octets = checkpoint.source.read_bytes(entry.file, entry.start, entry.end)
    kind = name.rpartition(".gguf_")[2]
    if kind == name:
        width = {"F32": np.float32, "F16": np.float16}.get(entry.dtype)
        if width is not None:
            return np.frombuffer(octets, width).astype(np.float32)
        return (np.frombuffer(octets, np.uint16).astype(np.uint32) << 16).view(np.float32)
    rows = torch.frombuffer(octets, dtype=torch.uint8).reshape(-1, entry.shape[-1])
    return dequantized(kind, rows).numpy().reshape(-1)


@pytest.mark.cover("seed", every=8)
@pytest.mark.parametrize("seed", range(40))
def test_every_tensor_has_the_numbers_of_the_gguf_package(seed: int, tmp_path: Path) -> None:
    paths, tensors = write(tmp_path, seed)
    checkpoint = open_checkpoint(paths[0])
    theirs = {tensor.name: tensor for path in paths for tensor in gguf.GGUFReader(path).tensors}
    assert theirs.keys() == tensors.keys()
    found = {re.sub(r"\.gguf_\w+$", ".weight", name): name for name in checkpoint.source.tensors}
    assert len(found) == len(theirs)
    known = ARCHITECTURES[gguf.GGUFReader(paths[0]).fields["general.architecture"].contents()]
    for stored, tensor in theirs.items():
        named = known.name(stored)
        assert named is not None, stored
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(-1)
        own = numbers_of(checkpoint, found[named[0]])
        assert np.array_equal(own, expected), (stored, tensor.tensor_type)


@pytest.mark.parametrize("hole", [(1 << 32) - 64, (1 << 32) + 64, 1 << 36])
def test_tensors_beyond_four_gibibytes(hole: int, tmp_path: Path) -> None:
    """Two parts, one over a hole that takes no disk: offsets do not fit 32 bits, and the last tensor is as it should.

    A tensor of the first case begins below 4 GiB and ends above.
    """
    metadata = moe_metadata("qwen3moe", layers=1, hidden=256, inner=256, experts=4)
    tensors = moe_tensors(np.random.default_rng(hole), layers=1)
    experts = {name: tensors.pop(name) for name in list(tensors) if "_exps" in name}
    split = {"split.count": 2, "split.tensors.count": len(tensors) + len(experts)}
    paths = [tmp_path / SPLIT_NAME.format(part, 2) for part in (1, 2)]
    paths[0].write_bytes(gguf_bytes({**metadata, **split, "split.no": 0}, tensors))
    whole = gguf_bytes({**split, "split.no": 1}, experts, hole=hole)
    head = len(whole) - sum(len(raw) for _, _, raw in experts.values())
    with paths[1].open("wb") as file:
        file.write(whole[:head])
        file.seek(head + hole)
        file.write(whole[head:])
    checkpoint = open_checkpoint(paths[0])
    checkpoint.require_source()
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(paths[1]).tensors}
    assert theirs.keys() == experts.keys()
    for projection in ("gate", "up", "down"):
        tensor = theirs[f"blk.0.ffn_{projection}_exps.weight"]
        wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found = [dequantize(checkpoint.matrix(0, expert, projection)).numpy() for expert in range(4)]
        assert np.array_equal(np.stack(found), wanted.reshape(4, 256, 256))

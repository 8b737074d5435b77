"""The expert pack beside the one that SGLang's builder makes from GGUF, and in SGLang's own reader."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import engines.sglang_engine  # noqa: F401  stand-ins for compiled packages come first
import gguf
import numpy as np
import pytest
import torch
from sglang.srt.layers.moe.expert_pack import ExpertPackStore
from sglang.srt.model_loader.expert_pack import build, format
from transcode.test_floats import deepseek_v4

from moeq.transcode.expert_pack import MANIFEST_NAME, PACK_NAME
from moeq.transcode.transcode import transcode

ROLES = {"gate": "w1", "up": "w3", "down": "w2"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("pack")
    values = deepseek_v4(folder / "source")
    transcode(folder / "source", folder / "out", "expert-pack")
    return folder, values


def store_of(folder: Path, **expected: Any) -> ExpertPackStore:
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    known = {
        "expected_source_sha256": manifest["source"]["sha256"],
        "expected_model_identity_sha256": manifest["model"]["model_identity_sha256"],
        "expected_config_sha256": manifest["model"]["config_sha256"],
    }
    sizes = {"expected_layers": 2, "expected_experts": 4, "expected_top_k": 2}
    return ExpertPackStore(folder / PACK_NAME, verify_pack_sha256=True, **{**sizes, **known, **expected})


def test_the_reader_gets_every_expert(made: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, values = made
    store = store_of(folder / "out")
    assert store.entries[0, 0, 0].shape == (256, 128)
    assert store.entries[0, 0, 2].shape == (128, 256)
    staging = torch.empty(store.object_payload_bytes, dtype=torch.uint8)
    for layer in range(2):
        for expert in range(4):
            store._read_object(layer, expert, staging)
            for role, short in ROLES.items():
                start, size = store.role_offsets[role], store.role_nbytes[role]
                blocks = staging[start : start + size].numpy()
                digest = store.entries[layer, expert, list(ROLES).index(role)].checksum
                assert hashlib.sha256(blocks).hexdigest() == digest
                expected = values[f"layers.{layer}.ffn.experts.{expert}.{short}"]
                rows = blocks.reshape(expected.shape[0], -1)
                found = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.MXFP4)
                assert torch.equal(torch.from_numpy(found), expected), (layer, expert, role)
    with pytest.raises(ValueError, match="dimensions"):
        store_of(folder / "out", expected_top_k=3)
    with pytest.raises(ValueError, match="config_sha256 does not match"):
        store_of(folder / "out", expected_config_sha256="0" * 64)


def test_the_same_objects_as_the_builder(
    made: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a GGUF file with the same experts; only places in that file and hashes of it differ."""
    folder, values = made
    source = tmp_path / "DeepSeek-small.gguf"
    writer = gguf.GGUFWriter(source, "deepseek4")
    for layer in range(2):
        for role, short in ROLES.items():
            stack = np.stack([values[f"layers.{layer}.ffn.experts.{expert}.{short}"].numpy() for expert in range(4)])
            blocks = gguf.quants.quantize(stack, gguf.GGMLQuantizationType.MXFP4)
            assert np.array_equal(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4), stack)
            kind = gguf.GGMLQuantizationType.MXFP4
            writer.add_tensor(f"blk.{layer}.ffn_{role}_exps.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    sha = hashlib.sha256(source.read_bytes()).hexdigest()
    identity = ["--model-identity-sha256", "1" * 64, "--config-sha256", "2" * 64]
    sizes = ["--num-layers", "2", "--num-experts", "4", "--top-k", "2", "--safety-margin-gib", "0"]
    paths = ["--source", str(source), "--source-sha256", sha, "--output", str(tmp_path / "built")]
    monkeypatch.setattr(sys, "argv", ["build.py", *paths, *identity, *sizes])
    theirs = build.build(build.parse_args())
    ours = json.loads((folder / "out" / MANIFEST_NAME).read_text())
    alike = ("alignment", "data_start", "header_bytes", "index_count", "index_entry_bytes", "object_payload_bytes")
    alike += ("object_stride", "pack_size", "padding_bytes", "payload_bytes", "role_bytes", "role_order")
    assert {key: ours[key] for key in alike} == {key: theirs[key] for key in alike}
    packs = [folder / "out" / PACK_NAME, tmp_path / "built"]
    with packs[0].open("rb") as one, packs[1].open("rb") as other:
        headers = [format.read_header(stream) for stream in (one, other)]
        indices = [format.read_index(stream, header) for stream, header in zip((one, other), headers, strict=True)]
    for mine, built in zip(*indices, strict=True):
        for field in ("key", "dtype_id", "dtype", "tensor_name", "pack_offset", "pack_nbytes", "shape", "quant_scheme"):
            assert getattr(mine, field) == getattr(built, field)
        # Blocks of zeros have any exponent: equal numbers, other bytes.
        assert (mine.transform_id, mine.block_size) == (built.transform_id, built.block_size)

"""SGLang's expert pack: its bytes, its hashes, and what is refused; `tests/engines` has SGLang's own reader."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transcode.test_floats import deepseek_v4

from moeq.errors import MoeqError
from moeq.transcode.expert_pack import LOADER_NAME, MANIFEST_NAME, PACK_NAME, PackPlan, plan_pack
from moeq.transcode.transcode import check, transcode

NAMES = {"gate": "w1", "up": "w3", "down": "w2"}


def test_experts_and_hashes(tmp_path: Path) -> None:
    """Every expert is an aligned object of ggml's blocks, by the library's own numbers."""
    values = deepseek_v4(tmp_path / "source")
    assert transcode(tmp_path / "source", tmp_path / "out", "expert-pack").exact
    manifest = json.loads((tmp_path / "out" / MANIFEST_NAME).read_text())
    pack = (tmp_path / "out" / PACK_NAME).read_bytes()
    assert len(pack) == manifest["pack_size"]
    assert hashlib.sha256(pack).hexdigest() == manifest["pack_sha256"]
    index = pack[manifest["header_bytes"] :][: manifest["index_count"] * manifest["index_entry_bytes"]]
    assert hashlib.sha256(index).hexdigest() == manifest["index_sha256"]
    size = manifest["role_bytes"]
    for place in range(2 * 4):
        for role, (name, short) in enumerate(NAMES.items()):
            start = manifest["data_start"] + place * manifest["object_stride"] + role * size
            assert (start - role * size) % 4096 == 0
            data = pack[start : start + size]
            blocks = np.frombuffer(data, np.uint8)
            expected = values[f"layers.{place // 4}.ffn.experts.{place % 4}.{short}"]
            found = gguf.quants.dequantize(blocks.reshape(expected.shape[0], -1), gguf.GGMLQuantizationType.MXFP4)
            assert torch.equal(torch.from_numpy(found), expected), (place, name)
            entry = index[(place * 3 + role) * manifest["index_entry_bytes"] :]
            assert hashlib.sha256(data).digest() in entry[: manifest["index_entry_bytes"]]
    assert (tmp_path / "out" / "config.json").read_text() == json.dumps(
        json.loads((tmp_path / "source" / "config.json").read_text()), indent=2
    ) + "\n"
    told = json.loads((tmp_path / "out" / LOADER_NAME).read_text())
    assert told["pack_path"] == PACK_NAME
    assert told["source_sha256"] == manifest["source"]["sha256"]
    assert transcode(tmp_path / "source", tmp_path / "out", "expert-pack").already_done


def test_refusals(checkpoints: Path, tmp_path: Path) -> None:
    """SGLang reads packs of one model with MXFP4 experts; Kimi-K3 has two other types of GGUF."""
    with pytest.raises(MoeqError, match="is read by deepseek_v4 only") as caught:
        check(checkpoints / "mxfp4-gptoss", "expert-pack")
    assert caught.value.code == "usage.target"
    deepseek_v4(tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    config = json.loads(path.read_text())
    del config["num_experts_per_tok"]
    path.write_text(json.dumps(config))
    with pytest.raises(MoeqError, match="no num_experts_per_tok") as caught:
        check(tmp_path / "source", "expert-pack")
    assert caught.value.code == "source.bad-config"
    with pytest.raises(MoeqError, match="the format has names of its own"):
        check(tmp_path / "source", "expert-pack", names="mlp")


def pack_of(*layers: tuple[int, int, tuple[str, ...]], top_k: int | None = 2) -> PackPlan:
    """Plan a pack of layers: number, experts, and projections of each expert."""
    sizes = {"gate": (64, 32), "up": (64, 32), "down": (32, 64)}
    specs = {role: SimpleNamespace(spec=SimpleNamespace(k=k, n=n)) for role, (k, n) in sizes.items()}
    surveys: Any = [
        SimpleNamespace(layer=number, kinds=[{role: specs[role] for role in roles}] * experts)
        for number, experts, roles in layers
    ]
    checkpoint: Any = SimpleNamespace(info=SimpleNamespace(name="model", top_k=top_k))
    return plan_pack(checkpoint, surveys, [{f"{number}.w1": ((32, 64), "U8")} for number, *_ in layers])


def test_a_pack_is_of_layers_that_are_alike() -> None:
    roles = ("gate", "up", "down")
    found = pack_of((0, 4, roles), (1, 4, roles))
    assert (found.name, found.layer, found.num_layers, found.num_experts, found.top_k) == (PACK_NAME, None, 2, 4, 2)
    assert found.sizes == ((64, 32), (64, 32), (32, 64))
    assert list(found.tensors) == ["0.w1", "1.w1"]
    for layers in ([(1, 4, roles)], [(0, 4, roles), (1, 3, roles)], [(0, 4, ("up", "down"))]):
        with pytest.raises(MoeqError, match="model: an expert pack has the same number of experts") as refused:
            pack_of(*layers)
        assert (refused.value.code, "deepseek-v4" in str(refused.value.hint)) == ("usage.target", True)
    with pytest.raises(MoeqError, match=r"model: config\.json has no num_experts_per_tok") as refused:
        pack_of((0, 4, roles), top_k=None)
    assert refused.value.code == "source.bad-config"

"""SGLang's expert pack: its bytes, its hashes, and what is refused; `tests/engines` has SGLang's own reader."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transcode.test_floats import deepseek_v4

from moeq.checkpoint.outputs import OutputFolder
from moeq.errors import MoeqError
from moeq.model import open as open_checkpoint
from moeq.transcode.expert_pack import (
    LOADER_NAME,
    MANIFEST_NAME,
    PACK_NAME,
    PackPlan,
    _aligned,
    finish_pack,
    loader_config,
    plan_pack,
)
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


def made_pack(tmp_path: Path) -> tuple[PackPlan, OutputFolder]:
    """A pack of one layer of two experts, whose matrices have 5,000 bytes each."""
    names = [f"{expert}.{role}" for expert in (0, 1) for role in ("gate", "up", "down")]
    tensors: dict[str, tuple[tuple[int, ...], str]] = {name: ((50, 100), "U8") for name in names}
    pack = PackPlan("the.pack", tensors, None, 1, 2, top_k=3, sizes=((64, 32), (65, 33), (32, 64)))
    folder = OutputFolder(tmp_path)
    data = bytearray(pack.form.size)
    for number, (start, stop) in enumerate(pack.form.ranges.values()):
        data[start:stop] = bytes([number + 1]) * (stop - start)
    (tmp_path / pack.name).write_bytes(data)
    return pack, folder


def test_places_in_a_pack(tmp_path: Path) -> None:
    """Header and index first, experts at multiples of 4,096, their matrices adjacent."""
    pack, folder = made_pack(tmp_path)
    folder.close()
    assert (pack.matrix_bytes, pack.stride, pack.data_start) == (5000, 16384, 4096)
    assert list(pack.form.ranges.values()) == [
        (4096, 9096), (9096, 14096), (14096, 19096), (20480, 25480), (25480, 30480), (30480, 35480),
    ]  # fmt: skip
    assert pack.form.size == 4096 + 2 * 16384
    assert [_aligned(size) for size in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]


def test_header_and_index_of_a_pack(tmp_path: Path, checkpoints: Path) -> None:
    """Byte for byte as `srt/model_loader/expert_pack/format.py` of SGLang 0.5.23 lays them out."""
    pack, folder = made_pack(tmp_path)
    checkpoint = open_checkpoint(checkpoints / "mxfp4-gptoss")
    with folder:
        manifest = finish_pack(folder, pack, checkpoint, {"b": 1, "a": 2})
    raw = (tmp_path / pack.name).read_bytes()
    source = hashlib.sha256(checkpoint.source.identity().encode()).hexdigest()
    config = hashlib.sha256(b'{"a": 2, "b": 1}').hexdigest()
    identity = hashlib.sha256(f"sglang-deepseek-expert-pack-v1:{source}:{config}".encode()).hexdigest()
    header, entry = manifest["header_bytes"], manifest["index_entry_bytes"]
    assert (header, entry) == (176, 328)
    assert raw[:24].rstrip(b"\0") == b"SGLANG-EXPERTPACK-v1"
    assert struct.unpack_from("<IIIIQQQIIII", raw, 24) == (1, header, entry, 3, 6, 4096, 4096, 1, 2, 3, 3)
    assert raw[header - 96 : header].hex() == identity + source + config
    for number in range(6):
        expert, role = divmod(number, 3)
        one = raw[header + number * entry :][:entry]
        assert struct.unpack_from("<HHBBH", one) == (0, expert, role, 2, 39)
        assert one[8:24].rstrip(b"\0") == b"MXFP4"
        assert one[24:104].rstrip(b"\0").decode() == f"blk.0.ffn_{('gate', 'up', 'down')[role]}_exps.weight"
        start = 4096 + expert * 16384 + role * 5000
        assert struct.unpack_from("<6Q", one, 104) == (0, 2 * 5000, expert * 5000, 5000, start, 5000)
        digest = hashlib.sha256(bytes([number + 1]) * 5000).digest()
        assert one[152:248] == bytes(32) + digest + digest
        columns, rows = ((64, 32), (65, 33), (32, 64))[role]
        assert struct.unpack_from("<4Q", one, entry - 80) == (columns, rows, 0, 0)
        assert (one[-48:-32].rstrip(b"\0"), one[-32:-16].rstrip(b"\0")) == (b"MXFP4", b"identity-v1")
        generation = hashlib.sha256(f"{identity}:{source}:0:{expert}".encode()).digest()[:8]
        assert struct.unpack_from("<QQ", one, entry - 16) == (32, int.from_bytes(generation, "little"))
    assert not any(raw[header + 6 * entry : 4096])
    wanted = {
        "format": "SGLANG-EXPERTPACK-v1", "version": 1, "complete": True, "layout": "triplet_identity",
        "role_order": ["gate", "up", "down"], "alignment": 4096, "pack_path": "the.pack", "pack_size": len(raw),
        "index_count": 6, "data_start": 4096, "object_count": 2, "object_payload_bytes": 15000,
        "object_stride": 16384, "role_bytes": 5000, "payload_bytes": 30000, "padding_bytes": 32768 - 30000,
        "source": {"path": "DeepSeek-V4-Flash.gguf", "sha256": source},
    }  # fmt: skip
    assert {key: manifest[key] for key in wanted} == wanted
    assert manifest["model"] == {
        "ref": checkpoint.info.name, "model_identity_sha256": identity, "config_sha256": config, "num_layers": 1,
        "num_routed_experts": 2, "top_k": 3, "single_gpu": True,
    }  # fmt: skip
    assert loader_config(manifest) == {
        "pack_path": PACK_NAME, "manifest_path": MANIFEST_NAME, "source_path": "DeepSeek-V4-Flash.gguf",
        "source_sha256": source, "model_identity_sha256": identity, "config_sha256": config,
    }  # fmt: skip


def test_a_pack_that_ends_too_early(tmp_path: Path, checkpoints: Path) -> None:
    pack, folder = made_pack(tmp_path)
    os.truncate(tmp_path / pack.name, pack.form.size - 16384)
    with folder, pytest.raises(MoeqError, match=r"the expert pack ends before byte 25,480"):
        finish_pack(folder, pack, open_checkpoint(checkpoints / "mxfp4-gptoss"), {})

"""Scales of static activations, out of the restore data of a conversion."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from load.deployments import convert
from safetensors import safe_open

import moeq
from moeq.errors import MoeqError
from moeq.load.activation_scales import ActivationScales, activation_scales
from moeq.load.torch_loader import layer_entry, open_converted


def of_layer(folder: Path, layer: int = 1) -> ActivationScales | None:
    checkpoint = open_converted(folder)
    return activation_scales(checkpoint, layer_entry(checkpoint, layer))


@pytest.mark.parametrize(
    ("name", "layout", "part"),
    [
        ("modelopt-nvfp4-qwen3moe", "trtllm-nvfp4/1", "input_scale"),
        ("ct-nvfp4-qwen3moe", "cutlass-nvfp4/1", "input_global_scale"),
        ("ct-fp8-tensor-qwen3moe", "marlin-fp8/1", "input_scale"),
    ],
)
@pytest.mark.parametrize("ep", [1, 2])
def test_they_are_the_sources(name, layout, part, ep, checkpoints: Path, tmp_path: Path) -> None:
    folder = convert(checkpoints / name, tmp_path / "out", layout, ep=ep if name != "ct-fp8-tensor-qwen3moe" else 1)
    found = of_layer(folder)
    assert found is not None
    assert found.part == part
    experts = moeq.open(folder).info.num_experts
    stored = {}
    for path in (checkpoints / name).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            stored |= {key: file.get_tensor(key).float().reshape(()) for key in file.keys() if key.endswith(part)}  # noqa: SIM118

    def wanted(projection: str) -> torch.Tensor:
        names = [f"model.layers.1.mlp.experts.{expert}.{projection}.{part}" for expert in range(experts)]
        numbers = torch.stack([stored[one] for one in names])
        return 1 / numbers if part == "input_global_scale" else numbers

    assert torch.equal(found.w13, torch.stack([wanted("gate_proj"), wanted("up_proj")], dim=1))
    assert torch.equal(found.w2, wanted("down_proj"))


def test_a_source_for_weights_alone_has_none(checkpoints: Path, tmp_path: Path) -> None:
    assert of_layer(convert(checkpoints / "ct-nvfp4a16-qwen3moe", tmp_path / "out", "marlin-nvfp4/1")) is None


class TestDamaged:
    @pytest.fixture
    def folder(self, checkpoints: Path, tmp_path: Path) -> Path:
        return convert(checkpoints / "modelopt-nvfp4-qwen3moe", tmp_path / "out", "trtllm-nvfp4/1")

    def change(self, folder: Path, name: str, **entry: object) -> None:
        """Another entry in the header, which keeps its length."""
        path = folder / "moeq-restore.data"
        raw = bytearray(path.read_bytes())
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        renamed = entry.pop("renamed", None)
        header[name] |= entry
        if renamed:
            header[str(renamed)] = header.pop(name)
        text = json.dumps(header, separators=(",", ":")).encode()
        assert len(text) <= length
        raw[8 : 8 + length] = text.ljust(length)
        path.write_bytes(raw)

    name = "tensor/model.layers.1.mlp.experts.0.gate_proj.input_scale"

    def test_the_file_is_missing(self, folder: Path) -> None:
        (folder / "moeq-restore.data").unlink()
        with pytest.raises(MoeqError, match="is missing") as caught:
            of_layer(folder)
        assert caught.value.code == "source.no-keepsake"

    def test_no_number(self, folder: Path) -> None:
        self.change(folder, self.name, dtype="U8", shape=[4])
        with pytest.raises(MoeqError, match=r"is U8 \[4\], no number"):
            of_layer(folder)

    def test_an_expert_has_none(self, folder: Path) -> None:
        self.change(folder, self.name, renamed=self.name.replace("input_scale", "input_scalx"))
        with pytest.raises(MoeqError, match="1 of 2 experts have input_scale of gate") as caught:
            of_layer(folder)
        assert caught.value.code == "source.missing-part"

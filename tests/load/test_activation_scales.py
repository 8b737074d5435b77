"""Scales of static activations, out of the restore data of a conversion."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from load.deployments import convert
from refusing import refuses
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import moeq
from moeq.checkpoint.manifest import LayerEntry, MatrixEntry
from moeq.checkpoint.names import index_experts
from moeq.checkpoint.source import LocalSource
from moeq.errors import MoeqError
from moeq.layouts.parts import torch_dtype
from moeq.load.activation_scales import ActivationScales, _numbers, activation_scales, stored_scales
from moeq.load.torch_loader import layer_entry, open_converted
from moeq.matrix import MatrixSpec
from moeq.prove.restore import restore
from moeq.prove.verify import verify
from moeq.transcode.transcode import transcode


def of_layer(folder: Path, layer: int = 1) -> ActivationScales | None:
    checkpoint = open_converted(folder)
    return activation_scales(checkpoint, layer_entry(checkpoint, layer))


@pytest.mark.cover(every=4)
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


def test_restore_data_that_are_not_there_tell_nothing(checkpoints: Path, tmp_path: Path) -> None:
    folder = convert(checkpoints / "modelopt-nvfp4-qwen3moe", tmp_path / "out", "trtllm-nvfp4/1")
    checkpoint = open_converted(folder)
    entry = layer_entry(checkpoint, 1)
    assert activation_scales(checkpoint, replace(entry, prefix="elsewhere")) is None
    checkpoint.manifest = replace(checkpoint.manifest, restore=None)
    assert activation_scales(checkpoint, entry) is None


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
        with pytest.raises(MoeqError, match=r"is U8 \[4\], not one number"):
            of_layer(folder)

    def test_an_expert_has_none(self, folder: Path) -> None:
        self.change(folder, self.name, renamed=self.name.replace("input_scale", "input_scalx"))
        with pytest.raises(MoeqError, match="1 of 2 experts have input_scale of gate") as caught:
            of_layer(folder)
        assert caught.value.code == "source.missing-part"


def stacked(source: Path, folder: Path, form: str) -> Path:
    """The experts of each layer as one tensor, as ModelOpt 0.47 names them for gpt-oss and Llama 4.

    Args:
        form: `shared`: one number of no dimension for all experts, as it writes; else `[E]` or `[E, 1]`.
    """
    shutil.copytree(source, folder)
    written: dict[str, torch.Tensor] = {}
    groups: dict[tuple[str, str, str], dict[int, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        head, found, tail = name.partition(".experts.")
        if not found:
            written[name] = tensor
            continue
        expert, projection, part = tail.split(".")
        groups.setdefault((head, projection, part), {})[int(expert)] = tensor
    for (head, projection, part), found in groups.items():
        whole = torch.stack([found[expert] for expert in sorted(found)])
        if projection == "up_proj":
            continue
        if projection == "gate_proj" and whole.dim() == 3:
            up = groups[head, "up_proj", part]
            whole = torch.cat([whole, torch.stack([up[expert] for expert in sorted(up)])], dim=1)
        if part == "input_scale":
            whole = {"shared": whole.max(), "[E]": whole.reshape(-1), "[E, 1]": whole.reshape(-1, 1)}[form]
        stem = "down_proj" if projection == "down_proj" else "gate_up_proj"
        suffix = "" if part == "weight" else f"_{part}"
        written[f"{head}.experts.{stem}{suffix}"] = whole.contiguous()
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.cover(every=3)
@pytest.mark.parametrize("form", ["shared", "[E]", "[E, 1]"])
def test_those_of_stacked_experts(form: str, checkpoints: Path, tmp_path: Path) -> None:
    """The same numbers as of single experts; everything else that is done with such a source works too."""
    plain = of_layer(convert(checkpoints / "modelopt-nvfp4-qwen3moe", tmp_path / "plain", "trtllm-nvfp4/1"))
    assert plain is not None
    source = stacked(checkpoints / "modelopt-nvfp4-qwen3moe", tmp_path / "source", form)
    folder = convert(source, tmp_path / "out", "trtllm-nvfp4/1", allow_lossy=True)
    found = of_layer(folder)
    assert found is not None
    everyone = form == "shared"
    assert torch.equal(found.w13, plain.w13.max().expand_as(plain.w13) if everyone else plain.w13)
    assert torch.equal(found.w2, plain.w2.max().expand_as(plain.w2) if everyone else plain.w2)
    assert verify(folder, source).ok
    restore(folder, tmp_path / "back")
    name = "model.safetensors"
    assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    transcode(source, tmp_path / "transcoded", "nvfp4-compressed-tensors", allow_lossy=True)
    numbers: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "transcoded").glob("*.safetensors"):
        numbers |= {name: one for name, one in load_file(path).items() if name.endswith("input_global_scale")}
    wanted = {name: (plain.w2 if "down" in name else plain.w13).max() for name in numbers if "layers.1" in name}
    assert wanted  # in this checkpoint they are alike for all experts
    assert all(torch.allclose(1 / numbers[name], number, rtol=1e-6) for name, number in wanted.items())


@pytest.mark.parametrize(
    ("shape", "dtype", "experts", "what"),
    [
        ((), "F32", 1, None),
        ((1, 1), "BF16", 1, None),
        ((), "F16", 3, None),
        ((1,), "F32", 3, None),
        ((3,), "F32", 3, None),
        ((3, 1), "F32", 3, None),
        ((2,), "F32", 1, "one number"),
        ((2,), "F32", 3, "3 numbers"),
        ((1,), "I32", 2, "2 numbers"),
        ((0,), "F32", 1, "one number"),
        ((2, 2), "F32", 4, "4 numbers"),
    ],
)
def test_numbers_of_experts(shape: tuple[int, ...], dtype: str, experts: int, what: str | None, tmp_path) -> None:
    values = torch.arange(1, 1 + torch.Size(shape).numel()).to(torch_dtype(dtype)).reshape(shape)
    (tmp_path / "config.json").write_text("{}")
    save_file({"n\xf6": values}, tmp_path / "model.safetensors")
    source = LocalSource(tmp_path, "it")
    entry = source.entry("n\xf6")
    if what is None:
        assert _numbers(source, entry, experts).tolist() == values.float().reshape(-1).expand(experts).tolist()
        return
    with refuses("source.bad-manifest", rf"'n\xf6' is {dtype} {list(shape)}, not {what}"):
        _numbers(source, entry, experts)


@pytest.mark.parametrize(
    ("part", "gated", "w13", "w2"),
    [
        ("input_scale", True, [[1, 4], [2, 5], [4, 8]], [2, 4, 8]),
        ("input_scale", False, [[4], [5], [8]], [2, 4, 8]),
        ("input_global_scale", False, [[0.25], [0.2], [0.125]], [0.5, 0.25, 0.125]),
    ],
)
def test_the_scales_of_every_projection(part: str, gated: bool, w13: object, w2: object, tmp_path: Path) -> None:
    numbers = {"gate_proj": (1, 2, 4), "up_proj": (4, 5, 8), "down_proj": (2, 4, 8)}
    names = {
        f"model.layers.3.mlp.experts.{expert}.{name}.{part}": torch.tensor([float(number)])
        for name, of_experts in numbers.items()
        for expert, number in enumerate(of_experts)
        if gated or name != "gate_proj"
    }
    (tmp_path / "config.json").write_text("{}")
    save_file(names, tmp_path / "model.safetensors")
    source = LocalSource(tmp_path, "it")
    (stored,) = index_experts({name: source.entry(name) for name in names})
    specs = {
        "w13": MatrixSpec("w13", 4, 2, "e2m1", 2, "e4m3", gated=gated),
        "w2": MatrixSpec("w2", 2, 4, "e2m1", 4, "e4m3"),
    }
    matrices = {role: MatrixEntry(spec, spec.n, spec.k, {}) for role, spec in specs.items()}
    entry = LayerEntry(3, "model.layers.3.mlp.experts", 3, "x/1", matrices)  # type: ignore[arg-type]
    found = stored_scales(source, stored, entry)
    assert found is not None
    assert found.w13.tolist() == torch.tensor(w13, dtype=torch.float32).tolist()
    assert found.w2.tolist() == w2
    assert found.part == part
    with refuses("source.missing-part", f"layer 3: 3 of 4 experts have {part} of {'gate' if gated else 'up'}"):
        stored_scales(source, stored, replace(entry, num_experts=4))

"""`moeq transcode` on checkpoints that real quantisers wrote: values, names, the way back, resuming, refusals."""

from __future__ import annotations

import json
import os
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transcode.libraries import INTEGERS, tensors_of, with_names_of_mixtral

from moeq.errors import ExitCode, MoeqError
from moeq.model import open as open_checkpoint
from moeq.prove.diff import diff
from moeq.schemes.dequantize import dequantize
from moeq.transcode import transcode as transcode_module
from moeq.transcode.transcode import REPORT_NAME, check, transcode
from moeq.transcode.transcoder import Transcoder

MXFP4 = ("ct-mxfp4-qwen3moe", "mxfp4-gptoss")


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def assert_same_tensors(left: Path, right: Path) -> None:
    before, after = tensors_of(left), tensors_of(right)
    if config_of(left)["model_type"] == "mixtral":  # whose experts get the names of its class
        before = {with_names_of_mixtral(name): tensor for name, tensor in before.items()}
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor, after[name]), name


def assert_same_values(source: Path, result: Path) -> None:
    """Every expert's values, decoded by each checkpoint's own format, are equal bit for bit."""
    before, after = open_checkpoint(source), open_checkpoint(result)
    for layer in before.info.moe_layers:
        for expert in range(before.num_experts(layer)):
            for projection in ("gate", "up", "down"):
                left, right = (dequantize(ckpt.matrix(layer, expert, projection)) for ckpt in (before, after))
                assert torch.equal(left, right), (layer, expert, projection)


@pytest.mark.cover(every=7)
@pytest.mark.parametrize("target", ["compressed-tensors", "gptq", "gptq_v2"])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_exact(checkpoints: Path, tmp_path: Path, name: str, target: str) -> None:
    found = transcode(checkpoints / name, tmp_path / "out", target)
    assert found.exact
    assert found.written
    assert_same_values(checkpoints / name, tmp_path / "out")
    compared = diff(checkpoints / name, tmp_path / "out")
    assert compared.equal, compared.other
    report = json.loads((tmp_path / "out" / REPORT_NAME).read_text())
    assert report["exact"] is True
    assert report["projections"] == found.projections
    assert not (tmp_path / "out.moeq-partial").exists()


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("target", ["compressed-tensors", "fp8", "nvfp4", "nvfp4-compressed-tensors"])
@pytest.mark.parametrize("name", MXFP4)
def test_mxfp4_is_exact(checkpoints: Path, tmp_path: Path, name: str, target: str) -> None:
    assert transcode(checkpoints / name, tmp_path / "out", target).exact
    compared = diff(checkpoints / name, tmp_path / "out")
    assert compared.equal, compared


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("via", ["compressed-tensors", "gptq_v2"])
@pytest.mark.parametrize("name", ["gptq-int4-g32-qwen3moe", "gptq-int8-g64-qwen3moe", "gptq-int4-g128-mixtral"])
def test_gptq_comes_back_byte_for_byte(checkpoints: Path, tmp_path: Path, name: str, via: str) -> None:
    transcode(checkpoints / name, tmp_path / "there", via)
    transcode(tmp_path / "there", tmp_path / "back", "gptq")
    assert_same_tensors(checkpoints / name, tmp_path / "back")


@pytest.mark.parametrize("name", ["ct-int4-g128-qwen3moe", "ct-int4-asym-g32-mixtral"])
def test_compressed_tensors_come_back_byte_for_byte(checkpoints: Path, tmp_path: Path, name: str) -> None:
    transcode(checkpoints / name, tmp_path / "there", "gptq_v2")
    transcode(tmp_path / "there", tmp_path / "back", "compressed-tensors")
    assert_same_tensors(checkpoints / name, tmp_path / "back")


def test_gpt_oss_comes_back_byte_for_byte(checkpoints: Path, tmp_path: Path) -> None:
    source = checkpoints / "mxfp4-gptoss"
    transcode(source, tmp_path / "there", "compressed-tensors")
    assert "model.layers.0.mlp.experts.3.gate_proj.weight_packed" in tensors_of(tmp_path / "there")
    transcode(tmp_path / "there", tmp_path / "back", "mxfp4")
    assert_same_tensors(source, tmp_path / "back")
    assert config_of(tmp_path / "back")["quantization_config"] == config_of(source)["quantization_config"]


@pytest.mark.parametrize(("name", "group"), [("ct-int4-g128-qwen3moe", 64), ("gptq-int4-g128-mixtral", 32)])
def test_groups_are_made_smaller(checkpoints: Path, tmp_path: Path, name: str, group: int) -> None:
    assert transcode(checkpoints / name, tmp_path / "out", "compressed-tensors", regroup=group).exact
    assert_same_values(checkpoints / name, tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").scheme_of(0).group_size == group
    table = config_of(tmp_path / "out")["quantization_config"]
    assert table["config_groups"]["group_0"]["weights"]["group_size"] == group


def test_groups_that_do_not_divide_are_refused(checkpoints: Path, tmp_path: Path) -> None:
    with pytest.raises(MoeqError, match=r"128 / 48") as error:
        transcode(checkpoints / "ct-int4-g128-qwen3moe", tmp_path / "out", "gptq", regroup=48)
    assert error.value.code == "usage.regroup"
    assert error.value.hint == "regroup=128 or regroup=64 or regroup=32 or regroup=16"


def test_names_move_to_another_container_and_back(checkpoints: Path, tmp_path: Path) -> None:
    source = checkpoints / "ct-int4-g128-qwen3moe"
    transcode(source, tmp_path / "moved", "compressed-tensors", names="block-sparse-moe")
    names = tensors_of(tmp_path / "moved").keys()
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight_packed" in names
    assert "model.layers.1.block_sparse_moe.gate.weight" in names
    assert not any(".mlp." in name for name in names)
    assert "model.layers.0.block_sparse_moe.gate" in config_of(tmp_path / "moved")["quantization_config"]["ignore"]
    assert diff(source, tmp_path / "moved", experts_only=True).equal
    transcode(tmp_path / "moved", tmp_path / "back", "compressed-tensors", names="mlp")
    assert_same_tensors(source, tmp_path / "back")


def test_experts_are_stacked_and_taken_apart_again(checkpoints: Path, tmp_path: Path) -> None:
    source = checkpoints / "ct-int4-g128-qwen3moe"
    transcode(source, tmp_path / "stacked", "compressed-tensors", names="stacked")
    stacked = tensors_of(tmp_path / "stacked")
    assert stacked["model.layers.0.mlp.experts.gate_up_proj_packed"].shape == (4, 256, 32)
    assert stacked["model.layers.0.mlp.experts.gate_up_proj_shape"].tolist() == [4, 256, 256]
    transcode(tmp_path / "stacked", tmp_path / "back", "compressed-tensors", names="per-expert")
    assert_same_tensors(source, tmp_path / "back")


def test_lossy_is_refused_counted_and_allowed(checkpoints: Path, tmp_path: Path) -> None:
    source = checkpoints / "gptq-int4-g32-qwen3moe"
    with pytest.raises(MoeqError, match=r"\d+ of \d+ blocks \(1 x 32\)") as error:
        transcode(source, tmp_path / "out", "bf16")
    assert error.value.code == "answer.not-exact"
    assert not (tmp_path / "out").exists()
    found = check(source, "bf16")
    assert not found.exact
    assert not found.written
    written = transcode(source, tmp_path / "out", "bf16", allow_lossy=True)
    assert sorted(loss.text for loss in written.losses) == sorted(loss.text for loss in found.losses)
    loss = next(row for row in written.losses if row.module.endswith("layers.1.mlp.experts.2.up_proj"))
    before = dequantize(open_checkpoint(source).matrix(1, 2, "up"))
    after = tensors_of(tmp_path / "out")[f"{loss.module}.weight"].float()
    assert torch.equal(after, before.to(torch.bfloat16).float())
    assert loss.numbers == int((before != after).sum())
    assert loss.max_abs == float((before - after).abs().max())
    assert loss.blocks == int((before != after).reshape(128, -1, 32).any(dim=2).sum())
    row, column = loss.first
    assert (loss.before, loss.after) == (float(before[row, column]), float(after[row, column]))
    assert "quantization_config" not in config_of(tmp_path / "out")
    assert config_of(tmp_path / "out")["dtype"] == "bfloat16"


def test_floats_are_exact_where_they_can_be(checkpoints: Path, tmp_path: Path) -> None:
    source = checkpoints / "ct-mxfp4-qwen3moe"
    assert transcode(source, tmp_path / "out", "bf16").exact
    weight = tensors_of(tmp_path / "out")["model.layers.1.mlp.experts.3.up_proj.weight"]
    assert torch.equal(weight.float(), dequantize(open_checkpoint(source).matrix(1, 3, "up")))


@pytest.mark.parametrize("target", ["bf16", "fp16"])
def test_gpt_oss_as_floats_has_the_familys_own_stacks(checkpoints: Path, tmp_path: Path, target: str) -> None:
    source = checkpoints / "mxfp4-gptoss"
    assert transcode(source, tmp_path / "out", target).exact
    tensors, ckpt = tensors_of(tmp_path / "out"), open_checkpoint(source)
    gate, up, down = (dequantize(ckpt.matrix(1, 3, role)) for role in ("gate", "up", "down"))
    stacked = tensors["model.layers.1.mlp.experts.gate_up_proj"][3].float()
    assert stacked.shape == (256, 256)
    assert torch.equal(stacked[:, 0::2], gate.t())
    assert torch.equal(stacked[:, 1::2], up.t())
    assert torch.equal(tensors["model.layers.1.mlp.experts.down_proj"][3].float(), down.t())
    before = tensors_of(source)["model.layers.1.mlp.experts.gate_up_proj_bias"]
    assert torch.equal(tensors["model.layers.1.mlp.experts.gate_up_proj_bias"], before)
    compared = diff(source, tmp_path / "out")
    assert compared.equal, compared


def test_narrow_projections_are_a_group_of_their_own(checkpoints: Path, tmp_path: Path) -> None:
    """compressed-tensors' readers divide K by the group size: 64 inputs are one group of 64, not half of one of 128."""
    transcode(checkpoints / "gptq-int4-g128-mixtral", tmp_path / "out", "compressed-tensors")
    groups = config_of(tmp_path / "out")["quantization_config"]["config_groups"]
    found = {group["weights"]["group_size"]: group["targets"] for group in groups.values()}
    assert found == {128: ["Linear"], 64: ["re:^model\\.layers\\.\\d+\\.self_attn\\.o_proj$"]}


def test_zero_points_of_zero_need_version_2(checkpoints: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoints / "ct-int4-asym-g32-mixtral", source)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("weight_zero_point"):
            tensor |= 0x11111111  # none of them is 0
    key = next(name for name in tensors if "layers.1" in name and name.endswith("weight_zero_point"))
    tensors[key][0, 0] &= ~0xF
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(MoeqError, match=r"1 of [\d,]+ zero points are 0") as error:
        transcode(source, tmp_path / "v1", "gptq")
    assert error.value.code == "answer.zero-points"
    assert "gptq_v2" in (error.value.hint or "")
    assert transcode(source, tmp_path / "v2", "gptq_v2").exact


def test_activation_order_is_kept_by_gptq_and_refused_elsewhere(checkpoints: Path, tmp_path: Path) -> None:
    source = checkpoints / "gptq-int4-g32-actorder-qwen3moe"
    assert transcode(source, tmp_path / "v2", "gptq_v2").exact
    assert_same_values(source, tmp_path / "v2")
    assert config_of(tmp_path / "v2")["quantization_config"]["desc_act"] is True
    with pytest.raises(MoeqError, match="activation order"):
        transcode(source, tmp_path / "ct", "compressed-tensors")


@pytest.fixture
def down_act_order(checkpoints: Path, tmp_path: Path) -> Path:
    """A GPTQ checkpoint in which only down projections are in activation order."""
    source = tmp_path / "source"
    shutil.copytree(checkpoints / "gptq-int4-g32-actorder-qwen3moe", source)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("g_idx") and "down_proj" not in name:
            tensor.copy_(torch.arange(len(tensor)) // 32)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    return source


@pytest.mark.cover(every=2)
@pytest.mark.parametrize("target", ["compressed-tensors", "gptq"])
def test_sorted_columns_compute_the_same(down_act_order: Path, tmp_path: Path, target: str) -> None:
    found = transcode(down_act_order, tmp_path / "out", target, sort_act_order=True)
    assert found.exact
    before, after = open_checkpoint(down_act_order), open_checkpoint(tmp_path / "out")
    assert not after.scheme_of(0).act_order
    x = torch.randn(5, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    moved = 0
    for layer in (0, 1):
        for expert in range(4):
            values = []
            for ckpt in (before, after):
                gate, up, down = (dequantize(ckpt.matrix(layer, expert, role)) for role in ("gate", "up", "down"))
                values.append((gate, up, down))
            old, new = values
            order = torch.argsort(before.matrix(layer, expert, "down").group_index, stable=True)
            moved += int((order != torch.arange(128)).any())
            assert torch.equal(new[0], old[0][order])
            assert torch.equal(new[1], old[1][order])
            assert torch.equal(new[2], old[2][:, order])
            answers = [
                (torch.nn.functional.silu(x @ gate.double().t()) * (x @ up.double().t())) @ down.double().t()
                for gate, up, down in values
            ]
            torch.testing.assert_close(answers[0], answers[1], rtol=1e-12, atol=1e-12)
    assert moved == 8


def test_hidden_features_are_never_sorted(checkpoints: Path, tmp_path: Path) -> None:
    source = checkpoints / "gptq-int4-g32-actorder-qwen3moe"
    with pytest.raises(MoeqError, match="hidden features in activation order") as error:
        transcode(source, tmp_path / "out", "compressed-tensors", sort_act_order=True)
    assert error.value.code == "usage.act-order"
    assert not (tmp_path / "out").exists()


def test_an_interrupted_run_goes_on(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out, whole = checkpoints / "gptq-int4-g32-qwen3moe", tmp_path / "out", tmp_path / "whole"
    transcode(source, whole, "compressed-tensors")
    run, finished = Transcoder.pack, list[str]()

    def dies(self: Transcoder, item: Any, data: Any, buffers: Any, slot: int) -> Any:
        if len(finished) > 14:
            raise KeyboardInterrupt
        finished.append(self.label(item))
        return run(self, item, data, buffers, slot)

    monkeypatch.setattr(Transcoder, "pack", dies)
    with pytest.raises(KeyboardInterrupt):
        transcode(source, out, "compressed-tensors", workers=1)
    monkeypatch.setattr(Transcoder, "pack", run)
    assert not out.exists()
    with pytest.raises(MoeqError, match="unfinished work of another conversion"):
        transcode(source, out, "gptq_v2")
    found = transcode(source, out, "compressed-tensors")
    assert 0 < found.resumed_units < len(found.plan.units)
    assert {file.name for file in out.iterdir()} == {file.name for file in whole.iterdir()}
    for file in whole.iterdir():
        assert (out / file.name).read_bytes() == file.read_bytes(), file.name


def test_shards_make_the_same_bytes(checkpoints: Path, tmp_path: Path) -> None:
    source = checkpoints / "awq-int4-g32-qwen3moe"
    transcode(source, tmp_path / "whole", "compressed-tensors")
    parts = [transcode(source, tmp_path / "out", "compressed-tensors", shard=f"{index}/3") for index in range(3)]
    assert [(part.projections, part.written, str(part.shard)) for part in parts] == [
        (0, False, f"{index}/3") for index in range(3)
    ]
    assert not any(part.written for part in parts)
    assert transcode(source, tmp_path / "out", "compressed-tensors").resumed_units == len(parts[0].plan.units)
    for file in (tmp_path / "whole").iterdir():
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes(), file.name


def test_losses_survive_shards(checkpoints: Path, tmp_path: Path) -> None:
    source = checkpoints / "ct-w8a8-qwen3moe"
    for index in range(2):
        transcode(source, tmp_path / "out", "fp16", allow_lossy=True, shard=f"{index}/2")
    found = transcode(source, tmp_path / "out", "fp16", allow_lossy=True)
    assert {loss.text for loss in found.losses} == {loss.text for loss in check(source, "fp16").losses}
    assert len(found.losses) > 0


def test_only_its_own_output_is_replaced(checkpoints: Path, tmp_path: Path) -> None:
    source, out = checkpoints / "ct-int4-g128-qwen3moe", tmp_path / "out"
    out.mkdir()
    (out / "photo.jpg").write_bytes(b"mine")
    with pytest.raises(MoeqError) as error:
        transcode(source, out, "gptq", force=True)
    assert error.value.code == "usage.destination-exists"
    assert (out / "photo.jpg").read_bytes() == b"mine"
    transcode(source, tmp_path / "second", "gptq")
    with pytest.raises(MoeqError) as error:
        transcode(source, tmp_path / "second", "gptq_v2")
    assert error.value.code == "usage.destination-exists"
    transcode(source, tmp_path / "second", "gptq_v2", force=True)
    assert config_of(tmp_path / "second")["quantization_config"]["checkpoint_format"] == "gptq_v2"


@pytest.mark.parametrize(
    ("name", "options", "code", "text"),
    [
        ("ct-int4-g128-qwen3moe", {"to": "gguf"}, "usage.target", "no format is called 'gguf'"),
        ("ct-int4-g128-qwen3moe", {"to": "nvfp4"}, "usage.target", "but not packed integers"),
        ("ct-mxfp4-qwen3moe", {"to": "gptq"}, "usage.target", "but not MXFP4"),
        ("ct-mxfp4-qwen3moe", {"to": "mxfp4"}, "usage.target", "gpt_oss only"),
        ("mxfp4-gptoss", {"to": "mxfp4", "names": "mlp"}, "usage.names", "stacked tensors only"),
        ("ct-int4-g128-qwen3moe", {"to": "gptq", "names": "stacked"}, "usage.names", "no tool writes stacked"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    checkpoints: Path, tmp_path: Path, name: str, options: dict[str, Any], code: str, text: str
) -> None:
    with pytest.raises(MoeqError, match=text) as error:
        transcode(checkpoints / name, tmp_path / "out", **options)
    assert error.value.code == code
    assert error.value.exit_code == ExitCode.USAGE
    assert not list(tmp_path.iterdir())


def test_weights_that_are_not_the_whole_of_the_mathematics_are_refused(checkpoints: Path, tmp_path: Path) -> None:
    """Rotated weights mean something else without the rotation, which no other format has."""
    source = tmp_path / "source"
    shutil.copytree(checkpoints / "gptq-int4-g32-qwen3moe", source)
    table = config_of(source)
    table["quantization_config"]["rotation"] = "hadamard"
    (source / "config.json").write_text(json.dumps(table))
    with pytest.raises(MoeqError, match="rotated") as error:
        transcode(source, tmp_path / "out", "compressed-tensors")
    assert error.value.code == "source.not-convertible"


def test_the_cache_scheme_is_carried_over(checkpoints: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoints / "ct-int4-g128-qwen3moe", source)
    table = config_of(source)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    table["quantization_config"]["kv_cache_scheme"] = scheme
    (source / "config.json").write_text(json.dumps(table))
    transcode(source, tmp_path / "out", "compressed-tensors", regroup=64)
    assert config_of(tmp_path / "out")["quantization_config"]["kv_cache_scheme"] == scheme


def test_layers_of_other_widths_are_named_in_the_config(checkpoints: Path, tmp_path: Path) -> None:
    """A second layer of 8 bits: a group of its own in compressed-tensors, a rule of `dynamic` in GPTQ."""
    source = tmp_path / "source"
    shutil.copytree(checkpoints / "gptq-int4-g32-qwen3moe", source)
    other = load_file(checkpoints / "gptq-int8-g64-qwen3moe" / "model.safetensors")
    tensors = load_file(source / "model.safetensors")
    mixed = {name: t for name, t in tensors.items() if ".layers.1.mlp.experts." not in name}
    mixed |= {name: t for name, t in other.items() if ".layers.1.mlp.experts." in name}
    save_file(mixed, source / "model.safetensors", {"format": "pt"})
    table = config_of(source)
    table["quantization_config"]["dynamic"] = {r"+:.*layers\.1\.mlp\.experts\..*": {"bits": 8, "group_size": 64}}
    (source / "config.json").write_text(json.dumps(table))
    for target in ("compressed-tensors", "gptq_v2"):
        assert transcode(source, tmp_path / target, target).exact
        assert_same_values(source, tmp_path / target)
        assert diff(source, tmp_path / target).equal
    groups = config_of(tmp_path / "compressed-tensors")["quantization_config"]["config_groups"]
    assert sorted(group["weights"]["num_bits"] for group in groups.values()) == [4, 8]
    rules = config_of(tmp_path / "gptq_v2")["quantization_config"]["dynamic"]
    wider = {name.removeprefix("+:"): rule["bits"] for name, rule in rules.items() if name.startswith("+:")}
    assert list(wider.values()) == [8, 8, 8, 8]
    for layer in (0, 1):  # vLLM looks up its fused experts by the name of their module
        assert any(re.match(rule, f"model.layers.{layer}.mlp.experts") for rule in wider) == (layer == 1)


def test_outputs_of_convert_are_refused(checkpoints: Path, tmp_path: Path) -> None:
    from moeq.deploy.deployment import Deployment
    from moeq.deploy.gpus import parse_gpu
    from moeq.pipeline.convert import convert

    convert(checkpoints / "ct-int4-g128-qwen3moe", tmp_path / "packed", Deployment(gpu=parse_gpu("a100")))
    with pytest.raises(MoeqError) as error:
        transcode(tmp_path / "packed", tmp_path / "out", "gptq")
    assert error.value.code == "usage.already-converted"


def test_damaged_scales_are_refused(checkpoints: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoints / "gptq-int4-g32-qwen3moe", source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.scales"][0, 3] = float("nan")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(MoeqError, match=r"layers\.1\.self_attn\.q_proj.*not finite") as error:
        transcode(source, tmp_path / "out", "compressed-tensors")
    assert error.value.exit_code == ExitCode.SOURCE
    assert not (tmp_path / "out").exists()


def test_every_byte_of_every_file_is_written_by_one_unit(checkpoints: Path, tmp_path: Path) -> None:
    found = transcode(checkpoints / "mxfp4-gptoss", tmp_path / "out", "mxfp4")
    for file in found.plan.files:
        spans = sorted(span for unit in found.plan.units if unit.file == file.name for span in unit.outputs)
        assert spans[0][0] == len(file.form.header)
        assert spans[-1][1] == file.form.size
        assert all(one[1] == two[0] for one, two in pairwise(spans))


def test_a_source_that_changes_before_the_end_is_told(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All weights are written, the index is about to be: the result would be of two sources."""
    source = Path(shutil.copytree(checkpoints / "gptq-int4-g32-qwen3moe", tmp_path / "source"))
    index_of = transcode_module.index_of

    def changed(plan: Any) -> Any:
        path = next(source.glob("*.safetensors"))
        path.write_bytes(path.read_bytes())
        os.utime(path, (1, 1))
        return index_of(plan)

    monkeypatch.setattr(transcode_module, "index_of", changed)
    with pytest.raises(MoeqError) as caught:
        transcode(source, tmp_path / "out", "compressed-tensors", workers=1)
    assert caught.value.code == "source.changed"
    assert not (tmp_path / "out").exists()

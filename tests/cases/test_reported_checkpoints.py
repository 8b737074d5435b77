"""Checkpoints of public bug reports, rebuilt small: what is read, what the verdict says, what converting comes to."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import stored
from safetensors.torch import load_file, save_file

import moeq
from moeq.cli.app import run
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.pipeline.plan.decide import Answer, advised
from moeq.pipeline.plan.options import Question
from moeq.transcode.transcode import transcode

NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
HIDDEN, INTER, EXPERTS = stored.HIDDEN, stored.INTER, stored.EXPERTS
ROLES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def asked(folder: Path, gpu: str = "H100", **fields: Any) -> Answer:
    return advised(moeq.open(folder), Question(Deployment(parse_gpu(gpu), **fields)))


def gptq(n: int, k: int, seed: int, group: int = 32) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors of a symmetric int4 GPTQ matrix, and its values float32 `[N, K]`."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, k), generator=draw)
    scales = torch.rand(n, k // group, generator=draw).half() / 100 + 0.01
    words = sum(codes.t().reshape(k // 8, 8, n)[:, i].long() << (4 * i) for i in range(8))
    packed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    parts = {
        "qweight": packed.contiguous(),
        "qzeros": torch.full((k // group, n // 8), 0x77777777, dtype=torch.int32),
        "scales": scales.t().contiguous(),
        "g_idx": (torch.arange(k) // group).to(torch.int32),
    }
    return parts, (codes - 8) * scales.float().repeat_interleave(group, 1)


def gptq_folder(folder: Path, **config: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Tensors of two layers of GPTQ experts, not written yet, and values by module; writes the config."""
    tensors, values = {}, {}
    for layer in range(2):
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = torch.ones(EXPERTS, HIDDEN, dtype=torch.bfloat16)
        for expert in range(EXPERTS):
            for seed, name in enumerate(ROLES):
                n, k = (HIDDEN, INTER) if name == "down_proj" else (INTER, HIDDEN)
                module = f"model.layers.{layer}.mlp.experts.{expert}.{name}"
                parts, values[module] = gptq(n, k, 100 * layer + 10 * expert + seed)
                tensors |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
    folder.mkdir()
    table = {**stored.QWEN, "quantization_config": {**stored.GPTQ, **config}}
    (folder / "config.json").write_text(json.dumps(table))
    return tensors, values


def assert_values(folder: Path, values: dict[str, torch.Tensor]) -> None:
    opened = moeq.open(folder)
    for module, wanted in values.items():
        parts = module.split(".")
        assert torch.equal(opened.dequantize(int(parts[2]), int(parts[5]), ROLES[parts[6]]), wanted), module


# ------------------------------------------------------------------------------------------------ lists per projection


def listed(folder: Path, names: tuple[str, ...], config: dict[str, Any], make: Any) -> Path:
    tensors = {}
    for name in names:
        for expert in range(EXPERTS):
            n, k = (
                (HIDDEN, INTER) if "down" in name or name == "w2" else (INTER * (2 if "gate_up" in name else 1), HIDDEN)
            )
            for part, (dtype, shape) in make(n, k).items():
                key = f"model.layers.0.mlp.experts.{name}.{expert}.{part}"
                tensors[key] = torch.ones(shape, dtype=torch.float32).to(dtype)
    return stored.write(folder, {**stored.QWEN, "num_hidden_layers": 1, "quantization_config": config}, [tensors])


@pytest.mark.cover(every=4)
@pytest.mark.parametrize(
    ("names", "config", "make", "target"),
    [
        (("gate_proj", "up_proj", "down_proj"), NVFP4, stored.nvfp4, "modelopt"),
        (("gate_up_projs", "down_projs"), NVFP4, stored.nvfp4, "modelopt"),
        (("gate_projs", "up_projs", "down_projs"), stored.GPTQ, stored.gptq, "compressed-tensors"),
        (("w1", "w3", "w2"), NVFP4, stored.nvfp4, "modelopt"),
    ],
)
def test_lists_of_experts_per_projection(names: Any, config: Any, make: Any, target: str, tmp_path: Path) -> None:
    """ModelOpt and Unsloth number experts after the projection: vllm-project/vllm#40885."""
    folder = listed(tmp_path / "made", names, config, make)
    if config is stored.GPTQ:
        tensors = load_file(folder / "model.safetensors")
        for name, tensor in tensors.items():
            if name.endswith("qzeros"):
                tensors[name] = torch.full_like(tensor, 0x77777777)
            elif name.endswith("g_idx"):
                tensors[name] = (torch.arange(len(tensor)) // 32).to(torch.int32)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    opened = moeq.open(folder)
    assert opened.num_experts(0) == EXPERTS
    found = asked(folder)
    assert "no class loads lists of experts per projection" in found.verdict.refusal
    assert found.ok  # moeq's plug-in loads what convert writes
    transcode(folder, tmp_path / "out", target, names="per-expert", allow_lossy=True)
    written = moeq.open(tmp_path / "out")
    assert f".experts.{EXPERTS - 1}." in written.module(0, EXPERTS - 1, "down")
    assert asked(tmp_path / "out").verdict.ok
    for role in ("gate", "up", "down"):
        assert torch.equal(written.dequantize(0, 2, role), opened.dequantize(0, 2, role))  # type: ignore[arg-type]


def test_a_list_beside_numbered_experts_is_refused(tmp_path: Path) -> None:
    folder = listed(tmp_path / "made", ("gate_proj", "up_proj", "down_proj"), NVFP4, stored.nvfp4)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if ".experts.gate_proj.3." in name)
    tensors[name.replace("gate_proj.3", "3.gate_proj")] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(moeq.MoeqError) as error:
        moeq.open(folder)
    assert error.value.code == "source.bad-names"


# ------------------------------------------------------------------------------------------------ two sets of experts


ERNIE = {
    "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"], "model_type": "ernie4_5_moe_vl",
    "hidden_size": HIDDEN, "moe_intermediate_size": [192, 64], "moe_num_experts": [4, 4], "moe_k": 2,
    "num_hidden_layers": 1, "vocab_size": 64, "hidden_act": "silu", "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True,
                                  "dynamic": True},
        }},
        "ignore": ["lm_head"],
    },
}  # fmt: skip


def _channel(expert: int, name: str, n: int, k: int) -> stored.Parts:
    return {"weight": (torch.float8_e4m3fn, (n, k)), "weight_scale": (torch.bfloat16, (n, 1))}


def two_sets(folder: Path, config: dict[str, Any]) -> Path:
    prefix = "model.layers.0.mlp.experts"
    text = stored.experts(prefix, _channel, inter=192)
    vision = stored.experts(prefix, _channel, inter=64)
    numbered = {name.replace(f"experts.{e}.", f"experts.{e + 4}."): t for e in range(4) for name, t in vision.items()
                if f"experts.{e}." in name}  # fmt: skip
    return stored.write(folder, config, [text, numbered])


def test_two_sets_of_experts(tmp_path: Path) -> None:
    """ERNIE-4.5-VL has text experts and smaller ones for images: ggml-org/llama.cpp#19475."""
    folder = two_sets(tmp_path / "made", ERNIE)
    opened = moeq.open(folder)
    assert [opened.spec(0, "w2", expert).k for expert in (0, 3, 4, 7)] == [192, 192, 64, 64]
    assert opened.dequantize(0, 7, "down").shape == (HIDDEN, 64)
    assert "experts.several-sets" in {row.code for row in opened.info.warnings}
    found = asked(folder)
    assert found.verdict.ok  # the class builds a layer for each set
    ranks = asked(folder, tp=8).verdict.gates
    assert any(gate.text == "tp 8 is more than 4 experts, which the class refuses" for gate in ranks)
    assert (found.verdict.shape.num_experts, found.verdict.shape.intermediate_size) == (4, 192)
    assert found.error is not None
    assert "experts 0-3 have 192 intermediate features, 4-7 have 64" in found.error.message
    other = two_sets(tmp_path / "other", {**ERNIE, "architectures": ["Ernie4_5_MoeForCausalLM"]})
    assert "vllm runs one set of experts in Ernie4_5_MoeForCausalLM" in asked(other).verdict.refusal


def test_a_second_set_that_the_engine_cannot_run(tmp_path: Path) -> None:
    def block(expert: int, name: str, n: int, k: int) -> stored.Parts:
        scales = (-(-n // 128), -(-k // 128))
        return {"weight": (torch.float8_e4m3fn, (n, k)), "weight_scale_inv": (torch.float32, scales)}

    table = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    config = {**ERNIE, "moe_intermediate_size": [256, 64], "quantization_config": table}
    sets = [stored.experts("model.layers.0.mlp.experts", block, inter=size) for size in (256, 64)]
    second = {re.sub(r"experts\.(\d)", lambda m: f"experts.{int(m[1]) + 4}", name): one
              for name, one in sets[1].items() if ".experts." in name}  # fmt: skip
    verdict = asked(stored.write(tmp_path / "made", config, [sets[0], second])).verdict
    assert not verdict.ok
    (gate,) = [gate for gate in verdict.gates if not gate.passed]
    assert (gate.code, gate.text.partition(":")[0]) == ("G13", "experts 4-7")


def test_two_sets_of_one_size_are_two_sets(tmp_path: Path) -> None:
    config = {**ERNIE, "moe_intermediate_size": [192, 192]}
    text = stored.experts("model.layers.0.mlp.experts", _channel, inter=192, count=8)
    found = asked(stored.write(tmp_path / "made", config, [text]))
    assert (found.verdict.shape.num_experts, found.verdict.shape.intermediate_size) == (4, 192)
    assert found.error is not None
    assert "several sets" in found.error.message


def test_counts_that_are_no_sets_are_still_refused(tmp_path: Path) -> None:
    with pytest.raises(moeq.MoeqError, match="the config declares 5 experts, the tensors of layer 0 have 8"):
        moeq.open(two_sets(tmp_path / "made", {**ERNIE, "moe_num_experts": [5, 4]}))


# ------------------------------------------------------------------------------------------------ group indices


def test_an_index_of_zeros_is_a_placeholder(tmp_path: Path) -> None:
    """Converters write `g_idx` of zeros, or none, without act-order: AutoGPTQ/AutoGPTQ#771."""
    folder = tmp_path / "made"
    tensors, values = gptq_folder(folder)
    for name in [name for name in tensors if name.endswith("g_idx")]:
        if ".layers.0." in name:
            tensors[name] *= 0
        else:
            del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert_values(folder, values)
    assert run(["convert", str(folder), str(tmp_path / "out"), "--gpu", "H100", "-q"]) == 0
    assert_values(tmp_path / "out", values)
    assert run(["restore", str(tmp_path / "out"), str(tmp_path / "back")]) == 0
    assert (tmp_path / "back/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.cover(every=4)
@pytest.mark.parametrize(
    ("index", "desc_act", "said"),
    [
        ([3] * 256, False, "g_idx is 3 for all 256 columns"),
        ([0] * 256, True, "g_idx is 0 for all 256 columns"),
        ([0] * 33 + [1] * 31 + [k // 32 for k in range(64, 256)], False, "has 33 of 256 columns in group 0"),
        ([k // 32 for k in range(255)] + [8], False, "ranges from 0 to 8"),
        ([-1] + [k // 32 for k in range(1, 256)], True, "ranges from -1 to 7"),
    ],
)
def test_an_impossible_index_is_refused_with_what_was_seen(
    index: list[int], desc_act: bool, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made"
    tensors, _ = gptq_folder(folder, desc_act=desc_act)
    tensors["model.layers.1.mlp.experts.2.up_proj.g_idx"] = torch.tensor(index, dtype=torch.int32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert run(["convert", str(folder), str(tmp_path / "out"), "--gpu", "H100", "--engine", "moeq", "-q"]) == 4
    message = capsys.readouterr().err
    assert said in message
    assert "desc_act has to be true" not in message


# ------------------------------------------------------------------------------------------------ stale copies


def test_stale_copies_are_what_engines_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another listed file has a tensor of the same name: vllm-project/vllm#54230."""
    folder = tmp_path / "made"
    tensors, values = gptq_folder(folder)
    stale = "model.layers.1.mlp.experts.0.up_proj.scales"
    rest = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    experts = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
    first, last = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    places = {**dict.fromkeys(experts, first), **dict.fromkeys(rest, last)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    save_file(experts, folder / first, {"format": "pt"})
    save_file({**rest, stale: tensors[stale] * 3}, folder / last, {"format": "pt"})
    assert_values(folder, values)
    (warning,) = [row.message for row in moeq.open(folder).info.warnings if row.code == "index.duplicates"]
    assert f"engines take the copy of the last listed file ({last})" in warning
    verdict = asked(folder).verdict
    assert f"{stale} of {last}, in place of the one in {first}" in verdict.refusal
    assert run(["doctor", str(folder), "--gpu", "H100", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["deployment"]["serve"] is None
    assert document["deployment"]["convert"].startswith("moeq convert")
    assert run(["convert", str(folder), str(tmp_path / "out"), "--gpu", "H100", "-q"]) == 0
    assert_values(tmp_path / "out", values)


def test_a_copy_in_an_earlier_file_changes_nothing(tmp_path: Path) -> None:
    """Files are read in natural order: the tenth comes after the second."""
    folder = tmp_path / "made"
    tensors, values = gptq_folder(folder)
    stale = "model.layers.1.mlp.experts.0.up_proj.scales"
    places = {name: "model-10.safetensors" for name in tensors} | {"a": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    save_file(tensors, folder / "model-10.safetensors", {"format": "pt"})
    save_file({"a": torch.ones(1), stale: tensors[stale] * 3}, folder / "model-2.safetensors", {"format": "pt"})
    assert_values(folder, values)
    assert asked(folder).verdict.ok


# ------------------------------------------------------------------------------------------------ configs


def test_prediction_layers_of_another_format(tmp_path: Path) -> None:
    """NVFP4 experts, and FP8 blocks in the layer of multi-token prediction: vllm-project/vllm#55496."""
    prefixes = [f"model.language_model.layers.{layer}.mlp.experts" for layer in range(2)]
    layers = [stored.experts(prefix, lambda e, p, n, k: stored.nvfp4(n, k)) for prefix in prefixes]
    mtp = stored.experts("mtp.layers.0.mlp.experts", lambda e, p, n, k: stored.fp8_block(n, k))
    table = {prefix: {"quant_algo": "NVFP4", "group_size": 16} for prefix in prefixes}
    table["mtp.layers.0.mlp.experts"] = {"quant_algo": "FP8_BLOCK_SCALES"}
    text = {name: value for name, value in stored.QWEN.items() if name not in ("architectures", "torch_dtype")}
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "text_config": {**text, "model_type": "qwen3_5_moe_text", "mtp_num_hidden_layers": 1},
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["lm_head"],
                                "quantized_layers": table},
    }  # fmt: skip
    tensors = [{name: t if t.dim() else torch.ones(()) for name, t in layer.items()} for layer in layers]
    folder = stored.write(tmp_path / "made", config, [*tensors, mtp])
    opened = moeq.open(folder)
    assert (opened.info.moe_layers, opened.info.mtp_layers) == ((0, 1), (2,))
    assert {opened.scheme_of(layer).title for layer in (0, 1)} == {"nvfp4 e2m1 g16 sym act-e2m1"}
    assert opened.scheme_of(2).format == "fp8-block"
    found = asked(folder, "B200")
    assert found.ok
    assert {part.layers for part in found.parts} == {(0, 1)}
    assert found.verdict.runs_as == "W4A4"
    assert run(["convert", str(folder), str(tmp_path / "out"), "--gpu", "H100", "-q"]) == 0
    written = {name: t for file in (tmp_path / "out").glob("*.safetensors") for name, t in load_file(file).items()}
    assert all(torch.equal(written[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in mtp.items())


def test_the_routers_usual_exclusion_is_no_rule_for_experts(checkpoints: Path, tmp_path: Path) -> None:
    source, folder = checkpoints / "awq-int4-g32-qwen3moe", tmp_path / "made"
    shutil.copytree(source, folder)
    for entry, told in (("gate", False), ("gate_proj", True)):
        config = json.loads((source / "config.json").read_text())
        config["quantization_config"]["modules_to_not_convert"] = [entry]
        (folder / "config.json").write_text(json.dumps(config))
        codes = [row.code for row in asked(folder).verdict.advisories]
        assert ("per-expert-rules-ignored" in codes) == told


@pytest.mark.parametrize(("inter", "loads"), [(128, True), (96, False)])
def test_mxfp4_of_another_padding_is_not_loaded_on_xpu(inter: int, loads: bool, tmp_path: Path) -> None:
    """The engine's method rounds 96 features up to 128 there, and the layout keeps 96."""

    def make(expert: int, name: str, n: int, k: int) -> stored.Parts:
        return {"weight": (torch.uint8, (n, k // 2)), "weight_scale": (torch.uint8, (n, k // 32))}

    config = {**stored.QWEN, "num_hidden_layers": 1, "moe_intermediate_size": inter}
    made = stored.experts("model.layers.0.mlp.experts", make, inter=inter)
    config["quantization_config"] = {"quant_method": "mxfp4"}
    found = asked(stored.write(tmp_path / "made", config, [made]), "XPU", backend="xpu")
    assert found.ok, found.error
    assert ("vllm" in {loader.name for loader in found.loaders}) == loads


# ------------------------------------------------------------------------------------------------ results of transcode


@pytest.mark.cover(every=3)
@pytest.mark.parametrize(("target", "wanted"), [("fp8", "fp8"), ("deepseek-v4", "fp8"), ("bf16", None)])
def test_deepseek_v4_says_how_its_experts_are_written(target: str, wanted: str | None, tmp_path: Path) -> None:
    """Engines take FP4 where `expert_dtype` is missing: vllm-project/vllm#43416."""
    config = {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": HIDDEN,
        "moe_intermediate_size": INTER, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "num_hidden_layers": 1,
        "vocab_size": 64, "torch_dtype": "bfloat16", "scoring_func": "sqrtsoftplus", "swiglu_limit": 10.0,
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
                                "weight_block_size": [128, 128]},
    }  # fmt: skip
    made = stored.experts(
        "layers.0.ffn.experts",
        lambda e, p, n, k: stored.fp8_block(n, k, "scale", torch.float8_e8m0fnu),
        ("w1", "w3", "w2"),
    )
    for expert_dtype in ({}, {"expert_dtype": "fp4"}):
        folder = stored.write(tmp_path / f"made{len(expert_dtype)}", {**config, **expert_dtype}, [made])
        out = tmp_path / f"out{len(expert_dtype)}"
        transcode(folder, out, target, allow_lossy=True)
        assert json.loads((out / "config.json").read_text()).get("expert_dtype") == wanted
        assert asked(out, "H100").verdict.ok


def test_an_asymmetric_result_that_vllm_refuses_is_told(
    tmp_path: Path, checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoints / "ct-int4-asym-g32-mixtral"
    assert run(["transcode", str(source), str(tmp_path / "out"), "--to", "gptq_v2", "-q"]) == 0
    assert "vLLM runs the result on none of H100, B200, A100, MI300X" in capsys.readouterr().err


def test_floats_get_the_names_that_transformers_loads(tmp_path: Path, checkpoints: Path) -> None:
    source = checkpoints / "gptq-int4-g128-mixtral"
    assert ".mlp.experts." in moeq.open(source).module(0, 0, "up")
    found = transcode(source, tmp_path / "out", "bf16", allow_lossy=True)
    assert not found.warnings
    names = {name for file in (tmp_path / "out").glob("*.safetensors") for name in load_file(file)}
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in names
    assert "model.layers.0.block_sparse_moe.gate.weight" in names
    assert not any(".mlp." in name for name in names)
    asked_for = transcode(source, tmp_path / "other", "bf16", names="mlp", allow_lossy=True)
    looked_for = "transformers looks for model.layers.0.block_sparse_moe.experts.0.w2.weight"
    assert any(looked_for in warning for warning in asked_for.warnings)
    assert any("MixtralForCausalLM does not load" in warning for warning in asked_for.warnings)

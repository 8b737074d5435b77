"""The verdict is about the tensors in the file: what the engine's method allocates has to be what is stored."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import stored
from safetensors.torch import load_file, save_file

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.oracle.judge import judge_config
from moeq.oracle.records import MoeShape, Verdict
from moeq.pipeline.plan.decide import answer
from moeq.pipeline.plan.layer_verdict import judge_checkpoint, moe_shape, stored_tensors
from moeq.pipeline.plan.options import Question

PREFIX = "model.layers.{}.mlp.experts"
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


#: Versions of vLLM whose parameters are extracted.
VERSIONS = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
QWEN35 = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "quantization_config": NVFP4,
    "text_config": {key: value for key, value in stored.QWEN.items() if key not in ("architectures", "torch_dtype")},
}  # fmt: skip


def judged(folder: Path, layer: int = 0, gpu: str = "H100", version: str = "0.33.0", **fields: Any) -> Verdict:
    where = Deployment(parse_gpu(gpu), engine=f"vllm@{version}", **fields)
    return judge_checkpoint(moeq.open(folder), where, layer, explain=False)


def qwen(folder: Path, quantization: dict[str, Any] | None, *layers: Any, **side: Any) -> Path:
    config = {**stored.QWEN, **({"quantization_config": quantization} if quantization else {})}
    made = [stored.experts(PREFIX.format(number), make) for number, make in enumerate(layers)]
    return stored.write(folder, config, made, **side)


def test_matching_tensors_pass(tmp_path: Path) -> None:
    made = {
        "gptq": (stored.GPTQ, lambda e, p, n, k: stored.gptq(n, k)),
        "nvfp4": (NVFP4, lambda e, p, n, k: stored.nvfp4(n, k)),
        "fp8": (FP8, lambda e, p, n, k: stored.fp8_block(n, k)),
        "plain": (None, lambda e, p, n, k: stored.plain(n, k)),
    }
    for name, (config, make) in made.items():
        verdict = judged(qwen(tmp_path / name, config, make, make))
        assert verdict.ok, (name, verdict.refusal)


@pytest.mark.parametrize(
    ("config", "make", "said"),
    [
        (FP8, lambda e, p, n, k: stored.nvfp4(n, k), "float8_e4m3fn"),
        (stored.GPTQ, lambda e, p, n, k: stored.plain(n, k), "weight"),
        (NVFP4, lambda e, p, n, k: stored.fp8_block(n, k), "weight"),
    ],
)
def test_tensors_of_another_kind_than_the_config_says(config, make, said: str, tmp_path: Path) -> None:
    verdict = judged(qwen(tmp_path / "made", config, make, make))
    assert not verdict.ok
    assert said in verdict.refusal


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_with_extracted_parameters_looks_at_the_tensors(version: str, tmp_path: Path) -> None:
    matching = qwen(tmp_path / "fp8", FP8, *[lambda e, p, n, k: stored.fp8_block(n, k)] * 2)
    assert judged(matching, version=version).ok
    other = qwen(tmp_path / "nvfp4", FP8, *[lambda e, p, n, k: stored.nvfp4(n, k)] * 2)
    assert "float8_e4m3fn" in judged(other, version=version).refusal


def test_one_layer_of_another_width_is_refused_alone(tmp_path: Path) -> None:
    """A `dynamic` rule for single experts never matches the fused module: the engine allocates int4."""
    config = {**stored.GPTQ, "dynamic": {r"+:model\.layers\.1\.mlp\.experts\.\d+\..*": {"bits": 8}}}
    bits = (4, 8)
    layers = [lambda e, p, n, k, b=b: stored.gptq(n, k, bits=b) for b in bits]
    folder = qwen(tmp_path / "made", config, *layers)
    assert judged(folder, 0).ok
    verdict = judged(folder, 1)
    assert not verdict.ok
    assert "qweight" in verdict.refusal
    whole = {**stored.GPTQ, "dynamic": {r"+:model\.layers\.1\.mlp\.experts.*": {"bits": 8}}}
    assert judged(qwen(tmp_path / "whole", whole, *layers), 1).ok


def test_deepseek_v4_with_fp8_experts_names_the_field_and_one_size(tmp_path: Path) -> None:
    config = {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": stored.HIDDEN,
        "moe_intermediate_size": stored.HIDDEN, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "num_hidden_layers": 1, "vocab_size": 64, "hidden_act": "silu", "n_shared_experts": 0,
        "scoring_func": "sqrtsoftplus", "swiglu_limit": 10.0, "quantization_config": {**FP8, "scale_fmt": "ue8m0"},
    }  # fmt: skip

    def make(expert: int, name: str, n: int, k: int) -> stored.Parts:
        return stored.fp8_block(n, k, "scale", torch.float8_e8m0fnu)

    layer = stored.experts("layers.0.ffn.experts", make, ("w1", "w3", "w2"), stored.HIDDEN)
    verdict = judged(stored.write(tmp_path / "v4", config, [layer]))
    assert not verdict.ok
    assert verdict.nearest is not None
    assert '"expert_dtype": "fp8"' in verdict.nearest
    mended = judged(stored.write(tmp_path / "mended", {**config, "expert_dtype": "fp8"}, [layer]))
    assert mended.ok, mended.refusal
    # transformers' config class, which vLLM uses from 0.33.0 on, takes either key for the size of experts.
    both = {**config, "expert_dtype": "fp8", "intermediate_size": 2 * stored.HIDDEN}
    folder = stored.write(tmp_path / "both", both, [layer])
    assert f"the engine creates {2 * stored.HIDDEN} by the config" in judged(folder).refusal
    assert "by the config" not in judged(folder, version="0.32.0").refusal


def test_a_side_file_alone_needs_the_option(tmp_path: Path) -> None:
    def make(expert: int, name: str, n: int, k: int) -> stored.Parts:
        return stored.gptq(n, k)

    folder = qwen(tmp_path / "made", None, make, make, quantize_config={**stored.GPTQ})
    verdict = judged(folder)
    assert not verdict.ok
    assert verdict.nearest == 'quantization="gptq"'
    assert judged(folder, quantization="gptq").ok


def test_excluded_experts_that_are_quantised(tmp_path: Path) -> None:
    config = {**stored.GPTQ, "dynamic": {r"-:.*\.experts.*": {}}}
    folder = qwen(tmp_path / "made", config, *[lambda e, p, n, k: stored.gptq(n, k)] * 2)
    verdict = judged(folder)
    assert verdict.method == "UnquantizedFusedMoEMethod"
    assert not verdict.ok
    (gate,) = (gate for gate in verdict.gates if gate.code == "G13" and not gate.passed)
    assert gate.remedy == "a quantization_config without the entry that leaves these experts out"


def test_missing_activation_scales_are_fatal_where_they_are_read(tmp_path: Path) -> None:
    def make(expert: int, name: str, n: int, k: int) -> stored.Parts:
        return stored.nvfp4(n, k, input_scale=expert not in (1, 3))

    folder = qwen(tmp_path / "made", NVFP4, make, make)
    assert any("experts 1, 3 have no input_scale" in row.message for row in moeq.open(folder).info.warnings)
    verdict = judged(folder, gpu="B200")
    assert not verdict.ok
    assert "experts 1, 3" in verdict.refusal
    assert verdict.convert is None
    assert "--moe-backend marlin" in str(verdict.nearest)
    weight_only = judged(folder, gpu="B200", backend="marlin")
    assert weight_only.ok
    assert weight_only.runs_as == "W4A16"
    assert weight_only.convert is not None
    assert judged(folder, gpu="A100").ok


def test_stacked_scales_are_loaded_by_no_class(tmp_path: Path) -> None:
    layer = {}
    for name, n, k in (("gate_up_proj", 2 * stored.INTER, stored.HIDDEN), ("down_proj", stored.HIDDEN, stored.INTER)):
        prefix = f"model.language_model.layers.0.mlp.experts.{name}"
        for part, (dtype, shape) in stored.nvfp4(n, k).items():
            end = "" if part == "weight" else f"_{part}"
            layer[prefix + end] = torch.zeros((stored.EXPERTS, *shape)).to(dtype)
    folder = stored.write(tmp_path / "made", QWEN35, [layer])
    verdict = answer(moeq.open(folder), Question(Deployment(parse_gpu("H100"), engine="vllm@0.33.0"))).verdict
    assert not verdict.ok
    assert "no class loads stacked scales such as" in verdict.refusal
    assert "moeq transcode" in str(verdict.nearest)


def test_a_doubled_wrapper_is_found_by_no_class(tmp_path: Path) -> None:
    for wrapper, ok in (("language_model", True), ("language_model.language_model", False)):
        layer = stored.experts(f"model.{wrapper}.layers.0.mlp.experts", lambda e, p, n, k: stored.nvfp4(n, k))
        folder = stored.write(tmp_path / wrapper, QWEN35, [layer])
        verdict = answer(moeq.open(folder), Question(Deployment(parse_gpu("H100"), engine="vllm@0.33.0"))).verdict
        assert verdict.ok == ok, verdict.refusal
        assert ok or "2 times above its layers" in verdict.refusal


def oracle(folder: Path, gpu: str = "H100", **fields: Any) -> list[Verdict]:
    """The verdicts of all groups of layers: the answer is yes if each of them is."""
    where = Deployment(parse_gpu(gpu), engine="vllm@0.33.0", **fields)
    return [part.verdict for part in answer(moeq.open(folder), Question(where), brief=True).parts]


def refusal(folder: Path, **fields: Any) -> str:
    return "; ".join(verdict.refusal for verdict in oracle(folder, **fields) if not verdict.ok)


def test_a_float_layer_beside_quantised_ones_is_judged(tmp_path: Path) -> None:
    """The engine takes the config for all layers alike; with an exclusion it takes the layer as it is."""
    layers = [lambda e, p, n, k: stored.gptq(n, k), lambda e, p, n, k: stored.plain(n, k)]
    assert "down.weight" in refusal(qwen(tmp_path / "made", stored.GPTQ, *layers))
    excluded = {**stored.GPTQ, "dynamic": {r"-:model\.layers\.1\.mlp\.experts.*": {}}}
    assert refusal(qwen(tmp_path / "excluded", excluded, *layers)) == ""


def test_layers_of_equal_tensors_that_the_config_tells_apart(tmp_path: Path) -> None:
    config = {**stored.GPTQ, "dynamic": {r"-:model\.layers\.1\.mlp\.experts.*": {}}}
    folder = qwen(tmp_path / "made", config, *[lambda e, p, n, k: stored.gptq(n, k)] * 2)
    assert [verdict.ok for verdict in oracle(folder)] == [True, False]


def test_a_layer_whose_scales_have_another_name(tmp_path: Path) -> None:
    names = iter(("weight_scale_inv", "weight_scale"))
    layers = [lambda e, p, n, k, s=name: stored.fp8_block(n, k, s) for name in names]
    assert "weight_scale" in refusal(qwen(tmp_path / "made", FP8, *layers))


def test_a_layer_with_fewer_experts_than_the_others(tmp_path: Path) -> None:
    def make(expert: int, name: str, n: int, k: int) -> stored.Parts:
        return stored.gptq(n, k)

    layers = [stored.experts(PREFIX.format(number), make, count=count) for number, count in enumerate((4, 3))]
    folder = stored.write(tmp_path / "made", {**stored.QWEN, "quantization_config": stored.GPTQ}, layers)
    assert "layer 1 has 3 experts" in refusal(folder)


def test_quantised_experts_that_no_file_declares(tmp_path: Path) -> None:
    folder = qwen(tmp_path / "made", None, *[lambda e, p, n, k: stored.fp8_block(n, k)] * 2)
    assert "creates unquantised experts" in refusal(folder)


def test_changes_are_tried_with_the_file_of_a_checkpoint_without_a_config(tmp_path: Path) -> None:
    """No device and no backend by name mends quantised tensors that the engine would take for floats."""
    checkpoint = moeq.open(qwen(tmp_path / "made", None, lambda e, p, n, k: stored.gptq(n, k)))
    shape, where = moe_shape(checkpoint, 0), Deployment(parse_gpu("H100"))
    for tensors, fits in ((stored_tensors(checkpoint, 0), False), ((), True)):
        verdict = judge_config({}, shape, where, tensors=tensors)
        assert verdict.ok is fits
        assert verdict.works is None
        assert any(row.unlock for row in verdict.candidates) is fits


def test_biases_that_no_method_registers(tmp_path: Path) -> None:
    """GPTQ's method always has biases; others only in gpt-oss."""

    def with_bias(parts: stored.Parts, n: int) -> stored.Parts:
        return {**parts, "bias": (torch.bfloat16, (n,))}

    made = {
        "fp8": (FP8, lambda e, p, n, k: with_bias(stored.fp8_block(n, k), n)),
        "gptq": (stored.GPTQ, lambda e, p, n, k: with_bias(stored.gptq(n, k), n)),
    }
    found = {name: refusal(qwen(tmp_path / name, config, make, make)) for name, (config, make) in made.items()}
    assert "creates no bias" in found["fp8"]
    assert found["gptq"] == ""


def test_layers_where_a_text_model_does_not_look_for_them(tmp_path: Path) -> None:
    for stem, ok in (("model", True), ("model.language_model", False), ("language_model.model", False)):
        layer = stored.experts(f"{stem}.layers.0.mlp.experts", lambda e, p, n, k: stored.nvfp4(n, k))
        config = {**stored.QWEN, "num_hidden_layers": 1, "quantization_config": NVFP4}
        folder = stored.write(tmp_path / stem, config, [layer])
        assert (refusal(folder) == "") == ok
        assert ok or "looks for layers in model.layers" in refusal(folder)


def test_rules_that_moe_wna16_does_not_read(tmp_path: Path) -> None:
    """The method's loader converts integers in one group size, which is the config's own."""
    config = {**stored.GPTQ, "dynamic": {r"+:model\.layers\.1\.mlp\.experts.*": {"group_size": 64}}}
    layers = [lambda e, p, n, k, g=group: stored.gptq(n, k, group=g) for group in (32, 64)]
    folder = qwen(tmp_path / "made", config, *layers)
    assert refusal(folder) == ""
    assert "scales" in refusal(folder, quantization="moe_wna16")


def test_zero_points_of_moe_wna16_with_expert_parallelism(tmp_path: Path) -> None:
    """Its loader takes the global number of an expert (vLLM 0.26.0 to 0.33.0)."""
    asymmetric = {**stored.GPTQ, "sym": False}
    layers = [lambda e, p, n, k: stored.gptq(n, k)] * 2
    folder = qwen(tmp_path / "made", {**asymmetric, "dynamic": {r"-:.*\.gate$": {}}}, *layers)
    assert refusal(folder, quantization="moe_wna16", tp=2) == ""
    assert "global expert numbers" in refusal(folder, quantization="moe_wna16", tp=2, ep=2)


@pytest.mark.parametrize(("version", "said"), [("0.31.0", "zero points of 8 bits as if they had 4"), ("0.32.0", "")])
def test_zero_points_of_8_bits_in_moe_wna16(version: str, said: str, tmp_path: Path) -> None:
    """Seen by loading a checkpoint with vLLM 0.26.0; 0.32.0 cuts them in units of the packing."""
    config = {**stored.GPTQ, "bits": 8, "sym": False}
    make = lambda e, p, n, k: stored.gptq(n, k, bits=8)  # noqa: E731
    verdict = judged(qwen(tmp_path / "made", config, make, make), version=version, quantization="moe_wna16")
    assert said in str(verdict.refusal)
    assert verdict.ok is not bool(said)


@pytest.mark.parametrize(("version", "ok"), [("0.26.0", False), ("0.27.1", True)])
def test_marlin_and_router_weights_on_the_input(version: str, ok: bool) -> None:
    """vLLM 0.26.0 hands Llama-4 to a kernel without zero points, since Marlin multiplied the output only."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": False}
    groups = {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    shape = MoeShape(2048, 768, 128, 1, router_weight_on_input=True)
    assert judge_config(config, shape, Deployment(parse_gpu("A100"), engine=f"vllm@{version}"), explain=False).ok is ok


def test_a_size_in_the_config_that_tensors_do_not_have(tmp_path: Path) -> None:
    made = lambda e, p, n, k: stored.fp8_block(n, k)  # noqa: E731
    folder = qwen(tmp_path / "made", FP8, made)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 2 * stored.INTER}))
    assert f"have {stored.INTER} intermediate features, and the engine creates {2 * stored.INTER}" in refusal(folder)
    verdict = judge_checkpoint(moeq.open(folder), Deployment(parse_gpu("H100"), engine="moeq"), 0)
    assert verdict.ok, verdict.refusal  # moeq's own kernels follow the tensors


def test_a_layer_after_the_last_one_that_predicts_nothing(tmp_path: Path) -> None:
    folder = qwen(tmp_path / "made", FP8, *[lambda e, p, n, k: stored.fp8_block(n, k)] * 3)
    assert refusal(folder) == ""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    assert "the file has layer 2, and the engine creates 2" in refusal(folder)


def test_a_layer_whose_experts_are_missing(tmp_path: Path) -> None:
    made = lambda e, p, n, k: stored.plain(n, k)  # noqa: E731
    folder = qwen(tmp_path / "made", None, made, made)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.layers.{layer}.mlp.gate.weight": torch.ones(4, 8, dtype=torch.bfloat16) for layer in (0, 1)}
    save_file(tensors, folder / "model.safetensors")
    assert "router and no experts" not in refusal(folder)
    save_file(
        {name: one for name, one in tensors.items() if ".0.mlp.experts" not in name}, folder / "model.safetensors"
    )
    assert "layer 0 has a router and no experts" in str(judged(folder, 1).refusal)


def test_zero_points_that_symmetric_awq_of_autoround_has_no_place_for(tmp_path: Path) -> None:
    """Marlin's shape test fails, and MoeWNA16 makes a place for unused zero points of GPTQ only."""

    def make(expert: int, name: str, n: int, k: int) -> stored.Parts:
        parts = stored.gptq(n, k)
        return {"qweight": (torch.int32, (k, n // 8)), "scales": parts["scales"], "qzeros": parts["qzeros"]}

    packing = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
    folder = qwen(tmp_path / "made", {**packing, "packing_format": "auto_round:auto_awq"}, make, make)
    assert refusal(folder) == ""
    assert "qzeros" in refusal(folder, tp=4)


def test_scales_of_blocks_that_the_engine_refines(tmp_path: Path) -> None:
    """A shard of 64 features refines the blocks; names and dtypes are those of whole ones."""
    made = [lambda e, p, n, k: stored.fp8_block(n, k)] * 2
    wrong = [lambda e, p, n, k: stored.nvfp4(n, k)] * 2
    assert refusal(qwen(tmp_path / "made", FP8, *made), tp=2) == ""
    assert refusal(qwen(tmp_path / "wrong", FP8, *wrong), tp=2) != ""


def test_blocks_that_are_cut_are_not_refined(tmp_path: Path) -> None:
    """The engine repeats the scale of a cut block as often as that of a whole one."""
    make = lambda e, p, n, k: stored.fp8_block(n, k)  # noqa: E731
    layers = [stored.experts(PREFIX.format(layer), make, inter=160) for layer in (0, 1)]
    config = {**stored.QWEN, "moe_intermediate_size": 160, "quantization_config": FP8}
    assert "which do not divide 160 features" in refusal(stored.write(tmp_path / "made", config, layers))


def test_groups_of_nvfp4_are_of_16(tmp_path: Path) -> None:
    made = [lambda e, p, n, k: stored.nvfp4(n, k)] * 2
    assert "group_size is 64" in refusal(qwen(tmp_path / "made", {**NVFP4, "group_size": 64}, *made))


def test_stacks_whose_order_only_one_of_them_shows(tmp_path: Path) -> None:
    """Gate and up are square here; down is stored as [K, N], which the class does not transpose."""
    prefix, found = PREFIX.format(0), {}
    for name, shape in (
        ("gate_up_proj", (2 * stored.INTER, stored.HIDDEN)),
        ("down_proj", (stored.INTER, stored.HIDDEN)),
    ):
        found[f"{prefix}.{name}"] = torch.zeros(stored.EXPERTS, *shape, dtype=torch.bfloat16)
    config = {**stored.QWEN, "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "num_hidden_layers": 1}
    folder = stored.write(tmp_path / "made", {**config, "intermediate_size": stored.INTER}, [found])
    assert "down gives 128" in refusal(folder)


def test_stacked_tensors_under_another_method(tmp_path: Path, checkpoints: Path) -> None:
    """The blocks of gpt-oss are loaded by its MXFP4 method only."""
    source = checkpoints / "mxfp4-gptoss"
    assert refusal(source) == ""
    folder = tmp_path / "made"
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
    assert refusal(folder) != ""


def test_an_algorithm_that_the_engine_does_not_normalise(tmp_path: Path) -> None:
    facts = {"quant_algo": "W4A16_NVFP4", "group_size": 16, "kv_cache_quant_algo": None, "exclude_modules": []}
    made = [lambda e, p, n, k: stored.nvfp4(n, k, input_scale=False)] * 2
    nested = {"quant_method": "modelopt", "producer": {"name": "modelopt"}, "quantization": facts}
    assert "Unknown ModelOpt quant algo" in refusal(qwen(tmp_path / "nested", nested, *made))
    assert refusal(qwen(tmp_path / "flat", {"quant_method": "modelopt", **facts}, *made)) == ""


def test_experts_that_calibration_missed_are_not_a_download_error(tmp_path: Path) -> None:
    def make(expert: int, name: str, n: int, k: int) -> stored.Parts:
        return stored.plain(n, k) if expert == 3 else stored.gptq(n, k)

    with pytest.raises(moeq.MoeqError) as raised:
        moeq.open(qwen(tmp_path / "made", stored.GPTQ, make, make))
    assert raised.value.code == "source.incomplete-experts"
    assert "experts 3 are not quantised" in raised.value.message
    assert "every expert calibrated" in str(raised.value.hint)

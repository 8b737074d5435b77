"""What the oracle is asked about a layer, and the gates that only a whole checkpoint shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint.builder import EXPERTS, config, quantization, write

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.matrix import MatrixSpec
from moeq.model.info import RoutingInfo
from moeq.pipeline.plan.layer_plan import _padded_group, describe
from moeq.pipeline.plan.layer_verdict import (
    CLASSES_OF_SETS,
    class_gate,
    heads_problem,
    judge_checkpoint,
    module_of_set,
    routing_name,
    side_config_gate,
    size_gate,
    stored_tensors,
)


def where(gpu: str = "A100", **deployment: Any) -> Deployment:
    return Deployment(gpu=parse_gpu(gpu), **deployment)


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A GPTQ checkpoint of old tools, whose config is in a file of its own."""
    write(tmp_path, document=config(quantization_config=None))
    (tmp_path / "quantize_config.json").write_text(json.dumps(quantization()))
    return tmp_path


def test_a_config_beside_is_read_on_request(beside: Path) -> None:
    checkpoint = moeq.open(beside)
    gate = side_config_gate(checkpoint, where())
    assert gate is not None
    assert (gate.code, gate.passed, gate.remedy) == ("G13", False, 'quantization="gptq"')
    assert gate.text.startswith("only quantize_config.json declares the quantisation")
    assert side_config_gate(checkpoint, where(quantization="gptq")) is None
    assert side_config_gate(checkpoint, where(engine="moeq")) is None
    verdict = judge_checkpoint(checkpoint, where(), 0)
    assert not verdict.ok
    assert gate in verdict.gates
    assert judge_checkpoint(checkpoint, where(quantization="gptq"), 0).ok


def test_a_config_that_the_engine_finds_is_no_problem(tmp_path: Path, checkpoints: Path) -> None:
    assert side_config_gate(moeq.open(write(tmp_path)), where()) is None
    assert side_config_gate(moeq.open(checkpoints / "mxfp4-gptoss"), where()) is None
    folder = tmp_path / "modelopt"
    folder.mkdir()
    source = checkpoints / "modelopt-fp8-qwen3moe"
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    document = json.loads((folder / "config.json").read_text())
    side = document.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(document))
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": side}))
    assert side_config_gate(moeq.open(folder), where("H100")) is None


def unlock(folder: Path, backend: str, deployment: Deployment) -> str | None:
    """The change that would make a backend of the engine work."""
    rows = judge_checkpoint(moeq.open(folder), deployment, 0, explain=True).candidates
    return next(row.unlock for row in rows if row.backend == backend)


def test_no_change_is_suggested_that_the_whole_checkpoint_forbids(checkpoints: Path, beside: Path) -> None:
    """The model has two attention heads; whatever the experts allow, more ranks cannot share them."""
    name = checkpoints / "gptq-int4-g32-qwen3moe"
    assert unlock(name, "MARLIN", where(tp=8)) == "tp 2"
    assert unlock(name, "XPU", where(tp=2)) == "a device of kind xpu"
    assert unlock(name, "XPU", where(tp=4)) is None
    # No device reads a config that the engine does not look for.
    assert unlock(beside, "XPU", where()) is None
    assert unlock(beside, "XPU", where(quantization="gptq")) == "a device of kind xpu"


def test_another_scheme_is_judged_without_the_sources_config(beside: Path, checkpoints: Path) -> None:
    """Which file declares the source's own quantisation does not matter for what it is transcoded to."""
    other = moeq.open(checkpoints / "ct-int4-g128-qwen3moe").scheme_of(0)
    checkpoint, wanted = moeq.open(beside), replace(other, weight=moeq.open(beside).scheme_of(0).weight)
    verdict = judge_checkpoint(checkpoint, where(), 0, scheme=wanted, explain=True)
    assert verdict.ok
    assert next(row.unlock for row in verdict.candidates if row.backend == "XPU") == "a device of kind xpu"


@pytest.mark.parametrize(
    ("whole", "shard", "padded", "group"),
    [(128, 32, 64, 32), (32, 32, 64, None), (128, 64, 128, None), (128, 32, 32, None), (128, 32, 48, None)],
)
def test_a_shard_of_one_group_that_is_padded_to_several(whole: int, shard: int, padded: int, group: int | None) -> None:
    spec = MatrixSpec("w2", 64, whole, "int4", 32, "bf16")
    part = spec.with_sizes(k=shard)
    assert _padded_group(spec, part, part.with_sizes(k=padded)) == group


def test_moonep_carries_unquantised_bf16_alone(tmp_path: Path) -> None:
    """vLLM 0.31.0 to 0.33.0 stop in their config; other all-to-alls are not concerned."""
    checkpoint = moeq.open(write(tmp_path))
    verdict = judge_checkpoint(checkpoint, where(ep=2, dp=2, all2all="moonep", dtype="fp16"), 0, explain=False)
    (gate,) = (gate for gate in verdict.gates if gate.code == "G10" and not gate.passed)
    assert gate.text.endswith("bf16 models without load balancing, not quantised models and dtype fp16")
    assert judge_checkpoint(checkpoint, where(ep=2, dp=2, all2all="deepep_high_throughput"), 0, explain=False).ok


def test_headers_that_all_experts_of_a_set_have_name_none(checkpoints: Path) -> None:
    checkpoint = moeq.open(checkpoints / "gptq-int4-g32-qwen3moe")
    rows = stored_tensors(checkpoint, 0, range(2))
    assert rows
    assert {row.experts for row in rows} == {()}


@pytest.mark.parametrize(
    ("scoring", "names"),  # without renormalisation and with, each without a bias and with
    [
        ("softmax", ("Default", "Unspecified", "RenormalizeNaive", "Unspecified")),
        ("topk-softmax", ("Custom", "Custom", "RenormalizeNaive", "Custom")),
        ("sigmoid", ("Sigmoid", "Custom", "SigmoidRenorm", "DeepSeekV3")),
        ("topk-sigmoid", ("Llama4", "Custom", "Custom", "Custom")),
        ("sqrtsoftplus", ("Custom", "Custom", "DeepseekV4", "DeepseekV4")),
        ("another", ("Custom", "Custom", "Custom", "Custom")),
    ],
)
def test_names_of_routing(scoring: str, names: tuple[str, ...]) -> None:
    pairs = [(renormalize, bias) for renormalize in (False, True) for bias in (False, True)]
    rules = [RoutingInfo(scoring, renormalize=one, correction_bias=bias) for one, bias in pairs]
    assert tuple(routing_name(rule, grouped=True) for rule in rules) == names


@pytest.mark.parametrize(("grouped", "name"), [(True, "DeepSeekV3"), (False, "MiniMax2")])
def test_routing_with_a_bias_is_named_by_its_groups(grouped: bool, name: str) -> None:
    rule = RoutingInfo("sigmoid", renormalize=True, correction_bias=True)
    assert routing_name(rule, grouped=grouped) == name


@pytest.mark.parametrize(
    ("architecture", "engine", "tp", "text"),
    [
        ("Qwen3MoeForCausalLM", "vllm@0.33.0", 2 * EXPERTS, "experts, which the class refuses"),
        ("Qwen3MoeForCausalLM", "vllm@0.33.0", EXPERTS, ""),
        ("Glm4MoeForCausalLM", "vllm@0.33.0", 2 * EXPERTS, ""),
        ("HunYuanMoEV1ForCausalLM", "vllm@0.28.0", 2 * EXPERTS, "experts, which the class refuses"),
        ("HunYuanMoEV1ForCausalLM", "vllm@0.29.0", 2 * EXPERTS, ""),
        ("MellumForCausalLM", "vllm@0.31.0", 2 * EXPERTS, "experts, which the class refuses"),
        ("MellumForCausalLM", "vllm@0.32.0", 2 * EXPERTS, ""),
        (
            "DeepseekV4ForCausalLM",
            "vllm@0.30.0",
            2 * EXPERTS,
            f"{EXPERTS} experts are not divisible by tp {2 * EXPERTS}",
        ),
        ("DeepseekV4ForCausalLM", "vllm@0.31.0", 2 * EXPERTS, ""),
    ],
)
def test_tensor_parallel_sizes_that_a_class_refuses(
    architecture: str, engine: str, tp: int, text: str, tmp_path: Path
) -> None:
    checkpoint = moeq.open(write(tmp_path, document=config(architectures=[architecture])))
    gate = class_gate(checkpoint, where(engine=engine, tp=tp))
    assert text in gate.text if gate else not text


@pytest.mark.parametrize(
    "architecture",
    [
        *("AliceAIForCausalLM", "ClefFlashForJointSchema", "ClefOmniForJointSchema", "Cohere2MoeForCausalLM"),
        *("Ernie4_5_MoeForCausalLM", "Ernie4_5_VLMoeForConditionalGeneration", "ExaoneMoEForCausalLM"),
        *("ExaoneMoeForCausalLM", "HYV3ForCausalLM", "HYV4ForCausalLM", "InternS1ProForConditionalGeneration"),
        *("InternS2MobiusForConditionalGeneration", "InternS2PreviewForConditionalGeneration", "K2HorizonForCausalLM"),
        *("LagunaForCausalLM", "Lfm2MoeForCausalLM", "MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"),
        *("MiMoV2OmniForCausalLM", "MiniMaxM2ForCausalLM", "MiniMaxM3SparseForCausalLM", "Qwen2MoeForCausalLM"),
        *("Qwen3NextForCausalLM", "Qwen3OmniMoeForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
        *("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "Qwen4ExpForCausalLM"),
        *("Step3TextForCausalLM", "Step3VLForConditionalGeneration", "Step3p5ForCausalLM", "Step5ForCausalLM"),
    ],
)
def test_classes_that_refuse_more_ranks_than_experts(architecture: str, tmp_path: Path) -> None:
    checkpoint = moeq.open(write(tmp_path, document=config(architectures=[architecture])))
    gate = class_gate(checkpoint, where(engine="vllm@0.33.0", tp=2 * EXPERTS))
    assert gate is not None
    assert gate.text == f"tp {2 * EXPERTS} is more than {EXPERTS} experts, which the class refuses"
    assert class_gate(checkpoint, where(engine="vllm@0.33.0", tp=EXPERTS)) is None


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"]}, True),
        ({"model_type": "qwen3_moe"}, True),
        ({"architectures": ["MixtralForCausalLM"], "model_type": "qwen3_moe"}, False),
        ({"architectures": "Qwen3MoeForCausalLM", "model_type": "mixtral"}, False),
    ],
)
def test_a_wrapper_runs_the_class_of_its_text_config(text: dict[str, Any], refused: bool, tmp_path: Path) -> None:
    document = config(architectures=["InternVLChatModel"], llm_config=text)
    gate = class_gate(moeq.open(write(tmp_path, document=document)), where(engine="vllm@0.33.0", tp=2 * EXPERTS))
    assert (gate is not None) is refused


def test_deepseek_v4_still_divides_experts_outside_cuda(tmp_path: Path) -> None:
    checkpoint = moeq.open(write(tmp_path, document=config(architectures=["DeepseekV4ForCausalLM"])))
    gate = class_gate(checkpoint, where("MI300X", engine="vllm@0.33.0", tp=2 * EXPERTS))
    assert gate is not None
    assert (gate.text.partition(" experts")[0], gate.remedy) == (f"{EXPERTS}", "a tp that divides them")


@pytest.mark.parametrize(
    ("model_type", "engine", "sizes", "created"),  # each size is added to that of the experts
    [
        ("qwen3_moe", "vllm@0.33.0", (0, 64), None),
        ("qwen3_moe", "vllm@0.33.0", (64, 0), 64),
        ("qwen3_moe", "moeq", (64, 0), None),
        ("deepseek_v4", "vllm@0.33.0", (64, 0), None),  # there `intermediate_size` is the experts'
        ("deepseek_v4", "vllm@0.33.0", (0, 64), 64),
        ("deepseek_v4", "vllm@0.33.0", (64, None), 64),
        ("deepseek_v4", "vllm@0.32.0", (0, 64), None),
        ("deepseek_v4", "vllm@0.32.0", (64, 0), 64),
    ],
)
def test_experts_of_another_size_than_the_config_says(
    model_type: str, engine: str, sizes: tuple[int, int | None], created: int | None, tmp_path: Path
) -> None:
    own = moeq.open(write(tmp_path / "own", document=config())).spec(0, "w2").k
    given = dict(zip(("moe_intermediate_size", "intermediate_size"), sizes, strict=True))
    changes = {name: None if more is None else own + more for name, more in given.items()}
    checkpoint = moeq.open(write(tmp_path / "other", document=config(model_type=model_type, **changes)))
    gate = size_gate(checkpoint, where(engine=engine), 0)
    assert (gate is not None) is (created is not None)
    if gate is not None:
        assert gate.text == (
            f"experts of layer 0 have {own} intermediate features, and the engine creates {own + (created or 0)} by "
            "the config"
        )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "said"),
    [
        (3, 3, 1, None),
        (4, 4, 2, None),
        (3, 3, 2, "3 attention heads are not divisible by tp 2 (3 % 2 = 1)"),
        (None, None, 2, None),
        (8, 2, 4, None),  # two ranks for each
        (12, 3, 2, "3 key-value heads are not divisible by tp 2, and tp 2 is not divisible by 3"),
        (12, 2, 3, "2 key-value heads are not divisible by tp 3, and tp 3 is not divisible by 2"),
        (12, 6, 3, None),
        (12, None, 3, None),
    ],
)
def test_every_rank_gets_whole_heads(heads: int | None, kv_heads: int | None, tp: int, said: str | None) -> None:
    facts = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    document = {name: value for name, value in facts.items() if value is not None}
    checkpoint: Any = SimpleNamespace(source=SimpleNamespace(config=document))
    assert heads_problem(checkpoint, where(tp=tp)) == said
    assert heads_problem(checkpoint, where(tp=tp, engine="moeq")) is None
    document["kv_lora_rank"] = 512  # one latent head, which every rank has
    whole = said is None or "key-value" in said
    assert heads_problem(checkpoint, where(tp=tp)) == (None if whole else said)


def test_a_set_of_experts_has_a_module_of_its_own() -> None:
    prefix = "model.layers.3.mlp.experts"
    (architecture, *_) = CLASSES_OF_SETS
    assert module_of_set(architecture, prefix, range(4)) == "model.layers.3.mlp.text_experts"
    assert module_of_set(architecture, prefix, range(4, 8)) == "model.layers.3.mlp.vision_experts"
    assert module_of_set("Qwen3MoeForCausalLM", prefix, range(4, 8)) == prefix


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (MatrixSpec("w13", 64, 32, "int4", 16, "f16"), "int4 g16 symmetric [64, 32] f16"),
        (
            MatrixSpec("w2", 64, 32, "int8", 32, "bf16", False, True),
            "int8 g32 with zero points, act-order [64, 32] bf16",
        ),
    ],
)
def test_messages_describe_a_matrix_in_one_phrase(spec: MatrixSpec, text: str) -> None:
    assert describe(spec) == text

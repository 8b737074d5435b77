"""What the oracle is asked about a layer, and the gates that only a whole checkpoint shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint.builder import EXPERTS, Stored, Tensors, config, experts, quantization, router, write
from refusing import refuses

import moeq
from moeq.checkpoint.facts import MTP
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.matrix import MatrixSpec
from moeq.model.info import RoutingInfo
from moeq.pipeline.plan.layer_plan import _padded_group, describe
from moeq.pipeline.plan.layer_verdict import (
    CLASSES_OF_SETS,
    class_gate,
    count_gate,
    extra_layer_gate,
    first_layer,
    heads_problem,
    is_quantised,
    judge_checkpoint,
    missing_experts_gate,
    module_of_set,
    moe_shape,
    moonep_gate,
    routing_name,
    side_config_gate,
    size_gate,
    stored_tensors,
    width_gate,
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


VLLM, OWN = where(engine="vllm@0.33.0"), where(engine="moeq")


def test_experts_that_a_layer_lacks(tmp_path: Path) -> None:
    """The engine creates as many in all layers, as the config declares; moeq's own kernels take what is there."""
    further = experts("model.layers.1.mlp.experts", count=1)
    document = config(num_hidden_layers=2)
    made = moeq.open(write(tmp_path, {**router(), **router(1, 2), **experts(), **further}, document))
    assert count_gate(made, VLLM, 0) is None
    assert count_gate(made, OWN, 1) is None
    gate = count_gate(made, VLLM, 1)
    assert gate is not None
    assert (gate.code, gate.passed, gate.error, gate.remedy) == ("G13", False, "none", None)
    assert gate.text == "layer 1 has 1 experts, and the engine creates 2, as the config declares for all layers"


def test_experts_whose_output_is_as_wide_as_their_input(tmp_path: Path) -> None:
    whole = moeq.open(write(tmp_path / "whole"))
    assert width_gate(whole, VLLM, 0) is None
    narrow = {name: one for name, one in experts(hidden=64).items() if "down" not in name} | {
        name: one for name, one in experts(hidden=96).items() if "down" in name
    }
    made = moeq.open(write(tmp_path / "narrow", {**router(), **narrow}))
    assert width_gate(made, OWN, 0) is None
    gate = width_gate(made, VLLM, 0)
    assert gate is not None
    assert gate.text == "gate and up take 64 features and down gives 96: the engine creates both for one hidden size"
    assert gate.error == "RuntimeError"


def test_a_router_without_experts(tmp_path: Path) -> None:
    document = config(num_hidden_layers=3)
    made = moeq.open(write(tmp_path / "made", {**router(), **router(2), **experts()}, document))
    assert made.info.dense_layers == (1, 2)
    gate = missing_experts_gate(made, VLLM, 0)
    assert gate is not None
    assert gate.text == "layer 2 has a router and no experts in the file"
    assert missing_experts_gate(made, OWN, 0) is None
    dense = moeq.open(write(tmp_path / "dense", {**router(), **experts()}, document))
    assert missing_experts_gate(dense, VLLM, 0) is None
    unknown = moeq.open(
        write(tmp_path / "unknown", {**router(), **router(2), **experts()}, document | {"model_type": "unheard_of"})
    )
    assert missing_experts_gate(unknown, VLLM, 0) is None


@pytest.mark.parametrize(
    ("declared", "engine", "refused"),
    [
        ({"num_nextn_predict_layers": 0}, VLLM, True),
        ({"num_nextn_predict_layers": 1}, VLLM, False),
        ({}, VLLM, False),
        ({"num_nextn_predict_layers": 0}, OWN, False),
        ({"text_config": {"num_nextn_predict_layers": 0}}, VLLM, True),
        ({"text_config": {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers": 0}, VLLM, False),
        ({"text_config": 5, "num_nextn_predict_layers": 0}, VLLM, True),
    ],
)
def test_layers_that_the_model_does_not_have(
    declared: dict[str, Any], engine: Deployment, refused: bool, tmp_path: Path
) -> None:
    source = SimpleNamespace(config=declared)
    made: Any = SimpleNamespace(source=source, info=SimpleNamespace(mtp_layers=(4, 5), num_layers=4))
    gate = extra_layer_gate(made, engine)
    assert (gate is not None) == refused
    if gate is not None:
        assert gate.text == "the file has layer 4, and the engine creates 4"
        assert (gate.error, gate.remedy) == ("ValueError", f'"{MTP[0]}" in config.json')
    none: Any = SimpleNamespace(source=source, info=SimpleNamespace(mtp_layers=(), num_layers=4))
    assert extra_layer_gate(none, engine) is None


@pytest.mark.parametrize(
    ("config_", "options", "wrong"),
    [
        (None, {}, None),
        ({"quant_method": "x"}, {}, "quantised models"),
        (None, {"quantization": "fp8"}, "quantised models"),
        (None, {"dtype": "fp16"}, "dtype fp16"),
        (None, {"eplb": True}, "expert load balancing"),
        ({"a": 1}, {"dtype": "fp16", "eplb": True}, "quantised models and dtype fp16 and expert load balancing"),
    ],
)
def test_what_moonep_does_not_carry(config_: Any, options: dict[str, Any], wrong: str | None) -> None:
    made: Any = SimpleNamespace(quantization_config=config_)
    asked = where(engine="vllm@0.33.0", all2all="moonep", ep=2, dp=2, **options)
    gate = moonep_gate(made, asked)
    assert (gate is not None) == (wrong is not None)
    if gate is not None:
        text = f"the moonep all-to-all takes unquantised bf16 models without load balancing, not {wrong}"
        assert (gate.text, gate.remedy) == (text, "another all-to-all")
    assert moonep_gate(made, replace(asked, all2all=None)) is None
    assert moonep_gate(made, replace(asked, engine="sglang")) is None


def test_a_layer_in_the_oracles_terms(tmp_path: Path) -> None:
    made = moeq.open(write(tmp_path, document=config(swiglu_limit=7.0, n_group=2, expert_dtype="fp4")))
    shape = moe_shape(made)
    assert (shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.top_k) == (64, 32, 2, 1)
    assert (shape.activation, shape.gated, shape.has_bias, shape.swiglu_limit) == ("silu", True, False, 7.0)
    assert (shape.model_type, shape.architecture) == ("qwen3_moe", "Qwen3MoeForCausalLM")
    assert (shape.router_weight_on_input, shape.expert_dtype, shape.routing) == (False, "fp4", "RenormalizeNaive")
    assert moe_shape(made, 0, range(1)) == shape, "there is one set of experts"
    plain = moeq.open(write(tmp_path / "plain", document=config(num_experts_per_tok=None)))
    with refuses("source.no-top-k", f"{plain.info.name}: config.json does not say how many experts a token uses"):
        moe_shape(plain)
    llama = moeq.open(write(tmp_path / "llama", document=config(architectures=["Llama4ForCausalLM"])))
    assert moe_shape(llama).router_weight_on_input is True
    bare = experts(names=("", "up_proj", "down_proj"))
    ungated = moe_shape(moeq.open(write(tmp_path / "bare", {**router(), **bare})))
    assert (ungated.activation, ungated.gated) == ("silu_no_mul", False)


def test_the_first_quantised_layer(tmp_path: Path) -> None:
    def plain(n: int, k: int) -> Tensors:
        return {"weight": Stored("BF16", (n, k))}

    second = "model.layers.1.mlp.experts"
    document = config(num_hidden_layers=2)
    tensors = {**router(), **router(1), **experts(make=plain), **experts(second)}
    made = moeq.open(write(tmp_path / "made", tensors, document))
    assert (first_layer(made), is_quantised(made, 0), is_quantised(made, 1)) == (1, False, True)
    none = moeq.open(write(tmp_path / "none", {**router(), **experts(make=plain)}, config(quantization_config=None)))
    assert first_layer(none) == 0


def test_headers_that_only_some_experts_have(tmp_path: Path) -> None:
    tensors = {**router(count=3), **experts(count=3)}
    bias = "model.layers.0.mlp.experts.1.up_proj.scales"
    tensors[bias] = Stored("BF16", tensors[bias].shape)
    made = moeq.open(write(tmp_path, {**tensors}, config(num_experts=3)))
    rows = {(row.projection, row.part, row.dtype): row.experts for row in stored_tensors(made, 0)}
    assert rows["up", "scales", "BF16"] == (1,)
    assert rows["up", "scales", "F16"] == (0, 2)
    assert rows["gate", "scales", "F16"] == ()
    some = {(row.projection, row.part, row.dtype): row.experts for row in stored_tensors(made, 0, range(1, 2))}
    assert some["up", "scales", "BF16"] == ()
    assert ("up", "scales", "F16") not in some

"""Linear modules that the engine creates otherwise than they are stored are refused, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import stored

import moeq
from moeq.checkpoint.families import find_family
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.pipeline.plan.decide import answer
from moeq.pipeline.plan.layer_verdict import judge_checkpoint
from moeq.pipeline.plan.options import Question

ROUTER = "model.layers.0.mlp.gate"
MEANT = f"the config quantises {ROUTER} (router), and the file holds BF16"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
CT: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "input_activations": None,
        "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
    }},
}  # fmt: skip


def awq(n: int, k: int) -> stored.Parts:
    parts = stored.gptq(n, k)
    return {"qweight": (torch.int32, (k, n // 8)), "scales": parts["scales"], "qzeros": parts["qzeros"]}


def ct_nvfp4(n: int, k: int) -> stored.Parts:
    return {
        "weight_packed": (torch.uint8, (n, k // 2)),
        "weight_scale": (torch.float8_e4m3fn, (n, k // 16)),
        "weight_global_scale": (torch.float32, (1,)),
    }


MAKERS = {"fp8": stored.fp8_block, "modelopt": stored.nvfp4, "awq": awq, "compressed-tensors": ct_nvfp4}


def refusal(
    folder: Path,
    config: dict[str, Any],
    router: stored.Parts,
    model: str = "Qwen3Moe",
    more: dict[str, torch.Tensor] | None = None,
    sizes: dict[str, Any] | None = None,
    **fields: Any,
) -> str:
    make = MAKERS.get(config["quant_method"], stored.gptq)
    tensors = stored.experts("model.layers.0.mlp.experts", lambda e, p, n, k: make(n, k))
    for part, (dtype, shape) in router.items():
        tensors[f"{ROUTER}.{part}"] = torch.zeros(shape, dtype=torch.float32).to(dtype)
    types = {"Qwen2Moe": "qwen2_moe", "Qwen3Moe": "qwen3_moe", "Olmoe": "olmoe"}
    kind = {"architectures": [f"{model}ForCausalLM"], "model_type": types[model]}
    sizes = {
        "num_hidden_layers": 1, "intermediate_size": stored.INTER, "shared_expert_intermediate_size": stored.INTER,
        **(sizes or {}),
    }  # fmt: skip
    stored.write(folder, {**stored.QWEN, **sizes, **kind, "quantization_config": config}, [tensors | (more or {})])
    where = Deployment(**{"gpu": parse_gpu("H100"), "engine": "vllm@0.33.0", **fields})
    verdict = judge_checkpoint(moeq.open(folder), where, 0, explain=False)
    return "" if verdict.ok else str(verdict.refusal)


@pytest.mark.parametrize(
    ("config", "key", "entry"),
    [
        (FP8, "ignored_layers", ROUTER),
        (MODELOPT, "exclude_modules", "*.mlp.gate"),
        (AWQ, "modules_to_not_convert", "gate"),
        (CT, "ignore", r"re:.*mlp\.gate$"),
    ],
)
def test_a_float_router_that_the_config_quantises(config: dict[str, Any], key: str, entry: str, tmp_path: Path) -> None:
    plain = stored.plain(stored.EXPERTS, stored.HIDDEN)
    others = {**config, key: ["lm_head"]}
    excluded = {**config, key: ["lm_head", entry]}
    assert MEANT in refusal(tmp_path / "meant", others, plain)
    assert refusal(tmp_path / "excluded", excluded, plain) == ""
    assert refusal(tmp_path / "other", others, plain, "Olmoe") == ""  # its class never quantises the router


def test_engines_that_read_from_the_file_what_is_quantised(tmp_path: Path) -> None:
    """AWQ without a list, and GPTQ; the config of MoeWNA16 reads no file."""
    plain = stored.plain(stored.EXPERTS, stored.HIDDEN)
    assert refusal(tmp_path / "awq", AWQ, plain) == ""
    assert refusal(tmp_path / "gptq", stored.GPTQ, plain) == ""
    rule = {**stored.GPTQ, "dynamic": {r"-:.*\.gate$": {}}}
    asked = "moe_wna16"
    assert MEANT in refusal(tmp_path / "asked", stored.GPTQ, plain, quantization=asked)
    assert refusal(tmp_path / "rule", rule, plain, quantization=asked) == ""


def test_an_output_head_that_modelopt_means_to_quantise(tmp_path: Path) -> None:
    """Versions before 0.33.0 read `ignore` alone; other configs do not quantise heads."""
    head = {"lm_head.weight": torch.zeros(64, stored.HIDDEN, dtype=torch.bfloat16)}
    flat = {**MODELOPT, "exclude_modules": ["lm_head", "*.gate"]}
    made = refusal(tmp_path / "old", flat, {}, engine="vllm@0.31.0", more=head)
    assert "the config quantises lm_head" in made
    assert refusal(tmp_path / "new", flat, {}, more=head) == ""
    listed = {**MODELOPT, "ignore": ["lm_head", "*.gate"]}
    assert refusal(tmp_path / "listed", listed, {}, engine="vllm@0.31.0", more=head) == ""
    assert "lm_head" in refusal(tmp_path / "none", {**MODELOPT, "exclude_modules": []}, {}, more=head)
    assert refusal(tmp_path / "fp8", FP8, {}, more=head) == ""


def test_a_quantised_router_that_the_engine_creates_as_floats(tmp_path: Path) -> None:
    router = stored.fp8_block(stored.EXPERTS, stored.HIDDEN)
    assert refusal(tmp_path / "both", FP8, router) == ""
    assert "creates it as float numbers" in refusal(tmp_path / "excluded", {**FP8, "ignored_layers": [ROUTER]}, router)
    assert "creates it as float numbers" in refusal(tmp_path / "class", FP8, router, "Olmoe")


ATTENTION = "model.layers.0.self_attn"


def attention(**made: stored.Parts) -> dict[str, torch.Tensor]:
    """Projections of the first layer's attention; `q`, `k`, `v` and `o`."""
    return {
        f"{ATTENTION}.{name}_proj.{part}": torch.zeros(shape, dtype=torch.float32).to(dtype)
        for name, parts in made.items()
        for part, (dtype, shape) in parts.items()
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"head_dim": 32}, ""),
        ({"head_dim": 64}, "q_proj has 256 features, and the engine creates 512"),
        ({"head_dim": 32, "num_attention_heads": 4}, "q_proj has 256 features, and the engine creates 128"),
        ({"head_dim": 32, "num_key_value_heads": 2}, "k_proj has 128 features, and the engine creates 64"),
    ],
)
def test_heads_of_another_width_than_the_config_says(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    """vLLM takes a part of a wider projection and stops at a narrower one; unstated sizes are not judged."""
    made = attention(q=stored.plain(256, 256), **dict.fromkeys("kv", stored.plain(128, 256)), o=stored.plain(256, 256))
    config = {**FP8, "ignored_layers": [ROUTER, *(f"{ATTENTION}.{name}_proj" for name in "qkvo")]}
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, **changes}
    found = refusal(tmp_path / "made", config, {}, more=made, sizes=sizes)
    assert said in found
    assert bool(said) is bool(found)


@pytest.mark.parametrize("model", ["Olmoe", "Qwen2Moe"])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"head_dim": 99}, ""),
        ({"num_attention_heads": 4}, "k_proj has 128 features, and the engine creates 256"),
        ({"num_key_value_heads": 8}, "k_proj has 128 features, and the engine creates 256"),
        ({"num_attention_heads": None}, ""),
    ],
)
def test_heads_that_divide_the_hidden_size(changes: dict[str, Any], said: str, model: str, tmp_path: Path) -> None:
    """These classes read no head_dim: with a hidden size of 256, eight heads have 32 features each."""
    assert stored.HIDDEN == 256
    made = attention(q=stored.plain(256, 256), **dict.fromkeys("kv", stored.plain(128, 256)), o=stored.plain(256, 256))
    config = {**FP8, "ignored_layers": [ROUTER, *(f"{ATTENTION}.{name}_proj" for name in "qkvo")]}
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, **changes}
    found = refusal(tmp_path / "made", config, {}, model, more=made, sizes=sizes)
    assert said in found
    assert bool(said) is ("and the engine creates" in found)


AUTO_ROUND: dict[str, Any] = {
    "quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "packing_format": "auto_round:auto_gptq",
}  # fmt: skip
FLOATS = {"bits": 16, "data_type": "float"}


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([".*self_attn.*"], ""),
        (["*self_attn*"], "the config quantises"),  # no regular expression: the engine passes over it
        (["qkv_proj", "o_proj"], ""),  # ends of the engine's own names
        (["q_proj", "k_proj", "v_proj", "o_proj"], "the config quantises"),
        ([f"{ATTENTION}.{name}_proj" for name in "qkvo"], ""),
        ([f"{ATTENTION}.{name}_proj" for name in "qo"], "extra_config differs for the parts of"),
        ([r".*\.[qkvo]_proj"], ""),
    ],
)
def test_attention_that_autoround_lists(entries: list[str], said: str, tmp_path: Path) -> None:
    """Entries for shards count where the engine's class tells the config its fused modules; checked by executing it."""
    plain = attention(**dict.fromkeys("qkvo", stored.plain(256, 256)))
    config = {**AUTO_ROUND, "extra_config": dict.fromkeys([ROUTER, *entries], FLOATS)}
    found = refusal(tmp_path / "made", config, {}, more=plain)
    assert said in found
    assert bool(said) is bool(found)


@pytest.mark.parametrize(
    ("changes", "said"), [({}, ""), ({"sym": False}, "no method outside experts"), ({"backend": "gptq"}, "no method")]
)
def test_attention_of_autoround_has_no_fallback(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    quantised = attention(**dict.fromkeys("qkvo", stored.gptq(256, 256)))
    found = refusal(tmp_path / "made", {**AUTO_ROUND, "extra_config": {ROUTER: FLOATS}, **changes}, {}, more=quantised)
    assert said in found
    assert bool(said) is bool(found)


@pytest.mark.parametrize("version", ["0.26.0", "0.33.0"])
def test_attention_that_the_config_lists_by_a_part_of_its_name(version: str, tmp_path: Path) -> None:
    """vLLM compares whole names of modules for FP8, and parts of them for ModelOpt."""
    plain, engine = attention(**dict.fromkeys("qkvo", stored.plain(256, 256))), f"vllm@{version}"
    whole = [ROUTER, *(f"{ATTENTION}.{name}_proj" for name in "qkvo")]
    short = {**FP8, "modules_to_not_convert": [ROUTER, "self_attn"]}
    text = f"the config quantises {ATTENTION}.o_proj (attention), and the file holds BF16"
    assert text in refusal(tmp_path / "short", short, {}, more=plain, engine=engine)
    assert refusal(tmp_path / "whole", {**FP8, "modules_to_not_convert": whole}, {}, more=plain, engine=engine) == ""
    listed = {**MODELOPT, "ignore": ["lm_head", "self_attn"]}
    assert refusal(tmp_path / "modelopt", listed, {}, more=plain, engine=engine) == ""


def test_attention_that_is_quantised_in_part(tmp_path: Path) -> None:
    """The engine makes one module of query, key and value."""
    fp8, bf16 = stored.fp8_block(256, 256), stored.plain(256, 256)
    assert refusal(tmp_path / "all", FP8, {}, more=attention(q=fp8, k=fp8, v=fp8, o=fp8)) == ""
    mixed = attention(q=fp8, k=fp8, v=bf16, o=fp8)
    listed = {**FP8, "ignored_layers": [f"{ATTENTION}.v_proj"]}
    assert "one module of them" in refusal(tmp_path / "some", listed, {}, more=mixed)
    excluded = {**FP8, "ignored_layers": [f"{ATTENTION}.{name}_proj" for name in "qkv"]}
    assert "creates it as float numbers" in refusal(tmp_path / "excluded", excluded, {}, more=mixed)


def test_attention_in_another_encoding(tmp_path: Path) -> None:
    nvfp4 = attention(**dict.fromkeys("qkvo", stored.nvfp4(256, 256)))
    assert "cannot be loaded: the file has" in refusal(tmp_path / "fp8", FP8, {}, more=nvfp4)
    assert refusal(tmp_path / "modelopt", {**MODELOPT, "ignore": ["lm_head", "*.gate"]}, {}, more=nvfp4) == ""


def test_blocks_and_groups_that_ranks_would_cut(tmp_path: Path) -> None:
    """Every rank loads whole blocks of FP8, and whole groups of input features."""
    fp8 = {**FP8, "ignored_layers": [ROUTER]}
    parts = attention(**dict.fromkeys("qkvo", stored.fp8_block(256, 256)))
    assert refusal(tmp_path / "two", fp8, {}, more=parts, tp=2, ep=2) == ""
    four = refusal(tmp_path / "four", fp8, {}, more=parts, tp=4, ep=4)
    assert "o_proj has 64 features on a rank of tp 4, and FP8 blocks have 128" in four
    groups = attention(o=stored.gptq(256, 32))
    assert "o_proj has 1 groups" in refusal(tmp_path / "one", stored.GPTQ, {}, more=groups, tp=2, ep=2)
    groups = attention(o=stored.gptq(256, 96))
    assert "o_proj has 3 groups of input features, which tp 2 would cut" in refusal(
        tmp_path / "three", stored.GPTQ, {}, more=groups, tp=2, ep=2
    )


def test_converted_experts_do_not_change_what_ranks_would_cut(checkpoints: Path) -> None:
    """The plug-in leaves `o_proj` to the engine, so a conversion loads there as little as its source."""
    checkpoint = moeq.open(checkpoints / "gptq-int4-g128-mixtral")
    for tp, names in ((1, ["vllm", "transformers", "load_experts"]), (2, ["transformers", "load_experts"])):
        found = answer(checkpoint, Question(Deployment(parse_gpu("A100"), tp=tp)))
        assert [loader.name for loader in found.loaders] == names


def test_rules_of_gptqmodel_for_attention(tmp_path: Path) -> None:
    """The first rule that matches the engine's fused name gives a module its bits and groups."""
    four = attention(**dict.fromkeys("qkvo", stored.gptq(256, 256)))
    fine = {r"+:.*self_attn\.qkv.*": {"group_size": 32}, r".*self_attn\..*": {"bits": 4}, r"+:.*o_proj": {"bits": 8}}
    assert refusal(tmp_path / "fine", {**stored.GPTQ, "dynamic": fine}, {}, more=four) == ""
    shards = {r"+:.*\.[qkv]_proj": {"bits": 8}}  # the engine asks for `qkv_proj`
    assert refusal(tmp_path / "shards", {**stored.GPTQ, "dynamic": shards}, {}, more=four) == ""
    eight = {r"+:.*qkv_proj": {"bits": 8}}
    made = refusal(tmp_path / "eight", {**stored.GPTQ, "dynamic": eight}, {}, more=four)
    assert "q_proj cannot be loaded: the file has scales [8, 256], where the config means [4, 256]" in made
    asymmetric = {r"+:.*o_proj": {"sym": False}}
    made = refusal(tmp_path / "sym", {**stored.GPTQ, "dynamic": asymmetric}, {}, more=four)
    assert "self_attn.o_proj: GPTQ with 4 bits and sym false" in made


def test_dense_modules_of_gptq_under_moe_wna16(tmp_path: Path) -> None:
    """Before 0.32.0 the method asks a GPTQ config that has read no file: nothing but experts is quantised."""
    parts, asked = attention(o=stored.gptq(256, 256)), {"quantization": "moe_wna16"}
    rule = {**stored.GPTQ, "dynamic": {r"-:.*\.gate$": {}}}
    assert refusal(tmp_path / "new", rule, {}, more=parts, **asked) == ""
    old = refusal(tmp_path / "old", rule, {}, more=parts, engine="vllm@0.29.0", **asked)
    assert "self_attn.o_proj is quantised" in old


COUNT, WIDTH = "n_shared_experts", "shared_expert_intermediate_size"


@pytest.mark.parametrize("encoding", [stored.fp8_block, stored.plain])
@pytest.mark.parametrize(
    ("architecture", "model", "module", "fields", "known"),
    [
        ("Qwen2Moe", "qwen2_moe", "mlp.shared_expert", {WIDTH: 256}, True),
        ("Qwen3Next", "qwen3_next", "mlp.shared_expert", {WIDTH: 256, COUNT: 1}, True),
        ("DeepseekV3", "deepseek_v3", "mlp.shared_experts", {COUNT: 2, WIDTH: 64}, True),
        ("Dots1", "dots1", "mlp.shared_experts", {COUNT: 2, "moe_shared_expert_intermediate_size": 64}, True),
        ("GlmMoeDsa", "glm_moe_dsa", "mlp.shared_experts", {COUNT: 2}, True),
        ("SolarOpen", "solar_open", "mlp.shared_experts", {COUNT: 2, "num_shared_experts": 1}, True),
        ("AXK1", "axk1", "mlp.shared_experts", {COUNT: 2}, True),
        ("Afmoe", "afmoe", "mlp.shared_experts", {"num_shared_experts": 2}, True),
        ("ExaoneMoE", "exaone_moe", "mlp.shared_experts", {"num_shared_experts": 2}, True),
        ("Ernie4_5_Moe", "ernie4_5_moe", "mlp.shared_experts", {"moe_num_shared_experts": 2}, True),
        ("AriaText", "aria_text", "mlp.shared_experts", {"moe_num_shared_experts": 2}, True),
        ("DeepseekV3", "deepseek_v3", "mlp.shared_experts", {"num_shared_experts": 2}, False),
        ("Qwen2Moe", "qwen2_moe", "mlp.shared_expert", {COUNT: 2}, False),
        ("Llama4", "llama4_text", "feed_forward.shared_expert", {COUNT: 2, "num_experts_per_tok": 1}, False),
        ("HunYuanMoEV1", "hunyuan_v1_moe", "mlp.shared_mlp", {"num_shared_expert": [2]}, False),
        ("HYV3", "hy_v3", "mlp.shared_mlp", {"num_shared_experts": 2, "expert_hidden_dim": 128}, False),
        ("MiniMaxM3Sparse", "minimax_m3", "block_sparse_moe.shared_experts", {COUNT: 2}, False),
        ("BailingMoe", "bailing_moe", "mlp.shared_experts", {"num_shared_experts": 2}, False),
        ("BailingMoeV2", "bailing_moe_v2", "mlp.shared_experts", {"moe_shared_expert_intermediate_size": 256}, False),
        ("Laguna", "laguna", "mlp.shared_expert", {WIDTH: 256}, False),
        ("LongcatFlash", "longcat_flash", "mlp.shared_experts", {COUNT: 2}, False),
    ],
)
def test_widths_of_shared_experts(
    architecture: str, model: str, module: str, fields: dict[str, Any], known: bool, encoding: Any, tmp_path: Path
) -> None:
    """The engine creates the config's width and takes a part of a wider tensor; other classes' keys say nothing."""
    family = find_family(model)
    assert family is not None
    above, dense = "model.layers.0", {"intermediate_size": stored.INTER, "num_hidden_layers": 1}
    names = ("w1", "w3", "w2") if "sparse" in family.experts else ("gate_proj", "up_proj", "down_proj")
    experts = stored.experts(f"{above}.{family.experts}", lambda e, p, n, k: stored.fp8_block(n, k), names)
    kind = {"architectures": [f"{architecture}ForCausalLM"], "model_type": model}
    for width in (256, 128):
        sizes = {"gate": (width, stored.HIDDEN), "up": (width, stored.HIDDEN), "down": (stored.HIDDEN, width)}
        parts = {f"{above}.{module}.{name}_proj": encoding(*size) for name, size in sizes.items()}
        held = {
            f"{name}.{part}": torch.zeros(shape, dtype=torch.float32).to(dtype)
            for name, rows in parts.items()
            for part, (dtype, shape) in rows.items()
        }
        listed = [f"{above}.{family.router}", *(parts if encoding is stored.plain else ())]
        document = {**stored.QWEN, **dense, **kind, **fields, "quantization_config": {**FP8, "ignored_layers": listed}}
        folder = stored.write(tmp_path / str(width), document, [experts | held])
        verdict = judge_checkpoint(moeq.open(folder), Deployment(parse_gpu("H100")), 0, explain=False)
        text = "gate_proj has 128 features, and the engine creates 256 by the config"
        assert verdict.ok or text in str(verdict.refusal), verdict.refusal
        assert verdict.ok is not (known and width == 128)


def test_a_shared_expert_without_dimensions(tmp_path: Path) -> None:
    scalars = {f"model.layers.0.mlp.shared_expert.{name}_proj.weight": torch.tensor(0.0) for name in ("gate", "up")}
    made = refusal(tmp_path / "made", stored.GPTQ, {}, "Qwen2Moe", scalars)
    assert "gate_proj has 1 features, and the engine creates 128" in made


def test_a_quantised_gate_of_shared_experts(tmp_path: Path) -> None:
    gate = {"model.layers.0.mlp.shared_expert_gate.qweight": torch.zeros(32, 8, dtype=torch.int32)}
    text = "mlp.shared_expert_gate is quantised (qweight), and the engine creates it as float numbers"
    assert text in refusal(tmp_path / "gate", stored.GPTQ, {}, more=gate)


@pytest.mark.parametrize(
    ("gpu", "width", "group", "takes"),
    [("A100", 256, 32, True), ("A100", 288, 32, False), ("H100", 192, 64, False), ("H100", 256, 64, True)],
)
def test_act_order_that_no_kernel_of_older_versions_takes(
    gpu: str, width: int, group: int, takes: bool, tmp_path: Path
) -> None:
    """Marlin takes features in steps of 64 and 128 and pads none; Hopper's other kernel takes steps of 128 and 64."""
    parts = attention(o=stored.gptq(width, 192 if gpu == "H100" else 256, group=group))
    config = {**stored.GPTQ, "desc_act": True, "dynamic": {r"+:.*o_proj": {"group_size": group}}}
    made = refusal(tmp_path / "made", config, {}, more=parts, engine="vllm@0.29.0", gpu=parse_gpu(gpu))
    assert ("act-order: no kernel takes model.layers.0.self_attn.o_proj" not in made) is takes

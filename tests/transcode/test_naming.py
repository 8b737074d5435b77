"""Names of written experts: the family's own, which engines and transformers load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint.builder import EXPERTS, HIDDEN, INTERMEDIATE, Stored, Tensors, config, experts, gptq, router, write

from moeq.checkpoint.families import FAMILIES, ModelFamily
from moeq.errors import MoeqError
from moeq.model import open as open_checkpoint
from moeq.model.expert_kinds import Experts
from moeq.oracle.engines.vllm.expert_names import names_of_class
from moeq.transcode.naming import NamesOption, Naming, _prefix, choose_naming, family_naming, rename
from moeq.transcode.survey import TranscodeRequest
from moeq.transcode.target_formats import TARGETS
from moeq.transcode.transcode import open_transcode

#: Classes of vLLM by model type, for families whose experts are stored one by one.
CLASSES = {
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k25": "KimiK25ForConditionalGeneration",
    "glm4_moe": "Glm4MoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "phimoe": "PhiMoEForCausalLM",
    "jamba": "JambaForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "hy_v3": "HYV3ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "exaone_moe": "ExaoneMoEForCausalLM",
}


@pytest.mark.parametrize(("model_type", "architecture"), CLASSES.items())
def test_engines_load_the_names_of_a_family(model_type: str, architecture: str) -> None:
    family = next(one for one in FAMILIES if model_type in one.model_types)
    known = names_of_class("0.33.0", architecture)
    assert known is not None
    assert {f"{family.experts}.*.{name}" for name in family.projections} <= known.modules.keys()


@pytest.mark.parametrize("target", ["fp8", "compressed-tensors", "gptq_v2", "bf16"])
@pytest.mark.parametrize("name", ["ct-int4-asym-g32-mixtral", "gptq-int4-g128-mixtral"])
def test_every_target_has_the_names_of_the_family(name: str, target: str, checkpoints: Path) -> None:
    job = open_transcode(TranscodeRequest(str(checkpoints / name), target, allow_lossy=True))
    tensors = {tensor for file in job.plan.files for tensor in file.tensors}
    assert any(tensor.startswith("model.layers.1.block_sparse_moe.experts.0.w1.") for tensor in tensors)
    assert "model.layers.1.block_sparse_moe.gate.weight" in tensors
    assert not [text for text in job.warnings if "transformers looks for" in text]


@pytest.mark.parametrize(("names", "known"), [("mlp", False), ("block-sparse-moe", True), ("per-expert", True)])
def test_other_names_are_warned_about(names: NamesOption, known: bool, checkpoints: Path) -> None:
    source = str(checkpoints / "ct-int4-asym-g32-mixtral")
    job = open_transcode(TranscodeRequest(source, "fp8", names=names, allow_lossy=True))
    told = " ".join(job.warnings)
    assert ("transformers looks for model.layers.0.block_sparse_moe.experts.0.w2.weight" in told) is not known
    assert ("MixtralForCausalLM does not load mlp.experts" in told) is not known


LAYER = "model.layers.0"
LONG = ("gate_proj", "up_proj", "down_proj")
SIZES = ((INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))


def fp8(n: int, k: int) -> Tensors:
    return {"weight": Stored("F8_E4M3", (n, k)), "weight_scale": Stored("BF16", (n, 1))}


def floats(n: int, k: int) -> Tensors:
    return {"weight": Stored("BF16", (n, k))}


def stacks(make: Any) -> Tensors:
    """Gate and up rows in one stack, down rows in another."""
    return {
        f"{LAYER}.mlp.experts.{name}{part.removeprefix('weight')}": Stored(stored.dtype, (EXPERTS, *stored.shape))
        for name, (n, k) in (("gate_up_proj", (2 * INTERMEDIATE, HIDDEN)), ("down_proj", SIZES[2]))
        for part, stored in make(n, k).items()
    }


FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": None,
        }
    },
}
GPT_OSS = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "intermediate_size": INTERMEDIATE}

#: Tensors of a layer of experts, and what its config says.
STORED: dict[str, tuple[Tensors, dict[str, Any]]] = {
    "experts": (experts(), {}),
    "no gate": (experts(names=("", "up_proj", "down_proj")), {}),
    "short": (experts(f"{LAYER}.block_sparse_moe.experts", names=("w1", "w3", "w2")), {}),
    "ffn": (experts(f"{LAYER}.ffn.experts"), {}),
    "no container": (experts(f"{LAYER}.experts"), {}),
    "lists": (
        {
            f"{LAYER}.mlp.experts.{name}.{expert}.{part}": stored
            for expert in range(EXPERTS)
            for name, size in zip(LONG, SIZES, strict=True)
            for part, stored in gptq(*size).items()
        },
        {},
    ),
    "float stacks": (stacks(floats), {"quantization_config": None}),
    "stacks": (stacks(fp8), {"quantization_config": FP8}),
    "interleaved stacks": (stacks(fp8), {"quantization_config": FP8, **GPT_OSS}),
}

PLAIN = ModelFamily("made", ("made",))
MADE: dict[str, ModelFamily | None] = {
    "none": None,
    "plain": PLAIN,
    "halves": replace(PLAIN, stacking="halves"),
    "interleaved": replace(PLAIN, stacking="interleaved"),
    "transposed": replace(PLAIN, stacking="transposed"),
    "short": replace(PLAIN, experts="block_sparse_moe.experts", projections=("w1", "w3", "w2")),
    "short halves": replace(PLAIN, projections=("w1", "w3", "w2"), stacking="halves"),
    "granite": replace(
        PLAIN, experts="block_sparse_moe", projections=("input_linear", "input_linear", "output_linear"),
        stacking="halves",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Experts]:
    made = {}
    for name, (tensors, changes) in STORED.items():
        folder = write(tmp_path_factory.mktemp("naming"), {**router(), **tensors}, config(**changes))
        made[name] = open_checkpoint(folder).experts(0)
    return made


def described(naming: Naming) -> str:
    """Module path, names of the projections, and what is true of the tensors, in words."""
    kinds = ("stacked", "interleaved", "transposed", "listed", "modules")
    told = [naming.prefix.removeprefix(f"{LAYER}."), *naming.spelled.values()]
    told += [kind for kind in kinds if getattr(naming, kind)]
    if naming.renamed:
        told += [">".join(path.removeprefix(f"{LAYER}.") for path in naming.renamed)]
    return " ".join(told)


ONE_BY_ONE = "mlp.experts gate_proj up_proj down_proj"
STACKED = "mlp.experts gate_up_proj down_proj stacked"
SHORT = "block_sparse_moe.experts w1 w3 w2"
RENAMED = f"{SHORT} mlp>block_sparse_moe"


@pytest.mark.parametrize(
    ("stored", "family", "target", "asked", "expected"),
    [
        ("experts", "none", "gptq", "source", ONE_BY_ONE),
        ("experts", "none", "gptq", "mlp", ONE_BY_ONE),
        ("experts", "none", "gptq", "block-sparse-moe", RENAMED),
        ("experts", "none", "gptq", "per-expert", ONE_BY_ONE),
        ("experts", "none", "compressed-tensors", "stacked", STACKED),
        ("experts", "halves", "compressed-tensors", "source", ONE_BY_ONE),
        ("experts", "halves", "bf16", "source", STACKED),
        ("experts", "interleaved", "bf16", "source", f"{STACKED} interleaved"),
        ("experts", "interleaved", "bf16", "stacked", f"{STACKED} interleaved"),
        ("experts", "transposed", "bf16", "source", f"{STACKED} transposed"),
        ("experts", "transposed", "bf16", "stacked", f"{STACKED} transposed"),
        ("experts", "transposed", "compressed-tensors", "stacked", STACKED),
        ("experts", "transposed", "bf16", "per-expert", ONE_BY_ONE),
        ("experts", "short", "gptq", "source", RENAMED),
        ("experts", "short", "gptq", "per-expert", ONE_BY_ONE),
        ("experts", "short halves", "bf16", "source", ONE_BY_ONE),
        ("experts", "granite", "bf16", "source", "block_sparse_moe input_linear output_linear stacked modules"),
        ("experts", "granite", "gptq", "source", ONE_BY_ONE),
        ("experts", "plain", "mxfp4", "source", f"{STACKED} interleaved"),
        ("experts", "plain", "mxfp4", "stacked", f"{STACKED} interleaved"),
        ("experts", "plain", "kt-amx-int4", "source", "blk.0 ffn_gate_exps ffn_up_exps ffn_down_exps listed"),
        ("no gate", "plain", "gptq", "source", "mlp.experts up_proj down_proj"),
        ("no gate", "short", "bf16", "source", "mlp.experts up_proj down_proj"),
        ("short", "none", "gptq", "source", SHORT),
        ("short", "plain", "gptq", "source", f"{ONE_BY_ONE} block_sparse_moe>mlp"),
        ("short", "none", "gptq", "mlp", f"{ONE_BY_ONE} block_sparse_moe>mlp"),
        ("short", "none", "gptq", "block-sparse-moe", SHORT),
        ("short", "none", "gptq", "per-expert", SHORT),
        ("ffn", "none", "gptq", "source", "ffn.experts gate_proj up_proj down_proj"),
        ("ffn", "none", "gptq", "per-expert", "ffn.experts w1 w3 w2"),
        ("no container", "plain", "gptq", "source", "experts gate_proj up_proj down_proj"),
        ("no container", "none", "gptq", "per-expert", "experts gate_proj up_proj down_proj"),
        ("lists", "none", "gptq", "source", ONE_BY_ONE),
        ("lists", "short", "gptq", "source", RENAMED),
        ("float stacks", "none", "bf16", "source", STACKED),
        ("float stacks", "plain", "bf16", "source", ONE_BY_ONE),
        ("float stacks", "none", "gptq", "source", ONE_BY_ONE),
        ("stacks", "none", "compressed-tensors", "source", STACKED),
        ("stacks", "short", "compressed-tensors", "source", STACKED),
        ("stacks", "short", "compressed-tensors", "per-expert", ONE_BY_ONE),
        ("stacks", "short", "bf16", "source", RENAMED),
        ("stacks", "short", "gptq", "source", RENAMED),
        ("stacks", "none", "fp8", "source", ONE_BY_ONE),
        ("interleaved stacks", "none", "compressed-tensors", "source", ONE_BY_ONE),
        ("interleaved stacks", "none", "bf16", "source", STACKED),
    ],
)
def test_names_of_a_layer(
    layers: dict[str, Experts], stored: str, family: str, target: str, asked: NamesOption, expected: str
) -> None:
    found = choose_naming(layers[stored], MADE[family], TARGETS[target], asked)
    assert described(found) == expected


NO_TOOL = ": no tool writes stacked experts in this format"
ROWS = f": {LAYER}.mlp.experts stacks interleaved gate and up rows, and no tool writes that in this format"


@pytest.mark.parametrize(
    ("stored", "family", "target", "asked", "detail", "hint"),
    [
        ("experts", "none", "gptq", "stacked", NO_TOOL, 'names="per-expert", or to="compressed-tensors"'),
        ("experts", "interleaved", "compressed-tensors", "stacked", ROWS, 'names="per-expert"'),
        ("no gate", "none", "compressed-tensors", "stacked", None, 'names="per-expert"'),
        ("experts", "none", "mxfp4", "mlp", ": gpt-oss' format has stacked tensors only", "leave the option out"),
        ("experts", "none", "kt-amx-int8", "mlp", ": the format has names of its own", "leave the option out"),
        ("no container", "none", "gptq", "mlp", f": {LAYER}.experts is no module of experts in a container", None),
    ],
)
def test_names_that_a_format_cannot_have(
    layers: dict[str, Experts], stored: str, family: str, target: str, asked: NamesOption, detail: str | None,
    hint: str | None,
) -> None:  # fmt: skip
    with pytest.raises(MoeqError) as caught:
        choose_naming(layers[stored], MADE[family], TARGETS[target], asked)
    expected = f'names="{asked}"{detail}' if detail else f"{LAYER}.mlp.experts has no gate: nothing to stack"
    assert (caught.value.code, caught.value.message, caught.value.hint) == ("usage.names", expected, hint)


def test_families_that_transformers_cannot_load(layers: dict[str, Experts]) -> None:
    """Quantised experts of families that stack floats have no names of the family's."""
    made = layers["experts"]
    for name in ("halves", "interleaved", "transposed", "granite"):
        assert family_naming(made, MADE[name], floats=False) is None
        assert family_naming(made, MADE[name], floats=True) is not None
    assert family_naming(made, MADE["short halves"], floats=True) is None
    assert family_naming(made, None, floats=True) is None
    assert family_naming(layers["no gate"], PLAIN, floats=True) is None
    # The router lies beside the experts, and would be renamed with the whole layer.
    for stored, family in (("no container", PLAIN), ("experts", replace(PLAIN, experts="experts"))):
        assert family_naming(layers[stored], family, floats=False) is None
    found = family_naming(made, MADE["short"], floats=False)
    assert found is not None
    assert described(found) == RENAMED


@pytest.mark.parametrize("prefix", ["experts", "layers.0.experts", "model.layers.0.mlp.experts.mlp"])
def test_modules_that_lie_in_no_container(prefix: str) -> None:
    assert _prefix(prefix, "per-expert") == (prefix, None)
    with pytest.raises(MoeqError, match=f"{prefix} is no module of experts in a container"):
        _prefix(prefix, "mlp")


def test_containers_are_renamed() -> None:
    assert _prefix("ffn.experts", "mlp") == ("mlp.experts", ("ffn", "mlp"))
    assert _prefix("a.0.mlp.experts", "mlp") == ("a.0.mlp.experts", None)
    renamed = [("a.ffn", "a.mlp"), ("b.mlp", "b.block_sparse_moe")]
    names = ("a.ffn.gate.weight", "a.ffn_norm.weight", "a.ffn", "b.mlp.gate.bias", "c.mlp.gate.weight")
    assert [rename(name, renamed) for name in names] == [
        "a.mlp.gate.weight", "a.ffn_norm.weight", "a.ffn", "b.block_sparse_moe.gate.bias", "c.mlp.gate.weight",
    ]  # fmt: skip


def test_names_of_tensors() -> None:
    """Parameters that stack experts have no module, so that their parts are suffixes; shapes are stored once."""
    one = Naming("p", {"gate": "w1", "gate_up": "gate_up_proj"})
    assert one.module("gate", 3) == "p.3.w1"
    assert one.tensor("gate", 3, "weight_packed") == "p.3.w1.weight_packed"
    listed = replace(one, listed=True)
    assert listed.tensor("gate", 3, "weight") == "p.w1.3.weight"
    stacked = replace(one, stacked=True)
    assert stacked.module("gate_up", 3) == "p.gate_up_proj"
    assert [stacked.tensor("gate_up", 3, part) for part in ("weight", "weight_packed", "bias", "scales")] == [
        "p.gate_up_proj", "p.gate_up_proj_packed", "p.gate_up_proj_bias", "p.gate_up_proj_scales",
    ]  # fmt: skip
    assert replace(stacked, modules=True).tensor("gate_up", 3, "weight") == "p.gate_up_proj.weight"
    parts = ("weight_packed", "weight_shape")
    assert [[naming.is_row(part) for part in parts] for naming in (one, stacked)] == [[False, False], [True, False]]

"""Names of written experts: the family's own, which engines and transformers load."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeq.checkpoint.families import FAMILIES
from moeq.oracle.engines.vllm.expert_names import names_of_class
from moeq.transcode.naming import NamesOption
from moeq.transcode.survey import TranscodeRequest
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

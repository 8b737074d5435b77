"""Model families in transformers itself, each as a small random model: converted, loaded, the same logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench_scripts import make_family
from engines.families import write_family, write_model
from engines.transformers_models import auto, load
from load.deployments import convert

from moeq.errors import MoeqError

IDS = torch.tensor([[5, 9, 3, 33, 60, 17], [3, 3, 8, 21, 40, 7]])


@pytest.mark.cover(every=15)
@pytest.mark.parametrize("family", list(make_family.FAMILIES))
def test_logits_are_those_of_the_source(family, tmp_path: Path) -> None:
    wanted = write_family(tmp_path / "source", family)
    folder = convert(tmp_path / "source", tmp_path / "out", "marlin-wna16/1")
    model, info = load(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert any(hasattr(module, "converted") for module in model.modules())
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, wanted(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.cover(every=2)
@pytest.mark.parametrize("kind", ["AutoModelForImageTextToText", "AutoModelForCausalLM"])
def test_a_model_that_sees_images_too(kind, tmp_path: Path) -> None:
    """Qwen3.5 as it is published, whole and its language model alone."""
    config = type(auto("AutoConfig").for_model("qwen3_5_moe"))(
        text_config=make_family.family_config("qwen3_5_moe_text").to_dict(),
        vision_config={"depth": 1, "num_heads": 2, "num_position_embeddings": 16, "out_hidden_size": 128}
        | dict.fromkeys(("hidden_size", "intermediate_size"), 32),
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    write_model(tmp_path / "source", auto("AutoModelForImageTextToText").from_config(config, dtype=torch.float32))
    folder = convert(tmp_path / "source", tmp_path / "out", "marlin-wna16/1")
    wanted = auto(kind).from_pretrained(tmp_path / "source-plain", dtype=torch.float32)
    model = auto(kind).from_pretrained(folder, dtype=torch.float32)
    assert sum(hasattr(module, "converted") for module in model.modules()) == 2
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, wanted(IDS).logits, rtol=1e-4, atol=1e-4)
    greedy = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(IDS[:1], **greedy), wanted.generate(IDS[:1], **greedy))


def test_plain_weights_are_not_read_as_packed_ones(tmp_path: Path) -> None:
    model = write_family(tmp_path / "source", "qwen3_moe")
    model.set_experts_implementation("moeq")
    with pytest.raises(MoeqError, match="Qwen3MoeExperts holds plain weights"):
        model(IDS)


@pytest.mark.cover(every=5)
@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe", "glm4_moe", "minimax_m2", "mixtral"])
def test_what_transformers_keeps_in_float32_is_kept(family, tmp_path: Path) -> None:
    """A bias that corrects the choice of experts, rounded to bfloat16, would choose others."""
    write_family(tmp_path / "source", family)
    folder = convert(tmp_path / "source", tmp_path / "out", "marlin-wna16/1")
    model, plain = (load(place, dtype=torch.bfloat16) for place in (folder, tmp_path / "source-plain"))
    found, wanted = ({name: one.dtype for name, one in each.state_dict().items()} for each in (model, plain))
    beside = {name for name in wanted if name in found}
    assert beside
    assert {name: found[name] for name in beside} == {name: wanted[name] for name in beside}

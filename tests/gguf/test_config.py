"""`config.json` of a GGUF file: each kind of metadata, one architecture after another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gguf_files import moe_metadata

from moeq.errors import MoeqError
from moeq.gguf.config import architecture_of, config_of
from moeq.gguf.names import ARCHITECTURES


def made(name: str, tensors: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    metadata = moe_metadata(name, layers=6, hidden=256, inner=128, experts=8)
    metadata |= {f"{name}.{key}" if key.startswith("rope.") else key: row for key, row in more.items()}
    return config_of(metadata, name, ARCHITECTURES[name], tensors, "m.gguf")


def numbers(*values: int) -> memoryview:
    return memoryview(np.array(values, np.int32))


def test_a_whole_config() -> None:
    assert made("qwen3moe", **{"tokenizer.ggml.padding_token_id": 5}) == {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16",
        "max_position_embeddings": 4096, "hidden_size": 256, "intermediate_size": 128, "moe_intermediate_size": 128,
        "num_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "norm_topk_prob": True, "num_hidden_layers": 6, "bos_token_id": 0,
        "eos_token_id": 1, "pad_token_id": 5, "vocab_size": 64, "tie_word_embeddings": True,
    }  # fmt: skip


@pytest.mark.parametrize(("tensors", "tied"), [((), True), (("output.weight",), False)])
def test_tied_embeddings(tensors: tuple[str, ...], tied: bool) -> None:
    assert made("qwen3moe", tensors)["tie_word_embeddings"] is tied
    assert made("gpt-oss", tensors)["tie_word_embeddings"] is False  # the model's own default


def test_numbers_of_metadata() -> None:
    """float32 is read as the shortest decimal; a value per layer is one number where all are alike."""
    assert made("qwen3moe", **{"qwen3moe.rope.freq_base": float(np.float32(1.1e4))})["rope_theta"] == 11000.0
    layered = {"qwen3moe.attention.head_count": numbers(4, 4, 4), "qwen3moe.attention.head_count_kv": numbers(2, 1, 2)}
    found = made("qwen3moe", **layered)
    assert (found["num_attention_heads"], found["num_key_value_heads"]) == (4, [2, 1, 2])
    for wrong in (float("inf"), float("nan"), "4", [4]):
        with pytest.raises(MoeqError, match=r"qwen3moe\.attention\.head_count is .*, expected a number"):
            made("qwen3moe", **{"qwen3moe.attention.head_count": wrong})


@pytest.mark.parametrize(
    ("blocks", "extra", "layers"),
    [(6, 0, 6), (6, 1, 5), (6, 5, 1), (1, 0, 1), (4096, 0, 4096), (4096, 1, 4095)],
)
def test_layers(blocks: int, extra: int, layers: int) -> None:
    found = made("glm4moe", **{"glm4moe.block_count": blocks, "glm4moe.nextn_predict_layers": extra})
    assert (found["num_hidden_layers"], found["num_nextn_predict_layers"]) == (layers, extra)


@pytest.mark.parametrize(
    ("blocks", "extra"), [(6, 6), (0, 0), (6, -1), (4097, 0), (6.0, 0), ("6", 0), (6, "1"), (True, 0), (6, 1.0)]
)
def test_layers_that_make_no_sense(blocks: object, extra: object) -> None:
    with pytest.raises(MoeqError, match="block_count is") as caught:
        made("qwen3moe", **{"qwen3moe.block_count": blocks, "qwen3moe.nextn_predict_layers": extra})
    assert caught.value.code == "source.bad-header"


@pytest.mark.parametrize(
    ("name", "gating", "expected"),
    [
        ("deepseek2", 1, ("deepseek_v2", "softmax")),
        ("deepseek2", None, ("deepseek_v2", None)),
        ("deepseek2", 2, ("deepseek_v3", "sigmoid")),
        ("minimax-m2", None, ("minimax_m2", "sigmoid")),
        ("minimax-m2", 1, ("minimax_m2", "softmax")),
        ("qwen3moe", 2, ("qwen3_moe", None)),
        ("glm4moe", 2, ("glm4_moe", None)),
    ],
)
def test_scoring(name: str, gating: int | None, expected: tuple[str, str | None]) -> None:
    more = {"rope.dimension_count": 16} | ({} if gating is None else {f"{name}.expert_gating_func": gating})
    found = made(name, **more)
    assert (found["model_type"], found.get("scoring_func")) == expected
    assert found["architectures"][0].lower().startswith(expected[0].replace("_", ""))


def test_latent_heads() -> None:
    shared = {"rope.dimension_count": 16, "deepseek2.attention.value_length": 40}
    whole = {"deepseek2.attention.key_length_mla": 48, "deepseek2.attention.value_length_mla": 32}
    keys = ("num_key_value_heads", "head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    assert [made("deepseek2", **shared)[key] for key in keys] == [4, 16, 16, 48, 40]
    assert [made("deepseek2", **shared, **whole)[key] for key in keys] == [4, 16, 16, 32, 32]


def test_linear_attention() -> None:
    name = "qwen35moe"
    sizes = {f"{name}.ssm.inner_size": 96, f"{name}.ssm.time_step_rank": 12, f"{name}.ssm.group_count": 3}
    found = made(name, **sizes)
    assert (found["linear_value_head_dim"], found["linear_num_key_heads"]) == (8, 3)
    assert "rope_parameters" not in found
    rope = {f"{name}.rope.dimension_sections": numbers(11, 0, 10), f"{name}.rope.dimension_count": 16}
    assert made(name, **sizes, **rope)["rope_parameters"] == {
        "rope_theta": 1e6, "mrope_section": [11, 10], "mrope_interleaved": True, "partial_rotary_factor": 0.25,
    }  # fmt: skip
    for wrong in (97, "96", 96.0, None):
        with pytest.raises(MoeqError, match=r"ssm\.inner_size .* does not divide into 12 value heads"):
            made(name, **{**sizes, f"{name}.ssm.inner_size": wrong})
    for heads in (0, -12):
        with pytest.raises(MoeqError, match=rf"does not divide into {heads} value heads"):
            made(name, **{**sizes, f"{name}.ssm.time_step_rank": heads})


def test_rope_scaling() -> None:
    assert "rope_scaling" not in made("qwen3moe", **{"rope.scaling.type": "none", "rope.scaling.factor": 4.0})
    assert made("qwen3moe", **{"rope.scaling.type": "linear"})["rope_scaling"] == {"rope_type": "linear"}
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32768}
    assert made("qwen3moe", **yarn)["rope_scaling"] == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
    }  # fmt: skip


def test_a_token_that_a_file_does_not_name_hides_no_other() -> None:
    assert made("qwen3moe", **{"tokenizer.ggml.bos_token_id": None})["eos_token_id"] == 1
    assert "bos_token_id" not in made("qwen3moe", **{"tokenizer.ggml.bos_token_id": None})


def test_token_ids_are_numbers() -> None:
    with pytest.raises(MoeqError, match="eos_token_id is 'x', expected a number"):
        made("qwen3moe", **{"tokenizer.ggml.eos_token_id": "x"})


@pytest.mark.parametrize("name", [7, "", "a\n", "x" * 65, None, ["qwen3moe"]])
def test_names_that_are_none(name: object) -> None:
    with pytest.raises(MoeqError, match=r"general\.architecture is .*, expected a name") as caught:
        architecture_of({"general.architecture": name, f"{name}.expert_count": 8}, "m.gguf")
    assert caught.value.code == "source.bad-header"


def test_architectures() -> None:
    title = "x" * 64
    for metadata, code in (
        ({"general.architecture": title, f"{title}.expert_count": 8}, "source.unsupported-format"),
        ({"general.architecture": "qwen3moe", "qwen3moe.expert_count": 0}, "answer.not-moe"),
        ({"general.architecture": "qwen3moe"}, "answer.not-moe"),
    ):
        with pytest.raises(MoeqError) as caught:
            architecture_of(metadata, "m.gguf")
        assert caught.value.code == code
    found = architecture_of({"general.architecture": "qwen3moe", "qwen3moe.expert_count": 8}, "m.gguf")
    assert found == ("qwen3moe", ARCHITECTURES["qwen3moe"])


def test_granite_with_shared_experts() -> None:
    assert made("granitemoe")["model_type"] == "granitemoe"
    found = made("granitemoe", **{"granitemoe.expert_shared_feed_forward_length": 64})
    assert (found["architectures"], found["model_type"]) == (["GraniteMoeSharedForCausalLM"], "granitemoeshared")


def test_rotary_shares_of_qwen3_next() -> None:
    sizes = {"qwen3next.ssm.inner_size": 96, "qwen3next.ssm.time_step_rank": 12}
    assert "partial_rotary_factor" not in made("qwen3next", **sizes)
    found = made("qwen3next", **sizes, **{"rope.dimension_count": 16})
    assert (found["partial_rotary_factor"], "rope_parameters" in found) == (0.25, False)
    assert "partial_rotary_factor" not in made("qwen3next", **sizes, **{"rope.dimension_count": 16.0})


#: Six layers: attention in the second and the fifth, experts in every other one.
JAMBA = tuple(f"blk.{layer}.{name}.weight" for name, layers in (("attn_q", (1, 4)), ("ffn_gate_exps", (0, 2, 4)))
              for layer in layers)  # fmt: skip


def jamba(*tensors: str, inner: object = 512, **more: Any) -> dict[str, Any]:
    return made("jamba", tensors, **{"jamba.ssm.inner_size": inner, **more})


def test_state_spaces() -> None:
    found = jamba(*JAMBA, **{"jamba.attention.head_count_kv": numbers(0, 2, 0, 0, 2, 0)})
    assert found["num_key_value_heads"] == 2
    assert {key: found[key] for key in found if key.startswith(("mamba_e", "mamba_conv_b", "mamba_p"))} == {
        "mamba_expand": 2, "mamba_conv_bias": False, "mamba_proj_bias": False,
    }  # fmt: skip
    layers = ("attn_layer_period", "attn_layer_offset", "expert_layer_period", "expert_layer_offset")
    assert [found[key] for key in layers] == [3, 1, 2, 0]
    found = jamba(*JAMBA[:1], *JAMBA[2:], "blk.0.ssm_conv1d.bias", "blk.0.ssm_in.bias")
    assert (found["mamba_conv_bias"], found["mamba_proj_bias"]) == (True, True)
    assert [found[key] for key in layers] == [6, 1, 2, 0]  # one layer alone: none in as many as there are


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (JAMBA[1:2] + JAMBA[2:], None),
        (JAMBA[2:], r"m\.gguf: layers \[\] of 6 have attn_q"),
        (JAMBA[:2], r"m\.gguf: layers \[\] of 6 have ffn_gate_exps"),
        ((*JAMBA, "blk.5.attn_q.weight"), r"layers \[1, 4, 5\] of 6 have attn_q"),
        (JAMBA[:4], r"layers \[0, 2\] of 6 have ffn_gate_exps"),
    ],
)
def test_layers_without_a_period(tensors: tuple[str, ...], words: str | None) -> None:
    if words is None:
        assert jamba(*tensors)["attn_layer_offset"] == 4
        return
    with pytest.raises(MoeqError, match=words) as caught:
        jamba(*tensors)
    assert caught.value.code == "source.inconsistent"


@pytest.mark.parametrize(("inner", "hidden"), [(511, 256), ("512", 256), (512, 0), (512, -256), (512, 256.0)])
def test_state_spaces_that_make_no_sense(inner: object, hidden: object) -> None:
    with pytest.raises(MoeqError, match=rf"ssm\.inner_size {inner!r} is no multiple of {hidden}") as caught:
        jamba(*JAMBA, inner=inner, **{"jamba.embedding_length": hidden})
    assert caught.value.code == "source.bad-header"


def test_vocabularies() -> None:
    assert made("qwen3moe", **{"tokenizer.ggml.tokens": ["a", "b", "c"]})["vocab_size"] == 3
    assert "vocab_size" not in made("qwen3moe", **{"tokenizer.ggml.tokens": numbers(1, 2)})


def test_empty_lists_stay_lists() -> None:
    assert made("qwen3moe", **{"qwen3moe.attention.head_count": numbers()})["num_attention_heads"] == []

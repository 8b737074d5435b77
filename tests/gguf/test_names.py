"""Names of llama.cpp's architectures in the models' own spelling."""

from __future__ import annotations

import pytest

from moeq.gguf.names import ARCHITECTURES

#: Tensors that are no weights of a model with experts, computed by llama.cpp or of dense models, and gaps.
UNNAMED = {
    "llama": {"rope_freqs", "attn_rot_embd", "ffn_gate", "ffn_down", "ffn_up"},
    "llama4": {"rope_freqs", "attn_rot_embd"},
    "deepseek2": {"rope_freqs", "attn_k_b", "attn_v_b", "attn_rot_embd"},
    "hunyuan-moe": {"rope_freqs"},
    "phimoe": {"rope_factors_long", "rope_factors_short", "attn_qkv"},
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_tensor_of_an_architecture_has_a_name(name: str) -> None:
    constants = pytest.importorskip("gguf.constants")
    number = next(key for key, title in constants.MODEL_ARCH_NAMES.items() if title == name)
    stored = [constants.TENSOR_NAMES[kind].format(bid=0, xid=0) for kind in constants.MODEL_TENSORS[number]]
    found = ARCHITECTURES[name]
    unnamed = {one for one in stored if found.name(f"{one}.weight") is None and found.name(one) is None}
    unnamed -= {f"blk.0.{half}" for first, (second, _) in found.joined.items() for half in (first, second)}
    assert {one.removeprefix("blk.0.") for one in unnamed} == UNNAMED.get(name, set())


@pytest.mark.parametrize("name", ["glm4moe", "bailingmoe2"])
def test_multi_token_prediction(name: str) -> None:
    found = ARCHITECTURES[name]
    assert found.name("blk.46.nextn.eh_proj.weight") == ("model.layers.46.eh_proj.weight", None)
    assert found.name("blk.46.nextn.shared_head_norm.weight") == ("model.layers.46.shared_head.norm.weight", None)
    assert found.config["nextn_predict_layers"] == "num_nextn_predict_layers"

"""Models that transformers makes, stored as llama.cpp's converter stores them: transcoded, they load with each number.

The converter's rules are those of `convert_hf_to_gguf.py` for Qwen3-Next, Jamba and Granite.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import Tensor as Stored
from gguf_files import gguf_bytes, moe_metadata

from moeq.model import open as open_checkpoint
from moeq.transcode.transcode import check, transcode

transformers = pytest.importorskip("transformers")

State = dict[str, torch.Tensor]
Named = Iterator[tuple[str, torch.Tensor]]

TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.final_layernorm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LEAVES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_ff_layernorm": "ffn_norm",
    **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **{name: "ffn_gate_inp" for name in ("mlp.gate", "feed_forward.router", "block_sparse_moe.router")},
    **{f"feed_forward.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{one}_proj": f"ffn_{one}_shexp" for one in ("gate", "up", "down")},
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.conv1d": "ssm_conv1d",
    **{f"mamba.{one}_proj": f"ssm_{one}" for one in ("in", "x", "dt", "out")},
    **{f"mamba.{one}_layernorm": f"ssm_{one}_norm" for one in ("dt", "b", "c")},
    "mamba.conv1d": "ssm_conv1d",
}


def stored_names(state: State, special: Callable[[str, torch.Tensor], list[tuple[str, torch.Tensor]] | None]) -> Named:
    """Every tensor under the names that llama.cpp has; `special` says what is more than a name."""
    for name, values in state.items():
        if name in TOP:
            changed = special("norm", values) if name == "model.norm.weight" else None
            yield TOP[name], changed[0][1] if changed else values
            continue
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        assert match, name
        block, inner = f"blk.{match[1]}", match[2]
        leaf, _, part = inner.rpartition(".")
        if inner.endswith("experts.gate_up_proj"):
            gate, up = values.chunk(2, dim=1)
            yield from ((f"{block}.ffn_gate_exps.weight", gate), (f"{block}.ffn_up_exps.weight", up))
        elif inner.endswith("experts.down_proj"):
            yield f"{block}.ffn_down_exps.weight", values
        elif (found := special(inner, values)) is not None:
            yield from ((f"{block}.{one}", made) for one, made in found)
        else:
            yield f"{block}.{LEAVES[leaf]}.{part}", values.squeeze()


def write(path: Path, metadata: dict[str, Any], tensors: Named) -> Path:
    def stored(values: torch.Tensor) -> Stored:
        return "f32", tuple(values.shape), values.contiguous().numpy().tobytes()

    path.write_bytes(gguf_bytes(metadata, {name: stored(values) for name, values in tensors}))
    return path


def random_model(model: torch.nn.Module) -> State:
    generator = torch.Generator().manual_seed(5)
    for tensor in model.state_dict().values():
        tensor.copy_(torch.rand(tensor.shape, generator=generator) - 0.5)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_loads(kind: type, folder: Path, state: State) -> None:
    """Every number is the model's; norms to which the converter adds 1, and decays, are rounded there and back."""
    loaded, info = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, tensor in loaded.state_dict().items():
        if name.endswith("A_log") or ("norm" in name and kind is transformers.Qwen3NextForCausalLM):
            assert torch.allclose(tensor, state[name], rtol=1e-6, atol=1e-6), name
        else:
            assert torch.equal(tensor, state[name]), name


SIZES = {"num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 64, "num_attention_heads": 4, "num_experts": 4}


def test_qwen3_next(tmp_path: Path) -> None:
    keys, per_key, key_size, size = 2, 3, 16, 8
    linear = {"linear_num_key_heads": keys, "linear_num_value_heads": keys * per_key}
    heads = {"linear_key_head_dim": key_size, "linear_value_head_dim": size, "head_dim": 16, "num_key_value_heads": 2}
    inner = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts_per_tok": 2}
    config = transformers.Qwen3NextConfig(**SIZES, **linear, **heads, **inner)
    state = random_model(transformers.Qwen3NextForCausalLM(config))

    def special(inner: str, values: torch.Tensor) -> list[tuple[str, torch.Tensor]] | None:
        if inner == "linear_attn.A_log":
            return [("ssm_a", -torch.exp(values))]
        if inner == "linear_attn.dt_bias":
            return [("ssm_dt.bias", values)]
        if inner == "linear_attn.in_proj_qkvz.weight":
            runs = [key_size, key_size, per_key * size, per_key * size]
            q, k, v, z = (run.reshape(-1, 64) for run in values.reshape(keys, -1, 64).split(runs, dim=1))
            return [("attn_qkv.weight", torch.cat([q, k, v])), ("attn_gate.weight", z)]
        if "norm" in inner and "linear_attn" not in inner:
            leaf = LEAVES.get(inner.removesuffix(".weight"), "")
            return [(f"{'post_attention_norm' if leaf == 'ffn_norm' else leaf}.weight", values + 1)]
        return None

    ssm = {"ssm.conv_kernel": 4, "ssm.state_size": key_size, "ssm.group_count": keys}
    more = {**ssm, "ssm.time_step_rank": keys * per_key, "ssm.inner_size": keys * per_key * size}
    more |= {"full_attention_interval": 4, "rope.dimension_count": 4, "expert_shared_feed_forward_length": 32}
    more |= {"attention.key_length": 16, "rope.freq_base": 1e4}
    metadata = moe_metadata("qwen3next", layers=4, hidden=64, inner=32, experts=4, **more)
    tensors = dict(stored_names(state, special))
    source = write(tmp_path / "m.gguf", metadata, iter(tensors.items()))
    transcode(source, tmp_path / "out", "fp32")
    assert_loads(transformers.Qwen3NextForCausalLM, tmp_path / "out", state)

    # Quantised to one type, its rows keep their bytes; to two, they become float32.
    rng = np.random.default_rng(6)
    for kinds, written in ((("q8_0", "q8_0"), "gguf_q8_0"), (("q8_0", "f32"), "gguf_f32")):
        files = {name: ("f32", tuple(one.shape), one.contiguous().numpy().tobytes()) for name, one in tensors.items()}
        for name, kind in zip(("attn_qkv", "attn_gate"), kinds, strict=True):
            shape = files[f"blk.0.{name}.weight"][1]
            raw = rng.integers(0, 60, shape[0] * shape[1] // 32 * 34, np.uint8)
            if kind == "q8_0":
                files[f"blk.0.{name}.weight"] = (kind, shape, raw.tobytes())
        (tmp_path / "m.gguf").write_bytes(gguf_bytes(metadata, files))
        opened = open_checkpoint(tmp_path / "m.gguf").source
        name = f"model.layers.0.linear_attn.in_proj_qkvz.{written}"
        assert name in opened.tensors or written == "gguf_f32"
        assert not check(tmp_path / "m.gguf", "fp32", workers=1).losses


def test_jamba(tmp_path: Path) -> None:
    layers = {"attn_layer_period": 4, "attn_layer_offset": 2, "expert_layer_period": 2, "expert_layer_offset": 1}
    mamba = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 8}
    config = transformers.JambaConfig(**SIZES, **layers, **mamba, intermediate_size=32, num_key_value_heads=2)
    state = random_model(transformers.JambaForCausalLM(config))

    def special(inner: str, values: torch.Tensor) -> list[tuple[str, torch.Tensor]] | None:
        if inner == "mamba.A_log":
            return [("ssm_a", -torch.exp(values))]
        return [("ssm_d", values)] if inner == "mamba.D" else None

    ssm = {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.time_step_rank": 8, "ssm.inner_size": 128}
    more = {**ssm, "attention.head_count_kv": [0, 0, 2, 0]}
    metadata = moe_metadata("jamba", layers=4, hidden=64, inner=32, experts=4, **more)
    source = write(tmp_path / "m.gguf", metadata, stored_names(state, special))
    assert transcode(source, tmp_path / "out", "fp32").exact
    assert_loads(transformers.JambaForCausalLM, tmp_path / "out", state)


def test_shared_experts_of_granite(tmp_path: Path) -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "num_experts"} | {"num_local_experts": 4}
    heads = {"num_key_value_heads": 2, "intermediate_size": 32, "shared_intermediate_size": 64}
    config = transformers.GraniteMoeSharedConfig(**sizes, **heads)
    state = random_model(transformers.GraniteMoeSharedForCausalLM(config))

    def special(inner: str, values: torch.Tensor) -> list[tuple[str, torch.Tensor]] | None:
        if inner == "shared_mlp.input_linear.weight":
            gate, up = values.chunk(2)
            return [("ffn_gate_shexp.weight", gate), ("ffn_up_shexp.weight", up)]
        if inner in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
            count = 4 if "q_proj" in inner else 2
            halves = values.reshape(count, 2, -1, 64).swapaxes(1, 2).reshape(values.shape)
            return [(f"attn_{inner[10]}.weight", halves)]
        return None

    more = {"expert_shared_feed_forward_length": 64, "attention.scale": 0.25, "logit_scale": 8.0}
    more |= {"embedding_scale": 12.0, "residual_scale": 0.5}
    metadata = moe_metadata("granitemoe", layers=4, hidden=64, inner=32, experts=4, **more)
    source = write(tmp_path / "m.gguf", metadata, stored_names(state, special))
    assert transcode(source, tmp_path / "out", "fp32").exact
    assert_loads(transformers.GraniteMoeSharedForCausalLM, tmp_path / "out", state)
    written = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert (written.shared_intermediate_size, written.logits_scaling, written.residual_multiplier) == (64, 8.0, 0.5)

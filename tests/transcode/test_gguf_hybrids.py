"""Models that transformers makes, stored as llama.cpp's converter stores them: transcoded, they load with each number.

The converter's rules are those of `convert_hf_to_gguf.py` for Qwen3-Next, Jamba and Granite.
"""

from __future__ import annotations

import os
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


#: Sizes of the models are drawn: more seeds find more.
SEEDS = range(int(os.environ.get("MOEQ_RANDOM", "4")))


def one_of(draw: np.random.Generator, *values: int) -> int:
    return int(draw.choice(values))


def sizes_of(draw: np.random.Generator) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes as configs call them, and as `moe_metadata` does. Heads divide the hidden size, and their halves too."""
    hidden, heads = one_of(draw, 64, 128, 192), one_of(draw, 2, 4, 8)
    kv_heads, experts, inner = one_of(draw, 1, 2, heads), one_of(draw, 2, 3, 5), one_of(draw, 32, 64, 96)
    config = {"num_hidden_layers": 4, "hidden_size": hidden, "vocab_size": 64, "num_attention_heads": heads}
    metadata = {"layers": 4, "hidden": hidden, "inner": inner, "experts": experts, "attention.head_count": heads}
    metadata |= {"attention.head_count_kv": kv_heads, "attention.key_length": hidden // heads}
    return config | {"num_key_value_heads": kv_heads}, metadata


@pytest.mark.cover("seed", every=4)
@pytest.mark.parametrize("seed", SEEDS)
def test_qwen3_next(seed: int, tmp_path: Path) -> None:
    draw = np.random.default_rng([1, seed])
    sizes, known = sizes_of(draw)
    hidden, inner_size, experts = (known[key] for key in ("hidden", "inner", "experts"))
    keys, per_key, key_size, size = (one_of(draw, *some) for some in ((1, 2, 3), (1, 2, 3), (8, 16), (8, 16)))
    kernel, head_size = one_of(draw, 2, 4), one_of(draw, 16, 32)
    linear = {"linear_num_key_heads": keys, "linear_num_value_heads": keys * per_key}
    heads = {"linear_key_head_dim": key_size, "linear_value_head_dim": size, "head_dim": head_size}
    inner = {"moe_intermediate_size": inner_size, "shared_expert_intermediate_size": 32, "num_experts_per_tok": 2}
    more_sizes = {"num_experts": experts, "linear_conv_kernel_dim": kernel}
    config = transformers.Qwen3NextConfig(**sizes, **linear, **heads, **inner, **more_sizes)
    state = random_model(transformers.Qwen3NextForCausalLM(config))

    def special(inner: str, values: torch.Tensor) -> list[tuple[str, torch.Tensor]] | None:
        if inner == "linear_attn.A_log":
            return [("ssm_a", -torch.exp(values))]
        if inner == "linear_attn.dt_bias":
            return [("ssm_dt.bias", values)]
        if inner == "linear_attn.in_proj_qkvz.weight":
            runs = [key_size, key_size, per_key * size, per_key * size]
            q, k, v, z = (run.reshape(-1, hidden) for run in values.reshape(keys, -1, hidden).split(runs, dim=1))
            return [("attn_qkv.weight", torch.cat([q, k, v])), ("attn_gate.weight", z)]
        if "norm" in inner and "linear_attn" not in inner:
            leaf = LEAVES.get(inner.removesuffix(".weight"), "")
            return [(f"{'post_attention_norm' if leaf == 'ffn_norm' else leaf}.weight", values + 1)]
        return None

    ssm = {"ssm.conv_kernel": kernel, "ssm.state_size": key_size, "ssm.group_count": keys}
    more = {**ssm, "ssm.time_step_rank": keys * per_key, "ssm.inner_size": keys * per_key * size}
    more |= {"full_attention_interval": 4, "rope.dimension_count": 4, "expert_shared_feed_forward_length": 32}
    more |= {"attention.key_length": head_size, "rope.freq_base": 1e4}
    metadata = moe_metadata("qwen3next", **{**known, **more})
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


@pytest.mark.cover("seed", every=4)
@pytest.mark.parametrize("seed", SEEDS)
def test_jamba(seed: int, tmp_path: Path) -> None:
    draw = np.random.default_rng([2, seed])
    sizes, known = sizes_of(draw)
    state_size, kernel, expand, rank = one_of(draw, 8, 16), one_of(draw, 2, 4), one_of(draw, 1, 2), one_of(draw, 4, 8)
    layers = {"attn_layer_period": 4, "attn_layer_offset": 2, "expert_layer_period": 2, "expert_layer_offset": 1}
    mamba = {"mamba_d_state": state_size, "mamba_d_conv": kernel, "mamba_expand": expand, "mamba_dt_rank": rank}
    inner = {"intermediate_size": known["inner"], "num_experts": known["experts"]}
    config = transformers.JambaConfig(**sizes, **layers, **mamba, **inner)
    state = random_model(transformers.JambaForCausalLM(config))

    def special(inner: str, values: torch.Tensor) -> list[tuple[str, torch.Tensor]] | None:
        if inner == "mamba.A_log":
            return [("ssm_a", -torch.exp(values))]
        return [("ssm_d", values)] if inner == "mamba.D" else None

    ssm = {"ssm.conv_kernel": kernel, "ssm.state_size": state_size, "ssm.time_step_rank": rank}
    more = {**ssm, "ssm.inner_size": expand * known["hidden"]}
    heads = {"attention.head_count_kv": [0, 0, sizes["num_key_value_heads"], 0]}
    metadata = moe_metadata("jamba", **{**known, **more, **heads})
    source = write(tmp_path / "m.gguf", metadata, stored_names(state, special))
    assert transcode(source, tmp_path / "out", "fp32").exact
    assert_loads(transformers.JambaForCausalLM, tmp_path / "out", state)


@pytest.mark.cover("seed", every=4)
@pytest.mark.parametrize("seed", SEEDS)
def test_shared_experts_of_granite(seed: int, tmp_path: Path) -> None:
    draw = np.random.default_rng([3, seed])
    sizes, known = sizes_of(draw)
    hidden, shared = known["hidden"], one_of(draw, 32, 64, 160)
    inner = {"intermediate_size": known["inner"], "shared_intermediate_size": shared}
    config = transformers.GraniteMoeSharedConfig(**sizes, **inner, num_local_experts=known["experts"])
    state = random_model(transformers.GraniteMoeSharedForCausalLM(config))

    def special(inner: str, values: torch.Tensor) -> list[tuple[str, torch.Tensor]] | None:
        if inner == "shared_mlp.input_linear.weight":
            gate, up = values.chunk(2)
            return [("ffn_gate_shexp.weight", gate), ("ffn_up_shexp.weight", up)]
        if inner in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
            count = sizes["num_attention_heads" if "q_proj" in inner else "num_key_value_heads"]
            halves = values.reshape(count, 2, -1, hidden).swapaxes(1, 2).reshape(values.shape)
            return [(f"attn_{inner[10]}.weight", halves)]
        return None

    more = {"expert_shared_feed_forward_length": shared, "attention.scale": 0.25, "logit_scale": 8.0}
    more |= {"embedding_scale": 12.0, "residual_scale": 0.5}
    metadata = moe_metadata("granitemoe", **known, **more)
    source = write(tmp_path / "m.gguf", metadata, stored_names(state, special))
    assert transcode(source, tmp_path / "out", "fp32").exact
    assert_loads(transformers.GraniteMoeSharedForCausalLM, tmp_path / "out", state)
    written = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert (written.shared_intermediate_size, written.logits_scaling, written.residual_multiplier) == (shared, 8.0, 0.5)

"""Write small random models of any family that transformers knows, experts in any format of `checkpoint_formats.py`.

    python examples/bench/make_family.py FOLDER --family glm4_moe --format gptq [--attention]

transformers makes the model and names its tensors as they are published; then experts (with `--attention` also the
projections of attention) get random codes and scales. Same arguments, same bytes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from checkpoint_formats import FORMATS, Fill, Format, Tensor, any_bits, masked
from make_checkpoint import write_shard

if TYPE_CHECKING:
    import torch

#: What makes a model of any family small; every config takes what it knows.
SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "shared_expert_intermediate_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

_MLA: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
_MLA |= {"num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 256}
# As published: without it vLLM 0.32.0 on a CPU rotates otherwise than DeepSeek does.
_MLA |= {
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1}
    | {"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64}
}

_QWEN3_NEXT: dict[str, Any] = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 128}
_QWEN3_NEXT |= {"linear_value_head_dim": 128, "layer_types": ["linear_attention", "full_attention"]}
_SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}

#: Family to what it needs beyond that.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {},
    "qwen3_moe": {},
    "qwen3_next": _QWEN3_NEXT,
    "mixtral": {},
    "olmoe": {"num_key_value_heads": 4},
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
    "minimax_m2": {},
    "glm4_moe": {},
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "dots1": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_num_shared_experts": 1, "moe_layer_start_index": 0},
    "hunyuan_v1_moe": {"num_shared_expert": 1, "num_experts_per_tok": 2},
    "flex_olmo": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0}
    | {"mamba_d_state": 8, "mamba_dt_rank": 8, "use_mamba_kernels": False},
    "lfm2_moe": {"num_dense_layers": 0, "layer_types": ["conv", "full_attention"]},
    "afmoe": {"num_dense_layers": 0} | _SLIDING,
    "exaone_moe": {"sliding_window": 32, "sliding_window_pattern": 2},
    "solar_open": {},
    "qwen3_5_moe_text": _QWEN3_NEXT,
    "deepseek_v32": _MLA | {"index_n_heads": 2, "index_head_dim": 64, "index_topk": 8},
    "glm4_moe_lite": _MLA,
    "glm_moe_dsa": _MLA | {"index_n_heads": 2, "index_head_dim": 64, "index_topk": 8},
    "cohere2_moe": _SLIDING,
    "mimo_v2_flash": _SLIDING,
    "laguna": {},
    "nemotron_h": {"layers_block_type": ["moe", "attention"]},
    "mellum": {},
    "minimax": {},
    "hy_v3": {},
    "kolibri1": {},
}

#: Keys of published configs that transformers' class leaves out, since it knows no other value, and engines read.
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "kimi_k2": {"model_type": "kimi_k2", "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "minimax_m2": {"scoring_func": "sigmoid", "use_routing_bias": True},
    "phimoe": {"architectures": ["PhiMoEForCausalLM"]},
}


#: Exponents of gpt-oss' scales, and the gain of formats whose random codes are small: with both, experts change what a
#: model says.
_SCALES_OSS = masked("u1", 0x03, 0x78)  # 2^-7 to 2^-4
_GAIN = dict.fromkeys(("fp8-tensor", "fp8-channel", "fp8-block", "fp8-block-f32"), 16.0) | {"nvfp4": 8.0}


#: Families that are another one to transformers.
LIKE = {"kimi_k2": "deepseek_v3", "sdar_moe": "qwen3_moe"}


def family_config(model_type: str, **more: Any) -> Any:
    """Make a small config of the family; `more` are keys beside or instead of those that make it small."""
    from transformers import AutoConfig

    model_type = LIKE.get(model_type, model_type)
    known = type(AutoConfig.for_model(model_type))
    wanted = SMALL | FAMILIES.get(model_type, {}) | more
    return known(**{name: value for name, value in wanted.items() if _takes(known, name)})


def _takes(config: type, name: str) -> bool:
    """Whether a config class knows a key."""
    return name in getattr(config, "attribute_map", {}) or hasattr(config(), name)


def write_family(
    folder: Path,
    model_type: str,
    kind: str,
    *,
    attention: bool = False,
    act_order: bool = False,
    gain: float | None = None,
    draft: bool = False,
    seed: int = 0,
    **sizes: Any,
) -> None:
    """Write a checkpoint into `folder`, which is created.

    Args:
        folder: where to.
        model_type: a family that transformers knows.
        kind: format of the experts, a name of `FORMATS`; "mxfp4" for gpt_oss, which stacks its experts.
        attention: quantise the projections of attention as well.
        act_order: GPTQ: columns of down projections in activation order.
        gain: how much larger than usual the inputs of experts are [1, or what the format's codes need].
        draft: a layer for multi-token prediction behind the last one, in bf16, as GLM-4.5 and DeepSeek-V3 name it.
        seed: seed of all random values.
        sizes: keys of the config.
    """
    gain = _GAIN.get(kind, 1.0) if gain is None else gain
    plain = dict(_unstacked(_plain(model_type, seed, sizes)))
    wanted = [name for name in plain if _is_quantised(name, plain[name], attention=attention)]
    if draft:
        plain |= _draft(plain, seed)
    found: list[Tensor] = []
    for name, tensor in plain.items():
        if name not in wanted:
            found.append(_stored(name, tensor * gain if "post_attention" in name else tensor))
        elif FORMATS[kind].projection is None:
            found += _stacked(name, *tensor.shape)
        else:
            found += _projection(name.removesuffix(".weight"), tensor, FORMATS[kind], act_order=act_order)
    folder.mkdir(parents=True)
    write_shard(folder / "model.safetensors", found, seed, sparse=False)
    config = family_config(model_type, **sizes).to_dict()
    names = [name.removesuffix(".weight") for name in plain if name not in wanted and plain[name].dim() == 2]
    # The engine asks for the whole stack of a layer.
    names += sorted({name.partition(".experts.")[0] + ".experts" for name in names if ".experts." in name})
    config |= {"architectures": [_architecture(model_type)], "dtype": "bfloat16"}
    config |= PUBLISHED.get(model_type, {})
    if "head_dim" in sizes:  # published configs have it where transformers derives it
        config.setdefault("head_dim", sizes["head_dim"])
    if model_type == "minimax_m2":
        config["rotary_dim"] = config["head_dim"]
    config["quantization_config"] = _quantization(FORMATS[kind].config, names, act_order=act_order)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _plain(model_type: str, seed: int, sizes: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors of a random model of the family, under the names that it is published with."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(family_config(model_type, **sizes), dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        return load_file(Path(scratch) / "model.safetensors")


def _unstacked(plain: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Experts that Granite stacks one by one, as quantised checkpoints of it have them."""
    for name, tensor in plain.items():
        prefix, stack, projection = name.partition("block_sparse_moe.")
        if not stack or tensor.dim() < 3:
            yield name, tensor
            continue
        for number, one in enumerate(tensor):
            parts = one.chunk(2) if projection.startswith("input") else (one,)
            for role, part in zip(("gate", "up") if len(parts) == 2 else ("down",), parts, strict=True):
                yield f"{prefix}{stack}experts.{number}.{role}_proj.weight", part


def _draft(plain: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Repeat the last layer as an MTP layer, with the tensors that join a hidden state and the next token."""
    import torch

    number = max(int(name.split(".")[2]) for name in plain if name.startswith("model.layers."))
    last, prefix = f"model.layers.{number}.", f"model.layers.{number + 1}."
    norm, embedding = plain["model.norm.weight"], plain["model.embed_tokens.weight"]
    size = norm.numel()
    joined = torch.randn(size, 2 * size, generator=torch.Generator().manual_seed(seed)) / (2 * size) ** 0.5
    own = {"eh_proj.weight": joined.to(norm.dtype), "embed_tokens.weight": embedding}
    own |= {"shared_head.head.weight": plain["lm_head.weight"], "shared_head.norm.weight": norm}
    own |= {"enorm.weight": norm, "hnorm.weight": norm}
    layer = {name.removeprefix(last): tensor for name, tensor in plain.items() if name.startswith(last)}
    return {prefix + name: tensor for name, tensor in (layer | own).items()}


def _architecture(model_type: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found: str = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[LIKE.get(model_type, model_type)]
    return found


def _is_quantised(name: str, tensor: torch.Tensor, *, attention: bool) -> bool:
    if ".experts." in name:
        return tensor.dim() >= 2 and not name.endswith("bias")
    return attention and ".self_attn." in name and name.endswith("_proj.weight")


def _stored(name: str, tensor: torch.Tensor) -> Tensor:
    """Store a tensor as it is."""
    import torch

    data = tensor.contiguous().view(torch.uint8).flatten().numpy()
    dtype = {torch.bfloat16: "BF16", torch.float32: "F32"}[tensor.dtype]
    return Tensor(name, dtype, tuple(tensor.shape), lambda bits, start: data[start : start + bits.size])


def _projection(module: str, tensor: torch.Tensor, kind: Format, *, act_order: bool) -> Iterator[Tensor]:
    """Draw the parts of a projection."""
    assert kind.projection is not None
    n, k = tensor.shape
    for part in kind.projection(module, n, k):
        moved = act_order and part.name.endswith("g_idx") and ("down_proj" in module or ".w2" in module)
        yield replace(part, fill=_shuffled(part.fill)) if moved else part


def _shuffled(fill: Fill) -> Fill:
    """32-bit values in a random order. For tensors of one chunk."""

    def filled(bits: np.ndarray, start: int) -> np.ndarray:
        return np.random.default_rng(int(bits[0])).permutation(fill(bits, start).view("<i4"))

    return filled


def _stacked(name: str, experts: int, k: int, n: int) -> Iterator[Tensor]:
    """gpt-oss' stacked MXFP4; transformers holds it transposed."""
    yield Tensor(f"{name}_blocks", "U8", (experts, n, k // 32, 16), any_bits)
    yield Tensor(f"{name}_scales", "U8", (experts, n, k // 32), _SCALES_OSS)


def _quantization(config: dict[str, Any], plain: list[str], *, act_order: bool) -> dict[str, Any]:
    """Return the format's config, which names the modules that are not quantised."""
    method = config["quant_method"]
    if method == "gptq":
        return config | {"dynamic": {f"-:^{name}$".replace(".", "[.]"): {} for name in plain}, "desc_act": act_order}
    if method == "modelopt":  # whose patterns already leave these modules out
        return config
    return config | {"ignore" if method == "compressed-tensors" else "modules_to_not_convert": plain}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to create")
    parser.add_argument("--family", default="qwen3_moe", help="model_type of a transformers config [qwen3_moe]")
    parser.add_argument("--format", choices=FORMATS, default="gptq")
    parser.add_argument("--attention", action="store_true", help="attention quantised as well")
    parser.add_argument("--act-order", action="store_true", help="GPTQ: down projections in activation order")
    parser.add_argument("--draft", action="store_true", help="a layer for multi-token prediction behind the last one")
    parser.add_argument("--sizes", type=json.loads, default={}, help='keys of the config: {"hidden_size": 512}')
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write_family(
        options.folder,
        options.family,
        options.format,
        attention=options.attention,
        act_order=options.act_order,
        draft=options.draft,
        seed=options.seed,
        **options.sizes,
    )


if __name__ == "__main__":
    main()

"""Build and fill models of vLLM's new tree (`vllm/models`) with the plug-in, two layers each, as on an H100.

    python tests/engines/tree_models.py SITE [MODEL_TYPE ...]

SITE holds the unpacked wheel. In a process of its own: vLLM is imported as on a GPU that is not there, with tensors on
the CPU. Attention and vision towers are left out; they need the device. Prints a line of JSON for each model: the
expert layers that the plug-in filled, from a conversion (`converted`) and from its source (`direct`), whether their
bytes are those of the conversion, or the error.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench_scripts import checkpoint_formats
from safetensors.torch import load_file, save_file

import moeq
from moeq.deploy.gpus import parse_gpu
from vllm_tables import models, names

HIDDEN, INNER, EXPERTS, LAYERS = 256, 128, 4, 2
SMALL = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "vocab_size": 64}
SMALL |= {"num_experts_per_tok": 2, "moe_intermediate_size": INNER, "intermediate_size": 256}
GROUPED = {"num_key_value_heads": 2, "head_dim": 64}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 32}
LATENT |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32}
V4 = SMALL | {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_key_value_heads": 1, "head_dim": 64}
V4 |= {"qk_rope_head_dim": 32, "q_lora_rank": 64, "o_lora_rank": 64, "o_groups": 2, "sliding_window": 32}
V4 |= {"index_head_dim": 32, "index_n_heads": 4, "index_topk": 16, "scoring_func": "sqrtsoftplus"}
V4 |= {"norm_topk_prob": True, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hc_mult": 4, "hc_eps": 1e-6}
V4 |= {"hc_sinkhorn_iters": 3, "num_hash_layers": 0, "compress_ratios": [0, 4], "mlp_layer_types": ["moe", "moe"]}
V4 |= {"max_position_embeddings": 128, "rms_norm_eps": 1e-6, "hidden_act": "silu", "kv_source_layer_ids": [1]}
KIMI = SMALL | LATENT | {"num_experts": EXPERTS, "num_experts_per_token": 2, "num_shared_experts": 1}
KIMI |= {"first_k_dense_replace": 0, "moe_renormalize": True, "moe_router_activation_func": "sigmoid"}
KIMI |= {"routed_scaling_factor": 1.0, "mla_use_nope": True, "moe_layer_freq": 1, "use_grouped_topk": True}
KIMI |= {"num_expert_group": 1, "topk_group": 1, "hidden_act": "silu"}
KIMI |= {
    "linear_attn_config": {
        "full_attn_layers": [2],
        "kda_layers": [1],
        "head_dim": 64,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    }
}
SITU = {"hidden_act": "situ", "activation_situ_beta": 1.0, "activation_situ_linear_beta": 1.0}
_KIMI_ATTENTION = ("KimiK3DeltaAttention", "KimiLinearGatedDeltaNetAttention", "MultiHeadLatentAttention")


@dataclass(frozen=True)
class Family:
    """A model of the tree.

    Attributes:
        architecture: name of the class in the registry.
        config: what `config.json` holds beside the names.
        module: module below `vllm.models` that builds layers.
        left_out: names in it that stand for attention or a vision tower.
        layers: path of the layers in checkpoints.
        experts: path of the experts below a layer.
        names: gate, up and down.
    """

    architecture: str
    config: dict[str, Any]
    module: str
    left_out: tuple[str, ...]
    layers: str = "model.layers"
    experts: str = "mlp.experts"
    names: tuple[str, str, str] = field(default=("gate_proj", "up_proj", "down_proj"))


_W123 = ("w1", "w3", "w2")
FAMILIES = {
    "beam": Family(
        "BeamForCausalLM",
        SMALL | GROUPED | {"num_experts": EXPERTS, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
        "beam.nvidia.model",
        ("BeamAttention",),
    ),
    "deepseek_v4": Family(
        *("DeepseekV4ForCausalLM", V4, "deepseek_v4.nvidia.model", ("_select_dsv4_attn_cls",)),
        *("layers", "ffn.experts", _W123),
    ),
    "deepseek_v41": Family(
        *("DeepseekV41ForCausalLM", {"text_config": V4, "vision_config": {}}, "deepseek_v41.nvidia.model"),
        *(("_select_dsv4_attn_cls",), "layers", "ffn.experts", _W123),
    ),
    "flint": Family("FlintForCausalLM", SMALL | GROUPED | {"num_experts": EXPERTS}, "flint.model", ("FlintAttention",)),
    "glm5_next": Family(
        "Glm5NextForCausalLM",
        {
            "text_config": SMALL
            | LATENT
            | {"qk_rope_head_dim": 0, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 1}
            | {
                "topk_group": 1,
                "routed_scaling_factor": 1.0,
                "topk_method": "noaux_tc",
                "scoring_func": "sigmoid",
                "swiglu_limit": 10.0,
                "mhc": False,
                "mlp_layer_types": ["sparse", "sparse"],
            }
        },
        "glm5next.common.model",
        ("Glm5NextLinearAttention", "Glm5NextMLAAttention"),
    ),
    "hy_v4": Family(
        "HYV4ForCausalLM",
        SMALL
        | LATENT
        | {"num_experts": EXPERTS, "n_routed_experts": EXPERTS, "expert_hidden_dim": INNER, "route_norm": True}
        | {"num_shared_experts": 1},
        "hy_v4.nvidia.model",
        ("HYV4MLAAttention",),
    ),
    "inkling_model": Family(
        "InklingForCausalLM",
        SMALL
        | GROUPED
        | {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "dense_intermediate_size": 256, "dense_mlp_idx": 0}
        | {"intermediate_size": INNER, "gate_activation": "sigmoid", "norm_after_topk": True}
        | {"shared_expert_sink": True, "inference_moe_w13_interleaved": True, "local_layer_ids": [0]},
        "inkling.nvidia.model",
        ("InklingAttention",),
    ),
    "kimi_linear": Family(
        *("KimiLinearForCausalLM", KIMI, "kimi_k3.nvidia.model", _KIMI_ATTENTION, "model.layers"),
        *("block_sparse_moe.experts", _W123),
    ),
    "kimi_k3": Family(
        *("KimiK3ForConditionalGeneration", {"text_config": KIMI | SITU}, "kimi_k3.nvidia.model"),
        *(("MoonViT3dPretrainedModel", *_KIMI_ATTENTION), "language_model.model.layers"),
        *("block_sparse_moe.experts", _W123),
    ),
    "minimax_m3_vl": Family(
        "MiniMaxM3SparseForConditionalGeneration",
        {
            "text_config": SMALL
            | GROUPED
            | {"num_local_experts": EXPERTS, "intermediate_size": INNER, "n_shared_experts": 1}
            | {"scoring_func": "sigmoid", "moe_layer_freq": [1, 1], "routed_scaling_factor": 2.0}
            | {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0},
            "vision_config": {},
        },
        "minimax_m3.nvidia.model",
        ("MiniMaxVLVisionModel", "MiniMaxM3SparseAttention", "MiniMaxM3Attention"),
        "language_model.model.layers",
        "block_sparse_moe.experts",
        _W123,
    ),
    "qwen4_exp": Family(
        "Qwen4ExpForCausalLM",
        {
            "text_config": SMALL
            | GROUPED
            | {"num_experts": EXPERTS, "shared_expert_intermediate_size": INNER, "norm_topk_prob": True}
            | {"layer_types": ["linear_attention", "indexed_attention"], "output_gate_type": "silu", "hc_count": 2}
        },
        "qwen4_exp.nvidia.model",
        ("QwenGatedDeltaNetAttention", "Qwen3NextAttention", "Qwen4ExpQSAAttention"),
    ),
    "step5": Family(
        "Step5ForCausalLM",
        SMALL
        | {"num_attention_groups": 2, "head_dim": 64, "moe_num_experts": EXPERTS, "moe_top_k": 2, "use_moe": True}
        | {"share_expert_dim": INNER, "moe_layers_enum": "0,1", "sparse_config": {}, "use_moe_router_bias": True}
        | {"need_fp32_gate": True},
        "step5.nvidia.model",
        ("Step5Attention",),
        experts="moe.experts",
    ),
}


class Absent:
    """Whatever is asked of a module that was left out: false, empty, and callable."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent()

    def __call__(self, *values: Any, **named: Any) -> Any:
        return Absent()

    def __getitem__(self, index: Any) -> Any:
        return Absent()

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return False


class LeftOut(torch.nn.Module):
    """In the place of a module that needs the device."""

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return Absent()


def write_source(folder: Path, model_type: str, family: Family, quantization: dict[str, Any]) -> Path:
    """Write a checkpoint that holds experts only, in compressed-tensors int4."""
    folder.mkdir()
    document = {"architectures": [family.architecture], "model_type": model_type, "torch_dtype": "bfloat16"}
    document |= {**family.config, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(document))
    generator, tensors = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for name in family.names:
                n, k = (HIDDEN, INNER) if name == family.names[2] else (INNER, HIDDEN)
                module = f"{family.layers}.{layer}.{family.experts}.{expert}.{name}"
                codes = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32, generator=generator)
                scale = (torch.rand(n, k // 32, generator=generator) / 64 + 0.01).to(torch.bfloat16)
                tensors |= {f"{module}.weight_packed": codes, f"{module}.weight_scale": scale}
                tensors[f"{module}.weight_shape"] = torch.tensor([n, k])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def filled(folder: Path, converted: Path, scratch: Path, **options: Any) -> dict[str, bool]:
    """Build the engine's model, let it load the folder's tensors, and compare every expert layer that was filled."""
    from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.model_loader.utils import initialize_model

    made = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, **options)
    whole = VllmConfig(model_config=made, device_config=DeviceConfig(device="cpu"))
    found = {}
    with set_current_vllm_config(whole):
        names._one_rank(str(scratch))
        with torch.device("cpu"):
            model = initialize_model(whole)
        tensors = {name: one for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}
        model.load_weights(iter(tensors.items()))
        for name, layer in model.named_modules():
            if isinstance(layer, RoutedExperts) and hasattr(layer.quant_method, "entry"):
                layer.quant_method.process_weights_after_loading(layer)
                expected = moeq.load_experts(converted, layer.quant_method.entry.layer)
                pairs = ((layer.w13_weight, expected.w13.weight), (layer.w2_weight, expected.w2.weight))
                found[name] = all(torch.equal(one, other) for one, other in pairs)
    return found


def report(model_type: str) -> dict[str, Any]:
    """Try a conversion and its source."""
    family = FAMILIES[model_type]
    module: Any = importlib.import_module(f"vllm.models.{family.module}")
    for name in family.left_out:
        setattr(module, name, (lambda *values: LeftOut) if name.startswith("_select") else LeftOut)
    row: dict[str, Any] = {"model_type": model_type, "architecture": family.architecture}
    with tempfile.TemporaryDirectory() as path:
        scratch, int4 = Path(path), checkpoint_formats.FORMATS["ct-int4"].config
        source = write_source(scratch / "source", model_type, family, int4)
        moeq.convert(source, scratch / "out", moeq.Deployment(gpu=parse_gpu("H100")))
        row["loads in"] = moeq.open(scratch / "out").manifest.loads_in
        for way, folder, options in (
            ("converted", scratch / "out", {}),
            ("direct", source, {"quantization": "moeq"}),
        ):
            try:
                row[way] = filled(folder, scratch / "out", scratch, **options)
            except Exception as error:  # noqa: BLE001 - whatever the engine or the plug-in raises is the finding
                row[way] = f"{type(error).__name__}: {error}"[:300]
    return row


def main(site: str, *only: str) -> None:
    """Print a line for each family."""
    models.install(site)
    from moeq.engines.vllm import plugin

    plugin.register()
    for model_type in only or FAMILIES:
        print(json.dumps(report(model_type)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

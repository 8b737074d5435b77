"""Write a random checkpoint with the tensor names, shapes and config of a real model, of any number of layers.

    python examples/bench/make_checkpoint.py FOLDER --model qwen3-30b-a3b --format gptq [--layers N] [--experts N]

Values are random and seeded per tensor: the same seed gives the same bytes, however the tensors are spread over files.
Memory stays at a few megabytes whatever the size. Embeddings are cut in proportion to the layers (`--vocab` sets
them), so that experts make up the share of the bytes that they have in the real model. `--sparse` writes headers over
holes: a terabyte in a few megabytes of disk, for measuring what reads headers only.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from checkpoint_formats import FORMATS, SCALES_E8M0, WEIGHTS_BF16, Format, Projection, Tensor, any_bits

CHUNK = 8 << 20


@dataclass(frozen=True)
class Model:
    """Sizes and names of a real model.

    Attributes:
        config: its `config.json`, as far as it names shapes.
        attention: attention projection to `(n, k)`.
        experts: module of the experts within a layer.
        names: projections of an expert: gate, up, down.
        formats: formats that exist for it.
        router: name of the router within the module that holds the experts.
        dense: layers at the start without experts.
        shared: whether each MoE layer has a shared expert of the experts' size.
        biases: whether attention and router have biases, and attention sinks (gpt-oss).
    """

    config: dict[str, Any]
    attention: dict[str, tuple[int, int]]
    hidden: int
    intermediate: int
    num_experts: int
    layers: int
    vocab: int
    experts_key: str = "num_experts"
    experts: str = "mlp.experts"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    formats: tuple[str, ...] = (
        *("gptq", "awq", "ct-int4", "w8a8"),
        *("nvfp4", "fp8-tensor", "fp8-channel", "fp8-block", "fp8-block-f32", "mxfp8"),
    )
    dense: int = 0
    dense_intermediate: int = 0
    shared: bool = False
    router: str = "gate"
    biases: bool = False


def _attention(hidden: int, heads: int, kv_heads: int, size: int) -> dict[str, tuple[int, int]]:
    query, value = heads * size, kv_heads * size
    return {
        "q_proj": (query, hidden),
        "k_proj": (value, hidden),
        "v_proj": (value, hidden),
        "o_proj": (hidden, query),
    }


def _config(architecture: str, model_type: str, top_k: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "num_experts_per_tok": top_k,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **more,
    }


# Sizes: the models' own config.json on the Hub (Qwen/Qwen3-30B-A3B, openai/gpt-oss-120b and -20b,
# moonshotai/Kimi-K2-Thinking, mistralai/Mixtral-8x7B-v0.1).
_OSS = Model(
    _config("GptOssForCausalLM", "gpt_oss", 4, 64, 8, head_dim=64, swiglu_limit=7.0, experts_per_token=4),
    _attention(2880, 64, 8, 64),
    hidden=2880,
    intermediate=2880,
    num_experts=128,
    layers=36,
    vocab=201088,
    experts_key="num_local_experts",
    formats=("mxfp4",),
    router="router",
    biases=True,
)
_QWEN = Model(
    _config("Qwen3MoeForCausalLM", "qwen3_moe", 8, 32, 4, head_dim=128, decoder_sparse_step=1, mlp_only_layers=[]),
    _attention(2048, 32, 4, 128),
    hidden=2048,
    intermediate=768,
    num_experts=128,
    layers=48,
    vocab=151936,
)


def _small(model: Model, heads: int, hidden: int) -> Model:
    """Give a model few heads, of 64 numbers each; two of them have keys and values."""
    config = model.config | {"num_attention_heads": heads, "num_key_value_heads": 2, "head_dim": 64}
    return replace(model, config=config, attention=_attention(hidden, heads, 2, 64), hidden=hidden)


_TINY = {"layers": 4, "vocab": 512}
MODELS = {
    "qwen3-30b-a3b": _QWEN,
    # Qwen/Qwen3-Next-80B-A3B's experts in a model whose attention is Qwen3-MoE's.
    "qwen3-512-experts": replace(
        _QWEN, config=_QWEN.config | {"num_experts_per_tok": 10}, intermediate=512, num_experts=512
    ),
    "gpt-oss-120b": _OSS,
    "gpt-oss-20b": replace(_OSS, num_experts=32, layers=24),
    "kimi-k2": Model(
        _config("DeepseekV3ForCausalLM", "kimi_k2", 8, 64, 64, q_lora_rank=1536, kv_lora_rank=512)
        | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_layer_freq": 1}
        | {"first_k_dense_replace": 1, "n_shared_experts": 1},
        {
            "q_a_proj": (1536, 7168),
            "q_b_proj": (64 * 192, 1536),
            "kv_a_proj_with_mqa": (512 + 64, 7168),
            "kv_b_proj": (64 * 256, 512),
            "o_proj": (7168, 64 * 128),
        },
        hidden=7168,
        intermediate=2048,
        num_experts=384,
        layers=61,
        vocab=163840,
        experts_key="n_routed_experts",
        formats=("ct-int4", "gptq", "awq", "w8a8"),
        dense=1,
        dense_intermediate=18432,
        shared=True,
    ),
    "mixtral-8x7b": Model(
        _config("MixtralForCausalLM", "mixtral", 2, 32, 8),
        _attention(4096, 32, 8, 128),
        hidden=4096,
        intermediate=14336,
        num_experts=8,
        layers=32,
        vocab=32000,
        experts_key="num_local_experts",
        experts="block_sparse_moe.experts",
        names=("w1", "w3", "w2"),
    ),
    # No real models: small enough for tests, every size a multiple of what layouts want. The experts of `small` are
    # just large enough for the compiled packing loops.
    "tiny": replace(_small(_QWEN, 4, 256), intermediate=128, num_experts=8, **_TINY),
    "tiny-oss": replace(_small(_OSS, 4, 256), intermediate=256, num_experts=4, **_TINY),
    "small": replace(_small(_QWEN, 8, 512), intermediate=512, num_experts=4, **_TINY),
}


@dataclass(frozen=True)
class Size:
    """How much of the model is written; None means as in the real one (layers: one; vocabulary: in proportion)."""

    layers: int = 1
    experts: int | None = None
    vocab: int | None = None
    shard_bytes: int = 4 << 30

    def of(self, model: Model) -> Model:
        """Cut the model to this size; layers without experts at its start come on top of `layers`."""
        vocab = self.vocab or max(64, model.vocab * self.layers // (model.layers - model.dense) // 64 * 64)
        return replace(
            model, layers=self.layers + model.dense, num_experts=self.experts or model.num_experts, vocab=vocab
        )


def tensors(model: Model, kind: Format) -> Iterator[Tensor]:
    """All tensors in the order of the layers."""
    yield bf16("model.embed_tokens.weight", model.vocab, model.hidden)
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield bf16(f"{prefix}.{norm}.weight", model.hidden)
        for name, (n, k) in model.attention.items():
            yield bf16(f"{prefix}.self_attn.{name}.weight", n, k)
            if model.biases:
                yield bf16(f"{prefix}.self_attn.{name}.bias", n)
        if model.biases:
            yield bf16(f"{prefix}.self_attn.sinks", model.config["num_attention_heads"])
        if layer < model.dense:
            yield from mlp(f"{prefix}.mlp", model, model.dense_intermediate, plain)
            continue
        moe = f"{prefix}.{model.experts.rpartition('.')[0]}"
        yield bf16(f"{moe}.{model.router}.weight", model.num_experts, model.hidden)
        if model.biases:
            yield bf16(f"{moe}.{model.router}.bias", model.num_experts)
        if model.shared:
            yield from mlp(f"{moe}.shared_experts", model, model.intermediate, plain)
        if kind.projection is None:
            yield from stacked_mxfp4(f"{prefix}.{model.experts}", model)
            continue
        for expert in range(model.num_experts):
            yield from mlp(f"{prefix}.{model.experts}.{expert}", model, model.intermediate, kind.projection)
    yield bf16("model.norm.weight", model.hidden)
    yield bf16("lm_head.weight", model.vocab, model.hidden)


def bf16(name: str, *shape: int) -> Tensor:
    return Tensor(name, "BF16", shape, WEIGHTS_BF16)


def plain(name: str, n: int, k: int) -> Iterator[Tensor]:
    yield bf16(f"{name}.weight", n, k)


def mlp(prefix: str, model: Model, intermediate: int, projection: Projection) -> Iterator[Tensor]:
    gate, up, down = model.names
    yield from projection(f"{prefix}.{gate}", intermediate, model.hidden)
    yield from projection(f"{prefix}.{up}", intermediate, model.hidden)
    yield from projection(f"{prefix}.{down}", model.hidden, intermediate)


def stacked_mxfp4(prefix: str, model: Model) -> Iterator[Tensor]:
    """gpt-oss: all experts of a layer in one tensor, rows of gate and up alternating."""
    for name, n, k in (
        ("gate_up_proj", 2 * model.intermediate, model.hidden),
        ("down_proj", model.hidden, model.intermediate),
    ):
        yield Tensor(f"{prefix}.{name}_blocks", "U8", (model.num_experts, n, k // 32, 16), any_bits)
        yield Tensor(f"{prefix}.{name}_scales", "U8", (model.num_experts, n, k // 32), SCALES_E8M0)
        yield bf16(f"{prefix}.{name}_bias", model.num_experts, n)


def shards(found: Iterable[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Consecutive tensors in files of at most `limit` bytes, or of one tensor."""
    group: list[Tensor] = []
    size = 0
    for tensor in found:
        if group and size + tensor.nbytes > limit:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += tensor.nbytes
    yield group


def write_shard(path: Path, group: list[Tensor], seed: int, *, sparse: bool) -> None:
    """One safetensors file: header first, then tensor by tensor, chunk by chunk."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in group:
        offsets = [offset, offset + tensor.nbytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
        offset += tensor.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        if sparse:
            file.truncate(8 + len(raw) + offset)
            return
        for tensor in group:
            write_values(file, tensor, seed)


def write_values(file: BinaryIO, tensor: Tensor, seed: int) -> None:
    generator = np.random.SFC64(np.random.SeedSequence([seed, zlib.crc32(tensor.name.encode())]))
    for start in range(0, tensor.nbytes, CHUNK):
        count = min(CHUNK, tensor.nbytes - start)
        bits = generator.random_raw(-(-count // 8)).view(np.uint8)[:count]
        file.write(tensor.fill(bits, start).data)


def unquantised(model: Model) -> list[str]:
    """Return the full names of all linear modules that are no routed experts."""
    names = ["lm_head"]
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}"
        moe = f"{prefix}.{model.experts.rpartition('.')[0]}"
        dense = f"{prefix}.mlp" if layer < model.dense else f"{moe}.shared_experts" if model.shared else None
        names += [f"{prefix}.self_attn.{name}" for name in model.attention]
        names += [f"{dense}.{name}" for name in model.names] if dense else []
        names += [f"{moe}.{model.router}"]
    return names


def config_of(model: Model, kind: Format) -> dict[str, Any]:
    quantization = dict(kind.config)
    if quantization["quant_method"] == "fp8":  # vLLM compares whole names here, and parts of names elsewhere
        quantization["modules_to_not_convert"] = unquantised(model)
    return model.config | {
        "hidden_size": model.hidden,
        "intermediate_size": model.dense_intermediate or model.intermediate,
        **({} if model.experts_key == "num_local_experts" else {"moe_intermediate_size": model.intermediate}),
        model.experts_key: model.num_experts,
        "num_hidden_layers": model.layers,
        "vocab_size": model.vocab,
        "quantization_config": quantization,
    }


def write_checkpoint(
    folder: Path, model: Model, kind: str, size: Size | None = None, *, seed: int = 0, sparse: bool = False
) -> int:
    """Write a checkpoint into `folder`, which is created; its bytes of tensor data.

    Raises:
        ValueError: the model does not exist in that format.
    """
    size = size or Size()
    cut = size.of(model)
    if kind not in cut.formats:
        raise ValueError(f"{model.config['model_type']} is written as {' or '.join(cut.formats)}, not as {kind}")
    folder.mkdir(parents=True, exist_ok=True)
    groups = list(shards(tensors(cut, FORMATS[kind]), size.shard_bytes))
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_shard(folder / name, group, seed, sparse=sparse)
        weight_map |= dict.fromkeys((tensor.name for tensor in group), name)
    total = sum(tensor.nbytes for group in groups for tensor in group)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config_of(cut, FORMATS[kind]), indent=1))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to create")
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b-a3b")
    parser.add_argument("--format", choices=FORMATS, help="[the first that the model comes in]")
    parser.add_argument("--layers", type=int, default=1, help="layers with experts [1]")
    parser.add_argument("--experts", type=int, help="experts per layer [as the model]")
    parser.add_argument("--vocab", type=int, help="vocabulary [the model's, in proportion to the layers]")
    parser.add_argument("--shard-gib", type=float, default=4.0, help="size of the files [4]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sparse", action="store_true", help="holes instead of values")
    options = parser.parse_args()
    size = Size(options.layers, options.experts, options.vocab, int(options.shard_gib * 2**30))
    model = MODELS[options.model]
    kind = options.format or model.formats[0]
    try:
        total = write_checkpoint(options.folder, model, kind, size, seed=options.seed, sparse=options.sparse)
    except ValueError as error:
        parser.error(str(error))
    print(f"{options.folder}: {options.model} as {kind}, {total / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()

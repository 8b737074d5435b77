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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

WIDTHS = {"I32": 4, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I8": 1, "U8": 1, "F8_E4M3": 1}
CHUNK = 8 << 20

#: Gives the bytes of a tensor, one chunk at a time: `(random bits of that many bytes, first byte) -> bytes`.
Fill = Callable[[np.ndarray, int], np.ndarray]


@dataclass(frozen=True)
class Tensor:
    """A tensor to write; `fill` turns random bits into its values."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fill: Fill

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * WIDTHS[self.dtype]


def any_bits(bits: np.ndarray, start: int) -> np.ndarray:
    """Packed codes, int8 weights: every bit pattern is a value."""
    return bits


def masked(dtype: str, random: int, fixed: int) -> Fill:
    """Numbers whose exponent is fixed, so that none is infinite, tiny or not a number."""
    return lambda bits, start: (bits.view(dtype) & dtype_of(dtype, random)) | dtype_of(dtype, fixed)


def dtype_of(dtype: str, value: int) -> np.generic:
    return np.dtype(dtype).type(value)


SCALES_F16 = masked("<u2", 0x03FF, 0x2000)  # 2^-7 to 2^-6
SCALES_BF16 = masked("<u2", 0x007F, 0x3C00)  # 2^-7 to 2^-6
SCALES_E4M3 = masked("u1", 0x1F, 0x30)  # 2^-1 to 2^3
CODES_E4M3 = masked("u1", 0xBF, 0x00)  # up to 1.875, no NaN
SCALES_E8M0 = masked("u1", 0x07, 0x70)  # 2^-15 to 2^-8
SCALES_MXFP8 = masked("u1", 0x07, 0x78)  # 2^-7 to 1
WEIGHTS_BF16 = masked("<u2", 0x807F, 0x3C00)


def constant(value: int, dtype: str = "<u4") -> Fill:
    return lambda bits, start: np.full(bits.size // np.dtype(dtype).itemsize, value, dtype)


def group_index(group: int) -> Fill:
    return lambda bits, start: np.arange(start // 4, (start + bits.size) // 4, dtype="<i4") // group


def sizes(n: int, k: int) -> Fill:
    return lambda bits, start: np.array([n, k], "<i8")


def gptq(name: str, n: int, k: int) -> Iterator[Tensor]:
    """GPTQ int4 groups of 128, symmetric: zero points are 8, stored minus one."""
    groups = ceil(k / 128)
    yield Tensor(f"{name}.qweight", "I32", (k // 8, n), any_bits)
    yield Tensor(f"{name}.qzeros", "I32", (groups, n // 8), constant(0x77777777))
    yield Tensor(f"{name}.scales", "F16", (groups, n), SCALES_F16)
    yield Tensor(f"{name}.g_idx", "I32", (k,), group_index(128))


def awq(name: str, n: int, k: int) -> Iterator[Tensor]:
    """AWQ int4 groups of 128, with zero points."""
    groups = ceil(k / 128)
    yield Tensor(f"{name}.qweight", "I32", (k, n // 8), any_bits)
    yield Tensor(f"{name}.qzeros", "I32", (groups, n // 8), any_bits)
    yield Tensor(f"{name}.scales", "F16", (groups, n), SCALES_F16)


def ct_int4(name: str, n: int, k: int) -> Iterator[Tensor]:
    """compressed-tensors pack-quantized int4, groups of 32, as Kimi-K2-Thinking stores its experts."""
    yield Tensor(f"{name}.weight_packed", "I32", (n, k // 8), any_bits)
    yield Tensor(f"{name}.weight_scale", "BF16", (n, k // 32), SCALES_BF16)
    yield Tensor(f"{name}.weight_shape", "I64", (2,), sizes(n, k))


def w8a8(name: str, n: int, k: int) -> Iterator[Tensor]:
    """compressed-tensors int8, one scale per channel."""
    yield Tensor(f"{name}.weight", "I8", (n, k), any_bits)
    yield Tensor(f"{name}.weight_scale", "BF16", (n, 1), SCALES_BF16)


def nvfp4(name: str, n: int, k: int) -> Iterator[Tensor]:
    """ModelOpt's NVFP4, weights only."""
    yield Tensor(f"{name}.weight", "U8", (n, k // 2), any_bits)
    yield Tensor(f"{name}.weight_scale", "F8_E4M3", (n, k // 16), SCALES_E4M3)
    yield Tensor(f"{name}.weight_scale_2", "F32", (), constant(0x3B800000))  # 2^-8


def fp8_tensor(name: str, n: int, k: int) -> Iterator[Tensor]:
    """compressed-tensors FP8, one scale per tensor."""
    yield Tensor(f"{name}.weight", "F8_E4M3", (n, k), CODES_E4M3)
    yield Tensor(f"{name}.weight_scale", "BF16", (1,), SCALES_BF16)


def fp8_channel(name: str, n: int, k: int) -> Iterator[Tensor]:
    """compressed-tensors FP8, one scale per channel."""
    yield Tensor(f"{name}.weight", "F8_E4M3", (n, k), CODES_E4M3)
    yield Tensor(f"{name}.weight_scale", "BF16", (n, 1), SCALES_BF16)


def fp8_block(name: str, n: int, k: int) -> Iterator[Tensor]:
    """Blocks of 128 x 128 with bfloat16 scales, as Qwen stores them."""
    yield Tensor(f"{name}.weight", "F8_E4M3", (n, k), CODES_E4M3)
    yield Tensor(f"{name}.weight_scale_inv", "BF16", (ceil(n / 128), ceil(k / 128)), SCALES_BF16)


def mxfp8(name: str, n: int, k: int) -> Iterator[Tensor]:
    """ModelOpt's MXFP8."""
    yield Tensor(f"{name}.weight", "F8_E4M3", (n, k), CODES_E4M3)
    yield Tensor(f"{name}.weight_scale", "U8", (n, k // 32), SCALES_MXFP8)


#: Tensors of one projection: `(module, n, k)`.
Projection = Callable[[str, int, int], Iterator[Tensor]]


def _ct(scheme: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    weights = {"type": "int", "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": weights, **more}
    ignore = [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*gate$",
        "re:.*shared_experts.*",
        "re:.*layers[.]0[.]mlp[.](gate|up|down)_proj$",
    ]
    return {
        "quant_method": "compressed-tensors",
        "format": scheme,
        "ignore": ignore,
        "config_groups": {"group_0": group},
    }


@dataclass(frozen=True)
class Format:
    """How experts are stored: the tensors of one projection (None: stacked), and what the config says about them."""

    projection: Projection | None
    config: dict[str, Any]


_PLAIN = ["self_attn", "mlp.gate", "moe.gate", "shared_experts", "lm_head"]
_PLAIN_PATTERNS = ["lm_head", "*self_attn*", "*mlp.gate*", "*moe.gate*", "*shared_experts*"]

_FP8_TOKENS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
_INT8_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}

FORMATS = {
    "gptq": Format(
        gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
        | {"checkpoint_format": "gptq"},
    ),
    "awq": Format(
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
        | {"modules_to_not_convert": ["self_attn", "mlp.gate", "moe.gate", "shared_experts", "lm_head"]},
    ),
    "ct-int4": Format(ct_int4, _ct("pack-quantized", {"num_bits": 4, "group_size": 32, "strategy": "group"})),
    "w8a8": Format(w8a8, _ct("int-quantized", {"num_bits": 8, "strategy": "channel"}, input_activations=_INT8_TOKENS)),
    "nvfp4": Format(
        nvfp4,
        {"quant_method": "modelopt", "quant_algo": "NVFP4_W4A16", "group_size": 16}
        | {"exclude_modules": _PLAIN_PATTERNS},
    ),
    "fp8-tensor": Format(
        fp8_tensor,
        _ct(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "tensor"},
            input_activations={**_FP8_TOKENS, "strategy": "tensor"},
        ),
    ),
    "fp8-channel": Format(
        fp8_channel,
        _ct("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, input_activations=_FP8_TOKENS),
    ),
    "fp8-block": Format(
        fp8_block,
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        | {"modules_to_not_convert": _PLAIN},
    ),
    "mxfp8": Format(
        mxfp8,
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 32} | {"exclude_modules": _PLAIN_PATTERNS},
    ),
    "mxfp4": Format(
        None,
        {"quant_method": "mxfp4"}
        | {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]},
    ),
}


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
        *("nvfp4", "fp8-tensor", "fp8-channel", "fp8-block", "mxfp8"),
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
    "tiny": replace(_QWEN, attention=_attention(256, 4, 2, 64), hidden=256, intermediate=128, num_experts=8, **_TINY),
    "tiny-oss": replace(
        _OSS, attention=_attention(256, 4, 2, 64), hidden=256, intermediate=256, num_experts=4, **_TINY
    ),
    "small": replace(_QWEN, attention=_attention(512, 8, 2, 64), hidden=512, intermediate=512, num_experts=4, **_TINY),
}


@dataclass(frozen=True)
class Size:
    """How much of the model is written; None means as in the real one (layers: one; vocabulary: in proportion)."""

    layers: int = 1
    experts: int | None = None
    vocab: int | None = None
    shard_bytes: int = 4 << 30

    def of(self, model: Model) -> Model:
        """The model cut to this size. Layers without experts at its start come on top of `layers`."""
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


def config_of(model: Model, kind: Format) -> dict[str, Any]:
    return model.config | {
        "hidden_size": model.hidden,
        "intermediate_size": model.dense_intermediate or model.intermediate,
        **({} if model.experts_key == "num_local_experts" else {"moe_intermediate_size": model.intermediate}),
        model.experts_key: model.num_experts,
        "num_hidden_layers": model.layers,
        "vocab_size": model.vocab,
        "quantization_config": kind.config,
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

"""Random deployments: everything follows from the seed. Their quantisation configs are made in `configs.py`.

A world is a device with optional packages and variables; a case is one layer, deployment and checkpoint config on it.
Both are plain dicts, since the engine's side reads them in another Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from oracle.differential.configs import FAMILIES, OPTION_FAMILIES, Row
from oracle.differential.dialects import DIALECTS, PREFIXES

_CUDA = ((7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
_GFX = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201", "gfx1250")
DEVICES: tuple[Row, ...] = (
    *({"kind": "cuda", "cap": list(capability)} for capability in _CUDA),
    *({"kind": "rocm", "gcn": gcn} for gcn in _GFX),
    {"kind": "xpu"},
    {"kind": "cpu", "arch": "x86", "amx": True},
    {"kind": "cpu", "arch": "x86", "amx": False},
    {"kind": "cpu", "arch": "x86", "amx": False, "zen": True},
    {"kind": "cpu", "arch": "arm", "amx": False},
    {"kind": "cpu", "arch": "power", "amx": False},
)

# hidden, intermediate, experts, top-k, activation, routing, model type: layers of published models
MODELS = (
    (2048, 768, 128, 8, "silu", "RenormalizeNaive", "qwen3_moe"),
    (4096, 1536, 128, 8, "silu", "RenormalizeNaive", "qwen3_moe"),
    (2048, 512, 512, 10, "silu", "RenormalizeNaive", "qwen3_next"),
    (4096, 14336, 8, 2, "silu", "RenormalizeNaive", "mixtral"),
    (2048, 1408, 64, 6, "silu", "Default", "deepseek_v2"),
    (7168, 2048, 256, 8, "silu", "DeepSeekV3", "deepseek_v3"),
    (7168, 2048, 384, 8, "silu", "DeepSeekV3", "kimi_k2"),
    (4096, 1408, 128, 8, "silu", "DeepSeekV3", "glm4_moe"),
    (3072, 1536, 256, 8, "silu", "MiniMax2", "minimax_m2"),
    (4096, 6400, 16, 2, "silu", "Custom", "phimoe"),
    (5120, 8192, 16, 1, "silu", "Llama4", "llama4"),
    (2688, 1856, 128, 6, "relu2_no_mul", "DeepSeekV3", "nemotron_h"),
    (4096, 2048, 256, 6, "silu", "DeepseekV4", "other"),
    (2048, 1024, 64, 8, "silu", "Default", "olmoe"),
    (1536, 512, 40, 8, "silu", "Renormalize", "granitemoe"),
    (2560, 1280, 64, 6, "silu", "Default", "ernie4_5_moe"),
    (2880, 2880, 32, 4, "swigluoai", "Renormalize", "other"),
    (7168, 3072, 384, 8, "situ", "DeepSeekV3", "kimi_k3"),
    (2048, 768, 128, 8, "gelu_tanh", "Renormalize", "gemma4"),
)
ACTIVATIONS = [
    "silu",
    "gelu",
    "gelu_tanh",
    "relu2",
    "swigluoai",
    "swigluoai_uninterleave",
    "situ",
    "swiglustep",
    "silu_no_mul",
    "gelu_no_mul",
    "gelu_tanh_no_mul",
    "relu2_no_mul",
]
ROUTINGS = [
    "Default",
    "Renormalize",
    "RenormalizeNaive",
    "DeepSeekV3",
    "Llama4",
    "TopK",
    "SigmoidRenorm",
    "MiniMax2",
    "Sigmoid",
    "Unspecified",
    "DeepseekV4",
    "Custom",
    "Simulated",
]
OVERRIDES = [
    "triton",
    "batched_triton",
    "deep_gemm",
    "deep_gemm_mega_moe",
    "cutlass",
    "flashinfer_trtllm",
    "flashinfer_cutlass",
    "flashinfer_cutedsl",
    "flashinfer_moe_ep_cutedsl",
    "flashinfer_b12x",
    "b12x",
    "flashinfer_moe_ep_mega_deep_gemm",
    "marlin",
    "humming",
    "triton_unfused",
    "aiter",
    "aiter_mega_moe",
    "aiter_triton_mxfp4_bf16",
    "aiter_triton_mxfp4_mxfp4",
    "flydsl",
    "hpc",
    "emulation",
    "rdna3",
]
COMMON_OVERRIDES = (
    "triton",
    "marlin",
    "humming",
    "flashinfer_trtllm",
    "flashinfer_cutlass",
    "emulation",
    "aiter",
    "cutlass",
)
ALL2ALL = [
    "allgather_reducescatter",
    "deepep_high_throughput",
    "deepep_low_latency",
    "deepep_v2",
    "mori_high_throughput",
    "mori_low_latency",
    "moonep",
    "nixl_ep",
    "flashinfer_nvlink_two_sided",
    "flashinfer_nvlink_one_sided",
]

_VARIABLES: dict[str, dict[str, tuple[str, ...]]] = {
    "cuda": {
        "VLLM_BATCH_INVARIANT": ("1", "0"),
        "VLLM_USE_FLASHINFER_MOE_INT4": ("1",),
        "VLLM_HUMMING_MOE_GEMM_TYPE": ("indexed", "grouped", "grouped_contiguous", "grouped_masked", "auto"),
        "VLLM_MARLIN_INPUT_DTYPE": ("int8", "fp8"),
        "VLLM_USE_DEEP_GEMM": ("0", "1"),
        "VLLM_MOE_USE_DEEP_GEMM": ("0", "1"),
        "VLLM_B12X_MOE_FP4_FORCE_A16": ("1",),
    },
    "rocm": {
        "VLLM_BATCH_INVARIANT": ("1",),
        "VLLM_ROCM_USE_AITER": ("1", "1", "1", "0"),
        "VLLM_ROCM_USE_AITER_MOE": ("0", "1"),
    },
    "xpu": {"VLLM_BATCH_INVARIANT": ("1",), "VLLM_USE_DEEP_GEMM": ("0",)},
    "cpu": {"VLLM_CPU_INT4_W4A8": ("0", "1"), "VLLM_BATCH_INVARIANT": ("1",)},
}
_PACKAGES = {
    "cuda": ("flashinfer", "triton_kernels", "deep_gemm", "humming", "quark", "hpc", "b12x"),
    "rocm": ("aiter", "aiter", "triton_kernels", "quark", "flydsl"),
    "xpu": ("triton_kernels", "quark"),
    "cpu": (),
}
_SHIPPED = ("flashinfer", "triton_kernels", "deep_gemm", "humming")


def worlds(rng: Random, device: Row, extra: int) -> Iterator[Row]:
    """The default world of a device, and some with other packages and variables."""
    yield {**device, "flags": {}, "env": {}, "plain": True}
    kind = device["kind"]
    for _ in range(extra):
        flags: dict[str, bool] = {}
        for name in _PACKAGES[kind]:
            if rng.random() < 0.35:
                chance = name == "triton_kernels" and kind != "cuda"
                flags[name] = rng.random() < 0.5 if chance else not (name in _SHIPPED and kind == "cuda")
        env = {name: rng.choice(values) for name, values in _VARIABLES[kind].items() if rng.random() < 0.25}
        if kind == "rocm" and flags.get("aiter") and rng.random() < 0.8:
            env["VLLM_ROCM_USE_AITER"] = "1"
        yield {**device, "flags": flags, "env": env, "plain": False}


def _layer(rng: Random) -> Row:
    hidden, inter, experts, topk, act, routing, model = rng.choice(MODELS)
    roll = rng.random()
    if roll < 0.2:
        step = rng.choice((8, 16, 32, 64, 96, 128, 160, 256))
        inter = step * rng.randint(1, max(1, 3072 // step))
    if 0.15 < roll < 0.3:
        step = rng.choice((16, 32, 64, 128, 256, 512))
        hidden = step * rng.randint(max(1, 512 // step), 6144 // step)
    if rng.random() < 0.06:
        experts = rng.choice((992, 993, 1000, 1024, 2048, 2056, 4096, 4, 60, 7))
    if rng.random() < 0.12:
        act = rng.choice(ACTIVATIONS)
    if rng.random() < 0.12:
        routing = rng.choice(ROUTINGS)
    return {
        "hidden": hidden,
        "inter": inter,
        "experts": experts,
        "topk": 1 if rng.random() < 0.05 else topk,
        "act": act,
        "routing": routing,
        "model_type": model,
        "router_fp32": rng.random() < 0.12,
        "hash_routing": rng.random() < 0.02,
        "bias": rng.random() < (0.5 if act.startswith("swigluoai") else 0.05),
        "swiglu_limit": rng.choice((7.0, 10.0)) if rng.random() < 0.06 else None,
    }


def _deployment(rng: Random, world: Row) -> Row:
    old = world["kind"] == "cuda" and world["cap"][0] < 8
    usual, other = ("fp16", "bf16") if old else ("bf16", "fp16")
    roll = rng.random()
    override = rng.choice(COMMON_OVERRIDES) if roll < 0.18 else rng.choice(OVERRIDES) if roll < 0.28 else "auto"
    return {
        "tp": rng.choice((1, 1, 1, 2, 4, 8)), "dp": rng.choice((1, 1, 1, 1, 2, 4, 8)), "ep": rng.random() < 0.4,
        "a2a": rng.choice(ALL2ALL) if rng.random() < 0.5 else "allgather_reducescatter", "eplb": rng.random() < 0.08,
        "lora": rng.random() < 0.1, "dtype": usual if rng.random() < 0.9 else other, "override": override,
    }  # fmt: skip


def case(rng: Random, number: int, world: Row, *, options: bool = False) -> Row:
    """One case on a world; with `options`, one about the value of `--quantization`."""
    families = OPTION_FAMILIES if options else FAMILIES
    family = rng.choices(list(families), [weight for _, weight in families.values()])[0]
    row: Row = {
        "id": number,
        "family": family,
        "prefix": "model.layers.0.mlp.experts",
        **_layer(rng),
        **_deployment(rng, world),
    }
    row["entry"], row["qcfg"], row["user_quant"] = families[family][0](rng)
    if family == "gpt-oss":
        row["model_type"] = "gpt_oss"
        if rng.random() < 0.85:
            row.update(hidden=2880, inter=2880, experts=rng.choice((32, 128)), topk=4, act="swigluoai", bias=True)
            row.update(routing="Renormalize", swiglu_limit=None)
    return row


#: Values of variables as people set them.
_SPELLINGS = (*("1", " 1", "01", "2", "0", "00") * 2, "", "true", "True", "TRUE", "yes", "on", "false", "off", "1.0")
_SPELLED = {
    "cuda": (*_VARIABLES["cuda"], "VLLM_DEEPEPLL_NVFP4_DISPATCH"),
    "xpu": ("VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM", "VLLM_BATCH_INVARIANT"),
    "rocm": ("VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MOE", "VLLM_BATCH_INVARIANT"),
    "cpu": ("VLLM_CPU_INT4_W4A8", "VLLM_BATCH_INVARIANT"),
}


def _ranks(rng: Random, row: Row) -> Row:
    """More of the ranks: prefill-context parallelism, more ranks than experts, redundant experts."""
    more: Row = {"pcp": rng.choice((1,) * 12 + (2, 4)), "redundant": 0}
    if rng.random() < 0.05:
        more.update(experts=rng.choice((4, 6, 8, 16)), topk=2, ep=True, tp=rng.choice((4, 8)), dp=rng.choice((1, 2, 4)))
    if rng.random() < 0.12:
        more.update(eplb=rng.random() < 0.85, redundant=rng.choice((0, 1, 8, 16, 32, 64, 256, 1024)))
        more["ep"] = rng.random() < 0.8
    return {**row, **more}


def dialect(rng: Random, number: int, world: Row) -> Row:
    """One case in the dialect of an exporter, on a deployment of which more is drawn."""
    family = rng.choices(list(DIALECTS), [weight for _, weight in DIALECTS.values()])[0]
    row: Row = {
        "id": number,
        "family": family,
        "prefix": rng.choice(PREFIXES),
        **_layer(rng),
        **_deployment(rng, world),
    }
    row = _ranks(rng, row)
    row["entry"], row["qcfg"], row["user_quant"] = DIALECTS[family][0](rng, row["prefix"])
    if family == "deepseek-v4":
        row["model_type"] = rng.choice(("deepseek_v4",) * 4 + ("deepseek_v4_text", "deepseek_v41", "deepseek_v3"))
        row["expert_dtype"] = rng.choice(("", "fp4", "fp8", "fp8", "bf16"))
    return row


def jobs(
    seed: int | str, per_world: int, extra_worlds: int, *, options: bool = False, dialects: bool = False
) -> Iterator[tuple[Row, list[Row]]]:
    """`(world, cases)` of every device's default world and its extra ones; `dialects` draws from `dialects.py`."""
    number = 0
    for index, device in enumerate(DEVICES):
        rng = Random(f"{seed}/{index}")
        for world in worlds(rng, device, extra_worlds):
            if dialects:
                if not world["plain"] and rng.random() < 0.3:
                    world["env"][rng.choice(_SPELLED[world["kind"]])] = rng.choice(_SPELLINGS)
                cases = [dialect(rng, number + offset, world) for offset in range(per_world)]
            else:
                cases = [case(rng, number + offset, world, options=options) for offset in range(per_world)]
            number += per_world
            yield world, cases

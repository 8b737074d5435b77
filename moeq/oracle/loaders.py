"""Which loaders take a converted layer, decided before anything is written. Needs no torch and no engine.

The tables repeat what each loader accepts (`moeq.engines`, `moeq.load`). Tests compare them with the engines' own code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moeq.layouts.readers import VLLM_VERSIONS
from moeq.layouts.registry import layout_class
from moeq.oracle.engines.vllm.facts import versions_with

#: Model types whose FP8 layers vLLM reads with the model's own config class (`DeepseekV4FP8Config`) instead of the one
#: that the checkpoint names: the plug-in would give them plain FP8.
VLLM_OWN_FP8 = ("deepseek_v4", "deepseek_v4_text", "deepseek_v41", "deepseek_v41_text")
#: SGLang versions that the plug-in was written against (`moeq.engines.sglang.plugin`).
SGLANG_VERSIONS = ("0.5.23",)
#: Architectures whose class in SGLang 0.5.23 was built and filled from a conversion on a CPU. Such a class passes the
#: layer's number to `FusedMoE`, by which the plug-in recognises the experts.
SGLANG_MODELS = (
    *("Cohere2MoeForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM"),
    *("Dots1ForCausalLM", "Ernie4_5_MoeForCausalLM", "ExaoneMoeForCausalLM", "Glm4MoeForCausalLM"),
    *("Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM", "GptOssForCausalLM", "HYV3ForCausalLM"),
    *("HunYuanMoEV1ForCausalLM", "Lfm2MoeForCausalLM", "MellumForCausalLM", "MiMoV2FlashForCausalLM"),
    *("MiniMaxM2ForCausalLM", "MixtralForCausalLM", "NemotronHForCausalLM", "OlmoeForCausalLM", "PhiMoEForCausalLM"),
    *("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM"),
    *("SDARMoeForCausalLM", "SolarOpenForCausalLM"),
)
#: Values of `quant_method` that SGLang reads on CUDA, and the formats of linear layers that it reads with them.
SGLANG_METHODS = ("awq", "compressed-tensors", "fp8", "gptq", "mxfp4")
SGLANG_LINEAR = ("awq", "ct-int8", "ct-pack", "gptq")
#: Formats whose q_a and kv_a SGLang's DeepSeek class can join to one layer. It joins AWQ's tensors by columns and all
#: others by rows, which fails for GPTQ's tensors and for the `weight_shape` of compressed-tensors.
SGLANG_JOINED = ("awq", "ct-int8")
#: Bits and group sizes of symmetric GPTQ that SGLang reads: `GPTQMarlinConfig.TYPE_MAP` and
#: `MARLIN_SUPPORTED_GROUP_SIZES`.
SGLANG_GPTQ: tuple[tuple[int, ...], tuple[int, ...]] = ((4, 8), (-1, 32, 64, 128))
#: Model type that the transformers loader was run with -> oldest version of transformers for it. The loader also takes
#: other models that use the experts interface.
TRANSFORMERS_MODELS = dict.fromkeys(("mixtral", "qwen3_moe", "gpt_oss"), "5.1") | dict.fromkeys(
    (
        *("afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe"),
        *("flex_olmo", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hunyuan_v1_moe", "hy_v3", "jamba", "kolibri1"),
        *("laguna", "lfm2_moe", "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "nemotron_h", "olmoe", "phimoe"),
        *("qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "solar_open"),
    ),
    "5.23",
)
#: Experts implementation that `config.json` of a conversion asks for; importing the loader registers it. Without the
#: import, transformers stops and prints this name; otherwise it would give the experts random weights and only warn.
TRANSFORMERS_GUARD = "moeq (import moeq.engines.transformers before loading)"
#: Oldest transformers that works; there is no newest one. 5.0 reads the number of experts of a Qwen3-MoE only from
#: `num_experts`, which configs by later versions lack. transformers 4 does not convert weights while loading.
TRANSFORMERS_OLDEST = "5.1"


@dataclass(frozen=True)
class Loader:
    """A loader of converted checkpoints."""

    name: str  #: `vllm`, `sglang`, `transformers` or `load_experts`
    title: str  #: name for people, with versions


@dataclass(frozen=True)
class PlannedLayer:
    """Facts about a layer that loaders look at."""

    layout: str
    model_type: str  #: `model_type` on the top level of the config, even where the language model is a part
    architecture: str  #: name of the model's class
    activation: str
    dtype: str
    platform: str
    tp: int  #: ranks that share an expert
    by_rank: bool  #: whether files hold one packing per rank
    own_kernel: bool  #: whether one of moeq's own kernels reads the layer on this GPU
    vllm: tuple[str, ...]  #: versions of vLLM that run the layer's backend on this deployment
    others: tuple[str, ...]  #: versions of vLLM that load the linear modules outside the experts
    family: bool  #: whether moeq knows the model's family
    own_config: bool  #: whether vLLM reads the source's other layers by the model's own config (`reads_by_own_config`)
    heads: bool  #: whether vLLM can spread the attention over the ranks
    #: Whether SGLang's class of the model takes its experts as the plug-in expects, its reader of the source's method
    #: takes the other layers, and attention and experts divide by the ranks.
    sglang: bool
    dispatched: bool  #: whether an all-to-all delivers the activations
    moved: bool  #: whether experts move between ranks (EPLB)
    scales: bool  #: whether the source stores the scales of static activations that an engine's kernel needs


def reads_by_own_config(model_type: str, quant_method: str | None) -> bool:
    """Return whether vLLM reads a source's layers outside the experts with the model's own config class."""
    return quant_method == "fp8" and model_type in VLLM_OWN_FP8


def loaders_of(planned: PlannedLayer) -> Iterator[Loader]:
    """Yield the loaders that take a layer, serving engines first."""
    versions = _vllm_versions(planned)
    if versions:
        yield Loader("vllm", f"vLLM {version_ranges(versions)} (moeq's plug-in)")
    if planned.sglang and _engine_runs_own_kernel(planned) and not planned.moved:
        yield Loader("sglang", f"SGLang {' and '.join(SGLANG_VERSIONS)} (moeq's plug-in)")
    if _transformers(planned):
        yield Loader("transformers", f"transformers {TRANSFORMERS_MODELS[planned.model_type]} and newer")
    if _own_kernel(planned):
        yield Loader("load_experts", "moeq.load_experts")


def version_ranges(versions: tuple[str, ...]) -> str:
    """Return some of `VLLM_VERSIONS` as text, oldest first: `0.26.0 to 0.29.0 and 0.32.0`."""
    runs: list[list[str]] = []
    for version in reversed(VLLM_VERSIONS):
        if version not in versions:
            runs.append([])
        elif runs and runs[-1]:
            runs[-1].append(version)
        else:
            runs.append([version])
    return " and ".join(" to ".join(dict.fromkeys((run[0], run[-1]))) for run in runs if run)


def _vllm_versions(planned: PlannedLayer) -> tuple[str, ...]:
    if not planned.family or not planned.heads or planned.own_config:
        return ()
    own = _engine_runs_own_kernel(planned)
    registered = versions_with(planned.architecture)  # None: no version registers the class, so a package brings it
    known = tuple(version for version in planned.others if registered is None or version in registered)
    if planned.moved:
        return known if own and planned.tp == 1 and not planned.by_rank else ()
    return tuple(version for version in known if own or version in _engines_own(planned))


def _engine_runs_own_kernel(planned: PlannedLayer) -> bool:
    """Return whether plug-ins run moeq's kernel, which takes NVIDIA GPUs and tokens that no all-to-all delivers."""
    return _own_kernel(planned) and planned.platform == "cuda" and not planned.dispatched


def _engines_own(planned: PlannedLayer) -> tuple[str, ...]:
    """Return the versions of vLLM whose own kernels run the layer."""
    kind = layout_class(planned.layout)
    # Only gpt-oss's activation needs interleaved gate and up rows; the kernel decides which of two halves is first.
    other_order = (kind.w13_order == "interleaved") != (planned.activation == "swigluoai")
    readers = [reader for reader in kind.vllm_readers() if planned.dtype in reader.dtypes]
    if not planned.scales or (other_order and not any(reader.activates for reader in readers)):
        return ()
    if planned.tp > 1:
        readers = [reader for reader in readers if reader.shards]
    read = {version for reader in readers for version in reader.versions}
    return tuple(version for version in planned.vllm if version in read)


def _transformers(planned: PlannedLayer) -> bool:
    if planned.model_type not in TRANSFORMERS_MODELS or planned.by_rank:
        return False
    # On a CPU, moeq's reference runs experts in any layout; on a GPU, moeq's kernels run them.
    on_gpu = planned.platform in ("cuda", "rocm") and _own_kernel(planned)
    return planned.platform == "cpu" or on_gpu


def _own_kernel(planned: PlannedLayer) -> bool:
    """Return whether moeq's kernel reads the order of rows: interleaved only for gpt-oss, and never up before gate."""
    orders = ("gate-up", "interleaved") if planned.activation == "swigluoai" else ("gate-up",)
    return planned.own_kernel and layout_class(planned.layout).w13_order in orders


def sglang_reads(config: Mapping[str, Any], linear: str | None) -> bool:
    """Return whether SGLang reads the layers that are not converted.

    Args:
        config: `quantization_config` of the source.
        linear: format of these layers; None if none of them is quantised.
    """
    method = str(config.get("quant_method", "")).lower()
    if method == "gptq":
        bits, groups = SGLANG_GPTQ
        stated = config.get("sym") is True and config.get("desc_act") is not None  # SGLang requires both keys
        return stated and config.get("bits") in bits and config.get("group_size") in groups
    return method in SGLANG_METHODS and linear in (None, *SGLANG_LINEAR)


def common(rows: Iterator[tuple[Loader, ...]] | list[tuple[Loader, ...]]) -> tuple[Loader, ...]:
    """Return the loaders that take every one of several layers."""
    found = list(rows)
    return tuple(loader for loader in found[0] if all(loader in row for row in found)) if found else ()


def loads_in(loaders: tuple[Loader, ...]) -> str:
    """Return the loaders' titles as text; `nothing yet` if there are none."""
    return ", ".join(loader.title for loader in loaders) or "nothing yet"

"""Which loaders take a converted layer, decided before anything is written. Needs no torch and no engine.

Every table says what its loader refuses (`moeq.engines`, `moeq.load`). Tests compare them with the engines' own code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moeq.layouts.readers import VLLM_VERSIONS
from moeq.layouts.registry import layout_class
from moeq.oracle.engines.vllm.facts import versions_with

#: Model types whose FP8 layers vLLM reads by a config of the model (`DeepseekV4FP8Config`) instead of the config that
#: the checkpoint names: the plug-in would give them plain FP8.
VLLM_OWN_FP8 = ("deepseek_v4", "deepseek_v4_text", "deepseek_v41", "deepseek_v41_text")
#: SGLang versions that the plug-in was written against (`moeq.engines.sglang.plugin`).
SGLANG_VERSIONS = ("0.5.23",)
#: Architectures whose class in SGLang 0.5.23 was built and filled from a conversion on a CPU: it hands its experts to
#: `FusedMoE` with the layer's number, by which the plug-in takes them.
SGLANG_MODELS = (
    *("Cohere2MoeForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM"),
    *("Dots1ForCausalLM", "Ernie4_5_MoeForCausalLM", "ExaoneMoeForCausalLM", "Glm4MoeForCausalLM"),
    *("Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM", "GptOssForCausalLM", "HYV3ForCausalLM"),
    *("HunYuanMoEV1ForCausalLM", "Lfm2MoeForCausalLM", "MellumForCausalLM", "MiMoV2FlashForCausalLM"),
    *("MiniMaxM2ForCausalLM", "MixtralForCausalLM", "NemotronHForCausalLM", "OlmoeForCausalLM", "PhiMoEForCausalLM"),
    *("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM"),
    *("SDARMoeForCausalLM", "SolarOpenForCausalLM"),
)
#: `quant_method` of sources that SGLang has a config for on CUDA, and the formats of linear layers that it then reads.
SGLANG_METHODS = ("awq", "compressed-tensors", "fp8", "gptq", "mxfp4")
SGLANG_LINEAR = ("awq", "ct-int8", "ct-pack", "gptq")
#: Formats whose q_a and kv_a its DeepSeek class can join to one layer: it joins AWQ's tensors by columns and all others
#: by rows, which is not how GPTQ's tensors and the `weight_shape` of compressed-tensors are stored.
SGLANG_JOINED = ("awq", "ct-int8")
#: Bits and groups of GPTQ that SGLang reads, symmetric only: `GPTQMarlinConfig.TYPE_MAP` and
#: `MARLIN_SUPPORTED_GROUP_SIZES`.
SGLANG_GPTQ: tuple[tuple[int, ...], tuple[int, ...]] = ((4, 8), (-1, 32, 64, 128))
#: Model types that the transformers loader was run with, and the oldest version of transformers for each. It also takes
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
#: Name of an experts implementation that `config.json` of a conversion asks for and that only the loader's import makes
#: known. Without it transformers would give the experts random weights and warn; with it, it stops and says this name.
TRANSFORMERS_GUARD = "moeq (import moeq.engines.transformers before loading)"
#: Oldest transformers that works. 5.0 reads the number of experts of a Qwen3-MoE from `num_experts` only, which configs
#: by later versions lack; transformers 4 does not convert weights while it loads them. There is no newest version.
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
    model_type: str  #: `model_type` of the config: of the whole model, where its language model is a part
    architecture: str  #: name of the model's class
    activation: str
    dtype: str
    platform: str
    tp: int  #: ranks that share an expert
    by_rank: bool  #: files hold one packing per rank
    own_kernel: bool  #: one of moeq's own kernels reads the layer on this GPU
    vllm: tuple[str, ...]  #: versions of vLLM that run the layer's backend on this deployment
    others: tuple[str, ...]  #: versions of vLLM that load the linear modules that are no experts
    family: bool  #: the model's family is known
    own_config: bool  #: vLLM reads the source's other layers by a config of the model (`reads_by_own_config`)
    heads: bool  #: vLLM can spread the attention over the ranks
    #: SGLang's class of the model takes its experts as the plug-in expects, its reader of the source's method takes the
    #: other layers, and attention and experts divide by these ranks.
    sglang: bool
    dispatched: bool  #: an all-to-all delivers the activations
    moved: bool  #: experts move between ranks (EPLB)
    scales: bool  #: the source stores the scales of static activations that an engine's kernel needs


def reads_by_own_config(model_type: str, quant_method: str | None) -> bool:
    """Return whether vLLM reads a source's layers outside the experts by a config that only it has for the model."""
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
    """Spell some of `VLLM_VERSIONS` for people, oldest first: `0.26.0 to 0.29.0 and 0.32.0`."""
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
    having = versions_with(planned.architecture)  # a class that no version registers comes from a package
    known = tuple(version for version in planned.others if having is None or version in having)
    if planned.moved:
        return known if own and planned.tp == 1 and not planned.by_rank else ()
    return tuple(version for version in known if own or version in _engines_own(planned))


def _engine_runs_own_kernel(planned: PlannedLayer) -> bool:
    """Return whether plug-ins run moeq's kernel: on NVIDIA GPUs, on tokens by rows."""
    return _own_kernel(planned) and planned.platform == "cuda" and not planned.dispatched


def _engines_own(planned: PlannedLayer) -> tuple[str, ...]:
    """Return the versions whose own kernels run the layer."""
    kind = layout_class(planned.layout)
    # Interleaved gate and up rows are for gpt-oss's activation alone; which half comes first is the kernel's own.
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
    # On a CPU experts run as the reference, whatever the layout; on a GPU in moeq's kernels.
    on_gpu = planned.platform in ("cuda", "rocm") and _own_kernel(planned)
    return planned.platform == "cpu" or on_gpu


def _own_kernel(planned: PlannedLayer) -> bool:
    """Return whether moeq's kernel reads the rows: interleaved for gpt-oss's activation only, never up before gate."""
    orders = ("gate-up", "interleaved") if planned.activation == "swigluoai" else ("gate-up",)
    return planned.own_kernel and layout_class(planned.layout).w13_order in orders


def sglang_reads(config: Mapping[str, Any], linear: str | None) -> bool:
    """Return whether SGLang reads the layers that stay; `linear`: their format, None if none is quantised."""
    method = str(config.get("quant_method", "")).lower()
    if method == "gptq":
        bits, groups = SGLANG_GPTQ
        stated = config.get("sym") is True and config.get("desc_act") is not None  # it reads none that is silent
        return stated and config.get("bits") in bits and config.get("group_size") in groups
    return method in SGLANG_METHODS and linear in (None, *SGLANG_LINEAR)


def common(rows: Iterator[tuple[Loader, ...]] | list[tuple[Loader, ...]]) -> tuple[Loader, ...]:
    """Return the loaders that take every one of several layers."""
    found = list(rows)
    return tuple(loader for loader in found[0] if all(loader in row for row in found)) if found else ()


def loads_in(loaders: tuple[Loader, ...]) -> str:
    """Name the loaders for people; `nothing yet` where there are none."""
    return ", ".join(loader.title for loader in loaders) or "nothing yet"

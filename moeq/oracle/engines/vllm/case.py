"""One question to vLLM's backend selection, with every fact that the rules read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moeq.deploy.deployment import Deployment, Gpu
from moeq.oracle.engines.vllm.policy import EnginePolicy
from moeq.oracle.records import MoeShape

#: Boolean variables that the engine reads with `int`: any other text stops it (vLLM 0.26.0 to 0.33.0, `envs.py`).
INTEGER_VARIABLES = (
    "VLLM_BATCH_INVARIANT",
    "VLLM_USE_FLASHINFER_MOE_INT4",
    "VLLM_USE_DEEP_GEMM",
    "VLLM_MOE_USE_DEEP_GEMM",
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_CPU_INT4_W4A8",
)
#: All-to-all kinds that deliver activations as `[E, max_tokens, K]`.
BATCHED_ALL2ALL = ("deepep_low_latency", "nixl_ep")
DEFAULT_ALL2ALL = "allgather_reducescatter"
#: Model types whose classes split tokens over tensor-parallel ranks before the experts.
SEQUENCE_PARALLEL_MODELS = frozenset(
    (
        *("deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa", "gpt_oss", "granitemoe"),
        *("llama4", "llama4_text", "mimo_v2", "mimo_v2_flash", "nemotron_h", "qwen3_moe", "qwen3_vl_moe_text"),
        *("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"),
    )
)


def is_integer(text: str) -> bool:
    """Tell whether Python's `int` accepts a text."""
    try:
        int(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Method:
    """One integration of the engine, and the facts that it reads from a config and passes to selection."""

    name: str  #: engine's class, `AutoGPTQMoEMethod`
    family: str  #: name of its backend family in the policy
    config: str  #: config class that filters compare: `gptq`, `awq`, `ct`, `moe_wna16`, `quark`, `mxfp4`, ..
    weight_key: str  #: weight key that the integration builds; it may differ from the checkpoint
    activation_key: str | None = None  #: requested activation key, or None
    bits: int | None = None  #: bits per weight
    group_size: int | None = None  #: weights per scale along K; -1 per channel, None if it does not apply
    group_missing: bool = False  #: whether the config of channel-wise scales omits the group size
    zero_points: bool = False  #: whether the integration declares zero points possible
    bias_possible: bool = False  #: whether the integration declares biases possible
    tile_padding: bool = False  #: whether Marlin may pad the intermediate size
    act_order: bool = False  #: whether columns are reordered: `desc_act`, or actorder `group`
    raw_zero_points: bool = False  #: whether the checkpoint has zero points
    marlin_assertion: bool = False  #: whether an assertion about scales or act-order fails on all backends but Marlin
    symmetric_assertion: bool = False  #: whether an assertion fails for zero points on all backends but Marlin
    checks_input: bool = False  #: whether the integration checks VLLM_MARLIN_INPUT_DTYPE
    vllm_cutlass: bool = True  #: whether vLLM's own CUTLASS kernels for FP8 are candidates
    block: tuple[int, int] | None = None  #: FP8 block of the checkpoint, `(rows, columns)`; None for other weights
    padded_intermediate: int | None = None  #: width to which the method first pads a rank's shard; None without padding
    fixed: tuple[str, str] | None = None  #: `(backend, experts)` of a method without selection
    #: `(backend, experts)` of a method that calls a kernel of its own without an experts class.
    built_in: tuple[str, str | None] | None = None
    #: Whether the first class of the selected backend is taken, whichever class selection found.
    first_class: bool = False
    #: Bits of activations at run time, where the integration and not the class decides them.
    activation_bits: int | None = None
    notes: tuple[str, ...] = ()  #: sentences for the verdict


@dataclass(frozen=True)
class Case:
    """One method, shape and deployment, under one policy.

    In a `brief` case, checks stop at the first failed rule: counterfactuals need only yes or no.
    """

    policy: EnginePolicy
    deployment: Deployment
    shape: MoeShape
    method: Method
    brief: bool = False

    @property
    def gpu(self) -> Gpu:
        """Device of every rank."""
        return self.deployment.gpu

    @cached_property
    def device(self) -> str:
        """Device of the policy's tables that represents the GPU; empty if there is none."""
        return self.policy.device(self.gpu) or ""

    @property
    def use_ep(self) -> bool:
        """Whether every rank holds whole experts."""
        return self.deployment.ep > 1

    @property
    def moe_tp(self) -> int:
        """Number of ranks that share one expert: all ranks, or 1 with expert parallelism."""
        return 1 if self.use_ep else self.ranks

    @property
    def ranks(self) -> int:
        """Number of ranks that a layer's experts are spread over: tp x dp x pcp."""
        return self.deployment.tp * self.deployment.dp * self.deployment.pcp

    @property
    def intermediate(self) -> int:
        """Expert width per rank, unpadded."""
        return self.shape.intermediate_size // self.moe_tp

    @property
    def uses_all2all(self) -> bool:
        """Whether all-to-all kernels run: expert parallelism over more than one data- or context-parallel rank."""
        return self.use_ep and (self.deployment.dp > 1 or self.deployment.pcp > 1)

    @property
    def all2all(self) -> str | None:
        """All-to-all kind in effect, or None."""
        return (self.deployment.all2all or DEFAULT_ALL2ALL) if self.uses_all2all else None

    @cached_property
    def parallel_form(self) -> str:
        """Name of the parallel form in the engine's tables: `single`, `tp`, `dp`, `ep`, `ep:KIND`, and `+eplb`."""
        deployment = self.deployment
        if self.all2all is not None:
            # A kind that this version does not know sets none of its switches; gate G10 refuses it.
            name = f"ep:{self.all2all if self.all2all in self.policy.all2all else DEFAULT_ALL2ALL}"
        else:
            name = "ep" if self.use_ep else "dp" if deployment.dp > 1 else "tp" if self.ranks > 1 else "single"
        return name + ("+eplb" if deployment.eplb else "")

    @property
    def format(self) -> str:
        """Activation format that the deployment needs: `standard` or `batched`."""
        # Unquantised experts have a backend whose name asks for the batched format.
        by_name = self.method.family == "unquantized" and self.deployment.backend == "batched_triton"
        batched = self.deployment.batched or self.all2all in BATCHED_ALL2ALL or by_name
        return "batched" if batched else "standard"

    @property
    def local_experts(self) -> int:
        """Number of experts on the fullest rank, replicas of load balancing included."""
        return -(-self.physical_experts // self.deployment.ep)

    @property
    def physical_experts(self) -> int:
        """Number of experts that all ranks hold: the layer's experts and the replicas of load balancing."""
        return self.shape.num_experts + self.deployment.redundant_experts

    @property
    def sequence_parallel(self) -> bool:
        """Whether the model's class splits tokens over tensor-parallel ranks, as it does with the default all-to-all.

        Source: `ParallelConfig.use_sequence_parallel_moe`, and the classes that pass it on, vLLM 0.26.0 to 0.33.0.
        """
        deployment = self.deployment
        spread = self.use_ep and deployment.tp > 1 and deployment.dp > 1 and self.all2all == DEFAULT_ALL2ALL
        return spread and self.shape.model_type in SEQUENCE_PARALLEL_MODELS

    @property
    def gated(self) -> bool:
        """Whether the experts have a gate half."""
        return self.shape.gated and not self.shape.activation.endswith("_no_mul")

    @cached_property
    def _env(self) -> dict[str, str]:
        return dict(self.deployment.env)

    def env(self, name: str) -> str | None:
        """Return the value of an environment variable of the deployment, or None."""
        return self._env.get(name)

    def flag(self, name: str) -> str | None:
        """Return a variable in the spelling of the tables: `1` or `0` if it is boolean, None if it is unset."""
        value = self._env.get(name)
        if value is None:
            return None
        if name in INTEGER_VARIABLES and is_integer(value):
            return "1" if int(value) else "0"
        if name.startswith("VLLM_ROCM_USE_AITER"):
            return "1" if value.lower() in ("true", "1") else "0"
        return value

    @cached_property
    def _packages(self) -> dict[str, bool]:
        assumed = self.policy.packages.get(self.gpu.platform, {})
        return {**assumed, **dict(self.deployment.packages)}

    def package(self, name: str) -> bool:
        """Tell whether an optional package is present: by the deployment, else by the platform's build."""
        return self._packages.get(name, False)

    @property
    def gemm_type(self) -> str:
        """GEMM type that Humming prefers: indexed, or grouped with expert parallelism."""
        forced = (self.env("VLLM_HUMMING_MOE_GEMM_TYPE") or "auto").lower()
        if not self.policy.since("0.30.0"):
            return "grouped_contiguous" if forced in ("grouped", "grouped_contiguous") else "indexed"
        if forced == "auto":
            return "grouped_contiguous" if self.use_ep else "indexed"
        return "grouped_contiguous" if forced == "grouped" else forced

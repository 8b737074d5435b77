"""One question to an engine's backend selection, with everything resolved that the rules look at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moeq.deploy.deployment import Deployment, Gpu
from moeq.oracle.engines.vllm.policy import EnginePolicy
from moeq.oracle.engines.vllm.tables import Variant
from moeq.oracle.records import MoeShape

#: All-to-all kinds that deliver activations as `[E, max_tokens, K]`.
BATCHED_ALL2ALL = ("deepep_low_latency", "nixl_ep")
DEFAULT_ALL2ALL = "allgather_reducescatter"


@dataclass(frozen=True)
class Method:
    """What one integration of the engine makes of a checkpoint's config and passes to selection.

    Attributes:
        name: the engine's class, `AutoGPTQMoEMethod`.
        family: family of the policy.
        config: config class: `gptq`, `awq`, `ct`, `moe_wna16`, `quark`, `mxfp4`, ... (pre-filters ask for it).
        weight_key: weight key as the integration builds it (not always the truth about the checkpoint).
        activation_key: requested activation key, or None.
        bits: bits per weight.
        group_size: weights per scale along K, -1 per channel, None where it does not apply.
        group_missing: the config of channel-wise scales names no group size, not even -1.
        zero_points: the integration says zero points are possible.
        bias_possible: the integration says biases are possible.
        tile_padding: Marlin may pad the intermediate size.
        act_order: `desc_act`, or actorder `group`.
        raw_zero_points: the checkpoint really has zero points.
        channel_assertion: the integration trips over channel-wise scales on anything but Marlin.
        symmetric_assertion: it trips over zero points on anything but Marlin.
        checks_input: the integration checks VLLM_MARLIN_INPUT_DTYPE.
        vllm_cutlass: FP8: the engine's own CUTLASS kernels are among the candidates.
        block: FP8: checkpoint block `(rows, columns)`, None for others.
        padded_intermediate: the method widens a rank's shard to this before anything else, None where it does not.
        fixed: the method has one backend and class, no selection: `(backend, experts)`.
        built_in: the same where the method has no experts class at all, but a kernel call of its own.
        first_class: whatever selection says, the first class of the selected backend is taken.
        notes: what is worth saying.
    """

    name: str
    family: str
    config: str
    weight_key: str
    activation_key: str | None = None
    bits: int | None = None
    group_size: int | None = None
    group_missing: bool = False
    zero_points: bool = False
    bias_possible: bool = False
    tile_padding: bool = False
    act_order: bool = False
    raw_zero_points: bool = False
    channel_assertion: bool = False
    symmetric_assertion: bool = False
    checks_input: bool = False
    vllm_cutlass: bool = True
    block: tuple[int, int] | None = None
    padded_intermediate: int | None = None
    fixed: tuple[str, str] | None = None
    built_in: tuple[str, str | None] | None = None
    first_class: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """One method, shape and deployment, under one policy.

    `brief` asks for the first failed rule only: for counterfactuals, where nothing but yes or no is looked at.
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
        """The device of the policy's tables that stands for it; empty where there is none of its kind."""
        return self.policy.device(self.gpu) or ""

    @property
    def use_ep(self) -> bool:
        """Whole experts per rank."""
        return self.deployment.ep > 1

    @property
    def moe_tp(self) -> int:
        """Ranks that share one expert: all of them (tp x dp), or one under expert parallelism."""
        return 1 if self.use_ep else self.deployment.tp * self.deployment.dp

    @property
    def intermediate(self) -> int:
        """Expert width per rank, unpadded."""
        return self.shape.intermediate_size // self.moe_tp

    @property
    def uses_all2all(self) -> bool:
        """All-to-all kernels run only with expert parallelism over more than one data-parallel rank."""
        return self.use_ep and self.deployment.dp > 1

    @property
    def all2all(self) -> str | None:
        """All-to-all kind in effect, or None."""
        return (self.deployment.all2all or DEFAULT_ALL2ALL) if self.uses_all2all else None

    @cached_property
    def parallel_form(self) -> str:
        """How the ranks share the experts, as the engine's tables name it."""
        d = self.deployment
        if self.all2all is not None:
            # A kind that this version does not know sets none of its switches (gate G10 refuses it).
            name = f"ep:{self.all2all if self.all2all in self.policy.all2all else DEFAULT_ALL2ALL}"
        else:
            name = "ep" if self.use_ep else "dp" if d.dp > 1 else "tp" if d.tp > 1 else "single"
        return name + ("+eplb" if d.eplb else "")

    @property
    def format(self) -> str:
        """Activation format that the deployment needs: `standard` or `batched`."""
        # Unquantised experts have a backend whose name asks for the batched format.
        by_name = self.method.family == "unquantized" and self.deployment.backend == "batched_triton"
        batched = self.deployment.batched or self.all2all in BATCHED_ALL2ALL or by_name
        return "batched" if batched else "standard"

    @property
    def local_experts(self) -> int:
        """Experts of the fullest rank."""
        return -(-self.shape.num_experts // self.deployment.ep)

    @cached_property
    def variants(self) -> dict[tuple[str, str], Variant]:
        """What classes accept for this case, by class and activation key: filled by the rules, which all look at it."""
        return {}

    @cached_property
    def _env(self) -> dict[str, str]:
        return dict(self.deployment.env)

    def env(self, name: str) -> str | None:
        """Value of an environment variable of the deployment, or None."""
        return self._env.get(name)

    def flag(self, name: str) -> str | None:
        """A boolean variable as the tables write it: `1`, `0` or None."""
        value = self._env.get(name)
        if value is None:
            return None
        return {"true": "1", "false": "0"}.get(value.strip().lower(), value)

    @cached_property
    def _packages(self) -> dict[str, bool]:
        assumed = self.policy.packages.get(self.gpu.platform, {})
        return {**assumed, **dict(self.deployment.packages)}

    def package(self, name: str) -> bool:
        """Whether an optional package is there: as the deployment says, else what the platform's build brings."""
        return self._packages.get(name, False)

    @property
    def gemm_type(self) -> str:
        """The GEMM type that Humming prefers: indexed without expert parallelism, grouped with it."""
        forced = (self.env("VLLM_HUMMING_MOE_GEMM_TYPE") or "auto").lower()
        if not self.policy.since("0.30.0"):
            return "grouped_contiguous" if forced in ("grouped", "grouped_contiguous") else "indexed"
        if forced == "auto":
            return "grouped_contiguous" if self.use_ep else "indexed"
        return "grouped_contiguous" if forced == "grouped" else forced

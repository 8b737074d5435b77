"""The question an engine's selection answers, resolved: what every rule looks at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moeq.deploy.deployment import Deployment, Gpu
from moeq.oracle.policy import EnginePolicy
from moeq.oracle.records import MoeShape


@dataclass(frozen=True)
class Method:
    """What one integration of the engine makes of a checkpoint's config and passes to selection.

    Attributes:
        name: the engine's class, `AutoGPTQMoEMethod`.
        family: family of the policy file.
        config: config class: `gptq`, `awq`, `ct`, `moe_wna16`, `quark`, `mxfp4`, ... (pre-filters ask for it).
        weight_key: weight key as the integration builds it (not always the truth about the checkpoint).
        activation_key: requested activation key, or None.
        bits: bits per weight.
        group_size: weights per scale along K, -1 per channel, None where it does not apply.
        zero_points: the integration says zero points are possible.
        bias_possible: the integration says biases are possible.
        tile_padding: Marlin may pad the intermediate size.
        act_order: `desc_act`, or actorder `group`.
        override_honoured: the user's backend is looked at.
        raw_zero_points: the checkpoint really has zero points.
        channel_assertion: the integration trips over channel-wise scales on anything but Marlin.
    """

    name: str
    family: str
    config: str
    weight_key: str
    activation_key: str | None = None
    bits: int | None = None
    group_size: int | None = None
    zero_points: bool = False
    bias_possible: bool = False
    tile_padding: bool = False
    act_order: bool = False
    override_honoured: bool = True
    raw_zero_points: bool = False
    channel_assertion: bool = False
    vllm_cutlass: bool = True
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

    @property
    def use_ep(self) -> bool:
        """Whole experts per rank."""
        return self.deployment.ep > 1

    @property
    def moe_tp(self) -> int:
        """Ranks that share one expert: expert parallelism takes the tensor-parallel ranks for itself."""
        return 1 if self.use_ep else self.deployment.tp

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
        return (self.deployment.all2all or "allgather_reducescatter") if self.uses_all2all else None

    @property
    def format(self) -> str:
        """Activation format that the deployment needs: `standard` or `batched`."""
        by_name = self.policy.families[self.method.family].option("batched_names", ())
        batched = (
            self.deployment.batched
            or self.all2all in self.policy.gates["batched_all2all"]
            or self.deployment.backend in by_name
        )
        return "batched" if batched else "standard"

    @property
    def local_experts(self) -> int:
        """Experts of the fullest rank."""
        return -(-self.shape.num_experts // self.deployment.ep)

    @cached_property
    def _env(self) -> dict[str, str]:
        return dict(self.deployment.env)

    def env(self, name: str) -> str | None:
        """Value of an environment variable of the deployment, or None."""
        return self._env.get(name)

    @cached_property
    def _packages(self) -> dict[str, bool]:
        assumed = self.policy.packages.get(self.gpu.platform, {})
        return {**assumed, **dict(self.deployment.packages)}

    def package(self, name: str) -> bool:
        """Whether an optional package is there: as the deployment says, else what the platform's wheel brings."""
        return self._packages.get(name, False)

    @property
    def gemm_type(self) -> str:
        """The GEMM type that Humming prefers: indexed without expert parallelism, grouped with it."""
        forced = self.env("VLLM_HUMMING_MOE_GEMM_TYPE")
        return forced or ("grouped" if self.use_ep else "indexed")

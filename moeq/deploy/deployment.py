"""Where a converted checkpoint is to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from moeq.errors import MoeqError
from moeq.typed import read_as

Platform = Literal["cuda", "rocm", "xpu", "cpu"]


@dataclass(frozen=True)
class Gpu:
    """One kind of device.

    Attributes:
        name: market name (`H100`) or the architecture given by the user (`sm90`, `gfx942`).
        platform: software stack that drives the device. Capabilities of different platforms are never compared.
        arch: `sm90`, `gfx942`, `xpu`, `x86-amx`, ...
        capability: CUDA compute capability `(major, minor)`; None on other platforms.
        memory_gib: device memory, if the name tells it.
    """

    name: str
    platform: Platform
    arch: str
    capability: tuple[int, int] | None = None
    memory_gib: int | None = None


@dataclass(frozen=True)
class Deployment:
    """Settings with which an engine is started. Sizes are counts of ranks.

    Attributes:
        gpu: device of every rank.
        tp: tensor-parallel size.
        ep: expert-parallel size; 1 is off. With expert parallelism every rank holds whole experts.
        dp: data-parallel size.
        pcp: prefill-context-parallel size. Experts are spread over these ranks as over data-parallel ones.
        all2all: all-to-all kind of the engine (`deepep_low_latency`, ...), or None for its default.
        batched: whether experts get activations as `[E, max_tokens, K]` instead of `[tokens, K]`.
        lora: whether LoRA adapters are applied to the experts.
        eplb: whether expert load balancing is on.
        redundant_experts: replicas that load balancing adds to the experts of a layer, over all ranks.
        dtype: activation dtype.
        backend: name of the requested backend, or `auto`.
        engine: engine that decides, `vllm@0.33.0`, `sglang` or `moeq`.
        env: environment variables that engines read, as sorted `(name, value)` pairs.
        packages: optional packages and whether they are present, as sorted `(name, present)` pairs.
        quantization: quantisation method that the user names to the engine (`moe_wna16`), or None for the checkpoint's.
    """

    gpu: Gpu
    tp: int = 1
    ep: int = 1
    dp: int = 1
    pcp: int = 1
    all2all: str | None = None
    batched: bool = False
    lora: bool = False
    eplb: bool = False
    redundant_experts: int = 0
    dtype: Literal["bf16", "fp16"] = "bf16"
    backend: str = "auto"
    engine: str = "vllm@0.33.0"
    env: tuple[tuple[str, str], ...] = ()
    packages: tuple[tuple[str, bool], ...] = ()
    quantization: str | None = None

    def __post_init__(self) -> None:
        """Raise MoeqError `usage.deployment` for values that no deployment has."""
        if not isinstance(self.gpu, Gpu):
            hint = "moeq.gpu(NAME) makes a Gpu: Deployment(gpu=moeq.gpu('H100'))"
            raise MoeqError("usage.deployment", f"gpu is {self.gpu!r}, it has to be a Gpu", hint)
        for name, least in (("tp", 1), ("ep", 1), ("dp", 1), ("pcp", 1), ("redundant_experts", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise MoeqError("usage.deployment", f"{name} is {value!r}, it has to be an integer of at least {least}")
        if self.dtype not in ("bf16", "fp16"):
            raise MoeqError("usage.deployment", f"dtype is {self.dtype!r}, it has to be bf16 or fp16")

    @classmethod
    def from_json(cls, row: Any, where: str = "deployment", code: str = "source.bad-manifest") -> Deployment:
        """Read a deployment back from its `asdict` form. Raise MoeqError `code` for anything else."""
        return read_as(cls, row, where, code)

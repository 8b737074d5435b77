"""One experts layer on one deployment of SGLang: records of question and answer, and helpers that readers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]


class SglangRefusal(Exception):
    """Error with which the engine stops.

    Attributes:
        stage: stage of the stop: `name`, `config` or `layer`.
        error: type of the engine's exception.
        remedy: change that helps, or None.
    """

    def __init__(self, stage: str, error: str, text: str, remedy: str | None = None) -> None:
        super().__init__(text)
        self.stage, self.error, self.text, self.remedy = stage, error, text, remedy


@dataclass(frozen=True)
class SglangLayer:
    """One experts layer on one deployment."""

    capability: tuple[int, int]
    hidden: int
    inter: int  #: intermediate size of an expert
    experts: int
    tp: int = 1
    ep: bool = False  #: whether every rank holds whole experts
    dtype: str = "bf16"
    act: str = "silu"
    runner: str = "auto"  #: value of `--moe-runner-backend`
    quantization: str | None = None  #: value of `--quantization`, or None
    prefix: str = "model.layers.1.mlp.experts"  #: the layer's name in the model

    @property
    def shard(self) -> int:
        """Intermediate size per rank."""
        return self.inter if self.ep else self.inter // self.tp

    @property
    def allocated_shard(self) -> int:
        """Intermediate size per rank with the padding of TensorRT-LLM's runners; NVFP4 pads in another way."""
        return -(-self.shard // 128) * 128 if self.runner.startswith("flashinfer_trtllm") else self.shard

    @property
    def has_marlin(self) -> bool:
        """Whether Marlin's kernels exist for the device."""
        return self.capability >= (8, 0)


@dataclass(frozen=True)
class SglangChoice:
    """Method and runner that run."""

    name: str  #: method in force
    method: str  #: class of the engine's method, or of the method's scheme
    runner: str | None  #: runner backend; None if the method has no runner
    layout: str | None = None  #: moeq's id of the byte order that its kernels read, or None
    quantised: bool = True  #: whether experts are made quantised
    runs: bool = True  #: whether the method has a kernel for the runner; otherwise the first request stops the engine


def value(config: Config, *names: str) -> Any:
    """Return the value of the first name that the config has. Raise SglangRefusal if it has none."""
    for name in names:
        if name in config:
            return config[name]
    raise SglangRefusal("config", "ValueError", f"the config has no {' or '.join(names)}")


#: Runners with kernels for unquantised experts, where the method passes all runners on.
_OWN = ("triton_kernel", "deep_gemm", "flashinfer_trtllm", "flashinfer_cutlass")


def unquantised(name: str, layer: SglangLayer, own: tuple[str, ...] = _OWN) -> SglangChoice:
    """Return the choice for experts that the config leaves unquantised: the layer's runner if in `own`, else Triton."""
    runner = layer.runner if layer.runner in own and name != "moe_wna16" else "triton"
    if runner == "deep_gemm" and layer.act != "silu":
        raise SglangRefusal("layer", "AssertionError", f"unquantised experts with activation {layer.act} on deep_gemm")
    return SglangChoice(name, "UnquantizedFusedMoEMethod", runner, quantised=False)

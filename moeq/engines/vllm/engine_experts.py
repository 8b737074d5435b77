"""The engine's release and device, and records of its own experts for a layout (`moeq.engines.vllm.backends`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import vllm
from packaging.version import Version
from torch import nn
from vllm.platforms import current_platform

from moeq.checkpoint.manifest import STACKED_ROLES
from moeq.deploy.deployment import Gpu
from moeq.deploy.detect import detect_cpu, detect_gpu
from moeq.deploy.gpus import find_by_device_name, parse_gpu
from moeq.layouts.readers import VLLM
from moeq.load.activation_scales import ActivationScales
from moeq.matrix import MatrixSpec
from moeq.schemes.base import Scheme

Tensors = dict[str, Any]
Clamp = dict[str, float | None]
#: Function that reads the scales of a layer's static activations; it returns None if the source stores none.
ReadScales = Callable[[], ActivationScales | None]

#: Release of the engine, and its numbers, for differences that its functions do not show.
RELEASE = Version(vllm.__version__).base_version
VERSION = Version(vllm.__version__).release


#: Name of the attribute of a layer with the records that `settle` makes for `quant_config`.
RECORDS = "moeq_records"


#: Constants that the engine's method for gpt-oss hands to every kernel, whatever the model's config says.
GPT_OSS: Clamp = {"gemm1_alpha": 1.702, "gemm1_beta": 1.0, "gemm1_clamp_limit": 7.0}


def current_gpu() -> Gpu:
    """Return the device that the engine runs on.

    CUDA devices are named by the engine's platform, which asks the driver without taking memory on the device.

    Raises MoeqError `usage.unknown-gpu`.
    """
    if current_platform.is_cuda():
        capability = current_platform.get_device_capability()
        named = find_by_device_name(current_platform.get_device_name())
        if named is not None and named.capability == (capability.major, capability.minor):
            return named
        return parse_gpu(f"sm{capability.major}{capability.minor}")
    if current_platform.is_cpu():
        return detect_cpu()
    return detect_gpu() or parse_gpu("XPU")


def accepts(function: Callable[..., Any], argument: str) -> bool:
    """Return whether one of the engine's functions has an argument of that name in this version."""
    return argument in inspect.signature(function).parameters


@dataclass(frozen=True)
class RankWeights:
    """Weights of a layer on one rank."""

    w13: MatrixSpec  #: spec of one expert's w13 on the rank, padding included
    w2: MatrixSpec  #: spec of one expert's w2 on the rank, padding included
    scheme: Scheme  #: scheme of the source
    experts: tuple[int, int]  #: `(start, stop)` of the rank's experts, as the model counts them
    activation: str  #: the engine's name of the activation function


def as_filled(layer: Any, weights: RankWeights, scales: ReadScales) -> None:
    """Leave the filled layer unchanged."""


@dataclass(frozen=True)
class UnpaddedSides:
    """Sides of a kernel that have no padding of the hidden size, in a layout that pads it."""

    tokens: bool = False  #: whether the kernel takes tokens without padding
    results: bool = False  #: whether the kernel returns results without padding


@dataclass(frozen=True)
class EngineExperts:
    """Description of how vLLM runs one layout."""

    title: str  #: the engine's name for the backend, as in its log
    reader: VLLM  #: the layout's record of this backend
    classes: Callable[[], list[Any]]  #: function that lists the engine's expert classes, best first
    keys: Callable[[RankWeights], tuple[Any, Any]]  #: function that gives the engine's `(weight key, activation key)`
    #: Function that makes the engine's record of scales, from the layer's tensors and the constants of its activation.
    quant_config: Callable[[Tensors, RankWeights, Clamp], Any]
    #: Function that makes the engine's kernel, from `moe_quant_config` (that record), `moe_config`, `experts_cls` and
    #: `routing_tables`.
    kernel: Callable[..., Any]
    #: Function that gives more arguments of `kernel` from the layer's tensors.
    kernel_arguments: Callable[[Tensors], dict[str, Any]] = lambda tensors: {}
    #: Function that gives the filled layer what the engine's own preparation adds beside weights: parameters by the
    #: engine's names, sizes after padding. Its last argument reads the scales of static activations.
    settle: Callable[[Any, RankWeights, ReadScales], None] = as_filled
    #: Whether hidden and intermediate size are rounded up before weights are made, as the layout pads.
    rounds_sizes: bool = False
    unpadded: UnpaddedSides = UnpaddedSides()  #: sides of the kernel that have no padding
    marlin_input: str | None = None  #: value of VLLM_MARLIN_INPUT_DTYPE that the bytes are for
    spreads: bool = True  #: whether expert-parallel ranks may hold some of the experts
    finishes: bool = True  #: whether the expert class gets the filled layer at the end
    #: Function that says why the engine, as it was started, would read the bytes wrongly, or None.
    obstacle: Callable[[RankWeights], str | None] = lambda weights: None
    #: Other backends of the engine that read the same bytes, in the engine's order.
    instead: tuple[EngineExperts, ...] = ()

    @property
    def option(self) -> str:
        """Value of `--moe-backend` that selects this backend, besides `auto`."""
        return self.reader.option

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Names of the activations' dtypes in torch."""
        return tuple(_TORCH_DTYPES[dtype] for dtype in self.reader.dtypes)


#: Function that makes the engine's experts from the layout's record of a backend.
Constructor = Callable[[VLLM], EngineExperts]
_TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def set_parameter(layer: Any, name: str, value: Any) -> None:
    """Add a parameter without gradient to a layer, in place of one of that name."""
    layer.register_parameter(name, nn.Parameter(value, requires_grad=False))


def widen_biases(layer: Any) -> None:
    """Convert the biases of a layer, where it has some, to float32."""
    for role in STACKED_ROLES:
        bias = getattr(layer, f"{role}_bias", None)
        if bias is not None:
            set_parameter(layer, f"{role}_bias", bias.data.float())

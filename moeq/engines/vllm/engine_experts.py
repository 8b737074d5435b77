"""What the plug-in says of the engine's own experts for a layout: a row of `moeq.engines.vllm.backends.BACKENDS`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import vllm
from torch import nn

from moeq.layouts.readers import VLLM
from moeq.load.activation_scales import ActivationScales
from moeq.matrix import MatrixSpec
from moeq.schemes.base import Scheme

Tensors = dict[str, Any]
Clamp = dict[str, float | None]
#: Reads the scales of a layer's static activations; None where the source stores none.
ReadScales = Callable[[], ActivationScales | None]

#: The engine's release, and its numbers, for what it cannot be asked.
RELEASE = str(vllm.__version__).partition("+")[0]
VERSION = tuple(map(int, RELEASE.split(".")))


#: Name of an attribute of a layer: what its `settle` made beside parameters, for `quant_config`.
RECORDS = "moeq_records"


def takes(function: Callable[..., Any], argument: str) -> bool:
    """Whether one of the engine's functions has an argument of that name in this version."""
    return argument in inspect.signature(function).parameters


@dataclass(frozen=True)
class RankWeights:
    """What a rank holds of a layer.

    Attributes:
        w13: one expert's matrix of the rank, padding included.
        w2: the same.
        scheme: how the source encodes it.
        experts: `(start, stop)` of the rank's experts, as the model counts them.
        activation: the engine's name of the activation function.
    """

    w13: MatrixSpec
    w2: MatrixSpec
    scheme: Scheme
    experts: tuple[int, int]
    activation: str


def as_filled(layer: Any, weights: RankWeights, scales: ReadScales) -> None:
    """Nothing is left to be done to the layer."""


@dataclass(frozen=True)
class Trims:
    """Whose business the padding of the hidden size is, where the layout pads it.

    Attributes:
        tokens: the kernel takes them without it.
        results: the kernel leaves them without it.
    """

    tokens: bool = False
    results: bool = False


@dataclass(frozen=True)
class EngineExperts:
    """How vLLM runs one layout.

    Attributes:
        title: the engine's name for the backend, as in its log.
        reader: what the layout says about this backend.
        classes: its expert classes, best first.
        keys: `(weight key, activation key)`, in the engine's terms.
        quant_config: its record of scales, from the layer's tensors and the constants of its activation.
        kernel: its kernel, from that record, its MoE config, the class, the routing tables and the layer's tensors.
        settle: gives the filled layer what the engine's own preparation leaves there beside the weights: parameters by
            the engine's names, sizes after padding. Its last argument reads the scales of static activations.
        rounds_sizes: hidden and intermediate size are rounded up before weights are made, as the layout pads.
        trims: whose business the padding of the hidden size is.
        marlin_input: value of VLLM_MARLIN_INPUT_DTYPE that the bytes are for.
        spreads: expert-parallel ranks may hold some of the experts.
        finishes: the expert class is given the filled layer at last.
        obstacle: why the engine, as it was started, would read the bytes wrongly; None where it would not.
        instead: other backends of the engine that read the same bytes, in the engine's order.
    """

    title: str
    reader: VLLM
    classes: Callable[[], list[Any]]
    keys: Callable[[RankWeights], tuple[Any, Any]]
    quant_config: Callable[[Tensors, RankWeights, Clamp], Any]
    kernel: Callable[[Any, Any, Any, Any, Tensors], Any]
    settle: Callable[[Any, RankWeights, ReadScales], None] = as_filled
    rounds_sizes: bool = False
    trims: Trims = Trims()
    marlin_input: str | None = None
    spreads: bool = True
    finishes: bool = True
    obstacle: Callable[[RankWeights], str | None] = lambda weights: None
    instead: tuple[EngineExperts, ...] = ()

    @property
    def option(self) -> str:
        """Value of `--moe-backend` that allows it, besides `auto`."""
        return self.reader.option

    @property
    def dtypes(self) -> tuple[str, ...]:
        """torch dtype names of the activations."""
        return tuple(_TORCH_DTYPES[dtype] for dtype in self.reader.dtypes)


#: Makes the engine's experts for a backend that reads a layout.
Constructor = Callable[[VLLM], EngineExperts]
_TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def set_parameter(layer: Any, name: str, value: Any) -> None:
    """A parameter of the layer that takes no gradient; one of that name is replaced."""
    layer.register_parameter(name, nn.Parameter(value, requires_grad=False))

"""Cells of the sweep over plans: layers of real models and random ones, numbers of tokens, and every plan to time.

A cell is a format, a layer and a number of tokens. Random layers and numbers follow from a seed alone.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch

from bench.shapes import FORMATS, HELD_OUT, KNOWN, SHAPES, Shape, weight_bytes
from moeq_kernels import PackedExperts, PackedMatrix
from moeq_kernels.epilogue import SILU, Epilogue
from moeq_kernels.formats import find_format
from moeq_kernels.gpu import GPUS, H200
from moeq_kernels.hopper.cost import Work
from moeq_kernels.hopper.w4a8 import w4a8_launches as w4a8
from moeq_kernels.hopper.w4a16 import w4a16_plan as w4a16
from moeq_kernels.hopper.w4a16.kinds import KINDS, kind_of_format
from moeq_kernels.hopper.w8a8 import w8a8_plan as w8a8
from moeq_kernels.mma.mma_plan import MmaPlan
from moeq_kernels.prepared import prepare_for
from moeq_kernels.problem import Problem
from moeq_kernels.schedules import FAMILIES


@dataclass(frozen=True)
class Stored:
    """Storage of a cell's weights, and the kernels that multiply them.

    Attributes:
        group: codes along k that share a scale; 0 is one scale per output feature.
        floor: the format of `shapes.FORMATS` with the same bytes and arithmetic.
    """

    layout: str
    element: str
    group: int
    floor: str
    scale: torch.dtype = torch.bfloat16
    family: str = "hopper-w4a16"

    @property
    def kind(self) -> str:
        """Name that device code has for the codes."""
        return kind_of_format(find_format(self.layout, self.element))


_MXFP4 = Stored("marlin-mxfp4/1", "e2m1", 32, "mxfp4", torch.uint8)
_INT4 = Stored("marlin-wna16/1", "int4", 128, "int4")
#: Formats of cells: 16-bit activations, 8-bit activations of the weights' kind, and 4-bit weights x e4m3.
STORED = {
    "int4": _INT4,
    "w8a16": Stored("marlin-wna16/1", "int8", 128, "int8"),
    "mxfp4": _MXFP4,
    "moeq-mxfp4": replace(_MXFP4, layout="moeq-mxfp4/1"),
    "nvfp4": Stored("marlin-nvfp4/1", "e2m1", 16, "nvfp4", torch.float8_e4m3fn),
    "fp8-w8a16": Stored("marlin-fp8/1", "e4m3", 128, "fp8-block"),
    "w8a8": Stored("int8-w8a8/1", "int8", 0, "w8a8", torch.float32, "hopper-w8a8"),
    "fp8": Stored("fp8-identity/1", "e4m3", 0, "fp8-w8a8", torch.float32, "hopper-fp8"),
    "fp8-block": Stored("fp8-block-identity/1", "e4m3", 128, "fp8-block-w8a8", torch.float32, "hopper-fp8"),
    "mxfp4-fp8": replace(_MXFP4, floor="mxfp4-fp8", family="hopper-w4a8"),
    "moeq-mxfp4-fp8": replace(_MXFP4, layout="moeq-mxfp4/1", floor="mxfp4-fp8", family="hopper-w4a8"),
    "int4-fp8": replace(_INT4, floor="int4-fp8", family="hopper-w4a8"),
}
#: The order in which formats are drawn; those whose plans matter most come twice.
ROUND = ("int4", "w8a8", "moeq-mxfp4", "fp8-block", "int4", "mxfp4", "w8a8", "nvfp4", "fp8")
#: Formats that have gpt-oss's activation; `-silu` is the same format without it.
GPT_OSS_FORMATS = ("mxfp4", "moeq-mxfp4")
#: Largest weight bytes of a random layer.
MAX_BYTES = 6e9
#: gpt-oss's features in int4, whose packed sizes are multiples of 128.
GPT_OSS_PADDED = 2944


@dataclass(frozen=True)
class Layer:
    """A layer in a format.

    Attributes:
        name: a key of `shapes.SHAPES`, or `random`.
        gpu: a key of `moeq_kernels.gpu.GPUS`, for which plans are made.
    """

    format: str
    name: str
    shape: Shape
    gpu: str = H200.name

    @property
    def stored(self) -> Stored:
        """Storage of the weights."""
        return STORED[self.format.removesuffix("-silu")]

    @property
    def family(self) -> str:
        """Family of kernels."""
        return self.stored.family

    @property
    def gpt_oss(self) -> bool:
        """Whether the layer has gpt-oss's interleaved rows, biases and activation."""
        return self.format in GPT_OSS_FORMATS

    @property
    def epilogue(self) -> Epilogue:
        """Activation between the products."""
        return Epilogue("swiglu_oai", gated=True, interleaved=True, limit=7.0) if self.gpt_oss else SILU

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Experts, choices of a token, hidden and intermediate features."""
        one = self.shape
        return one.experts, one.top_k, one.hidden, one.intermediate

    def random_experts(self, device: str = "cuda") -> PackedExperts:
        """Draw weights; every code is a valid one."""
        one = self.shape
        parts = [
            self._matrix(n, k, device) for n, k in ((2 * one.intermediate, one.hidden), (one.hidden, one.intermediate))
        ]
        return PackedExperts(*parts, "interleaved" if self.gpt_oss else "gate-up")

    def _matrix(self, n: int, k: int, device: str) -> PackedMatrix:
        make = _codes if self.stored.layout.endswith(("-identity/1", "-w8a8/1")) else _words
        matrix = make(self.stored, self.shape.experts, n, k, device)
        if not self.gpt_oss:
            return matrix
        return replace(matrix, bias=torch.randn(self.shape.experts, n, device=device).to(torch.bfloat16))

    def weight_bytes(self, experts: float) -> float:
        """Return the bytes of that many experts."""
        return weight_bytes(FORMATS[self.stored.floor], self.shape, experts)

    @property
    def problem(self) -> Problem:
        """Problem of the layer on its GPU."""
        return _problem(self)

    def chosen(self, tokens: int) -> Any:
        """Return the plan that a call would have."""
        return FAMILIES[self.family].plan_for(self.problem, tokens)

    def cuts(self, tokens: int) -> tuple[Work, dict[Any, Any]]:
        """Return what a call has to do, and every plan that may be the best with how it cuts the products."""
        work, found = FAMILIES[self.family].cuts(self.problem, tokens)
        return work, {plan: cut for plan, *cut in found}

    def candidates(self, tokens: int) -> list[Any]:
        """List every plan that may be the best, the chosen one first."""
        return list(dict.fromkeys([self.chosen(tokens), *self.cuts(tokens)[1]]))


def _words(stored: Stored, experts: int, n: int, k: int, device: str) -> PackedMatrix:
    """Draw a matrix in Marlin's words, or in moeq's order of them."""
    words = torch.randint(
        -(2**31), 2**31 - 1, (experts, k // 16, KINDS[stored.kind].bits // 2 * n), dtype=torch.int32, device=device
    )
    if stored.element == "e4m3":
        words &= ~0x40404040  # codes below 2, none of them NaN
    size = (experts, k // stored.group, n)
    whole = None
    if stored.kind == "nvfp4":  # scales from 32 to 256, which the global scale brings near 1
        scale = torch.randint(0xA0, 0xB8, size, dtype=torch.uint8, device=device).view(stored.scale)
        whole = torch.full((experts, 1), 2.0**126 / (300 * k**0.5), device=device)
    elif stored.scale == torch.uint8:
        middle = 126 - round(math.log2(3 * k**0.5))
        scale = torch.randint(middle - 1, middle + 2, size, dtype=torch.uint8, device=device)
    else:
        spread = {"int8": 74, "int4": 4.6, "e4m3": 0.6}[stored.element]
        lift = 2.0**120 if stored.element == "e4m3" else 1.0
        scale = ((torch.rand(size, device=device) + 0.5) / (spread * k**0.5) * lift).to(stored.scale)
    return PackedMatrix(stored.layout, words, n, k, stored.element, stored.group, scale, global_scale=whole)


def _codes(stored: Stored, experts: int, n: int, k: int, device: str) -> PackedMatrix:
    """Draw a matrix of bytes as checkpoints have it."""
    if stored.element == "int8":
        codes = torch.randint(-128, 128, (experts, n, k), dtype=torch.int8, device=device)
        scale = (torch.rand(experts, n, 1, device=device) + 0.5) / (74 * k**0.5)
        return PackedMatrix(stored.layout, codes, n, k, "int8", -1, scale)
    codes = torch.randint(0, 126, (experts, n, k), dtype=torch.uint8, device=device)
    codes |= torch.randint(0, 2, codes.shape, dtype=torch.uint8, device=device) << 7
    size = (experts, -(-n // 128), -(-k // 128)) if stored.group else (experts, n, 1)
    scale = (torch.rand(size, device=device) + 0.5) / (130 * k**0.5)
    weight = codes.view(torch.float8_e4m3fn)
    return PackedMatrix(
        stored.layout, weight, n, k, "e4m3", stored.group or -1, scale, activation_dtype="fp8"
    )  # fmt: skip


#: Kernels of plans by the first word of a plan's name.
KERNELS: dict[str, tuple[Any, Any]] = {
    **{one.__name__: (one, w4a16.Plan) for one in (w4a16.Queue, w4a16.Wide, w4a16.Narrow, w4a16.Direct)},
    **{one.__name__: (one, w8a8.Int8Plan) for one in (w8a8.Int8Narrow, w8a8.Int8Wide, w8a8.Int8Direct)},
    "W4a8Wide": (w4a8.W4a8Wide, w4a8.W4a8Plan),
}


def plan_named(name: str) -> Any:
    """Return the plan that `name_of` gives this name. Raises ValueError where there is no such kernel."""
    found = re.fullmatch(r"(\w+) ([\w ]+) x(\d+)/(\d+)", name)
    if not found or found[1] not in (*KERNELS, "Mma"):
        raise ValueError(f"no kernel has a plan named {name!r}")
    values = [None if word == "None" else int(word) for word in found[2].split()]
    shares = int(found[3]), int(found[4])
    if found[1] == "Mma":
        return MmaPlan(*values, *shares)  # type: ignore[arg-type]
    kernel, plan = KERNELS[found[1]]
    types = [field.type for field in fields(kernel)]
    return plan(
        kernel(*(bool(one) if kind == "bool" else one for one, kind in zip(values, types, strict=False))), *shares
    )


def _spread(generator: random.Random, low: float, high: float) -> float:
    """Draw a number whose logarithm is uniform."""
    return math.exp(generator.uniform(math.log(low), math.log(high)))


def random_shape(generator: random.Random, bytes_each: float) -> Shape:
    """Draw sizes between those of the smallest and the largest layers of models, and somewhat beyond."""
    while True:
        experts = round(_spread(generator, 8, 512))
        if generator.random() < 0.5:
            experts = 1 << round(math.log2(experts))
        top_k = generator.choice((1, 2, 4, 4, 8, 8, 8))  # few, since some kernels are compiled for each
        hidden = round(_spread(generator, 1024, 8192) / 128) * 128
        intermediate = round(_spread(generator, 128, 14336) / 128) * 128
        weights = 3 * experts * hidden * intermediate
        if top_k <= experts // 2 and weights >= 1 << 25 and weights * bytes_each <= MAX_BYTES:
            return Shape(experts, top_k, hidden, intermediate)


def numbers_of_tokens(generator: random.Random, shape: Shape) -> list[int]:
    """Draw three numbers: from 2 to 512, for 0.5 to 100 tokens an expert, and from 1 to 4096."""
    found: list[int] = []
    for draw in (
        lambda: _spread(generator, 2, 512),
        lambda: _spread(generator, 0.5, 100) * shape.experts / shape.top_k,
        lambda: _spread(generator, 1, 4096),
    ):
        number = max(1, min(4096, round(draw())))
        while number in found:
            number = max(1, min(4096, round(draw())))
        found.append(number)
    return found


def with_silu(fmt: str) -> str:
    """Name a format in layers without gpt-oss's activation."""
    return f"{fmt}-silu" if fmt in GPT_OSS_FORMATS else fmt


def model_layer(name: str, fmt: str) -> Layer | None:
    """Return a real model's layer, gpt-oss's in MXFP4 and int4 as it is served; None where the format does not fit."""
    shape = SHAPES[name]
    layer = Layer(with_silu(fmt), name, shape)
    if name.startswith("gpt-oss"):
        if fmt == "int4":
            layer = replace(layer, shape=replace(shape, hidden=GPT_OSS_PADDED, intermediate=GPT_OSS_PADDED))
        elif fmt in GPT_OSS_FORMATS:
            return replace(layer, format=fmt)
        elif fmt in ("fp8-block", "nvfp4"):
            return None
    return layer if layer.weight_bytes(shape.experts) <= 2 * MAX_BYTES else None


def named_cells(names: list[str]) -> Iterator[tuple[Layer, list[int]]]:
    """Yield the cells that are named like `int4:qwen3-30b-a3b:256,512`, or `int4:64x8x3200x2944:300`.

    The numbers of a layer without a name are experts, choices of a token, hidden and intermediate features.
    """
    for name in names:
        fmt, shape, numbers = name.split(":")
        if shape in SHAPES:
            layer = model_layer(shape, fmt)
        else:
            layer = Layer(with_silu(fmt), "random", Shape(*map(int, shape.split("x"))))
        if layer is None:
            raise SystemExit(f"{name}: {shape} has no layer in {fmt}")
        yield layer, [int(one) for one in numbers.split(",")]


def cells(formats: list[str], count: int, seed: int) -> Iterator[tuple[Layer, list[int]]]:
    """Yield layers with their numbers of tokens: real and `count` random ones in each format, interleaved.

    So a sweep that ends early has timed about as many of either kind in each format.
    """
    if unknown := set(formats) - set(ROUND):
        raise SystemExit(f"{', '.join(sorted(unknown))}: only {', '.join(dict.fromkeys(ROUND))} are drawn")
    names = [*HELD_OUT, *KNOWN]
    turn = {fmt: 0 for fmt in formats}
    while any(one < 2 * max(count, len(names)) for one in turn.values()):
        for fmt in ROUND:
            if fmt not in turn:
                continue
            index, real = divmod(turn[fmt], 2)
            turn[fmt] += 1
            # A string seeds the same in every process.
            generator = random.Random(f"{seed} {fmt} {turn[fmt]}")
            if real and index < len(names):
                # Each format begins with another layer, so that all layers come early.
                layer = model_layer(names[(index + 3 * formats.index(fmt)) % len(names)], fmt)
            elif not real and index < count:
                bytes_each = FORMATS[STORED[fmt].floor].bits / 8
                layer = Layer(with_silu(fmt), "random", random_shape(generator, bytes_each))
            else:
                layer = None
            if layer is not None:
                yield layer, numbers_of_tokens(generator, layer.shape)


def layer_of(row: dict[str, Any]) -> Layer:
    """Return the layer of a row of results."""
    sizes = (row["experts"], row["top_k"], row["hidden"], row["intermediate"])
    return Layer(row["format"], row["shape"], Shape(*sizes), row.get("gpu", H200.name))


def gpu_called(device: str) -> str:
    """Return the key of `GPUS` for torch's name of a GPU, H200's where there is none."""
    words = device.split()
    return next((name for name in GPUS if name in words), H200.name)


@cache
def _problem(layer: Layer) -> Problem:
    x = torch.empty(0, layer.shape.hidden, dtype=torch.bfloat16, device="meta")
    whole = (layer.shape.top_k, 1, layer.epilogue, None)
    return prepare_for(x, layer.random_experts("meta"), *whole, gpu=layer.gpu, family=layer.family).problem

"""Cells of the sweep over plans: layers of real models and random ones, numbers of tokens, and every plan to time.

A cell is a format, a layer and a number of tokens. What is random follows from a seed alone.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch

from bench import hopper_bench, w8a8_bench
from bench.peers import shapes as peers
from bench.timing import Shape
from moeq_kernels import PackedExperts
from moeq_kernels.epilogue import SILU, Epilogue
from moeq_kernels.gpu import GPUS, H200
from moeq_kernels.hopper.w4a16 import w4a16_plan as w4a16
from moeq_kernels.hopper.w4a16.product_launches import alike
from moeq_kernels.hopper.w8a8 import w8a8_plan as w8a8
from moeq_kernels.mma.mma_plan import MmaPlan
from moeq_kernels.prepared import prepare_for
from moeq_kernels.problem import Problem
from moeq_kernels.schedules import FAMILIES

#: What each format of a cell is called in `hopper_bench.FORMATS`, or among the codes of `w8a8_bench`.
SIXTEEN_BITS = {
    "int4": "int4",
    "mxfp4": "mxfp4",
    "mxfp4-silu": "mxfp4",
    "moeq-mxfp4": "moeq-mxfp4",
    "moeq-mxfp4-silu": "moeq-mxfp4",
    "nvfp4": "nvfp4",
    "w8a16": "int8",
    "fp8-w8a16": "fp8",
    "mxfp8-w8a16": "mxfp8",
}
BYTES = {"w8a8": "int8", "fp8-block": "fp8-block", "fp8": "fp8"}
#: The order of formats: those whose plans matter most come twice.
ROUND = ("int4", "w8a8", "moeq-mxfp4", "fp8-block", "int4", "mxfp4", "w8a8", "nvfp4", "fp8")
#: Those that gpt-oss has with its own activation.
MXFP4 = ("mxfp4", "moeq-mxfp4")
#: Numbers of tokens of a layer in one format.
NUMBERS = 3
#: Bytes of the weights of a layer at most.
MOST_BYTES = 6e9
#: gpt-oss's features in int4, whose packed sizes have to be multiples of 128.
GPT_OSS_PADDED = 2944


@dataclass(frozen=True)
class Layer:
    """A format and a layer.

    Attributes:
        name: of the model, or `random`.
        gpu: a key of `moeq_kernels.gpu.GPUS`, for which plans are made.
    """

    format: str
    name: str
    shape: Shape
    gpu: str = H200.name

    @property
    def codes(self) -> str | None:
        """What `w8a8_bench` calls the codes; None of formats with 16-bit activations."""
        return BYTES.get(self.format)

    @property
    def family(self) -> str:
        """Of kernels."""
        return "hopper-w4a16" if self.codes is None else w8a8_bench.FAMILY_OF[self.codes]

    @property
    def stored(self) -> hopper_bench.Weights:
        """Of a format with 16-bit activations."""
        return hopper_bench.FORMATS[SIXTEEN_BITS[self.format]]

    @property
    def epilogue(self) -> Epilogue:
        """Its activation."""
        return hopper_bench.epilogue_of(self.shape) if self.codes is None else SILU

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Experts, choices of a token, hidden and intermediate features."""
        one = self.shape
        return one.experts, one.top_k, one.hidden, one.intermediate

    def random_experts(self, device: str = "cuda") -> PackedExperts:
        """Random weights."""
        if self.codes is None:
            return hopper_bench.random_experts(self.shape, self.stored, device)
        return w8a8_bench.random_experts(self.shape, self.codes, device)

    def weight_bytes(self, experts: float) -> float:
        """Of that many experts."""
        if self.codes is None:
            return hopper_bench.weight_bytes(self.shape, self.stored, experts)
        return w8a8_bench.weight_bytes(self.shape, experts, self.codes)

    def floor_us(self, tokens: int, hit: float) -> float:
        """Least time on an H200."""
        if self.codes is None:
            return hopper_bench.floor_us(self.shape, self.stored, tokens, hit)
        return w8a8_bench.floor_us(self.shape, tokens, hit, self.codes)

    @property
    def problem(self) -> Problem:
        """On its GPU."""
        return _problem(self)

    def chosen(self, tokens: int) -> Any:
        """The plan that a call would have."""
        return FAMILIES[self.family].plan_for(self.problem, tokens)

    def candidates(self, tokens: int) -> list[Any]:
        """Every plan that may be the best, the chosen one first."""
        found = list(_sixteen_bits(self, tokens) if self.codes is None else _bytes(self, tokens))
        chosen = self.chosen(tokens)
        return list(dict.fromkeys([chosen, *found]))


def name_of(plan: Any) -> str:
    """A plan's kernel with its sizes in the order of their fields, and its shares; no two plans have the same."""
    if isinstance(plan, MmaPlan):
        return f"Mma {plan.tokens} {plan.stages} {plan.rows} x{plan.gate_up_splits}/{plan.down_splits}"
    values = [getattr(plan.kernel, field.name) for field in fields(plan.kernel)]
    if isinstance(plan.kernel, w4a16.Queue | w4a16.Wide) and not values[-1]:
        values.pop()  # as results before there was this size have it
    words = " ".join(str(int(one)) if isinstance(one, bool) else str(one) for one in values)
    return f"{type(plan.kernel).__name__} {words} x{plan.gate_up_splits}/{plan.down_splits}"


def held_out(sizes: tuple[int, ...]) -> bool:
    """Whether a layer of these sizes is one that rules are not fitted on: about half are."""
    return hashlib.sha256(repr(tuple(sizes)).encode()).digest()[0] % 2 == 1


def _spread(generator: random.Random, low: float, high: float) -> float:
    """Uniform in its logarithm."""
    return math.exp(generator.uniform(math.log(low), math.log(high)))


def random_shape(generator: random.Random, bytes_each: float) -> Shape:
    """Sizes between those of the smallest and the largest layers that models have, and somewhat beyond."""
    while True:
        experts = round(_spread(generator, 8, 512))
        if generator.random() < 0.5:
            experts = 1 << round(math.log2(experts))
        top_k = generator.choice((1, 2, 4, 4, 8, 8, 8))  # few, since some kernels are compiled for each
        hidden = round(_spread(generator, 1024, 8192) / 128) * 128
        intermediate = round(_spread(generator, 128, 14336) / 128) * 128
        weights = 3 * experts * hidden * intermediate
        if top_k <= experts // 2 and weights >= 1 << 25 and weights * bytes_each <= MOST_BYTES:
            return Shape(experts, top_k, hidden, intermediate)


def numbers_of_tokens(generator: random.Random, shape: Shape) -> list[int]:
    """One number from 2 to 512, one by tokens for an expert from 0.5 to 100, one from 1 to 4096."""
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
    """A format's name in layers that do not have gpt-oss's activation."""
    return f"{fmt}-silu" if fmt in MXFP4 else fmt


def model_layer(name: str, fmt: str) -> Layer | None:
    """A real model's layer, MXFP4 and int4 of gpt-oss as those checkpoints are served; None where no format fits."""
    one = peers.SHAPES[name]
    shape = Shape(one.experts, one.top_k, one.hidden, one.intermediate)
    if name.startswith("gpt-oss"):
        if fmt == "int4":
            shape = replace(shape, hidden=GPT_OSS_PADDED, intermediate=GPT_OSS_PADDED)
        elif fmt in MXFP4:
            return Layer(fmt, name, replace(shape, gpt_oss=True))
        elif fmt in ("fp8-block", "nvfp4"):
            return None
    layer = Layer(with_silu(fmt), name, shape)
    return layer if layer.weight_bytes(shape.experts) <= 2 * MOST_BYTES else None


def named_cells(names: list[str]) -> Iterator[tuple[Layer, list[int]]]:
    """Cells as `int4:qwen3-30b-a3b:256,512` names them, or `int4:64x8x3200x2944:300` of a layer without a name.

    The numbers are experts, choices of a token, hidden and intermediate features.
    """
    for name in names:
        fmt, shape, numbers = name.split(":")
        if shape in peers.SHAPES:
            layer = model_layer(shape, fmt)
        else:
            layer = Layer(with_silu(fmt), "random", Shape(*map(int, shape.split("x"))))
        if layer is None:
            raise SystemExit(f"{name}: {shape} has no layer in {fmt}")
        yield layer, [int(one) for one in numbers.split(",")]


def cells(formats: list[str], count: int, seed: int) -> Iterator[tuple[Layer, list[int]]]:
    """Layers with their numbers of tokens, `count` random ones in each format, real and random ones in turns.

    A sweep that ends early has done about as many of either kind in each format.
    """
    if unknown := set(formats) - set(ROUND):
        raise SystemExit(f"{', '.join(sorted(unknown))}: only {', '.join(dict.fromkeys(ROUND))} are drawn")
    names = [*peers.HELD_OUT, *peers.KNOWN]
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
                # Each format begins elsewhere, so that all layers are seen early.
                layer = model_layer(names[(index + 3 * formats.index(fmt)) % len(names)], fmt)
            elif not real and index < count:
                bytes_each = 1.0 if fmt in BYTES else 0.57
                layer = Layer(with_silu(fmt), "random", random_shape(generator, bytes_each))
            else:
                layer = None
            if layer is not None:
                yield layer, numbers_of_tokens(generator, layer.shape)


QUEUES = (
    w4a16.QUEUE8,
    w4a16.Queue(8, 3, 3),
    w4a16.Queue(8, 5, 2, after=True),
    w4a16.Queue(8, 5, 2, after=True, up=1, down=1),
    w4a16.Queue(8, 10, 2, after=True, step=64),
    w4a16.Queue(8, 10, 2, after=True, step=64, up=1, down=1),
    w4a16.Queue(8, 6, 3, after=True, step=64),
    w4a16.Queue(8, 6, 3, after=True, step=64, up=1, down=1),
    w4a16.Queue(8, 20, 1, after=True, step=64),
    w4a16.QUEUE16,
    w4a16.QUEUE16_FOLDED,
    w4a16.Queue(16, 5, 2, up=1, down=1, least=8),
    w4a16.Queue(16, 5, 2, least=8),
    w4a16.Queue(16, 9, 2, step=64, least=8),
    w4a16.Queue(16, 9, 2, step=64, up=1, down=1, least=8),
    w4a16.Queue(16, 9, 2, after=True, step=64, rows=32, least=8),
    w4a16.Queue(16, 9, 2, after=True, step=64, rows=32, up=1, down=1, least=8),
    w4a16.Queue(16, 6, 3, step=64, rows=32, least=8),
    w4a16.QUEUE32,
    replace(w4a16.QUEUE32, least=8),
    w4a16.Queue(32, 8, 2, step=64, least=8),
    w4a16.Queue(32, 8, 2, step=64, up=1, down=1, least=8),
    w4a16.Queue(32, 8, 2, step=64, up=1, down=1, least=16),
    w4a16.QUEUE64,
    w4a16.QUEUE64_INT4,
)
WIDES = (*hopper_bench.WIDE, *(replace(one, fine=not one.fine) for one in hopper_bench.WIDE if one.tokens > 64))
NARROWS = (
    w4a16.NARROW8,
    w4a16.Narrow(16, 2, after=False, resident=4, registers=128),
)


def _rounded(splits: int) -> int:
    """A power of two: each number of shares is a build of its own."""
    return 1 << (splits.bit_length() - 1)


def _sixteen_bits(layer: Layer, tokens: int) -> Iterator[Any]:
    """Plans of the kernels for 16-bit activations, those of `mma.sync` among them."""
    shape, stored = layer.shape, layer.stored
    pairs = tokens * shape.top_k
    mean = w4a16.tokens_per_hit(pairs, shape.experts)

    def fitted(kernel: Any) -> Any:
        return w4a16.kernel_for(kernel, stored.kind, stored.group)

    if mean <= 48:
        mma = hopper_bench.mma_plan(shape, stored, tokens)
        yield replace(mma, gate_up_splits=_rounded(mma.gate_up_splits), down_splits=_rounded(mma.down_splits))
    if mean <= 1.6 and pairs <= 128:
        kernel = fitted(w4a16.DIRECT)
        up_steps, steps = -(-shape.hidden // kernel.step), -(-shape.intermediate // kernel.step)
        up = w4a16.shares_for(pairs * -(-shape.intermediate // 128), up_steps, 16)
        down = w4a16.shares_for(pairs * -(-shape.hidden // 256), steps, 8)
        yield w4a16.Plan(kernel, up, down)
        if up > 1:
            yield w4a16.Plan(kernel, up // 2, down)
    for kernel in NARROWS:
        if kernel.tokens / 24 <= mean <= kernel.tokens * 1.3:
            kernel = fitted(kernel)
            tiles = pairs / mean * max(1.0, mean / kernel.tokens)
            resident = H200.multiprocessors * kernel.resident
            up = w4a16.splits_for(tiles * -(-shape.intermediate // 128), -(-shape.hidden // 128), resident)
            down = w4a16.splits_for(tiles * -(-shape.hidden // 256), -(-shape.intermediate // 128), resident)
            yield w4a16.Plan(kernel, _rounded(up), _rounded(down))
            yield w4a16.Plan(kernel)
    both = alike(layer.problem.w13, layer.problem.w2)
    for kernel in QUEUES if both else ():
        if mean / 3 <= kernel.tokens and (kernel.least or kernel.tokens) <= max(16.0, mean * 6):
            yield w4a16.Plan(fitted(kernel))
    for kernel in WIDES:
        if min(mean / 3, 100) <= kernel.tokens <= mean * 8:
            kernel = fitted(kernel)
            yield w4a16.Plan(kernel)
            down_items = pairs / mean * max(1.0, mean / kernel.tokens) * -(-shape.hidden // (128 * kernel.warpgroups))
            shares = max(1, min(4, int(H200.multiprocessors / max(1.0, down_items))))
            yield w4a16.Plan(kernel, down_splits=shares)
            if 1 < 2 * shares <= 4 and down_items < 4 * H200.multiprocessors:
                yield w4a16.Plan(kernel, down_splits=2 * shares)  # the last items end sooner


def _bytes(layer: Layer, tokens: int) -> Iterator[Any]:
    """Plans of the kernels that multiply bytes."""
    shape = layer.shape
    pairs = tokens * shape.top_k
    mean = w4a16.tokens_per_hit(pairs, shape.experts)
    if layer.codes == "int8" and mean <= 1.6 and pairs <= 128 and shape.intermediate <= 4096:
        yield w8a8.direct_plan(pairs, shape.hidden, shape.intermediate)
    for kernel in w8a8_bench.NARROW:
        if mean / 2 <= kernel.tokens <= max(16, mean * 5) and not (layer.codes != "int8" and kernel.tokens == 128):
            tiles = pairs / mean * max(1.0, mean / kernel.tokens)
            groups, resident = kernel.warpgroups, kernel.resident
            up = w8a8.splits_for(tiles * -(-shape.intermediate // (64 * groups)), -(-shape.hidden // 128), resident)
            down = w8a8.splits_for(tiles * -(-shape.hidden // (128 * groups)), -(-shape.intermediate // 128), resident)
            yield w8a8.Int8Plan(kernel, up, down)
            yield w8a8.Int8Plan(kernel)
            if up > 1 and down > 1:
                yield w8a8.Int8Plan(kernel, 1, down)
    if mean >= 8:
        yield w8a8.Int8Plan(w8a8.WIDE)


def layer_of(row: dict[str, Any]) -> Layer:
    """The layer of a row of results."""
    sizes = (row["experts"], row["top_k"], row["hidden"], row["intermediate"])
    gpt_oss = row["format"] in MXFP4
    return Layer(row["format"], row["shape"], Shape(*sizes, gpt_oss), row.get("gpu", H200.name))


def gpu_called(device: str) -> str:
    """The key of `GPUS` for what torch calls a GPU; H200's where there is none for it."""
    words = device.split()
    return next((name for name in GPUS if name in words), H200.name)


@cache
def _problem(layer: Layer) -> Problem:
    experts, x = layer.random_experts("meta"), empty(layer, "meta")
    return prepare_for(
        x, experts, layer.shape.top_k, 1, layer.epilogue, None, gpu=layer.gpu, family=layer.family
    ).problem


def empty(layer: Layer, device: str) -> torch.Tensor:
    """Tokens of the layer's type, none of them."""
    dtype = torch.bfloat16 if layer.codes else layer.stored.x
    return torch.empty(0, layer.shape.hidden, dtype=dtype, device=device)

"""Layers that reach every Hopper kernel, the plans that suit each, and inputs of their calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from moeq_kernels import PackedExperts
from moeq_kernels.epilogue import Epilogue
from moeq_kernels.formats import find_format
from moeq_kernels.gpu import Gpu
from moeq_kernels.hopper.w4a8.w4a8_launches import KERNELS as W4A8_KERNELS
from moeq_kernels.hopper.w4a8.w4a8_launches import W4a8Plan
from moeq_kernels.hopper.w4a16.kinds import kind_of_format
from moeq_kernels.hopper.w4a16.w4a16_plan import Direct, Narrow, Plan, Queue, Wide, kernel_for, kernels
from moeq_kernels.hopper.w8a8.w8a8_plan import Int8Direct, Int8Narrow, Int8Plan, Int8Wide, direct_plan
from moeq_kernels.hopper.w8a8.w8a8_plan import kernels as byte_kernels_of
from moeq_kernels.launch import Launch
from moeq_kernels.mma.mma_plan import MmaPlan
from moeq_kernels.prepared import prepare_for
from moeq_kernels.schedules import schedule
from support import routing
from support.cases import Recipe, Routed

#: Layers with 16-bit activations.
LAYERS = {
    "small": Recipe(experts=8, hidden=512, intermediate=384, group_size=128),
    "odd": Recipe(experts=6, hidden=576, intermediate=192, group_size=64, seed=1),
    "g32": Recipe(experts=8, hidden=448, intermediate=320, group_size=32, seed=2),
    "zeros": Recipe(experts=8, hidden=512, intermediate=256, group_size=128, zero_points=True, seed=3),
    "zeros-g32": Recipe(experts=4, hidden=384, intermediate=160 * 2, group_size=32, zero_points=True, seed=4),
    "many": Recipe(experts=128, hidden=256, intermediate=256, group_size=128, seed=5),
    "crowd": Recipe(experts=256, hidden=256, intermediate=256, group_size=128, seed=6),
    "short": Recipe(experts=8, hidden=128, intermediate=128, group_size=64, seed=7),
    "deep": Recipe(experts=4, hidden=4096, intermediate=2048, group_size=128, seed=8),
    "scales-f16": Recipe(experts=8, hidden=512, intermediate=384, group_size=128, dtype=torch.float16, seed=9),
    "scales-f16-g32": Recipe(
        experts=4, hidden=448, intermediate=320, group_size=32, zero_points=True, dtype=torch.float16, seed=10
    ),
    "f16": Recipe(experts=8, hidden=512, intermediate=384, group_size=128, dtype=torch.float16, seed=11),
    "f16-zeros-g32": Recipe(
        experts=8, hidden=448, intermediate=320, group_size=32, zero_points=True, dtype=torch.float16, seed=12
    ),
    "channel": Recipe(experts=8, hidden=448, intermediate=320, group_size=-1, bias=True, seed=13),
    "f16-channel": Recipe(
        experts=4, hidden=512, intermediate=192, group_size=-1, zero_points=True, bias=True, dtype=torch.float16,
        seed=14,
    ),
    "int8": Recipe(element="int8", experts=8, hidden=512, intermediate=384, group_size=128, seed=15),
    "int8-zeros-g32": Recipe(
        element="int8", experts=6, hidden=448, intermediate=320, group_size=32, zero_points=True, seed=16
    ),
    "int8-channel": Recipe(element="int8", experts=8, hidden=576, intermediate=192, group_size=-1, seed=17),
    "int8-scales-f16": Recipe(
        element="int8", experts=8, hidden=512, intermediate=256, group_size=64, dtype=torch.float16, seed=18
    ),
    "f16-int8": Recipe(
        element="int8", experts=8, hidden=512, intermediate=256, group_size=128, dtype=torch.float16, seed=19
    ),
    "f16-scales-bf16": Recipe(experts=8, hidden=512, intermediate=256, group_size=64, zero_points=True, seed=29),
    "int8-zeros-f16": Recipe(
        element="int8", experts=8, hidden=512, intermediate=256, group_size=128, zero_points=True, dtype=torch.float16,
        seed=30,
    ),
    "throng": Recipe(experts=384, hidden=256, intermediate=256, group_size=32, seed=31),
    "int2": Recipe("moeq-wna16/1", "int2", experts=8, hidden=512, intermediate=384, group_size=64, seed=41),
    "int2-channel": Recipe(
        "moeq-wna16/1", "int2", experts=6, hidden=448, intermediate=320, group_size=-1, bias=True, seed=42
    ),
    "f16-int2": Recipe(
        "moeq-wna16/1", "int2", experts=8, hidden=512, intermediate=256, group_size=128, dtype=torch.float16, seed=43
    ),
    "int3": Recipe("moeq-wna16/1", "int3", experts=8, hidden=512, intermediate=384, group_size=128, bias=True, seed=44),
    "f16-int3-g32": Recipe(
        "moeq-wna16/1", "int3", experts=6, hidden=448, intermediate=320, group_size=32, dtype=torch.float16, seed=45
    ),
    "mxfp4": Recipe("marlin-mxfp4/1", "e2m1", experts=8, hidden=512, intermediate=384, seed=20),
    "mxfp4-oai": Recipe(
        "marlin-mxfp4-interleaved/1", "e2m1", experts=8, hidden=448, intermediate=320, order="interleaved",
        activation="swiglu_oai", limit=7.0, bias=True, seed=21,
    ),
    "mxfp4-halves": Recipe(
        "marlin-mxfp4/1", "e2m1", experts=64, hidden=256, intermediate=192, activation="swiglu_oai", limit=1.0,
        bias=True, seed=22,
    ),
    "mxfp4-gpt-oss": Recipe(
        "marlin-mxfp4-interleaved/1", "e2m1", experts=32, hidden=2880, intermediate=2880, order="interleaved",
        activation="swiglu_oai", limit=7.0, bias=True, seed=23,
    ),
    "mxfp4-permuted": Recipe("moeq-mxfp4/1", "e2m1", experts=8, hidden=512, intermediate=384, bias=True, seed=39),
    "padded-mxfp4": Recipe("marlin-mxfp4/1", "e2m1", experts=8, hidden=640, intermediate=256, bias=True, seed=24),
    "padded-int4": Recipe(experts=8, hidden=640, intermediate=192, group_size=64, bias=True, limit=0.5, seed=25),
    "nvfp4": Recipe("marlin-nvfp4/1", "e2m1", experts=8, hidden=512, intermediate=384, seed=32),
    "nvfp4-permuted": Recipe("moeq-nvfp4/1", "e2m1", experts=8, hidden=512, intermediate=384, bias=True, seed=40),
    "padded-nvfp4": Recipe("marlin-nvfp4/1", "e2m1", experts=8, hidden=640, intermediate=192, bias=True, seed=33),
    "f16-nvfp4": Recipe(
        "marlin-nvfp4-fp16/1", "e2m1", experts=4, hidden=576, intermediate=320, dtype=torch.float16, seed=34
    ),
    "fp8": Recipe("marlin-fp8/1", "e4m3", experts=8, hidden=512, intermediate=384, group_size=128, seed=35),
    "f16-fp8": Recipe(
        "marlin-fp8-fp16/1", "e4m3", experts=4, hidden=512, intermediate=256, group_size=128, dtype=torch.float16,
        seed=36,
    ),
    "fp8-channel": Recipe(
        "marlin-fp8/1", "e4m3", experts=8, hidden=448, intermediate=320, group_size=-1, bias=True, seed=37
    ),
    "mxfp8": Recipe("marlin-mxfp8/1", "e4m3", experts=8, hidden=448, intermediate=320, group_size=32, seed=38),
    "gelu": Recipe(experts=8, hidden=384, intermediate=256, activation="gelu", bias=True, seed=26),
    "gelu-tanh": Recipe(experts=8, hidden=384, intermediate=256, activation="gelu_tanh", order="interleaved", seed=27),
    "relu2": Recipe(experts=8, hidden=384, intermediate=512, activation="relu2", order="ungated", bias=True, seed=28),
}  # fmt: skip
_W8A8 = Recipe("int8-w8a8/1", "int8", experts=8, hidden=512, intermediate=384)
_ROWS = replace(_W8A8, layout="fp8-identity/1", element="e4m3", group_size=-1, activation_dtype="fp8")
_BLOCKS = replace(_ROWS, layout="fp8-block-identity/1", group_size=128)
_W4A8 = replace(_W8A8, layout="marlin-mxfp4/1", element="e2m1", group_size=32)
_INT4_FP8 = replace(_W8A8, layout="marlin-wna16/1", element="int4", group_size=128)
_OAI = {"bias": True, "order": "interleaved", "activation": "swiglu_oai", "limit": 7.0}

#: Layers whose activations are quantised to 8 bits.
BYTE_LAYERS = {
    "w8a8-small": _W8A8,
    "w8a8-odd": replace(_W8A8, experts=6, hidden=352, intermediate=208, seed=1),
    "w8a8-bias": replace(_W8A8, hidden=384, intermediate=320, bias=True, seed=2),
    "w8a8-oai": replace(_W8A8, hidden=720, intermediate=368, seed=3, **_OAI),
    "w8a8-half": replace(_W8A8, hidden=512, intermediate=256, dtype=torch.float16, seed=4),
    "w8a8-many": replace(_W8A8, experts=128, hidden=256, intermediate=256, seed=5),
    "w8a8-crowd": replace(_W8A8, experts=256, hidden=256, intermediate=128, seed=6),
    "w8a8-short": replace(_W8A8, hidden=64, intermediate=48, seed=7),
    "w8a8-deep": replace(_W8A8, experts=4, hidden=4096, intermediate=2048, seed=8),
    "fp8-fp8": _ROWS,
    "fp8-fp8-odd": replace(_ROWS, experts=6, hidden=352, intermediate=208, bias=True, seed=9),
    "fp8-fp8-oai": replace(_ROWS, hidden=720, intermediate=368, seed=10, **_OAI),
    "fp8-fp8-half": replace(_ROWS, dtype=torch.float16, seed=11),
    "fp8-fp8-many": replace(_ROWS, experts=128, hidden=256, intermediate=256, seed=12),
    "fp8-fp8-deep": replace(_ROWS, experts=4, hidden=8192, intermediate=2048, seed=13),
    "blocks": _BLOCKS,
    "blocks-odd": replace(_BLOCKS, experts=6, hidden=336, intermediate=256, bias=True, seed=14),
    "blocks-oai": replace(_BLOCKS, hidden=720, intermediate=384, seed=15, **_OAI),
    "blocks-many": replace(_BLOCKS, experts=128, hidden=256, intermediate=256, seed=16),
    "w4a8": _W4A8,
    "w4a8-bias": replace(_W4A8, hidden=448, intermediate=320, bias=True, seed=17),
    "w4a8-oai": replace(_W4A8, layout="marlin-mxfp4-interleaved/1", hidden=448, intermediate=320, seed=18, **_OAI),
    "w4a8-many": replace(_W4A8, experts=128, hidden=256, intermediate=256, seed=19),
    "int4-fp8": _INT4_FP8,
    "int4-fp8-g32": replace(_INT4_FP8, hidden=448, intermediate=320, group_size=32, bias=True, seed=20),
    "int4-fp8-channel": replace(_INT4_FP8, hidden=448, intermediate=320, group_size=-1, seed=21, **_OAI),
}
#: Layers of all families.
EVERY = LAYERS | BYTE_LAYERS
#: Families of kernels for 8-bit activations, by the weights' element.
FAMILIES = {"int8": "hopper-w8a8", "e4m3": "hopper-fp8", "e2m1": "hopper-w4a8", "int4": "hopper-w4a8"}
#: Prefixes of the names of layers whose tokens are float16, or lack the last 136 packed features.
FLOAT16, PADDED = "f16", "padded-"


@dataclass(frozen=True)
class Calls:
    """Facts that all calls of a layer share: the family of kernels, the features of x and its dtype."""

    family: str
    hidden: int
    dtype: torch.dtype


def top_k_of(recipe: Recipe) -> int:
    """Return how many experts each token chooses."""
    return min(8 if recipe.experts > 8 else 2, recipe.experts)


def routed(
    kind: str, tokens: int, hidden: int, experts: int, top_k: int, seed: int, dtype: torch.dtype, device: str = "cuda"
) -> Routed:
    """Draw tokens and the experts that they choose; `holes` leaves out two choices of five."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator, device=device).to(dtype)
    ids = routing.choose_experts(kind, tokens, experts, top_k, generator)
    weights = torch.rand(tokens, top_k, generator=generator, device=device)
    if kind == "holes":
        ids = torch.where(torch.rand(ids.shape, generator=generator, device=device) < 0.4, -1, ids)
    return Routed(x, weights / weights.sum(1, keepdim=True), ids.to(torch.int64 if kind == "zipf" else torch.int32))


def epilogue_of(recipe: Recipe) -> Epilogue:
    """Return the activation of a layer."""
    alpha = {} if recipe.alpha is None else {"alpha": recipe.alpha}
    return Epilogue(
        recipe.activation, recipe.order != "ungated", recipe.order == "interleaved", limit=recipe.limit or 0.0, **alpha
    )


def calls_of(name: str) -> Calls:
    """Return what calls of the named layer share."""
    if name in BYTE_LAYERS:
        recipe = BYTE_LAYERS[name]
        return Calls(FAMILIES[recipe.element], recipe.hidden, recipe.dtype)
    hidden = LAYERS[name].hidden - 136 * name.startswith(PADDED)
    return Calls("hopper-w4a16", hidden, torch.float16 if name.startswith(FLOAT16) else torch.bfloat16)


def name_of(plan: Any) -> str:
    """Name a plan: its kernel, the kernel's sizes in the order of their fields, and its shares of k."""
    if plan is None:
        return "chosen"
    if isinstance(plan, MmaPlan):
        return f"Mma {plan.tokens} {plan.stages} {plan.rows} x{plan.gate_up_splits}/{plan.down_splits}"
    values = [getattr(plan.kernel, field.name) for field in fields(plan.kernel)]
    if isinstance(plan.kernel, Queue | Wide) and not values[-1]:
        values.pop()  # recorded results were named before these kernels had their last size
    words = " ".join(str(int(one)) if isinstance(one, bool) else str(one) for one in values)
    return f"{type(plan.kernel).__name__} {words} x{plan.gate_up_splits}/{plan.down_splits}"


def plans(recipe: Recipe, tokens: int) -> Iterator[Plan | None]:
    """Yield the chosen plan (None) and every kernel of plans, also with shares of k and in both scale modes."""
    yield None
    fmt = find_format(recipe.layout, recipe.element)
    kind = kind_of_format(fmt)
    group = max(0, fmt.group_sizes[0] if len(fmt.group_sizes) == 1 else recipe.group_size)
    gated = recipe.order != "ungated"
    for kernel in dict.fromkeys(kernel_for(base, kind, group) for base in kernels(kind)):
        if isinstance(kernel, Direct):
            if gated and tokens <= 40:
                yield Plan(kernel)
                yield Plan(replace(kernel, stages=2, after=False), 3, 2)
            continue
        yield Plan(kernel)
        if isinstance(kernel, Wide):
            yield Plan(kernel, 1, 2)
        if isinstance(kernel, Narrow):
            yield Plan(kernel, 2 * gated or 1, 2)
        if isinstance(kernel, Queue):
            yield Plan(replace(kernel, up=0, down=0))
            if kernel.tokens > 8 and kernel.least != 8:
                yield Plan(replace(kernel, least=8))
            if kernel.after and group:
                yield Plan(replace(kernel, after=False))


def plans_of(name: str, tokens: int) -> Iterator[Any]:
    """Yield the plans of the named layer."""
    yield from (byte_plans if name in BYTE_LAYERS else plans)(EVERY[name], tokens)


def byte_kernels(recipe: Recipe) -> Sequence[Int8Narrow | Int8Wide]:
    """Return the kernels that plans of an int8 or e4m3 layer come from."""
    two_blocks = recipe.layout == "fp8-block-identity/1" and recipe.order == "interleaved"
    return byte_kernels_of(recipe.element == "int8", wide=not two_blocks)


def byte_plans(recipe: Recipe, tokens: int) -> Iterator[Int8Plan | W4a8Plan | None]:
    """Yield the chosen plan (None), every kernel and two more, narrow ones also with shares of k."""
    yield None
    if FAMILIES[recipe.element] == "hopper-w4a8":
        yield from map(W4a8Plan, W4A8_KERNELS)
        return
    int8 = recipe.element == "int8"
    if tokens <= 40 and int8:
        few = direct_plan(8 * tokens, recipe.hidden, recipe.intermediate)
        yield few
        yield replace(few, kernel=Int8Direct(2), down_splits=1)
    for kernel in (*byte_kernels(recipe), Int8Narrow(8, 10), Int8Narrow(16, 5, warpgroups=2)):
        yield Int8Plan(kernel)
        if isinstance(kernel, Int8Narrow):
            yield Int8Plan(kernel, 2, 3)


def on_meta(packed: PackedExperts) -> PackedExperts:
    """Return the layer on `meta`: shapes and types without numbers."""
    w13, w2 = (
        replace(one, **{name: part.to("meta") for name, part in vars(one).items() if isinstance(part, Tensor)})
        for one in (packed.w13, packed.w2)
    )
    return replace(packed, w13=w13, w2=w2)


def launches_of(
    calls: Calls, recipe: Recipe, packed: PackedExperts, tokens: int, kind: str, plan: Any, gpu: str | None = None
) -> tuple[tuple[Launch, ...], Gpu]:
    """Return what a call launches and on which GPU; `gpu` names one where the weights are on `meta`."""
    known = 2 * recipe.experts if kind == "mapped" else None
    x = torch.empty(0, calls.hidden, dtype=calls.dtype, device=packed.w13.weight.device)
    layer = prepare_for(
        x, packed, top_k_of(recipe), tokens, epilogue_of(recipe), known, family=calls.family, plan=plan, gpu=gpu
    )
    return schedule(calls.family, layer.problem, tokens, plan).launches, layer.problem.gpu

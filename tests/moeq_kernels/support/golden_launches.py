"""What runs for many layers, kept in `tests/data/kernels/launches.json`: plans, kernels, a digest of their launches.

Plans and sizes were measured on GPUs, and nothing else notices on a CPU that others are chosen. Where a row changes, so
does what runs: measure (`bench.plan_regret`), then `python -m support.golden_launches` writes the file anew.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moeq_kernels import PackedExperts, prepare
from moeq_kernels.areas import Area, Box
from moeq_kernels.formats import FORMATS
from moeq_kernels.gpu import GPUS
from moeq_kernels.hopper.cost import Work, rounded
from moeq_kernels.hopper.w4a16 import w4a16_plan as w4a16
from moeq_kernels.hopper.w4a16.kinds import KINDS
from moeq_kernels.hopper.w8a8 import w8a8_plan as w8a8
from moeq_kernels.launch import Launch
from moeq_kernels.prepared import PreparedLayer
from moeq_kernels.schedules import FAMILIES, schedule
from moeq_kernels.tuning import choose_blocks
from support.cases import make_layer, meta_experts, meta_matrix
from support.hopper_layers import LAYERS, on_meta

FILE = Path(__file__).resolve().parents[2] / "data" / "kernels" / "launches.json"

#: Tokens of calls, of which the last have more pairs than one kernel sorts.
TOKENS = (1, 5, 40, 300, 5000)
#: Experts, choices of a token, hidden and intermediate sizes: few large experts and many small ones.
SIZES = ((8, 2, 4096, 1536), (128, 8, 2048, 768))

#: Sizes that end just behind whole blocks, of which there are so many that one feature more a block makes one fewer.
LONG = meta_experts(8, 16448, 8256, group=64)


def _experts(layout: str, element: str, sizes: tuple[int, int, int, int]) -> PackedExperts:
    groups = FORMATS[layout, element].group_sizes
    return meta_experts(sizes[0], *sizes[2:], layout, element, 128 if 128 in groups else groups[0])


def _interleaved(layout: str) -> PackedExperts:
    return replace(_experts(layout, "e4m3", SIZES[1]), w13_order="interleaved")


def _with(experts: PackedExperts, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> PackedExperts:
    """Return the layer with one more tensor `[experts, n or so]` in each matrix."""
    changed = [
        replace(one, **{name: torch.empty(one.num_experts, *(shape or (one.n,)), dtype=dtype, device="meta")})
        for one in (experts.w13, experts.w2)
    ]
    return replace(experts, w13=changed[0], w2=changed[1])


def of_formats() -> Iterator[tuple[str, PreparedLayer]]:
    """Yield a name and three layers for each format: the last for `mma.sync`, where that reads it."""
    for (layout, element), fmt in FORMATS.items():
        if fmt.act_order or not fmt.group_sizes:
            continue
        for sizes in SIZES:
            options: dict[str, Any] = {"dtype": getattr(torch, fmt.dtypes[-1]), "top_k": sizes[1]}
            made = prepare(_experts(layout, element, sizes), max_tokens=300, gpu="H200", **options)
            yield f"{layout} {element}, {sizes[0]} experts", made
        yield (
            f"{layout} {element} on A100",
            prepare(_experts(layout, element, sizes), gpu="A100", max_tokens=9, **options),
        )


def of_options() -> Iterator[tuple[str, PreparedLayer]]:
    """Yield a name and a layer for options that change launches."""
    int4 = _experts("marlin-wna16/1", "int4", SIZES[1])
    zeros = replace(int4.w13, zero=torch.empty(128, 16, 192, dtype=torch.int32, device="meta"))
    zeros_2 = replace(int4.w2, zero=torch.empty(128, 6, 256, dtype=torch.int32, device="meta"))
    no_gate = meta_matrix("marlin-wna16/1", "int4", 128, 768, 2048, 128)
    mxfp4 = _experts("marlin-mxfp4-interleaved/1", "e2m1", SIZES[0])
    for name, experts, given in (
        ("biases", _with(int4, "bias"), {}),
        ("zero points", replace(int4, w13=zeros, w2=zeros_2), {}),
        ("expert map", int4, {"num_experts": 512}),
        ("weights on the input", int4, {"router_weight_on_input": True}),
        ("no gate", replace(int4, w13=no_gate, w13_order="ungated"), {"activation": "relu2"}),
        ("one choice", int4, {"top_k": 1}),
        ("narrow tokens", int4, {"hidden_size": 2000}),
        ("gpt-oss", replace(_with(mxfp4, "bias"), w13_order="interleaved"), {"activation": "swiglu_oai", "limit": 7.0}),
        ("two formats", replace(int4, w2=_experts("marlin-wna16/1", "int8", SIZES[1]).w2), {}),
        ("one scale in w2", replace(int4, w2=meta_experts(128, 2048, 768, group=-1).w2), {}),
        ("fp8 rows", _experts("fp8-identity/1", "e4m3", SIZES[1]), {"activation_dtype": "fp8"}),
        ("fp8 blocks", _experts("fp8-block-identity/1", "e4m3", SIZES[1]), {"activation_dtype": "fp8"}),
        ("fp8 blocks, interleaved", _interleaved("fp8-block-identity/1"), {"activation_dtype": "fp8"}),
        ("long rows", LONG, {}),
        ("long rows on A100", LONG, {"gpu": "A100"}),
        ("long rows of int8", meta_experts(8, 16448, 8256, "int8-w8a8/1", "int8", -1), {}),
        ("unaligned int8", meta_experts(64, 1072, 688, "int8-w8a8/1", "int8", -1), {}),
        ("int4 by fp8", int4, {"activation_dtype": "fp8"}),
    ):
        yield name, prepare(experts, **{"top_k": 8, "max_tokens": 300, "gpu": "H100", **given})


def of_gpus() -> Iterator[tuple[str, PreparedLayer]]:
    """Yield a name and a layer for each GPU."""
    int4 = _experts("marlin-wna16/1", "int4", SIZES[1])
    for gpu in GPUS:
        yield gpu, prepare(int4, top_k=8, max_tokens=300, gpu=gpu)


def _text(argument: Any) -> str:
    if isinstance(argument, Area):
        return f"{argument.root} {argument.dtype} {argument.shape} {argument.strides} {argument.offset}"
    if isinstance(argument, Box):
        return f"{_text(argument.area)} by {argument.block} {argument.layout.swizzle_byte_width}"
    return str(argument)


def lines_of(launch: Launch) -> Iterator[str]:
    """Yield what a launch is given, one argument a line."""
    yield f"{launch.kernel} x {launch.programs}"
    for values in (launch.arguments, launch.constants, launch.options):
        yield from (f"{name} {_text(value)}" for name, value in sorted(values.items()))


def row_of(layer: PreparedLayer, tokens: int, plan: Any = None) -> dict[str, Any]:
    """Return what a call runs; times are the least, the one after it, and the sum over all plans."""
    module = FAMILIES[layer.family]
    planned = schedule(layer.family, layer.problem, tokens, plan)
    lines = [line for launch in planned.launches for line in lines_of(launch)]
    ranked = getattr(module, "ranked_plans", lambda *_: ())(layer.problem, rounded(tokens))
    times = [time for time, _ in ranked]
    return {
        "plan": str(plan or module.plan_for(layer.problem, tokens)),
        "times": [float(f"{time:.10g}") for time in (*times[:2], sum(times))],
        "kernels": " ".join(one.kernel.rpartition(":")[2] for one in planned.launches),
        "bytes": [planned.workspace_bytes, layer.workspace_bytes(min(tokens, layer.max_tokens))],
        "digest": _digest(lines),
    }


def of_tables() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what the tables say of each format and each GPU, and the tiles of the portable kernels."""
    for (layout, element), fmt in FORMATS.items():
        row = {key: value for key, value in vars(fmt).items() if not callable(value)}
        row |= {"weight": fmt.weight_shape(256, 512), "high": fmt.high_shape and fmt.high_shape(256, 512)}
        row |= {order: fmt.scale_shape(order, 384, 12) for order in (fmt.group_order, fmt.single_order) if order}
        row |= {"zero": fmt.zero_shape(256, 4)} if fmt.zero_points else {}
        yield f"{layout} {element}", {key: str(value) for key, value in row.items()}
        for fp8 in ("", "native", "decoded") if fmt.fp8_activations else ("",):
            tiles = {
                f"{rows} rows, {shared} KB": str(list(vars(choose_blocks(
                    rows, fmt, shared=shared * 1024, interpret=False, fp8=fp8)).values()))
                for rows, shared in itertools.product((1, 12, 17, 33, 64, 65), (64, 99, 227))
            }  # fmt: skip
            yield f"{layout} {element} tiles {fp8}", {"digest": _digest(tiles.items())}
    for gpu in GPUS.values():
        yield f"{gpu.name} itself", {"gpu": list(map(str, vars(gpu).values()))}


def _digest(lines: Iterable[Any]) -> str:
    return hashlib.sha256("\n".join(map(str, lines)).encode()).hexdigest()[:16]


def of_plans() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield rows of plans that need not be chosen."""
    kernels = w4a16.kernels("uint4")
    of_long = [one for one in kernels if isinstance(one, w4a16.Narrow | w4a16.Wide | w4a16.Queue)]
    for name, experts, some in (
        ("small", on_meta(make_layer(replace(LAYERS["small"], experts=4))[0]), kernels),
        ("zeros-g32", on_meta(make_layer(replace(LAYERS["zeros-g32"], experts=4))[0]), kernels[:9]),
        ("long", LONG, of_long),
    ):
        layer = prepare(experts, top_k=2, max_tokens=40, gpu="H200")
        for kernel in some:
            plan = w4a16.Plan(w4a16.kernel_for(kernel, "uint4", experts.w13.group_size), 2, 3)
            yield f"{name}, {kernel}", row_of(layer, 40, plan)
    int8 = prepare(_experts("int8-w8a8/1", "int8", SIZES[0]), top_k=2, max_tokens=40, gpu="H200")
    for kernel in (*w8a8.kernels(True), w8a8.Int8Direct(2)):
        yield f"int8, {kernel}", row_of(int8, 40, w8a8.Int8Plan(kernel, 2, 3))


def of_sizes() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the candidates for sizes at random, by kind of codes and GPU: limits, shares of k and their rounding."""
    draw = random.Random(1)
    for gpu, kind in itertools.product(("H200", "A100"), ("int8", "e4m3-blocks", *KINDS)):
        found: list[Any] = []
        for _ in range(40):
            experts, groups = draw.choice((8, 60, 128, 384)), (0, 16, 32, 128)
            top_k, tokens = draw.randint(1, 8), int(2 ** draw.uniform(0, 13))
            hidden, intermediate = 64 * draw.randint(2, 120), 64 * draw.randint(2, 60)
            work = Work(
                tokens * top_k, experts, hidden, intermediate, kind, top_k, draw.choice(groups), GPUS[gpu],
                both=draw.random() < 0.8, gated=draw.random() < 0.8,
            )  # fmt: skip
            found += w4a16.candidates(work, mma=True) if kind in KINDS else w8a8.candidates(work, draw.random() < 0.5)
        yield f"{kind}, {gpu}", {"candidates": len(found), "digest": _digest(found)}


def _of_layers(layers: Iterable[tuple[str, PreparedLayer]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, layer in layers:
        yield from ((f"{name}, {tokens} tokens", row_of(layer, tokens)) for tokens in TOKENS)


#: Parts of the file.
PARTS: dict[str, Callable[[], dict[str, dict[str, Any]]]] = {
    "formats": lambda: dict(_of_layers(of_formats())),
    "options": lambda: dict(_of_layers(of_options())),
    "gpus": lambda: dict(_of_layers(of_gpus())),
    "tables": lambda: dict(of_tables()),
    "plans": lambda: dict(of_plans()),
    "sizes": lambda: dict(of_sizes()),
}


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    parts = []
    for part, made in PARTS.items():
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in made().items())
        parts.append(f"{json.dumps(part)}: {{\n{lines}\n}}")
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")

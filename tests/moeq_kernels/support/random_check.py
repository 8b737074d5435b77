"""Check random problems against the float32 reference: shapes, formats, routing, graphs and eager calls.

    python -m support.random_check --out results.json --problems 10000 [--seconds 600]   # on a GPU
    python -m support.random_check --family mma-w4a16 --formats nvfp4,fp8 --problems 500
    python -m support.random_check --family hopper-w4a8 --plans "W4a8Wide 160" --problems 400
    python -m support.random_check --interpreter --family hopper-fp8 --problems 200       # small problems, no GPU

A problem is one call of a random layer: formats, groups, zero points, biases, activations, row orders, 1 to 1024
experts, up to 32 choices, k that is no multiple of a step, x narrower than the packed sizes. Tokens and routing are
random (uniform, Zipf, the same experts for all, choices without an expert, experts on other ranks). Calls are eager or
replayed from a graph, with or without a caller's workspace full of NaN. Some calls bring NaN or infinity in one token,
which must not show in another. An error may be 1.2 times that of 16-bit products on dequantised weights, and in the
worst row twice that. Without a GPU the portable kernels run in Triton's interpreter and the Hopper kernels as
`gluon_on_cpu` runs them, with random plans and a few multiprocessors. The exit code is 1 where a problem fails.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeq_kernels import PackedExperts, PreparedLayer, interpreter
from moeq_kernels import prepared as calls
from moeq_kernels.activations import GATED, UNGATED
from moeq_kernels.compiling import Specialisation, compile_all, specialise
from moeq_kernels.formats import FORMATS
from moeq_kernels.gpu import Gpu
from moeq_kernels.hopper.support import FLOATS, FP8
from moeq_kernels.hopper.w4a8 import w4a8_launches as w4a8
from moeq_kernels.hopper.w4a16.product_launches import share_constants
from moeq_kernels.hopper.w4a16.w4a16_plan import Queue
from moeq_kernels.hopper.w8a8 import w8a8_launches as w8a8
from moeq_kernels.hopper.w8a8.w8a8_plan import Int8Narrow, Int8Plan
from moeq_kernels.prepared import prepare_for
from moeq_kernels.schedules import FAMILIES, schedule
from moeq_kernels.sorting import PAIR_LIMITS, TOKEN_LIMITS
from moeq_kernels.warming import warmup
from support.cases import Recipe, make_layer
from support.comparison import FACTOR, random_map
from support.hopper_layers import byte_kernels, epilogue_of, name_of, plans, routed
from support.planned import pretend
from support.reference import Layer, moe, relative_error, worst_row

ROUTINGS = ("uniform", "uniform", "zipf", "same", "holes", "mapped")
#: Problems of one layer.
PER_LAYER = 125
#: Layers that are made and compiled together.
BATCH = 8
#: Largest error of the worst row over that of 16-bit products: outputs of experts may be rounded before their sum.
ROW_FACTOR = 2.0
#: Largest number of weights of a layer and of tokens of a call, on a GPU and in the interpreter.
LIMITS = {"cuda": (64 << 20, 3000), "cpu": (120_000, 64)}


@dataclass(frozen=True)
class Drawn:
    """A random layer, and facts that all its calls share."""

    recipe: Recipe
    top_k: int
    hidden: int
    family: str | None
    max_tokens: int


@dataclass(frozen=True)
class Given:
    """Inputs of a call; `local` numbers the chosen experts as this layer does, -1 for experts elsewhere."""

    x: Tensor
    weights: Tensor
    ids: Tensor
    expert_map: Tensor | None
    local: Tensor


@dataclass(frozen=True)
class Failure:
    """A problem that went wrong; infinite errors stand for NaN."""

    layer: str
    tokens: int
    routing: str
    how: str
    what: str
    error: float
    plain_error: float


def choices(family: str | None, formats: str) -> list[tuple[str, str]]:
    """List layouts and elements that the family reads and whose layout's name holds one of `formats`."""
    integers = [("marlin-wna16/1", "int4")] * 3 + [("marlin-wna16/1", "int8")]
    mxfp4 = [(f"{name}/1", "e2m1") for name in ("marlin-mxfp4", "marlin-mxfp4-interleaved", "moeq-mxfp4")]
    few_bits = [("moeq-wna16/1", "int2"), ("moeq-wna16/1", "int3")]
    w8a8 = [("int8-w8a8/1", "int8")]
    read = {
        None: [*integers, *few_bits, *w8a8, *mxfp4],
        "hopper-w4a16": [*integers, *few_bits, *mxfp4, *FLOATS],
        "hopper-w8a8": w8a8,
        "hopper-fp8": list(FP8),
        "hopper-w4a8": [*mxfp4, ("marlin-wna16/1", "int4")],
        "mma-w4a16": [*integers, *mxfp4, *FLOATS],
        "portable": list(FORMATS),
    }[family]
    if not formats:
        return read
    named = [key for key in read if any(part in key[0] for part in formats.split(","))]
    named = named or [key for key in FORMATS if family is None and any(part in key[0] for part in formats.split(","))]
    if not named:
        raise SystemExit(f"{family or 'no family'} reads no layout whose name holds one of {formats}")
    return named


def draw(generator: random.Random, family: str | None, device: str, formats: str = "") -> Drawn:
    """Draw a layer of at most LIMITS weights; `formats` are words that its layout's name has to hold."""
    layout, element = generator.choice(choices(family, formats))
    fmt = FORMATS[layout, element]
    groups = [one for one in fmt.group_sizes if one in (32, 64, 128) or (one == -1 and not fmt.act_order)]
    group = generator.choice(groups or [-1])
    step = max(fmt.k_multiple, fmt.n_multiple, 16 if layout == "int8-w8a8/1" or family == "hopper-fp8" else 8, group)
    steps = (16 if family == "hopper-fp8" else step, step)  # these read a last group that is not whole
    while True:
        experts = int(2 ** generator.uniform(0, 10 if device == "cuda" else 3.6))
        widest = 4096 if device == "cuda" else 320
        hidden, intermediate = (one * generator.randint(1, max(1, widest // one)) for one in steps)
        if experts * hidden * intermediate * 3 <= LIMITS[device][0]:
            break
    always = family == "hopper-fp8" or layout in ("int8-w8a8/1", "marlin-mxfp4-interleaved/1")
    gated = generator.random() < 0.9 or always
    order = generator.choice(["gate-up", "interleaved"]) if gated else "ungated"
    if layout == "marlin-mxfp4/1" and gated:
        order = "gate-up"
    if layout == "marlin-mxfp4-interleaved/1":
        order = "interleaved"
    activation = generator.choice(["silu", *GATED] if gated else UNGATED)
    dtype = getattr(torch, generator.choice(fmt.dtypes))
    zeros = fmt.zero_points and family != "hopper-w4a8"
    fp8 = fmt.fp8_activations and family in (None, "portable") and generator.random() < 0.5
    recipe = Recipe(
        layout, element, experts=experts, hidden=hidden, intermediate=intermediate, group_size=group, order=order,
        activation=activation, alpha=1.5 if activation == "situ" else None,
        limit=0.7 if activation == "swiglu_step" else generator.choice([None, 0.7]) if gated else None,
        bias=generator.random() < 0.3,
        zero_points=zeros and generator.random() < 0.4, dtype=dtype, seed=generator.randrange(1 << 30),
        activation_dtype="fp8" if fp8 or family == "hopper-fp8" else "",
    )  # fmt: skip
    top_k = min(generator.choice([1, 2, 4, 8, 10, 32]), experts)
    less = 16 if family == "hopper-w4a8" else 8
    narrower = hidden - less if generator.random() < 0.2 and hidden > 16 else hidden
    most = generator.choice([one for one in (24, 64, 700, 3000) if device == "cuda" or one <= LIMITS[device][1]])
    return Drawn(recipe, top_k, narrower, family, most)


def random_plan(drawn: Drawn, packed: PackedExperts, generator: random.Random, named: str = "") -> Any:
    """Draw a kernel that suits the layer, and shares of k; None stands for the chosen plan.

    With `named`, words of which the plan's name has to hold one, the result is None where no plan for the layer does.
    """
    if named:
        if drawn.family not in ("hopper-w4a16", "hopper-w8a8", "hopper-fp8", "hopper-w4a8"):
            raise SystemExit("--plans needs --family hopper-w4a16, hopper-w8a8, hopper-fp8 or hopper-w4a8")
        found = (random_plan(drawn, packed, generator) for _ in range(100))
        return next((one for one in found if any(part in name_of(one) for part in named.split(","))), None)
    if drawn.family == "hopper-w4a8":
        return w4a8.W4a8Plan(generator.choice(w4a8.KERNELS))
    if drawn.family == "mma-w4a16":
        return None
    if drawn.family == "hopper-w4a16":
        both = share_constants(packed.w13, packed.w2)
        found = list(plans(drawn.recipe, 1))
        return generator.choice([one for one in found if both or one is None or not isinstance(one.kernel, Queue)])
    kernel = generator.choice(byte_kernels(drawn.recipe))
    if not isinstance(kernel, Int8Narrow):
        return Int8Plan(kernel)
    shares = [-(-size // 128) for size in (drawn.recipe.hidden, drawn.recipe.intermediate)]
    return Int8Plan(kernel, *(generator.choice([one for one in (1, 1, 2, 3) if one <= most]) for most in shares))


def prepared(drawn: Drawn, packed: Any, mapped: bool, plan: Any = None) -> PreparedLayer:
    """Prepare the layer for calls with or without a map of twice its experts."""
    x = torch.empty(0, drawn.hidden, dtype=drawn.recipe.dtype, device=packed.w13.weight.device)
    known = 2 * drawn.recipe.experts if mapped else None
    epilogue = epilogue_of(drawn.recipe)
    return prepare_for(x, packed, drawn.top_k, drawn.max_tokens, epilogue, known, family=drawn.family, plan=plan)


def compile_planned(layers: list[PreparedLayer]) -> float:
    """Compile what layers with plans of their own need, in parallel; return the seconds."""
    wanted: dict[Gpu, set[Specialisation]] = {}
    for layer in layers:
        edges = {pairs // layer.problem.top_k for pairs in (*PAIR_LIMITS, w8a8.MAX_SINGLE_ROW_PAIRS)} | {
            0,
            *TOKEN_LIMITS,
        }
        for tokens in {min(layer.max_tokens, edge + more) for edge in edges for more in (0, 1)} - {0}:
            planned = schedule(layer.family, layer.problem, tokens, layer._plan)
            wanted.setdefault(layer.problem.gpu, set()).update(map(specialise, planned.launches))
    return sum(compile_all(found, gpu).seconds for gpu, found in wanted.items())


def narrowed(layer: Layer, hidden: int) -> Layer:
    """Return the part of a layer that tokens of so many features meet."""
    b2 = None if layer.b2 is None else layer.b2[:, :hidden]
    return replace(layer, w13=layer.w13[:, :, :hidden], w2=layer.w2[:, :hidden], b2=b2)


def given(kind: str, tokens: int, drawn: Drawn, seed: int, device: str) -> Given:
    """Draw inputs with that kind of routing."""
    known = 2 * drawn.recipe.experts if kind == "mapped" else drawn.recipe.experts
    expert_map = random_map(known, drawn.recipe.experts, seed, device) if kind == "mapped" else None
    found = routed(kind, tokens, drawn.hidden, known, drawn.top_k, seed, drawn.recipe.dtype, device)
    local = found.ids if expert_map is None else expert_map[found.ids.long()]
    return Given(found.x, found.weights, found.ids, expert_map, local)


def call(layer: PreparedLayer, inputs: Given, how: str) -> Tensor:
    """Return y of a call that is eager, has a caller's workspace, or is replayed from a graph."""
    tensors = (inputs.x, inputs.weights, inputs.ids)
    if how == "eager":
        return layer(*tensors, expert_map=inputs.expert_map)
    tokens = len(inputs.x)
    workspace = torch.full((layer.workspace_bytes(tokens),), 0xFF, dtype=torch.uint8, device=inputs.x.device)
    out = torch.full_like(inputs.x, float("nan"))
    if how == "workspace":
        return layer(*tensors, out=out, workspace=workspace, expert_map=inputs.expert_map)
    if inputs.ids.dtype != torch.int32:
        tensors = (inputs.x, inputs.weights, inputs.ids.to(torch.int32))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(*tensors, out=out, workspace=workspace, expert_map=inputs.expert_map)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    return out


def check(layer: PreparedLayer, plain: Layer, drawn: Drawn, generator: random.Random) -> tuple[Failure | None, float]:
    """Run one problem; return what is wrong with it, and its error over that of 16-bit arithmetic."""
    mapped = layer.problem.mapped
    kind = "mapped" if mapped else generator.choice([one for one in ROUTINGS if one != "mapped"])
    tokens = max(1, min(drawn.max_tokens, int(2 ** generator.uniform(0, 12))))
    how = generator.choice(["eager", "eager", "workspace", *(["graph"] if layer.device.type == "cuda" else [])])
    how = how if layer._plan is None else "eager"  # a layer tells the workspace of its family's own plans
    seed = generator.randrange(1 << 30)
    inputs = given(kind, tokens, drawn, seed, layer.device.type)
    spoilt = generator.randrange(tokens) if tokens > 1 and generator.random() < 0.1 else None
    if spoilt is not None:
        inputs.x[spoilt, seed % drawn.hidden] = generator.choice([float("nan"), float("inf")])
    y = call(layer, inputs, how)
    if spoilt is not None:
        inputs.x[spoilt] = 0
        y = y.clone()
        y[spoilt] = 0
    int8 = FORMATS[drawn.recipe.layout, drawn.recipe.element].int8_activations
    truth = moe(inputs.x, plain, inputs.weights, inputs.local)
    groups = layer.problem.w13.group_size if drawn.recipe.activation_dtype else None
    groups = -1 if drawn.family == "hopper-w4a8" else groups  # weights have groups, tokens have not
    rounded = moe(
        inputs.x, plain, inputs.weights, inputs.local, dtype=inputs.x.dtype, int8_activations=int8, fp8_groups=groups
    )
    if spoilt is not None:  # biases make something of a token of zeros
        truth[spoilt] = rounded[spoilt] = 0
    error, allowed = relative_error(y, truth), relative_error(rounded, truth)
    # Where nothing is left to add up, only the last rounding counts.
    good = error <= FACTOR * allowed + 1e-6
    same = worst_row(y, truth) <= ROW_FACTOR * worst_row(rounded, truth) + 1e-6
    what = "NaN of another token" if spoilt is not None else "a row is wrong" if good else "too inaccurate"
    name = f"{layer} {drawn.recipe}"
    failure = None if good and same else Failure(name, tokens, kind, how, what, error, allowed)
    return failure, error / allowed if allowed else 1.0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--code-for", metavar="GPU", help="run code for another GPU (its PTX), such as A100")
    parser.add_argument("--problems", type=int, default=10000)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--family", choices=FAMILIES, help="these kernels only, in all their formats")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--interpreter", action="store_true", help="small problems on the CPU, by default of portable")
    parser.add_argument("--plans", default="", help="words: plans whose name holds one, as 'Wide 160'")
    parser.add_argument("--formats", default="", help="what names of layouts have to hold, as nvfp4,fp8")
    parser.add_argument("--per-layer", type=int, default=None, help=f"problems of a layer (default {PER_LAYER}, or 4)")
    options = parser.parse_args()
    device = "cpu" if options.interpreter else "cuda"
    if options.interpreter:
        interpreter.enable()
        options.family = options.family or "portable"
        from support.gluon_on_cpu import run_all  # imports triton

        calls.run_with_triton = run_all
    each = options.per_layer or (4 if options.interpreter else PER_LAYER)
    if options.code_for:
        pretend(options.code_for)
    torch.backends.cuda.matmul.allow_tf32 = False
    generator = random.Random(options.seed)
    begin = time.monotonic()
    failures: list[Failure] = []
    families: dict[str, int] = {}
    worst, done, compiling, layers = 0.0, 0, 0.0, 0
    while done < options.problems and time.monotonic() - begin < options.seconds:
        batch = [draw(generator, options.family, device, options.formats) for _ in range(BATCH)]
        made = []
        for drawn in batch:
            packed, whole = make_layer(drawn.recipe, device)
            plain = narrowed(whole, drawn.hidden)
            own = options.interpreter and options.family != "portable"
            plan = random_plan(drawn, packed, generator, options.plans) if own or options.plans else None
            layer = prepared(drawn, packed, generator.random() < 0.2, plan)
            if own:  # programs that take several items each
                gpu = replace(layer.problem.gpu, multiprocessors=generator.choice((1, 2, 7)))
                layer.problem = replace(layer.problem, gpu=gpu)
            made.append((drawn, plain, layer))
        layers_made = [layer for _, _, layer in made]
        planned = options.plans and not options.interpreter
        compiling += compile_planned(layers_made) if planned else warmup(layers_made).seconds
        layers += BATCH
        for drawn, plain, layer in made:
            for _ in range(each):
                if done >= options.problems or time.monotonic() - begin > options.seconds:
                    break
                failure, ratio = check(layer, plain, drawn, generator)
                done, worst = done + 1, max(worst, ratio)
                families[layer.family] = families.get(layer.family, 0) + 1
                if failure:
                    failures.append(failure)
                    print("FAILED", failure, flush=True)
        summary = {
            "device": "cpu (Triton's interpreter)" if options.interpreter else torch.cuda.get_device_name(),
            "problems": done,
            "layers": layers,
            "families": families,
            "failed": len(failures),
            "worst_ratio": worst,
            "seconds": round(time.monotonic() - begin, 1),
            "seconds_compiling": round(compiling, 1),
            "seed": options.seed,
        }
        print(summary, flush=True)
        if options.out:
            options.out.write_text(
                json.dumps({**summary, "failures": [asdict(one) for one in failures]}, indent=1) + "\n"
            )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

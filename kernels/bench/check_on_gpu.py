"""Checks the kernels' numbers on a GPU, for every format, tile size and real model shape; optionally times them.

    python kernels/bench/check_on_gpu.py --out results.json [--time] [--seconds 330]

Needs torch and triton only. Prints a table, writes JSON, exits 1 when a comparison fails. `--device cpu --only tiny`
runs the same in Triton's interpreter. Comparisons that do not fit in `--seconds` are listed as skipped.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from support.cases import Recipe, Routed, make_layer, route
from support.comparison import compare, random_map
from support.reference import Layer, moe, relative_error

from moeq_kernels import PackedExperts, fused_moe, fused_moe_batched, interpreter
from moeq_kernels.formats import FORMATS


@dataclass(frozen=True)
class Shape:
    """Sizes of a MoE layer: `hidden`, `intermediate`, experts and choices per token, and the token counts to try."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    tokens: tuple[int, ...]


SHAPES = {
    "tiny": Shape(8, 2, 384, 192, (0, 1, 7, 33, 300)),
    "mixtral-8x7b": Shape(8, 2, 4096, 14336, (1, 64, 1000)),
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768, (1, 64, 1000)),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, (1, 64, 1000)),
}


def recipes(shape_name: str) -> Iterator[Recipe]:
    """Every format at that shape, with more variants on the tiny one (each costs compilations)."""
    tiny = shape_name == "tiny"
    for (layout, element), fmt in FORMATS.items():
        if not tiny and (element == "f16" or (shape_name == "gpt-oss-20b") != (element == "e2m1")):
            continue
        dtype = torch.float16 if element == "f16" else torch.bfloat16
        base = Recipe(layout, element, group_size=64 if tiny else 128, bias=tiny, dtype=dtype)
        if element == "e2m1":
            yield replace(base, order="interleaved", activation="swiglu_oai", limit=7.0, bias=True)
            continue
        yield base
        if fmt.zero_points and (tiny or element == "int4"):
            yield replace(base, zero_points=True, group_size=32, dtype=torch.float16 if tiny else dtype)
        if fmt.zero_points and tiny:
            yield replace(base, group_size=-1, order="interleaved", activation="gelu")
            yield replace(base, group_size=128, order="ungated", activation="relu2")


def describe(recipe: Recipe) -> str:
    """`marlin-wna16/1 int4 g64 zp float16 interleaved swiglu_oai`."""
    parts = [recipe.layout, recipe.element]
    if recipe.element in ("int4", "int8"):
        parts.append("channel" if recipe.group_size == -1 else f"g{recipe.group_size}")
    parts += ["zp"] * recipe.zero_points + ["bias"] * recipe.bias
    return " ".join([*parts, str(recipe.dtype).removeprefix("torch."), recipe.order, recipe.activation])


@dataclass(frozen=True)
class Row:
    """One line of the table; `error` and `allowed` are relative Frobenius errors against float32."""

    shape: str
    what: str
    tokens: int
    error: float
    allowed: float
    passed: bool
    micros: float | None = None
    graph_micros: float | None = None


class Session:
    """Collects rows and stops when the time is up."""

    def __init__(self, device: torch.device, seconds: float, timed: bool) -> None:
        self.device = device
        self.deadline = time.monotonic() + seconds
        self.timed = timed
        self.rows: list[Row] = []
        self.skipped: list[str] = []

    def add(self, row: Row) -> None:
        """Keeps and prints a row."""
        self.rows.append(row)
        mark = "ok  " if row.passed else "FAIL"
        times = "" if row.micros is None else f"  {row.micros:9.1f} us eager {row.graph_micros or 0:9.1f} us graph"
        print(f"{mark} {row.shape:14} M={row.tokens:<5} {row.error:9.3e} <= {row.allowed:9.3e}{times}  {row.what}")
        sys.stdout.flush()

    def out_of_time(self, what: str) -> bool:
        """Whether to stop; notes what was left out."""
        if time.monotonic() < self.deadline:
            return False
        self.skipped.append(what)
        return True


def check_recipe(session: Session, shape_name: str, recipe: Recipe) -> None:
    """All token counts of one format at one shape."""
    shape = SHAPES[shape_name]
    recipe = replace(recipe, experts=shape.experts, hidden=shape.hidden, intermediate=shape.intermediate)
    what = describe(recipe)
    if session.out_of_time(f"{shape_name}: {what}"):
        return
    packed, layer = make_layer(recipe, session.device)
    for tokens in shape.tokens:
        routed = route(tokens, shape.hidden, shape.experts, shape.top_k, dtype=recipe.dtype, device=session.device)
        result = compare(packed, layer, routed)
        eager, graph = (None, None)
        if session.timed and tokens and shape_name != "tiny":
            eager, graph = time_call(lambda routed=routed: call(packed, layer, routed))
        allowed = 1.2 * result.plain_error
        session.add(Row(shape_name, what, tokens, result.error, allowed, result.passed, eager, graph))


def call(packed: PackedExperts, layer: Layer, routed: Routed) -> torch.Tensor:
    """The timed call."""
    return fused_moe(routed.x, packed, routed.weights, routed.ids, activation=layer.activation, limit=layer.limit)


def time_call(function: Callable[[], object], repeats: int = 30) -> tuple[float, float]:
    """Median microseconds of an eager call and of a CUDA-graph replay (weights are as warm as the L2 leaves them)."""
    for _ in range(3):
        function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    medians = []
    for run in (function, graph.replay):
        times = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(1000 * start.elapsed_time(end))
        medians.append(statistics.median(times))
    return medians[0], medians[1]


def check_behaviour(session: Session) -> None:
    """Determinism, uneven routing, expert parallelism, router weight on input, batched format, on the tiny shape."""
    shape = SHAPES["tiny"]
    sizes = {"experts": shape.experts, "hidden": shape.hidden, "intermediate": shape.intermediate}
    packed, layer = make_layer(Recipe(bias=True, **sizes), session.device)
    routed = route(201, shape.hidden, shape.experts, 4, device=session.device)
    first = call(packed, layer, routed)
    same = all(torch.equal(first, call(packed, layer, routed)) for _ in range(5))
    session.add(Row("tiny", "bitwise equal when repeated", 201, 0.0 if same else 1.0, 0.0, same))

    skewed = replace(routed, ids=torch.where(routed.ids < 6, 3, routed.ids))
    result = compare(packed, layer, skewed)
    session.add(Row("tiny", "most tokens to one expert", 201, result.error, 1.2 * result.plain_error, result.passed))
    result = compare(packed, layer, routed, weight_on_input=True)
    session.add(Row("tiny", "router weight on input", 201, result.error, 1.2 * result.plain_error, result.passed))
    far = route(201, shape.hidden, 32, 4, device=session.device)
    result = compare(packed, layer, far, expert_map=random_map(32, shape.experts, 0, session.device))
    session.add(Row("tiny", "expert parallelism, 8 of 32", 201, result.error, 1.2 * result.plain_error, result.passed))

    counts = torch.tensor([0, 1, 5, 40, 17, 40, 2, 33], device=session.device)
    x = route(8 * 40, shape.hidden, 8, 1, device=session.device).x.view(8, 40, shape.hidden)
    y = fused_moe_batched(x, packed, counts).view(-1, shape.hidden)
    ids = torch.arange(8, device=session.device).repeat_interleave(40)[:, None]
    ids[torch.arange(40, device=session.device).repeat(8) >= counts.repeat_interleave(40)] = -1
    ones = torch.ones(320, 1, device=session.device)
    truth = moe(x.reshape(-1, shape.hidden), layer, ones, ids)
    plain = moe(x.reshape(-1, shape.hidden), layer, ones, ids, dtype=torch.bfloat16)
    error, allowed = relative_error(y, truth), 1.2 * relative_error(plain, truth)
    session.add(Row("tiny", "batched activations", 320, error, allowed, error <= allowed))


def report(session: Session) -> dict[str, object]:
    """The JSON document."""
    import triton

    gpu = torch.cuda.get_device_name(session.device) if session.device.type == "cuda" else "interpreter"
    return {
        "schema": "moeq-kernels.check/1",
        "date": time.strftime("%Y-%m-%d"),
        "device": gpu,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "passed": all(row.passed for row in session.rows) and not session.skipped,
        "rows": [dataclasses.asdict(row) for row in session.rows],
        "skipped": session.skipped,
    }


def main() -> int:
    """Command line; exit code 0 when every comparison passed and none was skipped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", choices=[*SHAPES], default=[*SHAPES], help="shapes")
    parser.add_argument("--layout", help="only layouts whose name contains this")
    parser.add_argument("--seconds", type=float, default=330.0)
    parser.add_argument("--time", action="store_true", help="also time the real shapes")
    options = parser.parse_args()
    if options.device == "cpu":
        interpreter.enable()
    session = Session(torch.device(options.device), options.seconds, options.time)
    if "tiny" in options.only:
        check_behaviour(session)
    for shape_name in options.only:
        for recipe in recipes(shape_name):
            if not options.layout or options.layout in recipe.layout:
                check_recipe(session, shape_name, recipe)
        if session.device.type == "cuda":
            torch.cuda.empty_cache()
    document = report(session)
    failed = [row for row in session.rows if not row.passed]
    print(f"{len(session.rows)} comparisons, {len(failed)} failed, {len(session.skipped)} formats skipped for time")
    for name in session.skipped:
        print(f"skipped: {name}")
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if document["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())

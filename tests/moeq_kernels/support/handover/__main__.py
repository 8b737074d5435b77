"""Check that every hand-over of shared memory between warps is ordered, for all schedules of the real code.

    python -m support.handover --out results.json

`gluon_on_cpu` runs the device code with warps as threads; this records what each of them does with shared memory and
mbarriers: waits, arrivals, bytes that are expected, copies of the copy engine and of cp.async, products that read
behind the program's back until they are waited for. Which phase of a barrier a wait waits for does not depend on the
schedule (and that is checked: no phase can pass by while somebody still waits for the one before), so one recording
orders all schedules. Two accesses of the same bytes, one of them a write, are a race unless one of them ends before the
other begins in every schedule. The numbers of stages and warpgroups are those of the plans.

`explore` walks through every interleaving of a short recording instead, event by event and copy by copy, and has to
come to the same verdict. `mutants` spoil recordings (a wait left out, the other phase, an arrival before the reading
is over, fewer bytes, a copy into the next stage, no fence): each has to be caught.

A warpgroup counts as one: that its warps meet before one of them arrives for all, or starts a copy, is read in the PTX
(`unsynchronised`). Not covered: memory outside a program (grids that follow early, counters), Triton's own scratch
memory, and whether compilers and hardware keep to the PTX memory model.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support.cases import Recipe, make_layer, route
from support.handover.mutants import mutants
from support.handover.order import Order
from support.handover.trace import Recorder, Trace

from moeq_kernels import interpreter


def cases() -> Iterator[tuple[str, str, Recipe, Any, int]]:
    """Yield name, family, layer, plan and tokens of every kernel, over two rounds of its stages and more.

    Layers are small, but k is as long as the ring asks for.
    """
    from moeq_kernels.hopper.w4a8 import w4a8_launches as w4a8
    from moeq_kernels.hopper.w4a16 import w4a16_plan as w4a16
    from moeq_kernels.hopper.w8a8 import w8a8_plan as w8a8

    def sized(recipe: Recipe, rows: int, stages: int) -> Recipe:
        return replace(recipe, experts=2, hidden=-(-(2 * stages + 2) * rows // 256) * 256, intermediate=256)

    int4, int8 = Recipe(group_size=128), Recipe("int8-w8a8/1", "int8")
    blocks = Recipe("fp8-block-identity/1", "e4m3", group_size=128, activation_dtype="fp8")
    for kernel in w4a16.kernels("uint4"):
        if isinstance(kernel, w4a16.Wide | w4a16.Queue):
            fitting = w4a16.kernel_for(kernel, "uint4", 128)
            name = f"int4 {type(kernel).__name__} {kernel.tokens} x {kernel.stages}" + (
                " gathering" * getattr(kernel, "gathers", False)
            )
            yield name, "hopper-w4a16", sized(int4, 64, fitting.stages), w4a16.Plan(fitting), kernel.tokens + 5
    for element, recipe, family in (("int8", int8, "hopper-w8a8"), ("e4m3 blocks", blocks, "hopper-fp8")):
        for kernel in w8a8.kernels(element == "int8"):
            name = f"{element} {type(kernel).__name__} {kernel.tokens} x {kernel.stages}"
            yield name, family, sized(recipe, 128, kernel.stages), w8a8.Int8Plan(kernel), kernel.tokens + 5
    for element, recipe in (("e2m1", Recipe("marlin-mxfp4/1", "e2m1")), ("int4", int4)):
        for size in w4a8.KERNELS:
            name = f"{element} x e4m3 {size.tokens} x {size.stages}"
            yield name, "hopper-w4a8", sized(recipe, 128, size.stages), w4a8.W4a8Plan(size), size.tokens + 5


def recorded(family: str, recipe: Recipe, plan: Any, tokens: int) -> Recorder:
    """Record one call of a layer."""
    from support import gluon_on_cpu, mbarriers_on_cpu

    from moeq_kernels.prepared import prepare_for
    from moeq_kernels.problem import tensors_of
    from moeq_kernels.schedules import schedule
    from moeq_kernels.validate import epilogue_of

    packed, _ = make_layer(recipe)
    routed = route(tokens, recipe.hidden, recipe.experts, 2, dtype=recipe.dtype)
    epilogue = epilogue_of(packed, recipe.activation, recipe.alpha, None, recipe.limit, False)
    layer = prepare_for(routed.x, packed, 2, tokens, epilogue, None, family=family)
    problem = replace(layer.problem, gpu=replace(layer.problem.gpu, multiprocessors=1), dependent=False)
    planned = schedule(family, problem, tokens, plan)
    roots = {"x": routed.x, "topk_weights": routed.weights, "topk_ids": routed.ids, "out": torch.empty_like(routed.x)}
    roots |= {"workspace": torch.full((planned.workspace_bytes,), 255, dtype=torch.uint8), **layer._tensors}
    assert tensors_of(packed)
    found = Recorder()
    mbarriers_on_cpu.listen(found)
    try:
        gluon_on_cpu.run_all(planned.launches, roots)
    finally:
        mbarriers_on_cpu.listen(None)
    return found


def judged(trace: Trace, spoil: bool) -> dict[str, Any]:
    """Judge the order of a trace, and of its mutants."""
    order = Order(trace)
    row: dict[str, Any] = {
        "threads": len(trace.threads) - 1,
        "barriers": len(trace.counts),
        "events": sum(map(len, trace.threads)),
        "accesses": len(order.accesses),
        "problems": order.problems[:5],
    }
    if spoil:
        verdicts = {name: Order(changed).problems[:1] for name, changed in mutants(trace)}
        row["mutants"] = len(verdicts)
        row["missed"] = [name for name, found in verdicts.items() if not found]
    return row


def rows_of(found: Recorder) -> Iterator[dict[str, Any]]:
    """Yield a verdict on every program of a call.

    Of equal programs only the longest is spoilt: where a program never comes back to its first stage, waiting for a
    free one makes no difference.
    """
    programs = [(kernel, trace) for kernel, trace in zip(found.kernels, found.traces(), strict=True) if trace.counts]
    longest: dict[tuple[str, int], Trace] = {}
    for kernel, trace in sorted(programs, key=lambda one: sum(map(len, one[1].threads))):
        longest[kernel, len(trace.threads)] = trace
    for kernel, trace in programs:
        yield {"kernel": kernel, **judged(trace, trace is longest[kernel, len(trace.threads)])}


def main() -> int:
    """Run the command line; the exit code is 1 where an access is not ordered, or a mutant was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    interpreter.enable()
    rows = []
    for name, family, recipe, plan, tokens in cases():
        if options.only not in name:
            continue
        begin = time.monotonic()
        for row in rows_of(recorded(family, recipe, plan, tokens)):
            rows.append({"case": name, **row})
            print(rows[-1], f"{time.monotonic() - begin:.1f} s", flush=True)
        if options.out:  # after every case: what was checked is kept if the rest is cut off
            options.out.write_text(json.dumps({"schema": "moeq-kernels.handover/1", "rows": rows}, indent=1) + "\n")
    return int(any(row["problems"] or row.get("missed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())

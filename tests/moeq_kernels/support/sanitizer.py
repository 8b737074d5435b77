"""Run compute-sanitizer over the kernels, on tiny layers: memory, uninitialised reads, shared memory, barriers.

    python -m support.sanitizer --out results.json [--seconds 120]

Every format that `fused_moe` reads, and every kernel of the Hopper plan; layers are made on the CPU, so that nearly
all that the tool watches is ours. Tools run at the same time, each in a process of its own.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

#: Where device code is looked up by file name.
KERNELS = Path(__file__).parents[3] / "kernels"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
TOKENS = (1, 70)


@dataclass(frozen=True)
class Call:
    """A call to run: its name, a function of the number of tokens, and those numbers."""

    name: str
    run: Any
    tokens: tuple[int, ...] = TOKENS


def calls(only: tuple[str, ...]) -> Iterator[Call]:
    """Yield every format whose name contains one of `only`, then every kernel of the Hopper plans for such layers."""
    import torch

    from moeq_kernels import PackedExperts, fused_moe
    from moeq_kernels.formats import FORMATS
    from support.cases import Recipe, make_layer, route
    from support.hopper_layers import EVERY, calls_of, name_of, plans_of
    from support.planned import run_family

    def on_gpu(packed: PackedExperts) -> PackedExperts:
        def moved(matrix: Any) -> Any:
            found = {name: value.cuda() for name, value in vars(matrix).items() if isinstance(value, torch.Tensor)}
            return replace(matrix, **found)

        return replace(packed, w13=moved(packed.w13), w2=moved(packed.w2))

    def given(recipe: Recipe, tokens: int) -> list[torch.Tensor]:
        routed = route(tokens, recipe.hidden, recipe.experts, 2, dtype=recipe.dtype)
        return [routed.x.cuda(), routed.weights.cuda(), routed.ids.cuda()]

    for layout, element in FORMATS:
        if not any(part in f"{layout} {element}" for part in only):
            continue
        dtype = torch.float16 if element == "f16" or "-fp16" in layout else torch.bfloat16
        mx = element == "e2m1"
        order, activation = ("interleaved", "swiglu_oai") if mx else ("gate-up", "silu")
        recipe = Recipe(layout, element, hidden=256, intermediate=128, dtype=dtype, bias=mx, order=order)  # type: ignore[arg-type]
        packed = on_gpu(make_layer(recipe)[0])

        def fused(tokens: int, recipe: Recipe = recipe, packed: PackedExperts = packed, name: str = activation) -> None:
            x, weights, ids = given(recipe, tokens)
            fused_moe(x, packed, weights, ids, activation=name, limit=7.0 if name == "swiglu_oai" else None)

        yield Call(f"fused_moe {layout} {element}", fused)

    for name in ("small", "zeros-g32", "nvfp4", "fp8-channel", "w8a8-odd", "blocks", "w4a8", "int4-fp8"):
        if not any(part in name for part in only):
            continue
        recipe, family = EVERY[name], calls_of(name).family
        packed = on_gpu(make_layer(recipe)[0])
        chosen = [(tokens, plan) for tokens in TOKENS for plan in plans_of(name, tokens)]
        for count, plan in chosen:

            def hopper(
                tokens: int, recipe: Recipe = recipe, packed: PackedExperts = packed, plan: Any = plan,
                family: str = family,
            ) -> None:  # fmt: skip
                x, weights, ids = given(recipe, tokens)
                run_family(family, x, packed, weights, ids, plan=plan)

            yield Call(f"{family} {name} {name_of(plan)}, {count} tokens", hopper, (count,))


def run_calls(seconds: float, only: tuple[str, ...]) -> int:
    """Everything, as far as the time reaches; prints what ran."""
    import torch

    begin, ran = time.monotonic(), 0
    for call in calls(only):
        for tokens in call.tokens:
            if time.monotonic() - begin > seconds:
                print(f"stopped before {call.name}, {tokens} tokens", flush=True)
                return ran
            call.run(tokens)
            torch.cuda.synchronize()
            ran += 1
        print("ran", call.name, flush=True)
    print("complete", flush=True)
    return ran


def run_tool(tool: str, seconds: float, only: str) -> subprocess.Popen[str]:
    """Start the tool over this script."""
    script = [sys.executable, "-m", "support.sanitizer", "--calls", "--seconds", str(seconds), "--only", only]
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "400", "--launch-timeout", "120", *script]
    # The caching allocator would hand out parts of large blocks, and accesses beyond a part would not be noticed.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def dispatches(block: str) -> bool:
    """Return whether a reported race is Triton's hand-over to specialised warps, which the tool misreads.

    The default warps write what the others are to do, all meet at a barrier, the others read it, all meet again:
    both barriers are of all threads, but at different instructions. Triton gives that code source lines of the kernel
    on which nothing of ours touches memory (`hand_over_lines`); one access elsewhere, or without a line, is a race.
    """
    accesses = re.findall(r"(?:Read|Write) access at (?:(\w+)\+\S+ in (\S+):(\d+))?", block)
    return bool(accesses) and all(
        file and int(line) in hand_over_lines(Path(file).name, kernel) for kernel, file, line in accesses
    )


@cache
def hand_over_lines(file: str, kernel: str) -> frozenset[int]:
    """Return the lines of `kernel` that stand for Triton's hand-over to specialised warps only.

    These are its decorator and `def`, its calls of `warp_specialize`, which merely name functions, and the `if`s over
    compile-time constants around them. A kernel without such a call has none.
    """
    lines: set[int] = set()
    for path in KERNELS.rglob(file):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == kernel:
                calls = list(_hand_overs(node))
                begin = min(one.lineno for one in (node, *node.decorator_list))
                lines.update(*calls, range(begin, node.lineno + 1) if calls else ())
    return frozenset(lines)


def _hand_overs(node: ast.AST) -> Iterator[set[int]]:
    """Yield the lines of each call of `warp_specialize` below a node, with those of the `if`s around it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call) and ast.unparse(child.func) == "gl.warp_specialize":
            assert child.end_lineno is not None
            yield set(range(child.lineno, child.end_lineno + 1))
        elif isinstance(child, ast.If) and all(one.id.isupper() for one in _names(child.test)):
            yield from ({child.lineno, *lines} for lines in _hand_overs(child))
        else:
            yield from _hand_overs(child)


def _names(expression: ast.expr) -> Iterator[ast.Name]:
    return (node for node in ast.walk(expression) if isinstance(node, ast.Name))


def summary(tool: str, output: str, code: int | None) -> dict[str, Any]:
    """Summarise what a tool said."""
    blocks = re.split(r"^=========\s*$", output, flags=re.MULTILINE)
    reported = [
        block for block in blocks if re.search(r"^========= (Error|Warning|Invalid|Uninit|Barrier)", block, re.M)
    ]
    telling = [block.strip() for block in reported if not dispatches(block)]
    counts = re.findall(r"SUMMARY: (\d+)", output)
    return {
        "tool": tool,
        "reported": int(counts[-1]) if counts else None,
        "hand_overs": len(reported) - len(telling),
        "errors": None if not counts else int(counts[-1]) if not reported else len(telling),
        "complete": "\ncomplete" in output,
        "ran": re.findall(r"^ran (.+)$", output, re.MULTILINE),
        "stopped": re.findall(r"^stopped before (.+)$", output, re.MULTILINE),
        "code": code,
        "first": telling[:10],
        "tail": output.splitlines()[-12:] if not counts else [],
    }


def main() -> int:
    """Run the command line; the exit code is 1 where a tool found an error or did not finish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--only", default="", help="formats and layers whose names contain one of these")
    parser.add_argument("--calls", action="store_true", help="make the calls, without a tool (what the tools run)")
    options = parser.parse_args()
    if options.calls:
        run_calls(options.seconds, tuple(options.only.split(",")))
        return 0
    processes = {tool: run_tool(tool, options.seconds, options.only) for tool in options.tools.split(",")}
    rows = []
    deadline = time.monotonic() + options.seconds + 60
    for tool, process in processes.items():
        try:
            output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        rows.append(summary(tool, output, process.returncode))
        print({key: value for key, value in rows[-1].items() if key not in ("ran", "first")}, flush=True)
    if options.out:
        options.out.write_text(json.dumps({"schema": "moeq-kernels.sanitizer/1", "tools": rows}, indent=1) + "\n")
    return 0 if all(row["errors"] == 0 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

"""What Python does around the launches of a prepared call, measured without a GPU.

    python kernels/bench/host_time.py --out results.json [--before FOLDER]

Everything is real but the driver: layers of real models are planned for an H200, their kernels are compiled for it, and
calls go through `PreparedLayer` to `cuLaunchKernelEx`, or to `cuGraphLaunch` once they are replayed, which a library of
this script's own takes and counts. So the figure is the host time of a call WITHOUT what the driver does, on this
machine's processor. `serving_check.py` measures the whole on a GPU, `launch_cost.py` the driver's calls.

`--before` names a folder with an earlier `moeq_kernels` (a checkout's `kernels`): both are measured in turns, in
processes of their own, several rounds, and a row holds the ratio of their medians, which means something on a busy
machine too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from support.pretended_driver import driver, pretend_cuda, take_cpu

TOKENS = (1, 8, 64, 200, 512)
LAYERS = (("qwen3-30b", "int4"), ("mixtral-tp8", "int4"), ("gpt-oss-20b", "mxfp4"), ("deepseek-v3-tp8", "int4"))


def layer_on_cpu(name: str, stored: str) -> tuple[Any, Any]:
    """A layer planned for an H200 that calls take tensors of the CPU to, and its shape."""
    import torch

    from bench.hopper_bench import FORMATS, epilogue_of, random_experts
    from bench.timing import SHAPES
    from moeq_kernels import prepared

    shape = SHAPES[name]
    experts = random_experts(shape, FORMATS[stored], "meta")
    x = torch.empty(0, shape.hidden, dtype=torch.bfloat16, device="meta")
    layer = prepared.prepare_for(x, experts, shape.top_k, 8192, epilogue_of(shape), None, gpu="H200")
    take_cpu(layer)
    return layer, shape


def in_turns(first: Any, second: Any, weights: Any, ids: Any, given: Any) -> None:
    """A call of each of two layers."""
    first[0](first[1], weights, ids, **given)
    second[0](second[1], weights, ids, **given)


def host_us(call: Any, rounds: int, calls: int = 200) -> float:
    """Microseconds of processor time of a call: the least of rounds."""
    found = []
    for _ in range(rounds):
        begin = time.process_time_ns()
        for _ in range(calls):
            call()
        found.append((time.process_time_ns() - begin) / calls / 1e3)
    return min(found)


def measure(rounds: int, names: list[str]) -> list[dict[str, Any]]:
    """Rows of all layers and token counts."""
    import torch

    torch.set_num_threads(1)
    pretend_cuda()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        library = driver(Path(folder))
        for name, stored in [one for one in LAYERS if one[0] in names]:
            (layer, shape), (other, _) = (layer_on_cpu(name, stored) for _ in range(2))
            for tokens in TOKENS:
                x = torch.zeros(tokens, shape.hidden, dtype=torch.bfloat16)
                weights = torch.zeros(tokens, shape.top_k)
                ids = torch.zeros(tokens, shape.top_k, dtype=torch.int32)
                out, workspace = torch.zeros_like(x), torch.zeros(layer.workspace_bytes(tokens), dtype=torch.uint8)
                given = {"out": out, "workspace": workspace}
                layer(x, weights, ids, **given)
                before = library.counted_launches()
                layer(x, weights, ids, **given)
                launches = library.counted_launches() - before
                us = host_us(partial(layer, x, weights, ids, **given), rounds)
                # As in a model: the layers in turns, each with tokens of its own.
                hidden = torch.zeros_like(x)
                turns = partial(in_turns, (layer, x), (other, hidden), weights, ids, given)
                rows.append({
                    "layer": name, "format": stored, "tokens": tokens, "launches": launches, "us": round(us, 2),
                    "two_layers_us": round(host_us(turns, rounds) / 2, 2),
                })  # fmt: skip
    return rows


def measured(folder: Path, rounds: int, names: str) -> list[dict[str, Any]]:
    """Rows by the `moeq_kernels` in that folder, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    command = [sys.executable, __file__, "--rounds", str(rounds), "--layers", names, "--one"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--before", type=Path, help="folder of an earlier moeq_kernels")
    parser.add_argument("--layers", default=",".join(name for name, _ in LAYERS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3, help="processes of each")
    parser.add_argument("--one", action="store_true", help="measure in this process and print the rows")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.rounds, options.layers.split(","))))
        return 0
    here = Path(__file__).parents[1]
    folders = {"us": here} | ({"before_us": options.before} if options.before else {})
    found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in folders}
    for _ in range(options.turns):
        for name, folder in folders.items():
            found[name].append(measured(folder, options.rounds, options.layers))
    rows = []
    for number, first in enumerate(found["us"][0]):
        row = dict(first)
        for what in ("us", "two_layers_us"):
            medians = {name: statistics.median(turn[number][what] for turn in turns) for name, turns in found.items()}
            row[what] = medians["us"]
            if options.before:
                row[f"before_{what}"] = medians["before_us"]
                row[f"{what.removesuffix('us')}ratio"] = round(medians["us"] / medians["before_us"], 3)
        rows.append(row)
        print(row)
    about = {"processor": platform.processor() or platform.machine(), "python": platform.python_version()}
    document = {"schema": "moeq-kernels.host-time/1", "date": time.strftime("%Y-%m-%d"), **about, "rows": rows}
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What conversion saves at start-up: experts from the source, repacked while loading, against a converted checkpoint.

Writes synthetic checkpoints with the real shapes of one layer of Qwen3-30B-A3B (GPTQ int4) and gpt-oss-20b (MXFP4),
converts them, then loads each way in a process of its own and prints wall time split into read, repack and copy, and
peak memory, side by side:

    python examples/bench/startup.py [--model NAME] [--layers N] [--folder FOLDER] [--tp N]

Both ways read through the page cache. The repack is moeq's own, on the CPU with all cores that it uses; engines repack
on the GPU, which is faster and needs a second copy there. With a GPU, `copy` is the transfer to it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import make_checkpoint
from make_checkpoint import MODELS

LAYOUTS = {"qwen3-30b-a3b": "marlin-wna16/1", "gpt-oss-20b": "marlin-mxfp4/1"}


def measure(road: str, folder: str, layout_id: str, tp: int) -> None:
    """In a process of its own: load every layer's experts of rank 0 one way and print what it took."""
    import torch

    import moeq

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    base = peak_memory()
    started = time.perf_counter()
    checkpoint = moeq.open(folder)
    opened = time.perf_counter() - started
    read, repack, copy = (from_source if road == "source" else from_converted)(checkpoint, layout_id, tp, device)
    result = {"open": opened, "read": read, "repack": repack, "copy": copy, "peak": peak_memory() - base}
    print(json.dumps(result))


def from_source(checkpoint, layout_id: str, tp: int, device) -> tuple[float, float, float]:
    """Read every tensor of an expert, decode and pack it, put the stack on the device; experts on all cores."""
    import torch

    from moeq.layouts.padding import plan_padding
    from moeq.layouts.registry import get_layout
    from moeq.model.shards import Range, shard_matrix, shard_spec

    layout, times, kept = get_layout(layout_id), [0.0, 0.0, 0.0], []
    with ThreadPoolExecutor() as pool:
        for layer in checkpoint.info.moe_layers:
            part = Range(0, checkpoint.spec(layer, "w2").k // tp)
            plan = plan_padding(layout, *(shard_spec(checkpoint.spec(layer, role), part) for role in ("w13", "w2")))

            def pack(expert: int, role: str, layer: int = layer, part=part, plan=plan) -> dict:
                matrix = checkpoint.matrix(layer, expert, role)
                return layout.pack(plan.pad(shard_matrix(matrix, part, first=True)))

            experts = range(checkpoint.num_experts(layer))
            for role in ("w13", "w2"):
                start = time.perf_counter()
                list(pool.map(lambda expert, r=role, n=layer: read(checkpoint, n, expert, r), experts))
                middle = time.perf_counter()
                packed = list(pool.map(lambda expert, r=role: pack(expert, r), experts))
                done = time.perf_counter()
                kept.append({name: torch.stack([row[name] for row in packed]).to(device) for name in packed[0]})
                times[0] += middle - start
                times[1] += (done - middle) - (middle - start)  # `matrix` reads again what has just been read
                times[2] += time.perf_counter() - done
    return times[0], times[1], times[2]


def read(checkpoint, layer: int, expert: int, role: str) -> None:
    """Read the stored tensors that a matrix is made from."""
    for projection in checkpoint.kind_of(layer, expert).projections:
        if (projection == "down") == (role == "w2"):
            checkpoint.parts(layer, expert, projection)


def from_converted(checkpoint, layout_id: str, tp: int, device) -> tuple[float, float, float]:
    import moeq

    read = copy = 0.0
    kept = []
    for layer in checkpoint.info.moe_layers:
        start = time.perf_counter()
        experts = moeq.load_experts(checkpoint, layer, tp_rank=0, tp_size=tp)
        read += time.perf_counter() - start
        start = time.perf_counter()
        matrices = (experts.w13, experts.w2)
        parts = ("weight", "scale", "zero", "bias")
        kept.append([getattr(m, p).to(device) for m in matrices for p in parts if getattr(m, p) is not None])
        copy += time.perf_counter() - start
    return read, 0.0, copy


def peak_memory() -> float:
    """High-water mark of this process in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=LAYOUTS, action="append")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        for name in options.model or LAYOUTS:
            compare(name, options.layers, options.tp, Path(scratch) / name)


def compare(name: str, layers: int, tp: int, folder: Path) -> None:
    import moeq

    layout = LAYOUTS[name]
    source, converted = folder / "source", folder / "converted"
    make_checkpoint.write_checkpoint(source, MODELS[name], MODELS[name].formats[0], make_checkpoint.Size(layers))
    started = time.perf_counter()
    deployment = moeq.Deployment(gpu=moeq.gpu("H100"), tp=tp)
    moeq.convert(source, converted, deployment, layout=layout)
    print(f"{name}, {layers} layer(s), tp {tp}, {layout}; converted once in {time.perf_counter() - started:.1f} s")
    print(f"{'':12}{'open':>8}{'read':>8}{'repack':>8}{'copy':>8}{'total':>8}   peak memory")
    for road, place in (("source", source), ("converted", converted)):
        command = [sys.executable, __file__, "--measure", road, str(place), layout, str(tp)]
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        found = json.loads(run.stdout.splitlines()[-1])
        steps = [found[step] for step in ("open", "read", "repack", "copy")]
        print(f"{road:12}" + "".join(f"{t:7.2f}s" for t in (*steps, sum(steps))) + f"{found['peak']:10.0f} MiB")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
    else:
        main()

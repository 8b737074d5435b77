"""Packing a source while an engine loads it: seconds, processor time and host memory, layer by layer.

    python examples/bench/direct_load.py [--case NAME ...] [--layers 4] [--device cuda] [--out FILE]

For each case a random checkpoint with a real model's shapes is written and read into the page cache. Then a process of
its own fills the tensors of a rank with its packed experts, as `vllm serve SRC --quantization moeq` does: no engine is
needed. The first layer also allocates buffers and compiles or loads the loops; it is told apart from the others.
`peak` is what the process holds at most beyond what it held before the first layer.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from measuring import machine, make_source, set_cache

#: Case to model, format and layout.
CASES = {
    "fp8-block": ("qwen3-30b-a3b", "fp8-block", "marlin-fp8/1"),
    "int4": ("qwen3-30b-a3b", "ct-int4", "marlin-wna16/1"),
    "int4-512-experts": ("qwen3-512-experts", "gptq", "marlin-wna16/1"),
    "int4-mixtral": ("mixtral-8x7b", "gptq", "marlin-wna16/1"),
    "mxfp4-gpt-oss": ("gpt-oss-20b", "mxfp4", "moeq-mxfp4/1"),
}


def fill(source: Path, layout: str, layers: int, device: str) -> dict[str, Any]:
    """Pack all layers of a source into tensors on a device, one after the other, twice, and measure each."""
    import torch

    import moeq
    from moeq.checkpoint.manifest import STACKED_ROLES
    from moeq.layouts.parts import torch_dtype
    from moeq.pipeline.in_memory import RankPacker
    from moeq.pipeline.plan.options import Ranks

    checkpoint = moeq.open(source)
    begun = time.perf_counter()
    packer = RankPacker(checkpoint, dict.fromkeys(range(layers), layout), Ranks(), 0)
    planned = time.perf_counter() - begun
    shard, count = packer.layer(0).shards[0], checkpoint.experts(0).num_experts
    tensors = {
        f"{role}_{part}": torch.zeros(count, *spec.shape, dtype=torch_dtype(spec.dtype), device=device)
        for role in STACKED_ROLES
        for part, spec in shard.parts[role].items()
    }
    size, before = sum(tensor.nbytes for tensor in tensors.values()), _peak()
    rows = []
    for layer in 2 * list(range(layers)):
        begun, used = time.perf_counter(), time.process_time()
        packer.pack(layer, tensors)
        rows.append({"wall": time.perf_counter() - begun, "cpu": time.process_time() - used})
    later = rows[1:]
    return {
        "bytes_of_a_layer": size,
        "experts": count,
        "plan": planned,
        "first": rows[0],
        "wall": median(row["wall"] for row in later),
        "cpu": median(row["cpu"] for row in later),
        "gib_per_second": size / 2**30 / median(row["wall"] for row in later),
        "cpu_per_gib": median(row["cpu"] for row in later) / (size / 2**30),
        "peak": _peak() - before,
    }


def _peak() -> int:
    """Return the most bytes that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--case", action="append", choices=CASES, help="[all]")
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--device", default="cpu", help="where the tensors are: cpu, cuda")
    options.add_argument("--folder", type=Path, help="where checkpoints are written and kept [a temporary folder]")
    options.add_argument("--out", type=Path, help="JSON file of the results")
    options.add_argument("--fill", help=argparse.SUPPRESS)  # one case, in the process that is measured
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        if asked.fill:
            model, kind, layout = CASES[asked.fill]
            print(json.dumps(fill(folder / f"{model}-{kind}-{asked.layers}", layout, asked.layers, asked.device)))
            return
        found = {case: _run(case, asked, folder) for case in asked.case or CASES}
    if asked.out:
        about = {"schema": "moeq.direct-load/1", "tensors_on": asked.device, "layers": asked.layers}
        command = f"python examples/bench/direct_load.py --layers {asked.layers} --device {asked.device}"
        cases = "".join(f" --case {case}" for case in asked.case or ())
        about |= {"machine": machine(), "command": command + cases}
        asked.out.write_text(json.dumps(about | {"cases": found}, indent=1) + "\n")


def _run(case: str, asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model, kind, _ = CASES[case]
    source = folder / f"{model}-{kind}-{asked.layers}"
    if not source.exists():
        make_source(source, model, kind, asked.layers, None)
    set_cache(source, "warm")
    given = ["--fill", case, "--layers", str(asked.layers), "--device", asked.device, "--folder", str(folder)]
    done = subprocess.run([sys.executable, __file__, *given], check=True, stdout=subprocess.PIPE, text=True)
    row: dict[str, Any] = json.loads(done.stdout)
    print(
        f"{case:18} {row['wall']:6.2f} s a layer, {row['gib_per_second']:5.2f} GiB/s, "
        f"{row['cpu_per_gib']:5.2f} s of processor a GiB, {row['cpu'] / row['experts'] * 1e3:6.2f} ms an expert, "
        f"first {row['first']['wall']:.1f} s, plan {row['plan']:.1f} s, peak {row['peak'] / 2**20:,.0f} MiB",
        flush=True,
    )
    return row


if __name__ == "__main__":
    main()

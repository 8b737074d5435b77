"""What conversion saves at start-up: experts from the source, repacked while loading, against a converted checkpoint.

Writes synthetic checkpoints with the real shapes of one layer of Qwen3-30B-A3B (GPTQ int4) and gpt-oss-20b (MXFP4),
converts them, then loads each way in a process of its own and prints wall time split into read, repack and copy, and
peak memory, side by side:

    python examples/bench/startup.py [--model NAME] [--layers N] [--folder FOLDER] [--tp N]

All ways read through the page cache. The repack of `source` is moeq's own, on the CPU with all cores that it uses.
With a GPU, `copy` is the transfer to it, and where vLLM is installed `engine` does what vLLM does: every tensor of the
source is copied to the GPU, and when all are there, the engine's own functions repack them, which takes more memory.
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

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    torch.zeros(1, device=device)
    load = ROADS[road]()
    base = peak_memory()
    started = time.perf_counter()
    checkpoint = moeq.open(folder)
    opened = time.perf_counter() - started
    read, repack, copy = load(checkpoint, layout_id, tp, device)
    result = {"open": opened, "read": read, "repack": repack, "copy": copy, "peak": peak_memory() - base}
    result["gpu_peak"] = torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0
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
    """Read the packed experts straight to the device; `read` holds the copy, which goes on at the same time."""
    import torch

    import moeq

    start = time.perf_counter()
    layers = checkpoint.info.moe_layers
    kept = [moeq.load_experts(checkpoint, n, device=device, tp_rank=0, tp_size=tp, check_gpu=False) for n in layers]
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert len(kept) == len(layers)
    return time.perf_counter() - start, 0.0, 0.0


class FromEngine:
    """vLLM's way. Constructing it imports the engine and compiles what it compiles once per machine."""

    def __init__(self) -> None:
        import torch
        import vllm._custom_ops as ops
        from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp4

        self.ops, self.scales, self.fp4 = ops, marlin_utils.marlin_moe_permute_scales, marlin_utils_fp4
        words = torch.zeros(1, 16, 64, dtype=torch.int32, device="cuda")
        ops.gptq_marlin_moe_repack(words, words.new_empty(1, 0), 128, 64, 4)
        torch.cuda.synchronize()

    def __call__(self, checkpoint, layout_id: str, tp: int, device) -> tuple[float, float, float]:
        """Read, repack and copy, in seconds; for one rank."""
        import torch

        read = copy = 0.0
        layers = []
        for layer in checkpoint.info.moe_layers:
            target: dict[str, torch.Tensor] = {}
            for name, where in self.places(checkpoint, layer):
                start = time.perf_counter()
                tensor = checkpoint.source.read(name)
                middle = time.perf_counter()
                self.put(target, checkpoint, layer, where, tensor, device)
                read, copy = read + middle - start, copy + time.perf_counter() - middle
            layers.append(target)
        start = time.perf_counter()
        torch.cuda.synchronize()
        middle = time.perf_counter()
        for target in layers:
            (self.repack_mxfp4 if "w13_blocks" in target else self.repack_gptq)(target)
        torch.cuda.synchronize()
        return read, time.perf_counter() - middle, copy + middle - start

    @staticmethod
    def places(checkpoint, layer: int):
        """Names of a layer's expert tensors, and `(stacked tensor, expert or None, half or None)` of each."""
        halves = {
            "gate_proj": ("w13", 0),
            "up_proj": ("w13", 1),
            "down_proj": ("w2", None),
            "gate_up_proj": ("w13", None),
        }
        prefix = f"layers.{layer}."
        for name in checkpoint.source.tensors:
            if prefix not in name or ".experts." not in name:
                continue
            leaf = name.rpartition(".experts.")[2]
            if leaf[0].isdigit():
                expert, projection, part = leaf.split(".")
                if part in ("qweight", "scales"):
                    yield name, (f"{halves[projection][0]}_{part}", int(expert), halves[projection][1])
            else:
                projection, _, part = leaf.rpartition("_")
                yield name, (f"{halves[projection][0]}_{part}", None, None)

    @staticmethod
    def put(target, checkpoint, layer: int, where, tensor, device) -> None:
        """Copy a tensor to its place on the GPU, as the engine's weight loaders do."""
        import torch

        part, expert, half = where
        if expert is None:  # MXFP4, rounded up as the engine does it
            sizes = {"w13": (5888, 3072), "w2": (3072, 2944)}[part.partition("_")[0]]
            shape = [tensor.shape[0], sizes[0], sizes[1] // 2 if "blocks" in part else sizes[1] // 32][: tensor.dim()]
            flat = tensor.flatten(2) if "blocks" in part else tensor
            target[part] = torch.zeros(shape, dtype=tensor.dtype, device=device)
            target[part][tuple(slice(0, size) for size in flat.shape)].copy_(flat)
            return
        rows, columns = tensor.shape
        if part not in target:
            wide = columns if half is None else 2 * columns
            dtype = torch.bfloat16 if part.endswith("scales") else tensor.dtype
            target[part] = torch.empty(checkpoint.num_experts(layer), rows, wide, dtype=dtype, device=device)
        place = target[part][expert]
        (place if half is None else place[:, half * columns : (half + 1) * columns]).copy_(tensor)

    def repack_gptq(self, target) -> None:
        """As `process_weights_after_loading` does for GPTQ int4 in groups of 128."""
        for role in ("w13", "w2"):
            words, scales = target[f"{role}_qweight"], target[f"{role}_scales"]
            size_k, size_n = 8 * words.shape[1], words.shape[2]
            order = words.new_empty(words.shape[0], 0)
            target[f"{role}_qweight"] = self.ops.gptq_marlin_moe_repack(words, order, size_k, size_n, 4)
            target[f"{role}_scales"] = self.scales(scales, size_k, size_n, 128)

    def repack_mxfp4(self, target) -> None:
        """As `process_weights_after_loading` does for gpt-oss."""
        from types import SimpleNamespace

        import torch

        parts = [target.pop(f"{role}_{part}") for part in ("blocks", "scales", "bias") for role in ("w13", "w2")]
        layer = SimpleNamespace(params_dtype=torch.bfloat16)
        target["packed"] = self.fp4.prepare_moe_mxfp4_layer_for_marlin(layer, *parts)


#: Ways of loading, in the order of the table; called to set up, then with what to load.
ROADS = {"source": lambda: from_source, "engine": FromEngine, "converted": lambda: from_converted}


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
    parser.add_argument("--road", choices=ROADS, action="append")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    rows: list[dict] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        for name in options.model or LAYOUTS:
            rows += compare(name, options.layers, options.tp, Path(scratch) / name, options.road)
    if options.out:
        about = {"schema": "moeq.startup/1", "date": time.strftime("%Y-%m-%d")}
        options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def compare(name: str, layers: int, tp: int, folder: Path, roads: list[str] | None) -> list[dict]:
    """Every way of loading one model, each in a process of its own."""
    import moeq

    rows: list[dict] = []
    layout = LAYOUTS[name]
    source, converted = folder / "source", folder / "converted"
    make_checkpoint.write_checkpoint(source, MODELS[name], MODELS[name].formats[0], make_checkpoint.Size(layers))
    started = time.perf_counter()
    deployment = moeq.Deployment(gpu=moeq.gpu("H100"), tp=tp)
    moeq.convert(source, converted, deployment, layout=layout)
    print(f"{name}, {layers} layer(s), tp {tp}, {layout}; converted once in {time.perf_counter() - started:.1f} s")
    print(f"{'':12}{'open':>8}{'read':>8}{'repack':>8}{'copy':>8}{'total':>8}   peak memory   of the GPU")
    for road in roads or ROADS:
        place = converted if road == "converted" else source
        command = [sys.executable, __file__, "--measure", road, str(place), layout, str(tp)]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            print(f"{road:12} not here: {run.stderr.strip().splitlines()[-1]}")
            continue
        found = json.loads(run.stdout.splitlines()[-1])
        rows.append({"model": name, "layers": layers, "tp": tp, "road": road, **found})
        steps = [found[step] for step in ("open", "read", "repack", "copy")]
        memory = f"{found['peak']:10.0f} MiB {found['gpu_peak']:8.0f} MiB"
        print(f"{road:12}" + "".join(f"{t:7.2f}s" for t in (*steps, sum(steps))) + memory, flush=True)
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
    else:
        main()

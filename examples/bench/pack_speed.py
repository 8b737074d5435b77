"""How fast experts are packed on this machine, against memcpy and the digest (BLAKE3) in the same run.

    python examples/bench/pack_speed.py [--seconds 0.5] [--rows 4096 --columns 4096] [--only ID ...] [--paths NAME ...]
                                        [--json FILE]

First the fast paths of a conversion (`moeq.pipeline.pack.fast`), on random experts with the shapes of real models:
gigabytes of stored bytes per second for `pack` (stored bytes to packed bytes), for `prove` (unpack, compare with what
is stored, digest of the logical values), for both one after the other, on one thread and on two.

Then one line per layout, from unpacked codes: gigabytes of *source* bytes (codes tightly packed, and scales) per second
for `pack` into reused buffers and for `unpack`, and for two threads packing two experts. `memcpy` copies between
buffers that do not fit the caches. On a machine that is busy with other work, `--clock cpu` counts seconds of this
process's own CPU time instead (two threads then count for what both used, so their column is per core).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import make_checkpoint
import numpy as np
import torch
from blake3 import blake3

import moeq
from moeq.checkpoint.manifest import StackedRole
from moeq.checkpoint.names import StoredName
from moeq.checkpoint.writer import tensor_bytes
from moeq.layouts.padding import logical_bytes
from moeq.layouts.registry import LAYOUTS, get_layout, layout_class
from moeq.layouts.words import have_numba
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.model import Checkpoint
from moeq.pipeline.pack.fast import find_fast_path
from moeq.pipeline.pack.fast.path import FastPath, Matrices
from moeq.pipeline.plan.layer_plan import LayerPlan, plan_layer
from moeq.pipeline.plan.units import place_of

SCALES = {"e8m0": torch.uint8, "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


def spec_for(layout_id: str, rows: int, columns: int) -> MatrixSpec:
    """The first kind of w2 that the layout holds: mxfp4, int4 groups of 32 or 128, or int8 channels."""
    kind = layout_class(layout_id)
    layout = get_layout(layout_id)
    element = kind.elements[0]
    scales = ("e8m0",) if element == "e2m1" else ("bf16", "f32")
    groups = (32,) if element == "e2m1" else (128, 32, columns)
    tried = [
        MatrixSpec("w2", rows, columns, element, group, scale, act_order="act-order" in layout_id)
        for scale in scales
        for group in groups
    ]
    return next(spec for spec in tried if not layout.problems(spec))


def random_matrix(spec: MatrixSpec, seed: int) -> QuantizedMatrix:
    """Random codes; scales that no layout loses."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << spec.bits, (spec.n, spec.k), generator=generator, dtype=torch.uint8)
    shape = (spec.n, spec.num_groups)
    scales = torch.randint(112, 140, shape, generator=generator)
    if spec.scale_dtype != "e8m0":
        scales = 2.0 ** (scales - 126)
    index = torch.arange(spec.k, dtype=torch.int32).flip(0) // spec.group_size if spec.act_order else None
    return QuantizedMatrix(spec, codes, scales.to(SCALES[spec.scale_dtype]), group_index=index)


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
clock = CLOCKS["wall"]


def rate(work: Callable[[], object], size: int, seconds: float) -> float:
    """Median GB/s of `size` bytes per call over at least `seconds` and three calls."""
    work()
    rates: list[float] = []
    started = time.perf_counter()
    while len(rates) < 3 or time.perf_counter() - started < seconds:
        before = clock()
        work()
        rates.append(size / (clock() - before) / 1e9)
    return statistics.median(rates)


def both(work: Callable[[int], object]) -> Callable[[], object]:
    """Two threads doing the same on data of their own; the compiled loops release the interpreter lock."""
    pool = ThreadPoolExecutor(2)
    return lambda: list(pool.map(work, (0, 1)))


def measure_layout(layout_id: str, rows: int, columns: int, seconds: float) -> dict[str, object]:
    """One row of the table."""
    layout = get_layout(layout_id, allow_lossy=True)
    spec = spec_for(layout_id, rows, columns)
    matrices = [random_matrix(spec, seed) for seed in (0, 1)]
    found = [layout.calibrate(matrix) for matrix in matrices]
    if found[0] is not None:
        layout = layout.with_calibration(max(value for value in found if value is not None))
    buffers = [layout.pack(matrix) for matrix in matrices]
    size = logical_bytes(spec)

    def pack(which: int) -> None:
        layout.pack_into(matrices[which], buffers[which])

    return {
        "layout": layout_id,
        "matrix": f"{spec.element} g{spec.group_size}",
        "pack": rate(lambda: pack(0), size, seconds),
        "pack_2": rate(both(pack), 2 * size, seconds),
        "unpack": rate(lambda: layout.unpack(buffers[0], spec), size, seconds),
    }


@dataclass(frozen=True)
class Journey:
    """A fast path to measure: what `make_checkpoint.py` writes, and the layout."""

    model: str
    format: str
    layout: str


FAST_PATHS = {
    "gptq": Journey("qwen3-30b-a3b", "gptq", "marlin-wna16/1"),
    "gptq-triton": Journey("qwen3-30b-a3b", "gptq", "triton-wna16/1"),
    "awq": Journey("qwen3-30b-a3b", "awq", "marlin-wna16/1"),
    "ct-int4": Journey("kimi-k2", "ct-int4", "marlin-wna16/1"),
    "w8a8": Journey("qwen3-30b-a3b", "w8a8", "int8-w8a8/1"),
    "mxfp4": Journey("gpt-oss-120b", "mxfp4", "marlin-mxfp4-interleaved/1"),
    "mxfp4-gate-up": Journey("gpt-oss-120b", "mxfp4", "marlin-mxfp4/1"),
    "mxfp4-moeq": Journey("gpt-oss-120b", "mxfp4", "moeq-mxfp4/1"),
    "mxfp4-hopper": Journey("gpt-oss-120b", "mxfp4", "triton-kernels-hopper/1"),
    "mxfp4-cdna4": Journey("gpt-oss-120b", "mxfp4", "triton-kernels-cdna4/1"),
    "nvfp4": Journey("qwen3-30b-a3b", "nvfp4", "marlin-nvfp4/1"),
    "fp8-channel": Journey("qwen3-30b-a3b", "fp8-channel", "marlin-fp8/1"),
    "fp8-block": Journey("qwen3-30b-a3b", "fp8-block", "marlin-fp8/1"),
    "mxfp8": Journey("qwen3-30b-a3b", "mxfp8", "marlin-mxfp8/1"),
    "nvfp4-trtllm": Journey("qwen3-30b-a3b", "nvfp4", "trtllm-nvfp4/1"),
    "nvfp4-cutlass": Journey("qwen3-30b-a3b", "nvfp4", "flashinfer-cutlass-nvfp4/1"),
    "nvfp4-cutedsl": Journey("qwen3-30b-a3b", "nvfp4", "flashinfer-cutedsl-nvfp4/1"),
    "nvfp4-b12x": Journey("qwen3-30b-a3b", "nvfp4", "b12x-nvfp4/1"),
    "fp8-block-trtllm": Journey("qwen3-30b-a3b", "fp8-block", "trtllm-fp8-block/1"),
    "fp8-block-cutlass": Journey("qwen3-30b-a3b", "fp8-block", "flashinfer-cutlass-fp8-block/1"),
    "fp8-block-aiter": Journey("qwen3-30b-a3b", "fp8-block", "aiter-fp8-block/1"),
    "fp8-block-fnuz": Journey("qwen3-30b-a3b", "fp8-block", "aiter-fp8-block-fnuz/1"),
    "fp8-channel-aiter": Journey("qwen3-30b-a3b", "fp8-channel", "aiter-fp8-channel/1"),
    "fp8-tensor-trtllm": Journey("qwen3-30b-a3b", "fp8-tensor", "trtllm-fp8-tensor/1"),
    "mxfp8-trtllm": Journey("qwen3-30b-a3b", "mxfp8", "trtllm-mxfp8/1"),
    "mxfp8-deepgemm": Journey("qwen3-30b-a3b", "mxfp8", "deepgemm-mxfp8/1"),
}


def measure_path(name: str, seconds: float) -> list[dict[str, object]]:
    """Both matrices of two random experts of a model, one per thread."""
    journey = FAST_PATHS[name]
    whole = make_checkpoint.MODELS[journey.model]
    config = {key: value for key, value in whole.config.items() if key != "first_k_dense_replace"}
    model = replace(whole, config=config, attention={}, dense=0, shared=False)
    with TemporaryDirectory() as folder:
        make_checkpoint.write_checkpoint(Path(folder), model, journey.format, make_checkpoint.Size(1, 2, 64))
        checkpoint = moeq.open(folder)
        plan = plan_layer(checkpoint, 0, journey.layout)
        return [_measure_path(name, checkpoint, plan, role, seconds) for role in ("w13", "w2")]


def _measure_path(
    name: str, checkpoint: Checkpoint, plan: LayerPlan, role: StackedRole, seconds: float
) -> dict[str, object]:
    experts = checkpoint.experts(0)
    fast_path = find_fast_path(experts, role, plan.layout, plan.shards, plan.entry.matrices[role].spec)
    if fast_path is None:
        raise SystemExit(f"no fast path for {name} {role}")
    layout = plan.layout.id
    inputs = [_stored(checkpoint, fast_path, expert) for expert in (0, 1)]
    sizes = {part: tensor_bytes(spec.shape, spec.dtype) for part, spec in plan.shards[0].parts[role].items()}
    outputs = [[{part: np.empty(size, np.uint8) for part, size in sizes.items()}] for _ in (0, 1)]
    scratch = [np.empty(fast_path.scratch_bytes, np.uint8) for _ in (0, 1)]
    size = sum(part.nbytes for part in inputs[0].values())
    if fast_path.calibrates:
        largest = [fast_path.largest(one, scratch[0]) or () for one in inputs]
        fast_path = fast_path.with_calibration([max(both) for both in zip(*largest, strict=True)])
    path = fast_path

    def read(which: int) -> Matrices:
        found = path.read(inputs[which], scratch[which])
        if found is None:
            raise SystemExit(f"the fast path of {name} {role} declined")
        return found

    def pack(which: int) -> None:
        path.pack(read(which), outputs[which], scratch[which])

    def prove(which: int, known: Matrices | None = None) -> None:
        if path.prove(known or read(which), outputs[which], scratch[which]) is None:
            raise SystemExit(f"{name} {role} does not unpack to what is stored")

    def go(which: int) -> None:
        known = read(which)
        path.pack(known, outputs[which], scratch[which])
        prove(which, known)

    both(go)()
    return {
        "path": f"{name} {role}",
        "layout": layout,
        "bytes": size,
        "pack": rate(lambda: pack(0), size, seconds),
        "prove": rate(lambda: prove(0), size, seconds),
        "whole": rate(lambda: go(0), size, seconds),
        "whole_2": rate(both(go), 2 * size, seconds),
    }


def _stored(checkpoint: Checkpoint, fast_path: FastPath, expert: int) -> dict[tuple[StoredName, str], np.ndarray]:
    """What the fast path reads, in memory."""
    experts, found = checkpoint.experts(0), {}
    for projection, part in fast_path.reads:
        entry = experts.layer.unit(expert)[projection][part]
        start, stop = place_of(entry, part, experts, expert)
        found[projection, part] = np.frombuffer(checkpoint.source.read_bytes(entry.file, start, stop), np.uint8)
    return found


def measure_memcpy(seconds: float) -> dict[str, object]:
    """Copies of 96 MiB."""
    source = [torch.zeros(96 << 20, dtype=torch.uint8) for _ in range(2)]
    target = [torch.ones_like(one) for one in source]
    size = source[0].numel()
    copy = rate(lambda: target[0].copy_(source[0]), size, seconds)
    two = rate(both(lambda which: target[which].copy_(source[which])), 2 * size, seconds)
    return {"layout": "memcpy", "matrix": "96 MiB", "pack": copy, "pack_2": two, "unpack": copy}


def measure_digest(seconds: float) -> dict[str, object]:
    """The digest alone, of 1 MiB that stays in the cache."""
    data = [np.zeros(1 << 20, np.uint8) for _ in range(2)]
    one = rate(lambda: blake3(data[0].data).digest(), data[0].nbytes, seconds)
    two = rate(both(lambda which: blake3(data[which].data).digest()), 2 * data[0].nbytes, seconds)
    return {"layout": "blake3", "matrix": "1 MiB", "pack": one, "pack_2": two, "unpack": one}


def main() -> int:
    """Measure, print the table, write JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each figure")
    parser.add_argument("--rows", type=int, default=4096, help="output features, a multiple of 256")
    parser.add_argument("--columns", type=int, default=4096, help="input features, a multiple of 256")
    parser.add_argument("--only", nargs="*", default=list(LAYOUTS), help="layout ids")
    parser.add_argument("--paths", nargs="*", default=list(FAST_PATHS), help=f"of {', '.join(FAST_PATHS)}")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="what seconds are")
    options = parser.parse_args()
    global clock
    clock = CLOCKS[options.clock]
    torch.set_num_threads(1)
    fast_paths = [row for name in options.paths for row in measure_path(name, options.seconds)] if have_numba() else []
    results = [measure_memcpy(options.seconds), measure_digest(options.seconds)]
    results += [measure_layout(one, options.rows, options.columns, options.seconds) for one in options.only]
    head = ("path", "layout", "pack", "prove", "both", "2 threads")
    print(f"{head[0]:18} {head[1]:28} {head[2]:>8} {head[3]:>8} {head[4]:>8} {head[5]:>10}   GB/s of stored bytes")
    for row in fast_paths:
        figures = f"{row['pack']:8.2f} {row['prove']:8.2f} {row['whole']:8.2f} {row['whole_2']:10.2f}"
        print(f"{row['path']:18} {row['layout']:28} {figures}")
    head = ("layout", "matrix", "pack", "2 threads", "unpack")
    print(f"{head[0]:34} {head[1]:22} {head[2]:>8} {head[3]:>10} {head[4]:>8}   GB/s of source bytes")
    for row in results:
        print(f"{row['layout']:34} {row['matrix']:22} {row['pack']:8.2f} {row['pack_2']:10.2f} {row['unpack']:8.2f}")
    if options.json:
        document = {
            "schema": "moeq.pack-speed/2",
            "numba": have_numba(),
            "machine": platform.machine(),
            "torch": torch.__version__,
            "unit": "GB/s of source bytes",
            "clock": options.clock,
            "paths": fast_paths,
            "results": results,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

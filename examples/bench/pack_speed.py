"""How fast layouts pack and unpack on this machine, against memcpy in the same run.

    python examples/bench/pack_speed.py [--seconds 0.5] [--rows 4096 --columns 4096] [--only ID ...] [--json FILE]

One line per layout: gigabytes of *source* bytes (codes tightly packed, and scales) per second on one core for `pack`
from unpacked codes into reused buffers, for `unpack`, and for two threads packing two experts. Before them comes the
direct road from GPTQ words, whose `unpack` is the comparison with the source. `memcpy` copies between buffers that do
not fit the caches. On a machine that is busy with other work, `--clock cpu` counts seconds of this process's own CPU
time instead (two threads then count for what both used, so their column is per core).
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
from pathlib import Path

import torch

from moeq.layouts.padding import logical_bytes
from moeq.layouts.registry import LAYOUTS, get_layout, layout_class
from moeq.layouts.words import have_numba
from moeq.matrix import MatrixSpec, QuantizedMatrix

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
    found = [layout.survey(matrix) for matrix in matrices]
    if found[0] is not None:
        layout = layout.with_survey(max(value for value in found if value is not None))
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


def measure_direct(rows: int, columns: int, seconds: float) -> dict[str, object]:
    """GPTQ words to Marlin words, and back against the source."""
    from moeq.layouts.fast.gptq_marlin import pack_gptq4, same_gptq4

    shape = (columns // 8, rows)
    words = [torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32) for _ in range(2)]
    out = [torch.zeros(columns // 16, 2 * rows, dtype=torch.int32) for _ in range(2)]
    size = words[0].numel() * 4
    return {
        "layout": "marlin-wna16/1",
        "matrix": "GPTQ words, no codes",
        "pack": rate(lambda: pack_gptq4(words[0], out[0]), size, seconds),
        "pack_2": rate(both(lambda which: pack_gptq4(words[which], out[which])), 2 * size, seconds),
        "unpack": rate(lambda: same_gptq4(words[0], out[0]), size, seconds),
    }


def measure_memcpy(seconds: float) -> dict[str, object]:
    """Copies of 96 MiB."""
    source = [torch.zeros(96 << 20, dtype=torch.uint8) for _ in range(2)]
    target = [torch.ones_like(one) for one in source]
    size = source[0].numel()
    copy = rate(lambda: target[0].copy_(source[0]), size, seconds)
    two = rate(both(lambda which: target[which].copy_(source[which])), 2 * size, seconds)
    return {"layout": "memcpy", "matrix": "96 MiB", "pack": copy, "pack_2": two, "unpack": copy}


def main() -> int:
    """Measure, print the table, write JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each figure")
    parser.add_argument("--rows", type=int, default=4096, help="output features, a multiple of 256")
    parser.add_argument("--columns", type=int, default=4096, help="input features, a multiple of 256")
    parser.add_argument("--only", nargs="*", default=list(LAYOUTS), help="layout ids")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="what seconds are")
    options = parser.parse_args()
    global clock
    clock = CLOCKS[options.clock]
    torch.set_num_threads(1)
    results = [measure_memcpy(options.seconds)]
    if have_numba():
        results.append(measure_direct(options.rows, options.columns, options.seconds))
    results += [measure_layout(one, options.rows, options.columns, options.seconds) for one in options.only]
    head = ("layout", "matrix", "pack", "2 threads", "unpack")
    print(f"{head[0]:34} {head[1]:22} {head[2]:>8} {head[3]:>10} {head[4]:>8}   GB/s of source bytes")
    for row in results:
        print(f"{row['layout']:34} {row['matrix']:22} {row['pack']:8.2f} {row['pack_2']:10.2f} {row['unpack']:8.2f}")
    if options.json:
        document = {
            "schema": "moeq.pack-speed/1",
            "numba": have_numba(),
            "machine": platform.machine(),
            "torch": torch.__version__,
            "unit": "GB/s of source bytes",
            "clock": options.clock,
            "results": results,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

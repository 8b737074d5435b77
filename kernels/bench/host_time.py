"""What Python does around the launches of a prepared call, measured without a GPU.

    PYTHONPATH=.:kernels python kernels/bench/host_time.py --out results.json [--before FOLDER]

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
import ctypes
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

TOKENS = (1, 8, 64, 200, 512)
LAYERS = (("qwen3-30b", "int4"), ("mixtral-tp8", "int4"), ("gpt-oss-20b", "mxfp4"), ("deepseek-v3-tp8", "int4"))

#: A driver that does nothing: what `moeq_kernels.cuda` calls, and how many launches there were. Like a real one it
#: refuses what needs a context in a thread that has none, and code while somebody captures, but for a thread that is
#: relaxed about that.
DRIVER = """
#include <stdint.h>
#include <stddef.h>
static long launches, nodes; static int capturing, others_capture;
static __thread void *current; static __thread int mode;
long counted_launches(void) { return launches; }
void somebody_captures(int does) { others_capture = does; }
int cuModuleLoadData(void **module, const void *image) {
    if (!current || (others_capture && mode != 2)) return current ? 900 : 201;
    *module = (void *)image; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = module; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(1 + (long)device); return 0; }
int cuCtxGetCurrent(void **context) { *context = current; return 0; }
int cuCtxSetCurrent(void *context) { current = context; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "none"; return 0; }
int cuLaunchKernelEx(const void *config, void *function, void **parameters, void **extra) {
    launches++; return current ? 0 : 201; }
int cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const void *sizes, const void *strides,
    const void *box, const void *steps, int interleave, int swizzle, int promotion, int fill) {
    *(void **)map = address; return current ? 0 : 201; }
int cuStreamCreate(void **stream, unsigned flags) { *stream = (void *)(16 + (long)flags); return 0; }
int cuStreamGetPriority(void *stream, int *priority) { *priority = 0; return 0; }
int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return cuStreamCreate(stream, flags); }
int cuStreamIsCapturing(void *stream, int *is) { *is = capturing; return 0; }
int cuThreadExchangeStreamCaptureMode(int *given) { int last = mode; mode = *given; *given = last; return 0; }
int cuStreamBeginCapture_v2(void *stream, int mode) { capturing = 1; nodes = launches; return 0; }
int cuStreamEndCapture(void *stream, void **graph) {
    capturing = 0; nodes = launches - nodes; launches -= nodes; *graph = (void *)3; return 0; }
int cuGraphGetNodes(void *graph, void **found, size_t *count) {
    if (found) for (size_t i = 0; i < *count; i++) found[i] = (void *)(100 + i);
    *count = nodes; return 0; }
int cuGraphGetEdges_v2(void *graph, void **from, void **to, void *data, size_t *count) {
    if (from) for (size_t i = 0; i < *count; i++) from[i] = (void *)(100 + i), to[i] = (void *)(101 + i);
    *count = nodes - 1; return 0; }
int cuGraphInstantiateWithFlags(void **run, void *graph, uint64_t flags) { *run = (void *)4; return 0; }
int cuGraphLaunch(void *run, void *stream) { launches++; return current ? 0 : 201; }
int cuGraphExecKernelNodeSetParams_v2(void *run, void *node, const void *params) { return 0; }
int cuGraphExecDestroy(void *run) { return 0; }
int cuGraphDestroy(void *graph) { return 0; }
"""


def driver(folder: Path, more: str = "") -> ctypes.CDLL:
    """The library, with more functions in C if wanted, loaded under the driver's name."""
    (folder / "driver.c").write_text(DRIVER + more)
    library = folder / "libcuda.so.1"
    build = ["gcc", "-O2", "-shared", "-fPIC", "-w", folder / "driver.c", "-o", library, "-Wl,-soname,libcuda.so.1"]
    subprocess.run(build, check=True)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


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


def take_cpu(layer: Any) -> None:
    """Makes a layer that was planned on `meta` take tensors of the CPU and launch through the stand-in."""
    import torch

    from moeq_kernels import prepared

    cpu = torch.device("cpu", 0)
    layer.device, layer._expected = cpu, (*layer._expected[:3], torch.device("cpu"))
    layer._direct, layer._program = True, prepared._program(layer.family, layer.problem, 0, None)
    weights = {one: torch.empty(64, dtype=torch.uint8) for one in layer._program.roots[6:]}
    layer._tensors, layer._weights = weights, [one.data_ptr() for one in weights.values()]


def pretend_cuda() -> None:
    """What prepared calls ask torch about the current device, answered without one."""
    import contextlib

    import torch

    torch._C._cuda_getDevice = lambda: 0  # type: ignore[attr-defined]
    torch._C._cuda_getCurrentRawStream = lambda index: 7  # type: ignore[attr-defined]
    torch.cuda.device = lambda index: contextlib.nullcontext()  # type: ignore[assignment,misc]


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
    here = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": f"{folder}:{here.parent}:{here}:{os.environ.get('PYTHONPATH', '')}"}
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

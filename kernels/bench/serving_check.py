"""Measure on a GPU what an engine needs of prepared layers: host time of calls, warming, graphs, streams, threads.

    python -m bench.serving_check --out results.json [--tokens 8192]

Host time of a call is its share of the time in which several calls return, without waiting for the device (fewer calls
are queued than its queue holds). Warming compiles the kernels of one layer for 1 to 8192 tokens from an empty cache
folder, then loads them in another process from the folder that was filled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.plan_cells import model_layer
from bench.shapes import SHAPES
from bench.timing import inputs
from moeq_kernels import PackedExperts, PreparedLayer, fused_moe, prepare

LAYERS = (
    ("qwen3-30b-a3b", "int4"),
    ("mixtral-8x7b-tp8", "int4"),
    ("gpt-oss-20b", "mxfp4"),
    ("deepseek-v3-tp8", "int4"),
)
TOKENS = (1, 8, 64, 200, 512, 4096)


def layer_of(name: str, stored: str, tokens: int, warm: bool) -> tuple[PreparedLayer, PackedExperts, dict[str, Any]]:
    """Prepare a real model's layer with random weights; return its weights and the options of its calls, too."""
    layer = model_layer(name, stored)
    assert layer is not None
    packed = layer.random_experts()
    options: dict[str, Any] = {"activation": "swiglu_oai", "limit": 7.0} if layer.gpt_oss else {}
    sizes = {"top_k": layer.shape.top_k, "hidden_size": layer.shape.hidden}
    return prepare(packed, max_tokens=tokens, warm=warm, **sizes, **options), packed, options


def host_us(call: Any, rounds: int = 30, calls: int = 10) -> float:
    """Return the microseconds of host time of a call: the median of rounds."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) / calls * 1e6)
    torch.cuda.synchronize()
    return sorted(times)[rounds // 2]


def launched_us(layer: PreparedLayer, tokens: int, call: Any) -> float:
    """Return the host time of a call whose kernels are launched one by one, not replayed as a graph."""
    replays = layer._program.bounds[tokens]._replays
    kept, replays._off = replays._off, True
    try:
        return host_us(call)
    finally:
        replays._off = kept


def measure(name: str, stored: str) -> list[dict[str, Any]]:
    """Measure the host times of one layer."""
    shape = SHAPES[name]
    layer, packed, options = layer_of(name, stored, 8192, warm=True)
    other = prepare(packed, top_k=shape.top_k, max_tokens=8192, hidden_size=shape.hidden, **options)
    rows = []
    for tokens in TOKENS:
        given = inputs(shape, tokens, 1)
        out = torch.empty_like(given.x)
        workspace = torch.empty(layer.workspace_bytes(tokens), dtype=torch.uint8, device="cuda")
        tensors = (given.x, given.weights, given.ids)
        elsewhere = (*(one.clone() for one in tensors), torch.empty_like(out))
        begin = time.perf_counter()
        layer(*tensors)
        first = (time.perf_counter() - begin) * 1e6

        def owned(tensors: Any = tensors, out: Any = out, workspace: Any = workspace) -> None:
            layer(*tensors, out=out, workspace=workspace)

        def alternating(
            tensors: Any = tensors, out: Any = out, workspace: Any = workspace, elsewhere: Any = elsewhere
        ) -> None:
            layer(*tensors, out=out, workspace=workspace)
            other(*elsewhere[:3], out=elsewhere[3], workspace=workspace)

        def simple(tensors: Any = tensors) -> None:
            fused_moe(tensors[0], packed, *tensors[1:], **options)

        rows.append({
            "layer": name, "format": stored, "tokens": tokens, "first_us": round(first, 1),
            "owned_us": round(host_us(owned), 1),
            "two_layers_us": round(host_us(alternating) / 2, 1),
            "launches_us": round(launched_us(layer, tokens, owned), 1),
            "allocating_us": round(host_us(lambda tensors=tensors: layer(*tensors)), 1),
            "fused_moe_us": round(host_us(simple), 1),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def check_use() -> dict[str, bool]:
    """Check that graphs, other streams, fresh threads and torch.compile give the numbers of an eager call."""
    shape = SHAPES["qwen3-30b-a3b"]
    layer, *_ = layer_of("qwen3-30b-a3b", "int4", 256, warm=True)
    given = inputs(shape, 24, 3)
    tensors = (given.x, given.weights, given.ids)
    wanted = layer(*tensors).clone()
    torch.cuda.synchronize()
    results = {}
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(given.x)
    with torch.cuda.graph(graph):
        layer(*tensors, out=out)
    out.fill_(float("nan"))
    graph.replay()
    results["graph"] = torch.equal(out, wanted)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = layer(*tensors)
    torch.cuda.current_stream().wait_stream(stream)
    results["another stream"] = torch.equal(y, wanted)
    results |= check_first_calls(layer, given, wanted)
    compiled = torch.compile(lambda x: layer(x, given.weights, given.ids) * 2, backend="aot_eager", fullgraph=True)
    results["torch.compile"] = torch.equal(compiled(given.x), wanted * 2)
    view = torch.empty(given.x.numel() + 1, dtype=given.x.dtype, device="cuda")[1:].view(given.x.shape)
    view.copy_(given.x)
    results["an unaligned x"] = torch.equal(layer(view, given.weights, given.ids), wanted)
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode("error")
        layer(*tensors)
        torch.cuda.set_sync_debug_mode("default")
    results["no synchronisation"] = True
    return results | check_replays()


def check_first_calls(layer: PreparedLayer, given: Any, wanted: torch.Tensor) -> dict[str, bool]:
    """Check calls in threads that have used no GPU, and one whose kernels are loaded while it is captured."""
    results = {}
    workspace = torch.empty(layer.workspace_bytes(24), dtype=torch.uint8, device="cuda")
    for tokens, name in ((24, "a fresh thread"), (23, "a fresh thread, as the first with so many tokens")):
        tensors = [one[:tokens] for one in (given.x, given.weights, given.ids)]
        found = torch.full_like(tensors[0], float("nan"))
        torch.cuda.synchronize()
        call = partial(layer, *tensors, out=found, workspace=workspace)
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        torch.cuda.synchronize()
        results[name] = torch.equal(found, wanted if tokens == 24 else layer(*tensors))
    other, *_ = layer_of("mixtral-8x7b-tp8", "int4", 24, warm=False)
    drawn = inputs(SHAPES["mixtral-8x7b-tp8"], 24, 3)
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(drawn.x)
    try:
        with torch.cuda.graph(graph):
            other(drawn.x, drawn.weights, drawn.ids, out=out)
        graph.replay()
        results["a first call, captured"] = torch.equal(out, other(drawn.x, drawn.weights, drawn.ids))
    except RuntimeError as error:
        print("a first call, captured:", error, flush=True)
        results["a first call, captured"] = False
    return results


def check_replays() -> dict[str, bool]:
    """Check that replayed calls give the numbers of single launches, whatever changes between calls."""
    shape = SHAPES["qwen3-30b-a3b"]
    layer, *_ = layer_of("qwen3-30b-a3b", "int4", 256, warm=True)
    other, *_ = layer_of("qwen3-30b-a3b", "int4", 256, warm=False)
    results = {}
    for tokens in (1, 24, 200):
        drawn = [inputs(shape, tokens, seed) for seed in (3, 4)]
        wanted = {}
        for number, one in enumerate((layer, other)):
            one(drawn[0].x, drawn[0].weights, drawn[0].ids)
            replays = one._program.bounds[tokens]._replays
            replays._off = True
            for which, given in enumerate(drawn):
                wanted[number, which] = one(given.x, given.weights, given.ids).clone()
        replays._off = False

        def call(number: int, which: int, layers: Any = (layer, other), drawn: Any = drawn) -> torch.Tensor:
            given = drawn[which]
            return layers[number](given.x, given.weights, given.ids)

        def right(number: int, which: int, call: Any = call, wanted: Any = wanted) -> bool:
            return torch.equal(call(number, which), wanted[number, which])

        same = all([right(0, 0) for _ in range(20)])
        results[f"replayed, {tokens}"] = same and bool(replays._by_stream)
        order = [(number, which) for _ in range(10) for number in (0, 1) for which in (0, 1)]
        results[f"replayed in turns, {tokens}"] = all([right(*one) for one in order])
        queued = [(one, call(*one)) for one in order]  # nothing waits between these
        results[f"replayed without waiting, {tokens}"] = all(torch.equal(y, wanted[one]) for one, y in queued)
        kept = [given.x.clone() for given in drawn]
        drawn[0].x.copy_(kept[1])
        drawn[0].ids.copy_(drawn[1].ids)
        drawn[0].weights.copy_(drawn[1].weights)
        results[f"replayed with other values, {tokens}"] = torch.equal(call(0, 0), wanted[0, 1])
        streams = [torch.cuda.Stream() for _ in range(3)]
        torch.cuda.synchronize()
        found = []
        for _ in range(10):
            for stream in streams:
                with torch.cuda.stream(stream):
                    found.append(call(1, 1))
        torch.cuda.synchronize()
        results[f"replayed on streams, {tokens}"] = all(torch.equal(y, wanted[1, 1]) for y in found)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = call(1, 1)
        y.fill_(float("nan"))
        call(0, 1)
        graph.replay()
        results[f"captured after replays, {tokens}"] = torch.equal(y, wanted[1, 1])
        del found, queued, graph
    return results


def warming(tokens: int) -> dict[str, Any]:
    """Measure the seconds of warming a layer from an empty folder, and again in another process."""
    script = (
        "import json, time, torch; from bench.serving_check import layer_of; torch.zeros(1, device='cuda')\n"
        f"layer, *_ = layer_of('qwen3-30b-a3b', 'int4', {tokens}, False); b = time.time(); w = layer.warm()\n"
        "print(json.dumps([w.kernels, w.compiled, w.seconds, time.time() - b]))"
    )
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "MOEQ_KERNEL_CACHE": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        found = []
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
            )
            found.append(json.loads(done.stdout.splitlines()[-1]))
    names = ("kernels", "compiled", "compile_seconds", "seconds")
    return {
        "tokens": tokens,
        "cold": dict(zip(names, found[0], strict=True)),
        "warm": dict(zip(names, found[1], strict=True)),
    }


def main() -> int:
    """Run the command line; the exit code is 1 where a way to call gives other numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args()
    document: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name, part in (
        ("warming", lambda: warming(options.tokens)),
        ("use", check_use),
        ("host", lambda: [row for layer in LAYERS for row in measure(*layer)]),
    ):
        document[name] = part()
        print(name, document[name], flush=True)
        if options.out:
            options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(document["use"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())

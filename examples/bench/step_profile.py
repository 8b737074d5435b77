"""Where the time of one decoding step goes: kernels of vLLM's torch profiler, summed by what they are for.

`serve.py --profile` asks every server for the trace of some decoding steps, with a given number of users at a time,
and this module reads it. Kernels count once each, by their names; what no pattern knows is `rest`. The gap is the time
of a step in which the GPU runs nothing.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

#: Purposes of kernels, first match counts. Matrix products beside the experts (attention's, the router's) have one
#: name for all, so that they are one purpose.
PURPOSES = {
    "routing": r"choose_experts|route_few|route_quantised|count_pairs|place_pairs"
    r"|topk|topK|moe_align|routing|sort|Sort|histogram",
    "experts": r"moe_gemm|few_gate_up|few_down|expert_layer|expert_product|w[48]a8_product|gather_rows|sum_rows"
    r"|sum_choices|quanti[sz]e_rows|[Mm]arlin|humming|fused_moe|matmul_ogs|_and_mul|moe_sum|swiglu|expand_input|finalize",
    "attention": r"flash|Flash|fmha|attention|reshape_and_cache|rotary|rope",
    "sampling": r"argmax|ArgMax|sampl|logits|top_p|softmax",
    "norms": r"norm|Norm",
    "other products": r"nvjet|gemm|gemv|Gemm|splitK|cublas|cutlass",
}
STEPS = 24


def profiler_options(folder: Path) -> list[str]:
    """Return options of `vllm serve` that let it write traces into `folder`."""
    config = {"profiler": "torch", "torch_profiler_dir": str(folder), "ignore_frontend": True}
    config |= {"torch_profiler_with_stack": False, "torch_profiler_dump_cuda_time_total": False}
    config |= {"torch_profiler_activities": ["CUDA"]}
    return ["--profiler-config", json.dumps(config)]


def profile(post: Callable[[str, dict[str, Any]], object], work: Callable[[], object], folder: Path) -> dict[str, Any]:
    """Trace `STEPS` decoding steps while `work` runs, and sum them up.

    Args:
        post: sends a request to the server: path and body.
        work: answers that take several times `STEPS` steps.
        folder: where the server writes its traces.

    Raises:
        RuntimeError: the server wrote no trace with kernels.
    """
    before = set(folder.glob("*.json*"))
    running = threading.Thread(target=work)
    running.start()
    time.sleep(0.5)  # prompts are done, all users decode
    post("/start_profile", {"max_iterations": STEPS})
    running.join()
    post("/stop_profile", {})
    for _ in range(100):
        if found := set(folder.glob("*.json*")) - before:
            time.sleep(1)  # the file is whole
            return summed(read_kernels(max(found, key=lambda path: path.stat().st_size)))
        time.sleep(0.2)
    raise RuntimeError(f"no trace in {folder}")


def read_kernels(path: Path) -> list[tuple[str, float, float]]:
    """Return `(name, start, seconds)` of everything that ran on the GPU, by start. The trace counts microseconds."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = json.loads(text)["traceEvents"]
    ran = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return sorted(((one["name"], one["ts"] / 1e6, one["dur"] / 1e6) for one in ran), key=lambda one: one[1])


def summed(kernels: Sequence[tuple[str, float, float]], steps: int = STEPS) -> dict[str, Any]:
    """Return microseconds of a step by purpose, the gap, and the ten kernels that take most.

    Raises:
        RuntimeError: there are no kernels.
    """
    if not kernels:
        raise RuntimeError("the trace holds no kernels")
    purposes, names, busy, end = Counter[str](), Counter[str](), 0.0, kernels[0][1]
    for name, start, seconds in kernels:
        purposes[purpose_of(name)] += seconds
        names[name[:80]] += seconds
        busy += max(0.0, start + seconds - max(end, start))
        end = max(end, start + seconds)
    whole = end - kernels[0][1]
    each = 1e6 / steps
    return {
        "step": round(whole * each, 1),
        **{name: round(purposes[name] * each, 1) for name in (*PURPOSES, "rest")},
        "gap": round((whole - busy) * each, 1),
        "kernels": {name: round(seconds * each, 1) for name, seconds in names.most_common(10)},
    }


def purpose_of(name: str) -> str:
    """Return what a kernel is for."""
    return next((purpose for purpose, pattern in PURPOSES.items() if re.search(pattern, name)), "rest")


def profile_table(found: dict[str, dict[int, dict[str, Any]]]) -> str:
    """Write microseconds of a step as Markdown: a line for each row of servers and number of users."""
    columns = ["step", *PURPOSES, "rest", "gap"]
    lines = ["| microseconds of a step | users | " + " | ".join(columns) + " |", "| --- " * (2 + len(columns)) + "|"]
    for row, by_users in found.items():
        for users, figures in by_users.items():
            lines.append(f"| {row} | {users} | " + " | ".join(f"{figures[name]:.0f}" for name in columns) + " |")
    return "\n".join(lines)

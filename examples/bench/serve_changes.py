"""A served conversion whose weights change: updates under load, `vllm preload`, and experts that EPLB moves.

    python examples/bench/serve_changes.py --out changes.json [--part updates] [--part preload] [--part balance]

Two checkpoints of one model with other random weights, A and B, are written and converted. The vocabulary is small.

* `updates`: a server of A gets the weights of B, then of A, and so on, once a second (`reload_weights`), while users
  ask it all the time. Every answer has to come. Greedy tokens and log-probabilities are compared after the first update
  and after each of the last two with those of servers that were started from the same weights and answered alone.
* `preload`: `vllm preload` holds A's weights on the GPU, and a server starts twice with `--load-format ipc_cache`. Its
  answers are compared with those of a server that read the files.
* `balance`, on two GPUs: a server under expert parallelism moves experts and replicas every few steps
  (`--enable-eplb`) while users ask it, and is compared with one that moves none: before, afterwards, and after both got
  the weights of B. Sums of moved experts are rounded in another order, so log-probabilities may differ by
  `--tolerance`, and tokens may where two are as likely.

Servers of one part start together. The result file is written after each comparison, and `right` says whether all of a
part's answers were as they have to be. Options after `--` go to every server. Wants what `serve.py` wants.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path
from typing import Any

from completions import ask, post, prompts
from make_checkpoint import MODELS, Size, write_checkpoint
from serve import ENVIRONMENT, ON_GPU, Row, Server, compared, greedy, row_of, timed, write_tokenizer

#: The engine answers `/collective_rpc` in this mode only.
DEVELOPER = {"VLLM_SERVER_DEV_MODE": "1"}
USERS = 4
#: Graphs for as many users as there are.
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
#: Token ids of prompts are below 30,000.
VOCABULARY = 30016
MOVED = re.compile(r"Rearranging experts (?!.*profile)")
EXPERT_PARALLEL = ("--tensor-parallel-size", "2", "--enable-expert-parallel", "--disable-custom-all-reduce")


class Progress:
    """Results, written as soon as they are there, and seconds since the start."""

    def __init__(self, out: Path, found: dict[str, Any]) -> None:
        self.out, self.found, self.start = out, found, time.perf_counter()

    def say(self, what: object) -> None:
        """Print what happens, with the seconds that have passed."""
        print(f"{time.perf_counter() - self.start:6.1f} s  {what}", flush=True)

    def put(self, part: str, **facts: Any) -> None:
        """Add facts of a part to the result file."""
        self.say(f"{part}: {facts}")
        self.found.setdefault(part, {}).update(facts)
        self.out.write_text(json.dumps(self.found, indent=1) + "\n")


@contextmanager
def serving(
    options: argparse.Namespace, progress: Progress, servers: Mapping[str, tuple[Path, Sequence[str]]]
) -> Iterator[list[Row]]:
    """Start servers of conversions in moeq's kernels together, and stop them afterwards."""
    running = []
    try:
        for name, (folder, more) in servers.items():
            row = row_of(f"converted:{options.kernels}", options.port, folder, folder, "vllm")
            options.port += 1
            row.options += more
            log = options.out.with_name(f"{options.out.stem}-{name}.log")
            running.append(Server(row, log, options.arguments))
        for name, server in zip(servers, running, strict=True):
            server.wait(alone=False)
            progress.say(f"{name} answers: {server.row.facts}")
        yield [server.row for server in running]
    finally:
        for server in running:
            server.stop()


@contextmanager
def asked(port: int, answers: list[int], failed: list[str]) -> Iterator[None]:
    """Let users ask a server all the time; `answers` gets the number of tokens of each answer, `failed` errors."""
    stop = threading.Event()

    def user(seed: int) -> None:
        while not stop.is_set():
            try:
                answers.append(ask(port, prompts(1, 64, seed)[0], 32)["usage"]["completion_tokens"])
            except (OSError, RuntimeError) as error:
                failed.append(str(error)[:300])
                return

    users = [threading.Thread(target=user, args=(seed,)) for seed in range(USERS)]
    for one in users:
        one.start()
    try:
        yield
    finally:
        stop.set()
        for one in users:
            one.join()


def reload(port: int, folder: Path) -> float:
    """Write a folder's weights into a running server, and return the seconds that took."""
    start = time.perf_counter()
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.absolute())}}
    post(port, "/collective_rpc", json.dumps(body).encode())
    return time.perf_counter() - start


def updates(folders: Sequence[Path], options: argparse.Namespace, progress: Progress) -> None:
    """Update a server once a second while it answers; see the module."""
    a, b = folders
    servers = {"updated": (a, ()), "alone-A": (a, ()), "alone-B": (b, ())}
    seconds, answers, failed, right = list[float](), list[int](), list[str](), []
    with serving(options, progress, servers) as (updated, *alone):
        expected = [greedy(row.port, 1) for row in alone]
        apart = compared(*expected)
        started = compared(greedy(updated.port, 1), expected[0])
        progress.put("updates", **{"A and B": apart, "as started": started})
        right += [apart["same"] < apart["tokens"], equal(started)]

        def update(number: int) -> None:
            seconds.append(reload(updated.port, folders[number % 2]))

        def compare(number: int) -> None:
            found = compared(greedy(updated.port, 1), expected[number % 2])
            right.append(equal(found))
            progress.put("updates", **{f"update {number} to {'AB'[number % 2]}": found | {"seconds": seconds[-1]}})

        update(1)
        compare(1)
        end, number = time.monotonic() + options.seconds, 1
        with asked(updated.port, answers, failed):
            while time.monotonic() < end and not failed:
                begun = time.monotonic()
                number += 1
                update(number)
                time.sleep(max(0.0, 1 - (time.monotonic() - begun)))
        for _ in range(2):
            number += 1
            update(number)
            compare(number)
    progress.put(
        "updates",
        **{
            "updates": len(seconds),
            "answers meanwhile": len(answers),
            "failed": failed,
            "seconds of an update": round(statistics.median(seconds), 3),
            "right": not failed and all(right) and set(answers) == {32},
        },
    )


def preload(folders: Sequence[Path], options: argparse.Namespace, progress: Progress) -> None:
    """Start servers from files and from the weights of another process; see the module."""
    folder, health = folders[0], options.port + 90
    engine = [*options.arguments, *row_of(f"converted:{options.kernels}", 0, folder, folder, "vllm").options]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "preload", "--model", str(folder), *engine]
    command += ["--weight-cache-health-port", str(health)]
    start, right = time.perf_counter(), []
    with options.out.with_name(f"{options.out.stem}-preload.log").open("w") as log:
        holder = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=ENVIRONMENT | os.environ
        )
    try:
        with serving(options, progress, {"files": (folder, ())}) as (row,):
            expected = greedy(row.port, 1)
        progress.put("preload", files=row.facts)
        while not healthy(health):
            if holder.poll() is not None:
                raise RuntimeError(f"vllm preload ended with {holder.returncode}; see its log")
            time.sleep(0.2)
        progress.put("preload", **{"seconds until it holds them": round(time.perf_counter() - start, 2)})
        shared = ("--load-format", "ipc_cache", "--model-loader-extra-config", '{"fallback": false}')
        for name in ("shared 1", "shared 2"):
            with serving(options, progress, {name.replace(" ", "-"): (folder, shared)}) as (row,):
                found = compared(greedy(row.port, 1), expected)
            right.append(equal(found))
            progress.put("preload", **{name: found | row.facts})
    finally:
        with suppress(ProcessLookupError):
            os.killpg(holder.pid, signal.SIGTERM)
        holder.wait(30)
    progress.put("preload", right=all(right))


def balance(folders: Sequence[Path], options: argparse.Namespace, progress: Progress) -> None:
    """Compare a server whose experts are moved under load with one whose experts stay; see the module."""
    moves = {"step_interval": 50, "window_size": 50, "num_redundant_experts": options.redundant}
    servers = {
        "fixed": (folders[0], EXPERT_PARALLEL),
        "moved": (folders[0], (*EXPERT_PARALLEL, "--enable-eplb", "--eplb-config", json.dumps(moves))),
    }
    answers, failed, right = list[int](), list[str](), []
    with serving(options, progress, servers) as (fixed, moved):
        log = options.out.with_name(f"{options.out.stem}-moved.log")

        def compare(when: str) -> None:
            expected = greedy(fixed.port, 1)
            found = compared(greedy(moved.port, 1), expected)
            right.append(found["log-probability"] <= options.tolerance)
            rearranged = len(MOVED.findall(log.read_text()))
            progress.put("balance", **{when: found | {"rearrangements": rearranged}})

        compare("as started")
        with asked(moved.port, answers, failed):
            time.sleep(options.seconds)
        compare("after moves under load")
        for row in (fixed, moved):
            progress.say(f"reload on {row.port}: {reload(row.port, folders[1]):.2f} s")
        compare("with the weights of B")
        with asked(moved.port, answers, failed):
            time.sleep(options.seconds / 4)
        compare("with the weights of B, moved")
        rearranged = len(MOVED.findall(log.read_text()))
    progress.put(
        "balance",
        **{
            "rearrangements": rearranged,
            "answers meanwhile": len(answers),
            "failed": failed,
            "right": not failed and rearranged > 0 and all(right) and set(answers) == {32},
        },
    )


PARTS = {"updates": updates, "preload": preload, "balance": balance}


def equal(found: dict[str, float]) -> bool:
    """Return whether two servers said the same tokens, with the same log-probabilities."""
    return found["same"] == found["tokens"] and found["log-probability"] == 0


def healthy(port: int) -> bool:
    """Return whether the preloading process holds the weights."""
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def conversions(options: argparse.Namespace, progress: Progress) -> list[Path]:
    """Write the checkpoints that the parts need, convert them and compile the kernels, unless that has been done.

    Sources are removed once they are converted: a machine's disk may not hold four folders of a whole model.
    """
    folders = []
    for seed, name in enumerate("A" if options.part == ["preload"] else "AB"):
        source, converted = options.folder / name, options.folder / f"{name}-converted"
        if not converted.exists():
            size = Size(options.layers, options.experts, VOCABULARY)
            write_checkpoint(source, MODELS[options.model], options.format, size, seed=seed)
            write_tokenizer(source)
            progress.say(f"{name} is written")
            seconds = timed("convert", str(source), str(converted), "--gpu", options.gpu)
            progress.say(f"{name} was converted in {seconds} s")
            shutil.rmtree(source)
        folders.append(converted)
    if ON_GPU:
        ep = ["--ep", "2"] if "balance" in options.part else []
        progress.say(f"kernels were compiled in {timed('warmup', str(folders[0]), *ep)} s")
    return folders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="what is tried [updates, preload]")
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b-a3b")
    parser.add_argument("--format", default="gptq")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, help="experts per layer [as the model]")
    parser.add_argument("--gpu", default="H100", help="what to convert for [H100]")
    parser.add_argument("--kernels", default="moeq", help="kernels that run the experts [moeq]")
    parser.add_argument("--seconds", type=float, default=15, help="how long users ask while weights change [15]")
    parser.add_argument("--redundant", type=int, default=16, help="replicas in `balance` [16]")
    parser.add_argument("--tolerance", type=float, default=0.1, help="log-probabilities in `balance` [0.1]")
    parser.add_argument("--folder", type=Path, default=Path("serve-changes"), help="checkpoints [serve-changes]")
    parser.add_argument("--port", type=int, default=8400)
    parser.add_argument("--out", type=Path, required=True, help="results as JSON")
    parser.add_argument("server", nargs="*", help="after --: options for every server")
    options = parser.parse_args()
    options.part = options.part or ["updates", "preload"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are stopped on the way out
    os.environ |= DEVELOPER
    options.folder.mkdir(parents=True, exist_ok=True)
    options.arguments = [
        *("--max-model-len", "4096", "--max-num-seqs", "16", "--no-enable-prefix-caching"),
        *("--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(1 << 30)),
        *(("--compilation-config", json.dumps(GRAPHS)) if ON_GPU else ("--enforce-eager",)),
        *options.server,
    ]
    import torch
    import vllm

    found: dict[str, Any] = {
        "schema": "moeq.serve-changes/1",
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name() if ON_GPU else f"CPU, {os.cpu_count()} cores",
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
        "arguments": {key: str(value) for key, value in vars(options).items()},
    }
    progress = Progress(options.out, found)
    folders = conversions(options, progress)
    for part in options.part:
        PARTS[part](folders, options, progress)


if __name__ == "__main__":
    main()

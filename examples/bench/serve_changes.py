"""A served conversion whose weights change or come from another process: updates under load, and `vllm preload`.

    python examples/bench/serve_changes.py --layers 4 --out changes.json [--seconds 20] [--skip preload]

Two checkpoints of one model with other random weights, A and B, are written and converted.

* `updates`: a server of A gets the weights of B, then of A, and so on, once a second (`reload_weights`), while users
  ask it all the time. Every answer has to come. After each of the last two updates the users stop, and greedy tokens
  and log-probabilities are compared with those of servers that were started from the same weights and answered alone.
* `preload`: `vllm preload` holds A's weights on the GPU, and a server starts twice with `--load-format ipc_cache`. Its
  answers are compared with those of a server that read the files.

`right` says whether all answers were equal. Options after `--` go to every server. Wants what `serve.py` wants.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path
from typing import Any

from completions import ask, post, prompts
from make_checkpoint import MODELS, Size, write_checkpoint
from serve import ENVIRONMENT, ON_GPU, QUICK, Row, Server, compared, greedy, row_of, timed, write_tokenizer

#: The engine answers `/collective_rpc` in this mode only.
DEVELOPER = {"VLLM_SERVER_DEV_MODE": "1"}
USERS = 4


@contextmanager
def serving(folder: Path, options: argparse.Namespace, name: str, number: int, *more: str) -> Iterator[Row]:
    """Start a server of a conversion in moeq's kernels, and stop it afterwards."""
    row = row_of(f"converted:{options.kernels}", options.port + number, folder, folder, "vllm")
    row.options += more
    server = Server(row, options.out.with_name(f"{options.out.stem}-{name}.log"), options.arguments)
    try:
        server.wait(alone=True)
        yield row
    finally:
        server.stop()


def reload(port: int, folder: Path) -> float:
    """Write a folder's weights into a running server, and return the seconds that took."""
    start = time.perf_counter()
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.absolute())}}
    post(port, "/collective_rpc", json.dumps(body).encode())
    return time.perf_counter() - start


def updates(folders: Sequence[Path], options: argparse.Namespace) -> dict[str, Any]:
    """Update a server once a second while it answers; see the module."""
    expected = []
    for number, folder in enumerate(folders):
        with serving(folder, options, f"alone-{number}", number) as row:
            expected.append(greedy(row.port, 1))
    answers, failed, stop = [0], list[str](), threading.Event()

    def user(seed: int) -> None:
        while not stop.is_set():
            try:
                said = ask(port, prompts(1, 64, seed)[0], 32)["choices"][0]
                answers[0] += bool(said["text"])
            except (OSError, RuntimeError) as error:
                failed.append(str(error)[:300])
                return

    seconds, differences = list[float](), dict[str, Any]()
    with serving(folders[0], options, "updated", len(folders)) as row:
        port = row.port
        users = [threading.Thread(target=user, args=(seed,)) for seed in range(USERS)]
        for one in users:
            one.start()
        end, number = time.monotonic() + options.seconds, 0
        while time.monotonic() < end and not failed:
            begun = time.monotonic()
            number += 1
            seconds.append(reload(port, folders[number % 2]))
            time.sleep(max(0.0, 1 - (time.monotonic() - begun)))
        stop.set()
        for one in users:
            one.join()
        for _ in range(2):
            number += 1
            seconds.append(reload(port, folders[number % 2]))
            differences["AB"[number % 2]] = compared(greedy(port, 1), expected[number % 2])
    apart = compared(expected[0], expected[1])
    return {
        "updates": len(seconds),
        "answers meanwhile": answers[0],
        "failed": failed,
        "seconds of an update": round(statistics.median(seconds), 3),
        "compared": differences,
        "A and B": apart,
        "right": not failed and apart["same"] < apart["tokens"] and all(map(equal, differences.values())),
    }


def preload(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Start servers from files and from the weights of another process; see the module."""
    with serving(folder, options, "files", 0) as row:
        expected, facts = greedy(row.port, 1), {"files": row.facts}
    health = options.port + 90
    engine = [*options.arguments, *row_of(f"converted:{options.kernels}", 0, folder, folder, "vllm").options]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "preload", "--model", str(folder), *engine]
    command += ["--weight-cache-health-port", str(health)]
    start, differences = time.perf_counter(), {}
    with options.out.with_name(f"{options.out.stem}-preload.log").open("w") as log:
        holder = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=ENVIRONMENT | os.environ
        )
    try:
        while not healthy(health):
            if holder.poll() is not None:
                raise RuntimeError(f"vllm preload ended with {holder.returncode}; see its log")
            time.sleep(0.2)
        facts["preload"] = {"ready": round(time.perf_counter() - start, 2)}
        for number in (1, 2):
            shared = ("--load-format", "ipc_cache", "--model-loader-extra-config", '{"fallback": false}')
            with serving(folder, options, f"shared-{number}", number, *shared) as row:
                facts[f"shared {number}"] = row.facts
                differences[f"shared {number}"] = compared(greedy(row.port, 1), expected)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(holder.pid, signal.SIGTERM)
        holder.wait(30)
    return {"facts": facts, "compared": differences, "right": all(map(equal, differences.values()))}


def equal(found: dict[str, float]) -> bool:
    """Return whether two servers said the same tokens, with the same log-probabilities."""
    return found["same"] == found["tokens"] and found["log-probability"] == 0


def healthy(port: int) -> bool:
    """Return whether the preloading process holds the weights."""
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b-a3b")
    parser.add_argument("--format", default="gptq")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--gpu", default="H100", help="what to convert for [H100]")
    parser.add_argument("--kernels", default="moeq", help="kernels that run the experts [moeq]")
    parser.add_argument("--seconds", type=float, default=20, help="how long the server is updated [20]")
    parser.add_argument("--skip", choices=("updates", "preload"), help="leave one part out")
    parser.add_argument("--folder", type=Path, default=Path("serve-changes"), help="checkpoints [serve-changes]")
    parser.add_argument("--port", type=int, default=8400)
    parser.add_argument("--out", type=Path, required=True, help="results as JSON")
    parser.add_argument("server", nargs="*", help="after --: options for every server")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are stopped on the way out
    os.environ |= DEVELOPER
    options.folder.mkdir(parents=True, exist_ok=True)
    options.arguments = [
        *(
            "--max-model-len",
            "4096",
            "--max-num-seqs",
            "256",
            "--no-enable-prefix-caching",
            "--gpu-memory-utilization",
            "0.2",
        ),
        *("--kv-cache-memory-bytes", str(1 << 30)),
        *(("--compilation-config", json.dumps(QUICK)) if ON_GPU else ("--enforce-eager",)),
        *options.server,
    ]
    folders = []
    for seed, name in enumerate("AB"):
        source, converted = options.folder / name, options.folder / f"{name}-converted"
        if not source.exists():
            model = MODELS[options.model]
            write_checkpoint(source, model, options.format, Size(options.layers, None, model.vocab), seed=seed)
            write_tokenizer(source)
        if not converted.exists():
            timed("convert", str(source), str(converted), "--gpu", options.gpu)
        folders.append(converted)
    import torch
    import vllm

    found: dict[str, Any] = {
        "schema": "moeq.serve-changes/1",
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name() if ON_GPU else f"CPU, {os.cpu_count()} cores",
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
        "arguments": {key: str(value) for key, value in vars(options).items()},
    }
    if options.skip != "updates":
        found["updates"] = updates(folders, options)
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    if options.skip != "preload":
        found["preload"] = preload(folders[0], options)
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({part: found[part] for part in ("updates", "preload") if part in found}, indent=1))


if __name__ == "__main__":
    main()

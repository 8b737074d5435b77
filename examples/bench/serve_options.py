"""What `vllm serve` does with a converted checkpoint under the engine's own options, over HTTP: works, or refuses.

    python examples/bench/serve_options.py SRC --interpreter --out options.json [--option dp --option mtp]

A small checkpoint is converted once; then a server is started with every option, one after the other, on the same
folder. Those that start are asked for greedy tokens of a few prompts, which are compared with those of the server
without options (`plain`).

| answer | |
| --- | --- |
| `same tokens` | it started, and says what `plain` says |
| `other tokens` | it started and says something else; expected of `dummy`, whose weights are random |
| `refused` | it ended; `why` is the line of its log that says why |

`--interpreter` and `--cpu` are those of `engine_generate.py`, for machines without a GPU.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from completions import ask
from cpu_gather import write_package
from engine_generate import PLACES
from serve import Row, Server, write_tokenizer

import moeq
from moeq.deploy.gpus import parse_gpu

PROMPTS = ([1, 5, 9, 2, 33, 60, 17, 3, 3, 8, 21, 40, 7, 12], [4, 4, 19], [50, 31, 22, 9, 14, 3, 77])
NEW = 8
#: Lines of a log that say which kernels run, or what was refused.
SAID = re.compile(r"moeq: .*")
FAILED = re.compile(r"(?:^|\s)([\w.]*(?:Error|Exception)\b(?:: .*|$))")


def kernels(which: str) -> list[str]:
    """Return the option that chooses moeq's kernels."""
    return ["--additional-config", json.dumps({"moeq": {"kernels": which}})]


@dataclass(frozen=True)
class Option:
    """A way to start a server.

    Attributes:
        arguments: arguments of the server's command line.
        environment: variables beside those of all.
        then: what is asked of it before the prompts.
        gathers: whether the plug-in of `cpu_gather.py` is needed.
    """

    arguments: list[str] = field(default_factory=list)
    environment: Mapping[str, str] = field(default_factory=dict)
    then: Callable[[int], object] = lambda port: None
    gathers: bool = False


def post(port: int, path: str) -> None:
    """Send a request without a body. Raises RuntimeError for any answer but 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", path)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{path}: {answer.status} {text[:200]!r}")


def drafts(port: int) -> dict[str, int]:
    """How many tokens a server guessed ahead, and how many of them were right, if it does that."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    names = {"drafted": "draft_tokens", "accepted": "accepted_tokens"}
    found = {
        key: re.search(rf"^vllm:spec_decode_num_{name}_total{{.*}} (\S+)$", text, re.M) for key, name in names.items()
    }
    return {key: int(float(match[1])) for key, match in found.items() if match}


def sleep_and_wake(level: int) -> Callable[[int], None]:
    """Give weights up and take them back."""

    def run(port: int) -> None:
        post(port, f"/sleep?level={level}")
        post(port, "/wake_up")

    return run


_MTP = {"method": "mtp", "num_speculative_tokens": 1}
_DEV = {"VLLM_SERVER_DEV_MODE": "1"}
OPTIONS: dict[str, Option] = {
    "plain": Option(),
    "kernels: moeq": Option(kernels("moeq")),
    "kernels: engine": Option(kernels("engine")),
    "kernels: auto": Option(kernels("auto")),
    "kernels: fast": Option(kernels("fast")),
    "MOEQ_KERNELS=engine": Option(environment={"MOEQ_KERNELS": "engine"}),
    "MOEQ_KERNELS=engine, kernels: moeq": Option(kernels("moeq"), {"MOEQ_KERNELS": "engine"}),
    "dummy": Option(["--load-format", "dummy"]),
    "sleep 1": Option(["--enable-sleep-mode"], _DEV, sleep_and_wake(1)),
    "tp": Option(["--tensor-parallel-size", "2"]),
    "dp": Option(["--data-parallel-size", "2"]),
    "dp, ep": Option(["--data-parallel-size", "2", "--enable-expert-parallel"]),
    "dp, gathering": Option(["--data-parallel-size", "2"], gathers=True),
    "dp, ep, gathering": Option(["--data-parallel-size", "2", "--enable-expert-parallel"], gathers=True),
    "mtp": Option(["--speculative-config", json.dumps(_MTP)]),
    "lora": Option(["--enable-lora"]),
    "eplb": Option(["--tensor-parallel-size", "2", "--enable-expert-parallel", "--enable-eplb"]),
    "moe-backend": Option(["--moe-backend", "triton"]),
    "prefix caching": Option(["--enable-prefix-caching"]),
}


def served(folder: Path, option: Option, log: Path, port: int, shared: list[str]) -> dict[str, Any]:
    """Start, ask, stop."""
    before = dict(os.environ)
    os.environ |= option.environment
    if option.gathers:
        write_package(package := log.with_suffix(""))
        paths = [str(package), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    try:
        server = Server(Row("m", port, folder, option.arguments), log, shared)
        try:
            server.wait(alone=False, prompt=PROMPTS[0])
            option.then(port)
            choices = [ask(port, prompt, NEW, logprobs=1)["choices"][0] for prompt in PROMPTS]
            found: dict[str, Any] = {"tokens": [choice["logprobs"]["tokens"] for choice in choices]} | drafts(port)
        except (RuntimeError, OSError, http.client.HTTPException) as error:
            found = {"why": why(log.read_text(errors="replace")) or str(error)[:400]}
        finally:
            server.stop()
    finally:
        os.environ.clear()
        os.environ |= before
    text = log.read_text(errors="replace")
    return found | {"said": sorted({line.strip() for line in SAID.findall(text)} - {found.get("why")})[:6]}


def why(log: str) -> str | None:
    """Return why a server ended: moeq's sentence, else the first error of a process."""
    lines = log.splitlines()
    pairs = ((FAILED.search(line), after.strip()) for line, after in zip(lines, [*lines[1:], ""], strict=True))
    # What is wrong with an argument, and what helps, is in the line after.
    more = ("validation error", "MoeqError")
    named = [
        f"{found[1]}: {after}" if any(word in found[1] for word in more) else found[1]
        for found, after in pairs
        if found
    ]
    causes = [line for line in named if "Engine core" not in line and "WorkerProc" not in line]
    own = [line for line in causes if "MoeqError" in line]
    return next(iter(own or causes or named), None)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a small checkpoint")
    parser.add_argument("--layout", help="convert to this layout [the backend's]")
    parser.add_argument("--option", action="append", choices=OPTIONS, metavar="NAME", help="only these [all]")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--interpreter", dest="place", action="store_const", const="interpreter")
    where.add_argument("--cpu", dest="place", action="store_const", const="cpu")
    parser.add_argument("--port", type=int, default=8300)
    parser.add_argument("--out", type=Path, required=True, help="results; rows of options not asked for stay")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server is stopped on the way out
    place = options.place or "gpu"
    environment, gpu = PLACES[place]
    # The engine chooses, unless an option says otherwise.
    os.environ |= {key: value for key, value in environment.items() if key != "MOEQ_KERNELS"}
    import torch
    import vllm

    found = json.loads(options.out.read_text()) if options.out.exists() else {"rows": {}}
    found |= {
        "schema": "moeq.serve-options/1",
        "date": time.strftime("%Y-%m-%d"),
        "checkpoint": options.source.name,
        "device": "CPU"
        if place == "cpu"
        else "CPU, Triton's interpreter"
        if options.place
        else torch.cuda.get_device_name(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
    }
    shared = ["--max-model-len", "64", "--max-num-seqs", "4", "--enforce-eager", "--dtype", "bfloat16"]
    shared += ["--kv-cache-memory-bytes", str(1 << 28)]
    with tempfile.TemporaryDirectory() as scratch:
        source, folder = Path(scratch, "source"), Path(scratch, "converted")
        shutil.copytree(options.source, source)
        write_tokenizer(source)
        more = {"layout": options.layout, "force_layout": True} if options.layout else {}
        moeq.convert(source, folder, moeq.Deployment(gpu=parse_gpu(gpu)), **more)
        for number, name in enumerate(options.option or OPTIONS):
            row = served(folder, OPTIONS[name], Path(scratch, f"{number}.log"), options.port + number, shared)
            found["rows"][name] = row
            plain = found["rows"].get("plain", {}).get("tokens")
            same = "same tokens" if row.get("tokens") == plain else "other tokens"
            row["answer"] = same if "tokens" in row else "refused"
            print(name, row, flush=True)
            options.out.write_text(json.dumps(found, indent=1) + "\n")
            if "why" in row:
                shutil.copy(Path(scratch, f"{number}.log"), options.out.with_suffix(f".{number}.log"))


if __name__ == "__main__":
    main()

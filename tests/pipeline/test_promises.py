"""What one command promises, the next one does: verdict, plan, conversion and loader over random deployments."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from bench_scripts import checkpoint_formats as formats
from bench_scripts import make_checkpoint as bench

import moeq
from moeq.cli.app import run
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import known_gpus
from moeq.errors import MoeqError
from moeq.layouts.registry import LAYOUTS
from moeq.pipeline.plan.decide import answer
from moeq.pipeline.plan.job import JobRequest, open_job
from moeq.pipeline.plan.options import ConvertOptions, Question

SEED = 20261122
GPUS = {gpu.arch: gpu for gpu in known_gpus().values()}
TPS, EPS = (1, 2, 3, 4, 6, 8, 16, 32), (1, 2, 4, 8)


def gptq(group: int) -> Any:
    """One GPTQ projection with groups of that size."""

    def projection(name: str, n: int, k: int) -> Iterator[bench.Tensor]:
        groups = ceil(k / group)
        yield bench.Tensor(f"{name}.qweight", "I32", (k // 8, n), formats.any_bits)
        yield bench.Tensor(f"{name}.qzeros", "I32", (groups, n // 8), formats.constant(0x77777777))
        yield bench.Tensor(f"{name}.scales", "F16", (groups, n), formats.SCALES_F16)
        yield bench.Tensor(f"{name}.g_idx", "I32", (k,), formats.group_index(group))

    return projection


def any_model(rng: random.Random) -> tuple[bench.Model, str]:
    """A model of sizes that nobody chose, and a format that it comes in."""
    kind = rng.choice(("gptq", "gptq", "awq", "ct-int4", "w8a8", "mxfp4"))
    base = bench.MODELS["gpt-oss-20b" if kind == "mxfp4" else rng.choice(("qwen3-30b-a3b", "mixtral-8x7b"))]
    heads = rng.choice((2, 6, 8, 12, 20, 32, 40))
    shared = rng.choice([size for size in (1, 2, 4, 5, 8, 10) if heads % size == 0])
    model = replace(
        base,
        config=base.config | {"num_attention_heads": heads, "num_key_value_heads": shared},
        attention={},
        hidden=rng.choice((512, 1024, 1536, 2048, 2880)),
        intermediate=rng.choice((128, 192, 256, 384, 512, 704, 768, 896, 1408, 1536)),
        num_experts=rng.choice((3, 4, 8, 16)),
    )
    return model, kind


def write_random(folder: Path, seed: int) -> Path:
    """A checkpoint of headers over holes."""
    rng = random.Random(seed)
    model, kind = any_model(rng)
    group = rng.choice((32, 64, 128))
    if kind == "gptq":
        config = bench.FORMATS["gptq"].config | {"group_size": group}
        bench.FORMATS["gptq-any"] = bench.Format(gptq(group), config)
        model, kind = replace(model, formats=("gptq-any",)), "gptq-any"
    bench.write_checkpoint(folder, model, kind, bench.Size(layers=2, vocab=64), sparse=True)
    return folder


@pytest.fixture(scope="session")
def sources(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The ten real checkpoints, real shapes as headers, and random shapes."""
    root = tmp_path_factory.mktemp("promises")
    found = {path.name: path for path in sorted(checkpoints.iterdir()) if path.is_dir()}
    real = (("qwen3-30b-a3b", "gptq", 16), ("gpt-oss-20b", "mxfp4", 4), ("kimi-k2", "ct-int4", 4))
    for name, kind, experts in (*real, ("mixtral-8x7b", "awq", 8), ("qwen3-30b-a3b", "w8a8", 8)):
        folder = root / f"{name}-{kind}"
        bench.write_checkpoint(folder, bench.MODELS[name], kind, bench.Size(experts=experts, vocab=64), sparse=True)
        found[folder.name] = folder
    return found | {f"random-{seed}": write_random(root / f"random-{seed}", SEED + seed) for seed in range(12)}


def any_ask(rng: random.Random) -> Question:
    """A question that may make sense."""
    gpu = rng.choice(list(GPUS.values()))
    deployment = Deployment(
        gpu=gpu,
        tp=rng.choice((1, 1, 2, 2, 4, *TPS)),
        ep=rng.choice((1, 1, 1, 1, *EPS)),
        dtype=rng.choice(("bf16", "bf16", "fp16")),
        engine=rng.choice(("vllm@0.33.0", "vllm@0.33.0", "moeq")),
        backend=rng.choice(("auto",) * 12 + ("marlin", "triton", "humming", "cutlass")),
        lora=rng.random() < 0.1,
        batched=rng.random() < 0.1,
    )
    options = ConvertOptions(
        layout=rng.choice((*[None] * 2 * len(LAYOUTS), *LAYOUTS)),
        force_layout=rng.random() < 0.3,
        skip_unfit=rng.random() < 0.2,
        regroup=rng.choice((*[None] * 8, 64, 32, 16)),
    )
    return Question(deployment, options)


def check(source: Path, ask: Question) -> bool:
    """The answer and the plan agree, and the sums are right; whether it was a yes."""
    checkpoint = moeq.open(source)
    found = answer(checkpoint, ask)
    request = JobRequest(str(source), ask.deployment, ask.options)
    job, problem = opened(request, checkpoint)
    if job is None:
        assert found.error is not None, f"promised {found.first.layout}, and the plan says {problem}"
        assert problem == (found.error.code, found.error.message)
        assert all(part.verdict.convert is None for part in found.parts)
        return False
    assert found.error is None, f"refused ({found.error}), and the plan is made"
    assert {plan.entry.layer: plan.entry.layout for plan in job.plan.layers} == {
        layer: choice.layout for layer, choice in found.choices.items()
    }
    assert job.answer.loaders == found.loaders
    if found.parts[0].choice is not None:
        assert found.verdict.convert is not None
        assert found.verdict.convert.layout == found.first.layout
    check_sums(source, ask, job)
    return True


def opened(request: JobRequest, checkpoint: Any) -> tuple[Any, tuple[str, str] | None]:
    """The job, or code and message of the error that it ends in."""
    try:
        return open_job(request, checkpoint), None
    except MoeqError as error:
        return None, (error.code, error.message)


def check_sums(source: Path, ask: Question, job: Any) -> None:
    """By hand, from the config: heads, groups and experts of every rank are whole."""
    config = json.loads((source / "config.json").read_text())
    tp, ep = ask.deployment.tp, ask.deployment.ep
    if ask.deployment.engine != "moeq" and not ask.options.force_layout:
        assert config["num_attention_heads"] % tp == 0
        shared = config["num_key_value_heads"]
        assert "kv_lora_rank" in config or shared % tp == 0 or tp % shared == 0
    for layer in job.plan.layers:
        assert ep <= layer.entry.num_experts
        whole = layer.entry.matrices["w2"].spec
        group = ask.options.regroup if layer.entry.source_group else whole.group_size
        one_scale = whole.num_groups == 1 or whole.act_order
        if ep == 1 and tp > 1 and not one_scale and whole.element != "e2m1":
            assert whole.k % tp == 0
            assert whole.k // tp % group == 0


def questions(sources: dict[str, Path], count: int, seed: int) -> list[tuple[str, Question]]:
    """Random questions about random checkpoints."""
    rng = random.Random(seed)
    return [(rng.choice(sorted(sources)), any_ask(rng)) for _ in range(count)]


@pytest.mark.slow
def test_what_the_verdict_promises_the_plan_does(sources: dict[str, Path]) -> None:
    results = [check(sources[name], ask) for name, ask in questions(sources, 150, SEED)]
    assert 24 < sum(results) < 120, "the sample asks for both"


@pytest.mark.night
@pytest.mark.timeout(0)
@pytest.mark.parametrize("arch", sorted(GPUS))
def test_every_checkpoint_layout_and_degree(arch: str, sources: dict[str, Path]) -> None:
    """All there is for one kind of device; minutes each."""
    count = 0
    for name, layout in itertools.product(sources, (None, *LAYOUTS)):
        for tp, ep in (*((tp, 1) for tp in TPS), (1, 2), (2, 2), (4, 4), (1, 8)):
            check(sources[name], Question(Deployment(gpu=GPUS[arch], tp=tp, ep=ep), ConvertOptions(layout)))
            count += 1
    assert count > 1000


def said(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, dict[str, Any]]:
    code = run([*map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_every_command_says_the_same(sources: dict[str, Path], tmp_path: Path, capsys) -> None:
    """`inspect`, `oracle` alone and as a sweep, `--require`, `plan` and a dry run of `convert`."""
    rng = random.Random(SEED)
    for _ in range(8):
        name, gpu = rng.choice(sorted(sources)), rng.choice(("A100", "H100", "B200", "MI300X", "MI355X", "CPU"))
        tp, ep = rng.choice(TPS), rng.choice((1, 1, *EPS))
        options = ("--gpu", gpu, "--tp", tp, "--ep", ep)
        source = sources[name]
        plan_code, plan = said(capsys, "plan", source, *options)
        convert_code, conversion = said(capsys, "convert", source, tmp_path / "out", *options, "--dry-run")
        _, inspected = said(capsys, "inspect", source, *options)
        _, single = said(capsys, "oracle", source, *options)
        required_code, swept = said(capsys, "oracle", source, *options, "--require", "all")
        cell = swept["cells"][0]
        assert plan_code == convert_code
        made = plan_code == 0
        assert [inspected["converts"], single["converts"], cell["converts"]] == [made] * 3, (name, options)
        assert made or required_code == 1
        if made:
            layouts = {conversion["layout"], plan["layouts"][0], inspected["verdict"]["convert"]["layout"]}
            assert layouts == {single["verdict"]["convert"]["layout"]} == {cell["convert"]}
            loaders = plan["loads_in"]
            assert loaders == conversion["loads_in"] == inspected["loads_in"] == single["loads_in"] == cell["loads_in"]
            works = [row for row in single["verdict"]["candidates"] if row["supported"]]
            for row in works:
                code, asked = said(capsys, "oracle", source, *options, "--backend", row["flag"] or "auto")
                assert (code, asked["verdict"]["chosen"]["backend"]) == (0, row["backend"])


def load_problem(folder: Path, **rank: int) -> str | None:
    """Why a rank's experts cannot be loaded, or None."""
    try:
        moeq.load_experts(folder, 0, **rank)
    except MoeqError as error:
        return error.message
    return None


@pytest.mark.slow
def test_what_is_said_to_load_is_loaded(checkpoints: Path, tmp_path: Path) -> None:
    """`moeq.load_experts` takes what it is said to take and refuses the rest, on every rank."""
    rng = random.Random(SEED)
    names = sorted(path.name for path in checkpoints.iterdir() if path.is_dir())
    seen = {True: 0, False: 0}
    for number in range(14):
        name, tp, ep = rng.choice(names), rng.choice((1, 2, 4)), rng.choice((1, 1, 2))
        gpu = GPUS[rng.choice(("sm80", "sm90", "sm100"))]
        where = Deployment(gpu=gpu, tp=tp, ep=ep, engine=rng.choice(("vllm@0.33.0", "moeq")))
        found = answer(moeq.open(checkpoints / name), Question(where, ConvertOptions(allow_lossy=True)))
        if not found.ok:
            continue
        folder = tmp_path / str(number)
        moeq.convert(checkpoints / name, folder, where, allow_lossy=True)
        claimed = any(loader.name == "load_experts" for loader in found.loaders)
        ranks = range(ep if ep > 1 else tp)
        size = {"ep_size": ep} if ep > 1 else {"tp_size": tp}
        for rank in ranks:
            number_of = {"ep_rank": rank} if ep > 1 else {"tp_rank": rank}
            problem = load_problem(folder, **size, **number_of)
            assert (problem is None) == claimed, f"{name}, {found.first.layout}, tp {tp}, ep {ep}: {problem}"
            seen[claimed] += 1
    assert seen[True] > 5


def refusal_of(source: Path, folder: Path, where: Deployment) -> MoeqError | None:
    """Why `convert` refuses once it reads values, or None where it does not."""
    try:
        moeq.convert(source, folder, where)
    except MoeqError as error:
        return error
    return None


@pytest.mark.slow
def test_rounding_is_announced(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A conversion that stops since scales would be rounded was said to do so, by every command."""
    stopped = 0
    for number, source in enumerate(path for path in sorted(checkpoints.iterdir()) if path.is_dir()):
        for dtype in ("bf16", "fp16"):
            where = Deployment(gpu=GPUS["sm80"], dtype=dtype, engine="moeq" if number % 2 else "vllm@0.33.0")
            found = answer(moeq.open(source), Question(where))
            refused = refusal_of(source, tmp_path / f"{source.name}-{dtype}", where) if found.ok else None
            if refused is None:
                continue
            stopped += 1
            assert refused.code == "answer.lossy"
            assert found.first.rounding is not None, f"{source.name}, {found.first.layout}: {refused}"
            assert answer(moeq.open(source), Question(where, ConvertOptions(allow_lossy=True))).first.rounding is None
            for command in ("plan", "inspect"):
                run([command, str(source), "--gpu", "sm80", "--dtype", dtype, "--engine", where.engine, "--json"])
                document = json.loads(capsys.readouterr().out)
                error = document.get("error")
                if error is not None or document.get("converts") is False:  # the first expert is refused already
                    assert (error["code"] if error else "answer.lossy") == refused.code
                    continue
                told = document if command == "plan" else document["verdict"]["convert"]
                assert told["rounding"] == found.first.rounding
    assert stopped

"""What `examples/bench/engine_options.py` makes of answers; the engine itself needs a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from bench_scripts import generating
from safetensors.torch import load_file, save_file

engine_options = import_module("engine_options")  # from the folder that `bench_scripts` has put on the path
Answer, Generated, Job = generating.Answer, generating.Generated, engine_options.Job
VOCABULARY = 16


def generated(seed: int, noise: float = 0.0) -> list[generating.Generated]:
    """Two prompts, three tokens each, the best ones of random log-probabilities. `noise`: added to those."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for length in (1, 5):
        prompt, new = (torch.randn(rows, VOCABULARY, generator=draw).log_softmax(-1) for rows in (length - 1, 3))
        tokens = new.argmax(-1).tolist()
        found.append(
            Generated(tokens, *(one + noise * torch.randn(one.shape, generator=draw) for one in (prompt, new)))
        )
    return found


@pytest.mark.parametrize(
    ("other", "answer"),
    [(generated(0), "bits"), (generated(0, noise=0.01), "tokens"), (generated(1), "DIFFERENT")],
)
def test_answers(other, answer) -> None:
    assert engine_options.answer_of(engine_options.beside(generated(0), other), 0.05) == answer


def test_another_token_is_a_near_tie_only_where_it_is_all_but_as_likely() -> None:
    one = generated(0)
    for gap, answer in ((0.001, "near tie"), (1.0, "DIFFERENT")):
        new = one[1].new.clone()
        place = len(new) - 1
        second = int(new[place].topk(2).indices[1])
        new[place, second] = new[place].max() - gap
        first = [one[0], replace(one[1], new=new)]
        other = [one[0], replace(one[1], new=new, tokens=[*one[1].tokens[:-1], second])]
        figures = engine_options.beside(first, other)
        assert figures["tokens"] == 5
        assert engine_options.answer_of({**figures, "furthest": 0.001}, 0.05) == answer


def test_prompts_are_compared_only_where_both_have_log_probabilities_of_them() -> None:
    one = generated(0)
    without = [replace(answer, prompt=answer.prompt[:0]) for answer in generated(0)]
    figures = engine_options.beside(*engine_options.alike(one, without))
    assert figures["of"] == 6
    assert figures["furthest"] == 0.0


@pytest.mark.parametrize(
    ("refused", "log", "answer", "why"),
    [
        ("RuntimeError: Engine core failed", "MoeqError: layer 0: no LoRA\n", "refused", "MoeqError: layer 0: no LoRA"),
        ("ValueError: EPLB requires tensor parallelism", "", "refused", "ValueError: EPLB requires tensor parallelism"),
        ("RuntimeError: CUDA error", "", "failed", "RuntimeError: CUDA error"),
        ("no answer in 100 s", "", "failed", "no answer in 100 s"),
    ],
)
def test_refusals_and_failures(refused, log, answer, why) -> None:
    row = engine_options.row_of(Job("qwen3-int4", "lora", "auto"), Answer(None, refused, log), 3.21)
    assert (row["answer"], row["why"], row["seconds"]) == (answer, why, 3.2)


def test_a_row_keeps_what_the_log_says_of_kernels() -> None:
    log = "(EngineCore) INFO 11-23 22:00:00 [experts.py:10] moeq: 16 experts of [512, 256]: moeq's kernels\nINFO more\n"
    row = engine_options.row_of(Job("qwen3-int4", "plain", "auto"), Answer(([], {"cached": 3}), "", log), 1.0)
    assert row["said"] == ["moeq: 16 experts of [512, 256]: moeq's kernels"]
    assert row["cached"] == 3


def test_rows_are_compared_with_the_right_ones() -> None:
    """An option with the plain run of its kernels; an adapter with the same adapter on the source."""

    class Model:
        known = "not computed"

    name = engine_options._INT4
    plain, lora = Job(name, "plain", "auto"), Job(name, "lora", "auto")
    full, way = Job(name, "full graphs", "auto"), Job(name, "static cache", "transformers")
    said = {job: generated(0) for job in (plain, full, Job(name, "plain", "source"), Job(name, "plain", "engine"), way)}
    said |= {
        lora: generated(1),
        Job(name, "lora", "source"): generated(1),
        Job(name, "eager", "transformers"): generated(0),
    }
    rows = {job.name: {} for job in said}
    engine_options.judge(rows, said, {name: Model()})
    compared = {job: rows[job.name]["compared with"] for job in (plain, full, lora, way)}
    assert compared == {plain: "plain: engine", full: "plain", lora: "same option: source", way: "eager"}
    assert {rows[job.name]["answer"] for job in compared} == {"bits"}
    assert rows[lora.name]["beside"]["plain"]["tokens"] < 6


def test_every_job_is_of_something_that_exists() -> None:
    jobs = engine_options.jobs()
    assert len(set(jobs)) == len(jobs)
    for job in jobs:
        assert job.checkpoint in engine_options.CHECKPOINTS
        assert job.option in (engine_options.WAYS if job.kernels == "transformers" else engine_options.OPTIONS)
    assert set(engine_options.OPTIONS) == {job.option for job in jobs if job.kernels != "transformers"}


@pytest.mark.parametrize("which", ["attention", "experts"])
def test_the_adapter_is_in_pefts_files(which: str, tmp_path: Path) -> None:
    attention = {"q_proj": (64, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 64)}
    experts = {f"{number}.{name}": (24, 32) for number in (0, 1) for name in ("gate_proj", "up_proj")}
    experts |= {f"{number}.down_proj": (32, 24) for number in (0, 1)}
    stored = {f"model.layers.1.self_attn.{name}.weight": torch.zeros(shape) for name, shape in attention.items()}
    stored |= {f"model.layers.1.mlp.experts.{name}.qweight": torch.zeros(1, dtype=torch.int32) for name in experts}
    save_file(stored | {"model.layers.1.mlp.gate.weight": torch.zeros(4, 32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 32, "moe_intermediate_size": 24}))
    engine_options.write_adapter(tmp_path, tmp_path / "adapter", which, rank=4)
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    place, shapes = ("self_attn", attention) if which == "attention" else ("mlp.experts", experts)
    for name, (n, k) in shapes.items():
        assert found.pop(f"base_model.model.model.layers.1.{place}.{name}.lora_A.weight").shape == (4, k)
        assert found.pop(f"base_model.model.model.layers.1.{place}.{name}.lora_B.weight").shape == (n, 4)
    assert not found
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert about["target_modules"] == sorted({name.rpartition(".")[2] for name in shapes})

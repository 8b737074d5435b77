"""`moeq doctor` and `moeq gpus`: what is pasted into issues, and names as drivers print them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moeq.cli.app import run

INT4 = "gptq-int4-g128-mixtral"


def said(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, dict[str, Any]]:
    code = run([*map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_environment_alone(capsys) -> None:
    code, document = said(capsys, "doctor")
    assert code == 0
    assert "torch " in document["environment"]["packages"]
    assert document["checkpoint"] is None


def test_a_checkpoint_on_a_deployment(mixtral, checkpoints, capsys) -> None:
    source = checkpoints / "gptq-int4-g32-qwen3moe"
    code, document = said(capsys, "doctor", source, "--gpu", "A100", "--tp", "2")
    advice = document["deployment"]
    assert code == 0
    assert advice["converts"]
    assert advice["serve"].endswith(" --tensor-parallel-size 2")
    assert "--gpu A100 --tp 2" in advice["convert"]
    assert advice["next"] == f"{advice['convert']} && vllm serve DST --tensor-parallel-size 2"
    # Both ranks hold 432 KiB of experts; the rest is 132.75 KiB.
    assert advice["memory"]["rest_per_rank"] == pytest.approx(132.75 * 1024 / 2, rel=0.01)
    assert 150_000 < advice["memory"]["experts_per_rank"] < 450_000
    assert advice["memory"]["gpu_bytes"] == 80 << 30
    _, document = said(capsys, "doctor", mixtral, "--gpu", "A100", "--engine", "vllm@0.26.0")
    advisories = document["deployment"]["advisories"]
    assert advisories
    assert all(row["workaround"] for row in advisories)
    _, text = run(["doctor", mixtral, "--gpu", "A100"]), capsys.readouterr().out
    for label in ("moeq", "packages", "checkpoint", "verdict", "loads in", "memory", "next"):
        assert f"\n  {label} " in text


def test_what_is_wrong_is_reported_and_not_raised(checkpoints, tmp_path, capsys) -> None:
    code, document = said(capsys, "doctor", checkpoints / INT4, "--gpu", "A100", "--tp", "3")
    assert (code, document["ok"], document["problem"]["code"]) == (1, False, "usage.tp")
    assert "--tp 2" in document["problem"]["hint"]
    code, document = said(capsys, "doctor", tmp_path / "nowhere")
    assert (code, document["problem"]["code"]) == (4, "source.missing")


@pytest.mark.parametrize(
    ("reported", "name", "memory"),
    [
        ("NVIDIA H100 80GB HBM3", "H100", 80),
        ("NVIDIA A100-SXM4-40GB", "A100", 40),
        ("Tesla V100-SXM2-16GB", "V100", 16),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 24),
        ("NVIDIA RTX A6000", "RTX A6000", 48),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000", 96),
        ("NVIDIA GH200 480GB", "GH200", 96),
        ("AMD Instinct MI300X OAM", "MI300X", 192),
    ],
)
def test_names_that_drivers_print(reported: str, name: str, memory: int, capsys) -> None:
    code, document = said(capsys, "gpus", reported)
    (gpu,) = document["gpus"]
    assert (code, gpu["name"], gpu["memory_gib"]) == (0, name, memory)


@pytest.mark.parametrize("name", ["sm9999", "gfx9999", "NVIDIA RTX A1000000", "H1000"])
def test_names_that_nothing_has(name: str, capsys) -> None:
    code, document = said(capsys, "gpus", name)
    assert (code, document["error"]["code"]) == (2, "usage.unknown-gpu")


def test_commands_agree_about_an_unknown_engine(checkpoints, capsys) -> None:
    codes = {said(capsys, command, checkpoints / INT4, "--gpu", "H100", "--engine", "sglang@9")[0] for command in
             ("inspect", "oracle", "plan")}  # fmt: skip
    assert codes == {2}

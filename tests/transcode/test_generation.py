"""Source and transcoded checkpoint generate the same in vLLM: `examples/bench/transcode_generate.py`, its judgement."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench_scripts import FOLDER, generating, judging

PAIRS = {
    ("gptq-int4-g32-qwen3moe", "--to gptq"): "bits",
    ("ct-int4-g128-qwen3moe", "--to compressed-tensors"): "bits",
    ("ct-int4-g128-qwen3moe", "--to gptq"): "bits",
    ("mxfp4-gptoss", "--to mxfp4"): "bits",
}


def engine_runs() -> bool:
    """Whether vLLM is here with its compiled kernels, not only its Python files."""
    found = importlib.util.find_spec("vllm")
    return found is not None and any(Path(folder).glob("_C*.so") for folder in found.submodule_search_locations or ())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not engine_runs(), reason="vLLM is not installed, or without its kernels")
def test_vllm_generates_the_same(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    root = FOLDER.parents[1]
    paths = [str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [sys.executable, str(FOLDER / "transcode_generate.py"), "--out", str(out)]
    command += [word for name in sorted({name for name, _ in PAIRS}) for word in ("--source", name)]
    command += [word for name in ("compressed-tensors", "gptq", "mxfp4") for word in ("--to", name)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    rows = {(row["source"], row["transcode"]): row for row in json.loads(out.read_text())["rows"]}
    assert {pair: rows[pair]["answer"] for pair in PAIRS} == PAIRS, run.stdout + run.stderr[-2000:]
    assert not [row for row in rows.values() if row["answer"] == "DIFFERENT"], run.stdout


def answered(tokens: list[int], logprobs: torch.Tensor) -> generating.Generated:
    return generating.Generated(tokens, logprobs[: -len(tokens)], logprobs[-len(tokens) :])


class Said(torch.nn.Module):
    """A model that says the same whatever the tokens are."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, tokens: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits[None, : tokens.shape[1]])


def judged(
    noise: float, *, tokens: list[int] | None = None, experts: float = 1.0, tie: bool = False, strays: float = 0.0
) -> str:
    """The answer about a result whose log-probabilities are float32's and noise.

    Args:
        noise: of the result.
        tokens: what the result chose, where it is not the source's.
        experts: how much experts matter.
        tie: two tokens are all but equally likely at the last place.
        strays: noise of the source.
    """
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(10, 32, generator=draw)
    greedy = logits[5:9].argmax(-1).tolist()
    if tie:
        logits[8, (greedy[-1] + 1) % 32] = logits[8, greedy[-1]] - 1e-4
    found, before = (
        (logits + size * torch.randn(10, 32, generator=draw)).log_softmax(-1)[:9] for size in (noise, strays)
    )
    known = judging.Reference(Said(logits), [[1] * 6], logits.log_softmax(-1)[:5], 0.01, experts)
    source, result = answered(greedy, before), answered(tokens or greedy, found)
    return str(judging.compare([source], [result], known, activations=False)["answer"])


def test_equal_answers_are_equal_to_the_bit() -> None:
    assert judged(0.0) == "bits"
    assert judged(1e-6) == "tokens"


def test_what_rounding_does_not_explain_is_different() -> None:
    assert judged(0.02) == "tokens"
    assert judged(0.04) == "DIFFERENT"


def test_another_token_is_right_only_where_both_are_as_likely() -> None:
    draw = torch.Generator().manual_seed(3)
    greedy = torch.randn(10, 32, generator=draw)[5:9].argmax(-1).tolist()
    other = [*greedy[:-1], (greedy[-1] + 1) % 32]
    assert judged(1e-6, tokens=other, tie=True) == "near tie"
    assert judged(1e-6, tokens=other) == "DIFFERENT"


def test_a_source_that_strays_leaves_the_result_to_float32() -> None:
    assert judged(0.02, strays=0.2) == "as float32"
    assert judged(0.2, strays=0.2) == "DIFFERENT"


def test_a_model_whose_experts_do_not_matter_says_nothing() -> None:
    assert judged(0.02, experts=0.05) == "blind"

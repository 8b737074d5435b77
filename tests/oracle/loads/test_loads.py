"""Where moeq says yes, vLLM's own loader fills every parameter: recorded loads, and new ones where the engine is.

MOEQ_VLLM_SITE is the folder of an unpacked wheel; MOEQ_VLLM_PYTHON names a Python that has torch and what it imports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from oracle.loads import cases, files, samples
from oracle.loads.compare import kind_of, loaded, verdict

import moeq

HERE = Path(__file__).parent
SITE = os.environ.get("MOEQ_VLLM_SITE")
#: Cases that `make test` looks at, of the recorded ones.
FIRST = 25


def wrong_yeses(seed: str, outcomes: dict[int, samples.Row], scratch: Path) -> tuple[list[str], int]:
    """Cases in which moeq says yes and the engine does not load, with the engine's reason, and how many both accept."""
    wrong, both = [], 0
    for number, engine in outcomes.items():
        case = cases.case(seed, number)
        ok, _ = verdict(case, files.write(scratch / str(number), case))
        kind = kind_of(loaded(engine), ok)
        both += kind == "yes/yes"
        if kind.startswith("yes-but"):
            wrong.append(
                f"{kind}: case {number} of seed {seed}, {case['family']} {case['twist']}: {loaded(engine).why}"
            )
    return wrong, both


@pytest.mark.slow
def test_first_recorded_loads(tmp_path: Path) -> None:
    seed, _, engine = samples.load()
    wrong, both = wrong_yeses(seed, dict(enumerate(engine[:FIRST])), tmp_path)
    assert not wrong
    assert both > FIRST // 5


@pytest.mark.slow
def test_recorded_loads(tmp_path: Path) -> None:
    seed, digest, engine = samples.load()
    assert digest == samples.digest_of_cases(seed, len(engine)), "the cases are others: record them again"
    wrong, both = wrong_yeses(seed, dict(enumerate(engine)), tmp_path)
    assert not wrong
    assert both > len(engine) // 5


def test_an_unfilled_parameter_is_no_load() -> None:
    """The engine's side is read strictly: silence with fresh memory is a no, and an unfilled optional part is none."""
    assert loaded({"unfilled": {"w13_bias": 1.0}, "left": ["g_idx"]}).ok
    assert not loaded({"unfilled": {"w13_weight": 0.5}, "left": []}).ok
    assert not loaded({"unfilled": {}, "left": ["bias"]}).ok
    assert loaded({"stage": "process", "error": "AttributeError", "msg": "'_OpNamespace' '_C' object", "at": ""}).ok
    assert not loaded({"stage": "load", "error": "KeyError", "msg": "No module named x", "at": ""}).ok


@pytest.mark.skipif(not SITE, reason="MOEQ_VLLM_SITE names no unpacked wheel")
def test_the_engine_itself(tmp_path: Path) -> None:
    """New checkpoints, of MOEQ_VLLM_SEED or of this release's seed."""
    seed = os.environ.get("MOEQ_VLLM_SEED") or f"moeq {moeq.__version__}"
    python, out = os.environ.get("MOEQ_VLLM_PYTHON", sys.executable), tmp_path / "rows.jsonl"
    command = [python, str(HERE / "engine.py"), str(SITE), "--seed", seed, "--out", str(out), "--cases", "120"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    wrong, both = wrong_yeses(seed, {row["id"]: row["engine"] for row in rows}, tmp_path)
    assert not wrong
    assert both > len(rows) // 5

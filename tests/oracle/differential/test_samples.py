"""moeq decides as the engine's own code did: recorded answers of every version, and a new look of a difference fails.

With MOEQ_VLLM_SITE (the folder of an unpacked wheel) the engine itself answers new cases, of MOEQ_VLLM_SEED or of a new
seed; MOEQ_VLLM_PYTHON names a Python that has torch and what the wheel imports.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from oracle.differential import samples
from oracle.differential.compare import Answer, Comparison, moeq_answer, moeq_outcome, short
from oracle.differential.known import DIFFERENCES

from moeq.oracle.engines.vllm.policy import load_policy
from moeq.oracle.versions import versions

HERE = Path(__file__).parent
SITE = os.environ.get("MOEQ_VLLM_SITE")


def problems(found: Comparison, version: str) -> list[str]:
    """Differences that `known.py` does not list, each with an example."""
    known = DIFFERENCES.get(version, {})
    return [f"{name}  ({len(ids)}, such as {ids[0]})" for name, ids in found.clusters.items() if name not in known]


#: The newest one first: it is asked in every run, the others in the scheduled one.
VERSIONS = versions("vllm")[::-1]

#: Those that were asked about the option as well.
OPTION_VERSIONS = ("0.33.0", "0.31.0", "0.30.0", "0.28.0", "0.26.0")


@pytest.mark.cover(every=len(VERSIONS))
@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_answers(version: str) -> None:
    head, rows = samples.load(version)
    policy, found = load_policy(f"vllm@{version}"), Comparison()
    assert head.version == version
    assert head.digest == policy.digest, "the sample and the tables are of different packages"
    assert head.cases == samples.digest_of_cases(head.seed), "the cases are others: record the samples again"
    for world, case, answer in rows:
        found.add(policy, world, case, answer)
    assert len(rows) > 2000
    assert sum(row.cases for row in found.families.values()) == len(rows)
    assert not problems(found, version)
    assert sum(row.decision for row in found.families.values()) >= 0.995 * len(rows)


@pytest.mark.cover(every=len(OPTION_VERSIONS))
@pytest.mark.parametrize("version", OPTION_VERSIONS)
def test_recorded_answers_about_the_quantization_option(version: str) -> None:
    """Methods on unquantised checkpoints, and Humming's method on quantised ones."""
    wrong, policy = [], load_policy(f"vllm@{version}")
    rows = [(world, case, answer["answer"]) for of, world, case, answer in samples.load_options() if of == version]
    assert len(rows) > 50
    for world, case, answer in rows:
        mine = moeq_answer(moeq_outcome(policy, world, case))
        if not Answer(*answer).agrees(mine):
            wrong.append((case["id"], answer, mine))
    assert not wrong


@pytest.mark.cover(every=len(VERSIONS))
@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_answers_in_dialects(version: str) -> None:
    """Configs as exporters write them: tables per module, lists, several groups."""
    wrong, policy = [], load_policy(f"vllm@{version}")
    rows = [(world, case, answer) for of, world, case, answer in samples.load_dialects() if of == version]
    assert len(rows) > 300
    for world, case, answer in rows:
        mine = moeq_answer(moeq_outcome(policy, world, case))
        if not Answer(*answer).agrees(mine):
            wrong.append((case["id"], answer, mine))
    assert len(wrong) <= 0.005 * len(rows), wrong


def test_a_difference_is_named() -> None:
    """An answer that is another one shows up, with both sides in its name."""
    version = versions("vllm")[-1]
    _, rows = samples.load(version)
    world, case, answer = next(row for row in rows if row[2]["answer"][0] == "choice")
    found = Comparison()
    found.add(load_policy(f"vllm@{version}"), world, case, {**answer, "answer": ["choice", "NOBODY", "NoExperts"]})
    (line,) = problems(found, version)
    assert line.startswith(f"{case['family']} | engine NOBODY NoExperts | moeq {answer['answer'][1]}")


@pytest.mark.parametrize("version", versions("vllm"))
def test_samples_are_of_this_release(version: str) -> None:
    """A new version of moeq comes with new cases: nobody has developed on them."""
    seed = samples.load(version)[0].seed
    assert seed == samples.release_seed(), f"record anew: python record.py SITE --sample {version}, then agree.py"


@pytest.mark.slow
@pytest.mark.skipif(not SITE, reason="MOEQ_VLLM_SITE names no unpacked wheel")
def test_the_engine_itself(tmp_path: Path) -> None:
    from importlib.metadata import distributions

    version = next(d.version for d in distributions(path=[str(SITE)]) if d.name == "vllm")
    seed = os.environ.get("MOEQ_VLLM_SEED") or secrets.token_hex(4)
    python, out = os.environ.get("MOEQ_VLLM_PYTHON", sys.executable), tmp_path / "rows.jsonl"
    command = [python, str(HERE / "record.py"), str(SITE), "--seed", seed, "--out", str(out), "--cases", "20"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found, policy = Comparison(), load_policy(f"vllm@{version}")
    for row in map(json.loads, out.read_text(encoding="utf-8").splitlines()):
        found.add(policy, row["world"], row["case"], short(row["engine"]))
    assert not problems(found, version), f"seed {seed}"

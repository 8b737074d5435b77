"""The whole matrix: every scheme x TP x EP x DP x all-to-all x LoRA gives a verdict or a refusal, in good time."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import product

import pytest
from oracle.examples import SHAPE, every_scheme, scheme

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import known_gpus, parse_gpu
from moeq.oracle.engines.vllm.policy import load_policy
from moeq.oracle.judge import judge
from moeq.oracle.sweep import deployments

POLICY = load_policy("vllm@0.33.0")
FORMS = [(tp, ep) for tp, ep in product((1, 2, 3, 8), (1, 2, 8, 256))]
ALL2ALL = [None, *POLICY.all2all]


@pytest.mark.cover(every=64)
@pytest.mark.parametrize("gpu", ["A100", "H100", "B200", "MI300X"])
@pytest.mark.parametrize("engine", ["vllm@0.33.0", "moeq"])
@pytest.mark.parametrize("name", list(every_scheme()))
def test_verdict_or_refusal(name: str, engine: str, gpu: str) -> None:
    one, shape = every_scheme()[name]
    kinds = [None] if engine == "moeq" else ALL2ALL  # moeq's own kernels do not communicate
    for (tp, ep), kind, lora in product(FORMS, kinds, (False, True)):
        where = Deployment(parse_gpu(gpu), tp=tp, ep=ep, all2all=kind, lora=lora, engine=engine)
        verdict = judge(one, shape, where, explain=False)
        assert verdict.ok or verdict.refusal, (tp, ep, kind, lora)
        # Nothing is chosen that a dry run could not build, and nothing is written for it either.
        if verdict.chosen:
            assert all(gate.passed for gate in verdict.gates)
        if verdict.convert:
            assert verdict.convert.sizes.padded_intermediate >= verdict.convert.sizes.intermediate > 0


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("backend", POLICY.overrides)
def test_every_backend_name_maps_or_is_refused_with_alternatives(backend: str) -> None:
    for one, shape in every_scheme().values():
        for gpu in ("H100", "MI300X", "XPU", "CPU"):
            verdict = judge(one, shape, Deployment(parse_gpu(gpu), backend=backend), explain=False)
            assert verdict.asked == backend
            if verdict.selected is None:
                assert verdict.error is not None
                if verdict.error.kind.startswith("OVERRIDE"):
                    assert verdict.error.hint


@pytest.mark.slow
def test_every_known_device_has_an_answer() -> None:
    for gpu in known_gpus().values():
        for one, shape in every_scheme().values():
            verdict = judge(one, shape, Deployment(gpu), explain=False)
            assert verdict.ok or verdict.refusal


def test_a_decision_reads_its_tables_once() -> None:
    where = Deployment(parse_gpu("H100"), tp=2)
    judge(scheme("gptq"), SHAPE, where)
    best = min(_seconds(where) for _ in range(5))
    assert best < 0.05  # some 5 ms; reading the tables anew takes longer


def _seconds(where: Deployment) -> float:
    start = time.process_time()  # of this process: other load on the machine says nothing about the oracle
    judge(scheme("gptq"), SHAPE, where)
    return time.process_time() - start


def test_a_thousand_cells_take_less_than_three_seconds() -> None:
    gpus = list(known_gpus().values())[:32]
    start = time.process_time()
    cells = deployments(Deployment(gpus[0]), gpus, [1, 2, 4, 8, 16, 32, 3, 6], [1, 2, 4, 8])
    verdicts = [judge(scheme("gptq"), SHAPE, where, explain=False) for where in cells]
    assert len(verdicts) >= 1000
    assert time.process_time() - start < 3.0


def test_no_torch_in_the_import_path() -> None:
    modules = "moeq.oracle.judge, moeq.oracle.sweep, moeq.oracle.backends, moeq.oracle.explain, moeq.deploy.options"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

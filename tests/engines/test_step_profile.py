"""`examples/bench/step_profile.py`: kernels of a trace by purpose, and the time in which none runs."""

import gzip
import json
from pathlib import Path

import pytest

from tests.bench_scripts import step_profile as profile


def test_a_step_is_split_by_purpose_and_overlaps_count_once(tmp_path: Path) -> None:
    events = [
        {"cat": "kernel", "name": "moe_gemm", "ts": 1000, "dur": 100},
        {"cat": "kernel", "name": "flash_fwd_kernel", "ts": 1200, "dur": 100},
        {"cat": "kernel", "name": "nvjet_tst", "ts": 1250, "dur": 100},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5000},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 1390, "dur": 10},
    ]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    found = profile.summed(profile.read_kernels(path), steps=2)
    assert (found["step"], found["experts"], found["attention"], found["other products"]) == (200, 50, 50, 50)
    assert (found["rest"], found["gap"]) == (5, 70)


def test_a_trace_without_kernels_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no kernels"):
        profile.summed([])

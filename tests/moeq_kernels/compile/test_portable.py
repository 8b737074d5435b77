"""Ahead-of-time compilation for every target, without a GPU. `support.compile.matrix` compiles the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support.compile.portable import _AMD_LINE, CUDA_LINE, TARGETS, _register_left_operand, local_memory

# Compiled in one child process: this one may be interpreting, which cannot be undone.
SCRIPT = """
import dataclasses, json
from support.compile.portable import TARGETS, compile_case, spread, trimmed_matrix
print(json.dumps([dataclasses.asdict(compile_case(*one)) for one in spread(trimmed_matrix(), list(TARGETS))]))
"""


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, object]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_every_kernel_compiles_without_spilling(outcomes: list[dict[str, object]]) -> None:
    assert [f"{o['target']} {o['case']}: {o['problem']}" for o in outcomes if o["problem"]] == []


@pytest.mark.slow
def test_every_target_and_both_vendors_are_covered(outcomes: list[dict[str, object]]) -> None:
    assert {o["target"] for o in outcomes} == set(TARGETS)
    assert all(0 < int(o["registers"]) <= 512 for o in outcomes)


def test_spills_in_a_loop_are_found_and_those_outside_are_told_apart() -> None:
    cuda = [".L_x_1:", "  LDL R1, [R2] ;", "  @P0 BRA `(.L_x_1) ;", "  STL [R1], R2 ;", ".L_x_2:", "  BRA `(.L_x_2);"]
    assert local_memory(cuda, CUDA_LINE, r"\b(?:LDL|STL)\b") == (1, 2)
    amd = [".LBB0_1:", "  scratch_load_dword v1, off", "  s_cbranch_scc0 .LBB0_1", "  scratch_store_dword off, v1"]
    assert local_memory(amd, _AMD_LINE, r"\bscratch_(?:load|store)") == (1, 2)


def test_a_left_operand_in_registers_is_found() -> None:
    head = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1, %r2, %r3, %r4}, "
    assert _register_left_operand(head + "{%r5,%r6,%r7,%r8}, %rd1, p, 1, 1, 0;")
    assert not _register_left_operand(head + "%rd2, %rd1, p, 1, 1, 0, 0;")

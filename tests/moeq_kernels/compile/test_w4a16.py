"""Ahead-of-time builds of the Hopper kernels for sm_90. `support.compile.hopper` builds all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support.compile.sass import hazards, main_loops, problems

# In a child process: this one may be interpreting, where nothing can be compiled.
SCRIPT = """
import json
from support.compile.w4a16 import cases, compile_case, compile_routing
from support.compile.sass import disassemble, is_wgmma, main_loops, problems
wanted = {
    "narrow8-gate-up-split", "narrow8-down", "narrow8-g32-zeros", "wide32-down", "wide64-gate-up", "wide160g-g32",
    "narrow8-f16-g32-zeros", "wide32-g32-f16-scales-zeros", "narrow8-channel", "narrow8-int8", "wide32-int8-g32-zeros",
    "narrow8-int2", "wide32-int3", "narrow8-mxfp4", "wide32-mxfp4-oai", "narrow8-relu2", "queue8-gate-up",
    "queue16-g32-zeros",
    "narrow8-situ", "wide64-swiglu-step", "wide64-nvfp4-permuted",
    "queue16-mxfp4-oai", "direct1-gate-up", "direct1-down", "wide32-nvfp4", "wide64-fp8-channel", "wide64-mxfp8-down",
    "narrow8-nvfp4-split", "queue8-nvfp4-down", "direct1-fp8-channel", "queue16-mxfp8", "queue8-fp8-f16",
}
outcomes = {}
for case in cases():
    if case.name in wanted:
        kernel = compile_case(case)
        sass = disassemble(kernel.asm["cubin"])
        counts = [sum(map(is_wgmma, body)) for body in main_loops(sass)]
        outcomes[case.name] = {"problems": problems(sass), "wgmma": counts, "shared": kernel.metadata.shared}
assert set(outcomes) == wanted, sorted(wanted - set(outcomes))
compile_routing()
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, object]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_weights_reach_the_tensor_cores_through_registers_and_nothing_overwrites_them(
    outcomes: dict[str, dict[str, object]],
) -> None:
    assert {name: outcome["problems"] for name, outcome in outcomes.items() if outcome["problems"]} == {}


@pytest.mark.slow
def test_loops_hold_the_multiplications_of_their_steps_and_buffers_fit(
    outcomes: dict[str, dict[str, object]],
) -> None:
    narrow = outcomes["narrow8-down"]
    assert narrow["wgmma"] == [32]  # 128 of k in steps of 16, for four blocks of 64 rows
    for name in ("narrow8-down", "narrow8-int8", "narrow8-mxfp4"):
        assert int(str(outcomes[name]["shared"])) <= 57 * 1024  # four programs on a multiprocessor
    assert (outcomes["narrow8-int8"]["wgmma"], outcomes["narrow8-mxfp4"]["wgmma"]) == ([16], [32])  # 64 and 128 of k
    assert outcomes["queue8-gate-up"]["wgmma"] == [32]  # one loop for both products
    assert 3 * (int(str(outcomes["queue8-gate-up"]["shared"])) + 1024) <= 228 * 1024  # three on a multiprocessor
    assert outcomes["direct1-down"]["wgmma"] == [32]
    assert [outcomes[name]["wgmma"] for name in ("queue8-nvfp4-down", "queue8-fp8-f16")] == [[32], [16]]
    assert 3 * (int(str(outcomes["queue8-nvfp4-down"]["shared"])) + 1024) <= 228 * 1024
    # Wide kernels: a loop for each width of tile and warpgroup, 64 of k in steps of 16 for two blocks of 64 rows.
    assert outcomes["wide64-gate-up"]["wgmma"] == [8] * 8
    assert outcomes["wide160g-g32"]["wgmma"] == [8, 16, 8, 16] * 2  # 64, 64 + 32, 128 and 128 + 32 tokens
    assert all(int(str(outcome["shared"])) <= 227 * 1024 for outcome in outcomes.values())


LOOP = """
.L_x_1:
        /*0000*/ LOP3.LUT R8, R4, 0xf000f, RZ, 0xc0, !PT ;
        /*0010*/ HGMMA.64x8x16.F32.BF16 R24, R8, gdesc[UR4], R24, gsb0 ;
{wait}
        /*0030*/ IADD3 R12, R12, 0x1, RZ ;
        /*0040*/ @P0 BRA `(.L_x_1) ;
        /*0050*/ EXIT ;
"""


def test_overwriting_a_running_left_operand_is_found_across_iterations() -> None:
    waits = LOOP.format(wait="        /*0020*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;")
    assert hazards(waits) == [] == problems(waits)
    too_late = LOOP.format(wait="        /*0020*/ WARPGROUP.DEPBAR.LE gsb0, 0x1 ;")
    assert [hazard.registers for hazard in hazards(too_late)] == [(8,)]
    assert problems(LOOP.format(wait=""))


def test_shuffles_spills_and_shared_operands_are_found() -> None:
    good = LOOP.format(wait="        /*0020*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;")
    for bad in ("SHFL.BFLY PT, R1, R2, 0x1, 0x1f", "STS [R3], R1", "LDL R1, [R2]"):
        assert len(problems(good.replace("IADD3 R12, R12, 0x1, RZ", bad))) == 1
    assert len(problems(good.replace("R24, R8, gdesc[UR4]", "R24, gdesc[UR8], gdesc[UR4]"))) == 1
    assert problems("        /*0000*/ EXIT ;") == ["no loop with wgmma"]
    assert len(main_loops(good)) == 1

"""Ahead-of-time builds of the Hopper kernels for products of bytes; `support.compile.hopper` builds all."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# In a child process: this one may be interpreting, where nothing can be compiled.
SCRIPT = """
import json
from support.compile import w4a8
from support.compile.w8a8 import cases, compile_case, compile_rows
from support.compile.sass import disassemble, instructions, is_wgmma, main_loops, problems
wanted = {
    "int8-narrow8x6-gate-up-split", "int8-narrow8x6-gate-up-direct", "int8-narrow16x6-down", "int8-narrow64x4-oai",
    "int8-wide128x4-gate-up", "e4m3-narrow64x4-block-gate-up", "e4m3-wide128x4-block-down",
    "e4m3-wide128x4-channel-oai", "e4m3-wide128x4-block-gate-up",
}
outcomes = {}
for case in cases():
    if case.name in wanted:
        kernel = compile_case(case)
        sass = disassemble(kernel.asm["cubin"])
        loops = [[one.operation for one in body if is_wgmma(one)] for body in main_loops(sass)]
        outcomes[case.name] = {
            "problems": problems(sass, registers=False), "wgmma": loops, "shared": kernel.metadata.shared,
            "local": [one.operation for one in instructions(sass).values() if one.operation.startswith(("LDL", "STL"))],
        }
assert set(outcomes) == wanted, sorted(wanted - set(outcomes))
rows = {}
for name, kernel in compile_rows().items():
    code = [one.operation for one in instructions(disassemble(kernel.asm["cubin"])).values()]
    rows[name] = [len(code), sum(one.startswith(("LDL", "STL")) for one in code)]
for case in w4a8.cases():
    if case.name in ("w4a8-64-oai", "w4a8-160-gate-up", "w4a8-int4-160-g128", "w4a8-int4-64-g32"):
        kernel = w4a8.compile_case(case)
        sass = disassemble(kernel.asm["cubin"])
        outcomes[case.name] = {
            "problems": problems(sass), "shared": kernel.metadata.shared,
            "wgmma": [[one.operation for one in body if is_wgmma(one)] for body in main_loops(sass)],
            "local": [one.operation for one in instructions(sass).values() if one.operation.startswith(("LDL", "STL"))],
        }
print(json.dumps([outcomes, rows]))
"""


@pytest.fixture(scope="module")
def built() -> tuple[dict[str, dict[str, object]], dict[str, list[int]]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    outcomes, rows = json.loads(done.stdout.splitlines()[-1])
    return outcomes, rows


@pytest.mark.slow
def test_products_multiply_bytes_from_shared_memory_and_never_spill(
    built: tuple[dict[str, dict[str, object]], dict[str, list[int]]],
) -> None:
    outcomes, _ = built
    # 160 tokens take all registers; what is kept for an item's end may lie in local memory, as `problems` finds no loop
    # that reads or writes it.
    most = {"w4a8-160-gate-up": 8, "w4a8-int4-160-g128": 24}
    found = {name: one["problems"] for name, one in outcomes.items() if one["problems"]}
    assert found | {name: one["local"] for name, one in outcomes.items() if len(one["local"]) > most.get(name, 0)} == {}
    # 128 of k in steps of 32, for two blocks of 64 rows (narrow) or of 128 columns (wide); a loop for each warpgroup
    assert outcomes["int8-narrow16x6-down"]["wgmma"] == [["IGMMA.64x16x32.S8.S8"] * 8]
    assert outcomes["int8-wide128x4-gate-up"]["wgmma"] == [["IGMMA.64x128x32.S8.S8"] * 8] * 2
    assert outcomes["e4m3-narrow64x4-block-gate-up"]["wgmma"] == [["QGMMA.64x64x32.F32.E4M3.E4M3"] * 8]
    for name in ("e4m3-wide128x4-block-down", "e4m3-wide128x4-channel-oai", "e4m3-wide128x4-block-gate-up"):
        assert outcomes[name]["wgmma"] == [["QGMMA.64x128x32.F32.E4M3.E4M3"] * 8] * 2
    # a loop for each height, 64, 96, 128 and 160 tokens, of one product or two
    products = ((64,), (64, 32), (128,), (128, 32))
    for name, weights in (("w4a8-160-gate-up", "E5M2"), ("w4a8-int4-160-g128", "E4M3")):
        heights = [{f"QGMMA.64x{tokens}x32.F32.{weights}.E4M3" for tokens in one} for one in products]
        assert [set(loop) for loop in outcomes[name]["wgmma"]] == heights * 2
    assert all(int(str(one["shared"])) <= 227 * 1024 for one in outcomes.values())
    assert int(str(outcomes["int8-narrow16x6-down"]["shared"])) <= 113 * 1024  # two programs on a multiprocessor


@pytest.mark.slow
def test_rows_are_spread_over_threads(built: tuple[dict[str, dict[str, object]], dict[str, list[int]]]) -> None:
    """A layout that gives one thread a whole row shows as thousands of instructions and as spills."""
    _, rows = built
    assert rows
    assert {name: found for name, found in rows.items() if found[0] > 2600 or found[1]} == {}


def test_every_build_of_the_short_list_is_one() -> None:
    from support.compile import w4a8, w4a16, w8a8
    from support.compile.hopper import TRIMMED

    assert {case.name for module in (w4a16, w8a8, w4a8) for case in module.cases()} >= TRIMMED

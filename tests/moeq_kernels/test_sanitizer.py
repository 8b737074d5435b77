"""Reading what compute-sanitizer says, without a GPU. The texts are its own, with today's line numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.sanitizer import summary

WIDE = Path(__file__).parents[2] / "kernels" / "moeq_kernels" / "hopper" / "w4a16" / "device" / "wide.py"


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(WIDE.read_text().splitlines(), 1) if text in line)


def race(read: int, write: int) -> str:
    return (
        f"========= Error: Race reported between Read access at expert_product_wide+0x290 in wide.py:{read}\n"
        f"=========     and Write access at expert_product_wide+0x8600 in wide.py:{write} [323 hazards]\n"
        "========= \n"
    )


def output(*blocks: str) -> str:
    end = f"========= RACECHECK SUMMARY: {len(blocks)} hazards displayed ({len(blocks)} errors, 0 warnings)\n"
    return "========= COMPUTE-SANITIZER\nran fused_moe a\ncomplete\n========= \n" + "".join(blocks) + end


def test_the_hand_over_to_specialised_warps_is_told_apart() -> None:
    kernel, specialised = line_of("def expert_product_wide("), line_of("gl.warp_specialize(")
    found = summary("racecheck", output(race(kernel, specialised)), 0)
    assert (found["reported"], found["hand_overs"], found["errors"]) == (1, 1, 0)
    assert found["complete"]
    assert found["ran"] == ["fused_moe a"]


def test_triton_may_name_the_condition_around_the_specialisation() -> None:
    kernel, condition = line_of("def expert_product_wide("), line_of("if GROUPS_OF_WARPS == 2:")
    found = summary("racecheck", output(race(kernel, condition)), 0)
    assert (found["hand_overs"], found["errors"]) == (1, 0)


@pytest.mark.parametrize(
    "text", ["def _multiply(", "if GROUP:", "if DEPENDENT and not EARLY:", "gl.allocate_shared_memory("]
)
def test_other_definitions_conditions_and_statements_are_not_a_hand_over(text: str) -> None:
    kernel = line_of("def expert_product_wide(")
    assert summary("racecheck", output(race(kernel, line_of(text))), 0)["errors"] == 1


def test_a_kernel_that_does_not_specialise_and_an_access_without_a_line_are_races() -> None:
    kernel = line_of("def expert_product_wide(")
    narrow = (
        race(kernel, kernel).replace("expert_product_wide", "expert_product_narrow").replace("wide.py", "narrow.py")
    )
    nowhere = race(kernel, kernel).replace(f" in wide.py:{kernel} [", " [")
    assert summary("racecheck", output(narrow, nowhere), 0)["errors"] == 2


def test_a_race_of_our_own_lines_is_an_error() -> None:
    kernel, ours = line_of("def expert_product_wide("), line_of("fence_async_shared()")
    found = summary("racecheck", output(race(kernel, kernel), race(kernel, ours)), 0)
    assert (found["hand_overs"], found["errors"]) == (1, 1)
    assert f"wide.py:{ours}" in found["first"][0]


def test_invalid_accesses_and_a_tool_that_said_nothing() -> None:
    text = "========= Invalid __global__ read of size 4 bytes\n=========     at expert_product_wide+0x10 in wide.py:3\n"
    found = summary("memcheck", output(text + "========= \n"), 1)
    assert found["errors"] == 1
    silent = summary("memcheck", "Killed\n", -9)
    assert silent["errors"] is None
    assert silent["tail"] == ["Killed"]

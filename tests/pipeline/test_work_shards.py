"""Which shard a process has, and which units are in it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeq.errors import MoeqError
from moeq.pipeline.plan.units import CopyUnit
from moeq.pipeline.run.work_shards import WorkShard, parse_shard

ARRAY = {
    "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_ARRAY_TASK_COUNT": "8",
    "SLURM_ARRAY_TASK_MIN": "0",
    "SLURM_ARRAY_TASK_MAX": "7",
    "SLURM_ARRAY_TASK_STEP": "1",
}
FROM_ONE = {**ARRAY, "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "8"}
STEPPED = {
    **ARRAY,
    "SLURM_ARRAY_TASK_ID": "14",
    "SLURM_ARRAY_TASK_COUNT": "4",
    "SLURM_ARRAY_TASK_MIN": "4",
    "SLURM_ARRAY_TASK_MAX": "19",
    "SLURM_ARRAY_TASK_STEP": "5",
}
SRUN = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}
SRUN_OF_ONE = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "6"}
SKYPILOT = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("text", "environ", "expected"),
    [
        ("0/1", {}, WorkShard(0, 1)),
        ("3/8", ARRAY, WorkShard(3, 8)),
        (" 6 / 7 ", {}, WorkShard(6, 7)),
        ("auto", ARRAY, WorkShard(3, 8)),
        ("auto", FROM_ONE, WorkShard(2, 8)),
        ("auto", STEPPED, WorkShard(2, 4)),
        ("auto", SRUN, WorkShard(2, 4)),
        ("auto", {"JOB_COMPLETION_INDEX": "0", "MOEQ_SHARDS": "5"}, WorkShard(0, 5)),
        ("auto", TORCHRUN, WorkShard(5, 6)),
        ("auto", SKYPILOT, WorkShard(1, 2)),
        # A task of an array that srun starts once is still a task of the array.
        ("auto", {**ARRAY, **SRUN_OF_ONE}, WorkShard(3, 8)),
        ("auto", SRUN_OF_ONE, WorkShard(0, 1)),
        # A batch script knows SLURM_PROCID and SLURM_NTASKS without being one of several processes.
        ("auto", {**ARRAY, "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, WorkShard(3, 8)),
        # Several launchers that agree.
        ("auto", {**SRUN, "RANK": "2", "WORLD_SIZE": "4"}, WorkShard(2, 4)),
        # Several that do not: one is named.
        ("torchrun", {**SKYPILOT, **TORCHRUN}, WorkShard(5, 6)),
        ("skypilot", {**SKYPILOT, **TORCHRUN}, WorkShard(1, 2)),
    ],
)
def test_shard(text: str, environ: dict[str, str], expected: WorkShard) -> None:
    assert parse_shard(text, environ) == expected


@pytest.mark.parametrize(
    ("text", "environ", "code", "said"),
    [
        ("8/8", {}, "usage.shard", "the last of 8 is 7/8"),
        ("9/8", {}, "usage.shard", "count from 0"),
        ("0/0", {}, "usage.shard", "cut into 0 shards"),
        ("-1/8", {}, "usage.shard", "expected I/N"),
        ("1", {}, "usage.shard", "expected I/N"),
        ("²/8", {}, "usage.shard", "expected I/N"),
        ("pbs", {}, "usage.shard", "expected I/N"),
        ("auto", {}, "usage.shard-launcher", "SLURM_ARRAY_TASK_ID"),
        ("auto", {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "usage.shard-launcher", "no launcher"),
        ("srun", {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "usage.shard-launcher", "SLURM_STEP_NUM_TASKS is not set"),
        ("auto", {"JOB_COMPLETION_INDEX": "0"}, "usage.shard-launcher", "MOEQ_SHARDS is not set although JOB_COMPL"),
        ("auto", {"RANK": "0"}, "usage.shard-launcher", "WORLD_SIZE is not set although RANK is"),
        ("auto", {"WORLD_SIZE": "2"}, "usage.shard-launcher", "RANK is not set although WORLD_SIZE is"),
        ("auto", {"RANK": "2", "WORLD_SIZE": "2"}, "usage.shard-launcher", "RANK=2 is not one of 0 .. 1"),
        ("auto", {"RANK": "one", "WORLD_SIZE": "2"}, "usage.shard-launcher", "RANK='one' is not a number"),
        ("auto", {**TORCHRUN, **SKYPILOT}, "usage.shard-launcher", "torchrun says 5/6, but SkyPilot says 1/2"),
        ("auto", {**ARRAY, **SRUN}, "usage.shard-launcher", "Slurm job array says 3/8, but srun says 2/4"),
        ("auto", {**ARRAY, "SLURM_ARRAY_TASK_COUNT": "3"}, "usage.shard-launcher", "not evenly spaced"),
        ("auto", {**STEPPED, "SLURM_ARRAY_TASK_ID": "15"}, "usage.shard-launcher", "not evenly spaced"),
        ("auto", {**STEPPED, "SLURM_ARRAY_TASK_STEP": "0"}, "usage.shard-launcher", "not evenly spaced"),
        ("auto", {k: v for k, v in ARRAY.items() if "MIN" not in k}, "usage.shard-launcher", "_MIN is not set"),
    ],
)
def test_refused(text: str, environ: dict[str, str], code: str, said: str) -> None:
    with pytest.raises(MoeqError) as caught:
        parse_shard(text, environ)
    assert caught.value.code == code
    assert said in caught.value.message


def test_contradictions_name_the_way_out() -> None:
    with pytest.raises(MoeqError) as caught:
        parse_shard("auto", {**TORCHRUN, **SKYPILOT})
    assert 'shard="torchrun"' in (caught.value.hint or "")


def copies(sizes: list[int], files: int) -> list[CopyUnit]:
    """Copies of these sizes, from and to that many files."""
    return [
        CopyUnit(
            id=f"copy/in-{number % files}/{number}",
            file=f"out-{number % files}",
            inputs={f"in-{number % files}": ((100 * number, 100 * number + size),)} if size else {},
            outputs=((0, size),) if size else (),
            padding_bytes=0,
            source_file=f"in-{number % files}",
            tensors=(),
        )
        for number, size in enumerate(sizes)
    ]


@given(st.lists(st.integers(0, 10**13), max_size=60), st.integers(1, 70), st.integers(1, 9), st.booleans())
def test_shards_are_a_balanced_partition(sizes: list[int], count: int, files: int, remote: bool) -> None:
    units = copies(sizes, files)
    shards = [WorkShard(index, count).select(units, remote=remote) for index in range(count)]
    dealt = [unit.id for shard in shards for unit in shard]
    assert sorted(dealt) == sorted(unit.id for unit in units), "every unit exactly once"
    groups: dict[str, int] = {}
    for unit in units:
        name = unit.id if remote else unit.file
        groups[name] = groups.get(name, 0) + unit.bytes_in + unit.bytes_out
    # Each shard ends at most half a group from its aim; what one leaves is spread over those after it.
    limit = 2 * sum(sizes) / count + (1 + sum(1 / n for n in range(1, count + 1))) / 2 * max(groups.values(), default=0)
    assert all(sum(unit.bytes_in + unit.bytes_out for unit in shard) <= limit + 1 for shard in shards)
    used = sum(bool(shard) for shard in shards)
    assert used == min(count, len(groups)), "nobody is idle while there is something to do"


@pytest.mark.parametrize(("sizes", "expected"), [([1, 2, 1], [2, 1]), ([2, 2, 1], [1, 2]), ([1, 2, 2], [2, 1])])
def test_a_group_is_taken_if_half_of_it_fits(sizes: list[int], expected: list[int]) -> None:
    """A group in the middle goes to the first of two shards if no more comes before it than after it."""
    shards = [WorkShard(index, 2).select(copies(sizes, files=3), remote=False) for index in range(2)]
    assert [len(shard) for shard in shards] == expected


def test_a_file_is_written_by_one_shard_unless_its_parts_are_fetched() -> None:
    units = copies([10] * 24, files=4)
    shards = [WorkShard(index, 4).select(units, remote=False) for index in range(4)]
    assert [{unit.file for unit in shard} for shard in shards] == [{f"out-{number}"} for number in range(4)]
    shards = [WorkShard(index, 8).select(units, remote=True) for index in range(8)]
    assert [len(shard) for shard in shards] == [3] * 8
    assert all(len({unit.source_file for unit in shard}) == 1 for shard in shards), "a shard reads neighbouring files"


@pytest.mark.parametrize(("text", "hint"), [("8/8", 'shard="7/8", if your shards count from 1'), ("9/8", None)])
def test_the_number_of_a_shard_that_is_counted_from_1(text: str, hint: str | None) -> None:
    with pytest.raises(MoeqError, match="so the last of 8 is 7/8") as caught:
        parse_shard(text, {})
    assert caught.value.hint == hint

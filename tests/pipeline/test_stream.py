"""Source files that come one by one: the order of work."""

from __future__ import annotations

import errno
import shutil
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moeq
from moeq.checkpoint.hub import HubSource
from moeq.checkpoint.hub_errors import explain
from moeq.errors import ExitCode, MoeqError
from moeq.pipeline.events import Fetching
from moeq.pipeline.run.streaming import require_space, require_streamable, schedule, streamed

SIZES = {f"f{number}": 10 for number in range(12)}


def layered(spread: int) -> list[frozenset[str]]:
    """Layers that each begin in the file in which the one before ended."""
    return [frozenset(f"f{layer + step}" for step in range(spread)) for layer in range(12 - spread + 1)]


def test_layers_that_overlap_hold_two_files() -> None:
    plan = schedule(layered(2), lambda unit: unit, SIZES)
    assert plan.peak_bytes == 20
    assert plan.fetched_bytes == 120
    assert [step.fetch for step in plan.steps[:3]] == [("f0", "f1"), ("f2",), ("f3",)]
    assert [step.drop for step in plan.steps[:3]] == [("f0",), ("f1",), ("f2",)]


def test_any_order_of_layers_holds_no_more() -> None:
    """Checkpoints sorted by name have layer 10 before layer 2."""
    units = layered(2)
    mixed = [units[number] for number in sorted(range(len(units)), key=str)]
    assert schedule(mixed, lambda unit: unit, SIZES).peak_bytes == 20


def test_the_need_that_leaves_the_least_behind_is_met_first() -> None:
    needs = [frozenset(files) for files in ("bd", "abe", "ace", "a")]
    assert schedule(needs, lambda unit: unit, dict.fromkeys("abcde", 1)).peak_bytes == 3


def test_copies_come_with_the_file_that_is_there() -> None:
    copies = [frozenset({name}) for name in sorted(SIZES)]
    plan = schedule([*copies, *layered(3)], lambda unit: unit, SIZES)
    assert plan.peak_bytes == 30
    assert len(plan.steps) <= 12


def test_copies_of_small_files_do_not_come_before_what_is_begun() -> None:
    """Files of different sizes: a small one far away costs less to fetch, and stays."""
    sizes = {f"f{number}": 10 - number % 3 for number in range(12)}
    copies = [frozenset({name}) for name in sizes]
    assert schedule([*copies, *layered(2)], lambda unit: unit, sizes).peak_bytes <= 20


def test_a_thousand_units_are_ordered_at_once() -> None:
    """Kimi-K2 in 62 files, in ranks, with copies from every file."""
    names = [f"f{number:02}" for number in range(62)]
    layers = [frozenset(names[number : number + 2]) for number in range(61) for _ in range(16)]
    copies = [frozenset({name}) for name in names]
    begun = time.process_time()
    plan = schedule([*copies, *layers], lambda unit: unit, dict.fromkeys(names, 16 << 30))
    assert plan.peak_bytes == 32 << 30
    assert time.process_time() - begun < 2


def test_more_than_the_disk_holds_is_refused_before_anything_is_fetched(tmp_path) -> None:
    large = schedule([frozenset({"f0", "f1"})], lambda unit: unit, {"f0": 10**18, "f1": 10**18})
    with pytest.raises(MoeqError, match=r"up to 2,000,000,000,000,000,000 bytes of source files") as caught:
        require_space(large, tmp_path / "files")
    assert caught.value.code == "resources.disk-full"


def test_what_is_fetched_already_counts_as_room(tmp_path, monkeypatch) -> None:
    plan = schedule([frozenset({"f0", "f1"})], lambda unit: unit, {"f0": 300, "f1": 300})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=400))
    with pytest.raises(MoeqError):
        require_space(plan, tmp_path / "files")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "f0").write_bytes(bytes(300))
    require_space(plan, tmp_path / "files")
    (tmp_path / "files" / "f0").write_bytes(bytes(200))  # which makes just as much as is needed
    require_space(plan, tmp_path / "files")


def test_a_disk_that_fills_up_while_fetching() -> None:
    error = explain(OSError(errno.ENOSPC, "No space left on device"), "org/model", None)
    assert (error.code, error.exit_code) == ("resources.disk-full", ExitCode.RESOURCES)


@given(st.lists(st.frozensets(st.sampled_from(sorted(SIZES)), min_size=1, max_size=4), max_size=25))
def test_steps_are_possible_and_complete(needs: list[frozenset[str]]) -> None:
    plan = schedule(list(enumerate(needs)), lambda unit: unit[1], SIZES)
    held: set[str] = set()
    fetched: list[str] = []
    done: list[tuple[int, frozenset[str]]] = []
    peak = 0
    for step in plan.steps:
        held.update(step.fetch)
        fetched.extend(step.fetch)
        peak = max(peak, 10 * len(held))
        assert all(need <= held for _, need in step.units)
        done.extend(step.units)
        held.difference_update(step.drop)
    assert sorted(done) == sorted(enumerate(needs))
    assert len(fetched) == len(set(fetched)), "no file twice"
    assert set(fetched) == frozenset().union(*needs)
    assert not held
    assert peak == plan.peak_bytes
    assert plan.fetched_bytes == 10 * len(fetched)


class Repository(HubSource):
    """A repository of three files, which a stream of its own fetches and drops."""

    def __init__(self, folder: Path) -> None:
        self.files = tuple(SimpleNamespace(name=f"f{n}", size=10 + n) for n in range(3))  # type: ignore[assignment]
        self.told: list[object] = []
        self.folder = folder

    def stream_into(self, folder: Path, pieces: Path) -> Any:
        self.told.append(("into", folder, pieces))
        return self

    def keep_only(self, names: set[str]) -> None:
        self.told.append(("keep", sorted(names)))

    def fetch(self, name: str) -> None:
        self.told.append(("fetch", name))

    def drop(self, name: str) -> None:
        self.told.append(("drop", name))

    def close(self) -> None:
        self.told.append("close")


def unit(*files: str) -> Any:
    return SimpleNamespace(inputs=frozenset(files))


def test_files_come_before_their_units_and_go_after_them(tmp_path: Path) -> None:
    source, units = Repository(tmp_path), [unit("f0", "f1"), unit("f1"), unit("f0")]
    folder: Any = SimpleNamespace(work=lambda name: tmp_path / name, pieces=tmp_path / "pieces")
    told = source.told
    with streamed(source, folder, told.append) as batches:
        for batch in batches(units):
            told.append([units.index(one) for one in batch])
    assert told == [
        ("into", tmp_path / "source", tmp_path / "pieces"),
        ("keep", ["f0", "f1"]),  # f2 is of an earlier run
        *[Fetching("f0", 10), ("fetch", "f0")],
        *[[2], Fetching("f1", 11), ("fetch", "f1"), [0, 1]],
        *[("drop", "f0"), ("drop", "f1")],
        "close",
    ]


def test_what_was_fetched_stays_where_the_work_ends_early(tmp_path: Path) -> None:
    source = Repository(tmp_path)
    folder: Any = SimpleNamespace(work=lambda name: tmp_path / name, pieces=tmp_path)
    with suppress(KeyboardInterrupt), streamed(source, folder, lambda _: None) as batches:
        next(iter(batches([unit("f2")])))
        raise KeyboardInterrupt
    assert source.told[1:] == [("keep", ["f2"]), ("fetch", "f2")]


def test_a_folder_and_a_cluster_cannot_be_streamed(checkpoints: Path, tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    assert require_streamable(repository) is repository
    local = moeq.open(checkpoints / "gptq-int4-g32-qwen3moe").source
    for source, executor, said, hint in (
        (repository, "ray", "cannot be combined with", "on several machines"),
        (local, "local", "gptq-int4-g32-qwen3moe is on disk already", "leave out "),
    ):
        with pytest.raises(MoeqError, match=said) as caught:
            require_streamable(source, executor)
        assert caught.value.code == "usage.stream-source"
        assert hint in str(caught.value.hint)

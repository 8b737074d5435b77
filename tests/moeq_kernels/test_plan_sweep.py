"""The sweep over plans: its cells, its candidates, and the judgement of plans by its results."""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hopper_layers import name_of
from support.routing import ROUTINGS

from bench.plan_cells import MAX_BYTES, ROUND, cells, layer_of, plan_named
from bench.plan_regret import CELLS, SCHEMA, judged, load, summary, time_of
from bench.plan_sweep import APART, MOST_CALLS, Sweep, copies_and_calls, launches_of
from moeq_kernels.gpu import GPUS

FORMATS = list(dict.fromkeys(ROUND))


def _row(tokens: int = 8, **changes: Any) -> dict[str, Any]:
    row = {"format": "int4", "shape": "random", "experts": 128, "top_k": 8, "hidden": 2048, "intermediate": 768}
    row |= {"tokens": tokens, **changes}
    chosen = name_of(layer_of(row).chosen(tokens))
    return {**row, "chosen": chosen, "plans": {chosen: 20.0, "Queue 8 9 9 1 128 64 3 3 x1/1": 10.0}}


def test_cells_follow_from_the_seed_and_all_formats_come_early() -> None:
    first = list(itertools.islice(cells(FORMATS, 3, 0), 40))
    assert first == list(itertools.islice(cells(FORMATS, 3, 0), 40))
    assert first != list(itertools.islice(cells(FORMATS, 3, 1), 40))
    assert len({layer.format.removesuffix("-silu") for layer, _ in first[:10]}) == len(FORMATS)
    for layer, numbers in first:
        assert len(set(numbers)) == 3
        assert all(1 <= tokens <= 4096 for tokens in numbers)
        assert layer.name != "random" or layer.weight_bytes(layer.shape.experts) <= 1.05 * MAX_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_candidate_can_be_launched_and_has_a_name_of_its_own(fmt: str) -> None:
    kernels = set()
    for layer, numbers in itertools.islice(cells([fmt], 2, 0), 6):
        for tokens in numbers:
            plans = layer.candidates(tokens)
            assert plans[0] == layer.chosen(tokens)
            assert len({name_of(plan) for plan in plans}) == len(plans)
            for plan in plans:
                assert launches_of(layer, tokens, plan)
                kernels.add(name_of(plan).split()[0])
    assert (
        {"Int8Narrow", "Int8Wide"} <= kernels
        if fmt in ("w8a8", "fp8", "fp8-block")
        else {"Queue", "Wide", "Mma"} <= kernels
    )


def test_judging_plans() -> None:
    rows = [_row(), _row(64)]
    found = judged(rows)
    assert [cell.ratio for cell in found] == [2.0, 2.0]
    assert "mean 2.000  within 2 %   0%" in summary(found)
    # Plans are judged for the GPU that they were timed on.
    assert layer_of({**rows[0], "gpu": "H100"}).problem.gpu == GPUS["H100"]
    # The nearest shares of the same kernel stand for a plan that was not timed; another kernel does not.
    plans = {"Narrow 8 x1/1": 5.0, "Narrow 8 x4/1": 3.0}
    assert time_of(plans, "Narrow 8 x3/1") == 3.0
    assert time_of(plans, "Narrow 16 x1/1") is None
    rows[0]["plans"].pop(rows[0]["chosen"])
    assert judged(rows)[0].ratio is None
    assert summary(judged(rows)).endswith("1 not timed")


def test_recorded_cells_name_plans_of_todays_kernels(tmp_path: Path) -> None:
    rows = load()
    head = json.loads(lzma.decompress(CELLS.read_bytes()).partition(b"\n")[0])
    assert head == {"schema": SCHEMA, "cells": len(rows), "about": "described in README.md beside this file"}
    names = {name for row in rows for name in row["plans"]}
    assert [name for name in names if name_of(plan_named(name)) != name] == []
    for row in (row for row in rows if row["plans"]):
        assert row["gpu"] in GPUS
        assert row["routing"] in ROUTINGS
        assert layer_of(row).stored
        assert min(row["plans"].values()) > 0
    for name in ("Nothing 8 x1/1", "Queue 8 3", "streams"):
        with pytest.raises(ValueError, match="no kernel has a plan named"):
            plan_named(name)
    other = tmp_path / "other.jsonl"
    other.write_text('{"schema": "another/1"}\n')
    with pytest.raises(ValueError, match="another/1"):
        load(other)


def test_copies_keep_weights_cold_however_few_a_call_reads() -> None:
    for layer, hit in ((layer_of(_row()), 8), (layer_of(_row()), 128), (layer_of(_row(hidden=8192)), 100)):
        copies, calls = copies_and_calls(layer, hit)
        read, whole = layer.weight_bytes(hit), layer.weight_bytes(layer.shape.experts)
        # Between two readings of a copy the other copies are read; or a call reads little of what there is.
        assert copies * read >= APART or copies * whole >= APART / 0.05 or copies == MOST_CALLS
        assert 2 <= copies <= calls <= MOST_CALLS


def test_a_plan_with_other_numbers_is_not_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = Sweep(argparse.Namespace(out=tmp_path / "sweep.jsonl"))
    truth = torch.randn(4, 64, dtype=torch.bfloat16)
    key = ("int4", "random", 8, 2, 64, 64, 4)
    assert sweep.right(key, "Queue", lambda: truth * 1.01, truth)
    assert not sweep.right(key, "Wide", lambda: truth * 0, truth)
    assert not sweep.right(key, "Narrow", lambda: truth * float("nan"), truth)
    assert sweep.bad == [[*key, "Wide"], [*key, "Narrow"]]
    assert "WRONG int4 random 8 2 64 64 4 Wide differs by 1" in capsys.readouterr().out
    assert sweep.right(key, "Direct", lambda: 1 // 0, truth)  # `time_plan` says why it fails


@pytest.mark.parametrize("gpu", ["H100", "H200"])
@pytest.mark.parametrize("family", ["hopper-w4a16", "hopper-w8a8", "hopper-fp8"])
def test_chosen_plans_take_at_most_two_per_cent_more_than_the_best_recorded_ones(family: str, gpu: str) -> None:
    """In the geometric mean over some of the recorded cells of today's kernels, and at most 1.2 x in any."""
    rows = [row for row in load() if row["routing"] == "uniform" and row["date"] >= "2026-11-24" and row["gpu"] == gpu]
    rows = [row for row in rows if layer_of(row).family == family]
    ratios = [cell.ratio for cell in judged(rows[:: max(1, len(rows) // 60)]) if cell.ratio]
    assert len(ratios) >= 30
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) <= 1.02
    assert max(ratios) <= 1.2

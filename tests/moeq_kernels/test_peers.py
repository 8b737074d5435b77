"""The side-by-side benchmark, as far as it goes without a GPU: inputs, processes, merging, verdicts, pictures."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from bench import hopper_bench, timing, w8a8_bench
from bench.ceilings import H200, READ
from bench.peers import evaluate, shapes
from bench.peers.conduct import Lane, Options, Run, Seat, conduct, jobs, one_cell, warm
from bench.peers.contenders import BY_FORMAT, CONTENDERS
from bench.peers.contenders.ours import Ours
from bench.peers.evaluate import TARGETS, judge, merge, scores, time_of
from bench.peers.problem import Stack, make_problem, route, truth
from bench.peers.report import markdown, picture
from bench.peers.shapes import FORMATS, GROUPS, Group, Shape, floor
from bench.reference import Layer, moe
from bench.routing import ROUTINGS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape whose sizes are no multiple of a group, as gpt-oss has them, and one of whole blocks."""
    monkeypatch.setitem(shapes.SHAPES, "tiny", Shape(4, 2, 192, 64))
    monkeypatch.setitem(shapes.SHAPES, "tiny-blocks", Shape(4, 2, 256, 128))


def tiny_group(name: str) -> Group:
    return Group(name, "tiny" if FORMATS[name].block_rows == 1 else "tiny-blocks")


class TestInputs:
    @pytest.mark.parametrize("name", list(FORMATS))
    def test_rounding_sizes_up_changes_no_result(self, name: str, tiny: None) -> None:
        problem = make_problem(tiny_group(name), "cpu")
        hidden, intermediate = problem.shape.hidden, problem.shape.intermediate
        step = 128 if problem.format.block_rows > 1 else 64
        w13, w2 = problem.padded(hidden + step, intermediate + step)
        assert w13.codes.shape == (4, 2 * (intermediate + step), hidden + step)
        assert w2.codes.shape == (4, hidden + step, intermediate + step)
        small, routed = truth(problem, 5), route(problem, 5, 0)
        fmt = problem.format
        biases = [None if part.bias is None else part.bias.float() for part in (w13, w2)]
        layer = Layer(Stack(w13, fmt), Stack(w2, fmt), *biases, fmt.order, fmt.activation, limit=fmt.limit)  # type: ignore[arg-type]
        large = moe(torch.nn.functional.pad(routed.x, (0, step)), layer, routed.weights, routed.ids)
        assert torch.allclose(large[:, :hidden], small.y, atol=1e-5)

    @pytest.mark.parametrize("name", list(FORMATS))
    def test_weights_have_the_size_that_keeps_activations_as_they_are(self, name: str, tiny: None) -> None:
        """About 1 / sqrt(k), no NaN, and scales in the range that every peer reads."""
        problem = make_problem(tiny_group(name), "cpu")
        for part in (problem.w13, problem.w2):
            values = torch.stack([Stack(part, problem.format)[expert] for expert in range(4)])
            assert bool(values.isfinite().all())
            assert 0.3 < float(values.std() * part.codes.shape[2] ** 0.5) < 3
            if problem.format.element == "e4m3":
                assert torch.equal(part.scales, part.scales.bfloat16().float())
                assert part.blocks(problem.format.block_rows).shape[1] * problem.format.block_rows == values.shape[1]

    @pytest.mark.parametrize("name", list(FORMATS))
    def test_our_packing_gives_the_numbers_of_the_reference(self, name: str, tiny: None) -> None:
        """In Triton's interpreter; what the benchmark checks on a GPU before it times anything."""
        problem = make_problem(tiny_group(name), "cpu")
        found, ours = truth(problem, 6), Ours()
        weights = ours.prepare(problem)
        y = ours.run(ours.duplicate(weights), ours.inputs(weights, route(problem, 6, 0)))
        assert found.hit == route(problem, 6, 0).ids.unique().numel()
        assert found.error(y) <= ours.factor * found.plain_error
        assert found.error(torch.full_like(y, float("nan"))) == float("inf")
        assert "portable" in ours.about(weights, route(problem, 6, 0))

    def test_activations_of_8_bits_have_their_own_tolerance(self, tiny: None) -> None:
        """Weights by the same rule; only what tokens are rounded to differs."""
        errors = {n: truth(make_problem(tiny_group(n), "cpu"), 6).plain_error for n in ("fp8", "fp8-w8a8")}
        assert errors["fp8-w8a8"] > 5 * errors["fp8"]

    def test_every_process_makes_the_same_numbers(self, tiny: None) -> None:
        one, two = (make_problem(Group("int4", "tiny"), "cpu") for _ in range(2))
        assert torch.equal(one.w13.codes, two.w13.codes)
        assert torch.equal(route(one, 9, 3).ids, route(two, 9, 3).ids)

    def test_routing_is_as_skewed_as_asked_for(self, tiny: None) -> None:
        def chosen(routing: str) -> torch.Tensor:
            problem = make_problem(tiny_group("int4"), device="cpu", routing=routing)
            ids = route(problem, 400, 0).ids
            assert ids.dtype == torch.int32
            assert (ids.sort(1).values.diff(dim=1) > 0).all()
            return ids.flatten().long().bincount(minlength=problem.shape.experts)

        uniform, zipf, same = (chosen(routing) for routing in ROUTINGS)
        assert uniform.max() < 1.5 * uniform.min()
        assert zipf[0] > 1.5 * uniform[0]
        assert zipf[-1] < 0.75 * uniform[-1]
        assert sorted(same.unique().tolist()) == [0, 400]

    def test_floor_is_bytes_at_few_tokens_and_arithmetic_at_many(self) -> None:
        few = floor(FORMATS["int4"], shapes.SHAPES["mixtral-8x7b"], 1, 2)
        many = floor(FORMATS["int4"], shapes.SHAPES["mixtral-8x7b"], 4096, 8)
        assert few.time == few.memory == pytest.approx(41.3, abs=0.1)
        assert many.time == many.compute == pytest.approx(3653, abs=1)

    def test_another_gpu_reads_at_another_rate(self) -> None:
        shape = shapes.SHAPES["mixtral-8x7b"]
        h200, h100 = (floor(FORMATS["int4"], shape, 64, 8, rate) for rate in READ.values())
        assert h100.memory / h200.memory == pytest.approx(READ[H200] / READ["NVIDIA H100 80GB HBM3"])
        assert h100.compute == h200.compute
        assert Lane({}, peak={"floor_read_tbs": 3.0}).read == 3e12
        assert Lane({}).read == READ[H200]

    @pytest.mark.parametrize(
        ("name", "memory", "compute"),
        [("nvfp4", 45.0, 3653), ("fp8", 80.1, 3653), ("fp8-w8a8", 80.1, 1827), ("fp8-block-w8a8", 80.1, 1827)],
    )
    def test_floors_of_small_floats(self, name: str, memory: float, compute: float) -> None:
        shape = shapes.SHAPES["mixtral-8x7b"]
        assert floor(FORMATS[name], shape, 1, 2).memory == pytest.approx(memory, abs=0.1)
        assert floor(FORMATS[name], shape, 4096, 8).compute == pytest.approx(compute, abs=1)

    def test_floors_agree_with_those_of_the_other_benchmarks(self) -> None:
        """Where rows are quantised the activations in the middle are bytes."""
        shape, other = shapes.SHAPES["deepseek-v2-lite"], timing.Shape(64, 6, 2048, 1408)
        for name, found in (
            ("int4", hopper_bench.floor_us(other, hopper_bench.FORMATS["int4"], 1024, 64)),
            ("w8a8", w8a8_bench.floor_us(other, 1024, 64, "int8")),
            ("fp8-w8a8", w8a8_bench.floor_us(other, 1024, 64, "fp8")),
            ("mxfp4-fp8", w8a8_bench.floor_us(other, 1024, 64, "mxfp4")),
        ):
            assert floor(FORMATS[name], shape, 1024, 64).time == pytest.approx(found, rel=0.003), name

    def test_groups_name_what_exists(self) -> None:
        assert all(group.format in FORMATS and group.shape in shapes.SHAPES for group in GROUPS)
        assert len(set(GROUPS)) == len(GROUPS)
        assert {name for names in BY_FORMAT.values() for name in names} == set(CONTENDERS)
        assert set(BY_FORMAT) == set(FORMATS) == {group.format for group in GROUPS}

    def test_a_run_that_is_cut_off_has_every_layer_in_the_first_formats(self) -> None:
        layers = [*shapes.KNOWN, *shapes.HELD_OUT]
        first = GROUPS[: 3 * len(layers)]
        assert len(layers) == 11
        assert {(group.format, group.shape) for group in first} == {
            (name, shape) for name in ("int4", "mxfp4", "w8a8") for shape in layers
        }
        second = GROUPS[len(first) :]
        assert [group.shape for group in second if group.format == "nvfp4"] == layers
        blocks = {group.shape for group in second if group.format == "fp8-block"}
        assert set(layers) - blocks == {"gpt-oss-20b", "gpt-oss-120b"}  # 2880 is no multiple of 128


class TestWarmingUp:
    def test_jobs_cover_every_call_once(self) -> None:
        groups = [Group("int4", "mixtral-8x7b"), Group("w8a8", "mixtral-8x7b")]
        options = Options(1.0, (1, 8, 128), skip=frozenset({("int4", "humming")}))
        work = jobs(groups, ["moeq", "marlin", "humming"], options)
        calls = [(job.name, group, count) for job in work for group in job.groups for count in job.tokens]
        assert len(calls) == len(set(calls))
        assert {name for name, *_ in calls} == {"moeq", "marlin", "humming"}
        assert sum(name == "marlin" for name, *_ in calls) == 3  # Marlin does not know W8A8
        assert sum(name == "moeq" for name, *_ in calls) == 6
        assert {group.format for name, group, _ in calls if name == "humming"} == {"w8a8"}

    def test_those_that_compile_much_have_a_job_for_each_group(self) -> None:
        groups = [Group(name, "mixtral-8x7b") for name in ("int4", "nvfp4", "fp8-block-w8a8")]
        work = jobs(groups, ["marlin", "humming", "deep_gemm"], Options(1.0, (1, 8)))
        assert sorted((job.name, len(job.groups)) for job in work) == [
            ("deep_gemm", 1),
            *[("humming", 1)] * 3,
            ("marlin", 2),
        ]

    def test_failures_are_told_and_absent_peers_are_not(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setenv("PYTHONPATH", str(ROOT / "kernels"))
        work = jobs([Group("int4", "qwen3-30b-a3b")], ["moeq", "marlin"], Options(1.0, (1,)))
        failed = warm(work, 2, 60.0, tmp_path / "log")
        assert len(failed) == 1
        assert failed[0].startswith("moeq int4 qwen3-30b-a3b: ")


class TestProcesses:
    """Real contenders' processes. Without a GPU ours fails in words, and peers that are not installed are absent."""

    @pytest.fixture(autouse=True)
    def no_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setenv("PYTHONPATH", str(ROOT / "kernels"))

    @pytest.mark.slow
    def test_a_run_without_gpu_says_what_failed_and_what_is_absent(self, tmp_path: Path) -> None:
        lane = Lane({name: Seat(name, tmp_path / "log") for name in ("moeq", "marlin")})
        saved: list[int] = []
        run = Run(Options(60.0, (1, 8), rounds=1), [lane], lambda found: saved.append(len(found.cells)))
        conduct([Group("int4", "qwen3-30b-a3b"), Group("w8a8", "qwen3-30b-a3b")], run)
        assert saved == [2, 4]
        rows = run.cells[0]["contenders"]
        assert rows["moeq"]["status"] == "failed"
        assert "NVIDIA" in rows["moeq"]["reason"] or "CUDA" in rows["moeq"]["reason"]
        absent = rows["marlin"]
        assert absent["status"] == "absent"
        assert "vllm" in absent["reason"].lower()
        assert "marlin" not in run.cells[2]["contenders"]  # it does not know W8A8

    @pytest.mark.slow
    def test_gpus_share_the_groups(self, tmp_path: Path) -> None:
        """Every group once; a lane's processes see its GPU only."""
        lanes = [Lane({"moeq": Seat("moeq", tmp_path / "log", gpu)}, gpu) for gpu in ("none-a", "none-b")]
        run = Run(Options(60.0, (1,), rounds=1), lanes, lambda found: None)
        groups = [Group("int4", "qwen3-30b-a3b"), Group("w8a8", "qwen3-30b-a3b"), Group("mxfp4", "qwen3-30b-a3b")]
        conduct(groups, run)
        assert sorted(row["format"] for row in run.cells) == ["int4", "mxfp4", "w8a8"]
        assert {row["gpu"] for row in run.cells} <= {"none-a", "none-b"}
        assert run.left_out == []

    def test_no_time_is_said(self, tmp_path: Path) -> None:
        run = Run(Options(0.0, (1, 8)), [Lane({"moeq": Seat("moeq", None)})], lambda found: None)
        conduct([Group("int4", "qwen3-30b-a3b")], run)
        assert run.cells == []
        assert run.left_out == [{"format": "int4", "shape": "qwen3-30b-a3b", "tokens": [1, 8], "reason": "time"}]

    def test_a_process_that_dies_loses_its_group_only(self, tmp_path: Path) -> None:
        seat = Seat("moeq", tmp_path / "log")
        seat.start()
        assert seat.gone is None
        assert "torch" in seat.versions
        seat.process.kill()
        assert "ended" in seat.order("close")["failed"]
        assert "ended" in (seat.gone or "")
        seat.start()
        assert seat.gone is None
        seat.stop()

    def test_a_process_that_does_not_answer_is_ended(self, tmp_path: Path) -> None:
        seat = Seat("moeq", tmp_path / "log", patience=0.0)
        seat.start()
        assert seat.order("open", format="int4", shape="qwen3-30b-a3b") == {"failed": "no answer in 0 s"}
        assert seat.process.wait(timeout=60) != 0
        assert seat.order("close") == {"failed": "no answer in 0 s"}
        seat.patience = 60.0
        seat.start()
        assert "ok" in seat.order("close")
        seat.stop()


class Pretended(Seat):
    """A contender without a process, which fails for good at one order."""

    def __init__(self, name: str, fails_at: str = "", after: int = 0) -> None:
        super().__init__(name, None)
        self.gone, self.fails_at, self.after = None, fails_at, after

    def order(self, do: str, **given: Any) -> dict[str, Any]:
        if self.gone is None and do == self.fails_at:
            self.after -= 1
            if self.after < 0:
                self.gone = "its process ended (code -11)"
        if self.gone is not None:
            return {"failed": self.gone}
        answers: dict[str, dict[str, Any]] = {
            "open": {},
            "check": {"right": True, "hit": 8},
            "capture": {"copies": 2, "hit": 8.0},
            "time": {"median": 100.0, "least": 99.0, "replays": 7},
        }
        return {"ok": answers[do]}


class TestOneFails:
    @pytest.mark.parametrize(
        ("fails_at", "after"), [("open", 0), ("check", 0), ("capture", 0), ("time", 0), ("time", 2)]
    )
    def test_the_others_keep_their_figures(self, fails_at: str, after: int) -> None:
        seats: list[Seat] = [Pretended("moeq"), Pretended("marlin", fails_at, after), Pretended("humming")]
        group = Group("nvfp4", "qwen3-next-80b")
        opened = {seat.name: seat.order("open") for seat in seats}
        found = one_cell(group, 8, seats, opened, Options(1.0, (8,)))["contenders"]
        assert found["marlin"]["status"] == "failed"
        assert found["marlin"]["reason"]
        for name in ("moeq", "humming"):
            assert found[name]["status"] == "right"
            assert found[name]["cold"]["us"] == found[name]["hot"]["us"] == 100.0
        again = one_cell(group, 1, seats, opened, Options(1.0, (1,)))["contenders"]
        assert time_of({"contenders": again}, "humming") == 100.0


def cell(fmt: str, shape: str, tokens: int, **times: float) -> dict[str, Any]:
    least = floor(FORMATS[fmt], shapes.SHAPES[shape], tokens, min(shapes.SHAPES[shape].experts, tokens * 2))
    rows: dict[str, Any] = {
        name.replace("_", "-"): {"status": "right", "cold": {"us": value}, "hot": {"us": 0.9 * value}}
        for name, value in times.items()
    }
    return {
        "format": fmt,
        "shape": shape,
        "tokens": tokens,
        "hit": 1,
        "floor_us": least.time,
        "memory_floor_us": least.memory,
        "compute_floor_us": least.compute,
        "peak_tflops": 800.0,
        "contenders": rows,
    }


def document(*cells: dict[str, Any]) -> dict[str, Any]:
    return {"device": "a GPU", "date": "2026-11-21", "cells": list(cells)}


def verdict(wanted: str, run: dict[str, Any], regime: str = "int4") -> evaluate.Verdict:
    return judge(
        next(target for target in TARGETS if target.wanted == wanted and target.regime.startswith(regime)), run
    )


class TestVerdicts:
    def test_every_cell(self) -> None:
        good = cell("int4", "mixtral-8x7b", 8, moeq=100, marlin=150, humming=120)
        bad = cell("int4", "mixtral-8x7b", 16, moeq=100, marlin=90, humming=130)
        target = "must: faster than Marlin in every cell"
        assert verdict(target, document(good)).reached is True
        found = verdict(target, document(good, bad))
        assert found.reached is False
        assert [miss.where for miss in found.misses] == ["int4 mixtral-8x7b M=16"]
        assert found.misses[0].value == pytest.approx(0.9)

    def test_a_share_of_the_cells(self) -> None:
        cells = [cell("int4", "mixtral-8x7b", 2**n, moeq=100, humming=90 if n == 0 else 110) for n in range(10)]
        assert verdict("must: faster than Humming in 90 % of the cells", document(*cells)).reached is True
        assert verdict("must: faster than Humming in 90 % of the cells", document(*cells[:9])).reached is False

    def test_geometric_mean(self) -> None:
        cells = [cell("int4", "mixtral-8x7b", n, moeq=100, humming=h) for n, h in ((1, 100), (8, 400))]
        found = verdict("aim: 1.4 x Humming in the geometric mean", document(*cells))
        assert found.reached is True
        assert "2.00" in found.said

    def test_peers_that_were_wrong_or_absent_do_not_count(self) -> None:
        one = cell("int4", "mixtral-8x7b", 8, moeq=100, marlin=50)
        one["contenders"]["marlin"]["status"] = "wrong"
        found = verdict("must: faster than Marlin in every cell", document(one))
        assert found.reached is None
        assert time_of(one, "marlin") is None

    def test_shares_of_floors_and_peaks(self) -> None:
        decode = cell("int4", "mixtral-8x7b", 16, moeq=200)
        assert verdict("must: 70 % of the byte floor", document(decode)).reached is True
        slow = cell("int4", "mixtral-8x7b", 16, moeq=250)
        assert verdict("must: 70 % of the byte floor", document(slow)).reached is False
        prefill = cell("int4", "mixtral-8x7b", 4096, moeq=3653 * 790 / 800 / 0.75)
        assert verdict("must: 70 % of the bf16 peak", document(prefill)).reached is True
        assert verdict("aim: 78 % of the bf16 peak", document(prefill)).reached is False
        assert verdict("must: 70 % of the bf16 peak", document({**prefill, "peak_tflops": None})).reached is None

    def test_both_ways_into_triton_kernels_count_as_one_peer(self) -> None:
        one = cell("mxfp4", "gpt-oss-20b", 8, moeq=100, triton_kernels_own_routing=90)
        one["contenders"]["triton_kernels"] = {"status": "right", "cold": {"us": 120.0}}
        one["contenders"]["triton_kernels-own-routing"] = one["contenders"].pop("triton-kernels-own-routing")
        found = verdict("must: faster than triton_kernels in 90 %", document(one), "MXFP4")
        assert found.misses[0].value == pytest.approx(0.9)

    def test_the_grid_has_known_and_held_out_layers_and_no_others(self) -> None:
        bad = [cell("mxfp4", shape, 8, moeq=100, humming=90) for shape in ("kimi-k2-tp8", "gpt-oss-20b")]
        other = cell("mxfp4", "mixtral-8x7b-tp8", 8, moeq=100, humming=50)
        found = verdict("must: faster than the best peer in 95 %", document(*bad, other), "MXFP4")
        assert found.reached is False
        assert {miss.where for miss in found.misses} == {"mxfp4 kimi-k2-tp8 M=8", "mxfp4 gpt-oss-20b M=8"}

    def test_the_best_peer_may_be_any(self) -> None:
        one = cell("fp8-block-w8a8", "kimi-k2-tp8", 8, moeq=100, humming=150, vllm_triton=140)
        one["contenders"]["deep_gemm"] = {"status": "right", "cold": {"us": 80.0}}
        found = verdict("aim: faster than the best peer in every cell", document(one), "NVFP4")
        assert [round(miss.value, 2) for miss in found.misses] == [0.8]

    @pytest.mark.parametrize(
        ("fmt", "regime", "wanted", "least"),
        [
            ("int4", "int4, known", "must: 1.35 x Humming in the geometric mean", 1.35),
            ("mxfp4", "MXFP4", "must: 1.25 x the best peer in the geometric mean", 1.25),
            ("w8a8", "W8A8", "must: 1.15 x the best peer in the geometric mean", 1.15),
        ],
    )
    def test_means_over_the_grid(self, fmt: str, regime: str, wanted: str, least: float) -> None:
        for factor in (0.99, 1.01):
            one = cell(fmt, "phi-3.5-moe", 8, moeq=100, humming=100 * least * factor)
            assert verdict(wanted, document(one), regime).reached is (factor > 1)

    def test_four_of_five_decode_cells_are_enough(self) -> None:
        target = "must: 70 % of the byte floor in 80 %"
        good = [cell("w8a8", "phi-3.5-moe", 2**n, moeq=1) for n in range(3, 7)]
        for row in good:
            row["contenders"]["moeq"]["cold"]["us"] = row["memory_floor_us"] / 0.75
        bad = cell("mxfp4", "phi-3.5-moe", 8, moeq=1e6)
        assert verdict(target, document(*good, bad), "decode").reached is True
        assert verdict(target, document(*good[:3], bad), "decode").reached is False
        prefill = cell("w8a8", "deepseek-v3-tp8", 4096, moeq=1e6)  # bytes take longer than products here
        assert prefill["memory_floor_us"] > prefill["compute_floor_us"]
        assert verdict(target, document(*good, prefill), "decode").cells == 4

    @pytest.mark.parametrize("status", ["failed", "wrong"])
    def test_a_cell_that_only_peers_have_is_lost(self, status: str) -> None:
        good = cell("int4", "mixtral-8x7b", 8, moeq=100, marlin=150, humming=300)
        ours = cell("int4", "mixtral-8x7b", 4096, marlin=150, humming=300)
        ours["contenders"]["moeq"] = {"status": status}
        for wanted in (
            "must: faster than Marlin in every cell",
            "must: faster than Humming in 90 % of the cells",
            "aim: 1.4 x Humming in the geometric mean",
        ):
            assert verdict(wanted, document(good)).reached is True
            assert verdict(wanted, document(good, ours)).reached is False
        assert verdict("must: 70 % of the bf16 peak", document(ours), "int4 prefill").reached is False
        good["contenders"]["moeq"] = {"status": status}
        assert verdict("must: 70 % of the byte floor in 80 %", document(good), "decode").reached is False
        good = cell("int4", "mixtral-8x7b", 8, moeq=100, marlin=150, humming=300)
        found = {score.peer: score for score in scores(document(good, ours))}
        assert (found["marlin"].cells, found["marlin"].won) == (2, 1)
        assert found["marlin"].mean == pytest.approx(1.5)
        assert scores(document(ours))[0].won == 0

    def test_without_us_nothing_is_lost(self) -> None:
        run = document(cell("int4", "mixtral-8x7b", 8, marlin=150))
        assert verdict("must: faster than Marlin in every cell", run).reached is None
        run["cells"][0]["contenders"]["moeq"] = {"status": "absent", "reason": "no triton"}
        assert verdict("must: faster than Marlin in every cell", run).reached is None

    def test_scores_name_every_peer_and_the_best(self) -> None:
        cells = [cell("w8a8", "mixtral-8x7b", n, moeq=100, humming=110, vllm_triton=200) for n in (1, 8)]
        found = {score.peer: score for score in scores(document(*cells))}
        assert found["humming"].won == 2
        assert found["vllm-triton"].mean == pytest.approx(2.0)
        assert found["best peer"].mean == pytest.approx(1.1)


class TestMerging:
    def test_a_cell_is_never_mixed(self) -> None:
        """A later run with fewer contenders does not replace a cell, nor lend it a time."""
        first = document(cell("int4", "mixtral-8x7b", 8, moeq=100, marlin=150))
        later = document(
            cell("int4", "mixtral-8x7b", 8, moeq=80), cell("int4", "mixtral-8x7b", 16, moeq=90, marlin=160)
        )
        merged = merge([first, later])
        assert [(row["tokens"], row["run"], time_of(row, "moeq")) for row in merged["cells"]] == [
            (8, 0, 100),
            (16, 1, 90),
        ]
        assert "not across cells" in merged["side_by_side"]
        assert merge([first])["side_by_side"] == "one run"

    def test_a_run_before_does_not_hide_that_we_failed(self) -> None:
        right = document(cell("int4", "mixtral-8x7b", 8, moeq=100, marlin=150))
        wrong = document(cell("int4", "mixtral-8x7b", 8, marlin=150))
        wrong["cells"][0]["contenders"]["moeq"] = {"status": "wrong"}
        assert [time_of(row, "moeq") for row in merge([right, wrong])["cells"]] == [None]
        assert [time_of(row, "moeq") for row in merge([wrong, right])["cells"]] == [100]
        mended = document(cell("int4", "mixtral-8x7b", 8, moeq=90))
        assert [time_of(row, "moeq") for row in merge([right, wrong, mended])["cells"]] == [90]

    def test_different_routing_is_refused(self) -> None:
        with pytest.raises(ValueError, match="uniform, zipf"):
            merge([document(), {**document(), "routing": "zipf"}])

    def test_different_gpus_are_refused(self) -> None:
        with pytest.raises(ValueError, match="different GPUs"):
            merge([document(), {**document(), "device": "another"}])


class TestReport:
    def run(self) -> dict[str, Any]:
        cells = [cell("int4", "mixtral-8x7b", n, moeq=200.0 + n, marlin=300.0 + n) for n in (1, 8, 128)]
        failed = copy.deepcopy(cells[0]) | {"tokens": 2}
        failed["contenders"]["marlin"] = {"status": "failed", "reason": "a <reason>"}
        return document(*cells, failed)

    def test_tables_show_times_and_what_was_not_timed(self) -> None:
        text = markdown(self.run())
        assert "| mixtral-8x7b | 8 |" in text
        assert "| failed |" in text
        assert text.count("| must: ") + text.count("| aim: ") == len(TARGETS)

    def test_the_picture_is_well_formed_and_holds_a_point_for_every_time(self) -> None:
        tree = ElementTree.fromstring(picture(self.run()))
        dots = [element for element in tree.iter() if element.tag.endswith("circle")]
        assert len(dots) == 4 + 3

    def test_the_command_writes_both(self, tmp_path: Path) -> None:
        source = tmp_path / "run.json"
        source.write_text(json.dumps(self.run()))
        command = [sys.executable, "-m", "bench.peers", "report", str(source), "--out", str(tmp_path / "out")]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "kernels")}
        subprocess.run(command, check=True, env=environment, capture_output=True)
        assert {path.name for path in (tmp_path / "out").iterdir()} == {"peers.json", "peers.md", "peers.svg"}

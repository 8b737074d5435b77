"""The side-by-side benchmark, as far as it goes without a GPU: inputs, processes, what one failure leaves."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import cases
from support.reference import Layer, moe
from support.routing import ROUTINGS

from bench import shapes
from bench.peers.conduct import Lane, Options, Run, Seat, conduct, jobs, one_cell, one_group, warm
from bench.peers.contenders import BY_FORMAT, CONTENDERS, ours, vllm_marlin
from bench.peers.contenders.ours import Ours, quantised
from bench.peers.contenders.vllm_marlin import marlin_words
from bench.peers.evaluate import time_of
from bench.peers.problem import Codes, Stack, make_problem, route, truth
from bench.shapes import FORMATS, GROUPS, H200, READ, Group, Shape, floor
from bench.timing import gpu_works

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

    @pytest.mark.cover(every=6)
    @pytest.mark.parametrize("name", list(FORMATS))
    def test_our_packing_gives_the_numbers_of_the_reference(self, name: str, tiny: None) -> None:
        """In Triton's interpreter; what the benchmark checks on a GPU before it times anything."""
        problem = make_problem(tiny_group(name), "cpu")
        found, contender = truth(problem, 6), Ours()
        weights = contender.prepare(problem)
        y = contender.run(contender.duplicate(weights), contender.inputs(weights, route(problem, 6, 0)))
        assert found.hit == route(problem, 6, 0).ids.unique().numel()
        assert found.error(y) <= contender.factor * found.plain_error
        assert found.error(torch.full_like(y, float("nan"))) == float("inf")
        assert "portable" in contender.about(weights, route(problem, 6, 0))

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


#: Golden bytes of the engine's own Marlin preparation: file, case, format of the benchmark, codes that share a scale.
MARLIN_GOLDEN = [
    ("marlin", "ct4_g32_bf16_bias", "int4", 32),
    ("marlin", "mxfp4_bf16", "mxfp4-silu", 32),
    ("marlin", "mxfp4_bf16", "mxfp4", 32),
    ("marlin_float", "fp8_block", "fp8-block", 128),
]


class TestContendersBytes:
    """Marlin and we are packed here; every other peer packs its weights itself."""

    @pytest.mark.parametrize(("file", "case", "name", "group"), MARLIN_GOLDEN)
    @pytest.mark.parametrize("matrix", ["13", "2"])
    def test_marlin_gets_the_words_that_the_engine_packs(
        self, file: str, case: str, name: str, group: int, matrix: str
    ) -> None:
        golden = load_file(ROOT / "tests" / "data" / "golden" / f"{file}.safetensors")
        given = {kind: golden.get(f"{case}.in.{kind}{matrix}") for kind in ("q", "w", "s", "b")}
        wanted = {kind: golden.get(f"{case}.out.{kind}{matrix}") for kind in ("w", "s", "b")}
        fmt = replace(FORMATS[name], group_size=group)
        codes = given["q"] if given["q"] is not None else given["w"]
        if given["q"] is None and fmt.element == "e2m1":
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
        scales = given["s"].repeat_interleave(fmt.block_rows, 1)
        part = Codes(codes, scales.bfloat16() if fmt.element == "e4m3" else scales, given["b"])
        found = marlin_words(part, name, fmt)
        assert torch.equal(found.weight, wanted["w"])
        assert found.scale is not None
        assert torch.equal(found.scale.view(wanted["s"].dtype), wanted["s"])
        if wanted["b"] is not None:
            assert torch.equal(found.bias, wanted["b"])

    @pytest.mark.parametrize("case", ["nvfp4_full", "nvfp4_small"])
    @pytest.mark.parametrize("matrix", ["13", "2"])
    def test_marlins_nvfp4_words_are_the_engines_and_its_scales_mean_the_same(self, case: str, matrix: str) -> None:
        """The engine moves a power of two from scales to the global one: 8 steps of a byte are a factor of 2."""
        golden = load_file(ROOT / "tests" / "data" / "golden" / "marlin_float.safetensors")
        words, scales, whole = (golden[f"{case}.in.{kind}{matrix}"] for kind in ("w", "s", "gs"))
        part = Codes(torch.stack([words & 15, words >> 4], -1).flatten(-2), scales, None, whole)
        found = marlin_words(part, "nvfp4", FORMATS["nvfp4"])
        assert torch.equal(found.weight, golden[f"{case}.out.w{matrix}"])
        assert found.scale is not None
        assert found.global_scale is not None
        steps = 8 * torch.log2(golden[f"{case}.out.gs{matrix}"] / found.global_scale.flatten()).round().int()
        mine, theirs = (one.view(torch.uint8).int() for one in (found.scale, golden[f"{case}.out.s{matrix}"]))
        inner = (theirs > 0) & (mine > 0) & (mine < 248)  # the largest and the smallest are cut off
        assert inner.float().mean() > 0.85
        assert torch.equal((mine - theirs)[inner], steps[:, None, None].expand_as(mine)[inner])

    def test_no_contender_reads_another_ones_order(self) -> None:
        assert ours.LAYOUTS["mxfp4"] == ours.LAYOUTS["mxfp4-silu"] == "moeq-mxfp4/1"
        assert set(vllm_marlin.LAYOUTS) == {name for name, known in BY_FORMAT.items() if "marlin" in known}
        assert all(layout.startswith("marlin-") for layout in vllm_marlin.LAYOUTS.values())
        words = torch.randint(0, 16, (2, 128, 64), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
        part = Codes(words, torch.full((2, 128, 2), 120, dtype=torch.uint8), None)
        matrix = marlin_words(part, "mxfp4", FORMATS["mxfp4"])
        other = cases.pack("moeq-mxfp4/1", "e2m1", quantised(part, FORMATS["mxfp4"]))
        assert not torch.equal(matrix.weight, other.weight)


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

    @pytest.mark.slow
    def test_failures_are_told_and_absent_peers_are_not(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        work = jobs([Group("int4", "qwen3-30b-a3b")], ["moeq", "marlin"], Options(1.0, (1,)))
        failed = warm(work, 2, 60.0, tmp_path / "log")
        assert len(failed) == 1
        assert failed[0].startswith("moeq int4 qwen3-30b-a3b: ")


@pytest.mark.slow
class TestProcesses:
    """Real contenders' processes. Without a GPU ours fails in words, and peers that are not installed are absent."""

    @pytest.fixture(autouse=True)
    def no_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))

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


def test_a_process_that_says_it_ends_has_ended_when_its_answer_is_there() -> None:
    seat = Seat("moeq", None)
    seat.gone, seat.lines = None, queue.Queue()
    seat.process = subprocess.Popen(
        [sys.executable, "-S", "-c", "raise SystemExit(1)"], stdin=subprocess.PIPE, text=True
    )
    seat.lines.put('{"failed": "RuntimeError: tactic 3: illegal access", "ends": true}')
    assert seat.order("check", tokens=1)["failed"] == "RuntimeError: tactic 3: illegal access"
    assert (seat.ended, seat.gone) == (
        True, "its process ended (code 1) after: RuntimeError: tactic 3: illegal access"
    )  # fmt: skip


def test_a_gpu_works_until_a_kernel_fails_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def failed() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", failed)
    assert not gpu_works()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert gpu_works()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", failed)
    assert gpu_works(), "no GPU has failed where none was used"


class Pretended(Seat):
    """A contender without a process, which fails for good at one order."""

    def __init__(self, name: str, fails_at: str = "", after: int = 0) -> None:
        super().__init__(name, None)
        self.gone, self.fails_at, self.after, self.silent = None, fails_at, after, False

    def start(self) -> None:
        if self.ended:
            self.gone, self.ended, self.fails_at = None, False, ""

    def order(self, do: str, **given: Any) -> dict[str, Any]:
        if self.gone is None and do == self.fails_at:
            self.after -= 1
            if self.after < 0:
                self.gone, self.ended = "its process ended (code -11)", not self.silent
        if self.gone is not None:
            return {"failed": self.gone}
        answers: dict[str, dict[str, Any]] = {
            "open": {},
            "close": {},
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

    @pytest.mark.parametrize("silent", [False, True])
    def test_another_process_takes_the_next_cell(self, silent: bool) -> None:
        """One that does not answer would cost as many seconds again."""
        marlin = Pretended("marlin", "check", 1)
        marlin.silent = silent
        run = Run(Options(60.0, (4, 2, 1)), [Lane({"moeq": Pretended("moeq"), "marlin": marlin})], lambda found: None)
        one_group(Group("nvfp4", "qwen3-next-80b"), run.lanes[0], run, time.monotonic() + 60)
        said = [cell["contenders"]["marlin"] for cell in run.cells]
        assert [row["status"] for row in said] == ["right", "failed", "failed" if silent else "right"]
        assert said[1]["reason"] == "its process ended (code -11)"

    def test_a_replay_that_fails_says_why(self) -> None:
        seat = Pretended("marlin", "time", 1)
        group = Group("nvfp4", "qwen3-next-80b")
        row = one_cell(group, 8, [seat], {"marlin": seat.order("open")}, Options(1.0, (8,)))["contenders"]["marlin"]
        assert (row["status"], row["reason"]) == ("failed", "a replay failed: its process ended (code -11)")

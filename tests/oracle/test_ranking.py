"""Ranking by measured times: what it rests on, what it names, and what it refuses to rank."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from importlib.resources import files

import pytest
from oracle.asking import gpu
from oracle.examples import CHECKPOINTS, GPT_OSS, SHAPE, scheme

import measured_times
import moeq
from moeq.deploy.deployment import Deployment
from moeq.oracle import ranking
from moeq.oracle.engines.moeq import is_fastest
from moeq.oracle.judge import judge
from moeq.oracle.ranking import Ranking
from moeq.oracle.records import MoeShape
from moeq.schemes.base import Scheme

INT4 = "ct-int4-g128-qwen3moe"


def ranked(
    where: Deployment, folder: str = INT4, shape: MoeShape = SHAPE, own: str | None = "marlin-wna16/1"
) -> Ranking:
    encoded = moeq.open(CHECKPOINTS / folder).scheme_of(0)
    return ranking.rank(judge(encoded, shape, where), encoded, own)


def test_the_errors_are_those_of_layers_that_are_left_out() -> None:
    stated = json.loads(files("moeq.oracle").joinpath("measured_times.json").read_text())["tables"]
    for row in stated:
        again = json.loads(json.dumps(row))
        for backend in again["backends"]:
            backend["median"] = backend["p90"] = 0
        measured_times.validate(again)
        assert again == row


def test_times_are_those_of_the_current_results() -> None:
    document = json.loads((measured_times.ROOT / measured_times.RESULTS / "h100-peers.json").read_text())
    table = ranking.tables()["H100", "int4"]
    own = next(row for row in table.backends if row.backend == "MOEQ")
    cells = [cell for cell in document["cells"] if cell["format"] == "int4"]
    assert len(cells) > 70
    for cell in cells:
        assert own.cells[cell["shape"]][cell["tokens"]] == cell["contenders"]["moeq"]["cold"]["us"]


def test_the_fastest_measured_backend_is_named() -> None:
    found = ranked(gpu("H200"))
    assert [row.backend for row in found.fastest("decode")] == ["MOEQ", "HUMMING", "MARLIN", "TRITON"]
    assert found.fastest("prefill")[0].backend == "MOEQ"
    assert found.ranks[0].decode == 1.0
    without = ranked(gpu("H200"), own=None)
    assert without.fastest("decode")[0].backend == "HUMMING"
    assert ranked(gpu("H200", tp=2)).ranks[0].microseconds[128] < found.ranks[0].microseconds[128]
    assert "MOEQ" not in [row.backend for row in without.ranks]
    absent = ranked(gpu("H200", packages={"humming": False}), own=None)
    assert absent.fastest("decode")[0].backend == "MARLIN"


@pytest.mark.parametrize("name", ["A100", "B200", "H20", "H100 NVL", "RTX 4090", "sm90", "MI300X"])
def test_a_gpu_that_was_not_measured_is_never_ranked(name: str) -> None:
    found = ranked(gpu(name))
    assert not found.ranks
    assert found.reason == f"no backend was measured on {gpu(name).gpu.name}; measured: H100, H200"


@pytest.mark.parametrize(
    ("where", "folder", "shape", "words"),
    [
        (gpu("H100", tp=4, ep=4), INT4, SHAPE, "with expert parallelism"),
        (gpu("H100", lora=True), INT4, SHAPE, "with lora"),
        (gpu("H100", dtype="fp16"), INT4, SHAPE, "with fp16"),
        (gpu("H100"), "ct-fp8-block-qwen3moe", SHAPE, "no times of fp8-block"),
        (gpu("H100"), "gptq-int4-g32-actorder-qwen3moe", SHAPE, "no times of gptq int4 g32"),
        (gpu("H100"), INT4, replace(SHAPE, hidden_size=512), "hidden 512 per rank is far"),
        (gpu("H100", tp=8), INT4, SHAPE, "intermediate 96 per rank is far"),
        (gpu("H100", engine="sglang@0.5.23"), INT4, SHAPE, "not those of sglang"),
    ],
)
def test_what_was_not_measured_is_refused_with_the_reason(
    where: Deployment, folder: str, shape: MoeShape, words: str
) -> None:
    found = ranked(where, folder, shape)
    assert not found.ranks
    assert words in found.reason


def test_random_layers_between_measured_ones_get_times_between_theirs() -> None:
    """The estimate of a layer never leaves the range of measured times over the least possible ones."""
    draw = random.Random(41)
    for table in ranking.tables().values():
        for times in table.backends:
            own = [
                us / ranking.least_microseconds(table.rates, ranking.measured_layers()[name], tokens)
                for name, cells in times.cells.items()
                for tokens, us in cells.items()
            ]
            for _ in range(10):
                experts = draw.choice([8, 16, 60, 128, 512])
                sizes = draw.randrange(1536, 8192, 256), draw.randrange(256, 14336, 128)
                layer = ranking.Layer(experts, draw.randint(1, min(8, experts)), *sizes)
                tokens = draw.choice([1, 3, 20, 700, 4096])
                ratio = ranking.estimate(times, table.rates, layer, tokens)
                ratio /= ranking.least_microseconds(table.rates, layer, tokens)
                assert min(own) * 0.999 <= ratio <= max(own) * 1.001


def test_an_order_that_was_measured_is_told_from_another() -> None:
    shape = GPT_OSS
    own, marlin = (
        ranked(gpu("H200"), "mxfp4-gptoss", shape, layout) for layout in ("moeq-mxfp4/1", "marlin-mxfp4-interleaved/1")
    )
    assert [found.fastest("decode")[0].layout for found in (own, marlin)] == ["moeq-mxfp4", "marlin-mxfp4"]
    assert own.fastest("decode")[0].microseconds[8] < marlin.fastest("decode")[0].microseconds[8]
    assert ranked(gpu("H200"), "mxfp4-gptoss", replace(shape, activation="silu")).notes


@pytest.mark.parametrize(
    ("where", "asked", "layout", "fastest"),
    [
        ("H100", scheme("gptq"), "marlin-wna16/1", True),
        ("H200", scheme("gptq"), "marlin-wna16/1", True),
        ("A100", scheme("gptq"), "marlin-wna16/1", False),
        ("B200", scheme("gptq"), "marlin-wna16/1", False),
        ("MI300X", scheme("gptq"), "marlin-wna16/1", False),
        ("H100", scheme("gptq", activation="int8"), "marlin-wna16/1", False),
        ("H100", scheme("gptq", "int3"), "marlin-wna16/1", False),
        ("H100", scheme("gptq", act_order=True), "marlin-act-order/1", False),
        ("H100", scheme("gptq"), "no-layout/1", False),
    ],
)
def test_own_kernels_are_ahead_on_hopper_alone(where: str, asked: Scheme, layout: str, fastest: bool) -> None:
    assert is_fastest(asked, gpu(where), layout) is fastest


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (scheme("gptq"), "int4"), (scheme("gptq", group=64), None), (scheme("gptq", "int8"), None),
        (scheme("gptq", act_order=True), None), (scheme("gptq", activation="int8"), None),
        (scheme("ct", "e2m1", 32, scale="e8m0"), "mxfp4"), (scheme("ct", "e2m1", 32, scale="e4m3"), None),
        (scheme("ct", "e2m1", 32, scale="e8m0", activation="e2m1"), None),
        (scheme("ct", "int8", -1, activation="int8"), "w8a8"), (scheme("ct", "int8", -1), None),
        (scheme("ct", "int8", 128, activation="int8"), None), (scheme("ct", "int4", -1, activation="int8"), None),
        (scheme("ct", "int8", -1, activation="e4m3"), None),
    ],
)  # fmt: skip
def test_formats_that_were_measured(asked: Scheme, expected: str | None) -> None:
    assert ranking.measured_format(asked) == expected


def test_numbers_of_a_ranking() -> None:
    found = ranked(gpu("H100"))
    table = ranking.tables()["H100", "int4"]
    assert (found.compared, found.right, found.regret) == (table.compared, table.right, table.regret)
    layer = ranking.Layer(128, 8, 2048, 768)
    for row in found.ranks:
        times = next(one for one in table.backends if one.backend == row.backend)
        for tokens, us in row.microseconds.items():
            assert us == round(ranking.estimate(times, table.rates, layer, tokens), 1)
        assert (row.layers, row.cells) == (len(times.cells), sum(map(len, times.cells.values())))
        assert (row.median, row.p90, row.versions) == (times.median, times.p90, times.versions)
    for phase, tokens in (("decode", ranking.DECODE), ("prefill", ranking.PREFILL)):
        first = found.fastest(phase)[0]
        assert getattr(first, phase) == 1.0
        for row in found.ranks:
            ratios = [row.microseconds[one] / first.microseconds[one] for one in tokens]
            mean = math.prod(ratios) ** (1 / len(ratios))
            assert getattr(row, phase) == pytest.approx(mean, rel=0.02)
            assert getattr(row, phase) == round(getattr(row, phase), 3)


def test_bounds_of_a_call() -> None:
    rates, layer = ranking.Rates(1e12, 4.0, 1e15, 2), ranking.Layer(8, 2, 1000, 100)
    assert layer.hit(1) == pytest.approx(2.0)
    assert layer.hit(2) == pytest.approx(8 * (1 - 0.75**2))
    weights = layer.hit(4) * 3 * 1000 * 100 * 4 / 8
    moved = weights + 4 * 4 * 1000 + 2 * 8 * 100
    assert ranking.least_microseconds(rates, layer, 4) == pytest.approx(moved / 1e12 * 1e6)
    slow = replace(rates, operations=1e9)
    assert ranking.least_microseconds(slow, layer, 4) == pytest.approx(6 * 1000 * 100 * 8 / 1e9 * 1e6)


@pytest.mark.parametrize("size", ["experts", "hidden", "intermediate"])
def test_sizes_far_from_the_measured_layers(size: str) -> None:
    known = sorted(getattr(one, size) for one in ranking.measured_layers().values())
    near = ranking.Layer(128, 8, 2048, 768)
    for value, far in (
        (math.ceil(known[0] / 1.5), False), (math.ceil(known[0] / 1.5) - 1, True),
        (int(known[-1] * 1.5), False), (int(known[-1] * 1.5) + 1, True),
    ):  # fmt: skip
        said = f"{size} {value} per rank is far from the measured layers ({known[0]} to {known[-1]})"
        assert ranking._outside(replace(near, **{size: value})) == (said if far else "")


def test_notes_and_other_reasons() -> None:
    shape = replace(SHAPE, activation="gelu")
    assert ranked(gpu("H100"), shape=shape).notes == ("measured with the activation silu, not gelu",)
    asymmetric = scheme("compressed-tensors", symmetric=False)
    found = ranking.rank(judge(asymmetric, SHAPE, gpu("H100")), asymmetric, None)
    assert found.reason or found.notes == ("measured without zero points",)
    assert ranked(gpu("H100")).notes == ()
    both = ranked(gpu("H100", lora=True, eplb=True, tp=2, ep=2))
    assert both.reason == "nothing was measured with lora and eplb and expert parallelism"
    spread = ranked(gpu("H100", all2all="deepep_low_latency", tp=1, ep=2, dp=2))
    assert spread.reason == "nothing was measured with expert parallelism and an all-to-all"
    single = ranked(gpu("H100"), shape=replace(SHAPE, gated=False, activation="relu2_no_mul"))
    assert single.reason == "only layers with gate and up were measured"


def test_what_a_ranking_is_without_validation() -> None:
    assert (ranking.DECODE, ranking.PREFILL, ranking.MIN_LAYERS, ranking.MAX_FACTOR) == (
        (1, 8, 32, 128),
        (512, 4096),
        8,
        1.5,
    )
    empty = Ranking("H100", None)
    assert (empty.ranks, empty.unmeasured, empty.reason, empty.notes) == ((), (), "", ())
    table = ranking.read_table({"rates": [1.0, 2.0, 3.0, 4], "backends": []})
    assert table == ranking.Table(ranking.Rates(1.0, 2.0, 3.0, 4), ())
    for one in (empty, table):
        assert (one.compared, one.right, one.regret) == (0, 0, 0.0)

"""The check is checked: every damage to every format is named by digest and by numbers alone, and nothing else is."""

from __future__ import annotations

import hashlib
import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import moeq
from moeq.check.results import CheckReport, ExpertError, LayerReport, ProjectionResult, Sample, SelftestReport
from moeq.check.run_check import CheckOptions, check_opened, open_both
from moeq.check.sabotage import SABOTAGES, Sabotage
from moeq.check.selftest import (
    OverlaySource,
    Planted,
    Site,
    _false_alarms,
    _layout,
    _outcome,
    _rows,
    _Sites,
    selftest,
)
from moeq.check.synthetic import RECIPES
from moeq.checkpoint.manifest import LayerEntry, MatrixEntry, Projection
from moeq.digest import DigestDifference
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.model.converted import ConvertedCheckpoint
from moeq.pipeline.convert import convert

FIRST_LAYOUT = {
    "gptq-int4-g32-qwen3moe": "marlin-wna16/1",
    "gptq-int4-g128-mixtral": "triton-wna16/1",
    "gptq-int8-g64-qwen3moe": "marlin-wna16/1",
    "gptq-int4-g32-actorder-qwen3moe": "marlin-act-order/1",
    "awq-int4-g32-qwen3moe": "triton-wna16/1",
    "ct-int4-g128-qwen3moe": "marlin-wna16/1",
    "ct-int4-asym-g32-mixtral": "marlin-wna16/1",
    "ct-w8a8-qwen3moe": "int8-w8a8/1",
    "ct-mxfp4-qwen3moe": "triton-kernels-hopper/1",
    "mxfp4-gptoss": "marlin-mxfp4-interleaved/1",
    "ct-fp8-channel-qwen3moe": "marlin-fp8/1",
    "ct-mxfp8-qwen3moe": "marlin-mxfp8/1",
}
EVERY_FORMAT = {
    "flip a code",
    "swap two scales",
    "transpose a tile",
    "shift a group",
    "swap gate and up",
    "swap two experts",
    "swap topk arguments",
}
ZERO, BIAS, E8M0, ORDER = "drop a zero point", "change a bias", "e8m0 off by one", "change a group"
MORE = {
    "awq-int4-g32-qwen3moe": {ZERO},
    "ct-int4-asym-g32-mixtral": {ZERO},
    "ct-mxfp4-qwen3moe": {E8M0},
    "mxfp4-gptoss": {E8M0, BIAS},
    "gptq-int4-g32-actorder-qwen3moe": {ORDER},
    "ct-mxfp8-qwen3moe": {E8M0},
}


def digest_of(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found.update(path.name.encode() + path.read_bytes() + str(path.stat().st_mtime_ns).encode())
    return found.hexdigest()


@pytest.mark.cover(every=12)
@pytest.mark.parametrize(("name", "layout"), FIRST_LAYOUT.items(), ids=list(FIRST_LAYOUT))
def test_every_damage_is_named(name, layout, conversions, checkpoints) -> None:
    folder = conversions(name, layout)
    before = digest_of(folder)
    report = selftest(folder, checkpoints / name)
    assert digest_of(folder) == before, "the user's files stay as they are"
    assert report.false_alarms == ()
    assert {result.sabotage for result in report.results} == EVERY_FORMAT | MORE.get(name, set())
    for result in report.results:
        assert result.numeric is not None, result
        assert (result.digest is not None) == result.data, result
        assert result.exceedance > 1 or not result.data
    assert report.ok


@pytest.mark.cover(every=2)
@pytest.mark.parametrize("name", ["nvfp4", "fp8-block"])
def test_every_damage_to_written_formats_is_named(name: str, tmp_path: Path) -> None:
    recipe = next(one for one in RECIPES if one.name == name)
    recipe.write(tmp_path / name)
    deployment = moeq.Deployment(gpu=moeq.gpu("H100"))
    convert(tmp_path / name, tmp_path / "out", deployment, layout=recipe.layout, force_layout=True)
    report = selftest(tmp_path / "out", tmp_path / name)
    assert report.ok, report
    assert report.false_alarms == ()
    # The rows of an expert here share one block, so that no two scales of a projection differ.
    one_block = {"swap two scales", "shift a group"}
    more = {"e4m3 scale off by one", "change the second scale"}
    wanted = EVERY_FORMAT | more if name == "nvfp4" else EVERY_FORMAT - one_block
    assert {result.sabotage for result in report.results} == wanted


def found(report: SelftestReport, name: str) -> str:
    return next(str(result.numeric) for result in report.results if result.sabotage == name)


def test_the_place_is_named_from_numbers_alone(conversions, checkpoints) -> None:
    name = "mxfp4-gptoss"
    report = selftest(conversions(name, FIRST_LAYOUT[name]), checkpoints / name)
    flipped = next(result for result in report.results if result.sabotage == "flip a code")
    row, column = flipped.damage.partition("(")[2].rstrip(")").split(", ")
    assert f"output feature {row}," in str(flipped.numeric)
    assert f"one weight, of input feature {column}" in str(flipped.numeric)
    assert "its bias" in found(report, BIAS)
    assert "the scale of group" in found(report, E8M0)
    assert "it computes expert" in found(report, "swap two experts")
    assert "it computes expert" in found(report, "swap gate and up")
    assert "16 output features" in found(report, "transpose a tile")


@pytest.mark.slow
def test_a_damage_without_numeric_effect_is_for_the_digest(conversions, checkpoints, monkeypatch) -> None:
    """A damage that no kernel can see must not be claimed as caught by numbers."""

    def harmless(matrix, rows, generator):  # type: ignore[no-untyped-def]
        scales = matrix.scales.clone()
        codes = matrix.codes.clone()
        place = torch.argwhere(codes[rows] == 0)[0]  # e2m1 code 0 is +0, code 8 is -0
        codes[rows.start + int(place[0]), int(place[1])] = 8
        return replace(matrix, codes=codes, scales=scales), "sign of a zero"

    kind = Sabotage("sign of a zero", lambda spec: True, harmless)
    monkeypatch.setattr("moeq.check.selftest.SABOTAGES", (kind,))
    name = "ct-mxfp4-qwen3moe"
    report = selftest(conversions(name, FIRST_LAYOUT[name]), checkpoints / name)
    result = report.results[0]
    assert result.numeric is None
    assert result.digest is not None
    assert result.caught


def test_an_unnoticed_damage_fails_the_selftest(conversions, checkpoints, monkeypatch) -> None:
    nothing = Sabotage("nothing", lambda spec: True, lambda matrix, rows, generator: (matrix, "nothing was done"))
    monkeypatch.setattr("moeq.check.selftest.SABOTAGES", (nothing,))
    name = "gptq-int4-g32-qwen3moe"
    report = selftest(conversions(name, FIRST_LAYOUT[name]), checkpoints / name)
    assert not report.results[0].caught
    assert not report.ok


def test_a_damage_elsewhere_is_a_false_alarm(conversions, checkpoints, monkeypatch) -> None:
    """If `rows` were ignored and another projection hit, the self-test must say so."""
    flip = SABOTAGES[0]

    def astray(matrix, rows, generator):  # type: ignore[no-untyped-def]
        half = matrix.spec.n // 2
        return flip.damage(matrix, slice(half, matrix.spec.n), generator)

    kind = Sabotage("astray", lambda spec: spec.role == "w13", astray)
    monkeypatch.setattr("moeq.check.selftest.SABOTAGES", (kind,))
    name = "gptq-int4-g32-qwen3moe"
    report = selftest(conversions(name, FIRST_LAYOUT[name]), checkpoints / name)
    assert not report.ok
    assert len(report.false_alarms) == 2, "one by digest, one by numbers"


def test_overlay_shows_patches_and_leaves_the_file(conversions) -> None:
    opened = open_both(conversions("gptq-int4-g32-qwen3moe", "marlin-wna16/1"))
    folder = opened.converted.source.name
    overlay = OverlaySource(Path(folder), folder)
    converted = ConvertedCheckpoint(overlay, opened.manifest)
    name = "model.layers.0.mlp.experts.w2_scale"
    entry = overlay.entry(name)
    before = overlay.read(name)
    overlay.patch(name, 2, bytes(before[2].numel() * 2))
    changed = overlay.read(name)
    assert bool((changed[2] == 0).all())
    assert torch.equal(changed[[0, 1, 3]], before[[0, 1, 3]])
    assert bool((overlay.read_row(entry, 2) == 0).all())
    assert torch.equal(overlay.read_row(entry, 1), before[1])
    assert bool((converted.matrix(0, 2, "down").scales == 0).all())
    assert torch.equal(opened.converted.source.read(name), before)
    with pytest.raises(ValueError, match="bytes"):
        overlay.patch(name, 0, b"short")


def test_a_read_may_begin_and_end_anywhere_in_a_patch(conversions) -> None:
    """Kernels' loaders read shards and pieces: the later of two patches is seen wherever a piece touches it."""
    folder = conversions("gptq-int4-g32-qwen3moe", "marlin-wna16/1")
    overlay = OverlaySource(Path(folder), str(folder))
    name = "model.layers.0.mlp.experts.w2_scale"
    entry, (size, *_) = overlay.entry(name), (overlay.read(name)[0].numel() * 2,)
    wanted = bytearray((Path(folder) / entry.file).read_bytes())
    for row, byte in ((2, 0xA5), (2, 0x5A), (1, 0x33)):
        overlay.patch(name, row, bytes([byte]) * size)
        wanted[entry.start + row * size : entry.start + (row + 1) * size] = bytes([byte]) * size
    first, end = entry.start + size, entry.start + 3 * size
    points = [first - 9, first - 1, first, first + 1, first + size, first + size + 5, end - 1, end, end + 7]
    with (Path(folder) / entry.file).open("rb") as file:
        for start, stop in itertools.combinations(points, 2):
            found = bytearray(stop - start)
            overlay.read_into(file.fileno(), memoryview(found), start, entry.file)
            assert found == wanted[start:stop], (start - first, stop - first)
            overlay.read_into(file.fileno(), memoryview(found), start, "another file")
            assert (found == wanted[start:stop]) == (stop <= first or start >= end)


SPECS = {
    "gated": MatrixSpec("w13", 48, 32, "int4", 32, "f16"),
    "ungated": MatrixSpec("w13", 48, 32, "int4", 32, "f16", gated=False),
    "w2": MatrixSpec("w2", 32, 24, "int4", 24, "f16"),
}


def layer(experts: int, w13: str = "gated") -> LayerEntry:
    matrices = {role: MatrixEntry(SPECS[name], 0, 0, {}) for role, name in (("w13", w13), ("w2", "w2"))}
    return LayerEntry(0, "experts", experts, "marlin-wna16/1", matrices)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "projection", "rows"),
    [
        ("gated", "gate", slice(0, 24)),
        ("gated", "up", slice(24, 48)),
        ("ungated", "up", slice(0, 48)),
        ("w2", "down", slice(0, 32)),
    ],
)
def test_rows_of_a_site(spec: str, projection: Projection, rows: slice) -> None:
    matrix = QuantizedMatrix(SPECS[spec], torch.empty(0), torch.empty(0))
    assert _rows(matrix, Site(3, (projection,))) == rows


@pytest.mark.parametrize(
    ("layout", "groups", "calibration"),
    [("marlin-wna16-int8act/1", 2, 4.0), ("marlin-wna16-int8act/1", 1, 0.0), ("marlin-wna16/1", 2, None)],
)
def test_layouts_are_calibrated_on_all_experts_of_the_layer(
    layout: str, groups: int, calibration: float | None
) -> None:
    """A damaged expert is packed beside the others as the conversion packed it; one group has nothing to calibrate."""
    spec = MatrixSpec("w2", 64, 128, "int4", 128 // groups, "f16")
    asked = []

    class Converted:
        def matrix(self, layer: int, expert: int, role: str) -> QuantizedMatrix:
            asked.append((layer, expert, role))
            scales = torch.full((64, groups), (1.0, 4.0, 2.0)[expert], dtype=torch.float16)
            return QuantizedMatrix(spec, torch.zeros(64, 128, dtype=torch.uint8), scales)

    entry = replace(layer(3), layer=5, layout=layout)
    assert _layout(Converted(), entry, "w2").calibration == calibration  # type: ignore[arg-type]
    assert asked == ([] if calibration is None else [(5, 0, "w2"), (5, 1, "w2"), (5, 2, "w2")])


def test_sites_are_handed_out_once_and_expert_by_expert() -> None:
    anywhere, both = SABOTAGES[0], SABOTAGES[-1]
    free = _Sites(layer(3))
    taken = [free.take(one) for one in (anywhere, both, anywhere, anywhere, both, anywhere, anywhere, both)]
    assert taken == [
        Site(0, ("gate",)),
        Site(1, ("gate", "up")),  # gate of expert 0 is taken
        Site(0, ("up",)),
        Site(0, ("down",)),
        Site(2, ("gate", "up")),
        Site(1, ("down",)),
        Site(2, ("down",)),
        None,
    ]
    assert free.take(anywhere) is None
    assert free.take_pair(set()) is None
    plain = _Sites(layer(2, "ungated"))
    assert plain.take(both) is None
    assert [plain.take(anywhere) for _ in range(3)] == [Site(0, ("up",)), Site(0, ("down",)), Site(1, ("up",))]
    only_down = replace(anywhere, possible=lambda spec: spec.role == "w2")
    assert [_Sites(layer(2)).take(only_down), plain.take(only_down)] == [Site(0, ("down",)), Site(1, ("down",))]


def test_two_experts_are_exchanged_whose_matrices_are_whole() -> None:
    """w2 where it is free, else w13: the first and the last of the experts, since neighbours may be equal."""
    assert _Sites(layer(3)).take_pair(set()) == (Site(0, ("down",)), Site(2, ("down",)))
    assert _Sites(layer(3)).take_pair({("w2", 0), ("w13", 2)}) == (Site(1, ("down",)), Site(2, ("down",)))
    assert _Sites(layer(2)).take_pair({("w2", 0)}) == (Site(0, ("gate", "up")), Site(1, ("gate", "up")))
    assert _Sites(layer(2, "ungated")).take_pair({("w2", 1)}) == (Site(0, ("up",)), Site(1, ("up",)))
    assert _Sites(layer(1)).take_pair(set()) is None
    assert _Sites(layer(2)).take_pair({("w2", 0), ("w13", 1)}) is None
    free = _Sites(layer(3))
    assert free.take(SABOTAGES[0]) == Site(0, ("gate",))
    assert free.take_pair({("w2", 1), ("w2", 2)}) == (Site(1, ("gate", "up")), Site(2, ("gate", "up")))


PASSED = ExpertError(0, 4, relative=0.1, tolerance=0.2, exceedance=0.5, element=(0, 1))
FAILED = replace(PASSED, expert=1, exceedance=3.0)


def kernels(gate: tuple[ExpertError, ...], up: tuple[ExpertError, ...]) -> CheckReport:
    results = tuple(
        ProjectionResult(0, name, 32, 0, 0, 0, 1, 0, 1, "exact", (0, 0), None, errors)
        for name, errors in (("gate", gate), ("up", up))
    )
    layers = (LayerReport(Sample(0, (0, 1), (), 1, True), results, 0, ()),)
    return CheckReport("out", None, "gptq", "x/1", "X", "cpu", "bf16", 0, 0, (), layers, 1, (), 0.0)


def digests(*places: tuple[int, Projection]) -> CheckReport:
    wrong = tuple(DigestDifference(0, expert, name, "stored") for expert, name in places)
    return replace(kernels((), ()), digest_mismatches=wrong)


def test_a_damage_is_caught_where_all_of_its_places_are_reported() -> None:
    both = Planted("swap gate and up", "gate and up exchanged", (Site(1, ("gate", "up")),))
    worse = replace(FAILED, exceedance=7.0)
    found = _outcome(both, digests((1, "gate"), (1, "up")), kernels((PASSED, FAILED), (worse,)))
    assert (found.sabotage, found.place, found.damage) == (both.name, "expert 1 gate, expert 1 up", both.text)
    assert found.digest == digests((1, "gate")).digest_mismatches[0].text
    assert (found.numeric, found.exceedance) == (worse.text, 7.0)
    partly = _outcome(both, digests((1, "gate"), (0, "up")), kernels((FAILED,), (replace(PASSED, expert=1),)))
    assert (partly.digest, partly.numeric, partly.exceedance) == (None, None, 3.0)


def test_false_alarms_are_what_no_damage_explains() -> None:
    planted = [Planted("flip a code", "", (Site(1, ("gate",)),)), Planted("swap", "", (Site(0, ("up",)),))]
    by_digest, by_kernel = digests((1, "gate"), (1, "up")), kernels((PASSED, FAILED), (FAILED,))
    assert [*_false_alarms(planted, by_digest, by_kernel)] == [
        by_digest.digest_mismatches[1].text,
        f"up {FAILED.text}",
    ]
    assert [*_false_alarms(planted, digests((0, "up")), kernels((FAILED,), ()))] == []


def test_without_the_source_the_undamaged_files_are_the_reference(checkpoints, tmp_path, monkeypatch) -> None:
    source = shutil.copytree(checkpoints / "gptq-int4-g32-qwen3moe", tmp_path / "source")
    convert(source, tmp_path / "out", moeq.Deployment(gpu=moeq.gpu("H100")), layout="marlin-wna16/1", force_layout=True)
    shutil.rmtree(source)
    monkeypatch.setattr("moeq.check.selftest.SABOTAGES", SABOTAGES[:1])
    asked: list[CheckOptions] = []
    monkeypatch.setattr(
        "moeq.check.selftest.check_opened",
        lambda opened, options: asked.append(options) or check_opened(opened, options),
    )
    report = selftest(tmp_path / "out", seed=5)
    ways = [(one.digests, one.kernels, one.whole, one.layers or one.digest_layers) for one in asked]
    assert ways == [(True, False, True, (0,)), (False, True, False, (0,))], "digests alone, then numbers alone"
    assert (asked[1].seed, asked[1].tokens, asked[1].device) == (5, (33,), "auto")
    assert [result.caught for result in report.results] == [True] * 3
    assert report.false_alarms == ()
    assert report.results[-1].numeric == "refused: topk_weights is int64 [1, 1]; it must be floating point"
    assert not report.results[-1].data


def test_a_conversion_for_several_ranks_is_refused(conversions, checkpoints, tmp_path) -> None:
    deployment = moeq.Deployment(gpu=moeq.gpu("H100"), tp=2)
    convert(checkpoints / "gptq-int4-g32-actorder-qwen3moe", tmp_path / "out", deployment, layout="marlin-act-order/1",
            force_layout=True)  # fmt: skip
    with pytest.raises(moeq.MoeqError, match="written rank by rank") as caught:
        selftest(tmp_path / "out")
    assert (caught.value.code, caught.value.hint) == ("usage.selftest", "self-test a conversion for one rank")

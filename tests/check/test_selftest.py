"""The check is checked: every damage to every format is named by digest and by numbers alone, and nothing else is."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import moeq
from moeq.check.results import SelftestReport
from moeq.check.run_check import open_both
from moeq.check.sabotage import SABOTAGES, Sabotage
from moeq.check.selftest import OverlaySource, selftest
from moeq.check.synthetic import RECIPES
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

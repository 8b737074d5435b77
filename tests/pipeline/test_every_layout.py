"""Every example checkpoint in every layout that holds it: converted, verified against its source, and taken back."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from layouts.pairs import CASES, DEPLOYMENT, EXACT, FP8_LARGER, FP8_LOSSY, FP8_TENSOR, LOSSY, LOSSY_CASES

import moeq
from moeq.errors import MoeqError
from moeq.layouts import words
from moeq.layouts.registry import LAYOUTS
from moeq.pipeline.convert import convert
from moeq.prove.diff import diff
from moeq.prove.restore import restore
from moeq.prove.verify import verify

#: Layouts of one scale per matrix, for checkpoints that have more of them: their sizes fit, their scales do not.
SCALES_DIFFER = {"ct-fp8-channel-qwen3moe": FP8_TENSOR, "ct-fp8-tensor-qwen3moe": FP8_TENSOR - FP8_LARGER}

#: Error relative to the norm of a projection, where 0.01 is not enough: small scales are rounded to subnormal E4M3, and
#: weights to E4M3 once more.
WORST = {"flashinfer-b12x-nvfp4/1": 0.1, **dict.fromkeys(FP8_LOSSY, 0.03), **dict.fromkeys(FP8_LARGER, 0.05)}

#: What the matrices do not tell: scales of activations, and divisors that share their float32 reciprocal with others.
KEPT = {
    "ct-nvfp4a16-qwen3moe": 4,
    "ct-nvfp4-qwen3moe": 14,
    "ct-fp8-tensor-qwen3moe": 18,
    "modelopt-fp8-qwen3moe": 18,
    "modelopt-nvfp4-qwen3moe": 12,
}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.cover(every=23)
@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_convert_verify_restore(name, layout, checkpoints, expected, tmp_path, monkeypatch) -> None:
    source, out = checkpoints / name, tmp_path / "out"
    conversion = convert(source, out, DEPLOYMENT, layout=layout, force_layout=True)
    assert {entry.layout for entry in conversion.manifest.layers} == {layout}
    kept = conversion.manifest.restore.kept
    assert len(kept) == KEPT.get(name, 0), "everything else in these checkpoints follows from the matrices"
    assert all(tensor.endswith(("global_scale", "input_scale")) for tensor in kept)

    converted = moeq.open(out)
    for key, want in expected[name].items():
        _, layer, _, expert, projection = key.split(".")
        values = converted.dequantize(int(layer), int(expert), projection) + 0.0
        assert list(values.shape) == want["shape"]
        assert hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest() == want["sha256"], key

    found = verify(out, source)
    assert found.ok, found.mismatches
    assert (found.units, found.source_units) == (len(expected[name]), len(expected[name]))
    restore(out, tmp_path / "back")
    assert content(tmp_path / "back") == content(source)
    monkeypatch.setattr(words, "COMPILED_FROM", 0)  # matrices this small take the reference path otherwise
    restore(out, tmp_path / "fast")
    assert content(tmp_path / "fast") == content(source)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_every_other_layout_is_refused_with_the_arithmetic(name, checkpoints, tmp_path) -> None:
    for layout in LAYOUTS.keys() - EXACT[name] - LOSSY.get(name, set()):
        with pytest.raises(MoeqError) as caught:
            convert(checkpoints / name, tmp_path / "out", DEPLOYMENT, layout=layout, force_layout=True)
        differ = layout in SCALES_DIFFER.get(name, set())
        code = "usage.scales-not-shared" if differ else "usage.layout-does-not-fit"
        assert caught.value.code == code, f"{name} {layout}"
        assert layout in caught.value.message
        assert caught.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.cover(every=17)
@pytest.mark.parametrize(("name", "layout"), LOSSY_CASES, ids=str)
def test_lossy_layouts_are_refused_unless_allowed_and_then_counted(name, layout, checkpoints, tmp_path) -> None:
    source, out = checkpoints / name, tmp_path / "out"
    with pytest.raises(MoeqError, match=r"would change [1-9]") as caught:
        convert(source, out, DEPLOYMENT, layout=layout, force_layout=True)
    assert caught.value.code == "answer.lossy"
    assert list(tmp_path.iterdir()) == []

    manifest = convert(source, out, DEPLOYMENT, layout=layout, force_layout=True, allow_lossy=True).manifest
    losses = sum(entry.losses for entry in manifest.layers)
    assert losses > 0
    assert manifest.restore.kept, "what packing changed is kept for the way back"
    found = verify(out, source)
    assert found.ok, found.mismatches
    assert found.losses == losses
    difference = diff(source, out, experts_only=True)
    assert not difference.equal
    assert difference.worst.relative < WORST.get(layout, 0.01)
    restore(out, tmp_path / "back")
    assert content(tmp_path / "back") == content(source)

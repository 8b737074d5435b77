"""`run-check` on real converted checkpoints: it passes on good ones, and names the place in damaged ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import moeq
from moeq.check.run_check import CheckOptions, run_check
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import ExitCode, MoeqError
from moeq.pipeline.convert import convert

A100 = Deployment(gpu=parse_gpu("A100"))
INT4 = "gptq-int4-g32-qwen3moe"
QUICK = CheckOptions(tokens=[9], layers=[0])


@pytest.fixture(scope="module")
def converted(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("converted")
    for name in (INT4, "gptq-int4-g128-mixtral", "gptq-int8-g64-qwen3moe"):
        convert(checkpoints / name, out / name, A100)
    return {path.name: path for path in out.iterdir()}


@pytest.fixture
def damaged(converted: dict[str, Path], tmp_path: Path) -> Path:
    shutil.copytree(converted[INT4], tmp_path / "damaged")
    return tmp_path / "damaged"


def overwrite(folder: Path, tensor: str, offset: int, data: bytes) -> None:
    entry = moeq.open(folder).source.tensors[tensor]
    with (folder / entry.file).open("r+b") as file:
        file.seek(entry.start + offset)
        file.write(data)


def stored(folder: Path, tensor: str) -> bytes:
    entry = moeq.open(folder).source.tensors[tensor]
    return bytes(moeq.open(folder).source.read_bytes(entry.file, entry.start, entry.end))


@pytest.mark.parametrize("name", [INT4, "gptq-int4-g128-mixtral", "gptq-int8-g64-qwen3moe"])
def test_good_conversions_pass_whole(name, converted, checkpoints) -> None:
    report = run_check(converted[name], checkpoints / name)
    assert report.ok
    assert report.digests_checked == 24
    assert [sample.layer for sample in report.samples] == [0, 1]
    assert all(sample.complete for sample in report.samples), "so small a model is checked whole, CPU or not"
    assert [(result.layer, result.name) for result in report.results] == [
        (layer, name) for layer in (0, 1) for name in ("gate", "up", "down", "layer")
    ]
    for result in report.results:
        assert 0 < result.relative <= result.tolerance < 0.02, result
        assert result.cosine > 0.9999
        assert result.tolerance == pytest.approx(1.2 * result.baseline)


def test_the_same_seed_gives_the_same_numbers(converted, checkpoints) -> None:
    first = run_check(converted[INT4], checkpoints / INT4, options=QUICK)
    again = run_check(converted[INT4], checkpoints / INT4, options=QUICK)
    other = run_check(converted[INT4], checkpoints / INT4, options=CheckOptions(tokens=[9], layers=[0], seed=1))
    assert first.results == again.results
    assert first.results != other.results


def test_a_flipped_nibble_is_named(damaged, checkpoints) -> None:
    # Layer 1, expert 2, w2: one code of one word.
    size = len(stored(damaged, "model.layers.1.mlp.experts.w2_weight")) // 4
    offset = 2 * size + 100
    byte = stored(damaged, "model.layers.1.mlp.experts.w2_weight")[offset]
    overwrite(damaged, "model.layers.1.mlp.experts.w2_weight", offset, bytes([byte ^ 0x08]))
    report = run_check(damaged, checkpoints / INT4, options=QUICK)
    assert not report.ok
    assert [(m.layer, m.expert, m.projection) for m in report.digest_mismatches] == [(1, 2, "down")]


def test_a_changed_scale_is_named_by_digest_and_by_kernel(damaged, checkpoints) -> None:
    name = "model.layers.0.mlp.experts.w13_scale"
    size = len(stored(damaged, name)) // 4
    data = bytearray(stored(damaged, name)[size : size + 2])
    data[1] ^= 0x10  # an exponent bit of the first scale of expert 1
    overwrite(damaged, name, size, bytes(data))
    report = run_check(damaged, checkpoints / INT4, options=CheckOptions(tokens=[33], layers=[0]))
    assert not report.ok
    assert [(m.layer, m.expert) for m in report.digest_mismatches] == [(0, 1)]
    wrong = {result.name: result.worst_expert for result in report.results if not result.passed}
    projection = report.digest_mismatches[0].projection
    assert wrong[projection] == 1
    assert set(wrong) == {projection, "layer"}, "the product is localised: the others still pass"


def test_swapped_experts_are_named_and_recognised(damaged, checkpoints) -> None:
    for part in ("w2_weight", "w2_scale"):
        name = f"model.layers.0.mlp.experts.{part}"
        data = stored(damaged, name)
        size = len(data) // 4
        overwrite(damaged, name, 0, data[3 * size :])
        overwrite(damaged, name, 3 * size, data[:size])
    report = run_check(damaged, checkpoints / INT4, options=CheckOptions(tokens=[33], layers=[0]))
    assert [m.text for m in report.digest_mismatches] == [
        "layer 0 expert 0 down: not the values recorded; it holds the values of expert 3 down",
        "layer 0 expert 3 down: not the values recorded; it holds the values of expert 0 down",
    ]
    without = run_check(damaged, checkpoints / INT4, options=CheckOptions(tokens=[33], layers=[0], digests=False))
    assert {result.name for result in without.results if not result.passed} == {"down", "layer"}


def test_a_nan_in_the_scales_fails(damaged, checkpoints) -> None:
    overwrite(damaged, "model.layers.0.mlp.experts.w2_scale", 0, b"\x00\x7e")
    report = run_check(damaged, checkpoints / INT4, options=CheckOptions(tokens=[33], layers=[0], digests=False))
    assert not report.ok
    assert {result.name for result in report.results if not result.passed} == {"down", "layer"}


def test_without_the_source_it_says_so(converted, checkpoints, tmp_path) -> None:
    shutil.copytree(checkpoints / INT4, tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out", A100)
    assert run_check(tmp_path / "out", options=QUICK).source == str(tmp_path / "source"), "found by its manifest"
    shutil.rmtree(tmp_path / "source")
    report = run_check(tmp_path / "out", options=QUICK)
    assert report.ok
    assert report.source is None
    assert "is not here" in report.notes[0]


def test_another_source_is_refused(converted, checkpoints) -> None:
    with pytest.raises(MoeqError, match="is not what was converted") as caught:
        run_check(converted[INT4], checkpoints / "gptq-int8-g64-qwen3moe", options=QUICK)
    assert caught.value.exit_code == ExitCode.SOURCE


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (CheckOptions(layers=[7]), "usage.no-such-layer"),
        (CheckOptions(experts=[4]), "usage.no-such-expert"),
        (CheckOptions(tokens=[0]), "usage.tokens"),
        (CheckOptions(device="tpu"), "usage.device"),
    ],
)
def test_nonsense_is_refused(options, code, converted, checkpoints) -> None:
    with pytest.raises(MoeqError) as caught:
        run_check(converted[INT4], checkpoints / INT4, options=options)
    assert caught.value.code == code


def test_a_source_checkpoint_is_not_an_output(checkpoints) -> None:
    with pytest.raises(MoeqError) as caught:
        run_check(checkpoints / INT4)
    assert caught.value.code == "source.no-manifest"


def test_a_sample_of_experts(converted, checkpoints) -> None:
    report = run_check(
        converted[INT4], checkpoints / INT4, options=CheckOptions(tokens=[5], layers=[1], experts=[3, 1])
    )
    assert report.ok
    (sample,) = report.samples
    assert (sample.experts, sample.top_k, sample.complete) == ((3, 1), 2, False)
    assert {result.worst_expert for result in report.results} <= {1, 3}

"""`run-check` on real converted checkpoints: it passes on good ones, and names the place in damaged ones."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import moeq
from moeq.check import layer_check
from moeq.check import run_check as run_check_module
from moeq.check.kernel_calls import fused_layer
from moeq.check.run_check import CheckOptions, Opened, run_check
from moeq.check.run_check import _changed as changed
from moeq.check.sampling import choose_samples
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
    convert(checkpoints / INT4, out / INT4, A100)
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


def test_a_whole_report(converted, checkpoints) -> None:
    report = run_check(converted[INT4], checkpoints / INT4, options=CheckOptions(tokens=[1, 7, 33]))
    assert report.ok
    assert report.digests_checked == 24
    assert [layer.sample.layer for layer in report.layers] == [0, 1]
    for layer in report.layers:
        assert layer.sample.complete, "so small a model is checked whole, CPU or not"
        runs = [run.title for run in layer.sample.runs]
        assert runs == ["1 token", "7 tokens", "33 tokens", "7 tokens, same experts"]
        assert layer.repeated >= 1
        assert layer.unequal == ()
    assert [(result.layer, result.name) for result in report.results] == [
        (layer, name) for layer in (0, 1) for name in ("gate", "up", "down", "layer")
    ]
    for result in report.results:
        assert 0 < result.relative <= result.tolerance < 0.02, result
        assert result.cosine > 0.9999
        assert result.tolerance == pytest.approx(1.2 * result.baseline)
    assert (report.scheme, report.layout, report.backend) == ("gptq int4 g32 sym", "marlin-wna16/1", "MARLIN")
    derivation = " ".join(report.derivation)
    assert "6 sqrt(256) 2^-24 sum|x||w| = 5.7e-06" in derivation, "the tolerance is printed with its derivation"
    assert {result.arithmetic for result in report.results if result.name != "layer"} == {"weights rounded to bfloat16"}


@pytest.mark.slow
def test_w8a8_is_held_against_int8_emulation(conversions, checkpoints) -> None:
    name = "ct-w8a8-qwen3moe"
    report = run_check(conversions(name, "int8-w8a8/1"), checkpoints / name, options=QUICK)
    assert report.ok
    products = [result for result in report.results if result.name != "layer"]
    assert {result.arithmetic for result in products} == {"int8 activations, exact integer sums"}
    assert all(result.relative < 1e-7 for result in products), "the quantisation of activations is no error"


@pytest.mark.slow
def test_experts_that_the_router_neglects_are_run_too(converted, checkpoints) -> None:
    options = CheckOptions(tokens=[1], layers=[0], digests=False)
    (layer,) = run_check(converted[INT4], checkpoints / INT4, options=options).layers
    assert [run.routing for run in layer.sample.runs] == ["router", "same", "spread"]
    assert [one.expert for one in layer.results[0].experts] == [0, 1, 2, 3]
    assert min(one.rows for one in layer.results[0].experts) >= 5


@pytest.mark.slow
def test_layers_written_rank_by_rank(checkpoints, tmp_path) -> None:
    deployment = moeq.Deployment(gpu=moeq.gpu("H100"), tp=2)
    converted = convert(
        checkpoints / "mxfp4-gptoss", tmp_path / "out", deployment, layout="triton-kernels-hopper/1", force_layout=True
    )
    assert converted.manifest is not None
    assert len(converted.manifest.layers[0].ranks) == 2
    report = run_check(tmp_path / "out", checkpoints / "mxfp4-gptoss", options=QUICK)
    assert report.ok
    assert len(report.results) == 4


def test_digests_alone_need_no_kernels(converted, checkpoints) -> None:
    report = run_check(converted[INT4], checkpoints / INT4, options=CheckOptions(kernels=False))
    assert report.ok
    assert (report.digests_checked, report.layers) == (24, ())
    assert (report.destination, report.source) == (str(converted[INT4]), str(checkpoints / INT4))
    assert (report.device, report.dtype, report.seed) == ("no kernels were run", "bf16", 0)
    assert (report.layers_in_checkpoint, report.derivation, report.notes) == (2, (), ())
    for layers, count in (((1,), 12), ((), 0)):
        options = CheckOptions(kernels=False, digest_layers=layers)
        assert run_check(converted[INT4], checkpoints / INT4, options=options).digests_checked == count


def test_missing_triton_is_found_before_anything_is_read(converted, checkpoints, monkeypatch) -> None:
    monkeypatch.setattr(run_check_module, "find_spec", lambda name: None)
    steps: list[str] = []
    with pytest.raises(MoeqError, match="need triton") as caught:
        run_check(converted[INT4], checkpoints / INT4, progress=lambda done, total, label: steps.append(label))
    assert (caught.value.code, steps) == ("environment.no-triton", [])


@pytest.mark.slow
def test_layers_in_processes_give_the_same_numbers(converted, checkpoints) -> None:
    options = {"tokens": [3], "digests": False}
    here = run_check(converted[INT4], checkpoints / INT4, options=CheckOptions(**options, jobs=1))
    there = run_check(converted[INT4], checkpoints / INT4, options=CheckOptions(**options, jobs=2))
    assert here.layers == there.layers


@pytest.mark.slow
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
    assert all(layer.ok for layer in report.layers), "layer 0 is fine, and only that was run"


def test_a_changed_scale_is_named_by_digest_and_by_kernel(damaged, checkpoints) -> None:
    name = "model.layers.0.mlp.experts.w13_scale"
    size = len(stored(damaged, name)) // 4
    data = bytearray(stored(damaged, name)[size : size + 2])
    data[1] ^= 0x10  # an exponent bit of the first scale of expert 1
    overwrite(damaged, name, size, bytes(data))
    report = run_check(damaged, checkpoints / INT4, options=CheckOptions(tokens=[33], layers=[0]))
    assert not report.ok
    assert [(m.layer, m.expert) for m in report.digest_mismatches] == [(0, 1)]
    wrong = {result.name: result.worst.expert for result in report.results if not result.passed}
    projection = report.digest_mismatches[0].projection
    assert wrong[projection] == 1
    assert set(wrong) == {projection, "layer"}, "the product is localised: the others still pass"


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_nan_in_the_scales_fails(damaged, checkpoints) -> None:
    overwrite(damaged, "model.layers.0.mlp.experts.w2_scale", 0, b"\x00\x7e")
    report = run_check(damaged, checkpoints / INT4, options=CheckOptions(tokens=[33], layers=[0], digests=False))
    assert not report.ok
    assert {result.name for result in report.results if not result.passed} == {"down", "layer"}
    json.dumps(report.to_json(), allow_nan=False)  # infinite errors are null, not a crash


@pytest.mark.slow
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
    assert caught.value.code == "usage.not-converted"


def test_a_sample_of_experts(converted, checkpoints) -> None:
    told: list[tuple[int, int, str]] = []
    report = run_check(
        converted[INT4],
        checkpoints / INT4,
        options=CheckOptions(tokens=[5], layers=[1], experts=[3, 1]),
        progress=lambda *step: told.append(step),
    )
    assert report.ok
    assert report.layers[0].repeated == 1
    # Every expert of both layers is hashed; two experts, and three runs, the last of which is not needed.
    assert {total for _, total, _ in told} == {2 * 4 + 2 + 3}
    labels = [f"layer {layer} expert {expert}" for layer in (0, 1) for expert in range(4)]
    runs = ["layer 1, 5 tokens", "layer 1, 7 tokens, same experts", "layer 1 expert 3", "layer 1 expert 1"]
    assert [label for _, _, label in told] == [*labels, *runs]
    sample = report.layers[0].sample
    assert (sample.experts, sample.top_k, sample.complete) == ((3, 1), 2, False)
    assert {one.expert for result in report.results for one in result.experts} == {1, 3}


@pytest.mark.slow
def test_numbers_that_were_changed_on_purpose_are_no_failure(checkpoints, tmp_path) -> None:
    """FP8 scales rounded to bf16: the kernels are right about what is stored, and the report says what it is."""
    source = checkpoints / "modelopt-fp8-qwen3moe"
    conversion = convert(source, tmp_path / "out", A100, allow_lossy=True)
    assert conversion.manifest.layer(0).losses
    report = run_check(tmp_path / "out", source, options=QUICK)
    assert report.ok, [result for result in report.results if not result.passed]
    (note,) = report.notes
    assert f"allow_lossy=True changed {conversion.manifest.layer(0).losses} stored numbers" in note


def test_a_note_says_which_reference_layers_have_whose_numbers_were_changed(converted, checkpoints) -> None:
    checkpoint, source = moeq.open(converted[INT4]), moeq.open(checkpoints / INT4)
    first, second = checkpoint.manifest.layers
    manifest = replace(checkpoint.manifest, layers=(replace(first, losses=5), second))
    (note,) = changed(Opened(checkpoint, source, manifest), [0, 1])
    assert note.startswith("allow_lossy=True changed 5 stored numbers")
    assert changed(Opened(checkpoint, source, manifest), [1]) == ()
    assert changed(Opened(checkpoint, checkpoint, manifest), [0]) == (), "what is stored is the reference anyway"


@pytest.mark.slow
def test_damage_is_found_where_numbers_were_changed_on_purpose(checkpoints, tmp_path) -> None:
    convert(checkpoints / "modelopt-fp8-qwen3moe", tmp_path / "out", A100, allow_lossy=True)
    tensor = "model.layers.0.mlp.experts.w2_scale"
    scale = stored(tmp_path / "out", tensor)
    overwrite(tmp_path / "out", tensor, 0, bytes((scale[0] ^ 0x40,)))
    assert run_check(tmp_path / "out", options=QUICK).digest_mismatches


@pytest.mark.slow
def test_a_kernel_that_does_not_repeat_bit_for_bit_fails(converted, checkpoints, monkeypatch) -> None:
    calls = itertools.count()

    def drifting(*arguments: Any) -> torch.Tensor:
        result = fused_layer(*arguments).clone()
        result.view(torch.int16)[-1, -1] ^= next(calls) % 2  # the second call of a run
        return result

    options = CheckOptions(tokens=[1], layers=[0], experts=[0], digests=False)
    monkeypatch.setattr(layer_check, "fused_layer", drifting)
    report = run_check(converted[INT4], checkpoints / INT4, options=options)
    assert [layer.unequal for layer in report.layers] == [("1 token",)]
    assert all(result.passed for result in report.results)
    assert not report.ok


def test_layers_are_sampled_at_both_ends_and_in_the_middle_on_a_cpu(converted) -> None:
    checkpoint = moeq.open(converted[INT4])
    entry = checkpoint.manifest.layers[0]
    manifest = replace(checkpoint.manifest, layers=tuple(replace(entry, layer=layer) for layer in range(3, 10)))
    for device, options, layers in (
        ("cpu", CheckOptions(), [3, 6, 9]),
        ("cuda", CheckOptions(), [3, 4, 5, 6, 7, 8, 9]),
        ("cpu", CheckOptions(layers=[8, 3, 8]), [8, 3]),
    ):
        samples = choose_samples(manifest, options, torch.device(device), checkpoint)
        assert [sample.layer for sample in samples] == layers


def test_products_alone_repeat_no_run(converted, checkpoints) -> None:
    options = CheckOptions(tokens=[1], layers=[0], experts=[0, 1], whole=False, digests=False)
    (layer,) = run_check(converted[INT4], checkpoints / INT4, options=options).layers
    assert [result.name for result in layer.results] == ["gate", "up", "down"]
    assert (layer.repeated, layer.unequal, layer.timings) == (0, (), ())

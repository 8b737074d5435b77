"""Static activation scales that are missing or unusable: found, named, and never served or written without a word."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.hub_server import serving
from oracle import stored
from safetensors.torch import load_file, save_file

import moeq
from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.names import FUSED
from moeq.cli.app import run
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.model.activation_scales import ScaleFault, _owners
from moeq.model.scan import scan
from moeq.pipeline.plan.decide import Answer, advised
from moeq.pipeline.plan.options import Question
from moeq.transcode.transcode import transcode

NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
FP8 = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
CT_NVFP4 = {
    "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "quantization_status": "compressed",
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
        "input_activations": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                              "symmetric": True, "dynamic": "local"},
    }},
    "ignore": ["lm_head"],
}  # fmt: skip
FAULTS = {"no": None, "a zero": 0.0, "an infinite": float("inf"), "a NaN": float("nan"), "a negative": -0.5}
NAMES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def fp8(n: int, k: int) -> stored.Parts:
    return {
        "weight": (torch.float8_e4m3fn, (n, k)),
        "weight_scale": (torch.float32, ()),
        "input_scale": (torch.float32, ()),
    }


def ct_nvfp4(n: int, k: int) -> stored.Parts:
    return {
        "weight_packed": (torch.uint8, (n, k // 2)),
        "weight_scale": (torch.float8_e4m3fn, (n, k // 16)),
        "weight_global_scale": (torch.float32, (1,)),
        "input_global_scale": (torch.float32, (1,)),
    }


KINDS = {
    "nvfp4": (NVFP4, "input_scale", lambda e, p, n, k: stored.nvfp4(n, k)),
    "fp8": (FP8, "input_scale", lambda e, p, n, k: fp8(n, k)),
    "ct-nvfp4": (CT_NVFP4, "input_global_scale", lambda e, p, n, k: ct_nvfp4(n, k)),
}


def checkpoint(folder: Path, kind: str, faults: dict[tuple[int, int, str], float | None]) -> Path:
    """Write a checkpoint in which experts, by layer, number and projection, have another scale or none."""
    config, part, make = KINDS[kind]
    prefix = "model.layers.{}.mlp.experts"
    layers = [stored.experts(prefix.format(layer), make) for layer in range(stored.LAYERS)]
    stored.write(folder, {**stored.QWEN, "quantization_config": config}, layers)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("scale", "scale_2")):
            tensors[name] = torch.ones(tensor.shape).to(tensor.dtype)
    for (layer, expert, projection), value in faults.items():
        name = f"{prefix.format(layer)}.{expert}.{projection}.{part}"
        if value is None:
            del tensors[name]
        else:
            tensors[name] = torch.full_like(tensors[name], value)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def asked(folder: Path, gpu: str, **fields: Any) -> Answer:
    return advised(moeq.open(folder), Question(Deployment(parse_gpu(gpu), **fields)))


def test_scales_that_compressed_tensors_wants_equal(tmp_path: Path) -> None:
    """vLLM's loader compares the input scales of gate and up, unless the gate's is 1.0, which parameters start with."""
    arguments = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": arguments}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    for gate, refused in ((0.5, True), (1.0, False), (0.25, False)):
        changes = {(0, 1, "gate_proj"): gate, (0, 1, "up_proj"): 0.25}
        folder = checkpoint(tmp_path / f"made-{gate}", "fp8", changes)
        whole = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**whole, "quantization_config": config}))
        verdict = asked(folder, "H100").parts[0].verdict
        assert ("experts 1 have unequal input scales" in (verdict.refusal or "")) == refused
        assert verdict.ok != refused
    modelopt = checkpoint(tmp_path / "modelopt", "fp8", {(0, 1, "gate_proj"): 0.5, (0, 1, "up_proj"): 0.25})
    assert asked(modelopt, "H100").parts[0].verdict.ok


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", FAULTS)
def test_every_fault_is_named(what: str, kind: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "made", kind, {(1, 2, "down_proj"): FAULTS[what], (1, 3, "down_proj"): FAULTS[what]})
    opened = moeq.open(folder)
    found = [*opened.info.warnings, *scan(opened)]
    part = KINDS[kind][1]
    wanted = [row for row in found if row.message.startswith(f"layer 1: experts 2, 3 have {what} {part} of down")]
    assert [row.code for row in wanted] == ["scales.activation-missing" if what == "no" else "data.activation-scale"]
    assert not [row for row in found if "layer 0" in row.message and "input" in row.message]


#: Faults that a larger scale of the layer hides: compressed-tensors stores reciprocals.
HIDDEN = {"nvfp4": ("a zero", "a negative"), "ct-nvfp4": ("an infinite", "a negative")}


@pytest.mark.cover(every=3)
@pytest.mark.parametrize(("what", "kind"), [(what, kind) for kind, found in HIDDEN.items() for what in found])
def test_backends_with_one_scale_for_all_experts(what: str, kind: str, tmp_path: Path) -> None:
    """FlashInfer's backends and emulation take the largest; vLLM's own CUTLASS kernel has one for each expert."""
    folder = checkpoint(tmp_path / "one", kind, {(1, 3, name): FAULTS[what] for name in NAMES})
    found = asked(folder, "B200")
    assert found.ok
    assert any("largest scale" in note for part in found.parts for note in part.verdict.notes)
    assert not asked(folder, "B200", backend="cutlass").ok
    every = checkpoint(tmp_path / "all", kind, {(1, e, name): FAULTS[what] for e in range(4) for name in NAMES})
    assert not asked(every, "B200").ok


@pytest.mark.cover(every=3)
@pytest.mark.parametrize(
    ("what", "kind"), [(what, kind) for kind in HIDDEN for what in FAULTS if what not in HIDDEN[kind]]
)
def test_four_bit_activations_are_refused_and_marlin_is_not(what: str, kind: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "made", kind, {(1, 3, name): FAULTS[what] for name in NAMES})
    found = asked(folder, "B200")
    assert found.error is not None
    assert "layer 1: experts 3 have" in found.error.message
    assert "NaN" in found.error.message
    assert "Marlin is weight-only and unharmed" in found.error.message
    assert 'backend="marlin"' in str(found.error.hint)
    forced = asked(folder, "B200", backend="marlin")
    assert forced.ok
    assert {part.verdict.runs_as for part in forced.parts} == {"W4A16"}


@pytest.mark.cover(every=4)
@pytest.mark.parametrize(
    ("what", "experts", "refused"),
    [
        ("no", (1,), None),
        ("a NaN", (1,), "largest scale of a layer for all of its experts"),
        ("an infinite", (1,), "largest scale of a layer for all of its experts"),
        ("a zero", (1,), None),  # larger scales of the layer hide it
        ("a zero", (0, 1, 2, 3), "is not positive"),
        ("a negative", (0, 1, 2, 3), "is not positive"),
    ],
)
def test_eight_bit_activations(what: str, experts: tuple[int, ...], refused: str | None, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "made", "fp8", {(0, e, name): FAULTS[what] for e in experts for name in NAMES})
    verdict = next(part.verdict for part in asked(folder, "H100").parts if 0 in part.layers)
    assert verdict.ok == (refused is None), verdict.refusal
    assert refused is None or refused in verdict.refusal
    codes = [row.code for row in verdict.advisories]
    assert ("activation-scales-missing" in codes) == (what == "no")


def test_scales_are_read_once(tmp_path: Path) -> None:
    found = moeq.open(checkpoint(tmp_path / "made", "nvfp4", {(0, 1, "gate_proj"): float("nan")}))
    opened: list[str] = []

    def opening(file: str) -> int:
        opened.append(file)
        return found.source.open(file)

    found.read_activation_scales(opened=opening)
    count, faults = len(opened), found.scale_faults(0)
    assert count > 0
    assert faults
    found.read_activation_scales(opened=opening)
    assert (len(opened), found.scale_faults(0)) == (count, faults)


def test_a_conversion_says_what_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoint(tmp_path / "made", "nvfp4", {(0, 1, "up_proj"): 0.0, (1, 2, "down_proj"): None})
    assert run(["convert", str(folder), str(tmp_path / "no"), "--gpu", "B200"]) == 1
    assert not (tmp_path / "no").exists()
    capsys.readouterr()
    assert run(["convert", str(folder), str(tmp_path / "dst"), "--gpu", "B200", "--backend", "marlin"]) == 0
    said = capsys.readouterr().err
    assert "layer 0: experts 1 have a zero input_scale of up" in said
    assert "layer 1: experts 2 have no input_scale of down" in said
    assert "weight-only and unharmed" in said


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [[], ["--stream-source"]])
def test_scales_of_a_repository_are_told_too(streamed: list[str], tmp_path: Path) -> None:
    """The scales of a source that is fetched are read from what the conversion keeps of it."""
    checkpoint(tmp_path / "made", "nvfp4", {(0, 1, "up_proj"): 0.0})
    with serving() as hub:
        hub.add("org/model", tmp_path / "made")
        ours = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1"}
        words = ["convert", "org/model", str(tmp_path / "dst"), "--gpu", "H100", *streamed]
        command = [sys.executable, "-c", "from moeq.cli.app import main; main()", *words]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        ran = subprocess.run(command, capture_output=True, text=True, env={**inherited, **ours}, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "layer 0: experts 1 have a zero input_scale of up" in ran.stderr


def test_a_doctor_does_not_recommend_to_serve_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind, gpu, value in (("nvfp4", "B200", 0.0), ("fp8", "H100", None), ("fp8", "H100", float("nan"))):
        folder = checkpoint(tmp_path / f"{kind} {value}", kind, {(1, 2, "down_proj"): value})
        run(["doctor", str(folder), "--gpu", gpu, "--json"])
        document = json.loads(capsys.readouterr().out)
        assert document["deployment"]["serve"] is None
        assert any("layer 1: experts 2" in text for text in document["checkpoint"]["odd"])


def test_scales_that_no_engine_uses_are_no_fault(tmp_path: Path) -> None:
    config = {**NVFP4, "quant_algo": "W4A16_NVFP4"}
    layers = [stored.experts("model.layers.0.mlp.experts", lambda e, p, n, k: stored.nvfp4(n, k))]
    folder = stored.write(tmp_path / "made", {**stored.QWEN, "quantization_config": config}, layers)
    opened = moeq.open(folder)
    opened.read_activation_scales()  # zero, every one of them
    assert opened.scale_faults(0) == ()


def test_transcode_leaves_incomplete_scales_out(tmp_path: Path) -> None:
    """One layer without the scale of one expert becomes weight-only, the other keeps its static scales."""
    folder = checkpoint(tmp_path / "made", "nvfp4", {(1, 2, "down_proj"): None})
    found = transcode(folder, tmp_path / "out", "modelopt")
    assert found.exact
    assert "layer 1: experts 2 have no input_scale of down" in found.warnings[0]
    opened = moeq.open(tmp_path / "out")
    assert opened.scheme_of(0).activation is not None
    assert opened.scheme_of(1).activation is None
    answered = asked(tmp_path / "out", "B200")
    assert answered.ok
    assert [part.verdict.runs_as for part in answered.parts] == ["W4A4", "W4A16"]


@pytest.mark.slow
def test_random_faults_are_found_exactly(tmp_path: Path) -> None:
    rng = random.Random(39)
    for number in range(30):
        kind = rng.choice([*KINDS])
        places = [(layer, expert, name) for layer in range(2) for expert in range(4) for name in NAMES]
        chosen = {place: rng.choice([*FAULTS]) for place in rng.sample(places, rng.randrange(12))}
        folder = checkpoint(tmp_path / str(number), kind, {place: FAULTS[what] for place, what in chosen.items()})
        opened = moeq.open(folder)
        opened.read_activation_scales()
        found = {
            (fault.layer, expert, name): fault.what
            for layer in range(2)
            for fault in opened.scale_faults(layer)
            for expert in fault.experts
            for name in fault.projections or NAMES.values()
        }
        assert found == {(layer, expert, NAMES[name]): what for (layer, expert, name), what in chosen.items()}
        if kind != "fp8":  # a kernel with one scale for each expert hides no fault
            assert asked(folder, "B200", backend="cutlass").ok == (not chosen)


@pytest.mark.parametrize(
    ("shape", "numbers", "owners"),
    [
        ((), [0.0], [{0, 1, 2}]),
        ((1,), [0.0], [{0, 1, 2}]),
        ((3,), [1.0, 0.0, 1.0], [{0}, {1}, {2}]),
        ((3, 2), [1.0, 1.0, 0.0, 1.0, 1.0, 1.0], [{0}, {0}, {1}, {1}, {2}, {2}]),
    ],
)
def test_a_stacked_number_belongs_to_its_expert_or_to_all(
    shape: tuple[int, ...], numbers: list[float], owners: list[set[int]]
) -> None:
    entry = TensorEntry("input_scale", "F32", shape, "model.safetensors", 0, 4 * len(numbers))
    assert list(_owners(numbers, FUSED, entry, 3)) == list(zip(numbers, owners, strict=True))
    assert list(_owners(numbers, 2, entry, 3)) == [(number, {2}) for number in numbers]


@pytest.mark.parametrize(
    ("count", "shown"),
    [(1, "0"), (8, "0, 1, 2, 3, 4, 5, 6, 7"), (9, "0, 1, 2, 3, 4, 5, 6, 7 and 1 more")],
)
def test_many_experts_are_counted(count: int, shown: str) -> None:
    fault = ScaleFault(3, "input_scale", "no", tuple(range(count)), ())
    assert fault.text == f"layer 3: experts {shown} have no input_scale"
    assert not fault.is_stored
    down = ScaleFault(3, "input_scale", "a zero", (2,), ("down", "up"))
    assert (down.text, down.is_stored) == ("layer 3: experts 2 have a zero input_scale of down, up", True)

"""Configs that are made for a scheme say what the scheme is: read again over the same tensors, they give it back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import moeq
from moeq.oracle.quantization_config import config_of
from moeq.schemes.base import QuantKey, ScaleKey, Scheme

CHECKPOINTS = Path(__file__).parents[1] / "data" / "checkpoints"
CONFIGS = ("config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json")


def declared(path: Path) -> bool:
    return "quantization_config" in json.loads((path / "config.json").read_text())


NAMES = [path.parent.name for path in sorted(CHECKPOINTS.glob("*/config.json")) if declared(path.parent)]


def read_again(name: str, folder: Path, quantization_config: dict[str, object]) -> Scheme:
    """Open a checkpoint with another config over the same tensors."""
    folder.mkdir()
    for path in (CHECKPOINTS / name).iterdir():
        if path.name not in CONFIGS:
            (folder / path.name).symlink_to(path)
    config = json.loads((CHECKPOINTS / name / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization_config}))
    checkpoint = moeq.open(folder)
    return checkpoint.scheme_of(checkpoint.info.moe_layers[0])


@pytest.mark.parametrize("name", NAMES)
def test_a_config_gives_its_scheme_back(name: str, tmp_path: Path) -> None:
    checkpoint = moeq.open(CHECKPOINTS / name)
    scheme = checkpoint.scheme_of(checkpoint.info.moe_layers[0])
    found = read_again(name, tmp_path / "again", config_of(scheme))
    assert replace(found, writer=scheme.writer) == scheme


def test_every_declared_method_is_among_them() -> None:
    methods = {
        json.loads((CHECKPOINTS / name / "config.json").read_text())["quantization_config"]["quant_method"]
        for name in NAMES
    }
    assert methods >= {"gptq", "compressed-tensors", "modelopt", "mxfp4"}


@pytest.mark.parametrize(("dynamic", "asked"), [(True, "dynamic"), (False, "static")])
def test_activations_of_fp8(dynamic: bool, asked: str) -> None:
    scale = ScaleKey("f32", "tensor", (-1, -1), dynamic=dynamic)
    weight = QuantKey("e4m3", "f8", ScaleKey("f32", "tensor", (-1, -1)))
    found = config_of(Scheme(format="fp8", weight=weight, activation=QuantKey("e4m3", "f8", scale), quant_method="fp8"))
    assert found == {"quant_method": "fp8", "activation_scheme": asked}
    assert config_of(Scheme(format="fp8", weight=weight, quant_method="fp8"))["activation_scheme"] == "dynamic"

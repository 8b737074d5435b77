"""Small checkpoints of the self-test are what they are named after, and equal seeds write equal ones."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

import moeq
from moeq.check.synthetic import RECIPES
from moeq.layouts.registry import get_layout

SCHEMES = {
    "gptq-int4": "gptq int4 g32 sym",
    "gptq-int4-asym": "gptq int4 g32 asym",
    "gptq-int4-actorder": "gptq int4 g32 sym act-order",
    "gptq-int8": "gptq int8 g32 sym",
    "awq-int4": "awq int4 g32 asym",
    "w8a8-int8": "ct-int8 int8 channel sym act-int8",
    "mxfp4": "mxfp4 e2m1 g32 sym",
    "nvfp4": "nvfp4 e2m1 g16 sym act-e2m1",
    "fp8-block": "fp8-block e4m3 g128 sym act-e4m3",
    "fp8-channel": "fp8 e4m3 channel sym act-e4m3",
    "mxfp8": "mxfp8 e4m3 g32 sym act-e4m3",
}


def test_every_recipe_is_of_its_scheme_and_fits_its_layout(tmp_path: Path) -> None:
    found = {}
    for recipe in RECIPES:
        recipe.write(tmp_path / recipe.name)
        checkpoint = moeq.open(tmp_path / recipe.name)
        assert checkpoint.info.refusals == ()
        assert (checkpoint.info.num_experts, checkpoint.info.top_k) == (4, 2)
        (scheme,) = checkpoint.info.schemes
        found[recipe.name] = scheme.title
        for role in ("w13", "w2"):
            assert get_layout(recipe.layout, allow_lossy=True).problems(checkpoint.matrix(0, 1, role).spec) == []
    assert found == SCHEMES


def test_seeds(tmp_path: Path) -> None:
    for number, seed in enumerate((0, 0, 1)):
        RECIPES[0].write(tmp_path / str(number), seed)
    first, again, other = ((tmp_path / str(number) / "model.safetensors").read_bytes() for number in range(3))
    assert first == again != other


def test_nvfp4_has_a_scale_of_down_that_is_not_that_of_gate_and_up(tmp_path: Path) -> None:
    """A kernel that takes the one for the other is seen."""
    (recipe,) = (one for one in RECIPES if one.name == "nvfp4")
    recipe.write(tmp_path / "made")
    stored = load_file(tmp_path / "made" / "model.safetensors")
    scales: dict[str, set[float]] = {}
    for name, tensor in stored.items():
        if name.endswith(".weight_scale_2"):
            scales.setdefault(name.split(".")[-2], set()).add(float(tensor))
    gate, up, down = (scales[f"{name}_proj"] for name in ("gate", "up", "down"))
    assert gate == up
    assert len(gate) == len(down) == len(gate | down) - 1 == 1

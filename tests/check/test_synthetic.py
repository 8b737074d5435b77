"""Small checkpoints of the self-test are what they are named after, and equal seeds write equal ones."""

from __future__ import annotations

from pathlib import Path

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

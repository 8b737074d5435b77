"""The public Python interface, as the README shows it."""

from __future__ import annotations

import moeq

NAME = "gptq-int4-g32-qwen3moe"


def test_every_public_name_resolves() -> None:
    for name in moeq.__all__:
        assert getattr(moeq, name) is not None
    assert set(moeq.__all__) == set(dir(moeq))


def test_the_example_of_the_readme(checkpoints, tmp_path) -> None:
    checkpoint = moeq.open(checkpoints / NAME)
    assert checkpoint.info.num_experts == 4
    assert checkpoint.dequantize(0, 3, "gate").shape == (128, 256)
    deployment = moeq.Deployment(gpu=moeq.gpu("H100"))
    verdict = moeq.decide(checkpoint, deployment)
    assert verdict.convert is not None
    moeq.convert(checkpoints / NAME, tmp_path / "out", deployment)
    assert moeq.run_check(tmp_path / "out", source=checkpoints / NAME).ok


def test_unknown_names_are_attribute_errors() -> None:
    assert not hasattr(moeq, "no_such_thing")

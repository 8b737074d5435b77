"""The public Python interface, as the README shows it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from importlib import resources
from typing import Any, get_type_hints

import pytest

import moeq
from moeq.pipeline.plan.options import ConvertKeywords, ConvertOptions

NAME = "gptq-int4-g32-qwen3moe"


def test_every_public_name_resolves() -> None:
    for name in moeq.__all__:
        assert getattr(moeq, name) is not None
    assert set(moeq.__all__) == set(dir(moeq))


def test_folders_do_not_hide_functions() -> None:
    import moeq.transcode.transcode

    assert inspect.isfunction(moeq.transcode)
    assert moeq.transcode.__module__ == "moeq.api.functions"
    assert sys.modules["moeq.transcode.transcode"].transcode is not moeq.transcode


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


def test_a_plan_from_python(checkpoints) -> None:
    job = moeq.plan(checkpoints / NAME, moeq.Deployment(gpu=moeq.gpu("A100")))
    assert set(job.answer.layouts.values()) == {"marlin-wna16/1"}
    assert job.plan.bytes_out > 0


@pytest.mark.parametrize("fields", [{"gpu": "A100"}, {"tp": 0}, {"ep": True}, {"dp": "2"}, {"dtype": "int8"}])
def test_deployments_that_cannot_be(fields: dict[str, Any]) -> None:
    with pytest.raises(moeq.MoeqError) as caught:
        moeq.Deployment(**{"gpu": moeq.gpu("A100"), **fields})
    assert caught.value.code == "usage.deployment"


def test_a_projection_that_there_is_not(checkpoints, tmp_path) -> None:
    moeq.convert(checkpoints / NAME, tmp_path / "out", moeq.Deployment(gpu=moeq.gpu("A100")))
    for folder in (checkpoints / NAME, tmp_path / "out"):
        with pytest.raises(moeq.MoeqError, match="no projection 'gates'") as caught:
            moeq.open(folder).dequantize(0, 0, "gates")  # type: ignore[arg-type]
        assert caught.value.hint == "projections: gate, up, down, w2, w13"


def test_both_packages_are_typed() -> None:
    assert resources.files("moeq").joinpath("py.typed").is_file()
    assert resources.files("moeq_kernels").joinpath("py.typed").is_file()


USER = """
import moeq

checkpoint = moeq.open("source")
deployment = moeq.Deployment(gpu=moeq.gpu("H100"), tp=2)
verdict = moeq.decide(checkpoint, deployment)
layout: str | None = verdict.convert.layout if verdict.convert else None
conversion = moeq.convert("source", "destination", deployment)
by_name = moeq.convert("source", "destination", gpu="H100", tp=2, allow_lossy=True, progress=True)
backend: str = moeq.plan("source", gpu="H100", layout="marlin-wna16/1").answer.backend
exact: bool = moeq.transcode("source", to="gptq", check_only=True).exact
options = moeq.CheckOptions(tokens=[1, 7])
ok: bool = moeq.run_check("destination", options=options).ok
experts = moeq.load_experts("destination", 0)
try:
    job = moeq.plan("source", deployment)
except moeq.MoeqError as error:
    print(error.code, error.hint)
"""


@pytest.mark.slow
def test_a_users_script_passes_mypy_strict(tmp_path) -> None:
    (tmp_path / "script.py").write_text(USER)
    argv = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "script.py"]
    result = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_keywords_of_convert_are_the_fields_of_the_options() -> None:
    """Types of keywords are spelled beside the record, since no type checker derives them from it."""
    assert get_type_hints(ConvertKeywords) == get_type_hints(ConvertOptions)
    assert ConvertKeywords.__optional_keys__ == {field.name for field in fields(ConvertOptions)}


def test_an_unknown_option_of_convert_is_refused(checkpoints, tmp_path) -> None:
    options: dict[str, Any] = {"layuot": "marlin-wna16/1"}
    with pytest.raises(TypeError, match="layuot"):
        moeq.convert(checkpoints / NAME, tmp_path / "out", moeq.Deployment(gpu=moeq.gpu("H100")), **options)

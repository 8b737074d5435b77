"""The default conversion on a GPU that moeq has kernels for is what they read fastest."""

from __future__ import annotations

from pathlib import Path

import pytest

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.pipeline.plan.decide import advised
from moeq.pipeline.plan.options import Question


def chosen(source: Path, **deployment: object) -> tuple[str, str | None]:
    """Layout and reason of the first converted layer."""
    where = Deployment(**{"gpu": parse_gpu("H100"), **deployment})  # type: ignore[arg-type]
    found = advised(moeq.open(source), Question(where)).first
    return found.layout, found.why


@pytest.mark.parametrize("gpu", ["H100", "H200"])
@pytest.mark.parametrize("name", ["mxfp4-gptoss", "ct-mxfp4-qwen3moe"])
def test_on_hopper_mxfp4_is_written_for_moeqs_kernels(name, gpu, checkpoints) -> None:
    layout, why = chosen(checkpoints / name, gpu=parse_gpu(gpu))
    assert layout == "moeq-mxfp4/1"
    assert f"fastest measured on {gpu}; --backend " in (why or "")


@pytest.mark.parametrize(
    ("deployment", "layout"),
    [
        ({"gpu": parse_gpu("A100")}, "marlin-mxfp4-interleaved/1"),  # no kernels of moeq's for this GPU
        ({"gpu": parse_gpu("B200")}, "trtllm-mxfp4/1"),
        ({"backend": "triton"}, "triton-kernels-hopper/1"),
    ],
)
def test_elsewhere_the_engine_chooses(deployment, layout, checkpoints) -> None:
    assert chosen(checkpoints / "mxfp4-gptoss", **deployment)[0] == layout


def test_what_an_engines_own_kernel_costs_is_said(checkpoints) -> None:
    _, why = chosen(checkpoints / "mxfp4-gptoss", backend="triton")
    assert "without --backend moeq-mxfp4/1 is written" in (why or "")


def test_where_adapters_rule_moeqs_kernels_out_the_engine_chooses(checkpoints) -> None:
    assert chosen(checkpoints / "mxfp4-gptoss", lora=True)[0] != "moeq-mxfp4/1"


def test_eight_bit_activations_stay_with_the_kernels_that_have_them(checkpoints) -> None:
    assert chosen(checkpoints / "ct-w8a8-qwen3moe")[0] == "int8-w8a8/1"
    assert chosen(checkpoints / "modelopt-fp8-qwen3moe")[0] == "flashinfer-cutlass-fp8-tensor/1"

"""The result of a transcoding before it is written, its config, and what is noted about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint.builder import config, write
from refusing import refuses

from moeq.model import Checkpoint
from moeq.model import open as open_checkpoint
from moeq.model.quantized_modules import QuantizedModule
from moeq.schemes.base import FP8_PER_TOKEN, FP8_STATIC, MXFP8, NVFP4, QuantKey
from moeq.transcode.expert_pack import GGUF_NAME
from moeq.transcode.planned_result import _with_expert_dtype, planned_result, written_config
from moeq.transcode.result_check import engine_refusal, warnings
from moeq.transcode.survey import ModuleSurvey, RecodedProjection, TranscodeRequest
from moeq.transcode.target_formats import TARGETS
from moeq.transcode.transcode import dropped_parts, notes
from moeq.transcode.transcode_plan import TranscodePlan, make_transcode_plan


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write(tmp_path_factory.mktemp("planned")))


def planned(made: Checkpoint, to: str = "compressed-tensors") -> TranscodePlan:
    return make_transcode_plan(made, TranscodeRequest("src", to))


def test_headers_without_data(made: Checkpoint) -> None:
    plan = planned(made)
    result = planned_result(made, plan)
    assert result.info.name == made.source.name
    (file,) = [file for file in plan.files if "model.layers.0.mlp.experts.1.up_proj.weight_scale" in file.tensors]
    entry = result.source.tensors["model.layers.0.mlp.experts.1.up_proj.weight_scale"]
    assert (entry.dtype, entry.shape, entry.file) == ("F16", (32, 2), file.name)
    assert (entry.start, entry.end) == file.form.ranges[entry.name]
    assert result.source.tensors.keys() == {name for one in plan.files for name in one.tensors}
    with refuses("source.missing-file", f"{file.name} is planned and not written yet"):
        result.source.path(file.name)


def test_configs_that_are_written(made: Checkpoint) -> None:
    document = config(text_config={"dtype": "float32", "n": 1, "more": {"torch_dtype": "float32"}}, dtype="float32")
    plan = planned(made)
    found = written_config(document, plan)
    assert found == {**document, "quantization_config": plan.config}
    floats = written_config(document, planned(made, "bf16"))
    assert "quantization_config" not in floats
    assert floats["dtype"] == "bfloat16"
    assert floats["text_config"] == {"dtype": "bfloat16", "n": 1, "more": {"torch_dtype": "bfloat16"}}
    assert "torch_dtype" not in floats
    assert written_config(config(torch_dtype="x"), planned(made, "fp16"))["torch_dtype"] == "float16"
    assert written_config(config(), planned(made, "fp32"))["torch_dtype"] == "float32"
    numbers = written_config(config(dtype=5), planned(made, "fp32"))
    assert numbers["dtype"] == 5
    pack = replace(plan, target=TARGETS["expert-pack"])
    assert written_config(document, pack) == document


@pytest.mark.parametrize(
    ("spelling", "written"),
    [("deepseek-fp4", "fp4"), ("deepseek-fp8", "fp8"), ("fp8-block", "fp8"), ("ct-mxfp4", None), ("plain", None)],
)
def test_what_deepseek_v4_says_of_its_experts(made: Checkpoint, spelling: str, written: str | None) -> None:
    """Engines assume FP4 where it says nothing; other families have no such key."""
    plan = planned(made)
    layer = plan.survey.layers[0]
    kinds = {
        0: {name: replace(one, spelling=spelling) for name, one in layer.kinds[0].items()},
        1: layer.kinds[1],
    }
    survey = replace(plan.survey, layers=(replace(layer, kinds=kinds),))
    assert plan.survey.family is not None
    deepseek = replace(survey, family=replace(plan.survey.family, model_types=("deepseek_v4",)))
    document = {"model_type": "x", "expert_dtype": "int2"}
    assert _with_expert_dtype(document, replace(plan, survey=survey)) == document
    assert _with_expert_dtype(document, replace(plan, survey=replace(survey, family=None))) == document
    found = _with_expert_dtype(document, replace(plan, survey=deepseek))
    assert found == {"model_type": "x", **({"expert_dtype": written} if written else {})}


STATIC = "the source has static scales of activations; with this format engines take them at run time"
FROM_16 = "engines quantise activations to FP8 with this format; the source was weight-only"
OTHER = "engines quantise activations to another type with this format than with the source's"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (None, None, []),
        (FP8_STATIC, FP8_STATIC, []),
        (FP8_PER_TOKEN, FP8_PER_TOKEN, []),
        (FP8_PER_TOKEN, FP8_STATIC, []),
        (FP8_STATIC, FP8_PER_TOKEN, [STATIC]),
        (MXFP8, NVFP4, [OTHER]),
        (FP8_STATIC, NVFP4, [STATIC, OTHER]),
        (None, FP8_PER_TOKEN, [FROM_16]),
        (
            FP8_PER_TOKEN,
            None,
            ["the source asks for e4m3 activations, the result is weight-only: activations stay 16-bit"],
        ),
    ],
)
def test_what_engines_do_with_activations(
    made: Checkpoint, before: QuantKey | None, after: QuantKey | None, expected: list[str]
) -> None:
    plan = planned(made)
    (kind, reader), *_ = plan.described.items()
    old, name = kind
    source = replace(old.source, scheme=replace(old.source.scheme, activation=before))
    read = replace(reader, scheme=replace(reader.scheme, activation=after))
    assert list(notes(replace(plan, described={(replace(old, source=source), name): read}))) == expected


def test_other_notes(made: Checkpoint) -> None:
    plan = planned(made)
    assert notes(plan) == ()
    pack, *_ = notes(replace(plan, target=TARGETS["expert-pack"]))
    assert pack == f"SGLang takes the rest of the model from a GGUF file: put one beside the pack as {GGUF_NAME}"
    told = notes(replace(plan, floats=("a.b", "a.c"), request=replace(plan.request, sort_act_order=True)))
    assert told == (
        "vLLM cannot load a.b and 1 more in this format: written as floats",
        "intermediate features of experts with sorted columns are in another order; moeq diff sees that",
    )


@pytest.mark.parametrize(
    ("to", "dropped"), [("modelopt", {}), ("nvfp4", {}), ("compressed-tensors", {}), ("bf16", {"input_scale": 12})]
)
def test_scales_that_a_target_has_no_place_for(checkpoints: Path, to: str, dropped: dict[str, int]) -> None:
    made = open_checkpoint(checkpoints / "modelopt-nvfp4-qwen3moe")
    plan = planned(made, to)
    experts = dropped_parts(made, replace(plan, survey=replace(plan.survey, modules=())))
    assert experts == dropped


def test_scales_of_other_modules_are_counted_too(checkpoints: Path) -> None:
    """One is carried over, two are dropped; parts that are no scales of activations do not count."""
    made = open_checkpoint(checkpoints / "modelopt-nvfp4-qwen3moe")
    plan = planned(made, "nvfp4")
    carried = next(projected for projected, _ in plan.described if projected.activation)
    entry = next(iter(made.source.tensors.values()))

    def module(name: str, projected: RecodedProjection, *parts: str) -> ModuleSurvey:
        return ModuleSurvey(QuantizedModule(name, dict.fromkeys(parts, entry), projected.source), name, projected)

    dropped = replace(carried, activation=None)
    modules = (
        module("a", carried, "weight", "input_scale"),
        module("b", dropped, "weight", "input_scale"),
        module("c", dropped, "weight", "weight_scale"),
        module("d", dropped, "input_scale"),
    )

    def count(*some: ModuleSurvey) -> dict[str, int]:
        return dropped_parts(made, replace(plan, survey=replace(plan.survey, layers=(), modules=some)))

    assert count(*modules) == {"input_scale": 2}
    assert count(*modules[:2]) == {"input_scale": 1}
    assert count(modules[0], modules[2]) == {}


def test_a_result_that_no_engine_can_be_asked_about(tmp_path: Path) -> None:
    """Without the number of experts per token no engine runs a model, whatever its format."""
    made = open_checkpoint(write(tmp_path, document=config(num_experts_per_tok=None)))
    plan = planned(made)
    assert engine_refusal(made, plan) is None
    assert warnings(made, plan) == ()
    experts: Any = replace(plan, target=TARGETS["kt-amx-int4"])
    assert warnings(made, experts) == ()

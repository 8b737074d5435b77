"""The default conversion on a GPU that moeq has kernels for is what they read fastest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from refusing import refuses

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.pipeline.plan.candidates import LayoutChoice, candidates
from moeq.pipeline.plan.decide import advised
from moeq.pipeline.plan.layer_verdict import judge_checkpoint
from moeq.pipeline.plan.options import ConvertOptions, Question

GPTOSS = "mxfp4-gptoss"


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
    assert f"fastest measured on {gpu}; backend=" in (why or "")


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
    assert "without backend, moeq-mxfp4/1 would be written" in (why or "")


def test_only_an_asked_backend_is_told_what_would_be_written_without_it(checkpoints) -> None:
    checkpoint, where = moeq.open(checkpoints / "mxfp4-gptoss"), Deployment(gpu=parse_gpu("H100"))
    found = [*candidates(checkpoint, Question(where), 0, None, judge_checkpoint(checkpoint, where, 0))]
    assert [row.layout for row in found[:2]] == ["moeq-mxfp4/1", "triton-kernels-hopper/1"]
    assert not any("without backend" in (row.why or "") for row in found)


def test_where_adapters_rule_moeqs_kernels_out_the_engine_chooses(checkpoints) -> None:
    assert chosen(checkpoints / "mxfp4-gptoss", lora=True)[0] != "moeq-mxfp4/1"


def test_eight_bit_activations_stay_with_the_kernels_that_have_them(checkpoints) -> None:
    assert chosen(checkpoints / "ct-w8a8-qwen3moe")[0] == "int8-w8a8/1"
    assert chosen(checkpoints / "modelopt-fp8-qwen3moe")[0] == "flashinfer-cutlass-fp8-tensor/1"


def listed(source: Path, gpu: str, **deployment: object) -> list[tuple[str, str | None]]:
    """Layout and option of every candidate of the first layer, in order."""
    checkpoint, where = moeq.open(source), Deployment(gpu=parse_gpu(gpu), **deployment)  # type: ignore[arg-type]
    found = candidates(checkpoint, Question(where), 0, None, judge_checkpoint(checkpoint, where, 0))
    return [(row.layout, row.flag) for row in found]


@pytest.mark.parametrize(
    ("name", "gpu", "deployment", "expected"),
    [
        (GPTOSS, "H100", {}, [
            ("moeq-mxfp4/1", None), ("triton-kernels-hopper/1", None),
            ("flashinfer-cutlass-mxfp4-bf16/1", "--moe-backend flashinfer_cutlass"),
            ("marlin-mxfp4-interleaved/1", "--moe-backend marlin"),
        ]),
        (GPTOSS, "B200", {}, [
            ("trtllm-mxfp4/1", None), ("triton-kernels-blackwell/1", "--moe-backend triton"),
            ("marlin-mxfp4-interleaved/1", "--moe-backend marlin"),
        ]),
        (GPTOSS, "H100", {"backend": "triton"}, [("triton-kernels-hopper/1", None)]),
        # Eight-bit activations on the tensor cores: nothing that multiplies in 16 bits takes their place.
        ("ct-mxfp4-qwen3moe", "B200", {}, [("cutlass-mxfp4/1", None)]),
        ("ct-nvfp4-qwen3moe", "B200", {}, [("trtllm-nvfp4/1", None)]),
        ("gptq-int4-g32-qwen3moe", "H100", {}, [("marlin-wna16/1", "--moe-backend marlin")]),
        ("gptq-int4-g32-qwen3moe", "A100", {"backend": "marlin"}, [("marlin-wna16/1", None)]),
    ],
)  # fmt: skip
def test_every_candidate_once_in_the_engines_order(name, gpu, deployment, expected, checkpoints) -> None:
    assert listed(checkpoints / name, gpu, **deployment) == expected


@pytest.mark.parametrize(
    ("name", "gpu", "deployment", "code", "text"),
    [
        (GPTOSS, "A100", {"backend": "nonsense"}, "usage.unknown-backend", "'nonsense' names no backend of MXFP4"),
        (GPTOSS, "A100", {"backend": "flashinfer_trtllm"}, "answer.backend-unsupported", "cannot run this"),
        ("ct-fp8-block-qwen3moe", "H100", {"tp": 2}, "answer.no-backend", "64 does not divide into blocks of 128"),
        ("ct-fp8-block-qwen3moe", "H100", {}, "answer.nothing-to-convert", "runs TRITON here: it reads"),
        ("ct-fp8-block-qwen3moe", "H100", {"backend": "triton"}, "answer.no-backend", "nothing to convert to"),
        ("gptq-int4-g32-qwen3moe", "A100", {"tp": 4}, "usage.tp", "2 attention heads are not divisible by tp 4"),
    ],
)
def test_no_candidate_says_why(name, gpu, deployment, code, text, checkpoints) -> None:
    with pytest.raises(MoeqError, match=text) as caught:
        listed(checkpoints / name, gpu, **deployment)
    assert caught.value.code == code


def test_a_layout_that_this_gpu_does_not_read_is_written_by_force(checkpoints) -> None:
    checkpoint, where = moeq.open(checkpoints / GPTOSS), Deployment(gpu=parse_gpu("H100"))

    def first(**options: bool) -> LayoutChoice:
        question = Question(where, ConvertOptions(layout="trtllm-mxfp4/1", **options))
        return next(iter(candidates(checkpoint, question, 0, None, judge_checkpoint(checkpoint, where, 0))))

    with pytest.raises(MoeqError, match="trtllm-mxfp4/1") as caught:
        first()
    assert (caught.value.code, caught.value.hint) == ("usage.layout-gpu", "force_layout=True writes it anyway")
    assert first(force_layout=True).overridden == (caught.value.message,)


def test_the_engines_own_reason_comes_first(checkpoints) -> None:
    _, why = chosen(checkpoints / "gptq-int4-g32-qwen3moe")
    assert (why or "").startswith("HUMMING: Humming's bytes depend on the GPU's SM version")


def test_a_backend_that_is_asked_for_raises_and_the_engines_own_choice_does_not(checkpoints) -> None:
    source = checkpoints / "ct-fp8-block-qwen3moe"
    assert not moeq.decide(source, gpu="H100", tp=2).ok
    with pytest.raises(MoeqError, match="'nonsense' names no backend") as caught:
        moeq.decide(source, gpu="H100", backend="nonsense")
    assert caught.value.code == "usage.unknown-backend"


def test_conversions_are_not_sources(checkpoints, tmp_path) -> None:
    moeq.convert(checkpoints / "gptq-int4-g32-qwen3moe", tmp_path / "out", gpu="A100")
    for action in (moeq.plan, moeq.decide):
        with pytest.raises(MoeqError) as caught:
            action(tmp_path / "out", gpu="A100")
        assert caught.value.code == "usage.already-converted"
    with pytest.raises(MoeqError) as caught:
        moeq.convert(tmp_path / "out", tmp_path / "again", gpu="A100")
    assert caught.value.code == "usage.already-converted"


def test_static_scales_of_a_folder_are_read_and_those_of_a_repository_are_not(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    opened = moeq.open(checkpoints / "modelopt-fp8-qwen3moe")
    monkeypatch.setattr(type(opened), "read_activation_scales", lambda checkpoint: read.append(checkpoint))
    question = Question(Deployment(gpu=parse_gpu("H100")))
    advised(opened, question)
    assert read == [opened]
    monkeypatch.setattr("moeq.pipeline.plan.decide.LocalSource", int)
    advised(opened, question)
    assert read == [opened]


def asked(source: Path, gpu: str, deployment: dict[str, Any], **options: Any) -> LayoutChoice:
    """The one candidate where a layout is asked for."""
    checkpoint, where = moeq.open(source), Deployment(gpu=parse_gpu(gpu), **deployment)
    question = Question(where, ConvertOptions(**options))
    (found,) = candidates(checkpoint, question, 0, None, judge_checkpoint(checkpoint, where, 0))
    return found


GPTQ = "gptq-int4-g32-qwen3moe"
HEADS = "2 attention heads are not divisible by tp 4 (2 % 4 = 2)"


@pytest.mark.parametrize(
    ("name", "gpu", "deployment", "layout", "backend", "flag"),
    [
        (GPTQ, "A100", {"engine": "moeq"}, "marlin-wna16/1", "MARLIN", None),
        (GPTQ, "A100", {}, "marlin-wna16/1", "MARLIN", None),
        (GPTQ, "A100", {"backend": "marlin"}, "marlin-wna16/1", "MARLIN", None),
        (
            GPTOSS, "H100", {}, "flashinfer-cutlass-mxfp4-bf16/1", "FLASHINFER_CUTLASS_MXFP4_BF16",
            "--moe-backend flashinfer_cutlass",
        ),
        (GPTOSS, "H100", {}, "marlin-mxfp4-interleaved/1", "MARLIN", "--moe-backend marlin"),
        ("modelopt-fp8-qwen3moe", "H100", {}, "marlin-fp8/1", "MARLIN", "--moe-backend marlin"),
    ],
)  # fmt: skip
def test_a_layout_that_is_asked_for(
    name: str, gpu: str, deployment: dict[str, Any], layout: str, backend: str, flag: str | None, checkpoints: Path
) -> None:
    found = asked(checkpoints / name, gpu, deployment, layout=layout)
    assert (found.layout, found.backend, found.flag, found.overridden) == (layout, backend, flag, ())


@pytest.mark.parametrize(
    ("name", "gpu", "deployment", "layout", "why"),
    [
        (
            GPTQ, "A100", {"engine": "moeq"}, "moeq-wna16/1",
            "no backend of moeq reads moeq-wna16/1 for this checkpoint on A100: MOEQ: weights are int4, this kernel "
            "reads int2",
        ),
        (
            GPTQ, "A100", {"engine": "moeq"}, "trtllm-mxint4/1",
            "no backend of moeq reads trtllm-mxint4/1 for this checkpoint on A100 (it is for SM100 family)",
        ),
        (
            GPTQ, "A100", {}, "triton-wna16/1",
            "no backend of vllm@0.33.0 reads triton-wna16/1 for this checkpoint on A100: TRITON: expert bias: this "
            "checkpoint has none, but AutoGPTQMoEMethod assumes it may have one",
        ),
        (
            GPTQ, "A100", {}, "moeq-wna16/1",
            "no backend of vllm@0.33.0 reads moeq-wna16/1 for this checkpoint on A100 (it is for SM80 and newer, "
            "gfx942, gfx950)",
        ),
        (
            GPTQ, "A100", {"tp": 4}, "marlin-wna16/1",
            f"{HEADS}; no backend of vllm@0.33.0 reads marlin-wna16/1 for this checkpoint on A100: MARLIN: "
            "vllm@0.33.0: model.layers.0.self_attn.o_proj has 2 groups of input features, which tp 4 would cut; "
            f"{HEADS} | BATCHED_MARLIN: activations are standard, the kernel takes batched",
        ),
    ],
)  # fmt: skip
def test_a_layout_that_nobody_reads_here(
    name: str, gpu: str, deployment: dict[str, Any], layout: str, why: str, checkpoints: Path
) -> None:
    with refuses("usage.layout-gpu", why, "force_layout=True writes it anyway"):
        asked(checkpoints / name, gpu, deployment, layout=layout)
    found = asked(checkpoints / name, gpu, deployment, layout=layout, force_layout=True)
    assert found.layout == layout
    assert "; ".join(found.overridden) == why
    told = why.rpartition(f"{gpu}: ")[2].partition(":")[0]
    assert found.backend == (layout if "(it is for" in why else told)


def test_a_layout_and_a_backend_that_do_not_fit(checkpoints: Path) -> None:
    message = 'backend="marlin" with layout="triton-wna16/1": marlin reads marlin-wna16/1'
    with refuses("usage.layout-backend", message, "name one of them: the layout follows from the backend"):
        asked(checkpoints / GPTQ, "A100", {"backend": "marlin"}, layout="triton-wna16/1")

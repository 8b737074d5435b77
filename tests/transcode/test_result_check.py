"""What is said of a result that an engine will not run, before it is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pipeline.mixing import rewritten
from refusing import refuses
from transcode.test_transcoder import SPEC as INT4

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.model import open as open_checkpoint
from moeq.transcode import result_check
from moeq.transcode.advise import _judged
from moeq.transcode.find_fast_item import rows_of
from moeq.transcode.result_check import engine_refusal, warnings, with_loadable_modules
from moeq.transcode.stored_matrices import StoredBlocks
from moeq.transcode.survey import TranscodeRequest
from moeq.transcode.transcode_plan import TranscodePlan, make_transcode_plan

GPUS = "H100, B200, A100, MI300X"
SIZES = "4 bits and sym false is not supported; 4 or 8 bits, symmetric"
NAMES = (
    "vllm@0.33.0: GptOssForCausalLM does not load mlp.experts.*.gate_proj, but mlp.experts.{down_proj, gate_up_proj}"
)


@pytest.mark.parametrize(
    ("name", "to", "told", "works"),
    [
        ("ct-int4-asym-g32-mixtral", "gptq_v2", f"layer 0: GPTQ with {SIZES}", 'to="compressed-tensors"'),
        ("mxfp4-gptoss", "compressed-tensors", f"layer 0: {NAMES}", 'to="mxfp4"'),
        (
            "gptq-int4-g32-actorder-qwen3moe", "gptq", "layer 0: act-order: desc_act is true with group_size 32",
            'to="bf16", allow_lossy=True',
        ),
    ],
)  # fmt: skip
def test_a_result_that_no_gpu_runs(checkpoints: Path, name: str, to: str, told: str, works: str) -> None:
    """The first GPU's reason is told, with the first other target that works."""
    made = open_checkpoint(checkpoints / name)
    plan = make_transcode_plan(made, TranscodeRequest("src", to))
    found = engine_refusal(made, plan)
    assert found is not None
    assert (found.text, found.unloadable) == (told, False)
    assert f"vLLM runs the result on none of {GPUS}: {told}; {works} works" in warnings(made, plan)
    assert with_loadable_modules(made, plan) is plan


def test_the_first_gpu_counts(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = open_checkpoint(checkpoints / "mxfp4-gptoss")
    plan = make_transcode_plan(made, TranscodeRequest("src", "compressed-tensors"))
    for gpus, gpu in ((("H100", "MI300X"), False), (("MI300X", "H100"), True)):
        monkeypatch.setattr(result_check, "GPUS", gpus)
        found = engine_refusal(made, plan)
        assert found is not None
        assert ("MI300X (rocm, gfx942)" in found.text) == gpu
        assert "does not load mlp.experts" in found.text


def test_a_result_that_no_engine_would_load(checkpoints: Path) -> None:
    made = open_checkpoint(checkpoints / "ct-fp8-channel-qwen3moe")
    plan = make_transcode_plan(made, TranscodeRequest("src", "modelopt"))
    text = (
        "layer 0: vllm@0.33.0: ModelOptFp8MoEMethod cannot load the experts: the file has gate.weight_scale (F32 "
        "[64]), and the method's parameter takes []"
    )
    found = engine_refusal(made, plan)
    assert found is not None
    assert (found.text, found.unloadable) == (text, True)
    message = f'to="modelopt": engines would not load the result: {text}'
    with refuses("usage.target", message, 'to="compressed-tensors"'):
        warnings(made, plan)


def test_a_result_that_one_gpu_runs(checkpoints: Path) -> None:
    made = open_checkpoint(checkpoints / "gptq-int4-g32-qwen3moe")
    plan = make_transcode_plan(made, TranscodeRequest("src", "compressed-tensors"))
    assert engine_refusal(made, plan) is None
    assert warnings(made, plan) == ()
    assert with_loadable_modules(made, plan) is plan


def test_modules_that_cannot_be_loaded_become_floats(checkpoints: Path) -> None:
    """Those alone: the output projection has whole blocks."""
    made = open_checkpoint(checkpoints / "gptq-int4-g32-qwen3moe")
    plan = make_transcode_plan(made, TranscodeRequest("src", "fp8"))
    found = with_loadable_modules(made, plan)
    assert set(found.floats) == {f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qkv"}
    floats = make_transcode_plan(made, TranscodeRequest("src", "bf16"))
    assert with_loadable_modules(made, floats) is floats
    experts = make_transcode_plan(made, TranscodeRequest("src", "kt-amx-int4", numa=1))
    assert with_loadable_modules(made, experts) is experts


def static(checkpoints: Path, folder: Path, value: float) -> tuple[TranscodePlan, object]:
    """An FP8 checkpoint with one other activation scale in layer 1."""

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = next(name for name in tensors if "layers.1" in name and name.endswith("down_proj.input_scale"))
        tensors[name].fill_(value)
        return tensors

    made = open_checkpoint(rewritten(checkpoints / "modelopt-fp8-qwen3moe", folder, change))
    made.read_activation_scales()
    return make_transcode_plan(made, TranscodeRequest("src", "compressed-tensors")), made


@pytest.mark.parametrize(("value", "harmed"), [(0.5, False), (float("nan"), True)])
def test_scales_are_carried_over_with_their_faults(
    checkpoints: Path, tmp_path: Path, value: float, harmed: bool
) -> None:
    """A transcoding does not help where the engine would compute NaN, be it in a later layer than the first."""
    plan, made = static(checkpoints, tmp_path / "made", value)
    verdict = _judged(made, plan, Deployment(parse_gpu("H100")))  # type: ignore[arg-type]
    assert ("NaN" in str(verdict.gates) + str(verdict.notes)) == harmed


def test_rows_of_a_stored_tensor(checkpoints: Path) -> None:
    made = open_checkpoint(checkpoints / "ct-fp8-block-qwen3moe")
    entry = next(entry for name, entry in made.source.tensors.items() if name.endswith("o_proj.weight"))
    n, k = entry.shape[0], 2 * entry.shape[1]
    assert rows_of(entry, None) == (entry.start, entry.end)
    assert rows_of(entry, (0, n)) == (entry.start, entry.end)
    assert rows_of(entry, (3, 5)) == (entry.start + 3 * k, entry.start + 5 * k)


@pytest.mark.parametrize(
    ("kind", "element", "group", "scale", "nbytes"),
    [
        ("q4_0", "int4", 32, "f16", 16 * 256 // 2 + 16 * 8 * 2),
        ("q8_0", "int8", 32, "f16", 16 * 256 + 16 * 8 * 2),
        ("mxfp4", "e2m1", 32, "e8m0", 16 * 256 // 2 + 16 * 8),
        ("nvfp4", "e2m1", 16, "e4m3", 16 * 256 // 2 + 16 * 16 + 64),
        ("q4_k", "f32", 256, "f32", 0),
        ("f16", "f16", 256, "f32", 0),
    ],
)
def test_scratch_of_blocks(kind: str, element: str, group: int, scale: str, nbytes: int) -> None:
    """Codes, scales, and NVFP4's global scale of every row; numbers need none."""
    spec = replace(
        INT4, n=16, k=256, element=element, group_size=group, scale_dtype=scale, symmetric=True, act_order=False
    )
    assert StoredBlocks(kind, spec, ()).scratch_bytes == nbytes

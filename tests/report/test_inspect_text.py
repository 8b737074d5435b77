"""What `moeq inspect` says of a checkpoint, line by line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gguf_files import write_model

import moeq
from moeq.errors import MoeqError
from moeq.report.backend_matrix import MatrixCell, _cell, backend_matrix
from moeq.report.inspect_text import Inspection, checkpoint_facts, next_steps
from moeq.report.publishing import open_push
from moeq.report.verdict_text import rounding_text


def test_facts_of_checkpoints(checkpoints: Path) -> None:
    info = moeq.open(checkpoints / "gptq-int4-g32-actorder-qwen3moe").info
    lines = list(checkpoint_facts(info, True))
    assert lines == [
        ("model", "Qwen3MoeForCausalLM (Qwen3-MoE)"),
        ("layers", "2, experts in 0-1"),
        ("experts", "4 per layer, top 2, activation silu"),
        ("sizes", "hidden 256, expert intermediate 128"),
        ("routing", "softmax, renormalised, scaled by 1, 1 groups"),
        ("scheme", "gptq int4, group 32, symmetric, act-order"),
        ("", "scales f16, zero points stored minus one, unused, written by gptqmodel:7.2.0"),
        ("bytes", "experts 464.0 KiB (78 %), the rest 132.8 KiB; 141 tensors in 1 file"),
        ("quantised", "experts 24/24, attention 8/8, embeddings 0/1, lm_head 0/1, router 0/2"),
    ]
    assert list(checkpoint_facts(info, False)) == [line for line in lines if line[0] != "routing"]
    found = dict(checkpoint_facts(moeq.open(checkpoints / "ct-w8a8-qwen3moe").info, False))
    assert found["scheme"] == "ct-int8 int8, one scale per channel, symmetric, no act-order, int8 activations"
    assert found[""] == "scales bf16, no zero points stored, written by compressed-tensors 0.19.0"


def test_facts_that_few_checkpoints_have(checkpoints: Path) -> None:
    info = moeq.open(checkpoints / "ct-int4-asym-g32-mixtral").info
    use = replace(info.schemes[0], layers=info.moe_layers[:1], projections=("down",))
    rare = replace(
        info,
        family_from_names=True,
        dense_layers=(0, 1, 2),
        mtp_layers=(61,),
        shared_experts=2,
        top_k=None,
        expert_input_size=64,
        routing=replace(info.routing, renormalize=False, scaling_factor=2.5, num_groups=8),
        schemes=(use,),
        expert_bytes=0,
        other_bytes=0,
        num_files=3,
        modules=(),
    )
    found = dict(checkpoint_facts(rare, True))
    assert found["model"] == f"{info.architecture} ({info.family}, told from tensor names)"
    assert found["layers"] == "2, experts in 0-1, dense 0-2, multi-token prediction 61"
    assert found["experts"] == "4 per layer, top ?, 2 shared, activation silu"
    assert found["sizes"] == "hidden 256 (experts read 64), expert intermediate 128"
    assert found["routing"] == f"{info.routing.scoring}, not renormalised, scaled by 2.5, 8 groups"
    assert found["scheme"].endswith("with zero points, no act-order (down) in layers 0")
    assert "unused" not in found[""]
    assert found["bytes"] == f"experts 0 B (0 %), the rest 0 B; {info.num_tensors:,} tensors in 3 files"
    assert "quantised" not in found


def test_a_base_model_is_a_name_before_anything_is_asked() -> None:
    """No token and no Hub are needed to say it."""
    for name in ("no-organisation", "org/-", "org/name.git", "../../name"):
        with pytest.raises(MoeqError) as refused:
            open_push("org/name", name, public=False)
        assert refused.value.code == "usage.push-name"
        assert repr(name) in refused.value.message


@pytest.mark.parametrize(
    ("kinds", "command"),
    [
        (("q8_0", "q8_0"), "moeq transcode m.gguf DST --to compressed-tensors"),
        (("q4_0", "q6_k"), "moeq transcode m.gguf DST --to bf16 --check-only (fp32 is exact)"),
    ],
)
def test_a_gguf_file_is_taken_to_a_format_that_engines_load(
    kinds: tuple[str, str], command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    gate_up, down = kinds
    write_model(tmp_path / "m.gguf", layers=1, experts=2, expert_type=gate_up, down_type=down)
    found = Inspection(moeq.open("m.gguf"), None, "no GPU")
    assert list(next_steps(found)) == [("next", command)]


def test_backends_that_an_engine_does_not_consider(checkpoints: Path) -> None:
    verdict = moeq.decide(checkpoints / "mxfp4-gptoss", gpu="H100")
    assert verdict.chosen is not None
    assert _cell(verdict, "NOSUCH") == MatrixCell("absent", "not considered")
    chosen = MatrixCell("chosen", f"the engine's choice ({verdict.chosen.experts})")
    assert _cell(verdict, verdict.chosen.backend) == chosen
    assert _cell(verdict, "MARLIN") == MatrixCell("works", "works too, with --moe-backend marlin")
    assert _cell(verdict, "EMULATION") == MatrixCell("no", "package quark is absent")
    matrix = backend_matrix(moeq.open(checkpoints / "mxfp4-gptoss"), verdict.deployment)
    assert (matrix.title, matrix.sizes) == ("vllm@0.33.0 on H100", (1, 2, 4, 8))
    refused = dict(matrix.rows)[verdict.chosen.backend]
    assert [cell.state for cell in refused] == ["chosen", "chosen", "no", "no"]
    assert refused[2].text.endswith("2 attention heads are not divisible by tp 4 (2 % 4 = 2)")


def test_what_is_said_of_roundings() -> None:
    assert rounding_text("scales are rounded") == "only with allow_lossy=True if there are any: scales are rounded"

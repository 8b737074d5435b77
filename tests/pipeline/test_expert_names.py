"""Names of experts as a layer stores them, held against what engines' classes load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import moeq
from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.names import LayerExperts, index_experts
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.pipeline.plan.expert_names import (
    _with_class_gate,
    _with_stale_gate,
    below_layer,
    names_problem,
    order_of,
    stored_names,
    unloaded,
)
from moeq.pipeline.plan.layer_verdict import judge_checkpoint

STACK = "model.layers.3.mlp.experts"
NAME = "model.safetensors"


def layer_of(*names: str) -> LayerExperts:
    entries = {name: TensorEntry(name, "BF16", (4, 8), "a.safetensors", 0, 64) for name in names}
    (layer,) = index_experts(entries)
    return layer


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ([f"{STACK}.0.gate_proj.weight"], None),
        ([f"{STACK}.gate_up_proj", f"{STACK}.gate_up_proj_scale"], None),
        ([f"{STACK}.gate_proj.0.weight"], f"lists of experts per projection such as {STACK}.gate_proj.0"),
        ([f"{STACK}.down_proj", f"{STACK}.down_proj_weight_scale"], "stacked scales such as down_proj_weight_scale"),
        ([f"model.{STACK}.0.gate_proj.weight"], "has 'model' 2 times above its layers, as in model.model.layers"),
    ],
)
def test_names_that_no_class_loads(names: list[str], problem: str | None) -> None:
    found = unloaded(layer_of(*names))
    assert (found is None) == (problem is None)
    assert (problem or "") in (found or "")


def test_the_path_below_a_layer() -> None:
    assert below_layer(layer_of(f"{STACK}.0.gate_proj.weight")) == "mlp.experts"


@pytest.mark.parametrize(
    ("alternate", "transposed", "known", "order"),
    [
        (False, False, True, "halves"), (True, False, True, "interleaved"), (True, True, True, "transposed"),
        (True, False, False, "interleaved"), (False, True, False, None),
    ],
)  # fmt: skip
def test_the_order_of_rows(alternate: bool, transposed: bool, known: bool, order: str | None) -> None:
    assert order_of(alternate=alternate, transposed=transposed, known=known) == order


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gptq-int4-g128-mixtral", {
            (f"mlp.experts.*.{leaf}_proj", "halves") for leaf in ("gate", "up", "down")
        }),
        ("mxfp4-gptoss", {
            *((f"mlp.experts.gate_up_proj_{part}", "interleaved") for part in ("blocks", "scales", "bias")),
            *((f"mlp.experts.down_proj_{part}", "halves") for part in ("blocks", "scales", "bias")),
        }),
    ],
)  # fmt: skip
def test_every_name_once_with_its_order(name: str, expected: set[tuple[str, str]], checkpoints: Path) -> None:
    found = list(stored_names(moeq.open(checkpoints / name).experts(0)))
    assert {(row.path, row.order) for row in found} == expected
    assert len(found) == len(expected)


def test_one_number_for_all_experts_has_no_order_and_no_name(checkpoints: Path, tmp_path: Path) -> None:
    source = checkpoints / "mxfp4-gptoss"
    first, second = sorted(source.glob("*.safetensors"))
    tensors = {**load_file(first), **load_file(second)}
    number = "model.layers.0.mlp.experts.gate_up_proj_input_scale"
    save_file({number: torch.ones(1), **tensors}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    experts = moeq.open(tmp_path).experts(0)
    assert next(iter(experts.layer.tensors())).name == number
    assert {row.path for row in stored_names(experts)} == {
        row.path for row in stored_names(moeq.open(source).experts(0))
    }


def test_llama_4_loads_no_biases_of_experts(checkpoints: Path, tmp_path: Path) -> None:
    """The class skips such a tensor in its mapping of experts, and then raises KeyError (vLLM 0.33.0, executed)."""
    source = checkpoints / "gptq-int4-g32-qwen3moe"
    config = json.loads((source / "config.json").read_text())
    names = {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text"}
    experts = {"intermediate_size": config["moe_intermediate_size"]}
    (tmp_path / "config.json").write_text(json.dumps(config | names | experts))
    found = {name.replace(".mlp.", ".feed_forward."): value for name, value in load_file(source / NAME).items()}
    save_file(found, tmp_path / NAME)
    assert names_problem(moeq.open(tmp_path), "vllm@0.33.0", 0) is None
    biases = {
        name.replace(".scales", ".bias"): torch.zeros(value.shape[1], dtype=torch.float16)
        for name, value in found.items()
        if name.endswith(".scales") and ".experts." in name
    }
    save_file(found | biases, tmp_path / NAME)
    assert "loads no biases" in str(names_problem(moeq.open(tmp_path), "vllm@0.33.0", 0))
    assert names_problem(moeq.open(tmp_path), "sglang@0.5.23", 0) is None


@pytest.mark.parametrize(
    ("stale", "said"),
    [
        ([], None),
        (["unheard.of"], None),  # a name that classes skip
        (["a.experts.9.x", "known"], "known of old.bin and 1 more, in place of the one in new.safetensors"),
        (["known", "a.experts.9.x"], "known of old.bin and 1 more, in place of the one in new.safetensors"),
        (["a.experts.9.x", "unheard.of"], "a.experts.9.x of old.bin, which the index does not name"),
    ],
)
@pytest.mark.parametrize("engine", ["vllm@0.33.0", "sglang@0.5.23", "transformers"])
def test_stale_copies_that_the_engine_reads(stale: list[str], said: str | None, engine: str, checkpoints: Path) -> None:
    """A copy of a tensor that the index names is told before one that nobody names."""
    opened = moeq.open(checkpoints / "gptq-int4-g32-qwen3moe")
    verdict = judge_checkpoint(opened, Deployment(gpu=parse_gpu("A100")), 0, explain=False)
    verdict = replace(verdict, engine=engine)
    source = SimpleNamespace(
        tensors={"known": TensorEntry("known", "F16", (1,), "new.safetensors", 0, 2)},
        stale=[TensorEntry(name, "F16", (1,), "old.bin", 0, 2) for name in stale],
    )
    checkpoint: Any = SimpleNamespace(source=source)
    found = _with_stale_gate(checkpoint, verdict)
    if said is None or engine == "transformers":
        assert found is verdict
        return
    gate = found.gates[-1]
    assert gate.text.startswith("the engine reads every tensor of every listed file: ")
    assert gate.text.partition(": ")[2] == said
    assert (gate.passed, gate.remedy) == (False, "moeq convert SRC DST, which leaves stale copies out")


def test_a_class_that_only_other_versions_have(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = moeq.open(checkpoints / "gptq-int4-g32-qwen3moe")
    verdict = judge_checkpoint(opened, Deployment(gpu=parse_gpu("A100")), 0, explain=False)
    checkpoint: Any = SimpleNamespace(info=SimpleNamespace(architecture="NewForCausalLM"))
    known = {"NewForCausalLM": ("0.31.0", "0.32.0")}
    monkeypatch.setattr("moeq.pipeline.plan.expert_names.versions_with", known.get)
    for engine in ("vllm@0.32.0", "sglang@0.5.23"):
        given = replace(verdict, engine=engine)
        assert _with_class_gate(checkpoint, given) is given
    gate = _with_class_gate(checkpoint, replace(verdict, engine="vllm@0.33.0")).gates[-1]
    assert gate.text.startswith("vLLM 0.33.0 has no class NewForCausalLM, which ")
    assert (gate.passed, gate.remedy) == (False, 'engine="vllm@0.32.0"')
    checkpoint.info.architecture = "Unheard"
    assert _with_class_gate(checkpoint, replace(verdict, engine="vllm@0.33.0")).gates == verdict.gates

"""What is said about loaders, held against the loaders' own code (read, not imported: engines are not installed)."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from bench_scripts import make_family
from safetensors.torch import load_file, save_file

import moeq
from moeq.checkpoint.manifest import read_manifest
from moeq.cli.app import run
from moeq.foreign import in_markdown
from moeq.layouts.readers import VLLM_VERSIONS
from moeq.oracle import loaders
from moeq.pipeline.plan.decide import answer
from moeq.pipeline.plan.options import Question
from moeq.report.publishing import CardOptions, render_card

ENGINES = Path(loaders.__file__).parents[1] / "engines"


def assigned(path: Path, name: str) -> ast.expr:
    """The value that a module assigns to a name."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            assert node.value is not None  # type: ignore[union-attr]
            return node.value  # type: ignore[union-attr]
    raise AssertionError(f"{path} assigns no {name}")


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        (VLLM_VERSIONS, "0.26.0 to 0.33.0"),
        (("0.33.0", "0.32.0"), "0.32.0 to 0.33.0"),
        (("0.33.0", "0.28.0", "0.27.1", "0.26.0"), "0.26.0 and 0.27.1 to 0.28.0 and 0.33.0"),
    ],
)
def test_ranges_of_versions(versions, words) -> None:
    assert loaders.version_ranges(versions) == words


@pytest.mark.parametrize(
    ("backend", "versions"),
    [
        ("flashinfer_trtllm", "0.26.0 to 0.33.0"),  # 0.27.0 decides as 0.27.1
        ("flashinfer_cutedsl", "0.32.0 to 0.33.0"),  # earlier ones pad nothing for it
    ],
)
def test_versions_whose_kernels_read_a_layout(checkpoints: Path, backend, versions) -> None:
    """None of moeq's own kernels reads these layouts."""
    source = moeq.open(checkpoints / "modelopt-nvfp4-qwen3moe")
    found = answer(source, Question(moeq.Deployment(gpu=moeq.gpu("B200"), backend=backend)))
    assert [loader.title for loader in found.loaders] == [f"vLLM {versions} (moeq's plug-in)"]


@pytest.mark.parametrize(
    ("architecture", "versions"),
    [("Qwen3MoeForCausalLM", "0.26.0 to 0.33.0"), ("Qwen4ExpForCausalLM", "0.29.0 to 0.33.0"),
     ("SomeMoeForCausalLM", "0.26.0 to 0.33.0")],
)  # fmt: skip
def test_versions_that_have_the_class(checkpoints: Path, tmp_path: Path, architecture, versions) -> None:
    """Versions without a class for the model are not named, and refused; a class of no version is a package's."""
    source = shutil.copytree(checkpoints / "gptq-int4-g32-qwen3moe", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    old = answer(moeq.open(source), Question(moeq.Deployment(gpu=moeq.gpu("H100"), engine="vllm@0.27.0")))
    assert f"vLLM {versions} (moeq's plug-in)" in [loader.title for loader in old.loaders]
    refused = [gate.text for gate in old.verdict.gates if "has no class" in gate.text]
    expected = ["vLLM 0.27.1 has no class Qwen4ExpForCausalLM, which 0.29.0 to 0.33.0 have"]
    assert refused == (expected if architecture == "Qwen4ExpForCausalLM" else [])


def test_versions_of_sglang() -> None:
    assert ast.literal_eval(assigned(ENGINES / "sglang" / "plugin.py", "ENGINES")) == loaders.SGLANG_VERSIONS


class TestSglang:
    """Held against the engine's own files, where they are at hand."""

    @pytest.fixture
    def engine(self) -> Path:
        found = find_spec("sglang")
        if found is None or found.origin is None or version("sglang") not in loaders.SGLANG_VERSIONS:
            pytest.skip(f"SGLang {loaders.SGLANG_VERSIONS[0]} is not installed")
        return Path(found.origin).parent / "srt"

    def test_methods(self, engine: Path) -> None:
        folder = engine / "layers" / "quantization"
        text = (folder / "__init__.py").read_text(encoding="utf-8")
        for name in loaders.SGLANG_METHODS:
            assert f'"{name}":' in text or name == "gptq"
        bits, groups = loaders.SGLANG_GPTQ
        marlin = (folder / "gptq" / "gptq.py").read_text(encoding="utf-8")
        found = re.findall(r"\((\d), (True|False)\): scalar_types", marlin)
        assert {(int(width), word) for width, word in found} == {(width, "True") for width in bits}
        assert tuple(ast.literal_eval(assigned(folder / "marlin_utils.py", "MARLIN_SUPPORTED_GROUP_SIZES"))) == groups


@pytest.mark.cover(every=4)
@pytest.mark.parametrize(
    ("name", "changes", "options", "loads"),
    [
        ("gptq-int4-g32-qwen3moe", {}, {}, True),
        ("gptq-int4-g32-qwen3moe", {}, {"tp": 2, "ep": 2}, True),
        ("gptq-int4-g32-qwen3moe", {}, {"ep": 2}, True),
        ("gptq-int4-g32-qwen3moe", {}, {"ep": 4}, False),  # two attention heads on four ranks
        ("gptq-int4-g32-qwen3moe", {}, {"batched": True}, False),
        ("gptq-int4-g32-qwen3moe", {"architectures": ["SomeMoeForCausalLM"]}, {}, False),
        ("gptq-int4-g32-qwen3moe", {"quantization_config": {"desc_act": None}}, {}, False),  # its Marlin wants it said
        ("gptq-int4-g32-qwen3moe", {"q_lora_rank": 32}, {}, False),  # its class would join q_a and kv_a by rows
        ("awq-int4-g32-qwen3moe", {"q_lora_rank": 32}, {}, True),
        ("gptq-int4-g128-mixtral", {}, {}, False),  # experts are called `mlp.experts`, which its class does not know
        ("ct-mxfp4-qwen3moe", {}, {}, True),
        ("mxfp4-gptoss", {}, {}, True),
    ],
)
def test_where_sglang_is_named(checkpoints: Path, tmp_path: Path, name, changes, options, loads) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoints / name, source)
    config = json.loads((source / "config.json").read_text())
    config |= {
        key: {**config[key], **change} if isinstance(change, dict) else change for key, change in changes.items()
    }
    (source / "config.json").write_text(json.dumps(config))
    deployment = moeq.Deployment(gpu=moeq.gpu("H100"), engine="moeq", **options)
    found = answer(moeq.open(source), Question(deployment))
    assert ("sglang" in [loader.name for loader in found.loaders]) == loads


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("layout", ["trtllm-nvfp4/1", "marlin-nvfp4/1"])
@pytest.mark.parametrize("lost", ["none", "of one expert", "all"])
def test_what_needs_scales_of_activations_is_named_where_all_are_there(
    checkpoints: Path, tmp_path: Path, layout: str, lost: str
) -> None:
    """The plug-in would refuse to load such a conversion; Marlin quantises no activations."""
    source = tmp_path / "source"
    shutil.copytree(checkpoints / "modelopt-nvfp4-qwen3moe", source)
    path = source / "model.safetensors"
    drop = {"none": "nothing", "of one expert": ".experts.1.up_proj.input_scale", "all": ".input_scale"}[lost]
    save_file({name: one for name, one in load_file(path).items() if not name.endswith(drop)}, path)
    deployment = moeq.Deployment(gpu=moeq.gpu("B200"))
    done = moeq.convert(source, tmp_path / "out", deployment, layout=layout, force_layout=True)
    named = "vllm" in [loader.name for loader in done.loaders]
    assert named == (lost == "none" or layout == "marlin-nvfp4/1")


def test_engines_that_balance_experts(checkpoints: Path, tmp_path: Path) -> None:
    """Moeq's kernels read the stored bytes alone, so vLLM may move them between ranks; SGLang's plug-in refuses."""
    where = {"gpu": moeq.gpu("H100"), "engine": "moeq", "tp": 2, "ep": 2}
    for balanced in (False, True):
        deployment = moeq.Deployment(eplb=balanced, **where)  # type: ignore[arg-type]
        done = moeq.convert(checkpoints / "gptq-int4-g32-qwen3moe", tmp_path / str(balanced), deployment)
        names = [loader.name for loader in done.loaders]
        assert ("vllm" in names, "sglang" in names) == (True, not balanced)


def test_models_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    models = Path(transformers.__file__).parent / "models"
    # Run in `test_transformers_families.py` and, gpt-oss, `test_transformers.py`.
    assert {*make_family.FAMILIES, "gpt_oss", "qwen3_5_moe"} == set(loaders.TRANSFORMERS_MODELS)
    for name in {name.removesuffix("_text") for name in loaders.TRANSFORMERS_MODELS}:
        assert "@use_experts_implementation" in (models / name / f"modeling_{name}.py").read_text(encoding="utf-8")
    assert min(loaders.TRANSFORMERS_MODELS.values()) == loaders.TRANSFORMERS_OLDEST


@pytest.mark.parametrize("layout", ["marlin-mxfp4-interleaved/1", "triton-kernels-hopper-w4/1"])
def test_kernels_that_no_name_asks_for_are_loaders_too(checkpoints: Path, tmp_path: Path, layout: str) -> None:
    """What vLLM's Marlin reads of gpt-oss is what moeq's kernels read of it."""
    deployment = moeq.Deployment(gpu=moeq.gpu("H100"))
    done = moeq.convert(checkpoints / "mxfp4-gptoss", tmp_path / "out", deployment, layout=layout, force_layout=True)
    assert [loader.name for loader in done.loaders] == ["vllm", "sglang", "transformers", "load_experts"]
    assert moeq.load_experts(tmp_path / "out", 0).w13.layout == layout


@pytest.mark.slow
def test_plain_transformers_stops_at_a_conversion(checkpoints: Path, tmp_path: Path) -> None:
    """In a process of its own: here the loader may have been imported by another test."""
    pytest.importorskip("transformers")
    name = "gptq-int4-g32-qwen3moe"
    moeq.convert(checkpoints / name, tmp_path / "out", moeq.Deployment(gpu=moeq.gpu("A100")))
    program = (
        "import sys\nfrom transformers import AutoConfig, AutoModelForCausalLM\n"
        "config = AutoConfig.from_pretrained(sys.argv[1])\nAutoModelForCausalLM.from_config(config)"
    )
    run = [sys.executable, "-c", program, str(tmp_path / "out")]
    plain = subprocess.run(run, capture_output=True, text=True, check=False)
    assert plain.returncode != 0
    assert loaders.TRANSFORMERS_GUARD in plain.stderr.splitlines()[-1]
    run[2] = f"import moeq.engines.transformers\n{program}"
    loaded = subprocess.run(run, capture_output=True, text=True, check=False)
    assert loaded.returncode == 0, loaded.stderr


def test_the_same_words_before_and_after(checkpoints: Path, tmp_path: Path, capsys) -> None:
    """What `plan` says is what `moeq.json`, `inspect` of the result and its model card say."""
    source, out = checkpoints / "ct-int4-g128-qwen3moe", tmp_path / "out"

    def said(*argv: str | Path) -> dict[str, Any]:
        assert run([*map(str, argv), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    words = said("plan", source, "--gpu", "H100")["loads_in"]
    assert "SGLang 0.5.23 (moeq's plug-in)" in words
    assert said("convert", source, out, "--gpu", "H100")["loads_in"] == words
    assert json.loads((out / "moeq.json").read_text())["loads_in"] == words
    assert said("inspect", out)["conversion"]["loads_in"] == words
    card = render_card(read_manifest(out), CardOptions("a/b", None, 1, None, {}))
    assert in_markdown(", ".join(words)) in card
    assert "python -m sglang.launch_server" in card


def planned(**changes: Any) -> loaders.PlannedLayer:
    """A layer that every loader takes, with changes."""
    facts = {
        "layout": "marlin-wna16/1", "model_type": "qwen3_moe", "architecture": "Qwen3MoeForCausalLM",
        "activation": "silu", "dtype": "bf16", "platform": "cuda", "tp": 1, "by_rank": False, "own_kernel": True,
        "vllm": VLLM_VERSIONS, "others": VLLM_VERSIONS, "family": True, "own_config": False, "heads": True,
        "sglang": True, "dispatched": False, "moved": False, "scales": True,
    }  # fmt: skip
    return loaders.PlannedLayer(**{**facts, **changes})  # type: ignore[arg-type]


ALL = {"vllm", "sglang", "transformers", "load_experts"}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ALL),
        ({"tp": 2}, ALL),
        ({"own_kernel": False}, {"vllm"}),
        ({"own_kernel": False, "vllm": ()}, set()),
        ({"own_kernel": False, "scales": False}, set()),
        ({"own_kernel": False, "dtype": "fp32"}, set()),
        ({"own_kernel": False, "activation": "swigluoai"}, set()),
        ({"activation": "swigluoai"}, ALL),
        ({"own_kernel": False, "layout": "marlin-act-order/1"}, {"vllm"}),
        ({"own_kernel": False, "layout": "marlin-act-order/1", "tp": 2}, set()),
        ({"family": False}, ALL - {"vllm"}),
        ({"heads": False}, ALL - {"vllm"}),
        ({"own_config": True}, ALL - {"vllm"}),
        ({"others": ()}, ALL - {"vllm"}),
        ({"sglang": False}, ALL - {"sglang"}),
        ({"dispatched": True}, ALL - {"sglang"}),
        ({"dispatched": True, "vllm": ()}, {"transformers", "load_experts"}),
        ({"moved": True}, ALL - {"sglang"}),
        ({"moved": True, "tp": 2}, {"transformers", "load_experts"}),
        ({"moved": True, "by_rank": True}, {"load_experts"}),
        ({"moved": True, "own_kernel": False}, set()),
        ({"by_rank": True}, ALL - {"transformers"}),
        ({"model_type": "nobodys"}, ALL - {"transformers"}),
        ({"platform": "cpu"}, {"vllm", "transformers", "load_experts"}),
        ({"platform": "cpu", "own_kernel": False}, {"vllm", "transformers"}),
        ({"platform": "rocm"}, {"vllm", "transformers", "load_experts"}),
        ({"platform": "rocm", "own_kernel": False}, {"vllm"}),
        ({"platform": "xpu"}, {"vllm", "load_experts"}),
    ],
)
def test_what_loaders_look_at(changes: dict[str, Any], names: set[str]) -> None:
    assert {loader.name for loader in loaders.loaders_of(planned(**changes))} == names


def test_versions_of_loaders() -> None:
    def title(**changes: Any) -> str:
        return loaders.loads_in(tuple(loaders.loaders_of(planned(**changes))))

    assert title().startswith(
        "vLLM 0.26.0 to 0.33.0 (moeq's plug-in), SGLang 0.5.23 (moeq's plug-in), transformers 5.1"
    )
    assert title(own_kernel=False, vllm=("0.29.0", "0.30.0")) == "vLLM 0.29.0 to 0.30.0 (moeq's plug-in)"
    assert title(own_kernel=False, layout="marlin-act-order/1") == "vLLM 0.26.0 to 0.29.0 (moeq's plug-in)"
    assert title(others=("0.31.0",)).startswith("vLLM 0.31.0 (moeq's plug-in)")
    assert title(vllm=(), own_kernel=False) == "nothing yet"
    rows = [tuple(loaders.loaders_of(planned(**changes))) for changes in ({}, {"by_rank": True}, {"sglang": False})]
    assert [loader.name for loader in loaders.common(rows)] == ["vllm", "load_experts"]
    assert loaders.common([]) == ()


@pytest.mark.parametrize(
    ("config", "linear", "reads"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}, "gptq", True),
        ({"quant_method": "GPTQ", "bits": 8, "group_size": -1, "sym": True, "desc_act": True}, None, True),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, None, False),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "desc_act": False}, None, False),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128, "sym": True, "desc_act": False}, None, False),
        ({"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True, "desc_act": False}, None, False),
        ({"quant_method": "awq"}, "awq", True), ({"quant_method": "awq"}, "fp8", False),
        ({"quant_method": "awq"}, None, True),
        ({"quant_method": "quark"}, None, False), ({}, None, False),
    ],
)  # fmt: skip
def test_what_sglang_reads_of_the_other_layers(config: dict[str, Any], linear: str | None, reads: bool) -> None:
    assert loaders.sglang_reads(config, linear) is reads


@pytest.mark.parametrize("model_type", ["deepseek_v4", "deepseek_v4_text", "deepseek_v41", "deepseek_v41_text"])
def test_models_with_a_config_class_of_their_own(model_type: str) -> None:
    assert loaders.reads_by_own_config(model_type, "fp8") is True
    assert loaders.reads_by_own_config(model_type, "gptq") is False
    assert loaders.reads_by_own_config("deepseek_v3", "fp8") is False
    assert loaders.reads_by_own_config(model_type, None) is False

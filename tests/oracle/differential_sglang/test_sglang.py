"""SGLang's decisions: as the package's own code made them, and as a verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oracle.differential import agree
from oracle.differential.samples import release_seed
from oracle.differential_sglang import cases, compare, samples

from moeq.cli.app import run
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import Gpu, parse_gpu
from moeq.errors import MoeqError
from moeq.oracle.engines.sglang.decision import decide_sglang
from moeq.oracle.engines.sglang.layer import SglangLayer, SglangRefusal
from moeq.oracle.judge import judge_config
from moeq.oracle.records import MoeShape, Verdict

SHAPE = MoeShape(2048, 768, 128, 8)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
SITE = os.environ.get("MOEQ_SGLANG_SITE")


def ct(inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    made = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": made, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": [], "config_groups": groups}


def verdict(config: dict[str, Any], gpu: str = "H100", **fields: Any) -> Verdict:
    return judge_config(config, SHAPE, Deployment(parse_gpu(gpu), engine="sglang", **fields))


def counted(rows: list[tuple[dict[str, Any], dict[str, Any]]]) -> compare.Counts:
    found = compare.Counts()
    for case, row in rows:
        found.add(case, row)
    return found


def kept_row(what: str) -> dict[str, Any]:
    """The row of the page about accuracy that begins so."""
    (row,) = (row for row in json.loads(agree.SGLANG.read_text(encoding="utf-8")) if row["what"].startswith(what))
    return row


def test_recorded_answers() -> None:
    head, rows = samples.load()
    found = counted(rows)
    assert head["seed"] == release_seed(), "another release: record the sample anew, with engine.py"
    assert head["cases"] == samples.digest(head["seed"], len(rows)), "the cases are others: record the sample again"
    assert found.cases == cases.COUNT
    assert not found.differences
    kept = kept_row("integers: recorded")
    assert (kept["cases"], kept["decision"], kept["exact"]) == (found.cases, found.decision, found.exact)


def test_recorded_answers_about_floats() -> None:
    head, rows = samples.load(samples.FLOATS)
    assert head["seed"] == release_seed(), "another release: record the sample anew, with engine.py --floats"
    assert head["cases"] == samples.digest(head["seed"], len(rows), floats=True), "the cases are others"
    found = counted(rows)
    assert found.cases == 1500
    assert not found.differences
    kept = kept_row("FP8, MXFP4, NVFP4, W4AFP8: recorded")
    assert (kept["cases"], kept["decision"], kept["exact"]) == (found.cases, found.decision, found.exact)


def test_a_difference_is_named() -> None:
    _, rows = samples.load()
    case, row = next(pair for pair in rows if "runner" in pair[1])
    found = counted([(case, {**row, "runner": "nobody's"})])
    assert found.decision == 0
    assert "nobody's" in next(iter(found.differences))


@pytest.mark.slow
@pytest.mark.skipif(not SITE, reason="MOEQ_SGLANG_SITE names no unpacked wheel")
def test_the_engine_itself(tmp_path: Path) -> None:
    out, python = tmp_path / "rows", os.environ.get("MOEQ_VLLM_PYTHON", sys.executable)
    command = [python, str(Path(__file__).parent / "engine.py"), str(SITE), str(out), "--seed", os.urandom(4).hex()]
    done = subprocess.run([*command, "--count", "600"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not counted(samples.load(out)[1]).differences


@pytest.mark.parametrize(
    ("config", "gpu", "fields", "expected"),
    [
        (GPTQ, "H100", {}, ("MARLIN", "GPTQMarlinMoEScheme", "marlin-wna16/1")),
        ({**GPTQ, "desc_act": True}, "A100", {}, ("MARLIN", "GPTQMarlinMoEScheme", "marlin-act-order/1")),
        (AWQ, "H100", {"tp": 2}, ("MARLIN", "AWQMoEScheme", "marlin-wna16/1")),
        (AWQ, "H100", {"tp": 8}, ("TRITON", "MoeWNA16Method", "triton-wna16/1")),  # 96 per rank: no Marlin tile
        (ct(), "H100", {}, ("MARLIN", "CompressedTensorsWNA16MoE", "marlin-wna16/1")),
        (ct(), "B200", {}, ("TRITON", "CompressedTensorsWNA16TritonMoE", "triton-wna16/1")),
        (ct(), "H100", {"backend": "triton"}, ("TRITON", "CompressedTensorsWNA16TritonMoE", "triton-wna16/1")),
    ],
)
def test_what_runs_and_what_its_kernels_read(config: Any, gpu: str, fields: Any, expected: tuple[str, ...]) -> None:
    found = verdict(config, gpu, **fields)
    assert found.chosen is not None
    assert (found.chosen.backend, found.chosen.experts, found.chosen.layout) == expected
    assert found.convert is not None
    assert found.convert.layout == expected[2]


@pytest.mark.parametrize(
    ("config", "gpu", "model", "expected"),
    [
        (FP8, "H100", "qwen3_moe", ("TRITON", "Fp8MoEMethod", "W8A8")),
        (FP8, "B200", "qwen3_moe", ("FLASHINFER_TRTLLM", "Fp8MoEMethod", "W8A8")),
        (FP8, "B200", "mixtral", ("TRITON", "Fp8MoEMethod", "W8A8")),
        ({"quant_method": "mxfp4"}, "H100", "gpt_oss", ("TRITON_KERNEL", "Mxfp4MoEMethod", "W4A16")),
        ({"quant_method": "mxfp4"}, "B200", "gpt_oss", ("FLASHINFER_MXFP4", "Mxfp4MoEMethod", "W4A8")),
        (NVFP4, "H100", "qwen3_moe", ("MARLIN", "ModelOptNvFp4FusedMoEMethod", "W4A16")),
        ({"quant_method": "w4afp8"}, "H100", "deepseek_v3", ("CUTLASS", "W4AFp8MoEMethod", "W4A8")),
    ],
)
def test_floats_run_what_the_model_and_the_gpu_decide(config: Any, gpu: str, model: str, expected: Any) -> None:
    shape = MoeShape(2048, 768, 128, 8, model_type=model)
    found = judge_config(config, shape, Deployment(parse_gpu(gpu), engine="sglang"))
    assert found.chosen is not None
    assert (found.chosen.backend, found.chosen.experts, found.runs_as) == expected


@pytest.mark.parametrize(("config", "gpu"), [(FP8, "B200"), (NVFP4, "B200"), (NVFP4, "RTX5090")])
def test_a_runner_that_a_model_chooses_by_rules_unknown_here_is_said(config: Any, gpu: str) -> None:
    found = judge_config(config, SHAPE, Deployment(parse_gpu(gpu), engine="sglang"))
    assert found.error is not None
    assert found.error.kind == "NOT_FOLLOWED"
    asked = judge_config(config, SHAPE, Deployment(parse_gpu(gpu), engine="sglang", backend="flashinfer_trtllm"))
    assert asked.ok


@pytest.mark.parametrize(("method", "gpu"), [("mxfp8", "H100"), ("w4afp8", "A100"), ("fp8", "T4")])
def test_methods_need_a_capability(method: str, gpu: str) -> None:
    found = verdict({**FP8, "quant_method": method}, gpu, backend="triton", dtype="fp16")
    assert "needs compute capability" in found.refusal


def test_flags_to_launch_it_with() -> None:
    note, unchecked = verdict(AWQ, tp=4, ep=4, dtype="fp16", quantization="moe_wna16", backend="triton").notes
    assert unchecked.startswith("not checked: modules beside the experts")
    assert note == (
        "launch flags: --tp-size 4 --ep-size 4 --dtype float16 --quantization moe_wna16 --moe-runner-backend triton"
    )


@pytest.mark.parametrize(
    ("config", "fields", "words", "hint"),
    [
        ({**GPTQ, "sym": False}, {}, "gptq is no method on CUDA", 'quantization="moe_wna16"'),
        ({**AWQ, "zero_point": False}, {}, "no place", 'quantization="moe_wna16"'),
        (GPTQ, {"backend": "triton"}, "trips an assertion", "--moe-runner-backend auto"),
        (GPTQ, {"backend": "warp"}, "no runner", "known: auto"),
        (ct({"num_bits": 8, "type": "int", "dynamic": True}, num_bits=8), {}, "NPUs only", "w8a8_int8"),
        ({"quant_method": "quark"}, {}, "is not known to moeq", 'engine="vllm"'),
        (FP8, {"backend": "marlin"}, "has no kernel for the runner marlin", "--moe-runner-backend auto"),
        (FP8, {"backend": "cutlass"}, "takes FP8 with scales per block", "--moe-runner-backend auto"),
        ({**FP8, "weight_block_size": [128, 128]}, {"tp": 8}, "does not divide into blocks", "another tp"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, {}, "is not known to moeq", 'engine="vllm"'),
        (GPTQ, {"dp": 2}, "not followed", "dp 1"),
    ],
)
def test_refusals_say_why_and_what_helps(config: Any, fields: Any, words: str, hint: str) -> None:
    found = verdict(config, **fields)
    assert not found.ok
    assert words in found.refusal
    assert hint in str(found.nearest)


@pytest.mark.parametrize("where", [parse_gpu("MI300X"), replace(parse_gpu("H100"), capability=None)], ids=str)
def test_devices_that_are_not_followed(where: Gpu) -> None:
    found = judge_config(GPTQ, SHAPE, Deployment(where, engine="sglang"))
    assert (found.ok, found.known) == (False, False)
    assert f"what SGLang does on {where.name} is not known to moeq: only CUDA is followed" in found.refusal


def test_suggested_changes_get_the_engines_yes() -> None:
    assert verdict({**GPTQ, "sym": False}, quantization="moe_wna16").ok
    assert verdict({**AWQ, "zero_point": False}, quantization="moe_wna16").ok
    assert not verdict(GPTQ, "MI300X").ok


@pytest.mark.parametrize(
    "config",
    [
        {**GPTQ, "group_size": 0}, {**AWQ, "group_size": 0}, {"quant_method": "gptq"}, {"quant_method": "awq"},
        {**GPTQ, "bits": 10**9}, ct(strategy=None, group_size=None), ct(group_size=-7), ct(num_bits=-4),
        {"quant_method": "compressed-tensors"}, {"quant_method": "compressed-tensors", "config_groups": {"a": {}}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": 3}}}, {},
    ],
)  # fmt: skip
def test_hostile_configs_are_refused(config: Any) -> None:
    """A verdict with a reason or a choice, or a plain error: nothing else comes out."""
    for asked in (None, "moe_wna16", "w8a8_int8"):
        found = None
        with suppress(MoeqError):
            found = verdict(config, quantization=asked)
        assert found is None or found.refusal or found.chosen is not None


def test_hundred_ranks_of_nothing() -> None:
    with pytest.raises(SglangRefusal, match="does not divide"):
        decide_sglang(GPTQ, SglangLayer((9, 0), 2048, 768, 128, tp=100))


def test_commands(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(checkpoints / "gptq-int4-g128-mixtral")
    assert run(["oracle", source, "--gpu", "H100", "--engine", "sglang", "--json"]) == 0
    assert "GPTQMarlinMoEScheme" in json.dumps(json.loads(capsys.readouterr().out))
    assert run(["doctor", source, "--gpu", "H100", "--engine", "sglang@0.5.23"]) == 0
    assert "sglang.launch_server" in capsys.readouterr().out
    assert run(["oracle", source, "--gpu", "H100", "--engine", "sglang@9"]) == 2
    capsys.readouterr()


def test_what_is_not_known_is_no_no(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Formats that are not followed have an exit code of their own."""
    source = str(checkpoints / "ct-mxfp8-qwen3moe")
    assert run(["oracle", source, "--gpu", "H100", "--engine", "sglang", "--json"]) == 6
    assert json.loads(capsys.readouterr().out)["verdict"]["error"]["kind"] == "NOT_FOLLOWED"
    assert run(["oracle", source, "--gpu", "H100", "--engine", "sglang"]) == 6
    said = capsys.readouterr().out
    assert "not known" in said
    assert "no backend" not in said

"""`moeq oracle`: one deployment, matrices, requirements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_scripts import make_checkpoint as generator
from oracle.examples import CHECKPOINTS, every_scheme
from pipeline.mixing import rewritten, with_layer_of

from moeq.cli.app import run


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_one_deployment(mixtral: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["oracle", mixtral, "--gpu", "h100", "--json"]) == 0
    answer = document(capsys)
    assert answer["schema"] == "moeq.oracle/1"
    assert answer["verdict"]["chosen"]["backend"] == "HUMMING"
    assert answer["verdict"]["convert"]["flag"] == "--moe-backend marlin"
    assert answer["verdict"]["mattered"] == {"humming": "present"}
    reasons = [row["reasons"] for row in answer["verdict"]["candidates"] if not row["supported"]]
    assert all(reasons)


@pytest.mark.parametrize(
    ("given", "expected"),
    [([], (1, 1)), (["--tp", "2"], (2, 1)), (["--ep", "2"], (1, 2)), (["--require", "H100/tp4"], (4, 1))],
)
def test_sizes_that_are_asked_for_once(
    given: list[str], expected: tuple[int, int], mixtral: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["oracle", mixtral, *([] if "--require" in given else ["--gpu", "h100"]), *given, "--json"])
    answer = document(capsys)
    if "--require" in given:
        cells = answer["cells"]
        assert [(cell["gpu"], cell["tp"], cell["ep"]) for cell in cells] == [("H100", *expected)]
        return
    where = answer["verdict"]["deployment"]
    assert (where["gpu"]["name"], where["tp"], where["ep"]) == ("H100", *expected)


def test_text_names_choice_and_every_backend(mixtral: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["oracle", mixtral, "--gpu", "h100", "--package", "humming=no"]) == 0
    text = capsys.readouterr().out
    assert "MarlinExperts" in text
    assert all(name in text for name in ("RDNA3", "FLASHINFER_TRTLLM", "TRITON", "EMULATION", "ZEN_CPU", "XPU"))
    assert "package humming is absent" in text


def test_a_forced_backend_that_cannot_work(mixtral: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["oracle", mixtral, "--gpu", "a100", "--backend", "triton", "--json"]) == 1
    answer = document(capsys)
    assert answer["ok"] is False
    assert answer["verdict"]["asked"] == "triton"
    assert answer["verdict"]["chosen"] is None
    assert "--backend auto (MARLIN)" in answer["verdict"]["nearest"]


def test_matrix(mixtral: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpu", "a100,h100,mi300x", "--tp", "1,2,4", "--ep", "1,4"]
    assert run(["oracle", mixtral, *options, "--json"]) == 0
    cells = document(capsys)["cells"]
    assert len(cells) == 18
    assert {(cell["gpu"], cell["backend"]) for cell in cells if cell["tp"] == cell["ep"] == 1} == {
        ("A100", "MARLIN"),
        ("H100", "HUMMING"),
        ("MI300X", "TRITON"),
    }
    assert run(["oracle", mixtral, *options]) == 0
    assert "marlin-w13-scale-order" in capsys.readouterr().out


def test_markdown(mixtral: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["oracle", mixtral, "--gpu", "a100,mi300x", "--tp", "1,2", "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| GPU | TP1 | TP2 |"
    assert lines[2].startswith("| A100 | MARLIN")


@pytest.mark.cover(every=4)
@pytest.mark.parametrize(
    ("required", "code"),
    [
        (["all"], 0),
        (["A100/tp1=MARLIN"], 0),
        (["A100/tp1=HUMMING"], 1),
        (["a100/tp3"], 1),
        (["V100"], 2),
        (["A100/tp64"], 2),
    ],
)
def test_require(checkpoints: Path, required: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(checkpoints / "gptq-int4-g32-qwen3moe")
    tps = "1,2,3" if required == ["a100/tp3"] else "1,2"
    asks = [word for text in required for word in ("--require", text)]
    assert run(["oracle", source, "--gpu", "a100,h100", "--tp", tps, *asks, "--json"]) == code
    assert bool(document(capsys).get("unmet")) == (code == 1)


def test_required_cells_are_the_sweep_where_no_option_names_one(
    mixtral: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["oracle", mixtral, "--require", "A100/tp2", "--require", "H100/tp1=MARLIN", "--json"]) == 1
    cells = {(cell["gpu"], cell["tp"]) for cell in document(capsys)["cells"]}
    assert cells == {(gpu, tp) for gpu in ("A100", "H100") for tp in (1, 2)}
    assert run(["oracle", mixtral, "--gpu", "H100", "--require", "A100/tp2", "--json"]) == 2


def test_the_matrix_says_what_convert_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = generator.Size(layers=1, experts=4, vocab=64)
    generator.write_checkpoint(tmp_path / "s", generator.MODELS["qwen3-30b-a3b"], "gptq", size, sparse=True)
    assert run(["oracle", str(tmp_path / "s"), "--gpu", "A100", "--tp", "2,4"]) == 0
    shown = capsys.readouterr().out
    assert "A100/tp4/ep1: runs, and convert cannot write for it: " in shown
    assert "A100/tp2" not in shown


def test_rank_names_the_fastest_measured_backend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = generator.Size(layers=1, vocab=64)
    generator.write_checkpoint(tmp_path / "s", generator.MODELS["qwen3-30b-a3b"], "gptq", size, sparse=True)
    asked = ["oracle", str(tmp_path / "s"), "--rank", "--gpu"]
    assert run([*asked, "H100", "--json"]) == 0
    (found,) = document(capsys)["rankings"]
    assert found["order"] == {"decode": ["MOEQ", "HUMMING", "MARLIN"], "prefill": ["MOEQ", "HUMMING", "MARLIN"]}
    assert found["unmeasured"] == ["EMULATION"]
    assert run([*asked, "H100"]) == 0
    assert "decoding MOEQ, 1.36 x as fast as HUMMING" in capsys.readouterr().out
    assert run([*asked, "B200"]) == 0
    assert "no ranking: no backend was measured on B200" in capsys.readouterr().out
    assert run([*asked, "H100,H200"]) == 2


def test_wrong_options_are_usage_errors(mixtral: str, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (
        ["--gpu", "h1000"],
        ["--gpu", "h100", "--tp", "two"],
        ["--gpu", "h100", "--tp", "0"],
        ["--gpu", "h100", "--package", "humming"],
        ["--gpu", "h100", "--package", "humming=maybe"],
        ["--gpu", "h100", "--engine", "vllm@0.1"],
        ["--gpu", "h100", "--dtype", "int3"],
        ["--gpu", "h100", "--backend", "nosuch"],
    ):
        assert run(["oracle", mixtral, *wrong, "--json"]) == 2, wrong
        assert document(capsys)["error"]["hint"] is not None or wrong[-1] in ("two", "0", "humming", "humming=maybe")


def test_deploy_file(mixtral: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "deploy.toml"
    file.write_text('gpu = "H100"\ntp = 1\n[packages]\nhumming = false\n', encoding="utf-8")
    assert run(["oracle", mixtral, "--deploy", str(file), "--json"]) == 0
    assert document(capsys)["verdict"]["chosen"]["backend"] == "MARLIN"


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    for code in ("P04_SCHEME", "p04", "G7", "R14", "marlin-w13-scale-order", "F07_MARLIN_SHAPE", "answer.no-backend"):
        assert run(["explain", code, "--json"]) == 0, code
        assert document(capsys)["entries"][0]["text"]
    assert run(["explain", "P99"]) == 2
    assert "nearest" in capsys.readouterr().err
    assert run(["explain"]) == 0
    assert "R48" in capsys.readouterr().out


def test_families_and_limits_of_a_backend_are_those_in_vllm() -> None:
    from moeq.cli.explanations import backends

    facts = {entry.code: dict(entry.facts) for entry in backends()}
    assert facts["XPU"]["limits"] == "no LoRA"
    assert facts["HUMMING"]["limits"] == "no LoRA; package humming"
    assert facts["TRITON"]["limits_in_mxfp4, mxfp4-generic, mxfp4-inc"] == "no LoRA; package triton_kernels"
    assert facts["CPU_W8A8"]["families"] == "fp8 (FP8 weights)"
    assert not {"limits", "families"} & facts["MOEQ"].keys()


@pytest.mark.slow
def test_every_code_of_a_verdict_can_be_explained() -> None:
    from moeq.cli.explanations import explain
    from moeq.deploy.deployment import Deployment
    from moeq.deploy.gpus import parse_gpu
    from moeq.oracle.judge import judge

    for engine in ("vllm@0.33.0", "moeq"):
        for gpu in ("V100", "H100", "B200", "MI300X", "CPU", "XPU"):
            for one, shape in every_scheme().values():
                where = Deployment(parse_gpu(gpu), tp=2, lora=True, eplb=True, engine=engine)
                verdict = judge(one, shape, where, explain=False)
                codes = {reason.code for row in verdict.candidates for reason in row.reasons}
                codes |= {gate.code for gate in verdict.gates} | {row.code for row in verdict.advisories}
                codes |= {verdict.error.kind} if verdict.error else set()
                for code in codes:
                    assert explain(code).code == code


def test_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["backends", "--json"]) == 0
    rows = document(capsys)["backends"]
    wna16 = [row["backend"] for row in rows if row["family"] == "wna16"]
    assert set(wna16) == {
        "RDNA3", "FLASHINFER_TRTLLM", "MARLIN", "BATCHED_MARLIN", "TRITON", "HUMMING", "EMULATION", "ZEN_CPU", "CPU",
        "XPU",
    }  # fmt: skip
    assert run(["backends", "wna16"]) == 0
    assert "marlin-wna16/1" in capsys.readouterr().out
    assert run(["backends", "--engine", "moeq", "--json"]) == 0
    assert document(capsys)["backends"][0]["family"] == "moeq"
    assert run(["backends", "nope"]) == 2


def test_help_lists_deployment_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["oracle", "--help"]) == 0
    assert "--require" in capsys.readouterr().out


def test_layers_of_two_widths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = {"dynamic": {r"+:.*layers\.1\.mlp\.experts.*": {"bits": 8, "group_size": 64}}}
    layer = with_layer_of(CHECKPOINTS / "gptq-int8-g64-qwen3moe", 1)
    source = rewritten(CHECKPOINTS / "gptq-int4-g32-qwen3moe", tmp_path / "source", layer, rules)
    assert run(["oracle", str(source), "--gpu", "cpu", "--json"]) == 1  # the AMX kernel reads no int8
    answer = document(capsys)
    assert answer["verdict"]["chosen"]["backend"] == "CPU"
    assert answer["other_schemes"][0]["layers"] == [1]
    assert answer["other_schemes"][0]["verdict"]["chosen"] is None
    assert run(["oracle", str(source), "--gpu", "a100,h100", "--tp", "1", "--require", "all", "--json"]) == 0
    assert {cell["scheme"] for cell in document(capsys)["cells"]} == {"gptq int4 g32 sym", "gptq int8 g64 sym"}
    run(["oracle", str(source), "--gpu", "cpu"])
    lines = capsys.readouterr().out.splitlines()
    assert f"{source}  gptq int4 g32 sym  layers 0" in lines
    assert f"{source}  gptq int8 g64 sym  layers 1" in lines
    run(["oracle", str(CHECKPOINTS / "gptq-int4-g32-qwen3moe"), "--gpu", "cpu"])
    assert f"{CHECKPOINTS / 'gptq-int4-g32-qwen3moe'}  gptq int4 g32 sym" in capsys.readouterr().out.splitlines()


def test_a_missing_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["oracle", str(tmp_path / "absent"), "--gpu", "h100", "--json"]) == 4
    assert document(capsys)["ok"] is False

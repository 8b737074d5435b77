"""convert, verify, restore, diff and parity as scripts meet them: documents, exit codes, one line per failure."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moeq.checkpoint.warning import CheckpointWarning
from moeq.cli.app import run
from moeq.errors import ExitCode
from moeq.prove.parity import Parity, PartParity

INT4, OSS = "gptq-int4-g32-qwen3moe", "mxfp4-gptoss"


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]):
    def called(*argv: object) -> tuple[int, dict[str, Any]]:
        code = run([*map(str, argv), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return called


@pytest.fixture
def text(capsys: pytest.CaptureFixture[str]):
    def called(*argv: object) -> tuple[int, str, str]:
        code = run([*map(str, argv), "--quiet"])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return called


def test_the_round_trip(call, checkpoints, tmp_path) -> None:
    source, out, back = checkpoints / OSS, tmp_path / "out", tmp_path / "back"
    code, document = call(
        "convert", source, out, "--gpu", "a100", "--layout", "trtllm-mxfp4/1", "--force-layout", "--tp", "2"
    )
    assert (code, document["schema"], document["ok"]) == (ExitCode.OK, "moeq.convert/1", True)
    assert document["layout"] == "trtllm-mxfp4/1"
    assert document["kept_for_restore"] == []
    assert document["written"] is True
    assert [row["written"] for row in document["sharding"]] == ["ranks", "ranks"]
    assert "64 intermediate features per rank are padded to 128" in document["sharding"][0]["why"]

    code, document = call("verify", out, "--source", source)
    assert (code, document["schema"], document["units"], document["mismatches"]) == (0, "moeq.verify/1", 24, [])
    code, document = call("restore", out, back)
    assert (code, document["schema"], document["kept"], document["missing"]) == (0, "moeq.restore/1", 0, [])
    assert {path.name: path.read_bytes() for path in back.iterdir()} == {
        path.name: path.read_bytes() for path in source.iterdir()
    }
    code, document = call("diff", back, out)
    assert (code, document["schema"], document["differing"], document["worst"]) == (0, "moeq.diff/1", [], None)


def test_inspect_describes_a_conversion(call, checkpoints, tmp_path) -> None:
    source, out = checkpoints / INT4, tmp_path / "out"
    call("convert", source, out, "--gpu", "a100", "--tp", "2")
    code, document = call("inspect", out)
    manifest = json.loads((out / "moeq.json").read_text())
    found = document["conversion"]
    assert code == ExitCode.OK
    assert found["source"] == {"name": str(source), "revision": None}
    assert found["identity"] == manifest["source"]["identity"] is not None
    assert found["layouts"] == ["marlin-wna16/1"]
    for name in ("moeq_version", "backend", "deployment", "copied", "loads_in"):
        assert found[name] == manifest[name], name
    assert found["deployment"]["tp"] == 2
    assert [row.pop("layer") for row in found["sharding"]] == [0, 1]
    assert found["sharding"] == [layer["sharding"] for layer in manifest["layers"]]
    assert call("inspect", source)[1]["conversion"] is None


def test_inspect_tells_what_a_scan_has_found(call, checkpoints, monkeypatch) -> None:
    found = [CheckpointWarning("data.zero-scale", "one"), CheckpointWarning("data.nan", "two")]
    monkeypatch.setattr("moeq.cli.inspect.scan_experts", lambda out, checkpoint: found)
    _, document = call("inspect", checkpoints / INT4, "--scan")
    assert document["scan"] == [{"code": one.code, "message": one.message} for one in found]
    assert call("inspect", checkpoints / INT4)[1]["scan"] is None
    found.clear()
    assert call("inspect", checkpoints / INT4, "--scan")[1]["scan"] == []


def test_numbers_that_the_engine_rounds_itself(call, text, checkpoints, tmp_path) -> None:
    """Float32 scales on Marlin: refused with what would be lost and who else loses it, then written and taken back."""
    source, out, back = checkpoints / "modelopt-fp8-qwen3moe", tmp_path / "out", tmp_path / "back"
    code, document = call("convert", source, out, "--gpu", "a100", "--workers", 1)  # the first expert is refused
    assert (code, document["error"]["code"]) == (ExitCode.NO, "answer.lossy")
    assert "scales by at most 0.24 %" in document["error"]["message"]
    assert "the engine itself makes of this checkpoint at every start" in document["error"]["hint"]
    code, shown, _ = text("convert", source, out, "--gpu", "a100", "--allow-lossy")
    assert code == ExitCode.OK
    assert "stored numbers were changed, as was allowed, and as the engine itself changes them at load" in " ".join(
        shown.split()
    )
    code, _ = call("restore", out, back)
    assert code == ExitCode.OK
    for path in source.iterdir():
        assert (back / path.name).read_bytes() == path.read_bytes()


def test_differences_end_with_1(call, text, checkpoints, tmp_path) -> None:
    out = tmp_path / "out"
    assert text("convert", checkpoints / INT4, out, "--gpu", "a100")[0] == ExitCode.OK
    path = max(out.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    code, document = call("verify", out)
    assert (code, document["ok"]) == (ExitCode.NO, False)
    assert [row["name"] for row in document["mismatches"]] == ["layer 1 expert 3 down"]
    code, shown, _ = text("verify", out)
    assert code == ExitCode.NO
    assert "layer 1 expert 3 down no longer holds the values that were converted" in shown
    code, document = call("diff", checkpoints / INT4, out)
    assert (code, document["ok"]) == (ExitCode.NO, False)
    assert [(row["layer"], row["expert"], row["projection"]) for row in document["differing"]] == [(1, 3, "down")]
    code, shown, _ = text("diff", checkpoints / INT4, out)
    assert code == ExitCode.NO
    assert "worst     layer 1 expert 3 down" in shown
    code, document = call("restore", out, tmp_path / "back")
    assert (code, document["error"]["code"]) == (ExitCode.SOURCE, "source.digest-mismatch")
    assert not (tmp_path / "back").exists()


def test_what_ranks_read_is_shown(text, checkpoints, tmp_path) -> None:
    code, shown, _ = text("convert", checkpoints / INT4, tmp_path / "a", "--gpu", "a100", "--tp", "2", "--dry-run")
    assert code == ExitCode.OK
    assert "sharding   unsharded, sliceable for tp 2: N by 64" in shown
    arguments = ("--gpu", "a100", "--layout", "marlin-act-order/1", "--force-layout", "--tp", "2", "--dry-run")
    code, shown, _ = text("convert", checkpoints / "gptq-int4-g32-actorder-qwen3moe", tmp_path / "b", *arguments)
    assert code == ExitCode.OK
    assert "sharding   ranks, " in shown
    assert list(tmp_path.iterdir()) == []


def test_a_plan_alone_is_not_written(call, checkpoints, tmp_path) -> None:
    code, document = call("convert", checkpoints / INT4, tmp_path / "out", "--gpu", "a100", "--dry-run")
    assert (code, document["written"]) == (ExitCode.OK, False)


def test_refusals_name_the_arithmetic_and_what_works(text, checkpoints, tmp_path) -> None:
    arguments = ("--gpu", "a100", "--engine", "moeq", "--layout", "triton-wna16/1", "--tp", "8")
    code, shown, errors = text("convert", checkpoints / INT4, tmp_path / "out", *arguments)
    assert (code, shown) == (ExitCode.USAGE, "")
    assert "cuts groups of 32: 16 per rank" in errors
    assert "hint: --tp 4" in errors
    assert list(tmp_path.iterdir()) == []


def test_parity_without_the_engine_says_what_to_install(call, checkpoints, tmp_path) -> None:
    code, document = call("parity", checkpoints / INT4, "--site", tmp_path)
    assert (code, document["error"]["code"]) == (ExitCode.ENVIRONMENT, "environment.no-engine")
    assert "vllm==0.33.0" in document["error"]["hint"]


@pytest.mark.parametrize("command", ["verify", "restore", "diff"])
def test_folders_that_are_no_checkpoints(command, call, checkpoints, tmp_path) -> None:
    empty: Path = tmp_path / "empty"
    empty.mkdir()
    more = {"verify": [], "restore": [tmp_path / "back"], "diff": [checkpoints / INT4]}[command]
    code, document = call(command, empty, *more)
    assert code == ExitCode.SOURCE
    assert document["error"]["message"]


@pytest.mark.cover(every=3)
@pytest.mark.parametrize("command", [("plan",), ("convert", "OUT", "--dry-run"), ("convert", "OUT")])
def test_a_loss_is_told_before_anything_is_written(call, checkpoints, tmp_path, command) -> None:
    """Gate and up with a scale each, for a kernel with one: `plan` and `--dry-run` end as `convert` does."""
    name, *more = [str(tmp_path / "out") if word == "OUT" else word for word in command]
    code, document = call(name, checkpoints / "ct-fp8-tensor-qwen3moe", *more, "--gpu", "h100", "--workers", 1)
    assert (code, document["error"]["code"]) == (ExitCode.NO, "answer.lossy")
    assert document["error"]["message"].startswith("layer 0 expert 0: flashinfer-cutlass-fp8-tensor/1 would change 64")
    assert "--allow-lossy writes them" in document["error"]["hint"]
    if command != ("convert", "OUT"):  # which is under way when it meets the loss
        kept = re.match(r"--backend (\w+)|--engine (\w+)", document["error"]["hint"])
        assert kept is not None
        again, _ = call(name, checkpoints / "ct-fp8-tensor-qwen3moe", *more, "--gpu", "h100", *kept[0].split())
        assert again == ExitCode.OK, "what the hint names keeps the numbers"
    code, document = call(name, checkpoints / "ct-fp8-tensor-qwen3moe", *more, "--gpu", "h100", "--allow-lossy")
    assert code == ExitCode.OK


def test_inspect_tells_a_loss(call, checkpoints) -> None:
    code, document = call("inspect", checkpoints / "ct-fp8-tensor-qwen3moe", "--gpu", "h100")
    assert (code, document["ok"]) == (ExitCode.NO, False)
    assert (document["converts"], document["verdict"]["convert"]) == (False, None)
    assert "would change 64 stored values" in document["verdict"]["no_convert"]


@pytest.mark.cover(every=3)
@pytest.mark.parametrize(
    ("name", "where", "expected"),
    [
        ("gptq-int4-g32-actorder-qwen3moe", ("--gpu", "h100"), ExitCode.NO),
        ("mxfp4-gptoss", ("--gpu", "h100", "--tp", 8), ExitCode.USAGE),
        ("mxfp4-gptoss", ("--gpu", "h100"), ExitCode.OK),
    ],
)
def test_inspect_ends_as_convert_would(call, checkpoints, name, where, expected) -> None:
    for command in ("inspect", "plan"):
        code, document = call(command, checkpoints / name, *where)
        assert (code, document["ok"]) == (expected, expected == ExitCode.OK)
    code, _ = call("inspect", checkpoints / name)
    assert code == ExitCode.OK, "no deployment was asked about"


def test_inspect_is_content_where_nothing_needs_converting(call, checkpoints) -> None:
    code, document = call("inspect", checkpoints / "ct-fp8-block-qwen3moe", "--gpu", "h100")
    assert (code, document["converts"], document["verdict"]["ok"]) == (ExitCode.OK, False, True)


@pytest.mark.parametrize("differing", [(), (3, 5)])
def test_the_answer_of_parity(differing: tuple[int, ...]) -> None:
    from moeq.cli.parity import render

    same = PartParity(0, None, "w13", "weight", (0, 3, 5), ())
    other = PartParity(1, 2, "w2", "scale", (0, 3, 5), differing, "the engine's are right" if differing else None)
    found = Parity("here", "vLLM 0.33.0", ("marlin-wna16/1",), (same, other), ("an operation was replaced",))
    console = Console(file=StringIO(), width=120)
    render(console, found)
    wanted = [
        f"{'different' if differing else 'bit-equal'}: here and vLLM 0.33.0",
        "  layout    marlin-wna16/1",
        f"  parts     {1 if differing else 2} of 2 equal",
        *(["  layer 1 rank 2 w2 scale, experts 3, 5: the engine's are right"] if differing else []),
        "  note      an operation was replaced",
    ]
    assert console.file.getvalue().splitlines() == wanted  # type: ignore[attr-defined]


def test_verify_puts_differences_on_the_page_of_a_job(text, checkpoints, tmp_path, monkeypatch) -> None:
    out = tmp_path / "out"
    assert text("convert", checkpoints / INT4, out, "--gpu", "a100")[0] == ExitCode.OK
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert "::error" not in text("verify", out)[2]
    path = max(out.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    code, _, said = text("verify", out)
    assert code == ExitCode.NO
    assert "::error title=moeq verify 1 mismatch::layer 1 expert 3 down no longer holds" in said

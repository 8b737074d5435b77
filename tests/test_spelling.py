"""Options in messages are spelled as the caller types them: `--tp 2` in a shell, `tp=2` in Python."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_type_hints

import pytest

import moeq
from moeq.api.functions import PlanKeywords
from moeq.cli.app import run
from moeq.spelling import option, spelled, together
from moeq.transcode.survey import TranscodeKeywords

ROOT = Path(__file__).parents[1]

#: Rooms whose messages only a shell shows: the command line, and engines, which are started from one.
FOR_SHELLS = ("moeq/cli/", "moeq/engines/")

#: A command line in a sentence, which stays as it is.
COMMAND = re.compile(r"`[^`]*`|\b(?:moeq|vllm|pip|hf|ray|sbatch|srun|torchrun|python) [a-z-]+\b[^;]*")

FUNCTIONS = ("decide", "plan", "convert", "finalize", "transcode", "push", "verify", "restore", "diff", "run_check")


@cache
def options() -> set[str]:
    """Return the options that a public function has, as a shell spells them."""
    keywords = {name for function in FUNCTIONS for name in inspect.signature(getattr(moeq, function)).parameters}
    keywords |= set(get_type_hints(PlanKeywords)) | set(get_type_hints(TranscodeKeywords))
    switches = {f"--no-{name}" for name in ("lora", "eplb", "digests")} | {"--standard", "--digests-only"}
    return {f"--{name.replace('_', '-')}" for name in keywords} | switches


def spelled_for_a_shell(text: str) -> set[str]:
    """Return the options of public functions that a message spells for a shell, outside of command lines."""
    return set(re.findall(r"--[a-z][a-z0-9-]*", COMMAND.sub("", text))) & options() if "--" in text else set()


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each string that is no docstring; values in an f-string are left out."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(value) for value in node.values}
            yield node.lineno, "".join(part.value for part in node.values if isinstance(part, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value


def test_no_message_spells_options_for_a_shell() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sorted((ROOT / "moeq").rglob("*.py"))
        if not str(path.relative_to(ROOT)).startswith(FOR_SHELLS) and path.name not in COMPOSED
        for line, text in texts(ast.parse(path.read_text()))
        if spelled_for_a_shell(text)
    ]
    assert not found, "\n".join(found)


#: Modules that compose command lines from parts.
COMPOSED = {"spelling.py", "commands.py", "advise.py", "publishing.py", "workload.py", "verdict.py", "ranks.py"}


def test_no_table_of_the_oracle_spells_options_for_a_shell() -> None:
    def strings(value: object) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            for part in value.values() if isinstance(value, dict) else value:
                yield from strings(part)

    for path in (ROOT / "moeq/oracle").rglob("*.toml"):
        found = [text for text in strings(tomllib.loads(path.read_text())) if spelled_for_a_shell(text)]
        assert not found, path.name


@pytest.mark.parametrize(
    ("named", "shell", "python"),
    [
        (("force", True), "--force", "force=True"),
        (("lora", False), "--no-lora", "lora=False"),
        (("batched", False), "--standard", "batched=False"),
        (("kernels", False), "--digests-only", "kernels=False"),
        (("max_memory", "300MiB"), "--max-memory 300MiB", 'max_memory="300MiB"'),
        (("tp", 2), "--tp 2", "tp=2"),
        (("gpu", "RTX 4090"), "--gpu 'RTX 4090'", 'gpu="RTX 4090"'),
        (("signed_by",), "--signed-by", "signed_by"),
    ],
)
def test_spellings(named: tuple[str, object], shell: str, python: str) -> None:
    assert option(*named) == python
    with spelled(for_shell=True):
        assert option(*named) == shell
        with spelled(for_shell=False):
            assert together([option(*named), option("tp", 1)]) == f"{python}, tp=1"
        assert together([option(*named), option("tp", 1)]) == f"{shell} --tp 1"
    assert option(*named) == python


def test_errors_of_python_name_keywords(checkpoints: Path, tmp_path: Path) -> None:
    """A failing call of every kind: neither message nor hint is in a shell's words, and the table is not either."""
    int4, order, float_, oss = (
        checkpoints / f"{name}"
        for name in (
            "gptq-int4-g32-qwen3moe",
            "gptq-int4-g32-actorder-qwen3moe",
            "ct-fp8-tensor-qwen3moe",
            "mxfp4-gptoss",
        )
    )
    done = tmp_path / "done"
    moeq.convert(int4, done, gpu="A100", shard="0/1")
    calls = [
        lambda: moeq.decide(int4),
        lambda: moeq.decide(int4, gpu="H100", backend="triton"),
        lambda: moeq.decide(int4, gpu="H100", engine="none@1"),
        lambda: moeq.plan(order, gpu="H100"),
        lambda: moeq.plan(order, gpu="H100", tp=4, dtype="fp16", lora=True),
        lambda: moeq.plan(float_, gpu="H100"),
        lambda: moeq.plan(oss, gpu="H100", tp=8),
        lambda: moeq.plan(oss, gpu="H100", tp=2, ep=3),
        lambda: moeq.plan(oss, gpu="H100", layout="triton-wna16/1"),
        lambda: moeq.plan(int4, gpu="H100", layout="rdna3-int4/1"),
        lambda: moeq.plan(int4, gpu="H100", regroup=48),
        lambda: moeq.plan(int4, gpu="H100", revision="main"),
        lambda: moeq.convert(int4, done, gpu="H100"),
        lambda: moeq.convert(int4, done, gpu="A100", shard="0/1", force=True),
        lambda: moeq.convert(int4, tmp_path / "out", gpu="A100", shard="3/3"),
        lambda: moeq.convert(int4, tmp_path / "out", gpu="A100", shard="one"),
        lambda: moeq.convert(int4, tmp_path / "out", gpu="A100", shard="auto"),
        lambda: moeq.convert(int4, tmp_path / "out", gpu="A100", max_memory="1MiB"),
        lambda: moeq.convert(int4, tmp_path / "out", gpu="A100", stream_source=True),
        lambda: moeq.convert(int4, tmp_path / "out", gpu="A100", executor="no"),
        lambda: moeq.convert(int4, int4, gpu="A100"),
        lambda: moeq.convert(int4, tmp_path / "out", gpu="A100", sign=tmp_path / "none.key"),
        lambda: moeq.finalize(tmp_path / "nothing"),
        lambda: moeq.transcode(oss, to="gptq", check_only=True),
        lambda: moeq.transcode(oss, to="nothing", check_only=True),
        lambda: moeq.transcode(int4, tmp_path / "t", to="bf16"),
        lambda: moeq.transcode(int4, tmp_path / "t", to="gptq", regroup=24),
        lambda: moeq.transcode(oss, to="mxfp4", names="per-expert", check_only=True),
        lambda: moeq.transcode(order, to="compressed-tensors", sort_act_order=True, names="stacked", check_only=True),
        lambda: moeq.verify(int4),
        lambda: moeq.verify(tmp_path / "nothing"),
        lambda: moeq.restore(int4, tmp_path / "back"),
        lambda: moeq.run_check(int4),
        lambda: moeq.push(int4, "org/name"),
    ]
    for call in calls:
        with pytest.raises(moeq.MoeqError) as caught:
            call()
        assert not spelled_for_a_shell(f"{caught.value.message}; {caught.value.hint or ''}"), caught.value


def test_tables_of_python_name_keywords(checkpoints: Path) -> None:
    for source in sorted(path for path in checkpoints.iterdir() if path.is_dir()):
        verdict = moeq.decide(source, gpu="H100", tp=2)
        assert not spelled_for_a_shell(f"{verdict!r} {verdict._repr_html_()}"), source.name
        assert not {name for row in verdict.candidates for name in spelled_for_a_shell(str(row.unlock))}, source.name


def test_the_command_line_speaks_to_a_shell(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(checkpoints / "gptq-int4-g32-actorder-qwen3moe"), "--gpu", "H100"]) == 1
    assert "hint: --engine moeq" in capsys.readouterr().err
    assert option("tp", 2) == "tp=2", "and Python is spoken to again"

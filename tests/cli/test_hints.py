"""Every hint works: what a hint names exists, and what it suggests is tried in the situation that printed it."""

from __future__ import annotations

import ast
import json
import random
import re
import shlex
import shutil
from collections.abc import Iterator
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from pipeline.test_promises import SEED, sources

import moeq
from moeq.cli.app import COMMANDS, run
from moeq.cli.explanations import warning_codes

__all__ = ["sources"]  # a fixture

MOEQ = Path(moeq.__file__).parent

#: Options of other programs that hints name.
FOREIGN = {
    *("--moe-backend", "--tensor-parallel-size", "--enable-expert-parallel", "--enable-eplb", "--additional-config"),
    *("--moe-a2a-backend", "--disable-shared-experts-fusion", "--lora-target-modules", "--init-expert-location"),
    *("--max-lora-rank", "--fully-sharded-loras", "--lora-dtype", "--ep-size"),
    *("--ep-num-redundant-experts", "--cpu-offload-gb", "--offload-group-size", "--load-format"),
    *("--expert-placement-strategy", "--local-dir", "--no-deps", "--memory", "--help", "--version"),
}


def options_of(command: str) -> set[str]:
    """Option names of a command."""
    found = {"--help"}
    for parameter in signature(import_module(COMMANDS[command].module).command, eval_str=True).parameters.values():
        for info in get_args(parameter.annotation)[1:]:
            # Within Annotated, typer keeps the first name as the default.
            names = (getattr(info, "default", None), *(getattr(info, "param_decls", None) or ()))
            found |= {one for name in names if isinstance(name, str) for one in name.split("/")}
    return found


def hints() -> Iterator[tuple[str, str]]:
    """Place and text of every hint in the code; what is filled in stands as X."""
    for path in sorted(MOEQ.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = getattr(getattr(node, "func", None), "id", "")
            if called != "MoeqError":
                continue
            assert isinstance(node, ast.Call)
            named = [keyword.value for keyword in node.keywords if keyword.arg == "hint"]
            for value in (*node.args[2:3], *named):
                yield f"{path.relative_to(MOEQ)}:{node.lineno}", "".join(texts(value))


def texts(node: ast.expr) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield f" {child.value} "
        elif isinstance(child, ast.FormattedValue):
            yield " X "


def test_what_hints_name_exists() -> None:
    """Commands, options, and packages of this project (which no index has)."""
    every = {name for command in COMMANDS for name in options_of(command)} | FOREIGN
    wrong, count = [], 0
    for place, text in hints():
        count += 1
        commands = re.findall(r"\bmoeq ([a-z][a-z-]+)", text)
        wrong += [f"{place}: moeq {name}" for name in commands if name not in COMMANDS and name not in _WORDS]
        known = every
        if len(set(commands)) == 1 and commands[0] in COMMANDS and ";" not in text and " or " not in text:
            known = options_of(commands[0]) | FOREIGN
        wrong += [f"{place}: {name}" for name in re.findall(r"(--[a-z][a-z0-9-]+)", text) if name not in known]
        if re.search(r"pip install '?moeq\b", text):
            wrong.append(f"{place}: no index has moeq: {text}")
    assert count > 150
    assert not wrong, "\n".join(wrong)


#: What follows the name of the program in sentences.
_WORDS = {
    "removes",
    "that",
    "reads",
    "looks",
    "has",
    "itself",
    "wrote",
    "on",
    "and",
    "writes",
    "is",
    "does",
    "knows",
    "have",
}


def called(capsys: pytest.CaptureFixture[str], argv: list[str]) -> tuple[int, dict[str, Any]]:
    code = run([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def changed(argv: list[str], suggestion: str) -> list[str]:
    """The command line with what a suggestion says."""
    words = argv[:]
    for name in re.findall(r"leaving out ((?:--[a-z-]+(?: and |, )?)+)", suggestion):
        for option in re.findall(r"--[a-z-]+", name):
            words = without(words, option)
    rest = re.sub(r"leaving out (?:--[a-z-]+(?: and |, )?)+", "", re.sub(r"\([^)]*\)", "", suggestion))
    given = shlex.split(" ".join(re.findall(r"--[a-z0-9-]+(?: (?!--|or\b|works\b)(?:'[^']*'|\S+))?", rest)))
    for word in given:
        if word.startswith("--"):
            words = without(words, word)
    return words + given


def without(words: list[str], option: str) -> list[str]:
    if option not in words:
        return words
    at = words.index(option)
    ends = at + 1 if at + 1 == len(words) or words[at + 1].startswith("--") else at + 2
    return words[:at] + words[ends:]


def any_options(rng: random.Random) -> list[str]:
    gpu = rng.choice(("A100", "H100", "B200", "MI300X", "MI355X", "CPU", "RTX 7900", "V100", "XPU"))
    words = ["--gpu", gpu if gpu != "RTX 7900" else "RX 7900", "--tp", str(rng.choice((1, 2, 3, 4, 6, 8, 16)))]
    words += rng.choice(([], [], [], ["--ep", str(rng.choice((2, 4, 8, 1024)))]))
    words += rng.choice(([], [], [], [], ["--backend", rng.choice(("marlin", "triton", "humming", "nonsense"))]))
    words += rng.choice(([], [], [], ["--layout", rng.choice(("marlin-wna16/1", "rdna3-int4/1", "trtllm-mxfp4/1"))]))
    words += rng.choice(([], [], [], ["--dtype", "fp16"]))
    words += rng.choice(([], [], [], [], ["--regroup", rng.choice(("7", "32", "64"))]))
    return words


@pytest.mark.slow
def test_suggestions_of_plan_are_plans(sources: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Every change that a refused `plan` suggests, by itself, is a plan."""
    rng, tried, situations = random.Random(SEED), 0, 0
    for _ in range(60):
        argv = ["plan", str(sources[rng.choice(sorted(sources))]), *any_options(rng)]
        code, document = called(capsys, argv)
        hint = document.get("error", {}).get("hint")
        if code == 0 or not hint or " works" not in hint:
            assert code == 0 or document["error"]["code"] in SILENT, (argv, document["error"])
            continue
        situations += 1
        for suggestion in hint.partition(" works")[0].split(", or "):
            again = changed(argv, suggestion)
            assert called(capsys, again)[0] == 0, (argv, hint, again, document)
            tried += 1
    assert situations > 15
    assert tried > 25


#: Where nothing can be suggested: the checkpoint itself has to be another one.
SILENT = {"usage.mixed-experts", "answer.not-convertible", "answer.nothing-to-convert"}

#: What unlocks a backend, as the oracle says it, and the options that say it.
UNLOCKS = (
    (r"tp (\d+)", r"--tp \1"),
    (r"ep (\d+) \(whole experts per rank\)", r"--ep \1"),
    (r"ep 1( and dp 1)?", "--ep 1 --dp 1"),
    (r"dtype (\w+)", r"--dtype \1"),
    (r"install (\w+)", r"--package \1=yes"),
    (r"set (\w+=\S+)", r"--env \1"),
    (r"install (\w+) and set (\w+=\S+)", r"--package \1=yes --env \2"),
    (r"(--quantization \w+)", r"\1"),
)


@pytest.mark.slow
def test_what_unlocks_a_backend_does(sources: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """The change that the oracle names for a backend makes the engine run it when it is asked for."""
    rng, tried = random.Random(SEED), 0
    for _ in range(24):
        gpu = rng.choice(("A100", "H100", "B200", "MI300X"))
        argv = ["oracle", str(sources[rng.choice(sorted(sources))]), "--gpu", gpu, "--tp", rng.choice("1248")]
        for row in called(capsys, argv)[1]["verdict"]["candidates"]:
            for pattern, options in UNLOCKS:
                found = re.fullmatch(pattern, row["unlock"] or "")
                if found and row["flag"]:
                    again = changed(argv, found.expand(options))
                    answer = called(capsys, again)[1]["verdict"]
                    rows = {other["backend"]: other for other in answer["candidates"]}
                    names = {answer["chosen"]["backend"]} if answer["chosen"] else set()
                    asked = called(capsys, [*again, "--backend", row["flag"]])[1]["verdict"]
                    names |= {asked["chosen"]["backend"]} if asked["chosen"] else set()
                    assert row["backend"] in names or rows[row["backend"]]["supported"], (argv, row, again)
                    tried += 1
    assert tried > 5


class TestSituations:
    """Hints that are no part of an answer: each is followed, word for word, where it was printed."""

    SRC = "gptq-int4-g32-qwen3moe"

    def hint(self, capsys: pytest.CaptureFixture[str], *argv: object) -> str:
        code, document = called(capsys, [str(word) for word in argv])
        assert code != 0
        return str(document["error"]["hint"])

    def follow(self, capsys: pytest.CaptureFixture[str], *argv: object) -> None:
        code, document = called(capsys, [str(word) for word in argv])
        assert code == 0, document

    def test_no_gpu(self, checkpoints, tmp_path, capsys, monkeypatch) -> None:
        monkeypatch.setattr("moeq.deploy.options.detect_gpu", lambda: None)
        argv = ("convert", checkpoints / self.SRC, tmp_path / "out", "--dry-run")
        for name in re.findall(r"--gpu (\w+)", self.hint(capsys, *argv)):
            self.follow(capsys, *argv, "--gpu", name)

    def test_unknown_gpu(self, checkpoints, capsys) -> None:
        hint = self.hint(capsys, "inspect", checkpoints / self.SRC, "--gpu", "H1000")
        for name in hint.partition("nearest known: ")[2].partition(";")[0].split(", "):
            code, document = called(capsys, ["inspect", str(checkpoints / self.SRC), "--gpu", name])
            assert "error" not in document, document  # a GPU may have no backend, and then the answer is 1
            assert code in (0, 1)
        assert "moeq gpus" in hint
        self.follow(capsys, "gpus")

    def test_destination_exists(self, checkpoints, tmp_path, capsys) -> None:
        argv = ("convert", checkpoints / self.SRC, tmp_path / "out", "--gpu", "A100", "--quiet")
        self.follow(capsys, *argv)
        self.follow(capsys, *argv)  # the same job is already done
        assert "--force replaces it" in self.hint(capsys, *argv, "--no-code")
        self.follow(capsys, *argv, "--no-code", "--force")

    def test_already_converted(self, checkpoints, tmp_path, capsys) -> None:
        self.follow(capsys, "convert", checkpoints / self.SRC, tmp_path / "out", "--gpu", "A100", "--quiet")
        hint = self.hint(capsys, "convert", tmp_path / "out", tmp_path / "two", "--gpu", "A100")
        assert "moeq restore" in hint
        self.follow(capsys, "restore", tmp_path / "out", tmp_path / "back", "--quiet")
        self.follow(capsys, "convert", tmp_path / "back", tmp_path / "two", "--gpu", "A100", "--quiet")

    def test_unfinished_work(self, checkpoints, tmp_path, capsys) -> None:
        argv = ("convert", checkpoints / self.SRC, tmp_path / "out", "--gpu", "A100", "--quiet")
        self.follow(capsys, *argv, "--shard", "0/2")
        hints = [self.hint(capsys, "verify", tmp_path / name) for name in ("out", "out.moeq-partial")]
        hints.append(self.hint(capsys, "inspect", tmp_path / "out.moeq-partial"))
        for hint in hints:
            again = shlex.split(hint.rpartition(": moeq ")[2].removesuffix(" ..."))
            assert again == [str(word) for word in argv[:3]]
        self.follow(capsys, *again, *argv[3:])

    def test_memory(self, checkpoints, tmp_path, capsys) -> None:
        argv = ("convert", checkpoints / self.SRC, tmp_path / "out", "--gpu", "A100", "--dry-run")
        enough = re.search(r"--max-memory (\w+) is enough", self.hint(capsys, *argv, "--max-memory", "1MiB"))
        assert enough is not None
        self.follow(capsys, *argv, "--max-memory", enough[1])

    def test_not_a_plan(self, checkpoints, tmp_path, capsys) -> None:
        (tmp_path / "plan.json").write_text("{}")
        argv = ("convert", checkpoints / self.SRC, tmp_path / "out", "--plan", tmp_path / "plan.json", "--dry-run")
        assert "moeq plan SRC -o FILE" in self.hint(capsys, *argv)
        self.follow(capsys, "plan", checkpoints / self.SRC, "--gpu", "A100", "-o", tmp_path / "plan.json")
        self.follow(capsys, *argv)

    @pytest.mark.slow
    def test_a_missing_shard_of_the_work(self, checkpoints, tmp_path, capsys) -> None:
        argv = ("convert", checkpoints / self.SRC, tmp_path / "out", "--gpu", "A100", "--quiet")
        assert "--shard 0/8" in self.hint(capsys, "finalize", tmp_path / "out")
        self.follow(capsys, *argv, "--shard", "0/3")
        for shard in re.findall(r"--shard (\d/\d)", self.hint(capsys, "finalize", tmp_path / "out", "--quiet")):
            self.follow(capsys, *argv, "--shard", shard)
        self.follow(capsys, "finalize", tmp_path / "out", "--quiet")

    def test_a_shard_counted_from_one(self, checkpoints, tmp_path, capsys) -> None:
        argv = ("convert", checkpoints / self.SRC, tmp_path / "out", "--gpu", "A100", "--dry-run")
        shard = re.search(r"--shard (\d/\d)", self.hint(capsys, *argv, "--shard", "2/2"))
        assert shard is not None
        self.follow(capsys, *argv, "--shard", shard[1])

    def test_a_file_instead_of_its_folder(self, checkpoints, capsys) -> None:
        hint = self.hint(capsys, "inspect", checkpoints / self.SRC / "model.safetensors")
        self.follow(capsys, "inspect", hint.rpartition(": ")[2])

    def test_a_gguf_file(self, tmp_path, capsys) -> None:
        (tmp_path / "model.gguf").write_bytes(b"GGUF")
        for path in (tmp_path / "model.gguf", tmp_path):
            _, document = called(capsys, ["inspect", str(path)])
            assert "GGUF" in document["error"]["message"]
            assert "folder" not in document["error"]["hint"]

    def test_a_layout_without_a_kernel(self, checkpoints, tmp_path, capsys) -> None:
        options = ("--gpu", "H100", "--layout", "cpu-amx-int4/1", "--force-layout", "--quiet")
        self.follow(capsys, "convert", checkpoints / self.SRC, tmp_path / "out", *options)
        hint = self.hint(capsys, "run-check", tmp_path / "out", "--quiet")
        assert "moeq verify" in hint
        assert "--digests-only" in hint
        self.follow(capsys, "verify", tmp_path / "out", "--quiet")
        self.follow(capsys, "run-check", tmp_path / "out", "--digests-only", "--quiet")

    def test_a_revision_of_a_folder(self, checkpoints, capsys) -> None:
        assert self.hint(capsys, "inspect", checkpoints / self.SRC, "--revision", "main") == "leave out --revision"
        self.follow(capsys, "inspect", checkpoints / self.SRC)

    def test_codes_of_verdicts_and_schemes_are_explained(self, checkpoints, capsys) -> None:
        for name in ("gptq-int4-g32-actorder-qwen3moe", "mxfp4-gptoss", self.SRC):
            _, document = called(capsys, ["inspect", str(checkpoints / name), "--gpu", "MI300X"])
            codes = [warning["code"] for warning in document["warnings"]]
            codes += [reason["code"] for row in document["verdict"]["candidates"] for reason in row["reasons"]]
            codes += [advisory["code"] for advisory in document["verdict"]["advisories"]]
            for code in set(codes):
                self.follow(capsys, "explain", code)

    def test_every_warning_is_explained(self) -> None:
        for path in sorted(MOEQ.rglob("*.py")):
            for code in re.findall(r'CheckpointWarning\(\s*"([a-z0-9.-]+)"', path.read_text(encoding="utf-8")):
                assert code in warning_codes(), code

    def test_a_missing_part_of_the_source(self, checkpoints, tmp_path, capsys) -> None:
        shutil.copytree(checkpoints / "mxfp4-gptoss", tmp_path / "source")
        (tmp_path / "source" / "model-00002-of-00002.safetensors").unlink()
        assert "finish the download" in self.hint(capsys, "inspect", tmp_path / "source")


@pytest.mark.cover(every=10)
@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_examples_of_help_run(command, checkpoints, tmp_path, capsys, monkeypatch) -> None:
    """In order, in a folder that has ./checkpoint: those that need the network or another program are only parsed."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoints / "gptq-int4-g32-qwen3moe", tmp_path / "checkpoint")
    if command in ("verify", "restore", "diff", "run-check", "selftest", "push"):
        assert run(["convert", "checkpoint", "converted", "--gpu", "A100", "--quiet"]) == 0
    if command == "convert":
        assert run(["plan", "checkpoint", "--gpu", "H100", "-o", "plan.json"]) == 0
    for example in COMMANDS[command].examples:
        words = shlex.split(example)
        if command in ("push", "parity", "finalize", "warmup") or "org/name" in words:
            assert {word for word in words if word.startswith("--")} <= options_of(command)
            continue
        shutil.rmtree(tmp_path / "converted", ignore_errors=True) if command == "convert" else None
        more = ["--layers", "0", "--tokens", "3"] if command == "run-check" and "--layers" not in words else []
        # The examples are about larger models than this one, which has two attention heads.
        words = ["2" if word == "4" and command == "inspect" else word for word in words]
        answers = (0, 1) if command == "oracle" else (0,)
        assert run([command, *words, *more]) in answers, example
    capsys.readouterr()
    assert typer is not None

"""The command line as people and scripts meet it: answers on stdout, exit codes, one clear line per failure."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from forks import Ended, Starter, starting
from rich.text import Text
from safetensors.numpy import save_file

from moeq.cli.app import COMMANDS, run
from moeq.errors import EXIT_CODES, ExitCode, MoeqError

INT4 = "gptq-int4-g32-qwen3moe"


Moeq = Callable[..., Ended]


@pytest.fixture(scope="module")
def starter(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    folder = tmp_path_factory.mktemp("app")
    rehearsal = [["convert", checkpoints / INT4, folder / "out", "--gpu", "a100", "--dry-run"], ["inspect", "--help"]]
    with starting(folder, {**os.environ, "COLUMNS": "120"}, rehearsal=rehearsal) as found:
        yield found


@pytest.fixture
def moeq(starter: Starter) -> Moeq:
    """Runs the installed command in a process of its own."""
    return partial(starter.run, seconds=60)


def write_model(folder: Path, config: dict[str, object], tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def dense_model(tmp_path: Path) -> Path:
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"]
    tensors = {name: np.zeros((8, 8), np.float16) for name in names}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8}
    return write_model(tmp_path / "dense", config, tensors)


@pytest.fixture
def plain_moe(tmp_path: Path) -> Path:
    sizes = {"gate_proj": (64, 128), "up_proj": (64, 128), "down_proj": (128, 64)}
    tensors = {
        f"model.layers.0.mlp.experts.{expert}.{name}.weight": np.zeros(shape, np.float16)
        for expert in range(4)
        for name, shape in sizes.items()
    }
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 1,
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    return write_model(tmp_path / "plain", config, tensors)


def test_help_lists_every_command(moeq: Moeq) -> None:
    result = moeq("--help")
    assert result.code == 0
    for name in COMMANDS:
        assert name in result.out


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(moeq: Moeq, name: str) -> None:
    result = moeq(name, "--help")
    assert result.code == 0, result.err
    assert "--json" in result.out


def test_version(moeq: Moeq) -> None:
    result = moeq("--version")
    assert (result.code, result.out) == (0, "moeq 0.1.0\n")


def test_the_package_runs_as_a_module() -> None:
    result = subprocess.run([sys.executable, "-m", "moeq", "--version"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "moeq 0.1.0\n")


@pytest.mark.parametrize("argv", [["no-such-command"], ["inspect"], ["inspect", "x", "--no-such-option"]])
def test_usage_errors(moeq: Moeq, argv: list[str]) -> None:
    result = moeq(*argv)
    assert result.code == ExitCode.USAGE
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert "Traceback" not in result.err


class TestFailures:
    """Every failure: exit code, one line and a hint on stderr, nothing on stdout, nothing left behind."""

    def expect(self, moeq: Moeq, tmp_path: Path, source: Path, code: str, command: str) -> None:
        out = tmp_path / "out"
        argv: list[str | Path] = [command, source]
        if command == "convert":
            argv.append(out)
        text = moeq(*argv, "--gpu", "a100")
        assert text.code == EXIT_CODES[code.partition(".")[0]], text.err
        assert text.out == ""
        first, *rest = text.err.splitlines()
        assert first.startswith("error: ")
        assert all(line.startswith("hint: ") for line in rest), text.err
        document = moeq(*argv, "--gpu", "a100", "--json")
        answer = json.loads(document.out)
        assert answer["schema"] == f"moeq.{command}/1"
        assert answer["ok"] is False
        assert answer["error"]["code"] == code
        assert answer["error"]["exit_code"] == document.code == text.code
        assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]

    @pytest.mark.parametrize("command", ["inspect", "convert"])
    def test_wrong_path(self, moeq, tmp_path, command) -> None:
        self.expect(moeq, tmp_path, tmp_path / "nowhere", "source.missing", command)

    @pytest.mark.parametrize("command", ["inspect", "convert"])
    def test_truncated_file(self, moeq, tmp_path, checkpoints, command) -> None:
        shutil.copytree(checkpoints / INT4, tmp_path / "source")
        weights = tmp_path / "source" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
        self.expect(moeq, tmp_path, tmp_path / "source", "source.truncated", command)

    @pytest.mark.parametrize("command", ["inspect", "convert"])
    def test_missing_shard(self, moeq, tmp_path, checkpoints, command) -> None:
        shutil.copytree(checkpoints / "mxfp4-gptoss", tmp_path / "source")
        (tmp_path / "source" / "model-00002-of-00002.safetensors").unlink()
        self.expect(moeq, tmp_path, tmp_path / "source", "source.missing-shard", command)

    @pytest.mark.parametrize("command", ["inspect", "convert"])
    def test_not_a_moe(self, moeq, tmp_path, dense_model, command) -> None:
        self.expect(moeq, tmp_path, dense_model, "answer.not-moe", command)

    def test_not_quantised(self, moeq, tmp_path, plain_moe) -> None:
        self.expect(moeq, tmp_path, plain_moe, "answer.nothing-to-convert", "convert")

    def test_an_unquantised_moe_can_still_be_inspected(self, moeq, plain_moe) -> None:
        result = moeq("inspect", plain_moe, "--json")
        assert result.code == 0, result.err
        document = json.loads(result.out)
        assert document["num_experts"] == 4
        assert document["convertible"] is False

    def test_no_backend(self, moeq, tmp_path, checkpoints) -> None:
        source = checkpoints / "gptq-int4-g32-actorder-qwen3moe"
        self.expect(moeq, tmp_path, source, "answer.no-backend", "convert")

    def test_unknown_gpu(self, moeq, tmp_path, checkpoints) -> None:
        result = moeq("inspect", checkpoints / INT4, "--gpu", "H1000")
        assert result.code == ExitCode.USAGE
        assert "H100" in result.err, "the nearest name that exists"

    def test_forced_backend_that_cannot_work(self, moeq, tmp_path, checkpoints) -> None:
        argv = ["convert", checkpoints / INT4, tmp_path / "out", "--gpu", "a100", "--backend", "flashinfer_trtllm"]
        result = moeq(*argv)
        assert result.code == ExitCode.NO
        assert "10" in result.err, "the reason names the compute capability it needs"


def test_inspect_json_is_one_document(moeq: Moeq, checkpoints) -> None:
    result = moeq("inspect", checkpoints / INT4, "--gpu", "h100", "--json")
    assert result.code == 0
    assert result.err == ""
    document = json.loads(result.out)
    assert document["schema"] == "moeq.inspect/1"
    assert document["ok"] is True
    facts = ("model_type", "num_layers", "num_experts", "top_k", "hidden_size", "intermediate_size")
    assert [document[name] for name in facts] == ["qwen3_moe", 2, 4, 2, 256, 128]
    (use,) = document["schemes"]
    assert use["scheme"]["weight"]["dtype"] == "int4"
    assert use["scheme"]["weight"]["scale"]["group_shape"] == [1, 32]
    assert use["scheme"]["zero_point"] == "stored-minus-one"
    assert document["expert_bytes"] + document["other_bytes"] > 0
    assert document["verdict"]["selected"]["backend"] == "HUMMING"
    assert document["verdict"]["convert"]["layout"] == "marlin-wna16/1"


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        ("gptq-int4-g32-qwen3moe", "gptq int4, group 32, symmetric, no act-order"),
        ("gptq-int4-g128-mixtral", "gptq int4, group 128, symmetric, no act-order"),
        ("gptq-int8-g64-qwen3moe", "gptq int8, group 64, symmetric, no act-order"),
        ("gptq-int4-g32-actorder-qwen3moe", "gptq int4, group 32, symmetric, act-order"),
    ],
)
def test_inspect_says_what_the_scheme_is(moeq: Moeq, name: str, phrase: str, checkpoints) -> None:
    result = moeq("inspect", checkpoints / name, "--gpu", "a100")
    assert result.code == ("actorder" in name)
    assert phrase in result.out
    assert "zero points stored minus one, unused" in result.out


def test_without_a_gpu_inspect_still_answers(moeq: Moeq, checkpoints) -> None:
    result = moeq("inspect", checkpoints / INT4)
    assert result.code == 0
    assert "verdict" in result.out


def test_bugs_are_reported_as_bugs(monkeypatch, capsys) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("something nobody thought of")

    monkeypatch.setattr("moeq.cli.app.parser", broken)
    monkeypatch.delenv("MOEQ_DEBUG", raising=False)
    assert run(["inspect", "x"]) == ExitCode.BUG
    captured = capsys.readouterr()
    assert "RuntimeError: something nobody thought of" in captured.err
    assert "MOEQ_DEBUG=1" in captured.err
    assert "Traceback" not in captured.err


def test_ctrl_c_is_130(monkeypatch, capsys) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moeq.cli.app.parser", interrupted)
    assert run(["convert", "a", "b"]) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "error: interrupted\n"  # nothing was begun, so nothing is kept


def test_a_closed_pipe_is_not_an_error(checkpoints) -> None:
    command = f"{sys.executable} -c 'from moeq.cli.app import main; main()' inspect {checkpoints / INT4} | head -1"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in result.stderr
    assert "Exception" not in result.stderr


def test_errors_survive_process_boundaries() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(MoeqError("source.truncated", "short", "fetch it again")))
    assert (error.code, error.message, error.hint, error.exit_code) == (
        "source.truncated",
        "short",
        "fetch it again",
        ExitCode.SOURCE,
    )


@pytest.mark.parametrize("kind", sorted(EXIT_CODES))
def test_the_kind_alone_decides_the_exit_code(kind: str) -> None:
    assert MoeqError(f"{kind}.anything", "x").exit_code == EXIT_CODES[kind]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_every_word_of_its_texts(name: str) -> None:
    """Square brackets are markup to the help printer: a text in them would silently be left out."""
    parameters = inspect.signature(import_module(COMMANDS[name].module).command, eval_str=True).parameters.values()
    helps = [info.help for parameter in parameters for info in getattr(parameter.annotation, "__metadata__", ())]
    assert helps or name == "backends"
    for text in filter(None, helps):
        assert Text.from_markup(text).plain == text.replace("\\[", "["), text

"""The example action and workflow: every shell step runs under bash with the variables that GitHub would set."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoint.hub_uploads import serving_uploads

FOLDER = Path(__file__).parents[2] / "examples" / "github-action"
ACTION = yaml.safe_load((FOLDER / "action.yml").read_text())
WORKFLOW = yaml.safe_load((FOLDER / "convert-and-push.yml").read_text())
INT4 = "gptq-int4-g32-qwen3moe"

EXPRESSION = re.compile(r"\$\{\{ (.*?) \}\}")


class Runner:
    """As much of GitHub's runner as the action uses: inputs, conditions on them, environment, outputs, summary."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.output, self.summary = folder / "output", folder / "summary"
        self.output.touch()
        self.summary.touch()
        self.log = ""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "GITHUB_"))}
        self.environment = {
            **own,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "GITHUB_ACTIONS": "true",
            "CI": "true",
            "GITHUB_OUTPUT": str(self.output),
            "GITHUB_STEP_SUMMARY": str(self.summary),
            "RUNNER_TEMP": str(folder),
            **environment,
        }

    def use(self, **given: str) -> int:
        """Run the action's steps; exit code of the first that fails."""
        assert given.keys() <= ACTION["inputs"].keys()
        missing = {name for name, row in ACTION["inputs"].items() if row.get("required")} - given.keys()
        assert not missing
        inputs = {name: row.get("default", "") for name, row in ACTION["inputs"].items()} | given
        for step in ACTION["runs"]["steps"]:
            if "if" in step and not self.holds(step["if"], inputs):
                continue
            code = self.step(step, inputs)
            if code:
                return code
        return 0

    def holds(self, condition: str, inputs: dict[str, str]) -> bool:
        match = re.fullmatch(r"\$\{\{ inputs\.(\w+) (==|!=) '(.*)' \}\}", condition)
        assert match, condition
        return (inputs[match[1]] == match[3]) == (match[2] == "==")

    def step(self, step: dict[str, Any], inputs: dict[str, str]) -> int:
        assert step["shell"] == "bash"
        assert "${{" not in step["run"], "inputs reach scripts as variables only"
        values = {
            name: EXPRESSION.sub(lambda m: inputs[m[1].removeprefix("inputs.")], v) for name, v in step["env"].items()
        }
        script = self.folder / "step.sh"
        script.write_text(step["run"])
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)]
        done = subprocess.run(
            command, env={**self.environment, **values}, capture_output=True, text=True, check=False, cwd=self.folder
        )
        self.log += done.stdout + done.stderr
        return done.returncode

    @property
    def outputs(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self.output.read_text().splitlines())


@pytest.mark.slow
def test_convert_verify_and_push(checkpoints: Path, tmp_path: Path) -> None:
    with serving_uploads() as (hub, _):
        runner = Runner(tmp_path, HF_ENDPOINT=hub.url, HF_HUB_DISABLE_XET="1", HF_HOME=str(tmp_path / "hf"))
        code = runner.use(
            source=str(checkpoints / INT4),
            destination="out",
            gpu="A100",
            options="--workers\n1\n",
            push="org/from-ci",
            token="hf_write",
            install="",
        )
        assert code == 0, runner.log
        assert (hub.folders["org/from-ci"] / "moeq.json").is_file()
    outputs = runner.outputs
    assert outputs.keys() == ACTION["outputs"].keys()
    assert outputs["destination"] == "out"
    assert outputs["repository"].endswith("/org/from-ci")
    assert re.fullmatch("[0-9a-f]{64}", outputs["plan"])
    events = [json.loads(line) for line in Path(outputs["events"]).read_text().splitlines()]
    assert [row["event"] for row in events][-3:] == ["finished", "pushed", "ended"]
    assert "hf_write" not in runner.log + runner.summary.read_text() + Path(outputs["events"]).read_text()
    assert "### moeq convert: out" in runner.summary.read_text()
    assert "::group::moeq convert" in runner.log
    assert "verified" in runner.log


@pytest.mark.cover(every=5)
@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        ({"gpu": "A100", "source": "/no/such"}, 4, "::error title=moeq convert source."),
        ({"gpu": "no such gpu"}, 2, "::error title=moeq convert usage."),
        ({"gpu": "A100", "options": "--no-such-option"}, 2, "::error title=moeq convert usage.command-line"),
        ({"gpu": "$(touch pwned)", "options": "`touch pwned`"}, 2, "::error title=moeq convert usage."),
        ({"gpu": "A100", "push": "not a name"}, 2, "usage.push-name"),
    ],
)
def test_failures_keep_their_exit_code(
    checkpoints: Path, tmp_path: Path, given: dict[str, str], code: int, says: str
) -> None:
    runner = Runner(tmp_path)
    assert runner.use(**{"source": str(checkpoints / INT4), "install": "", **given}) == code, runner.log
    assert says in runner.log
    assert not (tmp_path / "pwned").exists()
    assert not (tmp_path / "converted").exists()
    assert runner.outputs == {}


def test_the_workflow_gives_the_action_what_it_takes() -> None:
    steps = WORKFLOW["jobs"]["convert"]["steps"]
    used = next(step for step in steps if step.get("uses") == "./examples/github-action")
    required = {name for name, row in ACTION["inputs"].items() if row.get("required")}
    assert required <= used["with"].keys() <= ACTION["inputs"].keys()
    inputs = WORKFLOW[True]["workflow_dispatch"]["inputs"]  # YAML reads `on` as true
    named = set(re.findall(r"inputs\.(\w+)", (FOLDER / "convert-and-push.yml").read_text()))
    assert named == inputs.keys()
    assert used["with"]["options"].split("\n")[::2] == ["--tp", "--max-memory", ""]


def test_outputs_come_from_steps_that_exist() -> None:
    ids = {step.get("id") for step in ACTION["runs"]["steps"]}
    for row in ACTION["outputs"].values():
        match = re.fullmatch(r"\$\{\{ steps\.(\w+)\.outputs\.(\w+) \}\}", row["value"])
        assert match
        assert match[1] in ids

"""The scripts and manifests below `examples/cluster`, run as far as that goes without a cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.pipeline.convert import convert
from moeq.pipeline.run.work_shards import LAUNCHERS

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"
NAME = "gptq-int4-g32-qwen3moe"

#: Stands for Slurm's `sbatch`: runs the job at once, every task of an array with the variables that Slurm sets.
SBATCH = r"""#!/bin/bash
set -euo pipefail
array="" dependency=""
while [[ $1 == --* ]]; do
    case $1 in
        --array=*) array=${1#--array=} ;;
        --dependency=afterok:*) dependency=${1#--dependency=afterok:} ;;
    esac
    shift
done
state=$(dirname "$0")
echo "$dependency|$array|$*" >> "$state/submitted"
if [[ -n $dependency && ! -e $state/$dependency.ok ]]; then exit 0; fi  # waits for ever
export SLURM_JOB_ID=$((100 + $(wc -l < "$state/submitted"))) SLURM_CPUS_PER_TASK=1
if [[ -n $array ]]; then
    first=${array%-*} last=${array#*-}
    for task in $(seq "$last" -1 "$first"); do
        SLURM_ARRAY_TASK_ID=$task SLURM_ARRAY_TASK_MIN=$first SLURM_ARRAY_TASK_MAX=$last SLURM_ARRAY_TASK_STEP=1 \
            SLURM_ARRAY_TASK_COUNT=$((last - first + 1)) "$@" >> "$state/log" 2>&1
    done
    touch "$state/$SLURM_JOB_ID.ok"
else
    "$@" >> "$state/log" 2>&1
fi
echo "$SLURM_JOB_ID"
"""


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "out"
    convert(checkpoints / NAME, out, Deployment(gpu=parse_gpu("H100")))
    return content(out)


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for the search path with `moeq` in it."""
    folder = tmp_path / "tools"
    folder.mkdir()
    script(folder / "moeq", f'#!/bin/bash\nexec {sys.executable} -c "from moeq.cli.app import main; main()" "$@"\n')
    return folder


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def run(words: list[str], tools: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    launchers = {name for launcher in LAUNCHERS for name in (launcher.index, launcher.count, *launcher.mark)}
    inherited = {key: value for key, value in os.environ.items() if key not in launchers and "SLURM" not in key}
    environment = {**inherited, "PATH": f"{tools}:{os.environ['PATH']}", **variables}
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow
def test_slurm(checkpoints, whole, tools, tmp_path) -> None:
    script(tools / "sbatch", SBATCH)
    out = tmp_path / "out"
    words = [str(FOLDER / "slurm.sh"), str(checkpoints / NAME), str(out), "--gpu", "H100"]
    ran = run(words, tools, SHARDS="2")
    log = (tools / "log").read_text()
    assert ran.returncode == 0, ran.stderr + log
    array, waiting = (line.split("|") for line in (tools / "submitted").read_text().splitlines())
    assert array[:2] == ["", "0-1"]
    assert waiting[:2] == ["101", ""]
    assert "shard 1/2" in log
    assert content(out) == whole


def container(manifest: str) -> dict[str, Any]:
    job = yaml.safe_load((FOLDER / manifest).read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    (found,) = job["spec"]["template"]["spec"]["containers"]
    return {"job": job["spec"], **found}


def mounted(words: list[str], paths: Mapping[str, Path]) -> list[str]:
    """The command with paths of this machine in place of those of the volume."""
    return [str(paths.get(word, word)) for word in words]


@pytest.mark.slow
def test_kubernetes(checkpoints, whole, tools, tmp_path) -> None:
    paths = {"/models/source": checkpoints / NAME, "/models/converted": tmp_path / "out"}
    pod, last = container("kubernetes.yaml"), container("kubernetes-finalize.yaml")
    variables = {row["name"]: row["value"] for row in pod["env"]}
    assert pod["job"]["completionMode"] == "Indexed"
    assert int(variables["MOEQ_SHARDS"]) == pod["job"]["completions"]
    assert pod["image"] == last["image"]
    # Every index is run; with two layers, one of four pods finds nothing to do.
    for index in reversed(range(pod["job"]["completions"])):
        ran = run(mounted([*pod["command"], *pod["args"]], paths), tools, JOB_COMPLETION_INDEX=str(index), **variables)
        assert ran.returncode == 0, ran.stderr
    assert not (tmp_path / "out").exists()
    ran = run(mounted(last["command"], paths), tools)
    assert ran.returncode == 0, ran.stderr
    assert content(tmp_path / "out") == whole


@pytest.mark.slow
def test_skypilot(checkpoints, whole, tools, tmp_path) -> None:
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    command = task["run"].replace("/models/source", str(checkpoints / NAME))
    command = command.replace("/models/converted", str(tmp_path / "out"))
    for rank in range(task["num_nodes"]):
        variables = {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_NODES": str(task["num_nodes"])}
        ran = run(["bash", "-c", command], tools, **variables)
        assert ran.returncode == 0, ran.stderr
    assert run(["moeq", "finalize", str(tmp_path / "out")], tools).returncode == 0
    assert content(tmp_path / "out") == whole


@pytest.mark.slow
def test_torchrun(checkpoints, whole, tools, tmp_path) -> None:
    """The real torchrun, with the options of the table."""
    line = next(line for line in (FOLDER / "README.md").read_text().splitlines() if "torchrun --nnodes" in line)
    (command,) = re.findall(r"`(torchrun .*?)`", line)
    here = command.replace("--nnodes=2 --nproc-per-node=4 ...", "--standalone --nproc-per-node=2")
    here = here.replace("SRC", str(checkpoints / NAME)).replace("DST", str(tmp_path / "out"))
    ran = run([sys.executable, "-m", "torch.distributed.run", *here.split()[1:]], tools)
    assert ran.returncode == 0, ran.stderr
    assert run(["moeq", "finalize", str(tmp_path / "out")], tools).returncode == 0
    assert content(tmp_path / "out") == whole


def test_the_table_of_variables_is_the_one_of_the_code() -> None:
    text = (FOLDER / "README.md").read_text()
    for launcher in LAUNCHERS:
        row = next(line for line in text.splitlines() if line.startswith(f"| `{launcher.name}` |"))
        assert f"`{launcher.index}`" in row
        assert f"`{launcher.count}`" in row

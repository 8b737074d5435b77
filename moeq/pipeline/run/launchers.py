"""Launchers (Slurm, Kubernetes, ...): the environment variables that give a process its index and their number.

Sources of the names: Slurm's manual pages sbatch(1) and srun(1); Kubernetes, "Indexed Job for parallel processing";
PyTorch, "torchrun"; SkyPilot, "Distributed multi-node jobs".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moeq.errors import MoeqError
from moeq.spelling import option

#: Kubernetes tells a pod its index and not how many there are; the manifest passes the number in this variable.
COUNT_VARIABLE = "MOEQ_SHARDS"


@dataclass(frozen=True)
class Launcher:
    """One way of starting a command N times.

    Attributes:
        name: name for `--shard`.
        title: name for people.
        index: variable with this process's number.
        count: variable with how many there are.
        mark: variables of which one is set only if this launcher started the process.
        first, last, step: variables with the lowest and highest number and their distance, for a launcher that counts
            from elsewhere than 0 in steps other than 1.
        remedy: a way to launch that sets the variables.
    """

    name: str
    title: str
    index: str
    count: str
    mark: tuple[str, ...]
    remedy: str
    first: str | None = None
    last: str | None = None
    step: str | None = None


LAUNCHERS = (
    Launcher(
        name="slurm-array",
        title="Slurm job array",
        index="SLURM_ARRAY_TASK_ID",
        count="SLURM_ARRAY_TASK_COUNT",
        mark=("SLURM_ARRAY_TASK_ID",),
        first="SLURM_ARRAY_TASK_MIN",
        last="SLURM_ARRAY_TASK_MAX",
        step="SLURM_ARRAY_TASK_STEP",
        remedy="submit with sbatch --array=0-7",
    ),
    Launcher(
        name="srun",
        title="srun",
        index="SLURM_PROCID",
        count="SLURM_STEP_NUM_TASKS",
        # A batch script has SLURM_PROCID=0 and SLURM_NTASKS too, without being one of several processes.
        mark=("SLURM_STEP_NUM_TASKS",),
        remedy="start with srun --ntasks=8",
    ),
    Launcher(
        name="kubernetes",
        title="Kubernetes indexed Job",
        index="JOB_COMPLETION_INDEX",
        count=COUNT_VARIABLE,
        mark=("JOB_COMPLETION_INDEX",),
        remedy=f"set {COUNT_VARIABLE} to the Job's completions in the container's env",
    ),
    Launcher(
        name="torchrun",
        title="torchrun",
        index="RANK",
        count="WORLD_SIZE",
        mark=("RANK", "WORLD_SIZE"),
        remedy="start with torchrun --nproc-per-node=8 --no-python moeq ...",
    ),
    Launcher(
        name="skypilot",
        title="SkyPilot",
        index="SKYPILOT_NODE_RANK",
        count="SKYPILOT_NUM_NODES",
        mark=("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
        remedy="set num_nodes in the task",
    ),
)


@dataclass(frozen=True)
class TaskIndex:
    """Index of this process and number of processes, as a launcher says: `index` of `count`, counted from 0."""

    launcher: Launcher
    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.launcher.title} says {self.index}/{self.count}"


def place(launcher: Launcher, environ: Mapping[str, str]) -> TaskIndex:
    """Read this process's index from the environment.

    Raises:
        MoeqError: `usage.shard-launcher` if a variable is missing, is no number, or contradicts another.
    """
    index, count = _number(launcher, launcher.index, environ), _number(launcher, launcher.count, environ)
    if launcher.first and launcher.last and launcher.step:
        index = _regular(launcher, environ, index, count)
    if not 0 <= index < count:
        detail = f"{launcher.index}={index} is not one of 0 .. {count - 1} ({launcher.count}={count})"
        raise MoeqError("usage.shard-launcher", f"{launcher.title}: {detail}", launcher.remedy)
    return TaskIndex(launcher, index, count)


def find_place(environ: Mapping[str, str]) -> TaskIndex:
    """Find this process's index in the environment. Launchers of a single process do not count.

    Raises:
        MoeqError: `usage.shard-launcher` if no launcher is found, or several that contradict each other.
    """
    found = [place(launcher, environ) for launcher in LAUNCHERS if any(name in environ for name in launcher.mark)]
    if not found:
        looked = ", ".join(f"{launcher.index} ({launcher.title})" for launcher in LAUNCHERS)
        raise MoeqError(
            "usage.shard-launcher",
            f"{option('shard', 'auto')}: no launcher's variables are set; looked for {looked}",
            f"say which shard this is: {option('shard', '0/8')} .. {option('shard', '7/8')}",
        )
    several = [candidate for candidate in found if candidate.count > 1]
    places = {(candidate.index, candidate.count) for candidate in several}
    if len(places) > 1:
        raise MoeqError(
            "usage.shard-launcher",
            f"{option('shard', 'auto')}: " + ", but ".join(map(str, several)),
            f"say which counts: {option('shard', several[0].launcher.name)}, or {option('shard', 'I/N')}",
        )
    return (several or found)[0]


def _number(launcher: Launcher, variable: str, environ: Mapping[str, str]) -> int:
    text = environ.get(variable)
    if text is None:
        set_ = next(name for name in (launcher.index, launcher.count, *launcher.mark) if name != variable)
        detail = f"{variable} is not set" + (f" although {set_} is" if set_ in environ else "")
        raise MoeqError("usage.shard-launcher", f"{launcher.title}: {detail}", launcher.remedy)
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        detail = f"{variable}={text[:40]!r} is not a number"
        raise MoeqError("usage.shard-launcher", f"{launcher.title}: {detail}", launcher.remedy)
    return int(text)


def _regular(launcher: Launcher, environ: Mapping[str, str], number: int, count: int) -> int:
    """Return the position of `number` in first, first + step, ..., last; refuse lists such as `--array=1,3,4`."""
    names = (launcher.first or "", launcher.last or "", launcher.step or "")
    first, last, step = (_number(launcher, name, environ) for name in names)
    if step < 1 or first + (count - 1) * step != last or (number - first) % step:
        shown = ", ".join(f"{name}={environ[name]}" for name in (launcher.index, *names, launcher.count))
        raise MoeqError(
            "usage.shard-launcher",
            f"{launcher.title}: the numbers are not evenly spaced ({shown})",
            f"{launcher.remedy}; to run some shards again name them: moeq convert SRC DST --shard ${launcher.index}/8",
        )
    return (number - first) // step

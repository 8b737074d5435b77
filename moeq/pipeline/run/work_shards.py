"""Shards of the work: which units of a conversion one of N processes executes.

Shards count from 0, as Slurm arrays, Kubernetes indexed Jobs and ranks do: 0/8 .. 7/8. The plan alone determines the
units of a shard, so that every process finds the same cut without asking another. Launchers tell a process
its shard by environment variables. Sources of their names: Slurm's manual pages sbatch(1) and srun(1); Kubernetes,
"Indexed Job for parallel processing"; PyTorch, "torchrun"; SkyPilot, "Distributed multi-node jobs".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moeq.checkpoint.source import Source
from moeq.errors import MoeqError
from moeq.pipeline.plan.units import Unit
from moeq.spelling import option

_FRACTION = re.compile(r"(\d{1,9})\s*/\s*(\d{1,9})", re.ASCII)


@dataclass(frozen=True)
class WorkShard:
    """Shard `index` of `count`, counted from 0."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def label(self) -> str:
        """Name of the shard without a slash, for file names."""
        return f"{self.index}-of-{self.count}"

    def select(self, units: Sequence[Unit], *, remote: bool) -> tuple[Unit, ...]:
        """Return the units of this shard, in the order of their places in the source (`remote`: see `is_remote`).

        Units are dealt in groups, see `grouped`, in the order of their places in the source, so that a shard reads
        neighbouring files. Every shard in turn takes groups until its bytes are as near as possible to an equal share
        of the bytes that are left. Each leaves one group at least for every later shard, if there are enough.
        """
        groups = grouped(units, remote=remote)
        sizes = [sum(unit.bytes_in + unit.bytes_out for unit in group) for group in groups]
        left, stop = sum(sizes), 0
        for index in range(self.index + 1):
            start, taken, others = stop, 0, self.count - index - 1
            while stop < len(groups):
                # Take the next group if half of it fits into the share left / (others + 1); in whole numbers.
                fits = (2 * taken + sizes[stop]) * (others + 1) <= 2 * left and len(groups) - stop > others
                if others and not fits and stop > start:
                    break
                taken, stop = taken + sizes[stop], stop + 1
            left -= taken
        return tuple(unit for group in groups[start:stop] for unit in group)


@dataclass(frozen=True)
class ShardRun:
    """A shard of a conversion."""

    shard: WorkShard  #: the shard
    units: int  #: count of the shard's units
    bytes_out: int  #: bytes that these units write
    done: bool  #: whether the units are done; False for a dry run


def grouped(units: Sequence[Unit], *, remote: bool = False) -> list[list[Unit]]:
    """Group units that one machine executes together: those that write to the same file.

    Two machines may write disjoint ranges of one file, but network file systems write whole pages: where two ranges
    meet within a page, one machine can lose the other's bytes, which only `moeq finalize` would notice.

    A file of copied tensors gathers them from many source files. Where these have to be fetched first (`remote`), its
    units are dealt one by one; otherwise a shard would fetch most of the model to copy a small part of it.
    """
    groups: dict[str, list[Unit]] = {}
    for unit in units:
        groups.setdefault(unit.fetch_group if remote else unit.file, []).append(unit)
    return sorted(groups.values(), key=lambda group: (min(map(_place, group)), group[0].id))


def _place(unit: Unit) -> tuple[str, int]:
    """Return the place of a unit's first byte in the source; units without bytes come first."""
    return min(((file, spans[0][0]) for file, spans in unit.inputs.items() if spans), default=("", 0))


def is_remote(source: Source) -> bool:
    """Return whether a source is a commit of a repository, whose files each process fetches for itself.

    Some machines may hold the files already, but all machines have to deal the units in the same way.
    """
    return source.revision is not None


def parse_label(label: str) -> WorkShard | None:
    """Return the shard with that label; None if it is not a label."""
    match = re.fullmatch(r"(\d{1,9})-of-(\d{1,9})", label, re.ASCII)
    return WorkShard(int(match[1]), int(match[2])) if match else None


def parse_shard(text: str, environ: Mapping[str, str]) -> WorkShard:
    """Return the shard of `I/N`, of `auto` (whichever launcher started this process), or of a launcher's name.

    Raises MoeqError `usage.shard` for anything else; `usage.shard-launcher` if a launcher's variables are missing or
    contradict each other.
    """
    named = {launcher.name: launcher for launcher in LAUNCHERS}
    if text == "auto" or text in named:
        return (find_task_index(environ) if text == "auto" else task_index(named[text], environ)).shard
    match = _FRACTION.fullmatch(text.strip())
    if match is None:
        raise MoeqError(
            "usage.shard",
            f"{option('shard')} {text[:60]!r}: expected I/N, such as 0/8 for the first of eight",
            f"or auto, or one of {', '.join(named)}",
        )
    index, count = int(match[1]), int(match[2])
    if count < 1:
        raise MoeqError(
            "usage.shard",
            f"{option('shard', text)}: the work cannot be cut into {count} shards",
            "0/1 is all of the work",
        )
    if index >= count:
        raise MoeqError(
            "usage.shard",
            f"{option('shard', text)}: shards count from 0, so the last of {count} is {count - 1}/{count}",
            f"{option('shard', f'{index - 1}/{count}')}, if your shards count from 1" if index == count else None,
        )
    return WorkShard(index, count)


#: Kubernetes tells a pod its index but not the count of pods; the Job's manifest passes the count in this variable.
COUNT_VARIABLE = "MOEQ_SHARDS"


@dataclass(frozen=True)
class Launcher:
    """One way of starting a command N times."""

    name: str  #: name for `--shard`
    title: str  #: name for people
    index: str  #: variable with this process's number
    count: str  #: variable with the count of processes
    mark: tuple[str, ...]  #: variables; if one of them is set, this launcher has started the process
    remedy: str  #: a way to launch that sets the variables
    #: Variables with the lowest number, the highest number and the step, for a launcher whose numbers need not be
    #: 0, 1, 2, ...
    spacing: tuple[str, str, str] | None = None


LAUNCHERS = (
    Launcher(
        name="slurm-array",
        title="Slurm job array",
        index="SLURM_ARRAY_TASK_ID",
        count="SLURM_ARRAY_TASK_COUNT",
        mark=("SLURM_ARRAY_TASK_ID",),
        spacing=("SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_STEP"),
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
    """Index of this process among all processes, as its launcher says."""

    launcher: Launcher
    shard: WorkShard

    def __str__(self) -> str:
        return f"{self.launcher.title} says {self.shard}"


def task_index(launcher: Launcher, environ: Mapping[str, str]) -> TaskIndex:
    """Read this process's index from the environment.

    Raises MoeqError `usage.shard-launcher` if a variable is missing, is no number, or contradicts another.
    """
    index, count = _number(launcher, launcher.index, environ), _number(launcher, launcher.count, environ)
    if launcher.spacing is not None:
        index = _evenly_spaced(launcher, launcher.spacing, environ, index, count)
    if not 0 <= index < count:
        detail = f"{launcher.index}={index} is not one of 0 .. {count - 1} ({launcher.count}={count})"
        raise MoeqError("usage.shard-launcher", f"{launcher.title}: {detail}", launcher.remedy)
    return TaskIndex(launcher, WorkShard(index, count))


def find_task_index(environ: Mapping[str, str]) -> TaskIndex:
    """Find this process's index in the environment. Launchers of several processes win over those of one.

    Raises MoeqError `usage.shard-launcher` if no launcher is found, or several that contradict each other.
    """
    found = [task_index(launcher, environ) for launcher in LAUNCHERS if any(name in environ for name in launcher.mark)]
    if not found:
        looked = ", ".join(f"{launcher.index} ({launcher.title})" for launcher in LAUNCHERS)
        raise MoeqError(
            "usage.shard-launcher",
            f"{option('shard', 'auto')}: no launcher's variables are set; looked for {looked}",
            f"say which shard this is: {option('shard', '0/8')} .. {option('shard', '7/8')}",
        )
    several = [candidate for candidate in found if candidate.shard.count > 1]
    if len({candidate.shard for candidate in several}) > 1:
        raise MoeqError(
            "usage.shard-launcher",
            f"{option('shard', 'auto')}: " + ", but ".join(map(str, several)),
            f"say which one is meant: {option('shard', several[0].launcher.name)}, or {option('shard', 'I/N')}",
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


def _evenly_spaced(
    launcher: Launcher, names: tuple[str, str, str], environ: Mapping[str, str], number: int, count: int
) -> int:
    """Return the position of `number` in first, first + step, ..., last; refuse lists such as `--array=1,3,4`."""
    first, last, step = (_number(launcher, name, environ) for name in names)
    if step < 1 or first + (count - 1) * step != last or (number - first) % step:
        shown = ", ".join(f"{name}={environ[name]}" for name in (launcher.index, *names, launcher.count))
        raise MoeqError(
            "usage.shard-launcher",
            f"{launcher.title}: the numbers are not evenly spaced ({shown})",
            f"{launcher.remedy}; to run some shards again name them: moeq convert SRC DST --shard ${launcher.index}/8",
        )
    return (number - first) // step

"""What the benchmarks against `cp` share: options, checkpoints, measured processes, the page cache, the document.

Each contender runs in turn in a process of its own, the order rotating, and ends with a `sync` of the files it wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MOEQ = [sys.executable, "-P", "-c", "from moeq.cli.app import main; main()"]

#: Environment of every contender: bytecode is kept, as where a package is installed.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

#: After a sync, the disk still discards the blocks of deleted files for a while.
SETTLE_SECONDS = 1.0


@dataclass(frozen=True)
class Run:
    """One measured process: seconds and bytes."""

    wall: float
    user: float
    system: float
    peak: int


def measure(command: list[str], log: Path) -> Run:
    """Run a command to its end and take the kernel's account of it.

    This process stays small: the peak that the kernel reports for a child counts what its parent held when it forked.
    """
    with log.open("wb") as output:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=ENVIRONMENT)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text()[-2000:]}")
    scale = 1 if sys.platform == "darwin" else 1024
    return Run(wall, usage.ru_utime, usage.ru_stime, usage.ru_maxrss * scale)


def synced(command: list[str], folder: Path) -> list[str]:
    """Run the command, then sync every file in the folder that it wrote."""
    return ["sh", "-c", '"$@" && exec sync "$0"/*', str(folder), *command]


def set_cache(source: Path, cache: str) -> float:
    """Drop the source from the page cache, or read it into it; the share that is in it afterwards."""
    for path in source.iterdir():
        fd = os.open(path, os.O_RDONLY)
        try:
            if cache == "cold":
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while os.read(fd, 16 << 20):
                    pass
        finally:
            os.close(fd)
    return cached_share(source)


def settle() -> None:
    """Let the disk finish what earlier runs left to it: journals, and blocks of deleted files to discard."""
    os.sync()
    time.sleep(SETTLE_SECONDS)


def cached_share(source: Path) -> float:
    """How much of the source is in the page cache; -1 where `fincore` (util-linux) is missing."""
    if shutil.which("fincore") is None:
        return -1.0
    files = [str(path) for path in source.iterdir()]
    found = subprocess.run(["fincore", "-nbo", "RES", *files], capture_output=True, text=True, check=True).stdout
    return sum(map(int, found.split())) / sum(path.stat().st_size for path in source.iterdir())


def make_source(source: Path, model: str, kind: str, layers: int, experts: int | None) -> None:
    """Write a random checkpoint (`make_checkpoint.py`, or `make_gguf.py` for `gguf-TYPE`) and bring it to disk."""
    if kind.startswith("gguf-"):
        source.mkdir()
        script, out, named = "make_gguf.py", source / "model.gguf", ["--type", kind.removeprefix("gguf-")]
    else:
        script, out, named = "make_checkpoint.py", source, ["--format", kind]
    make = [sys.executable, str(HERE / script), str(out), "--model", model, *named]
    make += ["--layers", str(layers), *(["--experts", str(experts)] if experts else [])]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["sync", *map(str, source.iterdir())], check=True)


def run_once(command: list[str], source: Path, out: Path, cache: str) -> tuple[Run, float]:
    """One measured run of a contender, and the share of the source that was in the page cache before it."""
    cached = set_cache(source, cache)
    settle()
    return measure(synced(command, out), out.with_name(f"{out.name}.log")), cached


def folder_bytes(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir())


def machine() -> dict[str, Any]:
    """Describe the machine."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def option_parser(text: str, cases: Iterable[str], *, gib: float, repeat: int) -> argparse.ArgumentParser:
    """Return the parser of the options that all these benchmarks have."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(cases), action="append", help="[all]")
    parser.add_argument("--gib", type=float, default=gib, help=f"size of each checkpoint [{gib:g}]")
    parser.add_argument("--repeat", type=int, default=repeat, help=f"runs of each contender [{repeat}]")
    parser.add_argument("--workers", type=int, default=2, help="workers of moeq [2]")
    parser.add_argument("--cache", choices=("cold", "warm"), default="cold", help="the source in the page cache [cold]")
    parser.add_argument("--folder", type=Path, help="where to write, on the disk to measure [the temporary folder]")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser


def run_cases(
    options: argparse.Namespace,
    cases: Iterable[str],
    schema: str,
    run_case: Callable[[str, argparse.Namespace, Path], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Run the cases that were asked for; every one is shown, and the document written, when it is finished."""
    rows: list[dict[str, Any]] = []
    for name in options.case or cases:
        with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
            rows.append(run_case(name, options, Path(scratch)))
        show(rows[-1])
        if options.json:
            given = {"gib": options.gib, "cache": options.cache, "workers": options.workers, "repeat": options.repeat}
            document = {"schema": schema, **given, "machine": machine(), "cases": rows}
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    return rows

"""Time our kernels and the peers that are installed side by side; README.md in this folder says how.

python -m bench.peers run --out FOLDER [--seconds S] [--warm PROCESSES]
python -m bench.peers report FOLDER/peers.json [MORE.json ...] --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.routing import ROUTINGS

from bench.peers.conduct import PATIENCE, Lane, Options, Run, Seat, conduct, jobs, warm
from bench.peers.contenders import BY_FORMAT, CONTENDERS
from bench.peers.evaluate import merge
from bench.peers.report import markdown, missing
from bench.shapes import GROUPS, TOKENS


class Clocks:
    """Clocks, power and temperature of the GPUs, read once a second during the run."""

    QUERY = "clocks.sm,clocks.mem,power.draw,temperature.gpu"

    def __init__(self, gpus: list[str]) -> None:
        self.gpus = gpus
        self.rows: list[list[float]] = []
        self.driver = next(iter(self._ask("driver_version")), "")
        threading.Thread(target=self._watch, daemon=True).start()

    def _ask(self, query: str) -> list[str]:
        """Ask nvidia-smi; return a line for each GPU."""
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", f"--id={','.join(self.gpus)}"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return []
        return answer.strip().splitlines()

    def _watch(self) -> None:
        while rows := self._ask(self.QUERY):
            try:
                self.rows += [[float(part) for part in row.split(",")] for row in rows]
            except ValueError:
                return
            time.sleep(1)

    def summary(self) -> dict[str, Any]:
        """Return the least, the median and the largest value of each."""
        columns = zip(*self.rows, strict=True) if self.rows else []
        names = self.QUERY.split(",")
        return {
            name: {"least": min(column), "median": statistics.median(column), "most": max(column)}
            for name, column in zip(names, columns, strict=False)
        }


def document(run: Run, clocks: Clocks) -> dict[str, Any]:
    """Return the document of a run, as it is written to a file."""
    import torch

    return {
        "schema": "moeq-kernels.peers/2",
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "driver": clocks.driver,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "side_by_side": "one run",
        "rounds": run.options.rounds,
        "milliseconds": run.options.milliseconds,
        "routing": run.options.routing,
        "contenders": {n: {"versions": s.versions, "absent": s.absent} for n, s in run.lanes[0].seats.items()},
        "peaks": {lane.gpu: lane.peak for lane in run.lanes},
        "clocks": clocks.summary(),
        "seconds": round(time.monotonic() - run.began, 1),
        "left_out": run.left_out,
        "cells": run.cells,
    }


def write(found: dict[str, Any], folder: Path) -> None:
    """Write the document and its tables."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "peers.json").write_text(json.dumps(found, indent=1) + "\n")
    if found["cells"]:
        (folder / "peers.md").write_text(markdown(found))


def run(given: argparse.Namespace) -> int:
    """Time every contender in every cell, as far as the seconds reach."""
    groups = [g for g in GROUPS if g.format in given.formats.split(",") and g.shape in given.shapes.split(",")]
    tokens = tuple(int(count) for count in given.tokens.split(","))
    names = [name for name in given.contenders.split(",") if any(name in BY_FORMAT[group.format] for group in groups)]
    given.out.mkdir(parents=True, exist_ok=True)
    log = given.out / "contenders.log"
    skip = frozenset(tuple(pair.split(":", 1)) for pair in given.skip.split(",") if pair)
    options = Options(given.seconds, tokens, given.rounds, given.milliseconds, log, skip, given.routing)
    gpus = given.gpus.split(",")
    clocks = Clocks(gpus)
    begin = time.monotonic()
    if given.warm:
        work = jobs(groups, [name for name in names if name in given.warm_only.split(",")], options)
        for reason in warm(work, given.warm, given.warm_seconds, log, gpus):
            print("warming up:", reason, flush=True)
        print(f"warmed up in {time.monotonic() - begin:.0f} s", flush=True)
    if not given.only_warm:
        left = replace(options, seconds=given.seconds - (time.monotonic() - begin))
        lanes = [Lane({name: Seat(name, log, gpu, given.patience) for name in names}, gpu) for gpu in gpus]
        done = Run(left, lanes, lambda found: write(document(found, clocks), given.out))
        conduct(groups, done)
        print("\n".join(missing(document(done, clocks))), flush=True)
    return 0


def report(given: argparse.Namespace) -> int:
    """Write the tables of earlier runs."""
    write(merge([json.loads(path.read_text()) for path in given.files]), given.out)
    print((given.out / "peers.md").read_text())
    return 0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    timing = commands.add_parser("run", help="time everything that is installed")
    timing.set_defaults(call=run)
    timing.add_argument("--out", type=Path, required=True, help="folder for peers.json and peers.md")
    timing.add_argument("--seconds", type=float, default=600, help="spent on the most telling groups and cells first")
    timing.add_argument(
        "--gpus",
        default=os.environ.get("CUDA_VISIBLE_DEVICES", "0"),
        help="as CUDA_VISIBLE_DEVICES; several share the groups",
    )
    timing.add_argument("--formats", default=",".join(BY_FORMAT))
    timing.add_argument("--shapes", default=",".join(dict.fromkeys(group.shape for group in GROUPS)))
    timing.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    timing.add_argument("--contenders", default=",".join(CONTENDERS))
    timing.add_argument("--skip", default="", help="FORMAT:CONTENDER,... to leave out")
    timing.add_argument("--rounds", type=int, default=3)
    timing.add_argument("--patience", type=float, default=PATIENCE, help="seconds for an answer of a contender")
    timing.add_argument("--milliseconds", type=float, default=25)
    timing.add_argument(
        "--routing", choices=ROUTINGS, default="uniform", help="experts alike, by rank, or the same for all tokens"
    )
    timing.add_argument(
        "--warm", type=int, default=0, metavar="PROCESSES", help="compile everything first, in parallel"
    )
    timing.add_argument("--warm-only", default=",".join(CONTENDERS), help="whose kernels to compile first")
    timing.add_argument("--warm-seconds", type=float, default=600, help="stop compiling after that")
    timing.add_argument("--only-warm", action="store_true", help="compile, and time nothing")
    again = commands.add_parser("report", help="tables of earlier runs")
    again.set_defaults(call=report)
    again.add_argument("files", type=Path, nargs="+")
    again.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    return int(given.call(given))


if __name__ == "__main__":
    sys.exit(main())

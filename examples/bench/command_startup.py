"""What a command takes before and after its work: every command on a checkpoint of 3 MiB, which the fast path packs.

    python examples/bench/command_startup.py [--repeat 10] [--folder FOLDER] [--json FILE]

Commands run in turns, each in a process of its own, after a first turn that is not counted: it compiles the loops and
Python's own files, and fills the page cache. Processor time tells more than wall time where other work is running.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from measuring import MOEQ, Run, machine, make_source, measure

#: Experts are just large enough for compiled loops (`moeq.layouts.words.COMPILED_FROM`).
MODEL, FORMAT, GPU = "small", "gptq", "a100"


def commands(folder: Path) -> dict[str, list[str]]:
    """Command lines by name, in an order in which each finds what it reads."""
    source, converted, transcoded = (str(folder / name) for name in ("source", "converted", "transcoded"))
    return {
        "--help": ["--help"],
        "inspect": ["inspect", source, "--gpu", GPU],
        "plan": ["plan", source, "--gpu", GPU],
        "convert": ["convert", source, converted, "--gpu", GPU, "--quiet"],
        "verify": ["verify", converted],
        "verify --source": ["verify", converted, "--source", source],
        "transcode": ["transcode", source, transcoded, "--to", "compressed-tensors", "--quiet"],
    }


def turn(folder: Path) -> dict[str, Run]:
    """Every command once."""
    for name in ("converted", "transcoded"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return {name: measure([*MOEQ, *words], folder / "log") for name, words in commands(folder).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=10, help="runs of each command [10]")
    parser.add_argument("--folder", type=Path, help="where to write [the temporary folder]")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch)
        make_source(folder / "source", MODEL, FORMAT, 1, None)
        turn(folder)
        load = os.getloadavg()[0]
        turns = [turn(folder) for _ in range(options.repeat)]
    rows = []
    print(f"{'':18}{'processor time':>24}{'wall time':>24}   least, median (s); load {load:.1f}")
    for name in turns[0]:
        runs = [row[name] for row in turns]
        used, wall = [run.user + run.system for run in runs], [run.wall for run in runs]
        figures = min(used), statistics.median(used), min(wall), statistics.median(wall)
        print(f"{name:18}" + "".join(f"{figure:12.3f}" for figure in figures), flush=True)
        rows.append({"command": name, "runs": [asdict(run) for run in runs]})
    if options.json:
        about = {"schema": "moeq.command-startup/1", "date": time.strftime("%Y-%m-%d"), "load": load}
        options.json.write_text(json.dumps({**about, "machine": machine(), "commands": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Converting against copying: `moeq convert` with its proof, `cp -r` of the same files, and the script of a user.

    python examples/bench/convert_speed.py [--case NAME ...] [--gib 2] [--repeat 5] [--cache cold|warm] [--json FILE]

For every format a random checkpoint with a real model's shapes is written, then each contender runs in turn, the order
rotating, each in a process of its own, and ends with a `sync` of the files it wrote. Figures are wall time, CPU time
(user and system) and peak resident memory of the process, medians over the repetitions; ratios are taken repetition by
repetition, so that they hold when the machine's speed drifts. `best` is the fastest run: on a machine that is busy with
other work it says most about an idle one. With `--cache cold` (the default) the source is dropped from the page cache
before every run, with `warm` it is read once. At the end the bytes of the contenders' tensors are compared. Outputs are
deleted as soon as they have been measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CONVERT = "from moeq.cli.app import main; main()"

#: After a sync, the disk still discards the blocks of deleted files for a while.
SETTLE_SECONDS = 1.0


@dataclass(frozen=True)
class Case:
    """A checkpoint and the layout it is converted to.

    Attributes:
        model, format: what `make_checkpoint.py` writes.
        layer_gib: size of one layer, to reach the size that is asked for.
        layout: layout id.
        experts: experts per layer where a whole layer would be too large.
        naive: whether `naive_convert.py` knows the layout.
    """

    model: str
    format: str
    layer_gib: float
    layout: str
    experts: int | None = None
    naive: bool = True


CASES = {
    "gptq": Case("qwen3-30b-a3b", "gptq", 0.35, "marlin-wna16/1"),
    "gptq-mixtral": Case("mixtral-8x7b", "gptq", 0.77, "marlin-wna16/1"),
    "awq": Case("qwen3-30b-a3b", "awq", 0.35, "marlin-wna16/1"),
    "ct-int4": Case("kimi-k2", "ct-int4", 1.9, "marlin-wna16/1", experts=48),
    "w8a8": Case("qwen3-30b-a3b", "w8a8", 0.62, "int8-w8a8/1"),
    "mxfp4": Case("gpt-oss-120b", "mxfp4", 1.7, "marlin-mxfp4/1"),
    "mxfp4-hopper": Case("gpt-oss-120b", "mxfp4", 1.7, "triton-kernels-hopper/1", naive=False),
}


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
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text()[-2000:]}")
    scale = 1 if sys.platform == "darwin" else 1024
    return Run(wall, usage.ru_utime, usage.ru_stime, usage.ru_maxrss * scale)


def synced(command: list[str], folder: Path) -> list[str]:
    """The command, then a sync of every file in the folder it wrote."""
    return ["sh", "-c", '"$@" && exec sync "$0"/*', str(folder), *command]


def contenders(case: Case, source: Path, out: Path, workers: int, naive: bool) -> Iterator[tuple[str, list[str]]]:
    yield "cp", ["cp", "-r", str(source), str(out)]
    options = ["--gpu", "H100", "--layout", case.layout, "--force-layout", "--workers", str(workers), "--quiet"]
    yield "convert", [sys.executable, "-P", "-c", CONVERT, "convert", str(source), str(out), *options]
    if naive and case.naive:
        yield "naive", [sys.executable, str(HERE / "naive_convert.py"), str(source), str(out)]


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


def tensors(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Where every tensor's bytes lie: name to (file, start, stop, dtype, shape)."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        for name, row in header.items():
            if name != "__metadata__":
                start, stop = row["data_offsets"]
                found[name] = (path, 8 + length + start, 8 + length + stop, row["dtype"], row["shape"])
    return found


def differences(one: Path, other: Path) -> list[str]:
    """Names of tensors that are not the same bytes in two folders."""
    first, second = tensors(one), tensors(other)
    wrong = sorted(first.keys() ^ second.keys())
    for name in first.keys() & second.keys():
        if first[name][3:] != second[name][3:] or not same_bytes(first[name], second[name]):
            wrong.append(name)
    return wrong


def same_bytes(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    with one[0].open("rb") as first, other[0].open("rb") as second:
        first.seek(one[1])
        second.seek(other[1])
        left = one[2] - one[1]
        while left:
            count = min(left, 4 << 20)
            if first.read(count) != second.read(count):
                return False
            left -= count
    return True


def run_case(name: str, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    case, source = CASES[name], scratch / "source"
    layers = max(1, round(options.gib / case.layer_gib))
    make = [sys.executable, str(HERE / "make_checkpoint.py"), str(source), "--model", case.model]
    make += ["--format", case.format, "--layers", str(layers)]
    make += ["--experts", str(case.experts)] if case.experts else []
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["sync", *map(str, source.iterdir())], check=True)
    runs: dict[str, list[Run]] = {
        who: [] for who, _ in contenders(case, source, scratch, options.workers, options.naive)
    }
    cached: list[float] = []
    same: list[str] | None = None
    for turn in range(options.repeat):
        order = list(runs)
        for who in order[turn % len(order) :] + order[: turn % len(order)]:
            out = scratch / who
            command = dict(contenders(case, source, out, options.workers, options.naive))[who]
            cached.append(set_cache(source, options.cache))
            settle()
            runs[who].append(measure(synced(command, out), scratch / f"{who}.log"))
        if turn == 0 and options.trace is not None:
            trace(name, case, source, scratch, options)
        if turn == 0 and "naive" in runs:
            same = differences(scratch / "convert", scratch / "naive")
        sizes = {who: sum(path.stat().st_size for path in (scratch / who).iterdir()) for who in runs}
        for who in runs:
            shutil.rmtree(scratch / who)
    shutil.rmtree(source)
    return summary(name, case, layers, runs, sizes, cached, same)


def trace(name: str, case: Case, source: Path, scratch: Path, options: argparse.Namespace) -> None:
    """A picture of every thread of one more run of each contender, which is not counted."""
    options.trace.mkdir(parents=True, exist_ok=True)
    out = scratch / "traced"
    for who, command in contenders(case, source, out, options.workers, naive=False):
        set_cache(source, options.cache)
        settle()
        picture = options.trace / f"{name}-{options.cache}-{who}.svg"
        subprocess.run([sys.executable, str(HERE / "thread_trace.py"), str(picture), *command], check=True)
        shutil.rmtree(out)


def summary(name, case, layers, runs, sizes, cached, same) -> dict[str, Any]:
    rows = {}
    for who, found in runs.items():
        rows[who] = {field: statistics.median(getattr(run, field) for run in found) for field in asdict(found[0])}
        rows[who]["bytes"] = sizes[who]
        rows[who]["best_wall"] = min(run.wall for run in found)
        for other in ("cp", "naive"):
            if other in runs:
                ratios = [mine.wall / theirs.wall for mine, theirs in zip(found, runs[other], strict=True)]
                rows[who][f"wall_to_{other}"] = statistics.median(ratios)
                rows[who][f"wall_to_{other}_range"] = [min(ratios), max(ratios)]
                rows[who][f"best_to_{other}"] = rows[who]["best_wall"] / min(run.wall for run in runs[other])
    return {
        "case": name,
        **asdict(case),
        "layers": layers,
        "results": rows,
        "runs": {who: [asdict(run) for run in found] for who, found in runs.items()},
        "source_in_page_cache": statistics.median(cached),
        "same_bytes_as_naive": None if same is None else not same,
        "differing": (same or [])[:5],
    }


def show(row: dict[str, Any]) -> None:
    same = {None: "", True: "; convert and naive wrote the same tensors", False: f"; DIFFER: {row['differing']}"}
    print(
        f"{row['case']}: {row['model']} as {row['format']}, {row['layers']} layers, "
        f"{row['results']['cp']['bytes'] / 2**30:.2f} GiB, to {row['layout']}{same[row['same_bytes_as_naive']]}"
    )
    print(f"  {'':8} {'wall':>8} {'cpu':>8} {'peak':>10} {'/ cp':>6} {'(range)':12} {'best':>7} {'/ cp':>6}")
    for who, figures in row["results"].items():
        low, high = figures["wall_to_cp_range"]
        print(
            f"  {who:8} {figures['wall']:7.2f}s {figures['user'] + figures['system']:7.2f}s "
            f"{figures['peak'] / 2**20:6.0f} MiB {figures['wall_to_cp']:6.2f} {f'({low:.2f}-{high:.2f})':12} "
            f"{figures['best_wall']:6.2f}s {figures['best_to_cp']:6.2f}",
            flush=True,
        )


def table(rows: list[dict[str, Any]]) -> str:
    """All cases as a table in Markdown."""
    lines = ["| case | GiB | cp | convert | ratio (range) | peak memory |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        cp, mine = row["results"]["cp"], row["results"]["convert"]
        low, high = mine["wall_to_cp_range"]
        cells = [
            f"`{row['case']}` → `{row['layout']}`",
            f"{cp['bytes'] / 2**30:.1f}",
            f"{cp['wall']:.1f} s",
            f"{mine['wall']:.1f} s",
            f"{mine['wall_to_cp']:.2f} ({low:.2f}–{high:.2f})",
            f"{mine['peak'] / 2**20:.0f} MiB",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="[all]")
    parser.add_argument("--gib", type=float, default=2.0, help="size of each checkpoint [2]")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each contender [5]")
    parser.add_argument("--workers", type=int, default=2, help="workers of `moeq convert` [2]")
    parser.add_argument("--cache", choices=("cold", "warm"), default="cold", help="the source in the page cache [cold]")
    parser.add_argument("--no-naive", dest="naive", action="store_false", help="leave out the script of a user")
    parser.add_argument("--folder", type=Path, help="where to write, on the disk to measure [the temporary folder]")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="draw every thread of one more run of each here")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    rows = []
    for name in options.case or CASES:
        with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
            rows.append(run_case(name, options, Path(scratch)))
        show(rows[-1])
        if options.json:
            given = {"gib": options.gib, "cache": options.cache, "workers": options.workers, "repeat": options.repeat}
            document = {"schema": "moeq.convert-speed/1", **given, "machine": machine(), "cases": rows}
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(table(rows))
    return 0 if all(row["same_bytes_as_naive"] is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

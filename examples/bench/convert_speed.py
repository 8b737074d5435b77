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
import shutil
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measuring import HERE, MOEQ, Run, folder_bytes, make_source, option_parser, run_cases, run_once


@dataclass(frozen=True)
class Case:
    """A checkpoint and the layout it is converted to.

    Attributes:
        model, format: what `make_checkpoint.py` writes.
        layer_gib: size of one layer, to reach the size that is asked for.
        layout: layout id.
        experts: experts per layer where a whole layer would be too large.
        naive: whether `naive_convert.py` knows the layout.
        options: more options of `moeq convert`.
    """

    model: str
    format: str
    layer_gib: float
    layout: str
    experts: int | None = None
    naive: bool = True
    options: tuple[str, ...] = ()


CASES = {
    "gptq": Case("qwen3-30b-a3b", "gptq", 0.35, "marlin-wna16/1"),
    "gptq-mixtral": Case("mixtral-8x7b", "gptq", 0.77, "marlin-wna16/1"),
    "awq": Case("qwen3-30b-a3b", "awq", 0.35, "marlin-wna16/1"),
    "ct-int4": Case("kimi-k2", "ct-int4", 1.9, "marlin-wna16/1", experts=48),
    "w8a8": Case("qwen3-30b-a3b", "w8a8", 0.62, "int8-w8a8/1"),
    "mxfp4": Case("gpt-oss-120b", "mxfp4", 1.7, "marlin-mxfp4/1"),
    "mxfp4-hopper": Case("gpt-oss-120b", "mxfp4", 1.7, "triton-kernels-hopper/1", naive=False),
    "nvfp4": Case("qwen3-30b-a3b", "nvfp4", 0.37, "marlin-nvfp4/1", naive=False),
    "fp8-tensor": Case("qwen3-30b-a3b", "fp8-tensor", 0.62, "marlin-fp8/1", naive=False),
    "fp8-channel": Case("qwen3-30b-a3b", "fp8-channel", 0.62, "marlin-fp8/1", naive=False),
    "fp8-block": Case("qwen3-30b-a3b", "fp8-block", 0.62, "marlin-fp8/1", naive=False),
    "mxfp8": Case("qwen3-30b-a3b", "mxfp8", 0.64, "marlin-mxfp8/1", naive=False),
    "nvfp4-trtllm": Case("qwen3-30b-a3b", "nvfp4", 0.37, "trtllm-nvfp4/1", naive=False),
    "nvfp4-cutlass": Case("qwen3-30b-a3b", "nvfp4", 0.37, "flashinfer-cutlass-nvfp4/1", naive=False),
    "fp8-block-trtllm": Case("qwen3-30b-a3b", "fp8-block", 0.62, "trtllm-fp8-block/1", naive=False),
    "fp8-block-aiter": Case("qwen3-30b-a3b", "fp8-block", 0.62, "aiter-fp8-block/1", naive=False),
    "fp8-block-fnuz": Case("qwen3-30b-a3b", "fp8-block", 0.62, "aiter-fp8-block-fnuz/1", naive=False),
    "mxfp8-trtllm": Case("qwen3-30b-a3b", "mxfp8", 0.64, "trtllm-mxfp8/1", naive=False),
    "fp8-block-rounded": Case(
        "qwen3-30b-a3b", "fp8-block-f32", 0.62, "marlin-fp8/1", naive=False, options=("--allow-lossy",)
    ),
    "gptq-regroup": Case(
        "qwen3-30b-a3b", "gptq", 0.35, "marlin-wna16/1", naive=False, options=("--tp", "4", "--regroup", "64")
    ),
}


def contenders(case: Case, source: Path, out: Path, workers: int, naive: bool) -> Iterator[tuple[str, list[str]]]:
    yield "cp", ["cp", "-r", str(source), str(out)]
    options = ["--gpu", "H100", "--layout", case.layout, "--force-layout", "--workers", str(workers), "--quiet"]
    yield "convert", [*MOEQ, "convert", str(source), str(out), *options, *case.options]
    if naive and case.naive:
        yield "naive", [sys.executable, str(HERE / "naive_convert.py"), str(source), str(out)]


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
    make_source(source, case.model, case.format, layers, case.experts)
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
            run, share = run_once(command, source, out, options.cache)
            runs[who].append(run)
            cached.append(share)
        if turn == 0 and "naive" in runs:
            same = differences(scratch / "convert", scratch / "naive")
        sizes = {who: folder_bytes(scratch / who) for who in runs}
        for who in runs:
            shutil.rmtree(scratch / who)
    shutil.rmtree(source)
    return summary(name, case, layers, runs, sizes, cached, same)


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


def main() -> int:
    parser = option_parser(__doc__ or "", CASES, gib=2.0, repeat=5)
    parser.add_argument("--no-naive", dest="naive", action="store_false", help="leave out the script of a user")
    options = parser.parse_args()
    rows = run_cases(options, CASES, "moeq.convert-speed/1", run_case, show)
    print(table(rows))
    return 0 if all(row["same_bytes_as_naive"] is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Transcoding against copying: `moeq transcode` with its proof, and `cp -r` of the same files.

    python examples/bench/transcode_speed.py [--case NAME ...] [--gib 1] [--repeat 3] [--cache cold|warm] [--json FILE]

Checkpoints, processes and figures are those of `convert_speed.py`; ratios are taken repetition by repetition.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measuring import MOEQ, Run, folder_bytes, make_source, option_parser, run_cases, run_once


@dataclass(frozen=True)
class Case:
    """A checkpoint as `make_checkpoint.py` writes it, the size of one of its layers, and what it becomes.

    Attributes:
        model, format: what is written.
        layer_gib: size of one layer.
        to: options of `moeq transcode`.
        experts: experts per layer where a whole layer would be too large.
    """

    model: str
    format: str
    layer_gib: float
    to: tuple[str, ...]
    experts: int | None = None


CASES = {
    "gptq-ct": Case("qwen3-30b-a3b", "gptq", 0.35, ("compressed-tensors",)),
    "awq-ct": Case("qwen3-30b-a3b", "awq", 0.35, ("compressed-tensors",)),
    "ct-gptq": Case("kimi-k2", "ct-int4", 1.9, ("gptq_v2",), experts=24),
    "gptq-regroup": Case("qwen3-30b-a3b", "gptq", 0.35, ("compressed-tensors", "--regroup", "32")),
    "mxfp4-fp8": Case("gpt-oss-120b", "mxfp4", 1.7, ("fp8",), experts=64),
    "gptq-bf16": Case("qwen3-30b-a3b", "gptq", 0.35, ("bf16", "--allow-lossy")),
    "fp8-bf16": Case("qwen3-30b-a3b", "fp8-block", 0.6, ("bf16", "--allow-lossy")),
    "gptq-fp8": Case("qwen3-30b-a3b", "gptq", 0.35, ("fp8", "--allow-lossy")),
    "nvfp4-fp8": Case("qwen3-30b-a3b", "nvfp4", 0.38, ("fp8", "--allow-lossy")),
    "fp8-channel-fp8": Case("qwen3-30b-a3b", "fp8-channel", 0.62, ("fp8", "--allow-lossy")),
    "mxfp4-bf16": Case("gpt-oss-120b", "mxfp4", 1.7, ("bf16",), experts=64),
    "gptq-kt-int4": Case("qwen3-30b-a3b", "gptq", 0.35, ("kt-amx-int4", "--allow-lossy")),
    "gptq-kt-int8": Case("qwen3-30b-a3b", "gptq", 0.35, ("kt-amx-int8", "--allow-lossy")),
    "gguf-q8_0-ct": Case("qwen3-30b-a3b", "gguf-q8_0", 0.62, ("compressed-tensors",)),
    "gguf-q4_0-ct": Case("qwen3-30b-a3b", "gguf-q4_0", 0.33, ("compressed-tensors",)),
    "gguf-mxfp4-ct": Case("gpt-oss-120b", "gguf-mxfp4", 1.7, ("compressed-tensors",), experts=64),
    "gguf-mxfp4": Case("gpt-oss-120b", "gguf-mxfp4", 1.7, ("mxfp4",), experts=64),
    "gguf-q4_k-bf16": Case("qwen3-30b-a3b", "gguf-q4_k", 0.33, ("bf16", "--allow-lossy")),
    "gguf-q6_k-bf16": Case("qwen3-30b-a3b", "gguf-q6_k", 0.48, ("bf16", "--allow-lossy")),
}


def run_case(name: str, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """All repetitions of one case."""
    case, source = CASES[name], scratch / "source"
    share = 1.0 if case.experts is None else 0.5
    layers = max(1, round(options.gib / (case.layer_gib * share)))
    make_source(source, case.model, case.format, layers, case.experts)
    into = [str(source), str(scratch / "transcode"), "--to", *case.to]
    commands = {
        "cp": ["cp", "-r", str(source), str(scratch / "cp")],
        "transcode": [*MOEQ, "transcode", *into, "--workers", str(options.workers), "--quiet"],
    }
    runs: dict[str, list[Run]] = {who: [] for who in commands}
    sizes = {}
    for turn in range(options.repeat):
        for who in list(runs) if turn % 2 else reversed(list(runs)):
            runs[who].append(run_once(commands[who], source, scratch / who, options.cache)[0])
        sizes = {who: folder_bytes(scratch / who) for who in runs}
        for who in runs:
            shutil.rmtree(scratch / who)
    ratios = [mine.wall / theirs.wall for mine, theirs in zip(runs["transcode"], runs["cp"], strict=True)]
    return {
        "case": name,
        **asdict(case),
        "layers": layers,
        "bytes": sizes,
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "peak": max(run.peak for run in runs["transcode"]),
        "runs": {who: [asdict(run) for run in found] for who, found in runs.items()},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """All cases as a table in Markdown."""
    lines = ["| case | GiB in, out | cp | transcode | processor | ratio (range) | peak |", "| --- " * 7 + "|"]
    for row in rows:
        copied, mine = row["runs"]["cp"], row["runs"]["transcode"]
        size = " → ".join(f"{row['bytes'][who] / 2**30:.2f}" for who in ("cp", "transcode"))
        processor = statistics.median(run["user"] + run["system"] for run in mine)
        low, high = row["ratio_range"]
        lines.append(
            f"| {row['model']} {row['format']} to {' '.join(row['to'])} | {size} | "
            f"{statistics.median(run['wall'] for run in copied):.1f} s | "
            f"{statistics.median(run['wall'] for run in mine):.1f} s | {processor:.1f} s | "
            f"{row['ratio']:.2f} ({low:.2f}–{high:.2f}) | {row['peak'] / 2**20:.0f} MiB |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure the cases that were asked for."""
    options = option_parser(__doc__ or "", CASES, gib=1.0, repeat=3).parse_args()
    schema = "moeq.transcode-speed/1"
    rows = run_cases(options, CASES, schema, run_case, lambda row: print(table([row]).splitlines()[-1], flush=True))
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

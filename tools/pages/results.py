"""What was measured and run where, from the result files of the benchmarks.

Any file that is added or removed changes the pages and nothing else. A file of a kind that is not known here is listed
with its device and versions.
"""

from __future__ import annotations

import ast
import json
import math
import re
import shlex
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from packaging.version import Version

from moeq.oracle import ranking
from pages.tables import NOTE, ROOT, cell, table

FOLDERS = (ROOT / "examples" / "bench" / "results", ROOT / "kernels" / "bench" / "results")
MODELS = {
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "gpt-oss-20b": "gpt-oss-20b",
    "mixtral-8x7b": "Mixtral-8x7B",
    "qwen3-512-experts": "512 experts of Qwen3-Next-80B",
}
FORMATS = {
    "gptq": "int4",
    "int4": "int4",
    "mxfp4": "MXFP4",
    "w8a8": "W8A8",
    "nvfp4": "NVFP4",
    "mxfp4-fp8": "MXFP4, e4m3 activations",
}
FORMATS |= {"ct-int4": "int4, groups of 32", "fp8-block": "FP8 blocks"}
FORMATS |= {"int4-fp8": "int4, e4m3 activations", "fp8-w8a8": "FP8", "fp8-block-w8a8": "FP8, blocks"}

#: Least number of layers of a served model that the README shows.
FEWEST_LAYERS = 24
#: Rows of `serve.py` with moeq's kernels: of a conversion, or of the source as it is.
OURS = ("converted:moeq", "direct:moeq")
#: Rows of the same source, loaded by the engine alone and packed by moeq while the engine loads it.
LOADED = ("auto", "direct:moeq")

Run = dict[str, Any]


def runs() -> list[tuple[Path, Run]]:
    """Return every run of every result file, the newest first. A file holds one, or several as `{"runs": [...]}`."""
    paths = sorted(path for folder in FOLDERS for path in folder.glob("*.json"))
    found = [(path, run) for path in paths for run in _read(path)]
    return sorted(found, key=lambda pair: str(pair[1].get("date", "")), reverse=True)


def _read(path: Path) -> list[Run]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(found, list):
        return [{"rows": found}]
    several: list[Run] | None = found.get("runs") if set(found) == {"runs"} else None
    return several or [found]


# ------------------------------------------------------------------------------------------------ serving


def is_serving(run: Run) -> bool:
    """Say whether a run is one of `serve.py` with vLLM and moeq's kernels on a GPU."""
    rows, versions = run.get("rows"), run.get("versions")
    ours = isinstance(rows, list) and any(row.get("name") in OURS for row in rows)
    return ours and "arguments" in run and isinstance(versions, dict) and "vllm" in versions and not is_brief(run)


def is_brief(run: Run) -> bool:
    """Say whether a run of `serve.py` has too few rounds for figures of its answers."""
    return run.get("arguments", {}).get("rounds") in ("0", "1")


def is_load(run: Run) -> bool:
    """Say whether a run of `serve.py` was made for the seconds until weights are ready."""
    return is_brief(run) and run["arguments"]["profile"] == "False"


def serving(columns: tuple[str, ...], *, brief: bool = False) -> str:
    """Return the table of served models: tokens a second with moeq's kernels, against the engine's best in that run.

    A brief one has the newest version of the engine only, one layout for each format, and models that are not cut to a
    few layers, where the host bounds what faster experts gain.
    """
    served = [run for _, run in runs() if is_serving(run)]
    newest = max(served, key=lambda run: Version(_version(run)))
    kept: dict[tuple[str, ...], tuple[str, ...]] = {}
    for run in served:
        asked = run["arguments"]
        layout = "" if brief else _asked_layout(run)
        if brief and (_version(run) != _version(newest) or run["facts"]["layers"] < FEWEST_LAYERS):
            continue
        figures = {row["name"]: _medians(row["figures"]) for row in run["rows"] if row.get("figures")}
        peers = _engine_rows(figures)
        for name in [name for name in OURS if name in figures][: 1 if brief else None]:
            compiled = str(asked.get("default_graphs"))
            key = (asked["model"], asked["format"], run["gpu"], str(asked["server"]), layout, compiled, name)
            cells = [_beside(figures[name], list(peers.values()), column) for column in columns]
            title = _served(run) + (", the source as it is" if name.startswith("direct") else "")
            kept.setdefault(key, (title, _version(run), ", ".join(peers), *cells, f"`{serve_command(run)}`"))
    head = ("`vllm serve`", "version", "against", *(_column(name) for name in columns), "command")
    return table(head, sorted(kept.values()))


def steps() -> str:
    """Return the table of where a decoding step's time goes, in microseconds, from runs of `serve.py --profile`."""
    lines = []
    for _, run in runs():
        for row in run["rows"] if is_serving(run) or is_brief(run) else []:
            for users, step in row.get("profiles", {}).items():
                parts = {name: value for name, value in step.items() if name != "kernels"}
                lines.append((_served(run), row["name"], users, *(f"{value:,.0f}" for value in parts.values())))
                head = ("`vllm serve`", "row", "users", *parts)
    return table(head, lines)


def _ours(figures: dict[str, Run]) -> Run:
    """Return the figures of the first row with moeq's kernels, or none."""
    return next((figures[name] for name in OURS if name in figures), {})


def _engine_rows(figures: dict[str, Run]) -> dict[str, Run]:
    """Return the figures of the engine's own backends on the source."""
    return {name: row for name, row in figures.items() if not name.startswith(("converted", "direct"))}


def _version(run: Run) -> str:
    return str(run["versions"]["vllm"])


def _asked_layout(run: Run) -> str:
    """Return the layout that the conversion was asked to have, or nothing."""
    layout = run["arguments"].get("layout")
    return "" if layout in (None, "None") else str(layout)


def _medians(figures: Run) -> Run:
    return {name: statistics.median(values) for name, values in figures.items()}


def _beside(ours: Run, peers: list[Run], column: str) -> str:
    if column not in ours:
        return "–"
    best = max((peer[column] for peer in peers if column in peer), default=None)
    return f"{ours[column]:,.0f}" + (f" ({ours[column] / best:.2f} x)" if best else "")


def _column(name: str) -> str:
    users = name.removeprefix("c = ")
    return name if users == name else f"{users} user" + ("s" if users != "1" else "")


def _served(run: Run) -> str:
    asked = run["arguments"]
    server = _server(run)
    parallel = [f"TP {size}" for size in re.findall(r"--tensor-parallel-size (\d+)", server)]
    if "--enable-expert-parallel" in server and parallel:
        parallel = [parallel[0].replace("TP", "EP")]
    name = MODELS.get(asked["model"], asked["model"])
    gpu = run["gpu"].removeprefix("NVIDIA ").partition(" ")[0]
    layout = [f"`{_asked_layout(run)}`"] if _asked_layout(run) else []
    layers = [] if asked.get("layers") in (None, "None") else [f"{asked['layers']} layers"]
    compiled = ["default compilation"] if asked.get("default_graphs") == "True" else []
    what = f"{name} {FORMATS.get(asked['format'], asked['format'])}"
    return ", ".join([what, gpu, *layers, *parallel, *layout, *compiled])


def _server(run: Run) -> str:
    """Return the options that went to every server, which some files hold as Python's text of a list."""
    server = run["arguments"]["server"]
    return shlex.join(ast.literal_eval(server) if isinstance(server, str) else server)


def serve_command(run: Run) -> str:
    """Return the command line of a run of `serve.py`."""
    asked = {name: value for name, value in run["arguments"].items() if value not in (None, "None", False, "False")}
    words = ["python examples/bench/serve.py", "--model", asked["model"], "--format", asked["format"]]
    rows = asked["row"]
    for row in ast.literal_eval(rows) if isinstance(rows, str) else rows:
        words += ["--row", row]
    for name in ("rounds", "users", "backend", "layout", "layers", "gpu", "kv_gib"):
        if name in asked:
            words += [f"--{name.replace('_', '-')}", shlex.quote(str(asked[name]))]
    words += [f"--{name.replace('_', '-')}" for name in ("default_graphs", "together", "profile") if name in asked]
    server = _server(run)
    return " ".join([*words, *(["--", server] if server else [])])


# ------------------------------------------------------------------------------------------------ kernels


def kernels(only: tuple[str, ...] = (), *, brief: bool = False) -> str:
    """Return the table of kernels: the newest run of each format, GPU and peer; a brief one is beside Humming."""
    rows: list[tuple[str, ...]] = []
    beside: dict[tuple[str, str], set[str]] = defaultdict(set)
    for path, run in runs():
        if not str(run.get("schema", "")).startswith("moeq-kernels.peers/"):
            continue
        where = run["device"].removeprefix("NVIDIA ").partition(" ")[0]
        for name, ratios in _ratios(run).items():
            title = FORMATS.get(name, name)
            title += " in layout `moeq-mxfp4/1`" if name in path.stem and name == "mxfp4" else ""
            peers = _peers(run, name)
            if brief and "humming" not in peers:
                continue
            if (only and name not in only) or beside[title, where] & peers:
                continue
            beside[title, where] |= peers
            rows.append((title, where, ", ".join(sorted(peers)), *_sum(ratios), _peers_command(name, peers)))
    head = ("kernels", "GPU", "against the best of", "faster in", "mean speed-up", "command, in `kernels/`")
    return table(head, sorted(rows))


def ranking_errors() -> str:
    """Return the leave-one-layer-out errors of the ranking, by table and backend."""
    rows = []
    for (gpu, name), found in sorted(ranking.tables().items()):
        named = f"{found.right} of {found.compared}, {found.regret:.1%} lost"
        for times in found.backends:
            backend = times.backend + (f" (`{times.layout}`)" if times.layout else "")
            calls = f"{sum(map(len, times.cells.values()))}, {len(times.cells)}"
            rows.append(
                (gpu, FORMATS.get(name, name), named, backend, calls, f"{times.median:.0%}", f"{times.p90:.0%}")
            )
            named = ""
    return table(("GPU", "format", "fastest named", "backend", "calls, layers", "median error", "90 % below"), rows)


def _peers(run: Run, name: str) -> set[str]:
    return {peer for one in run["cells"] if one["format"] == name for peer in one["contenders"]} - {"moeq"}


def _sum(ratios: list[float]) -> tuple[str, str]:
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    return f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)} cells", f"{mean:.2f} x"


def _peers_command(name: str, peers: set[str]) -> str:
    return f"`python -m bench.peers run --formats {name} --contenders {','.join(['moeq', *sorted(peers)])}`"


def _ratios(run: Run) -> dict[str, list[float]]:
    """Return by format, for every cell with a right peer, the time of the best peer over ours; cold weights."""
    found: dict[str, list[float]] = {}
    for one in run["cells"]:
        times = {
            name: row["cold"]["us"]
            for name, row in one["contenders"].items()
            if row.get("status") == "right" and "cold" in row
        }
        ours = times.pop("moeq", None)
        if ours and times:
            found.setdefault(one["format"], []).append(min(times.values()) / ours)
    return found


# ------------------------------------------------------------------------------------------------ loading


def loading() -> str:
    """Return the table of load times: the engine's repack, the plug-in, and `load_experts`."""
    ways = {"engine": "source, by the engine", "converted": "`moeq.load_experts`", "plug-in": "converted, plug-in"}
    rows = []
    for run in (run for _, run in runs() if str(run.get("schema", "")).startswith("moeq.startup/")):
        device = "CPU" if run["device"] == "cpu" else run["device"].removeprefix("NVIDIA ")
        seconds = {
            (row["model"], row["cold"], row.get("road") or row.get("loader")): row["median"]["total"]
            for row in run["rows"]
        }
        for (model, cold, way), total in seconds.items():
            files, ratio = "disk" if cold else "page cache", total / seconds[model, cold, "engine"]
            named = (MODELS.get(model, model), device, f"{run['layers']}", files, ways[way])
            rows.append((*named, f"{total:.2f} s", f"{ratio:.2f} x"))
    return table(("model", "device", "layers", "files in", "way", "time", "of the engine's"), rows)


def starting() -> str:
    """Return the table of unconverted sources: seconds until weights are ready, by the engine and packed by moeq."""
    rows = []
    for run in (run for _, run in runs() if is_load(run)):
        engine, ours = ({row["name"]: row["facts"]["weights"] for row in run["rows"]}[name] for name in LOADED)
        which = " ".join(next((name, run["versions"][name]) for name in ("sglang", "vllm") if name in run["versions"]))
        starts = "at once" if run["arguments"]["together"] == "True" else "one by one"
        rows.append((_served(run), which, starts, f"{engine:.1f} s", f"{ours:.1f} s", f"{ours / engine:.2f} x"))
    return table(("source", "engine", "servers start", "by the engine", "packed by moeq", "of the engine's"), rows)


# ------------------------------------------------------------------------------------------------ converting


def converting() -> str:
    """Return the table of conversions beside `cp`: of each case, machine and cache the run with the most pairs."""
    kept: dict[tuple[str, ...], tuple[str, ...]] = {}
    found = [run for _, run in runs() if str(run.get("schema", "")).startswith("moeq.convert-speed/")]
    for run in sorted(found, key=lambda run: -run["repeat"]):
        for case in run["cases"]:
            ours = case["results"].get("convert")
            key = (case["case"], run["machine"]["processor"], run["cache"])
            if not ours or "wall_to_cp" not in ours or key in kept:
                continue
            options = f"--case {case['case']} --gib {run['gib']:g} --repeat {run['repeat']} --cache {run['cache']}"
            size = f"{case['layer_gib'] * case['layers']:.1f} GiB"
            files = "not in the page cache" if run["cache"] == "cold" else "in the page cache"
            figures = (f"{ours['wall']:.1f} s", f"{ours['wall_to_cp']:.2f} x", f"{ours['peak'] / 2**20:.0f} MiB")
            title, command = f"`{case['case']}` to `{case['layout']}`", f"`convert_speed.py {options}`"
            kept[key] = (title, size, _device(run), files, *figures, command)
    head = ("case", "source", "machine", "files", "time", "of `cp`", "peak memory", "command, in `examples/bench/`")
    return table(head, sorted(kept.values()))


# ------------------------------------------------------------------------------------------------ everything


def tested_page() -> str:
    """Return the page of everything that was run, from all result files."""
    rows = []
    for path, run in runs():
        day = run.get("date", "")
        rows.append(
            (
                str(day) if re.match(r"\d{4}-", str(day)) else "",
                _what(run, path),
                _device(run),
                _versions(run),
                _outcome(run),
                f"`{path.relative_to(ROOT)}`",
            )
        )
    intro = (
        "One row for each run in the repository's result files: what ran, on which machine and versions, and how it "
        "ended.\n"
        "What has no row was not run. The folders' README files have the commands."
    )
    parts = ["# What was run where", NOTE, intro, table(("date", "what", "on", "versions", "outcome", "file"), rows)]
    return "\n\n".join(parts) + "\n"


_KINDS = {
    "moeq.engine-generate": "whole models generating in vLLM, compared with float32 transformers",
    "moeq.engine-options": "options of vLLM, tokens compared",
    "moeq.serve-options": "options of `vllm serve` over HTTP, tokens compared",
    "moeq.engine-check": "layers in vLLM's kernels, compared with float32",
    "moeq.serve-changes": "`vllm serve` while its weights change",
    "moeq.startup": "load times of layers",
    "moeq.convert-speed": "`moeq convert` against `cp`",
    "moeq.direct-load": "packing a source while an engine loads it, without the engine",
    "moeq.transcode-speed": "`moeq transcode` against `cp`",
    "moeq.transcode-generate": "source and transcoded checkpoint generating in vLLM",
    "moeq.command-startup": "start of every command",
    "moeq.torture-results": "kills and power cuts while converting",
    "moeq.attacks": "kills, injected faults and fuzzing",
    "moeq.pack-speed": "speed of the fast path",
    "moeq-kernels.peers": "kernels beside other libraries'",
    "moeq-kernels.sanitizer": "kernels under compute-sanitizer",
    "moeq-kernels.sanitizer-runs": "kernels under compute-sanitizer",
}


def _what(run: Run, path: Path) -> str:
    if is_serving(run) or {"arguments", "rows", "compared"} <= set(run):
        server = "`sglang.launch_server`" if "sglang" in run["versions"] else "`vllm serve`"
        why = "until weights are ready" if is_load(run) else "where a step's time goes" if is_brief(run) else ""
        return ", ".join(filter(None, (server, _served(run), why)))
    kind = str(run.get("schema", "")).partition("/")[0]
    return _KINDS.get(kind) or re.sub(r"^\d{4}-\d\d-\d\d-", "", path.stem).replace("-", " ")


def _device(run: Run) -> str:
    machine = run.get("machine")
    named = machine.get("processor") if isinstance(machine, dict) else machine
    found = run.get("device") or run.get("gpu") or named or ""
    cores = f", {machine['cores']} cores" if isinstance(machine, dict) and "cores" in machine else ""
    return cell(f"{found}{cores}") if isinstance(found, str) else ""


def _versions(run: Run) -> str:
    flat = {**run, **(run.get("versions") or {})} if isinstance(run.get("versions"), dict) else run
    names = ("vllm", "sglang", "transformers", "torch", "triton")
    return ", ".join(f"{name} {flat[name]}" for name in names if isinstance(flat.get(name), str))


def _outcome(run: Run) -> str:
    for told in _OUTCOMES:
        text = told(run)
        if text:
            return text
    return ""


def _right(run: Run) -> str:
    """Count rows that say whether they are right."""
    rows = run.get("rows")
    if not isinstance(rows, list) or not rows:
        return ""
    for key in ("right", "ok"):
        said = [row[key] for row in rows if isinstance(row, dict) and key in row]
        if said:
            refused = sum("refused" in row for row in rows)
            return f"{sum(map(bool, said))} of {len(said)} right" + (f", {refused} refused" if refused else "")
    return ""


def _weights_ready(run: Run) -> str:
    """Say after how many seconds the weights of each row were ready, where that was the question."""
    rows = run["rows"] if is_load(run) else []
    return "; ".join(f"{row['name']}: {row['facts']['weights']:.1f} s" for row in rows)


def _changed(run: Run) -> str:
    """Sum up runs in which a served model changes, or another process holds its weights."""
    parts = {"updates": "updates", "preload": "held weights", "balance": "moved experts"}
    return "; ".join(f"{name}: right" for key, name in parts.items() if run.get(key, {}).get("right"))


def _same_tokens(run: Run) -> str:
    """Say how many tokens of served rows are those of the first row, where no engine's own row is beside them."""
    compared = run.get("compared")
    if is_serving(run) or not isinstance(compared, dict):
        return ""
    rows = [(name, one) for name, one in compared.items() if name != "again" and "same" in one]
    return "; ".join(f"{name}: {one['same']} of {one['tokens']} tokens as in the first row" for name, one in rows)


def _answers(run: Run) -> str:
    """Count the answers of rows that compare tokens."""
    rows = run.get("rows")
    answers = (
        [row["answer"] for row in rows if isinstance(row, dict) and "answer" in row] if isinstance(rows, list) else []
    )
    counts = {answer: answers.count(answer) for answer in dict.fromkeys(map(str, answers))}
    shown = sorted(counts.items(), key=lambda row: -row[1])[:4]
    more = len(answers) - sum(count for _, count in shown)
    return cell(
        ", ".join([*(f"{count} x {answer[:40]}" for answer, count in shown), *([f"{more} others"] if more else [])])
    )


def _speedups(run: Run) -> str:
    """Sum up cells beside peers, or served rows."""
    if str(run.get("schema", "")).startswith("moeq-kernels.peers/"):
        told = [f"{name}: {sum(r > 1 for r in found)} of {len(found)} faster" for name, found in _ratios(run).items()]
        return "; ".join(told)
    if is_serving(run):
        figures = {row["name"]: _medians(row["figures"]) for row in run["rows"] if row.get("figures")}
        ours = _ours(figures)
        peers = list(_engine_rows(figures).values())
        ratios = [
            ours[name] / best
            for name in ours
            if (name.startswith("c = ") or name == "prefill")
            and (best := max((p[name] for p in peers if name in p), default=0))
        ]
        return f"{min(ratios):.2f} to {max(ratios):.2f} x of the engine's best" if ratios else ""
    return ""


def _ratio_to_cp(run: Run) -> str:
    """Sum up conversions beside `cp`."""
    cases = run.get("cases")
    if not isinstance(cases, list):
        return ""
    ratios = [case.get("ratio") or case.get("results", {}).get("moeq", {}).get("ratio") for case in cases]
    known = [ratio for ratio in ratios if isinstance(ratio, (int, float))]
    return f"{min(known):.2f} to {max(known):.2f} x the time of `cp`" if known else ""


def _counted(run: Run) -> str:
    """Sum up runs that count what broke, and rows without a verdict."""
    if "kills" in run and "fuzz" in run:
        return f"{run['kills']['kills']:,} kills, {run['fuzz']['executions']:,} inputs: {run['kills']['broken']} broken"
    if isinstance(run.get("tools"), list):
        return ", ".join(f"{tool['tool']}: {tool['errors']} errors" for tool in run["tools"])
    rows = next(
        (
            run[name]
            for name in ("rows", "cells", "cases", "runs", "commands")
            if isinstance(run.get(name), (list, dict))
        ),
        None,
    )
    return f"{len(rows):,} rows" if rows else ""


_OUTCOMES: tuple[Callable[[Run], str], ...] = (
    _weights_ready, _speedups, _changed, _same_tokens, _right, _answers, _ratio_to_cp, _counted,
)  # fmt: skip

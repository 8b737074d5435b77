"""Runs an engine's own decision code on random cases.

    python tests/oracle/differential/record.py SITE --seed 7 --cases 200 --worlds 4 --out FILE.jsonl
    python tests/oracle/differential/record.py SITE --sample VERSION       (the recorded sample that the tests compare)

For a Python with torch and what the engine's Python files import, with moeq on PYTHONPATH. SITE is the folder of the
unpacked wheel. `--out` gets one JSON row a case: world, case, and what the engine decided; `agree.py` counts them.
Every world runs in a fork, so that cached answers cannot leak.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from oracle.differential import cases, samples

from vllm_tables import inside, sandbox
from vllm_tables.questions import GROUPS
from vllm_tables.tables import digest_of

Row = dict[str, Any]
Job = tuple[Row, list[Row]]


def _device(world: Row) -> str:
    """Name of a world's device in the tables."""
    if world["kind"] == "cuda":
        return "sm{}{}".format(*world["cap"])
    if world["kind"] == "cpu":
        name: str = {"arm": "arm64", "power": "ppc64le"}.get(world["arch"], "x86")
        return name + ("-amx" if world.get("amx") else "-zen" if world.get("zen") else "")
    return str(world.get("gcn", world["kind"]))


def answers(site: str, jobs: list[Job]) -> Iterator[Row]:
    """What the engine in `site` decides, case by case, in the order of the jobs of each import.

    Raises:
        SystemExit: where the engine cannot be executed on some device.
    """
    sandbox.preload()
    with tempfile.TemporaryDirectory() as folder:
        for group in GROUPS:
            mine = [job for job in jobs if _device(job[0]) in group]
            part = Path(folder, "group")
            if not mine:
                continue
            if not inside.in_fork(lambda mine=mine: _of_group(site, mine, folder), str(part)):
                raise SystemExit(f"the engine in {site} cannot be executed for {', '.join(group)}")
            yield from map(json.loads, part.read_text(encoding="utf-8").splitlines())


def _of_group(site: str, jobs: list[Job], folder: str) -> Iterator[Row]:
    sandbox.install(site, jobs[0][0])
    inside.prepare()
    for number, (world, rows) in enumerate(jobs):

        def work(world: Row = world, rows: list[Row] = rows) -> Iterator[Row]:
            sandbox.change_device(world)
            sandbox.apply(world)
            for case in rows:
                yield {"world": world, "case": case, "engine": inside.decide(case)}

        path = Path(folder, str(number))
        if not inside.in_fork(work, str(path)):
            raise SystemExit(f"the engine's side died on {world}")
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def main() -> None:
    """Record the answers to a seed's cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sample", metavar="VERSION")
    parser.add_argument("--questions", type=Path, metavar="FILE", help="JSON rows of world and case, instead of a seed")
    parser.add_argument("--seed", help="default: of this release")
    parser.add_argument("--options", action="store_true", help="with --out: cases about the value of --quantization")
    parser.add_argument("--dialects", action="store_true", help="with --out: cases in the dialects of exporters")
    for name, default in (("cases", 80), ("worlds", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if options.sample:
        head = samples.Head.of(options.sample, digest_of(options.site), options.seed or samples.release_seed())
        samples.save(head, answers(options.site, list(head.jobs())))
        return
    if options.questions:
        rows = map(json.loads, options.questions.read_text(encoding="utf-8").splitlines())
        jobs = [(row["world"], [row["case"]]) for row in rows]
    else:
        kinds = {"options": options.options, "dialects": options.dialects}
        jobs = list(cases.jobs(options.seed, options.cases, options.worlds, **kinds))
    with options.out.open("w", encoding="utf-8") as out:
        for row in answers(options.site, jobs):
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

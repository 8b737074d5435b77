"""Runs an engine's own decision code on random cases: `python record.py SITE --seed 1 --cases 80 --worlds 4 --out
FILE`.

For a Python with torch and what the engine's Python files import, with moeq on PYTHONPATH. SITE is the folder of the
unpacked
wheel. Writes one JSON row per case: world, case, and what the engine decided. Every device is imported in its own
process, and every world runs in a fork of it, so that cached answers cannot leak.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import cases

from moeq.oracle.engines.vllm import inside, sandbox


def _device(job: tuple[dict[str, Any], list[dict[str, Any]]]) -> str:
    world = job[0]
    return json.dumps({key: value for key, value in world.items() if key not in ("flags", "env", "plain")})


def _answers(
    site: str, jobs: list[tuple[dict[str, Any], list[dict[str, Any]]]], folder: str
) -> Iterator[dict[str, Any]]:
    sandbox.install(site, jobs[0][0])
    inside.prepare()
    for number, (world, rows) in enumerate(jobs):

        def work(world: dict[str, Any] = world, rows: list[dict[str, Any]] = rows) -> Iterator[dict[str, Any]]:
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
    parser.add_argument("--out", type=Path, required=True)
    for name, default in (("seed", 1), ("cases", 80), ("worlds", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with options.out.open("w", encoding="utf-8") as out, tempfile.TemporaryDirectory() as folder:
        for device, jobs in groupby(cases.jobs(options.seed, options.cases, options.worlds), key=_device):
            rows = list(jobs)
            part = Path(folder, "device")
            if not inside.in_fork(lambda rows=rows: _answers(options.site, rows, folder), str(part)):
                raise SystemExit(f"the engine cannot be executed for {device}")
            out.write(part.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()

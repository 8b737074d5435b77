"""Feed the parsers by coverage: `python tests/attacks/fuzz/run.py --seconds 600`.

With atheris installed (`pip install atheris`, Linux) inputs are chosen by the branches that they reach; without it, by
random damage to what is known. Inputs that break an invariant are written to the folder of findings and named; new
inputs worth keeping go to `--corpus`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]

from attacks.fuzz.targets import TARGETS, seeds  # noqa: E402 - the path above


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="in all")
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: every one")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--corpus", type=Path, help="where to keep inputs that reached something new")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--alone", help=argparse.SUPPRESS)  # the child that atheris runs in: it ends its process
    options = parser.parse_args()
    if options.alone:
        return coverage_guided(options)
    names = options.target or list(TARGETS)
    guided = has_atheris()
    failed = False
    for name in names:
        budget = options.seconds / len(names)
        found = spawn(name, budget, options) if guided else random_damage(name, budget, options)
        engine = "atheris" if guided else "random damage"
        print(json.dumps({"target": name, "engine": engine, "seconds": round(budget, 1), **found}), flush=True)
        failed |= bool(found["findings"])
    return 1 if failed else 0


def has_atheris() -> bool:
    try:
        import atheris  # noqa: F401
    except ImportError:
        return False
    return True


def spawn(name: str, budget: float, options: argparse.Namespace) -> dict[str, object]:
    """Run a target under atheris in a process of its own; libFuzzer ends that by itself."""
    options.findings.mkdir(parents=True, exist_ok=True)
    before = set(options.findings.iterdir())
    argv = [sys.executable, __file__, "--alone", name, "--seconds", str(budget), "--findings", str(options.findings)]
    argv += ["--corpus", str(options.corpus)] if options.corpus else []
    done = subprocess.run([*argv, "--seed", str(options.seed)], capture_output=True, text=True, check=False)
    log = done.stdout + done.stderr
    runs = [word for line in log.splitlines() if "stat::number_of_executed_units" in line for word in line.split()[-1:]]
    covered = [line.split("cov:")[1].split()[0] for line in log.splitlines() if "cov:" in line]
    found = sorted(path.name for path in set(options.findings.iterdir()) - before)
    if done.returncode and not found:
        found = [log[-2000:]]
    return {
        "executions": int(runs[-1]) if runs else None,
        "edges": int(covered[-1]) if covered else None,
        "findings": found,
    }


def coverage_guided(options: argparse.Namespace) -> int:
    import atheris

    with atheris.instrument_imports(include=["moeq"], enable_loader_override=False):
        import moeq.cli.app
        import moeq.pipeline.finalize
        import moeq.prove.verify  # noqa: F401
    target = TARGETS[options.alone]
    corpus = Path(options.corpus or tempfile.mkdtemp()) / options.alone
    corpus.mkdir(parents=True, exist_ok=True)
    start = Path(tempfile.mkdtemp())
    for number, data in enumerate(seeds(options.alone)):
        (start / f"{number}").write_bytes(data)
    arguments = [
        sys.argv[0],
        f"-max_total_time={max(int(options.seconds), 1)}",
        f"-artifact_prefix={options.findings}/{options.alone}-",
        f"-seed={options.seed}",
        "-max_len=262144",
        "-timeout=20",
        "-rss_limit_mb=4096",
        "-print_final_stats=1",
        str(corpus),
        str(start),
    ]
    atheris.Setup(arguments, target)
    atheris.Fuzz()
    return 0


def random_damage(name: str, budget: float, options: argparse.Namespace) -> dict[str, object]:
    """Bytes and values changed at random, from what is known and from what came of it."""
    dice, known = random.Random(options.seed), seeds(name)
    executions, findings, ends = 0, list[str](), time.monotonic() + budget
    while time.monotonic() < ends:
        data = damaged(dice, dice.choice(known))
        executions += 1
        try:
            TARGETS[name](data)
        except BaseException:  # noqa: BLE001 - whatever it is, it is a finding
            options.findings.mkdir(parents=True, exist_ok=True)
            path = options.findings / f"{name}-{executions}-{os.getpid()}"
            path.write_bytes(data)
            findings.append(f"{path.name}: {traceback.format_exc(limit=-2)[-600:]}")
    return {"executions": executions, "edges": None, "findings": findings}


_PIECES = (b"null", b"true", b"-1", b"1e400", b'""', b"[]", b"{}", b"\x00", b"\xff", b'"\\ud800"', b"9" * 30, b"[" * 90)


def damaged(dice: random.Random, data: bytes) -> bytes:
    """A few bytes changed, cut, doubled or replaced by what parsers trip over."""
    found = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 4, 8))):
        at = dice.randrange(len(found) + 1)
        stop = min(at + dice.choice((1, 1, 4, 20, 200)), len(found))
        action = dice.random()
        if action < 0.4:
            found[at:stop] = dice.choice(_PIECES)
        elif action < 0.6:
            found[at:stop] = bytes(dice.randrange(256) for _ in range(stop - at))
        elif action < 0.8:
            del found[at:stop]
        else:
            found[at:at] = found[dice.randrange(len(found) + 1) :][: dice.choice((1, 10, 100))]
    return bytes(found)


if __name__ == "__main__":
    sys.exit(main())

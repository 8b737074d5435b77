"""Recorded samples: what an engine's own code decided about a seed's cases, a file a version.

Cases follow from the seed, so a file holds the engine's answers alone; a digest tells whether the cases are still the
same ones.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from oracle.differential import cases
from oracle.differential.compare import Row, short

FOLDER = Path(__file__).parents[2] / "data" / "oracle" / "samples"
#: Cases of each of the 24 devices' worlds, and worlds beside the plain one: 2,016 in all.
CASES, WORLDS = 28, 2


def release_seed() -> str:
    """The seed of samples that are recorded for this release: another one each time."""
    import moeq

    return f"moeq {moeq.__version__}"


@dataclass(frozen=True)
class Head:
    """What a sample is of.

    Attributes:
        version: version of the engine.
        digest: digest of its package.
        seed: of the cases.
        cases: digest of the cases.
    """

    version: str
    digest: str
    seed: str
    cases: str

    @classmethod
    def of(cls, version: str, digest: str, seed: str) -> Head:
        """The head of a sample of today's cases."""
        return cls(version, digest, seed, digest_of_cases(seed))

    def jobs(self) -> Iterator[tuple[Row, list[Row]]]:
        """Its worlds and cases."""
        return cases.jobs(self.seed, CASES, WORLDS)


@cache
def digest_of_cases(seed: str) -> str:
    """BLAKE2 of a sample's cases."""
    total = hashlib.blake2b(digest_size=8)
    for world, rows in cases.jobs(seed, CASES, WORLDS):
        total.update(json.dumps([world, rows], sort_keys=True).encode())
    return total.hexdigest()


def path_of(version: str) -> Path:
    """Where a version's sample lies."""
    return FOLDER / f"{version}.json.xz"


def save(head: Head, rows: Iterable[Row]) -> None:
    """Write a sample from recorded rows, in the order of its cases."""
    by_number = {row["case"]["id"]: short(row["engine"]) for row in rows}
    document = {**asdict(head), "rows": [by_number[case["id"]] for _, part in head.jobs() for case in part]}
    FOLDER.mkdir(parents=True, exist_ok=True)
    path_of(head.version).write_bytes(lzma.compress(json.dumps(document).encode(), preset=9))


@cache
def asked(seed: str) -> list[tuple[Row, Row]]:
    """World and case of every case of a sample: the same for all versions of a release."""
    return [(world, case) for world, part in cases.jobs(seed, CASES, WORLDS) for case in part]


@cache
def load(version: str) -> tuple[Head, list[tuple[Row, Row, Row]]]:
    """A version's sample: head, and `(world, case, engine's answer)` of every case."""
    document: dict[str, Any] = json.loads(lzma.decompress(path_of(version).read_bytes()))
    rows = document.pop("rows")
    head = Head(**document)
    return head, [(world, case, answer) for (world, case), answer in zip(asked(head.seed), rows, strict=True)]


def keep_dialects(version: str, seed: str, rows: Iterable[tuple[Row, Row, Row]]) -> None:
    """Put a version's answers to a seed's cases in exporters' dialects beside those of the other versions."""
    path = FOLDER / "dialects.json.xz"
    old = json.loads(lzma.decompress(path.read_bytes())) if path.exists() else {}
    kept = {row["case"]["id"]: row for row in old["rows"]} if old.get("seed") == seed else {}
    for world, case, answer in rows:
        row = kept.setdefault(case["id"], {"world": world, "case": case, "engine": {}})
        row["engine"][version] = answer["answer"]
    path.write_bytes(lzma.compress(json.dumps({"seed": seed, "rows": list(kept.values())}).encode(), preset=9))


def load_dialects() -> list[tuple[str, Row, Row, list[Any]]]:
    """Recorded answers to cases in exporters' dialects: version, world, case and the engine's answer."""
    document = json.loads(lzma.decompress((FOLDER / "dialects.json.xz").read_bytes()))
    return [
        (version, row["world"], row["case"], answer)
        for row in document["rows"] for version, answer in row["engine"].items()
    ]  # fmt: skip


def load_options() -> list[tuple[str, Row, Row, Row]]:
    """Recorded answers about `--quantization`: version, world, case and the engine's answer.

    They were made with `record.py --options`, and keep their cases: before 0.31 only those that humming-kernels 0.1.10
    and 0.1.12, which those versions require, can answer without a GPU.
    """
    rows = json.loads(lzma.decompress((FOLDER / "options.json.xz").read_bytes()))
    return [(version, world, case, answer) for version, world, case, answer in rows]

"""The recorded sample: what the engine did with a seed's checkpoints. Cases follow from the seed, so a file holds the
engine's side alone; a digest tells whether the cases are still the same ones.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
from pathlib import Path
from typing import Any

from oracle.loads import cases

Row = dict[str, Any]
PATH = Path(__file__).parents[2] / "data" / "oracle" / "loads-0.33.0.json.xz"


def digest_of_cases(seed: str, count: int) -> str:
    """BLAKE2 of a seed's first cases."""
    total = hashlib.blake2b(digest_size=8)
    for number in range(count):
        total.update(json.dumps(cases.case(seed, number), sort_keys=True).encode())
    return total.hexdigest()


def save(seed: str, rows: list[Row]) -> None:
    """Write the sample from recorded rows: all cases from the first one on."""
    engine = [row["engine"] for row in sorted(rows, key=lambda row: int(row["id"]))]
    for row in engine:
        row.pop("frames", None)
        if "msg" in row:
            row["msg"] = re.sub(r"/\S+-\d+", "FOLDER", row["msg"])[:160]
    document = {"seed": seed, "cases": digest_of_cases(seed, len(engine)), "engine": engine}
    PATH.write_bytes(lzma.compress(json.dumps(document).encode(), preset=9))


def load() -> tuple[str, str, list[Row]]:
    """The sample: seed, digest of its cases, and the engine's outcome of each."""
    document = json.loads(lzma.decompress(PATH.read_bytes()))
    return document["seed"], document["cases"], document["engine"]

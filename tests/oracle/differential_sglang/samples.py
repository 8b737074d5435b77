"""The recorded sample: SGLang's answers to a seed's cases, and a digest that tells whether the cases are the same."""

from __future__ import annotations

import hashlib
import json
import lzma
from pathlib import Path
from typing import Any

from oracle.differential_sglang import cases

Row = dict[str, Any]

PATH = Path(__file__).parents[2] / "data" / "oracle" / "samples" / "sglang-0.5.23.json.xz"
FLOATS = PATH.with_name("sglang-floats-0.5.23.json.xz")


def digest(seed: str, count: int, *, floats: bool = False) -> str:
    """BLAKE2 of a seed's cases."""
    return hashlib.blake2b(
        json.dumps(cases.cases(seed, count, floats=floats), sort_keys=True).encode(), digest_size=8
    ).hexdigest()


def save(path: Path, seed: str, rows: list[Row], *, floats: bool = False) -> None:
    """Write answers, in the order of the cases."""
    for row in rows:
        row.pop("text", None)
    document = {"seed": seed, "cases": digest(seed, len(rows), floats=floats), "floats": floats, "rows": rows}
    path.write_bytes(lzma.compress(json.dumps(document).encode(), preset=9))


def load(path: Path = PATH) -> tuple[Row, list[tuple[Row, Row]]]:
    """Seed and digest, and every case with the engine's answer."""
    document: Row = json.loads(lzma.decompress(path.read_bytes()))
    rows = document.pop("rows")
    asked = cases.cases(document["seed"], len(rows), floats=document.get("floats", False))
    return document, list(zip(asked, rows, strict=True))

"""Takes an engine's tables out of the engine: `python -m moeq.oracle.extract vllm==0.33.0 --site DIR [--out FILE]`.

DIR holds the unpacked wheel (its Python and JSON files suffice). Run it with a Python that has torch and what the
engine's Python files import; no GPU is needed. The result is `moeq/oracle/engines/<engine>/tables/<version>.json`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from moeq.errors import MoeqError

_WIDTH = 150


def dump(value: Any, indent: int = 0) -> str:
    """JSON that reads well as a diff: what fits into a line is one line."""
    plain = json.dumps(value, ensure_ascii=False)
    if len(plain) + indent <= _WIDTH or not isinstance(value, (dict, list)) or not value:
        return plain
    pad = " " * (indent + 1)
    if isinstance(value, list):
        parts = [pad + dump(item, indent + 1) for item in value]
        opening, closing = "[]"
    else:
        parts = [f"{pad}{json.dumps(key)}: {dump(item, indent + 1)}" for key, item in value.items()]
        opening, closing = "{}"
    return opening + "\n" + ",\n".join(parts) + "\n" + " " * indent + closing


def main(arguments: list[str] | None = None) -> int:
    """Run the extractor of the engine that is named."""
    parser = argparse.ArgumentParser(prog="python -m moeq.oracle.extract", description=__doc__)
    parser.add_argument("engine", metavar="ENGINE==VERSION")
    parser.add_argument("--site", required=True, help="folder of the unpacked wheel")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    name, _, version = options.engine.partition("==")
    try:
        if name not in ("vllm",) or not version:
            raise MoeqError("usage.unknown-engine", f"there is no extractor for '{options.engine}'", "vllm==0.33.0")
        module: Any = importlib.import_module(f"moeq.oracle.engines.{name}.extract")
        tables = module.extract(version, options.site)
    except MoeqError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    out = options.out or Path(__file__).parent / "engines" / name / "tables" / f"{version}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(dump(tables) + "\n", encoding="utf-8")
    print(out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Takes an engine's tables out of the engine: `python -m moeq.oracle.extract vllm==0.33.0 --site DIR [--out FILE]`.

DIR holds the unpacked wheel (its Python and JSON files suffice). Run it with a Python that has torch and what the
engine's Python files import; no GPU is needed. The result is `moeq/oracle/engines/<engine>/tables/<version>.json`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from moeq.errors import MoeqError
from moeq.oracle.tablefile import packed, text


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
    out.write_text(text(packed(tables)) + "\n", encoding="utf-8")
    print(out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

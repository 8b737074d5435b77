"""Extract facts about vLLM from vLLM itself: `python tools/extract.py WHAT VERSION --site SITE`.

SITE is the folder of the unpacked wheel. `tables` executes its decisions on every device and writes
`moeq/oracle/engines/vllm/tables/VERSION.json`; `names` executes `load_weights` of its model classes and updates
`expert_names.json`; `linears` builds them and updates `linears.json`; `parameters` executes `create_weights` of its
methods and updates `parameters.json`; `models`
follows the constructors of its model classes and updates `tools/pages/vllm_models.json`; `architectures` lists what its
registry holds and updates `architectures.json`. README.md beside this file lists what has to be installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from moeq.errors import MoeqError
from vllm_tables import architectures, linears, models, names, parameters, tables
from vllm_tables.storing import changes, packed, text

MODELS = Path(__file__).parent / "pages" / "vllm_models.json"
DATA = Path(__file__).parents[1] / "moeq" / "oracle" / "engines" / "vllm"


def main(arguments: list[str] | None = None) -> int:
    """Run one extractor and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tables", "names", "linears", "parameters", "models", "architectures"))
    parser.add_argument("version")
    parser.add_argument("--site", required=True, help="folder of the unpacked wheel")
    parser.add_argument(
        "--only", nargs="*", default=(), metavar="ARCHITECTURE", help="with `names`: these classes only"
    )
    parser.add_argument("--like", metavar="VERSION", help="with `tables`: store the changes from a close release's")
    options = parser.parse_args(arguments)
    try:
        if options.what == "tables":
            out = DATA / "tables" / f"{options.version}.json"
            made = packed(tables.extract(options.version, options.site))
            if options.like:
                old = json.loads((DATA / "tables" / f"{options.like}.json").read_text(encoding="utf-8"))
                made = {"like": options.like, "changes": changes(old, made)}
            content = text(made)
        elif options.what == "parameters":
            out = DATA / "parameters.json"
            known = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
            found = parameters.extract(options.version, options.site)
            content = text(parameters.merged(known, options.version, found))
        elif options.what == "architectures":
            out = DATA / "architectures.json"
            rows = json.loads(out.read_text(encoding="utf-8")) if out.exists() else []
            content = json.dumps(
                architectures.merged(rows, options.version, architectures.extract(options.site)), indent=1
            )
        elif options.what == "linears":
            out = DATA / "linears.json"
            known = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
            content = json.dumps(linears.merged(known, options.version, linears.extract(options.site)), indent=1)
        elif options.what == "models":
            out = MODELS
            known = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
            found = models.extract(options.version, options.site)
            content = json.dumps(models.merged(known, options.version, found), indent=1)
        else:
            out = DATA / "expert_names.json"
            known = json.loads(out.read_text(encoding="utf-8"))
            found = names.extract(options.version, options.site, tuple(options.only))
            content = json.dumps(names.merged(known, options.version, found), indent=1, sort_keys=True)
    except MoeqError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    out.write_text(content + "\n", encoding="utf-8")
    print(out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

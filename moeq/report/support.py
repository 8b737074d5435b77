"""The support tables of the README, generated from the registries.

python -m moeq.report.support                    # print them
python -m moeq.report.support --write README.md  # replace them between their markers
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from moeq.layouts.registry import NOT_OFFLINE, layout_facts
from moeq.schemes.registry import FORMATS, get_format
from moeq_kernels.capabilities import CAPABILITIES

BEGIN, END = "<!-- support:begin -->", "<!-- support:end -->"


def support_tables() -> str:
    """Markdown: checkpoint formats, kernel layouts, and what cannot be made offline."""
    kernels = {capability.layout for capability in CAPABILITIES}
    formats = [
        (f"`{found.id}`", found.title, "yes" if found.refusal is None else f"no: {found.refusal}")
        for found in map(get_format, FORMATS)
    ]
    layouts = [
        (
            f"`{facts.id}`",
            facts.title,
            facts.schemes,
            facts.arch,
            facts.source,
            "yes" if facts.id in kernels else "",
        )
        for facts in layout_facts()
    ]
    parts = [
        "### Checkpoint formats\n",
        _table(("format", "how it stores weights", "converted"), formats),
        "\n### Kernel layouts\n",
        _table(("layout", "read by", "holds", "devices", "layout of", "run-check kernel"), layouts),
        "\nCannot be packed offline:\n",
        *(f"* {name}: {reason}." for name, reason in NOT_OFFLINE.items()),
    ]
    return "\n".join(parts)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def replace_tables(text: str) -> str:
    """`text` with the tables between the markers brought up to date. Raises ValueError where there are no markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} ... {END} in the text")
    return f"{before}{BEGIN}\n\n{support_tables()}\n\n{END}{after}"


def main(argv: Sequence[str]) -> int:
    """Print the tables, or write them into the file after `--write`."""
    if not argv:
        sys.stdout.write(support_tables() + "\n")
        return 0
    if len(argv) != 2 or argv[0] != "--write":
        sys.stderr.write("usage: python -m moeq.report.support [--write FILE]\n")
        return 2
    path = Path(argv[1])
    path.write_text(replace_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

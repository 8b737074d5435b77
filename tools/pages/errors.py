"""The reference of exit codes and error codes, from `moeq/cli/error_codes.toml`."""

from __future__ import annotations

from moeq.cli.explanations import error_codes
from moeq.errors import EXIT_CODES, ExitCode
from pages.tables import NOTE, cell, table

_KINDS = {
    "answer": "The command ran fine and the answer is no: no backend, something differs, a required cell fails.",
    "usage": "The request is wrong or contradicts itself.",
    "environment": "This machine lacks something: a package, a GPU, a permission.",
    "source": "The checkpoint is missing, gated, damaged or incomplete.",
    "resources": "Out of disk or above the memory ceiling. Finished work is kept.",
    "bug": "A bug in moeq.",
    "interrupted": "Ctrl-C or SIGTERM. Finished work is kept.",
}


def errors_page() -> str:
    """Return the page of all exit codes and error codes."""
    rows = [("0", "", "Yes, or done.")]
    rows += [(str(int(code)), f"[`{kind}.*`](#{kind})", _KINDS[kind]) for kind, code in _by_exit_code()]
    unknown = "`moeq oracle` only: moeq does not know what this engine decides; the verdict's error is `NOT_FOLLOWED`."
    rows.append((str(int(ExitCode.UNKNOWN)), "", unknown))
    rows.sort(key=lambda row: int(row[0]))
    intro = (
        "Every failure has a code such as `usage.tp`. The part before the dot decides the exit code; scripts branch\n"
        "on either. `moeq explain CODE` prints what this page says of a code. After 5 and 130 finished work is kept,\n"
        "and the same command continues it."
    )
    parts = ["# Exit codes and error codes", NOTE, intro, table(("exit code", "error codes", "means"), rows)]
    for kind, code in _by_exit_code():
        parts += [f"## {kind}", f"Exit code {int(code)}. {_KINDS[kind]}"]
        for name, row in error_codes().items():
            if name.partition(".")[0] == kind:
                parts += [f"### {name}", _explained(row)]
    return "\n\n".join(parts) + "\n"


def _by_exit_code() -> list[tuple[str, int]]:
    return sorted(((kind, int(code)) for kind, code in EXIT_CODES.items()), key=lambda row: row[1])


def _explained(row: dict[str, str]) -> str:
    lines = [("meaning", row["meaning"]), ("usual cause", row["cause"]), ("what helps", row["remedy"])]
    message = row["example"].replace("`", "'")
    return table((f"`{cell(message)}`".replace("&lt;", "<"), ""), [(f"**{key}**", cell(text)) for key, text in lines])

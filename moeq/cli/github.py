"""GitHub Actions: annotations, groups and job summaries, where the environment says that a workflow runs.

Source: GitHub's documentation of workflow commands. A command is a line `::name key=value::data`; in data `%`, CR and
LF are written %25, %0D and %0A, in values of properties also `:` and `,`. Commands work on stderr as on stdout.
"""

from __future__ import annotations

import os
from pathlib import Path

#: Upper bound of one step's summary in bytes; GitHub drops a larger one whole.
SUMMARY_LIMIT = 1 << 20


def in_actions() -> bool:
    """Return whether this process is a step of a workflow."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def escaped(text: str) -> str:
    """Escape the data of a workflow command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def annotation(kind: str, title: str, message: str) -> str:
    """Spell an `error`, `warning` or `notice` as one line."""
    name = escaped(title).replace(":", "%3A").replace(",", "%2C")
    return f"::{kind} title={name}::{escaped(message)}"


def group(title: str) -> str:
    """Return the line that begins lines which the log folds; `::endgroup::` ends them."""
    return f"::group::{escaped(title)}"


END_GROUP = "::endgroup::"


def append_summary(markdown: str) -> bool:
    """Append to the job summary; False where there is none, where it is full, or where it cannot be written."""
    name = os.environ.get("GITHUB_STEP_SUMMARY")
    if not name:
        return False
    data = markdown.encode()
    try:
        path = Path(name)
        if path.exists() and path.stat().st_size + len(data) > SUMMARY_LIMIT:
            return False
        with path.open("ab") as file:
            file.write(data)
    except OSError:
        return False
    return True

"""Known defects of an engine, attached to the decisions that meet them.

What an advisory says is data of the engine's policy file; when it applies is one of the conditions here, by name.
"""

from __future__ import annotations

from collections.abc import Callable

from moeq.oracle.case import Case
from moeq.oracle.records import Advisory
from moeq.oracle.select import Selection

Condition = Callable[[Case, Selection], bool]


def advisories_for(case: Case, selection: Selection) -> tuple[Advisory, ...]:
    """Advisories of the policy whose condition holds."""
    found = []
    for row in case.policy.advisories:
        if CONDITIONS[row["when"]](case, selection):
            fields = {key: value for key, value in row.items() if key != "when"}
            found.append(Advisory(**{**fields, "requirement": tuple(row["requirement"])}))
    return tuple(found)


CONDITIONS: dict[str, Condition] = {}

"""docs/reference/events.md names every event and every field that is written."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import get_args

from moeq.cli.conversion_report import SCHEMA
from moeq.pipeline import events
from moeq.pipeline.push import Pushed

DOCS = (Path(__file__).parents[2] / "docs" / "reference" / "events.md").read_text()
#: Not written: heartbeats say how far they are.
SUMMED_UP = (events.Advanced, events.Checking)


def row(event: str) -> str:
    found = re.search(rf"^\| `{event}` \|.*$", DOCS, re.MULTILINE)
    assert found, f"{event} is not documented"
    return found[0]


def test_every_event_of_the_pipeline_is_documented() -> None:
    assert SCHEMA in DOCS
    for kind in get_args(events.Event):
        if kind not in SUMMED_UP:
            documented = row(re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower())
            for field in dataclasses.fields(kind):
                assert f"`{field.name}`" in documented


def test_events_of_the_command_are_documented() -> None:
    for field in dataclasses.fields(Pushed):
        assert f"`{field.name}`" in row("pushed")
    for event in ("heartbeat", "failed", "ended"):
        assert row(event)

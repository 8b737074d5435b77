"""Traces with one mistake each, all of which the checks have to find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from support.handover.trace import Event, Trace

Events = list[Event]


def mutants(trace: Trace) -> Iterator[tuple[str, Trace]]:
    """Yield the trace with one mistake each, in every place of its code: threads and arrays of barriers."""
    for number, events in enumerate(trace.threads):
        waits = [one for one in events if one.what == "wait"]
        for group in dict.fromkeys(trace.groups[one.bar] for one in waits):
            for name, spoil in (("does not wait", _no_wait), ("waits for the other phase", _other_phase)):
                yield f"thread {number} {name}", _with(trace, number, spoil(trace, list(events), group))
        for name, change in MISTAKES.items():
            changed = change(list(events))
            if changed != list(events):
                yield f"thread {number} {name}", _with(trace, number, changed)


def _with(trace: Trace, number: int, events: Events) -> Trace:
    threads = list(trace.threads)
    threads[number] = tuple(events)
    return replace(trace, threads=tuple(threads))


def _no_wait(trace: Trace, events: Events, group: int) -> Events:
    return [one for one in events if one.what != "wait" or trace.groups[one.bar] != group]


def _other_phase(trace: Trace, events: Events, group: int) -> Events:
    return [
        replace(one, number=1 - one.number) if one.what == "wait" and trace.groups[one.bar] == group else one
        for one in events
    ]


def _early_arrival(events: Events) -> Events:
    for place, one in enumerate(events):
        if one.what == "arrive" and place and events[place - 1].what in ("read", "products", "write"):
            events[place - 1], events[place] = one, events[place - 1]
    return events


def _no_arrival(events: Events) -> Events:
    return [one for one in events if one.what != "arrive"]


def _fewer_bytes(events: Events) -> Events:
    return [replace(one, number=one.number - 1) if one.what == "expect" else one for one in events]


def _next_place(events: Events) -> Events:
    """Send copies to where the following copy of other bytes should go."""
    places = list(dict.fromkeys((one.low, one.high) for one in events if one.what == "copy"))
    following = dict(zip(places, [*places[1:], *places[:1]], strict=True))
    changed = []
    for one in events:
        low, high = following[one.low, one.high] if one.what == "copy" else (one.low, one.high)
        changed.append(replace(one, low=low, high=high))
    return changed


def _no_fence(events: Events) -> Events:
    """Only where threads write what products read."""
    return [one for one in events if one.what != "fence"] if any(one.what == "gather" for one in events) else events


MISTAKES: dict[str, Callable[[Events], Events]] = {
    "arrives before its access is over": _early_arrival,
    "does not arrive": _no_arrival,
    "expects fewer bytes": _fewer_bytes,
    "copies to the next place": _next_place,
    "sets no fence": _no_fence,
}

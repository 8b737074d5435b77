"""Progress bars for callers in Python: Rich draws them in a terminal and in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from moeq.pipeline import events

#: Takes steps or bytes done, all of them, and a label.
Advance = Callable[[int, int, str], None]


@contextmanager
def shown(progress: Callable[..., Any] | bool, title: str) -> Iterator[Advance | None]:
    """Yield what a function reports its progress to: the caller's own, a bar for `True`, or None for `False`."""
    if not isinstance(progress, bool):
        yield progress
    elif not progress:
        yield None
    else:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        what = TextColumn("{task.description}", markup=False)
        with Progress(what, BarColumn(), TaskProgressColumn(), TimeRemainingColumn()) as bar:
            task = bar.add_task(title, total=None)

            def advance(done: int, total: int, label: str) -> None:
                bar.update(task, completed=done, total=total, description=f"{title} {label}".strip())

            yield advance


@contextmanager
def events_shown(progress: events.Progress | bool, title: str) -> Iterator[events.Progress | None]:
    """Yield the same for functions that report events."""
    if not isinstance(progress, bool):
        yield progress
        return
    with shown(progress, title) as advance:

        def tell(event: events.Event) -> None:
            if advance is not None and isinstance(event, events.Advanced | events.Checking):
                advance(event.done, event.total, event.label)

        yield None if advance is None else tell

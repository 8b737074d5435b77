"""Progress bars for callers in Python: Rich's bar in a terminal, an updated display in a notebook.

Rich's bar in a notebook needs ipywidgets, and a saved notebook does not show it; a display needs only IPython.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from importlib import import_module
from typing import Any

from moeq.pipeline import events
from moeq.pipeline.events import Advance

#: Least seconds between two updates of a bar in a notebook.
UPDATE_SECONDS = 0.1


@contextmanager
def progress_bar(progress: Callable[..., Any] | bool, title: str) -> Iterator[Advance | None]:
    """Yield a function that takes progress: the caller's own, that of a bar for `True`, or None for `False`."""
    if not isinstance(progress, bool):
        yield progress
    elif not progress:
        yield None
    else:
        from rich import get_console

        with (_notebook_bar if get_console().is_jupyter else _terminal_bar)(title) as advance:
            yield advance


@contextmanager
def _terminal_bar(title: str) -> Iterator[Advance]:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    what = TextColumn("{task.description}", markup=False)
    with Progress(what, BarColumn(), TaskProgressColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(title, total=None)

        def advance(done: int, total: int, label: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{title} {label}".strip())

        yield advance


@contextmanager
def _notebook_bar(title: str) -> Iterator[Advance]:
    begun = drawn = time.monotonic()
    display = import_module("IPython.display").display  # every notebook has IPython
    shown = display(_bundle(title, 0, 1), raw=True, display_id=True)

    def advance(done: int, total: int, label: str) -> None:
        nonlocal drawn
        now = time.monotonic()
        if now - drawn >= UPDATE_SECONDS:
            drawn = now
            shown.update(_bundle(f"{title} {label}".strip(), done, total), raw=True)

    yield advance
    shown.update(_bundle(f"{title}: finished in {time.monotonic() - begun:.1f} s", 1, 1), raw=True)


def _bundle(text: str, done: int, total: int) -> dict[str, str]:
    """Return the bar by media type: HTML for a notebook, plain text for a terminal."""
    percent = 100 * done // max(total, 1)
    bar = f'<progress value="{percent}" max="100" style="vertical-align: middle"></progress>'
    return {"text/html": f"<div>{bar} {percent} % {escape(text)}</div>", "text/plain": f"{percent} % {text}"}


@contextmanager
def event_bar(progress: events.Progress | bool, title: str) -> Iterator[events.Progress | None]:
    """Yield a function that takes events: the caller's own, that of a bar for `True`, or None for `False`."""
    if not isinstance(progress, bool):
        yield progress
        return
    with progress_bar(progress, title) as advance:
        if advance is None:
            yield None
            return

        def tell(event: events.Event) -> None:
            if isinstance(event, events.Advanced | events.Checking):
                advance(event.done, event.total, event.label)

        yield tell

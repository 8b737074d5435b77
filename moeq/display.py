"""How records show themselves: one line as text, a small table in a notebook."""

from __future__ import annotations

from importlib import import_module


class DisplayedRecord:
    """Mixin for records of the public interface; dataclasses take it with `repr=False`.

    What is shown is in `moeq.report.notebook`, which is above all records and therefore imported by name.
    """

    def __repr__(self) -> str:
        text: str = import_module("moeq.report.notebook").one_line(self)
        return text

    def _repr_html_(self) -> str:
        """Return the table that IPython shows."""
        text: str = import_module("moeq.report.notebook").table(self)
        return text

"""A thing worth telling the user that does not stop the work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Notice:
    """A warning about a checkpoint.

    Attributes:
        code: stable dotted name, such as `index.total-size`.
        message: one sentence with names and numbers.
    """

    code: str
    message: str

"""A warning about a checkpoint: worth knowing, but no reason to stop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointWarning:
    """A warning about a checkpoint."""

    code: str  #: stable dotted name, such as `index.total-size`
    message: str  #: one sentence with names and numbers

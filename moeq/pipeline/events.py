"""Events of a running conversion: plain records, passed in order to a callback in the driver's thread. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Started:
    """The work of a run begins.

    Attributes:
        job: digest of the plan.
        units: units of this run (of a shard: only its own), finished ones included.
        bytes_in: bytes of the source that they read.
        bytes_out: bytes that they write.
        resumed_units: units found finished from an earlier run.
        resumed_bytes: bytes that those wrote.
    """

    job: str
    units: int
    bytes_in: int
    bytes_out: int
    resumed_units: int = 0
    resumed_bytes: int = 0


@dataclass(frozen=True)
class Checking:
    """Units of an earlier run are read again before they count; comes before `Started`.

    Attributes:
        done: bytes read.
        total: bytes to read.
        label: the unit.
    """

    done: int
    total: int
    label: str


@dataclass(frozen=True)
class UnitStarted:
    """A unit was begun."""

    unit: str


@dataclass(frozen=True)
class Advanced:
    """Bytes of a unit were written; sent about once per expert.

    Attributes:
        done: bytes written, those of finished and resumed units included.
        total: bytes to write in all.
        label: what was worked on.
    """

    done: int
    total: int
    label: str


@dataclass(frozen=True)
class UnitFinished:
    """A unit is on disk and in the journal.

    Attributes:
        unit: its id.
        what: `pack` or `copy`.
        bytes_in: bytes read.
        bytes_out: bytes written.
        seconds: from its first byte to the journal.
        resumed: whether an earlier run had finished the unit.
    """

    unit: str
    what: str
    bytes_in: int
    bytes_out: int
    seconds: float
    resumed: bool = False


@dataclass(frozen=True)
class Fetching:
    """A file of the source is fetched; nothing is converted meanwhile.

    Attributes:
        file: its name.
        bytes: its size.
    """

    file: str
    bytes: int


@dataclass(frozen=True)
class Warned:
    """A warning that does not stop the work.

    Attributes:
        code: stable name.
        message: one sentence.
    """

    code: str
    message: str


@dataclass(frozen=True)
class Finished:
    """The conversion stands under its final name; or a shard of it is done.

    Attributes:
        bytes_out: bytes of tensor data in it.
        seconds: from `Started` on.
        resumed_units: units that earlier runs had finished.
    """

    bytes_out: int
    seconds: float
    resumed_units: int


Event = Started | Checking | UnitStarted | Advanced | UnitFinished | Fetching | Warned | Finished

Progress = Callable[[Event], None]

#: Takes steps or bytes done, all of them, and a label: the progress of everything but conversions.
Advance = Callable[[int, int, str], None]

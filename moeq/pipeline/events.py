"""Events of a running conversion: plain records, passed in order to a callback in the driver's thread. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Started:
    """The work of a run begins."""

    job: str  #: digest of the plan
    units: int  #: units of this run (of a shard: only its own), finished ones included
    bytes_in: int  #: bytes of the source that these units read
    bytes_out: int  #: bytes that these units write
    resumed_units: int = 0  #: units that an earlier run had finished
    resumed_bytes: int = 0  #: bytes that an earlier run had written


@dataclass(frozen=True)
class Checking:
    """Units of an earlier run are read again before they count; comes before `Started`."""

    done: int  #: bytes read
    total: int  #: bytes to read
    label: str  #: id of the unit


@dataclass(frozen=True)
class UnitStarted:
    """A unit was begun."""

    unit: str  #: id of the unit


@dataclass(frozen=True)
class Advanced:
    """Bytes of a unit were written; sent about once per expert."""

    done: int  #: bytes written, those of finished and resumed units included
    total: int  #: bytes to write in all
    label: str  #: name of the item that was written


@dataclass(frozen=True)
class UnitFinished:
    """A unit is on disk and in the journal."""

    unit: str  #: id of the unit
    what: str  #: `pack` or `copy`
    bytes_in: int  #: bytes read
    bytes_out: int  #: bytes written
    seconds: float  #: time from the unit's first byte to its journal line
    resumed: bool = False  #: whether an earlier run had finished the unit


@dataclass(frozen=True)
class Fetching:
    """A file of the source is fetched; nothing is converted meanwhile."""

    file: str  #: file name
    bytes: int  #: size of the file


@dataclass(frozen=True)
class Warned:
    """A warning that does not stop the work."""

    code: str  #: stable name
    message: str  #: one sentence


@dataclass(frozen=True)
class Finished:
    """The conversion has its final name, or a shard of it is done."""

    bytes_out: int  #: bytes of tensor data in the result
    seconds: float  #: time since `Started`
    resumed_units: int  #: units that earlier runs had finished


Event = Started | Checking | UnitStarted | Advanced | UnitFinished | Fetching | Warned | Finished

Progress = Callable[[Event], None]

#: Function that takes steps or bytes done, the total, and a label: progress of all work other than conversions.
Advance = Callable[[int, int, str], None]

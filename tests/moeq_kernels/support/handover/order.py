"""Order of the accesses of a trace in every schedule, derived from one recording."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from support.handover.trace import LONG, Event, Trace


@dataclass
class Clock:
    """What surely has happened: events of each thread, and completed phases of each barrier."""

    events: list[int]
    phases: dict[int, int] = field(default_factory=dict)

    def join(self, other: Clock) -> None:
        self.events = list(map(max, self.events, other.events))
        for bar, count in other.phases.items():
            self.phases[bar] = max(count, self.phases.get(bar, 0))

    def copy(self) -> Clock:
        return Clock(list(self.events), dict(self.phases))


@dataclass
class Access:
    """Reading or writing bytes, from an event on until another one or until a phase is complete.

    Attributes:
        clock: before it.
        end: the event after which it is over, None while unknown; phase: instead of that, a barrier's.
        generic: a write by threads, which products see after a fence only.
    """

    event: Event
    thread: int
    place: int
    clock: Clock
    end: int | None = None
    phase: tuple[int, int] | None = None

    @property
    def writes(self) -> bool:
        return self.event.what in ("copy", "gather", "write")

    @property
    def generic(self) -> bool:
        return self.event.what in ("gather", "write")

    def before(self, other: Access) -> bool:
        """Whether this one is over before the other begins, in every schedule."""
        if self.phase is not None:
            return other.clock.phases.get(self.phase[0], 0) > self.phase[1]
        return self.end is not None and other.clock.events[self.thread] > self.end


@dataclass
class Phase:
    """A phase of a barrier while it fills."""

    arrived: int = 0
    expected: int = 0
    moved: int = 0
    clock: Clock | None = None


class Order:
    """What is ordered in every schedule of a trace; `problems` says what is not."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.problems: list[str] = []
        self.accesses: list[Access] = []
        self.fences: list[list[int]] = [[] for _ in trace.threads]
        self._phases: dict[tuple[int, int], Phase] = {}
        self._complete: dict[int, int] = {}
        self._waits: list[tuple[int, int, int, int]] = []
        self._shares = self._arrivals()
        self._run()
        self._never_lapped()
        self._races()

    def _arrivals(self) -> dict[tuple[int, int], int]:
        """How often a thread arrives in a phase of a barrier."""
        totals: dict[tuple[int, int], int] = {}
        for thread, events in enumerate(self.trace.threads):
            for one in events:
                if one.what in ("arrive", "expect"):
                    key = (thread, one.bar)
                    totals[key] = totals.get(key, 0) + (one.number if one.what == "arrive" else 1)
        shares: dict[tuple[int, int], int] = {}
        for bar, count in self.trace.counts.items():
            mine = {key: total for key, total in totals.items() if key[1] == bar}
            whole = sum(mine.values())
            for key, total in mine.items():
                shares[key] = max(1, round(total * count / whole))
        return shares

    def _run(self) -> None:
        """All threads as far as they come, one after the other, round and round."""
        threads = self.trace.threads
        clocks = [Clock([0] * len(threads)) for _ in threads]
        state = [_Thread() for _ in threads]
        self._advance(0, clocks[0], state[0])
        for clock in clocks[1:]:
            clock.join(clocks[0])
        moved = True
        while moved:
            moved = False
            for number in range(1, len(threads)):
                moved |= self._advance(number, clocks[number], state[number])
        for number, one in enumerate(state):
            if one.place < len(threads[number]):
                self.problems.append(f"thread {number} waits forever at {threads[number][one.place]}")

    def _advance(self, number: int, clock: Clock, state: _Thread) -> bool:
        events, begun = self.trace.threads[number], state.place
        while state.place < len(events):
            one = events[state.place]
            if one.what == "wait" and not self._wait(number, one, clock, state.place):
                break
            if one.what in ("arrive", "expect"):
                self._arrive(number, one, clock, state)
            elif one.what in (*LONG, "read", "write"):
                self._access(number, one, clock, state)
            elif one.what == "products":
                state.end(state.products, one.number)
            elif one.what == "commit":
                state.groups.append(state.gathers)
                state.gathers = []
            elif one.what == "committed":
                while len(state.groups) > one.number:
                    state.end(state.groups.pop(0), 0)
            elif one.what == "fence":
                self.fences[number].append(state.place)
            state.place += 1
            clock.events[number] = state.place
        return state.place > begun

    def _wait(self, number: int, one: Event, clock: Clock, place: int) -> bool:
        known = clock.phases.get(one.bar, 0)
        if (known - 1) & 1 != one.number:
            if self._complete.get(one.bar, 0) <= known:
                return False
            clock.join(self._phases[one.bar, known].clock)  # type: ignore[arg-type]
            clock.phases[one.bar] = max(known + 1, clock.phases.get(one.bar, 0))
            known += 1
        self._waits.append((number, place, one.bar, known))
        return True

    def _arrive(self, number: int, one: Event, clock: Clock, state: _Thread) -> None:
        count = one.number if one.what == "arrive" else 1
        place = state.arrived.get(one.bar, 0) // self._shares[number, one.bar]
        state.arrived[one.bar] = state.arrived.get(one.bar, 0) + count
        phase = self._phase(one.bar, place, clock, number, state.place)
        phase.arrived += count
        if one.what == "expect":
            phase.expected += one.number
            state.expecting[one.bar] = place
        self._completed(one.bar)

    def _phase(self, bar: int, place: int, clock: Clock, number: int, at: int) -> Phase:
        if clock.phases.get(bar, 0) < place:
            self.problems.append(f"thread {number} could count for the phase before at event {at}")
        phase = self._phases.setdefault((bar, place), Phase())
        mine = clock.copy()
        mine.events[number] = at + 1
        if phase.clock is None:
            phase.clock = mine
        else:
            phase.clock.join(mine)
        return phase

    def _completed(self, bar: int) -> None:
        while True:
            place = self._complete.get(bar, 0)
            phase = self._phases.get((bar, place))
            if phase is None or phase.arrived != self.trace.counts[bar] or phase.moved != phase.expected:
                return
            if place:
                phase.clock.join(self._phases[bar, place - 1].clock)  # type: ignore[union-attr,arg-type]
            phase.clock.phases[bar] = place + 1  # type: ignore[union-attr]
            self._complete[bar] = place + 1

    def _access(self, number: int, one: Event, clock: Clock, state: _Thread) -> None:
        found = Access(one, number, state.place, clock.copy())
        self.accesses.append(found)
        if one.what == "copy":
            place = state.expecting.get(one.bar, 0)
            found.phase = (one.bar, place)
            self._phase(one.bar, place, clock, number, state.place).moved += one.number
            self._completed(one.bar)
        elif one.what == "product":
            state.products.append(found)
        elif one.what == "gather":
            state.gathers.append(found)
        else:
            found.end = state.place

    def _never_lapped(self) -> None:
        """Between what a wait waits for and its end no further phase can complete: parities would be mistaken."""
        for number, place, bar, known in self._waits:
            after = self._phases.get((bar, known))
            passed = known < self._complete.get(bar, 0) and after is not None and after.clock is not None
            if passed and after.clock.events[number] <= place:  # type: ignore[union-attr]
                self.problems.append(f"thread {number} could miss a phase at event {place}")

    def _races(self) -> None:
        for one, two in overlapping(self.accesses):
            if not one.writes and not two.writes:
                continue
            if not one.before(two) and not two.before(one):
                self.problems.append(f"race: {_named(one)} and {_named(two)}")
            for written, read in ((one, two), (two, one)):
                if written.generic and read.event.what == "product" and written.before(read):
                    until = read.clock.events[written.thread]
                    assert written.end is not None
                    if not any(written.end <= fence < until for fence in self.fences[written.thread]):
                        self.problems.append(f"no fence between {_named(written)} and {_named(read)}")


@dataclass
class _Thread:
    """Where a thread is, and what of its own goes on."""

    place: int = 0
    arrived: dict[int, int] = field(default_factory=dict)
    expecting: dict[int, int] = field(default_factory=dict)
    products: list[Access] = field(default_factory=list)
    gathers: list[Access] = field(default_factory=list)
    groups: list[list[Access]] = field(default_factory=list)

    def end(self, running: list[Access], left: int) -> None:
        """End all but the last `left` at the present event."""
        while len(running) > left:
            running.pop(0).end = self.place


def _named(one: Access) -> str:
    return f"{one.event.what} of thread {one.thread}, event {one.place}"


def overlapping(accesses: list[Access]) -> Iterator[tuple[Access, Access]]:
    """Pairs that touch the same bytes."""
    ranked = sorted(accesses, key=lambda one: one.event.low)
    for number, one in enumerate(ranked):
        for other in ranked[number + 1 :]:
            if other.event.low >= one.event.high:
                break
            yield one, other

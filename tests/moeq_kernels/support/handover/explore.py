"""Walk through every interleaving of a short trace, event by event and copy by copy, to check `order`."""

from __future__ import annotations

from typing import Any

from support.handover.trace import LONG, Event, Trace

#: Accesses by a thread's own instructions.
SHORT = ("read", "write")


def explore(trace: Trace, most: int = 300_000) -> str | None:
    """Every interleaving: the first thing that goes wrong, or None. Copies complete at any time after their start.

    Raises:
        ValueError: there are more than `most` states.
    """
    threads, bars = trace.threads, sorted(trace.counts)
    index = {bar: number for number, bar in enumerate(bars)}
    running = [_running(events) for events in threads]
    start = (
        (len(threads[0]), *[0] * (len(threads) - 1)),
        tuple((trace.counts[bar], 0, 0) for bar in bars),
        frozenset[tuple[int, int]](),
    )
    seen, stack = {start}, [start]
    while stack:
        places, barriers, copies = stack.pop()
        after = []
        for number in range(1, len(threads)):
            if places[number] < len(threads[number]):
                one = threads[number][places[number]]
                step = _step(one, number, places, barriers, copies, index, trace.counts)
                if step is None:
                    continue
                if one.what in (*LONG, *SHORT):
                    busy = [(threads[t][at], t) for t, at in copies]
                    busy += [(threads[t][at], t) for t in range(1, len(threads)) for at in running[t][places[t]]]
                    # What takes no time itself is at the same time as what another thread could do now.
                    others = [t for t in range(1, len(threads)) if places[t] < len(threads[t])]
                    busy += [(threads[t][places[t]], t) for t in others if threads[t][places[t]].what in SHORT]
                    for other, thread in busy:
                        foreign = thread != number or other.what == "copy"
                        if foreign and _conflict(one, other):
                            return f"{one.what} of thread {number} during {other.what} of thread {thread}"
                after.append(step)
        for copy in copies:
            one = threads[copy[0]][copy[1]]
            moved = _counted(barriers, index[one.bar], 0, -one.number, trace.counts[one.bar])
            if moved is None:
                return "more arrivals than a barrier counts"
            after.append((places, moved, copies - {copy}))
        if not after and any(place < len(events) for place, events in zip(places, threads, strict=True)):
            return "nobody can go on"
        fresh = [one for one in after if one not in seen]
        seen.update(fresh)
        stack += fresh
        if len(seen) > most:
            raise ValueError(f"more than {most} states")
    return None


def _step(
    one: Event, number: int, places: Any, barriers: Any, copies: Any, index: dict[int, int], counts: dict[int, int]
) -> Any:
    """Return the state after an event; None while the event has to wait."""
    if one.what == "wait" and barriers[index[one.bar]][2] == one.number:
        return None
    ahead = (*places[:number], places[number] + 1, *places[number + 1 :])
    if one.what in ("arrive", "expect"):
        arrivals, moved = (one.number, 0) if one.what == "arrive" else (1, one.number)
        barriers = _counted(barriers, index[one.bar], arrivals, moved, counts[one.bar])
        if barriers is None:
            return None
    if one.what == "copy":
        copies = copies | {(number, places[number])}
    return ahead, barriers, copies


def _counted(barriers: Any, place: int, arrivals: int, moved: int, count: int) -> Any:
    """Barriers as (arrivals missing, bytes missing, parity of the phase) after some of both; None: too many."""
    missing, left, phase = barriers[place]
    missing, left = missing - arrivals, left + moved
    if missing < 0:
        return None
    if missing == 0 and left == 0:
        missing, phase = count, phase ^ 1
    return (*barriers[:place], (missing, left, phase), *barriers[place + 1 :])


def _running(events: tuple[Event, ...]) -> list[tuple[int, ...]]:
    """Before each event (and behind the last): which products and gathers of the thread go on."""
    found: list[tuple[int, ...]] = []
    products: list[int] = []
    gathers: list[int] = []
    groups: list[list[int]] = []
    for place, one in enumerate(events):
        found.append((*products, *gathers, *(at for group in groups for at in group)))
        if one.what == "product":
            products.append(place)
        elif one.what == "products":
            products = products[len(products) - one.number :] if one.number else []
        elif one.what == "gather":
            gathers.append(place)
        elif one.what == "commit":
            groups.append(gathers)
            gathers = []
        elif one.what == "committed":
            groups = groups[len(groups) - one.number :] if one.number else []
    found.append((*products, *gathers, *(at for group in groups for at in group)))
    return found


def _conflict(one: Event, other: Event) -> bool:
    writes = any(each.what in ("copy", "gather", "write") for each in (one, other))
    return writes and one.low < other.high and other.low < one.high

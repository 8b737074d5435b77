"""Which cases of a large product `make test` runs: as few as show every value once. The others are `slow`.

    @pytest.mark.cover("fault", ("command", "place"))

runs cases until each fault and each pair of command and place was there; without names, each value of each parameter.
`@pytest.mark.cover(every=4)` runs one case of four, for lists that all go the same way.
What is chosen depends on the parameters alone, so that every worker and every run chooses the same.
"""

from __future__ import annotations

import argparse
import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

#: Values of some parameters; of one that is no plain value, the object.
Value = tuple[tuple[str, object], ...]


def is_in_share(name: str, share: str) -> bool:
    """Whether a test is in a share such as 2/8, the second of eight: each test is in one, by a hash of its name."""
    number, _, of = share.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise pytest.UsageError(f"--share {share}: N/M with N from 1 to M is a share")
    return zlib.crc32(name.encode()) % int(of) == int(number) - 1


def only_distributes(argv: Sequence[str]) -> bool:
    """Whether a process with these arguments hands tests to others and runs none."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-n", "--numprocesses")
    parser.add_argument("--collect-only", "--co", action="store_true")
    known, _ = parser.parse_known_args(argv)
    distributed = known.numprocesses not in (None, "0") and not known.collect_only
    return distributed and "PYTEST_XDIST_WORKER" not in os.environ


def left_for_later(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The cases of tests marked `cover` that show nothing which the chosen ones do not."""
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("cover"):
            groups[item.nodeid.partition("[")[0]].append(item)
    return [item for group in groups.values() for item in _unchosen(group)]


def _unchosen(group: list[pytest.Item]) -> Iterator[pytest.Item]:
    marker = group[0].get_closest_marker("cover")
    assert marker is not None
    if "every" in marker.kwargs:
        yield from (item for number, item in enumerate(group) if number % marker.kwargs["every"])
        return
    cases = [_values(item) for item in group]
    asked = marker.args or tuple(cases[0])
    wanted = [(name,) if isinstance(name, str) else tuple(name) for name in asked]
    unknown = {name for names in wanted for name in names} - cases[0].keys()
    if unknown:
        raise pytest.UsageError(f"{group[0].nodeid}: cover names {sorted(unknown)}, which is no parameter of it")
    chosen = covering(cases, wanted)
    yield from (item for number, item in enumerate(group) if number not in chosen)


def _values(item: pytest.Item) -> dict[str, object]:
    call: Any = getattr(item, "callspec", None)
    if call is None:
        raise pytest.UsageError(f"{item.nodeid}: cover is for tests with parameters")
    # Plain values stand for themselves, others for the object in the list of parameters: all cases share it.
    return {
        name: value if isinstance(value, str | int) else ("object", id(value)) for name, value in call.params.items()
    }


def covering(cases: Sequence[Mapping[str, object]], wanted: Sequence[tuple[str, ...]]) -> set[int]:
    """Numbers of few cases that hold every value that some case has; others' values are spread evenly.

    Args:
        cases: for each case its parameters' values.
        wanted: the parameters, or groups of parameters, whose values have to be there.
    """
    shows = [{tuple((name, case[name]) for name in names) for names in wanted} for case in cases]
    missing: set[Value] = set().union(*shows)
    used: Counter[tuple[str, object]] = Counter()
    chosen: set[int] = set()
    while missing:
        best = max(
            (number for number in range(len(cases)) if number not in chosen),
            key=lambda number: (len(shows[number] & missing), -sum(used[value] for value in cases[number].items())),
        )
        chosen.add(best)
        missing -= shows[best]
        used.update(cases[best].items())
    return chosen

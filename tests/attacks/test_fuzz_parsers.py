"""Parsers fed with documents that are nearly right, made by their structure, and with the kept corpus.

`make fuzz` runs the same targets for ten minutes, guided by coverage.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import pytest
from attacks.fuzz.run import damaged
from attacks.fuzz.targets import SEEDS, TARGETS, seeds
from attacks.mutations import VALUES, places, with_value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

#: Documents per target and way; `make fuzz-minute` and `make fuzz` try many more.
EXAMPLES = int(os.environ.get("MOEQ_FUZZ_EXAMPLES", "60"))

#: Files of a length, a JSON document, and data.
WITH_DATA = ("header", "restore-data", "hqq", "torchao")

fuzzing = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)

#: The default's characters; the default encodes each character there is to find them, which takes seconds.
characters = st.characters(exclude_categories=["Cs"])
texts = st.text(characters, max_size=20)
scalars = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), texts, st.sampled_from(VALUES))
keys = st.text(characters, max_size=8)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=6,
)


def document_of(name: str, raw: bytes) -> tuple[Any, bytes]:
    """The JSON document in a seed, and what follows it."""
    if name in WITH_DATA:
        length = int.from_bytes(raw[:8], "little")
        return json.loads(raw[8 : 8 + length]), raw[8 + length :]
    if name == "journal":
        return [json.loads(line) for line in raw.splitlines()], b""
    return json.loads(raw), b""


def documents_of(name: str) -> Iterator[tuple[Any, bytes]]:
    """The documents among the seeds, the last first; many seeds are damaged ones."""
    for raw in reversed(seeds(name)):
        with suppress(ValueError):
            yield document_of(name, raw)


def bytes_of(name: str, document: Any, rest: bytes) -> bytes:
    if name == "journal":
        return b"\n".join(json.dumps(row).encode() for row in document) + b"\n"
    raw = json.dumps(document).encode()
    return len(raw).to_bytes(8, "little") + raw + rest if name in WITH_DATA else raw


@pytest.mark.cover(every=8)
@pytest.mark.parametrize("name", [name for name in TARGETS if name != "gguf"])
def test_values_by_structure(name: str) -> None:
    """A real document with some values replaced by anything."""
    documents = list(islice(documents_of(name), 3))
    assert documents
    spots = [(number, path) for number, (document, _) in enumerate(documents) for path in places(document)]

    @fuzzing
    @given(st.lists(st.tuples(st.sampled_from(spots), anything), min_size=1, max_size=3))
    def run(changes: list[tuple[tuple[int, tuple[Any, ...]], Any]]) -> None:
        number = changes[0][0][0]
        document, rest = documents[number]
        for (other, path), value in changes:
            if other == number:
                try:
                    document = with_value(document, path, value)
                except (KeyError, IndexError, TypeError):
                    continue  # an earlier change took the place away
        TARGETS[name](bytes_of(name, document, rest))

    run()


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("name", TARGETS)
def test_bytes(name: str) -> None:
    """A real file with bytes damaged at random."""
    known = seeds(name)

    @fuzzing
    @given(st.randoms(use_true_random=False), st.sampled_from(known))
    def run(dice: Any, data: bytes) -> None:
        TARGETS[name](damaged(dice, data))

    run()


@pytest.mark.cover(every=9)
@pytest.mark.parametrize("name", TARGETS)
def test_nothing_known(name: str) -> None:
    @fuzzing
    @given(st.one_of(st.binary(max_size=200), anything.map(lambda value: json.dumps(value).encode())))
    def run(data: bytes) -> None:
        TARGETS[name](data)

    run()


@pytest.mark.parametrize("name", TARGETS)
def test_the_kept_corpus(name: str) -> None:
    """Inputs that once reached something, or broke something."""
    assert (SEEDS / name).is_dir()
    for path in sorted((SEEDS / name).iterdir()):
        TARGETS[name](path.read_bytes())

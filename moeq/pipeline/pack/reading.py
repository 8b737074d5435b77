"""Parts of one expert, read into reused memory: what lies together in a file is read at once. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from moeq.pipeline.pack.buffers import Buffers
from moeq.pipeline.pack.inputs import WORD, InputFile, blocks_of
from moeq.pipeline.state.records import Bytes

#: File, first byte, byte after the last.
Place = tuple[str, int, int]


def read_places(inputs: Mapping[str, InputFile], places: Sequence[Place], buffers: Buffers, slot: int) -> list[Bytes]:
    """The bytes at these places, each from a multiple of `WORD` in memory on.

    Args:
        inputs: open files by name.
        places: what to read.
        buffers: memory of this worker.
        slot: which of its input buffers is free.

    Raises:
        MoeqError: `source.truncated`, `source.unreadable`.
    """
    order = sorted(range(len(places)), key=places.__getitem__)
    runs = [[order[0]]]
    for one, two in pairwise(order):
        together = places[one][0] == places[two][0] and places[one][2] == places[two][1]
        if together and (places[two][1] - places[runs[-1][0]][1]) % WORD == 0:
            runs[-1].append(two)
        else:
            runs.append([two])
    spans = [(places[run[0]][0], places[run[0]][1], places[run[-1]][2]) for run in runs]
    memory = buffers.take_many(f"input {slot}", [blocks_of(start, stop) for _, start, stop in spans])
    found: dict[int, Bytes] = {}
    for run, target, (file, first, last) in zip(runs, memory, spans, strict=True):
        data = inputs[file].read(target, first, last)
        for index in run:
            _, start, stop = places[index]
            found[index] = data[start - first : stop - first]
    return [found[index] for index in range(len(places))]

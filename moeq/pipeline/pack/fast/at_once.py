"""Pack several experts with one call: record the steps that pack the first one, and replay them for the others."""

from __future__ import annotations

from moeq.layouts.loops.tape import Tape, UnrecordedError
from moeq.pipeline.pack.fast.path import FastPath, Inputs, Outputs
from moeq.pipeline.pack.fast.scratch import Array


def record(path: FastPath, inputs: Inputs, outputs: Outputs, scratch: Array) -> Tape | None:
    """Pack an expert and record how; None if it cannot be recorded, or needs the reference path."""
    tape = Tape()
    traced = {key: tape.trace(inputs[key]) for key in path.reads}
    targets = [{part: tape.trace(memory) for part, memory in packed.items()} for packed in outputs]
    spare = tape.trace(scratch)
    try:
        with tape.recording():
            read = path.read(traced, spare)
            if read is None:
                return None
            path.pack(read, targets, spare)
    except UnrecordedError:
        return None
    return tape if tape.functions else None

"""Sizes of bitsandbytes' 4-bit matrices, which their headers do not have: read from the texts beside them."""

from __future__ import annotations

from moeq.checkpoint.source import Source
from moeq.errors import MoeqError
from moeq.schemes.bitsandbytes import MAX_STATE_BYTES, STATES, FourBitSizes, read_state


def with_sizes(source: Source) -> None:
    """Give every 4-bit matrix of a source its shape `[N, K / 2]` instead of `[N K / 2, 1]`.

    A repository is asked for the sizes of one matrix of each name and shape; `unpack` checks the others.

    Raises:
        MoeqError: `source.bad-data` if a text is none, `source.inconsistent` if it does not fit its matrix.
    """
    suffixes = tuple(f".{state}" for state in STATES)
    found = {}
    known: dict[object, FourBitSizes] = {}
    for name, entry in source.tensors.items():
        if not name.endswith(suffixes):
            continue
        weight_name = name[: name.index(".weight.quant_state.")] + ".weight"
        weight = source.tensors.get(weight_name)
        if weight is None or weight.dtype != "U8" or entry.nbytes > MAX_STATE_BYTES:
            raise MoeqError("source.inconsistent", f"{name} describes no matrix of bytes called {weight_name}")
        module = weight_name.removesuffix(".weight")
        key = (module.rpartition(".")[2], weight.shape) if source.remote else name
        if key not in known:
            known[key] = read_state(source.peek(entry), name)
        state = known[key]
        if 2 * weight.nbytes != state.rows * state.columns:
            detail = f"{weight_name} has {weight.nbytes:,} bytes for {state.rows} x {state.columns} codes of 4 bits"
            raise MoeqError("source.inconsistent", detail)
        found[weight_name] = weight._replace(shape=(state.rows, state.columns // 2))
    if found:
        source.tensors = {**source.tensors, **found}

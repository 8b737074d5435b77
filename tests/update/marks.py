"""What an update may write, by checkpoint and layout: the claims that a page shows and the random updates prove."""

from __future__ import annotations

from layouts.pairs import CASES, FP16_MXFP4, LOSSY, LOSSY_CASES

from moeq.layouts.registry import layout_class

PAIRS = [*CASES, *LOSSY_CASES]

#: Checkpoints whose rows share one scale or one order, so that nothing less than a projection is written.
_WHOLE = ("fp8-tensor", "modelopt-fp8", "actorder")
#: Checkpoints with one scale for all columns of a row.
_CHANNELS = ("w8a8", "fp8-channel")
#: Checkpoints whose gate and up share something that an update of one of them may change.
_JOINED = ("nvfp4", "actorder")


def written_kinds(name: str, layout: str) -> frozenset[str]:
    """Return the kinds of updates (`update.updates.KINDS`) that are written, whatever the other experts hold."""
    found = {"rows", "columns", "block", "projection", "pair"}

    def has(words: tuple[str, ...]) -> bool:
        return any(word in name for word in words)

    kind = layout_class(layout)
    if layout in LOSSY.get(name, ()):
        if kind.calibration_scope is not None or layout in FP16_MXFP4:
            return frozenset()
        if kind.rounds_jointly:
            return frozenset({"pair"})
    if has(_WHOLE):
        found -= {"rows", "columns", "block"}
    if has(_CHANNELS):
        found -= {"columns", "block"}
    if has(_JOINED) or getattr(kind, "scope", None) == "tensor":
        found -= {"projection"}
    return frozenset(found)

"""Write the table of updates: layouts by checkpoints, with what the random updates of the tests prove."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from layouts.pairs import EXACT, LOSSY
from update.marks import PAIRS, written_kinds

import moeq
from moeq.layouts.padding import plan_padding
from moeq.layouts.registry import LAYOUTS, get_layout
from moeq.model import Checkpoint
from pages.tables import NOTE, ROOT, table

CHECKPOINTS = ROOT / "tests" / "data" / "checkpoints"

#: Words for what may be written, by the kinds of updates that are.
_MARKS: Mapping[frozenset[str], str] = {
    frozenset({"rows", "columns", "block", "projection", "pair"}): "**all**",
    frozenset({"rows", "columns", "block", "pair"}): "**slices**",
    frozenset({"rows", "projection", "pair"}): "**rows**",
    frozenset({"projection", "pair"}): "**whole**",
    frozenset({"pair"}): "**w13**",
    frozenset(): "**some**",
}

#: Words for why a layout does not hold a checkpoint, by the code of `moeq.layouts.base.Problem`.
_REASONS = {
    "layout.element": "codes",
    "layout.scale-dtype": "scales",
    "layout.zero-point": "zeros",
    "layout.act-order": "order",
    "layout.bias": "bias",
    "layout.group-size": "groups",
    "layout.group-cut": "groups",
    "layout.k-multiple": "sizes",
    "layout.n-multiple": "sizes",
}

_INTRO = f"""
What `moeq.Writer.update` writes, by layout and by checkpoint of the tests. A mark is what
`tests/update/test_writer.py` proves: {len(PAIRS)} pairs, 125 random updates each in `make test-slow`, 1,000 in
`make night`, and the bytes of a fresh conversion of the updated checkpoint after them. A checkpoint may also be
updated by float weights.

| mark | written |
| --- | --- |
| **all** | `gate`, `up`, `down`, `w13`; any rows, and whole groups of columns, of one projection |
| **slices** | likewise, but `gate` or `up` alone only with the second-level scale that both have |
| **rows** | each projection and any rows of it; no columns, since a row has one scale |
| **whole** | each projection as a whole |
| **w13** | `w13` and `down` as a whole; `gate` or `up` alone only where nothing that both share changes |
| **some** | what leaves the common factor of all experts as it is, or loses no numbers in a layer that lost none |

`*`: the layout rounds numbers of this checkpoint, and was written with `--allow-lossy`. Slices take whole blocks of FP8
scales. Other cells say why the layout does not hold the checkpoint, so that there is nothing to update: *codes*,
*scales* (their type, or their number), *groups*, *zeros* (points), *order* (act-order, or none), *bias*, *sizes*
(those of the small checkpoint).
""".strip()


def matrix_page() -> str:
    """Return docs/reference/update-matrix.md."""
    checkpoints = {name: moeq.open(CHECKPOINTS / name) for name in EXACT}
    head = ["layout", *(f"`{name.rpartition('-')[0]}`" for name in checkpoints)]
    rows = ([f"`{layout}`", *_cells(layout, checkpoints.items())] for layout in LAYOUTS)
    marked = {layout for _, layout in PAIRS}
    unproven = ", ".join(f"`{layout}`" for layout in LAYOUTS if layout not in marked)
    rest = f"Without a checkpoint of the tests that fits, and so unproven: {unproven}."
    return "\n\n".join(["# What can be written in place", NOTE, _INTRO, table(head, rows), rest]) + "\n"


def _cells(layout: str, checkpoints: Iterable[tuple[str, Checkpoint]]) -> Iterable[str]:
    for name, checkpoint in checkpoints:
        if (name, layout) not in PAIRS:
            yield reason(layout, checkpoint)
        else:
            yield _MARKS[written_kinds(name, layout)] + ("*" if layout in LOSSY.get(name, ()) else "")


def reason(layout: str, checkpoint: Checkpoint) -> str:
    """Return the word for why a layout does not hold a checkpoint."""
    kind = get_layout(layout)
    padding = plan_padding(kind, checkpoint.spec(0, "w13"), checkpoint.spec(0, "w2"))
    problems = [*kind.problems(padding.w13), *kind.problems(padding.w2)]
    # Types and sizes fit, so what differs is in the numbers: several scales where the layout has one.
    return _REASONS[problems[0].code] if problems else "scales"

"""Read in PTX whether the warps of a warpgroup meet before one thread arrives, or starts a copy, for all."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_WORDS = re.compile(
    r"(?P<arrive>mbarrier\.arrive)|(?P<copy>cp\.async\.bulk\.tensor)|(?P<meet>bar(?:rier)?\.(?:warp\.|cta\.)?sync)|"
    r"(?P<touch>(?:ld|st)\.shared|ldmatrix|stmatrix|wgmma\.wait_group|cp\.async\.c[ag])"
)
_LABEL, _BRANCH = re.compile(r"^\s*(\$?\w+):"), re.compile(r"\bbra(?:\.uni)?\s+(\$?\w+)")


@dataclass
class _Block:
    """Lines without a label or branch between them, and the labels that may follow; None: the next block."""

    lines: list[tuple[int, str]] = field(default_factory=list)
    after: list[str | None] = field(default_factory=list)


def _blocks(ptx: str) -> dict[str, _Block]:
    found = {"": _Block()}
    name = ""
    for number, line in enumerate(ptx.splitlines(), 1):
        label, branch = _LABEL.match(line), _BRANCH.search(line)
        if label:
            found[name].after.append(label[1])
            name = label[1]
            found[name] = _Block()
        found[name].lines.append((number, line))
        if branch or re.search(r"\b(?:ret|exit);", line):
            if branch:
                found[name].after.append(branch[1])
            fresh = f"line {number}"
            if "@" in line.split("bra")[0]:
                found[name].after.append(fresh)
            name = fresh
            found[name] = _Block()
    return found


def unsynchronised(ptx: str) -> list[int]:
    """Lines where a thread arrives, or starts a copy, though its warps may not have met since they touched memory.

    Shared memory, that is: others of them could still be reading what is given away, or writing what is handed on.
    """
    blocks = _blocks(ptx)
    touched: dict[str, bool] = dict.fromkeys(blocks, False)
    found: set[int] = set()
    waiting = list(blocks)
    while waiting:
        name = waiting.pop(0)
        now = touched[name]
        for number, line in blocks[name].lines:
            for word in _WORDS.finditer(line):
                if word["meet"]:
                    now = False
                elif word["touch"]:
                    now = True
                elif now:
                    found.add(number)
        for after in blocks[name].after:
            if after in touched and now and not touched[after]:
                touched[after] = True
                waiting.append(after)
    return sorted(found)

"""Words and numbers for people."""

from __future__ import annotations


def human_bytes(count: int) -> str:
    """A byte count with a binary unit: `812 B`, `1.5 KiB`, `15.2 GiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"

"""Every thread of a process over time, as a picture: what it did, and what it waited for.

    python examples/bench/thread_trace.py OUT.svg COMMAND ...

The kernel is asked from outside, a hundred times a second (`/proc/PID/task/*/stat`): nothing in the traced program
changes, and `cp` can be looked at beside a conversion. Running on a processor, waiting for the disk, and sleeping
(for a lock, a queue, the interpreter) have a colour each; a thread that was to run and had no processor counts as
running. Linux only.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

EVERY_SECONDS = 0.01
COLOURS = {"R": "#2f7d4f", "D": "#c2561a", "S": "#d9dee4"}
NAMES = {"R": "running", "D": "waiting for the disk", "S": "sleeping"}


@dataclass
class Thread:
    """One thread.

    Attributes:
        name: as the kernel knows it.
        samples: `(seconds, state)`.
    """

    name: str
    samples: list[tuple[float, str]] = field(default_factory=list)

    def share(self, state: str) -> float:
        """Share of its samples in a state."""
        return sum(found == state for _, found in self.samples) / max(len(self.samples), 1)


def traced(command: list[str]) -> tuple[dict[int, Thread], float, int]:
    """Run a command; its threads by id, the seconds that it took, and its exit code."""
    process = subprocess.Popen(command)
    threads: dict[int, Thread] = {}
    started = time.monotonic()
    tasks = Path(f"/proc/{process.pid}/task")
    while process.poll() is None:
        now = time.monotonic() - started
        for task in tasks.glob("*/stat"):
            try:
                text = task.read_text()
            except OSError:
                continue  # it ended
            name, _, rest = text.partition("(")[2].rpartition(")")
            state = rest.split()[0]
            thread = threads.setdefault(int(task.parent.name), Thread(name))
            thread.samples.append((now, state if state in COLOURS else "S"))
        time.sleep(EVERY_SECONDS)
    return threads, time.monotonic() - started, process.returncode


def picture(threads: dict[int, Thread], seconds: float, title: str) -> str:
    """SVG: a row per thread, time to the right."""
    width, row, left, top = 1200, 16, 190, 60
    scale = width / max(seconds, 1e-3)
    parts = [f'<text x="8" y="20" font-size="15">{escaped(title)}: {seconds:.1f} s</text>']
    x = 8
    for state, name in NAMES.items():
        parts.append(f'<rect x="{x}" y="30" width="12" height="12" fill="{COLOURS[state]}"/>')
        parts.append(f'<text x="{x + 17}" y="41">{name}</text>')
        x += 40 + 7 * len(name)
    for number, (thread_id, thread) in enumerate(sorted(threads.items())):
        y = top + row * number
        label = f"{thread.name} {thread_id}: {100 * thread.share('R'):.0f} % running"
        parts.append(f'<text x="8" y="{y + 11}">{escaped(label)}</text>')
        for start, stop, state in runs(thread.samples):
            span = max((stop - start) * scale, 0.5)
            parts.append(
                f'<rect x="{left + start * scale:.1f}" y="{y}" width="{span:.1f}" height="{row - 3}" '
                f'fill="{COLOURS[state]}"/>'
            )
    height = top + row * len(threads) + 30
    ticks = range(0, int(seconds) + 1, max(1, int(seconds) // 12))
    parts += [f'<text x="{left + second * scale:.0f}" y="{height - 8}">{second} s</text>' for second in ticks]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 20}" height="{height}"'
    return f'{head} font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>' + "".join(
        [*parts, "</svg>\n"]
    )


def runs(samples: list[tuple[float, str]]) -> list[tuple[float, float, str]]:
    """Neighbouring samples of one state as one span."""
    found: list[tuple[float, float, str]] = []
    for at, state in samples:
        if found and found[-1][2] == state:
            found[-1] = (found[-1][0], at + EVERY_SECONDS, state)
        else:
            found.append((at, at + EVERY_SECONDS, state))
    return found


def escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def main() -> int:
    if len(sys.argv) < 3:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    threads, seconds, code = traced(sys.argv[2:])
    Path(sys.argv[1]).write_text(picture(threads, seconds, Path(sys.argv[2]).name), encoding="utf-8")
    for thread_id, thread in sorted(threads.items()):
        shares = ", ".join(f"{NAMES[state]} {100 * thread.share(state):.0f} %" for state in COLOURS)
        sys.stdout.write(f"{thread.name} {thread_id}: {shares}, from {thread.samples[0][0]:.2f} s\n")
    return code


if __name__ == "__main__":
    sys.exit(main())

"""Time every contender on the same inputs, cell by cell, each in a process of its own.

For a group (a format at a shape) all contenders set up. For a token count each is compared with the reference; those
that are right capture their calls and replay alternately, several rounds, every second round in reverse order.
Several GPUs share the groups; a group runs whole on one of them.
"""

from __future__ import annotations

import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from bench.peers.contenders import BY_FORMAT
from bench.shapes import FORMATS, H200, READ, SHAPES, Group, floor

#: Seconds to wait for an answer, and for a process to start; compiling takes longest.
PATIENCE = 240.0
#: Last lines of a process's output that its failure quotes.
LAST_LINES = 6

Document = dict[str, Any]


class Seat:
    """A contender's process on a GPU; `gone` says why there is none, `ended` whether it ended by itself.

    Args:
        gpu: value of `CUDA_VISIBLE_DEVICES`; None leaves the variable as it is.
        patience: seconds to wait for an answer before the process is ended.
    """

    def __init__(self, name: str, log: Path | None, gpu: str | None = None, patience: float = PATIENCE) -> None:
        self.name, self.gpu, self.patience = name, gpu, patience
        self.log = None if log is None else log.with_name(f"{log.stem}-{name}{log.suffix}")
        self.versions: dict[str, str] = {}
        self.absent: str | None = None
        self.gone: str | None = "not started"
        self.ended = False
        self.last_failure = ""

    def start(self) -> None:
        """Start the process, unless it runs or its packages are absent."""
        if self.absent or self.gone is None:
            return
        command = [sys.executable, "-m", "bench.peers.worker", self.name]
        errors = self.log.open("ab") if self.log else subprocess.DEVNULL
        environment = os.environ | ({} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": self.gpu})
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=(self.process, self.lines), daemon=True).start()
        self.ended = False
        answer = self._answer(PATIENCE)
        self.absent = answer.get("absent")
        self.gone = self.absent or answer.get("failed")
        self.versions = answer.get("ok", {}).get("versions", {})

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    def order(self, do: str, **given: Any) -> Document:
        """Give an order; return `{"ok": ...}` or `{"failed": reason}`."""
        if self.gone is not None:
            return {"failed": self.gone}
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **given}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return self._ended()
        return self._answer(self.patience)

    def _answer(self, patience: float) -> Document:
        try:
            line = self.lines.get(timeout=patience)
        except queue.Empty:
            self.process.kill()
            self.gone = f"no answer in {patience:.0f} s"
            return {"failed": self.gone}
        if not line:
            return self._ended()
        answer: Document = json.loads(line)
        self.last_failure = str(answer.get("failed", ""))
        if answer.get("ends"):
            self._ended()
        return answer

    def _ended(self) -> Document:
        self.ended = True
        after = f" after: {self.last_failure}" if self.last_failure else ""
        self.gone = f"its process ended (code {self.process.wait()}){after}"
        if self.log is not None and (said := self.log.read_text(errors="replace").split("\n")[-LAST_LINES:]):
            self.gone += "; it said: " + " / ".join(line.strip()[:300] for line in said if line.strip())
        return {"failed": self.gone}

    def stop(self) -> None:
        """End the process."""
        if self.gone is None and self.process.stdin is not None:
            self.process.stdin.close()
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.gone = self.gone or "stopped"


@dataclass(frozen=True)
class Options:
    """Options of a run.

    Attributes:
        seconds: time of the whole run, shared out over the groups as it goes.
        tokens: token counts, most telling first.
        rounds: rounds of each contender with cold weights.
        milliseconds: time of replays in a round.
        log: file for the contenders' own output.
        skip: `(format, contender)` pairs to leave out.
        routing: how tokens choose experts (`support.routing.ROUTINGS`).
    """

    seconds: float
    tokens: tuple[int, ...]
    rounds: int = 3
    milliseconds: float = 25.0
    log: Path | None = None
    skip: frozenset[tuple[str, str]] = frozenset()
    routing: str = "uniform"


def contenders_of(group: Group, names: Iterable[str], skip: frozenset[tuple[str, str]]) -> list[str]:
    """List the named contenders that take part in a group."""
    known = BY_FORMAT[group.format]
    return [name for name in names if name in known and (group.format, name) not in skip]


@dataclass
class Lane:
    """A GPU: a process for every contender, and the rates that it reaches (`Worker.peak`)."""

    seats: dict[str, Seat]
    gpu: str = ""
    peak: Document = field(default_factory=dict)

    @property
    def read(self) -> float:
        """Bytes a second that floors are counted with."""
        return float(self.peak["floor_read_tbs"]) * 1e12 if self.peak else READ[H200]


@dataclass
class Run:
    """Cells of a run so far; `save` is called after every group, by one lane at a time."""

    options: Options
    lanes: list[Lane]
    save: Callable[[Run], None]
    cells: list[Document] = field(default_factory=list)
    left_out: list[Document] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def remaining(self) -> float:
        """Seconds that are left."""
        return self.options.seconds - (time.monotonic() - self.began)


def together(seats: Iterable[Seat], action: Callable[[Seat], Any]) -> dict[str, Any]:
    """Do the same with several contenders at once; nothing that is timed is done so."""
    seats = list(seats)
    with ThreadPoolExecutor(max(1, len(seats))) as pool:
        return dict(zip((seat.name for seat in seats), pool.map(action, seats), strict=True))


def conduct(groups: list[Group], run: Run) -> None:
    """Time the groups as far as the seconds reach; each may take 1.4 times its even share of the rest."""
    waiting = list(groups)
    with ThreadPoolExecutor(len(run.lanes)) as pool:
        for lane in [pool.submit(_lane, lane, waiting, run) for lane in run.lanes]:
            lane.result()


def _lane(lane: Lane, waiting: list[Group], run: Run) -> None:
    """Time groups on one GPU as long as some are waiting."""
    together(lane.seats.values(), Seat.start)
    for seat in lane.seats.values():
        print(f"{lane.gpu} {seat.name:28s} {seat.gone or seat.versions}", flush=True)
    if "moeq" in lane.seats:
        lane.peak = lane.seats["moeq"].order("peak").get("ok", {})
        print(lane.gpu, "peak", lane.peak, flush=True)
    while True:
        with run.lock:
            if not waiting:
                break
            share = min(run.remaining, 1.4 * run.remaining * len(run.lanes) / len(waiting))
            group = waiting.pop(0)
        one_group(group, lane, run, time.monotonic() + share)
        with run.lock:
            run.save(run)
    together(lane.seats.values(), Seat.stop)


def one_group(group: Group, lane: Lane, run: Run, deadline: float) -> None:
    """Time all token counts of a format at a shape."""
    seats = [lane.seats[name] for name in contenders_of(group, lane.seats, run.options.skip)]
    together(seats, Seat.start)
    if time.monotonic() > deadline:
        run.left_out.append({**asdict(group), "tokens": list(run.options.tokens), "reason": "time"})
        return
    begin = time.monotonic()

    def set_up(seat: Seat) -> Document:
        return seat.order("open", **asdict(group), routing=run.options.routing)

    opened = together(seats, set_up)
    details = {name: answer.get("ok", answer) for name, answer in opened.items()}
    print(f"{group.format} {group.shape}: set up in {time.monotonic() - begin:.1f} s {details}", flush=True)
    for number, tokens in enumerate(run.options.tokens):
        if time.monotonic() > deadline:
            rest = list(run.options.tokens[number:])
            run.left_out.append({**asdict(group), "tokens": rest, "reason": "time"})
            print(f"{group.format} {group.shape}: no time for {rest}", flush=True)
            break
        lost = [seat for seat in seats if seat.ended]
        together(lost, lambda seat: seat.start())
        opened |= together(lost, set_up)
        cell = one_cell(group, tokens, seats, opened, run.options, lane.read)
        run.cells.append(cell | {"gpu": lane.gpu, "peak_tflops": lane.peak.get("bf16_tflops")})
        print(line(cell), flush=True)
    together(seats, lambda seat: seat.order("close"))


def one_cell(
    group: Group, tokens: int, seats: list[Seat], opened: Document, options: Options, read: float = READ[H200]
) -> Document:
    """Compare, capture and time one token count; floors count with `read` bytes a second."""
    found: dict[str, Document] = {}
    for name, answer in opened.items():
        if "failed" in answer:
            seat = next(seat for seat in seats if seat.name == name)
            found[name] = {"status": "absent" if seat.absent else "failed", "reason": answer["failed"]}
    ready = [seat for seat in seats if seat.name not in found]
    for name, answer in together(ready, lambda seat: seat.order("check", tokens=tokens)).items():
        right = answer.get("ok", {}).get("right")
        found[name] = {"status": "right" if right else "wrong" if right is False else "failed", **answer.get("ok", {})}
        if "failed" in answer:
            found[name]["reason"] = answer["failed"]
    hit = max((row["hit"] for row in found.values() if "hit" in row), default=0)
    timed = [seat for seat in ready if found[seat.name]["status"] == "right"]
    captured = together(timed, lambda seat: seat.order("capture", tokens=tokens, hit=hit))
    average_hit = hit
    for name, answer in captured.items():
        if "failed" in answer:
            found[name] |= {"status": "failed", "reason": answer["failed"]}
        else:
            found[name]["copies"] = answer["ok"]["copies"]
            average_hit = answer["ok"]["hit"]
    take_turns([seat for seat in timed if found[seat.name]["status"] == "right"], found, options)
    # Cold calls choose more or fewer experts than the first one.
    least = floor(FORMATS[group.format], SHAPES[group.shape], tokens, average_hit, read)
    return {
        **asdict(group),
        "tokens": tokens,
        "hit": average_hit,
        "floor_us": least.time,
        "memory_floor_us": least.memory,
        "compute_floor_us": least.compute,
        "contenders": found,
    }


def take_turns(seats: list[Seat], found: dict[str, Document], options: Options) -> None:
    """Time cold and hot calls in rounds; add the medians over the rounds to what was found."""
    for kind, turns in (("cold", options.rounds), ("hot", 1)):
        rounds: dict[str, list[Document]] = {seat.name: [] for seat in seats}
        failures: dict[str, str] = {}
        for number in range(turns):
            for seat in seats[:: 1 - 2 * (number % 2)]:
                answer = seat.order("time", kind=kind, milliseconds=options.milliseconds)
                if "ok" in answer:
                    rounds[seat.name].append(answer["ok"])
                else:
                    failures.setdefault(seat.name, answer["failed"])
        for name, rows in rounds.items():
            if len(rows) < turns:
                found[name] |= {"status": "failed", "reason": f"a replay failed: {failures[name]}"}
                continue
            medians = [row["median"] for row in rows]
            found[name][kind] = {
                "us": round(statistics.median(medians), 2),
                "rounds": [round(value, 2) for value in medians],
                "least": round(min(row["least"] for row in rows), 2),
                "replays": sum(row["replays"] for row in rows),
            }


def line(cell: Document) -> str:
    """Describe a cell on one line."""
    parts = []
    for name, row in cell["contenders"].items():
        parts.append(f"{name} {row['cold']['us']:.1f}" if "cold" in row else f"{name} {row['status']}")
    return (
        f"{cell['format']:14s} {cell['shape']:16s} M={cell['tokens']:5d} floor {cell['floor_us']:7.1f}  "
        + "  ".join(parts)
    )


@dataclass(frozen=True)
class Job:
    """Calls of a contender in some groups, which one process compiles."""

    name: str
    groups: tuple[Group, ...]
    tokens: tuple[int, ...]


#: Contenders that compile for every shape and number of tokens.
COMPILING = ("humming", "deep_gemm")


def jobs(groups: list[Group], names: list[str], options: Options) -> list[Job]:
    """Share out the compiling: two jobs a group for ours, one a shape for peers, one a group for COMPILING peers."""
    tokens = options.tokens
    halves = [half for half in (tokens[0::2], tokens[1::2]) if half]
    ours = [Job("moeq", (group,), half) for group in groups for half in halves if "moeq" in names]
    peers = []
    for shape in dict.fromkeys(group.shape for group in groups):
        for name in names:
            known = [g for g in groups if g.shape == shape and name in contenders_of(g, names, options.skip)]
            if known and name != "moeq":
                parts = [(group,) for group in known] if name in COMPILING else [tuple(known)]
                peers += [Job(name, part, tokens) for part in parts]
    return [job for both in zip_longest(ours, peers) for job in both if job]


def warm(
    work: list[Job], processes: int, seconds: float, log: Path | None, gpus: Sequence[str | None] = (None,)
) -> list[str]:
    """Compile everything in parallel processes before anything is timed; return what failed."""
    deadline = time.monotonic() + seconds

    def one(numbered: tuple[int, Job]) -> list[str]:
        number, job = numbered
        # The driver may take minutes to compile a peer's first kernel.
        seat, failed = Seat(job.name, log, gpus[number % len(gpus)], max(PATIENCE, seconds)), []
        seat.start()
        for group in job.groups:
            answer = seat.order("open", **asdict(group))
            for count in job.tokens:
                if time.monotonic() > deadline:
                    answer = {"failed": "out of time"}
                if "failed" not in answer:
                    answer = seat.order("warm", tokens=count)
            if "failed" in answer and not seat.absent:
                failed.append(f"{job.name} {group.format} {group.shape}: {answer['failed']}")
        seat.stop()
        return failed

    with ThreadPoolExecutor(processes) as pool:
        return [reason for failed in pool.map(one, enumerate(work)) for reason in failed]

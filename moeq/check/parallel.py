"""Check several layers in parallel on a CPU, in one process each, since Triton's interpreter uses one core."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace

import torch

from moeq.check.layer_check import LayerCheck, check_layer
from moeq.check.results import LayerReport
from moeq.check.sampling import expert_weights
from moeq.model import open as open_checkpoint
from moeq.spelling import for_shell, spelled

#: Least number of weights of a layer that make up for the start of a process, which imports torch and triton.
MIN_WEIGHTS = 4 * 2**20


def choose_jobs(checks: Sequence[LayerCheck], asked: int | None) -> int:
    """Choose the number of processes; 1 means only this process."""
    if len(checks) < 2 or checks[0].device.type != "cpu":
        return 1
    if asked is not None:
        return max(1, min(asked, len(checks)))
    return min(os.cpu_count() or 1, len(checks)) if min(map(_work, checks)) >= MIN_WEIGHTS else 1


def _work(check: LayerCheck) -> int:
    """Return the number of weights that the kernels decode for a check."""
    return expert_weights(check.entry) * len(check.sample.experts)


def check_layers(checks: Sequence[LayerCheck], jobs: int, advance: Callable[[str], None]) -> list[LayerReport]:
    """Call `check_layer` for every layer and return the reports in order; each job has a process of its own."""
    if jobs == 1:
        with _few_threads(checks):
            return [check_layer(check, advance) for check in checks]
    others = set(multiprocessing.active_children())
    # Spawned, since torch's threads do not survive a fork. Each process opens the checkpoints again.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _end_at_interrupts) as pool:
        threads = max(1, (os.cpu_count() or 1) // jobs)
        try:
            with _interrupts_blocked():
                futures = [pool.submit(_in_process, *_sent(check), threads) for check in checks]
            for future in as_completed(futures):
                for label in future.result()[1]:
                    advance(label)
            return [future.result()[0] for future in futures]
        except BaseException:  # the reports of the other layers are not needed any more
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.kill()  # SIGTERM may still be blocked there
            raise


#: Signals that interrupt a command.
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C and SIGTERM in this thread and in the processes that it starts, until they unblock them.

    A terminal sends Ctrl-C to all processes. Processes that still import torch, or have no task yet, would print
    tracebacks.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_at_interrupts() -> None:
    """Let Ctrl-C and SIGTERM end the process that calls this, without a message."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTS)


@contextmanager
def _few_threads(checks: Sequence[LayerCheck]) -> Iterator[None]:
    """Use one thread for small experts on a CPU: waking threads would take longer than their work."""
    before = torch.get_num_threads()
    small = all(check.device.type == "cpu" and _work(check) < MIN_WEIGHTS for check in checks)
    torch.set_num_threads(1 if small else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


#: Names and revisions of the converted checkpoint and the reference, by which a process opens them again.
_Places = list[tuple[str, str | None]]


def _sent(check: LayerCheck) -> tuple[LayerCheck, _Places, bool]:
    """Return a check in a form that can be sent: without checkpoints, with their places and the spelling of options."""
    places = [(one.source.name, one.source.revision) for one in (check.converted, check.reference)]
    return replace(check, converted=None, reference=None), places, for_shell()  # type: ignore[arg-type]


def _in_process(check: LayerCheck, places: _Places, shell: bool, threads: int) -> tuple[LayerReport, list[str]]:
    """Check a layer in this process; return the report and the labels of its progress."""
    from moeq_kernels import interpreter

    torch.set_num_threads(threads)
    interpreter.enable()
    opened = {place: open_checkpoint(*place) for place in set(places)}
    labels: list[str] = []
    check = replace(check, converted=opened[places[0]], reference=opened[places[1]])
    with spelled(for_shell=shell):
        return check_layer(check, labels.append), labels

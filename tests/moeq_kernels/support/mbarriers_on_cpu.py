"""mbarriers of a Gluon kernel on a CPU, where warps are threads, and what a listener is told of them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from support.gluon_on_cpu import Shared


class Observed:
    """Told what warps do with shared memory and mbarriers, if it has a listener: see `handover`."""

    listener: Any = None
    warps = threading.local()

    def __call__(self, what: str, shared: Shared | None = None, bar: Shared | None = None, number: Any = 0) -> None:
        if self.listener is not None:
            self.listener(getattr(self.warps, "partition", None), what, shared, bar, int(number))


seen = Observed()


def listen(listener: Any) -> None:
    """From now on `listener` is told what kernels do; None: nobody is."""
    seen.listener = listener


class Barriers:
    """mbarriers of one program, by address."""

    def __init__(self) -> None:
        self._states: dict[int, list[int]] = {}
        self._changed = threading.Condition()
        self._running = 1
        self._waiting: dict[int, tuple[list[int], int]] = {}  # by thread: equal states are of different barriers

    def _count(self, shared: Shared, arrivals: int, moved: int) -> None:
        with self._changed:
            state = self._states[shared.memory.data_ptr()]
            state[1] -= arrivals
            state[2] += moved
            assert state[1] >= 0, "more arrivals than an mbarrier counts"
            if state[1] == 0 and state[2] == 0:
                state[1], state[3] = state[0], state[3] ^ 1
                self._changed.notify_all()

    def init(self, shared: Shared, count: int) -> None:
        seen("init", None, shared, count)
        self._states[shared.memory.data_ptr()] = [count, count, 0, 0]  # arrivals of a phase, missing ones, bytes, phase

    def expect(self, shared: Shared, moved: Any, pred: Any = True) -> None:
        if pred:
            seen("expect", None, shared, moved)
            self._count(shared, 1, int(moved))

    def arrive(self, shared: Shared, count: int = 1, pred: Any = True) -> None:
        if pred:
            seen("arrive", None, shared, count)
            self._count(shared, count, 0)

    def wait(self, shared: Shared, phase: Any) -> None:
        seen("wait", None, shared, phase)
        waiting = (self._states[shared.memory.data_ptr()], int(phase))
        with self._changed:
            self._waiting[threading.get_ident()] = waiting
            self._changed.notify_all()
            try:
                assert self._changed.wait_for(lambda: self._passed(waiting) or self._is_stuck(), timeout=120)
                assert self._passed(waiting), "waits forever"
            finally:
                del self._waiting[threading.get_ident()]

    @staticmethod
    def _passed(waiting: tuple[list[int], int]) -> bool:
        return waiting[0][3] != waiting[1]

    def _is_stuck(self) -> bool:
        return len(self._waiting) >= self._running and not any(map(self._passed, self._waiting.values()))

    def run_on(self, more: int) -> None:
        """So many partitions more, or fewer, go on running."""
        with self._changed:
            self._running += more
            self._changed.notify_all()

    def copied(self, shared: Shared, moved: int) -> None:
        """Bytes have come."""
        self._count(shared, 0, -moved)

    def end(self) -> None:
        """The program is over: all bytes that an mbarrier expects have come, and no others."""
        assert all(state[2] == 0 for state in self._states.values()), "bytes that did not come, or were not expected"

    @staticmethod
    def MBarrierLayout() -> None:
        return None

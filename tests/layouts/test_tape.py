"""Loops recorded on some memory and run again on other memory."""

from __future__ import annotations

from threading import Thread

import numpy as np
import pytest

pytest.importorskip("numba")

from moeq.layouts.loops import compare, transpose
from moeq.layouts.loops.native import code_lock
from moeq.layouts.loops.tape import Player, Tape, Traced, UnrecordedError


def memory(count: int, seed: int) -> list[np.ndarray]:
    """Flat bytes at multiples of 8."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, 4096, np.uint8) for _ in range(count)]


def played(work, count: int = 3) -> None:
    """Record work from one piece of memory to another, and compare what it does to others when it is played."""
    tape = Tape()
    with tape.recording():
        work(*(tape.trace(one) for one in memory(2, 99)))
    pairs, wanted = [memory(2, seed) for seed in range(count)], [memory(2, seed) for seed in range(count)]
    addresses = np.array([[one.ctypes.data for one in pair] for pair in pairs], np.int64)
    player = Player(tape, count)
    assert player.play(addresses[:1]) == [True]  # fewer than it holds
    assert player.play(addresses[1:]) == [True] * (count - 1)
    for found, pair in zip(pairs, wanted, strict=True):
        work(*pair)
        assert all(np.array_equal(one, other) for one, other in zip(found, pair, strict=True))


def words(memory: np.ndarray, rows: int, columns: int) -> np.ndarray:
    return memory[: 4 * rows * columns].view(np.uint32).reshape(rows, columns)


@pytest.mark.parametrize("columns", [1, 5, 16, 33])
def test_copies_are_played(columns: int) -> None:
    played(lambda one, two: np.copyto(words(two, 6, columns), words(one, 6, columns)))
    played(lambda one, two: np.copyto(words(two, 6, columns)[1::2], words(one, 6, columns)[::2]))
    played(lambda one, two: np.copyto(words(two, 6, columns)[:, ::2], words(one, 6, columns)[:, ::2]))
    played(lambda one, two: np.copyto(words(two, 6, columns).reshape(2, 3, -1), words(one, 2, columns)[:, None]))
    played(lambda one, two: transpose.copy(words(one, columns, 6).T, words(two, 6, columns)))


def test_fills_and_flips_are_played() -> None:
    def work(one: np.ndarray, two: np.ndarray) -> None:
        words(two, 6, 40)[:, 3:] = 0
        words(two, 6, 40)[::2].fill(0)
        np.bitwise_xor(words(one, 6, 40), np.uint32(0x80808080), out=words(two, 7, 40)[1:])
        np.bitwise_xor(one[7:100], np.uint8(0x11), out=one[7:100])

    played(work)


def test_constants_are_read_where_they_are() -> None:
    table = np.arange(240, dtype=np.uint32).reshape(6, 40)
    tape = Tape()
    (one,) = memory(1, 0)
    one[:960] = table.view(np.uint8).reshape(-1)
    with tape.recording():
        assert compare.equal_rows(table, words(tape.trace(one), 6, 40))
    other = one.copy()
    other[17] ^= 1
    player = Player(tape, 3)
    del table
    addresses = np.array([[memory.ctypes.data] for memory in (one, other, one)], np.int64)
    assert player.play(addresses) == [True, False, True], "work that takes another way is not done"


@pytest.mark.parametrize(
    "work",
    [
        lambda one: one[3],
        lambda one: one[np.array([1])],
        lambda one: int(one[:1]),
        lambda one: one + 1,
        lambda one: (one == 0).all(),
        lambda one: one.any(),
        lambda one: one.tolist(),
        lambda one: list(one),
        lambda one: np.copyto(one[:4], np.zeros(4, np.uint8)),
        lambda one: np.copyto(one[:4], one[4:8].view(np.int8)),
        lambda one: np.copyto(np.empty((2, 4), np.uint8)[:, ::2], one[:4].reshape(2, 2)),  # all runs would share it
        lambda one: one.fill(3),
        lambda one: np.bitwise_xor(one[:4].view(np.uint16), np.uint16(0x1234), out=one[:4].view(np.uint16)),
        lambda one: np.bitwise_xor(one[:4], one[4:8], out=one[:4]),
        lambda one: np.bitwise_xor(one[:4], np.uint16(0x1111), out=one[:8].view(np.uint16)),
        lambda one: compare.is_zero(one[:64].reshape(8, 8)[:, :4].reshape(1, -1)),  # a copy
        lambda one: compare.is_zero(np.asarray(one)[8:64].reshape(1, -1)),  # the same memory, no longer traced
        lambda one: one[:64].reshape(2, 2, 4, 4)[:, :, ::2].fill(0),
    ],
)
def test_what_no_tape_repeats_is_refused(work) -> None:
    tape = Tape()
    with pytest.raises(UnrecordedError), tape.recording():
        work(tape.trace(memory(1, 0)[0]))
    assert not isinstance(memory(1, 0)[0], Traced)


def test_one_thread_at_a_time_adds_machine_code() -> None:
    """Two threads that begin at once would make two engines, and free the code of one."""
    tape, (one,) = Tape(), memory(1, 0)
    with tape.recording():
        compare.is_zero(tape.trace(one).reshape(1, -1))
    thread = Thread(target=Player, args=(tape, 1))
    with code_lock:
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
    thread.join(60)
    assert not thread.is_alive()


def test_memory_of_another_tape_is_refused() -> None:
    one, two, three = memory(3, 0)
    other, tape = Tape(), Tape()
    views = [other.trace(memory) for memory in (one, two)]
    tape.trace(three)
    for view in views:  # a number that the tape has, and one that it has not
        with pytest.raises(UnrecordedError, match="another tape"), tape.recording():
            compare.is_zero(view[:64].reshape(1, -1))


def test_nothing_is_recorded_outside() -> None:
    tape, (one,) = Tape(), memory(1, 0)
    with pytest.raises(ZeroDivisionError), tape.recording():
        assert 1 / 0
    compare.is_zero(one.reshape(1, -1))
    assert tape.functions == []

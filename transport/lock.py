"""The mutation lock, and sections that can be undone.

A section is the only place where a segment's shared structures change. It keeps a journal of old values in the
segment itself: before each store it notes the address and what was there. Whoever takes the lock and finds a
section that did not end (its process died, or raised) first puts the old values back, newest first. Undoing
twice is undoing once, so the repairer may die as well.

    take the lock -> repair() if an intent stands -> SEQUENCE odd -> intent -> stores -> intent cleared
                                                                              (the commit) -> SEQUENCE even

The kernel lets go of a dead process's flock; the threads of one process are kept apart by a threading.Lock.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum

from pdctl.transport.errors import CorruptSegmentError, DeadlineError
from pdctl.transport.layout import H, Layout

LOCK_DEADLINE_S = 10.0
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3


class Op(IntEnum):
    """What a section is for; stands in the intent."""

    NONE = 0
    ATTACH = 1
    DETACH = 2
    SUBMIT = 3
    CLAIM = 4
    GROW = 5
    PUBLISH = 6
    FINISH = 7
    PREEMPT = 8
    CANCEL = 9
    RECYCLE = 10
    REAP = 11
    CLOSE = 12
    CONDEMN = 13


class Rollback(Exception):  # noqa: N818  (not an error)
    """Raised inside a section to undo it and leave it without an error."""


class Section:
    """The stores of one operation. `set` is the only way to change what others rely on.

    What nobody reads before a later `set` makes it reachable (a private block's tokens) and the ring, which is for
    people, are stored plainly.
    """

    __slots__ = ("_capacity", "_journal", "count", "words")

    def __init__(self, words: memoryview, layout: Layout) -> None:
        self.words = words
        self._journal = layout.journal
        self._capacity = layout.geometry.journal_entries
        self.count = 0

    def set(self, address: int, value: int) -> None:
        """Store one word; undone if the section does not end.

        Args:
            address: word offset in the segment.
            value: unsigned, 64 bits.
        """
        count = self.count
        if count >= self._capacity:
            raise CorruptSegmentError(f"section of more than {self._capacity} stores: the journal is full")
        words = self.words
        entry = self._journal + 2 * count
        words[entry] = address
        words[entry + 1] = words[address]
        words[H.INTENT_COUNT] = self.count = count + 1  # SYNC: journal
        words[address] = value

    def add(self, address: int, delta: int) -> None:
        self.set(address, self.words[address] + delta)


class FileLock:
    """flock(2) on the segment's file, tried without blocking.

    Asks for the descriptor each time: once it is closed, its number belongs to another file.
    """

    def __init__(self, owned: OwnedFd) -> None:
        self._owned = owned

    def try_acquire(self) -> bool:
        try:
            fcntl.flock(self._owned.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        fcntl.flock(self._owned.fd, fcntl.LOCK_UN)


class NoFileLock:
    """For anonymous mappings, which no other process has."""

    def try_acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


class MutationLock:
    """One a process and segment. See the module's text for the protocol.

    Attributes:
        deadline_s: how long a section waits for the lock if it does not say.
    """

    def __init__(self, words: memoryview, layout: Layout, file_lock: FileLock | NoFileLock) -> None:
        self._words = words
        self._layout = layout
        self._file_lock = file_lock
        self._thread_lock = threading.Lock()
        self.slot = -1
        self.incarnation = 0
        self.deadline_s = LOCK_DEADLINE_S
        self.on_acquired: Callable[[], None] | None = None

    @contextmanager
    def section(self, op: Op, row: int = -1, *, deadline_s: float | None = None) -> Iterator[Section]:
        """Run an operation that happens wholly or not at all.

        An exception leaves the intent standing: the next section, in whichever process, undoes it first.
        `Rollback` undoes at once and is swallowed.

        Raises:
            DeadlineError: the lock did not come free; names who holds it.
        """
        self._acquire(self.deadline_s if deadline_s is None else deadline_s)
        try:
            if self.on_acquired is not None:
                self.on_acquired()
            words = self._words
            repair(words, self._layout)
            words[H.LOCK_SLOT] = self.slot + 1
            words[H.LOCK_PID] = os.getpid()
            words[H.INTENT_COUNT] = 0
            words[H.INTENT_SLOT] = self.slot + 1
            words[H.INTENT_INCARNATION] = self.incarnation
            words[H.INTENT_ROW] = row + 1
            words[H.SEQUENCE] = (words[H.SEQUENCE] + 1) | 1  # SYNC: snapshot
            words[H.INTENT_OP] = op
            section = Section(words, self._layout)
            try:
                yield section
            except Rollback:
                undo(words, self._layout)
            words[H.INTENT_OP] = Op.NONE  # SYNC: section-commit
            words[H.LOCK_SECTIONS] += 1
            words[H.LOCK_PID] = 0
            words[H.SEQUENCE] = (words[H.SEQUENCE] + 1) & ~1  # SYNC: snapshot
        finally:
            self._file_lock.release()
            self._thread_lock.release()

    def _acquire(self, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        if not self._thread_lock.acquire(timeout=deadline_s):
            raise DeadlineError(f"the segment's lock: another thread of this process held it for {deadline_s} s")
        pause = _FIRST_PAUSE_S
        try:
            while not self._file_lock.try_acquire():
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"the segment's lock: process {self._words[H.LOCK_PID]} "
                        f"(slot {self._words[H.LOCK_SLOT] - 1}) held it for {deadline_s} s"
                    )
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        except BaseException:  # a signal handler's, too
            self._thread_lock.release()
            raise


def undo(words: memoryview, layout: Layout) -> None:
    """Put back the old values of the section under way, newest first. Idempotent."""
    for index in range(words[H.INTENT_COUNT] - 1, -1, -1):
        entry = layout.journal + 2 * index
        words[words[entry]] = words[entry + 1]


def repair(words: memoryview, layout: Layout) -> Op:
    """Undo the section that did not end, if there is one. Call with the lock held.

    Returns:
        The operation undone; NONE if the segment was in order.

    Raises:
        CorruptSegmentError: the journal points outside the segment.
    """
    op = words[H.INTENT_OP]
    if op == Op.NONE:
        return Op.NONE
    if op not in set(Op):
        raise CorruptSegmentError(f"intent: operation {op} found, expected one of 1 to {max(Op)}")
    count = words[H.INTENT_COUNT]
    if count > layout.geometry.journal_entries:
        raise CorruptSegmentError(
            f"journal: {count} entries found, at most {layout.geometry.journal_entries} expected"
        )
    for index in range(count):
        if words[layout.journal + 2 * index] >= layout.meta_words:
            raise CorruptSegmentError(f"journal entry {index}: address outside the segment")
    undo(words, layout)
    words[H.REPAIRS] += 1
    words[H.INTENT_OP] = Op.NONE
    return Op(op)


# A forked child shares its parent's open file, so also its flock: it must not hold the descriptor.
_open_fds: weakref.WeakSet[OwnedFd] = weakref.WeakSet()


class OwnedFd:
    """A descriptor that forked children close at once."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        _open_fds.add(self)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _close_in_child() -> None:
    for owned in list(_open_fds):
        owned.close()


os.register_at_fork(after_in_child=_close_in_child)

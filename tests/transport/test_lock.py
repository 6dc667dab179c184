from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from pdctl.transport.errors import CorruptSegmentError, DeadlineError
from pdctl.transport.layout import H, Layout
from pdctl.transport.lock import MutationLock, NoFileLock, Op, Rollback, repair, undo
from pdctl.transport.mapping import unlink_if_orphaned
from pdctl.transport.names import SegmentName
from pdctl.transport.segment import Role, Segment

Fork = Callable[[Callable[[Callable[[object], None]], None]], Any]
# Words that nothing else stores to: header words far behind the counters.
A, ANOTHER = 500, 501


@pytest.fixture
def segment(kit: ModuleType) -> Segment:
    made = Segment.anonymous(kit.geometry())
    made.words[A], made.words[ANOTHER] = 10, 20
    return made


# --- one process -------------------------------------------------------------------------------------------


def test_a_section_that_ends_stays(segment: Segment) -> None:
    words = segment.words
    with segment.lock.section(Op.GROW, 3) as section:
        section.set(A, 11)
        section.add(ANOTHER, -1)
        assert words[H.INTENT_OP] == Op.GROW
        assert words[H.INTENT_ROW] == 4
        assert words[H.SEQUENCE] % 2 == 1
        assert words[H.LOCK_PID] == os.getpid()
    assert (words[A], words[ANOTHER]) == (11, 19)
    assert words[H.INTENT_OP] == Op.NONE
    assert words[H.SEQUENCE] % 2 == 0
    assert words[H.LOCK_PID] == 0
    with segment.lock.section(Op.GROW):
        assert (words[A], words[ANOTHER]) == (11, 19)
    assert words[H.REPAIRS] == 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_the_intent_and_the_next_section_undoes_it(
    segment: Segment, error: type[BaseException]
) -> None:
    words = segment.words
    with pytest.raises(error), segment.lock.section(Op.PUBLISH) as section:
        section.set(A, 11)
        section.set(A, 12)
        section.add(ANOTHER, 5)
        raise error
    assert words[H.INTENT_OP] == Op.PUBLISH
    assert words[H.SEQUENCE] % 2 == 1
    assert (words[A], words[ANOTHER]) == (12, 25)
    with segment.lock.section(Op.GROW):
        assert (words[A], words[ANOTHER]) == (10, 20)
    assert words[H.REPAIRS] == 1
    assert words[H.INTENT_OP] == Op.NONE


def test_rollback_undoes_at_once_and_is_no_error(segment: Segment) -> None:
    with segment.lock.section(Op.CLAIM) as section:
        section.set(A, 11)
        section.set(A, 12)
        raise Rollback
    assert segment.words[A] == 10
    assert segment.words[H.INTENT_OP] == Op.NONE
    assert segment.words[H.SEQUENCE] % 2 == 0
    with segment.lock.section(Op.CLAIM):
        pass
    assert segment.words[H.REPAIRS] == 0


def test_the_sequence_only_rises(segment: Segment) -> None:
    """A viewer that saw the same even number twice saw no section in between, whatever died."""
    seen = [segment.words[H.SEQUENCE]]
    for error in (None, ValueError, None, Rollback, ValueError, ValueError, None):
        try:
            with segment.lock.section(Op.GROW):
                seen.append(segment.words[H.SEQUENCE])
                assert seen[-1] % 2 == 1
                if error:
                    raise error
        except ValueError:
            continue
        seen.append(segment.words[H.SEQUENCE])
        assert seen[-1] % 2 == 0
    assert seen == sorted(set(seen))


def test_a_full_journal_is_an_error_and_undone(kit: ModuleType, segment: Segment) -> None:
    room = segment.geometry.journal_entries
    with segment.lock.section(Op.GROW) as section:
        for number in range(room):
            section.set(A, number)
    assert segment.words[A] == room - 1
    with (
        pytest.raises(CorruptSegmentError, match=rf"more than {room} stores"),
        segment.lock.section(Op.GROW) as section,
    ):
        for _ in range(room + 1):
            section.add(A, 1)
    with segment.lock.section(Op.GROW):
        assert segment.words[A] == room - 1


def test_a_bad_value_is_not_noted_wrongly(segment: Segment) -> None:
    with pytest.raises((ValueError, OverflowError)), segment.lock.section(Op.GROW) as section:
        section.set(ANOTHER, 21)
        section.add(A, -11)
    with segment.lock.section(Op.GROW):
        assert (segment.words[A], segment.words[ANOTHER]) == (10, 20)


@pytest.mark.parametrize("what", ["count", "address"])
def test_a_damaged_journal_is_refused_untouched(segment: Segment, what: str) -> None:
    with pytest.raises(ValueError), segment.lock.section(Op.GROW) as section:
        section.set(A, 11)
        raise ValueError
    words, layout = segment.words, segment.layout
    if what == "count":
        words[H.INTENT_COUNT] = layout.geometry.journal_entries + 1
    else:
        words[layout.journal] = layout.meta_words
    before = bytes(words)
    with pytest.raises(CorruptSegmentError, match="journal"), segment.lock.section(Op.GROW):
        raise AssertionError("the section began")
    assert bytes(words) == before


@pytest.mark.parametrize("stores", [1, 2, 7])
def test_whoever_repairs_may_die_as_well(kit: ModuleType, segment: Segment, stores: int) -> None:
    """Again and again, a store later each time; the last one finds everything as it was."""
    layout, words = segment.layout, segment.words
    before = (words[A], words[ANOTHER])
    with pytest.raises(ValueError), segment.lock.section(Op.GROW) as section:
        for number in range(stores):
            section.add((A, ANOTHER)[number % 2], 1)
            section.set(A, number)
        raise ValueError
    stood, deaths = bytes(words), 0
    while True:
        words[:] = memoryview(stood).cast("Q")
        dying = kit.DyingWords(words, die_at=deaths + 1)
        try:
            repair(dying, layout)
        except kit.Died:
            deaths += 1
            for _ in range(2):
                try:
                    repair(kit.DyingWords(words, die_at=deaths), layout)
                except kit.Died:
                    pass
            with segment.lock.section(Op.GROW):
                assert (words[A], words[ANOTHER]) == before
        else:
            break
    assert deaths == 2 * stores + 2
    assert (words[A], words[ANOTHER]) == before


def test_death_at_any_store_of_a_section_leaves_all_or_nothing(kit: ModuleType, segment: Segment) -> None:
    layout, words = segment.layout, segment.words
    stood, outcomes, k = bytes(words), [], 0
    while True:
        k += 1
        words[:] = memoryview(stood).cast("Q")
        lock = MutationLock(kit.DyingWords(words, die_at=k), layout, NoFileLock())
        done = False
        try:
            with lock.section(Op.GROW) as section:
                section.set(A, 11)
                section.set(ANOTHER, 21)
                section.set(A, 12)
            done = True
        except kit.Died:
            pass
        with segment.lock.section(Op.GROW):
            outcomes.append((words[A], words[ANOTHER]))
        if done:
            break
    assert set(outcomes) == {(10, 20), (12, 21)}
    assert outcomes == sorted(outcomes), "once committed, committed"
    assert len(outcomes) > 20


def test_undo_of_random_sections_restores_every_word(segment: Segment) -> None:
    random_, words = random.Random(1), segment.words
    for _ in range(20):
        before = words[A : A + 10].tolist()
        with segment.lock.section(Op.GROW) as section:
            for _ in range(random_.randrange(50)):
                section.set(A + random_.randrange(10), random_.getrandbits(64))
            undo(words, segment.layout)
            raise Rollback
        assert words[A : A + 10].tolist() == before


def test_a_failing_lock_call_does_not_lock_out_the_process(segment: Segment) -> None:
    """A signal handler may raise while the lock is waited for."""

    class Interrupted(NoFileLock):
        def try_acquire(self) -> bool:
            raise KeyboardInterrupt

    lock = MutationLock(segment.words, segment.layout, Interrupted())
    with pytest.raises(KeyboardInterrupt), lock.section(Op.GROW):
        pass
    lock._file_lock = NoFileLock()

    def fail() -> None:
        raise SystemExit

    lock.on_acquired = fail
    with pytest.raises(SystemExit), lock.section(Op.GROW):
        pass
    lock.on_acquired = None
    with lock.section(Op.GROW, deadline_s=0.01) as section:
        section.set(A, 11)
    assert segment.words[A] == 11


# --- threads -----------------------------------------------------------------------------------------------


def test_threads_of_a_process_wait_for_each_other(shared: Segment) -> None:
    shared.words[A] = 0

    def count() -> None:
        for _ in range(200):
            with shared.lock.section(Op.GROW) as section:
                section.set(A, shared.words[A] + 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared.words[A] == 800
    assert shared.words[H.REPAIRS] == 0


def test_a_deadline_within_the_process_says_so(shared: Segment) -> None:
    caught: list[DeadlineError] = []

    def wait() -> None:
        try:
            with shared.lock.section(Op.GROW, deadline_s=0.02):
                pass
        except DeadlineError as error:
            caught.append(error)

    with shared.lock.section(Op.GROW):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
    assert "another thread of this process" in caught[0].message


# --- processes ---------------------------------------------------------------------------------------------


def hold(name: SegmentName, store: bool = False) -> Callable[[Callable[[object], None]], None]:
    """A process that stays in a section."""

    def body(say: Callable[[object], None]) -> None:
        segment = Segment.open(name)
        me = segment.attach(Role.DECODE)
        with segment.lock.section(Op.PUBLISH) as section:
            if store:
                section.set(A, 11)
                section.set(ANOTHER, 21)
            say(me.slot)
            while True:
                signal.pause()

    return body


def test_processes_wait_for_each_other(shared: Segment, name: SegmentName, fork: Fork) -> None:
    shared.words[A] = 0

    def count(say: Callable[[object], None]) -> None:
        segment = Segment.open(name)
        for _ in range(300):
            with segment.lock.section(Op.GROW) as section:
                section.set(A, segment.words[A] + 1)

    children = [fork(count) for _ in range(3)]
    assert [child.wait() for child in children] == [0, 0, 0]
    assert shared.words[A] == 900


def test_a_deadline_names_the_holder(shared: Segment, name: SegmentName, fork: Fork) -> None:
    child = fork(hold(name))
    slot = child.line()
    for _ in range(2):
        with (
            pytest.raises(DeadlineError, match=rf"process {child.pid} \(slot {slot}\) held it for 0.02 s"),
            shared.lock.section(Op.GROW, deadline_s=0.02),
        ):
            pass
    child.kill()
    with shared.lock.section(Op.GROW, deadline_s=5):
        pass


def test_a_process_killed_inside_a_section_is_undone_by_the_next(
    shared: Segment, name: SegmentName, fork: Fork
) -> None:
    shared.words[A], shared.words[ANOTHER] = 10, 20
    child = fork(hold(name, store=True))
    child.line()
    assert (shared.words[A], shared.words[ANOTHER]) == (11, 21)
    child.kill()
    with shared.lock.section(Op.GROW, deadline_s=5):
        assert (shared.words[A], shared.words[ANOTHER]) == (10, 20)
    assert shared.words[H.REPAIRS] == 1


def test_an_exception_in_one_process_is_undone_by_another(shared: Segment, name: SegmentName, fork: Fork) -> None:
    shared.words[A] = 10
    with pytest.raises(ValueError), shared.lock.section(Op.GROW) as section:
        section.set(A, 11)
        raise ValueError

    def body(say: Callable[[object], None]) -> None:
        other = Segment.open(name)
        with other.lock.section(Op.GROW):
            say(other.words[A])

    assert fork(body).line() == "10"
    assert shared.words[A] == 10


def test_a_forked_child_holds_neither_the_lock_nor_the_life_of_its_parent(
    shared: Segment, name: SegmentName, fork: Fork
) -> None:
    def body(say: Callable[[object], None]) -> None:
        segment = Segment.open(name)
        segment.attach(Role.DECODE)
        with segment.lock.section(Op.PUBLISH):
            grandchild = os.fork()
            if grandchild == 0:
                signal.alarm(60)
                while True:
                    signal.pause()
            say(grandchild)
            while True:
                signal.pause()

    child = fork(body)
    grandchild = int(child.line())
    try:
        child.kill()
        with shared.lock.section(Op.GROW, deadline_s=5):
            pass
        os.kill(grandchild, 0)
        assert unlink_if_orphaned(name) is True
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_a_forked_child_cannot_use_its_parents_lock(shared: Segment, fork: Fork) -> None:
    def body(say: Callable[[object], None]) -> None:
        number = shared.mapping.fd
        files = [os.open("/dev/null", os.O_RDONLY) for _ in range(64)]
        try:
            with shared.lock.section(Op.GROW, deadline_s=1):
                say("in a section")
        except (OSError, ValueError):
            say(f"refused {number} {len(files)}")

    assert fork(body).line() == "refused -1 64"


def test_layouts_agree_on_the_journal(segment: Segment) -> None:
    assert Layout(segment.geometry).journal == segment.layout.journal

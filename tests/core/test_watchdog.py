"""Who hangs and who is only slow: looks as the supervisor takes them, once a second, on a clock of the test's."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pdctl.core.watchdog import BLOCKED_S, CPU_S, LATE_S, STOPPED_S, Look, Watchdog, state_and_cpu_s

BUSY = Look(name="decode-0", pid=7, state="R", cpu_s={7: 0.0}, progress=(1, 0), owns_rows=True)


class Story:
    """Looks at one process, second by second."""

    def __init__(self, first: Look = BUSY) -> None:
        self.dog = Watchdog()
        self.now = 1000.0
        self.look = first
        self.dog.judge([first], self.now)

    def pass_s(self, seconds: float, *, cpu: float = 0.0, step_s: float = 1.0, **changes: Any) -> str | None:
        """Let time pass; the first verdict, if there is one. `cpu`: share of a core that it gets."""
        self.look = replace(self.look, **changes)
        end = self.now + seconds
        while self.now < end:
            self.now += step_s
            threads = {thread: had + cpu * step_s for thread, had in self.look.cpu_s.items()}
            self.look = replace(self.look, cpu_s=threads)
            if verdict := self.dog.judge([self.look], self.now).get(self.look.name):
                return verdict
        return None


def test_a_stopped_daemon_hangs_after_two_seconds() -> None:
    story = Story()
    # The first look that sees it says only that it is stopped now.
    assert story.pass_s(STOPPED_S, state="T") is None
    assert story.pass_s(1) == "stopped for 2 s"


def test_a_daemon_that_is_traced_or_stopped_with_nothing_to_do_hangs_too() -> None:
    assert Story().pass_s(5, state="t", owns_rows=False) == "stopped for 2 s"


def test_a_stop_that_is_over_is_forgotten() -> None:
    story = Story()
    for _ in range(10):
        assert story.pass_s(2, state="T") is None
        assert story.pass_s(1, state="S") is None


def test_stops_with_work_between_two_looks_are_not_one_stop() -> None:
    story = Story()
    for turn in range(10):
        assert story.pass_s(1, state="T", progress=(turn, 0)) is None
        assert story.pass_s(1, state="T", cpu=0.01) is None


def test_one_that_spins_hangs_by_its_own_cpu_time() -> None:
    story = Story()
    assert story.pass_s(CPU_S - 1, cpu=1.0) is None
    verdict = story.pass_s(2, cpu=1.0)
    assert verdict == "no progress in 30 s of CPU time of one thread (30 s are allowed)"


def test_threads_that_share_the_work_are_one_worker_not_many() -> None:
    """Sixteen of them have thirty seconds together in two: that says nothing."""
    threads = dict.fromkeys(range(16), 0.0)
    story = Story(replace(BUSY, cpu_s=threads))
    assert story.pass_s(CPU_S - 1, cpu=1.0) is None
    # One that began since the last count has had its time since then.
    story.look = replace(story.look, cpu_s={99: 5.0, **story.look.cpu_s})
    assert story.pass_s(2, cpu=1.0) == "no progress in 30 s of CPU time of one thread (30 s are allowed)"


def test_one_that_is_starved_is_slow_not_dead() -> None:
    """Ready to run, at a hundredth of a core, for an hour."""
    assert Story().pass_s(2900, cpu=0.01) is None


def test_one_that_is_blocked_hangs_by_the_clock() -> None:
    story = Story()
    assert story.pass_s(BLOCKED_S - 1, state="D") is None
    assert story.pass_s(2) == "no progress, and blocked for 120 s (120 s are allowed)"


def test_turns_are_progress() -> None:
    story = Story()
    for turn in range(100):
        assert story.pass_s(20, cpu=1.0, progress=(turn + 2, 0)) is None


def test_ticks_within_one_turn_are_progress_however_long_it_takes() -> None:
    """A chunk of 65,536 tokens on a slow core: one turn of hours."""
    story = Story()
    for tick in range(500):
        assert story.pass_s(20, cpu=1.0, progress=(1, tick + 1)) is None


def test_who_owns_nothing_is_not_judged_by_progress() -> None:
    story = Story(replace(BUSY, owns_rows=False))
    assert story.pass_s(1000, cpu=1.0, state="S") is None
    # And what it did before it had rows is not held against it.
    assert story.pass_s(CPU_S - 1, cpu=1.0, owns_rows=True) is None


def test_long_ticks_are_measured_by_those_before() -> None:
    story = Story(replace(BUSY, longest_tick_s=2.0))
    assert story.pass_s(199, cpu=1.0) is None
    assert story.pass_s(2, cpu=1.0) == "no progress in 200 s of CPU time of one thread (200 s are allowed)"


def test_a_judge_who_is_late_judges_nobody() -> None:
    """The machine was paused: everything stood still, the judge too."""
    story = Story()
    for _ in range(20):
        assert story.pass_s(LATE_S, step_s=LATE_S, state="T") is None
    assert story.pass_s(1) is None
    assert story.pass_s(2) is not None


def test_another_process_of_the_name_starts_anew() -> None:
    story = Story()
    story.pass_s(CPU_S - 1, cpu=1.0)
    assert story.pass_s(CPU_S - 1, cpu=1.0, pid=8) is None
    story.pass_s(2, state="T")
    assert story.pass_s(1, state="T", pid=9) is None


@pytest.mark.parametrize(("holds_lock", "verdict"), [(True, "stopped for 2 s inside a section"), (False, None)])
def test_a_router_is_judged_only_as_a_stopped_holder_of_the_lock(holds_lock: bool, verdict: str | None) -> None:
    story = Story(Look(name="router", pid=3, state="S", cpu_s={3: 0.0}))
    assert story.pass_s(500, cpu=1.0) is None
    assert story.pass_s(4, state="T", holds_lock=holds_lock) == verdict


# --- what /proc says ---------------------------------------------------------------------------------------


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys, time; print(flush=True); time.sleep(600)"], stdout=-1
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def until(pid: int, states: str) -> str:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = state_and_cpu_s(pid)
        assert found is not None
        if found[0] in states:
            return found[0]
        time.sleep(0.005)
    raise AssertionError(f"process {pid}: never in {states}")


def test_states_of_a_process(child: subprocess.Popen[bytes]) -> None:
    until(child.pid, "S")
    child.send_signal(signal.SIGSTOP)
    until(child.pid, "T")
    child.send_signal(signal.SIGCONT)
    until(child.pid, "S")
    child.kill()
    child.wait()
    assert state_and_cpu_s(child.pid) is None


def test_a_thread_that_could_run_is_a_process_that_could_run() -> None:
    code = "import threading, sys\ndef spin():\n while True: pass\n"
    code += "threading.Thread(target=spin, daemon=True).start(); print(flush=True); threading.Event().wait()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        until(process.pid, "R")
        found = state_and_cpu_s(process.pid)
        assert found is not None
        deadline = time.monotonic() + 30
        while (later := state_and_cpu_s(process.pid)) is not None and max(later[1].values()) <= max(
            found[1].values()
        ):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
        process.stdout.close() if process.stdout is not None else None

"""Who hangs: a process that is stopped, or that makes no progress although it could.

Judged once a second from what the kernel and the segment say. A daemon counts its turns, also while it waits for
work or room, and within a forward the bounded parts that it is made of (ticks: P.TICKS); so it hangs if it owns
rows, and for a long time counts nothing, by the CPU time of its busiest thread (it spins) or by the time it was seen
neither running nor ready to run (it is blocked). A process that is ready to run and gets no core is starved, not
dead: a chunk beside busy neighbours may take a hundred times as long. Whoever judges late was starved or paused
itself, and judges nobody.

No flag and no prompt makes a tick long: it is a layer of at most 256 tokens, 16 million scores of its attention (or
those of one token), or the logits of at most --max-batch tokens. What a layer takes here the daemon measures before
it owns a row, on 26 tokens. A token costs less the more of them share a matrix, so 256 take at most ten times as
long; _TICKS allows a hundred, which leaves ten times as much for the logits. For the scores CPU_S is enough on any
core that computes 0.6 GFLOP/s (they are 17 GFLOP with heads of 256 numbers).

Decides only; supervisor.py looks and kills.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdctl.core.process import ProcessStat

STOPPED_S = 2.0
CPU_S = 30.0
BLOCKED_S = 120.0
# A tick may take so many times as long as the longest that this daemon has made, the probe at its start included.
_TICKS = 100
# Looks that are further apart say nothing.
LATE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Look:
    """A process now.

    Attributes:
        name: of the child.
        pid: tells it from a later one of the same name.
        state: as in /proc/PID/stat: R (runs, or could), S, D, T, t, Z.
        cpu_s: CPU time that each of its threads has had, by the thread's id.
        progress: turns and ticks counted; None: of a process that counts none.
        owns_rows: whether anybody waits for it.
        longest_tick_s: the most CPU time from one tick to the next so far.
        holds_lock: whether it is in a section of the segment.
    """

    name: str
    pid: int
    state: str
    cpu_s: Mapping[int, float]
    progress: tuple[int, int] | None = None
    owns_rows: bool = False
    longest_tick_s: float = 0.0
    holds_lock: bool = False


@dataclass
class _Known:
    """What was seen last, and since the last count: the CPU time it had then, and how long it has been blocked."""

    pid: int
    progress: tuple[int, int] | None
    cpu_s: Mapping[int, float]
    last: Look
    blocked_s: float = 0.0
    stopped_s: float = 0.0


class Watchdog:
    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._last_s: float | None = None

    def judge(self, looks: list[Look], now_s: float) -> dict[str, str]:
        """Names of processes that hang, and why, in words that go on after "was killed: ".

        Args:
            now_s: monotonic; to be called about once a second.
        """
        elapsed_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        if elapsed_s >= LATE_S:
            self._known.clear()
            elapsed_s = 0.0
        verdicts = {}
        for look in looks:
            known = self._known.get(look.name)
            moved = known is None or known.pid != look.pid or known.progress != look.progress
            before = None if known is None or known.pid != look.pid else known
            if known is None or moved or not look.owns_rows:
                known = _Known(look.pid, look.progress, look.cpu_s, look)
                self._known[look.name] = known
            # Stopped from one look to the next: seen so twice, and not for a moment at work between.
            if before is not None and _stands_still(before.last, look):
                known.stopped_s = before.stopped_s + elapsed_s
            else:
                known.stopped_s = 0.0
            known.last = look
            if look.state in "SD":
                known.blocked_s += elapsed_s
            if (why := _verdict(look, known)) is not None:
                verdicts[look.name] = why
        return verdicts


def _stands_still(before: Look, now: Look) -> bool:
    at_work = before.cpu_s != now.cpu_s or before.progress != now.progress
    return before.state in "Tt" and now.state in "Tt" and not at_work


def _verdict(look: Look, known: _Known) -> str | None:
    if known.stopped_s >= STOPPED_S and (look.progress is not None or look.holds_lock):
        return f"stopped for {known.stopped_s:.0f} s" + (" inside a section" if look.holds_lock else "")
    if look.progress is None or not look.owns_rows:
        return None
    spent_s = max((had - known.cpu_s.get(thread, 0.0) for thread, had in look.cpu_s.items()), default=0.0)
    allowed_s = max(CPU_S, _TICKS * look.longest_tick_s)
    if spent_s >= allowed_s:
        return f"no progress in {spent_s:.0f} s of CPU time of one thread ({allowed_s:.0f} s are allowed)"
    allowed_s = max(BLOCKED_S, _TICKS * look.longest_tick_s)
    if known.blocked_s >= allowed_s:
        return f"no progress, and blocked for {known.blocked_s:.0f} s ({allowed_s:.0f} s are allowed)"
    return None


def state_and_cpu_s(pid: int) -> tuple[str, dict[int, float]] | None:
    """State, and CPU time by thread; None if the process is gone. A process with a thread that could run is R."""
    found = ProcessStat.read(pid)
    if found is None:
        return None
    try:
        threads = [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        threads = []
    stats = {thread: stat for thread in threads if (stat := ProcessStat.read(pid, thread)) is not None}
    ready = found.state in "SD" and any(stat.state == "R" for stat in stats.values())
    return "R" if ready else found.state, {thread: stat.cpu_s for thread, stat in stats.items()}

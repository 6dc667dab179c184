"""What Linux offers for keeping processes in hand: parent death, sub-reaping, pidfds.

Knows nothing of clusters. Called by every process of one.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from pdctl.transport.segment import process_start_time

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def die_with_parent(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Be killed (or sent another signal) when the parent dies; exit at once if it already has.

    The signal is tied to the parent's thread that made us: parents start children from their main thread.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:
        sys.exit(f"parent {parent_pid} is gone")


def become_subreaper() -> None:
    """Orphans below us become our children, so that we can wait for them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_process_name(name: str) -> None:
    """The name that `ps -e` and `top` show (15 bytes)."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


class ProcessHandle:
    """A process by pidfd: never a stranger that got its number later.

    Attributes:
        pid: for people; signals go through the pidfd.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.fd = os.pidfd_open(pid)

    @classmethod
    def find(cls, pid: int, start_time: int) -> ProcessHandle | None:
        """The process that had this PID and start time (clock ticks after boot), if it still runs."""
        try:
            handle = cls(pid)
        except (OSError, OverflowError):
            return None
        if process_start_time(pid) != start_time or handle.is_gone(0):
            handle.close()
            return None
        return handle

    def fileno(self) -> int:
        return self.fd

    def send(self, number: signal.Signals) -> None:
        """Signal it; nothing happens if it is gone."""
        try:
            signal.pidfd_send_signal(self.fd, number)
        except ProcessLookupError:
            pass

    def is_gone(self, timeout_s: float) -> bool:
        """Whether it ends within the timeout. A zombie is gone: it stores nothing any more."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True, kw_only=True)
class ProcessStat:
    """What /proc says of a process or thread now.

    Attributes:
        state: R (runs, or could), S, D, T (stopped), t (traced), Z, …
        cpu_s: CPU time that it has had.
    """

    name: str
    state: str
    cpu_s: float

    @property
    def stopped(self) -> bool:
        return self.state in "Tt"

    @classmethod
    def read(cls, pid: int, thread: int | None = None) -> ProcessStat | None:
        """From /proc/PID/stat, or a thread's; None if it is gone."""
        where = f"/proc/{pid}" if thread is None else f"/proc/{pid}/task/{thread}"
        try:
            begin, end = Path(f"{where}/stat").read_text(errors="replace").rsplit(")", 1)
            fields = end.split()
            ticks = int(fields[11]) + int(fields[12])
            return cls(name=begin.split("(", 1)[1], state=fields[0], cpu_s=ticks / os.sysconf("SC_CLK_TCK"))
        except (OSError, IndexError, ValueError):
            return None


def exit_text(status: int) -> str:
    """How a process ended, in words, from its wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"

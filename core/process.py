"""What Linux offers for keeping processes in hand: parent death, sub-reaping, pidfds.

Knows nothing of clusters. Called by every process of one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from pdctl.transport.errors import IncompatibleError
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


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def become_subreaper() -> None:
    """Orphans below us become our children, so that we can wait for them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_process_name(name: str) -> None:
    """The name that `ps -e` and `top` show (15 bytes)."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


def _without_pidfds(call: str, error: OSError) -> IncompatibleError:
    return IncompatibleError(
        f"{call}: {error.strerror}: this system does not let pdctl hold its processes by descriptor, without which a "
        "death cannot be proved",
        hint="Linux 5.3 or later, and a seccomp profile that allows pidfd_open and pidfd_send_signal "
        "(update Docker, or: docker run --security-opt seccomp=unconfined)",
    )


def check_pidfds() -> None:
    """Raise IncompatibleError, naming the remedy, where the system has no pidfds or forbids them."""
    handle = ProcessHandle(os.getpid())
    try:
        signal.pidfd_send_signal(handle.fd, 0)
    except OSError as error:
        raise _without_pidfds("pidfd_send_signal", error) from error
    finally:
        handle.close()


class ProcessHandle:
    """A process by pidfd: never a stranger that got its number later.

    Attributes:
        pid: for people; signals go through the pidfd.

    Raises:
        OSError: there is no such process, or no descriptor is left.
        IncompatibleError: the system has no pidfds or forbids them.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self.fd = os.pidfd_open(pid)
        except OSError as error:
            # EPERM: of seccomp; the call itself has none.
            if error.errno in (errno.ENOSYS, errno.EPERM):
                raise _without_pidfds("pidfd_open", error) from error
            raise

    @classmethod
    def find(cls, pid: int, start_time: int) -> ProcessHandle | None:
        """The process that had this PID and start time (clock ticks after boot), if it still runs.

        Raises:
            IncompatibleError: the system has no pidfds or forbids them.
        """
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
        parent: PID.
        cpu_s: CPU time that it has had.
    """

    name: str
    state: str
    parent: int
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
            cpu_s = ticks / os.sysconf("SC_CLK_TCK")
            return cls(name=begin.split("(", 1)[1], state=fields[0], parent=int(fields[1]), cpu_s=cpu_s)
        except (OSError, IndexError, ValueError):
            return None


def descendants(pid: int) -> list[int]:
    """PIDs of a process's children, and theirs, as far as /proc can be read."""
    children: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and (found := ProcessStat.read(int(entry.name))) is not None:
                children.setdefault(found.parent, []).append(int(entry.name))
    below, todo = [], [pid]
    while todo:
        mine = children.pop(todo.pop(), [])
        below += mine
        todo += mine
    return below


def exit_text(status: int) -> str:
    """How a process ended, in words, from its wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"

"""Bells: unix datagram sockets without content that mean "scan".

A ring may be lost (the queue holds a handful); whoever waits also scans once a second. Drain first, then scan:
a ring that comes during the scan is then still in the queue. Knows nothing of rows.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from pathlib import Path

from pdctl.transport.names import bell_path, socket_address

_MOST_RINGS = 1000
_KEEP_S = 1.0


class Bell:
    """A process's own bell, and the means to ring the others'.

    Its names are files that may be removed, and a socket whose name is gone hears nothing: `keep` gives it others.

    Args:
        slots: the process's places: one socket, with a name for each.

    Attributes:
        fault: why nobody can ring it now; None: it has its names.
    """

    def __init__(self, run_dir: Path, *slots: int) -> None:
        self._run_dir = run_dir
        self._paths = [bell_path(run_dir, slot) for slot in slots]
        self._names: tuple[int, int] | None = None
        self._look_at = 0.0
        self._socket = _socket()
        self.fault: str | None = None
        self._bind(self._socket)

    def _bind(self, bell: socket.socket) -> bool:
        """Name a socket, in the place of whatever has our names; whether that could be done."""
        first, *others = self._paths
        try:
            for path in self._paths:
                path.unlink(missing_ok=True)
            with socket_address(first) as address:
                bell.bind(address)
            first.chmod(0o600)
            for other in others:
                os.link(first, other)
            found = first.lstat()
        except OSError as error:
            self.fault = f"{first}: {error.strerror or error}"
            return False
        self._names, self.fault = (found.st_dev, found.st_ino), None
        return True

    def keep(self) -> bool:
        """See whether the names still lead here, and give them to another socket if not. Looks once a second at most.

        Returns:
            Whether it has another descriptor from now on. If it cannot be done, `fault` says why.
        """
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + _KEEP_S
        if all(map(self._is_ours, self._paths)):
            return False
        try:
            fresh = _socket()  # a socket is named once
        except OSError as error:
            self.fault = f"{self._paths[0]}: {error.strerror}"
            return False
        if not self._bind(fresh):
            fresh.close()
            return False
        self._socket.close()
        self._socket = fresh
        return True

    def _is_ours(self, path: Path) -> bool:
        try:
            found = path.lstat()
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._names

    def fileno(self) -> int:
        return self._socket.fileno()

    def drain(self) -> bool:
        """Take all rings out of the queue, whatever is in them; True if there was one."""
        rung = False
        # More than a queue holds; whoever rings without end does not keep us from scanning.
        for _ in range(_MOST_RINGS):
            try:
                self._socket.recv(16)
                rung = True
            except OSError:
                break
        return rung

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a ring or the timeout, then drain; True if it rang."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll(timeout_s * 1000)
        return self.drain()

    def ring(self, slot: int) -> None:
        """Wake the participant in `slot`. Never blocks, never fails: it will scan in a second anyway."""
        try:
            with socket_address(bell_path(self._run_dir, slot)) as address:
                self._socket.sendto(b"", socket.MSG_DONTWAIT, address)
        except OSError:
            pass

    def close(self) -> None:
        """Remove the names that are still ours, too."""
        self._socket.close()
        for path in filter(self._is_ours, self._paths):
            with contextlib.suppress(OSError):
                path.unlink()


def _socket() -> socket.socket:
    bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    bell.setblocking(False)
    return bell

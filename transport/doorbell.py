"""Bells: unix datagram sockets without content that mean "scan".

A ring may be lost (the queue holds a handful); whoever waits also scans once a second. Drain first, then scan:
a ring that comes during the scan is then still in the queue. Knows nothing of rows.
"""

from __future__ import annotations

import os
import select
import socket
from pathlib import Path

from pdctl.transport.names import bell_path, socket_address

_MOST_RINGS = 1000


class Bell:
    """A process's own bell, and the means to ring the others'.

    Args:
        slots: the process's places: one socket, with a name for each.
    """

    def __init__(self, run_dir: Path, *slots: int) -> None:
        self._run_dir = run_dir
        self._paths = [bell_path(run_dir, slot) for slot in slots]
        for path in self._paths:
            path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        first, *others = self._paths
        with socket_address(first) as address:
            self._socket.bind(address)
        first.chmod(0o600)
        for other in others:
            os.link(first, other)

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
        self._socket.close()
        for path in self._paths:
            path.unlink(missing_ok=True)

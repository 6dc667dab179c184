"""Answers on the HTTP port while no router does: a 503 at once, so that no client hangs in the listener's queue.

Runs in the supervisor's loop: reads what is sent without looking at it, never waits, and holds few connections at a
time; the others wait in the queue for a moment. Knows nothing of HTTP but one fixed answer. Used by supervisor.py.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Callable

MAX_CONNECTIONS = 64
# For a client to send its request and take its answer.
PATIENCE_S = 3.0
_READ_BYTES = 256 << 10
# Without a descriptor for another connection, look again after so long.
_PAUSE_S = 0.5


class _Connection:
    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.deadline = time.monotonic() + PATIENCE_S
        self.answered = False


class StandIn:
    """The supervisor's end of the HTTP port.

    Args:
        listener: shared with the router, and non-blocking.
        selector: its data are callables.
        is_served: whether a router takes connections now; asked before each is accepted.
    """

    def __init__(
        self, listener: socket.socket, selector: selectors.BaseSelector, is_served: Callable[[], bool]
    ) -> None:
        self._listener = listener
        self._selector = selector
        self._is_served = is_served
        self._why: str | None = None
        self._retry_after_s: int | None = None
        self._listens = False
        self._pauses_until = 0.0
        self._connections: list[_Connection] = []

    def serve(self, why: str | None, *, retry_after_s: int | None = None) -> None:
        """Answer from now on, saying why; None: leave clients to the router. Call once a turn: it also keeps time."""
        self._why, self._retry_after_s = why, retry_after_s
        now = time.monotonic()
        for one in [one for one in self._connections if one.deadline <= now]:
            self._end(one)
        self._settle()

    def next_deadline(self) -> float | None:
        deadlines = [one.deadline for one in self._connections]
        if self._why is not None and not self._listens and not self._is_full:
            deadlines.append(self._pauses_until)
        return min(deadlines, default=None)

    def close(self) -> None:
        self._why = None
        for one in [*self._connections]:
            self._end(one)
        self._settle()

    @property
    def _is_full(self) -> bool:
        return len(self._connections) >= MAX_CONNECTIONS

    def _settle(self) -> None:
        """Listen if connections are ours and there is a place for one."""
        listens = self._why is not None and not self._is_full and self._pauses_until <= time.monotonic()
        if listens and not self._listens:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        elif self._listens and not listens:
            self._selector.unregister(self._listener)
        self._listens = listens

    def _accept(self) -> None:
        if self._is_served():
            self.serve(None)
            return
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # no descriptors are left: the one that waits would call us again at once
            self._pauses_until = time.monotonic() + _PAUSE_S
            self._settle()
            return
        connection.setblocking(False)
        one = _Connection(connection)
        self._connections.append(one)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(one))
        self._settle()

    def _hear(self, one: _Connection) -> None:
        """Answer the first bytes. The rest is read as well: a close with unread data would take the answer away."""
        try:
            data = one.socket.recv(_READ_BYTES)
            if data and not one.answered:
                one.answered = True
                one.socket.send(self._answer())
                one.socket.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(one)

    def _answer(self) -> bytes:
        # As api_errors.py has it, which brings a web framework along.
        error = {
            "message": self._why or "the router takes no requests",
            "type": "service_unavailable_error",
            "param": None,
            "code": "router_down",
        }
        body = json.dumps({"error": error}, separators=(",", ":")).encode()
        head = ["HTTP/1.1 503 Service Unavailable", "Content-Type: application/json", f"Content-Length: {len(body)}"]
        if self._retry_after_s is not None:
            head.append(f"Retry-After: {self._retry_after_s}")
        return "\r\n".join([*head, "Connection: close", "", ""]).encode() + body

    def _end(self, one: _Connection) -> None:
        self._connections.remove(one)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(one.socket)
        one.socket.close()
        self._settle()

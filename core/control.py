"""The control socket: JSON lines between a command and the supervisor, which never waits for either.

    <- {"operation": ..., "timeout_s": ...}         one request a connection, one line
    -> {"taken": true}                              it was heard
    -> {"progress": "decode-1: ready"}              any number
    -> {"done": {...}} or {"error": {"message", "hint", "exit_code"}}, and the end of the connection

A client may be slow, silent, too long, full of garbage or gone: it is cut off, and nobody else notices. Knows
nothing of operations. The other end is control_client.py.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdctl.transport.errors import UsageError
from pdctl.transport.names import socket_address

MAX_CLIENTS = 32
MAX_REQUEST_BYTES = 64 << 10
# What a client may leave unread.
_MAX_UNREAD_BYTES = 256 << 10
# For a request to come in whole, and for the last words to go out.
PATIENCE_S = 5.0
_READ_BYTES = 16 << 10


class ControlClient:
    """One connection: a request is read, answers are written as far as the client takes them."""

    def __init__(self, server: ControlServer, connection: socket.socket) -> None:
        self._server = server
        self._socket = connection
        self._unread = bytearray()
        self._unsent = bytearray()
        self._heard = False
        self._finished = False
        # None: as long as its operation takes.
        self.deadline: float | None = time.monotonic() + PATIENCE_S

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_gone(self) -> bool:
        return self._socket.fileno() < 0

    def say(self, **message: Any) -> None:
        if self.is_gone:
            return
        self._unsent += json.dumps(message).encode() + b"\n"
        if len(self._unsent) > _MAX_UNREAD_BYTES:
            self.close()
        else:
            self._send()

    def finish(self, **message: Any) -> None:
        """Say the last thing; the connection ends when it is out."""
        self._finished = True
        self.deadline = time.monotonic() + PATIENCE_S
        self.say(**message)

    def close(self) -> None:
        if not self.is_gone:
            self._server.forget(self)
            self._socket.close()

    def serve(self) -> None:
        """Go on after an event, as far as it goes without waiting."""
        if not self.is_gone:
            self._read()
        if not self.is_gone:
            self._send()

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        # It left, or has more to say than a request.
        if not data or self._heard:
            self.close()
            return
        self._unread += data
        line, end, more = self._unread.partition(b"\n")
        if len(line) > MAX_REQUEST_BYTES or more:
            self._refuse(f"control: expected one line of at most {MAX_REQUEST_BYTES} bytes")
        elif end:
            self._hear(bytes(line))

    def _hear(self, line: bytes) -> None:
        try:
            request = json.loads(line)
        # A deep nest of brackets is a RecursionError.
        except (ValueError, RecursionError):
            request = None
        if not isinstance(request, dict):
            self._refuse("control: expected a JSON object")
            return
        self._heard, self.deadline = True, None
        self.say(taken=True)
        self._server.on_request(self, request)

    def _refuse(self, message: str) -> None:
        self._heard = True
        self.finish(error={"message": message, "hint": None, "exit_code": UsageError.exit_code})

    def _send(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        if self._finished and not self._unsent:
            self.close()
        else:
            self._server.watch(self, writes=bool(self._unsent))


class ControlServer:
    """The listening end, in the supervisor's selector; the selector's data are callables."""

    def __init__(
        self,
        path: Path,
        selector: selectors.BaseSelector,
        on_request: Callable[[ControlClient, dict[str, Any]], None],
    ) -> None:
        self.on_request = on_request
        self._path = path
        self._selector = selector
        self._clients: list[ControlClient] = []
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        with socket_address(path) as address:
            self._socket.bind(address)
        path.chmod(0o600)
        self._socket.listen(MAX_CLIENTS)
        selector.register(self._socket, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:  # it left before we came to it, or there are no descriptors: look again
            return
        connection.setblocking(False)
        client = ControlClient(self, connection)
        self._clients.append(client)
        self._selector.register(client, selectors.EVENT_READ, client.serve)
        if len(self._clients) == MAX_CLIENTS:
            self._selector.unregister(self._socket)  # further ones wait

    def watch(self, client: ControlClient, *, writes: bool) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0)
        self._selector.modify(client, events, client.serve)

    def forget(self, client: ControlClient) -> None:
        self._selector.unregister(client)
        self._clients.remove(client)
        if len(self._clients) == MAX_CLIENTS - 1:
            self._selector.register(self._socket, selectors.EVENT_READ, self._accept)

    def expire(self) -> None:
        """Cut off who took too long."""
        now = time.monotonic()
        for client in [one for one in self._clients if one.deadline is not None and one.deadline <= now]:
            client.close()

    def next_deadline(self) -> float | None:
        return min((client.deadline for client in self._clients if client.deadline is not None), default=None)

    def close(self) -> None:
        for client in [*self._clients]:
            client.close()
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._socket)
        self._socket.close()
        self._path.unlink(missing_ok=True)

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
import os
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
# Without a descriptor for another connection, look again after so long.
_PAUSE_S = 0.5


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
        self._pauses_until: float | None = None
        self._socket, self._name = self._bind()
        selector.register(self._socket, selectors.EVENT_READ, self._accept)

    def _bind(self) -> tuple[socket.socket, os.stat_result]:
        """A listening socket under our path, whatever lies there, and what the path then leads to."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._path.unlink(missing_ok=True)
            listener.setblocking(False)
            with socket_address(self._path) as address:
                listener.bind(address)
            self._path.chmod(0o600)
            listener.listen(MAX_CLIENTS)
            return listener, self._path.lstat()
        except OSError:
            listener.close()
            raise

    def keep(self) -> bool:
        """See that the path still leads to our socket; if it was removed, listen under it again.

        Returns:
            Whether that had to be done.

        Raises:
            OSError: it cannot be done. Those that are connected go on.
        """
        if self._is_in_place():
            return False
        fresh, self._name = self._bind()
        self._deafen()
        self._socket.close()
        self._socket = fresh
        if not self._is_full:
            self._listen()
        return True

    def _is_in_place(self) -> bool:
        try:
            found = self._path.lstat()
        except OSError:
            return False
        return os.path.samestat(found, self._name) and found.st_mode == self._name.st_mode

    @property
    def _is_full(self) -> bool:
        return len(self._clients) >= MAX_CLIENTS

    def _listen(self) -> None:
        self._pauses_until = None
        self._selector.register(self._socket, selectors.EVENT_READ, self._accept)

    def _deafen(self) -> None:
        with contextlib.suppress(KeyError, ValueError):  # deaf already, or closed
            self._selector.unregister(self._socket)

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it left before we came to it
            return
        except OSError:  # no descriptors are left: the one that waits would call us again at once
            self._deafen()
            self._pauses_until = time.monotonic() + _PAUSE_S
            return
        connection.setblocking(False)
        client = ControlClient(self, connection)
        self._clients.append(client)
        self._selector.register(client, selectors.EVENT_READ, client.serve)
        if self._is_full:
            self._deafen()  # further ones wait

    def watch(self, client: ControlClient, *, writes: bool) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0)
        self._selector.modify(client, events, client.serve)

    def forget(self, client: ControlClient) -> None:
        was_full = self._is_full
        self._selector.unregister(client)
        self._clients.remove(client)
        if was_full and not self._is_full:
            self._listen()

    def expire(self) -> None:
        """Cut off who took too long; listen again after a pause."""
        now = time.monotonic()
        for client in [one for one in self._clients if one.deadline is not None and one.deadline <= now]:
            client.close()
        if self._pauses_until is not None and self._pauses_until <= now:
            self._listen()

    def next_deadline(self) -> float | None:
        deadlines = [*(client.deadline for client in self._clients), self._pauses_until]
        return min((one for one in deadlines if one is not None), default=None)

    def close(self) -> None:
        """End all conversations, and remove the socket's name if it is still ours."""
        for client in [*self._clients]:
            client.close()
        self._deafen()
        in_place = self._is_in_place()
        self._socket.close()
        if in_place:
            self._path.unlink(missing_ok=True)

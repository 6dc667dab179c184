"""One client's connection: uvicorn's, with bounds on what it may hold without asking anything of us.

    a head (request line and headers)    MAX_HEAD_BYTES, within HEAD_TIMEOUT_S of the connection or its first byte
    idle between two requests            KEEP_ALIVE_S
    all connections                      max_connections(); one more gets 503
    an answer that nobody takes          UNREAD_TIMEOUT_S, by the kernel (TCP_USER_TIMEOUT)

Bodies, deadlines and what is asked are api.py's; that file knows no connections, and this one no routes.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
from collections.abc import Mapping
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from pdctl.core.api_errors import encode, error_body

MAX_HEAD_BYTES = 32 << 10
HEAD_TIMEOUT_S = 30.0
# Read and parsed in one go: of chunks of one byte, six of these are one to the parser.
READ_BYTES = 16 << 10
KEEP_ALIVE_S = 75
# Longer than any request may take: whoever pauses a stream gets the rest of it.
UNREAD_TIMEOUT_S = 660
_MAX_CONNECTIONS = 2048


def max_connections() -> int:
    """How many there may be at once: half of what this process may open, the rest is for itself."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MAX_CONNECTIONS if limit < 0 else max(16, min(_MAX_CONNECTIONS, limit // 2))


def bound_unread_answers(listener: socket.socket, timeout_s: float = UNREAD_TIMEOUT_S) -> None:
    """Let the kernel end connections, of all that `listener` will accept, whose client takes nothing for so long."""
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, with a deadline for each head, a last place, and refusals in OpenAI's words."""

    head_timeout_s = HEAD_TIMEOUT_S
    limit = _MAX_CONNECTIONS

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # asyncio's, unless it has another name some day
        if len(self.connections) > self.limit:
            message = f"{self.limit} connections are open, as many as there may be"
            self._refuse(503, message, "too_many_connections", {"Retry-After": "1"})
        else:
            self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def _watch_head(self) -> None:
        """While no request is under way the client owes us a head; what trickles in after an answer counts as one."""
        if self.transport.is_closing() or not (self.cycle is None or self.cycle.response_complete):
            self._stop_head_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what is not HTTP, from where it caught the error that says why."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if status == 431:
            self._refuse(431, f"the request's head is larger than {MAX_HEAD_BYTES} bytes", "head_too_large")
        else:
            self._refuse(status, f"not HTTP/1.1: {error or msg}", "invalid_http")

    def _refuse(self, status: int, message: str, code: str, headers: Mapping[str, str] | None = None) -> None:
        """Answer without having a request, if an answer has not begun already, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = encode(error_body(status, message, code=code)).encode()
            fields = {
                "Content-Type": "application/json",
                "Content-Length": str(len(body)),
                "Connection": "close",
                **(headers or {}),
            }
            response = h11.Response(
                status_code=status, headers=list(fields.items()), reason=STATUS_PHRASES.get(status, b"")
            )
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            # Its request ends here: what it still says must not follow our answer.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

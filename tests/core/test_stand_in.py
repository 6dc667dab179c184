"""Clients while no router runs: all are refused at once, whatever they do, and cost no more than a place."""

from __future__ import annotations

import contextlib
import json
import resource
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pdctl.core import stand_in
from pdctl.core.api_errors import error_body
from pdctl.core.stand_in import MAX_CONNECTIONS, StandIn

WATCHDOG_S = 30


class Loop:
    """A supervisor's loop with nothing in it but the port."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.listener.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.why: str | None = "the router is being restarted"
        self.served = False
        self.turns = 0
        self.stand_in = StandIn(self.listener, self.selector, lambda: self.served)
        self._ends = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends:
            self.turns += 1
            self.stand_in.serve(self.why, retry_after_s=1)
            for key, _ in self.selector.select(0.01):
                key.data()

    def connect(self) -> socket.socket:
        return socket.create_connection(self.listener.getsockname(), timeout=WATCHDOG_S)

    def close(self) -> None:
        self._ends = True
        self._thread.join(WATCHDOG_S)
        assert not self._thread.is_alive()
        self.stand_in.close()
        assert not self.selector.get_map()
        self.selector.close()
        self.listener.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def said(client: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            data += part
    client.close()
    return data


def ask(loop: Loop, data: bytes) -> tuple[bytes, Any]:
    client = loop.connect()
    client.sendall(data)
    head, _, body = said(client).partition(b"\r\n\r\n")
    return head, json.loads(body)


@pytest.mark.parametrize(
    "data",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 8000000\r\n\r\n" + b"x" * 8_000_000,
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\nnot all of it",
        b"\0\xff",
    ],
    ids=["get", "large", "half", "garbage"],
)
def test_a_client_is_refused_in_openais_words(loop: Loop, data: bytes) -> None:
    head, body = ask(loop, data)
    lines = head.decode().split("\r\n")
    assert lines[0] == "HTTP/1.1 503 Service Unavailable"
    assert {"Content-Type: application/json", "Retry-After: 1", "Connection: close"} <= set(lines)
    assert body == error_body(503, "the router is being restarted", code="router_down")


def test_who_says_nothing_or_does_not_leave_keeps_nobody_out(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in, "PATIENCE_S", 0.2)
    silent = [loop.connect() for _ in range(3 * MAX_CONNECTIONS)]
    for client in silent[:10]:
        client.sendall(b"x")
    assert ask(loop, b"GET / HTTP/1.1\r\n\r\n")[0].startswith(b"HTTP/1.1 503 ")
    for client in silent:
        client.close()


def test_a_router_that_serves_gets_all_clients(loop: Loop) -> None:
    """At once: also those that come before the loop has heard of it."""
    loop.served = True
    client, before = loop.connect(), loop.turns
    deadline = time.monotonic() + WATCHDOG_S
    while loop.turns < before + 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    loop.listener.setblocking(True)
    accepted, _ = loop.listener.accept()
    accepted.sendall(b"from the router")
    accepted.close()
    assert said(client) == b"from the router"


def test_without_descriptors_nobody_spins(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    client = loop.connect()
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        client.sendall(b"x")
        with loop_blocked_accepts(loop) as calls:
            time.sleep(0.7)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(calls) <= 4
    assert said(client).startswith(b"HTTP/1.1 503 ")


@contextlib.contextmanager
def loop_blocked_accepts(loop: Loop) -> Iterator[list[int]]:
    """Counts calls of the accepting handler."""
    calls: list[int] = []
    accept = loop.stand_in._accept

    def counted() -> None:
        calls.append(1)
        accept()

    loop.stand_in._accept = counted  # type: ignore[method-assign]
    yield calls
    loop.stand_in._accept = accept  # type: ignore[method-assign]

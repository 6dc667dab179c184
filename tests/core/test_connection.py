"""What a client may hold without asking for anything, over real sockets: heads, idle time, places, unread answers."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from pdctl.core import connection
from pdctl.core.connection import MAX_HEAD_BYTES, Connection, bound_unread_answers, max_connections
from pdctl.core.router import Server

WATCHDOG_S = 30
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
Dialogue = Callable[["Peer"], Awaitable[None]]


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] == "/body":
        while (await receive()).get("more_body"):
            pass
    body = b"x" * (32 << 20) if scope["path"] == "/large" else b"ok"
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Peer:
    """A client that speaks bytes."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def connect(self) -> Peer:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def another(self) -> Peer:
        return await Peer(self._port).connect()

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, bytes]:
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
        return int(head.split()[1]), await self.reader.readexactly(length)

    async def error(self) -> tuple[int, str]:
        """Status and code of an answer that is the connection's last."""
        status, body = await self.answer()
        error = json.loads(body)["error"]
        assert error.keys() == {"message", "type", "param", "code"} and error["message"]
        await self.closed()
        return status, error["code"]

    async def closed(self) -> None:
        try:
            assert await self.reader.read() == b""
        except ConnectionError:
            pass


def served(dialogue: Dialogue, **settings: Any) -> None:
    """Have a dialogue with a server whose `Connection` has these settings."""

    async def run() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        bound_unread_answers(listener, settings.pop("unread_timeout_s", 60))
        kind = type("Quick", (Connection,), settings)
        config = uvicorn.Config(
            app,
            http=kind,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            log_config=None,
            lifespan="off",
            ws="none",
            timeout_keep_alive=1,
            timeout_graceful_shutdown=1,
        )
        server = Server(config, lambda: None)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            async with asyncio.timeout(WATCHDOG_S):
                await dialogue(await Peer(listener.getsockname()[1]).connect())
        finally:
            server.stop()
            await serving

    asyncio.run(run())


def test_a_head_that_does_not_come_is_not_waited_for() -> None:
    async def dialogue(peer: Peer) -> None:
        trickling = await peer.another()
        trickling.say(b"GET / HTT")
        await asyncio.gather(peer.closed(), trickling.closed())

    served(dialogue, head_timeout_s=0.2)


def test_a_head_that_trickles_in_is_not_waited_for_either() -> None:
    """Every byte cancels uvicorn's own keep-alive timer; ours counts from the first."""

    async def dialogue(peer: Peer) -> None:
        peer.say(REQUEST)
        assert await peer.answer() == (200, b"ok")

        async def trickle() -> None:
            while True:
                peer.say(b"G")
                await asyncio.sleep(0.05)

        trickling = asyncio.create_task(trickle())
        await peer.closed()
        trickling.cancel()

    served(dialogue, head_timeout_s=0.5)


def test_a_slow_body_of_a_request_that_was_answered_counts_as_a_head() -> None:
    async def dialogue(peer: Peer) -> None:
        peer.say(b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        assert await peer.answer() == (200, b"ok")
        await peer.closed()

    served(dialogue, head_timeout_s=0.2)


def test_requests_under_way_have_their_time() -> None:
    async def dialogue(peer: Peer) -> None:
        peer.say(b"POST /body HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n")
        await asyncio.sleep(0.6)
        peer.say(b"{}")
        assert await peer.answer() == (200, b"ok")
        peer.say(REQUEST + REQUEST)
        assert await peer.answer() == (200, b"ok")
        assert await peer.answer() == (200, b"ok")
        await peer.closed()  # idle

    served(dialogue, head_timeout_s=0.2)


def test_a_probe_of_http_1_0_is_answered() -> None:
    async def dialogue(peer: Peer) -> None:
        peer.say(b"GET / HTTP/1.0\r\n\r\n")
        assert await peer.answer() == (200, b"ok")
        await peer.closed()

    served(dialogue)


@pytest.mark.parametrize(
    ("said", "status", "code"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), 400, "invalid_http"),
        (b"hello\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nbad header\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400, "invalid_http"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, "invalid_http"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 501, "invalid_http"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * (MAX_HEAD_BYTES + 1), 431, "head_too_large"),
        (b"G" * (MAX_HEAD_BYTES + 1), 431, "head_too_large"),
        (b"POST /body HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "invalid_http"),
    ],
)
def test_what_is_no_http_gets_an_error_object(
    said: bytes, status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def dialogue(peer: Peer) -> None:
        peer.say(said)
        assert await peer.error() == (status, code)

    served(dialogue)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], caplog.text


def test_garbage_in_a_body_ends_its_request_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    async def dialogue(peer: Peer) -> None:
        peer.say(b"POST /large HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
        assert await peer.error() == (400, "invalid_http")

    served(dialogue)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], caplog.text


def test_one_connection_too_many() -> None:
    async def dialogue(peer: Peer) -> None:
        others = [await peer.another() for _ in range(3)]
        for one in (peer, *others[:2]):
            one.say(REQUEST)
            assert await one.answer() == (200, b"ok")
        assert await others[2].error() == (503, "too_many_connections")
        peer.writer.close()
        await peer.writer.wait_closed()
        while True:  # the server has seen it
            again = await others[0].another()
            again.say(REQUEST)
            if (await again.answer())[0] == 200:
                break

    served(dialogue, limit=3)


def test_an_answer_that_nobody_takes_is_given_up() -> None:
    async def dialogue(peer: Peer) -> None:
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        peer.say(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        port, mine = peer.writer.get_extra_info("peername")[1], peer.writer.get_extra_info("sockname")[1]
        while not is_established(port, mine):
            await asyncio.sleep(0.01)
        while is_established(port, mine):
            await asyncio.sleep(0.05)

    served(dialogue, unread_timeout_s=0.5)


def is_established(server_port: int, client_port: int) -> bool:
    """Whether the server's end of a connection is there, as the kernel sees it."""
    with open("/proc/net/tcp") as table:
        wanted = [f"{server_port:04X}", f"{client_port:04X}"]
        return any([end.split(":")[1] for end in line.split()[1:3]] == wanted for line in list(table)[1:])


def test_places_leave_room_for_our_own_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, places in ((-1, 2048), (1 << 20, 2048), (1024, 512), (8, 16)):
        monkeypatch.setattr(connection.resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert max_connections() == places

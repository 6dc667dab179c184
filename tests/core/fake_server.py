"""An OpenAI-compatible server whose answers a test decides; shared by the tests of bench."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from pdctl.core.bench.client import Server, find_server

WATCHDOG_S = 60


class FakeServer:
    """An OpenAI-compatible server whose answers a test decides.

    Attributes:
        bodies: of all requests, in the order they came.
        most_at_once: requests that were under way at once.
    """

    def __init__(self, answer: Callable[[int, dict[str, Any]], AsyncIterator[Any]], owner: str = "pdctl") -> None:
        """owner: "pdctl" tells token ids and its vocabulary; somebody else does not."""
        self._answer = answer
        self._owner = owner
        self._now = 0
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most_at_once = 0
        self.url = ""

    async def models(self, request: web.Request) -> web.Response:
        told = {"vocab_size": 50} if self._owner == "pdctl" else {}
        return web.json_response({"data": [{"id": "m", "owned_by": self._owner, **told}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        number = len(self.bodies)
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        begun = False
        try:
            async for part in self._answer(number, self.bodies[-1]):
                if isinstance(part, web.Response):
                    return part
                if not begun:
                    await response.prepare(request)
                    begun = True
                if part is None:  # hang up
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                await response.write(
                    part if isinstance(part, bytes) else b"data: " + json.dumps(part).encode() + b"\n\n"
                )
            if not begun:
                await response.prepare(request)
            return response
        finally:
            self._now -= 1


@contextmanager
def running(server: FakeServer) -> Iterator[Server]:
    """It listens in a thread of its own while the block runs."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    stop: asyncio.Event = asyncio.Event()

    async def life() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", server.models)
        app.router.add_post("/v1/completions", server.complete)
        app.router.add_post("/v1/chat/completions", server.complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        server.url = f"http://127.0.0.1:{port}"
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(life()))
    thread.start()
    assert ready.wait(WATCHDOG_S)
    try:
        yield asyncio.run(find_server(server.url, None, None))
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(WATCHDOG_S)
        assert not thread.is_alive()
        loop.close()


DONE = b"data: [DONE]\n\n"


def chunk(*ids: int, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "x", "token_ids": list(ids), "finish_reason": finish}]}


def usage(prompt: int, output: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}}


async def good(number: int, body: dict[str, Any]) -> AsyncIterator[Any]:
    for token in range(body["max_tokens"]):
        yield chunk(token)
    yield usage(len(body["prompt"]), body["max_tokens"])
    yield DONE

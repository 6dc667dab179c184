"""The interface against its own OpenAPI document, with requests that schemathesis makes of it, good and bad."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from test_api import MODEL, World

WATCHDOG_S = 120
GENERATION = ("/v1/completions", "/v1/chat/completions")
# A request of the right shape may still ask for too much, or for two things that do not go together.
REFUSED_FOR_ITS_MEANING = re.compile(
    r"this model's context is \d+ tokens|need \d+ blocks|token id -?\d+ is not one of|has no tokens|answers, at most"
    r"|best_of \d+: answers are not ranked|top_logprobs: only with|stream_options: only with"
    r"|min_tokens \d+: more than|max_completion_tokens \d+ and max_tokens \d+ differ"
    r"|content: is required|no system role"
)


class Server:
    """A World whose loop runs on a thread, for callers that are no coroutines."""

    def __init__(self, run_dir: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._stop: asyncio.Event
        self.world: World
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(run_dir),))
        self._thread.start()
        assert self._started.wait(WATCHDOG_S)
        self.document: dict[str, Any] = self.ask("GET", "/openapi.json").json()

    async def _run(self, run_dir: Path) -> None:
        self._stop = asyncio.Event()
        self.world = World(run_dir, {"max_queue": 2048, "max_rows": 32})
        self.world.engine.burst = 8
        self.world.client.start()
        engine = asyncio.create_task(self.world.engine.run())
        self._started.set()
        await self._stop.wait()
        engine.cancel()
        self.world.client.begin_shutdown("over")
        await self.world.client.finish_shutdown(1)

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        call = self.world.http.request(method, path, **more)
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(WATCHDOG_S)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WATCHDOG_S)
        self._loop.close()

    def check(self, method: str, path: str, response: httpx.Response) -> dict[str, Any] | None:
        """Hold an answer to the document; returns the error object, if it is one."""
        assert response.status_code < 500, response.text
        kind = response.headers["content-type"].split(";")[0]
        described = self.document["paths"][path][method]["responses"][str(response.status_code)]["content"]
        assert kind in described
        if kind != "application/json":
            return None
        answer = response.json()
        jsonschema_rs.validate({**described[kind]["schema"], "components": self.document["components"]}, answer)
        return answer["error"] if response.status_code >= 400 else None  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("run"))
    yield made
    made.close()


bounded = settings(
    max_examples=80,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)


def without_integral_floats(value: Any) -> Any:
    """For JSON Schema 1.0 is an integer; for us it is none, which no schema can say."""
    if isinstance(value, dict):
        return {key: without_integral_floats(one) for key, one in value.items()}
    if isinstance(value, list):
        return [without_integral_floats(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def body_of(case: Any) -> dict[str, Any]:
    """How a generated case goes over the wire."""
    sent = case.as_transport_kwargs(base_url="http://router")
    sent["content"] = sent.pop("data", None)
    return {key: sent[key] for key in ("headers", "json", "content") if sent.get(key) is not None}


@pytest.mark.parametrize("path", GENERATION)
def test_what_the_document_allows_is_served_or_refused_for_its_meaning(server: Server, path: str) -> None:
    operation = schemathesis.openapi.from_dict(server.document)[path]["POST"]
    outcomes: list[int] = []

    @seed(1)
    @bounded
    @given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    def check(case: Any) -> None:
        body = without_integral_floats({**case.body, "model": MODEL})
        response = server.ask("POST", path, json=body)
        error = server.check("post", path, response)
        outcomes.append(response.status_code)
        if error is not None:
            assert response.status_code == 400 and REFUSED_FOR_ITS_MEANING.search(error["message"]), (body, error)

    check()
    assert outcomes.count(200) >= 3, "hardly anything was served"


@pytest.mark.parametrize("path", GENERATION)
def test_what_the_document_does_not_allow_is_refused(server: Server, path: str) -> None:
    operation = schemathesis.openapi.from_dict(server.document)[path]["POST"]

    @seed(1)
    @bounded
    @given(case=operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def check(case: Any) -> None:
        response = server.ask("POST", path, **body_of(case))
        error = server.check("post", path, response)
        assert error is not None and 400 <= response.status_code < 500, response.text

    check()


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{model}", "/health", "/health/ready", "/metrics"])
def test_the_other_routes_are_as_described(server: Server, path: str) -> None:
    for model, status in ((MODEL, 200), ("nope", 404)) if "{" in path else ((MODEL, 200),):
        response = server.ask("GET", path.replace("{model}", model))
        assert response.status_code == status
        server.check("get", path, response)


@pytest.mark.parametrize("path", GENERATION)
def test_the_examples_are_served(server: Server, path: str) -> None:
    content = server.document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    response = server.ask("POST", path, json=content["example"])
    assert response.status_code == 200, response.text


def test_every_route_is_in_the_document(server: Server) -> None:
    routes = {route.path.replace(":path", "") for route in server.world.app.routes}  # type: ignore[attr-defined]
    assert routes == {*server.document["paths"], "/openapi.json"}
    assert jsonschema_rs.meta.is_valid(server.document["components"]["schemas"]["CompletionRequest"])

"""What `pdctl generate` makes of a server's refusals: an exit code, and the command to run next on that cluster."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pdctl.core.api_errors import ApiError
from pdctl.core.client import Client
from pdctl.transport.errors import CapacityError, DeadlineError, PdctlError, UsageError


@contextmanager
def refusing(error: ApiError, *, in_stream: bool = False) -> Iterator[Client]:
    """A client of a server that answers everything with an error, or with a stream that ends in one."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200 if in_stream else error.status)
            self.end_headers()
            data = json.dumps(error.body()).encode()
            self.wfile.write(b"data: " + data + b"\n\n" if in_stream else data)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            yield Client(url, timeout_s=30, command=lambda verb: f"pdctl {verb} --name two")
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "kind", "exit_code", "hint"),
    [
        (429, CapacityError, 5, "pdctl status --name two"),
        (503, CapacityError, 5, "pdctl status --name two"),
        (504, DeadlineError, 6, "pdctl status --name two"),
        (408, DeadlineError, 6, "pdctl status --name two"),
        (401, UsageError, 2, "unset PDCTL_API_KEY"),
        (400, UsageError, 2, None),
        (500, PdctlError, 1, "pdctl logs --name two"),
    ],
)
def test_a_refusal_is_an_exit_code_and_a_hint(
    status: int, kind: type[PdctlError], exit_code: int, hint: str | None
) -> None:
    with refusing(ApiError(status, "because")) as client, pytest.raises(kind, match="because") as raised:
        client.post("/v1/completions", {"prompt": "ab"})
    assert raised.value.exit_code == exit_code
    assert raised.value.hint == hint or (hint is not None and hint in (raised.value.hint or ""))


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("no_daemon", 5), ("shutting_down", 5), ("unavailable", 5), ("timeout", 6), ("engine_failed", 1)],
)
def test_so_is_an_error_in_a_stream(code: str, exit_code: int) -> None:
    error = ApiError(503, "because", code=code)
    with refusing(error, in_stream=True) as client, pytest.raises(PdctlError, match="because") as raised:
        list(client.stream("/v1/completions", {"prompt": "ab"}))
    assert raised.value.exit_code == exit_code and raised.value.hint is not None

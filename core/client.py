"""A small HTTP client for our own API: JSON and server-sent events over the standard library.

Light on purpose: `pdctl generate` must answer before a heavier client is imported; bench/client.py is that one.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from pdctl.core.keys import KEY_VARIABLE, ApiKey
from pdctl.transport.errors import CapacityError, DeadlineError, NotFoundError, PdctlError, UsageError

DEFAULT_TIMEOUT_S = 600.0


class Client:
    """Talks to one server; a connection a request.

    Args:
        key: the server's API key, if it wants one.
        command: what a person types to run a command on its cluster, for hints; default: there are none.
    """

    def __init__(
        self,
        url: str,
        key: ApiKey | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        command: Callable[[str], str | None] = lambda verb: None,
    ) -> None:
        parts = urlsplit(url)
        self.url = url
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._key = key
        self._timeout_s = timeout_s
        self._hint = command

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """One answer, whole."""
        connection, response = self._send(path, body)
        try:
            answer: dict[str, Any] = json.loads(response.read())
            return answer
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._broken(error) from error
        finally:
            connection.close()

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
        """The chunks of a streamed answer, each with its arrival (monotonic ns). Closing it leaves the server.

        Raises:
            PdctlError: an error event in the stream, or a stream cut off before its end.
        """
        connection, response = self._send(path, {**body, "stream": True})
        try:
            while line := response.readline():
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                arrived = time.monotonic_ns()
                chunk = json.loads(data)
                if "error" in chunk:
                    raise self._event_error(chunk["error"])
                yield arrived, chunk
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._broken(error) from error
        finally:
            connection.close()
        raise PdctlError(f"{self.url}: the stream was cut off", hint=self._hint("status"))

    def _event_error(self, error: dict[str, Any]) -> PdctlError:
        message = f"{self.url}: {error['message']}"
        if error.get("code") == "timeout":
            return DeadlineError(message, hint=self._hint("status"))
        if error.get("code") in ("no_daemon", "shutting_down", "unavailable"):
            return CapacityError(message, hint=self._hint("status"))
        return PdctlError(message, hint=self._hint("logs"))

    def _send(self, path: str, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key.reveal()}"
        try:
            connection.request("POST", path, json.dumps(body).encode(), headers)
            response = connection.getresponse()
            if response.status == 200:
                return connection, response
            raise self._error(response.status, response.read())
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._broken(error) from error
        except PdctlError:
            connection.close()
            raise

    def _broken(self, error: Exception) -> PdctlError:
        if isinstance(error, TimeoutError):
            return DeadlineError(f"{self.url}: no answer in {self._timeout_s:.0f} s", hint=self._hint("status"))
        if isinstance(error, ConnectionRefusedError):
            return NotFoundError(f"{self.url}: nobody listens", hint=self._hint("status"))
        return PdctlError(f"{self.url}: {type(error).__name__}: {error}", hint=self._hint("status"))

    def _error(self, status: int, body: bytes) -> PdctlError:
        try:
            message = str(json.loads(body)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = body[:200].decode(errors="replace")
        if status in (429, 503):
            return CapacityError(message, hint=self._hint("status"))
        if status in (408, 504):
            return DeadlineError(message, hint=self._hint("status"))
        if status == 401:
            return UsageError(message, hint=f"unset {KEY_VARIABLE}: a cluster's owner needs none")
        if 400 <= status < 500:
            return UsageError(message)
        return PdctlError(f"HTTP {status}: {message}", hint=self._hint("logs"))

"""One request over HTTP, as a client of any OpenAI-compatible server sees it.

aiohttp, because a client that is slow to read measures itself. Makes samples; knows no workload but its requests.
"""

from __future__ import annotations

import asyncio
import errno
import json
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from pdctl.core.bench.reading import printable
from pdctl.core.bench.samples import Sample
from pdctl.core.bench.workloads import Request
from pdctl.core.keys import ApiKey
from pdctl.transport.errors import IncompatibleError, NotFoundError, UsageError

# A line of the stream holds one chunk, with all its token ids.
_MAX_LINE_BYTES = 1 << 20
_ASK_TIMEOUT_S = 10.0
_SHOWN_CHARS = 200


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where to ask.

    Attributes:
        model: as the server names it.
        tells_token_ids: whether it knows `return_token_ids`.
        is_pdctl: whether it is one of ours, which also tells its own times.
        vocab_size: ids that its model knows; None: it does not tell.
    """

    url: str
    model: str
    key: ApiKey | None = None
    tells_token_ids: bool = False
    is_pdctl: bool = False
    vocab_size: int | None = None


def session(timeout_s: float) -> aiohttp.ClientSession:
    """Connections without a limit, each request with one: `timeout_s` from its begin to its last byte."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        read_bufsize=_MAX_LINE_BYTES,
    )


async def find_server(url: str, key: ApiKey | None, model: str | None) -> Server:
    """Ask a server what it serves.

    Args:
        model: one of its models; None: the first.

    Raises:
        UsageError: no such URL, or no such model.
        NotFoundError: nobody answers there.
        IncompatibleError: what answers is no such server.
    """
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise UsageError(f"--base-url {url}: expected http://… or https://…")
    try:
        async with session(_ASK_TIMEOUT_S) as http, http.get(f"{base}/v1/models", headers=_headers(key)) as response:
            if response.status != 200:
                raise IncompatibleError(f"{base}/v1/models: HTTP {response.status}, expected 200")
            entries = {entry["id"]: entry for entry in (await response.json(content_type=None))["data"]}
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise NotFoundError(f"{base}: nobody answers ({_reason(error)})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise IncompatibleError(f"{base}/v1/models: not an OpenAI-compatible server's answer") from error
    chosen = model or next(iter(entries), None)
    if chosen is None or chosen not in entries:
        served = ", ".join(map(printable, entries)) or "none"
        raise UsageError(f"{base}: no model {chosen!r}, it serves {served}")
    owner = entries[chosen].get("owned_by")
    return Server(
        url=base,
        model=chosen,
        key=key,
        tells_token_ids=owner in ("pdctl", "vllm"),
        is_pdctl=owner == "pdctl",
        vocab_size=_vocab_size(entries[chosen]),
    )


def _vocab_size(entry: dict[str, Any]) -> int | None:
    """As our server tells it, or as the config.json says of which vLLM tells the directory."""
    if (told := _count(entry.get("vocab_size"))) is not None:
        return told
    try:
        return _count(json.loads((Path(entry["root"]) / "config.json").read_text())["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Milliseconds since the run began."""

    began_ns: int

    def ms(self) -> float:
        return (time.monotonic_ns() - self.began_ns) / 1e6


async def ask(
    http: aiohttp.ClientSession,
    server: Server,
    request: Request,
    clock: Clock,
    due_ms: float,
    *,
    history: tuple[int, ...] = (),
    ignore_eos: bool = True,
    on_first: asyncio.Event | None = None,
) -> Sample:
    """Send one request, greedy, streamed, and watch its answer arrive. Never raises for what a server does.

    Args:
        history: ids of all turns before this one.
        on_first: set at the first token, or at the end without one.
    """
    answer = _Answer()
    sent_ms = clock.ms()
    try:
        async with http.post(
            server.url + ("/v1/chat/completions" if request.messages is not None else "/v1/completions"),
            json=_body(server, request, history, ignore_eos),
            headers=_headers(server.key),
        ) as response:
            if response.status != 200:
                text = (await response.content.read(_MAX_LINE_BYTES)).decode(errors="replace")
                answer.fail(f"http_{response.status}", _error_text(text))
            else:
                await answer.read(response, clock, on_first)
    except TimeoutError:
        answer.fail("timeout", f"not complete after {clock.ms() - sent_ms:.0f} ms")
    except (aiohttp.ClientError, OSError) as error:
        if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            answer.fail("open_files", f"this client may have {limit} open files (ulimit -n): lower --max-concurrency")
        else:
            kind = "cut_off" if isinstance(error, aiohttp.ClientPayloadError) else "connection"
            answer.fail(kind, _reason(error))
    except (ValueError, TypeError, AttributeError, LookupError, HttpProcessingError) as error:
        answer.fail("malformed", f"a chunk of another shape: {_reason(error)}")
    finally:
        if on_first is not None:
            on_first.set()
    return answer.sample(request, due_ms, sent_ms)


class _Answer:
    """What has arrived of one answer."""

    def __init__(self) -> None:
        self._chunks_ms: list[float] = []
        self._token_ids: list[int] | None = None
        self._prompt_tokens: int | None = None
        self._cached_tokens: int | None = None
        self._output_tokens: int | None = None
        self._timings: dict[str, Any] = {}
        self._finish_reason: str | None = None
        self._finished_ms: float | None = None
        self._error: tuple[str, str] | None = None

    def fail(self, kind: str, why: str) -> None:
        self._error = (kind, printable(why, _SHOWN_CHARS))

    async def read(self, response: aiohttp.ClientResponse, clock: Clock, on_first: asyncio.Event | None) -> None:
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            at_ms = clock.ms()
            data = line[5:].strip()
            if data == b"[DONE]":
                self._end()
                return
            chunk = json.loads(data)
            if chunk.get("error") is not None:
                self.fail("event", _error_text(data.decode()))
                return
            self._take(chunk, at_ms)
            if on_first is not None and self._chunks_ms:
                on_first.set()
        self.fail("cut_off", f"the stream ended after {len(self._chunks_ms)} chunks, without [DONE]")

    def _end(self) -> None:
        if not self._chunks_ms and self._finished_ms is not None:
            # The end token was the only one, and came with the end.
            self._chunks_ms.append(self._finished_ms)
        if not self._chunks_ms:
            self.fail("empty", "the stream ended without a token")

    def _take(self, chunk: dict[str, Any], at_ms: float) -> None:
        if choices := chunk.get("choices"):
            if carries_token(choices[0]):
                self._chunks_ms.append(at_ms)
            if choices[0].get("finish_reason"):
                self._finish_reason, self._finished_ms = choices[0]["finish_reason"], at_ms
            if (ids := choices[0].get("token_ids")) is not None:
                self._token_ids = self._token_ids or []
                self._token_ids.extend(ids)
        if usage := chunk.get("usage"):
            self._prompt_tokens = _count(usage.get("prompt_tokens"))
            self._output_tokens = _count(usage.get("completion_tokens"))
            self._cached_tokens = _count((usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
        self._timings = chunk.get("timings") or self._timings

    def sample(self, request: Request, due_ms: float, sent_ms: float) -> Sample:
        ids = self._token_ids
        return Sample(
            index=request.index,
            group=request.group,
            due_ms=due_ms,
            sent_ms=sent_ms,
            chunks_ms=tuple(self._chunks_ms),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=len(ids) if self._output_tokens is None and ids is not None else self._output_tokens,
            token_ids=None if ids is None else tuple(ids),
            finish_reason=self._finish_reason,
            timings=self._timings,
            error_kind=None if self._error is None else self._error[0],
            error=None if self._error is None else self._error[1],
        )


def carries_token(choice: dict[str, Any]) -> bool:
    """Whether a chunk brings a token, so that TTFT and ITL are told from it.

    Of a completion every chunk does, by vLLM's definition. A chat also has chunks that bring none: the first often
    only names the role, and many servers send it before they have computed anything; the last may only say why the
    answer ended. Where the server tells token ids, they decide. Elsewhere a token is text of any kind (an answer,
    reasoning, a call), or an empty text in a chunk that neither names a role nor ends the answer: such a token is a
    special one, or part of a character. (`vllm bench serve` counts every chunk with choices, which is the same on
    vLLM: it sends the role together with the first token.)
    """
    delta = choice.get("delta")
    if delta is None:
        return True
    if choice.get("token_ids") is not None:
        return bool(choice["token_ids"])
    if any(value for key, value in delta.items() if key != "role"):
        return True
    return "role" not in delta and not choice.get("finish_reason") and delta.get("content") is not None


def _body(server: Server, request: Request, history: tuple[int, ...], ignore_eos: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": server.model,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.messages is not None:
        body["messages"] = list(request.messages)
    else:
        body["prompt"] = request.text if request.token_ids is None else [*history, *request.token_ids]
    if ignore_eos:
        body["ignore_eos"] = True
    if server.tells_token_ids:
        body["return_token_ids"] = True
    if server.is_pdctl:
        body["timings"] = True
    return body


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _headers(key: ApiKey | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key.reveal()}"}


def _error_text(text: str) -> str:
    """The message of an OpenAI error object, else the text."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return text


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__

"""One request under way: its rows submitted and waited for, its answer in OpenAI's words, whole or as events.

    Plan --submit--> Choices --deltas--> chunks of an event stream, or one object

Whatever grows with an answer (its tokens, its choices) is done in turns, for other answers wait on the same loop.
Knows rows only through `RowClient`, and no routes; called by api.py.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdctl.core.api_errors import ApiError, encode
from pdctl.core.logprobs import chat_logprobs, completion_logprobs
from pdctl.core.readiness import Readiness
from pdctl.core.requests import Choice, Delta, QueueFullError, RowClient, RowRequest, ShuttingDownError
from pdctl.core.server.held_bytes import Held
from pdctl.core.server.joined_lists import JoinedLists
from pdctl.core.server.turns import Turn
from pdctl.core.tokenizer import Tokenizer
from pdctl.transport.errors import CapacityError, PdctlError, UsageError
from pdctl.transport.rows import RowState, TokenLogprobs, Wish

log = logging.getLogger(__name__)

# What a client that reads slowly gets on top of its deadline, to take what is ready.
_SLOW_CLIENT_S = 30.0
# Of a whole answer, sent at a time.
_PIECE_CHARS = 1 << 18

_T = TypeVar("_T")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T | None:
    """Run `work` while the client is there; None if it left, once `work` has been cancelled and is over."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checked request: nothing in it can be refused any more, but for want of room.

    Attributes:
        rows: `num_choices` per prompt, prompt by prompt.
        hidden_ids: ids that end an answer without being part of it.
        wants_logprobs: so do all rows.
    """

    request_id: str
    created: int
    model: str
    chat: bool
    rows: tuple[RowRequest, ...]
    num_choices: int
    hidden_ids: frozenset[int]
    stops: tuple[str, ...]
    deadline_ns: int
    include_usage: bool
    return_token_ids: bool
    wants_logprobs: bool
    timings: bool


class Answer:
    """The answer to one HTTP request: its choices, and the waiting for them.

    Args:
        observe: told of every choice that is done.
        held: what its prompts take of the router's memory; given back by `close`.

    Attributes:
        choices: those that have a row, or had one: in the order of the plan, and in the end all of them.
        outcome: how the stream of events ended, for the log.
    """

    def __init__(
        self, plan: Plan, client: RowClient, tokenizer: Tokenizer, observe: Callable[[Choice], None], held: Held
    ) -> None:
        self.plan = plan
        self.choices: list[Choice] = []
        self.outcome = "streamed"
        self._client = client
        self._tokenizer = tokenizer
        self._observe = observe
        self._held = held
        self._num_done = 0
        self._news = asyncio.Event()

    async def begin(self) -> None:
        """Put the first request into a row, waiting for one if need be; `deltas` sees to the others.

        Raises:
            ApiError: it is refused, or there was no row in time.
        """
        with _refusals(self.plan):
            self._client.admit(self.plan.rows[0].tokens)
            await self._submit(0)

    async def _submit(self, index: int) -> None:
        plan = self.plan
        stream = await self._client.submit(plan.rows[index], self._news.set)
        self.choices.append(Choice(index, stream, self._tokenizer, hidden_ids=plan.hidden_ids, stops=plan.stops))

    async def _submit_others(self) -> None:
        """One row after the other, as they come free. Rings at its end, be that an error."""
        turn = Turn()
        try:
            with _refusals(self.plan):
                for index in range(1, len(self.plan.rows)):
                    await self._submit(index)
                    await turn.pass_on()
        finally:
            self._news.set()

    def cancel(self, wish: Wish = Wish.LEFT) -> None:
        """Want no more; rows that have ended are not touched."""
        self._client.cancel([choice.stream for choice in self.choices], wish)

    def close(self) -> None:
        """It has been sent, or nobody takes it any more."""
        self.cancel()
        self._held.release()

    @property
    def is_whole(self) -> bool:
        return self._num_done == len(self.plan.rows)

    async def deltas(self) -> AsyncIterator[tuple[Choice, Delta]]:
        """What comes, choice by choice, until all are done.

        Raises:
            ApiError: one of them failed, or the deadline passed. All rows are given up then.
        """
        deadline = asyncio.get_running_loop().call_at(self.plan.deadline_ns / 1e9, self._news.set)
        submitting = asyncio.ensure_future(self._submit_others())
        turn = Turn()
        try:
            while not self.is_whole:
                await self._news.wait()
                self._news.clear()
                if submitting.done():
                    submitting.result()
                for choice in self.choices:  # may grow meanwhile
                    if choice.is_done:
                        continue
                    delta = choice.advance()
                    if choice.failure is not None:
                        raise self._failure(choice)
                    if choice.is_done:
                        self._num_done += 1
                        self._observe(choice)
                    if choice.has_more:
                        self._news.set()
                    if delta.token_ids or delta.text or choice.is_done:
                        yield choice, delta
                    await turn.pass_on()
                if not self.is_whole and time.monotonic_ns() >= self.plan.deadline_ns:
                    raise _deadline_error(self.plan)
        except ApiError:
            self.cancel(Wish.ERROR)
            raise
        finally:
            deadline.cancel()
            submitting.cancel()
            await asyncio.wait((submitting,))
            if not submitting.cancelled():
                submitting.exception()  # told above, or too late to be

    def _failure(self, choice: Choice) -> ApiError:
        end = choice.failure
        if self._client.is_closing:
            return ApiError(503, "the server is shutting down", code="shutting_down", retry_after_s=1)
        if end is not None and end.no_daemon:
            return no_daemon_error(self._client.readiness, end.error)
        if end is not None and end.state is RowState.FAILED:
            log.error("%s failed: %s", self.plan.request_id, end.error)
            return ApiError(500, f"generation failed: {end.error}", code="engine_failed")
        if time.monotonic_ns() >= self.plan.deadline_ns:
            return _deadline_error(self.plan)
        return ApiError(500, "generation was cancelled", code="cancelled")

    # --- in OpenAI's words ---------------------------------------------------------------------------------

    def usage(self) -> dict[str, object]:
        """Each prompt counts once, however many answers it has: as its first answer found it."""
        firsts = self.choices[:: self.plan.num_choices]
        prompt = sum(len(choice.stream.request.tokens) for choice in firsts)
        completion = sum(choice.num_tokens for choice in self.choices)
        cached = sum(choice.stream.stats().cached_tokens for choice in firsts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def timings(self) -> object:
        """One object; for several choices a list of them, in their order."""
        found = [asdict(choice.stream.stats()) for choice in self.choices]
        for stats in found:
            del stats["cached_tokens"]
        return found[0] if len(found) == 1 else found

    def _envelope(self, *, chunk: bool) -> dict[str, object]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.plan.chat else "text_completion"
        plan = self.plan
        return {"id": plan.request_id, "object": kind, "created": plan.created, "model": plan.model}

    async def collect(self) -> list[bytes]:
        """The whole answer as the JSON of one object, in parts."""
        plan = self.plan
        texts: list[list[str]] = [[] for _ in plan.rows]
        token_ids = [JoinedLists() for _ in plan.rows]
        logprobs = [JoinedLists() for _ in plan.rows]
        async with aclosing(self.deltas()) as deltas:  # type: ignore[type-var]
            async for choice, delta in deltas:
                texts[choice.index].append(delta.text)
                if plan.return_token_ids:
                    token_ids[choice.index].add({"token_ids": delta.token_ids})
                found = self._logprobs(delta.logprobs, delta.text_offsets)
                if found is not None:
                    logprobs[choice.index].add(found)
        parts, part, turn = [], [encode(self._envelope(chunk=False))[:-1], ',"choices":['], Turn()
        for choice in self.choices:
            text = "".join(texts[choice.index])
            said = {"message": {"role": "assistant", "content": text}} if plan.chat else {"text": text}
            part.append("," if choice.index else "")
            part.append(encode({"index": choice.index, **said})[:-1])
            part.append(',"logprobs":')
            for text in logprobs[choice.index].parts() if plan.wants_logprobs else ("null",):
                part.append(text)
                if sum(map(len, part)) > _PIECE_CHARS:
                    parts.append("".join(part).encode())
                    part.clear()
                    await turn.pass_on()
            part.append(f',"finish_reason":{encode(choice.finish_reason)}')
            if plan.return_token_ids:
                part.append("," + "".join(token_ids[choice.index].parts())[1:-1])
            part.append("}")
            await turn.pass_on()
        rest: dict[str, object] = {"usage": self.usage()}
        if plan.timings:
            rest["timings"] = self.timings()
        part += ["],", encode(rest)[1:]]
        parts.append("".join(part).encode())
        return parts

    def _logprobs(self, logprobs: list[TokenLogprobs], text_offsets: list[int]) -> dict[str, object] | None:
        if not self.plan.wants_logprobs:
            return None
        if self.plan.chat:
            return chat_logprobs(self._tokenizer, logprobs)
        return completion_logprobs(self._tokenizer, logprobs, text_offsets)

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events; a failure is the last event."""
        try:
            async with aclosing(self.deltas()) as deltas:  # type: ignore[type-var]
                async for event in self._chunks(deltas):
                    yield b"data: " + encode(event).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            self.outcome = f"failed ({error.code})"
            yield b"data: " + encode(error.body()).encode() + b"\n\n"

    async def _chunks(self, deltas: AsyncIterator[tuple[Choice, Delta]]) -> AsyncIterator[dict[str, object]]:
        plan, envelope = self.plan, self._envelope(chunk=True)
        begun: set[int] = set()
        async for choice, delta in deltas:
            if plan.chat and choice.index not in begun:
                role = {"role": "assistant", "content": ""}
                yield envelope | {"choices": [self._piece(choice.index, role, None)]}
                begun.add(choice.index)
            # Of a token without text too, as in vLLM: whoever measures sees every step.
            content: object = delta.text
            if plan.chat:
                content = {"content": delta.text} if delta.text or not choice.is_done else {}
            piece = self._piece(choice.index, content, choice.finish_reason)
            if delta.logprobs:
                piece["logprobs"] = self._logprobs(delta.logprobs, delta.text_offsets)
            if plan.return_token_ids:
                piece["token_ids"] = delta.token_ids
            event = envelope | {"choices": [piece]}
            if self.is_whole and plan.timings and not plan.include_usage:
                event["timings"] = self.timings()
            yield event
        if plan.include_usage:
            event = envelope | {"choices": [], "usage": self.usage()}
            if plan.timings:
                event["timings"] = self.timings()
            yield event

    def _piece(self, index: int, content: object, finish_reason: str | None) -> dict[str, object]:
        name = "delta" if self.plan.chat else "text"
        return {"index": index, name: content, "logprobs": None, "finish_reason": finish_reason}

    def log_line(self, status: object) -> None:
        took_ms = (time.monotonic_ns() - self.plan.rows[0].received_ns) / 1e6
        log.info(
            "%s %s %s prompt=%d completion=%d finish=%s %.0f ms",
            self.plan.request_id,
            "chat" if self.plan.chat else "completion",
            status,
            sum(len(row.tokens) for row in self.plan.rows[:: self.plan.num_choices]),
            sum(choice.num_tokens for choice in self.choices),
            ",".join(choice.finish_reason or "-" for choice in self.choices),
            took_ms,
        )


def no_daemon_error(readiness: Readiness, words: str) -> ApiError:
    return ApiError(503, words, code="no_daemon", retry_after_s=math.ceil(readiness.absence_limit_s))


def _deadline_error(plan: Plan) -> ApiError:
    allowed_s = (plan.deadline_ns - plan.rows[0].received_ns) / 1e9
    return ApiError(504, f"not finished within {allowed_s:g} s", code="timeout")


@contextmanager
def _refusals(plan: Plan) -> Iterator[None]:
    """Errors of submitting, as the client is told of them."""
    try:
        yield
    except Exception as error:
        refusal = _submit_error(error, plan)
        if refusal is None:
            raise
        raise refusal from error


def _submit_error(error: Exception, plan: Plan) -> ApiError | None:
    """What the client is told of an error of `RowClient.submit`; None: a bug."""
    if isinstance(error, QueueFullError):
        return ApiError(429, f"overloaded: {error}", code="queue_full", retry_after_s=1)
    if isinstance(error, ShuttingDownError):
        return ApiError(503, "the server is shutting down", code="shutting_down", retry_after_s=1)
    if isinstance(error, TimeoutError):
        return _deadline_error(plan)
    if isinstance(error, CapacityError | UsageError):
        return ApiError(400, error.message, code="capacity_exceeded")
    if isinstance(error, PdctlError):
        log.error("%s: %s", plan.request_id, error)
        return ApiError(503, error.message, code="unavailable", retry_after_s=1)
    return None


class EventStream(Response):
    """Sends an answer's events; cancels its rows the moment the client leaves."""

    def __init__(self, answer: Answer) -> None:
        headers = {
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
            "X-Request-Id": answer.plan.request_id,
        }
        super().__init__(None, 200, headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer, status = self._answer, "client left"
        try:
            async with asyncio.timeout_at(answer.plan.deadline_ns / 1e9 + _SLOW_CLIENT_S):
                if await until_disconnect(receive, self._send_all(send)):
                    status = answer.outcome
        except TimeoutError:
            status = "client too slow"
        finally:
            answer.close()
            answer.log_line(status)

    async def _send_all(self, send: Send) -> bool:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._answer.events()) as events:  # type: ignore[type-var]
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True


class WholeAnswer(Response):
    """Sends a body that is there in parts: no part is so large that copying it would be felt."""

    def __init__(self, parts: list[bytes], headers: Mapping[str, str]) -> None:
        super().__init__(None, 200, {**headers, "Content-Length": str(sum(map(len, parts)))}, "application/json")
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        turn = Turn()
        for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await turn.pass_on()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

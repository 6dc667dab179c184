"""Requests in flight: rows on one side, text on the other.

`RowClient` is the router's hand in the segment: it submits, listens to the bell, copies tokens out, cancels
and recycles. `RowStream` is one row as its reader sees it. `Choice` makes text of it and ends it at a stop
string. All run on one event loop and none blocks it. Knows nothing of HTTP; called by api.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdctl.core.detokenizer import StopChecker
from pdctl.core.readiness import Readiness
from pdctl.core.wake import Wake, keep_bell
from pdctl.transport.doorbell import Bell
from pdctl.transport.errors import PdctlError
from pdctl.transport.layout import LOGPROB_RING, H, P, R
from pdctl.transport.rows import OWNED, TERMINAL, FinishReason, RowParams, Rows, RowState, TokenLogprobs
from pdctl.transport.segment import Participant, Role, Segment

if TYPE_CHECKING:
    from pdctl.core.tokenizer import Tokenizer

log = logging.getLogger(__name__)

SCAN_INTERVAL_S = 1.0
_TERMINAL = frozenset(map(int, TERMINAL))


class QueueFullError(Exception):
    """As many requests wait for a daemon as may."""


class ShuttingDownError(Exception):
    """The router is about to end."""


@dataclass(frozen=True, kw_only=True)
class RowRequest:
    """What goes into a row.

    Attributes:
        tokens: the prompt's ids.
        limit_tokens: prompt and output together.
        deadline_ns: CLOCK_MONOTONIC; also the end of waiting for a row.
        received_ns: when the client's request was read.
    """

    request_id: str
    tokens: Sequence[int]
    limit_tokens: int
    params: RowParams
    deadline_ns: int
    received_ns: int


@dataclass(frozen=True, kw_only=True)
class RowEnd:
    """How a row ended, or why nobody waits for its end.

    Attributes:
        no_daemon: nobody was there to begin it: it may be asked again.
    """

    state: RowState
    reason: FinishReason = FinishReason.NONE
    error: str = ""
    no_daemon: bool = False


@dataclass(frozen=True, kw_only=True)
class RowStats:
    """Where a request's time and tokens went. None: that phase did not happen (yet), or more than once.

    Attributes:
        queue_ms: waiting, for a row and then for the first daemon.
        prefill_ms: from a prefill daemon's first claim to READY, chunks of other rows in between included.
        handover_us: from READY after prefill to a decode daemon's claim.
        decode_ms: from that claim to the end.
        first_token_ms: from the request's arrival to its first token.
        cached_tokens, prefill_tokens, local_tokens: prompt tokens taken from the cache, computed by prefill
            daemons, and computed by decode daemons.
        adoptions, preemptions: how often another daemon took it over after a death, or it lost its blocks. After
            either, only first_token_ms is a single time; the others are None.
    """

    queue_ms: float | None
    prefill_ms: float | None
    handover_us: float | None
    decode_ms: float | None
    first_token_ms: float | None
    cached_tokens: int
    prefill_tokens: int
    local_tokens: int
    prefill_slot: int | None
    decode_slot: int | None
    adoptions: int
    preemptions: int


class RowStream:
    """One request in its row. Tokens wait here, not in the segment, for a reader who is slow.

    Attributes:
        end: set once; what `take` returns after that is the rest.
    """

    def __init__(
        self, client: RowClient, request: RowRequest, row: int, generation: int, on_news: Callable[[], None]
    ) -> None:
        self.request = request
        self.row = row
        self.generation = generation
        self.on_news = on_news
        self.end: RowEnd | None = None
        self._client = client
        self._pending: list[int] = []
        self._pending_logprobs: list[TokenLogprobs] = []
        self._stats: RowStats | None = None
        self._position = len(request.tokens)

    @property
    def has_begun(self) -> bool:
        """Whether there is a first token."""
        return self._position > len(self.request.tokens)

    def take(self) -> list[int]:
        """The tokens that came since the last call."""
        taken, self._pending = self._pending, []
        return taken

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Those of the tokens that `take` returns, if the request asks for them; else none."""
        taken, self._pending_logprobs = self._pending_logprobs, []
        return taken

    def cancel(self, *, enough: bool = False) -> None:
        """Want no more of it: the row ends soon and is recycled then. Nothing happens after the end.

        Args:
            enough: because the answer is whole, not because nobody wants it: it counts as finished.
        """
        self._client.cancel(self, FinishReason.STOP if enough else FinishReason.NONE)

    def stats(self) -> RowStats:
        """As of now; as of the end once that is known."""
        return self._stats or self._client.read_stats(self)

    def read(self, rows: Rows) -> int:
        """Copy new tokens out of the row; returns how many. For the client."""
        tokens = rows.new_tokens(self.row, self.generation, self._position)
        end = self._position + len(tokens)
        if tokens and self.request.params.num_logprobs is not None:
            self._pending_logprobs += rows.take_logprobs(self.row, self._position, end)
        self._position = end
        self._pending += tokens
        return len(tokens)

    def close(self, end: RowEnd) -> None:
        """Note the end, with the stamps as they are now. For the client."""
        self._stats = self._client.read_stats(self)
        self.end = end


class RowClient:
    """All requests of this router.

    Args:
        me: attached as router.
        bell: the own bell.
        local_prefill_tokens: see `Rows.submit`.
        max_batch: rows that one decode daemon runs at once.
        max_queue: requests that may wait for a daemon, in a row or for one; see `admit`.

    Attributes:
        readiness: looked at once a second.
    """

    def __init__(
        self,
        segment: Segment,
        me: Participant,
        bell: Bell,
        *,
        local_prefill_tokens: int,
        max_batch: int,
        max_queue: int,
    ) -> None:
        self.segment = segment
        self.readiness = Readiness(segment)
        self._rows = segment.rows
        self._me = me
        self._bell = bell
        self._wake = Wake(segment, me.slot, bell)
        self._local_prefill_tokens = local_prefill_tokens
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._live: dict[int, RowStream] = {}
        self._num_waiting = 0
        self._turn = asyncio.Lock()  # fair: first come, first served
        self._freed = asyncio.Event()
        self._closing = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_live(self) -> int:
        """Rows that are ours, those that only wait for their owner to let go included."""
        return len(self._live)

    @property
    def is_closing(self) -> bool:
        return self._closing

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row."""
        return self._num_waiting

    @property
    def num_queued(self) -> int:
        """Requests that no daemon has worked on yet, in rows or waiting for one."""
        return self._num_waiting + sum(map(self._rows.is_unclaimed, self._live))

    # --- life ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen to the bell. On the event loop's thread."""
        self._listen()
        self._on_timer()

    def begin_shutdown(self, why: str) -> None:
        """End all streams now, with `why` as the error; take no more."""
        self._closing = True
        self._freed.set()
        for stream in list(self._live.values()):
            if stream.end is None:
                stream.close(RowEnd(state=RowState.FAILED, error=why))
                self._cancel_row(stream)
                stream.on_news()

    async def finish_shutdown(self, timeout_s: float) -> int:
        """Wait for the owners to let go of the cancelled rows; returns how many did not."""
        deadline = time.monotonic() + timeout_s
        while self._live and time.monotonic() < deadline:
            self._scan()
            await asyncio.sleep(0.01)
        if self._timer is not None:
            self._timer.cancel()
        asyncio.get_running_loop().remove_reader(self._heard_fd)
        return len(self._live)

    # --- requests ------------------------------------------------------------------------------------------

    def admit(self, tokens: Sequence[int]) -> None:
        """Refuse a request that would have to wait while as many wait already as may.

        Its further prompts need no admission: they wait their turn for a row.

        Args:
            tokens: of its first prompt.

        Raises:
            QueueFullError: too many wait already.
            ShuttingDownError: the router ends.
        """
        if self._closing:
            raise ShuttingDownError
        queued = self.num_queued
        if queued >= self._max_queue and not self._starts_at_once(tokens):
            self.segment.words[H.REJECTED] += 1
            raise QueueFullError(f"{queued} requests wait for a daemon, at most {self._max_queue} may (--max-queue)")

    def _starts_at_once(self, tokens: Sequence[int]) -> bool:
        """Whether a daemon is free for it, and nobody else waits for that daemon."""
        states = self._rows.states()
        if self._num_waiting or int(RowState.FREE) not in states:
            return False
        if len(tokens) - 1 - self._rows.num_cached(tokens) <= self._local_prefill_tokens:
            ahead, role, places = RowState.READY, Role.DECODE, self._max_batch
        else:
            ahead, role, places = RowState.QUEUED, Role.PREFILL, 1
        slots = self.readiness.ready_slots(role)
        free = sum(max(0, places - self.segment.participant_word(slot, P.LOAD)) for slot in slots)
        return states.count(int(ahead)) < free

    async def submit(self, request: RowRequest, on_news: Callable[[], None]) -> RowStream:
        """Put a request into a row, once there is one.

        Args:
            on_news: called on the event loop whenever tokens or the end came.

        Raises:
            UsageError, CapacityError: it can never fit.
            ShuttingDownError: the router ends.
            TimeoutError: no row before its deadline.
        """
        self._count_waiting(1)
        try:
            async with asyncio.timeout_at(request.deadline_ns / 1e9), self._turn:
                while True:
                    if self._closing:
                        raise ShuttingDownError
                    self._freed.clear()
                    claim = self._rows.submit(
                        self._me,
                        request_id=request.request_id,
                        tokens=request.tokens,
                        limit_tokens=request.limit_tokens,
                        params=request.params,
                        local_prefill_tokens=self._local_prefill_tokens,
                        deadline_ns=request.deadline_ns,
                    )
                    if claim is not None:
                        break
                    await self._freed.wait()
                # No await from here to the end: nothing can come between the row and its entry.
                stream = RowStream(self, request, claim.row, claim.generation, on_news)
                self._live[claim.row] = stream
        finally:
            self._count_waiting(-1)
        state = self._rows.state(claim.row)
        if state is RowState.QUEUED:
            self._wake.for_work(Role.PREFILL)
        elif state is RowState.READY:
            self._wake.for_work(Role.DECODE)
        return stream

    def _count_waiting(self, change: int) -> None:
        self._num_waiting += change
        self._me.put(P.WAITING, self._num_waiting)

    def cancel(self, stream: RowStream, reason: FinishReason = FinishReason.NONE) -> None:
        if stream.end is None:
            stream.close(RowEnd(state=RowState.CANCELLED, reason=reason))
            self._cancel_row(stream)

    def _cancel_row(self, stream: RowStream) -> None:
        row = stream.row
        enough = stream.end is not None and stream.end.reason is FinishReason.STOP
        try:
            self._rows.cancel(row, stream.generation, enough=enough)
        except PdctlError as error:  # the lock is held by a stopped process; the timer tries again
            log.warning("%s: cancelling row %d: %s", stream.request.request_id, row, error)
            return
        state = self._rows.state(row)
        if state in _TERMINAL:
            self._let_go(stream)
            self._wake.for_room()
        elif state in OWNED:
            self._wake.owner(row)

    def read_stats(self, stream: RowStream) -> RowStats:
        """The row's stamps and counts; only while the row is this stream's."""
        rows, row = self._rows, stream.row
        received = stream.request.received_ns
        prefilling, ready = rows.get(row, R.T_PREFILLING), rows.get(row, R.T_READY)
        decoding, first = rows.get(row, R.T_DECODING), rows.get(row, R.T_FIRST_TOKEN)
        finished = rows.get(row, R.T_FINISHED) or time.monotonic_ns()
        claimed = prefilling if prefilling else decoding
        # After a death or preemption a row waits and is computed again in between: its spans are no phases.
        once = not rows.get(row, R.ADOPTIONS) and not rows.get(row, R.PREEMPTIONS)
        return RowStats(
            queue_ms=_span(received, claimed, 1e6) if once else None,
            prefill_ms=_span(prefilling, ready, 1e6) if once else None,
            handover_us=_span(ready, decoding, 1e3) if prefilling and once else None,
            decode_ms=_span(decoding, finished, 1e6) if once else None,
            first_token_ms=_span(received, first, 1e6),
            cached_tokens=rows.get(row, R.CACHED_TOKENS),
            prefill_tokens=rows.get(row, R.PREFILLED_TOKENS),
            local_tokens=rows.get(row, R.LOCAL_TOKENS),
            prefill_slot=(rows.get(row, R.PREFILL_SLOT) or 0) - 1 if prefilling else None,
            decode_slot=(rows.get(row, R.DECODE_SLOT) or 0) - 1 if decoding else None,
            adoptions=rows.get(row, R.ADOPTIONS),
            preemptions=rows.get(row, R.PREEMPTIONS),
        )

    # --- scanning ------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._heard_fd = self._bell.fileno()
        asyncio.get_running_loop().add_reader(self._heard_fd, self._on_bell)

    def _on_bell(self) -> None:
        self._bell.drain()
        self._scan()

    def _on_timer(self) -> None:
        """Bells may be lost, and cancelling may have had to wait: once a second look at everything."""
        self.readiness.look()
        if keep_bell(self._bell):
            asyncio.get_running_loop().remove_reader(self._heard_fd)
            self._listen()
        self._timer = asyncio.get_running_loop().call_later(SCAN_INTERVAL_S, self._on_timer)
        for stream in list(self._live.values()):
            if stream.end is not None:
                self._cancel_row(stream)
        self._scan()
        self._give_up_waiting()
        self._freed.set()  # the supervisor recycles rows too

    def _give_up_waiting(self) -> None:
        """End what waits for a daemon of a role that has been absent too long. An answer that has begun waits on."""
        absent = self.readiness.absent()
        if not absent:
            return
        waits_for = {RowState.QUEUED: Role.PREFILL.label, RowState.READY: Role.DECODE.label}
        for stream in list(self._live.values()):
            if stream.end is None and not stream.has_begun and waits_for.get(self._rows.state(stream.row)) in absent:
                stream.close(RowEnd(state=RowState.FAILED, error=self.readiness.absence_words(), no_daemon=True))
                self._cancel_row(stream)
                stream.on_news()

    def _scan(self) -> None:
        if not self._live:
            return
        # States before tokens: a row seen at its end has all its tokens in place.
        states = self._rows.states()
        for stream in list(self._live.values()):
            state = states[stream.row]
            number = stream.read(self._rows) if stream.end is None else 0
            news = number > 0
            if number >= LOGPROB_RING // 2 and stream.request.params.num_logprobs is not None:
                self._wake.owner(stream.row)  # it may have waited for room in the ring
            if state in _TERMINAL:
                news = self._note_end(stream, RowState(state)) or news
                self._let_go(stream)
            elif state == RowState.FREE:
                news = self._note_end(stream, RowState.FAILED, "its row was taken away") or news
                self._drop(stream)
            if news:
                stream.on_news()

    def _note_end(self, stream: RowStream, state: RowState, error: str = "") -> bool:
        if stream.end is not None:
            return False
        if state is RowState.FAILED:
            error = error or self._rows.error_text(stream.row) or "failed without a cause"
        reason = self._rows.get(stream.row, R.FINISH_REASON)
        stream.close(RowEnd(state=state, reason=FinishReason(reason), error=error))
        return True

    def _let_go(self, stream: RowStream) -> None:
        """Give the row back; everything of it has been copied out."""
        try:
            self._rows.recycle(stream.row, stream.generation)
        except PdctlError as error:
            log.warning("%s: recycling row %d: %s", stream.request.request_id, stream.row, error)
            return
        self._drop(stream)

    def _drop(self, stream: RowStream) -> None:
        del self._live[stream.row]
        self._freed.set()


def _span(start_ns: int, stop_ns: int, unit: float) -> float | None:
    if not start_ns or not stop_ns:
        return None
    return round(max(0, stop_ns - start_ns) / unit, 3)


@dataclass(frozen=True)
class Delta:
    """What came since the last one. Text may lag behind tokens: half characters and begun stops wait.

    Attributes:
        logprobs: of the tokens, if asked for.
        text_offsets: if so, where in the choice's text each token begins.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)


class Choice:
    """One answer as it grows.

    Args:
        hidden_ids: end-of-sequence and stop ids in force: they end the row and count, but are not text.
        stops: stop strings.

    Attributes:
        num_tokens: sampled tokens used, up to the one that ended it.
        finish_reason: "stop" or "length", once known.
        failure: how it ended, if it did not finish.
    """

    def __init__(
        self,
        index: int,
        stream: RowStream,
        tokenizer: Tokenizer,
        *,
        hidden_ids: frozenset[int],
        stops: Sequence[str],
    ) -> None:
        self.index = index
        self.stream = stream
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.failure: RowEnd | None = None
        self._hidden_ids = hidden_ids
        self._detokenizer = tokenizer.detokenizer()
        self._stop_checker = StopChecker(stops) if stops else None
        self._text_length = 0

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    def advance(self) -> Delta:
        """Take what the row has; notes the end if that is it."""
        ids, logprobs = self.stream.take(), self.stream.take_logprobs()
        offsets: list[int] = []
        if self._stop_checker is None and not logprobs:
            text = self._push(ids)
            self.num_tokens += len(ids)
        else:
            ids, text, offsets = self._push_singly(ids)
        end = self.stream.end
        if self.finish_reason is None and end is not None:
            if end.state is RowState.FINISHED:
                text += self._finish(end.reason)
            else:
                self.failure = end
        return Delta(text, ids, logprobs[: len(ids)], offsets[: len(logprobs)])

    def _push(self, ids: list[int]) -> str:
        if ids and ids[-1] in self._hidden_ids:  # nothing comes after it
            ids = ids[:-1]
        text = self._detokenizer.push(ids)
        self._text_length += len(text)
        return text

    def _push_singly(self, ids: list[int]) -> tuple[list[int], str, list[int]]:
        """Token by token: up to a stop string, and noting where each begins."""
        text, offsets = "", []
        for number, token in enumerate(ids, 1):
            offsets.append(self._text_length)
            self.num_tokens += 1
            shown, stopped = self._check_stop(self._push([token]))
            text += shown
            if stopped:
                self.finish_reason = "stop"
                self.stream.cancel(enough=True)
                return ids[:number], text, offsets
        return ids, text, offsets

    def _check_stop(self, text: str) -> tuple[str, bool]:
        if self._stop_checker is None:
            return text, False
        # As with vLLM, a stop string counts once it ends beyond min_tokens.
        return self._stop_checker.push(text, exempt=self.num_tokens <= self.stream.request.params.min_tokens)

    def _finish(self, reason: FinishReason) -> str:
        text, stopped = self._detokenizer.flush(), False
        if self._stop_checker is not None:
            text, stopped = self._check_stop(text)
            if not stopped:
                rest, stopped = self._stop_checker.flush()
                text += rest
        self.finish_reason = "stop" if stopped or reason is FinishReason.STOP else "length"
        return text

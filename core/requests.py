"""Requests in flight: rows on one side, text on the other.

`RowClient` is the router's hand in the segment: it submits, listens to the bell, copies tokens out, cancels
and recycles. `RowStream` is one row as its reader sees it. `Choice` makes text of it and ends it at a stop
string. All run on one event loop and none holds it up: what is done for many rows is done in slices, and the
segment's lock is tried for a moment and then again later. Knows nothing of HTTP; called by api.py and answer.py.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdctl.core.detokenizer import StopChecker
from pdctl.core.readiness import Readiness
from pdctl.core.server.turns import Turn
from pdctl.core.wake import Wake, keep_bell
from pdctl.transport.doorbell import Bell
from pdctl.transport.errors import DeadlineError, PdctlError
from pdctl.transport.layout import LOGPROB_RING, H, P, R
from pdctl.transport.rows import (
    OWNED,
    TERMINAL,
    WAITING,
    Claim,
    FinishReason,
    RowParams,
    Rows,
    RowState,
    TokenLogprobs,
    Wish,
)
from pdctl.transport.segment import Participant, Role, Segment

if TYPE_CHECKING:
    from pdctl.core.tokenizer import Tokenizer

log = logging.getLogger(__name__)

SCAN_INTERVAL_S = 1.0
# The segment's lock is tried for so long, on the loop: most sections are over by then.
LOCK_PATIENCE_S = 0.001
# ... and again after this.
LOCK_PAUSE_S = 0.005
# A prompt that takes milliseconds to look up.
_MANY_TOKENS = 16 << 10
# Tokens that a choice makes text of at a time; more wait for the next turn.
_TOKENS_AT_A_TIME = 32
_TERMINAL = frozenset(map(int, TERMINAL))


class QueueFullError(Exception):
    """As many requests wait for a daemon as may."""


class ShuttingDownError(Exception):
    """The router is about to end."""


@dataclass(frozen=True, kw_only=True)
class RowRequest:
    """What goes into a row.

    Attributes:
        tokens: the prompt's ids; shared by all answers to it.
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
        wish: what its row is to end as, if it is ended early.
    """

    def __init__(
        self, client: RowClient, request: RowRequest, row: int, generation: int, on_news: Callable[[], None]
    ) -> None:
        self.request = request
        self.row = row
        self.generation = generation
        self.on_news = on_news
        self.end: RowEnd | None = None
        self.wish = Wish.LEFT
        self._client = client
        self._pending: list[int] = []
        # Packed: a reader who is slow must not cost fifty objects a token.
        self._pending_logprobs: list[bytes] = []
        self._stats: RowStats | None = None
        self._position = len(request.tokens)

    @property
    def has_begun(self) -> bool:
        """Whether there is a first token."""
        return self._position > len(self.request.tokens)

    @property
    def has_more(self) -> bool:
        """Whether tokens wait to be taken."""
        return bool(self._pending)

    def take(self, most: int | None = None) -> list[int]:
        """The tokens that came since the last call, `most` of them at a time."""
        taken = self._pending[:most]
        del self._pending[:most]
        return taken

    def take_logprobs(self, most: int | None = None) -> list[TokenLogprobs]:
        """Those of the tokens that `take` returns, if the request asks for them; else none."""
        taken = self._pending_logprobs[:most]
        del self._pending_logprobs[:most]
        return list(map(_unpack_logprobs, taken))

    def cancel(self, wish: Wish = Wish.LEFT) -> None:
        """Want no more of it: the row ends soon and is recycled then. Nothing happens after the end."""
        self._client.cancel((self,), wish)

    def stats(self) -> RowStats:
        """As of now; as of the end once that is known."""
        return self._stats or self._client.read_stats(self)

    def read(self, rows: Rows) -> int:
        """Copy new tokens out of the row; returns how many. For the client."""
        tokens = rows.new_tokens(self.row, self.generation, self._position)
        end = self._position + len(tokens)
        if tokens and self.request.params.num_logprobs is not None:
            self._pending_logprobs += map(_pack_logprobs, rows.take_logprobs(self.row, self._position, end))
        self._position = end
        self._pending += tokens
        return len(tokens)

    def close(self, end: RowEnd) -> None:
        """Note the end, with the stamps as they are now. For the client."""
        self._stats = self._client.read_stats(self)
        self.end = end


def _pack_logprobs(one: TokenLogprobs) -> bytes:
    ids, values = zip((one.token, one.logprob), *one.top, strict=True)
    return struct.pack(f"<{len(ids)}I{len(ids)}f", *ids, *values)


def _unpack_logprobs(data: bytes) -> TokenLogprobs:
    number = len(data) // 8
    values = struct.unpack(f"<{number}I{number}f", data)
    own, *top = zip(values[:number], values[number:], strict=True)
    return TokenLogprobs(token=own[0], logprob=own[1], top=tuple(top))


class RowClient:
    """All requests of this router.

    Args:
        me: attached as router.
        bell: the own bell.
        local_prefill_tokens: see `Rows.submit`.
        max_batch: rows that one decode daemon runs at once.
        max_queue: requests that may wait for a daemon; see `admit`.

    Attributes:
        readiness: looked at once a second.
        on_first_token: told of a stream the moment its first token is seen.
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
        self.on_first_token: Callable[[RowStream], None] = lambda stream: None
        # Those whose end is known, and whose rows are to be cancelled or given back.
        self._unsettled: dict[int, RowStream] = {}
        self._settling: asyncio.Handle | None = None
        self._to_scan: deque[RowStream] = deque()
        self._scan_again = False
        self._scanning: asyncio.Handle | None = None
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
        """Requests that wait for a row or, in one, for a daemon: the first, or the next after prefill, a preemption
        or a death."""
        states = self._rows.states()
        return self._num_waiting + sum(states[row] in WAITING for row in self._live)

    # --- life ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen to the bell. On the event loop's thread."""
        self._listen()
        self._on_timer()

    def begin_shutdown(self, why: str) -> None:
        """End all streams now, with `why` as the error; take no more."""
        self._closing = True
        self._freed.set()
        self._break_off(list(self._live.values()), RowEnd(state=RowState.FAILED, error=why))

    async def finish_shutdown(self, timeout_s: float) -> int:
        """Wait for the owners to let go of the cancelled rows; returns how many did not."""
        deadline = time.monotonic() + timeout_s
        while self._live and time.monotonic() < deadline:
            self._scan()
            await asyncio.sleep(0.01)
        for handle in (self._timer, self._settling, self._scanning):
            if handle is not None:
                handle.cancel()
        asyncio.get_running_loop().remove_reader(self._heard_fd)
        return len(self._live)

    # --- requests ------------------------------------------------------------------------------------------

    def admit(self, tokens: Sequence[int]) -> None:
        """Refuse a request that would have to wait while as many wait already as may, or will when prefill is done.

        Its further prompts need no admission: they wait their turn for a row.

        Args:
            tokens: of its first prompt.

        Raises:
            QueueFullError: too many wait already.
            ShuttingDownError: the router ends.
        """
        if self._closing:
            raise ShuttingDownError
        queued = self.num_queued + self._count_soon_queued()
        if queued >= self._max_queue and not self._starts_at_once(tokens):
            self.segment.words[H.REJECTED] += 1
            raise QueueFullError(
                f"{queued} requests wait for a daemon, or will after prefill; "
                f"at most {self._max_queue} may (--max-queue)"
            )

    def _count_soon_queued(self) -> int:
        """Rows in prefill that will have to wait for decode after it, as things are."""
        states = self._rows.states()
        if not (prefilling := states.count(int(RowState.PREFILLING))):
            return 0
        free = self._free_places(Role.DECODE, self._max_batch)
        return min(prefilling, max(0, prefilling + states.count(int(RowState.READY)) - free))

    def _starts_at_once(self, tokens: Sequence[int]) -> bool:
        """Whether every daemon that it needs is free for it, and nobody else is on the way to that daemon."""
        states = self._rows.states()
        if states.count(int(RowState.FREE)) <= (waiting := self._num_waiting):
            return False
        queued, prefilling, ready = (
            states.count(int(state)) for state in (RowState.QUEUED, RowState.PREFILLING, RowState.READY)
        )
        # Whatever is prefilled needs a place in decode afterwards.
        if waiting + queued + prefilling + ready >= self._free_places(Role.DECODE, self._max_batch):
            return False
        if len(tokens) - 1 - self._rows.num_cached(tokens) <= self._local_prefill_tokens:
            return True
        return waiting + queued < self._free_places(Role.PREFILL, 1)

    def _free_places(self, role: Role, places: int) -> int:
        """Rows that daemons of a role could take now, of `places` each."""
        slots = self.readiness.ready_slots(role)
        return sum(max(0, places - self.segment.participant_word(slot, P.LOAD)) for slot in slots)

    async def submit(self, request: RowRequest, on_news: Callable[[], None]) -> RowStream:
        """Put a request into a row, once there is one.

        Args:
            on_news: called on the event loop whenever tokens or the end came.

        Raises:
            UsageError, CapacityError: it can never fit.
            ShuttingDownError: the router ends.
            TimeoutError: no row before its deadline.
            DeadlineError: somebody has held the segment's lock for long.
        """
        self._count_waiting(1)
        try:
            async with asyncio.timeout_at(request.deadline_ns / 1e9), self._turn:
                while True:
                    self._freed.clear()
                    claim = await self._put_into_row(request)
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

    async def _put_into_row(self, request: RowRequest) -> Claim | None:
        """None: no row is free. Nothing is awaited after the row is taken."""
        give_up_at = time.monotonic() + self.segment.lock.deadline_s
        cached = self._rows.num_cached(request.tokens)
        if len(request.tokens) > _MANY_TOKENS:
            await asyncio.sleep(0)  # that was a long turn already
        while True:
            if self._closing:
                raise ShuttingDownError
            try:
                with self._patience():
                    return self._rows.submit(
                        self._me,
                        request_id=request.request_id,
                        tokens=request.tokens,
                        limit_tokens=request.limit_tokens,
                        params=request.params,
                        local_prefill_tokens=self._local_prefill_tokens,
                        deadline_ns=request.deadline_ns,
                        cached_tokens=cached,
                    )
            except DeadlineError:
                if time.monotonic() >= give_up_at:
                    holder = f"process {self.segment.words[H.LOCK_PID]}"
                    waited_s = self.segment.lock.deadline_s
                    raise DeadlineError(f"the segment's lock: {holder} held it for {waited_s:g} s") from None
            await asyncio.sleep(LOCK_PAUSE_S)

    @contextmanager
    def _patience(self) -> Iterator[None]:
        """Sections inside wait only a moment for the lock: a stopped process may hold it, and the loop goes on."""
        lock = self.segment.lock
        usual, lock.deadline_s = lock.deadline_s, LOCK_PATIENCE_S
        try:
            yield
        finally:
            lock.deadline_s = usual

    def _count_waiting(self, change: int) -> None:
        self._num_waiting += change
        self._me.put(P.WAITING, self._num_waiting)

    def cancel(self, streams: Iterable[RowStream], wish: Wish = Wish.LEFT) -> None:
        """Want no more of these; those that have ended are not touched."""
        reason = FinishReason.STOP if wish is Wish.ENOUGH else FinishReason.NONE
        for stream in streams:
            if stream.end is None:
                stream.wish = wish
                stream.close(RowEnd(state=RowState.CANCELLED, reason=reason))
                self._unsettled[stream.row] = stream
        self._settle_now()

    def _break_off(self, streams: Iterable[RowStream], end: RowEnd) -> None:
        """End streams with an error of ours."""
        for stream in streams:
            if stream.end is None:
                stream.wish = Wish.ERROR
                stream.close(end)
                self._unsettled[stream.row] = stream
                stream.on_news()
        self._settle_now()

    def _settle_now(self) -> None:
        if self._settling is None:
            self._settle()

    def _settle(self) -> None:
        """Cancel and give back rows whose end is known, for one slice and while the lock is free; the rest soon."""
        self._settling = None
        turn, loop = Turn(), asyncio.get_running_loop()
        with self._patience():
            while self._unsettled:
                row = next(iter(self._unsettled))
                try:
                    self._settle_row(self._unsettled[row])
                except DeadlineError:
                    self._settling = loop.call_later(LOCK_PAUSE_S, self._settle)
                    return
                except PdctlError as error:  # the timer tries again
                    log.warning("row %d: %s", row, error)
                del self._unsettled[row]
                if self._unsettled and turn.is_over:
                    self._settling = loop.call_soon(self._settle)
                    return

    def _settle_row(self, stream: RowStream) -> None:
        row = stream.row
        if self._live.get(row) is not stream:
            return
        cancelled = self._rows.state(row) not in _TERMINAL
        if cancelled:
            self._rows.cancel(row, stream.generation, wish=stream.wish)
        state = self._rows.state(row)
        if state in _TERMINAL:
            self._rows.recycle(row, stream.generation)
            self._drop(stream)
            if cancelled:
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
        for stream in self._live.values():
            if stream.end is not None:
                self._unsettled[stream.row] = stream
        self._settle_now()
        self._scan()
        self._give_up_waiting()
        self._freed.set()  # the supervisor recycles rows too

    def _give_up_waiting(self) -> None:
        """End what waits for a daemon of a role that has been absent too long. An answer that has begun waits on."""
        absent = self.readiness.absent()
        if not absent:
            return
        waits_for = {RowState.QUEUED: Role.PREFILL.label, RowState.READY: Role.DECODE.label}
        hopeless = [
            stream
            for stream in self._live.values()
            if not stream.has_begun and waits_for.get(self._rows.state(stream.row)) in absent
        ]
        words = self.readiness.absence_words()
        self._break_off(hopeless, RowEnd(state=RowState.FAILED, error=words, no_daemon=True))

    def _scan(self) -> None:
        """Look at all rows, in slices; a bell in the middle of it means: all of them again."""
        if self._scanning is not None:
            self._scan_again = True
            return
        self._to_scan.extend(self._live.values())
        self._scan_on()

    def _scan_on(self) -> None:
        self._scanning = None
        # States before tokens: a row seen at its end has all its tokens in place.
        states, turn = self._rows.states(), Turn()
        while self._to_scan:
            stream = self._to_scan.popleft()
            if self._live.get(stream.row) is stream:
                self._look_at(stream, states[stream.row])
            if not self._to_scan and self._scan_again:
                self._scan_again = False
                self._to_scan.extend(self._live.values())
                states = self._rows.states()
            if self._to_scan and turn.is_over:
                self._scanning = asyncio.get_running_loop().call_soon(self._scan_on)
                break
        self._settle_now()

    def _look_at(self, stream: RowStream, state: int) -> None:
        had_begun = stream.has_begun
        number = stream.read(self._rows) if stream.end is None else 0
        news = number > 0
        if news and not had_begun:
            self.on_first_token(stream)
        if number >= LOGPROB_RING // 2 and stream.request.params.num_logprobs is not None:
            self._wake.owner(stream.row)  # it may have waited for room in the ring
        if state in _TERMINAL:
            news = self._note_end(stream, RowState(state)) or news
            self._unsettled[stream.row] = stream
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

    @property
    def has_more(self) -> bool:
        """Whether there is more to take at once."""
        return not self.is_done and self.stream.has_more

    def advance(self) -> Delta:
        """Take what the row has, or the first of it (see `has_more`); notes the end if that is it."""
        ids, logprobs = self.stream.take(_TOKENS_AT_A_TIME), self.stream.take_logprobs(_TOKENS_AT_A_TIME)
        offsets: list[int] = []
        if not ids and self.stream.end is None:
            return Delta("", ids)
        if self._stop_checker is None and not logprobs:
            text = self._push(ids)
            self.num_tokens += len(ids)
        else:
            ids, text, offsets = self._push_singly(ids)
        end = self.stream.end
        if self.finish_reason is None and end is not None and not self.has_more:
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
                self.stream.cancel(Wish.ENOUGH)
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

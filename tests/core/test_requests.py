"""Rows as the router sees them: waiting, waking, ending, cancelling, recycling; daemons played by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from pdctl.core.detokenizer import IncrementalDetokenizer
from pdctl.core.readiness import Readiness
from pdctl.core.requests import (
    Choice,
    QueueFullError,
    RowClient,
    RowRequest,
    RowStream,
    ShuttingDownError,
)
from pdctl.transport.doorbell import Bell
from pdctl.transport.errors import DeadlineError
from pdctl.transport.layout import LOGPROB_RING, DType, Geometry, H, P, R
from pdctl.transport.lock import NoFileLock
from pdctl.transport.recovery import verify
from pdctl.transport.rows import Actor, Claim, FinishReason, RowParams, RowState, TokenLogprobs
from pdctl.transport.segment import ParticipantState, Role, Segment

EOS = 0
# With 2 tokens of local prefill: a prompt for a prefill daemon, and one for decode.
LONG, SHORT = list(b"0123456789"), list(b"abc")


class ByteTokenizer:
    """One id a byte."""

    def detokenizer(self) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(lambda ids: bytes(ids).decode("utf-8", "replace"))


def logprobs_of(token: int) -> TokenLogprobs:
    return TokenLogprobs(token=token, logprob=-token / 8, top=((token + 1, -0.25),))


class World:
    """A segment, a router, and both daemons' bells."""

    def __init__(self, run_dir: Path, *, max_rows: int = 4, max_queue: int = 8, max_batch: int = 2) -> None:
        self.segment = Segment.anonymous(
            Geometry(
                num_blocks=64,
                block_tokens=4,
                num_layers=1,
                num_kv_heads=1,
                head_dim=1,
                dtype=DType.FLOAT32,
                max_rows=max_rows,
                max_context=256,
                max_participants=8,
            )
        )
        self.rows = self.segment.rows
        self.prefill = self.segment.attach(Role.PREFILL)
        self.decode = self.segment.attach(Role.DECODE)
        for daemon in (self.prefill, self.decode):
            daemon.put(P.STATE, ParticipantState.READY)
        self.prefill_bell = Bell(run_dir, self.prefill.slot)
        self.decode_bell = Bell(run_dir, self.decode.slot)
        self.me = self.segment.attach(Role.ROUTER)
        self.bell = Bell(run_dir, self.me.slot)
        self.client = RowClient(
            self.segment, self.me, self.bell, local_prefill_tokens=2, max_batch=max_batch, max_queue=max_queue
        )
        for daemon in (self.prefill, self.decode):
            daemon.put(P.STATE, ParticipantState.READY)
        self.news = asyncio.Event()

    async def submit(
        self,
        prompt: bytes = b"0123456789",
        *,
        limit: int = 20,
        timeout_s: float = 30,
        params: RowParams | None = None,
    ) -> RowStream:
        now = time.monotonic_ns()
        request = RowRequest(
            request_id="r",
            tokens=list(prompt),
            limit_tokens=limit,
            params=params or RowParams(),
            deadline_ns=now + int(timeout_s * 1e9),
            received_ns=now,
        )
        return await self.client.submit(request, self.news.set)

    def claim(self, row: int) -> Claim:
        """Take a row through prefill to decode."""
        if self.rows.state(row) is RowState.QUEUED:
            claim = self.rows.claim(self.prefill, row, alone=True)
            assert claim is not None
            self.rows.commit_kv(row, claim.num_tokens - 1)
            self.rows.hand_over(row)
        claim = self.rows.claim(self.decode, row, alone=True)
        assert claim is not None
        return claim

    def emit(self, claim: Claim, position: int, text: bytes) -> None:
        for offset, token in enumerate(text):
            if not self.rows.get(claim.row, R.T_FIRST_TOKEN):
                self.rows.put(claim.row, R.T_FIRST_TOKEN, time.monotonic_ns())
            self.rows.commit_kv(claim.row, position + offset)
            if self.rows.params(claim.row).num_logprobs is not None:
                assert self.rows.has_logprob_room(claim.row, position + offset)
                self.rows.put_logprobs(claim.row, position + offset, logprobs_of(token))
            self.rows.commit_token(claim.row, claim.generation, position + offset, token)
        self.decode_bell.ring(self.me.slot)

    def finish(self, claim: Claim, reason: FinishReason) -> None:
        self.rows.finish(claim.row, reason)
        self.decode_bell.ring(self.me.slot)

    async def hear(self) -> None:
        await self.news.wait()
        self.news.clear()


def play(run_dir: Path, scenario: Callable[[World], Awaitable[None]], **options: int) -> None:
    async def run() -> None:
        async with asyncio.timeout(30):
            world = World(run_dir, **options)
            world.client.start()
            await scenario(world)
            for row in world.rows.owned_by(world.decode.slot, world.decode.incarnation):
                world.rows.end_cancelled(row, Actor.DECODE)
            world.client.begin_shutdown("over")
            assert await world.client.finish_shutdown(5) == 0
            assert set(world.rows.states()) == {RowState.FREE}
            assert verify(world.segment) == []

    asyncio.run(run())


def test_tokens_arrive_in_order_and_the_row_is_recycled(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        stream = await world.submit()
        assert world.prefill_bell.drain()
        assert not world.decode_bell.drain()
        claim = world.claim(stream.row)
        world.emit(claim, 10, b"ab")
        await world.hear()
        assert stream.take() == list(b"ab")
        world.emit(claim, 12, b"c")
        world.finish(claim, FinishReason.LENGTH)
        while stream.end is None:
            await world.hear()
        assert stream.take() == list(b"c")
        assert (stream.end.state, stream.end.reason) == (RowState.FINISHED, FinishReason.LENGTH)
        assert world.rows.state(stream.row) is RowState.FREE
        stats = stream.stats()
        assert stats.queue_ms is not None and stats.prefill_ms is not None and stats.decode_ms is not None
        assert stats.first_token_ms is not None and stats.handover_us is not None
        assert (stats.prefill_slot, stats.decode_slot) == (world.prefill.slot, world.decode.slot)

    play(tmp_path, scenario)


def test_log_probabilities_come_with_tokens_and_make_room(tmp_path: Path) -> None:
    """An owner that waits for room is woken; one that is read as it goes is left alone."""

    async def scenario(world: World) -> None:
        stream = await world.submit(limit=200, params=RowParams(num_logprobs=1))
        claim, position = world.claim(stream.row), 10
        text = bytes(range(LOGPROB_RING)) * 2 + b"rest"
        for part in (text[:1], text[1:4], text[4 : 4 + LOGPROB_RING], text[4 + LOGPROB_RING :]):
            world.decode_bell.drain()
            world.emit(claim, position, part)
            position += len(part)
            await world.hear()
            assert stream.take() == list(part)
            assert stream.take_logprobs() == [logprobs_of(token) for token in part]
            assert world.rows.get(claim.row, R.READ_TOKENS) == position
            assert world.decode_bell.drain() is (len(part) >= LOGPROB_RING // 2)

    play(tmp_path, scenario)


def test_short_prompts_ring_decode_and_have_no_prefill_times(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        stream = await world.submit(b"abc")
        assert world.decode_bell.drain()
        assert not world.prefill_bell.drain()
        claim = world.claim(stream.row)
        world.emit(claim, 3, b"x")
        world.finish(claim, FinishReason.STOP)
        while stream.end is None:
            await world.hear()
        stats = stream.stats()
        assert (stats.prefill_ms, stats.handover_us, stats.prefill_slot) == (None, None, None)
        assert stats.queue_ms is not None

    play(tmp_path, scenario)


def test_lost_bells_cost_a_second_at_most(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        stream = await world.submit()
        claim = world.claim(stream.row)
        world.rows.commit_token(claim.row, claim.generation, 10, 65)
        await world.hear()
        assert stream.take() == [65]

    play(tmp_path, scenario)


def test_requests_wait_for_rows_in_order(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        first = await world.submit()
        order: list[int] = []

        async def later(number: int) -> None:
            stream = await world.submit()
            order.append(number)
            stream.cancel()

        tasks = [asyncio.create_task(later(number)) for number in range(5)]
        await asyncio.sleep(0.01)
        assert world.client.num_waiting == 5
        first.cancel()
        await asyncio.gather(*tasks)
        assert order == [0, 1, 2, 3, 4]
        assert world.client.num_waiting == 0

    play(tmp_path, scenario, max_rows=1)


def test_waiting_is_bounded_in_number_and_time(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        first = await world.submit()
        world.claim(first.row)
        waiting = [asyncio.create_task(world.submit(timeout_s=0.05)) for _ in range(2)]
        await asyncio.sleep(0)
        assert world.me.get(P.WAITING) == world.client.num_queued == 2
        with pytest.raises(QueueFullError, match=r"2 requests wait for a daemon, or .*; at most 2 may"):
            world.client.admit(LONG)
        assert world.segment.words[H.REJECTED] == 1
        for task in waiting:
            with pytest.raises(TimeoutError):
                await task
        assert world.me.get(P.WAITING) == world.client.num_waiting == 0
        world.client.admit(LONG)

    play(tmp_path, scenario, max_rows=1, max_queue=2)


def test_whoever_waits_for_a_daemon_is_in_the_queue(tmp_path: Path) -> None:
    """For the first one or the next: after prefill, when it was put back, when it lost its blocks."""

    async def scenario(world: World) -> None:
        first, second = await world.submit(), await world.submit(b"abc")
        assert world.client.num_queued == 2
        with pytest.raises(QueueFullError):
            world.client.admit(LONG)
        assert world.rows.claim(world.prefill, first.row, alone=True) is not None
        assert world.client.num_queued == 1
        with pytest.raises(QueueFullError):
            world.client.admit(LONG)  # the one place in decode is for the second
        world.rows.commit_kv(first.row, 9)
        world.rows.hand_over(first.row)
        assert world.client.num_queued == 2
        with pytest.raises(QueueFullError):
            world.client.admit(LONG)
        world.claim(second.row)
        world.claim(first.row)
        assert world.client.num_queued == 0
        world.rows.put_back(first.row, Actor.DECODE)
        assert world.client.num_queued == 1
        world.claim(first.row)
        assert world.rows.preempt(first.row, Actor.DECODE)
        assert world.client.num_queued == 1
        assert world.segment.words[H.REJECTED] == 3

    play(tmp_path, scenario, max_queue=2, max_batch=1)


def test_with_no_queue_nobody_waits_for_decode_either(tmp_path: Path) -> None:
    """One place in decode, and prefill idle: what would only wait after it is refused before it."""

    async def scenario(world: World) -> None:
        world.client.admit(LONG)
        row = (await world.submit()).row
        claim = world.rows.claim(world.prefill, row, alone=True)
        assert claim is not None  # and not yet said so in its load
        for _ in range(2):
            with pytest.raises(QueueFullError):
                world.client.admit(LONG)
            world.rows.commit_kv(row, 9)
            if world.rows.state(row) is RowState.PREFILLING:
                world.rows.hand_over(row)
        world.claim(row)
        world.decode.put(P.LOAD, 1)
        for prompt in (LONG, SHORT):
            with pytest.raises(QueueFullError):
                world.client.admit(prompt)
        world.decode.put(P.LOAD, 0)

    play(tmp_path, scenario, max_queue=0, max_batch=1)


def test_the_lock_is_not_waited_for_on_the_loop(tmp_path: Path) -> None:
    """Submitting, cancelling and recycling wait for it, the loop does not; and submitting not for ever."""

    async def scenario(world: World) -> None:
        lock, held = world.segment.lock, world.segment.lock._file_lock
        first, second = await world.submit(), await world.submit()
        claim = world.claim(second.row)
        world.emit(claim, 10, b"a")
        world.finish(claim, FinishReason.LENGTH)
        turns, was_waiting = 0, world.client.num_live

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        lock._file_lock = HeldLock()
        try:
            submitting = asyncio.create_task(world.submit())
            first.cancel()
            while second.end is None:
                await world.hear()
            assert second.take() == [97]
            for _ in range(20):
                before = turns
                await asyncio.sleep(0.002)
                assert turns > before
            assert not submitting.done() and world.client.num_live == was_waiting
            submitting.cancel()  # its client leaves
            lock.deadline_s = 0.05
            with pytest.raises(DeadlineError, match=r"held it for 0\.05 s"):
                await world.submit()
        finally:
            lock._file_lock = held
            counting.cancel()
        while world.client.num_live:
            await asyncio.sleep(0.001)
        (await world.submit()).cancel()

    play(tmp_path, scenario)


class HeldLock(NoFileLock):
    """Somebody else's."""

    def try_acquire(self) -> bool:
        return False


def test_with_no_queue_whoever_finds_a_free_daemon_is_served(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.client.admit(LONG)
        row = (await world.submit()).row
        for busy in (False, True):
            if busy:  # the only prefill daemon has a row
                assert world.rows.claim(world.prefill, row, alone=True) is not None
                world.prefill.put(P.LOAD, 1)
            with pytest.raises(QueueFullError):
                world.client.admit(LONG)
            world.client.admit(SHORT)  # decode is free, and that is where a short prompt goes
        world.decode.put(P.LOAD, 1)  # the second place is for the row in prefill
        with pytest.raises(QueueFullError):
            world.client.admit(SHORT)
        world.decode.put(P.LOAD, 0)
        world.decode.put(P.STATE, ParticipantState.STOPPING)
        with pytest.raises(QueueFullError):
            world.client.admit(SHORT)
        world.rows.put_back(row, Actor.PREFILL)

    play(tmp_path, scenario, max_queue=0, max_batch=2)


def test_without_a_free_row_nobody_starts_at_once(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.submit(b"abc")
        with pytest.raises(QueueFullError):
            world.client.admit(SHORT)

    play(tmp_path, scenario, max_queue=0, max_rows=1)


def test_a_role_that_lacks_is_told_after_a_moment(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        readiness = Readiness(world.segment, absence_limit_s=600)
        assert readiness.absent() == []
        world.decode.put(P.STATE, ParticipantState.STARTING)
        assert (readiness.missing(), readiness.absent()) == (["decode"], [])
        readiness.absence_limit_s = 0
        assert readiness.absent() == ["decode"]
        readiness.absence_limit_s = 600
        world.decode.put(P.STATE, ParticipantState.READY)
        assert readiness.absent() == []
        world.decode.put(P.DRAIN, 1)
        assert (readiness.missing(), readiness.absent()) == (["decode"], [])

    play(tmp_path, scenario)


def test_cancel_without_an_owner_ends_at_once(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        stream = await world.submit()
        stream.cancel()
        stream.cancel()
        assert world.rows.state(stream.row) is RowState.FREE
        assert world.client.num_live == 0

    play(tmp_path, scenario)


def test_cancel_with_an_owner_rings_it_and_waits_for_it(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        stream = await world.submit()
        claim = world.claim(stream.row)
        world.decode_bell.drain()
        stream.cancel()
        assert world.decode_bell.drain()
        assert world.rows.get(stream.row, R.CANCEL) == 1
        world.emit(claim, 10, b"unread")
        await asyncio.sleep(0.01)
        assert stream.take() == []
        assert (world.client.num_live, world.rows.state(stream.row)) == (1, RowState.DECODING)
        world.rows.end_cancelled(stream.row, Actor.DECODE)
        world.decode_bell.ring(world.me.slot)
        while world.client.num_live:
            await asyncio.sleep(0.001)
        assert world.rows.state(stream.row) is RowState.FREE

    play(tmp_path, scenario)


def test_a_cancelled_row_that_lost_its_owner_is_ended(tmp_path: Path) -> None:
    """The owner let go of the row between our wish and its reading it."""

    async def scenario(world: World) -> None:
        stream = await world.submit()
        world.claim(stream.row)
        stream.cancel()
        world.rows.put_back(stream.row, Actor.DECODE)
        while world.client.num_live:
            await asyncio.sleep(0.01)
        assert world.rows.state(stream.row) is RowState.FREE

    play(tmp_path, scenario)


def test_failure_brings_its_cause(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        stream = await world.submit()
        claim = world.claim(stream.row)
        world.emit(claim, 10, b"a")
        world.rows.fail(stream.row, "decode 0 died three times", Actor.DECODE)
        world.decode_bell.ring(world.me.slot)
        while stream.end is None:
            await world.hear()
        assert stream.take() == list(b"a")
        assert (stream.end.state, stream.end.error) == (RowState.FAILED, "decode 0 died three times")

    play(tmp_path, scenario)


def test_recycling_is_tried_again_when_the_lock_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: World) -> None:
        stream = await world.submit()
        claim = world.claim(stream.row)
        recycle = world.rows.recycle

        def refuse(row: int, generation: int, actor: Actor = Actor.ROUTER) -> bool:
            monkeypatch.setattr(world.rows, "recycle", recycle)
            raise DeadlineError("the lock is held")

        monkeypatch.setattr(world.rows, "recycle", refuse)
        world.finish(claim, FinishReason.LENGTH)
        await world.hear()
        assert stream.end is not None
        while world.client.num_live:
            await asyncio.sleep(0.01)

    play(tmp_path, scenario)


def test_shutdown_ends_streams_waiters_and_rows(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        stream = await world.submit()
        waiter = asyncio.create_task(world.submit())
        await asyncio.sleep(0)
        world.client.begin_shutdown("going down")
        await world.hear()
        assert stream.end is not None and stream.end.error == "going down"
        with pytest.raises(ShuttingDownError):
            await waiter
        with pytest.raises(ShuttingDownError):
            await world.submit()
        with pytest.raises(ShuttingDownError):
            world.client.admit(LONG)

    play(tmp_path, scenario, max_rows=1)


def test_no_other_words_are_written_by_an_idle_client(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        before = bytes(world.segment.words[: world.segment.layout.meta_words])
        await asyncio.sleep(0.02)
        assert bytes(world.segment.words[: world.segment.layout.meta_words]) == before
        assert world.me.get(P.ROLE) == Role.ROUTER

    play(tmp_path, scenario)


# --- choices ---------------------------------------------------------------------------------------------------


def choice_of(stream: RowStream, stops: tuple[str, ...] = ()) -> Choice:
    return Choice(0, stream, ByteTokenizer(), hidden_ids=frozenset({EOS}), stops=stops)  # type: ignore[arg-type]


def test_end_of_sequence_counts_and_is_not_text(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        stream = await world.submit()
        choice, claim = choice_of(stream), world.claim(stream.row)
        world.emit(claim, 10, b"hi\0")
        await world.hear()
        delta = choice.advance()
        assert (delta.text, delta.token_ids, choice.is_done) == ("hi", [*b"hi", EOS], False)
        world.finish(claim, FinishReason.STOP)
        await world.hear()
        assert choice.advance().text == ""
        assert (choice.finish_reason, choice.num_tokens) == ("stop", 3)

    play(tmp_path, scenario)


def test_a_stop_string_cancels_the_row_and_counts_to_its_last_token(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        stream = await world.submit()
        choice, claim = choice_of(stream, ("lo",)), world.claim(stream.row)
        world.emit(claim, 10, b"hel")
        await world.hear()
        assert choice.advance().text == "he"
        world.emit(claim, 13, b"lo wor")
        await world.hear()
        delta = choice.advance()
        assert (delta.text, delta.token_ids) == ("l", list(b"lo"))
        assert (choice.finish_reason, choice.num_tokens) == ("stop", 5)
        assert world.rows.get(stream.row, R.CANCEL)

    play(tmp_path, scenario)


def test_stop_strings_count_from_min_tokens_on(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        stream = await world.submit(params=RowParams(min_tokens=4))
        choice, claim = choice_of(stream, ("lo",)), world.claim(stream.row)
        world.emit(claim, 10, b"lolo")
        await world.hear()
        assert (choice.advance().text, choice.is_done) == ("lolo", False)
        world.emit(claim, 14, b"lo wo")
        await world.hear()
        delta = choice.advance()
        assert (delta.text, delta.token_ids, choice.finish_reason) == ("", list(b"lo"), "stop")

    play(tmp_path, scenario)


def test_each_token_with_log_probabilities_has_its_place_in_the_text(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        stream = await world.submit(params=RowParams(num_logprobs=1))
        choice, claim = choice_of(stream, ("zz",)), world.claim(stream.row)
        world.emit(claim, 10, "aéz".encode())
        await world.hear()
        delta = choice.advance()
        assert delta.text == "aé"
        assert delta.text_offsets == [0, 1, 1, 2]
        world.emit(claim, 14, b"zy\0")
        await world.hear()
        delta = choice.advance()
        # Nothing of what comes after the stop.
        assert (delta.token_ids, delta.text_offsets) == (list(b"z"), [3])
        assert delta.logprobs == [logprobs_of(token) for token in b"z"]

    play(tmp_path, scenario)


def test_half_a_character_at_the_limit_is_shown_at_the_end(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        stream = await world.submit()
        choice, claim = choice_of(stream, ("zz",)), world.claim(stream.row)
        world.emit(claim, 10, b"z" + "é".encode()[:1])
        await world.hear()
        assert choice.advance().text == ""
        world.finish(claim, FinishReason.LENGTH)
        await world.hear()
        assert choice.advance().text == "z\ufffd"
        assert choice.finish_reason == "length"

    play(tmp_path, scenario)


def test_what_nobody_will_begin_is_given_up_and_what_has_begun_waits(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.client.readiness.absence_limit_s = 0.05
        begun = await world.submit(b"begun, handed back", limit=40)
        claim = world.claim(begun.row)
        world.emit(claim, claim.num_tokens, b"x")
        await world.hear()
        world.rows.put_back(begun.row, Actor.DECODE)
        waiting = await world.submit(b"nobody has begun", limit=40)
        for daemon in (world.prefill, world.decode):
            daemon.put(P.STATE, ParticipantState.DRAINED)
        world.client._on_timer()
        await asyncio.sleep(0.1)
        world.client._on_timer()
        assert waiting.end is not None and waiting.end.no_daemon
        assert "daemon has been ready for" in waiting.end.error
        assert begun.end is None
        begun.cancel()

    play(tmp_path, scenario)

"""The decode engine: continuous batching over rows in the segment, one token each a step.

    step():  claim ready rows -> follow wishes -> make room -> forward -> commit KV, then tokens -> publish

Rows join and leave between steps. A row's first step here runs its last committed token (of a new row: the last of
the prompt, and up to `local_prefill_tokens` before it), whether it is new or was adopted from a dead daemon. Called
by daemon.py; samples through sampler.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from pdctl.core.attention import TokenRun
from pdctl.core.config import ClusterSpec
from pdctl.core.model import Model
from pdctl.core.room import ask_younger, preempt_younger
from pdctl.core.sampler import sample
from pdctl.transport.layout import P, R
from pdctl.transport.rows import Actor, FinishReason, RowParams, RowState
from pdctl.transport.segment import Participant, ParticipantState, Role, Segment

_log = logging.getLogger("decode")
# A row is left to a less loaded peer for so long.
_COURTESY_NS = 50_000_000


@dataclass(kw_only=True, eq=False)
class _Active:
    """A row in the batch. All of it can be read again from the row."""

    row: int
    generation: int
    order: int
    num_tokens: int
    kv_len: int
    limit_tokens: int
    params: RowParams
    stop_ids: frozenset[int]
    block_table: list[int]


class DecodeEngine:
    def __init__(
        self,
        segment: Segment,
        me: Participant,
        model: Model,
        spec: ClusterSpec,
        ring: Callable[[Role], None],
    ) -> None:
        self._segment = segment
        self._rows = segment.rows
        self._me = me
        self._model = model
        self._spec = spec
        self._ring = ring
        self._batch: list[_Active] = []

    def step(self) -> bool:
        """Advance every row of the batch by one token (or one chunk of local prefill); False: nothing could run."""
        self._claim_ready()
        self._follow_wishes()
        if not self._batch:
            return False
        running = self._make_room()
        if running:
            self._advance(running)
        self._me.add(P.PROGRESS, 1)
        return bool(running)

    @property
    def has_waiting(self) -> bool:
        """Rows are ready that a peer may want more than we do: look again soon."""
        return int(RowState.READY) in self._rows.states()

    def release(self) -> None:
        """Put all rows back, with tokens and blocks, for another daemon: drain and shutdown."""
        for active in self._batch:
            self._rows.put_back(active.row, Actor.DECODE)
        if self._batch:
            self._set_batch([])
            self._ring(Role.DECODE)

    # --- joining and leaving -------------------------------------------------------------------------------

    def _claim_ready(self) -> None:
        if len(self._batch) >= self._spec.max_batch or self._runs_alone():
            return
        for row in self._rows.in_state(RowState.READY):
            if len(self._batch) >= self._spec.max_batch:
                return
            if self._left_to_a_peer(row):
                continue
            self._claim(row)
            if self._runs_alone():
                return

    def _runs_alone(self) -> bool:
        """A row whose last owner died before its first commit is the whole batch until it commits."""
        return len(self._batch) == 1 and self._rows.get(self._batch[0].row, R.ATTEMPTS) > 1

    def _left_to_a_peer(self, row: int) -> bool:
        if time.monotonic_ns() - self._rows.get(row, R.T_READY) > _COURTESY_NS:
            return False
        mine = len(self._batch)
        return any(
            slot != self._me.slot
            and self._segment.participant_word(slot, P.STATE) == ParticipantState.READY
            and self._segment.participant_word(slot, P.LOAD) < mine
            for slot in self._segment.slots(Role.DECODE)
        )

    def _claim(self, row: int) -> None:
        rows = self._rows
        claim = rows.claim(self._me, row, alone=not self._batch, local_prefill_tokens=self._spec.local_prefill_tokens)
        if claim is None:
            if rows.state(row) is RowState.QUEUED:
                self._ring(Role.PREFILL)
            return
        params = rows.params(row)
        stop_ids = frozenset(params.stop_ids)
        if not params.ignore_eos:
            stop_ids |= frozenset(self._spec.eos_token_ids)
        active = _Active(
            row=row,
            generation=claim.generation,
            order=rows.get(row, R.ORDER),
            num_tokens=claim.num_tokens,
            kv_len=claim.kv_len,
            limit_tokens=rows.get(row, R.LIMIT_TOKENS),
            params=params,
            stop_ids=stop_ids,
            block_table=rows.block_table(row),
        )
        self._me.add(P.CLAIMS, 1)
        if rows.get(row, R.ADOPTIONS):
            self._me.add(P.ADOPTED_ROWS, 1)
        _log.info(
            "%s row %d: takes over at token %d, KV %d",
            rows.request_id(row),
            row,
            claim.num_tokens,
            claim.kv_len,
        )
        # A predecessor may have died between its last token and the row's end.
        if claim.num_tokens > rows.get(row, R.NUM_PROMPT):
            last = rows.tokens(row, claim.num_tokens - 1, claim.num_tokens)[0]
            if (reason := self._finish_reason(active, last)) is not FinishReason.NONE:
                rows.finish(row, reason)
                self._ring(Role.ROUTER)
                return
        self._set_batch([*self._batch, active])

    def _set_batch(self, batch: list[_Active]) -> None:
        self._batch = batch
        self._me.put(P.LOAD, len(batch))

    def _follow_wishes(self) -> None:
        kept = []
        for active in self._batch:
            if self._rows.get(active.row, R.CANCEL):
                self._rows.end_cancelled(active.row, Actor.DECODE)
                self._ring(Role.ROUTER)
                self._wake_prefill()
            elif self._rows.get(active.row, R.PREEMPT):
                self._preempt(active.row)
            else:
                kept.append(active)
        if len(kept) != len(self._batch):
            self._set_batch(kept)

    def _wake_prefill(self) -> None:
        """Blocks came free: a queued row may fit now."""
        if int(RowState.QUEUED) in self._rows.states():
            self._ring(Role.PREFILL)

    # --- room ----------------------------------------------------------------------------------------------

    def _make_room(self) -> list[_Active]:
        """Give every row the block of its next position, oldest first; returns the rows that have it."""
        running: list[_Active] = []
        for active in sorted(self._batch, key=lambda one: one.order):
            if active not in self._batch:
                continue
            while not self._has_room(active):
                if not self._take_blocks_for(active):
                    break
            else:
                if active in self._batch:
                    running.append(active)
        return running

    def _has_room(self, active: _Active) -> bool:
        if active.num_tokens <= len(active.block_table) * self._spec.block_tokens:
            return True
        if not self._rows.grow(active.row, active.num_tokens):
            return False
        active.block_table = self._rows.block_table(active.row)
        return True

    def _take_blocks_for(self, active: _Active) -> bool:
        """Preempt one row that is younger than `active`: nobody's, else one of ours, else ask its owner.

        Returns:
            False: nothing came free now, or `active` itself made way for older rows.
        """
        rows = self._rows
        if preempt_younger(rows, active.order, Actor.DECODE) is not None:
            self._ring(Role.PREFILL)
            return True
        youngest = max(self._batch, key=lambda one: one.order)
        if youngest is active and ask_younger(rows, active.order) is not None:
            self._ring(Role.PREFILL)
            self._ring(Role.DECODE)
            return False
        if youngest is active and self._is_oldest(active):
            return False  # what it needs comes free with the next row that ends
        self._set_batch([one for one in self._batch if one is not youngest])
        self._preempt(youngest.row)
        return youngest is not active

    def _is_oldest(self, active: _Active) -> bool:
        states = (RowState.QUEUED, RowState.PREFILLING, RowState.READY, RowState.DECODING)
        held = [row for state in states for row in self._rows.in_state(state)]
        return all(self._rows.get(row, R.ORDER) >= active.order for row in held)

    def _preempt(self, row: int) -> None:
        if self._rows.preempt(row, Actor.DECODE):
            _log.info("%s row %d: preempted, the pool is full", self._rows.request_id(row), row)
            self._ring(Role.PREFILL)

    # --- computing -----------------------------------------------------------------------------------------

    def _advance(self, running: list[_Active]) -> None:
        began = time.monotonic_ns()
        rows = self._rows
        tokens: list[int] = []
        runs: list[TokenRun] = []
        logit_rows: list[int] = []
        sampled: list[_Active] = []
        for active in running:
            end = min(active.num_tokens, active.kv_len + self._spec.chunk_tokens)
            length = end - active.kv_len
            tokens += rows.tokens(active.row, active.kv_len, end)
            runs.append(TokenRun(block_table=active.block_table, start=active.kv_len, length=length))
            if length > 1:
                local = length - (end == active.num_tokens)
                rows.put(active.row, R.LOCAL_TOKENS, rows.get(active.row, R.LOCAL_TOKENS) + local)
                self._me.add(P.LOCAL_PREFILL_TOKENS, local)
            active.kv_len = end
            if end == active.num_tokens:
                logit_rows.append(len(tokens) - 1)
                sampled.append(active)
        logits = self._model.forward(tokens, runs, logit_rows)
        for active in running:
            rows.commit_kv(active.row, active.kv_len)
        ended = []
        for index, active in enumerate(sampled):
            assert logits is not None
            try:
                token = sample(logits[index], active.params, active.num_tokens)
            except FloatingPointError as error:
                rows.fail(active.row, f"decode daemon, token {active.num_tokens}: {error}", Actor.DECODE)
                ended.append(active)
                continue
            rows.commit_token(active.row, active.generation, active.num_tokens, token)
            active.num_tokens += 1
            if not rows.get(active.row, R.T_FIRST_TOKEN):
                rows.put(active.row, R.T_FIRST_TOKEN, time.monotonic_ns())
            if (reason := self._finish_reason(active, token)) is not FinishReason.NONE:
                rows.publish(active.row)
                rows.finish(active.row, reason)
                ended.append(active)
        for active in running:
            if active not in ended and rows.num_publishable(active.row) > 0:
                rows.publish(active.row)
                # Twins were merged: the table may name other blocks now.
                active.block_table = rows.block_table(active.row)
        if ended:
            self._set_batch([active for active in self._batch if active not in ended])
            self._wake_prefill()
        if sampled:
            self._ring(Role.ROUTER)
        self._me.add(P.DECODE_TOKENS, len(sampled))
        self._me.add(P.STEPS, 1)
        self._me.add(P.BUSY_NS, time.monotonic_ns() - began)

    @staticmethod
    def _finish_reason(active: _Active, last_token: int) -> FinishReason:
        if last_token in active.stop_ids:
            return FinishReason.STOP
        if active.num_tokens >= active.limit_tokens:
            return FinishReason.LENGTH
        return FinishReason.NONE

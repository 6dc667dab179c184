"""The prefill engine: claim the oldest queued row, compute its prompt's KV chunk by chunk, hand it over.

    step():  claim -> follow wishes -> forward one chunk -> commit KV -> publish full blocks -> hand over

Samples nothing: positions 0..N-2 only. Keeps nothing that is not in the row. Called by daemon.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pdctl.core.attention import TokenRun
from pdctl.core.config import ClusterSpec
from pdctl.core.model import Model
from pdctl.core.room import ask_younger, preempt_younger
from pdctl.transport.layout import P, R
from pdctl.transport.rows import Actor, Claim, RowState
from pdctl.transport.segment import Participant, Role, Segment

_log = logging.getLogger("prefill")


class PrefillEngine:
    """One row at a time, so a death charges only the row that was run."""

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
        self._chunk_tokens = spec.chunk_tokens
        self._ring = ring
        self._current: Claim | None = None

    def step(self) -> bool:
        """Do one chunk of work; False: there is none now."""
        if self._current is None:
            self._current = self._claim()
        claim = self._current
        if claim is None:
            return False
        if self._follow_wishes(claim.row):
            return True
        start = self._rows.get(claim.row, R.KV_LEN)
        end = min(start + self._chunk_tokens, claim.num_tokens - 1)
        if start < end:
            self._compute(claim, start, end)
        if end >= claim.num_tokens - 1:
            self._let_go()
            self._rows.hand_over(claim.row)
            self._ring(Role.DECODE)
        return True

    def release(self) -> None:
        """Put the row back, with its blocks, for another daemon: drain and shutdown."""
        if self._current is not None:
            row = self._current.row
            self._let_go()
            self._rows.put_back(row, Actor.PREFILL)
            self._ring(Role.PREFILL)

    def _claim(self) -> Claim | None:
        # Only the oldest: a younger and smaller row must not overtake it for ever.
        for row in self._rows.in_state(RowState.QUEUED)[:1]:
            claim = self._rows.claim(self._me, row, alone=True)
            while claim is None and self._make_room(row):
                claim = self._rows.claim(self._me, row, alone=True)
            if claim is None:
                return None
            self._me.add(P.CLAIMS, 1)
            self._me.add(P.CACHED_TOKENS, self._rows.get(row, R.CACHED_TOKENS))
            self._me.put(P.LOAD, 1)
            _log.info(
                "%s row %d: %d tokens, KV of %d there already",
                self._rows.request_id(row),
                row,
                claim.num_tokens,
                claim.kv_len,
            )
            return claim
        return None

    def _make_room(self, row: int) -> bool:
        """Take blocks from one row younger than `row`, which could not be claimed; False: not now."""
        if self._rows.state(row) is not RowState.QUEUED:
            return False  # another prefill daemon was faster
        order = self._rows.get(row, R.ORDER)
        if preempt_younger(self._rows, order, Actor.PREFILL) is not None:
            return True
        if ask_younger(self._rows, order) is not None:
            self._ring(Role.PREFILL)
            self._ring(Role.DECODE)
        return False

    def _compute(self, claim: Claim, start: int, end: int) -> None:
        began = time.monotonic_ns()
        row = claim.row
        run = TokenRun(block_table=self._rows.block_table(row), start=start, length=end - start)
        self._model.forward(self._rows.tokens(row, start, end), [run], [])
        self._rows.commit_kv(row, end)
        self._rows.put(row, R.PREFILLED_TOKENS, self._rows.get(row, R.PREFILLED_TOKENS) + end - start)
        self._rows.publish(row)
        self._me.add(P.PREFILL_TOKENS, end - start)
        self._me.add(P.STEPS, 1)
        self._me.add(P.PROGRESS, 1)
        self._me.add(P.BUSY_NS, time.monotonic_ns() - began)

    def _follow_wishes(self, row: int) -> bool:
        if self._rows.get(row, R.CANCEL):
            self._let_go()
            self._rows.end_cancelled(row, Actor.PREFILL)
            self._ring(Role.ROUTER)
            return True
        if self._rows.get(row, R.PREEMPT):
            self._let_go()
            self._rows.preempt(row, Actor.PREFILL)
            self._ring(Role.DECODE)
            return True
        return False

    def _let_go(self) -> None:
        self._current = None
        self._me.put(P.LOAD, 0)

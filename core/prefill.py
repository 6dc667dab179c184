"""The prefill engine: share a chunk among the rows that need it most, compute their KV, hand over what is whole.

    plan():    follow wishes -> schedule (claim, put back) -> one chunk
    commit():  KV -> publish -> hand over what is whole

Owns only what it is about to compute: a row that gets no part of the chunk goes back into the queue, with its
blocks, for any prefill daemon. Samples nothing: it answers for positions 0..N-2 only. Called by daemon.py, or by
colocated.py, which packs its work with a decode engine's.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from pdctl.core.attention import TokenRun
from pdctl.core.config import ClusterSpec
from pdctl.core.model import Model
from pdctl.core.room import Wanted, claim_row
from pdctl.core.shared_prefix import SharedPrefixes
from pdctl.core.wake import Wake
from pdctl.core.work import Work
from pdctl.transport.layout import P, R
from pdctl.transport.rows import Actor, Claim, RowState
from pdctl.transport.segment import Participant, Role, Segment

_log = logging.getLogger("prefill")
# Until we have computed something ourselves.
_FIRST_GUESS_TOKENS_PER_S = 1000.0
# Of what the last chunk tells about our speed, so much is believed.
_BELIEVED = 0.2


@dataclass(frozen=True)
class _Part:
    """A row's share of one forward: positions `start` to `stop`."""

    claim: Claim
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == self.claim.num_tokens - 1


@dataclass(frozen=True, kw_only=True)
class PrefillWork(Work):
    """One run a part; those of last parts may go one token on, whose logits are wanted (see `plan`)."""

    parts: list[_Part]

    @property
    def num_tokens(self) -> int:
        """Those that prefill answers for."""
        return sum(part.stop - part.start for part in self.parts)

    @property
    def last_parts(self) -> list[Claim]:
        """Whose prompt is whole with this forward; with `first_tokens`, in the order of the logits."""
        return [part.claim for part in self.parts if part.is_last]


class PrefillEngine:
    """See the module's text.

    Attributes:
        look_again: after a plan of nothing: what was wanted may have come meanwhile, plan once more before sleeping.
    """

    def __init__(self, segment: Segment, me: Participant, model: Model, spec: ClusterSpec, wake: Wake) -> None:
        self._segment = segment
        self._rows = segment.rows
        self._me = me
        self._model = model
        self._spec = spec
        self._wake = wake
        self._prefixes = SharedPrefixes(segment)
        self._owned: dict[int, Claim] = {}
        self._tokens_per_s = _FIRST_GUESS_TOKENS_PER_S
        self._wanted = Wanted(segment, me)
        self.look_again = False

    @property
    def rows(self) -> list[int]:
        """The rows in hand."""
        return list(self._owned)

    def step(self) -> bool:
        """Do one chunk of work; False: there is none now."""
        work = self.plan(self._spec.chunk_tokens)
        if work is None:
            return self.look_again
        work.run(self._model)
        self.commit(work)
        return True

    def plan(self, budget_tokens: int, *, first_tokens: bool = False) -> PrefillWork | None:
        """What the next forward should compute; None: nothing can run now.

        Args:
            budget_tokens: at most so many of those that prefill answers for.
            first_tokens: whether a prompt that will be whole is computed through its last token, with logits: who
                samples from them spares decode a step.
        """
        self._follow_wishes()
        self._wanted.look()
        parts = self._schedule(budget_tokens)
        self.look_again = self._wanted.tell()
        self._me.put(P.LOAD, len(self._owned))
        if not parts:
            return None
        if self._rows.in_state(RowState.QUEUED):
            self._wake.an_idle_peer(Role.PREFILL)
        return self._work(parts, first_tokens=first_tokens)

    def release(self) -> None:
        """Put all rows back, with their blocks, for another daemon: drain and shutdown."""
        self._put_back(list(self._owned))
        self._me.put(P.LOAD, 0)
        self._wanted.forget()
        self._wake.for_work(Role.PREFILL)

    # --- what to compute -----------------------------------------------------------------------------------

    def _schedule(self, budget: int) -> list[_Part]:
        """Fill one chunk: the shortest rest first, but age counts (see `_urgency`)."""
        now_ns = time.monotonic_ns()
        waiting = self._rows.in_state(RowState.QUEUED)
        order = sorted([*self._owned, *waiting], key=lambda row: self._urgency(row, now_ns))
        parts: list[_Part] = []
        for row in order:
            if budget == 0 or len(parts) == self._spec.max_batch:
                break
            # Its last owner died over it: it is computed alone, once it comes first.
            suspect = row not in self._owned and self._rows.get(row, R.ATTEMPTS) > 0
            if suspect and parts:
                continue
            if suspect:
                self._put_back(list(self._owned))
            claim = self._owned.get(row) or self._claim(row)
            if claim is None:
                continue
            start = self._rows.get(row, R.KV_LEN)
            stop = min(start + budget, claim.num_tokens - 1)
            parts.append(_Part(claim, start, stop))
            budget -= stop - start
            if suspect:
                break
        if len(parts) > 1:
            # A death in this forward is charged to none of them alone.
            for part in parts:
                self._rows.put(part.claim.row, R.CLAIMED_ALONE, 0)
        chosen = {part.claim.row for part in parts}
        self._put_back([row for row in self._owned if row not in chosen])
        return parts

    def _urgency(self, row: int, now_ns: int) -> float:
        """Tokens left, less what could have been computed while it waited; the smallest goes first.

        So a short prompt overtakes a long one, but only for as long as the long one takes to compute: after that
        it stands before every newcomer.
        """
        rows = self._rows
        there = max(rows.get(row, R.KV_LEN), rows.get(row, R.CACHED_TOKENS))
        left = rows.get(row, R.NUM_TOKENS) - 1 - there
        waited_s = (now_ns - rows.get(row, R.T_CREATED)) / 1e9
        return left - waited_s * self._tokens_per_s

    def _claim(self, row: int) -> Claim | None:
        """Make a queued row ours; None: not now, or it needs no prefill daemon any more."""
        rows = self._rows
        if self._wanted.is_before(row) or self._prefixes.is_being_computed(row):
            return None
        alone, local = not self._owned, self._spec.local_prefill_tokens
        claim = claim_row(
            rows,
            self._me,
            row,
            self._wanted,
            self._wake,
            alone=alone,
            local_prefill_tokens=local,
            vocab_size=self._model.vocab_size,
        )
        if claim is None:
            return None
        self._owned[row] = claim
        self._me.add(P.CLAIMS, 1)
        self._me.add(P.CACHED_TOKENS, claim.cached_tokens)
        _log.info(
            "%s row %d: %d tokens, KV of %d there already",
            rows.request_id(row),
            row,
            claim.num_tokens,
            claim.kv_len,
        )
        return claim

    # --- computing -----------------------------------------------------------------------------------------

    def _work(self, parts: list[_Part], *, first_tokens: bool) -> PrefillWork:
        rows = self._rows
        tokens: list[int] = []
        runs: list[TokenRun] = []
        logit_rows: list[int] = []
        for part in parts:
            row, stop = part.claim.row, part.stop + (first_tokens and part.is_last)
            tokens += rows.tokens(row, part.start, stop)
            runs.append(TokenRun(block_table=rows.block_table(row), start=part.start, length=stop - part.start))
            if stop > part.stop:
                logit_rows.append(len(tokens) - 1)
        return PrefillWork(
            tokens=tokens,
            runs=runs,
            logit_rows=logit_rows,
            alone=len(parts) == 1 and rows.get(parts[0].claim.row, R.ATTEMPTS) > 1,
            planned_ns=time.monotonic_ns(),
            parts=parts,
        )

    def commit(self, work: PrefillWork) -> None:
        """The work's KV is in the pages: make it true for everybody, and hand over rows that are whole."""
        rows = self._rows
        for part, run in zip(work.parts, work.runs, strict=True):
            row = part.claim.row
            # Through the prompt's last token, if that was computed along: whoever has its logits sees it by that.
            rows.commit_kv(row, run.start + run.length)
            rows.put(row, R.PREFILLED_TOKENS, rows.get(row, R.PREFILLED_TOKENS) + part.stop - part.start)
            rows.publish(row)
        took_ns = time.monotonic_ns() - work.planned_ns
        self._tokens_per_s += _BELIEVED * (work.num_tokens * 1e9 / took_ns - self._tokens_per_s)
        self._me.add(P.PREFILL_TOKENS, work.num_tokens)
        self._me.add(P.STEPS, 1)
        self._me.add(P.BUSY_NS, took_ns)
        # Whose client left meanwhile is not handed over: nobody would look at it before decode has room.
        self._follow_wishes()
        self._hand_over([claim.row for claim in work.last_parts if claim.row in self._owned])

    # --- letting go ----------------------------------------------------------------------------------------

    def _hand_over(self, ready: list[int]) -> None:
        for row in ready:
            del self._owned[row]
            self._rows.hand_over(row)
            self._wake.for_work(Role.DECODE)
        self._me.put(P.LOAD, len(self._owned))

    def _put_back(self, given_up: list[int]) -> None:
        for row in given_up:
            del self._owned[row]
            self._rows.put_back(row, Actor.PREFILL)

    def _follow_wishes(self) -> None:
        for row in list(self._owned):
            if self._rows.get(row, R.CANCEL):
                self._rows.end_cancelled(row, Actor.PREFILL)
                self._wake.clients([row])
            elif self._rows.is_to_be_preempted(row):
                self._rows.preempt(row, Actor.PREFILL)
            else:
                continue
            del self._owned[row]
            self._wake.for_room()

"""The decode engine: continuous batching over rows in the segment, one token each a step.

    plan():    claim ready rows -> follow wishes -> make room -> the next token, or chunk, of every row
    commit():  KV, then tokens -> publish -> let go of rows that ended

Rows join and leave between steps. A row's first step here runs its last committed token (of a new row: the last of
the prompt, and up to `local_prefill_tokens` before it), whether it is new or was adopted from a dead daemon. Called
by daemon.py, or by colocated.py, which packs its work with a prefill engine's; samples through sampler.py.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from pdctl.core.attention import TokenRun
from pdctl.core.config import ClusterSpec
from pdctl.core.model import Model
from pdctl.core.room import Wanted, ask_younger, claim_row, preempt_younger
from pdctl.core.sampler import RowSampler, token_logprobs
from pdctl.core.wake import Wake
from pdctl.core.work import Work
from pdctl.transport.layout import P, R
from pdctl.transport.rows import Actor, Claim, FinishReason, RowState
from pdctl.transport.segment import Participant, Role, Segment

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
    stop_ids: frozenset[int]
    block_table: list[int]
    sampler: RowSampler


@dataclass(frozen=True, kw_only=True)
class DecodeWork(Work):
    """One run a row, in the order of `rows`. Rows whose run ends at their last token get the next one."""

    rows: list[_Active]

    @property
    def sampled(self) -> list[_Active]:
        """Whose logits are wanted, in their order."""
        pairs = zip(self.rows, self.runs, strict=True)
        return [active for active, run in pairs if run.start + run.length == active.num_tokens]


class DecodeEngine:
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
        self._batch: list[_Active] = []
        self._wanted = Wanted(segment, me)
        self.look_again = False

    @property
    def rows(self) -> list[int]:
        """The rows in hand."""
        return [active.row for active in self._batch]

    def step(self) -> bool:
        """Advance every row of the batch by one token (or one chunk of local prefill); False: nothing could run."""
        work = self.plan()
        if work is None:
            return self.look_again
        self.commit(work, work.run(self._model))
        return True

    def plan(self) -> DecodeWork | None:
        """What the next forward should compute; None: nothing can run now."""
        self._wanted.look()
        self._claim_ready()
        self._follow_wishes()
        running = [active for active in self._make_room() if self._is_read(active)]
        self.look_again = self._wanted.tell()
        return self._work(running) if running else None

    def release(self) -> None:
        """Put all rows back, with tokens and blocks, for another daemon: drain and shutdown."""
        self._wanted.forget()
        if self._batch:
            self._put_back()
            self._wake.for_work(Role.DECODE)

    def _put_back(self) -> None:
        for active in self._batch:
            self._rows.put_back(active.row, Actor.DECODE)
        self._set_batch([])

    # --- joining and leaving -------------------------------------------------------------------------------

    def _claim_ready(self) -> None:
        if self._runs_alone() or self._try_suspect():
            return
        for row in self._rows.in_state(RowState.READY):
            if len(self._batch) >= self._spec.max_batch:
                return
            if (peer := self._peer_with_less_to_do(row)) is not None:
                self._wake.slot(peer)
                continue
            if self._wanted.is_before(row):
                continue
            self._claim(row)
            if self._runs_alone():
                return

    def _try_suspect(self) -> bool:
        """Whether a row whose last owner died over it is the batch now. For one step the others make way for it.

        They are put back as they are, so that nobody pays for its death, and nobody's coming keeps it waiting.
        """
        now_ns = time.monotonic_ns()
        for row in self._rows.in_state(RowState.READY):
            waited_ns = now_ns - self._rows.get(row, R.T_STATE)
            if self._rows.get(row, R.ATTEMPTS) and (not self._batch or waited_ns > _COURTESY_NS):
                self._put_back()
                self._claim(row)
                return self._runs_alone()
        return False

    def _runs_alone(self) -> bool:
        """A row whose last owner died before its first commit is the whole batch until it commits."""
        return len(self._batch) == 1 and self._rows.get(self._batch[0].row, R.ATTEMPTS) > 1

    def _peer_with_less_to_do(self, row: int) -> int | None:
        """Who should rather claim `row`, and has had no time to do so yet."""
        if time.monotonic_ns() - self._rows.get(row, R.T_STATE) > _COURTESY_NS:
            return None
        peer = self._segment.least_loaded(Role.DECODE, but=self._me.slot)
        if peer is None or self._segment.participant_word(peer, P.LOAD) >= len(self._batch):
            return None
        return peer

    def _claim(self, row: int) -> None:
        rows = self._rows
        alone, local = not self._batch, self._spec.local_prefill_tokens
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
            return
        try:
            active = self._activate(claim)
        except Exception as error:
            self._fail(row, "its parameters", error)
            self._wake.clients([row])
            self._wake.for_room()
            return
        self._me.add(P.CLAIMS, 1)
        self._me.add(P.CACHED_TOKENS, claim.cached_tokens)
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
                self._wake.clients([row])
                return
        self._set_batch([*self._batch, active])
        if len(self._batch) > 1:
            # A death from now on is charged to none of them alone.
            for one in self._batch:
                rows.put(one.row, R.CLAIMED_ALONE, 0)

    def _activate(self, claim: Claim) -> _Active:
        rows, row = self._rows, claim.row
        params = rows.params(row)
        stop_ids = frozenset(params.stop_ids)
        if not params.ignore_eos:
            stop_ids |= frozenset(self._spec.eos_token_ids)
        return _Active(
            row=row,
            generation=claim.generation,
            order=rows.get(row, R.ORDER),
            num_tokens=claim.num_tokens,
            kv_len=claim.kv_len,
            limit_tokens=rows.get(row, R.LIMIT_TOKENS),
            stop_ids=stop_ids,
            block_table=rows.block_table(row),
            sampler=RowSampler(
                params,
                num_prompt=rows.get(row, R.NUM_PROMPT),
                end_ids=stop_ids,
                read_tokens=partial(rows.tokens, row),
            ),
        )

    def _set_batch(self, batch: list[_Active]) -> None:
        self._batch = batch
        self._me.put(P.LOAD, len(batch))

    def _follow_wishes(self) -> None:
        kept = []
        for active in self._batch:
            if self._rows.get(active.row, R.CANCEL):
                self._rows.end_cancelled(active.row, Actor.DECODE)
                self._wake.clients([active.row])
                self._wake.for_room()
            elif self._rows.is_to_be_preempted(active.row):
                self._preempt(active.row)
            else:
                kept.append(active)
        if len(kept) != len(self._batch):
            self._set_batch(kept)

    # --- room ----------------------------------------------------------------------------------------------

    def _make_room(self) -> list[_Active]:
        """Give every row the block of its next position, oldest first; returns the rows that have it."""
        running: list[_Active] = []
        for active in sorted(self._batch, key=lambda one: one.order):
            if active not in self._batch:
                continue
            while not self._has_room(active):
                if not self._take_blocks_for(active):
                    if active in self._batch:
                        self._wanted.note(active.order)
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
            self._wake.for_work(Role.PREFILL)
            return True
        youngest = max(self._batch, key=lambda one: one.order)
        if youngest is active and (asked := ask_younger(rows, active.order)) is not None:
            self._wake.owner(asked)
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
        request_id = self._rows.request_id(row)  # before anybody else can have the row
        if self._rows.preempt(row, Actor.DECODE):
            _log.info("%s row %d: preempted, the pool is full", request_id, row)
            self._wake.for_work(Role.PREFILL)
            self._wake.for_room()

    def _is_read(self, active: _Active) -> bool:
        """False: the router has yet to read what the next token's log-probabilities would overwrite."""
        if active.sampler.params.num_logprobs is None:
            return True
        return self._rows.has_logprob_room(active.row, active.num_tokens)

    # --- computing -----------------------------------------------------------------------------------------

    def _work(self, running: list[_Active]) -> DecodeWork:
        tokens: list[int] = []
        runs: list[TokenRun] = []
        logit_rows: list[int] = []
        for active in running:
            end = min(active.num_tokens, active.kv_len + self._spec.chunk_tokens)
            tokens += self._rows.tokens(active.row, active.kv_len, end)
            runs.append(TokenRun(block_table=active.block_table, start=active.kv_len, length=end - active.kv_len))
            if end == active.num_tokens:
                logit_rows.append(len(tokens) - 1)
        return DecodeWork(
            tokens=tokens,
            runs=runs,
            logit_rows=logit_rows,
            alone=self._runs_alone(),
            planned_ns=time.monotonic_ns(),
            rows=running,
        )

    def commit(self, work: DecodeWork, logits: Tensor | None) -> None:
        """The work's KV is in the pages: make it true for everybody, and sample.

        Args:
            logits: float32 [len(work.logit_rows), vocab_size]; None if none were wanted.
        """
        rows, sampled = self._rows, work.sampled
        for active, run in zip(work.rows, work.runs, strict=True):
            active.kv_len = run.start + run.length
            rows.commit_kv(active.row, active.kv_len)
            if local := run.length - (active.kv_len == active.num_tokens):
                rows.put(active.row, R.LOCAL_TOKENS, rows.get(active.row, R.LOCAL_TOKENS) + local)
                self._me.add(P.LOCAL_PREFILL_TOKENS, local)
        ended = []
        for index, active in enumerate(sampled):
            assert logits is not None
            try:
                token = self._sample(active, logits[index])
            except Exception as error:
                self._fail(active.row, f"token {active.num_tokens}", error)
                ended.append(active)
                continue
            # Counted first: whoever sees the token sees it counted.
            self._me.add(P.DECODE_TOKENS, 1)
            rows.commit_token(active.row, active.generation, active.num_tokens, token)
            active.num_tokens += 1
            if not rows.get(active.row, R.T_FIRST_TOKEN):
                rows.put(active.row, R.T_FIRST_TOKEN, time.monotonic_ns())
            if (reason := self._finish_reason(active, token)) is not FinishReason.NONE:
                rows.publish(active.row)
                rows.finish(active.row, reason)
                ended.append(active)
        for active in work.rows:
            if active not in ended and rows.num_publishable(active.row) > 0:
                rows.publish(active.row)
                # Twins were merged: the table may name other blocks now.
                active.block_table = rows.block_table(active.row)
        if ended:
            self._set_batch([active for active in self._batch if active not in ended])
            self._wake.for_room()
        self._wake.clients(active.row for active in sampled)
        self._me.add(P.STEPS, 1)
        self._me.add(P.BUSY_NS, time.monotonic_ns() - work.planned_ns)

    def _sample(self, active: _Active, logits: Tensor) -> int:
        """All that is computed for one row alone. What it raises is that row's end, and nobody else's."""
        token = active.sampler.sample(logits, active.num_tokens)
        if (number := active.sampler.params.num_logprobs) is not None:
            self._rows.put_logprobs(active.row, active.num_tokens, token_logprobs(logits, token, number))
        return token

    def _fail(self, row: int, where: str, error: Exception) -> None:
        """End a row of ours with the cause that lies in it. A death would be charged to all in the batch."""
        cause = str(error) if isinstance(error, FloatingPointError) else f"{type(error).__name__}: {error}"
        text = f"decode daemon, {where}: {cause}"
        _log.error("%s row %d: failed, %s", self._rows.request_id(row), row, text, exc_info=error)
        self._rows.fail(row, text, Actor.DECODE)

    def begin(self, computed: list[Claim], logits: Tensor) -> None:
        """First tokens without a step of their own: of rows that were handed over just now, if we get to claim them.

        Between the forward and our claim a row may have had another fate: cancelled, and already another request's,
        ready at once; or its blocks taken. So the logits are for the request that they were computed for, and only
        while the KV of its last token stands in its blocks (`KV_LEN` says so, and no claim of ours changes that).

        Args:
            computed: prefill's claims of rows whose last token went through the forward. Of one that we cannot
                claim now, a later step computes that token again, to the same bits.
            logits: float32 [len(computed), vocab_size].
        """
        self._claim_ready()
        index_of = {(claim.row, claim.generation, claim.num_tokens): at for at, claim in enumerate(computed)}
        begun = {
            at: active
            for active in self._batch
            if (at := index_of.get((active.row, active.generation, active.num_tokens))) is not None
            and self._rows.get(active.row, R.KV_LEN) == active.num_tokens
            and self._is_read(active)
        }
        if begun:
            self.commit(self._work(list(begun.values())), logits[list(begun)])

    @staticmethod
    def _finish_reason(active: _Active, last_token: int) -> FinishReason:
        if last_token in active.stop_ids:
            return FinishReason.STOP
        if active.num_tokens >= active.limit_tokens:
            return FinishReason.LENGTH
        return FinishReason.NONE

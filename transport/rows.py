"""Rows: one request each, from its tokens to its last stamp, and every move a row can make.

    FREE -> FILLING -> QUEUED -> PREFILLING -> READY -> DECODING -> FINISHED -> FREE
            FILLING -> READY, QUEUED -> READY        nothing, or little, is left to prefill
            PREFILLING, READY, DECODING -> QUEUED    preempted for want of blocks (tokens kept, KV recomputed)
            READY -> QUEUED                          more is left to prefill than it seemed
            PREFILLING -> QUEUED                     other rows go first (tokens and blocks kept)
            PREFILLING -> QUEUED, DECODING -> READY  owner dead or drained (tokens and blocks kept)
            ... -> CANCELLED / FAILED -> FREE

While a row has an owner, only the owner (or the supervisor, once the owner is proven dead) changes its state and
block table; everybody else writes wishes. Rows without an owner are moved inside a section by whoever needs to.

What a token costs, after the KV of all layers, is three plain stores in a fixed order: KV_LEN, the token's slot
(generation << 32 | id; this store is the commit), then NUM_TOKENS as a hint where to look for the last slot.
Log-probabilities, where asked for, are written before the slot, into a ring whose reader says how far it is.

Knows blocks through `Pool`; knows nothing of models or sockets.
"""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from pdctl.transport.errors import CapacityError, CorruptSegmentError, UsageError
from pdctl.transport.layout import (
    LOGPROB_RING,
    LOGPROB_WORDS,
    MAX_LOGPROBS,
    ROW_ERROR_WORDS,
    ROW_PARAM_WORDS,
    ROW_REQUEST_ID_WORDS,
    WORD,
    B,
    H,
    Layout,
    R,
    RowFlag,
    VerifyKv,
)
from pdctl.transport.lock import MutationLock, Op, Rollback, Section
from pdctl.transport.pool import BlockRef, Pool, chain_hash

if TYPE_CHECKING:
    from pdctl.transport.segment import Participant

MAX_DEATHS_ALONE = 3
_TOKEN_MASK = 0xFFFFFFFF
_KV_LEN, _NUM_TOKENS, _ATTEMPTS, _CANCEL, _PREEMPT = map(
    int, (R.KV_LEN, R.NUM_TOKENS, R.ATTEMPTS, R.CANCEL, R.PREEMPT)
)


class RowState(IntEnum):
    FREE = 0
    FILLING = 1
    QUEUED = 2
    PREFILLING = 3
    READY = 4
    DECODING = 5
    FINISHED = 6
    CANCELLED = 7
    FAILED = 8


class Actor(IntEnum):
    """Who may make a move."""

    ROUTER = 0
    PREFILL = 1
    DECODE = 2
    SUPERVISOR = 3


class FinishReason(IntEnum):
    NONE = 0
    STOP = 1
    LENGTH = 2


class Wish(IntEnum):
    """Why a row is to end early, which is what it is counted as; R.CANCEL holds it.

    LEFT: its client wants it no more. ENOUGH: its client has the whole answer. ERROR: its client gets an error for
    an answer.
    """

    NONE = 0
    LEFT = 1
    ENOUGH = 2
    ERROR = 3


_OUTCOMES: dict[int, H] = {Wish.LEFT: H.CANCELLED, Wish.ENOUGH: H.FINISHED, Wish.ERROR: H.FAILED}


TERMINAL = frozenset({RowState.FINISHED, RowState.CANCELLED, RowState.FAILED})
OWNED = frozenset({RowState.FILLING, RowState.PREFILLING, RowState.DECODING})
# For a daemon, be it the first or the next: after prefill, a preemption, a death, between two chunks.
WAITING = frozenset({RowState.QUEUED, RowState.READY})

_S = RowState
_ANYBODY = frozenset(Actor)
TRANSITIONS: dict[tuple[RowState, RowState], frozenset[Actor]] = {
    (_S.FREE, _S.FILLING): frozenset({Actor.ROUTER}),
    (_S.FILLING, _S.QUEUED): frozenset({Actor.ROUTER}),
    (_S.FILLING, _S.READY): frozenset({Actor.ROUTER}),
    (_S.FILLING, _S.FREE): frozenset({Actor.ROUTER, Actor.SUPERVISOR}),
    (_S.QUEUED, _S.PREFILLING): frozenset({Actor.PREFILL}),
    (_S.QUEUED, _S.READY): frozenset({Actor.PREFILL}),
    (_S.QUEUED, _S.CANCELLED): frozenset({Actor.ROUTER, Actor.SUPERVISOR}),
    (_S.QUEUED, _S.FAILED): frozenset({Actor.PREFILL, Actor.SUPERVISOR}),
    (_S.PREFILLING, _S.READY): frozenset({Actor.PREFILL}),
    (_S.PREFILLING, _S.QUEUED): frozenset({Actor.PREFILL, Actor.SUPERVISOR}),
    (_S.PREFILLING, _S.CANCELLED): frozenset({Actor.PREFILL, Actor.SUPERVISOR}),
    (_S.PREFILLING, _S.FAILED): frozenset({Actor.PREFILL, Actor.SUPERVISOR}),
    (_S.READY, _S.DECODING): frozenset({Actor.DECODE}),
    (_S.READY, _S.QUEUED): _ANYBODY,
    (_S.READY, _S.CANCELLED): frozenset({Actor.ROUTER, Actor.SUPERVISOR}),
    (_S.READY, _S.FAILED): frozenset({Actor.DECODE, Actor.SUPERVISOR}),
    (_S.DECODING, _S.FINISHED): frozenset({Actor.DECODE}),
    (_S.DECODING, _S.READY): frozenset({Actor.DECODE, Actor.SUPERVISOR}),
    (_S.DECODING, _S.QUEUED): frozenset({Actor.DECODE}),
    (_S.DECODING, _S.CANCELLED): frozenset({Actor.DECODE, Actor.SUPERVISOR}),
    (_S.DECODING, _S.FAILED): frozenset({Actor.DECODE, Actor.SUPERVISOR}),
    (_S.FINISHED, _S.FREE): frozenset({Actor.ROUTER, Actor.SUPERVISOR}),
    (_S.CANCELLED, _S.FREE): frozenset({Actor.ROUTER, Actor.SUPERVISOR}),
    (_S.FAILED, _S.FREE): frozenset({Actor.ROUTER, Actor.SUPERVISOR}),
}
_STAMP = {
    RowState.FILLING: R.T_CREATED,
    RowState.QUEUED: R.T_QUEUED,
    RowState.PREFILLING: R.T_PREFILLING,
    RowState.READY: R.T_READY,
    RowState.DECODING: R.T_DECODING,
    RowState.FINISHED: R.T_FINISHED,
    RowState.CANCELLED: R.T_FINISHED,
    RowState.FAILED: R.T_FINISHED,
}
# A row may be put back and claimed again, between chunks or by a daemon that is drained: a phase begins once.
_FIRST_ENTRY = frozenset({R.T_QUEUED, R.T_PREFILLING, R.T_READY, R.T_DECODING})


@dataclass(frozen=True, kw_only=True)
class RowParams:
    """What a request asks of the sampler. Temperature 0 is greedy; the other defaults change nothing.

    Attributes:
        top_k: 0: all.
        min_tokens: output tokens before which no end-of-sequence or stop id may come.
        repetition_penalty: divides positive logits of ids in prompt or output, multiplies negative ones.
        presence_penalty, frequency_penalty: subtracted from logits of ids in the output, once or each time.
        logit_bias: (id, what is added to its logit in float32), each id once.
        num_logprobs: how many of the likeliest tokens are told with each token's own log-probability; None: no
            log-probabilities.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    ignore_eos: bool = False
    stop_ids: tuple[int, ...] = field(default=())
    logit_bias: tuple[tuple[int, float], ...] = field(default=())
    num_logprobs: int | None = None


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """A sampled token's natural log-probability, and the likeliest tokens with theirs, likeliest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A row that is now ours.

    Attributes:
        generation: tells this request from the row's earlier ones.
        num_tokens: committed ones.
        kv_len: positions whose KV is there; below num_tokens.
        cached_tokens: so many of them came from the prefix cache with this claim.
    """

    row: int
    generation: int
    num_tokens: int
    kv_len: int
    cached_tokens: int = 0


def float_to_word(value: float) -> int:
    return int.from_bytes(struct.pack("<d", value), "little")


def word_to_float(word: int) -> float:
    return float(struct.unpack("<d", word.to_bytes(8, "little"))[0])


def _pair_to_word(token: int, value: float) -> int:
    """An id and a float32 in one word."""
    return token << 32 | int.from_bytes(struct.pack("<f", value), "little")


def _word_to_pair(word: int) -> tuple[int, float]:
    return word >> 32, float(struct.unpack("<f", (word & _TOKEN_MASK).to_bytes(4, "little"))[0])


class Rows:
    """All rows of a segment. Methods named after an operation of the protocol run it in one section."""

    def __init__(self, words: memoryview, layout: Layout, lock: MutationLock, pool: Pool) -> None:
        self._words = words
        self._layout = layout
        self._lock = lock
        self._pool = pool
        self.num_rows = layout.geometry.max_rows
        self._blocks_per_row = layout.geometry.blocks_per_row

    # --- reading -------------------------------------------------------------------------------------------

    def state(self, row: int) -> RowState:
        return RowState(self._words[self._layout.row_states + row])

    def get(self, row: int, name: R) -> int:
        return self._words[self._layout.row(row) + name]

    def put(self, row: int, name: R, value: int) -> None:
        """Store a single-writer word: the owner's own, or a wish."""
        self._words[self._layout.row(row) + name] = value

    def states(self) -> list[int]:
        """The states of all rows, in one read."""
        start = self._layout.row_states
        return self._words[start : start + self.num_rows].tolist()

    def in_state(self, state: RowState) -> list[int]:
        """Rows in `state`, oldest request first."""
        wanted = int(state)
        found = [row for row, now in enumerate(self.states()) if now == wanted]
        if len(found) > 1:
            found.sort(key=lambda row: self.get(row, R.ORDER))
        return found

    def owned_by(self, slot: int, incarnation: int) -> list[int]:
        return [
            row
            for row, state in enumerate(self.states())
            if state in OWNED
            and self.get(row, R.OWNER) == slot + 1
            and self.get(row, R.OWNER_INCARNATION) == incarnation
        ]

    def count_tokens(self, row: int) -> int:
        """Committed tokens: from the hint on, slots of this generation."""
        base = self._layout.row(row)
        words, slots = self._words, base + self._layout.row_tokens
        most = self._layout.geometry.max_context
        generation, number = words[base + R.GENERATION], min(words[base + _NUM_TOKENS], most)
        while number < most and words[slots + number] >> 32 == generation:
            number += 1
        return number

    def tokens(self, row: int, start: int, stop: int) -> list[int]:
        slots = self._layout.row(row) + self._layout.row_tokens
        end = slots + min(stop, self._layout.geometry.max_context)
        return [word & _TOKEN_MASK for word in self._words[slots + start : end].tolist()]

    def new_tokens(self, row: int, generation: int, start: int) -> list[int]:
        """Tokens committed from position `start` on: read the slots, believe only this generation's."""
        slots = self._layout.row(row) + self._layout.row_tokens
        words, found = self._words, []
        for position in range(start, self._layout.geometry.max_context):
            word = words[slots + position]  # SYNC: row-commit
            if word >> 32 != generation:
                break
            found.append(word & _TOKEN_MASK)
        return found

    def block_table(self, row: int) -> list[int]:
        """The row's blocks, first positions first."""
        base = self._layout.row(row)
        start = base + self._layout.row_blocks
        return self._words[start : start + min(self._words[base + R.NUM_BLOCKS], self._blocks_per_row)].tolist()

    def params(self, row: int) -> RowParams:
        """What the request asks for. What its words hold beyond their bounds is left out, or raises here.

        Raises:
            CorruptSegmentError: log-probabilities that have no room in the row.
        """
        if (asked := self.get(row, R.NUM_LOGPROBS)) > LOGPROB_WORDS:
            raise CorruptSegmentError(f"row {row}: {asked - 1} log-probabilities a token, at most {MAX_LOGPROBS}")
        start = self._layout.row(row) + self._layout.row_params
        stop_ids_end = start + min(self.get(row, R.NUM_STOP_IDS), ROW_PARAM_WORDS)
        bias_end = min(stop_ids_end + self.get(row, R.NUM_LOGIT_BIAS), start + ROW_PARAM_WORDS)
        num_logprobs = self.get(row, R.NUM_LOGPROBS)
        return RowParams(
            temperature=word_to_float(self.get(row, R.TEMPERATURE)),
            top_p=word_to_float(self.get(row, R.TOP_P)),
            top_k=self.get(row, R.TOP_K),
            min_p=word_to_float(self.get(row, R.MIN_P)),
            seed=self.get(row, R.SEED),
            min_tokens=self.get(row, R.MIN_TOKENS),
            repetition_penalty=word_to_float(self.get(row, R.REPETITION_PENALTY)),
            presence_penalty=word_to_float(self.get(row, R.PRESENCE_PENALTY)),
            frequency_penalty=word_to_float(self.get(row, R.FREQUENCY_PENALTY)),
            ignore_eos=bool(self.get(row, R.FLAGS) & RowFlag.IGNORE_EOS),
            stop_ids=tuple(self._words[start:stop_ids_end].tolist()),
            logit_bias=tuple(map(_word_to_pair, self._words[stop_ids_end:bias_end].tolist())),
            num_logprobs=num_logprobs - 1 if num_logprobs else None,
        )

    def take_logprobs(self, row: int, start: int, stop: int) -> list[TokenLogprobs]:
        """Copy out what belongs to committed tokens; their places in the ring are free then. For the router."""
        base = self._layout.row(row)
        length = self._words[base + R.NUM_LOGPROBS]
        found = []
        for position in range(start, stop):
            entry = self._logprob_entry(row, position)
            own, *top = map(_word_to_pair, self._words[entry : entry + length].tolist())
            found.append(TokenLogprobs(token=own[0], logprob=own[1], top=tuple(top)))
        self._words[base + R.READ_TOKENS] = stop  # SYNC: logprobs-read
        return found

    def has_logprob_room(self, row: int, position: int) -> bool:
        """Whether nothing unread stands where the log-probabilities of `position` belong."""
        return position < self.get(row, R.READ_TOKENS) + LOGPROB_RING  # SYNC: logprobs-read

    def _logprob_entry(self, row: int, position: int) -> int:
        return self._layout.row(row) + self._layout.row_logprobs + position % LOGPROB_RING * LOGPROB_WORDS

    def request_id(self, row: int) -> str:
        return self._text(row, self._layout.row_request_id, ROW_REQUEST_ID_WORDS)

    def error_text(self, row: int) -> str:
        return self._text(row, self._layout.row_error, ROW_ERROR_WORDS)

    def _text(self, row: int, offset: int, num_words: int) -> str:
        start = self._layout.row(row) + offset
        data = self._words[start : start + num_words].tobytes()
        return data.split(b"\0", 1)[0].decode("utf-8", "replace")

    def _put_text(self, row: int, offset: int, num_words: int, text: str) -> None:
        data = text.encode("utf-8", "replace").replace(b"\0", b" ")[: num_words * WORD - 1]
        data = data.decode("utf-8", "ignore").encode()
        start = self._layout.row(row) + offset
        self._words[start : start + num_words] = memoryview(data.ljust(num_words * WORD, b"\0")).cast("Q")

    # --- moving --------------------------------------------------------------------------------------------

    def _move(self, section: Section, row: int, to: RowState, actor: Actor) -> None:
        """A move inside a section: checks the table, stamps, notes it in the ring, stores the state last."""
        now = self.state(row)
        self._check_move(row, now, to, actor)
        at = time.monotonic_ns()
        base = self._layout.row(row)
        section.set(base + R.T_STATE, at)
        stamp = _STAMP.get(to)
        if stamp is not None and (stamp not in _FIRST_ENTRY or not self._words[base + stamp]):
            section.set(base + stamp, at)
        ring = self._words[H.RING_HEAD]
        event = self._layout.ring + ring % self._layout.geometry.ring_events * 8
        self._words[event : event + 6] = memoryview(
            array("Q", (at, row + 1, self._words[base + R.GENERATION], now, to, self._lock.slot + 1))
        )
        self._words[H.RING_HEAD] = ring + 1
        section.set(self._layout.row_states + row, to)

    def _move_own(self, row: int, to: RowState, actor: Actor) -> None:
        """A move that is one store, for an owner that changes nothing else: stamp, then state."""
        self._check_move(row, self.state(row), to, actor)
        words, base = self._words, self._layout.row(row)
        words[base + R.T_STATE] = at = time.monotonic_ns()
        stamp = _STAMP[to]
        if stamp not in _FIRST_ENTRY or not words[base + stamp]:
            words[base + stamp] = at
        words[self._layout.row_states + row] = to  # SYNC: row-state

    @staticmethod
    def _check_move(row: int, now: RowState, to: RowState, actor: Actor) -> None:
        if actor not in TRANSITIONS.get((now, to), frozenset()):
            raise CorruptSegmentError(f"row {row}: {actor.name} may not move {now.name} to {to.name}")

    # --- the router's side ---------------------------------------------------------------------------------

    def submit(
        self,
        me: Participant,
        *,
        request_id: str,
        tokens: Sequence[int],
        limit_tokens: int,
        params: RowParams,
        local_prefill_tokens: int,
        deadline_ns: int = 0,
        cached_tokens: int | None = None,
    ) -> Claim | None:
        """Put a request into a free row: QUEUED, or READY if little of it is left to prefill.

        Args:
            tokens: the prompt's ids, at least one.
            limit_tokens: prompt and output together, at most.
            local_prefill_tokens: READY if no more than so many tokens before the last are uncached.
            cached_tokens: what `num_cached` said a moment ago; None: it is asked.

        Returns:
            None: no row is free now.

        Raises:
            UsageError: the request can never fit a row.
            CapacityError: it can never fit the pool.
            DeadlineError: the lock did not come free; nothing has changed.
        """
        g = self._layout.geometry
        if not 1 <= len(tokens) < limit_tokens <= g.max_context:
            raise UsageError(f"{len(tokens)} prompt tokens, limit {limit_tokens}: a row holds {g.max_context}")
        num_stop_ids, num_bias = len(params.stop_ids), len(params.logit_bias)
        if num_stop_ids + num_bias > ROW_PARAM_WORDS:
            raise UsageError(
                f"{num_stop_ids} stop ids and {num_bias} logit biases: at most {ROW_PARAM_WORDS} of both"
            )
        num_logprobs = 0 if params.num_logprobs is None else params.num_logprobs + 1
        if not 0 <= num_logprobs <= LOGPROB_WORDS:
            raise UsageError(f"num_logprobs {params.num_logprobs}: expected 0 to {MAX_LOGPROBS}")
        # Checked before a row is taken: a value that cannot be stored would leave it FILLING for ever.
        bias_ids = [token for token, _ in params.logit_bias]
        for what, ids in (("stop id", params.stop_ids), ("logit bias id", bias_ids), ("token", tokens)):
            if ids and not (min(ids) >= 0 and max(ids) <= _TOKEN_MASK):
                raise UsageError(f"{what} out of range: {min(ids)} to {max(ids)} found, 0 to {_TOKEN_MASK} expected")
        for what, number in (
            ("top_k", params.top_k),
            ("min_tokens", params.min_tokens),
            ("deadline_ns", deadline_ns),
        ):
            if not 0 <= number < 1 << 64:
                raise UsageError(f"{what} {number}: not an unsigned 64-bit number")
        try:
            bias = [_pair_to_word(token, value) for token, value in params.logit_bias]
        except OverflowError:
            raise UsageError("logit bias: a value beyond float32") from None
        if (need := -(-limit_tokens // g.block_tokens)) > g.num_blocks:
            raise CapacityError(f"request of {limit_tokens} tokens: {need} blocks, the pool has {g.num_blocks}")
        row = self._take_free_row(me)
        if row is None:
            return None
        words, base = self._words, self._layout.row(row)
        generation = words[base + R.GENERATION]
        slots = base + self._layout.row_tokens
        words[slots : slots + len(tokens)] = memoryview(array("Q", [generation << 32 | token for token in tokens]))
        self._put_text(row, self._layout.row_request_id, ROW_REQUEST_ID_WORDS, request_id)
        self._put_text(row, self._layout.row_error, ROW_ERROR_WORDS, "")
        start = base + self._layout.row_params
        words[start : start + num_stop_ids + num_bias] = memoryview(array("Q", (*params.stop_ids, *bias)))
        fields: dict[int, int] = {
            R.NUM_PROMPT: len(tokens),
            R.NUM_TOKENS: len(tokens),
            R.LIMIT_TOKENS: limit_tokens,
            R.DEADLINE_NS: deadline_ns,
            R.TEMPERATURE: float_to_word(params.temperature),
            R.TOP_P: float_to_word(params.top_p),
            R.TOP_K: params.top_k,
            R.MIN_P: float_to_word(params.min_p),
            R.SEED: params.seed & ((1 << 64) - 1),
            R.MIN_TOKENS: params.min_tokens,
            R.REPETITION_PENALTY: float_to_word(params.repetition_penalty),
            R.PRESENCE_PENALTY: float_to_word(params.presence_penalty),
            R.FREQUENCY_PENALTY: float_to_word(params.frequency_penalty),
            R.FLAGS: RowFlag.IGNORE_EOS if params.ignore_eos else 0,
            R.NUM_STOP_IDS: num_stop_ids,
            R.NUM_LOGIT_BIAS: num_bias,
            R.NUM_LOGPROBS: num_logprobs,
            R.READ_TOKENS: len(tokens),
        }
        for name, value in fields.items():
            words[base + name] = value
        cached = self.num_cached(tokens) if cached_tokens is None else cached_tokens
        words[base + R.CACHED_TOKENS] = cached  # a forecast, until the first claim
        direct = len(tokens) - 1 - cached <= local_prefill_tokens
        self._move_own(row, RowState.READY if direct else RowState.QUEUED, Actor.ROUTER)
        return Claim(row=row, generation=generation, num_tokens=len(tokens), kv_len=0)

    def num_cached(self, tokens: Sequence[int]) -> int:
        """How many of a prompt's tokens a claim would find in the cache now."""
        size = self._layout.geometry.block_tokens
        return len(self._pool.match(tokens, (len(tokens) - 1) // size)) * size

    def _take_free_row(self, me: Participant) -> int | None:
        while True:
            states = self.states()
            try:
                row = states.index(RowState.FREE)
            except ValueError:
                return None
            base = self._layout.row(row)
            with self._lock.section(Op.SUBMIT, row) as section:
                if self.state(row) != RowState.FREE:
                    continue
                generation = (self._words[base + R.GENERATION] + 1) & _TOKEN_MASK or 1
                for offset in range(R.OWNER, R.T_STATE):
                    if self._words[base + offset]:
                        section.set(base + offset, 0)
                section.set(base + R.GENERATION, generation)
                for owner, value in (
                    (R.OWNER, me.slot + 1),
                    (R.OWNER_INCARNATION, me.incarnation),
                    (R.CLIENT, me.slot + 1),
                    (R.CLIENT_INCARNATION, me.incarnation),
                    (R.ORDER, self._words[H.NEXT_ORDER]),
                ):
                    section.set(base + owner, value)
                section.add(H.NEXT_ORDER, 1)
                section.add(H.REQUESTS, 1)
                self._move(section, row, RowState.FILLING, Actor.ROUTER)
                return row

    def cancel(self, row: int, generation: int, actor: Actor = Actor.ROUTER, *, wish: Wish = Wish.LEFT) -> None:
        """Wish a row's end: its owner ends it before the next chunk or step; without an owner it ends now.

        Raises:
            DeadlineError: the lock did not come free; the wish stands.
        """
        base = self._layout.row(row)
        if self._words[base + R.GENERATION] != generation:
            return
        self._words[base + _CANCEL] = wish
        if self.state(row) not in (RowState.QUEUED, RowState.READY):
            return
        with self._lock.section(Op.CANCEL, row) as section:
            same = self._words[base + R.GENERATION] == generation
            if same and self.state(row) in (RowState.QUEUED, RowState.READY):
                self._end(section, row, RowState.CANCELLED, actor)

    def recycle(self, row: int, generation: int, actor: Actor = Actor.ROUTER) -> bool:
        """Give a finished row back, once its tokens are copied out; False if it is not at its end.

        Raises:
            DeadlineError: the lock did not come free; nothing has changed.
        """
        if self.get(row, R.GENERATION) != generation or self.state(row) not in TERMINAL:
            return False
        done = False
        with self._lock.section(Op.RECYCLE, row) as section:
            if self.get(row, R.GENERATION) == generation and self.state(row) in TERMINAL:
                self._move(section, row, RowState.FREE, actor)
                done = True
        return done

    # --- the daemons' side ---------------------------------------------------------------------------------

    def _fault(self, row: int) -> str | None:
        """Which of a row's words cannot be what a router wrote; None: whoever claims it may rely on them."""
        most = self._layout.geometry.max_context
        num_prompt, num_tokens, limit = (self.get(row, name) for name in (R.NUM_PROMPT, R.NUM_TOKENS, R.LIMIT_TOKENS))
        if not 1 <= num_prompt <= num_tokens <= limit <= most:
            found = f"{num_prompt} prompt tokens, {num_tokens} tokens, a limit of {limit}"
            return f"the row's lengths contradict each other: {found}; a row holds {most}"
        return None

    def _refuse_faulty(self, row: int, generation: int, from_state: RowState, actor: Actor, fault: str) -> None:
        with self._lock.section(Op.FINISH, row) as section:
            same = self.state(row) == from_state and self.get(row, R.GENERATION) == generation
            if same and self._fault(row) is not None:
                self._put_text(row, self._layout.row_error, ROW_ERROR_WORDS, fault)
                self._end(section, row, RowState.FAILED, actor)

    def claim(
        self, me: Participant, row: int, *, alone: bool, local_prefill_tokens: int | None = None
    ) -> Claim | None:
        """Make a row ours, with all blocks that it needs, or change nothing.

        What of it is cached is looked up without the lock, then checked again and pinned inside it. A row taken
        over with blocks keeps them, and gains what others have published since. Who may compute little and who
        much is settled here too: a decode daemon that finds too much uncached sends the row to prefill, a prefill
        daemon that finds little left sends it to decode, each with `None` for an answer.

        Args:
            me: a prefill daemon claims QUEUED rows, a decode daemon READY ones.
            alone: whether this row would be the only one we work on. Rows whose last owner died before
                its first commit are claimed in no other way.
            local_prefill_tokens: what a decode daemon may prefill itself; None: nothing is sent on.

        Returns:
            None: another was faster, the room is short, the row must be claimed alone, it was sent on, or it failed
                because its words make no sense.
        """
        words, base = self._words, self._layout.row(row)
        from_state, to_state, actor = me.claims
        generation = words[base + R.GENERATION]
        if words[base + _ATTEMPTS] and not alone:
            return None
        if (fault := self._fault(row)) is not None:
            self._refuse_faulty(row, generation, from_state, actor, fault)
            return None
        num_tokens = self.count_tokens(row)
        held = words[base + R.NUM_BLOCKS], words[base + R.NUM_PUBLISHED]
        is_first = not words[base + R.T_DECODING]
        matched = self._match(row, num_tokens)
        if self._pool.seals:
            if words[base + R.ADOPTIONS] and self._refuse_if_broken(row, generation, actor):
                return None
            matched = self._without_broken(matched)
        claimed: Claim | None = None
        with self._lock.section(Op.CLAIM, row) as section:
            if self.state(row) != from_state or words[base + R.GENERATION] != generation:
                raise Rollback
            # Another may have had it in between: with blocks that the match did not know, or a token further.
            now_held = words[base + R.NUM_BLOCKS], words[base + R.NUM_PUBLISHED]
            if now_held != held or self.count_tokens(row) != num_tokens:
                raise Rollback
            if words[base + _ATTEMPTS] and not alone:
                raise Rollback
            cached = self._pin_matched(section, row, matched)
            uncached = num_tokens - 1 - words[base + _KV_LEN]
            little = local_prefill_tokens is not None and uncached <= local_prefill_tokens
            fresh = held[0] == 0
            if actor is Actor.DECODE and fresh and local_prefill_tokens is not None and not little:
                self._release_blocks(section, row)
                section.set(base + R.T_READY, 0)
                self._move(section, row, RowState.QUEUED, actor)
                return None
            self._count_prompt(section, row, num_tokens, cached, fresh)
            # Through position num_tokens: the last known token's KV, and the next token's.
            if not self._grow(section, row, min(num_tokens + 1, words[base + R.LIMIT_TOKENS])):
                raise Rollback
            if actor is Actor.PREFILL and little:
                self._move(section, row, RowState.READY, actor)
                return None
            section.set(base + R.OWNER, me.slot + 1)
            section.set(base + R.OWNER_INCARNATION, me.incarnation)
            section.add(base + _ATTEMPTS, 1)
            section.set(base + R.CLAIMED_ALONE, int(alone))
            section.set(base + _NUM_TOKENS, num_tokens)
            section.set(base + _PREEMPT, 0)
            section.set(base + (R.DECODE_SLOT if actor is Actor.DECODE else R.PREFILL_SLOT), me.slot + 1)
            self._move(section, row, to_state, actor)
            claimed = Claim(
                row=row,
                generation=generation,
                num_tokens=num_tokens,
                kv_len=min(words[base + _KV_LEN], num_tokens - 1),
                cached_tokens=cached,
            )
        if claimed is not None and actor is Actor.DECODE and is_first:
            # The stamp of a claim is when it was over: hand-over times include the whole section.
            words[base + R.T_DECODING] = time.monotonic_ns()
        return claimed

    def _match(self, row: int, num_tokens: int) -> list[BlockRef]:
        """Cached blocks that follow those the row has published itself, as far as its KV is not there yet."""
        words, base, size = self._words, self._layout.row(row), self._layout.geometry.block_tokens
        first, limit = words[base + R.NUM_PUBLISHED], (num_tokens - 1) // size
        if limit <= words[base + _KV_LEN] // size or limit <= first:
            return []
        after = None
        if first:
            block = words[base + self._layout.row_blocks + first - 1]
            after = BlockRef(block, self._pool.generation(block)), words[base + R.LAST_HASH]
        return self._pool.match(self.tokens(row, first * size, num_tokens), limit - first, after)

    def _without_broken(self, matched: list[BlockRef]) -> list[BlockRef]:
        """Matched blocks up to the first whose KV is not what was sealed; that one is condemned."""
        for index, ref in enumerate(matched):
            if self._pool.is_broken(ref):
                with self._lock.section(Op.CONDEMN) as section:
                    self._pool.condemn(section, ref)
                return matched[:index]
        return matched

    def _refuse_if_broken(self, row: int, generation: int, actor: Actor) -> bool:
        """Check what the last owner of a waiting row published, before it is taken over.

        Returns:
            True: a block is broken, and the row failed, or waits for all its KV to be computed again.
        """
        words, base = self._words, self._layout.row(row)
        table = self.block_table(row)[: words[base + R.NUM_PUBLISHED]]
        refs = [BlockRef(block, self._pool.generation(block)) for block in table]
        broken = next((ref for ref in refs if self._pool.is_broken(ref)), None)
        if broken is None:
            return False
        text = f"KV of block {broken.block} is not what was computed (checksum)"
        with self._lock.section(Op.CONDEMN, row) as section:
            self._pool.condemn(section, broken)
            state = self.state(row)
            same = words[base + R.GENERATION] == generation and state in (RowState.QUEUED, RowState.READY)
            if same and broken.block in self.block_table(row):
                if words[H.VERIFY_KV] == VerifyKv.FAIL:
                    self._put_text(row, self._layout.row_error, ROW_ERROR_WORDS, text)
                    self._end(section, row, RowState.FAILED, actor)
                else:
                    self._release_blocks(section, row)
                    section.add(base + R.PREEMPTIONS, 1)
                    section.add(H.PREEMPTIONS, 1)
                    if state is RowState.READY:
                        self._move(section, row, RowState.QUEUED, actor)
        return True

    def _pin_matched(self, section: Section, row: int, matched: list[BlockRef]) -> int:
        """Put cached blocks into the table, in place of private ones that are not computed; returns tokens won."""
        words, base, size = self._words, self._layout.row(row), self._layout.geometry.block_tokens
        table, first = base + self._layout.row_blocks, words[base + R.NUM_PUBLISHED]
        place = first
        for ref in matched:
            if not self._pool.pin(section, ref):
                break
            if place < words[base + R.NUM_BLOCKS]:
                self._pool.release(section, words[table + place])
            section.set(table + place, ref.block)
            place += 1
        if place == first:
            return 0
        won = place * size - words[base + _KV_LEN]
        section.set(base + R.NUM_BLOCKS, max(place, words[base + R.NUM_BLOCKS]))
        section.set(base + R.NUM_PUBLISHED, place)
        section.set(base + R.LAST_HASH, self._pool_hash(words[table + place - 1]))
        section.set(base + _KV_LEN, max(words[base + _KV_LEN], place * size))
        return max(0, won)

    def _count_prompt(self, section: Section, row: int, num_tokens: int, cached: int, fresh: bool) -> None:
        """Count a prompt once, and what of it was cached; what is computed again after a preemption is neither."""
        base = self._layout.row(row)
        if self._words[base + R.PREEMPTIONS] or num_tokens != self._words[base + R.NUM_PROMPT]:
            return
        if fresh:
            section.set(base + R.CACHED_TOKENS, cached)
            section.add(H.PROMPT_TOKENS, num_tokens)
        else:
            section.add(base + R.CACHED_TOKENS, cached)
        section.add(H.CACHED_TOKENS, cached)

    def _pool_hash(self, block: int) -> int:
        return self._words[self._layout.block(block) + B.HASH]

    def _grow(self, section: Section, row: int, num_positions: int) -> bool:
        words, base = self._words, self._layout.row(row)
        have = words[base + R.NUM_BLOCKS]
        need = -(-num_positions // self._layout.geometry.block_tokens)
        if need <= have:
            return True
        if need - have > self._pool.num_available():
            return False
        for index in range(have, need):
            block = self._pool.allocate(section, row)
            if block is None:
                raise CorruptSegmentError("pool: fewer blocks than it counts")
            section.set(base + self._layout.row_blocks + index, block)
        section.set(base + R.NUM_BLOCKS, need)
        return True

    def grow(self, row: int, num_positions: int) -> bool:
        """Blocks for positions below `num_positions` of an owned row; False: the pool has none left."""
        if num_positions > self._layout.geometry.max_context:
            raise CapacityError(
                f"row {row}: blocks for {num_positions} positions, a row holds {self._layout.geometry.max_context}"
            )
        need = -(-num_positions // self._layout.geometry.block_tokens)
        if need <= self.get(row, R.NUM_BLOCKS):
            return True
        grown = False
        with self._lock.section(Op.GROW, row) as section:
            grown = self._grow(section, row, num_positions)
        return grown

    def commit_kv(self, row: int, kv_len: int) -> None:
        """KV below `kv_len` is in the pages, in all layers. If it grew, this is the owner's proof of progress.

        KV that was there before proves nothing: a row that kills whoever samples it comes as far each time.
        """
        base = self._layout.row(row)
        grew = kv_len > self._words[base + _KV_LEN]
        self._words[base + _KV_LEN] = kv_len  # SYNC: row-commit
        if grew:
            self._acquit(base)

    def put_logprobs(self, row: int, position: int, logprobs: TokenLogprobs) -> None:
        """What belongs to the token that is committed next; a daemon that dies in between has written nothing."""
        own = (logprobs.token, logprobs.logprob)
        entry = array("Q", [_pair_to_word(token, value) for token, value in (own, *logprobs.top)])
        start = self._logprob_entry(row, position)
        self._words[start : start + len(entry)] = memoryview(entry)

    def commit_token(self, row: int, generation: int, position: int, token: int) -> None:
        """The token at `position` is sampled. One store makes it true for everybody."""
        base = self._layout.row(row)
        self._words[base + self._layout.row_tokens + position] = generation << 32 | token  # SYNC: row-commit
        self._words[base + _NUM_TOKENS] = position + 1
        self._acquit(base)

    def _acquit(self, base: int) -> None:
        """The row went on: whoever died over it before did not die of it."""
        if self._words[base + _ATTEMPTS]:
            self._words[base + R.DEATHS_ALONE] = 0
            self._words[base + _ATTEMPTS] = 0

    def num_publishable(self, row: int) -> int:
        """Full blocks that no position still to be written lies in, beyond those already published."""
        base = self._layout.row(row)
        words = self._words
        settled = min(words[base + _KV_LEN], words[base + _NUM_TOKENS] - 1)
        return settled // self._layout.geometry.block_tokens - words[base + R.NUM_PUBLISHED]

    def publish(self, row: int) -> int:
        """Make the row's newly full blocks a cached prefix for all; returns how many."""
        number = self.num_publishable(row)
        if number <= 0:
            return 0
        words, base = self._words, self._layout.row(row)
        size = self._layout.geometry.block_tokens
        first = words[base + R.NUM_PUBLISHED]
        tokens = self.tokens(row, first * size, (first + number) * size)
        hash_ = words[base + R.LAST_HASH] or self._pool.hash_seed()
        parts = [tokens[index * size : (index + 1) * size] for index in range(number)]
        hashes = []
        for part in parts:
            hashes.append(hash_ := chain_hash(hash_, part))
        table = base + self._layout.row_blocks
        sums = [0] * number
        if self._pool.seals:
            sums = [self._pool.checksum(words[table + first + index]) for index in range(number)]
        with self._lock.section(Op.PUBLISH, row) as section:
            for index, part in enumerate(parts):
                place = table + first + index
                parent = None
                if first + index:
                    before = words[place - 1]
                    parent = BlockRef(before, self._pool.generation(before))
                kept = self._pool.publish(section, words[place], hashes[index], part, parent, sums[index])
                if kept != words[place]:
                    section.set(place, kept)
            section.set(base + R.NUM_PUBLISHED, first + number)
            section.set(base + R.LAST_HASH, hash_)
        return number

    def hand_over(self, row: int) -> None:
        """Prefill is done: stamps, then one store of the state, and any decode daemon may take the row."""
        self._uncharge(row)
        self._move_own(row, RowState.READY, Actor.PREFILL)

    def put_back(self, row: int, actor: Actor) -> None:
        """An owner lets a row go, with its tokens and blocks, for another to go on with."""
        self._uncharge(row)
        self._move_own(row, RowState.QUEUED if actor is Actor.PREFILL else RowState.READY, actor)

    def _uncharge(self, row: int) -> None:
        """A living owner lets go: this claim was no attempt that a death ended. Earlier ones still count."""
        at = self._layout.row(row) + _ATTEMPTS
        if self._words[at]:
            self._words[at] -= 1

    def finish(self, row: int, reason: FinishReason) -> None:
        with self._lock.section(Op.FINISH, row) as section:
            section.set(self._layout.row(row) + R.FINISH_REASON, reason)
            self._end(section, row, RowState.FINISHED, Actor.DECODE)

    def end_cancelled(self, row: int, actor: Actor) -> None:
        """The owner follows the wish to cancel."""
        with self._lock.section(Op.CANCEL, row) as section:
            self._end(section, row, RowState.CANCELLED, actor)

    def fail(self, row: int, text: str, actor: Actor) -> None:
        self._put_text(row, self._layout.row_error, ROW_ERROR_WORDS, text)
        with self._lock.section(Op.FINISH, row) as section:
            self._end(section, row, RowState.FAILED, actor)

    def preempt(self, row: int, actor: Actor) -> bool:
        """Its owner gives up a row's blocks for want of room; its tokens stay, its KV is computed again later.

        Returns:
            False: the row is in no state that the actor owns rows in.
        """
        done = False
        with self._lock.section(Op.PREEMPT, row) as section:
            mine = {Actor.PREFILL: RowState.PREFILLING, Actor.DECODE: RowState.DECODING}.get(actor)
            if self.state(row) is mine:
                base = self._layout.row(row)
                if self._words[base + _ATTEMPTS]:
                    section.add(base + _ATTEMPTS, -1)  # see _uncharge
                self._give_up_blocks(section, row, actor)
                done = True
        return done

    def preempt_waiting(self, row: int, generation: int, actor: Actor) -> bool:
        """Take the blocks of a row that nobody owns: READY, or QUEUED (put back by a prefill daemon).

        Args:
            generation: of the request that was seen there. It may be gone, or claimed by a peer, since then: nothing
                is taken from an owner, and nothing from another request.

        Returns:
            False: there is nothing to take any more.
        """
        done = False
        with self._lock.section(Op.PREEMPT, row) as section:
            same = self.get(row, R.GENERATION) == generation and self.get(row, R.NUM_BLOCKS) > 0
            if same and self.state(row) in (RowState.READY, RowState.QUEUED):
                self._give_up_blocks(section, row, actor)
                done = True
        return done

    def _give_up_blocks(self, section: Section, row: int, actor: Actor) -> None:
        base = self._layout.row(row)
        self._release_blocks(section, row)
        section.set(base + _PREEMPT, 0)
        section.add(base + R.PREEMPTIONS, 1)
        section.add(H.PREEMPTIONS, 1)
        if self.state(row) is not RowState.QUEUED:
            self._move(section, row, RowState.QUEUED, actor)

    def wish_preempted(self, row: int, generation: int) -> None:
        """Ask a row's owner to give up its blocks. Whoever has the row next knows by the generation whom we meant."""
        self.put(row, R.PREEMPT, generation)

    def is_to_be_preempted(self, row: int) -> bool:
        """Whether the request in this row was asked to give up its blocks. For its owner."""
        return self.get(row, R.PREEMPT) == self.get(row, R.GENERATION)

    # --- inside a section ----------------------------------------------------------------------------------

    def _end(self, section: Section, row: int, to: RowState, actor: Actor) -> None:
        base = self._layout.row(row)
        self._release_blocks(section, row)
        outcome = H.FINISHED if to is RowState.FINISHED else H.FAILED
        if to is RowState.CANCELLED:
            outcome = _OUTCOMES.get(self._words[base + _CANCEL], H.CANCELLED)
        section.add(outcome, 1)
        section.add(H.OUTPUT_TOKENS, max(0, self.count_tokens(row) - self._words[base + R.NUM_PROMPT]))
        self._move(section, row, to, actor)

    def _release_blocks(self, section: Section, row: int) -> None:
        """Let go of all blocks, last first: children are evicted before their parents."""
        base = self._layout.row(row)
        for block in reversed(self.block_table(row)):
            self._pool.release(section, block)
        for name in (R.NUM_BLOCKS, R.NUM_PUBLISHED, R.LAST_HASH, R.KV_LEN):
            section.set(base + name, 0)

    def reap_row(self, section: Section, row: int, cause: str, *, resume: bool = True) -> RowState:
        """Take a row from an owner that is proven dead. Only the supervisor, inside its section.

        Args:
            cause: what it fails with, if it must.
            resume: whether it may go on elsewhere.

        Returns:
            The row's new state.
        """
        base, words, actor = self._layout.row(row), self._words, Actor.SUPERVISOR
        state = self.state(row)
        if state is RowState.FILLING:
            self._move(section, row, RowState.FREE, actor)
            return RowState.FREE
        if words[base + _ATTEMPTS] and words[base + R.CLAIMED_ALONE]:
            section.add(base + R.DEATHS_ALONE, 1)
            if words[base + R.DEATHS_ALONE] >= MAX_DEATHS_ALONE:
                self._put_text(row, self._layout.row_error, ROW_ERROR_WORDS, cause)
                self._end(section, row, RowState.FAILED, actor)
                return RowState.FAILED
        if words[base + _CANCEL]:
            self._end(section, row, RowState.CANCELLED, actor)
            return RowState.CANCELLED
        if not resume:
            self._put_text(row, self._layout.row_error, ROW_ERROR_WORDS, cause)
            self._end(section, row, RowState.FAILED, actor)
            return RowState.FAILED
        to = RowState.QUEUED if state is RowState.PREFILLING else RowState.READY
        section.add(base + R.ADOPTIONS, 1)
        section.add(H.ADOPTIONS, 1)
        self._move(section, row, to, actor)
        return to

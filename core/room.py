"""Room for the oldest: who gives up blocks when the pool is full, and who gets them.

The oldest request in the segment is never preempted, and admission saw to it that it fits alone: so it always
ends, then the next. A preempted row keeps its tokens; its KV is computed again. What comes free is for the oldest
that wants it: a daemon says for whom it waits, and no row behind that one is begun. Called by both engines.
"""

from __future__ import annotations

import logging

from pdctl.core.wake import Wake
from pdctl.transport.layout import P, R
from pdctl.transport.rows import Actor, Claim, Rows, RowState
from pdctl.transport.segment import Participant, Role, Segment

_log = logging.getLogger("rows")
_SENT_ON_TO = {RowState.QUEUED: Role.PREFILL, RowState.READY: Role.DECODE}


def claim_row(
    rows: Rows,
    me: Participant,
    row: int,
    wanted: Wanted,
    wake: Wake,
    *,
    alone: bool,
    local_prefill_tokens: int,
    vocab_size: int | None,
) -> Claim | None:
    """Claim a row, taking blocks from younger ones if it lacks some; rings whoever it is sent on to.

    Args:
        alone, local_prefill_tokens: see `Rows.claim`.
        vocab_size: a row with ids beyond it fails here: in a forward it would end all that share it. None: there is
            no model that could fail.

    Returns:
        None: not now, or it is no row for us any more. If there was no room, `wanted` knows.
    """
    from_state, _, actor = me.claims
    while (claim := rows.claim(me, row, alone=alone, local_prefill_tokens=local_prefill_tokens)) is None:
        state = rows.state(row)
        if state is not from_state:
            if (role := _SENT_ON_TO.get(state)) is not None:
                wake.for_work(role)
            elif state is RowState.FAILED:
                _log.error("%s row %d: failed, %s", rows.request_id(row), row, rows.error_text(row))
                wake.clients([row])
            return None
        if rows.get(row, R.ATTEMPTS) and not alone:
            return None
        order = rows.get(row, R.ORDER)
        if not make_room(rows, order, actor, wake):
            wanted.note(order)
            return None
    largest = 0 if vocab_size is None else max(rows.tokens(row, claim.kv_len, claim.num_tokens))
    if vocab_size is not None and largest >= vocab_size:
        text = f"token id {largest} in the prompt: the model has {vocab_size}"
        _log.error("%s row %d: failed, %s", rows.request_id(row), row, text)
        rows.fail(row, text, actor)
        wake.clients([row])
        wake.for_room()
        return None
    return claim


def make_room(rows: Rows, order: int, actor: Actor, wake: Wake) -> bool:
    """Take the blocks of one request younger than `order`, or ask its owner to give them up.

    Returns:
        True: some came free. False: not now; they come with a bell.
    """
    if preempt_younger(rows, order, actor) is not None:
        wake.for_work(Role.PREFILL)
        return True
    asked = ask_younger(rows, order)
    if asked is not None:
        wake.owner(asked)
    return False


def preempt_younger(rows: Rows, order: int, actor: Actor) -> int | None:
    """Take the blocks of the youngest request after `order` that nobody owns: a ready one, else a queued one.

    Returns:
        Its row; None: there is none.
    """
    for state in (RowState.READY, RowState.QUEUED):
        for row in reversed(rows.in_state(state)):
            generation = rows.get(row, R.GENERATION)
            younger = rows.get(row, R.ORDER) > order and rows.get(row, R.NUM_BLOCKS) > 0
            if younger and rows.preempt_waiting(row, generation, actor):
                return row
    return None


def ask_younger(rows: Rows, order: int) -> int | None:
    """Wish that the owner of the youngest request after `order` gives it up, before its next chunk or step.

    Returns:
        Its row; None: all others are older.
    """
    owned = [row for state in (RowState.PREFILLING, RowState.DECODING) for row in rows.in_state(state)]
    # The generation is read before the order: if the request is gone since, the wish is nobody's.
    younger = [(rows.get(row, R.GENERATION), rows.get(row, R.ORDER), row) for row in owned]
    generation, last, youngest = max(younger, key=lambda one: one[1], default=(0, 0, 0))
    if last <= order:
        return None
    rows.wish_preempted(youngest, generation)
    return youngest


class Wanted:
    """For which rows blocks are wanted, by us and by others.

    Rows are named by their order: the smallest is the oldest.
    """

    def __init__(self, segment: Segment, me: Participant) -> None:
        self._segment = segment
        self._me = me
        self._ours: int | None = None
        self._first: int | None = None

    def look(self) -> None:
        """Begin a step: ask what all daemons wait for, as far as those rows still wait."""
        rows = self._segment.rows
        told = {
            self._segment.participant_word(slot, P.WANTS_ROOM) - 1
            for role in (Role.PREFILL, Role.DECODE)
            for slot in self._segment.slots(role)
        }
        told.discard(-1)
        self._ours = self._first = None
        if told:
            states = (RowState.QUEUED, RowState.READY, RowState.DECODING)
            orders = {rows.get(row, R.ORDER) for state in states for row in rows.in_state(state)}
            self._first = min(told & orders, default=None)

    def note(self, order: int) -> None:
        """There was no room for this row."""
        self._ours = order if self._ours is None else min(order, self._ours)
        self._first = order if self._first is None else min(order, self._first)

    def is_before(self, row: int) -> bool:
        """Whether an older row waits for the blocks that `row`, which has none, would take."""
        rows = self._segment.rows
        return self._first is not None and rows.get(row, R.ORDER) > self._first and not rows.get(row, R.NUM_BLOCKS)

    def forget(self) -> None:
        """We wait for nothing any more."""
        self._ours = self._first = None
        self.tell()

    def tell(self) -> bool:
        """Say what we wait for, so that whoever frees blocks rings.

        Returns:
            True: look once more before sleeping; some may have come free before we said so.
        """
        told, now = self._me.get(P.WANTS_ROOM), 0 if self._ours is None else self._ours + 1
        if told != now:
            self._me.put(P.WANTS_ROOM, now)
        return now != 0 and told != now

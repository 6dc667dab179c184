"""Room for the oldest: who gives up blocks when the pool is full.

The oldest request in the segment is never preempted, and admission saw to it that it fits alone: so it always
ends, then the next. A preempted row keeps its tokens; its KV is computed again. Called by both engines.
"""

from __future__ import annotations

from pdctl.transport.layout import R
from pdctl.transport.rows import Actor, Rows, RowState


def preempt_younger(rows: Rows, order: int, actor: Actor) -> int | None:
    """Take the blocks of the youngest request after `order` that nobody owns: a ready one, else a queued one.

    Returns:
        Its row; None: there is none.
    """
    for state in (RowState.READY, RowState.QUEUED):
        for row in reversed(rows.in_state(state)):
            younger = rows.get(row, R.ORDER) > order and rows.get(row, R.NUM_BLOCKS) > 0
            if younger and rows.preempt(row, actor):
                return row
    return None


def ask_younger(rows: Rows, order: int) -> int | None:
    """Wish that the owner of the youngest request after `order` gives it up, before its next chunk or step.

    Returns:
        Its row, for ringing its owner's bell; None: all others are older.
    """
    owned = [row for state in (RowState.PREFILLING, RowState.DECODING) for row in rows.in_state(state)]
    younger = [row for row in owned if rows.get(row, R.ORDER) > order]
    if not younger:
        return None
    youngest = max(younger, key=lambda row: rows.get(row, R.ORDER))
    rows.put(youngest, R.PREEMPT, 1)
    return youngest

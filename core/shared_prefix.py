"""Which rows begin alike: a row waits for blocks that another is computing, instead of computing them too.

It waits for the blocks, never for the row: if the other is cancelled, preempted or its daemon dies, it is no
longer being prefilled, and nobody waits for it. Used by the prefill engine; all of it can be read again from rows.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from pdctl.transport.layout import R
from pdctl.transport.rows import RowState
from pdctl.transport.segment import Segment


@dataclass(frozen=True)
class _Known:
    generation: int
    num_tokens: int
    hashes: list[int]


class SharedPrefixes:
    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._rows = segment.rows
        self._known: dict[int, _Known] = {}

    def is_being_computed(self, row: int) -> bool:
        """Whether some prefill daemon is at work on KV that `row` needs, too."""
        rows, size = self._rows, self._segment.geometry.block_tokens
        there = rows.get(row, R.KV_LEN)
        for other in rows.in_state(RowState.PREFILLING):
            if other == row:
                continue
            shared = _num_equal(self._hashes(row), self._hashes(other)) * size
            if shared > max(there, rows.get(other, R.KV_LEN)):
                return True
        return False

    def _hashes(self, row: int) -> list[int]:
        """Chain hashes of the blocks that this row publishes before it is handed over."""
        generation, num_tokens = self._rows.get(row, R.GENERATION), self._rows.get(row, R.NUM_TOKENS)
        known = self._known.get(row)
        if known is None or (known.generation, known.num_tokens) != (generation, num_tokens):
            tokens = self._rows.tokens(row, 0, num_tokens - 1)
            known = _Known(generation, num_tokens, self._segment.pool.chain_hashes(tokens))
            self._known[row] = known
        return known.hashes


def _num_equal(first: list[int], second: list[int]) -> int:
    """How many hashes at the start are equal. In a chain, two that are equal have only equal ones before them."""
    if not first or not second or first[0] != second[0]:
        return 0
    shorter = range(min(len(first), len(second)))
    return bisect_left(shorter, True, key=lambda index: first[index] != second[index])

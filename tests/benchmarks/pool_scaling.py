"""What claiming, growing and scanning cost, by the size of the pool and the number of rows: ratios in one run.

    python tests/benchmarks/pool_scaling.py

The geometry is faked (64 bytes of KV a block) so that a million blocks fit any machine; the operations are the
daemons' own. Each figure is the median of many, in microseconds; every pool is full of cached blocks, so that each
allocation evicts one. Not collected by pytest.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from pdctl.transport.layout import DType, Geometry, R
from pdctl.transport.rows import Actor, RowParams, RowState
from pdctl.transport.segment import Role, Segment

BLOCK = 16
PROMPT = 32 * BLOCK
ROUNDS = 200


def timed_us(operation: Callable[[], object], before: Callable[[], object], after: Callable[[], object]) -> float:
    """Median time of `operation`, which `before` makes possible and `after` undoes."""
    found = []
    for _ in range(ROUNDS):
        before()
        began = time.perf_counter_ns()
        operation()
        found.append((time.perf_counter_ns() - began) / 1e3)
        after()
    return statistics.median(found)


class Bench:
    def __init__(self, num_blocks: int, max_rows: int) -> None:
        geometry = Geometry(
            num_blocks=num_blocks,
            block_tokens=BLOCK,
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            dtype=DType.BFLOAT16,
            max_rows=max_rows,
            max_context=1024,
        )
        self.segment = Segment.anonymous(geometry)
        self.rows = self.segment.rows
        self.router = self.segment.attach(Role.ROUTER)
        self.prefill = self.segment.attach(Role.PREFILL)
        self._ids = itertools.count()
        self.row = -1
        self._fill(num_blocks)
        # All rows but one hold a request that waits.
        for _ in range(max_rows - 1):
            self.submit(8)

    def submit(self, length: int) -> int:
        start = next(self._ids) * 1000
        claim = self.rows.submit(
            self.router,
            request_id="bench",
            tokens=list(range(start, start + length)),
            limit_tokens=length + 64,
            params=RowParams(),
            local_prefill_tokens=0,
        )
        assert claim is not None
        self.row = claim.row
        return claim.row

    def _fill(self, num_blocks: int) -> None:
        """Leave every block cached and unreferenced."""
        for _ in range(num_blocks // (PROMPT // BLOCK) + 1):
            self.submit(PROMPT + 1)
            self.claim()
            self.end()

    def claim(self) -> None:
        assert self.rows.claim(self.prefill, self.row, alone=True) is not None

    def end(self) -> None:
        """The request is over; its blocks stay cached."""
        generation = self.rows.get(self.row, R.GENERATION)
        if self.rows.state(self.row) is RowState.PREFILLING:
            self.rows.commit_kv(self.row, PROMPT)
            self.rows.publish(self.row)
            self.rows.end_cancelled(self.row, Actor.PREFILL)
        else:
            self.rows.cancel(self.row, generation)
        assert self.rows.recycle(self.row, generation)

    def grow(self) -> None:
        assert self.rows.grow(self.row, PROMPT + 2 * BLOCK)

    def figures(self) -> tuple[float, float, float]:
        """Claim with 33 blocks, growth by one block, and a daemon's scan for waiting rows; in us."""

        def claimed() -> None:
            self.submit(PROMPT + 1)
            self.claim()

        claim = timed_us(self.claim, lambda: self.submit(PROMPT + 1), self.end)
        grow = timed_us(self.grow, claimed, self.end)
        scan = timed_us(lambda: self.rows.in_state(RowState.QUEUED), lambda: None, lambda: None)
        return claim, grow, scan


def table(title: str, cases: list[tuple[str, Bench]]) -> Table:
    made = Table(title=title)
    for column in ("", "claim of 33 blocks", "growth by 1", "scan", "against the first"):
        made.add_column(column, justify="right")
    first: tuple[float, ...] | None = None
    for name, bench in cases:
        figures = bench.figures()
        first = first or figures
        ratios = " ".join(f"{now / then:.2f}" for now, then in zip(figures, first, strict=True))
        made.add_row(name, *(f"{figure:.1f} us" for figure in figures), ratios)
        bench.segment.close()
    return made


def main() -> None:
    console = Console()
    blocks = [10**3, 10**4, 10**5, 10**6]
    console.print(table("by blocks in the pool", [(f"{number:,}", Bench(number, 8)) for number in blocks]))
    rows = [8, 64, 512, 4096]
    console.print(table("by rows, all waiting", [(f"{number:,}", Bench(10**4, number)) for number in rows]))


if __name__ == "__main__":
    main()

"""The table of `pdctl bench`, from its result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdctl.core.bench.figures import digits

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

    from pdctl.core.bench.quick import Phase, Result


def render(result: Result) -> Table:
    """At most 80 columns; a figure that was not measured is n/a, never 0."""
    from rich.table import Table

    plan = result.plan
    table = Table(
        title=f"{plan.prompt_tokens} prompt tokens, {plan.max_tokens} generated, greedy", title_justify="left"
    )
    table.add_column("")
    for phase in result.phases:
        table.add_column(f"{phase.concurrency} at once", justify="right")
    rows: tuple[tuple[str, Callable[[Phase], str]], ...] = (
        ("requests ok / failed", lambda phase: f"{phase.summary['completed']} / {phase.summary['failed']}"),
        ("TTFT ms", lambda phase: _spread(phase, "ttft_ms")),
        ("TPOT ms", lambda phase: _spread(phase, "tpot_ms")),
        ("hand-over µs", lambda phase: _spread(phase, "handover_us")),
        ("output tok/s", lambda phase: digits(phase.summary["output_throughput"])),
        ("total tok/s", lambda phase: digits(phase.summary["total_token_throughput"])),
    )
    for label, cell in rows:
        table.add_row(label, *(cell(phase) for phase in result.phases))
    return table


def _spread(phase: Phase, key: str) -> str:
    series = phase.series[key]
    return "n/a" if series is None else f"{digits(series.p50)} ({digits(series.p99)})"

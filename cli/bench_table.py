"""The table of `pdctl bench`, from its result."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

    from pdctl.core.bench.quick import Phase, Result


def render(result: Result) -> Table:
    """At most 80 columns; a figure that was not measured is n/a, never 0."""
    from rich.table import Table

    table = Table(
        title=f"{result.prompt_tokens} prompt tokens, {result.max_tokens} generated, greedy",
        title_justify="left",
    )
    table.add_column("")
    for phase in result.phases:
        table.add_column(f"{phase.concurrency} at once", justify="right")
    rows: tuple[tuple[str, Callable[[Phase], str]], ...] = (
        ("requests ok / failed", lambda phase: f"{phase.num_ok} / {phase.num_failed}"),
        ("TTFT ms", lambda phase: _spread(phase, "ttft_ms")),
        ("TPOT ms", lambda phase: _spread(phase, "tpot_ms")),
        ("hand-over µs", lambda phase: _spread(phase, "handover_us")),
        ("output tok/s", lambda phase: _number(phase.output_tokens_per_s)),
        ("total tok/s", lambda phase: _number(phase.total_tokens_per_s)),
    )
    for label, cell in rows:
        table.add_row(label, *(cell(phase) for phase in result.phases))
    return table


def _spread(phase: Phase, key: str) -> str:
    series = phase.series[key]
    if series is None:
        return "n/a"
    return f"{_number(series.p50)} ({_number(series.p99)})"


def _number(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"

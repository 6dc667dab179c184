"""The tables of `pdctl bench handoff` and `pdctl bench engine`, from their results; at most 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from pdctl.core.bench.engine import Cell as EngineCell
    from pdctl.core.bench.engine import Result as EngineResult
    from pdctl.core.bench.figures import Series
    from pdctl.core.bench.handoff import Cell
    from pdctl.core.bench.handoff import Result as HandoffResult


def handoff_tables(result: HandoffResult) -> list[Table]:
    """One table as the machine is, one beside the load; a row a length, a column a transport."""
    from rich.table import Table

    g = result.geometry
    tables = []
    for load in sorted({cell.load for cell in result.cells}):
        cells = {(cell.tokens, cell.transport): cell for cell in result.cells if cell.load is load}
        names = list(dict.fromkeys(name for _, name in cells))
        title = f"hand-over, {g.token_bytes:,} bytes of KV a token ({g.dtype.label})"
        if load:
            title = f"beside a process that moves {result.load_gb_per_s:.1f} GB/s of memory"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, collapse_padding=True)
        table.add_column("tokens")
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
        for tokens in dict.fromkeys(tokens for tokens, _ in cells):
            row = [cells[tokens, name] for name in names]
            table.add_row(f"{tokens}\n{_megabytes(row[0].num_bytes)} MB", *(_handoff_cell(cell) for cell in row))
        tables.append(table)
    return tables


def _handoff_cell(cell: Cell) -> str:
    if cell.series is None:
        return "n/a"
    ratio = "" if cell.ratio is None or cell.transport == "pdctl" else f"{digits(cell.ratio)}x"
    return f"{spread(cell.series)}\n{ratio}"


def _megabytes(num_bytes: int) -> str:
    return digits(num_bytes / 1e6)


def engine_tables(result: EngineResult) -> list[Table]:
    """Decode steps, prefill, and where the time of a decode step goes; what was not asked for has no table."""
    tables = []
    for name, head, cells, limits in (
        ("decode", ("batch", "context"), result.decode, result.decode_limits),
        ("prefill", ("tokens",), result.prefill, result.prefill_limits),
    ):
        if cells:
            words = (
                f"{name}, {limits.threads} thread{'s' * (limits.threads > 1)}: memory is read at "
                f"{limits.read_bytes_per_s / 1e9:.1f} GB/s, {limits.flops_per_s / 1e9:.0f} GFLOP/s"
            )
            tables.append(_limit_table(words, head, cells))
    if result.profiles:
        tables.append(_profile_table(result))
    return tables


def _limit_table(title: str, head: tuple[str, ...], cells: tuple[EngineCell, ...]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in (*head, "ms", "tok/s", "limit ms", "binds", "of the limit"):
        table.add_column(name, justify="left" if name == "binds" else "right", no_wrap=True)
    for cell in cells:
        sizes = (str(cell.batch), str(cell.context))[-len(head) :]
        figures = (spread(cell.series), digits(cell.tokens_per_s), digits(cell.limit_ms), cell.limit)
        table.add_row(*sizes, *figures, f"{100 * cell.share_of_limit:.0f} %")
    return table


def _profile_table(result: EngineResult) -> Table:
    """A column a batch; the five smallest batches fit."""
    from rich.table import Table

    profiles = result.profiles[:5]
    table = Table(
        title="one decode step, ms (share)", title_justify="left", box=None, pad_edge=False, collapse_padding=True
    )
    table.add_column("batch, context")
    for one in profiles:
        table.add_column(f"{one.batch}, {one.context}", justify="right", no_wrap=True)
    for phase in profiles[0].phases_ms:
        cells = []
        for one in profiles:
            ms = one.phases_ms[phase]
            cells.append(f"{digits(ms)} ({100 * ms / sum(one.phases_ms.values()):.0f}%)")
        table.add_row(phase, *cells)
    table.add_row("timers", *(digits(one.timers_ms) for one in profiles))
    table.add_row("step without timers", *(digits(one.step_ms) for one in profiles))
    return table


def spread(series: Series) -> str:
    return f"{digits(series.p50)} ({digits(series.p99)})"


def digits(value: float) -> str:
    """Two or three digits that mean something."""
    if 0 < value < 0.005:
        return "<.01"
    if value >= 99.5:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"

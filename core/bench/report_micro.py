"""Sections of `bench handoff` and `bench engine`. Called by report.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdctl.core.bench.figures import digits
from pdctl.core.bench.machine import doubts
from pdctl.core.bench.plots import Draws, Plot, Table, Trace
from pdctl.core.bench.reading import Found, printable

OWN = "pdctl"


@dataclass(frozen=True, kw_only=True)
class _Cell:
    """One transport at one length; times above 0, as they were measured."""

    transport: str
    tokens: int
    num_bytes: int
    load: bool
    times_ms: tuple[float, ...]
    ratio: float | None

    @property
    def median_ms(self) -> float | None:
        return statistics.median(self.times_ms) if self.times_ms else None


def _doubts(results: Found) -> list[str]:
    """Whether the machine did something else; older files do not tell."""
    busy = results["busy_share"]
    return [] if busy.is_missing else doubts([share.measured() for share in busy])


def _cells(results: Found) -> list[_Cell]:
    return [
        _Cell(
            transport=printable(one["transport"].text(), 40),
            tokens=one["kv_tokens"].count(),
            num_bytes=one["bytes"].count(),
            load=one["load"].flag(),
            times_ms=tuple(at.measured() for at in one["samples_ms"]),
            ratio=one["ratio_to_pdctl"].number(),
        )
        for one in results["cells"]
    ]


def handoff_words(results: Found) -> tuple[str, ...]:
    """Our own way at the shortest and the longest, what the others take there, and who is not there."""
    plain = [cell for cell in _cells(results) if not cell.load and cell.times_ms]
    own = sorted((cell for cell in plain if cell.transport == OWN), key=lambda cell: cell.tokens)
    words = []
    if own:
        words.append(
            "pdctl hands over "
            + " and ".join(
                f"{cell.tokens:,} tokens ({_size(cell.num_bytes)}) in {digits(cell.median_ms, 'ms')}"
                for cell in dict.fromkeys((own[0], own[-1]))
            )
            + " (median)."
        )
        others = [cell for cell in plain if cell.tokens == own[-1].tokens and cell.transport != OWN and cell.ratio]
        if others:
            told = ", ".join(f"{cell.transport} {digits(cell.ratio)}x" for cell in others)
            words.append(f"At {own[-1].tokens:,} tokens, times its median: {told}.")
    words += _doubts(results)
    if not plain:
        words.append("Nothing was measured: there is nothing to draw.")
    words += [f"{one['transport'].text()} failed: {one['error'].shown()}" for one in results["failed"]]
    words += [
        f"{one['transport'].text()} is not installed: {one['install'].shown()}" for one in results["not_installed"]
    ]
    return tuple(words)


def handoff_table(results: Found) -> Table:
    """Medians: a row a transport and state of the machine, a column a length."""
    cells = _cells(results)
    lengths = sorted({cell.tokens for cell in cells})
    rows = []
    for load in (False, True):
        for name in dict.fromkeys(cell.transport for cell in cells if cell.load is load):
            found = {cell.tokens: cell.median_ms for cell in cells if (cell.transport, cell.load) == (name, load)}
            rows.append((f"{name}, under load" if load else name, *(digits(found.get(tokens)) for tokens in lengths)))
    return Table(
        title="Median ms by tokens handed over",
        headings=("", *(f"{tokens:,}" for tokens in lengths)),
        rows=tuple(rows),
    )


def handoff_plots(results: Found) -> tuple[Plot, ...]:
    """Time over length, without and beside a load of our own, with the same axes."""
    cells = _cells(results)
    positive = [time for cell in cells for time in cell.times_ms if time > 0]
    if not positive:
        return ()
    y_range = (min(positive) / 1.5, max(positive) * 1.5)
    load_gb = results["load_gb_per_s"].number()
    beside = "" if load_gb is None else f" of {digits(load_gb)} GB/s"
    titles = {False: "Hand-over", True: f"Hand-over beside a memory load{beside}"}
    return tuple(
        Plot(
            title=title,
            x_title="KV handed over, tokens",
            y_title="time, ms",
            traces=_by_transport([cell for cell in cells if cell.load is load]),
            x_log=True,
            y_log=True,
            y_range=y_range,
            x_ticks=tuple(sorted({float(cell.tokens) for cell in cells if cell.tokens > 0})),
            principal=True,
        )
        for load, title in titles.items()
        if any(cell.load is load for cell in cells)
    )


def _by_transport(cells: Sequence[_Cell]) -> tuple[Trace, ...]:
    """A line through the medians, and every round as a dot."""
    traces = []
    for color, name in enumerate(dict.fromkeys(cell.transport for cell in cells)):
        own = sorted(
            (cell for cell in cells if cell.transport == name and cell.tokens > 0), key=lambda cell: cell.tokens
        )
        medians = [(cell, median) for cell in own if (median := cell.median_ms) is not None and median > 0]
        rounds = [(cell, time) for cell in own for time in cell.times_ms if time > 0]
        traces += [
            Trace(
                name=name,
                x=[float(cell.tokens) for cell, _ in rounds],
                y=[time for _, time in rounds],
                color=color,
                faint=True,
            ),
            Trace(
                name=name,
                x=[float(cell.tokens) for cell, _ in medians],
                y=[median for _, median in medians],
                hover=[
                    f"{cell.tokens:,} tokens, {_size(cell.num_bytes)}: "
                    f"{digits(median, 'ms')}, median of {len(cell.times_ms)}"
                    for cell, median in medians
                ],
                draws=Draws.BOTH,
                color=color,
            ),
        ]
    return tuple(trace for trace in traces if trace.x)


def _size(num_bytes: int) -> str:
    return f"{digits(num_bytes / 1e6)} MB" if num_bytes >= 1e5 else f"{digits(num_bytes / 1e3)} kB"


# --- one daemon's work, without a cluster -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Work:
    """A decode step of a batch, or a prefill (batch 0), at one length."""

    batch: int
    length: int
    times_ms: tuple[float, ...]
    tokens_per_s: float | None
    limit: str
    limit_ms: float | None
    share: float | None

    @property
    def median_ms(self) -> float | None:
        return statistics.median(self.times_ms) if self.times_ms else None

    @property
    def name(self) -> str:
        return f"decode, batch {self.batch}" if self.batch else "prefill"


def _work(results: Found) -> list[_Work]:
    found = [(one, one["batch"].count(), one["context"].count()) for one in results["decode"]]
    found += [(one, 0, one["prompt_tokens"].count()) for one in results["prefill"]]
    return [
        _Work(
            batch=batch,
            length=length,
            times_ms=tuple(at.measured() for at in one["samples_ms"]),
            tokens_per_s=one["tokens_per_s"].number(),
            limit=one["limit"].text(),
            limit_ms=one["limit_ms"].number(),
            share=one["share_of_limit"].number(),
        )
        for one, batch, length in sorted(found, key=lambda cell: (cell[1] == 0, *cell[1:]))
    ]


def engine_words(results: Found) -> tuple[str, ...]:
    """How near the machine's limits it comes, what these are, and what was left out."""
    work = _work(results)
    words = []
    for what, chosen in (
        ("A decode step", [one for one in work if one.batch]),
        ("A prefill", [one for one in work if not one.batch]),
    ):
        shares = [one.share for one in chosen if one.share is not None]
        if shares:
            low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
            reach = low if low == high else f"{low} to {high}"
            words.append(f"{what} reaches {reach} of what this machine allows.")
    if not work:
        words.append("Nothing was measured: there is nothing to draw.")
    for name, limits in results["limits"].items():
        words.append(
            f"Limits of {name} (threads: {limits['threads'].shown()}): reading "
            f"{digits(limits['read_gb_per_s'].number(), 'GB/s')}, computing "
            f"{digits(limits['compute_gflop_per_s'].number(), 'GFLOP/s')}."
        )
    words += _doubts(results)
    words += [f"Left out: {one.shown()}" for one in results["skipped"]]
    return tuple(words)


def engine_tables(results: Found) -> tuple[Table, ...]:
    """What each took, and where the time of a step goes."""
    rows = tuple(
        (
            one.name,
            f"{one.length:,}",
            digits(one.median_ms),
            digits(one.tokens_per_s),
            one.limit,
            digits(one.limit_ms),
            "n/a" if one.share is None else f"{one.share:.0%}",
        )
        for one in _work(results)
    )
    headings = ("", "tokens", "p50 ms", "tok/s", "bound by", "limit ms", "share")
    tables = [Table(headings=headings, rows=rows)]
    steps = [*results["profile"]]
    if steps:
        phases = dict.fromkeys(phase for one in steps for phase, _ in one["phases_ms"].items())
        shown = [{phase: time.number() for phase, time in one["phases_ms"].items()} for one in steps]
        tables.append(
            Table(
                title="Where the time of a decode step goes, ms",
                headings=("", *(f"batch {one['batch'].count()}, {one['context'].count():,}" for one in steps)),
                rows=tuple((phase, *(digits(times.get(phase)) for times in shown)) for phase in phases),
            )
        )
    return tuple(tables)


def engine_plots(results: Found) -> tuple[Plot, ...]:
    """Steps over context, prefill over length, and both against the machine's limits."""
    work = [one for one in _work(results) if one.length > 0]
    decode, prefill = [one for one in work if one.batch], [one for one in work if not one.batch]
    step: list[Trace] = []
    rate: list[Trace] = []
    share: list[Trace] = []
    for color, batch in enumerate(dict.fromkeys(one.batch for one in decode)):
        own = [one for one in decode if one.batch == batch]
        step += _over_length(f"batch {batch}", color, own, lambda _, time: time)
        step += _limit(color, own, lambda one: one.limit_ms)
    rate += _over_length("prefill", 0, prefill, lambda one, time: one.length / time * 1e3)
    rate += _limit(0, prefill, lambda one: one.length / one.limit_ms * 1e3 if one.limit_ms else None)
    for color, name in enumerate(dict.fromkeys(one.name for one in work)):
        own = [one for one in work if one.name == name and one.share is not None]
        share.append(
            Trace(
                name=name,
                x=[float(one.length) for one in own],
                y=[100 * (one.share or 0.0) for one in own],
                hover=[f"{one.share:.0%} of the limit of {one.limit} at {one.length:,} tokens" for one in own],
                draws=Draws.BOTH,
                color=color,
            )
        )
    return (
        _plot("Decode step", "context, tokens", "step, ms", step, decode),
        _plot("Prefill", "prompt, tokens", "prefill, tok/s", rate, prefill),
        _plot("Share of the machine's limit", "context or prompt, tokens", "of the limit, %", share, work),
    )


def _over_length(
    name: str, color: int, own: Sequence[_Work], value: Callable[[_Work, float], float]
) -> tuple[Trace, ...]:
    """Every round as a dot, and a line through the medians."""
    rounds = [(float(one.length), value(one, time)) for one in own for time in one.times_ms if time > 0]
    medians = [
        (float(one.length), value(one, time)) for one in own if (time := one.median_ms) is not None and time > 0
    ]
    return tuple(
        Trace(name=name, x=[x for x, _ in found], y=[y for _, y in found], color=color, draws=draws, faint=faint)
        for found, draws, faint in ((rounds, Draws.DOTS, True), (medians, Draws.BOTH, False))
    )


def _limit(color: int, own: Sequence[_Work], value: Callable[[_Work], float | None]) -> tuple[Trace, ...]:
    """What the machine allows, dashed."""
    found = [(float(one.length), limit) for one in own if (limit := value(one)) is not None]
    name = "the machine's limit (of each colour)"
    xs, ys = [x for x, _ in found], [y for _, y in found]
    return (Trace(name=name, x=xs, y=ys, color=color, draws=Draws.LINE, dashed=True),)


def _plot(title: str, x_title: str, y_title: str, traces: Sequence[Trace], work: Sequence[_Work]) -> Plot:
    return Plot(
        title=title,
        x_title=x_title,
        y_title=y_title,
        traces=tuple(trace for trace in traces if trace.x),
        x_log=True,
        x_ticks=tuple(sorted({float(one.length) for one in work})),
        principal=True,
    )

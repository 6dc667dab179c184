"""What a report says and draws, before it is a page or a screen: sections of words, tables and plots.

Plain values: knows neither the documents they come from (report.py) nor how they are shown (page.py, the command).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pdctl.core.bench.figures import digits, percentile


class Draws(Enum):
    """How a series is drawn."""

    DOTS = "markers"
    LINE = "lines"
    BOTH = "lines+markers"


class Symbol(Enum):
    """Of dots; told apart without colours."""

    CIRCLE = "circle"
    CROSS = "x"
    STAR = "star"
    DIAMOND = "diamond"
    TRIANGLE = "triangle-up"


# The colour of what is no series: arrivals, limits.
NEUTRAL = -1


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One series.

    Attributes:
        name: for the legend; traces of one name share an entry.
        hover: a text for each point; empty: its coordinates.
        color: index into a palette, or NEUTRAL.
        low, high: of each point's spread along x; empty: it has none.
        faint: behind the others.
        labelled: the hover texts stand beside the points, too.
        size: of its dots; series that lie on each other have different ones.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | str]
    hover: Sequence[str] = ()
    draws: Draws = Draws.DOTS
    symbol: Symbol = Symbol.CIRCLE
    color: int = 0
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    faint: bool = False
    dashed: bool = False
    labelled: bool = False
    size: int = 9


@dataclass(frozen=True, kw_only=True)
class Line:
    """A straight line across a plot, with words beside it."""

    at: float
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One pair of axes.

    Attributes:
        levels: horizontal lines.
        marks: vertical lines.
        spans: stretches of x, shaded.
        x_range, y_range: None: of the data.
        x_ticks: where values are written; empty: at round ones.
        wide: all of the page's width.
        principal: also on a terminal.
        note: what to know before believing it.
    """

    title: str
    x_title: str
    y_title: str
    traces: tuple[Trace, ...]
    levels: tuple[Line, ...] = ()
    marks: tuple[Line, ...] = ()
    spans: tuple[tuple[float, float], ...] = ()
    x_log: bool = False
    y_log: bool = False
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    x_ticks: tuple[float, ...] = ()
    wide: bool = False
    principal: bool = False
    note: str = ""

    @property
    def categories(self) -> tuple[str, ...]:
        """What y names, where it is no number."""
        return tuple(dict.fromkeys(value for trace in self.traces for value in trace.y if isinstance(value, str)))

    @property
    def has_points(self) -> bool:
        return any(trace.x for trace in self.traces)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of words; the first column names them."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One document, or several that are compared.

    Attributes:
        words: the result, first things first.
        provenance: (what, value) of what the figures depend on.
    """

    title: str
    source: str
    words: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    plots: tuple[Plot, ...] = ()
    provenance: tuple[tuple[str, str], ...] = ()


def distribution(name: str, values: Sequence[float], *, color: int, unit: str, labelled: bool) -> tuple[Trace, ...]:
    """All values, each at its percentile, with p50 and p99 marked.

    Percentiles are interpolated between values (figures.percentile), and so is this line: it goes through its marks.
    """
    if not values:
        return ()
    ordered = sorted(values)
    last = max(len(ordered) - 1, 1)
    marks = [percentile(ordered, percent) for percent in (50, 99)]
    return (
        Trace(
            name=name,
            x=ordered,
            y=[100 * place / last for place in range(len(ordered))],
            draws=Draws.LINE,
            color=color,
        ),
        Trace(
            name=name,
            x=marks,
            y=(50.0, 99.0),
            hover=[f"p{percent} {digits(value, unit)}" for percent, value in zip((50, 99), marks, strict=True)],
            symbol=Symbol.DIAMOND,
            color=color,
            labelled=labelled,
        ),
    )


def spreads_far(values: Sequence[float]) -> bool:
    """Whether only a logarithmic axis shows both ends."""
    return bool(values) and min(values) > 0 and max(values) / min(values) > 50

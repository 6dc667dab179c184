"""Plots of a report on a terminal, made of characters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pdctl.core.bench.plots import NEUTRAL, Draws, Line, Plot, Symbol, Trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

_MOST_COLUMNS = 120
_ROWS = 16
# As plotext and rich call the same ones of a terminal's own sixteen: readable on light and on dark.
_COLORS = (("blue+", "bright_blue"), ("orange", "yellow"), ("green", "green"), ("magenta", "magenta"),
           ("cyan", "cyan"), ("red", "red"))  # fmt: skip
_MARKERS = {Symbol.CROSS: "×", Symbol.STAR: "*", Symbol.DIAMOND: "◆", Symbol.TRIANGLE: "▲"}
# Without colours, series are told apart by these.
_LETTERS = "ox+#%@"


def draw(plot: Plot, columns: int, *, colors: bool = True) -> RenderableType:
    """At most so wide as the terminal: the title, the axes, what is what, the note."""
    from rich.console import Group
    from rich.text import Text

    width = min(columns, _MOST_COLUMNS)
    title = Text(plot.title, style="bold").append(f": {plot.y_title}", style="not bold dim")
    parts = [title, Text.from_ansi(_axes(plot, width, colors=colors)), _legend(plot, colors)]
    if plot.note:
        parts.append(Text(plot.note, style="dim"))
    return Group(*(part for part in parts if part.plain), "")


def _axes(plot: Plot, width: int, *, colors: bool) -> str:
    import plotext

    figure = plotext.figure
    figure.clear.all()
    figure.theme("colorless")
    figure.plot_size(width, _ROWS)
    figure.legend(False)
    for begin, end in plot.spans:
        low, high = _limits(plot, "y")
        shade = plotext.marker("░", plotext.pixel())
        figure.draw(figure.rectangle((begin, end), (low, high), marker=shade))
    for trace in _ordered(plot.traces):
        _add(figure, plot, trace, colors=colors)
    plain = plotext.pixel()
    for line in plot.levels:
        figure.line(_place(line.at, plot.y_log), orientation="horizontal", pixel=plain, style="dotted")
    for line in plot.marks:
        figure.line(_place(line.at, plot.x_log), orientation="vertical", pixel=plain, style="dotted")
    _ruler(figure.ruler("x"), plot.x_log, plot.x_ticks, *_limits(plot, "x"))
    _ruler(figure.ruler("y"), plot.y_log, (), *_limits(plot, "y"))
    figure.label(plot.x_title, axis="x")
    text: str = figure.build().string()
    figure.clear.all()
    return text


def _ordered(traces: Sequence[Trace]) -> list[Trace]:
    """What is faint first: the rest lies on top."""
    return sorted(traces, key=lambda trace: not trace.faint)


def _add(figure: Any, plot: Plot, trace: Trace, *, colors: bool) -> None:
    import plotext

    points = [
        (x, y)
        for x, y in zip(trace.x, trace.y, strict=True)
        if not isinstance(y, str) and (x > 0 or not plot.x_log) and (y > 0 or not plot.y_log)
    ]
    if not points:
        return
    pixel = (
        plotext.pixel(foreground=_COLORS[trace.color % len(_COLORS)][0])
        if colors and trace.color >= 0
        else plotext.pixel()
    )
    xs, ys = [_place(x, plot.x_log) for x, _ in points], [_place(y, plot.y_log) for _, y in points]
    if trace.draws is not Draws.DOTS:
        figure.draw(figure.signal(xs, ys, marker=plotext.marker("braille", pixel)).lines())
    if trace.draws is not Draws.LINE:
        figure.draw(figure.signal(xs, ys, marker=plotext.marker(_marker(trace, colors), pixel)))


def _marker(trace: Trace, colors: bool) -> str:
    if trace.symbol in _MARKERS:
        return _MARKERS[trace.symbol]
    return "•" if colors or trace.color < 0 else _LETTERS[trace.color % len(_LETTERS)]


def _limits(plot: Plot, axis: str) -> tuple[float, float]:
    """Of the data and the lines across; a little more than nothing."""
    given = plot.x_range if axis == "x" else plot.y_range
    if given is not None:
        return given
    is_log = plot.x_log if axis == "x" else plot.y_log
    values = [value for value in _values(plot, axis) if value > 0 or not is_log]
    low, high = min(values, default=1.0 if is_log else 0.0), max(values, default=1.0)
    if is_log:
        return (low, high) if low < high else (low / 2, high * 2)
    low = min(low, 0.0)
    return low, high if high > low else low + 1


def _values(plot: Plot, axis: str) -> Iterator[float]:
    for trace in plot.traces:
        yield from (value for value in (trace.x if axis == "x" else trace.y) if not isinstance(value, str))
    yield from (line.at for line in (plot.marks if axis == "x" else plot.levels))


def _ruler(ruler: Any, is_log: bool, given: Sequence[float], low: float, high: float) -> None:
    ticks = given or (_log_ticks(low, high) if is_log else _ticks(low, high))
    ruler.lim(_place(low, is_log), _place(high, is_log))
    ruler.ticks([_place(tick, is_log) for tick in ticks], [f"{tick:g}" for tick in ticks])


def _place(value: float, is_log: bool) -> float:
    """On an axis that is always linear: plotext's own logarithmic one forgets its limits beside given ticks."""
    return math.log10(value) if is_log else value


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers."""
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten; of short stretches 2 and 5 between them, too."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    every = max(1, len(powers) // 6)
    ticks = [factor * 10.0**power for power in powers if power % every == 0 for factor in factors]
    return [tick for tick in ticks if low <= tick <= high] or [low, high]


def _legend(plot: Plot, colors: bool) -> Any:
    from rich.text import Text

    legend = Text()
    named: set[str] = set()
    for trace in plot.traces:
        if not trace.name or trace.name in named:
            continue
        named.add(trace.name)
        style = _COLORS[trace.color % len(_COLORS)][1] if colors and trace.color != NEUTRAL else ""
        line = "┄" if trace.color == NEUTRAL else "━"
        legend.append(line if trace.draws is Draws.LINE else _marker(trace, colors), style=style)
        legend.append(f" {trace.name}   ")
    for words in (_told(plot.levels, plot.y_title), _told(plot.marks, plot.x_title)):
        legend.append(words)
    legend.rstrip()
    return legend


def _told(lines: Sequence[Line], title: str) -> str:
    return "".join(f"┄ {line.label}   " for line in lines if line.label)

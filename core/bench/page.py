"""Sections as one page of HTML that needs nothing else: no network, no server, no other file.

Every text is foreign: it is escaped as HTML, again as the little markup that plotly reads in labels, and in JSON so
that no text can end the script around it. The page's policy lets nothing run but the two scripts that are named in it
by their hash, and nothing be fetched. Same sections, same bytes. Called by cli/bench_report.py.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Sequence
from typing import Any

from pdctl.core.bench.plots import NEUTRAL, Line, Plot, Section, Table, Trace
from pdctl.core.bench.reading import printable

# Above it, dots are drawn by the graphics card: as elements of the page they would take seconds.
_MOST_ELEMENTS = 5000
_LONGEST_NAME = 60
# Colours are names of the page's own, looked up when it is drawn: light and dark have different ones.
_INK, _GRID, _PAPER, _NEUTRAL_COLOR, _SPAN = "--ink", "--grid", "--paper", "--neutral", "--span"
_PALETTE = tuple(f"--series-{index}" for index in range(7))

# Okabe and Ito's palette, which people of any colour vision tell apart; lighter, where it lies on dark.
_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --paper: #ffffff; --card: #f6f8fa; --grid: #dfe3e8;
  --neutral: #6e7781; --span: #8c959f;
  --series-0: #0072b2; --series-1: #d55e00; --series-2: #009e73; --series-3: #cc79a7; --series-4: #b58900;
  --series-5: #56b4e9; --series-6: #6a3d9a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9da7b3; --paper: #0f1419; --card: #171d24;
  --grid: #2b333d; --neutral: #9aa4af; --span: #8c959f;
  --series-0: #4aa8e0; --series-1: #f28e4b; --series-2: #2fc79b; --series-3: #e39ac5; --series-4: #e6c34a;
  --series-5: #8fd0f5; --series-6: #b79be0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; }
h2 { font-size: 1.25rem; margin: 0; overflow-wrap: anywhere; }
section { margin-top: 2.5rem; padding-top: 1.5rem; border-top: 1px solid var(--grid); }
.source { margin: 0 0 .75rem; color: var(--soft); font-size: .875rem; overflow-wrap: anywhere; }
.words { margin: 0 0 1rem; padding: 0; list-style: none; max-width: 60rem; overflow-wrap: anywhere; }
.words li { margin: .25rem 0; }
.scroll { overflow-x: auto; margin: 0 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .875rem; }
caption { text-align: left; white-space: nowrap; color: var(--soft); padding: .25rem 0; }
th, td { padding: .3rem .75rem; border-bottom: 1px solid var(--grid); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1rem; }
figure { margin: 0; padding: .75rem; background: var(--card); border-radius: 8px; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figcaption { font-weight: 600; font-size: .9375rem; overflow-wrap: anywhere; }
.plot { height: 21rem; }
.note { margin: .25rem 0 0; color: var(--soft); font-size: .8125rem; }
details { margin-top: 1rem; color: var(--soft); font-size: .8125rem; }
summary { cursor: pointer; }
details td { white-space: normal; text-align: left; vertical-align: top; overflow-wrap: anywhere; }
details td:first-child { white-space: nowrap; }
nav ul { margin: 0; padding-left: 1.25rem; }
a { color: var(--series-0); }
@media (max-width: 52rem) { .plots { grid-template-columns: minmax(0, 1fr); } }
"""

_SCRIPT = """
"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const paint = (value, key) => {
    if (Array.isArray(value)) return value.map((one) => paint(one, key));
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, paint(one, name)]));
    }
    if (typeof value === "string" && key.toLowerCase().endsWith("color") && value.startsWith("--")) {
      return getComputedStyle(document.documentElement).getPropertyValue(value).trim();
    }
    return value;
  };
  const draw = () => {
    for (const figure of figures) {
      const place = document.getElementById(figure.id);
      Plotly.react(place, paint(figure.data, ""), paint(figure.layout, ""), {
        responsive: true, displayModeBar: false,
      }).catch((error) => { place.textContent = "This plot could not be drawn: " + error; });
    }
  };
  draw();
  dark.addEventListener("change", draw);
})();
"""


def render(sections: Sequence[Section], title: str) -> str:
    """The page."""
    from plotly.offline import get_plotlyjs  # lazily: it reads five megabytes

    title = printable(title, 200)
    figures: list[dict[str, Any]] = []
    body = "\n".join(_section(section, number, figures) for number, section in enumerate(sections))
    library, script = f"\n{get_plotlyjs()}\n", _SCRIPT
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; "
        # 'unsafe-eval': plotly makes the programs of the graphics card with it; it lets no foreign text run.
        f"script-src {_hash(library)} {_hash(script)} 'unsafe-eval'"
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<link rel="icon" href="data:,">
<style>{_STYLE}</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<p class="source">Point at a plot for values, drag over it to look closer, double-click to see all of it again.</p>
{_contents(sections)}
<noscript><p>A script draws the plots, and this browser runs none. Words and tables are all there.</p></noscript>
<main>
{body}
</main>
<script type="application/json" id="figures">{_json(figures)}</script>
<script>{library}</script>
<script>{script}</script>
</body>
</html>
"""


def _contents(sections: Sequence[Section]) -> str:
    if len(sections) < 2:
        return ""
    entries = "".join(
        f'<li><a href="#section-{number}">{html.escape(section.title)}</a> ({html.escape(section.source)})</li>'
        for number, section in enumerate(sections)
    )
    return f"<nav><ul>{entries}</ul></nav>"


def _section(section: Section, number: int, figures: list[dict[str, Any]]) -> str:
    parts = [f"<h2>{html.escape(section.title)}</h2>", f'<p class="source">{html.escape(section.source)}</p>']
    if section.words:
        parts.append(f'<ul class="words">{"".join(f"<li>{html.escape(words)}</li>" for words in section.words)}</ul>')
    parts += [_table(table) for table in section.tables]
    if section.plots:
        places = []
        for plot in section.plots:
            place = f"plot-{len(figures)}"
            figures.append({"id": place, **figure(plot)})
            places.append(_place(plot, place))
        parts.append(f'<div class="plots">{"".join(places)}</div>')
    if section.provenance:
        rows = "".join(
            f"<tr><td>{html.escape(what)}</td><td>{html.escape(value)}</td></tr>"
            for what, value in section.provenance
        )
        parts.append(f"<details open><summary>Where these figures come from</summary><table>{rows}</table></details>")
    return f'<section id="section-{number}">{"".join(parts)}</section>'


def _table(table: Table) -> str:
    caption = f"<caption>{html.escape(table.title)}</caption>" if table.title else ""
    head = "".join(f'<th scope="col">{html.escape(heading)}</th>' for heading in table.headings)
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    return f'<div class="scroll"><table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _place(plot: Plot, place: str) -> str:
    title, note = html.escape(plot.title), html.escape(plot.note)
    height = f' style="height:{7 + 2 * len(plot.categories)}rem"' if plot.categories else ""
    return (
        f"<figure{' class=wide' if plot.wide else ''}><figcaption>{title}</figcaption>"
        f'<div class="plot" id="{place}"{height} role="img" aria-label="{title}"></div>'
        f"{f'<p class=note>{note}</p>' if note else ''}</figure>"
    )


def figure(plot: Plot) -> dict[str, Any]:
    """As plotly takes it, with names of colours."""
    # The graphics card's dots and the page's do not mix on one pair of axes: all or none.
    heavy = sum(len(trace.x) for trace in plot.traces) > _MOST_ELEMENTS
    shown = _in_legend(plot.traces)
    data = [_trace(trace, heavy=heavy, in_legend=number in shown) for number, trace in enumerate(plot.traces)]
    axis = {"gridcolor": _GRID, "linecolor": _GRID, "zerolinecolor": _GRID, "automargin": True}
    layout = {
        "font": {"color": _INK, "family": "system-ui, sans-serif", "size": 12},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 60, "r": 16, "t": 8, "b": 44},
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": _PAPER, "bordercolor": _GRID, "font": {"color": _INK}, "namelength": -1},
        "showlegend": len(shown) > 1,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"},
        "xaxis": {
            **axis,
            "title": {"text": _label(plot.x_title)},
            **_scale(plot.x_log, plot.x_range),
            **_ticks(plot.x_ticks),
        },
        "yaxis": {**axis, "title": {"text": _label(plot.y_title)}, **_scale(plot.y_log, plot.y_range)},
        "shapes": [
            *(_span(begin, end) for begin, end in plot.spans),
            *(_ruled(x0=mark.at, x1=mark.at, yref="paper", y0=0, y1=1) for mark in plot.marks),
            *(_ruled(y0=level.at, y1=level.at, xref="paper", x0=0, x1=1) for level in plot.levels),
        ],
        "annotations": [
            *(
                _beside(mark, x=_place_on(mark.at, plot.x_log), y=0, yref="paper", xanchor="left", yanchor="bottom")
                for mark in plot.marks
                if mark.label
            ),
            *(
                _beside(
                    level, y=_place_on(level.at, plot.y_log), x=1, xref="paper", xanchor="right", yanchor="bottom"
                )
                for level in plot.levels
                if level.label
            ),
        ],
    }
    return {"data": data, "layout": layout}


def _in_legend(traces: Sequence[Trace]) -> set[int]:
    """Of the traces of each name one, and none that is faint if there is another."""
    names = dict.fromkeys(trace.name for trace in traces if trace.name)
    chosen = [[number for number, trace in enumerate(traces) if trace.name == name] for name in names]
    return {min(numbers, key=lambda number: traces[number].faint) for numbers in chosen}


def _trace(trace: Trace, *, heavy: bool, in_legend: bool) -> dict[str, Any]:
    color = _NEUTRAL_COLOR if trace.color == NEUTRAL else _PALETTE[trace.color % len(_PALETTE)]
    made: dict[str, Any] = {
        "type": "scattergl" if heavy else "scatter",
        "mode": trace.draws.value + "+text" * trace.labelled,
        "name": _label(trace.name),
        "legendgroup": _label(trace.name),
        "showlegend": in_legend,
        "x": list(trace.x),
        "y": [_label(value) if isinstance(value, str) else value for value in trace.y],
        # Of very many dots the dense places shall be seen.
        "opacity": 0.45 if trace.faint or (heavy and len(trace.x) > _MOST_ELEMENTS / 10) else 1.0,
        "marker": {"color": color, "symbol": trace.symbol.value, "size": trace.size},
        "line": {"color": color, "width": 1.5 if trace.faint else 2, "dash": "dot" if trace.dashed else "solid"},
    }
    if trace.hover:
        made |= {"text": [_label(text) for text in trace.hover], "hovertemplate": "%{text}<extra></extra>"}
    else:
        made["hovertemplate"] = "%{x:,.5~r}, %{y:,.5~r}<extra>%{fullData.name}</extra>"
    if trace.labelled:
        made |= {"textposition": ["middle left", "bottom left"], "textfont": {"color": _INK}}
    if trace.high:
        made["error_x"] = {
            "type": "data",
            "symmetric": False,
            "array": [high - at for high, at in zip(trace.high, trace.x, strict=True)],
            "arrayminus": [at - low for low, at in zip(trace.low, trace.x, strict=True)],
            "color": color,
            "thickness": 6,
            "width": 0,
        }
    return made


def _scale(is_log: bool, limits: tuple[float, float] | None) -> dict[str, Any]:
    if is_log:
        scale: dict[str, Any] = {"type": "log", "exponentformat": "none"}
        return scale if limits is None else {**scale, "range": [math.log10(limit) for limit in limits]}
    return {"rangemode": "tozero"} if limits is None else {"range": list(limits)}


def _ticks(ticks: Sequence[float]) -> dict[str, Any]:
    return {"tickvals": list(ticks), "ticktext": [f"{tick:,g}" for tick in ticks]} if ticks else {}


def _place_on(at: float, is_log: bool) -> float:
    """Annotations want the exponent, where shapes want the value."""
    return math.log10(at) if is_log else at


def _span(begin: float, end: float) -> dict[str, Any]:
    """Shaded from bottom to top, below the data."""
    where = {"x0": begin, "x1": end, "yref": "paper", "y0": 0, "y1": 1}
    return {**where, "type": "rect", "layer": "below", "fillcolor": _SPAN, "opacity": 0.15, "line": {"width": 0}}


def _ruled(**where: Any) -> dict[str, Any]:
    """A line all the way across, below the data."""
    line = {"color": _NEUTRAL_COLOR, "width": 1, "dash": "dash"}
    return {**where, "type": "line", "layer": "below", "line": line}


def _beside(line: Line, **where: Any) -> dict[str, Any]:
    return {"text": _label(line.label), "showarrow": False, "font": {"color": _INK, "size": 11}, **where}


def _label(text: str) -> str:
    """For plotly, which reads tags and entities in every text that it shows."""
    short = text if len(text) <= _LONGEST_NAME * 2 else text[: _LONGEST_NAME * 2 - 1] + "…"
    return html.escape(short, quote=False)


def _json(value: Any) -> str:
    """To stand in a script: no text in it can end that, or begin a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"

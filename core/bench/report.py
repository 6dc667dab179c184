"""From documents of results to the sections of a report: what each kind of benchmark says and draws.

Several documents of one kind that can be laid over each other get a section more. Pure; page.py makes a page of the
sections, the command shows them on a terminal. Called by cli/bench_report.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pdctl.core.bench import report_compare, report_micro, report_serve
from pdctl.core.bench.figures import digits
from pdctl.core.bench.plots import Plot, Section, Table, Trace
from pdctl.core.bench.reading import Found, printable


@dataclass(frozen=True, kw_only=True)
class Document:
    """Results as results.load returns them.

    Attributes:
        label: what its series are called beside those of others.
        path: of its file, for errors.
    """

    label: str
    path: str
    content: dict[str, Any]

    @property
    def found(self) -> Found:
        return Found(self.content, f"{printable(self.path)}:")

    @property
    def kind(self) -> str:
        return str(self.content["kind"])


def sections(documents: Sequence[Document]) -> tuple[Section, ...]:
    """One of each document, in their order; before them, what can be laid over each other.

    Raises:
        IncompatibleError: a document does not hold what its kind should; the place is named.
    """
    own = [_SECTIONS[document.kind](document) for document in documents]
    return (*_together(documents), *own)


def _serve(document: Document) -> Section:
    found = document.found
    results, configuration = found["results"], found["configuration"]
    load = report_serve.Load.of(results)
    return Section(
        title=report_serve.title_of(configuration, results),
        source=printable(document.label),
        words=report_serve.serve_words(results, configuration["goodput_ms"]),
        tables=(report_serve.summary_table(results),),
        plots=_drawn(report_serve.serve_plots(load)),
        provenance=_provenance(found),
    )


def _sweep(document: Document) -> Section:
    found = document.found
    results = found["results"]
    return Section(
        title=report_serve.title_of(found["configuration"], results, "highest rate: "),
        source=printable(document.label),
        words=report_serve.sweep_words(results),
        tables=(report_serve.sweep_table(results),),
        plots=_drawn(report_serve.sweep_plots(results)),
        provenance=_provenance(found),
    )


def _compare(document: Document) -> Section:
    found = document.found
    results = found["results"]
    names = [printable(system["name"].text(), 40) for system in results["systems"]]
    return Section(
        title=f"comparison: {', '.join(names)}",
        source=printable(document.label),
        words=report_compare.compare_words(results),
        tables=report_compare.compare_tables(results),
        plots=_drawn(report_compare.compare_plots(results)),
        provenance=(
            *_provenance(found),
            *(
                (f"system: {name}", system["configuration"].shown())
                for name, system in zip(names, results["systems"], strict=True)
            ),
        ),
    )


def _handoff(document: Document) -> Section:
    found = document.found
    results = found["results"]
    return Section(
        title="hand-over of a prompt's KV between two processes",
        source=printable(document.label),
        words=report_micro.handoff_words(results),
        tables=(report_micro.handoff_table(results),),
        plots=_drawn(report_micro.handoff_plots(results)),
        provenance=(*_provenance(found), ("geometry", results["geometry"].shown())),
    )


def _engine(document: Document) -> Section:
    found = document.found
    results = found["results"]
    return Section(
        title=f"engine: {printable(results['model'].shown(), 80)}, {results['dtype'].shown()}",
        source=printable(document.label),
        words=report_micro.engine_words(results),
        tables=report_micro.engine_tables(results),
        plots=_drawn(report_micro.engine_plots(results)),
        provenance=(*_provenance(found), ("numerics", results["numerics"].shown())),
    )


_SECTIONS: dict[str, Callable[[Document], Section]] = {
    "serve": _serve,
    "sweep": _sweep,
    "compare": _compare,
    "handoff": _handoff,
    "engine": _engine,
}


def _drawn(plots: Sequence[Plot]) -> tuple[Plot, ...]:
    """Without those that have nothing to show."""
    return tuple(plot for plot in plots if plot.has_points or plot.levels)


def _provenance(found: Found) -> tuple[tuple[str, str], ...]:
    """When, how, where and with what it was measured."""
    return (
        ("measured", found["date_utc"].shown()),
        ("command", found["command"].shown()),
        ("machine", found["machine"].shown()),
        ("configuration", found["configuration"].shown()),
    )


def _together(documents: Sequence[Document]) -> list[Section]:
    loads = [document for document in documents if document.kind == "serve"]
    sweeps = [document for document in documents if document.kind == "sweep"]
    laid = [_loads_together(loads)] if len(loads) > 1 else []
    return [*laid, _sweeps_together(sweeps)] if len(sweeps) > 1 else laid


def _loads_together(documents: Sequence[Document]) -> Section:
    """The distributions of several loads over each other."""
    loads = {document.label: report_serve.Load.of(document.found["results"]) for document in documents}
    groups = {
        f"{printable(label, 40)}{f': {group}' if group else ''}": samples
        for label, load in loads.items()
        for group, samples in load.groups.items()
    }
    keys = ("p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p50_itl_ms", "p99_itl_ms", "output_throughput")
    headings = ("", "TTFT p50 ms", "p99", "TPOT p50 ms", "ITL p50 ms", "p99", "out tok/s")
    rows = tuple(
        (printable(label, 40), *(digits(load.results["summary"][key].number()) for key in keys))
        for label, load in loads.items()
    )
    return Section(
        title="loads, side by side",
        source=f"{len(documents)} files",
        tables=(Table(headings=headings, rows=rows),),
        plots=_drawn(report_serve.distributions(groups)),
    )


def _sweeps_together(documents: Sequence[Document]) -> Section:
    """The same figure of several searches in one plot."""
    laid: dict[str, Plot] = {}
    rows = []
    for color, document in enumerate(documents):
        results = document.found["results"]
        label = printable(document.label, 40)
        best = results["best_rate_per_s"].number()
        limits = results["objectives"].shown()
        rows.append((label, limits, "none that was tried" if best is None else digits(best)))
        for plot in _drawn(report_serve.sweep_plots(results)):
            traces = tuple(_labelled(trace, label, color) for trace in plot.traces if not trace.dashed)
            before = laid.get(plot.title)
            # Lines across belong to one file each: they stay in its own section.
            laid[plot.title] = dataclasses.replace(
                plot, traces=(*(before.traces if before else ()), *traces), levels=(), marks=()
            )
    return Section(
        title="rates, side by side",
        source=f"{len(documents)} files",
        tables=(Table(headings=("", "objectives ms", "best requests/s"), rows=tuple(rows)),),
        plots=_drawn([*laid.values()]),
    )


def _labelled(trace: Trace, label: str, color: int) -> Trace:
    return dataclasses.replace(trace, name=f"{label}: {trace.name}" if trace.name else "", color=color)

"""The section of `bench compare`: systems side by side on the same axes. Called by report.py."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pdctl.core.bench.figures import digits
from pdctl.core.bench.plots import NEUTRAL, Draws, Line, Plot, Symbol, Table, Trace
from pdctl.core.bench.reading import Found, printable
from pdctl.core.bench.report_serve import Load, distributions, gaps, itl_over_time, sentence
from pdctl.core.bench.samples import Sample
from pdctl.core.bench.workloads import PROMPT, STREAM

# Of a figure's key, what is no plain word.
_SHORT = {"itl": "ITL", "ttft": "TTFT", "tpot": "TPOT", "e2el": "E2EL"}
_FIGURES = ("p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p50_itl_ms", "p99_itl_ms", "output_throughput")
_HEADINGS = ("TTFT p50 ms", "p99", "TPOT p50 ms", "ITL p50 ms", "p99", "out tok/s", "failed")


@dataclass(frozen=True, kw_only=True)
class _System:
    """One system's rounds of one workload."""

    name: str
    rounds: tuple[Load, ...]

    @property
    def samples(self) -> list[Sample]:
        return [sample for load in self.rounds for sample in load.good]


def compare_words(results: Found) -> tuple[str, ...]:
    """The verdict, as it was found when it was measured."""
    words = [one.text() for one in results["verdict"]]
    equality = results["token_equality"]
    if not equality.is_missing and not equality["first_difference"].is_missing:
        words.append(f"The first answer that differs: {equality['first_difference'].shown()}.")
    return tuple(words)


def compare_tables(results: Found) -> tuple[Table, ...]:
    """Of each workload the systems' figures, then all ratios."""
    tables = []
    for kind, systems in _workloads(results):
        rows = []
        for system in systems:
            summaries = [load.results["summary"] for load in system.rounds]
            cells = [_median([summary[key].number() for summary in summaries]) for key in _FIGURES]
            failed = sum(summary["failed"].count() for summary in summaries)
            rows.append((system.name, *cells, str(failed)))
        title = f"{kind}: medians over the rounds"
        tables.append(Table(title=title, headings=("", *_HEADINGS), rows=tuple(rows)))
    ratios = [
        (f"{kind}: {figure}", other, *(digits(ratio[key].number()) for key in ("median", "lowest", "highest")))
        for kind, other, figure, ratio in _ratios(results)
        if not ratio.is_missing
    ]
    if ratios:
        headings = ("figure", "against", "median", "lowest", "highest")
        title = f"Ratios: {_first(results)}'s figure over the other's, within a round"
        tables.append(Table(title=title, headings=headings, rows=tuple(ratios)))
    return tuple(tables)


def compare_plots(results: Found) -> tuple[Plot, ...]:
    """Ratios, then each workload's gaps and distributions, then the sweep that chose the chunk."""
    plots = [*_ratio_plots(results)]
    for number, (kind, systems) in enumerate(_workloads(results)):
        drawn = [*_over_time(kind, systems), *_side_by_side(kind, systems)]
        # A terminal shows the workload that was asked for first.
        plots += drawn if number == 0 else [replace(plot, principal=False) for plot in drawn]
    return (*plots, *_chunk_plots(results))


def _workloads(results: Found) -> Iterator[tuple[str, list[_System]]]:
    """Of each workload, the systems that it was measured on."""
    found: dict[str, list[_System]] = {}
    for system in results["systems"]:
        name = printable(system["name"].text(), 40)
        for kind, workload in system["workloads"].items():
            rounds = tuple(Load.of(one) for one in workload["rounds"])
            found.setdefault(printable(kind, 40), []).append(_System(name=name, rounds=rounds))
    yield from found.items()


def _over_time(kind: str, systems: Sequence[_System]) -> list[Plot]:
    """A plot a system, all with the same axes: the first round, and the others behind it."""
    drawn = [(system, _gap_traces(system.rounds)) for system in systems]
    points = [(x, y) for _, traces in drawn for trace in traces for x, y in zip(trace.x, trace.y, strict=True)]
    if not points:
        return []
    x_range = (0.0, 1.02 * max(x for x, _ in points))
    y_range = (0.0, 1.05 * max(float(y) for _, y in points))
    return [
        itl_over_time(
            f"{sentence(kind)}: inter-token latency of {system.name}",
            traces,
            system.rounds[0],
            x_range=x_range,
            y_range=y_range,
        )
        for system, traces in drawn
        if system.rounds
    ]


def _gap_traces(rounds: Sequence[Load]) -> list[Trace]:
    traces = []
    for number, load in enumerate(rounds):
        name = "first round" if number == 0 else "the other rounds"
        traces.append(gaps(name, _streams(load.good), color=0 if number == 0 else NEUTRAL, faint=number > 0))
    # What comes last lies on top.
    return [trace for trace in reversed(traces) if trace.x]


def _streams(samples: Sequence[Sample]) -> list[Sample]:
    """Of the mixed workload its streams, else all."""
    return [sample for sample in samples if sample.group in (STREAM, "")]


def _side_by_side(kind: str, systems: Sequence[_System]) -> list[Plot]:
    streams = {system.name: _streams(system.samples) for system in systems}
    prompts = {system.name: [one for one in system.samples if one.group in (PROMPT, "")] for system in systems}
    of = ("the streams' ", "the prompts' ") if kind == "mixed" else ("", "")
    return [
        *distributions(streams, ("itl",), title=f"{kind}, all rounds: {of[0]}"),
        *distributions(prompts, ("ttft",), title=f"{kind}, all rounds: {of[1]}", principal=("ttft",)),
    ]


def _first(results: Found) -> str:
    names = [system["name"].text() for system in results["systems"]]
    return names[0] if names else "the first system"


def _ratios(results: Found) -> Iterator[tuple[str, str, str, Found]]:
    """(workload, other system, figure, ratio)."""
    for kind, others in results["ratios"].items():
        for other, figures in others.items():
            for key, ratio in figures.items():
                yield kind, other, _spoken(key), ratio


def _ratio_plots(results: Found) -> Iterator[Plot]:
    kinds: dict[str, dict[str, list[tuple[str, float, float, float]]]] = {}
    for kind, other, figure, ratio in _ratios(results):
        if ratio.is_missing:
            continue
        median, low, high = (ratio[key].number() for key in ("median", "lowest", "highest"))
        # On a logarithmic axis there is no place for zero.
        if median is not None and low is not None and high is not None and 0 < low <= median <= high:
            kinds.setdefault(kind, {}).setdefault(other, []).append((figure, median, low, high))
    for kind, others in kinds.items():
        first = _first(results)
        yield Plot(
            title=f"{sentence(kind)}: {first} over the others",
            x_title="ratio",
            y_title="",
            traces=tuple(
                Trace(
                    name=f"against {other}",
                    x=[median for _, median, _, _ in found],
                    y=[figure for figure, _, _, _ in found],
                    low=[low for _, _, low, _ in found],
                    high=[high for _, _, _, high in found],
                    hover=[
                        f"{figure}: {digits(median)} ({digits(low)} to {digits(high)})"
                        for figure, median, low, high in found
                    ],
                    color=color,
                )
                for color, (other, found) in enumerate(others.items())
            ),
            marks=(Line(at=1.0),),
            x_log=True,
            x_ticks=_round_ratios(
                [edge for found in others.values() for _, _, low, high in found for edge in (low, high)]
            ),
            wide=True,
            note=f"{first}'s figure divided by the other's: at 1 they are equal. "
            "Dots: medians; bars: lowest to highest round.",
        )


def _round_ratios(edges: Sequence[float]) -> tuple[float, ...]:
    """Ratios to be written on the axis: few, and 1 among them."""
    low, high = min(*edges, 1.0), max(*edges, 1.0)
    if high / low < 2:
        return ()
    factors = (1, 2, 5) if high / low < 1e3 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    return tuple(tick for tick in ticks if low / 1.5 <= tick <= high * 1.5)


def _chunk_plots(results: Found) -> list[Plot]:
    found = results["chunk_sweep"]
    points = [] if found.is_missing else [*found]
    plots = []
    for key, title, y_title, unit in (
        ("p99_itl_under_prompts_ms", "Chunk of the colocated server: the streams' tail", "ITL p99, ms", "ms"),
        ("median_prompt_ttft_ms", "Chunk of the colocated server: the prompts", "TTFT p50, ms", "ms"),
    ):
        drawn = [
            (point["chunk_tokens"].measured(), value, point["chosen"].flag())
            for point in points
            if (value := point[key].number()) is not None
        ]
        drawn.sort()
        chosen = [(tokens, value) for tokens, value, is_chosen in drawn if is_chosen]
        if drawn:
            plots.append(
                Plot(
                    title=title,
                    x_title="chunk, tokens",
                    y_title=y_title,
                    traces=(
                        Trace(
                            name="tried",
                            x=[tokens for tokens, _, _ in drawn],
                            y=[value for _, value, _ in drawn],
                            draws=Draws.BOTH,
                        ),
                        *[
                            Trace(
                                name="chosen",
                                x=[tokens for tokens, _ in chosen],
                                y=[value for _, value in chosen],
                                hover=[f"{tokens:g} tokens: {digits(value, unit)}" for tokens, value in chosen],
                                symbol=Symbol.STAR,
                                color=1,
                            )
                        ]
                        * bool(chosen),
                    ),
                    x_log=all(tokens > 0 for tokens, _, _ in drawn),
                    x_ticks=tuple(tokens for tokens, _, _ in drawn),
                )
            )
    return plots


def _median(values: Sequence[float | None]) -> str:
    measured = [value for value in values if value is not None]
    return digits(statistics.median(measured) if measured else None)


def _spoken(key: str) -> str:
    """p99_itl_under_prompts_ms: p99 ITL under prompts."""
    words = key.removesuffix("_ms").split("_")
    return printable(" ".join(_SHORT.get(word, word) for word in words), 60)

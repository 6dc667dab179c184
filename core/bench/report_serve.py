"""Sections of `bench serve` and `bench serve --find-rate`. Called by report.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdctl.core.bench.figures import METRICS, OBJECTIVES, by_group, digits, latencies_ms, own_duration_s, summarize
from pdctl.core.bench.plots import (
    NEUTRAL,
    Draws,
    Line,
    Plot,
    Symbol,
    Table,
    Trace,
    distribution,
    spreads_far,
)
from pdctl.core.bench.reading import Found, printable
from pdctl.core.bench.samples import Sample
from pdctl.core.bench.workloads import PROMPT, STREAM

LABELS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}
LONG_LABELS = {
    "ttft": "time to first token (TTFT)",
    "tpot": "time per output token (TPOT)",
    "itl": "inter-token latency (ITL)",
    "e2el": "whole request (E2EL)",
}
# More colours than these are none to tell apart.
_MOST_STREAMS = 6


@dataclass(frozen=True, kw_only=True)
class Load:
    """One load as results.py lists it for "serve"."""

    results: Found
    samples: tuple[Sample, ...]

    @classmethod
    def of(cls, results: Found) -> Load:
        return cls(results=results, samples=tuple(_sample(one) for one in results["samples"]))

    @property
    def good(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.ok and sample.chunks_ms]

    def group(self, name: str) -> list[Sample]:
        return [sample for sample in self.good if sample.group == name]

    @property
    def groups(self) -> dict[str, list[Sample]]:
        """Samples that succeeded, by group; of a workload without groups, all under ""."""
        return {name: self.group(name) for name in dict.fromkeys(sample.group for sample in self.good)}


def _sample(found: Found) -> Sample:
    kind = found["error_kind"]
    output = found["output_tokens"]
    prompt = found["prompt_tokens"]
    return Sample(
        index=found["index"].count(),
        group=found["group"].text(),
        due_ms=found["due_ms"].measured(),
        sent_ms=found["sent_ms"].measured(),
        chunks_ms=tuple(at.measured() for at in found["chunks_ms"]),
        prompt_tokens=None if prompt.is_missing else prompt.count(),
        output_tokens=None if output.is_missing else output.count(),
        error_kind=None if kind.is_missing else kind.text(),
    )


def serve_words(results: Found, objectives: Found) -> tuple[str, ...]:
    """The result of one load in a few lines."""
    summary = results["summary"]
    completed, failed = summary["completed"].count(), summary["failed"].count()
    errors = [
        f"{one['count'].count()} x {one['kind'].text()}: {one['first'].shown()}" for one in summary["errors_by_kind"]
    ]
    words = [
        f"{completed:,} of {completed + failed:,} requests succeeded in {digits(summary['duration'].number(), 's')}."
    ]
    if not completed:
        words.append("No request succeeded: there is nothing to draw.")
    words += [f"Failed: {text}" for text in errors]
    if completed:
        words.append(
            f"Output {digits(summary['output_throughput'].number(), 'tok/s')}, "
            f"{digits(summary['request_throughput'].number(), 'requests/s')}; "
            f"{summary['total_cached_tokens'].count():,} of {summary['total_input_tokens'].count():,} "
            "prompt tokens were cached."
        )
        words += _own_rates(Load.of(results))
    untold = summary["untold_output_tokens"].number()
    if untold:
        words.append(f"{untold:,.0f} answers of unknown length: they count in no throughput of tokens, in no TPOT.")
    attained = summary["slo_attainment"].number()
    if attained is not None:
        limits = ", ".join(f"{LABELS.get(key, key)} {digits(one.number(), 'ms')}" for key, one in objectives.items())
        words.append(
            f"Goodput {digits(summary['request_goodput'].number(), 'requests/s')}: "
            f"{attained:.1%} of all requests within {limits}."
        )
    if not results["under_prompts"].is_missing:
        under = results["under_prompts"]
        p50, p99, worst = (digits(under[f"{key}_itl_ms"].number(), "ms") for key in ("p50", "p99", "max"))
        words.append(f"While long prompts are computed, the streams' ITL is {p50} (p50), {p99} (p99), {worst} (max).")
    share = results["client_cpu_share"].number()
    if share is not None and share > 0.5:
        words.append(f"The client used {share:.0%} of a core: it may have measured itself.")
    return tuple(words)


def _own_rates(load: Load) -> list[str]:
    """What each group gave over its own time; from the samples: older files have it over the time of all."""
    words = []
    for group, samples in by_group(load.samples).items():
        duration_s = own_duration_s(samples)
        if duration_s > 0 and (good := load.group(group)):
            rate = summarize(good, duration_s, {})["output_throughput"]
            words.append(f"{sentence(group)}s alone: output {digits(rate, 'tok/s')} in {digits(duration_s, 's')}.")
    return words


def summary_table(results: Found) -> Table:
    """Latencies by group; what was not measured is n/a."""
    summary = results["summary"]
    keys = ("mean", "p50", "p90", "p99")
    rows = []
    for group, figures in [*results["groups"].items()] or [("", summary)]:
        for metric in METRICS:
            values = [figures[f"{key}_{metric}_ms"].number() for key in keys]
            if values[1] is None and group:
                continue
            worst = figures["max_itl_ms"].number() if metric == "itl" else None
            name = f"{group}: {LABELS[metric]}" if group else LABELS[metric]
            rows.append((name, *map(digits, values), digits(worst) if metric == "itl" else ""))
    if not results["under_prompts"].is_missing:
        under = results["under_prompts"]
        values = [under[f"p{percent}_itl_ms"].number() for percent in (50, 90, 99)]
        worst = under["max_itl_ms"].number()
        rows.append((f"{STREAM}: ITL under prompts", "", *map(digits, values), digits(worst)))
    return Table(headings=("ms", *keys, "max"), rows=tuple(rows))


def serve_plots(load: Load) -> tuple[Plot, ...]:
    """Gaps over the run, and how each latency is distributed."""
    return (
        itl_over_time("Inter-token latency over the run", _stream_traces(load), load),
        *distributions({group or "all requests": samples for group, samples in load.groups.items()}),
    )


def itl_over_time(
    title: str,
    traces: Sequence[Trace],
    prompts_of: Load,
    *,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
) -> Plot:
    """One dot a gap; prompts of the mixed workload as lines where they arrive, shaded until their first token."""
    prompts = prompts_of.group(PROMPT)
    arrivals = [sample.sent_ms / 1e3 for sample in prompts]
    told = [
        f"prompt {sample.index}{_tokens(sample)}: first token after {digits(sample.ttft_ms, 'ms')}"
        for sample in prompts
    ]
    arriving = Trace(
        name="a long prompt arrives",
        x=arrivals,
        y=[0.0] * len(arrivals),
        hover=told,
        symbol=Symbol.TRIANGLE,
        color=NEUTRAL,
    )
    failed = sum(not sample.ok for sample in prompts_of.samples)
    notes = ["Shaded: from the arrival of a long prompt to its first token."] * bool(prompts)
    notes += [f"{failed} failed requests are not drawn."] * bool(failed)
    return Plot(
        title=title,
        x_title="time, s",
        y_title="gap between two tokens, ms",
        traces=(*traces, *[arriving] * bool(prompts)),
        marks=tuple(Line(at=at) for at in arrivals),
        spans=tuple((sample.sent_ms / 1e3, sample.chunks_ms[0] / 1e3) for sample in prompts),
        x_range=x_range,
        y_range=y_range,
        wide=True,
        principal=True,
        note=" ".join(notes),
    )


def gaps(name: str, samples: Sequence[Sample], *, color: int, faint: bool = False, size: int = 5) -> Trace:
    """A dot where a token arrived, as high as it was awaited."""
    return Trace(
        name=name,
        x=[at / 1e3 for sample in samples for at in sample.chunks_ms[1:]],
        y=[gap for sample in samples for gap in sample.itls_ms],
        color=color,
        faint=faint,
        size=size,
    )


def _stream_traces(load: Load) -> list[Trace]:
    """One a stream of the mixed workload, as long as they can be told apart; else one a group.

    Streams of one batch get their tokens in the same moments: what lies on top is smaller.
    """
    traces: list[Trace] = []
    for group, samples in load.groups.items():
        if group == STREAM and len(samples) <= _MOST_STREAMS:
            largest = 3 + 2 * len(samples)
            traces += [
                gaps(f"stream {sample.index}", [sample], color=number, size=largest - 2 * number)
                for number, sample in enumerate(samples)
            ]
        elif any(sample.itls_ms for sample in samples):
            traces.append(gaps(group or "all requests", samples, color=len(traces)))
    return traces


def distributions(
    groups: dict[str, list[Sample]],
    metrics: Sequence[str] = METRICS,
    *,
    title: str = "",
    principal: Sequence[str] = ("itl",),
) -> list[Plot]:
    """Of each latency, a line a group; `title`: what its title begins with."""
    values = {name: latencies_ms(samples) for name, samples in groups.items()}
    plots = []
    for metric in metrics:
        # A group keeps its colour where another one has nothing to show.
        drawn = {name: (color, found[metric]) for color, (name, found) in enumerate(values.items()) if found[metric]}
        if drawn:
            plots.append(
                Plot(
                    title=sentence(title + LONG_LABELS[metric]),
                    x_title=f"{LABELS[metric]}, ms",
                    y_title="gaps, %" if metric == "itl" else "requests, %",
                    traces=tuple(
                        trace
                        for name, (color, found) in drawn.items()
                        for trace in distribution(name, found, color=color, unit="ms", labelled=len(drawn) == 1)
                    ),
                    x_log=spreads_far([value for _, found in drawn.values() for value in found]),
                    principal=metric in principal,
                    note="Diamonds: p50 and p99." if len(drawn) > 1 else "",
                )
            )
    return plots


def sentence(text: str) -> str:
    """With a capital at its beginning."""
    return text[:1].upper() + text[1:]


def _tokens(sample: Sample) -> str:
    return "" if sample.prompt_tokens is None else f" of {sample.prompt_tokens:,} tokens"


# --- the search for a rate --------------------------------------------------------------------------------------


def sweep_words(results: Found) -> tuple[str, ...]:
    """What was found."""
    limits = ", ".join(
        f"{LABELS.get(key, key)} {digits(one.number(), 'ms')}" for key, one in results["objectives"].items()
    )
    share = results["target_attainment"].measured()
    best = results["best_rate_per_s"].number()
    found = f"up to {digits(best)} requests/s." if best is not None else "at none of the rates that were tried."
    failed = sum(point["summary"]["failed"].count() for point in results["points"])
    return (f"{share:.0%} of requests within {limits}: {found}", *[f"{failed} requests failed."] * bool(failed))


@dataclass(frozen=True, kw_only=True)
class _Point:
    """One rate; infinite: all at once."""

    rate: float
    meets: bool
    summary: Found

    def figure(self, key: str) -> float | None:
        return self.summary[key].number()


def _points(results: Found) -> list[_Point]:
    points = []
    for one in results["points"]:
        rate = one["rate_per_s"].number()
        points.append(
            _Point(rate=math.inf if rate is None else rate, meets=one["meets"].flag(), summary=one["summary"])
        )
    return sorted(points, key=lambda point: point.rate)


def sweep_table(results: Found) -> Table:
    """A row a rate, ascending."""
    rows = []
    for point in _points(results):
        share = point.figure("slo_attainment")
        rows.append(
            (
                "all at once" if math.isinf(point.rate) else digits(point.rate),
                *(
                    digits(point.figure(key))
                    for key in ("request_throughput", "output_throughput", "p99_ttft_ms", "p99_tpot_ms")
                ),
                "n/a" if share is None else f"{share:.1%}",
                "yes" if point.meets else "no",
            )
        )
    headings = ("rate req/s", "answered req/s", "output tok/s", "TTFT p99 ms", "TPOT p99 ms", "good", "meets")
    return Table(headings=headings, rows=tuple(rows))


def sweep_plots(results: Found, label: str = "", color: int = 0) -> tuple[Plot, ...]:
    """Throughput and tails over the offered rate; what came of all at once as a level."""
    points = _points(results)
    best = results["best_rate_per_s"].number()
    marks = () if best is None else (Line(at=best, label=f"best {digits(best)}/s"),)
    offered = [point.rate for point in points if not math.isinf(point.rate)]
    diagonal = Trace(
        name="answered as offered", x=offered, y=offered, draws=Draws.LINE, color=NEUTRAL, dashed=True, faint=True
    )
    plots = [
        _frontier(
            "Requests answered",
            "answered, requests/s",
            points,
            "request_throughput",
            "/s",
            marks,
            [diagonal] * bool(offered),
        ),
        _frontier("Output", "output, tok/s", points, "output_throughput", "tok/s", marks),
    ]
    objectives = {key: limit.number() for key, limit in results["objectives"].items()}
    for metric in OBJECTIVES:
        limit = objectives.get(metric)
        if limit is None and metric == "e2el":
            continue
        level = () if limit is None else (Line(at=limit, label=f"objective {digits(limit, 'ms')}"),)
        title = f"{LABELS[metric]}, 99th percentile"
        plots.append(
            _frontier(title, f"{LABELS[metric]} p99, ms", points, f"p99_{metric}_ms", "ms", marks, levels=level)
        )
    return tuple(plots)


def _frontier(
    title: str,
    y_title: str,
    points: Sequence[_Point],
    key: str,
    unit: str,
    marks: tuple[Line, ...],
    more: Sequence[Trace] = (),
    levels: tuple[Line, ...] = (),
) -> Plot:
    """A figure of all rates: a line through them, dots by whether they meet."""
    drawn = [(point, value) for point in points if (value := point.figure(key)) is not None]
    rates = [(point, value) for point, value in drawn if not math.isinf(point.rate)]
    traces = [
        Trace(name="", x=[point.rate for point, _ in rates], y=[value for _, value in rates], draws=Draws.LINE,
              color=NEUTRAL, faint=True)
    ]  # fmt: skip
    for meets, name, symbol in ((True, "meets the objectives", Symbol.CIRCLE), (False, "does not", Symbol.CROSS)):
        chosen = [(point, value) for point, value in rates if point.meets is meets]
        traces.append(
            Trace(
                name=name,
                x=[point.rate for point, _ in chosen],
                y=[value for _, value in chosen],
                hover=[_told(point, value, unit) for point, value in chosen],
                symbol=symbol,
                color=0 if meets else 1,
            )
        )
    at_once = [
        Line(at=value, label=f"all at once {digits(value, unit)}{'' if point.meets else ', does not meet'}")
        for point, value in drawn
        if math.isinf(point.rate)
    ]
    return Plot(
        title=title,
        x_title="offered, requests/s",
        y_title=y_title,
        traces=(*more, *(trace for trace in traces if trace.x)),
        levels=(*levels, *at_once),
        marks=marks,
        principal=key in ("request_throughput", "p99_ttft_ms"),
    )


def _told(point: _Point, value: float, unit: str) -> str:
    share = point.figure("slo_attainment")
    good = "" if share is None else f"; {share:.1%} within the objectives"
    return f"{digits(value, unit)} at {digits(point.rate)} requests/s{good}"


def title_of(configuration: Found, results: Found, what: str = "") -> str:
    """Workload and model."""
    workload = printable(configuration["workload"].shown(), 40)
    return f"{what}{workload} workload on {printable(results['server']['model_id'].shown(), 80)}"

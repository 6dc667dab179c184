"""The table of `pdctl bench serve`, from its results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdctl.core.bench.figures import digits

if TYPE_CHECKING:
    from rich.console import RenderableType

_METRICS = (
    ("ttft", "TTFT ms"),
    ("tpot", "TPOT ms"),
    ("itl", "ITL ms"),
    ("e2el", "E2EL ms"),
)


def render(document: dict[str, Any]) -> RenderableType:
    """At most 80 columns; what was not measured is n/a, never 0."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    results, configuration = document["results"], document["configuration"]
    summary = results["summary"]
    title = f"{configuration['workload']} on {results['server']['url']} ({results['server']['model_id']})"
    table = Table(title=Text(title), title_justify="left")
    table.add_column("")
    for heading in ("mean", "p50", "p90", "p99"):
        table.add_column(heading, justify="right")
    groups = results["groups"] or {"": summary}
    for group, figures in groups.items():
        for metric, label in _METRICS:
            if figures[f"p50_{metric}_ms"] is None and group:
                continue
            cells = [digits(figures[f"{key}_{metric}_ms"]) for key in ("mean", "p50", "p90", "p99")]
            table.add_row(f"{group}: {label}" if group else label, *cells)
    if (under := results["under_prompts"]) is not None:
        cells = [digits(under[f"p{percent}_itl_ms"]) for percent in (50, 90, 99)]
        table.add_row("stream: ITL ms while prompts are computed", "", *cells)
    lines = [_counts(summary), _throughput(summary), *(_own_rate(*one) for one in results["groups"].items())]
    if summary["slo_attainment"] is not None:
        objectives = ", ".join(f"{key} {limit:g} ms" for key, limit in configuration["goodput_ms"].items())
        lines.append(
            f"goodput {digits(summary['request_goodput'])} req/s: {summary['slo_attainment']:.1%} within {objectives}"
        )
    if results["client_cpu_share"] > 0.5:
        lines.append(f"the client used {results['client_cpu_share']:.0%} of a core: it may have measured itself")
    return Group(table, *(Text(line) for line in lines))


def _counts(summary: dict[str, Any]) -> str:
    text = f"{summary['completed']} ok, {summary['failed']} failed in {summary['duration']:.1f} s"
    for error in summary["errors_by_kind"]:
        text += f"; {error['count']} x {error['kind']}"
    if summary["untold_output_tokens"]:
        text += f"; {summary['untold_output_tokens']} answers of unknown length"
    return text


def _throughput(summary: dict[str, Any]) -> str:
    return (
        f"output {digits(summary['output_throughput'])} tok/s, total {digits(summary['total_token_throughput'])} "
        f"tok/s, {digits(summary['request_throughput'])} req/s; "
        f"prompt tokens {_count(summary['total_input_tokens'])}, cached {_count(summary['total_cached_tokens'])}"
    )


def _own_rate(group: str, figures: dict[str, Any]) -> str:
    """Of a group over its own time: the line above is about all of them together."""
    return f"{group}s alone: output {digits(figures['output_throughput'])} tok/s in {figures['duration']:.1f} s"


def _count(value: int | None) -> str:
    return "n/a" if value is None else str(value)

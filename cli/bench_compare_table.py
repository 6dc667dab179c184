"""The tables and words of `pdctl bench compare`, from its results."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from pdctl.core.bench.figures import digits

if TYPE_CHECKING:
    from rich.console import RenderableType


def render(document: dict[str, Any]) -> RenderableType:
    """A table a workload, a column a system; then the verdict. At most 80 columns."""
    from rich.console import Group
    from rich.text import Text

    results = document["results"]
    parts: list[RenderableType] = []
    if results["chunk_sweep"]:
        parts.append(_sweep(results["chunk_sweep"]))
    parts += [_workload(kind, results["systems"]) for kind in results["systems"][0]["workloads"]]
    parts += [Text(line) for line in results["verdict"]]
    return Group(*parts)


def _workload(kind: str, systems: list[dict[str, Any]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    from pdctl.core.bench.compare import figures_of

    num_rounds = len(systems[0]["workloads"][kind]["rounds"])
    table = Table(title=f"{kind}: median of {num_rounds} rounds (lowest-highest)", title_justify="left")
    table.add_column("")
    for system in systems:
        table.add_column(Text(system["name"]), justify="right")
    for figure in figures_of(kind):
        unit = " ms" if figure.lower_is_better else ""
        table.add_row(
            f"{figure.label}{unit}",
            *(_spread([figure.of(one) for one in system["workloads"][kind]["rounds"]]) for system in systems),
        )
    return table


def _spread(values: list[float | None]) -> str:
    found = [value for value in values if value is not None]
    if not found:
        return "n/a"
    return f"{digits(statistics.median(found))} ({digits(min(found))}-{digits(max(found))})"


def _sweep(points: list[dict[str, Any]]) -> RenderableType:
    from rich.table import Table

    table = Table(title="colocated: chunk sizes under the mixed workload, once each", title_justify="left")
    for heading in ("chunk tokens", "p99 ITL ms", "prompts' TTFT ms", "output tok/s", ""):
        table.add_column(heading, justify="right")
    for point in points:
        table.add_row(
            str(point["chunk_tokens"]),
            digits(point["p99_itl_under_prompts_ms"]),
            digits(point["median_prompt_ttft_ms"]),
            digits(point["output_throughput"]),
            "chosen" if point["chosen"] else "",
        )
    return table

"""`pdctl bench serve --find-rate`: the highest rate that meets the objectives, and what was tried on the way."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pdctl.cli.bench_options import workload_of
from pdctl.cli.bench_run import keep
from pdctl.cli.options import look_hint
from pdctl.cli.output import print_json, remark, stdout_console
from pdctl.transport.errors import PdctlError

if TYPE_CHECKING:
    from rich.table import Table

    from pdctl.core.bench.client import Server


def find(
    server: Server,
    vocab_size: int | None,
    given: dict[str, Any],
    objectives: dict[str, float],
    machine: dict[str, Any],
) -> None:
    """Measure, print, save.

    Args:
        given: the options of `bench serve`, by parameter name.
    """
    from pdctl.cli.bench_serve import watching
    from pdctl.core.bench import results
    from pdctl.core.bench.serve import serve
    from pdctl.core.bench.sweep import find_rate

    made = workload_of(given["workload"], given, vocab_size=vocab_size)
    seed = made.configuration["seed"]

    def measure(rate_per_s: float) -> dict[str, Any]:
        nonlocal seed
        # Other requests each time: the same ones would be found in the prefix cache.
        load = workload_of(
            given["workload"], {**given, "request_rate": rate_per_s, "seed": seed}, vocab_size=vocab_size
        )
        seed += 1
        shown = "all at once" if math.isinf(rate_per_s) else f"{rate_per_s:.3g} requests/s"
        with watching(len(load.requests)) as on_sample:
            measured = serve(
                server,
                load,
                objectives=objectives,
                num_warmups=given["num_warmups"],
                timeout_s=given["timeout_s"],
                on_sample=on_sample,
            )
        remark(f"{shown}: {measured['summary']['slo_attainment']:.1%} within the objectives")
        return measured

    found = find_rate(measure, given["attainment"])
    document = results.document(
        "sweep",
        {**made.configuration, "num_warmups": given["num_warmups"], "goodput_ms": objectives},
        {"server": {"url": server.url, "model_id": server.model}, "objectives": objectives, **found},
        machine,
    )
    keep(document, given["output"])
    if given["as_json"]:
        points = [{key: one[key] for key in one if key != "samples"} for one in found["points"]]
        print_json({**document, "results": {**document["results"], "points": points}})
    else:
        stdout_console().print(render(document))
        best = found["best_rate_per_s"]
        what = ", ".join(f"{key} {limit:g} ms" for key, limit in objectives.items())
        share = f"{given['attainment']:.0%} of requests within {what}"
        if best is None:
            remark(f"{share}: at no rate that was tried")
        elif found["is_bound"]:
            remark(f"{share}: even all at once, {best:.3g} requests/s; more --num-prompts may find more")
        else:
            remark(f"{share}: up to {best:.3g} requests/s")
    failed = sum(point["summary"]["failed"] for point in found["points"])
    if failed:
        raise PdctlError(f"{failed} requests failed", hint=look_hint())


def render(document: dict[str, Any]) -> Table:
    """A row a rate, ascending; at most 80 columns."""
    from rich.table import Table
    from rich.text import Text

    from pdctl.core.bench.figures import digits

    results = document["results"]
    title = f"{document['configuration']['workload']} on {results['server']['url']}"
    table = Table(title=Text(title), title_justify="left")
    for heading in ("rate req/s", "req/s", "output tok/s", "TTFT p99 ms", "TPOT p99 ms", "good", "meets"):
        table.add_column(heading, justify="right")
    for point in sorted(results["points"], key=lambda point: point["rate_per_s"] or math.inf):
        summary = point["summary"]
        table.add_row(
            "all at once" if point["rate_per_s"] is None else f"{point['rate_per_s']:.3g}",
            digits(summary["request_throughput"]),
            digits(summary["output_throughput"]),
            digits(summary["p99_ttft_ms"]),
            digits(summary["p99_tpot_ms"]),
            f"{summary['slo_attainment']:.1%}",
            "yes" if point["meets"] else "no",
        )
    return table

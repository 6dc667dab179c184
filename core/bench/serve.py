"""`pdctl bench serve`: one workload on one server, and its results; also a round of compare, a point of a sweep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdctl.core.bench import load
from pdctl.core.bench.client import Server
from pdctl.core.bench.figures import by_group, itls_under_prompts_ms, percentile, summarize, summarize_groups
from pdctl.core.bench.samples import Sample
from pdctl.core.bench.workloads import PROMPT, STREAM, Workload


def serve(
    server: Server,
    workload: Workload,
    *,
    objectives: dict[str, float],
    num_warmups: int = 1,
    timeout_s: float = load.DEFAULT_TIMEOUT_S,
    on_sample: Callable[[Sample], None] = lambda sample: None,
) -> dict[str, Any]:
    """Run it; returns what results.py lists for "serve"."""
    measured = load.run(
        server,
        workload,
        num_warmups=num_warmups,
        timeout_s=timeout_s,
        on_sample=on_sample,
    )
    groups = by_group(measured.samples)
    return {
        "server": {"url": server.url, "model_id": server.model},
        "summary": summarize(measured.samples, measured.duration_s, objectives),
        "groups": summarize_groups(groups, measured.duration_s, objectives),
        "under_prompts": _under_prompts(groups) if workload.kind == "mixed" else None,
        "client_cpu_share": measured.client_cpu_share,
        "samples": [sample.to_json() for sample in measured.samples],
    }


def _under_prompts(groups: dict[str, list[Sample]]) -> dict[str, float | int | None]:
    """The streams' inter-token latency while prompts are computed: what the mixed workload is for."""
    gaps = itls_under_prompts_ms(groups.get(STREAM, []), groups.get(PROMPT, []))
    return {
        "num_gaps": len(gaps),
        **{f"p{percent}_itl_ms": percentile(gaps, percent) if gaps else None for percent in (50, 90, 99)},
        "max_itl_ms": max(gaps, default=None),
    }

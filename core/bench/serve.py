"""`pdctl bench serve`: one workload on one server, and its results; also a round of compare, a point of a sweep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdctl.core.bench import load
from pdctl.core.bench.client import Server
from pdctl.core.bench.figures import itls_under_prompts_ms, percentile, summarize
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
    groups = {
        group: [sample for sample in measured.samples if sample.group == group]
        for group in dict.fromkeys(sample.group for sample in measured.samples)
        if group
    }
    return {
        "server": {"url": server.url, "model_id": server.model},
        "summary": summarize(measured.samples, measured.duration_s, objectives),
        "groups": {group: summarize(samples, measured.duration_s, objectives) for group, samples in groups.items()},
        "under_prompts": _under_prompts(groups) if workload.kind == "mixed" else None,
        "client_cpu_share": measured.client_cpu_share,
        "samples": [sample.to_json() for sample in measured.samples],
    }


def _own_duration_s(samples: list[Sample], otherwise_s: float) -> float:
    """From the first request of a group to its last chunk: a group's throughput does not wait for the others."""
    ends = [sample.chunks_ms[-1] for sample in samples if sample.chunks_ms]
    return (max(ends) - min(sample.sent_ms for sample in samples)) / 1e3 if ends else otherwise_s


def _under_prompts(groups: dict[str, list[Sample]]) -> dict[str, float | int | None]:
    """The streams' inter-token latency while prompts are computed: what the mixed workload is for."""
    gaps = itls_under_prompts_ms(groups.get(STREAM, []), groups.get(PROMPT, []))
    return {
        "num_gaps": len(gaps),
        **{f"p{percent}_itl_ms": percentile(gaps, percent) if gaps else None for percent in (50, 90, 99)},
        "max_itl_ms": max(gaps, default=None),
    }

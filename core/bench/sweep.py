"""The highest arrival rate at which a server still meets its objectives, found by halving the gap.

    all at once -> the most it can do, C -> C/2, then between the best that met and the least that did not

Knows neither servers nor workloads: it is given a function that measures one rate. Called by cli/bench_rates.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

# Where the gap between a rate that meets and one that does not is this small, the rate is found.
_CLOSE_ENOUGH = 1.1
_LOWEST_SHARE = 1 / 64
MAX_POINTS = 10


def find_rate(measure: Callable[[float], dict[str, Any]], attainment: float) -> dict[str, Any]:
    """Measure rate after rate.

    Args:
        measure: returns what `serve` returns (with objectives) of one rate; infinite: all at once.
        attainment: share of all requests sent that must meet the objectives.

    Returns:
        What results.py lists for "sweep", but for "server" and "objectives": "best_rate_per_s" is None if no rate
        met them. If they were met with all at once, it is what was answered then, and "is_bound" is true: a longer
        load may find more.
    """
    points: list[dict[str, Any]] = []

    def meets(rate_per_s: float) -> bool:
        measured = measure(rate_per_s)
        summary = measured["summary"]
        share = summary["slo_attainment"]
        met = share is not None and share >= attainment
        shown = None if math.isinf(rate_per_s) else rate_per_s
        points.append({"rate_per_s": shown, "summary": summary, "meets": met, "samples": measured["samples"]})
        return met

    best: float | None = None
    met_all_at_once = meets(math.inf)
    capacity = points[0]["summary"]["request_throughput"]
    if met_all_at_once:
        best = capacity
    elif capacity:
        low, high = 0.0, capacity
        rate = capacity / 2
        while len(points) < MAX_POINTS and rate >= capacity * _LOWEST_SHARE:
            if meets(rate):
                low = rate
            else:
                high = rate
            if low and high / low < _CLOSE_ENOUGH:
                break
            rate = math.sqrt(low * high) if low else high / 2
        best = low or None
    return {
        "target_attainment": attainment,
        "best_rate_per_s": best,
        "is_bound": met_all_at_once,
        "points": points,
    }

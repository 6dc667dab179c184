"""Figures from samples, in the definitions of `vllm bench serve`: percentiles, means, spreads.

Percentiles by linear interpolation, as numpy's default; None where nothing was measured, never 0. Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("percentile: no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, kw_only=True)
class Series:
    """One figure over all requests that have it."""

    mean: float
    p50: float
    p99: float
    num: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Series | None:
        if not values:
            return None
        return cls(
            mean=statistics.fmean(values),
            p50=percentile(values, 50),
            p99=percentile(values, 99),
            num=len(values),
        )

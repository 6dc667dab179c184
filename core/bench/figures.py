"""Figures from samples, in the definitions and under the keys of `vllm bench serve`.

TTFT, TPOT and E2EL: one value a request that succeeded; ITL: the gaps of all of them pooled. Percentiles by linear
interpolation and standard deviations of the population, as numpy's defaults. Two differences: where nothing was
measured or told there is None, never 0; a request with an error event in its stream, or without an end, has failed.
Pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pdctl.core.bench.samples import Sample
from pdctl.transport.errors import UsageError

METRICS = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 90, 99)
OBJECTIVES = ("ttft", "tpot", "e2el")


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


def parse_goodput(given: Sequence[str]) -> dict[str, float]:
    """{"ttft": 300.0} from `--goodput ttft:300`; milliseconds.

    Raises:
        UsageError: it says something else.
    """
    objectives: dict[str, float] = {}
    for text in given:
        key, colon, value = text.partition(":")
        try:
            limit_ms = float(value)
        except ValueError:
            limit_ms = math.nan
        if key not in OBJECTIVES or not colon or not 0 <= limit_ms < math.inf:
            raise UsageError(f"--goodput {text}: expected {', '.join(f'{one}:MS' for one in OBJECTIVES)}")
        objectives[key] = limit_ms
    return objectives


def meets(sample: Sample, objectives: dict[str, float]) -> bool:
    """Whether a request succeeded within all objectives. An answer of one token meets any TPOT; one of unknown
    length none."""
    short = sample.output_tokens is not None and sample.output_tokens < 2
    values = {"ttft": sample.ttft_ms, "tpot": 0.0 if short else sample.tpot_ms, "e2el": sample.e2el_ms}
    return sample.ok and all((value := values[key]) is not None and value <= objectives[key] for key in objectives)


def summarize(samples: Sequence[Sample], duration_s: float, objectives: dict[str, float]) -> dict[str, Any]:
    """All figures of a load: `duration` in seconds, throughputs per second, latencies in ms.

    Beyond vLLM's keys: `slo_attainment` (good requests by all that were sent), `total_cached_tokens`, `max_itl_ms`,
    `errors_by_kind` (failed requests, with the first message of each kind), and `untold_output_tokens`: requests
    whose server told neither usage nor token ids. If there are any, no total and no throughput of tokens is known.
    """
    good = [sample for sample in samples if sample.ok]
    output = _total([sample.output_tokens for sample in good])
    prompt = _total([sample.prompt_tokens for sample in good])
    met = sum(meets(sample, objectives) for sample in good)
    values = latencies_ms(good)
    summary: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(samples) - len(good),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "total_cached_tokens": _total([sample.cached_tokens for sample in good]),
        "untold_output_tokens": sum(sample.output_tokens is None for sample in good),
        "request_throughput": len(good) / duration_s if good else None,
        "request_goodput": met / duration_s if objectives else None,
        "slo_attainment": met / len(samples) if objectives and samples else None,
        "output_throughput": None if output is None else output / duration_s,
        "total_token_throughput": None if output is None or prompt is None else (output + prompt) / duration_s,
        **_peaks(good),
    }
    for metric in METRICS:
        summary |= _statistics(metric, values[metric])
    summary["max_itl_ms"] = max(values["itl"], default=None)
    summary["errors_by_kind"] = _errors(samples)
    return summary


def by_group(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Samples of each group of a workload; of one without groups, nothing."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.group:
            groups.setdefault(sample.group, []).append(sample)
    return groups


def summarize_groups(
    groups: dict[str, list[Sample]], duration_s: float, objectives: dict[str, float]
) -> dict[str, dict[str, Any]]:
    """The figures of each group, over the time that it took itself: from its first request to its last token.

    What the streams of the mixed workload give in a second must not depend on how long the prompts take beside them.

    Args:
        duration_s: of the whole load; it counts for a group in which no token arrived.
    """
    return {
        group: summarize(samples, own_duration_s(samples) or duration_s, objectives)
        for group, samples in groups.items()
    }


def own_duration_s(samples: Sequence[Sample]) -> float:
    """From the first request to the last token; 0 if none arrived."""
    begin = min(sample.sent_ms for sample in samples)
    return max((sample.chunks_ms[-1] - begin for sample in samples if sample.chunks_ms), default=0.0) / 1e3


def latencies_ms(good: Sequence[Sample]) -> dict[str, list[float]]:
    """All values of each of METRICS, in ms, over requests that succeeded."""
    return {
        "ttft": [value for sample in good if (value := sample.ttft_ms) is not None],
        "tpot": [value for sample in good if (value := sample.tpot_ms) is not None],
        "itl": [gap for sample in good for gap in sample.itls_ms],
        "e2el": [value for sample in good if (value := sample.e2el_ms) is not None],
    }


def itls_under_prompts_ms(streams: Sequence[Sample], prompts: Sequence[Sample]) -> list[float]:
    """The gaps of the streams that have a moment in common with a prompt, from its sending to its first token."""
    spans = [(one.sent_ms, one.chunks_ms[0]) for one in prompts if one.ok]
    return [
        at - before
        for sample in streams
        if sample.ok
        for before, at in zip(sample.chunks_ms, sample.chunks_ms[1:], strict=False)
        if any(begin <= at and before < end for begin, end in spans)
    ]


def _total(values: Sequence[int | None]) -> int | None:
    """Their sum; None if there are none, or one is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def digits(value: float | None, unit: str = "") -> str:
    """A figure for people: three digits or so; n/a of None."""
    if value is None:
        return "n/a"
    size = abs(value)
    if size >= 100:
        text = f"{value:,.0f}"
    elif size >= 10:
        text = f"{value:.1f}"
    else:
        text = f"{value:.2f}" if size >= 0.1 or size == 0 else f"{value:.2g}"
    return f"{text} {unit}" if unit else text


def _statistics(metric: str, values: list[float]) -> dict[str, float | None]:
    keys = ["mean", "median", "std", *(f"p{percent}" for percent in PERCENTILES)]
    if not values:
        return {f"{key}_{metric}_ms": None for key in keys}
    found = [statistics.fmean(values), statistics.median(values), statistics.pstdev(values)]
    found += [percentile(values, percent) for percent in PERCENTILES]
    return {f"{key}_{metric}_ms": value for key, value in zip(keys, found, strict=True)}


def _peaks(good: list[Sample]) -> dict[str, float | None]:
    """In buckets of a second: chunks that arrived, and requests that touched it. Both as vLLM counts them."""
    if not good:
        return {"max_output_tokens_per_s": None, "max_concurrent_requests": None}
    origin = min(sample.sent_ms for sample in good)
    chunks: dict[int, int] = {}
    requests: dict[int, int] = {}
    for sample in good:
        for at in sample.chunks_ms:
            second = int((at - origin) / 1e3)
            chunks[second] = chunks.get(second, 0) + 1
        for second in range(int((sample.sent_ms - origin) / 1e3), int((sample.chunks_ms[-1] - origin) / 1e3) + 1):
            requests[second] = requests.get(second, 0) + 1
    return {
        "max_output_tokens_per_s": float(max(chunks.values())),
        "max_concurrent_requests": max(requests.values()),
    }


def _errors(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for sample in samples:
        if sample.error_kind is not None:
            entry = found.setdefault(
                sample.error_kind, {"kind": sample.error_kind, "count": 0, "first": sample.error}
            )
            entry["count"] += 1
    return list(found.values())

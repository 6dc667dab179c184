"""`pdctl bench` alone: a small honest table about the running cluster, in the definitions of `vllm bench serve`.

TTFT: from just before the request is sent to the first chunk with choices. TPOT: (last chunk − first chunk) /
(output tokens − 1), for requests with more than one. Output tokens: usage.completion_tokens. Percentiles by
linear interpolation. Hand-over: from the stamp before the READY store to the stamp after the DECODING store, as
the server's `timings` tell it. Monotonic clock.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pdctl.core.bench.figures import Series
from pdctl.core.client import Client
from pdctl.transport.errors import PdctlError


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Random token ids, so that no prompt finds a cached prefix. The same seed gives the same requests."""

    num_requests: int
    prompt_tokens: int
    max_tokens: int
    concurrency: int
    seed: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class Phase:
    """All requests of one concurrency. Series keys: ttft_ms, tpot_ms, e2el_ms, handover_us."""

    concurrency: int
    num_ok: int
    num_failed: int
    duration_s: float
    series: dict[str, Series | None]
    output_tokens: int
    input_tokens: int

    @property
    def output_tokens_per_s(self) -> float | None:
        return self.output_tokens / self.duration_s if self.num_ok else None

    @property
    def total_tokens_per_s(self) -> float | None:
        return (self.output_tokens + self.input_tokens) / self.duration_s if self.num_ok else None


@dataclass(frozen=True, kw_only=True)
class Result:
    prompt_tokens: int
    max_tokens: int
    phases: tuple[Phase, ...]
    first_error: str | None

    @property
    def num_failed(self) -> int:
        return sum(phase.num_failed for phase in self.phases)

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "max_tokens": self.max_tokens,
            "phases": [
                {
                    "concurrency": phase.concurrency,
                    "num_ok": phase.num_ok,
                    "num_failed": phase.num_failed,
                    "duration_s": phase.duration_s,
                    "output_tokens": phase.output_tokens,
                    "input_tokens": phase.input_tokens,
                    "output_tokens_per_s": phase.output_tokens_per_s,
                    "total_tokens_per_s": phase.total_tokens_per_s,
                    **{key: None if series is None else vars(series) for key, series in phase.series.items()},
                }
                for phase in self.phases
            ],
            "first_error": self.first_error,
        }


@dataclass(frozen=True, kw_only=True)
class _Sample:
    ttft_ms: float | None
    e2el_ms: float
    tpot_ms: float | None
    handover_us: float | None
    output_tokens: int
    input_tokens: int


def run(client: Client, workload: Workload, advance: Callable[[], None]) -> Result:
    """Warm up with one request, then measure one at a time and several at once."""
    source = random.Random(workload.seed)

    def prompts(number: int) -> list[list[int]]:
        return [[source.randrange(workload.vocab_size) for _ in range(workload.prompt_tokens)] for _ in range(number)]

    errors: list[str] = []
    _measure(client, prompts(1)[0], workload.max_tokens, errors)
    errors.clear()
    phases = []
    for concurrency in dict.fromkeys((1, min(workload.concurrency, workload.num_requests))):
        began = time.monotonic()
        with ThreadPoolExecutor(concurrency) as pool:
            samples: list[_Sample | None] = []
            for sample in pool.map(
                lambda prompt: _measure(client, prompt, workload.max_tokens, errors),
                prompts(workload.num_requests),
            ):
                samples.append(sample)
                advance()
        good = [sample for sample in samples if sample is not None]
        phases.append(
            Phase(
                concurrency=concurrency,
                num_ok=len(good),
                num_failed=len(samples) - len(good),
                duration_s=time.monotonic() - began,
                output_tokens=sum(sample.output_tokens for sample in good),
                input_tokens=sum(sample.input_tokens for sample in good),
                series={
                    key: Series.of([value for sample in good if (value := getattr(sample, key)) is not None])
                    for key in ("ttft_ms", "tpot_ms", "e2el_ms", "handover_us")
                },
            )
        )
    return Result(
        prompt_tokens=workload.prompt_tokens,
        max_tokens=workload.max_tokens,
        phases=tuple(phases),
        first_error=errors[0] if errors else None,
    )


def _measure(client: Client, prompt: list[int], max_tokens: int, errors: list[str]) -> _Sample | None:
    """One request; None if it failed, with the reason appended to `errors`."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "timings": True,
        "stream_options": {"include_usage": True},
    }
    sent = time.monotonic_ns()
    first = last = None
    usage: dict[str, Any] = {}
    timings: dict[str, Any] = {}
    try:
        for arrived, chunk in client.stream("/v1/completions", body):
            if chunk.get("choices"):
                first, last = first or arrived, arrived
            usage = chunk.get("usage") or usage
            timings = chunk.get("timings") or timings
    except PdctlError as error:
        errors.append(error.message)
        return None
    output = int(usage.get("completion_tokens", 0))
    tpot = (last - first) / (output - 1) / 1e6 if first is not None and last is not None and output > 1 else None
    return _Sample(
        ttft_ms=None if first is None else (first - sent) / 1e6,
        e2el_ms=((last or time.monotonic_ns()) - sent) / 1e6,
        tpot_ms=tpot,
        handover_us=timings.get("handover_us"),
        output_tokens=output,
        input_tokens=int(usage.get("prompt_tokens", 0)),
    )

"""`pdctl bench` alone: a small honest table about the running cluster, one request at a time and several at once.

Hand-over: from the stamp before the READY store to the stamp after the DECODING store, as the server's `timings` tell
it. The other figures: figures.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pdctl.core.bench import load
from pdctl.core.bench.client import Server
from pdctl.core.bench.figures import Series, latencies_ms, summarize
from pdctl.core.bench.samples import Sample
from pdctl.core.bench.workloads import Arrivals, make


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Random prompts, so that none finds a cached prefix. The same seed asks the same requests."""

    num_requests: int
    prompt_tokens: int
    max_tokens: int
    concurrency: int
    seed: int
    vocab_size: int

    @property
    def steps(self) -> tuple[int, ...]:
        """Requests at once, of each phase."""
        return tuple(dict.fromkeys((1, min(self.concurrency, self.num_requests))))


@dataclass(frozen=True, kw_only=True)
class Phase:
    """All requests of one concurrency. Series keys: ttft_ms, tpot_ms, e2el_ms, handover_us."""

    concurrency: int
    summary: dict[str, Any]
    series: dict[str, Series | None]


@dataclass(frozen=True, kw_only=True)
class Result:
    plan: Plan
    phases: tuple[Phase, ...]

    @property
    def num_failed(self) -> int:
        return sum(phase.summary["failed"] for phase in self.phases)

    @property
    def first_error(self) -> str | None:
        errors = [error["first"] for phase in self.phases for error in phase.summary["errors_by_kind"]]
        return errors[0] if errors else None

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.plan.prompt_tokens,
            "max_tokens": self.plan.max_tokens,
            "seed": self.plan.seed,
            "phases": [
                {
                    "concurrency": phase.concurrency,
                    "num_ok": phase.summary["completed"],
                    "num_failed": phase.summary["failed"],
                    "duration_s": phase.summary["duration"],
                    "output_tokens": phase.summary["total_output_tokens"],
                    "input_tokens": phase.summary["total_input_tokens"],
                    "output_tokens_per_s": phase.summary["output_throughput"],
                    "total_tokens_per_s": phase.summary["total_token_throughput"],
                    **{key: None if series is None else vars(series) for key, series in phase.series.items()},
                }
                for phase in self.phases
            ],
            "first_error": self.first_error,
        }


def run(server: Server, plan: Plan, on_sample: Callable[[Sample], None]) -> Result:
    """Warm up with one request, then measure one at a time and several at once."""
    phases = []
    for number, concurrency in enumerate(plan.steps):
        workload = make(
            "random",
            seed=plan.seed + number,
            vocab_size=plan.vocab_size,
            num_prompts=plan.num_requests,
            input_len=plan.prompt_tokens,
            output_len=plan.max_tokens,
            arrivals=Arrivals(),
            max_concurrency=concurrency,
        )
        measured = load.run(server, workload, num_warmups=int(number == 0), on_sample=on_sample)
        good = [sample for sample in measured.samples if sample.ok]
        values = latencies_ms(good)
        handovers = [told for sample in good if (told := sample.timings.get("handover_us")) is not None]
        phases.append(
            Phase(
                concurrency=concurrency,
                summary=summarize(measured.samples, measured.duration_s, {}),
                series={
                    **{f"{key}_ms": Series.of(values[key]) for key in ("ttft", "tpot", "e2el")},
                    "handover_us": Series.of(handovers),
                },
            )
        )
    return Result(plan=plan, phases=tuple(phases))

"""Documents of `pdctl bench`, as results.py lists them, from samples that are made up here; test files share them."""

from __future__ import annotations

import random
from typing import Any

from pdctl.core.bench.figures import by_group, itls_under_prompts_ms, percentile, summarize, summarize_groups
from pdctl.core.bench.results import SCHEMA
from pdctl.core.bench.samples import Sample


def sample(index: int, sent_ms: float, gaps_ms: list[float], *, ttft_ms: float = 50.0, group: str = "") -> Sample:
    chunks = [sent_ms + ttft_ms]
    for gap in gaps_ms:
        chunks.append(chunks[-1] + gap)
    return Sample(
        index=index,
        group=group,
        due_ms=sent_ms,
        sent_ms=sent_ms,
        chunks_ms=tuple(chunks),
        prompt_tokens=64,
        cached_tokens=0,
        output_tokens=len(chunks),
        finish_reason="length",
    )


def failed(index: int, error: str = "refused") -> Sample:
    return Sample(index=index, due_ms=0.0, sent_ms=1.0, error=error, error_kind="connection")


def plain_samples(number: int = 8, seed: int = 0) -> list[Sample]:
    source = random.Random(seed)
    return [
        sample(index, index * 200.0, [source.uniform(20, 40) for _ in range(10)], ttft_ms=source.uniform(50, 90))
        for index in range(number)
    ]


def mixed_samples(stall_ms: float = 30.0, seed: int = 0) -> list[Sample]:
    """Four streams; two long prompts arrive, and each stops every stream for so long."""
    source = random.Random(seed)
    streams = [
        sample(index, 0.0, [stall_ms if step in (20, 40) else source.uniform(25, 35) for step in range(60)],
               group="stream")
        for index in range(4)
    ]  # fmt: skip
    prompts = [sample(4 + index, 600.0 * (1 + index), [], ttft_ms=400.0, group="prompt") for index in range(2)]
    return [*streams, *prompts]


def load(samples: list[Sample], objectives: dict[str, float] | None = None) -> dict[str, Any]:
    """What `bench serve` puts in `results`."""
    groups = by_group(samples)
    duration = 3.0
    under = None
    if groups:
        found = itls_under_prompts_ms(groups["stream"], groups["prompt"])
        under = {
            "num_gaps": len(found),
            **{f"p{percent}_itl_ms": percentile(found, percent) if found else None for percent in (50, 90, 99)},
            "max_itl_ms": max(found, default=None),
        }
    return {
        "server": {"url": "http://127.0.0.1:8000", "model_id": "tiny"},
        "summary": summarize(samples, duration, objectives or {}),
        "groups": summarize_groups(groups, duration, objectives or {}),
        "under_prompts": under,
        "client_cpu_share": 0.1,
        "samples": [one.to_json() for one in samples],
    }


def document(kind: str, results: dict[str, Any], **configuration: Any) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "kind": kind,
        "date_utc": "2026-01-02T03:04:05+00:00",
        "command": f"pdctl bench {kind} --output it.json",
        "machine": {"cpu": "A CPU", "usable_cores": 2, "instructions": ["avx2"], "virtual": True, "torch": "2.13.0"},
        "configuration": configuration,
        "results": results,
    }


def serve_document(samples: list[Sample], objectives: dict[str, float] | None = None) -> dict[str, Any]:
    workload = "mixed" if any(one.group for one in samples) else "random"
    return document("serve", load(samples, objectives), workload=workload, goodput_ms=objectives or {})


def sweep_document(
    rates: tuple[float | None, ...] = (None, 1.0, 2.0, 3.0), best: float | None = 2.0
) -> dict[str, Any]:
    objectives = {"ttft": 100.0}
    points = []
    for number, rate in enumerate(rates):
        summary = summarize(plain_samples(seed=number), 4.0 + number, objectives)
        points.append(
            {"rate_per_s": rate, "summary": summary, "meets": rate is not None and best is not None and rate <= best}
        )
    return document(
        "sweep",
        {
            "server": {"url": "http://127.0.0.1:8000", "model_id": "tiny"},
            "objectives": objectives,
            "target_attainment": 0.99,
            "best_rate_per_s": best,
            "points": points,
        },
        workload="random",
        goodput_ms=objectives,
    )


def compare_document(rounds: int = 3) -> dict[str, Any]:
    """Two systems, two workloads: one of them stalls for long prompts, the other lets them wait."""

    def system(name: str, stall_ms: float) -> dict[str, Any]:
        return {
            "name": name,
            "server": {"url": "http://127.0.0.1:8000", "model_id": "tiny"},
            "configuration": {"threads": 2},
            "workloads": {
                "mixed": {"rounds": [load(mixed_samples(stall_ms, seed)) for seed in range(rounds)]},
                "random": {"rounds": [load(plain_samples(seed=seed)) for seed in range(rounds)]},
            },
        }

    return document(
        "compare",
        {
            "systems": [system("disaggregated", 45.0), system("colocated", 420.0)],
            "chunk_sweep": [
                {
                    "chunk_tokens": tokens,
                    "p99_itl_under_prompts_ms": tail,
                    "median_prompt_ttft_ms": ttft,
                    "chosen": tokens == 256,
                }
                for tokens, tail, ttft in ((128, 80.0, 900.0), (256, 120.0, 500.0), (512, 300.0, 450.0))
            ],
            "token_equality": {
                "systems": ["disaggregated", "colocated"],
                "compared": 10,
                "equal": 9,
                "first_difference": {"workload": "mixed", "round": 1, "index": 3},
            },
            "ratios": {
                "mixed": {
                    "colocated": {
                        "p99_itl_under_prompts_ms": {"median": 0.11, "lowest": 0.08, "highest": 0.2},
                        "median_prompt_ttft_ms": {"median": 1.4, "lowest": 1.2, "highest": 1.7},
                        "output_throughput": None,
                    }
                },
                "random": {"colocated": {"p99_itl_ms": {"median": 1.0, "lowest": 0.9, "highest": 1.1}}},
            },
            "verdict": ["mixed: 9.1x lower.", "Disaggregate if a calm stream matters."],
        },
        rounds=rounds,
    )  # fmt: skip


def handoff_document() -> dict[str, Any]:
    source = random.Random(0)
    cells = []
    for load_on in (False, True):
        for name, per_token_ms in (("pdctl", 0.0), ("memcpy", 0.004), ("pipe", 0.009)):
            for tokens in (16, 256, 4096):
                times = [(0.05 + per_token_ms * tokens * (1 + load_on)) * source.uniform(1, 1.3) for _ in range(7)]
                cells.append(
                    {
                        "transport": name,
                        "kv_tokens": tokens,
                        "bytes": tokens * 23040,
                        "load": load_on,
                        "p50_ms": percentile(times, 50),
                        "p99_ms": percentile(times, 99),
                        "ratio_to_pdctl": 1.0 + per_token_ms * tokens / 0.05,
                        "samples_ms": times,
                    }
                )
    return document(
        "handoff",
        {
            "geometry": {"num_layers": 30, "num_kv_heads": 3, "head_dim": 64, "dtype": "bfloat16"},
            "rounds": 7,
            "load_gb_per_s": 12.5,
            "busy_share": [0.02],
            "cells": cells,
            "failed": [{"transport": "mooncake", "error": "no route"}],
            "not_installed": [{"transport": "nixl", "install": "pip install nixl-cu12"}],
        },
        rounds=7,
    )


def engine_document() -> dict[str, Any]:
    def cell(tokens: int, p50_ms: float, limit_ms: float, limit: str, **names: int) -> dict[str, Any]:
        times = [p50_ms * factor for factor in (0.95, 1.0, 1.1)]
        return {
            **names,
            "p50_ms": p50_ms,
            "p99_ms": max(times),
            "min_ms": min(times),
            "tokens_per_s": tokens / p50_ms * 1e3,
            "limit": limit,
            "limit_ms": limit_ms,
            "share_of_limit": limit_ms / p50_ms,
            "samples_ms": times,
        }

    return document(
        "engine",
        {
            "model": "tiny",
            "dtype": "bfloat16",
            "numerics": "avx2",
            "block_tokens": 16,
            "chunk_tokens": 512,
            "rounds": 1,
            "limits": {
                name: {"threads": threads, "read_gb_per_s": 20.0 * threads, "compute_gflop_per_s": 100.0 * threads}
                for name, threads in (("decode", 1), ("prefill", 2))
            },
            "decode": [
                cell(batch, 20.0 + batch + context / 100, 11.0, "memory", batch=batch, context=context)
                for batch in (1, 4, 8)
                for context in (64, 256, 1024)
            ],
            "prefill": [
                cell(tokens, tokens * 1.2, tokens * 0.5, "compute", prompt_tokens=tokens) for tokens in (64, 1024)
            ],
            "profile": [
                {"batch": 1, "context": 256, "step_ms": 22.0, "timers_ms": 0.5,
                 "phases_ms": {"linear": 15.0, "attention": 5.0, "sample": 2.5}},
            ],
            "busy_share": [0.9],
            "skipped": [{"batch": 8, "context": 65536, "reason": "65540 positions, a row holds 8192"}],
        },
    )  # fmt: skip


def documents() -> dict[str, dict[str, Any]]:
    """One of each kind, and of each shape of "serve"."""
    return {
        "plain": serve_document(plain_samples(), {"ttft": 80.0}),
        "mixed": serve_document(mixed_samples(420.0)),
        "sweep": sweep_document(),
        "compare": compare_document(),
        "handoff": handoff_document(),
        "engine": engine_document(),
    }

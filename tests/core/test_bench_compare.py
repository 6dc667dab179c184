"""Comparing: the same requests to all, ratios within a round, and a verdict that says what was measured."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_server import FakeServer, good, running

from pdctl.core.bench.compare import (
    COLOCATED,
    DISAGGREGATED,
    System,
    _doubts,
    compare,
    figures_of,
    token_equality,
    verdict,
)
from pdctl.core.bench.machine import doubts
from pdctl.core.bench.sweep import MAX_POINTS, find_rate
from pdctl.core.bench.workloads import Arrivals, Workload, make


def workloads(number: int) -> list[Workload]:
    more: dict[str, Any] = {"input_len": 5, "output_len": 6, "max_concurrency": None, "num_streams": 2}
    more |= {"arrivals": Arrivals(), "seed": number, "vocab_size": 50, "num_prompts": 3}
    return [make(kind, **more) for kind in ("mixed", "random")]


async def slow(number: int, body: dict[str, Any]) -> AsyncIterator[Any]:
    """Twenty times as long between tokens, and others than `good`'s in every third answer."""
    async for part in good(number, body):
        await asyncio.sleep(0.02)
        if number % 3 == 0 and isinstance(part, dict) and part["choices"]:
            part["choices"][0]["token_ids"] = [49]
        yield part


async def steady(number: int, body: dict[str, Any]) -> AsyncIterator[Any]:
    async for part in good(number, body):
        await asyncio.sleep(0.001)
        yield part


def test_all_are_asked_the_same_in_turn() -> None:
    asked: list[tuple[int, str, str]] = []
    first, second = FakeServer(steady), FakeServer(slow)
    with running(first) as one, running(second) as two:
        systems = [
            System(name=DISAGGREGATED, server=one, configuration={"up": []}),
            System(name=COLOCATED, server=two, configuration={"up": ["--colocated"]}),
        ]
        measured = compare(
            systems,
            workloads,
            rounds=2,
            timeout_s=20,
            quiet_wait_s=0,
            on_begin=lambda number, name, load: asked.append((number, name, load.kind)),
        )
    order = [DISAGGREGATED, COLOCATED]
    turned = order[::-1]
    assert asked == [(0, name, kind) for kind in ("mixed", "random") for name in order] + [
        (1, name, kind) for kind in ("mixed", "random") for name in turned
    ]
    wanted = {
        tuple(one.token_ids or ()) for number in range(2) for load in workloads(number) for one in load.requests
    }
    assert wanted <= {tuple(body["prompt"]) for body in first.bodies}
    assert wanted <= {tuple(body["prompt"]) for body in second.bodies}

    ratios = measured["ratios"]["random"][COLOCATED]
    rounds = [system["workloads"]["random"]["rounds"] for system in measured["systems"]]
    for figure in figures_of("random"):
        by_hand = sorted(figure.of(ours) / figure.of(theirs) for ours, theirs in zip(*rounds, strict=True))  # type: ignore[operator]
        found = ratios[figure.key]
        assert (found["lowest"], found["highest"]) == (by_hand[0], by_hand[-1])
        assert found["median"] == pytest.approx(sum(by_hand) / 2)

    equality = measured["token_equality"]
    assert equality["compared"] == 2 * (5 + 3)
    assert 0 < equality["equal"] < equality["compared"]
    assert equality["first_difference"]["round"] == 0
    words = "\n".join(measured["verdict"])
    assert f"random, {DISAGGREGATED} against {COLOCATED}" in words
    assert "TPOT" in words


def test_a_round_in_which_one_failed_is_in_no_ratio() -> None:
    async def fails_at_first(number: int, body: dict[str, Any]) -> AsyncIterator[Any]:
        if number == 3:  # after the warm-ups, in the first round
            yield {"error": {"message": "gone"}}
            return
        async for part in steady(number, body):
            yield part

    with running(FakeServer(steady)) as one, running(FakeServer(fails_at_first)) as two:
        systems = [System(name=name, server=server, configuration={}) for name, server in (("a", one), ("b", two))]
        measured = compare(systems, lambda number: workloads(number)[:1], rounds=2, timeout_s=20, quiet_wait_s=0)
    assert measured["ratios"]["mixed"]["b"]["output_throughput"]["num_rounds"] == 1
    assert "b: 1 requests of mixed failed; those rounds are in no ratio." in measured["verdict"]


def test_a_busy_machine_is_told() -> None:
    assert _doubts({}, [0.0, 0.1]) == []
    (line,) = _doubts({}, [0.1, 0.5, 0.9])
    assert "Before 2 of 3 turns" in line and "up to 90%" in line
    assert doubts([0.9])[0].startswith("Before it began the machine was busy (90% of its cores)")


def ratio(median: float, low: float, high: float) -> dict[str, float]:
    return {"median": median, "lowest": low, "highest": high, "num_rounds": 5}


def mixed(
    tail: dict[str, float] | None, ttft: dict[str, float] | None, output: dict[str, float] | None = None
) -> dict[str, Any]:
    keys = [figure.key for figure in figures_of("mixed")]
    values = [tail, tail, ttft, output or ratio(1.0, 0.9, 1.1)]
    return {"mixed": {COLOCATED: dict(zip(keys, values, strict=True))}}


EQUAL = {"systems": [DISAGGREGATED, COLOCATED], "compared": 10, "equal": 10, "first_difference": None}


@pytest.mark.parametrize(
    ("tail", "ttft", "output", "says"),
    [
        (ratio(0.05, 0.04, 0.06), ratio(1.5, 1.4, 1.6), None, "20.0x lower; the price: prompts wait 1.5x as long"),
        (ratio(0.5, 0.4, 0.6), ratio(1.0, 0.9, 1.1), None, "2.0x lower, and neither the prompts nor the streams pay"),
        (ratio(0.5, 0.4, 0.6), ratio(0.7, 0.6, 0.8), ratio(0.8, 0.7, 0.9), "the price: streams give 0.80x"),
        (ratio(0.99, 0.98, 0.99), ratio(1.0, 0.9, 1.1), None, "Stay colocated: separate"),
        (ratio(3.0, 2.0, 4.0), ratio(1.0, 0.9, 1.1), None, "Stay colocated: separate"),
        (ratio(0.7, 0.4, 1.2), ratio(1.0, 0.9, 1.1), None, "No verdict: the streams' tail is not lower"),
        (None, None, None, "No verdict: no round"),
    ],
)
def test_the_advice_follows_the_figures(tail: Any, ttft: Any, output: Any, says: str) -> None:
    lines = verdict(mixed(tail, ttft, output), EQUAL, DISAGGREGATED)
    assert says in lines[2]
    # Nothing that was measured on another machine.
    assert lines[3:] == ["Colocated is pdctl's own engine. How another server does on this machine: --url NAME=URL."]
    assert "Tokens: 10 of 10 answers equal" in lines[1]


def test_words_name_direction_and_spread() -> None:
    (line, *_) = verdict(mixed(ratio(0.5, 0.4, 0.8), ratio(2.0, 0.9, 2.5)), EQUAL, DISAGGREGATED)
    assert "p99 ITL while prompts are computed 2.0x lower (1.2-2.5)" in line
    assert "the prompts' TTFT 2.0x higher (0.9-2.5, not in every round)" in line
    assert "the streams' tokens/s 1.00x (0.90-1.10), alike" in line
    unsteady = mixed(ratio(0.5, 0.4, 0.8), ratio(1.0, 0.5, 2.0))
    assert "the prompts' TTFT 1.00x (0.50-2.00), unsteady" in verdict(unsteady, EQUAL, DISAGGREGATED)[0]


def test_without_both_of_ours_no_tokens_are_compared() -> None:
    assert token_equality({DISAGGREGATED: {}, "other": {}})["compared"] == 0


# --- the highest rate ------------------------------------------------------------------------------------------


def server_of(limit_per_s: float, capacity_per_s: float) -> Any:
    """Meets its objectives up to a rate."""

    def measure(rate_per_s: float) -> dict[str, Any]:
        return {
            "summary": {
                "slo_attainment": 1.0 if rate_per_s <= limit_per_s else 0.2,
                "request_throughput": min(rate_per_s, capacity_per_s),
            },
            "samples": [],
        }

    return measure


ALL_FAILED = {"summary": {"slo_attainment": 0.0, "request_throughput": None}, "samples": []}


@pytest.mark.parametrize("limit", [9.5, 5.0, 4.9, 1.0, 0.3])
def test_the_rate_is_found_within_a_tenth(limit: float) -> None:
    found = find_rate(server_of(limit, 10.0), 0.99)
    assert limit / 1.1 <= found["best_rate_per_s"] <= limit
    assert len(found["points"]) <= MAX_POINTS


def test_all_at_once_may_do() -> None:
    found = find_rate(server_of(float("inf"), 10.0), 0.99)
    assert (found["best_rate_per_s"], found["is_bound"]) == (10, True)
    assert [point["rate_per_s"] for point in found["points"]] == [None]


@pytest.mark.parametrize("measure", [server_of(0.0, 10.0), lambda rate: ALL_FAILED])
def test_no_rate_may_do(measure: Any) -> None:
    found = find_rate(measure, 0.99)
    assert found["best_rate_per_s"] is None
    assert 1 <= len(found["points"]) <= MAX_POINTS

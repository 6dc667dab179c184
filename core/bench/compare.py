"""`pdctl bench compare`: the same requests to several servers in turn, and what the difference is worth.

In every round each system is asked the same workload, in an order that turns with the round; the next round's
requests are others. So drift of the machine meets all alike, and a prefix cache meets every prompt once. A ratio is
taken within its round, if nobody failed in it; what is told is the median over the rounds, with the lowest and the
highest. Knows servers, not how they were started.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pdctl.core.bench.client import Server
from pdctl.core.bench.machine import await_quiet, doubts
from pdctl.core.bench.serve import serve
from pdctl.core.bench.workloads import STREAM, Workload

DISAGGREGATED, COLOCATED = "disaggregated", "colocated"
# A figure that differs less than this is called equal, if it does not spread by more than that.
_ALIKE, _STEADY = 1.05, 1.25
# Of every verdict that no other server is part of: who stays colocated because of it might do better still.
_BASELINE = "Colocated is pdctl's own engine. How another server does on this machine: --url NAME=URL."


@dataclass(frozen=True, kw_only=True)
class System:
    """One of those that are compared.

    Attributes:
        configuration: what it was started with, for the results.
    """

    name: str
    server: Server
    configuration: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number of a round, and how it is told.

    Attributes:
        of: takes it from what `serve` returned; None: not measured.
        lower_is_better: latencies, not throughputs.
    """

    key: str
    label: str
    of: Callable[[dict[str, Any]], float | None]
    lower_is_better: bool = True


def _summary(key: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda measured: measured["summary"][key]


def _group(group: str, key: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda measured: measured["groups"].get(group, {}).get(key)


# What a workload is compared by; the first is what it is for.
FIGURES: dict[str, tuple[Figure, ...]] = {
    "mixed": (
        Figure(
            key="p99_itl_under_prompts_ms",
            label="the streams' p99 ITL while prompts are computed",
            of=lambda measured: measured["under_prompts"]["p99_itl_ms"],
        ),
        Figure(
            key="p50_itl_under_prompts_ms",
            label="their p50 ITL then",
            of=lambda measured: measured["under_prompts"]["p50_itl_ms"],
        ),
        Figure(key="median_prompt_ttft_ms", label="the prompts' TTFT", of=_group("prompt", "median_ttft_ms")),
        Figure(
            key="output_throughput",
            label="the streams' tokens/s",
            of=_group(STREAM, "output_throughput"),
            lower_is_better=False,
        ),
    ),
    "": (
        Figure(key="p99_itl_ms", label="p99 ITL", of=_summary("p99_itl_ms")),
        Figure(key="median_ttft_ms", label="TTFT", of=_summary("median_ttft_ms")),
        Figure(key="median_tpot_ms", label="TPOT", of=_summary("median_tpot_ms")),
        Figure(
            key="output_throughput", label="output tokens/s", of=_summary("output_throughput"), lower_is_better=False
        ),
    ),
}


def figures_of(kind: str) -> tuple[Figure, ...]:
    """What a workload of this kind is compared by."""
    return FIGURES.get(kind, FIGURES[""])


def compare(
    systems: Sequence[System],
    workloads: Callable[[int], Sequence[Workload]],
    *,
    rounds: int,
    timeout_s: float,
    quiet_wait_s: float,
    on_begin: Callable[[int, str, Workload], None] = lambda number, system, workload: None,
) -> dict[str, Any]:
    """Measure all systems; the first is the one that the others are compared with.

    Args:
        workloads: those of a round, by its number.
        quiet_wait_s: at most so long is waited before each turn until the machine is quiet.
        on_begin: called before each of them, for each system.

    Returns:
        What results.py lists for "compare", but for "chunk_sweep".
    """
    measured: dict[str, dict[str, dict[str, list[dict[str, Any]]]]] = {system.name: {} for system in systems}
    busy: list[float] = []
    for number in range(rounds):
        for workload in workloads(number):
            turn = number % len(systems)
            for system in (*systems[turn:], *systems[:turn]):
                on_begin(number, system.name, workload)
                busy.append(await_quiet(quiet_wait_s))
                result = serve(
                    system.server,
                    workload,
                    objectives={},
                    timeout_s=timeout_s,
                )
                kinds = measured[system.name].setdefault(workload.kind, {"rounds": []})
                kinds["rounds"].append(result)
    ratios = _ratios(measured, systems[0].name)
    equality = token_equality(measured)
    return {
        "systems": [
            {
                "name": system.name,
                "server": {"url": system.server.url, "model_id": system.server.model},
                "configuration": system.configuration,
                "workloads": measured[system.name],
            }
            for system in systems
        ],
        "token_equality": equality,
        "ratios": ratios,
        "busy_share": busy,
        "verdict": [*verdict(ratios, equality, systems[0].name), *_doubts(measured, busy)],
    }


def _ratios(measured: dict[str, Any], first: str) -> dict[str, Any]:
    """The first system's figure over the other's, of rounds in which neither failed: see results.py."""
    ratios: dict[str, Any] = {}
    for kind, ours in measured[first].items():
        for other, theirs in measured.items():
            if other == first:
                continue
            rounds = [
                (one, two)
                for one, two in zip(ours["rounds"], theirs[kind]["rounds"], strict=True)
                if not one["summary"]["failed"] and not two["summary"]["failed"]
            ]
            entry = ratios.setdefault(kind, {}).setdefault(other, {})
            for figure in figures_of(kind):
                pairs = [(figure.of(one), figure.of(two)) for one, two in rounds]
                found = [mine / its for mine, its in pairs if mine and its]
                entry[figure.key] = _spread(found) if found else None
    return ratios


def _spread(found: list[float]) -> dict[str, float]:
    return {
        "median": statistics.median(found),
        "lowest": min(found),
        "highest": max(found),
        "num_rounds": len(found),
    }


def token_equality(measured: dict[str, Any]) -> dict[str, Any]:
    """Whether our two systems gave the same token ids to the same requests. Answers that failed are not compared."""
    compared = equal = 0
    difference: dict[str, Any] | None = None
    if {DISAGGREGATED, COLOCATED} <= set(measured):
        for kind, ours in measured[DISAGGREGATED].items():
            pairs = zip(ours["rounds"], measured[COLOCATED][kind]["rounds"], strict=True)
            for number, (one, two) in enumerate(pairs):
                others = {sample["index"]: sample for sample in two["samples"]}
                for sample in one["samples"]:
                    other = others.get(sample["index"])
                    failed = other is None or sample["error_kind"] or other["error_kind"]
                    if other is None or failed or sample["token_ids"] is None:
                        continue
                    compared += 1
                    if sample["token_ids"] == other["token_ids"]:
                        equal += 1
                    elif difference is None:
                        difference = {"workload": kind, "round": number, "index": sample["index"]}
    return {
        "systems": [DISAGGREGATED, COLOCATED],
        "compared": compared,
        "equal": equal,
        "first_difference": difference,
    }


def verdict(ratios: dict[str, Any], equality: dict[str, Any], first: str) -> list[str]:
    """The comparison in sentences: what is gained, what it costs, how sure that is, and what follows."""
    lines = []
    for kind, others in ratios.items():
        for other, found in others.items():
            told = [_words(figure, found[figure.key]) for figure in figures_of(kind)]
            lines.append(f"{kind}, {first} against {other}: {'; '.join(told)}.")
    if equality["compared"]:
        same = f"{equality['equal']} of {equality['compared']}"
        lines.append(f"Tokens: {same} answers equal, id by id, {' and '.join(equality['systems'])}.")
    if (mixed := ratios.get("mixed", {}).get(COLOCATED)) is not None:
        lines.append(_advice(mixed))
    if any(set(others) == {COLOCATED} for others in ratios.values()):
        lines.append(_BASELINE)
    return lines


def _words(figure: Figure, ratio: dict[str, float] | None) -> str:
    if ratio is None:
        return f"{figure.label} not measured"
    median, low, high = ratio["median"], ratio["lowest"], ratio["highest"]
    unsure = ", not in every round" if low <= 1 <= high else ""
    if 1 / _ALIKE < median < _ALIKE:
        what = "alike" if high / low < _STEADY else "unsteady"
        return f"{figure.label} {median:.2f}x ({low:.2f}-{high:.2f}), {what}"
    if not figure.lower_is_better:
        return f"{figure.label} {median:.2f}x ({low:.2f}-{high:.2f}{unsure})"
    if median < 1:
        return f"{figure.label} {1 / median:.1f}x lower ({1 / high:.1f}-{1 / low:.1f}{unsure})"
    return f"{figure.label} {median:.1f}x higher ({low:.1f}-{high:.1f}{unsure})"


def _advice(mixed: dict[str, dict[str, float] | None]) -> str:
    """What follows for whoever chooses between our two."""
    tail, ttft = mixed["p99_itl_under_prompts_ms"], mixed["median_prompt_ttft_ms"]
    output = mixed["output_throughput"]
    if tail is None or ttft is None or output is None:
        return "No verdict: no round in which all streams ran beside all prompts and nothing failed."
    if tail["lowest"] <= 1 <= tail["highest"]:
        return "No verdict: the streams' tail is not lower, or not higher, in every round. More --rounds may tell."
    if tail["median"] > 1 / _ALIKE:
        return "Stay colocated: separate processes do not keep the streams any calmer here."
    gain = f"Disaggregate if a calm stream matters: its tail is {1 / tail['median']:.1f}x lower"
    price = []
    if ttft["median"] > _ALIKE:
        price.append(f"prompts wait {ttft['median']:.1f}x as long")
    if output["median"] < 1 / _ALIKE:
        price.append(f"streams give {output['median']:.2f}x the tokens/s")
    if not price:
        return f"{gain}, and neither the prompts nor the streams pay for it here."
    return f"{gain}; the price: {' and '.join(price)}. Stay colocated if that counts more."


def _doubts(measured: dict[str, Any], busy: list[float]) -> list[str]:
    """What makes the figures doubtful."""
    lines = []
    for name, kinds in measured.items():
        for kind, entry in kinds.items():
            failed = sum(one["summary"]["failed"] for one in entry["rounds"])
            if failed:
                lines.append(f"{name}: {failed} requests of {kind} failed; those rounds are in no ratio.")
    return [*lines, *doubts(busy)]

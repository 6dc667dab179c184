"""Figures from samples: vLLM's definitions, checked against numpy and by hand; None where nothing was measured."""

from __future__ import annotations

import dataclasses
import json
import random

import numpy
import pytest

from pdctl.core.bench.figures import (
    by_group,
    digits,
    itls_under_prompts_ms,
    meets,
    parse_goodput,
    percentile,
    summarize,
    summarize_groups,
)
from pdctl.core.bench.samples import Sample
from pdctl.transport.errors import UsageError


def sample(index: int = 0, sent: float = 0.0, chunks: tuple[float, ...] = (), **more: object) -> Sample:
    values = {"output_tokens": len(chunks) or None, "prompt_tokens": 10, **more}
    return Sample(index=index, due_ms=sent, sent_ms=sent, chunks_ms=chunks, **values)  # type: ignore[arg-type]


def test_one_request_by_hand() -> None:
    one = sample(sent=100.0, chunks=(150.0, 160.0, 190.0))
    assert one.ttft_ms == 50
    assert one.itls_ms == (10, 30)
    assert one.e2el_ms == 90
    assert one.tpot_ms == 20


def test_a_chunk_of_several_tokens_is_one_gap() -> None:
    """Tokens are told by usage, never counted from chunks."""
    one = sample(chunks=(10.0, 50.0), output_tokens=5)
    assert one.itls_ms == (40,)
    assert one.tpot_ms == 10


@pytest.mark.parametrize("output_tokens", [0, 1])
def test_no_or_one_token_has_no_tpot(output_tokens: int) -> None:
    """S60: nothing is divided by zero."""
    one = sample(chunks=(5.0,), output_tokens=output_tokens)
    assert one.tpot_ms is None
    summary = summarize([one], 1.0, {"tpot": 1.0})
    assert summary["p99_tpot_ms"] is None
    assert summary["mean_itl_ms"] is None


def test_percentiles_are_numpys() -> None:
    source = random.Random(3)
    for number in (1, 2, 3, 10, 101):
        values = [source.uniform(0, 1e4) for _ in range(number)]
        for percent in (0, 1, 50, 90, 99, 99.9, 100):
            assert percentile(values, percent) == pytest.approx(numpy.percentile(values, percent), rel=1e-12)
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_the_summary_is_what_numpy_makes_of_the_samples() -> None:
    source = random.Random(4)
    samples = []
    for index in range(20):
        at, chunks = source.uniform(0, 5000), []
        moment = at
        for _ in range(source.randrange(1, 9)):
            moment += source.uniform(5, 80)
            chunks.append(moment)
        samples.append(sample(index, at, tuple(chunks)))
    samples.append(sample(20, 0.0, (), error="boom", error_kind="event"))
    summary = summarize(samples, 8.0, {})
    good = samples[:-1]
    values = {
        "ttft": [one.chunks_ms[0] - one.sent_ms for one in good],
        "e2el": [one.chunks_ms[-1] - one.sent_ms for one in good],
        "itl": [gap for one in good for gap in numpy.diff(one.chunks_ms)],
        "tpot": [
            (one.chunks_ms[-1] - one.chunks_ms[0]) / (len(one.chunks_ms) - 1)
            for one in good
            if len(one.chunks_ms) > 1
        ],
    }
    for metric, expected in values.items():
        assert summary[f"mean_{metric}_ms"] == pytest.approx(numpy.mean(expected))
        assert summary[f"median_{metric}_ms"] == pytest.approx(numpy.median(expected))
        assert summary[f"std_{metric}_ms"] == pytest.approx(numpy.std(expected))
        assert summary[f"p99_{metric}_ms"] == pytest.approx(numpy.percentile(expected, 99))
    assert (summary["completed"], summary["failed"]) == (20, 1)
    assert summary["total_output_tokens"] == sum(len(one.chunks_ms) for one in good)
    assert summary["total_input_tokens"] == 200
    assert summary["output_throughput"] == summary["total_output_tokens"] / 8
    assert summary["request_throughput"] == 20 / 8
    assert summary["request_goodput"] is None
    assert summary["errors_by_kind"] == [{"kind": "event", "count": 1, "first": "boom"}]


def test_all_failed_is_no_zero() -> None:
    """S60."""
    summary = summarize([sample(error="gone", error_kind="connection")], 2.0, {"ttft": 5.0})
    assert (summary["completed"], summary["failed"]) == (0, 1)
    for key, value in summary.items():
        if key.endswith(("_ms", "_throughput")) or key.startswith("max_"):
            assert value is None, key
    assert summary["slo_attainment"] == 0


def test_goodput_is_all_objectives_of_all_that_were_sent() -> None:
    fast = sample(0, 0.0, (10.0, 20.0))
    slow = sample(1, 0.0, (500.0, 510.0))
    failed = sample(2, 0.0, (1.0,), error="gone", error_kind="cut_off")
    one_token = sample(3, 0.0, (10.0,))
    objectives = {"ttft": 10.0, "tpot": 10.0}
    assert [meets(one, objectives) for one in (fast, slow, failed, one_token)] == [True, False, False, True]
    summary = summarize([fast, slow, failed, one_token], 4.0, objectives)
    assert summary["request_goodput"] == 0.5
    assert summary["slo_attainment"] == 0.5


def test_peaks_are_counted_in_whole_seconds_as_vllm_does() -> None:
    first = sample(0, 0.0, (100.0, 900.0, 1100.0))
    second = sample(1, 950.0, (1500.0, 2100.0))
    summary = summarize([first, second], 3.0, {})
    assert summary["max_output_tokens_per_s"] == 2
    assert summary["max_concurrent_requests"] == 2


def test_a_group_is_measured_over_its_own_time() -> None:
    """Streams that end after a second give ten tokens in it, however long the prompts beside them take."""
    stream = sample(0, 0.0, tuple(100.0 * at for at in range(1, 11)), group="stream")
    late = sample(1, 100.0, (600.0, 1000.0), group="stream")
    prompt = sample(2, 500.0, (20_500.0,), group="prompt")
    nothing = sample(3, 500.0, (), group="none", error="gone", error_kind="event")
    groups = summarize_groups(by_group([stream, late, prompt, nothing]), 21.0, {"ttft": 1e9})
    assert list(groups) == ["stream", "prompt", "none"]
    assert {group: figures["duration"] for group, figures in groups.items()} == {
        "stream": 1.0,
        "prompt": 20.0,
        "none": 21.0,
    }
    assert [figures["output_throughput"] for figures in groups.values()] == [12.0, 0.05, None]
    assert [figures["request_goodput"] for figures in groups.values()] == [2.0, 0.05, 0.0]
    # What did not succeed gave no tokens, and took its time all the same.
    slow = sample(4, 0.0, (3000.0,), group="stream", error="gone", error_kind="cut_off")
    assert summarize_groups(by_group([stream, slow]), 21.0, {})["stream"]["output_throughput"] == 10 / 3
    assert summarize_groups(by_group([sample()]), 21.0, {}) == {}


def test_an_answer_of_unknown_length_is_told() -> None:
    one = sample(chunks=(1.0, 2.0), output_tokens=None)
    summary = summarize([one], 1.0, {})
    assert summary["untold_output_tokens"] == 1
    assert summary["p50_itl_ms"] == 1
    told = sample(1, chunks=(1.0, 2.0))
    for samples in ([told, one], [one]):  # what one did not tell, no sum can
        summary = summarize(samples, 1.0, {"tpot": 1000.0})
        for key in ("total_output_tokens", "output_throughput", "total_token_throughput", "total_cached_tokens"):
            assert summary[key] is None
    assert summary["slo_attainment"] == 0
    assert not meets(one, {"tpot": 1e9})


def test_gaps_under_prompts_have_a_moment_in_common_with_one() -> None:
    stream = sample(0, 0.0, (10.0, 20.0, 40.0, 70.0, 75.0))
    prompt = sample(1, 25.0, (70.0,))
    assert itls_under_prompts_ms([stream], [prompt]) == [20, 30]
    # The chunk that computed the prompt is the gap's, whoever of the two is read first.
    assert itls_under_prompts_ms([stream], [sample(1, 25.0, (69.9,))]) == [20, 30]
    assert itls_under_prompts_ms([stream], [sample(1, 50.0, (60.0,))]) == [30]
    assert itls_under_prompts_ms([stream], [sample(1, 80.0, (90.0,))]) == []
    assert itls_under_prompts_ms([stream], []) == []


@pytest.mark.parametrize("text", ["", "ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:nan", "ttft:inf", "itl:5", ":5"])
def test_an_objective_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected ttft:MS"):
        parse_goodput([text])


def test_objectives() -> None:
    assert parse_goodput(["ttft:300", "tpot:50.5"]) == {"ttft": 300.0, "tpot": 50.5}


def test_a_sample_as_json() -> None:
    one = sample(3, 1.5, (2.25, 3.125), token_ids=(1, 2), group="stream", timings={"handover_us": 3.0})
    values = json.loads(json.dumps(one.to_json()))
    assert (values["chunks_ms"], values["token_ids"], values["group"]) == ([2.25, 3.125], [1, 2], "stream")
    assert values.keys() == {field.name for field in dataclasses.fields(Sample)}


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "n/a"), (0.0, "0.00"), (0.0123, "0.012"), (0.5, "0.50"), (12.34, "12.3"), (1234.5, "1,234")],
)
def test_digits(value: float | None, text: str) -> None:
    assert digits(value) == text
    assert digits(value, "ms") == (text if value is None else f"{text} ms")

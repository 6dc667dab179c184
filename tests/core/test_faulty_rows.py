"""A fault that lies in one row ends that row, with its cause, and the daemon and everybody else go on.

Over a fake model; what the others are told is checked by `FakeCluster` itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from fake_model import VOCABULARY, FakeCluster

from pdctl.core import decode as decode_module
from pdctl.core.sampler import RowSampler
from pdctl.transport.layout import LOGPROB_WORDS, R
from pdctl.transport.rows import RowState, float_to_word


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(index * (seed + 3) + index // 5 + seed) % VOCABULARY for index in range(length)]


def put(name: R, value: int) -> Callable[[FakeCluster, int], None]:
    return lambda cluster, row: cluster.rows.put(row, name, value)


def put_prompt_token(cluster: FakeCluster, row: int) -> None:
    layout, rows = cluster.segment.layout, cluster.rows
    at = layout.row(row) + layout.row_tokens + 1
    cluster.segment.words[at] = rows.get(row, R.GENERATION) << 32 | VOCABULARY


FAULTS: dict[str, tuple[dict[str, Any], Callable[[FakeCluster, int], None] | None, str]] = {
    "bias for an id the model does not have": (
        {"logit_bias": ((VOCABULARY, 1.0),)},
        None,
        "logit_bias for token id 17: the model has 17",
    ),
    "every token banned": (
        {"logit_bias": tuple((token, float("-inf")) for token in range(VOCABULARY))},
        None,
        "no token is left",
    ),
    "a bias that is no number": ({"logit_bias": ((1, float("nan")),)}, None, "not finite"),
    "min_p beyond 1": ({"temperature": 1.0}, put(R.MIN_P, float_to_word(1e9)), "IndexError"),
    "log-probabilities without room": ({}, put(R.NUM_LOGPROBS, LOGPROB_WORDS + 9), "log-probabilities a token"),
    "more prompt than tokens": ({}, put(R.NUM_PROMPT, 1 << 63), "contradict each other"),
    "a limit beyond the row": ({}, put(R.LIMIT_TOKENS, 1 << 20), "a limit of 1048576"),
    "a prompt's id the model does not have": ({}, put_prompt_token, "token id 17 in the prompt: the model has 17"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", ["disaggregated", "colocated", "local prefill"])
def test_a_row_with_a_fault_fails_alone(kind: str, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    params, change, cause = FAULTS[fault]
    local = 200 if kind == "local prefill" else 0
    cluster = FakeCluster(colocated=kind == "colocated", local_prefill_tokens=local)
    others = [cluster.submit(prompt_of(20, seed), 12) for seed in (1, 2)]
    faulty = cluster.submit(prompt_of(20), 12, **params)
    if change is not None:
        change(cluster, faulty)
    others.append(cluster.submit(prompt_of(20, 3), 12))
    with caplog.at_level(logging.ERROR):
        cluster.run()
    assert cluster.rows.state(faulty) is RowState.FAILED
    assert cause in cluster.rows.error_text(faulty)
    assert [record for record in caplog.records if cluster.rows.request_id(faulty) in record.getMessage()]
    assert cluster.router.slot in cluster.rung
    del cluster.asked[faulty]
    for row in others:
        assert len(cluster.take(row)) == 12
        assert cluster.get(row, R.ADOPTIONS) == 0
    assert cluster.segment.pool.num_available() == cluster.spec.num_blocks


def test_end_ids_that_the_model_does_not_have_ban_nothing() -> None:
    """Of a generation_config, or of the request: there is no such logit."""
    cluster = FakeCluster(eos_token_ids=(VOCABULARY, 1 << 31))
    row = cluster.submit(prompt_of(20), 12, min_tokens=8, stop_ids=(VOCABULARY + 5,))
    cluster.run()
    assert len(cluster.take(row)) == 12


def test_what_a_row_raises_is_in_the_log_with_its_id(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = FakeCluster()
    row = cluster.submit(prompt_of(20), 12, temperature=0.5)
    monkeypatch.setattr(RowSampler, "sample", lambda *_: [][0])
    with caplog.at_level(logging.ERROR):
        cluster.run()
    [record] = [one for one in caplog.records if one.exc_info]
    assert f"{cluster.rows.request_id(row)} row {row}: failed" in record.getMessage()
    assert cluster.rows.error_text(row) == "decode daemon, token 20: IndexError: list index out of range"


def test_what_a_rows_log_probabilities_raise_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster()
    told = cluster.submit(prompt_of(20), 12, num_logprobs=1)
    other = cluster.submit(prompt_of(20, 1), 12)

    def fail(*_: Any) -> None:
        raise OverflowError("float too large to pack with f format")

    monkeypatch.setattr(decode_module, "token_logprobs", fail)
    cluster.run()
    assert cluster.rows.state(told) is RowState.FAILED
    assert len(cluster.take(other)) == 12


@pytest.mark.parametrize("kind", ["disaggregated", "colocated"])
@pytest.mark.parametrize("others", [0, 3])
def test_a_row_that_kills_whoever_samples_it_fails_after_three_deaths_alone(
    monkeypatch: pytest.MonkeyPatch, kind: str, others: int
) -> None:
    """Not an exception but the process's end, each time after commit_kv: the innocent pay for none of it."""
    cluster = FakeCluster(colocated=kind == "colocated")
    rows = [cluster.submit(prompt_of(20, seed), 30) for seed in range(1, others + 1)]
    culprit = cluster.submit(prompt_of(20), 30, min_tokens=13)
    sample, deaths = RowSampler.sample, 0

    def die(self: RowSampler, logits: Any, position: int) -> int:
        if self.params.min_tokens == 13 and position == 25:
            raise KeyboardInterrupt
        return sample(self, logits, position)

    monkeypatch.setattr(RowSampler, "sample", die)
    for _ in range(300):
        for engine in cluster.engines:
            try:
                engine.step()
            except KeyboardInterrupt:
                deaths += 1
                cluster.kill(engine)
        assert all(cluster.get(row, R.DEATHS_ALONE) == 0 for row in rows)
    assert cluster.rows.state(culprit) is RowState.FAILED
    assert cluster.rows.error_text(culprit) == "killed"
    assert deaths <= 5
    del cluster.asked[culprit]
    for row in rows:
        assert cluster.rows.state(row) is RowState.FINISHED
        cluster.take(row)

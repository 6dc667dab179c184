"""The sampler: pure, seeded by a counter, and of the right distribution."""

from __future__ import annotations

import math

import pytest
import torch

from pdctl.core.sampler import RowSampler, largest, sample, token_logprobs, uniform
from pdctl.transport.rows import RowParams

LOGITS = torch.tensor([1.0, 3.0, 2.0, 3.0, -1.0, 0.5])
VOCAB = 5000
PROMPT = [5, 17, 5, 4999, 300]
OUTPUT = [17, 8, 8, 8, 1234, 0]


def random_logits(seed: int, scale: float = 4.0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale


def reference(logits: torch.Tensor, params: RowParams, position: int) -> int:
    """Temperature, min_p, top_k, top_p and the draw, by definition: everything sorted, one token after another."""
    values = logits.tolist()
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    weights = {token: math.exp((values[token] - values[order[0]]) / params.temperature) for token in order}
    kept = [token for token in order if weights[token] >= params.min_p][: params.top_k or None]
    total, running, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        nucleus.append(token)
        running += weights[token]
        if params.top_p < 1 and running >= params.top_p * total:
            break
    left = uniform(params.seed, position) * running
    for token in nucleus:
        left -= weights[token]
        if left < 0:
            return token
    raise AssertionError("a draw below 1 ends before the last")


def sampler_of(params: RowParams, tokens: list[int], num_prompt: int, end_ids: tuple[int, ...] = ()) -> RowSampler:
    return RowSampler(
        params,
        num_prompt=num_prompt,
        end_ids=frozenset(end_ids),
        read_tokens=lambda start, stop: tokens[start:stop],
    )


def shares(params: RowParams, number: int = 4000) -> list[float]:
    counts = [0] * len(LOGITS)
    for position in range(number):
        counts[sample(LOGITS, params, position)] += 1
    return [count / number for count in counts]


def test_greedy_takes_the_largest_and_ties_go_to_the_lowest_id() -> None:
    assert sample(LOGITS, RowParams(), 9) == 1
    assert sample(LOGITS, RowParams(temperature=0.7, top_k=1, seed=5), 9) == 1
    assert sample(torch.zeros(50_000), RowParams(), 0) == 0


def test_the_draw_is_a_function_of_seed_and_position() -> None:
    draws = {uniform(seed, position) for seed in (0, 1, (1 << 64) - 1) for position in range(100)}
    assert len(draws) == 300
    assert all(0 <= draw < 1 for draw in draws)
    assert uniform(7, 3) == uniform(7, 3)
    # Pinned: another value here would change every seeded answer that people kept.
    assert uniform(7, 3) == 0.1846062188940475


def test_shares_are_the_softmax_of_the_scaled_logits() -> None:
    expected = torch.softmax(LOGITS.double() / 1.5, 0).tolist()
    found = shares(RowParams(temperature=1.5, seed=11))
    for one, other in zip(found, expected, strict=True):
        # Five standard deviations of a share over 4,000 draws.
        assert abs(one - other) < 5 * math.sqrt(other * (1 - other) / 4000)


def test_top_k_keeps_k_and_cuts_ties_at_the_higher_id() -> None:
    found = shares(RowParams(temperature=5.0, top_k=1, seed=2))
    assert found[1] == 1.0
    found = shares(RowParams(temperature=5.0, top_k=2, seed=2))
    assert [index for index, share in enumerate(found) if share] == [1, 3]


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    probabilities = torch.softmax(LOGITS.double(), 0)
    two = float(probabilities[1] + probabilities[3])
    assert {
        index for index, share in enumerate(shares(RowParams(temperature=1, top_p=two - 1e-9, seed=1))) if share
    } == {
        1,
        3,
    }
    three = {index for index, share in enumerate(shares(RowParams(temperature=1, top_p=two + 1e-3, seed=1))) if share}
    assert three == {1, 2, 3}
    assert shares(RowParams(temperature=1, top_p=1e-9, seed=1))[1] == 1.0


def test_other_rows_do_not_matter() -> None:
    batch = torch.randn(8, 1000, generator=torch.Generator().manual_seed(1))
    params = RowParams(temperature=0.8, top_p=0.9, seed=3)
    alone = [sample(batch[row].clone(), params, row) for row in range(8)]
    assert [sample(batch[row], params, row) for row in range(8)] == alone


@pytest.mark.parametrize("params", [RowParams(), RowParams(temperature=1.0)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_an_error(params: RowParams, bad: float) -> None:
    with pytest.raises(FloatingPointError):
        sample(torch.full((10,), bad), params, 0)


# --- against definitions and transformers ------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.3, 2.0, 12.0])
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_p": 0.3},
        {"top_p": 0.97},
        {"top_k": 7},
        {"top_k": 900},
        {"top_k": VOCAB + 5},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 40, "top_p": 0.8},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.2},
    ],
)
def test_draws_are_those_of_the_definition(filters: dict[str, float], scale: float) -> None:
    """Flat and steep logits: with few candidates, with more than are tried first, and with all."""
    for seed in range(12):
        logits = random_logits(seed, scale)
        # Every logit three times: ties are everywhere, at the edges of all filters too.
        logits[VOCAB // 3 : 2 * (VOCAB // 3)] = logits[: VOCAB // 3]
        logits[2 * (VOCAB // 3) : 3 * (VOCAB // 3)] = logits[: VOCAB // 3]
        params = RowParams(temperature=0.6 + seed / 8, seed=seed, **filters)  # type: ignore[arg-type]
        assert sample(logits, params, seed) == reference(logits, params, seed)


def test_filters_are_transformers_own() -> None:
    """The token drawn is where transformers' probabilities, likeliest first, add up to the draw."""
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    tokens = PROMPT + OUTPUT
    for seed in range(100):
        logits = random_logits(seed, 2.0)
        params = RowParams(
            temperature=0.5 + seed / 50, seed=seed, min_p=0.02, top_k=60, top_p=0.9, repetition_penalty=1.4
        )
        theirs = LogitsProcessorList(
            [
                RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
                TemperatureLogitsWarper(params.temperature),
                MinPLogitsWarper(params.min_p),
                TopKLogitsWarper(params.top_k),
                TopPLogitsWarper(params.top_p),
            ]
        )(torch.tensor([tokens]), logits[None])[0]
        shares, order = torch.softmax(theirs.double(), 0).sort(descending=True, stable=True)
        token = sampler_of(params, tokens, len(PROMPT)).sample(logits, len(tokens))
        place = int((order == token).nonzero())
        before, drawn = float(shares[:place].sum()), uniform(seed, len(tokens))
        assert shares[place] > 0
        assert before - 1e-6 <= drawn <= before + float(shares[place]) + 1e-6


def test_what_changes_logits_is_transformers_own() -> None:
    from transformers import (
        LogitsProcessorList,
        MinNewTokensLengthLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
    )

    tokens, end_ids, bias = PROMPT + OUTPUT, (2, 17), ((5, 3.5), (17, 100.0), (40, -100.0))
    params = RowParams(repetition_penalty=0.7, min_tokens=len(OUTPUT) + 1, logit_bias=bias)
    logits = random_logits(3)
    theirs = LogitsProcessorList(
        [
            MinNewTokensLengthLogitsProcessor(len(PROMPT), params.min_tokens, list(end_ids)),
            SequenceBiasLogitsProcessor({(token,): value for token, value in bias}),
            RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
        ]
    )(torch.tensor([tokens]), logits[None].clone())[0]
    sampler = sampler_of(params, tokens, len(PROMPT), end_ids)
    assert torch.equal(sampler._adjust(logits, len(tokens)), theirs)
    assert theirs[17] == -math.inf
    # From min_tokens on, all is allowed.
    assert sampler._adjust(logits, len(tokens) + 1)[2] == logits[2]


def test_presence_and_frequency_count_the_output_alone() -> None:
    logits, tokens = random_logits(4), PROMPT + OUTPUT
    before = logits.clone()
    params = RowParams(presence_penalty=0.5, frequency_penalty=-0.25)
    found = sampler_of(params, tokens, len(PROMPT))._adjust(logits, len(tokens))
    expected = logits.clone()
    for token in set(OUTPUT):
        expected[token] -= -0.25 * OUTPUT.count(token) + 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert found[5] == logits[5], "only in the prompt"
    assert torch.equal(logits, before), "the model's own logits stay for log-probabilities"


def test_counts_made_step_by_step_are_those_made_at_once() -> None:
    """A row's next owner counts again what the first one counted as it went."""
    params = RowParams(repetition_penalty=1.7, presence_penalty=0.3, frequency_penalty=0.9)
    tokens = PROMPT + OUTPUT * 3
    first = sampler_of(params, tokens, len(PROMPT))
    for position in range(len(PROMPT), len(tokens) + 1):
        logits = random_logits(position)
        next_owner = sampler_of(params, tokens, len(PROMPT))
        assert torch.equal(first._adjust(logits, position), next_owner._adjust(logits, position))


def test_the_number_of_threads_does_not_matter() -> None:
    logits = random_logits(1, 1.0, vocab=150_001)
    params = RowParams(temperature=1.0, top_p=0.95, seed=1, repetition_penalty=1.1, frequency_penalty=0.3)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        sampler = sampler_of(params, PROMPT + OUTPUT, len(PROMPT))
        adjusted = sampler._adjust(logits, len(PROMPT + OUTPUT))
        draws = [sample(adjusted, params, position) for position in range(20)]
        found.append((adjusted.tolist(), draws, token_logprobs(logits, 7, 20)))
    assert found[0] == found[1]


def test_a_plain_row_pays_for_nothing() -> None:
    def read(start: int, stop: int) -> list[int]:
        raise AssertionError("no token is read")

    logits = random_logits(5)
    sampler = RowSampler(RowParams(), num_prompt=3, end_ids=frozenset({2}), read_tokens=read)
    assert sampler._adjust(logits, 3) is logits


@pytest.mark.parametrize("number", [1, 5, 128, 700, VOCAB])
def test_the_largest_are_what_a_stable_sort_begins_with(number: int) -> None:
    logits = (random_logits(number) * 2).round()  # a few dozen values
    values, order = torch.sort(logits, descending=True, stable=True)
    found, ids = largest(logits, number)
    assert torch.equal(found, values[:number])
    assert torch.equal(ids, order[:number])


def test_when_every_token_is_banned_it_is_said() -> None:
    sampler = sampler_of(RowParams(min_tokens=1), [0], 1, tuple(range(len(LOGITS))))
    with pytest.raises(FloatingPointError, match="no token is left"):
        sampler.sample(LOGITS, 1)


@pytest.mark.parametrize("number", [0, 5, 20])
def test_log_probabilities_are_the_log_softmax(number: int) -> None:
    logits = random_logits(6).round()
    logits[4321] = 30.0
    found = token_logprobs(logits, 77, number)
    expected = torch.log_softmax(logits, 0)
    assert found.token == 77
    assert found.logprob == pytest.approx(float(expected[77]), abs=1e-4)
    order = torch.sort(expected, descending=True, stable=True).indices.tolist()
    assert [token for token, _ in found.top] == order[:number]
    assert [value for _, value in found.top] == pytest.approx(expected[order[:number]].tolist(), abs=1e-4)
    if number:
        assert found.top[0][0] == 4321

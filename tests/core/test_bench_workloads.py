"""Workloads: the same seed makes the same requests, arrivals keep the rate, files are read or refused by line."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from pdctl.core.bench.workloads import ARRIVALS, PROMPT, STREAM, Arrivals, Workload, make
from pdctl.transport.errors import UsageError

VOCAB = 97


def made(kind: str = "random", seed: int = 1, **more: Any) -> Workload:
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "num_prompts": 6,
        "input_len": 9,
        "output_len": 4,
        "arrivals": Arrivals(),
        "max_concurrency": None,
        **more,
    }
    return make(kind, seed=seed, **values)


@pytest.mark.parametrize("kind", ["random", "shared-prefix", "multi-turn", "mixed"])
@pytest.mark.parametrize("arrivals", ARRIVALS)
def test_the_same_seed_makes_the_same_workload(kind: str, arrivals: str) -> None:
    more = {"prefix_len": 5, "turns": 3, "arrivals": Arrivals(kind=arrivals, rate_per_s=7)}
    assert made(kind, **more) == made(kind, **more)
    assert made(kind, seed=2, **more).stages != made(kind, **more).stages


@pytest.mark.parametrize("kind", ["random", "shared-prefix", "multi-turn", "mixed"])
def test_every_request_has_its_own_place_and_known_ids(kind: str) -> None:
    load = made(kind, turns=3, prefix_len=4)
    assert sorted(one.index for one in load.requests) == list(range(len(load.requests)))
    assert all(0 <= token < VOCAB for one in load.requests for token in one.token_ids or ())


def test_no_prompt_of_one_kind_begins_as_one_of_another() -> None:
    """What one workload leaves in a prefix cache is of no use to another of the same seed."""
    kinds = ["random", "shared-prefix", "multi-turn", "mixed"]
    begins = [
        {one.token_ids[:8] for one in made(kind, vocab_size=50_000, prefix_len=9).requests if one.token_ids}
        for kind in kinds
    ]
    for one, other in itertools.combinations(begins, 2):
        assert not one & other


def test_a_shared_prefix_is_shared_by_every_nth() -> None:
    load = made("shared-prefix", prefix_len=20, num_prefixes=2)
    fronts = [one.token_ids[:20] for one in load.requests if one.token_ids]
    assert fronts[0] == fronts[2] == fronts[4] != fronts[1]
    assert all(len(one.token_ids or ()) == 29 for one in load.requests)
    assert len({one.token_ids for one in load.requests}) == 6


def test_turns_follow_each_other() -> None:
    load = made("multi-turn", turns=3)
    (stage,) = load.stages
    assert [len(talk.requests) for talk in stage.conversations] == [3] * 6
    assert load.needs_token_ids
    assert not made().needs_token_ids


def test_mixed_is_streams_and_then_prompts() -> None:
    load = made("mixed", num_streams=3, stream_input_len=2)
    streams, prompts = ([one for one in load.requests if one.group == group] for group in (STREAM, PROMPT))
    assert [len(one.token_ids or ()) for one in streams] == [2] * 3
    assert [(len(one.token_ids or ()), one.max_tokens) for one in prompts] == [(9, 1)] * 6
    assert len(load.stages) == 2


@pytest.mark.parametrize("kind", ARRIVALS)
def test_arrivals_keep_the_rate(kind: str) -> None:
    offsets = Arrivals(kind=kind, rate_per_s=20, burst_size=5).offsets_s(100, random.Random(1))
    assert offsets == sorted(offsets)
    assert offsets[0] >= 0
    assert offsets[-1] == pytest.approx(5, abs=0.26)


def test_poisson_gaps_spread_as_an_exponential() -> None:
    offsets = Arrivals(rate_per_s=10).offsets_s(4000, random.Random(2))
    gaps = [later - sooner for sooner, later in itertools.pairwise(offsets)]
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(0.1, rel=0.1)
    assert offsets[-1] == pytest.approx(400)


def test_bursts_come_together() -> None:
    offsets = Arrivals(kind="burst", rate_per_s=4, burst_size=2).offsets_s(5, random.Random(1))
    assert offsets == [0, 0, 0.5, 0.5, 1.0]


def test_without_a_rate_all_come_at_once() -> None:
    assert Arrivals().offsets_s(3, random.Random(1)) == [0, 0, 0]
    assert Arrivals(rate_per_s=5).offsets_s(0, random.Random(1)) == []


@pytest.mark.parametrize("more", [{"kind": "x"}, {"rate_per_s": 0}, {"rate_per_s": -1}, {"rate_per_s": math.nan}])
def test_arrivals_that_cannot_be(more: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Arrivals(**more)


def test_jsonl(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    lines = [
        {"prompt": "text"},
        {"prompt": [1, 2], "max_tokens": 7},
        {"messages": [{"role": "user", "content": "x"}]},
    ]
    file.write_text("\n\n".join(json.dumps(line) for line in lines))
    load = made("jsonl", dataset=file)
    text, ids, chat = load.requests
    assert (text.text, text.max_tokens) == ("text", 4)
    assert (ids.token_ids, ids.max_tokens) == ((1, 2), 7)
    assert chat.messages == ({"role": "user", "content": "x"},)
    assert load.configuration["num_prompts"] == 3


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "{}", '{"prompt": ""}', '{"prompt": []}', '{"prompt": [1.5]}', '{"prompt": "a", "max_tokens": 0}'],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"prompt": "good"}}\n{line}\n')
    with pytest.raises(UsageError, match="line 2"):
        made("jsonl", dataset=file)


def test_sharegpt(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    talk = [{"from": "human", "value": "question"}, {"from": "gpt", "value": "answer"}]
    file.write_text(json.dumps([{"conversations": talk}, {"conversations": talk[1:]}]))
    assert [one.text for one in made("sharegpt", dataset=file).requests] == ["question"]


@pytest.mark.parametrize("content", ["", "{", "[1]", '[{"conversations": 1}]', "[]", '{"a": 1}'])
@pytest.mark.parametrize("kind", ["jsonl", "sharegpt"])
def test_a_file_that_is_none_of_these(tmp_path: Path, content: str, kind: str) -> None:
    file = tmp_path / "f"
    file.write_text(content)
    with pytest.raises(UsageError, match=str(file)):
        made(kind, dataset=file)


@pytest.mark.parametrize("kind", ["jsonl", "sharegpt"])
def test_a_file_that_is_missing(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UsageError, match="--dataset"):
        made(kind)
    with pytest.raises(UsageError, match="nowhere"):
        made(kind, dataset=tmp_path / "nowhere")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="bytes"):
        made(kind, dataset=tmp_path / "bytes")


def test_fewer_of_a_dataset(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"p{index}"}) for index in range(20)))
    one, again = (made("jsonl", dataset=file, num_prompts=5) for _ in range(2))
    assert one == again
    assert len({request.text for request in one.requests}) == 5


def test_an_unknown_workload() -> None:
    with pytest.raises(UsageError, match="expected one of random"):
        made("other")

"""`pdctl up --colocated`: one process for prefill and decode, with every promise but the one that needs two."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pdctl.transport.layout import H, P
from pdctl.transport.recovery import verify
from pdctl.transport.rows import RowState
from pdctl.transport.segment import ParticipantState, Role, take_snapshot

pytestmark = pytest.mark.e2e

WATCHDOG_S = 120
LENGTHS = [1, 16, 17, 33, 333]
NUM_TOKENS = 200
# No id lies further below the largest logit: then it is a tie, which roundings decide.
TIE = 1e-3
DAEMONS = (Role.PREFILL, Role.DECODE)


@pytest.fixture(scope="module")
def cluster(start_shared: Any, tiny_dir: Path) -> Any:
    return start_shared(
        "--colocated", "--model", str(tiny_dir), "--dtype", "float32", "--kv-blocks", "512", "--max-context", "2048",
        "--chunk-tokens", "32", "--threads", "2",
    )  # fmt: skip


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    source = random.Random(5)
    return [[source.randrange(3, 259) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(cluster: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What each prompt says alone."""
    return [cluster.ids(prompt, NUM_TOKENS) for prompt in prompts]


def ask_all(cluster: Any, pool: ThreadPoolExecutor, prompts: list[list[int]]) -> list[Any]:
    return [pool.submit(cluster.ids, prompt, NUM_TOKENS) for prompt in prompts]


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + WATCHDOG_S
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.005)
    raise AssertionError(f"{what}: not in {WATCHDOG_S} s")


def pids(cluster: Any) -> set[int]:
    return {pid for role in DAEMONS for _, pid in cluster.slots(role)}


def is_ready(cluster: Any) -> bool:
    segment = take_snapshot(cluster.state.segment_name).segment
    slots = [slot for role in DAEMONS for slot in segment.slots(role)]
    return len(slots) == 2 and all(segment.participant_word(at, P.STATE) == ParticipantState.READY for at in slots)


def counter(cluster: Any, name: H) -> int:
    return int(take_snapshot(cluster.state.segment_name).segment.words[name])


def test_answers_are_transformers_own(tiny_dir: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32).eval()
    for prompt, answer in zip(prompts, expected, strict=True):
        assert len(answer) == NUM_TOKENS
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        assert float((logits.amax(1) - chosen).max()) < TIE


def test_alone_is_all_at_once_is_cached(cluster: Any, prompts: list[list[int]], expected: list[list[int]]) -> None:
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert [one.result(WATCHDOG_S) for one in ask_all(cluster, pool, prompts)] == expected
    again = cluster.complete(prompts[-1], 4)
    assert again["choices"][0]["token_ids"] == expected[-1][:4]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == (LENGTHS[-1] - 1) // 16 * 16
    assert again["timings"]["local_tokens"] == 0
    assert {again["timings"]["prefill_slot"], again["timings"]["decode_slot"]} == {
        slot for role in DAEMONS for slot, _ in cluster.slots(role)
    }


def test_it_says_what_it_is(cluster: Any) -> None:
    assert len(pids(cluster)) == 1
    status = cluster.cli("status")
    assert status.code == 0
    assert "colocated: prefill-0 and decode-0 are one process" in status.out
    found = json.loads(cluster.cli("status", "--json").out)
    assert found["colocated"] is True
    daemons = [one for one in found["processes"] if one["role"] in ("prefill", "decode")]
    assert [(one["name"], one["state"], one["num_threads"]) for one in daemons] == [
        ("prefill-0", "ready", 2),
        ("decode-0", "ready", 2),
    ]
    assert {one["pid"] for one in daemons} == pids(cluster)
    assert (cluster.state_dir / "logs" / cluster.name / "colocated-0.log").exists()


@pytest.mark.parametrize(
    "command",
    [["scale", "decode=2"], ["scale", "decode=1"], ["drain", "decode-0"], ["drain", "--force", "colocated-0"]],
)
def test_what_needs_two_processes_is_refused(cluster: Any, command: list[str]) -> None:
    before = pids(cluster)
    result = cluster.cli(*command)
    assert result.code == 2
    assert "this cluster is colocated" in result.err
    assert pids(cluster) == before


def test_a_kill_under_load_costs_no_token(cluster: Any, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Both halves have rows in hand; both go on in the successor where they were, and it was one death."""
    deaths, adoptions = counter(cluster, H.DEATHS), counter(cluster, H.ADOPTIONS)
    source = random.Random(6)
    long = [source.randrange(3, 259) for _ in range(1500)]
    with ThreadPoolExecutor(len(prompts) + 1) as pool:
        answers = ask_all(cluster, pool, prompts)
        last = pool.submit(cluster.complete, long, 4)

        def both_busy() -> bool:
            rows = take_snapshot(cluster.state.segment_name).segment.rows
            return bool(rows.in_state(RowState.PREFILLING) and rows.in_state(RowState.DECODING))

        wait_for(both_busy, "work in both halves")
        killed = cluster.kill(Role.DECODE)
        assert [one.result(WATCHDOG_S) for one in answers] == expected
        answer = last.result(WATCHDOG_S)
    assert answer["timings"]["prefill_tokens"] == len(long) - 1
    assert killed not in pids(cluster)
    assert counter(cluster, H.DEATHS) == deaths + 1
    assert counter(cluster, H.ADOPTIONS) > adoptions + 1
    assert verify(take_snapshot(cluster.state.segment_name).segment) == []
    assert cluster.ids(long, 4) == answer["choices"][0]["token_ids"]


def test_a_restart_under_load_costs_no_token(
    cluster: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    before, deaths = pids(cluster), counter(cluster, H.DEATHS)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = ask_all(cluster, pool, prompts)
        done = cluster.cli("restart", "--json")
        assert json.loads(done.out)["restarted"] == ["colocated-0"], done.err
        assert [one.result(WATCHDOG_S) for one in answers] == expected
    assert len(pids(cluster)) == 1
    assert pids(cluster).isdisjoint(before)
    assert counter(cluster, H.DEATHS) == deaths
    assert is_ready(cluster)

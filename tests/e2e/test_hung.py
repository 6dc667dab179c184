"""Processes that hang: told from slow ones, killed, and nobody's answer is another for it (S35)."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pdctl.core.client import Client
from pdctl.core.status import ClusterStatus, cluster_status, describe
from pdctl.transport.errors import PdctlError
from pdctl.transport.layout import H, P, R
from pdctl.transport.recovery import verify
from pdctl.transport.rows import RowState
from pdctl.transport.segment import Role, Segment, open_to_look, take_snapshot

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def cluster(start_shared: Any, tiny_dir: Path) -> Any:
    return start_shared(
        "--model", str(tiny_dir), "--dtype", "float32", "--kv-blocks", "512", "--max-context", "2048",
        "--chunk-tokens", "16", "--local-prefill-tokens", "0", "--decode", "2", "--threads", "1",
    )  # fmt: skip


def tokens_of(length: int, seed: int) -> list[int]:
    source = random.Random(1000 * seed + length)
    return [source.randrange(3, 259) for _ in range(length)]


def status_of(cluster: Any) -> ClusterStatus:
    return cluster_status(cluster.state_dir, cluster.name)


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 240) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.005)
    raise AssertionError(f"{what}: not in {timeout_s} s")


def owner_of(segment: Segment, state: RowState) -> int | None:
    """The PID of a daemon that owns a row in this state now."""
    rows = segment.rows.in_state(state)
    return segment.participant_word(segment.rows.get(rows[0], R.OWNER) - 1, P.PID) if rows else None


def state_of(cluster: Any, pid: int) -> str | None:
    return next((one.state for one in status_of(cluster).processes if one.pid == pid), None)


@pytest.mark.parametrize("state", [RowState.DECODING, RowState.PREFILLING])
def test_a_stopped_daemons_rows_go_on_elsewhere(cluster: Any, state: RowState) -> None:
    length = 1500 if state is RowState.PREFILLING else 20
    prompts = [tokens_of(length, seed) for seed in range(3)]
    alone = [cluster.ids(prompt, 200, temperature=0.8, seed=5) for prompt in prompts]
    fresh = [tokens_of(length, seed) for seed in range(10, 13)]
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(cluster.ids, prompt, 200, temperature=0.8, seed=5) for prompt in prompts]
        others = [pool.submit(cluster.complete, prompt, 40) for prompt in fresh]
        segment = open_to_look(cluster.state.segment_name)
        pid = wait_for(lambda: owner_of(segment, state), f"a row in {state.name}")
        segment.close()
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: state_of(cluster, pid) in ("stopped", "dead", None), "being named")
        assert [one.result(240) for one in waiting] == alone
        assert all(len(one.result(240)["choices"][0]["token_ids"]) == 40 for one in others)
    wait_for(
        lambda: pid not in [pid for role in (Role.PREFILL, Role.DECODE) for _, pid in cluster.slots(role)], "end"
    )
    wait_for(lambda: cluster.get("/health/ready") == 200, "its successor")
    assert "killed: stopped for" in cluster.cli("logs", "supervisor").out
    assert verify(take_snapshot(cluster.state.segment_name).segment) == []


def test_a_stopped_daemon_with_nothing_to_do_is_replaced(cluster: Any) -> None:
    _, pid = cluster.slots(Role.DECODE)[0]
    os.kill(pid, signal.SIGSTOP)
    prompts = [tokens_of(30, seed) for seed in range(20, 24)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: cluster.complete(prompt, 20), prompts))
    assert all(len(answer["choices"][0]["token_ids"]) == 20 for answer in answers)
    wait_for(lambda: pid not in [other for _, other in cluster.slots(Role.DECODE)], "its end")
    wait_for(lambda: len(cluster.slots(Role.DECODE)) == 2, "its successor")


def test_a_stopped_holder_of_the_lock_is_killed(cluster: Any) -> None:
    """Its word in the header says that it is inside a section; nobody else can be, so nobody else writes it."""
    wait_for(lambda: cluster.get("/health/ready") == 200, "readiness")
    pid = cluster.pid(Role.ROUTER)
    os.kill(pid, signal.SIGSTOP)
    segment = Segment.open(cluster.state.segment_name)
    try:
        deadline = time.monotonic() + 240
        while pid in [other for _, other in cluster.slots(Role.ROUTER)]:
            segment.words[H.LOCK_PID] = pid  # daemons' sections clear it
            assert time.monotonic() < deadline, "the router was not killed"
            time.sleep(0.01)
    finally:
        segment.close()
    wait_for(lambda: cluster.get("/health/ready") == 200, "another router")
    assert cluster.ids(tokens_of(9, 1), 3)
    assert "inside a section" in cluster.cli("logs", "supervisor").out


def test_where_failures_are_not_resumed_the_client_hears_the_cause(start: Any, tiny_dir: Path) -> None:
    """S44: an error event and the end of the stream, not silence and not a finish_reason. S61: all logs have it."""
    one = start(
        "--model", str(tiny_dir), "--dtype", "float32", "--kv-blocks", "256", "--max-context", "2048",
        "--on-failure", "fail",
    )  # fmt: skip
    body = {"prompt": tokens_of(100, 1), "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        generate = ("generate", "--raw", "--ignore-eos", "--max-tokens", "1500", "hello")
        printed = pool.submit(one.cli, *generate)
        events = iter(Client(one.state.url).stream("/v1/completions", body))
        for _ in range(5):
            _, event = next(events)
            assert event["choices"][0]["finish_reason"] is None
        wait_for(
            lambda: len(take_snapshot(one.state.segment_name).segment.rows.in_state(RowState.DECODING)) == 2, "both"
        )
        pid = one.kill(Role.DECODE)
        with pytest.raises(PdctlError, match=rf"decode-0 \(pid {pid}\) ended: signal SIGKILL") as error:
            list(events)
        result = printed.result(240)
    assert "pdctl logs decode-0" in str(error.value)
    lines = one.cli("logs", "--grep", event["id"]).out.splitlines()
    assert {line.split()[0] for line in lines} == {"router", "prefill-0", "decode-0", "supervisor"}
    causes = [line for line in lines if f"decode-0 (pid {pid}) ended: signal SIGKILL" in line]
    assert {line.split()[0] for line in causes} == {"router", "supervisor"}
    assert result.code != 0 and f"decode-0 (pid {pid}) ended" in result.err
    wait_for(lambda: one.get("/health/ready") == 200, "its successor")
    assert one.ids(tokens_of(9, 1), 3)
    _a_killed_prefill_daemon_is_named(one)


def _a_killed_prefill_daemon_is_named(one: Any) -> None:
    """S22, S61: before the first token, and not streamed; its id leads to the cause in all logs."""
    segment = open_to_look(one.state.segment_name)
    with ThreadPoolExecutor(1) as pool:
        for seed in range(100):
            # Another one each time: what was computed is in the cache.
            body = {"prompt": tokens_of(1900, 100 + seed), "max_tokens": 3}
            answer = pool.submit(one.post, "/v1/completions", body)
            wait_for(lambda answer=answer: owner_of(segment, RowState.PREFILLING) or answer.done(), "prefill")
            pid = one.kill(Role.PREFILL)
            status, told = answer.result(240)
            wait_for(lambda: one.get("/health/ready") == 200, "its successor")
            if status != 200:
                break
    segment.close()
    assert (status, told["error"]["code"]) == (500, "engine_failed")
    cause = f"prefill-0 (pid {pid}) ended: signal SIGKILL"
    assert cause in told["error"]["message"]
    with_cause = one.cli("logs", "--grep", cause).out.splitlines()
    ids = {word for line in with_cause for word in line.split() if word.startswith("cmpl-")}
    assert len(ids) == 1
    lines = one.cli("logs", "--grep", ids.pop()).out.splitlines()
    assert {line.split()[0] for line in lines} == {"router", "prefill-0", "supervisor"}
    assert {line.split()[0] for line in lines if cause in line} == {"router", "supervisor"}
    assert verify(take_snapshot(one.state.segment_name).segment) == []
    assert len(one.ids(tokens_of(100, 1), 3)) == 3


def test_what_the_dead_held_is_never_shown_as_healthy_use(cluster: Any) -> None:
    """S29: at any moment a row's owner lives, is called dead, or has been replaced."""
    wait_for(lambda: cluster.get("/health/ready") == 200, "readiness")
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(cluster.ids, tokens_of(20, seed), 400) for seed in range(30, 34)]
        segment = open_to_look(cluster.state.segment_name)
        pid = wait_for(lambda: owner_of(segment, RowState.DECODING), "a row under way")
        segment.close()
        os.kill(pid, signal.SIGKILL)
        while not all(one.done() for one in waiting):
            name, gone = cluster.state.segment_name, not Path(f"/proc/{pid}").exists()
            status = describe(take_snapshot(name), name.path)
            for row in status.rows:
                if gone and row.owner is not None and row.owner.alive:
                    assert row.owner.pid != pid
    assert all(len(one.result()) == 400 for one in waiting)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_both_daemons_of_a_role_killed_one_after_the_other(cluster: Any, role: Role) -> None:
    """S41, S42: the first death costs nothing; whoever comes back serves, and nobody else was restarted."""
    scaled = cluster.cli("scale", "prefill=2")
    assert scaled.code == 0, scaled.err
    other_role = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    others = cluster.slots(other_role)
    for _ in range(2):
        killed = cluster.kill(role)
        with ThreadPoolExecutor(5) as pool:
            answers = list(pool.map(lambda seed: cluster.ids(tokens_of(60, 40 + seed), 4), range(5)))
        assert all(len(answer) == 4 for answer in answers)
        wait_for(lambda: cluster.cli("status").code == 0, "health")
        assert killed not in [pid for _, pid in cluster.slots(role)]
    assert cluster.slots(other_role) == others
    assert verify(take_snapshot(cluster.state.segment_name).segment) == []


def test_a_forward_tells_its_progress_layer_by_layer(cluster: Any) -> None:
    """What the watchdog looks at: a chunk may be as long as the flags allow, since no tick of it is."""
    wait_for(lambda: cluster.get("/health/ready") == 200, "readiness")

    def counted() -> tuple[int, int]:
        segment = take_snapshot(cluster.state.segment_name).segment
        slots = [slot for role in (Role.PREFILL, Role.DECODE) for slot in segment.slots(role)]
        words = [[segment.participant_word(slot, word) for slot in slots] for word in (P.STEPS, P.TICKS)]
        return sum(words[0]), sum(words[1])

    steps, ticks = counted()
    assert len(cluster.ids(tokens_of(400, 77), 20)) == 20
    steps_now, ticks_now = counted()
    assert ticks_now - ticks >= 3 * (steps_now - steps) > 3 * 20  # two layers, and the slice or its logits

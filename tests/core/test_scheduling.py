"""Who is computed when, who waits for whom, and who is rung: engines over a fake model, stepped by hand."""

from __future__ import annotations

import time
from typing import Any

import pytest
from fake_model import BLOCK, FakeCluster

from pdctl.transport.layout import H, P, R
from pdctl.transport.recovery import reap
from pdctl.transport.rows import Actor, RowState
from pdctl.transport.segment import ParticipantState, Role

CHUNK = 32  # of FakeCluster


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(index * (seed + 3) + index // 5 + seed) % 17 for index in range(length)]


def prefilled(cluster: FakeCluster) -> int:
    return sum(engine._me.get(P.PREFILL_TOKENS) for engine in cluster.prefill)


# --- sharing a chunk ---------------------------------------------------------------------------------------


def test_short_prompts_share_one_forward() -> None:
    cluster = FakeCluster()
    for seed in range(3):
        cluster.submit(prompt_of(9, seed))
    assert cluster.prefill[0].step()
    assert cluster.model.forwards == [[(0, 8), (0, 8), (0, 8)]]
    cluster.run()


def test_a_long_prompt_gets_what_a_short_one_leaves_of_the_chunk() -> None:
    cluster = FakeCluster()
    cluster.submit(prompt_of(200, 1))
    prefill = cluster.prefill[0]
    prefill.step()
    cluster.submit(prompt_of(11, 2))
    prefill.step()
    prefill.step()
    assert cluster.model.forwards == [[(0, 32)], [(0, 10), (32, 22)], [(54, 32)]]
    cluster.run()


def test_the_shorter_of_two_goes_first_and_the_other_stays_free_for_a_peer() -> None:
    cluster = FakeCluster(prefill=2)
    long = cluster.submit(prompt_of(200, 1))
    short = cluster.submit(prompt_of(100, 2))
    first, second = cluster.prefill
    first.step()
    assert cluster.rows.state(long) is RowState.QUEUED
    assert cluster.rows.state(short) is RowState.PREFILLING
    assert cluster.rung[-1] == second._me.slot
    second.step()
    assert cluster.rows.state(long) is RowState.PREFILLING
    assert cluster.get(long, R.PREFILL_SLOT) == second._me.slot + 1
    cluster.run()


def test_a_row_that_is_overtaken_goes_back_with_what_is_computed() -> None:
    cluster = FakeCluster(prefill=2)
    long = cluster.submit(prompt_of(200, 1))
    first, second = cluster.prefill
    first.step()
    short = cluster.submit(prompt_of(CHUNK + 1, 2))
    first.step()
    assert cluster.rows.state(short) is RowState.READY
    assert (cluster.rows.state(long), cluster.get(long, R.KV_LEN)) == (RowState.QUEUED, CHUNK)
    second.step()
    assert cluster.model.forwards[-1] == [(CHUNK, CHUNK)]
    cluster.run()
    assert cluster.get(long, R.PREFILLED_TOKENS) == 199


def test_age_brings_a_long_prompt_before_newcomers() -> None:
    cluster = FakeCluster()
    long = cluster.submit(prompt_of(200, 1))
    prefill = cluster.prefill[0]
    prefill.step()
    # As long as it takes to compute, at the speed measured.
    waited_ns = int(199 / prefill._tokens_per_s * 1e9)
    cluster.rows.put(long, R.T_CREATED, time.monotonic_ns() - waited_ns)
    cluster.submit(prompt_of(20, 2))
    prefill.step()
    assert cluster.model.forwards[-1] == [(CHUNK, CHUNK)]
    cluster.run()


def test_cancelled_between_chunks() -> None:
    cluster = FakeCluster()
    row = cluster.submit(prompt_of(200))
    cluster.prefill[0].step()
    cluster.cancel(row)
    assert not cluster.prefill[0].step()
    assert cluster.rows.state(row) is RowState.CANCELLED
    assert len(cluster.model.forwards) == 1
    assert cluster.prefill[0]._me.get(P.LOAD) == 0


def test_cancelled_during_its_last_chunk_it_is_not_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold its blocks until decode has room, or somebody looks."""
    cluster = FakeCluster()
    left, stays = cluster.submit(prompt_of(9, 1)), cluster.submit(prompt_of(9, 2))
    forward = cluster.model.forward

    def leave_meanwhile(*arguments: Any) -> Any:
        cluster.cancel(left)
        return forward(*arguments)

    monkeypatch.setattr(cluster.model, "forward", leave_meanwhile)
    assert cluster.prefill[0].step()
    assert (cluster.rows.state(left), cluster.rows.state(stays)) == (RowState.CANCELLED, RowState.READY)
    assert cluster.get(left, R.NUM_BLOCKS) == 0
    assert cluster.prefill[0]._me.get(P.LOAD) == 0


def test_a_row_whose_owner_died_over_it_is_computed_alone() -> None:
    cluster = FakeCluster(prefill=2)
    suspect = cluster.submit(prompt_of(9, 1))
    rows, first = cluster.rows, cluster.prefill[0]
    assert rows.claim(first._me, suspect, alone=True) is not None
    cluster.kill(first)
    # It comes second, among others it is left out; then it comes first.
    rows.put(suspect, R.T_CREATED, time.monotonic_ns() + 10**9)
    for seed in (2, 3):
        cluster.submit(prompt_of(6, seed))
    second = cluster.prefill[1]
    second.step()
    assert cluster.model.forwards == [[(0, 5), (0, 5)]]
    second.step()
    assert cluster.model.forwards[-1] == [(0, 8)]
    cluster.run()
    assert rows.get(suspect, R.DEATHS_ALONE) == 0


# --- what another row is computing -------------------------------------------------------------------------

SHARED = prompt_of(100, 5)


def test_a_prefix_under_way_is_waited_for() -> None:
    cluster = FakeCluster(prefill=2)
    first, second = cluster.prefill
    one = cluster.submit([*SHARED, 1, 2, 3])
    first.step()
    two = cluster.submit([*SHARED, 4, 5, 6])
    for _ in range(2):
        assert not second.step()
        first.step()
    assert cluster.rows.state(two) is RowState.QUEUED
    assert second.step()  # what they share is there now; of `one` six tokens are left
    cluster.run()
    blocks = 100 // BLOCK * BLOCK
    assert (cluster.get(one, R.CACHED_TOKENS), cluster.get(two, R.CACHED_TOKENS)) == (0, blocks)
    assert prefilled(cluster) == 102 + 102 - blocks


@pytest.mark.parametrize("how", ["cancelled", "killed", "preempted"])
def test_nobody_waits_for_a_row_that_is_no_longer_computed(how: str) -> None:
    cluster = FakeCluster(prefill=2)
    first, second = cluster.prefill
    one = cluster.submit([*SHARED, 1, 2, 3])
    first.step()
    two = cluster.submit([*SHARED, 4, 5, 6])
    assert not second.step()
    if how == "cancelled":
        cluster.cancel(one)
        first._follow_wishes()
    elif how == "killed":
        cluster.kill(first)
    else:
        cluster.rows.wish_preempted(one, cluster.get(one, R.GENERATION))
        first._follow_wishes()
    assert second.step()
    cluster.run(two)
    cluster.take(two)


def test_many_with_one_prompt_compute_it_once() -> None:
    cluster = FakeCluster(prefill=3, decode=2)
    rows = [cluster.submit(SHARED, 10) for _ in range(8)]
    cluster.run()
    blocks = 99 // BLOCK * BLOCK
    assert [cluster.get(row, R.CACHED_TOKENS) for row in rows] == [0, *[blocks] * 7]
    assert prefilled(cluster) == 99 + 7 * (99 - blocks)


def test_two_that_met_too_late_still_share_what_is_published() -> None:
    cluster = FakeCluster()
    one, two = cluster.submit([*SHARED, 1, 2, 3]), cluster.submit([*SHARED, 4, 5, 6])
    rows, other = cluster.rows, cluster.join(Role.PREFILL)
    # Claimed with private blocks for all of it, and put back before anything was computed.
    assert rows.claim(other, two, alone=True) is not None
    rows.put_back(two, Actor.PREFILL)
    rows.put(two, R.T_CREATED, time.monotonic_ns() + 10**9)
    assert (rows.get(two, R.NUM_BLOCKS), rows.get(two, R.CACHED_TOKENS)) == (13, 0)
    while rows.state(one) is not RowState.READY:
        cluster.prefill[0].step()
    cluster.run()
    blocks = 100 // BLOCK * BLOCK
    assert cluster.get(two, R.CACHED_TOKENS) == blocks
    assert cluster.get(two, R.PREFILLED_TOKENS) == 102 - blocks
    words = cluster.segment.words
    assert (words[H.PROMPT_TOKENS], words[H.CACHED_TOKENS]) == (206, blocks)


# --- the prefix cache of all -------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 1, 100])
def test_what_one_daemon_computed_is_cached_for_every_other(length: int) -> None:
    cluster = FakeCluster(prefill=2, decode=3)
    prompt = prompt_of(length, 6)
    tokens = cluster.ask(prompt, 20)
    # The others alone, one after the other.
    for prefill in range(2):
        for decode in range(3):
            row = cluster.submit(prompt, 20)
            while not cluster.rows.state(row) >= RowState.FINISHED:
                cluster.prefill[prefill].step()
                cluster.decode[decode].step()
            assert cluster.get(row, R.CACHED_TOKENS) == (length - 1) // BLOCK * BLOCK
            assert cluster.take(row) == tokens
    words = cluster.segment.words
    assert words[H.PROMPT_TOKENS] == 7 * length
    assert words[H.CACHED_TOKENS] == 6 * ((length - 1) // BLOCK * BLOCK)


@pytest.mark.parametrize("output", [1, 7, 8, 9, 40])
def test_the_second_turn_finds_what_decode_generated(output: int) -> None:
    cluster = FakeCluster(prefill=2, decode=2)
    first = prompt_of(30, 7)
    turn = [*first, *cluster.ask(first, output)]
    before = prefilled(cluster)
    second = [*turn, 3, 1, 4, 1, 5]
    row = cluster.submit(second, 5)
    cluster.run(row)
    cached = (len(turn) - 1) // BLOCK * BLOCK  # the last token's KV was never computed
    assert cluster.get(row, R.CACHED_TOKENS) == cached
    assert prefilled(cluster) - before == len(second) - 1 - cached
    cluster.take(row)


def test_what_little_is_left_after_waiting_is_for_decode() -> None:
    cluster = FakeCluster(prefill=2, local_prefill_tokens=12)
    first, second = cluster.prefill
    one, two = (cluster.submit(prompt_of(101, 8), 3) for _ in range(2))
    first.step()
    while cluster.get(one, R.KV_LEN) < 96:
        assert not second.step()
        first.step()
        assert cluster.rows.state(two) is RowState.QUEUED
    second.step()
    # Nothing was computed for it: the prefill daemon only passed it on, and rang.
    assert cluster.rows.state(two) is RowState.READY
    assert cluster.rung[-1] == cluster.decode[0]._me.slot
    cluster.run()
    assert (cluster.get(two, R.CACHED_TOKENS), cluster.get(two, R.LOCAL_TOKENS)) == (96, 4)
    assert cluster.get(two, R.PREFILLED_TOKENS) == 0


# --- decode daemons ----------------------------------------------------------------------------------------


def test_decode_daemons_share_the_rows_evenly() -> None:
    cluster = FakeCluster(decode=3)
    rows = [cluster.submit(prompt_of(20, seed), 40) for seed in range(9)]
    for _ in range(30):
        cluster.step()
    assert [engine._me.get(P.LOAD) for engine in cluster.decode] == [3, 3, 3]
    cluster.run()
    assert {cluster.get(row, R.DECODE_SLOT) for row in rows} == {engine._me.slot + 1 for engine in cluster.decode}


def test_a_row_that_is_left_to_a_peer_is_told_to_it_and_taken_in_the_end() -> None:
    cluster = FakeCluster(decode=2)
    busy, idle = cluster.decode
    rows = [cluster.submit(prompt_of(20, seed), 40) for seed in range(2)]
    while cluster.rows.in_state(RowState.QUEUED) or cluster.rows.in_state(RowState.PREFILLING):
        cluster.prefill[0].step()
    cluster.rung.clear()
    busy.step()
    assert busy._me.get(P.LOAD) == 1
    assert idle._me.slot in cluster.rung
    cluster.rows.put(rows[1], R.T_STATE, time.monotonic_ns() - 10**9)
    busy.step()
    assert busy._me.get(P.LOAD) == 2
    cluster.run()


def test_the_least_loaded_that_is_ready_and_not_drained_is_rung() -> None:
    cluster = FakeCluster(decode=3)
    segment, (one, two, three) = cluster.segment, [engine._me for engine in cluster.decode]
    assert segment.least_loaded(Role.DECODE) == one.slot
    one.put(P.LOAD, 2)
    two.put(P.LOAD, 1)
    assert segment.least_loaded(Role.DECODE) == three.slot
    three.put(P.DRAIN, 1)
    assert segment.least_loaded(Role.DECODE) == two.slot
    assert segment.least_loaded(Role.DECODE, but=two.slot) == one.slot
    for me in (one, two):
        me.put(P.STATE, ParticipantState.STOPPING)
    assert segment.least_loaded(Role.DECODE) is None


# --- room --------------------------------------------------------------------------------------------------


def test_blocks_that_come_free_are_for_the_oldest_that_wants_them() -> None:
    cluster = FakeCluster(num_blocks=20, decode=2)
    old = cluster.submit(prompt_of(150, 1), 4)  # 19 blocks
    young = [cluster.submit(prompt_of(30, seed), 60) for seed in range(2, 6)]
    while cluster.rows.state(old) is RowState.QUEUED:
        cluster.step()
    # The short ones were first; each made way for the old one at most once, and did not come back meanwhile.
    assert sum(cluster.get(row, R.NUM_BLOCKS) for row in young) <= 1
    assert {cluster.get(row, R.PREEMPTIONS) for row in young} <= {0, 1}
    cluster.run()
    assert cluster.get(old, R.PREEMPTIONS) == 0
    for row in (old, *young):
        cluster.take(row)


def test_who_waits_for_room_is_rung_when_blocks_come_free() -> None:
    cluster = FakeCluster(num_blocks=20)
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    first = cluster.submit(prompt_of(100, 1), 50)  # 19 blocks in the end
    while cluster.rows.state(first) is not RowState.DECODING:
        cluster.step()
    second = cluster.submit(prompt_of(100, 2), 50)
    # Once more to look again, then it sleeps.
    assert prefill.step()
    assert not prefill.step()
    assert prefill._me.get(P.WANTS_ROOM) == cluster.get(second, R.ORDER) + 1
    cluster.rung.clear()
    cluster.cancel(first)
    decode.step()
    assert prefill._me.slot in cluster.rung
    prefill.step()
    assert prefill._me.get(P.WANTS_ROOM) == 0
    cluster.run(second)


def test_a_suspect_is_decoded_although_others_keep_coming() -> None:
    """Its daemon died before its first commit: it runs alone for one step; the rest make way, and lose nothing."""
    cluster = FakeCluster(local_prefill_tokens=200)
    rows, decode = cluster.rows, cluster.decode[0]
    others = [cluster.submit(prompt_of(20, seed), 100) for seed in range(10, 14)]
    decode.step()
    assert decode._me.get(P.LOAD) == len(others)
    dead = cluster.join(Role.DECODE)
    suspects = [cluster.submit(prompt_of(60, seed), 5) for seed in range(3)]
    for row in suspects:
        assert rows.claim(dead, row, alone=row == suspects[0]) is not None
    reap(cluster.segment, dead.slot, dead.incarnation, "killed")
    assert [rows.get(row, R.ATTEMPTS) for row in suspects] == [1, 1, 1]
    decode.step()  # a peer with nothing to do would take them
    assert decode._me.get(P.LOAD) == len(others)
    for row in suspects:
        rows.put(row, R.T_STATE, time.monotonic_ns() - 10**9)
    for row in suspects:
        decode.step()
        assert [rows.state(one) for one in others] == [RowState.READY] * len(others)
        assert (rows.state(row), rows.get(row, R.ATTEMPTS)) == (RowState.DECODING, 0)
    decode.step()
    assert decode._me.get(P.LOAD) == len(others) + len(suspects)
    cluster.run()
    for row in (*suspects, *others):
        assert cluster.get(row, R.PREEMPTIONS) == 0
        cluster.take(row)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("number", [1, 2])
def test_a_death_is_charged_to_one_alone_only_if_it_was_alone(
    monkeypatch: pytest.MonkeyPatch, role: Role, number: int
) -> None:
    cluster = FakeCluster(local_prefill_tokens=0 if role is Role.PREFILL else 200)
    rows = [cluster.submit(prompt_of(9, seed)) for seed in range(number)]
    engine = cluster.prefill[0] if role is Role.PREFILL else cluster.decode[0]

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(cluster.model, "forward", die)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    cluster.kill(engine)
    assert [cluster.get(row, R.ATTEMPTS) for row in rows] == [1] * number
    assert [cluster.get(row, R.DEATHS_ALONE) for row in rows] == [int(number == 1)] * number
    cluster.run()

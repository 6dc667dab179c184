"""Prefill and decode in one loop: what shares a forward, what goes first, who pays for a death, and that none sleeps
with work left. Over a fake model, stepped by hand; what it answers is checked by `FakeCluster` itself."""

from __future__ import annotations

from typing import Any

import pytest
from fake_model import BLOCK, FakeCluster

from pdctl.transport.layout import H, P, R
from pdctl.transport.recovery import reap
from pdctl.transport.rows import TERMINAL, RowState

CHUNK = 32  # of FakeCluster


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(index * (seed + 3) + index // 5 + seed) % 17 for index in range(length)]


def cluster_of(**changes: Any) -> FakeCluster:
    return FakeCluster(colocated=True, **changes)


def work_off(cluster: FakeCluster) -> None:
    """Step as the daemon does: until it would sleep."""
    for _ in range(10_000):
        if not cluster.step():
            return
    raise AssertionError("it never sleeps")


@pytest.mark.parametrize("length", [1, 2, BLOCK, BLOCK + 1, CHUNK, CHUNK + 1, CHUNK + 2, 3 * CHUNK])
def test_the_last_chunk_gives_the_first_token(length: int) -> None:
    cluster = cluster_of()
    row = cluster.submit(prompt_of(length), 4)
    num_chunks = max(1, -(-(length - 1) // CHUNK))
    for chunk in range(num_chunks):
        assert cluster.rows.count_tokens(row) == length, chunk
        assert cluster.step()
    assert cluster.rows.count_tokens(row) == length + 1
    assert cluster.get(row, R.PREFILLED_TOKENS) == length - 1
    assert cluster.get(row, R.LOCAL_TOKENS) == 0
    work_off(cluster)
    assert len(cluster.model.forwards) == num_chunks + 3
    assert len(cluster.take(row)) == 4


def test_running_answers_come_first_and_prompts_get_what_they_leave() -> None:
    cluster = cluster_of()
    answers = [cluster.submit(prompt_of(4, seed), 40) for seed in range(3)]
    cluster.step()
    cluster.submit(prompt_of(200, 3), 4)
    cluster.step()
    assert cluster.model.forwards[1:] == [[(4, 1), (4, 1), (4, 1), (0, CHUNK - 3)]]
    cluster.step()
    assert cluster.model.forwards[-1] == [(5, 1), (5, 1), (5, 1), (CHUNK - 3, CHUNK - 3)]
    assert [cluster.rows.count_tokens(row) for row in answers] == [7, 7, 7]
    cluster.run()


def test_a_step_full_of_answers_still_computes_a_block_of_a_prompt() -> None:
    cluster = cluster_of(chunk_tokens=2 * BLOCK)
    answers = [cluster.submit(prompt_of(4, seed), 60) for seed in range(2 * BLOCK - 1)]
    while any(cluster.rows.count_tokens(row) == 4 for row in answers):
        cluster.step()
    cluster.submit(prompt_of(50, 3), 4)
    cluster.step()
    assert len(cluster.model.forwards[-1]) == 2 * BLOCK
    assert cluster.model.forwards[-1][-1] == (0, BLOCK)
    cluster.run()


def test_a_cached_prompt_is_all_decodes() -> None:
    cluster = cluster_of()
    prompt = prompt_of(2 * BLOCK + 1)
    first = cluster.ask(prompt)
    del cluster.model.forwards[:]
    row = cluster.submit(prompt)
    assert cluster.rows.state(row) is RowState.READY
    cluster.step()
    assert cluster.model.forwards == [[(2 * BLOCK, 1)]]
    cluster.run(row)
    assert cluster.take(row) == first


def test_a_full_batch_leaves_the_first_token_for_later() -> None:
    cluster = cluster_of(max_batch=2)
    rows = [cluster.submit(prompt_of(4, seed), 6) for seed in range(2)]
    cluster.step()
    rows.append(cluster.submit(prompt_of(9, 5), 6))
    cluster.step()
    assert cluster.rows.state(rows[2]) is RowState.READY
    assert cluster.rows.count_tokens(rows[2]) == 9
    work_off(cluster)
    assert {cluster.rows.state(row) for row in rows} == {RowState.FINISHED}
    cluster.run()


def test_nobody_sleeps_with_work_left_and_no_socket_is_used() -> None:
    """Both halves want the same few blocks: what one leaves the other must see in the same process."""
    cluster = cluster_of(num_blocks=14)
    rows = [cluster.submit(prompt_of(20 + 9 * seed, seed), 40) for seed in range(6)]
    work_off(cluster)
    assert {cluster.rows.state(row) for row in rows} == {RowState.FINISHED}
    assert cluster.segment.words[H.PREEMPTIONS] > 0
    assert set(cluster.rung) == {cluster.router.slot}
    for row in rows:
        cluster.take(row)
    assert cluster.segment.pool.num_available() == 14


def test_a_cancelled_row_makes_room_without_a_bell() -> None:
    cluster = cluster_of(num_blocks=4)
    old = cluster.submit(prompt_of(3 * BLOCK - 1), 2)
    cluster.step()
    young = cluster.submit(prompt_of(2 * BLOCK + 3, 4), 2)
    assert cluster.rows.state(old) is RowState.DECODING
    cluster.step()
    cluster.cancel(young)
    work_off(cluster)
    assert cluster.rows.state(old) is RowState.FINISHED
    assert cluster.rows.state(young) in TERMINAL
    assert cluster.segment.pool.num_available() == 4


def test_released_rows_go_on_with_a_successor_as_they_are() -> None:
    cluster = cluster_of()
    answer, prompt = cluster.submit(prompt_of(9), 30), cluster.submit(prompt_of(150, 2), 5)
    for _ in range(200):
        if not cluster.step():
            break
        engine = cluster.colocated
        assert engine is not None
        engine.release()
        assert cluster.rows.in_state(RowState.PREFILLING) == cluster.rows.in_state(RowState.DECODING) == []
        for half in engine.prefill, engine.decode:
            assert half._me.get(P.LOAD) == 0
            cluster.segment.detach(half._me)
        cluster._colocate()
    cluster.run()
    assert cluster.get(prompt, R.PREFILLED_TOKENS) == 149
    assert cluster.get(answer, R.ADOPTIONS) == cluster.get(answer, R.PREEMPTIONS) == 0
    assert len(cluster.take(answer)) == 30


def test_a_row_whose_owner_died_over_it_is_computed_alone_and_others_make_way() -> None:
    cluster = cluster_of()
    answer = cluster.submit(prompt_of(4), 40)
    cluster.step()
    suspect = cluster.submit(prompt_of(50, 1), 4)
    cluster.rows.put(suspect, R.ATTEMPTS, 1)
    cluster.step()
    assert cluster.model.forwards[-1] == [(0, CHUNK - 1)]
    assert cluster.get(suspect, R.CLAIMED_ALONE) == 1
    assert (cluster.rows.state(answer), cluster.rows.count_tokens(answer)) == (RowState.DECODING, 5)
    cluster.step()
    assert cluster.model.forwards[-1] == [(4, 1), (CHUNK - 1, 50 - CHUNK + 1)]
    cluster.run()


def test_an_answer_whose_owner_died_over_it_is_computed_alone_and_prompts_make_way() -> None:
    cluster = cluster_of()
    prompt = cluster.submit(prompt_of(200, 1), 4)
    cluster.step()
    suspect = cluster.submit([5], 4)
    cluster.rows.put(suspect, R.ATTEMPTS, 1)
    cluster.step()
    assert cluster.model.forwards[-1] == [(0, 1)]
    assert cluster.get(suspect, R.CLAIMED_ALONE) == 1
    cluster.step()
    assert cluster.model.forwards[-1] == [(1, 1), (CHUNK, CHUNK - 1)]
    assert cluster.rows.state(prompt) is RowState.PREFILLING
    cluster.run()


def test_rows_of_one_forward_are_charged_to_none_of_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One new row in each half, and the process dies over them: nobody can say over which."""
    cluster = cluster_of()
    answer, prompt = cluster.submit([5], 4), cluster.submit(prompt_of(50, 1), 4)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster.model, "forward", die)
    with pytest.raises(KeyboardInterrupt):
        cluster.step()
    monkeypatch.undo()
    assert [cluster.rows.state(row) for row in (answer, prompt)] == [RowState.DECODING, RowState.PREFILLING]
    assert cluster.colocated is not None
    cluster.kill(cluster.colocated)
    assert [cluster.get(row, R.DEATHS_ALONE) for row in (answer, prompt)] == [0, 0]
    assert [cluster.get(row, R.ATTEMPTS) for row in (answer, prompt)] == [1, 1]
    # From now on each alone, until it has shown that it is not the cause.
    work_off(cluster)
    assert cluster.model.forwards[:2] == [[(0, 1)], [(0, CHUNK - 1)]]
    cluster.run()


def test_a_process_with_two_places_dies_once() -> None:
    cluster = cluster_of()
    cluster.submit(prompt_of(50), 4)
    cluster.step()
    before = cluster.segment.words[H.DEATHS]
    for half, counted in ((cluster.prefill[0], False), (cluster.decode[0], True)):
        reap(cluster.segment, half._me.slot, half._me.incarnation, "killed", counted=counted)
    assert cluster.segment.words[H.DEATHS] == before + 1

"""What others do inside a step, between an engine's plan and its commit: at every point, with every answer checked.

An engine carries row numbers from a plan to a commit; meanwhile clients leave, the router gives their rows to other
requests, and peers claim what it has just looked at. Over a fake model, whose answers show any KV that is not the
request's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_model import BLOCK, FakeCluster

from pdctl.transport.layout import WORD, R
from pdctl.transport.rows import TERMINAL, Actor, RowState

SHARED = [index * 7 % 17 for index in range(2 * BLOCK)]
STEPS = 60


class Router:
    """Cancels one request, and gives its row, as soon as it is free, to another that is ready at once."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.leaver = cluster.submit([*SHARED, 1, 2, 3, 4, 5, 6, 7, 8], 12)
        self.newcomer: int | None = None
        self.has_left = False

    def act(self) -> None:
        cluster = self.cluster
        if not self.has_left:
            self.has_left = True
            cluster.cancel(self.leaver)
        if self.newcomer is None and cluster.rows.state(self.leaver) in TERMINAL:
            cluster.take(self.leaver)
            self.newcomer = cluster.submit([*SHARED, 9], 12)


def cluster_of(colocated: bool, **changes: Any) -> FakeCluster:
    cluster = FakeCluster(colocated=colocated, **changes)
    cluster.ask([*SHARED, 0], 2)  # from now on what they share is cached
    return cluster


def from_point(number: int, act: Callable[[], None]) -> tuple[Callable[[], None], list[int]]:
    """Calls `act` from the number-th point on; the list counts the points."""
    points = [0]

    def counted() -> None:
        points[0] += 1
        if points[0] > number:
            act()

    return counted, points


@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize("colocated", [True, False])
def test_a_row_that_changes_hands_inside_a_step(colocated: bool, others: int) -> None:
    """Whenever the client leaves and however fast its row has another request: each has the tokens of its own."""
    num_points, number, tried, reused, inside = 1, 0, 0, 0, 0
    while number < num_points:
        cluster = cluster_of(colocated)
        rows = [cluster.submit([seed, *SHARED, seed, 3], 20) for seed in range(others)]
        router = Router(cluster)
        act, points = from_point(number, router.act)
        with cluster.meanwhile(act):
            for _ in range(8):
                before = router.newcomer
                cluster.step()
                inside += before is None and router.newcomer is not None
        for _ in range(STEPS):
            router.act()
            cluster.step()
        assert router.newcomer is not None, number
        reused += router.newcomer == router.leaver
        num_points = points[0]
        cluster.run()
        for row in (router.newcomer, *rows):
            assert cluster.rows.state(row) is RowState.FINISHED, cluster.rows.error_text(row)
            cluster.take(row)
        assert cluster.segment.pool.num_available() == cluster.spec.num_blocks
        # What was published on the way is what its tokens say.
        cluster.ask([*SHARED, 9, 1, 2, 3], 12)
        number += 1 + others
        tried += 1
    assert tried > 20
    assert reused > 0.9 * tried
    assert inside > 0.5 * tried


def test_first_tokens_are_of_the_request_whose_logits_they_are() -> None:
    """One point of those above by itself: between prefill's commit and decode's claim the row is another's."""
    cluster = cluster_of(True)
    router = Router(cluster)
    forward, in_state = cluster.model.forward, cluster.rows.in_state
    left = []

    def leave(*arguments: Any) -> Any:
        cluster.cancel(router.leaver)
        router.has_left = True
        left.append(True)
        return forward(*arguments)

    def look(state: RowState) -> list[int]:
        if left and state is RowState.READY:
            router.act()
        return in_state(state)

    cluster.model.forward = leave  # type: ignore[method-assign]
    cluster.rows.in_state = look  # type: ignore[method-assign]
    cluster.step()
    cluster.model.forward, cluster.rows.in_state = forward, in_state  # type: ignore[method-assign]
    assert router.newcomer == router.leaver
    assert cluster.rows.state(router.newcomer) is RowState.DECODING
    assert cluster.rows.count_tokens(router.newcomer) == len(SHARED) + 1, "its own logits come with the next step"
    assert cluster.get(router.newcomer, R.KV_LEN) == len(SHARED)
    cluster.run()
    cluster.take(router.newcomer)


def test_logits_are_of_no_use_once_the_blocks_are_gone() -> None:
    """Handed over, its blocks taken, ready again, since all but its last token is cached: that one's KV is gone."""
    cluster = cluster_of(True)
    prompt = [8, *SHARED, *SHARED[:7], 5]
    row = cluster.submit(prompt, 12)
    assert cluster.colocated is not None
    decode, peer = cluster.colocated.decode, cluster.new_prefill()
    claim_ready = decode._claim_ready

    def lose_blocks_first() -> None:
        if cluster.rows.state(row) is RowState.READY:
            decode._claim_ready = claim_ready  # type: ignore[method-assign]
            last = cluster.rows.block_table(row)[-1]
            assert cluster.rows.preempt_waiting(row, cluster.get(row, R.GENERATION), Actor.PREFILL)
            cells = cluster.segment.layout.kv_offset // WORD + last * BLOCK
            cluster.segment.words[cells : cells + BLOCK] = memoryview(bytes(BLOCK * WORD)).cast("Q")
            assert not peer.step()
        claim_ready()

    decode._claim_ready = lose_blocks_first  # type: ignore[method-assign]
    cluster.step()
    assert cluster.get(row, R.PREEMPTIONS) == 1
    assert cluster.rows.state(row) is RowState.DECODING
    assert cluster.rows.count_tokens(row) == len(prompt)
    cluster.run()
    cluster.take(row)

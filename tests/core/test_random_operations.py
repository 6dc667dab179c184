"""Ten thousand operations in any order, on several daemons and too small a pool: all tokens right, nothing lost."""

from __future__ import annotations

import random

import pytest
from fake_model import FakeCluster

from pdctl.transport.layout import H, P, R
from pdctl.transport.recovery import verify
from pdctl.transport.rows import TERMINAL, RowState

OPERATIONS = 10_000
STEM = [index * 7 % 17 for index in range(96)]


def prompt(rng: random.Random) -> list[int]:
    """Beginnings that requests share, and mostly a rest of their own. Some are ready at once, if it is cached."""
    if rng.random() < 0.3:
        return [*STEM[: 8 * rng.randrange(13)], rng.randrange(17)]
    return STEM[: rng.randrange(97)] + [rng.randrange(17) for _ in range(rng.randrange(1, 40))]


def step(cluster: FakeCluster, rng: random.Random) -> None:
    rng.choice(cluster.engines).step()


def submit(cluster: FakeCluster, rng: random.Random) -> None:
    cluster.try_submit(prompt(rng), rng.randrange(1, 60))


def cancel(cluster: FakeCluster, rng: random.Random) -> None:
    if cluster.asked:
        cluster.cancel(rng.choice(list(cluster.asked)))


def collect(cluster: FakeCluster, rng: random.Random) -> None:
    for row in list(cluster.asked):
        if cluster.rows.state(row) in TERMINAL:
            assert cluster.rows.state(row) is not RowState.FAILED, cluster.rows.error_text(row)
            cluster.take(row)


def kill(cluster: FakeCluster, rng: random.Random) -> None:
    cluster.kill(rng.choice(cluster.engines))


class Killed(BaseException):
    """The process is gone at this point."""


def die(cluster: FakeCluster, rng: random.Random) -> None:
    """Killed within a step, right before or after it makes something true for everybody."""
    engine, name = rng.choice(cluster.engines), rng.choice(["commit_kv", "commit_token", "publish", "hand_over"])
    real = getattr(cluster.rows, name)
    # Before its first commit a row's death counts against the row; that is not the subject here.
    after = name == "commit_kv" or rng.random() < 0.5

    def last(*arguments: int) -> None:
        if after:
            real(*arguments)
        raise Killed

    setattr(cluster.rows, name, last)
    try:
        engine.step()
    except Killed:
        cluster.kill(engine)
    finally:
        delattr(cluster.rows, name)


def act_inside(cluster: FakeCluster, rng: random.Random) -> None:
    """A step, and inside it, from some point on: clients leave, their rows go to others, and peers make steps."""
    engine = rng.choice(cluster.engines)
    peers = [one for one in cluster.engines if one is not engine]
    starts_at, points = rng.randrange(60), 0

    def act() -> None:
        nonlocal points
        points += 1
        if points == starts_at:
            for row in cluster.rows.in_state(RowState.PREFILLING) or list(cluster.asked)[:1]:
                cluster.cancel(row)
        elif starts_at < points < starts_at + 20 and points % 2:
            if peers and rng.random() < 0.3:
                rng.choice(peers).step()
            collect(cluster, rng)
            if points % 3 == 0:
                cluster.try_submit([*STEM[: 8 * rng.randrange(13)], rng.randrange(17)], 12)

    with cluster.meanwhile(act):
        engine.step()


def drain(cluster: FakeCluster, rng: random.Random) -> None:
    rng.choice(cluster.engines).release()


# How often each comes.
MIXTURE = {step: 60, act_inside: 2, submit: 6, cancel: 1, collect: 6, kill: 1, die: 1, drain: 1}


@pytest.mark.parametrize(
    ("prefill", "decode", "num_blocks", "local"),
    # None of a kind: colocated.
    [(1, 1, 30, 0), (2, 2, 26, 12), (1, 3, 200, 12), (3, 2, 40, 0), (0, 0, 26, 0)],
)
def test_ten_thousand_operations(prefill: int, decode: int, num_blocks: int, local: int) -> None:
    cluster = FakeCluster(
        prefill=max(1, prefill),
        decode=max(1, decode),
        colocated=not prefill + decode,
        num_blocks=num_blocks,
        local_prefill_tokens=local,
    )
    rng = random.Random(1000 * prefill + 100 * decode + num_blocks)
    operations = rng.choices(list(MIXTURE), weights=list(MIXTURE.values()), k=OPERATIONS)
    for number, operation in enumerate(operations):
        operation(cluster, rng)
        if number % 50 == 0:
            assert verify(cluster.segment) == []
    # An engine whose predecessor was killed at the very end has had nothing to do yet.
    for _ in range(4 * len(cluster.decode)):
        submit(cluster, rng)
    cluster.run()
    collect(cluster, rng)
    assert cluster.asked == {}
    assert cluster.segment.pool.num_available() == num_blocks
    words = cluster.segment.words
    assert words[H.FINISHED] > 100
    assert words[H.CANCELLED] > 50
    assert words[H.CACHED_TOKENS] > 0
    assert words[H.ADOPTIONS] > 20
    assert (words[H.PREEMPTIONS] > 100) == (num_blocks < 100)
    assert all(engine._me.get(P.STEPS) for engine in cluster.decode)
    for row in range(cluster.rows.num_rows):
        assert cluster.get(row, R.NUM_BLOCKS) == 0

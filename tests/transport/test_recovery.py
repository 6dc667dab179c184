"""verify() must see every kind of damage (all other tests lean on it), and reap() must take what is dead's alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdctl.transport.errors import DeadlineError
from pdctl.transport.layout import B, BlockState, H, P, R
from pdctl.transport.recovery import reap, sweep, verify
from pdctl.transport.rows import Actor, RowState
from pdctl.transport.segment import Role

S = RowState
PROMPT = [0, 1, 2, 1, 0, 2, 2, 1, 0]


@pytest.fixture
def lively(world: Any) -> Any:
    """Free, private, shared and waiting blocks; rows with and without an owner."""
    world.leave_cached([2, 2, 2, 2, 1, 1, 1, 1, 0], 10)
    world.finished([2, 1], 4)
    world.row = world.decoding(PROMPT, 20, steps=2).row
    world.ready([*PROMPT, 1], 20)
    world.check()
    return world


def block_in(world: Any, state: BlockState, *, used: bool = True) -> int:
    pool = world.supervisor.pool
    blocks = [b for b in range(world.geometry.num_blocks) if pool.state(b) == state]
    if state is BlockState.CACHED:
        blocks = [b for b in blocks if (pool.refs(b) > 0) == used]
    return world.layout.block(blocks[0])


def add(place: Callable[[Any], int], delta: int = 1) -> Callable[[Any], None]:
    def damage(world: Any) -> None:
        world.mapping.words[place(world)] += delta

    return damage


def put(place: Callable[[Any], int], value: int) -> Callable[[Any], None]:
    def damage(world: Any) -> None:
        world.mapping.words[place(world)] = value

    return damage


def free(w: Any) -> int:
    return block_in(w, BlockState.FREE)


def owned(w: Any) -> int:
    return block_in(w, BlockState.OWNED)


def shared_block(w: Any) -> int:
    return block_in(w, BlockState.CACHED)


def waiting(w: Any) -> int:
    return block_in(w, BlockState.CACHED, used=False)


def row(w: Any) -> int:
    return w.layout.row(w.row)


def orphan_a_child(w: Any) -> None:
    words, layout = w.mapping.words, w.layout
    child = next(b for b in range(w.geometry.num_blocks) if words[layout.block(b) + B.PARENT])
    words[layout.block(child) + B.PARENT_GENERATION] += 1


def move_to_another_bucket(w: Any) -> None:
    words, layout = w.mapping.words, w.layout
    buckets = range(layout.buckets, layout.buckets + w.geometry.num_buckets)
    full = next(at for at in buckets if words[at])
    empty = next(at for at in buckets if not words[at])
    words[empty], words[full] = words[full], 0


DAMAGE: dict[str, tuple[Callable[[Any], None], str]] = {
    "free count": (add(lambda w: H.FREE_COUNT), "free list"),
    "free list cut": (put(lambda w: H.FREE_HEAD, 0), "free list"),
    "free list loop": (lambda w: put(lambda w: free(w) + B.FREE_NEXT, w.mapping.words[H.FREE_HEAD])(w), ""),
    "free list leads out": (put(lambda w: H.FREE_HEAD, 1 << 40), "unreadable"),
    "lru count": (add(lambda w: H.LRU_COUNT), "LRU list"),
    "lru tail": (add(lambda w: H.LRU_TAIL, -1), "tail"),
    "lru cut": (put(lambda w: H.LRU_HEAD, 0), "LRU list"),
    "lru back link": (
        lambda w: add(lambda w: w.layout.block(w.mapping.words[H.LRU_TAIL] - 1) + B.LRU_PREV)(w),
        "stands",
    ),
    "cached count": (add(lambda w: H.CACHED_COUNT), "prefix index"),
    "bucket cut": (lambda w: [put(lambda w, b=b: w.layout.buckets + b, 0)(w) for b in range(16)] and None, "index"),
    "bucket leads out": (put(lambda w: w.layout.buckets, 1 << 40), "unreadable"),
    "another bucket": (move_to_another_bucket, "hangs in bucket"),
    "parent gone": (orphan_a_child, "parent"),
    "reference lost": (add(lambda w: shared_block(w) + B.REFS, -1), "references"),
    "reference won": (add(lambda w: shared_block(w) + B.REFS), "references"),
    "waiting block referenced": (add(lambda w: waiting(w) + B.REFS), "references"),
    "free block owned": (put(lambda w: free(w) + B.STATE, BlockState.OWNED), "in the free list"),
    "free block cached": (put(lambda w: free(w) + B.STATE, BlockState.CACHED), "in the index"),
    "private block freed": (put(lambda w: owned(w) + B.STATE, BlockState.FREE), "state 0"),
    "private block of another": (add(lambda w: owned(w) + B.ROW), "private to row"),
    "impossible block state": (put(lambda w: owned(w) + B.STATE, 9), ""),
    "block leaked": (add(lambda w: row(w) + R.NUM_BLOCKS, -1), "private to row"),
    "block twice": (
        lambda w: put(lambda w: row(w) + w.layout.row_blocks, w.supervisor.rows.block_table(w.row)[1])(w),
        "references",
    ),
    "block that is none": (put(lambda w: row(w) + w.layout.row_blocks, 4711), "block 4711 of 12"),
    "published too much": (add(lambda w: row(w) + R.NUM_PUBLISHED, 9), "published of"),
    "published too little": (add(lambda w: row(w) + R.NUM_PUBLISHED, -1), "expected OWNED"),
    "kv beyond the blocks": (put(lambda w: row(w) + R.KV_LEN, 30), "kv_len 30"),
    "no owner": (put(lambda w: row(w) + R.OWNER, 0), "without an owner"),
    "owner out of range": (put(lambda w: row(w) + R.OWNER, 99), "without an owner"),
    "end with blocks": (put(lambda w: w.layout.row_states + w.row, S.FINISHED), "FINISHED but holds"),
    "free with blocks": (put(lambda w: w.layout.row_states + w.row, S.FREE), "FREE but holds"),
    "impossible row state": (put(lambda w: w.layout.row_states + w.row, 99), "unreadable"),
    "section cut off": (put(lambda w: H.INTENT_OP, 6), "operation 6"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_seen(lively: Any, name: str) -> None:
    damage, message = DAMAGE[name]
    damage(lively)
    problems = verify(lively.supervisor.segment)
    assert problems != []
    assert any(message in problem for problem in problems), problems


def test_verify_stores_nothing(lively: Any) -> None:
    before = bytes(lively.mapping.words)
    assert verify(lively.supervisor.segment) == []
    assert bytes(lively.mapping.words) == before


# --- reap --------------------------------------------------------------------------------------------------


def test_reap_takes_the_deads_rows_alone(world: Any) -> None:
    other = world.join(Role.DECODE)
    mine, others = world.decoding(PROMPT, 20), world.ready([1, *PROMPT], 20)
    assert other.claim(others.row)
    dead = world.decode
    reaped = reap(world.supervisor.segment, dead.me.slot, dead.me.incarnation, "why")
    assert (reaped.adoptable, reaped.failed, reaped.cancelled) == ((mine.row,), (), ())
    assert world.router.rows.state(mine.row) is S.READY
    assert world.router.rows.state(others.row) is S.DECODING
    assert world.supervisor.segment.participant_word(dead.me.slot, P.ROLE) == Role.NONE
    world.check()


def test_reap_says_what_became_of_each_row(world: Any) -> None:
    claims = [world.submit([token, *PROMPT], 12) for token in (0, 1)]
    for claim in claims:
        assert world.prefill.claim(claim.row, alone=True)
    world.router.rows.put(claims[0].row, R.DEATHS_ALONE, 2)
    world.prefill.rows.commit_kv(claims[1].row, 1)
    world.router.rows.cancel(claims[1].row, claims[1].generation)
    reaped = reap(world.supervisor.segment, world.prefill.me.slot, world.prefill.me.incarnation, "why")
    assert (reaped.adoptable, reaped.failed, reaped.cancelled) == ((), (claims[0].row,), (claims[1].row,))
    world.check()


def test_reaping_the_same_death_twice_changes_nothing(world: Any) -> None:
    world.decoding(PROMPT, 20)
    dead = world.decode
    world.reap(dead)
    newcomer = world.join(Role.DECODE)
    assert newcomer.me.slot == dead.me.slot
    row = world.router.rows.in_state(S.READY)[0]
    assert newcomer.claim(row, alone=True)
    reaped = reap(world.supervisor.segment, dead.me.slot, dead.me.incarnation, "why")
    assert reaped.adoptable == ()
    assert newcomer.owned == [row]
    assert world.mapping.words[H.DEATHS] == 1


def test_a_dead_router_takes_its_rows_with_it(world: Any) -> None:
    rows = world.supervisor.rows
    filling = world.router.rows._take_free_row(world.router.me)
    queued, ready = world.submit(PROMPT, 20), world.ready([1, *PROMPT], 20)
    decoding, finished = world.decoding([2, *PROMPT], 20), world.finished([1], 3)
    survivor = world.join(Role.ROUTER)
    others = survivor.submit(PROMPT, 20)
    world.reap(world.router)
    for row in (filling, queued.row, ready.row, finished.row):
        assert rows.state(row) is S.FREE
    assert rows.state(decoding.row) is S.DECODING, "its owner ends it"
    assert rows.state(others.row) is S.QUEUED
    assert sweep(world.supervisor.segment) == 0
    assert world.decode.follow_wishes(decoding.row)
    assert sweep(world.supervisor.segment) == 1
    assert rows.state(decoding.row) is S.FREE
    world.router = survivor
    world.check()
    world.run_to_end()


def test_sweep_leaves_rows_that_a_living_router_has_yet_to_read(world: Any) -> None:
    claim = world.finished(PROMPT, 12)
    assert sweep(world.supervisor.segment) == 0
    assert world.router.rows.state(claim.row) is S.FINISHED


def test_a_decoder_that_dies_before_its_first_commit_leaves_a_suspect(world: Any) -> None:
    claim = world.ready(PROMPT, 20)
    dead = world.join(Role.DECODE)
    assert dead.claim(claim.row)
    world.reap(dead)
    assert world.decode.claim(claim.row, alone=False) is None
    assert world.decode.claim(claim.row, alone=True) is not None
    assert world.router.rows.state(claim.row) is S.DECODING
    world.decode.rows.put_back(claim.row, Actor.DECODE)
    world.run_to_end()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_where_nothing_is_resumed_the_deads_rows_fail_with_the_cause(world: Any, role: Role) -> None:
    """And only those: what waits, and what others work on, goes on."""
    others = world.decoding([2, 1, 0], 9), world.submit(PROMPT, 20)
    row = world.submit([*PROMPT, 1], 20).row if role is Role.PREFILL else world.ready([*PROMPT, 2], 20).row
    dead = world.join(role)
    assert dead.claim(row) is not None
    reaped = reap(world.supervisor.segment, dead.me.slot, dead.me.incarnation, "decode-1 ended", resume=False)
    assert (reaped.failed, reaped.adoptable) == ((row,), ())
    rows = world.router.rows
    assert (rows.state(row), rows.error_text(row)) == (S.FAILED, "decode-1 ended")
    assert [rows.state(claim.row) for claim in others] == [S.DECODING, S.QUEUED]
    world.check()
    world.run_to_end()


@pytest.mark.parametrize("held", range(1, 5))
def test_a_death_is_counted_once_however_often_recovery_has_to_wait(
    world: Any, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    """The lock is held by another just when the rows are to be moved."""
    world.decoding(PROMPT, 20)
    world.decoding([1, *PROMPT], 20)
    dead, segment = world.decode.me, world.supervisor.segment
    acquire, calls = segment.lock._acquire, []

    def busy(deadline_s: float) -> None:
        calls.append(1)
        if len(calls) == held:
            raise DeadlineError("the segment's lock: held")
        acquire(deadline_s)

    monkeypatch.setattr(segment.lock, "_acquire", busy)
    with pytest.raises(DeadlineError):
        reap(segment, dead.slot, dead.incarnation, "why")
    reap(segment, dead.slot, dead.incarnation, "why")
    assert world.mapping.words[H.DEATHS] == 1
    assert len(world.router.rows.in_state(S.READY)) == 2
    world.check()

"""Sealed blocks: KV that changed after it was published is never used again, and nobody else is disturbed."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from pdctl.transport.layout import B as Block
from pdctl.transport.layout import BlockState, H, R, VerifyKv
from pdctl.transport.recovery import verify, verify_seals
from pdctl.transport.rows import Actor, RowState

S = RowState
PROMPT = [0, 1, 2, 1, 0, 2, 2, 1, 0, 1, 2]  # two blocks of four before position N-1
MakeWorld = Callable[..., Any]


@pytest.fixture(params=[VerifyKv.RECOMPUTE, VerifyKv.FAIL])
def sealed(request: pytest.FixtureRequest, world: Any) -> Any:
    world.mapping.words[H.VERIFY_KV] = request.param
    return world


def corrupt(world: Any, block: int) -> None:
    """Flip one bit of a block's KV."""
    world.mapping.words[world.prefill._cells + block * world.geometry.block_tokens] ^= 1 << 17


def decode_to_the_end(world: Any, row: int) -> list[int]:
    assert world.decode.claim(row, alone=True) is not None
    while world.decode.rows.state(row) is S.DECODING:
        assert world.decode.decode(row)
    return world.router.rows.tokens(row, 0, 20)  # type: ignore[no-any-return]


def test_without_the_flag_nothing_is_sealed(world: Any) -> None:
    world.leave_cached(PROMPT, 14)
    assert verify_seals(world.supervisor.segment) == (0, [])


def test_every_published_block_is_sealed_and_stays_whole(sealed: Any) -> None:
    sealed.leave_cached(PROMPT, 14)
    assert verify_seals(sealed.supervisor.segment) == (3, [])
    row = sealed.submit(PROMPT, 20).row
    assert sealed.prefill.claim(row).cached_tokens == 8
    sealed.run_to_end()
    assert sealed.mapping.words[H.BAD_BLOCKS] == 0


@pytest.mark.parametrize("which", [0, 1])
def test_a_hit_on_a_broken_block_is_a_miss_from_there_on(sealed: Any, kit: ModuleType, which: int) -> None:
    """Whatever the flag: the row has lost nothing yet."""
    sealed.leave_cached(PROMPT, 14)
    block = sealed.router.pool.match(PROMPT, 2)[which].block
    corrupt(sealed, block)
    sealed_blocks, problems = verify_seals(sealed.supervisor.segment)
    assert (sealed_blocks, problems) == (3, [f"block {block}: its KV is not what was sealed (checksum)"])
    row = sealed.submit(PROMPT, 20).row
    assert sealed.prefill.claim(row).cached_tokens == 4 * which
    assert sealed.mapping.words[H.BAD_BLOCKS] == 1
    assert sealed.prefill.pool.state(block) == BlockState.BAD
    sealed.prefill.prefill(row)
    assert verify(sealed.supervisor.segment) == []
    # What was computed anew is the cached block now.
    table = sealed.prefill.rows.block_table(row)
    assert [ref.block for ref in sealed.router.pool.match(PROMPT, 2)] == table[:2]
    assert block not in table
    sealed.prefill.rows.hand_over(row)
    assert decode_to_the_end(sealed, row) == kit.answer(PROMPT, 20)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_row_taken_over_from_the_dead_with_broken_kv(sealed: Any, kit: ModuleType, role: str) -> None:
    rows, words = sealed.router.rows, sealed.mapping.words
    if role == "decode":
        row = sealed.decoding(PROMPT, 20, steps=2).row
    else:
        row = sealed.submit(PROMPT, 20).row
        sealed.prefill.claim(row)
        sealed.prefill.prefill(row, 9)
    dead = getattr(sealed, role)
    sealed.reap(dead)
    heir = sealed.join(dead.me.role)
    setattr(sealed, role, heir)
    block = rows.block_table(row)[1]
    corrupt(sealed, block)
    assert heir.claim(row, alone=True) is None
    assert words[H.BAD_BLOCKS] == 1
    assert verify(sealed.supervisor.segment) == []
    if words[H.VERIFY_KV] == VerifyKv.FAIL:
        assert rows.state(row) is S.FAILED
        assert rows.error_text(row) == f"KV of block {block} is not what was computed (checksum)"
        return
    assert (rows.state(row), rows.get(row, R.NUM_BLOCKS), rows.get(row, R.PREEMPTIONS)) == (S.QUEUED, 0, 1)
    assert sealed.prefill.claim(row, alone=True).cached_tokens == 4
    sealed.prefill.prefill(row)
    sealed.prefill.rows.hand_over(row)
    assert decode_to_the_end(sealed, row) == kit.answer(PROMPT, 20)
    assert verify(sealed.supervisor.segment) == []


def test_a_row_that_was_not_taken_over_is_not_checked_again(sealed: Any) -> None:
    """Handing over must not cost what the prompt's length costs."""
    row = sealed.ready(PROMPT, 20).row
    corrupt(sealed, sealed.router.rows.block_table(row)[0])
    assert sealed.decode.claim(row) is not None
    assert sealed.mapping.words[H.BAD_BLOCKS] == 0


def test_a_broken_block_stays_with_who_has_it_and_is_evicted_in_its_turn(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=8)
    world.mapping.words[H.VERIFY_KV] = VerifyKv.RECOMPUTE
    rows, pool = world.router.rows, world.router.pool
    reader = world.ready(PROMPT, 14).row
    block = rows.block_table(reader)[0]
    corrupt(world, block)
    other = world.submit(PROMPT, 13).row
    assert world.prefill.claim(other).cached_tokens == 0
    assert rows.block_table(reader)[0] == block
    assert pool.state(block) == BlockState.BAD
    generation = pool.generation(block)
    world.prefill.rows.end_cancelled(other, Actor.PREFILL)
    rows.cancel(reader, rows.get(reader, R.GENERATION))
    for row in (reader, other):
        assert rows.recycle(row, rows.get(row, R.GENERATION))
    assert verify(world.supervisor.segment) == []
    world.leave_cached([2] * 9, 31)
    assert pool.generation(block) > generation
    world.check()


def test_a_block_that_was_reused_meanwhile_is_not_called_broken(sealed: Any) -> None:
    sealed.leave_cached(PROMPT, 14)
    ref = sealed.router.pool.match(PROMPT, 1)[0]
    corrupt(sealed, ref.block)
    assert sealed.router.pool.is_broken(ref)
    sealed.mapping.words[sealed.layout.block(ref.block) + Block.GENERATION] += 1
    assert not sealed.router.pool.is_broken(ref)

"""After a death: take a dead participant's rows; and at any time: recount everything.

`repair()` (undoing a section that did not end) is in lock.py, because every section begins with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdctl.transport.errors import CorruptSegmentError
from pdctl.transport.layout import B, BlockState, H, P, R
from pdctl.transport.lock import Op
from pdctl.transport.pool import BlockRef
from pdctl.transport.rows import OWNED, TERMINAL, Actor, RowState
from pdctl.transport.segment import Role, Segment


@dataclass(frozen=True, kw_only=True)
class Reaped:
    """What a dead participant left: rows by what became of them."""

    slot: int
    adoptable: tuple[int, ...]
    failed: tuple[int, ...]
    cancelled: tuple[int, ...]


def reap(
    segment: Segment, slot: int, incarnation: int, cause: str, *, resume: bool = True, counted: bool = False
) -> Reaped:
    """Take everything from a participant that is PROVEN dead, and free its slot.

    Stores into a mapping cannot be fenced: the caller has seen the process's pidfd become readable. If this raises,
    call it again: what was done stays done, and the death is counted with the last of it.

    Args:
        cause: what its rows fail with, if they must.
        resume: whether they go on elsewhere; else all of them fail.
        counted: the process had another place, with which its death was counted.
    """
    rows = segment.rows
    outcome: dict[RowState, list[int]] = {}
    # A section repairs what the dead one left half done.
    with segment.lock.section(Op.REAP):
        base = segment.layout.participant(slot)
        role = Role(segment.words[base + P.ROLE])
        if segment.words[base + P.INCARNATION] != incarnation or role is Role.NONE:
            return Reaped(slot=slot, adoptable=(), failed=(), cancelled=())
    for row in rows.owned_by(slot, incarnation):
        with segment.lock.section(Op.REAP, row) as section:
            outcome.setdefault(rows.reap_row(section, row, cause, resume=resume), []).append(row)
    if role is Role.ROUTER:
        _reap_clients_rows(segment, slot, incarnation)
    with segment.lock.section(Op.REAP) as section:
        section.set(segment.layout.participant(slot) + P.ROLE, Role.NONE)
        section.add(H.DEATHS, int(not counted))
    return Reaped(
        slot=slot,
        adoptable=tuple(outcome.get(RowState.QUEUED, []) + outcome.get(RowState.READY, [])),
        failed=tuple(outcome.get(RowState.FAILED, [])),
        cancelled=tuple(outcome.get(RowState.CANCELLED, [])),
    )


def _reap_clients_rows(segment: Segment, slot: int, incarnation: int) -> None:
    """Nobody will read these rows: end them. Rows with an owner are ended by it, and swept up later."""
    rows = segment.rows
    for row, state in enumerate(rows.states()):
        if state == RowState.FREE or rows.get(row, R.CLIENT) != slot + 1:
            continue
        if rows.get(row, R.CLIENT_INCARNATION) == incarnation:
            generation = rows.get(row, R.GENERATION)
            rows.cancel(row, generation, Actor.SUPERVISOR)
            rows.recycle(row, generation, Actor.SUPERVISOR)


def sweep(segment: Segment) -> int:
    """Recycle finished rows whose router is gone; returns how many."""
    rows, swept = segment.rows, 0
    for row, state in enumerate(rows.states()):
        if state in TERMINAL and not _client_lives(segment, row):
            swept += rows.recycle(row, rows.get(row, R.GENERATION), Actor.SUPERVISOR)
    return swept


def _client_lives(segment: Segment, row: int) -> bool:
    slot = segment.rows.get(row, R.CLIENT) - 1
    if not 0 <= slot < segment.geometry.max_participants:
        return False
    return segment.participant_word(slot, P.ROLE) == Role.ROUTER and segment.participant_word(
        slot, P.INCARNATION
    ) == segment.rows.get(row, R.CLIENT_INCARNATION)


def verify(segment: Segment) -> list[str]:
    """Recount every list, reference and index entry; returns what does not add up, each with its numbers.

    Reads only. On a live segment give it a snapshot; a section under way is put aside by the reader's copy.
    """
    if segment.words[H.INTENT_OP]:
        return [f"a section is under way or was cut off (operation {segment.words[H.INTENT_OP]})"]
    try:
        return _verify(segment)
    except (IndexError, ValueError, CorruptSegmentError) as error:
        return [f"unreadable: {error}"]


def _verify(segment: Segment) -> list[str]:
    words, layout, rows, g = segment.words, segment.layout, segment.rows, segment.geometry
    problems: list[str] = []
    refs = [0] * g.num_blocks
    writers: dict[int, int] = {}

    for row in range(g.max_rows):
        state = rows.state(row)
        table = rows.block_table(row)
        if state in TERMINAL | {RowState.FREE, RowState.FILLING} and table:
            problems.append(f"row {row}: {state.name} but holds {len(table)} blocks")
        if rows.get(row, R.NUM_BLOCKS) > g.blocks_per_row:
            problems.append(
                f"row {row}: {rows.get(row, R.NUM_BLOCKS)} blocks, at most {g.blocks_per_row} are possible"
            )
        published = rows.get(row, R.NUM_PUBLISHED)
        if published > len(table):
            problems.append(f"row {row}: {published} blocks published of {len(table)}")
        kv_len = rows.get(row, R.KV_LEN)
        if kv_len > len(table) * g.block_tokens:
            problems.append(f"row {row}: kv_len {kv_len} beyond its {len(table)} blocks")
        if state in OWNED and not 1 <= rows.get(row, R.OWNER) <= g.max_participants:
            problems.append(f"row {row}: {state.name} without an owner")
        for index, block in enumerate(table):
            if block >= g.num_blocks:
                problems.append(f"row {row}: block {block} of {g.num_blocks}")
                continue
            refs[block] += 1
            expected = BlockState.CACHED if index < published else BlockState.OWNED
            now = segment.pool.state(block)
            if now != expected and not (now == BlockState.BAD and expected is BlockState.CACHED):
                problems.append(
                    f"row {row}, place {index}: block {block} is in state {now}, expected {expected.name}"
                )
            if expected is BlockState.OWNED:
                writers[block] = row

    free = _walk(words, words[H.FREE_HEAD], lambda b: layout.block(b) + B.FREE_NEXT, g.num_blocks)
    lru = _walk(words, words[H.LRU_HEAD], lambda b: layout.block(b) + B.LRU_NEXT, g.num_blocks)
    for name, found, counter in (("free list", free, H.FREE_COUNT), ("LRU list", lru, H.LRU_COUNT)):
        if len(found) != words[counter]:
            problems.append(f"{name}: {len(found)} blocks linked, {words[counter]} counted")
    if lru and words[H.LRU_TAIL] != lru[-1] + 1:
        problems.append(f"LRU list: tail is {words[H.LRU_TAIL] - 1}, last linked is {lru[-1]}")
    for before, block in zip([-1, *lru], lru, strict=False):
        if (link := words[layout.block(block) + B.LRU_PREV] - 1) != before:
            problems.append(f"LRU list: before block {block} stands {before}, its link says {link}")

    indexed: list[int] = []
    for bucket in range(g.num_buckets):
        at = words[layout.buckets + bucket]
        chain = _walk(words, at, lambda b: layout.block(b) + B.BUCKET_NEXT, g.num_blocks)
        for block in chain:
            if words[layout.block(block) + B.HASH] & (g.num_buckets - 1) != bucket:
                problems.append(f"prefix index: block {block} hangs in bucket {bucket}, not its own")
        indexed += chain
        if len(indexed) > g.num_blocks:
            raise CorruptSegmentError(f"the prefix index links more than {g.num_blocks} blocks")

    free_set, lru_set, indexed_set = set(free), set(lru), set(indexed)
    if len(indexed) != len(indexed_set):
        problems.append("prefix index: a block stands in it twice")
    if len(indexed) != words[H.CACHED_COUNT]:
        problems.append(f"prefix index: {len(indexed)} blocks, {words[H.CACHED_COUNT]} counted")
    for block in range(g.num_blocks):
        problems += _verify_block(segment, block, refs[block], writers, free_set, lru_set, indexed_set)
    return problems


def _verify_block(
    segment: Segment,
    block: int,
    refs: int,
    writers: dict[int, int],
    free: set[int],
    lru: set[int],
    indexed: set[int],
) -> list[str]:
    words, base = segment.words, segment.layout.block(block)
    state = BlockState(words[base + B.STATE])
    problems = []
    if (state is BlockState.FREE) != (block in free):
        problems.append(f"block {block}: {state.name} and {'' if block in free else 'not '}in the free list")
    published = state in (BlockState.CACHED, BlockState.BAD)
    if published != (block in indexed):
        problems.append(f"block {block}: {state.name} and {'' if block in indexed else 'not '}in the index")
    if state is BlockState.OWNED and writers.get(block) != words[base + B.ROW] - 1:
        problems.append(f"block {block}: private to row {words[base + B.ROW] - 1}, held by {writers.get(block)}")
    if state is BlockState.OWNED and refs != 1:
        problems.append(f"block {block}: private, in {refs} block tables")
    if published:
        if words[base + B.REFS] != refs:
            problems.append(f"block {block}: {words[base + B.REFS]} references counted, {refs} found")
        if (refs == 0) != (block in lru):
            problems.append(f"block {block}: {refs} references and {'' if block in lru else 'not '}in the LRU list")
        parent = words[base + B.PARENT]
        if parent and (
            parent - 1 not in indexed or segment.pool.generation(parent - 1) != words[base + B.PARENT_GENERATION]
        ):
            problems.append(f"block {block}: its parent {parent - 1} is gone")
    elif refs and state is BlockState.FREE:
        problems.append(f"block {block}: free, in {refs} block tables")
    return problems


def verify_seals(segment: Segment) -> tuple[int, list[str]]:
    """Compare every sealed block's KV with its checksum; on a live segment, too. Reads only.

    Returns:
        How many blocks carry a checksum, and what is wrong.
    """
    pool, problems, sealed = segment.pool, [], 0
    for block in range(segment.geometry.num_blocks):
        base = segment.layout.block(block)
        if segment.words[base + B.STATE] == BlockState.CACHED and segment.words[base + B.CHECKSUM]:
            sealed += 1
            if pool.is_broken(BlockRef(block, pool.generation(block))):
                problems.append(f"block {block}: its KV is not what was sealed (checksum)")
    return sealed, problems


def _walk(words: memoryview, head: int, next_of: object, limit: int) -> list[int]:
    found: list[int] = []
    at = head
    while at and len(found) <= limit:
        found.append(at - 1)
        if not 0 < at <= limit:
            raise CorruptSegmentError(f"a list leads to block {at - 1} of {limit}")
        at = words[next_of(at - 1)]  # type: ignore[operator]
    return found

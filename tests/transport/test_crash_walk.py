"""Every operation, killed before every single store: what is left is the state before or after, and all goes on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from pdctl.transport.layout import BLOCK_WORDS, BlockState, H, P, R, VerifyKv
from pdctl.transport.layout import B as Block
from pdctl.transport.lock import Op
from pdctl.transport.names import SegmentName
from pdctl.transport.recovery import reap, sweep, verify
from pdctl.transport.rows import Actor, FinishReason, RowState
from pdctl.transport.segment import Role, Segment

Fork = Callable[[Callable[[Callable[[object], None]], None]], Any]
PROMPT = [0, 1, 2, 1, 0, 2, 2, 1, 0, 1, 1]
Operation = Callable[[Any], object]
# World -> (who runs it, what), built before the walk; the operation gets the member who will die.
SCENARIOS: dict[str, Callable[[Any], tuple[Any, Operation]]] = {}


def scenario(build: Callable[[Any], tuple[Any, Operation]]) -> Callable[[Any], tuple[Any, Operation]]:
    SCENARIOS[build.__name__] = build
    return build


@scenario
def attach(world: Any) -> tuple[Any, Operation]:
    world.submit(PROMPT, 20)
    newcomer = world.join(Role.DECODE)
    newcomer.segment.detach(newcomer.me)
    return newcomer, lambda member: member.segment.attach(Role.DECODE)


@scenario
def detach(world: Any) -> tuple[Any, Operation]:
    leaver = world.join(Role.DECODE)
    return leaver, lambda member: member.segment.detach(member.me)


@scenario
def submit_to_prefill(world: Any) -> tuple[Any, Operation]:
    return world.router, lambda member: member.submit(PROMPT, 20, stop_ids=(5, 6))


@scenario
def submit_to_decode_in_a_used_row(world: Any) -> tuple[Any, Operation]:
    world.leave_cached(PROMPT, 20)
    return world.router, lambda member: member.submit(PROMPT, 20, local=4)


@scenario
def claim_prefill_cold(world: Any) -> tuple[Any, Operation]:
    row = world.submit(PROMPT, 20).row
    return world.prefill, lambda member: member.claim(row)


@scenario
def claim_prefill_with_cached_prefix(world: Any) -> tuple[Any, Operation]:
    world.leave_cached(PROMPT[:9], 12)
    row = world.submit([*PROMPT, 2, 2, 2, 2], 20).row
    return world.prefill, lambda member: member.claim(row)


@scenario
def claim_prefill_with_eviction(world: Any) -> tuple[Any, Operation]:
    for token in (0, 1, 2):
        world.leave_cached([token] * 9, 20)
    row = world.submit([*[1] * 6, *[0] * 15], 30).row
    return world.prefill, lambda member: member.claim(row)


@scenario
def claim_prefill_gains_what_others_published(world: Any) -> tuple[Any, Operation]:
    first, second = world.submit([*PROMPT, 2, 2, 2], 20).row, world.submit([*PROMPT, 1, 1, 1, 1], 20).row
    world.prefill.claim(first)
    world.prefill.prefill(first, 2)
    world.prefill.rows.put_back(first, Actor.PREFILL)
    world.prefill.claim(second)
    world.prefill.prefill(second, 9)
    return world.join(Role.PREFILL), lambda member: member.claim(first)


@scenario
def claim_prefill_sends_on(world: Any) -> tuple[Any, Operation]:
    world.leave_cached(PROMPT[:9], 12)
    row = world.submit(PROMPT, 20).row
    return world.prefill, lambda member: member.claim(row, local=2)


@scenario
def claim_prefill_meets_a_broken_block(world: Any) -> tuple[Any, Operation]:
    world.mapping.words[H.VERIFY_KV] = VerifyKv.RECOMPUTE
    world.leave_cached(PROMPT[:9], 12)
    block = world.router.pool.match(PROMPT, 2)[1].block
    world.mapping.words[world.layout.block(block) + Block.CHECKSUM] ^= 1  # as if its KV were another
    row = world.submit(PROMPT, 20).row
    return world.prefill, lambda member: member.claim(row)


@scenario
def claim_decode_adopts_a_broken_row(world: Any) -> tuple[Any, Operation]:
    world.mapping.words[H.VERIFY_KV] = VerifyKv.RECOMPUTE
    row = world.decoding(PROMPT, 20, steps=3).row
    world.reap(world.decode)
    world.decode = world.join(Role.DECODE)
    block = world.router.rows.block_table(row)[0]
    world.mapping.words[world.layout.block(block) + Block.CHECKSUM] ^= 1
    return world.decode, lambda member: member.claim(row, alone=True)


@scenario
def claim_decode(world: Any) -> tuple[Any, Operation]:
    row = world.ready(PROMPT, 20).row
    return world.decode, lambda member: member.claim(row)


@scenario
def claim_decode_fresh(world: Any) -> tuple[Any, Operation]:
    world.leave_cached(PROMPT[:9], 12)
    row = world.submit(PROMPT, 20, local=5).row
    return world.decode, lambda member: member.claim(row, local=5)


@scenario
def claim_decode_sends_back(world: Any) -> tuple[Any, Operation]:
    world.leave_cached(PROMPT[:9], 12)
    row = world.submit(PROMPT, 20, local=5).row
    return world.decode, lambda member: member.claim(row, local=0)


@scenario
def claim_decode_adopts(world: Any) -> tuple[Any, Operation]:
    row = world.decoding(PROMPT, 20, steps=3).row
    world.reap(world.decode)
    world.decode = world.join(Role.DECODE)
    return world.decode, lambda member: member.claim(row, alone=True)


@scenario
def prefill_chunks_and_publish(world: Any) -> tuple[Any, Operation]:
    row = world.submit(PROMPT, 20).row
    world.prefill.claim(row)

    def operation(member: Any) -> None:
        member.prefill(row, 3)
        member.prefill(row)

    return world.prefill, operation


@scenario
def publish_of_a_twin(world: Any) -> tuple[Any, Operation]:
    other = world.join(Role.PREFILL)
    first, second = world.submit(PROMPT, 20).row, world.submit(PROMPT, 18).row
    world.prefill.claim(first)
    other.claim(second)
    other.prefill(second)
    other.rows.put_back(second, Actor.PREFILL)
    return world.prefill, lambda member: member.prefill(first)


@scenario
def hand_over(world: Any) -> tuple[Any, Operation]:
    row = world.submit(PROMPT, 20).row
    world.prefill.claim(row)
    world.prefill.prefill(row)
    return world.prefill, lambda member: member.rows.hand_over(row)


@scenario
def put_back_prefill(world: Any) -> tuple[Any, Operation]:
    row = world.submit(PROMPT, 20).row
    world.prefill.claim(row)
    world.prefill.prefill(row, 5)
    return world.prefill, lambda member: member.rows.put_back(row, Actor.PREFILL)


@scenario
def put_back_decode(world: Any) -> tuple[Any, Operation]:
    row = world.decoding(PROMPT, 20).row
    return world.decode, lambda member: member.rows.put_back(row, Actor.DECODE)


@scenario
def decode_steps_with_publish(world: Any) -> tuple[Any, Operation]:
    row = world.decoding(PROMPT, 20).row
    return world.decode, lambda member: [member.decode(row) for _ in range(4)]


@scenario
def grow(world: Any) -> tuple[Any, Operation]:
    world.leave_cached([2] * 9, 28)
    row = world.decoding(PROMPT, 30).row
    return world.decode, lambda member: member.rows.grow(row, 30)


@scenario
def finish(world: Any) -> tuple[Any, Operation]:
    row = world.decoding(PROMPT, 20, steps=4).row
    return world.decode, lambda member: member.rows.finish(row, FinishReason.STOP)


@scenario
def fail(world: Any) -> tuple[Any, Operation]:
    row = world.decoding(PROMPT, 20, steps=4).row
    return world.decode, lambda member: member.rows.fail(row, "out of luck", Actor.DECODE)


@scenario
def cancel_unowned(world: Any) -> tuple[Any, Operation]:
    claim = world.ready(PROMPT, 20)
    return world.router, lambda member: member.rows.cancel(claim.row, claim.generation)


@scenario
def cancel_owned(world: Any) -> tuple[Any, Operation]:
    claim = world.decoding(PROMPT, 20)
    world.router.rows.cancel(claim.row, claim.generation)
    return world.decode, lambda member: member.follow_wishes(claim.row)


@scenario
def preempt_unowned(world: Any) -> tuple[Any, Operation]:
    claim = world.ready(PROMPT, 20)
    return world.prefill, lambda one: one.rows.preempt_waiting(claim.row, claim.generation, Actor.PREFILL)


@scenario
def preempt_owned(world: Any) -> tuple[Any, Operation]:
    claim = world.decoding(PROMPT, 20, steps=6)
    world.router.rows.wish_preempted(claim.row, claim.generation)
    return world.decode, lambda member: member.follow_wishes(claim.row)


@scenario
def preempt_queued_blocks(world: Any) -> tuple[Any, Operation]:
    claim = world.submit(PROMPT, 20)
    world.prefill.claim(claim.row)
    world.prefill.prefill(claim.row, 5)
    world.prefill.rows.put_back(claim.row, Actor.PREFILL)
    return world.decode, lambda one: one.rows.preempt_waiting(claim.row, claim.generation, Actor.DECODE)


@scenario
def recycle(world: Any) -> tuple[Any, Operation]:
    claim = world.finished(PROMPT, 20)
    return world.router, lambda member: member.rows.recycle(claim.row, claim.generation)


@scenario
def reap_a_decoder(world: Any) -> tuple[Any, Operation]:
    world.decoding(PROMPT, 20, steps=3)
    cancelled = world.decoding([2, *PROMPT], 20)
    world.router.rows.cancel(cancelled.row, cancelled.generation)
    dead, world.decode = world.decode, world.join(Role.DECODE)
    world.dead = dead
    return world.supervisor, lambda member: reap(member.segment, dead.me.slot, dead.me.incarnation, "killed")


@scenario
def reap_the_third_death(world: Any) -> tuple[Any, Operation]:
    row = world.submit(PROMPT, 20).row
    for _ in range(3):
        dead = world.join(Role.PREFILL)
        assert dead.claim(row, alone=True)
        if world.router.rows.get(row, R.DEATHS_ALONE) < 2:
            world.reap(dead)
    world.dead = dead
    return world.supervisor, lambda member: reap(member.segment, dead.me.slot, dead.me.incarnation, "killed")


@scenario
def reap_a_router(world: Any) -> tuple[Any, Operation]:
    for make in (world.submit, world.ready, world.decoding):
        make(PROMPT, 20)
    world.finished([2], 6)
    dead, world.router = world.router, world.join(Role.ROUTER)
    world.dead = dead
    return world.supervisor, lambda member: reap(member.segment, dead.me.slot, dead.me.incarnation, "killed")


@scenario
def sweep_after_a_router(world: Any) -> tuple[Any, Operation]:
    claim = world.decoding(PROMPT, 20)
    dead, world.router = world.router, world.join(Role.ROUTER)
    world.reap(dead)
    assert world.decode.follow_wishes(claim.row)
    return world.supervisor, lambda member: sweep(member.segment)


# --- pictures ----------------------------------------------------------------------------------------------


class Camera:
    """The segment's content as a hash, without what may differ between two equal states."""

    def __init__(self, world: Any) -> None:
        layout, g = world.layout, world.geometry
        self._words, self._layout, self._geometry = world.mapping.words, layout, g
        stamps = (R.T_CREATED, R.T_QUEUED, R.T_PREFILLING, R.T_READY, R.T_DECODING, R.T_FINISHED, R.T_STATE)
        header = (H.SEQUENCE, H.LOCK_SLOT, H.LOCK_PID, H.REPAIRS, H.LOCK_SECTIONS, H.RING_HEAD, H.DEATHS)
        self._masked = [
            *header,
            *range(H.INTENT_OP, H.INTENT_COUNT + 1),
            *(layout.row(row) + stamp for row in range(g.max_rows) for stamp in stamps),
            *(layout.block(block) + Block.LAST_USE_NS for block in range(g.num_blocks)),
            *(layout.participant(slot) + P.ATTACHED_NS for slot in range(g.max_participants)),
        ]

    def __call__(self) -> int:
        words, layout, g = self._words, self._layout, self._geometry
        copy = memoryview(bytearray(words[: layout.journal])).cast("Q")
        for at in self._masked:
            copy[at] = 0
        for block in range(g.num_blocks):
            if words[layout.blocks + block * BLOCK_WORDS + Block.STATE] != BlockState.CACHED:
                # Tokens of a block that nobody can find are no content.
                at = layout.block_tokens + block * g.block_tokens
                copy[at : at + g.block_tokens] = memoryview(bytes(8 * g.block_tokens)).cast("Q")
        for row in range(g.max_rows):
            if words[layout.row_states + row] != RowState.FAILED:
                at = layout.row(row) + layout.row_error
                copy[at : at + 64] = memoryview(bytes(512)).cast("Q")
        return hash(bytes(copy))


def walk(kit: ModuleType, build: Callable[[Any], tuple[Any, Operation]]) -> int:
    """Kill the operation at each of its stores; returns how many there are."""
    world = kit.World()
    victim, operation = build(world)
    dead = getattr(world, "dead", None)
    words, answers = world.mapping.words, {}
    for row, state in enumerate(world.router.rows.states()):
        if state not in (RowState.FREE, RowState.FILLING):
            number = world.router.rows.get(row, R.NUM_PROMPT)
            answers[row] = kit.answer(
                world.router.rows.tokens(row, 0, number), world.router.rows.get(row, R.LIMIT_TOKENS)
            )
    stood, picture = bytes(words), Camera(world)

    # Without a death: the states between sections, which are all that anybody may ever find.
    legal = {picture()}
    watched = kit.DyingWords(words)
    watched.after_store = lambda: words[H.INTENT_OP] or legal.add(picture())
    operation(victim.through(watched))
    assert len(legal) > 1, "the operation changes nothing"
    points = watched.stores

    for die_at in range(1, points + 1):
        words[:] = memoryview(stood).cast("Q")
        with pytest.raises(kit.Died):
            operation(victim.through(kit.DyingWords(words, die_at=die_at)))
        survivor = Segment(world.mapping, world.geometry)
        with survivor.lock.section(Op.CLOSE):
            pass
        assert picture() in legal, (build.__name__, die_at)
        assert verify(survivor) == [], (build.__name__, die_at)
        go_on(world, victim, dead)
        for row, tokens in world.run_to_end().items():
            if row in answers:
                assert tokens == answers[row][: len(tokens)]
    world.close()
    return points


def go_on(world: Any, victim: Any, dead: Any) -> None:
    """What the supervisor does, or the next one where it was itself the victim."""
    members = {name: getattr(world, name) for name in ("router", "prefill", "decode")}
    if victim is not world.supervisor:
        world.reap(victim)
    if dead is not None:
        world.reap(dead)
    world.check()
    for name, member in members.items():
        if member is victim:
            # The walk comes back to the same words: only the members may change, and change back.
            setattr(world, name, world.join(member.me.role))
    world.run_to_end()
    for name, member in members.items():
        setattr(world, name, member)


@pytest.mark.parametrize("name", SCENARIOS)
def test_death_at_every_store(kit: ModuleType, name: str) -> None:
    points = walk(kit, SCENARIOS[name])
    print(f"{name}: {points} points")
    assert points >= MINIMUM.get(name, 10)


# Where a store less would mean that the scenario no longer does what its name says.
MINIMUM = {
    "attach": 80,
    "claim_prefill_with_cached_prefix": 60,
    "claim_prefill_with_eviction": 150,
    "claim_prefill_gains_what_others_published": 70,
    "claim_prefill_sends_on": 60,
    "grow": 60,
    "hand_over": 3,
    "put_back_prefill": 2,
    "put_back_decode": 3,
    "publish_of_a_twin": 60,
}


def test_the_walk_is_long(kit: ModuleType) -> None:
    total = 0
    for build in SCENARIOS.values():
        world = kit.World()
        victim, operation = build(world)
        dry = kit.DyingWords(world.mapping.words)
        operation(victim.through(dry))
        total += dry.stores
    print(f"{total} points in {len(SCENARIOS)} operations")
    assert total > 1500


@pytest.mark.parametrize("name", ["preempt_owned", "claim_prefill_with_eviction", "publish_of_a_twin"])
def test_death_during_the_repair_of_every_fifth_death(kit: ModuleType, name: str) -> None:
    world = kit.World()
    victim, operation = SCENARIOS[name](world)
    words, picture = world.mapping.words, Camera(world)
    stood = bytes(words)
    dry = kit.DyingWords(words)
    operation(victim.through(dry))
    points = 0
    for die_at in range(1, dry.stores + 1, 5):
        words[:] = memoryview(stood).cast("Q")
        with pytest.raises(kit.Died):
            operation(victim.through(kit.DyingWords(words, die_at=die_at)))
        cut_off, repaired = bytes(words), None
        for second in range(1, 1000):
            words[:] = memoryview(cut_off).cast("Q")
            repairer = world.supervisor.through(kit.DyingWords(words, die_at=second))
            done = False
            with contextlib.suppress(kit.Died), repairer.segment.lock.section(Op.CLOSE):
                done = True
            world.repair()
            now = picture()
            assert repaired in (None, now), (name, die_at, second)
            repaired, points = now, points + 1
            if done:
                break
        assert verify(world.supervisor.segment) == []
    assert points > 100


# --- real processes, real signals --------------------------------------------------------------------------


def toy_engine(kit: ModuleType, name: SegmentName, role: Role) -> Callable[[Callable[[object], None]], None]:
    """A daemon that takes whatever it can get and works on it, for ever."""

    def body(say: Callable[[object], None]) -> None:
        segment = Segment.open(name)
        member = kit.Member(segment, segment.attach(role))
        say((member.me.slot, member.me.incarnation))
        rows, state = segment.rows, member.me.claims[0]
        while True:
            for row in rows.in_state(state):
                member.claim(row, alone=not member.owned)
            for row in member.owned:
                if member.follow_wishes(row):
                    continue
                if role is Role.PREFILL:
                    member.prefill(row)
                    rows.hand_over(row)
                elif not member.decode(row):
                    rows.preempt(row, Actor.DECODE)

    return body


def test_daemons_killed_at_random_lose_no_request(
    kit: ModuleType, shared: Segment, name: SegmentName, fork: Fork
) -> None:
    """Two daemons, a router that always has work for them, and a supervisor that kills one, again and again."""
    router = kit.Member(shared, shared.attach(Role.ROUTER))
    chance, wanted = random.Random(4), {}
    daemons = {role: fork(toy_engine(kit, name, role)) for role in (Role.PREFILL, Role.DECODE)}
    ids = {role: tuple(map(int, child.line()[1:-1].split(","))) for role, child in daemons.items()}
    served = kills = 0
    give_up = time.monotonic() + kit.WATCHDOG_S
    while kills < 25 or served < 40:
        assert time.monotonic() < give_up, (kills, served)
        prompt = [chance.randrange(2) for _ in range(chance.randrange(1, 16))]
        limit = len(prompt) + chance.randrange(1, 12)
        if claim := router.submit(prompt, limit):
            wanted[claim.row] = (claim.generation, kit.answer(prompt, limit))
        for row, state in enumerate(shared.rows.states()):
            if state == RowState.FINISHED:
                generation, expected = wanted.pop(row)
                assert shared.rows.new_tokens(row, generation, 0) == expected
                assert shared.rows.recycle(row, generation)
                served += 1
            assert state != RowState.CANCELLED
            if state == RowState.FAILED:
                assert shared.rows.error_text(row) == "killed"
                assert shared.rows.recycle(row, wanted.pop(row)[0])
        if chance.random() < 0.2:
            time.sleep(chance.random() * 0.004)
            role = chance.choice(list(daemons))
            os.kill(daemons[role].pid, signal.SIGKILL)
            assert daemons[role].wait() == -signal.SIGKILL
            reap(shared, *ids[role], "killed")
            daemons[role] = fork(toy_engine(kit, name, role))
            ids[role] = tuple(map(int, daemons[role].line()[1:-1].split(",")))
            kills += 1
    for role, child in daemons.items():
        child.kill()
        reap(shared, *ids[role], "killed")
    assert verify(shared) == []
    print(f"{kills} kills, {served} answers, {shared.words[H.REPAIRS]} repairs")

"""Random histories of a small segment: several daemons, shortage, deaths anywhere, and the same answers."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pdctl.transport.layout import H, R
from pdctl.transport.rows import OWNED, TERMINAL, Actor, Claim, RowState
from pdctl.transport.segment import Role

# Beginnings that requests share, and a rest of their own.
STEM = [0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 2, 2, 0, 1, 1]
PROMPTS = st.builds(
    lambda stem, rest: STEM[:stem] + rest, st.integers(0, 16), st.lists(st.integers(0, 1), min_size=1, max_size=6)
)
PICK = st.integers(0, 1000)
# Shrinking a history takes minutes; switch it on to study one.
SHRINK = False
ROLES = [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE]


class Histories(RuleBasedStateMachine):
    """The members' operations in any order; `self.asked` is all that the model knows."""

    kit: ModuleType

    def __init__(self) -> None:
        super().__init__()
        self.world = self.kit.World()
        self.members = [self.world.prefill, self.world.decode, *map(self.world.join, ROLES[1:3])]
        self.asked: dict[tuple[int, int], tuple[list[int], int]] = {}
        self.cancelled: set[tuple[int, int]] = set()

    # --- what daemons do -----------------------------------------------------------------------------------

    def act(self, member: Any, operation: str, pick: int) -> None:
        """One operation of a member, on one of the rows that it can do it to."""
        rows, owned = member.rows, member.owned
        actor = member.me.claims[2]
        if operation == "claim":
            waiting = rows.in_state(member.me.claims[0])
            if waiting:
                local = (None, 0, 3)[pick % 3]
                member.claim(waiting[pick % len(waiting)], alone=not owned, local=local)
            return
        if not owned:
            return
        row = owned[pick % len(owned)]
        if operation == "put_back":
            rows.put_back(row, actor)
        elif not member.follow_wishes(row):
            self.work(member, row, pick)

    def work(self, member: Any, row: int, pick: int) -> None:
        rows = member.rows
        if member.me.role is Role.PREFILL:
            last = rows.get(row, R.NUM_TOKENS) - 1
            member.prefill(row, rows.get(row, R.KV_LEN) + 1 + pick % 7)
            if rows.get(row, R.KV_LEN) == last:
                rows.hand_over(row)
        elif not member.decode(row):
            self.make_room(member, row)

    def make_room(self, member: Any, row: int) -> None:
        """As engines do: rows that nobody owns first, the youngest first, then a wish, at last the own row."""
        rows = member.rows
        order = {other: rows.get(other, R.ORDER) for other in range(rows.num_rows)}
        idle = [other for other in rows.in_state(RowState.READY) if rows.get(other, R.NUM_BLOCKS)]
        busy = [other for other in rows.in_state(RowState.DECODING) if other not in member.owned]
        if idle:
            youngest = max(idle, key=order.__getitem__)
            assert rows.preempt_waiting(youngest, rows.get(youngest, R.GENERATION), Actor.DECODE)
        elif busy and order[max(busy, key=order.__getitem__)] > order[row]:
            youngest = max(busy, key=order.__getitem__)
            rows.wish_preempted(youngest, rows.get(youngest, R.GENERATION))
        else:
            assert rows.preempt(row, Actor.DECODE)

    # --- rules ---------------------------------------------------------------------------------------------

    @initialize(prompts=st.lists(PROMPTS, max_size=3))
    def fill(self, prompts: list[list[int]]) -> None:
        for prompt in prompts:
            self.submit(prompt, 5, 0)

    @rule(prompt=PROMPTS, more=st.integers(1, 10), local=st.integers(0, 6))
    def submit(self, prompt: list[int], more: int, local: int) -> None:
        limit = len(prompt) + more
        claim = self.world.router.submit(prompt, limit, local=local)
        if claim is not None:
            self.note(claim, prompt, limit)

    def note(self, claim: Claim, prompt: list[int], limit: int) -> None:
        assert (claim.row, claim.generation) not in self.asked
        self.asked[claim.row, claim.generation] = (prompt, limit)

    @rule(who=PICK, pick=PICK, operation=st.sampled_from(["claim", "claim", "work", "work", "work", "put_back"]))
    def act_alive(self, who: int, pick: int, operation: str) -> None:
        self.act(self.members[who % len(self.members)], operation, pick)

    @rule(who=PICK, times=st.integers(1, 12))
    def work_on(self, who: int, times: int) -> None:
        member = self.members[who % len(self.members)]
        self.act(member, "claim", who)
        for time in range(times):
            self.act(member, "work", who + time)

    @rule(prompt=PROMPTS, more=st.integers(1, 10), picks=st.lists(PICK, min_size=5, max_size=40))
    def busy_time(self, prompt: list[int], more: int, picks: list[int]) -> None:
        """A request comes and everybody works for a while."""
        self.submit(prompt, more, 0)
        for pick in picks:
            for member in self.members:
                self.act(member, "claim" if pick % 4 == 0 else "work", pick)
        self.collect()

    @rule(who=PICK, pick=PICK, operation=st.sampled_from(["claim", "work", "work"]), store=st.integers(0, 120))
    def die_inside(self, who: int, pick: int, operation: str, store: int) -> None:
        """A daemon is killed before some store of an operation, or (0) between two."""
        busy = [index for index, member in enumerate(self.members) if member.owned] or [0]
        index = busy[who % len(busy)]
        member = self.members[index]
        dying = member.through(self.kit.DyingWords(self.world.mapping.words, die_at=store))
        try:
            self.act(dying, operation, pick)
        except self.kit.Died:
            self.bury(index)
        if store == 0:
            self.bury(index)

    def bury(self, index: int) -> None:
        member = self.members[index]
        self.world.reap(member)
        self.members[index] = self.world.join(member.me.role)
        if member is self.world.prefill:
            self.world.prefill = self.members[index]
        if member is self.world.decode:
            self.world.decode = self.members[index]

    @rule(who=PICK, pick=PICK, store=st.integers(1, 60))
    def die_and_lie_there(self, who: int, pick: int, store: int) -> None:
        """The section stays cut off until somebody else takes the lock."""
        member = self.members[who % len(self.members)]
        dying = member.through(self.kit.DyingWords(self.world.mapping.words, die_at=store))
        try:
            self.act(dying, "claim", pick)
        except self.kit.Died:
            other = self.members[(who + 1) % len(self.members)]
            self.act(other, "work", pick)
            self.act(other, "claim", pick)
            self.bury(who % len(self.members))

    @rule(prompt=PROMPTS, store=st.integers(1, 1000))
    def router_may_die(self, prompt: list[int], store: int) -> None:
        dying = self.world.router.through(self.kit.DyingWords(self.world.mapping.words, die_at=store))
        try:
            claim = dying.submit(prompt, len(prompt) + 3)
        except self.kit.Died:
            self.world.reap(self.world.router)
            self.world.router = self.world.join(Role.ROUTER)
            self.cancelled |= set(self.asked)
        else:
            if claim is not None:
                self.note(claim, prompt, len(prompt) + 3)

    @precondition(lambda self: self.asked)
    @rule(pick=PICK, really=st.integers(0, 3))
    def cancel(self, pick: int, really: int) -> None:
        if really:
            return
        row, generation = sorted(self.asked)[pick % len(self.asked)]
        self.world.router.rows.cancel(row, generation)
        self.cancelled.add((row, generation))

    @rule(who=PICK, pick=PICK)
    def wish_preemption(self, who: int, pick: int) -> None:
        rows = self.world.router.rows
        if decoding := rows.in_state(RowState.DECODING):
            row = decoding[pick % len(decoding)]
            rows.wish_preempted(row, rows.get(row, R.GENERATION))

    @rule()
    def collect(self) -> None:
        """What the router does with rows at their end."""
        rows = self.world.router.rows
        for row, state in enumerate(rows.states()):
            if state in TERMINAL:
                generation = rows.get(row, R.GENERATION)
                self.judge(row, generation, rows.new_tokens(row, generation, 0))
                assert rows.recycle(row, generation)

    def judge(self, row: int, generation: int, tokens: list[int]) -> None:
        prompt, limit = self.asked.pop((row, generation))
        expected = self.kit.answer(prompt, limit)
        state = self.world.router.rows.state(row)
        if state is RowState.FAILED:
            assert self.world.router.rows.error_text(row) == "killed by the test"
        if state is RowState.FINISHED:
            assert tokens == expected
        else:
            assert state is RowState.FAILED or (row, generation) in self.cancelled
            assert tokens == expected[: len(tokens)]

    # --- always --------------------------------------------------------------------------------------------

    @invariant()
    def everything_adds_up(self) -> None:
        if self.world.mapping.words[H.INTENT_OP]:
            self.world.repair()
        self.world.check()
        rows = self.world.router.rows
        owners = {(member.me.slot + 1, member.me.incarnation) for member in self.members}
        for row, state in enumerate(rows.states()):
            assert state != RowState.FILLING
            if state in OWNED:
                assert (rows.get(row, R.OWNER), rows.get(row, R.OWNER_INCARNATION)) in owners

    def teardown(self) -> None:
        self.collect()
        waiting = dict(self.asked)
        for row, tokens in self.world.run_to_end(self.members).items():
            key = (row, self.world.router.rows.get(row, R.GENERATION))
            if key in waiting:
                expected = self.kit.answer(*waiting.pop(key))
                if key in self.cancelled:
                    assert tokens == expected[: len(tokens)]
                else:
                    assert tokens == expected
        assert set(waiting) <= self.cancelled, "a request was lost"
        self.world.close()


def test_histories(kit: ModuleType) -> None:
    Histories.kit = kit
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=150,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
            phases=[Phase.explicit, Phase.reuse, Phase.generate, *([Phase.shrink] if SHRINK else [])],
        ),
    )

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.transport.errors import CapacityError, CorruptSegmentError, PdctlError, UsageError
from pdctl.transport.layout import (
    LOGPROB_RING,
    LOGPROB_WORDS,
    MAX_LOGPROBS,
    ROW_ERROR_WORDS,
    ROW_PARAM_WORDS,
    ROW_REQUEST_ID_WORDS,
    H,
    P,
    R,
)
from pdctl.transport.layout import B as Block
from pdctl.transport.lock import Op
from pdctl.transport.rows import (
    MAX_DEATHS_ALONE,
    OWNED,
    TERMINAL,
    TRANSITIONS,
    Actor,
    FinishReason,
    RowParams,
    Rows,
    RowState,
    TokenLogprobs,
    Wish,
    float_to_word,
    word_to_float,
)
from pdctl.transport.segment import Role

S = RowState
MakeWorld = Callable[..., Any]

# Who may move what, told once more and by hand: letters are Router, Prefill, Decode, Supervisor.
ALLOWED = """
    FREE       -> FILLING     R
    FILLING    -> QUEUED      R
    FILLING    -> READY       R
    FILLING    -> FREE        R  S
    QUEUED     -> PREFILLING   P
    QUEUED     -> READY        P
    QUEUED     -> CANCELLED   R  S
    QUEUED     -> FAILED       P S
    PREFILLING -> READY        P
    PREFILLING -> QUEUED       P S
    PREFILLING -> CANCELLED    P S
    PREFILLING -> FAILED       P S
    READY      -> DECODING      D
    READY      -> QUEUED      RPDS
    READY      -> CANCELLED   R  S
    READY      -> FAILED        DS
    DECODING   -> FINISHED      D
    DECODING   -> READY         DS
    DECODING   -> QUEUED        D
    DECODING   -> CANCELLED     DS
    DECODING   -> FAILED        DS
    FINISHED   -> FREE        R  S
    CANCELLED  -> FREE        R  S
    FAILED     -> FREE        R  S
"""


def allowed_moves() -> set[tuple[RowState, RowState, Actor]]:
    actors = {"R": Actor.ROUTER, "P": Actor.PREFILL, "D": Actor.DECODE, "S": Actor.SUPERVISOR}
    moves = set()
    for line in ALLOWED.strip().splitlines():
        before, _, after, who = line.split(maxsplit=3)
        moves |= {(S[before], S[after], actors[letter]) for letter in who.replace(" ", "")}
    return moves


# --- the table ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", S)
def test_every_move_is_allowed_or_refused_as_written(before: RowState) -> None:
    moves = allowed_moves()
    for after, actor in itertools.product(S, Actor):
        if (before, after, actor) in moves:
            Rows._check_move(3, before, after, actor)
        else:
            message = f"row 3: {actor.name} may not move {before.name} to {after.name}"
            with pytest.raises(CorruptSegmentError, match=message):
                Rows._check_move(3, before, after, actor)


def test_the_table_has_no_other_moves() -> None:
    assert {(a, b, actor) for (a, b), actors in TRANSITIONS.items() for actor in actors} == allowed_moves()
    assert {before for before, after in TRANSITIONS if after is S.FREE} == TERMINAL | {S.FILLING}
    for state in S:
        assert any(before is state for before, _ in TRANSITIONS), f"{state.name} is a dead end"


OPERATIONS: dict[str, tuple[Callable[[Any, int], object], Actor]] = {
    "hand_over": (lambda w, row: w.prefill.rows.hand_over(row), Actor.PREFILL),
    "put_back prefill": (lambda w, row: w.prefill.rows.put_back(row, Actor.PREFILL), Actor.PREFILL),
    "put_back decode": (lambda w, row: w.decode.rows.put_back(row, Actor.DECODE), Actor.DECODE),
    "finish": (lambda w, row: w.decode.rows.finish(row, FinishReason.STOP), Actor.DECODE),
    "claim prefill": (lambda w, row: w.prefill.claim(row, alone=True), Actor.PREFILL),
    "claim decode": (lambda w, row: w.decode.claim(row, alone=True), Actor.DECODE),
    "claim decode, too much": (lambda w, row: w.decode.claim(row, alone=True, local=0), Actor.DECODE),
    "recycle": (lambda w, row: w.router.rows.recycle(row, 1), Actor.ROUTER),
    "cancel": (lambda w, row: w.router.rows.cancel(row, 1), Actor.ROUTER),
    **{
        f"{name} {actor.name}": (lambda w, row, run=run, actor=actor: run(w.decode.rows, row, actor), actor)
        for actor in Actor
        for name, run in {
            "end_cancelled": lambda rows, row, actor: rows.end_cancelled(row, actor),
            "fail": lambda rows, row, actor: rows.fail(row, "why", actor),
            "preempt": lambda rows, row, actor: rows.preempt(row, actor),
            "preempt_waiting": lambda rows, row, actor: rows.preempt_waiting(row, 1, actor),
        }.items()
    },
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_operation_moves_a_row_past_the_table(world: Any, operation: str) -> None:
    run, actor = OPERATIONS[operation]
    row = world.ready([1, 2, 0, 1, 2], 9).row
    words, moved = world.mapping.words, 0
    stood = bytes(words[: world.layout.meta_words])
    for before in S:
        words[: world.layout.meta_words] = memoryview(stood).cast("Q")
        words[world.layout.row_states + row] = before
        try:
            run(world, row)
        except CorruptSegmentError:
            world.repair()
            assert world.router.rows.state(row) is before
        after = world.router.rows.state(row)
        if after is not before:
            assert actor in TRANSITIONS[before, after]
            moved += 1
    never = ("preempt ROUTER", "preempt SUPERVISOR", "end_cancelled ROUTER", "fail ROUTER")
    assert moved > 0 or operation in never, "it never moves"


# --- submit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "limit", "params", "message"),
    [
        ([], 5, {}, "0 prompt tokens"),
        ([1] * 5, 5, {}, "5 prompt tokens, limit 5"),
        ([1] * 5, 33, {}, "limit 33: a row holds 32"),
        ([1] * 40, 50, {}, "40 prompt tokens"),
        ([-1], 5, {}, "-1"),
        ([1 << 32], 5, {}, str(1 << 32)),
        ([1], 5, {"stop_ids": (-1,)}, "-1"),
        ([1], 5, {"stop_ids": (1 << 32,)}, str(1 << 32)),
        ([1], 5, {"stop_ids": (1,) * (ROW_PARAM_WORDS + 1)}, f"{ROW_PARAM_WORDS + 1} stop ids"),
        (
            [1],
            5,
            {"stop_ids": (1,) * 1025, "logit_bias": ((1, 1.0),) * 1024},
            f"1025 stop ids and 1024 logit biases: at most {ROW_PARAM_WORDS}",
        ),
        ([1], 5, {"logit_bias": ((-1, 1.0),)}, "logit bias id out of range: -1"),
        ([1], 5, {"logit_bias": ((1 << 32, 1.0),)}, str(1 << 32)),
        ([1], 5, {"logit_bias": ((1, 1e39),)}, "beyond float32"),
        ([1], 5, {"min_tokens": -1}, "min_tokens"),
        ([1], 5, {"num_logprobs": -2}, "num_logprobs -2"),
        ([1], 5, {"num_logprobs": MAX_LOGPROBS + 1}, f"num_logprobs {MAX_LOGPROBS + 1}"),
        ([1], 5, {"top_k": -1}, "top_k"),
        ([1], 5, {"top_k": 1 << 64}, "top_k"),
    ],
)
def test_what_cannot_be_stored_is_refused_and_takes_no_row(
    world: Any, tokens: list[int], limit: int, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        world.router.submit(tokens, limit, **params)
    assert set(world.router.rows.states()) == {S.FREE}
    assert world.mapping.words[H.REQUESTS] == 0


def test_a_bad_deadline_takes_no_row(world: Any) -> None:
    with pytest.raises(UsageError, match="deadline"):
        world.router.rows.submit(
            world.router.me,
            request_id="r",
            tokens=[1],
            limit_tokens=2,
            params=RowParams(),
            local_prefill_tokens=0,
            deadline_ns=-5,
        )
    assert set(world.router.rows.states()) == {S.FREE}


def test_what_can_never_fit_the_pool_is_refused_with_both_numbers(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=3)
    with pytest.raises(CapacityError, match="13 tokens: 4 blocks, the pool has 3"):
        world.router.submit([1], 13)
    assert world.router.submit([1], 12) is not None


@given(
    prompt=st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=31),
    temperature=st.floats(allow_nan=False),
    top_p=st.floats(0, 1),
    top_k=st.integers(0, 1 << 32),
    min_p=st.floats(0, 1),
    seed=st.integers(0, (1 << 64) - 1),
    min_tokens=st.integers(0, (1 << 64) - 1),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.lists(st.tuples(st.integers(0, (1 << 32) - 1), st.floats(-100, 100, width=32)), max_size=9).map(
        tuple
    ),
    num_logprobs=st.none() | st.integers(0, MAX_LOGPROBS),
    ignore_eos=st.booleans(),
    stop_ids=st.lists(st.integers(0, (1 << 32) - 1), max_size=9).map(tuple),
    request_id=st.text(max_size=200),
)
def test_a_row_holds_what_was_asked(kit: ModuleType, prompt: list[int], request_id: str, **asked: Any) -> None:
    world = kit.World()
    claim = world.router.rows.submit(
        world.router.me,
        request_id=request_id,
        tokens=prompt,
        limit_tokens=32,
        params=RowParams(**asked),
        local_prefill_tokens=0,
        deadline_ns=77,
    )
    rows = world.decode.rows
    assert rows.params(claim.row) == RowParams(**asked)
    assert rows.tokens(claim.row, 0, rows.count_tokens(claim.row)) == prompt
    kept = rows.request_id(claim.row)
    expected = request_id.replace("\0", " ")
    if len(expected.encode("utf-8", "replace")) < 8 * ROW_REQUEST_ID_WORDS:
        assert kept == expected
    else:
        assert expected.startswith(kept)
        assert len(kept.encode()) >= 8 * ROW_REQUEST_ID_WORDS - 4
    assert rows.get(claim.row, R.DEADLINE_NS) == 77
    assert rows.get(claim.row, R.LIMIT_TOKENS) == 32


def test_a_negative_seed_is_taken_modulo_2_64(world: Any) -> None:
    row = world.submit([1], 2, seed=-1).row
    assert world.decode.rows.params(row).seed == (1 << 64) - 1


def test_a_full_segment_means_later_not_error(world: Any) -> None:
    claims = [world.submit([1, 2], 4) for _ in range(world.geometry.max_rows)]
    assert world.router.submit([1, 2], 4) is None
    world.router.rows.cancel(claims[2].row, claims[2].generation)
    assert world.router.submit([1, 2], 4) is None, "not before it is recycled"
    world.router.rows.recycle(claims[2].row, claims[2].generation)
    again = world.submit([1, 2], 4)
    assert (again.row, again.generation) == (claims[2].row, claims[2].generation + 1)


def test_a_new_request_inherits_nothing(world: Any) -> None:
    old = world.decoding([1, 2, 0, 1, 2], 9, steps=2)
    world.router.rows.wish_preempted(old.row, old.generation)
    world.decode.rows.fail(old.row, "a long story", Actor.DECODE)
    world.router.rows.cancel(old.row, old.generation)
    assert world.router.rows.error_text(old.row) == "a long story"
    world.router.rows.recycle(old.row, old.generation)
    new = world.submit([2, 1], 9)
    assert new.row == old.row
    rows = world.router.rows
    mine = (R.GENERATION, R.ORDER, R.OWNER, R.OWNER_INCARNATION, R.CLIENT, R.CLIENT_INCARNATION)
    stamps = (R.T_CREATED, R.T_QUEUED, R.T_STATE)
    asked = (R.NUM_PROMPT, R.NUM_TOKENS, R.LIMIT_TOKENS, R.READ_TOKENS, R.TOP_P, R.REPETITION_PENALTY, *stamps)
    assert {name.name: rows.get(new.row, name) for name in R if name not in mine + asked} == {
        name.name: 0 for name in R if name not in mine + asked
    }
    assert rows.error_text(new.row) == ""
    assert rows.count_tokens(new.row) == 2
    assert rows.new_tokens(new.row, new.generation, 0) == [2, 1]


@pytest.mark.parametrize(
    ("cached_blocks", "prompt_tokens", "local", "state"),
    [
        (0, 1, 0, S.READY),
        (0, 2, 0, S.QUEUED),
        (0, 2, 1, S.READY),
        (0, 5, 4, S.READY),
        (0, 5, 3, S.QUEUED),
        (1, 5, 0, S.READY),
        (1, 6, 0, S.QUEUED),
        (1, 6, 1, S.READY),
        (2, 9, 0, S.READY),
        (2, 8, 3, S.READY),
        (2, 8, 2, S.QUEUED),
    ],
)
def test_little_to_prefill_goes_straight_to_decode(
    world: Any, cached_blocks: int, prompt_tokens: int, local: int, state: RowState
) -> None:
    prompt = [0, 1, 2, 1, 0, 2, 2, 1, 0, 1][:prompt_tokens]
    if cached_blocks:
        world.leave_cached([*prompt[: 4 * cached_blocks], 2], 4 * cached_blocks + 2)
    assert world.router.rows.state(world.submit(prompt, 32, local=local).row) is state


# --- tokens ------------------------------------------------------------------------------------------------


def test_a_committed_slot_counts_although_the_hint_is_stale(world: Any) -> None:
    claim = world.decoding([1, 2, 0], 20, steps=3)
    rows = world.decode.rows
    rows.put(claim.row, R.NUM_TOKENS, 4)
    assert rows.count_tokens(claim.row) == 6
    rows.put_back(claim.row, Actor.DECODE)
    again = world.decode.claim(claim.row)
    assert again.num_tokens == 6
    assert rows.get(claim.row, R.NUM_TOKENS) == 6


def test_the_slot_is_the_commit_and_comes_before_the_hint(world: Any, kit: ModuleType) -> None:
    claim = world.decoding([1, 2, 0], 20)
    seen = []
    words = kit.DyingWords(world.mapping.words)
    words.after_store = lambda: seen.append(
        (world.router.rows.new_tokens(claim.row, claim.generation, 3), world.router.rows.get(claim.row, R.NUM_TOKENS))
    )
    world.decode.through(words).rows.commit_token(claim.row, claim.generation, 3, 2)
    assert seen[:2] == [([2], 3), ([2], 4)]
    assert world.router.rows.get(claim.row, R.ATTEMPTS) == 0, "what follows: no death before this one counts"


def test_tokens_of_the_rows_last_request_are_never_read(world: Any) -> None:
    old = world.finished([1, 2, 0], 20)
    assert len(world.router.rows.new_tokens(old.row, old.generation, 3)) == 17
    world.router.rows.recycle(old.row, old.generation)
    new = world.submit([1, 2, 0], 20)
    assert new.row == old.row
    rows = world.router.rows
    assert rows.count_tokens(new.row) == 3
    assert rows.new_tokens(new.row, new.generation, 3) == []
    assert rows.new_tokens(new.row, old.generation, 3) == rows.new_tokens(new.row, old.generation, 3)
    assert rows.new_tokens(new.row, old.generation, 0) == []


def logprobs_of(position: int, number: int) -> TokenLogprobs:
    """Values that float32 holds exactly, and that no other position has."""
    top = tuple((1000 * position + index, -position - index / 32) for index in range(number))
    return TokenLogprobs(token=position % 3, logprob=-position / 4, top=top)


def test_the_longest_parameters_fit(world: Any) -> None:
    stop_ids = tuple(range(ROW_PARAM_WORDS // 2))
    logit_bias = tuple((token, float(token % 100)) for token in range(ROW_PARAM_WORDS // 2))
    row = world.submit([1, 2, 0], 9, stop_ids=stop_ids, logit_bias=logit_bias, num_logprobs=MAX_LOGPROBS).row
    rows = world.decode.rows
    assert rows.params(row) == RowParams(stop_ids=stop_ids, logit_bias=logit_bias, num_logprobs=MAX_LOGPROBS)
    assert rows.tokens(row, 0, 3) == [1, 2, 0]


@pytest.mark.parametrize("number", [0, 1, MAX_LOGPROBS])
def test_log_probabilities_go_around_the_ring_with_their_tokens(make_world: MakeWorld, number: int) -> None:
    world = make_world(max_context=256, num_blocks=64)
    claim = world.submit([1, 2, 0], 256, num_logprobs=number)
    owner, reader = world.decode.rows, world.router.rows
    read = written = 3
    for step in range(3 * LOGPROB_RING):
        assert owner.has_logprob_room(claim.row, written)
        owner.put_logprobs(claim.row, written, logprobs_of(written, number))
        owner.commit_token(claim.row, claim.generation, written, written % 3)
        written += 1
        if step % 7 == 0:
            stop = written - step % 3
            assert reader.take_logprobs(claim.row, read, stop) == [
                logprobs_of(at, number) for at in range(read, stop)
            ]
            read = stop
    # Unread ones are never overwritten: there is room for the ring's length beyond what was read.
    while owner.has_logprob_room(claim.row, written):
        owner.put_logprobs(claim.row, written, logprobs_of(written, number))
        written += 1
    assert written == read + LOGPROB_RING
    assert reader.take_logprobs(claim.row, read, written) == [logprobs_of(at, number) for at in range(read, written)]
    # The ring ends where the row does.
    assert world.router.rows.get(claim.row + 1, R.GENERATION) == 0


def test_log_probabilities_are_there_before_the_token_that_commits_them(world: Any, kit: ModuleType) -> None:
    claim = world.submit([1, 2, 0], 20, num_logprobs=2)
    words, seen = kit.DyingWords(world.mapping.words), []

    def look() -> None:
        tokens = world.router.rows.new_tokens(claim.row, claim.generation, 3)
        if tokens:
            seen.append(world.router.rows.take_logprobs(claim.row, 3, 3 + len(tokens)))

    words.after_store = look
    rows = world.decode.through(words).rows
    rows.put_logprobs(claim.row, 3, logprobs_of(3, 2))
    rows.commit_token(claim.row, claim.generation, 3, 0)
    assert seen == [[logprobs_of(3, 2)]] * 2


def test_a_stale_handle_changes_nothing(world: Any) -> None:
    old = world.finished([1, 2, 0], 6)
    world.router.rows.recycle(old.row, old.generation)
    new = world.finished([1, 2, 0], 6)
    rows = world.router.rows
    assert new.row == old.row
    assert rows.recycle(old.row, old.generation) is False
    rows.cancel(old.row, old.generation)
    assert rows.get(new.row, R.CANCEL) == 0
    assert rows.state(new.row) is S.FINISHED


def test_generations_never_become_zero(world: Any) -> None:
    """Generation 0 would make untouched token slots look committed."""
    rows = world.router.rows
    for row in range(world.geometry.max_rows):
        rows.put(row, R.GENERATION, (1 << 32) - 1)
    claim = world.submit([1], 5)
    assert claim.generation == 1
    assert rows.count_tokens(claim.row) == 1


def test_a_row_can_be_filled_to_its_last_slot(world: Any) -> None:
    claim = world.finished([1, 2, 0], 32)
    assert world.router.rows.count_tokens(claim.row) == 32
    assert len(world.router.rows.new_tokens(claim.row, claim.generation, 0)) == 32


@given(st.floats())
def test_floats_survive_their_words(value: float) -> None:
    assert repr(word_to_float(float_to_word(value))) == repr(value)


# --- stamps ------------------------------------------------------------------------------------------------


def test_every_state_stamps_its_entry(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(100)
    monkeypatch.setattr("pdctl.transport.rows.time.monotonic_ns", lambda: next(clock))
    claim = world.finished([1, 2, 0], 6)
    rows = world.router.rows
    order = [R.T_CREATED, R.T_QUEUED, R.T_PREFILLING, R.T_READY, R.T_DECODING, R.T_FINISHED]
    stamps = [rows.get(claim.row, stamp) for stamp in order]
    assert stamps == sorted(set(stamps))
    assert stamps[0] >= 100
    assert rows.get(claim.row, R.T_STATE) == stamps[-1]


@pytest.mark.parametrize("end", ["cancel", "fail"])
def test_other_ends_are_stamped_too(world: Any, end: str) -> None:
    claim = world.submit([1, 2, 0], 6)
    rows = world.supervisor.rows
    rows.cancel(claim.row, claim.generation) if end == "cancel" else rows.fail(claim.row, "late", Actor.SUPERVISOR)
    assert rows.get(claim.row, R.T_FINISHED) == rows.get(claim.row, R.T_STATE) > 0


# --- claim -------------------------------------------------------------------------------------------------

B = 4


@pytest.mark.parametrize("number", [1, 2, B - 1, B, B + 1, 2 * B, 2 * B + 1, 3 * B, 3 * B + 1])
def test_a_fully_cached_prompt_still_computes_its_last_token_in_a_private_block(world: Any, number: int) -> None:
    prompt = [(7 * i) % 3 for i in range(3 * B + 1)]
    world.leave_cached(prompt, 3 * B + 2)
    claim = world.submit(prompt[:number], 32)
    daemon = world.prefill if world.router.rows.state(claim.row) is S.QUEUED else world.decode
    taken = daemon.claim(claim.row)
    cached = (number - 1) // B * B
    rows = world.router.rows
    assert taken.kv_len == cached
    assert rows.get(claim.row, R.CACHED_TOKENS) == cached
    table = rows.block_table(claim.row)
    assert len(table) == number // B + 1, "positions 0..N, the next token's too"
    assert [world.router.pool.refs(block) for block in table[: cached // B]] == [1] * (cached // B)
    world.check()
    last = (number - 1) // B
    assert all(world.mapping.words[world.layout.block(block)] == 1 for block in table[last:]), "private"
    assert world.run_to_end()[claim.row] is not None


def test_a_claim_takes_all_blocks_or_changes_nothing(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=8)
    prefix = [0, 1, 2, 1]
    world.leave_cached([*prefix, 1], 6)
    held = world.submit([2] * 18, 20)
    assert world.prefill.claim(held.row)
    assert world.router.pool.num_available() == 3
    wants_four = world.submit([*prefix, *[1] * 11], 20)
    before = bytes(world.mapping.words[world.layout.row_states : world.layout.journal])
    free = world.router.pool.num_free()
    assert world.prefill.claim(wants_four.row) is None
    assert bytes(world.mapping.words[world.layout.row_states : world.layout.journal]) == before
    assert world.router.pool.num_free() == free
    world.check()
    fits = world.submit([*prefix, *[1] * 7], 20)
    assert world.prefill.claim(fits.row).kv_len == 4
    assert world.router.pool.num_available() == 0
    world.check()


def test_a_claim_needs_no_block_beyond_the_limit(make_world: MakeWorld) -> None:
    """A prompt that leaves room for one token fits a pool of just its blocks."""
    world = make_world(num_blocks=2)
    assert world.run_to_end() == {}
    claim = world.submit([1, 0, 1, 0, 1, 0, 1], 8)
    assert world.run_to_end()[claim.row] == [1, 0, 1, 0, 1, 0, 1, *world.router.rows.tokens(claim.row, 7, 8)]


def test_one_of_two_claimers_gets_the_row(world: Any) -> None:
    other = world.join(Role.PREFILL)
    claim = world.submit([1, 2, 0, 1, 2], 9)
    assert world.prefill.claim(claim.row) is not None
    assert other.claim(claim.row) is None
    assert world.prefill.owned == [claim.row]
    assert other.owned == []


def test_roles_claim_their_own_states(world: Any) -> None:
    queued, ready = world.submit([1, 2, 0], 9), world.submit([1], 9)
    assert world.prefill.claim(ready.row) is None
    assert world.decode.claim(queued.row) is None
    assert world.prefill.claim(queued.row) is not None
    assert world.decode.claim(ready.row) is not None


@pytest.mark.parametrize("local", [0, 2, 3])
def test_decode_sends_back_what_is_too_much_to_prefill_itself(world: Any, local: int) -> None:
    claim = world.submit([1, 2, 0, 1], 9, local=3)
    rows = world.router.rows
    assert rows.state(claim.row) is S.READY
    taken = world.decode.claim(claim.row, local=local)
    if local < 3:
        assert taken is None
        assert rows.state(claim.row) is S.QUEUED
        assert rows.block_table(claim.row) == []
        assert rows.get(claim.row, R.ATTEMPTS) == 0
    else:
        assert rows.state(claim.row) is S.DECODING
        assert taken.kv_len == 0
    world.check()
    world.run_to_end()


def test_a_prompt_is_counted_once_however_often_it_changes_hands(world: Any) -> None:
    prompt = [0, 1, 2, 1, 0, 2, 2, 1, 0, 1, 2, 2]
    world.leave_cached(prompt[:5], 6)
    words = world.mapping.words
    base = words[H.PROMPT_TOKENS], words[H.CACHED_TOKENS]
    claim = world.submit(prompt, 20, local=30)
    assert world.decode.claim(claim.row, local=0) is None
    assert world.prefill.claim(claim.row) is not None
    assert (words[H.PROMPT_TOKENS] - base[0], words[H.CACHED_TOKENS] - base[1]) == (12, 4)
    # Preempted, it finds what it computed itself in the cache: no hit, and the client was told of four already.
    world.prefill.prefill(claim.row)
    assert world.prefill.rows.preempt(claim.row, Actor.PREFILL)
    assert world.prefill.claim(claim.row) is not None
    assert world.prefill.rows.get(claim.row, R.KV_LEN) > 4
    assert (words[H.PROMPT_TOKENS] - base[0], words[H.CACHED_TOKENS] - base[1]) == (12, 4)
    assert world.prefill.rows.get(claim.row, R.CACHED_TOKENS) == 4


def test_output_tokens_and_outcomes_are_counted_at_the_end(world: Any) -> None:
    words, rows = world.mapping.words, world.router.rows
    for wish, counter in ((Wish.LEFT, H.CANCELLED), (Wish.ENOUGH, H.FINISHED), (Wish.ERROR, H.FAILED)):
        before = words[counter], words[H.OUTPUT_TOKENS]
        claim = world.decoding([0, 1, 2, 1, 0], 20, steps=3)
        rows.cancel(claim.row, claim.generation, wish=wish)
        assert words[H.OUTPUT_TOKENS] == before[1]
        world.decode.rows.end_cancelled(claim.row, Actor.DECODE)
        assert (words[counter], words[H.OUTPUT_TOKENS]) == (before[0] + 1, before[1] + 3)
        assert rows.recycle(claim.row, claim.generation)


@pytest.mark.parametrize("local", [1, 2])
def test_prefill_sends_on_what_decode_may_do_itself(world: Any, local: int) -> None:
    prompt = [0, 1, 2, 1, 0, 2, 2, 1, 0, 1, 2]
    world.leave_cached(prompt[:9], 12)
    row = world.submit(prompt, 20).row
    rows = world.router.rows
    assert rows.state(row) is S.QUEUED
    taken = world.prefill.claim(row, local=local)
    if local == 1:
        assert rows.state(row) is S.PREFILLING
        assert (taken.kv_len, taken.cached_tokens) == (8, 8)
    else:
        assert taken is None
        assert rows.state(row) is S.READY
        # With its prefix pinned and room for the next token: decode need not match again.
        assert (rows.get(row, R.NUM_BLOCKS), rows.get(row, R.KV_LEN)) == (3, 8)
        assert world.decode.claim(row, local=0).kv_len == 8
    assert (rows.get(row, R.CACHED_TOKENS), rows.get(row, R.ATTEMPTS)) == (8, 1)
    world.check()
    world.run_to_end()


def test_a_row_that_was_put_back_gains_what_others_have_published_since(world: Any) -> None:
    prompt = [0, 1, 2, 1, 0, 2, 2, 1, 0, 1, 2, 2, 1]
    first, second = world.submit(prompt, 20).row, world.submit([*prompt[:9], 0, 0], 20).row
    world.prefill.claim(first)
    world.prefill.prefill(first, 5)  # one block, and a quarter of the next
    world.prefill.rows.put_back(first, Actor.PREFILL)
    private = world.prefill.rows.block_table(first)
    world.prefill.claim(second)
    world.prefill.prefill(second)
    free = world.prefill.pool.num_free()
    taken = world.prefill.claim(first)
    rows = world.prefill.rows
    assert (taken.kv_len, taken.cached_tokens) == (8, 3)
    assert rows.block_table(first) == [private[0], rows.block_table(second)[1], *private[2:]]
    assert world.prefill.pool.num_free() == free + 1
    assert rows.get(first, R.CACHED_TOKENS) == 3
    world.check()
    world.run_to_end()


# What changes between a claimer's look at a row and its section.
def _another_made_progress(world: Any, other: Any, row: int) -> None:
    assert other.claim(row) is not None
    other.prefill(row, 6) if other.me.role is Role.PREFILL else other.decode(row)
    other.rows.put_back(row, other.me.claims[2])


def _another_died(world: Any, other: Any, row: int) -> None:
    assert other.claim(row) is not None
    world.reap(other)


def _another_request(world: Any, other: Any, row: int) -> None:
    world.router.rows.cancel(row, world.router.rows.get(row, R.GENERATION))
    assert world.router.rows.recycle(row, world.router.rows.get(row, R.GENERATION))
    assert world.submit([2, 2, 2, 2, 2, 2], 20).row == row


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("meanwhile", [_another_made_progress, _another_died, _another_request])
def test_a_claim_built_on_an_old_look_changes_nothing(
    world: Any, role: Role, meanwhile: Callable[[Any, Any, int], None]
) -> None:
    claimer, other = world.join(role), world.join(role)
    row = world.submit([1, 2, 0, 1, 2, 0, 1, 2], 20, local=30 if role is Role.DECODE else 0).row
    if role is Role.DECODE:
        other_prefill = world.join(Role.DECODE)
        assert other_prefill.claim(row)
        other_prefill.compute(row, 7)
        other_prefill.rows.put_back(row, Actor.DECODE)
        assert world.router.rows.preempt_waiting(row, 1, Actor.ROUTER)
        words = world.mapping.words
        words[world.layout.row_states + row] = S.READY
    lock, happened = claimer.segment.lock, []

    def between() -> None:
        if not happened:
            happened.append(True)
            if role is Role.DECODE and meanwhile is _another_made_progress:
                assert other.claim(row) is not None
                other.compute(row, 7)
                other.decode(row)
                other.rows.put_back(row, Actor.DECODE)
            else:
                meanwhile(world, other, row)

    lock.on_acquired = between
    taken = claimer.claim(row)
    assert happened
    assert taken is None
    lock.on_acquired = None
    world.check()
    world.run_to_end([claimer, other])


def test_a_match_that_was_evicted_meanwhile_is_not_pinned(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=4)
    prompt = [0, 1, 2, 1, 0, 2, 2, 1, 0]
    world.leave_cached(prompt, 10)
    claim = world.submit(prompt, 12)
    other = world.join(Role.PREFILL)
    greedy = world.submit([2] * 9, 12)
    assert world.router.rows.state(claim.row) is S.READY
    lock = world.decode.segment.lock

    def between() -> None:
        lock.on_acquired = None
        assert other.claim(greedy.row) is not None
        other.rows.preempt(greedy.row, Actor.PREFILL)

    lock.on_acquired = between
    taken = world.decode.claim(claim.row)
    assert world.mapping.words[H.EVICTIONS] == 1
    assert taken.kv_len == 4, "what is left of the match"
    world.check()
    world.run_to_end([other])


# --- death, attempts, putting back ------------------------------------------------------------------------


def die(world: Any, row: int, role: Role, *, alone: bool, commit: bool = False) -> None:
    daemon = world.join(role)
    assert daemon.claim(row, alone=alone) is not None
    if commit:
        daemon.prefill(row, 2) if role is Role.PREFILL else daemon.decode(row)
    world.reap(daemon)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_row_whose_owner_died_before_a_commit_is_claimed_alone_until_it_commits(world: Any, role: Role) -> None:
    row = world.submit([1, 2, 0, 1, 2, 0] if role is Role.PREFILL else [1], 20).row
    daemon = world.prefill if role is Role.PREFILL else world.decode
    die(world, row, role, alone=False)
    assert daemon.claim(row, alone=False) is None
    die(world, row, role, alone=True, commit=True)
    assert world.router.rows.get(row, R.ATTEMPTS) == 0
    assert daemon.claim(row, alone=False) is not None
    world.run_to_end()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_three_deaths_alone_fail_a_row_with_the_cause(world: Any, role: Role) -> None:
    row = world.submit([1, 2, 0, 1, 2, 0] if role is Role.PREFILL else [1], 20).row
    die(world, row, role, alone=False)
    for death in range(MAX_DEATHS_ALONE):
        assert world.router.rows.state(row) in (S.QUEUED, S.READY), death
        die(world, row, role, alone=True)
    assert world.router.rows.state(row) is S.FAILED
    assert world.router.rows.error_text(row) == "killed by the test"
    assert world.router.rows.block_table(row) == []
    world.check()


def test_deaths_in_company_are_not_counted_against_a_row(world: Any) -> None:
    row = world.submit([1, 2, 0, 1, 2, 0], 20).row
    for _ in range(MAX_DEATHS_ALONE + 1):
        die(world, row, Role.PREFILL, alone=False)
        world.router.rows.put(row, R.ATTEMPTS, 0)
    assert world.router.rows.state(row) is S.QUEUED


def test_kv_that_was_there_before_acquits_nobody(world: Any) -> None:
    """Each daemon comes as far as the KV of the last token, and dies over its sampling."""
    row = world.submit([1], 20).row
    for death in range(MAX_DEATHS_ALONE + 1):
        daemon = world.join(Role.DECODE)
        assert daemon.claim(row, alone=True) is not None
        daemon.rows.commit_kv(row, 1)
        # The first one's KV grew, which is progress. The others' did not.
        assert world.router.rows.get(row, R.ATTEMPTS) == death
        world.reap(daemon)
        assert world.router.rows.get(row, R.DEATHS_ALONE) == death
    assert world.router.rows.state(row) is S.FAILED
    assert world.router.rows.error_text(row) == "killed by the test"
    world.check()


def test_a_token_acquits(world: Any) -> None:
    row = world.submit([1], 20).row
    die(world, row, Role.DECODE, alone=True)
    claim = world.decode.claim(row, alone=True)
    world.decode.rows.commit_token(row, claim.generation, 1, 2)
    assert [world.router.rows.get(row, word) for word in (R.ATTEMPTS, R.DEATHS_ALONE)] == [0, 0]


def test_a_commit_between_deaths_starts_the_count_again(world: Any) -> None:
    row = world.submit([1, 2, 0, 1, 2, 0], 20).row
    for commit in (False, False, True, False, False):
        die(world, row, Role.PREFILL, alone=True, commit=commit)
    assert world.router.rows.state(row) is S.QUEUED
    world.run_to_end()


LETTING_GO: dict[str, Callable[[Any, int], object]] = {
    "prefill put_back": lambda w, row: w.prefill.rows.put_back(row, Actor.PREFILL),
    "prefill preempt": lambda w, row: w.prefill.rows.preempt(row, Actor.PREFILL),
    "hand_over": lambda w, row: w.prefill.rows.hand_over(row),
    "decode put_back": lambda w, row: w.decode.rows.put_back(row, Actor.DECODE),
    "decode preempt": lambda w, row: w.decode.rows.preempt(row, Actor.DECODE),
}


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("way", LETTING_GO)
def test_letting_a_row_go_alive_is_no_attempt(world: Any, way: str, before: int) -> None:
    """Only deaths make a row suspect; and a suspect does not become innocent by being put back."""
    decode = way.startswith("decode")
    row = world.submit([1] if decode else [1, 2, 0], 20).row
    for _ in range(before):
        die(world, row, Role.DECODE if decode else Role.PREFILL, alone=True)
    assert (world.decode if decode else world.prefill).claim(row, alone=True) is not None
    LETTING_GO[way](world, row)
    assert world.router.rows.get(row, R.ATTEMPTS) == before
    assert world.router.rows.get(row, R.DEATHS_ALONE) == before
    world.run_to_end()


def test_prefill_puts_back_with_tokens_and_blocks(world: Any) -> None:
    row = world.submit([0, 1, 2, 1, 0, 2, 2, 1, 0, 1, 2], 20).row
    world.prefill.claim(row)
    world.prefill.prefill(row, 6)
    table = world.router.rows.block_table(row)
    world.prefill.rows.put_back(row, Actor.PREFILL)
    assert world.router.rows.state(row) is S.QUEUED
    assert world.router.rows.block_table(row) == table
    other = world.join(Role.PREFILL)
    taken = other.claim(row)
    assert (taken.num_tokens, taken.kv_len) == (11, 6)
    assert world.router.rows.block_table(row) == table
    world.run_to_end([other])


def test_a_decoder_adopts_at_the_last_committed_token(world: Any, kit: ModuleType) -> None:
    claim = world.decoding([0, 1, 2, 1, 0], 20, steps=5)
    world.reap(world.decode)
    rows = world.router.rows
    assert rows.state(claim.row) is S.READY
    assert rows.get(claim.row, R.ADOPTIONS) == 1
    world.decode = world.join(Role.DECODE)
    taken = world.decode.claim(claim.row)
    assert (taken.num_tokens, taken.kv_len) == (10, 9)
    assert world.run_to_end() == {claim.row: kit.answer([0, 1, 2, 1, 0], 20)}


def test_kv_of_a_token_that_was_never_committed_is_not_trusted(world: Any) -> None:
    """kv_len may run ahead of the tokens by the one whose commit did not happen."""
    claim = world.decoding([0, 1, 2], 20, steps=1)
    world.decode.compute(claim.row, 4)
    world.reap(world.decode)
    world.decode = world.join(Role.DECODE)
    taken = world.decode.claim(claim.row)
    assert (taken.num_tokens, taken.kv_len) == (4, 3)
    world.run_to_end()


# --- preemption, cancelling, ends --------------------------------------------------------------------------


@pytest.mark.parametrize("state", [S.READY, S.DECODING, S.PREFILLING])
def test_preemption_keeps_tokens_and_takes_blocks(world: Any, kit: ModuleType, state: RowState) -> None:
    prompt = [0, 1, 2, 1, 0]
    if state is S.PREFILLING:
        claim = world.submit(prompt, 20)
        world.prefill.claim(claim.row)
        world.prefill.prefill(claim.row, 3)
        assert world.prefill.rows.preempt(claim.row, Actor.PREFILL)
    elif state is S.READY:
        claim = world.ready(prompt, 20)
        assert world.router.rows.preempt_waiting(claim.row, claim.generation, Actor.PREFILL)
    else:
        claim = world.decoding(prompt, 20, steps=3)
        world.router.rows.wish_preempted(claim.row, claim.generation)
        assert world.decode.follow_wishes(claim.row)
    rows = world.router.rows
    assert rows.state(claim.row) is S.QUEUED
    assert rows.block_table(claim.row) == []
    assert rows.get(claim.row, R.KV_LEN) == 0
    assert rows.get(claim.row, R.PREEMPT) == 0
    assert rows.get(claim.row, R.PREEMPTIONS) == world.mapping.words[H.PREEMPTIONS] == 1
    assert rows.count_tokens(claim.row) == (8 if state is S.DECODING else 5)
    assert world.router.pool.num_available() == world.geometry.num_blocks
    world.check()
    assert world.run_to_end() == {claim.row: kit.answer(prompt, 20)}


@pytest.mark.parametrize("who", [Actor.ROUTER, Actor.PREFILL, Actor.SUPERVISOR])
def test_a_row_being_decoded_is_preempted_by_its_owner_alone(world: Any, who: Actor) -> None:
    claim = world.decoding([0, 1, 2, 1, 0], 20, steps=3)
    assert world.router.rows.preempt(claim.row, who) is False
    assert world.router.rows.preempt_waiting(claim.row, claim.generation, who) is False
    assert world.router.rows.state(claim.row) is S.DECODING
    assert len(world.router.rows.block_table(claim.row)) > 0


@pytest.mark.parametrize("state", [S.QUEUED, S.READY])
def test_a_row_that_a_peer_claims_meanwhile_keeps_its_blocks(world: Any, state: RowState) -> None:
    """Seen without an owner, and claimed before our section: the peer computes into those blocks."""
    claim = world.submit([0, 1, 2, 1, 0], 20)
    world.prefill.claim(claim.row)
    world.prefill.prefill(claim.row, 3 if state is S.QUEUED else 4)
    if state is S.QUEUED:
        world.prefill.rows.put_back(claim.row, Actor.PREFILL)
    else:
        world.prefill.rows.hand_over(claim.row)
    role, actor = (Role.PREFILL, Actor.PREFILL) if state is S.QUEUED else (Role.DECODE, Actor.DECODE)
    ours, peer = world.join(role), world.join(role)
    lock = ours.segment.lock

    def between() -> None:
        lock.on_acquired = None
        assert peer.claim(claim.row) is not None

    lock.on_acquired = between
    assert ours.rows.preempt_waiting(claim.row, claim.generation, actor) is False
    assert world.router.rows.state(claim.row) in OWNED
    assert len(world.router.rows.block_table(claim.row)) > 0
    world.check()
    peer.rows.put_back(claim.row, actor)
    assert world.run_to_end()


def test_blocks_are_taken_only_from_the_request_that_was_seen(world: Any) -> None:
    claim = world.ready([0, 1, 2, 1, 0], 20)
    assert world.router.rows.preempt_waiting(claim.row, claim.generation + 1, Actor.DECODE) is False
    assert world.router.rows.state(claim.row) is S.READY


def test_a_wish_is_for_the_request_that_was_meant(world: Any) -> None:
    old = world.finished([1, 2, 0], 8)
    world.router.rows.recycle(old.row, old.generation)
    new = world.decoding([0, 1, 2, 1, 0], 20)
    assert new.row == old.row
    world.router.rows.wish_preempted(old.row, old.generation)  # written late
    assert not world.decode.rows.is_to_be_preempted(new.row)
    world.router.rows.wish_preempted(new.row, new.generation)
    assert world.decode.rows.is_to_be_preempted(new.row)


@pytest.mark.parametrize("name", [R.NUM_PROMPT, R.NUM_TOKENS, R.LIMIT_TOKENS])
@pytest.mark.parametrize("value", [0, 40, 1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_row_whose_lengths_make_no_sense_fails_with_what_they_are(
    world: Any, role: Role, name: R, value: int
) -> None:
    claim = world.submit([0, 1, 2, 1, 0], 20, local=30 if role is Role.DECODE else 0)
    other = world.submit([1, 2, 0], 20, local=30 if role is Role.DECODE else 0)
    world.router.rows.put(claim.row, name, value)
    daemon = world.prefill if role is Role.PREFILL else world.decode
    assert daemon.claim(claim.row) is None
    assert world.router.rows.state(claim.row) is S.FAILED
    assert "a row holds 32" in world.router.rows.error_text(claim.row)
    assert daemon.claim(other.row) is not None
    world.check()


def test_log_probabilities_that_have_no_room_are_refused(world: Any) -> None:
    claim = world.submit([0, 1], 20)
    world.router.rows.put(claim.row, R.NUM_LOGPROBS, LOGPROB_WORDS + 1)
    with pytest.raises(CorruptSegmentError, match="21 log-probabilities a token, at most 20"):
        world.router.rows.params(claim.row)


def test_a_row_put_back_by_prefill_gives_its_blocks_for_an_older_one(make_world: MakeWorld) -> None:
    """Otherwise the oldest row, which fits alone, could wait for blocks that nobody may take."""
    world = make_world(num_blocks=4)
    oldest = world.submit([1, 2, 0, 1, 2, 0, 1, 2, 0], 12)
    younger = world.submit([2, 2, 0, 1, 2, 0, 1, 2, 0], 12)
    assert world.prefill.claim(younger.row)
    world.prefill.prefill(younger.row, 5)
    world.prefill.rows.put_back(younger.row, Actor.PREFILL)
    assert world.prefill.claim(oldest.row) is None
    assert world.prefill.rows.preempt_waiting(younger.row, younger.generation, Actor.PREFILL)
    assert world.router.rows.state(younger.row) is S.QUEUED
    assert world.router.rows.block_table(younger.row) == []
    assert world.prefill.claim(oldest.row) is not None
    world.check()
    left = world.router.rows.preempt_waiting(younger.row, younger.generation, Actor.PREFILL)
    assert left is False, "nothing left to take"
    world.run_to_end()


@pytest.mark.parametrize("state", [S.QUEUED, S.PREFILLING, S.READY, S.DECODING, S.FINISHED, S.FAILED])
def test_cancel_in_each_state(world: Any, state: RowState) -> None:
    prompt, rows = [0, 1, 2, 1, 0], world.router.rows
    if state in (S.QUEUED, S.PREFILLING, S.FAILED):
        claim = world.submit(prompt, 20)
        if state is S.PREFILLING:
            world.prefill.claim(claim.row)
            world.prefill.prefill(claim.row, 4)
        if state is S.FAILED:
            rows.fail(claim.row, "why", Actor.SUPERVISOR)
    else:
        make = {S.READY: world.ready, S.DECODING: world.decoding, S.FINISHED: world.finished}[state]
        claim = make(prompt, 20)
    rows.cancel(claim.row, claim.generation)
    if state in OWNED:
        assert rows.state(claim.row) is state, "its owner ends it"
        owner = world.prefill if state is S.PREFILLING else world.decode
        assert owner.follow_wishes(claim.row)
    ended = rows.state(claim.row)
    assert ended is (state if state in TERMINAL else S.CANCELLED)
    assert rows.block_table(claim.row) == []
    world.check()
    assert rows.recycle(claim.row, claim.generation)
    assert world.router.pool.num_available() == world.geometry.num_blocks
    counters = {S.FINISHED: H.FINISHED, S.FAILED: H.FAILED, S.CANCELLED: H.CANCELLED}
    assert {state: world.mapping.words[word] for state, word in counters.items()} == {
        **dict.fromkeys(counters, 0),
        ended: 1,
    }


def test_a_wish_to_cancel_survives_its_owner(world: Any) -> None:
    claim = world.decoding([0, 1, 2], 20)
    world.router.rows.cancel(claim.row, claim.generation)
    world.reap(world.decode)
    assert world.router.rows.state(claim.row) is S.CANCELLED
    world.check()


def test_a_cancel_that_comes_after_the_rows_end_spares_the_next_request(world: Any) -> None:
    claim = world.submit([0, 1, 2], 20)
    lock = world.router.segment.lock

    def between() -> None:
        lock.on_acquired = None
        world.supervisor.rows.cancel(claim.row, claim.generation, Actor.SUPERVISOR)
        assert world.supervisor.rows.recycle(claim.row, claim.generation, Actor.SUPERVISOR)
        other = world.join(Role.ROUTER)
        assert other.submit([2, 2, 2], 9).row == claim.row

    lock.on_acquired = between
    world.router.rows.cancel(claim.row, claim.generation)
    assert world.router.rows.state(claim.row) is S.QUEUED


@pytest.mark.parametrize("state", [S.QUEUED, S.PREFILLING, S.READY, S.DECODING])
def test_only_rows_at_their_end_are_recycled(world: Any, state: RowState) -> None:
    claim = world.submit([0, 1, 2], 20)
    world.mapping.words[world.layout.row_states + claim.row] = state
    assert world.router.rows.recycle(claim.row, claim.generation) is False
    assert world.router.rows.state(claim.row) is state


def test_a_row_is_recycled_once(world: Any) -> None:
    claim = world.finished([0, 1, 2], 6)
    lock = world.router.segment.lock

    def between() -> None:
        lock.on_acquired = None
        assert world.supervisor.rows.recycle(claim.row, claim.generation, Actor.SUPERVISOR)

    lock.on_acquired = between
    assert world.router.rows.recycle(claim.row, claim.generation) is False
    assert world.mapping.words[H.INTENT_OP] == 0
    assert world.router.rows.state(claim.row) is S.FREE


def test_a_finished_rows_tokens_stay_until_it_is_recycled(world: Any, kit: ModuleType) -> None:
    claim = world.finished([0, 1, 2], 9)
    rows = world.router.rows
    assert rows.get(claim.row, R.FINISH_REASON) == FinishReason.LENGTH
    assert rows.new_tokens(claim.row, claim.generation, 0) == kit.answer([0, 1, 2], 9)


def test_an_error_text_is_cut_at_a_character(world: Any) -> None:
    claim = world.submit([0, 1, 2], 9)
    world.supervisor.rows.fail(claim.row, "ä" * 1000, Actor.SUPERVISOR)
    text = world.router.rows.error_text(claim.row)
    assert set(text) == {"ä"}
    assert len(text.encode()) in (8 * ROW_ERROR_WORDS - 2, 8 * ROW_ERROR_WORDS - 1)


# --- sharing -----------------------------------------------------------------------------------------------


def test_twins_computed_at_once_end_up_sharing(world: Any, kit: ModuleType) -> None:
    prompt = [0, 1, 2, 1, 0, 2, 2, 1, 0, 1]
    other = world.join(Role.PREFILL)
    first, second = world.submit(prompt, 16), world.submit(prompt, 14)
    assert world.prefill.claim(first.row).kv_len == 0
    assert other.claim(second.row).kv_len == 0
    rows, pool = world.router.rows, world.router.pool
    available = pool.num_available()
    world.prefill.prefill(first.row, 6)
    other.prefill(second.row)
    world.prefill.prefill(first.row)
    one, two = rows.block_table(first.row), rows.block_table(second.row)
    assert one[:2] == two[:2]
    assert one[2] != two[2], "the block of position N-1 is private"
    assert [pool.refs(block) for block in one[:2]] == [2, 2]
    assert pool.num_available() == available + 2
    world.check()
    world.prefill.rows.hand_over(first.row)
    other.rows.hand_over(second.row)
    assert world.run_to_end() == {first.row: kit.answer(prompt, 16), second.row: kit.answer(prompt, 14)}


def test_what_decode_generated_is_a_prefix_for_the_next_turn(world: Any, kit: ModuleType) -> None:
    world.leave_cached([0, 1, 2], 14)
    answer = kit.answer([0, 1, 2], 14)
    claim = world.submit([*answer, 2, 2], 20)
    assert world.prefill.claim(claim.row).kv_len == 12
    world.run_to_end()


def test_equal_tokens_under_another_model_are_no_hit(world: Any) -> None:
    prompt = [0, 1, 2, 1, 0]
    world.leave_cached(prompt, 6)
    for word in (H.FINGERPRINT, H.NUMERICS_ID):
        assert len(world.router.pool.match(prompt, 1)) == 1
        world.mapping.words[word] += 1
        assert world.router.pool.match(prompt, 1) == []
        world.mapping.words[word] -= 1


def test_equal_blocks_behind_other_prefixes_are_no_hit(world: Any) -> None:
    world.leave_cached([0, 1, 2, 1, 0, 2, 2, 1, 0], 10)
    assert len(world.router.pool.match([0, 1, 2, 1, 0, 2, 2, 1], 2)) == 2
    assert world.router.pool.match([0, 2, 2, 1], 1) == []
    assert len(world.router.pool.match([0, 1, 2, 1, 0, 1, 2, 1], 2)) == 1


def test_colliding_hashes_are_told_apart_by_tokens(
    world: Any, monkeypatch: pytest.MonkeyPatch, kit: ModuleType
) -> None:
    for module in ("rows", "pool"):
        monkeypatch.setattr(f"pdctl.transport.{module}.chain_hash", lambda parent, tokens: 5)
    for prompt in ([0, 1, 2, 1, 0], [2, 1, 2, 1, 0], [1, 1, 2, 1, 0, 2, 2, 1, 0]):
        world.leave_cached(prompt, 10)
        world.check()
    assert len(world.router.pool.match([2, 1, 2, 1], 1)) == 1
    assert world.router.pool.match([2, 2, 2, 2], 1) == []


def test_children_are_evicted_before_their_parents(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=6)
    prompt = [0, 1, 2, 1, 0, 2, 2, 1, 0, 1, 1, 1, 2]
    world.leave_cached(prompt, 14)
    hits = [len(world.router.pool.match(prompt, 3))]
    greedy = world.submit([2], 24)
    world.decode.claim(greedy.row)
    while world.router.rows.state(greedy.row) is S.DECODING:
        assert world.decode.decode(greedy.row)
        world.check()
        hits.append(len(world.router.pool.match(prompt, 3)))
    assert hits[0] == 3
    assert hits == sorted(hits, reverse=True)
    assert set(hits) == {3, 2, 1, 0}


def test_the_least_recently_used_prefix_is_evicted_first(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=4)
    first, second = [0, 1, 2, 1, 0], [1, 1, 2, 1, 0]
    world.leave_cached(first, 6)
    world.leave_cached(second, 6)
    world.leave_cached(first, 6)
    claim = world.submit([2] * 9, 11)
    assert world.prefill.claim(claim.row)
    assert len(world.router.pool.match(first, 1)) == 1
    assert world.router.pool.match(second, 1) == []
    assert world.mapping.words[H.EVICTIONS] == 1
    world.check()


def test_grow_says_no_and_changes_nothing_when_the_pool_is_empty(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=4)
    first, second = world.decoding([1], 16), world.decoding([2, 2, 2], 16)
    rows = world.decode.rows
    assert rows.grow(first.row, 4), "nothing to do"
    assert rows.grow(first.row, 9)
    assert rows.grow(second.row, 5) is False
    world.check()
    assert rows.preempt(first.row, Actor.DECODE)
    assert rows.grow(second.row, 16)
    world.check()


def test_grow_stops_at_the_end_of_the_block_table(world: Any) -> None:
    """One place further lie the row's tokens."""
    claim = world.decoding([1, 2, 0], 32)
    with pytest.raises(PdctlError, match="33"):
        world.decode.rows.grow(claim.row, 33)
    assert world.router.rows.count_tokens(claim.row) == 3
    world.check()


def test_participants_counters_are_their_own(world: Any) -> None:
    me = world.decode.me
    me.put(P.LOAD, 3)
    me.add(P.STEPS, 2)
    assert me.get(P.LOAD) == world.supervisor.segment.participant_word(me.slot, P.LOAD) == 3
    assert world.supervisor.segment.participant_word(me.slot, P.STEPS) == 2
    assert world.supervisor.segment.participant_word(world.prefill.me.slot, P.STEPS) == 0


def test_rows_are_listed_oldest_first(world: Any) -> None:
    claims = [world.submit([1, 2, 0], 6) for _ in range(4)]
    world.router.rows.cancel(claims[0].row, claims[0].generation)
    world.router.rows.recycle(claims[0].row, claims[0].generation)
    youngest = world.submit([1, 2, 0], 6)
    assert youngest.row == claims[0].row
    expected = [claim.row for claim in claims[1:]] + [youngest.row]
    assert world.router.rows.in_state(S.QUEUED) == expected


def test_a_match_is_void_once_its_block_holds_something_else(make_world: MakeWorld) -> None:
    """CACHED before, CACHED now, and yet another block: only the generation tells."""
    world = make_world(num_blocks=3)
    world.leave_cached([0, 1, 2, 1, 0], 6)
    (ref,) = world.router.pool.match([0, 1, 2, 1], 1)
    world.leave_cached([2] * 9, 12)
    world.leave_cached([1] * 9, 12)
    pool = world.router.pool
    assert ref.block in [found.block for found in pool.match([1] * 8, 2)]
    with world.router.segment.lock.section(Op.CLAIM) as section:
        assert pool.pin(section, ref) is False
    world.check()


def test_a_child_of_a_reused_parent_is_no_hit(world: Any) -> None:
    prompt = [0, 1, 2, 1, 0, 2, 2, 1, 0]
    world.leave_cached(prompt, 10)
    pool = world.router.pool
    _, child = pool.match(prompt, 2)
    world.mapping.words[world.layout.block(child.block) + Block.PARENT_GENERATION] += 1
    assert len(pool.match(prompt, 2)) == 1


def test_the_block_of_a_position_that_may_be_written_again_is_not_published(world: Any) -> None:
    """kv_len reaches the block's end before the next token is committed; an adopter would write N-1 again."""
    claim = world.decoding([0, 1, 2], 20, steps=5)
    rows = world.decode.rows
    assert rows.count_tokens(claim.row) == 8
    world.decode.compute(claim.row, 8)
    assert rows.publish(claim.row) == 0
    assert rows.get(claim.row, R.NUM_PUBLISHED) == 1
    rows.commit_token(claim.row, claim.generation, 8, 0)
    assert rows.publish(claim.row) == 1


def test_two_routers_never_take_the_same_free_row(world: Any) -> None:
    other, taken = world.join(Role.ROUTER), []
    lock = world.router.segment.lock

    def between() -> None:
        lock.on_acquired = None
        taken.append(other.submit([1, 2, 0], 9).row)

    lock.on_acquired = between
    row = world.submit([2, 2, 2], 9).row
    assert taken != [row]
    assert world.router.rows.tokens(row, 0, 3) == [2, 2, 2]
    assert world.router.rows.tokens(taken[0], 0, 3) == [1, 2, 0]


def test_keys_of_the_prefix_index_are_the_same_in_every_process() -> None:
    """S06: they depend on tokens and segment alone, not on Python's own hashes; another dtype has other keys."""
    code = (
        "from pdctl.transport.layout import DType, Geometry\n"
        "from pdctl.transport.pool import chain_hash\n"
        "from pdctl.transport.segment import Segment\n"
        "for dtype in DType:\n"
        "    segment = Segment.anonymous(Geometry(num_blocks=4, block_tokens=4, num_layers=1, num_kv_heads=1,\n"
        "                                         head_dim=1, dtype=dtype, max_rows=1, max_context=8))\n"
        "    print(chain_hash(chain_hash(segment.pool.hash_seed(), [1, 2, 3, 4]), [5, 6, 7, 8]))\n"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.split()
        for seed in ("0", "4242", "random")
    ]
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 2

"""What the transport's tests share: small segments, words that die, child processes, and a toy engine.

The toy engine writes into a KV cell a hash of all tokens up to that position and picks the next token from such
a hash. So every cell can be checked wherever its block ends up, and every answer is known beforehand.

Test modules cannot import this file (importlib mode): they reach it through the `kit` fixture.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import ModuleType

import pytest

from pdctl.transport import mapping as mapping_module
from pdctl.transport.layout import WORD, B, BlockState, DType, Geometry, H, Layout, P, R
from pdctl.transport.lock import Op
from pdctl.transport.mapping import Mapping
from pdctl.transport.names import SegmentName, new_segment_name
from pdctl.transport.pool import chain_hash
from pdctl.transport.recovery import reap, sweep, verify
from pdctl.transport.rows import OWNED, TERMINAL, Actor, Claim, FinishReason, RowParams, RowState
from pdctl.transport.segment import Participant, Role, Segment

WATCHDOG_S = 30
VOCABULARY = 3


@pytest.fixture(scope="session")
def kit() -> ModuleType:
    """This module."""
    return sys.modules[__name__]


def geometry(**changes: object) -> Geometry:
    """12 blocks of 4 tokens, one 64-bit KV cell a token."""
    values: dict[str, object] = {
        "num_blocks": 12,
        "block_tokens": 4,
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_dim": 1,
        "dtype": DType.FLOAT32,
        "max_rows": 6,
        "max_context": 32,
        "max_participants": 12,
        "ring_events": 16,
    }
    return Geometry(**{**values, **changes})  # type: ignore[arg-type]


# --- segments in /dev/shm ----------------------------------------------------------------------------------


@pytest.fixture
def name() -> Iterator[SegmentName]:
    """A segment name that nobody else has; its file is gone after the test."""
    name = new_segment_name(f"t-{secrets.token_hex(4)}")
    yield name
    name.path.unlink(missing_ok=True)


@pytest.fixture
def shared(name: SegmentName) -> Iterator[Segment]:
    """A segment in /dev/shm."""
    segment = Segment.create(name, geometry(), fingerprint=7, numerics_id=9)
    segment.mapping.drop_byte(0)  # as its maker does, once it has a place of its own
    yield segment
    segment.close()


# --- words of a process that dies --------------------------------------------------------------------------


class Died(BaseException):
    """The process is gone; nothing after this line ran."""


class DyingWords:
    """A segment's words, as seen by a process that dies just before its `die_at`-th store.

    The store of a slice counts twice: a process may also die with half of it written.

    Attributes:
        stores: stores so far.
        after_store: called after each of them.
    """

    def __init__(self, words: memoryview, die_at: int = 0) -> None:
        self._words = words
        self._die_at = die_at
        self.stores = 0
        self.after_store: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, key: int | slice) -> int | memoryview:
        return self._words[key]

    def __setitem__(self, key: int | slice, value: int | memoryview) -> None:
        if isinstance(key, slice):
            start, stop, _ = key.indices(len(self._words))
            assert stop - start == len(value)
            middle = start + (stop - start) // 2
            self._store(slice(start, middle), value[: middle - start])
            self._store(slice(middle, stop), value[middle - start :])
        else:
            self._store(key, value)

    def _store(self, key: int | slice, value: int | memoryview) -> None:
        if 0 < self._die_at <= self.stores + 1:
            raise Died
        self._words[key] = value
        self.stores += 1
        if self.after_store is not None:
            self.after_store()


# --- processes ---------------------------------------------------------------------------------------------


class Child:
    """A forked process that runs `body(say)`; `say` sends the parent a line."""

    def __init__(self, body: Callable[[Callable[[object], None]], None]) -> None:
        self._read, write = os.pipe()
        self._buffer = b""
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                signal.alarm(2 * WATCHDOG_S)
                os.close(self._read)
                body(lambda thing: os.write(write, f"{thing}\n".encode()) and None)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(write)

    def line(self) -> str:
        """The child's next line."""
        while b"\n" not in self._buffer:
            if not select.select([self._read], [], [], WATCHDOG_S)[0]:
                raise AssertionError("the child says nothing")
            if not (data := os.read(self._read, 4096)):
                raise AssertionError(f"the child ended, having said {self._buffer!r}")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line.decode()

    def wait(self) -> int:
        """Its exit status, negative for a signal."""
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status

    def kill(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def close(self) -> None:
        self.kill()
        os.close(self._read)


@pytest.fixture
def fork() -> Iterator[Callable[[Callable[[Callable[[object], None]], None]], Child]]:
    """Makes `Child`ren, and ends them with the test."""
    children: list[Child] = []

    def make(body: Callable[[Callable[[object], None]], None]) -> Child:
        children.append(Child(body))
        return children[-1]

    yield make
    for child in children:
        child.close()


# --- the toy engine ----------------------------------------------------------------------------------------


@cache
def cell(tokens: tuple[int, ...]) -> int:
    """What the KV of the last of these tokens must be."""
    return chain_hash(cell(tokens[:-1]), tokens[-1:]) if tokens else 1


def next_token(tokens: Sequence[int]) -> int:
    return cell(tuple(tokens)) % VOCABULARY


def answer(prompt: Sequence[int], limit: int) -> list[int]:
    """Prompt and output of a request that ends by length."""
    tokens = list(prompt)
    while len(tokens) < limit:
        tokens.append(next_token(tokens))
    return tokens


class Member:
    """A participant, with a Segment of its own over the memory all share."""

    def __init__(self, segment: Segment, me: Participant) -> None:
        self.segment = segment
        self.me = me
        self.rows = segment.rows
        self.pool = segment.pool
        self._cells = segment.layout.kv_offset // WORD
        self._block_tokens = segment.geometry.block_tokens

    @classmethod
    def join(cls, mapping: Mapping, geometry: Geometry, role: Role) -> Member:
        segment = Segment(mapping, geometry)
        return cls(segment, segment.attach(role))

    def through(self, words: DyingWords) -> Member:
        """The same participant, storing through `words`."""
        segment = Segment(self.segment.mapping, self.segment.geometry, words)  # type: ignore[arg-type]
        segment.lock.slot, segment.lock.incarnation = self.me.slot, self.me.incarnation
        me = Participant(segment.words, segment.layout, self.me.slot, self.me.role, self.me.incarnation)
        return Member(segment, me)

    @property
    def owned(self) -> list[int]:
        return self.rows.owned_by(self.me.slot, self.me.incarnation)

    def submit(self, prompt: Sequence[int], limit: int, *, local: int = 0, **params: object) -> Claim | None:
        return self.rows.submit(
            self.me,
            request_id="request",
            tokens=prompt,
            limit_tokens=limit,
            params=RowParams(**params),  # type: ignore[arg-type]
            local_prefill_tokens=local,
        )

    def claim(self, row: int, *, alone: bool = False, local: int | None = None) -> Claim | None:
        return self.rows.claim(self.me, row, alone=alone, local_prefill_tokens=local)

    def read_cell(self, block: int, offset: int) -> int:
        return self.segment.words[self._cells + block * self._block_tokens + offset]

    def compute(self, row: int, stop: int) -> None:
        """KV of the positions from kv_len to `stop`, then the commit."""
        rows = self.rows
        start, tokens, table = rows.get(row, R.KV_LEN), rows.tokens(row, 0, stop), rows.block_table(row)
        for position in range(start, stop):
            block = table[position // self._block_tokens]
            base = self.segment.layout.block(block)
            assert self.segment.words[base + B.STATE] == BlockState.OWNED, "a published block is never written"
            assert self.segment.words[base + B.ROW] == row + 1, "a block of another row"
            at = self._cells + block * self._block_tokens + position % self._block_tokens
            self.segment.words[at] = cell(tuple(tokens[: position + 1]))
        rows.commit_kv(row, stop)

    def prefill(self, row: int, stop: int | None = None) -> None:
        """A chunk: KV up to `stop`, by default of all prompt tokens but the last."""
        last = self.rows.get(row, R.NUM_TOKENS) - 1
        self.compute(row, last if stop is None else min(stop, last))
        self.rows.publish(row)

    def decode(self, row: int) -> bool:
        """A step: KV of the last token, the next token. False: no block was left for it."""
        rows, generation = self.rows, self.rows.get(row, R.GENERATION)
        number = rows.get(row, R.NUM_TOKENS)
        if number == rows.get(row, R.LIMIT_TOKENS):
            # The last owner died between the last token and the row's end.
            rows.finish(row, FinishReason.LENGTH)
            return True
        if not rows.grow(row, number):
            return False
        # An adopter writes position tokens-1 once more, whatever kv_len says.
        rows.put(row, R.KV_LEN, min(rows.get(row, R.KV_LEN), number - 1))
        self.compute(row, number)
        rows.commit_token(row, generation, number, next_token(rows.tokens(row, 0, number)))
        rows.publish(row)
        if number + 1 == rows.get(row, R.LIMIT_TOKENS):
            rows.finish(row, FinishReason.LENGTH)
        return True

    def follow_wishes(self, row: int) -> bool:
        """What an owner does before each chunk and step; True if the row is no longer its own."""
        actor = self.me.claims[2]
        if self.rows.get(row, R.CANCEL):
            self.rows.end_cancelled(row, actor)
            return True
        if actor is Actor.DECODE and self.rows.is_to_be_preempted(row):
            return self.rows.preempt(row, actor)
        return False


class World:
    """A segment over private memory, and its participants."""

    def __init__(self, geometry_: Geometry | None = None) -> None:
        self.geometry = geometry_ or geometry()
        self.mapping = mapping_module.anonymous(self.geometry)
        self.layout = Layout(self.geometry)
        self.supervisor = self.join(Role.SUPERVISOR)
        self.router = self.join(Role.ROUTER)
        self.prefill = self.join(Role.PREFILL)
        self.decode = self.join(Role.DECODE)

    def join(self, role: Role) -> Member:
        return Member.join(self.mapping, self.geometry, role)

    def repair(self) -> None:
        with self.supervisor.segment.lock.section(Op.CLOSE):
            pass

    def reap(self, member: Member) -> None:
        reap(self.supervisor.segment, member.me.slot, member.me.incarnation, "killed by the test")

    def submit(self, prompt: Sequence[int], limit: int, **more: object) -> Claim:
        claim = self.router.submit(prompt, limit, **more)  # type: ignore[arg-type]
        assert claim is not None
        return claim

    def ready(self, prompt: Sequence[int], limit: int) -> Claim:
        """A row with nothing left to prefill."""
        claim = self.submit(prompt, limit)
        if self.router.rows.state(claim.row) is RowState.QUEUED:
            assert self.prefill.claim(claim.row) is not None
            self.prefill.prefill(claim.row)
            self.prefill.rows.hand_over(claim.row)
        return claim

    def decoding(self, prompt: Sequence[int], limit: int, steps: int = 0) -> Claim:
        """A row that is being decoded, `steps` tokens ago."""
        claim = self.ready(prompt, limit)
        assert self.decode.claim(claim.row) is not None
        for _ in range(steps):
            assert self.decode.decode(claim.row)
        return claim

    def finished(self, prompt: Sequence[int], limit: int) -> Claim:
        claim = self.decoding(prompt, limit, steps=limit - len(prompt))
        assert self.router.rows.state(claim.row) is RowState.FINISHED
        return claim

    def leave_cached(self, prompt: Sequence[int], limit: int) -> None:
        """Run a request to its end and recycle it: its blocks stay as cached prefix."""
        claim = self.finished(prompt, limit)
        assert self.router.rows.recycle(claim.row, claim.generation)

    def check(self) -> None:
        """All that must be true between any two sections."""
        segment = self.supervisor.segment
        assert verify(segment) == []
        self._check_kv(segment)

    def _check_kv(self, segment: Segment) -> None:
        rows, size = segment.rows, self.geometry.block_tokens
        for row, state in enumerate(rows.states()):
            if state in TERMINAL | {RowState.FREE, RowState.FILLING}:
                continue
            number = rows.count_tokens(row)
            tokens, table = rows.tokens(row, 0, number), rows.block_table(row)
            for position in range(min(rows.get(row, R.KV_LEN), number)):
                found = self.supervisor.read_cell(table[position // size], position % size)
                assert found == cell(tuple(tokens[: position + 1])), (row, position)
        for block in range(self.geometry.num_blocks):
            if segment.pool.state(block) != BlockState.CACHED:
                continue
            prefix: list[int] = []
            at = block + 1
            while at:
                prefix = segment.pool.tokens_of(at - 1) + prefix
                at = segment.words[segment.layout.block(at - 1) + B.PARENT]
            for offset in range(size):
                known = prefix[: len(prefix) - size + offset + 1]
                assert self.supervisor.read_cell(block, offset) == cell(tuple(known)), block

    def run_to_end(self, members: Sequence[Member] = ()) -> dict[int, list[int]]:
        """Put back what `members` own, then bring every row to its end, one by one, the oldest first.

        Returns:
            The tokens of the rows that ended, by row; all rows are FREE afterwards.
        """
        rows = self.supervisor.rows
        for member in (self.prefill, self.decode, *members):
            for row in member.owned:
                if not member.follow_wishes(row):
                    member.rows.put_back(row, member.me.claims[2])
        assert not any(state in OWNED for state in rows.states())
        for _ in range(10 * self.geometry.max_rows):
            waiting = sorted(
                rows.in_state(RowState.QUEUED) + rows.in_state(RowState.READY),
                key=lambda row: rows.get(row, R.ORDER),
            )
            if not waiting:
                break
            self._advance(waiting)
        ended = {}
        for row, state in enumerate(rows.states()):
            if state in TERMINAL:
                ended[row] = rows.tokens(row, 0, rows.count_tokens(row))
                assert self.router.rows.recycle(row, rows.get(row, R.GENERATION))
        sweep(self.supervisor.segment)
        assert set(rows.states()) == {RowState.FREE}
        self.check()
        assert self.supervisor.pool.num_available() == self.geometry.num_blocks
        return ended

    def _advance(self, waiting: list[int]) -> None:
        """The oldest row, one phase further; the others give their blocks for it, the youngest first."""
        row, *others = waiting
        state = self.router.rows.state(row)
        member = self.prefill if state is RowState.QUEUED else self.decode
        while member.claim(row, alone=True) is None:
            if self.router.rows.state(row) is not state:
                return  # its KV was refused: it is computed again
            assert others, "the oldest row fits alone"
            self._take_blocks(others.pop())
        if member.follow_wishes(row):
            return
        if member is self.prefill:
            member.prefill(row)
            member.rows.hand_over(row)
            return
        while member.rows.state(row) is RowState.DECODING:
            if not member.decode(row):
                assert others, "the oldest row fits alone"
                self._take_blocks(others.pop())

    def _take_blocks(self, row: int) -> None:
        rows = self.decode.rows
        rows.preempt_waiting(row, rows.get(row, R.GENERATION), Actor.DECODE)

    def close(self) -> None:
        self.mapping.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    """World(geometry(**changes))."""
    with contextlib.ExitStack() as stack:

        def make(**changes: object) -> World:
            return stack.enter_context(contextlib.closing(World(geometry(**changes))))

        yield make


def participant_role(segment: Segment, slot: int) -> Role:
    return Role(segment.participant_word(slot, P.ROLE))


def free_order(segment: Segment) -> list[int]:
    """The free list, in order."""
    found, at = [], segment.words[H.FREE_HEAD]
    while at:
        found.append(at - 1)
        at = segment.words[segment.layout.block(at - 1) + B.FREE_NEXT]
    return found

"""A model without weights, and a cluster of engines around it: thousands of steps a second.

Its KV of a position is a hash of all tokens up to there, made from the KV before it in the row's pages; its next
token is such a hash. So KV that is missing, stale or another row's gives wrong tokens, and every answer is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pdctl.core.attention import TokenRun
from pdctl.core.colocated import ColocatedEngine
from pdctl.core.config import ClusterSpec
from pdctl.core.decode import DecodeEngine
from pdctl.core.prefill import PrefillEngine
from pdctl.core.wake import Wake
from pdctl.transport.layout import WORD, P, R
from pdctl.transport.pool import chain_hash
from pdctl.transport.recovery import reap, verify
from pdctl.transport.rows import TERMINAL, RowParams, RowState
from pdctl.transport.segment import Participant, ParticipantState, Role, Segment

VOCABULARY = 17
BLOCK = 8
# What engines do with rows and model; before and after each, other processes may have done something.
_POINTS = (
    *("in_state", "tokens", "block_table", "params", "claim", "grow", "commit_kv", "put_logprobs", "commit_token"),
    *("publish", "hand_over", "put_back", "preempt", "preempt_waiting", "finish", "fail", "end_cancelled"),
)


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that must follow `prompt`."""
    cell, found = 1, []
    for token in prompt:
        cell = chain_hash(cell, (token,))
    for _ in range(count):
        found.append(cell % VOCABULARY)
        cell = chain_hash(cell, (found[-1],))
    return found


class FakeModel:
    """What engines need of a model.

    Attributes:
        forwards: the runs of every forward, as (start, length) pairs.
    """

    vocab_size = VOCABULARY
    numerics = SimpleNamespace(dtype="float32")

    def __init__(self, segment: Segment) -> None:
        self._words = segment.words
        self._cells = segment.layout.kv_offset // WORD
        self.forwards: list[list[tuple[int, int]]] = []

    def forward(self, tokens: list[int], runs: list[TokenRun], logit_rows: list[int]) -> Tensor | None:
        assert len(tokens) == sum(run.length for run in runs)
        self.forwards.append([(run.start, run.length) for run in runs])
        cells: list[int] = []
        for run in runs:
            cell = self._words[self._at(run, run.start - 1)] if run.start else 1
            for position in range(run.start, run.start + run.length):
                cell = chain_hash(cell, (tokens[len(cells)],))
                self._words[self._at(run, position)] = cell
                cells.append(cell)
        if not logit_rows:
            return None
        logits = torch.zeros(len(logit_rows), VOCABULARY)
        for index, row in enumerate(logit_rows):
            logits[index, cells[row] % VOCABULARY] = 1
        return logits

    def _at(self, run: TokenRun, position: int) -> int:
        return self._cells + run.block_table[position // BLOCK] * BLOCK + position % BLOCK


class Engines:
    """Engines over one segment, with bells that only note who was rung. For clusters that are stepped by hand.

    Attributes:
        segment, spec, model, rung: the cluster's own.
    """

    segment: Segment
    spec: ClusterSpec
    model: Any
    rung: list[int]

    def new_prefill(self) -> PrefillEngine:
        me = self.join(Role.PREFILL)
        return PrefillEngine(self.segment, me, self.model, self.spec, self.wake(me))

    def new_decode(self) -> DecodeEngine:
        me = self.join(Role.DECODE)
        return DecodeEngine(self.segment, me, self.model, self.spec, self.wake(me))

    def new_colocated(self) -> ColocatedEngine:
        prefill, decode = ((self.segment, self.join(role)) for role in (Role.PREFILL, Role.DECODE))
        return ColocatedEngine(prefill, decode, self.model, self.spec, self)

    def join(self, role: Role) -> Participant:
        me = self.segment.attach(role)
        me.put(P.STATE, ParticipantState.READY)
        return me

    def wake(self, me: Participant) -> Wake:
        return Wake(self.segment, me.slot, self)

    def ring(self, slot: int) -> None:
        """A bell that only notes who was rung."""
        self.rung.append(slot)


Engine = PrefillEngine | DecodeEngine | ColocatedEngine


class FakeCluster(Engines):
    """Any number of engines over one segment of 64-bit KV cells, stepped by hand.

    Attributes:
        colocated: the one engine of a colocated cluster; its halves are in `prefill` and `decode`.
    """

    def __init__(self, *, prefill: int = 1, decode: int = 1, colocated: bool = False, **changes: Any) -> None:
        values: dict[str, Any] = {
            "name": "fake",
            "state_dir": Path("/tmp"),
            "model_path": Path("/fake"),
            "model_name": "fake",
            "fingerprint": 1,
            "num_layers": 1,
            "num_kv_heads": 1,
            "head_dim": 1,
            "vocab_size": VOCABULARY,
            "eos_token_ids": (),
            "dtype": "float32",
            "block_tokens": BLOCK,
            "num_blocks": 128,
            "max_context": 256,
            "max_rows": 32,
            "local_prefill_tokens": 0,
            "chunk_tokens": 32,
            "colocated": colocated,
        }
        self.spec = ClusterSpec(**{**values, **changes})
        self.segment = Segment.anonymous(self.spec.geometry)
        self.rows = self.segment.rows
        self.model = FakeModel(self.segment)
        self.rung: list[int] = []
        self.router = self.segment.attach(Role.ROUTER)
        self.prefill: list[PrefillEngine] = []
        self.decode: list[DecodeEngine] = []
        self.colocated: ColocatedEngine | None = None
        if colocated:
            self._colocate()
        else:
            self.prefill += [self.new_prefill() for _ in range(prefill)]
            self.decode += [self.new_decode() for _ in range(decode)]
        self.asked: dict[int, tuple[list[int], int, int]] = {}

    def _colocate(self) -> None:
        self.colocated = self.new_colocated()
        self.prefill, self.decode = [self.colocated.prefill], [self.colocated.decode]

    @property
    def engines(self) -> list[Engine]:
        """One a process."""
        return [self.colocated] if self.colocated is not None else [*self.prefill, *self.decode]

    def try_submit(self, prompt: Sequence[int], count: int, **params: Any) -> int | None:
        claim = self.rows.submit(
            self.router,
            request_id="r",
            tokens=prompt,
            limit_tokens=len(prompt) + count,
            params=RowParams(**params),
            local_prefill_tokens=self.spec.local_prefill_tokens,
        )
        if claim is None:
            return None
        self.asked[claim.row] = (list(prompt), count, claim.generation)
        return claim.row

    def submit(self, prompt: Sequence[int], count: int = 4, **params: Any) -> int:
        row = self.try_submit(prompt, count, **params)
        assert row is not None
        return row

    def cancel(self, row: int) -> None:
        self.rows.cancel(row, self.asked[row][2])

    def kill(self, engine: Engine) -> None:
        """Its process is gone: its rows are taken, another engine stands in its place."""
        for half in (engine.prefill, engine.decode) if isinstance(engine, ColocatedEngine) else (engine,):
            reap(self.segment, half._me.slot, half._me.incarnation, "killed")
        if isinstance(engine, ColocatedEngine):
            self._colocate()
        elif isinstance(engine, PrefillEngine):
            self.prefill[self.prefill.index(engine)] = self.new_prefill()
        else:
            self.decode[self.decode.index(engine)] = self.new_decode()

    @contextmanager
    def meanwhile(self, act: Callable[[], None]) -> Iterator[None]:
        """Have others act inside a step: `act` is called before and after all that an engine does in this context."""
        busy = [False]

        def wrapped(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            if busy[0]:  # a part of another operation, perhaps in its section; or of what the others do
                return real(*arguments, **named)
            busy[0] = True
            try:
                act()
                result = real(*arguments, **named)
                act()
            finally:
                busy[0] = False
            return result

        owners = [(self.rows, name) for name in _POINTS] + [(self.model, "forward")]
        before = [(owner, name, vars(owner).get(name)) for owner, name in owners]
        for owner, name in owners:
            setattr(owner, name, partial(wrapped, getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name, was in before:
                if was is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, was)

    def step(self) -> bool:
        """One step of every engine; False: none had anything to do."""
        worked = [engine.step() for engine in self.engines]
        return any(worked)

    def run(self, *rows: int, steps: int = 10_000) -> None:
        """Step until these rows (none given: all) have ended; then check tokens and the segment."""
        wanted = rows or tuple(self.asked)
        for _ in range(steps):
            if all(self.rows.state(row) in TERMINAL for row in wanted):
                break
            self.step()
        else:
            states = {row: self.rows.state(row).name for row in wanted}
            raise AssertionError(f"after {steps} steps: {states}")
        assert verify(self.segment) == []

    def take(self, row: int) -> list[int]:
        """The tokens of a row that ended, checked; the row is free again."""
        prompt, count, generation = self.asked.pop(row)
        tokens = self.rows.new_tokens(row, generation, len(prompt))
        expected = answer(prompt, count)
        if self.rows.state(row) is RowState.FINISHED:
            assert tokens == expected
        else:
            assert tokens == expected[: len(tokens)]
        assert self.rows.recycle(row, generation)
        return tokens

    def ask(self, prompt: Sequence[int], count: int = 4) -> list[int]:
        row = self.submit(prompt, count)
        self.run(row)
        return self.take(row)

    def get(self, row: int, name: R) -> int:
        return self.rows.get(row, name)

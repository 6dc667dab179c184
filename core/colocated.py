"""Prefill and decode as one process does both: one forward a step for running answers and waiting prompts.

    step():  decode's plan (every running row) -> prefill's plan (what the token budget leaves) -> one packed forward
             -> decode's commit -> prefill's commit -> first tokens of the prompts that are whole

This is continuous batching with chunked prefill, what a server without disaggregation does: the baseline for what
separation buys. Weights are read once a step; a prompt's last chunk gives its first token; every running row waits
for the chunk beside it. In the segment it is a prefill and a decode participant, so that rows, recovery and
whoever looks on need not know. Called by daemon.py.
"""

from __future__ import annotations

from pdctl.core.config import ClusterSpec
from pdctl.core.decode import DecodeEngine, DecodeWork
from pdctl.core.model import Model
from pdctl.core.prefill import PrefillEngine, PrefillWork
from pdctl.core.wake import Ringer, Wake
from pdctl.core.work import Work
from pdctl.transport.layout import R
from pdctl.transport.segment import Participant, Segment

# A place in the segment: the segment as this place has it opened, and the place.
Place = tuple[Segment, Participant]


class ColocatedEngine:
    """One engine of each kind, and one loop for both.

    Args:
        prefill, decode: our two places.
        bell: rings other processes.
    """

    def __init__(self, prefill: Place, decode: Place, model: Model, spec: ClusterSpec, bell: Ringer) -> None:
        self._model = model
        self._spec = spec
        self._rows = decode[0].rows
        self._bell = _BellWithin(bell, (prefill[1].slot, decode[1].slot))
        self.prefill = PrefillEngine(*prefill, model, spec, self._wake(prefill))
        self.decode = DecodeEngine(*decode, model, spec, self._wake(decode))

    def step(self) -> bool:
        """Advance every answer by one token, and prompts by one chunk together; False: nothing could run."""
        self._bell.rung = False
        decode, prefill = self._plan()
        if decode is not None and prefill is not None:
            work: Work = _packed(decode, prefill)
        elif (one := decode or prefill) is not None:
            work = one
        else:
            return self._bell.rung or self.decode.look_again or self.prefill.look_again
        logits = work.run(self._model)
        num_decoded = 0 if decode is None else len(decode.logit_rows)
        if decode is not None:
            self.decode.commit(decode, None if logits is None else logits[:num_decoded])
        if prefill is not None:
            self.prefill.commit(prefill)
            if logits is not None and prefill.last_parts:
                self.decode.begin(prefill.last_parts, logits[num_decoded:])
        return True

    def release(self) -> None:
        """Put all rows back, with tokens and blocks."""
        self.decode.release()
        self.prefill.release()

    def _wake(self, place: Place) -> Wake:
        segment, me = place
        return Wake(segment, me.slot, self._bell)

    def _plan(self) -> tuple[DecodeWork | None, PrefillWork | None]:
        """Decode first. A row whose last owner died over it is computed alone: for one step all others make way."""
        decode = self.decode.plan()
        if decode is not None and decode.alone:
            return decode, None
        prefill = self.prefill.plan(self._budget_left(decode), first_tokens=True)
        if prefill is not None and prefill.alone:
            decode = None
        self._share_deaths(prefill)
        return decode, prefill

    def _budget_left(self, decode: DecodeWork | None) -> int:
        """Prompt tokens of this step: a block at least, so that answers without end do not keep prompts out."""
        budget = self._spec.chunk_tokens
        taken = 0 if decode is None else len(decode.tokens)
        return max(budget - taken, min(budget, self._spec.block_tokens))

    def _share_deaths(self, prefill: PrefillWork | None) -> None:
        """A death with several rows in hand is charged to none of them alone, but to one that is computed alone."""
        held = [*self.decode.rows, *self.prefill.rows]
        alone = prefill.parts[0].claim.row if prefill is not None and prefill.alone else None
        if len(held) > 1:
            for row in held:
                if row != alone:
                    self._rows.put(row, R.CLAIMED_ALONE, 0)


class _BellWithin:
    """The bell of a process with two places: what one of them says to the other needs no socket.

    Attributes:
        rung: whether one of our own was rung: look once more before sleeping.
    """

    def __init__(self, bell: Ringer, ours: tuple[int, int]) -> None:
        self._bell = bell
        self._ours = ours
        self.rung = False

    def ring(self, slot: int) -> None:
        if slot in self._ours:
            self.rung = True
        else:
            self._bell.ring(slot)


def _packed(first: Work, second: Work) -> Work:
    return Work(
        tokens=first.tokens + second.tokens,
        runs=first.runs + second.runs,
        logit_rows=first.logit_rows + [len(first.tokens) + row for row in second.logit_rows],
        alone=False,
        planned_ns=first.planned_ns,
    )

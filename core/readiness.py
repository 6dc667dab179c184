"""Who is ready: what health answers, and whether a request has anybody to wait for.

Reads participants and their guard bytes. Knows nothing of HTTP; called by requests.py (once a second) and api.py.
"""

from __future__ import annotations

import time

from pdctl.transport.layout import P
from pdctl.transport.segment import ParticipantState, Role, Segment

# A restart takes less than a second; with a new zygote, because that died as well, some 5 s, on a busy machine more.
# A role that lacks longer than this is in trouble.
ABSENCE_LIMIT_S = 20.0
_ROLES = (Role.PREFILL, Role.DECODE)


class Readiness:
    """The daemons of one segment.

    Args:
        absence_limit_s: see `absent`.
    """

    def __init__(self, segment: Segment, *, absence_limit_s: float = ABSENCE_LIMIT_S) -> None:
        self.absence_limit_s = absence_limit_s
        self._segment = segment
        self._was_ready = dict.fromkeys(_ROLES, False)
        self._gone_since: dict[Role, float] = {}

    def missing(self) -> list[str]:
        """Roles of which no participant is ready right now."""
        return [role.label for role in _ROLES if not self.ready_slots(role)]

    def look(self) -> None:
        """Note who is there and who is not: `absent` counts from the first look that found nobody."""
        for role in _ROLES:
            if self.ready_slots(role):
                self._gone_since.pop(role, None)
            else:
                self._gone_since.setdefault(role, time.monotonic())

    def absent(self) -> list[str]:
        """Roles that have had no ready participant for longer than the limit."""
        self.look()
        now = time.monotonic()
        return [role.label for role, since in self._gone_since.items() if now - since > self.absence_limit_s]

    def absence_words(self) -> str:
        """Who has been absent, for a client."""
        who = " and no ".join(self.absent())
        return f"no {who} daemon has been ready for {self.absence_limit_s:g} s"

    def is_loading(self) -> bool:
        """Whether a role has never been ready since this cluster began."""
        for role, seen in self._was_ready.items():
            if not seen:
                slots = self._segment.slots(role)
                self._was_ready[role] = any(self._segment.participant_word(s, P.READY_NS) for s in slots)
                self._was_ready[role] |= bool(self.ready_slots(role))
        return not all(self._was_ready.values())

    def supervisor_lives(self) -> bool:
        return any(self._lives(slot) for slot in self._segment.slots(Role.SUPERVISOR))

    def ready_slots(self, role: Role) -> list[int]:
        """Participants that take rows: ready, not to be drained, alive."""
        segment = self._segment
        return [
            slot
            for slot in segment.slots(role)
            if segment.participant_word(slot, P.STATE) == ParticipantState.READY
            and not segment.participant_word(slot, P.DRAIN)
            and self._lives(slot)
        ]

    def _lives(self, slot: int) -> bool:
        mapping = self._segment.mapping
        # An anonymous segment has no file to hold locks on, and only this process in it.
        return mapping.path is None or mapping.byte_is_held(slot + 1)

"""Whom to wake for what: a bell for the one who can do something about it.

Bells have no content and may be lost; everybody also scans once a second. Used by the engines and the router.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

from pdctl.transport.doorbell import Bell
from pdctl.transport.layout import P, R
from pdctl.transport.segment import Role, Segment

_log = logging.getLogger("wake")


class Ringer(Protocol):
    """What rings; in a daemon its `Bell`."""

    def ring(self, slot: int) -> None: ...


def keep_bell(bell: Bell) -> bool:
    """See that our own bell can be rung (its file may vanish), and log what had to be done.

    Returns:
        Whether it has another descriptor from now on.
    """
    before = bell.fault
    renewed = bell.keep()
    if renewed:
        _log.warning("bell: its file had gone, there is another one")
    elif bell.fault is not None and bell.fault != before:
        _log.error("bell: nobody can ring us (%s); we look around once a second, and try again", bell.fault)
    return renewed


class Wake:
    """The bells of all participants, by what is to be done.

    Args:
        slot: our own, which is never rung.
    """

    def __init__(self, segment: Segment, slot: int, bell: Ringer) -> None:
        self._segment = segment
        self._slot = slot
        self._bell = bell

    def for_work(self, role: Role) -> None:
        """A row waits for a daemon of this role: ring the one with the least to do."""
        slot = self._segment.least_loaded(role)
        if slot is not None and slot != self._slot:
            self._bell.ring(slot)

    def an_idle_peer(self, role: Role) -> None:
        """There is more than we can do now: ring another of our role, if one does nothing."""
        slot = self._segment.least_loaded(role, but=self._slot)
        if slot is not None and not self._segment.participant_word(slot, P.LOAD):
            self._bell.ring(slot)

    def for_room(self) -> None:
        """Blocks came free: ring all who wait for some."""
        for role in (Role.PREFILL, Role.DECODE):
            for slot in self._segment.slots(role):
                if slot != self._slot and self._segment.participant_word(slot, P.WANTS_ROOM):
                    self._bell.ring(slot)

    def owner(self, row: int) -> None:
        """A wish stands in the row."""
        self.slot(self._segment.rows.get(row, R.OWNER) - 1)

    def clients(self, rows: Iterable[int]) -> None:
        """Tokens, or the end, are in these rows: ring their routers, each once."""
        for slot in {self._segment.rows.get(row, R.CLIENT) - 1 for row in rows}:
            self.slot(slot)

    def slot(self, slot: int) -> None:
        if slot != self._slot and 0 <= slot < self._segment.geometry.max_participants:
            self._bell.ring(slot)

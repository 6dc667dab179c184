"""Unexpected exceptions in a loop that must go on: each is logged and counted, and those that persist slow it down.

Knows nothing of what the loop does. Used by supervisor.py.
"""

from __future__ import annotations

import logging
import time

_log = logging.getLogger("faults")
# The same one is logged so often, and a fault is worth a warning for so long.
_SAY_AGAIN_S = 60.0
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 1.0


class Faults:
    """
    Attributes:
        number: so far.
    """

    def __init__(self) -> None:
        self.number = 0
        self._said: dict[str, float] = {}
        self._last = ""
        self._last_at = 0.0
        self._turns = 0
        self._in_this_turn = False

    def note(self, what: str, error: Exception) -> None:
        """Log an exception, with its traceback when it has not just been logged."""
        now = time.monotonic()
        self.number += 1
        self._in_this_turn = True
        self._last, self._last_at = f"{what}: {type(error).__name__}: {error}", now
        self._said = {text: at for text, at in self._said.items() if now - at < _SAY_AGAIN_S}
        if self._last not in self._said:
            self._said[self._last] = now
            _log.error("%s (unexpected error %d); going on", self._last, self.number, exc_info=error)

    def pause_s(self) -> float:
        """After each turn of the loop: how long to do nothing, so that a lasting fault takes no core."""
        self._turns = self._turns + 1 if self._in_this_turn else 0
        self._in_this_turn = False
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self._turns, 10)) if self._turns else 0.0

    def warning(self) -> str | None:
        """What to tell people; None if nothing went wrong in the last minute."""
        if not self.number or time.monotonic() - self._last_at > _SAY_AGAIN_S:
            return None
        return f"the supervisor had {self.number} unexpected errors, the last: {self._last}"

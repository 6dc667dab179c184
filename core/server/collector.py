"""When Python's garbage collector may look at everything: only while that is quick.

A full collection looks at every object of every request under way: with 900 of them that took 0.1 s, in the middle
of whatever callback came along. Young objects are collected as always. Requests leave hardly any garbage that needs
more (some objects a connection), so that can wait for a quiet moment. Used by router.py.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

INTERVAL_S = 10.0
# Some ten milliseconds' worth.
_FEW_REQUESTS = 64
# Without a quiet moment for so long, it happens all the same: what is never collected has no bound.
_LONGEST_WAIT_S = 600.0
_YOUNG, _MIDDLE, _NEVER = 700, 10, 1 << 30


class Collector:
    """Decides when to collect.

    Args:
        num_requests: under way now.
    """

    def __init__(self, num_requests: Callable[[], int]) -> None:
        self._num_requests = num_requests
        self._last = time.monotonic()

    def start(self) -> None:
        """Everything that is there now stays: it is never looked at again. On the event loop's thread."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(_YOUNG, _MIDDLE, _NEVER)
        self._again()

    def _again(self) -> None:
        asyncio.get_running_loop().call_later(INTERVAL_S, self._look)

    def _look(self) -> None:
        self.collect()
        self._again()

    def collect(self) -> bool:
        """Collect everything, if there is a reason to and now is the time; returns whether."""
        num_middle = gc.get_count()[2]  # collections since the last full one
        quiet = self._num_requests() <= _FEW_REQUESTS
        if not num_middle or not (quiet or time.monotonic() - self._last > _LONGEST_WAIT_S):
            return False
        gc.collect()
        self._last = time.monotonic()
        return True

"""Long work on an event loop, cut into turns: everybody else comes first after each.

Counts the thread's own CPU time, so that a busy machine does not make turns shorter. Knows nothing of what is done;
used by whatever on the router's loop grows with what clients send or rows hold.
"""

from __future__ import annotations

import asyncio
import time

# A callback may be several turns' worth of something that cannot be cut; all of it stays below 50 ms.
SLICE_S = 0.01


class Turn:
    """What one piece of work has used since it last let others go first."""

    def __init__(self) -> None:
        self._ends = time.thread_time() + SLICE_S

    @property
    def is_over(self) -> bool:
        return time.thread_time() >= self._ends

    async def pass_on(self) -> None:
        """Let everybody else go first, if the turn is over."""
        if self.is_over:
            await asyncio.sleep(0)
            self._ends = time.thread_time() + SLICE_S

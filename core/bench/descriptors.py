"""Open files of a load: each request that is under way is a connection, and a process may have only so many.

Knows no requests but their number. Called by load.py before it sends the first, and by the commands before they start
anything.
"""

from __future__ import annotations

import contextlib
import math
import resource

from pdctl.transport.errors import CapacityError

# What a client has open beside its connections: the terminal, files, the event loop, names that are looked up.
_OTHERS = 64


def allow(num_at_once: int) -> None:
    """Let this process have as many connections as the system lets it have.

    Args:
        num_at_once: requests that are sure to be under way together.

    Raises:
        CapacityError: that is fewer than these.
    """
    limit = raised()
    if num_at_once + _OTHERS > limit:
        most = max(1, int(limit) - _OTHERS)
        raise CapacityError(
            f"{num_at_once} requests at once: want {num_at_once + _OTHERS} open files, this process may have {limit} "
            "(ulimit -Hn)",
            hint=f"--max-concurrency {most}",
        )


def raised() -> float:
    """The limit of open files, after it was raised from the soft to the hard one; infinite: there is none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # The system's own limit may be lower than the hard one: then the soft one stays.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if soft == resource.RLIM_INFINITY else soft

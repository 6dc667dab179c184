"""A process that a cluster should have: what is known of it, and when it is started again after its end.

Holds no policy but that of restarts, and touches no process: supervisor.py starts, watches and stops them.
"""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass, field

from pdctl.core.process import ProcessHandle
from pdctl.transport.segment import Role

# Dying before it is ready, or sooner than this without having computed anything, is a failure of the start.
STEADY_S = 10.0
MAX_QUICK_DEATHS = 8
_LONGEST_BACKOFF_S = 30.0
# To ask the system again costs little.
_LONGEST_REFUSAL_S = 5.0
# Kinds of daemons, by the places in the segment that one of them takes.
DAEMON_PLACES = {
    "prefill": (Role.PREFILL,),
    "decode": (Role.DECODE,),
    "colocated": (Role.PREFILL, Role.DECODE),
}


@dataclass(kw_only=True, eq=False)
class Child:
    """The router, the zygote or a daemon.

    Attributes:
        role: None for the zygote.
        colocated: of a daemon whose role is PREFILL: it does the work of a decode daemon, too, in a place for each.
        index: of a daemon among those of its role.
        handle: None while it is not running.
        started: when its process was last made (monotonic seconds).
        start_at: when to start it next; None: it runs, or waits for something else than time.
        num_starts: tells one process of this name from the next.
        quick_deaths: failures of its start in a row (see STEADY_S).
        num_refused: times in a row that the system would not make its process.
        ready: it has said that it serves, or, drained, that it would.
        asked: the zygote was asked for it and has not answered.
        kill_at: when it is killed if it has not ended; None: nobody asked it to end.
        wanted: False: forgotten when it ends.
        proof_ns: the longest tick of its proof of the numerics; None: it has not proved that it is bit-exact.
        verdict: why it was killed as hung; None: it was not.
        drain: it is to stand idle, in this and any later process of its name.
        log_size: of its log file before this start: what it says about its death comes after.
    """

    name: str
    role: Role | None
    colocated: bool = False
    index: int = 0
    handle: ProcessHandle | None = None
    started: float = 0.0
    start_at: float | None = 0.0
    num_starts: int = 0
    quick_deaths: int = 0
    num_refused: int = 0
    ready: bool = False
    asked: bool = False
    kill_at: float | None = None
    wanted: bool = True
    proof_ns: int | None = None
    verdict: str | None = None
    drain: bool = False
    log_size: int = 0
    popen: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def kind(self) -> str:
        """Of a daemon: see DAEMON_PLACES."""
        assert self.role is not None
        return "colocated" if self.colocated else self.role.label

    @property
    def roles(self) -> tuple[Role, ...]:
        """Of its places in the segment."""
        if self.role is None:
            return ()
        return DAEMON_PLACES["colocated"] if self.colocated else (self.role,)

    @property
    def gave_up(self) -> bool:
        """It died so often that it is not started again, but by hand."""
        return self.quick_deaths >= MAX_QUICK_DEATHS

    def begin(self, handle: ProcessHandle) -> None:
        """It runs."""
        self.handle, self.started = handle, time.monotonic()
        self.start_at, self.asked, self.num_refused = None, False, 0
        self.num_starts += 1

    def put_off(self) -> float:
        """The system has no process, memory or descriptor for it now: no fault of its own, so never given up.

        Returns:
            Seconds until it is tried again.
        """
        self.num_refused += 1
        pause: float = min(_LONGEST_REFUSAL_S, 0.1 * 2.0 ** min(self.num_refused, 10))
        self.start_at, self.asked, self.ready = time.monotonic() + pause, False, False
        return pause

    def end(self, *, worked: bool = False) -> None:
        """Its process is gone: decide when the next one is made, if ever.

        Args:
            worked: whether it had computed something. Then its end says nothing against the next one's start.
        """
        now, told = time.monotonic(), self.kill_at is not None
        quick = not self.ready or (now - self.started < STEADY_S and not worked)
        self.handle, self.kill_at, self.verdict, self.ready = None, None, None, False
        if told:
            self.start_afresh()
            return
        self.quick_deaths = self.quick_deaths + 1 if quick else 0
        # The first restart is at once; a daemon that was well before is no suspect.
        pause = 0.0 if self.quick_deaths <= 2 else min(_LONGEST_BACKOFF_S, 0.1 * 2**self.quick_deaths)
        self.start_at = None if self.gave_up else now + pause

    def start_afresh(self) -> None:
        """Start it at once, and forget how it ended before."""
        self.quick_deaths, self.start_at = 0, time.monotonic()

"""`pdctl down`: end a cluster, and prove that nothing is left."""

from __future__ import annotations

import signal
import time

from pdctl.cli.options import DEFAULT_CLUSTER, NameOption, StateDirOption, place_of
from pdctl.cli.output import remark
from pdctl.transport.errors import DeadlineError

# The supervisor stops its children within 5 s and kills what is left.
_GRACE_S = 12.0
_KILL_S = 5.0


def down(name: NameOption = DEFAULT_CLUSTER, state_dir: StateDirOption = None) -> None:
    """End a cluster: no process, port, segment or state file stays; its logs do."""
    from pdctl.core import cluster

    directory = place_of(state_dir, name)
    deadline = time.monotonic() + _GRACE_S
    supervisor = None
    # One that is just starting has not signed its lock file yet; another `down` never does, and lets go soon.
    while cluster.is_locked(directory, name):
        supervisor = cluster.find_supervisor(directory, name)
        if supervisor is not None:
            break
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"cluster {name!r}: somebody holds its lock", hint=cluster.command("status", name, directory)
            )
        time.sleep(0.02)
    if supervisor is None:
        removed = cluster.tidy(directory, name)
        if removed is None:
            remark(f"cluster {name!r}: nothing running")
        else:
            remark(f"cluster {name!r} had crashed: removed {', '.join(map(str, removed)) or 'its state'}")
        return
    # A stopped one could not hear us.
    supervisor.send(signal.SIGCONT)
    supervisor.send(signal.SIGTERM)
    if not supervisor.is_gone(_GRACE_S):
        remark(f"supervisor {supervisor.pid}: did not end in {_GRACE_S:.0f} s, killed")
        supervisor.send(signal.SIGKILL)
        if not supervisor.is_gone(_KILL_S):
            raise DeadlineError(
                f"cluster {name!r}: its supervisor (pid {supervisor.pid}) does not end",
                hint=cluster.command("status", name, directory),
            )
    # Nothing is left of one that ended by itself.
    cluster.tidy(directory, name)
    remark(f"cluster {name!r}: down")

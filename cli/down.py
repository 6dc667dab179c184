"""`pdctl down`: end a cluster, and prove that nothing is left."""

from __future__ import annotations

import signal
import time

from pdctl.cli.options import DEFAULT_CLUSTER, NameOption, StateDirOption, state_dir_of
from pdctl.cli.output import remark
from pdctl.transport.errors import DeadlineError
from pdctl.transport.names import check_cluster

# The supervisor stops its children within 5 s and kills what is left.
_GRACE_S = 12.0
_KILL_S = 5.0


def down(name: NameOption = DEFAULT_CLUSTER, state_dir: StateDirOption = None) -> None:
    """End a cluster: no process, port, segment or state file stays; its logs do."""
    from pdctl.core import cluster
    from pdctl.core.process import ProcessHandle

    directory = state_dir_of(state_dir)
    check_cluster(name)
    state = cluster.read_state(directory, name)
    if not cluster.is_locked(directory, name):
        removed = cluster.tidy(directory, name)
        if removed:
            remark(f"cluster {name!r} had crashed: removed {', '.join(map(str, removed))}")
        else:
            remark(f"cluster {name!r}: nothing running")
        return
    deadline = time.monotonic() + _GRACE_S
    # A supervisor that is just starting has not written its file yet.
    while state is None and cluster.is_locked(directory, name) and time.monotonic() < deadline:
        time.sleep(0.05)
        state = cluster.read_state(directory, name)
    if state is not None:
        handle = ProcessHandle.find(state.supervisor_pid, state.supervisor_start_time)
        if handle is not None:
            handle.send(signal.SIGCONT)
            handle.send(signal.SIGTERM)
            if not handle.is_gone(_GRACE_S):
                remark(f"supervisor {handle.pid}: did not end in {_GRACE_S:.0f} s, killed")
                handle.send(signal.SIGKILL)
                handle.is_gone(_KILL_S)
    deadline = time.monotonic() + _KILL_S
    while cluster.is_locked(directory, name):
        if time.monotonic() > deadline:
            raise DeadlineError(f"cluster {name!r}: its supervisor does not end", hint="pdctl status")
        time.sleep(0.02)
    cluster.tidy(directory, name)
    remark(f"cluster {name!r}: down")

"""What a running cluster shows on disk, kept in place: directory, lock, state.json, spec.json, control socket, logs.

All of it may vanish or become unwritable at any time (tmp cleaners, log-out, rm), and serving needs none of it. Once
a second it is looked at, which takes a few stat calls, and made again. What cannot be made again is a warning, logged
once and shown in state.json as far as that can be written.

The name is ours only as long as we hold the lock on the file that others look at. If the lock was removed, its place
is taken again; if another supervisor has been faster, `look` says so, and supervisor.py goes down: two clusters of
one name in one directory would write each other's files. Knows nothing of processes and rows.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pdctl.core.cluster import (
    ClusterLock,
    ClusterState,
    find_supervisor,
    spec_path,
    state_path,
    write_state,
)
from pdctl.core.control import ControlServer
from pdctl.core.private_files import private_directory, write_private
from pdctl.transport.errors import PdctlError
from pdctl.transport.names import cluster_dir, log_dir

_log = logging.getLogger("upkeep")
_Found = tuple[int, ...]


class Upkeep:
    """The files of one cluster, from the moment that its lock is held."""

    def __init__(self, state: ClusterState, lock: ClusterLock) -> None:
        self._state = state
        self._lock = lock
        self._owned = True
        self._warnings: dict[str, str] = {}
        self._shown: tuple[ClusterState, _Found | None] | None = None
        self._spec: tuple[str, _Found | None] | None = None

    @property
    def state(self) -> ClusterState:
        return self._state

    def begin(self) -> None:
        """Write both files for the first time.

        Raises:
            OSError: that cannot be done.
        """
        self._keep_spec()
        self._keep_state()

    def show(self, state: ClusterState) -> None:
        """Have state.json, and spec.json, say this from now on."""
        self._state = state
        if self._owned:
            self._attempt("spec.json", self._keep_spec)
            self._attempt("state.json", self._keep_state)

    def warn(self, what: str, text: str | None) -> None:
        """Have state.json say what does not work as it should; None: it does again."""
        if text is None:
            self._warnings.pop(what, None)
        elif self._warnings.get(what) != text:
            self._warnings[what] = text

    def look(self, control: ControlServer) -> bool:
        """Make again what has vanished.

        Returns:
            False if another supervisor has taken the name.
        """
        self.keep_logs()
        self._owned = self._attempt("lock", self._keep_lock)
        if not self._owned:
            return not self._is_taken()
        self._attempt("control socket", lambda: self._keep_control(control))
        self._attempt("spec.json", self._keep_spec)
        self._attempt("state.json", self._keep_state)
        return True

    def keep_logs(self) -> None:
        """Make the log directory again, if it is gone: without one, those who start now write to nowhere."""

        def make() -> None:
            directory = log_dir(self._state.spec.state_dir, self._state.name)
            for path in (directory.parent.parent, directory.parent, directory):
                private_directory(path)

        self._attempt("logs", make)

    def _keep_lock(self) -> None:
        in_place = self._lock.is_in_place()
        private_directory(self._directory)
        if not self._lock.keep():
            raise BlockingIOError(0, "another process has the lock")
        if not in_place:
            _log.warning("lock: it had gone from %s, and is there again", self._directory)

    def _is_taken(self) -> bool:
        """Whether another supervisor signed the lock. One that is only locked is being tidied, or not signed yet."""
        other = find_supervisor(self._state.spec.state_dir, self._state.name)
        if other is None:
            return False
        other.close()
        return other.pid != os.getpid()

    def _keep_control(self, control: ControlServer) -> None:
        if control.keep():
            _log.warning("control socket: it had gone, and is there again")

    def _keep_state(self) -> None:
        # What it says is written or not: it never says of itself that it cannot be.
        warnings = {what: text for what, text in self._warnings.items() if what != "state.json"}
        wanted = replace(self._state, warnings=warnings)
        path = state_path(self._state.spec.state_dir, self._state.name)
        if self._shown is None or self._shown[1] is None or self._shown != (wanted, _found(path)):
            write_state(wanted)
            self._shown = wanted, _found(path)

    def _keep_spec(self) -> None:
        path = spec_path(self._state.spec.state_dir, self._state.name)
        text = self._state.spec.to_json()
        if self._spec is None or self._spec[1] is None or self._spec != (text, _found(path)):
            write_private(path, text)
            self._spec = text, _found(path)

    @property
    def _directory(self) -> Path:
        return cluster_dir(self._state.spec.state_dir, self._state.name)

    def _attempt(self, what: str, call: Callable[[], None]) -> bool:
        try:
            call()
        except (OSError, PdctlError) as error:
            text = f"{what}: {error.message if isinstance(error, PdctlError) else error}; tried again every second"
            if what not in self._warnings:
                _log.error("%s", text)
            self.warn(what, text)
            return False
        self.warn(what, None)
        return True


def _found(path: Path) -> _Found | None:
    """What tells a file from any other, and from itself once somebody wrote to it or opened it to others."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode, found.st_uid

"""A cluster's traces on disk: its lock, its state file, and what to do with what a dead one left.

    <state dir>/<name>/lock        locked by the supervisor for its life: held = running; holds its PID and start time
    <state dir>/<name>/state.json  written whole by rename: where to find everything
    <state dir>/<name>/bell-<n>    the participants' sockets
    <state dir>/<name>/control     the supervisor's: what commands ask it (control.py)
    <state dir>/logs/<name>/       the only thing that `down` leaves

Used by the supervisor and by every command. No torch; takes no lock but the cluster's own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import signal
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pdctl.core.config import MIN_BLOCKS, ClusterSpec
from pdctl.core.private_files import (
    check_private,
    open_file,
    private_directory,
    read_private,
    write_private,
)
from pdctl.core.process import ProcessHandle, ProcessStat
from pdctl.transport.errors import (
    AlreadyRunningError,
    CapacityError,
    CorruptSegmentError,
    IncompatibleError,
    NoRoomError,
    NotFoundError,
    OtherSegmentError,
    PdctlError,
    UsageError,
)
from pdctl.transport.layout import P
from pdctl.transport.mapping import is_somebody_elses, unlink_if_orphaned
from pdctl.transport.names import (
    DEFAULT_CLUSTER,
    SHM_DIR,
    SegmentName,
    check_cluster,
    cluster_dir,
    default_state_dir,
    log_dir,
    parse_segment_name,
    segments_of,
)
from pdctl.transport.segment import Role, process_start_time, take_snapshot

STATE_SCHEMA = 2
_LOCK, _STATE, _SPEC = "lock", "state.json", "spec.json"
# A lock of the open file, as flock's is, that can also be asked about without being taken (Linux).
_F_OFD_GETLK, _F_OFD_SETLK = 36, 37
_FLOCK = struct.Struct("hhqqi4x")
_MADE_BY_SUPERVISORS = re.compile(r"lock|control|bell-\d+|(state|spec)\.json|\.(state|spec)\.json\.\d+")


@dataclass(frozen=True, kw_only=True)
class ClusterState:
    """What state.json holds.

    Attributes:
        phase: "starting", "running" or "stopping".
        supervisor_start_time: clock ticks after boot; with the PID it names the process.
        gave_up: processes that are not restarted any more, with their deaths in a row.
        trouble: processes that do not come up, with what the last one said.
        warnings: what the supervisor cannot do as it should, by what it is about.
    """

    name: str
    phase: str
    supervisor_pid: int
    supervisor_start_time: int
    segment: str
    url: str
    started_unix_ns: int
    spec: ClusterSpec
    gave_up: dict[str, int] = field(default_factory=dict)
    trouble: dict[str, str] = field(default_factory=dict)
    warnings: dict[str, str] = field(default_factory=dict)

    @property
    def segment_name(self) -> SegmentName:
        name = parse_segment_name(self.segment)
        if name is None:
            raise NotFoundError(
                f"state file: {self.segment!r} is not a segment's name",
                hint=command("down", self.name, self.spec.state_dir),
            )
        return name


def state_path(state_dir: Path, name: str) -> Path:
    return cluster_dir(state_dir, name) / _STATE


def spec_path(state_dir: Path, name: str) -> Path:
    return cluster_dir(state_dir, name) / _SPEC


def command(verb: str, name: str, state_dir: Path, *, always_place: bool = False) -> str:
    """What a person types to run a command on this cluster, for hints: the one place that makes such lines.

    Args:
        always_place: name the state directory even if it is the default one.
    """
    words = ["pdctl", verb]
    if name != DEFAULT_CLUSTER:
        words += ["--name", name]
    if always_place or not _is_default(state_dir):
        words += ["--state-dir", shlex.quote(str(state_dir))]
    return " ".join(words)


def _is_default(state_dir: Path) -> bool:
    try:
        return state_dir == default_state_dir()
    except UsageError:  # there is none
        return False


def advice(error: PdctlError, name: str, state_dir: Path) -> str | None:
    """What to do about an error: its own hint, or what follows from its kind for this cluster.

    The transport knows neither clusters nor commands: its errors have values, and the words are made here.
    """
    if error.hint is not None:
        return error.hint
    if isinstance(error, NoRoomError):
        if error.fitting_blocks < MIN_BLOCKS:
            return f"free memory, or enlarge {SHM_DIR}"
        return command(f"up --kv-blocks {error.fitting_blocks}", name, state_dir)
    if isinstance(error, OtherSegmentError):
        return f"{command('down', name, state_dir)}; {command('up', name, state_dir)}"
    return None


def _lock(fd: int, operation: int, kind: int) -> int:
    """One call on the lock of a whole file; the lock's kind as the kernel answers."""
    answer = fcntl.fcntl(fd, operation, _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0))
    return int(_FLOCK.unpack(answer)[0])


class ClusterLock:
    """The lock that makes one supervisor the only one of its name."""

    def __init__(self, state_dir: Path, name: str) -> None:
        self._path = cluster_dir(state_dir, name) / _LOCK
        self._fd = -1

    def acquire(self, wait_s: float) -> bool:
        """Take it, waiting for one that is on its way out; False if it stays taken."""
        deadline = time.monotonic() + wait_s
        while True:
            private_directory(self._path.parent)
            try:
                fd = open_file(self._path, os.O_RDWR | os.O_CREAT)
            except FileNotFoundError:  # the directory was removed between the two calls
                continue
            except OSError as error:
                raise UsageError(f"lock {self._path}: {error.strerror}", hint=f"remove {self._path}") from error
            try:
                _lock(fd, _F_OFD_SETLK, fcntl.F_WRLCK)
                # The holder before us may have removed the file that we opened.
                if os.path.samestat(os.fstat(fd), self._path.lstat()):
                    self._fd = fd
                    return True
            except FileNotFoundError:
                pass
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(fd)
                    return False
                time.sleep(0.05)
            except OSError as error:  # a file system without such locks
                os.close(fd)
                raise UsageError(
                    f"lock {self._path}: cannot be taken ({error.strerror})",
                    hint="set PDCTL_STATE_DIR or --state-dir to a directory on a local disk",
                ) from error
            os.close(fd)

    def keep(self) -> bool:
        """See that the file we hold is the one that others look at and says who holds it; make it again if not.

        Only with the lock on what has the name is the name ours: whoever has been faster keeps it.

        Returns:
            False if another process has the lock there.

        Raises:
            UsageError, OSError: it cannot be made.
        """
        if not self.is_in_place():
            held = self._fd
            if not self.acquire(0):
                return False
            os.close(held)
        if os.fstat(self._fd).st_mode & 0o077:
            os.fchmod(self._fd, 0o600)
        if os.pread(self._fd, 128, 0) != _signature():
            self.sign()
        return True

    def sign(self) -> None:
        """Say in the file who holds the lock: `down` finds us even without a state file."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, _signature(), 0)

    def forget_state(self) -> None:
        """Remove what a dead supervisor wrote, so that nobody takes it for ours; files of people stay."""
        for path in self._path.parent.iterdir():
            if path != self._path and _MADE_BY_SUPERVISORS.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    path.unlink()

    def is_in_place(self) -> bool:
        """Whether the file that we hold is still the one that others look at.

        If the directory was removed under us, what stands there now is another supervisor's.
        """
        try:
            return os.path.samestat(os.fstat(self._fd), self._path.lstat())
        except OSError:
            return False

    def release(self, *, remove: bool) -> None:
        """Let go; with `remove`, take the cluster's directory away first."""
        if self._fd < 0:
            return
        if remove and self.is_in_place():
            with contextlib.suppress(OSError):
                self.forget_state()
                # Last: from here on the next supervisor may make files of its own in there.
                self._path.unlink()
                self._path.parent.rmdir()
        os.close(self._fd)
        self._fd = -1


def _signature() -> bytes:
    return f"{os.getpid()} {process_start_time(os.getpid()) or 0}\n".encode()


def is_locked(state_dir: Path, name: str) -> bool:
    """Whether a supervisor of this name lives (or `down` is tidying up). Takes nothing."""
    try:
        fd = open_file(cluster_dir(state_dir, name) / _LOCK)
    except OSError:
        return False
    try:
        return _lock(fd, _F_OFD_GETLK, fcntl.F_RDLCK) != fcntl.F_UNLCK
    except OSError:  # no file of which parts can be locked
        return False
    finally:
        os.close(fd)


def find_supervisor(state_dir: Path, name: str) -> ProcessHandle | None:
    """The living supervisor that signed the lock file; None if there is none, or it has not signed yet."""
    try:
        pid, start_time = map(int, read_private(cluster_dir(state_dir, name) / _LOCK).split())
    except (OSError, ValueError):
        return None
    return ProcessHandle.find(pid, start_time) if pid > 0 else None


def write_state(state: ClusterState) -> None:
    """Replace state.json as a whole."""
    directory = cluster_dir(state.spec.state_dir, state.name)
    values = {
        "schema": STATE_SCHEMA,
        "name": state.name,
        "phase": state.phase,
        "supervisor_pid": state.supervisor_pid,
        "supervisor_start_time": state.supervisor_start_time,
        "segment": state.segment,
        "url": state.url,
        "started_unix_ns": state.started_unix_ns,
        "gave_up": state.gave_up,
        "trouble": state.trouble,
        "warnings": state.warnings,
        "spec": json.loads(state.spec.to_json()),
    }
    write_private(directory / _STATE, json.dumps(values, indent=1))


def read_state(state_dir: Path, name: str) -> ClusterState | None:
    """The state file's content; None if it is missing, garbage or of another schema."""
    try:
        values: dict[str, Any] = json.loads(read_private(cluster_dir(state_dir, name) / _STATE))
        if values.pop("schema") != STATE_SCHEMA:
            return None
        values["spec"] = ClusterSpec.from_json(json.dumps(values["spec"]))
        state = ClusterState(**values)
        _ = state.segment_name
        texts = (state.phase, state.segment, state.url, *state.trouble.values(), *state.warnings.values())
        numbers = (state.supervisor_pid, state.supervisor_start_time, state.started_unix_ns, *state.gave_up.values())
        if not all(type(text) is str for text in texts) or not all(type(number) is int for number in numbers):
            return None
        return state if state.name == name and _is_url(state.url) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, PdctlError):
        return None


def is_cluster_directory(path: Path) -> bool:
    """Whether it holds nothing but what a supervisor makes: only such a directory may be emptied unasked."""
    try:
        found = [entry.name for entry in path.iterdir()]
    except OSError:
        return False
    return "lock" in found and all(map(_MADE_BY_SUPERVISORS.fullmatch, found))


def _is_url(text: str) -> bool:
    parts = urlsplit(text)  # ValueError, from `port` too: for the caller
    return parts.scheme == "http" and bool(parts.hostname) and parts.port is not None


def list_clusters(state_dir: Path) -> list[str]:
    """Names that have a directory, running or not."""
    found = []
    with contextlib.suppress(OSError):
        for entry in sorted(state_dir.iterdir()):
            with contextlib.suppress(UsageError):
                if entry.is_dir() and (entry / _LOCK).exists():
                    found.append(check_cluster(entry.name))
    return found


def running(state_dir: Path, name: str) -> ClusterState:
    """The state of a cluster whose supervisor lives.

    Raises:
        NotFoundError: there is none, or it died (the message says which), or one of this name runs elsewhere.
        UsageError: see `check_trust`.
    """
    check_trust(state_dir, name)
    up, down = command("up", name, state_dir), command("down", name, state_dir)
    if not is_locked(state_dir, name):
        if was_left(state_dir, name):
            raise NotFoundError(f"cluster {name!r}: crashed (its supervisor is gone)", hint=f"{down}; {up}")
        others = places_in_use(name)
        if others:
            known = [place for place in others if place is not None]
            raise NotFoundError(
                f"cluster {name!r}: not running in {state_dir}, but {places_words(others)}",
                hint=", or ".join(command("status", name, place) for place in known) or None,
            )
        raise NotFoundError(f"cluster {name!r}: not running", hint=up)
    state = read_state(state_dir, name)
    if state is None:
        raise NotFoundError(
            f"cluster {name!r}: is just starting or stopping", hint=command("status", name, state_dir)
        )
    return state


def check_trust(state_dir: Path, name: str) -> None:
    """Refuse what another user may have put where this cluster's files are.

    Raises:
        UsageError: names what, and whose it is.
    """
    logs = log_dir(state_dir, name)
    check_private(state_dir, cluster_dir(state_dir, name), logs, logs.parent)


def places_in_use(name: str) -> list[Path | None]:
    """State directories in which clusters of this name run, by their segments; None: its processes do not tell."""
    found = [state_dir_of_segment(segment) for segment in segments_of(name) if has_supervisor(segment)]
    return sorted(set(found), key=str)


def place_of(state_dir: Path, name: str) -> Path:
    """Where to look for a cluster: here, or where the only one of its name runs, if there is nothing of it here."""
    if is_locked(state_dir, name) or _exists(cluster_dir(state_dir, name)):
        return state_dir
    others = places_in_use(name)
    return others[0] if len(others) == 1 and others[0] is not None else state_dir


def state_dir_of_segment(segment: SegmentName) -> Path | None:
    """The state directory of the living cluster that has this segment, from the lock that its supervisor has open.

    None if /proc does not tell: the supervisor is in another PID namespace, or its directory was removed.
    """
    try:
        found = take_snapshot(segment)
    except (NotFoundError, CorruptSegmentError, IncompatibleError, CapacityError):
        return None
    for slot in found.segment.slots(Role.SUPERVISOR):
        pid = found.segment.participant_word(slot, P.PID)
        if slot not in found.held or process_start_time(pid) != found.segment.participant_word(slot, P.START_TIME):
            continue
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile
                    target = link.readlink()
                    if target.name == _LOCK and target.parent.name == segment.cluster:
                        place = target.parent.parent
                        if is_locked(place, segment.cluster):
                            return place
    return None


def places_words(places: list[Path | None]) -> str:
    """Where else a cluster runs."""
    known = [str(place) for place in places if place is not None]
    if not known:
        return "one of this name runs in a state directory that its processes do not tell (in another container?)"
    return (
        f"{'one of this name runs' if len(places) == 1 else 'several of this name run'} in {' and in '.join(known)}"
    )


def was_left(state_dir: Path, name: str) -> bool:
    """Whether a cluster that does not run left anything but logs."""
    left = _exists(cluster_dir(state_dir, name))
    return left or any(not has_supervisor(one) for one in segments_of(name))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a path that cannot be: too long, through a file
        return False


def has_supervisor(segment: SegmentName) -> bool:
    """Whether a segment belongs to a cluster that runs: this name is in use in another state directory.

    So does a file with a segment's name that is no segment, as long as a living process has it: nobody's to remove.
    """
    try:
        snapshot = take_snapshot(segment)
    except (NotFoundError, CorruptSegmentError, IncompatibleError):
        return is_somebody_elses(segment)
    return any(slot in snapshot.held for slot in snapshot.segment.slots(Role.SUPERVISOR))


def refuse_if_running(state_dir: Path, name: str) -> None:
    """Raise AlreadyRunningError if a cluster of this name runs or starts; one that stops is no obstacle."""
    state = read_state(state_dir, name)
    if state is None or state.phase == "stopping":
        return
    supervisor = find_supervisor(state_dir, name)
    if supervisor is not None:
        supervisor.close()
        if supervisor.pid == state.supervisor_pid:
            raise already_running(state_dir, name, state)


def already_running(state_dir: Path, name: str, state: ClusterState | None) -> AlreadyRunningError:
    status = command("status", name, state_dir)
    if state is None:
        return AlreadyRunningError(f"cluster {name!r}: already starting or stopping", hint=status)
    return AlreadyRunningError(
        f"cluster {name!r}: already {state.phase} at {state.url} (supervisor {state.supervisor_pid})",
        hint=f"{status}, or {command('down', name, state_dir)}",
    )


def remove_stale(state_dir: Path, name: str, *, wait_s: float = 5.0) -> list[SegmentName]:
    """End the processes and unlink the segments that dead supervisors of this name left. Call with its lock held.

    Daemons are killed by the kernel when the supervisor dies; give the last of them a moment.

    Returns:
        The segments removed.
    """
    removed, deadline = [], time.monotonic() + wait_s
    while strays := _strays(spec_path(state_dir, name)):
        for stray in strays:
            stray.send(signal.SIGKILL)
        alive = [stray.pid for stray in strays if not stray.is_gone(max(0.0, deadline - time.monotonic()))]
        for stray in strays:
            stray.close()
        if alive:
            raise AlreadyRunningError(
                f"cluster {name!r}: process {alive[0]} of an earlier one does not end",
                hint=command("status", name, state_dir),
            )
    for segment in segments_of(name):
        while not has_supervisor(segment):
            if unlink_if_orphaned(segment):
                removed.append(segment)
                break
            if time.monotonic() > deadline:
                raise AlreadyRunningError(
                    f"segment {segment}: a process of an earlier cluster still holds it",
                    hint=command("status", name, state_dir),
                )
            time.sleep(0.02)
    return removed


def _strays(spec: Path) -> list[ProcessHandle]:
    """Processes made with this specification whose supervisor is dead: those that were not bound to its life yet."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and _is_stray(int(entry.name), spec):
            with contextlib.suppress(ProcessLookupError):
                stray = ProcessHandle(int(entry.name))
                # Looked at again: the number may have become a stranger's.
                if _is_stray(stray.pid, spec):
                    found.append(stray)
                else:
                    stray.close()
    return found


def _is_stray(pid: int, spec: Path) -> bool:
    try:
        # Anybody may give a process such arguments.
        if Path(f"/proc/{pid}").stat().st_uid != os.geteuid():
            return False
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if os.fsencode(spec) not in words or not any(word.startswith(b"pdctl.core.") for word in words):
            return False
        # A supervisor leads a session of its own; its number is no other's while a process of that session lives.
        supervisor = ProcessStat.read(os.getsid(pid))
        return supervisor is None or supervisor.state in "ZX"
    except OSError:  # it is gone
        return False


def tidy(state_dir: Path, name: str) -> list[SegmentName] | None:
    """Remove all that a dead cluster left but its logs.

    Returns:
        The segments removed; None if nothing was left, or another one has just started.
    """
    if not was_left(state_dir, name):
        return None
    private_directory(state_dir)
    lock = ClusterLock(state_dir, name)
    if not lock.acquire(0):
        return None
    try:
        return remove_stale(state_dir, name)
    finally:
        lock.release(remove=True)

"""All clusters of this user at a glance, and what dead ones left: for `pdctl ls` and `pdctl gc`.

Looks at one state directory and at all of this user's segments; those that belong to a cluster of another state
directory are foreign here. Only `collect` removes anything, and only what no living process holds. No torch.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pdctl.core.cluster import (
    ClusterLock,
    ClusterState,
    command,
    has_supervisor,
    is_cluster_directory,
    is_locked,
    list_clusters,
    read_state,
    state_dir_of_segment,
    tidy,
)
from pdctl.transport.errors import AlreadyRunningError, PdctlError
from pdctl.transport.layout import P
from pdctl.transport.mapping import descriptor_of
from pdctl.transport.names import SegmentName, all_segments, check_cluster, cluster_dir, log_dir
from pdctl.transport.segment import ParticipantState, Role, Segment, take_snapshot


@dataclass(frozen=True, kw_only=True)
class ClusterSummary:
    """One cluster.

    Attributes:
        phase: starting, running, stopping; crashed: nobody runs it, `collect` removes it; foreign: it runs with
            another state directory.
        state_dir: None for a foreign cluster whose processes do not tell.
        url, model, model_path, ready, wanted, uptime_s, supervisor_pid: None if nothing says so; ready and wanted
            are daemons by role.
        colocated: whether one process is the prefill and the decode daemon.
        segment_bytes: of all its segments.
    """

    name: str
    phase: str
    state_dir: str | None
    url: str | None = None
    model: str | None = None
    model_path: str | None = None
    ready: dict[str, int] | None = None
    wanted: dict[str, int] | None = None
    colocated: bool = False
    uptime_s: float | None = None
    supervisor_pid: int | None = None
    segments: tuple[str, ...]
    segment_bytes: int


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """Something that a dead cluster left.

    Attributes:
        kind: "segment", "state" (a cluster's directory) or "logs".
        removed: whether it is gone now.
        kept_because: why not; None if it was removed, or was not to be.
    """

    kind: str
    cluster: str
    path: Path
    num_bytes: int
    removed: bool = False
    kept_because: str | None = None


# --- looking -----------------------------------------------------------------------------------------------


def survey(state_dir: Path) -> list[ClusterSummary]:
    """All clusters, by name; foreign ones last."""
    segments = all_segments()
    found, claimed = [], set[SegmentName]()
    for name in list_clusters(state_dir):
        locked = is_locked(state_dir, name)
        state = read_state(state_dir, name) if locked else None
        if locked:
            phase = "starting" if state is None else state.phase
            mine = [one for one in segments if state is not None and one == state.segment_name]
        else:
            phase = "crashed"
            mine = [one for one in segments if one.cluster == name and not has_supervisor(one)]
        claimed.update(mine)
        found.append(_summary(name, phase, state_dir, state, mine))
    for segment in segments:
        if segment in claimed:
            continue
        # This state directory has nothing of it: it runs elsewhere, or only its segment is left.
        if has_supervisor(segment):
            elsewhere = state_dir_of_segment(segment)
            state = read_state(elsewhere, segment.cluster) if elsewhere else None
            found.append(_summary(segment.cluster, "foreign", elsewhere, state, [segment]))
        else:
            found.append(_summary(segment.cluster, "crashed", None, None, [segment]))
    return sorted(found, key=lambda one: (one.phase == "foreign", one.name))


def refuse_if_served(state_dir: Path, model: Path) -> None:
    """Raise AlreadyRunningError if a cluster serves what lies in `model`: it may have to load it once more."""
    for one in survey(state_dir):
        if one.phase == "crashed" or one.model_path is None or one.state_dir is None:
            continue
        if Path(one.model_path).resolve().is_relative_to(model.resolve()):
            raise AlreadyRunningError(
                f"{model} is being served by cluster {one.name!r} at {one.url}",
                hint=command("down", one.name, Path(one.state_dir)),
            )


def _summary(
    name: str, phase: str, state_dir: Path | None, state: ClusterState | None, segments: list[SegmentName]
) -> ClusterSummary:
    summary = ClusterSummary(
        name=name,
        phase=phase,
        state_dir=None if state_dir is None else str(state_dir),
        segments=tuple(map(str, segments)),
        segment_bytes=sum(map(_file_bytes, segments)),
    )
    if state is None:
        return summary
    return replace(
        summary,
        url=state.url,
        model=state.spec.model_name,
        model_path=str(state.spec.model_path),
        ready=_ready(state),
        wanted={"prefill": state.spec.num_prefill, "decode": state.spec.num_decode},
        colocated=state.spec.colocated,
        uptime_s=max(0.0, time.time() - state.started_unix_ns / 1e9),
        supervisor_pid=state.supervisor_pid,
    )


def _ready(state: ClusterState) -> dict[str, int] | None:
    """Daemons that take requests now, by role; None if the segment cannot be read."""
    # Its name may be gone.
    fd = descriptor_of(state.supervisor_pid, state.segment_name)
    try:
        snapshot = take_snapshot(state.segment_name if fd is None else fd)
    except PdctlError:
        return None
    finally:
        if fd is not None:
            os.close(fd)
    return {role.label: _num_ready(snapshot.segment, role, snapshot.held) for role in (Role.PREFILL, Role.DECODE)}


def _num_ready(segment: Segment, role: Role, held: frozenset[int]) -> int:
    slots = [slot for slot in segment.slots(role) if slot in held]
    return sum(segment.participant_word(slot, P.STATE) == ParticipantState.READY for slot in slots)


def _file_bytes(name: SegmentName) -> int:
    try:
        return name.path.stat().st_size
    except OSError:
        return 0


# --- removing ----------------------------------------------------------------------------------------------


def leftovers(state_dir: Path, *, logs: bool) -> list[Leftover]:
    """What `collect` would remove."""
    found = []
    for name in _dead_clusters(state_dir):
        directory = cluster_dir(state_dir, name)
        if directory.exists():
            num_bytes = _directory_bytes(directory)
            found.append(Leftover(kind="state", cluster=name, path=directory, num_bytes=num_bytes))
    for segment in all_segments():
        if not has_supervisor(segment) and _may_be_tidied(state_dir, segment.cluster):
            num_bytes = _file_bytes(segment)
            found.append(Leftover(kind="segment", cluster=segment.cluster, path=segment.path, num_bytes=num_bytes))
    for name in _names_of_logs(state_dir) if logs else ():
        directory = log_dir(state_dir, name)
        if _may_be_tidied(state_dir, name):
            num_bytes = _directory_bytes(directory)
            found.append(Leftover(kind="logs", cluster=name, path=directory, num_bytes=num_bytes))
    return sorted(found, key=lambda one: (one.cluster, one.kind))


def collect(state_dir: Path, *, logs: bool) -> list[Leftover]:
    """Remove what dead clusters left; of living ones, and of those that start meanwhile, nothing.

    Raises:
        UsageError: the state directory cannot be used.
    """
    found = leftovers(state_dir, logs=logs)
    kept: dict[str, str] = {}
    for name in {one.cluster: None for one in found}:
        try:
            tidy(state_dir, name)
            if logs:
                _remove_logs(state_dir, name)
        except AlreadyRunningError as error:
            kept[name] = error.message
    return [_after(one, kept.get(one.cluster)) for one in found]


def _after(one: Leftover, reason: str | None) -> Leftover:
    if not one.path.exists():
        return replace(one, removed=True)
    return replace(one, kept_because=reason or "in use again, or it holds what is not ours")


def _remove_logs(state_dir: Path, name: str) -> None:
    lock = ClusterLock(state_dir, name)
    if not lock.acquire(0):
        return
    try:
        for pattern in ("*.log", "*.log.1"):
            for file in log_dir(state_dir, name).glob(pattern):
                file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something else is in there
            log_dir(state_dir, name).rmdir()
    finally:
        lock.release(remove=True)


def _dead_clusters(state_dir: Path) -> list[str]:
    return [name for name in list_clusters(state_dir) if _may_be_tidied(state_dir, name)]


def _may_be_tidied(state_dir: Path, name: str) -> bool:
    """Whether nobody runs a cluster of this name here, and what lies in its place is a cluster's."""
    directory = cluster_dir(state_dir, name)
    return not is_locked(state_dir, name) and (not directory.exists() or is_cluster_directory(directory))


def _names_of_logs(state_dir: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for entry in (state_dir / "logs").iterdir():
            with contextlib.suppress(PdctlError):
                if entry.is_dir() and not entry.is_symlink():
                    yield check_cluster(entry.name)


def _directory_bytes(directory: Path) -> int:
    total = 0
    with contextlib.suppress(OSError):
        for entry in directory.iterdir():
            with contextlib.suppress(OSError):
                total += entry.lstat().st_size
    return total

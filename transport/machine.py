"""What the kernel lets this process have: memory, cores, shared memory, under all limits of its cgroups.

Both versions of cgroups, at every level from the process's own group to the top: a limit anywhere above counts. Knows
nothing of segments. Called by mapping.py before a segment is made, by `core` for threads, and by `status`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pdctl.transport.errors import CapacityError
from pdctl.transport.names import SHM_DIR

_SHM_REMEDY = (
    f"mount -t tmpfs -o mode=1777 tmpfs {SHM_DIR}, as root; a container has one unless it is run with --ipc=none "
    "(its size: --shm-size)"
)
# f_type of statfs(2).
_TMPFS, _RAMFS = 0x01021994, 0x858458F6
# File pages that the kernel takes back before it kills: what MemAvailable counts too, for the whole machine. Pages of
# shared memory are not among them. Only version 2 tells the last one.
_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")


# --- memory ------------------------------------------------------------------------------------------------


def memory_available(root: Path = Path("/")) -> int:
    """Bytes that programs may take without pressing others into swap, as the kernel estimates it."""
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def memory_limits(root: Path = Path("/")) -> list[tuple[int, str]]:
    """Bytes left under each memory limit of this process's cgroup and of those above it, and which limit that is.

    What the group uses counts without the page cache that the kernel would take back; swap does not count.

    Args:
        root: where /proc and /sys are, for tests.
    """
    found = []
    for version, group in _groups(root, "memory"):
        limits = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
        with contextlib.suppress(OSError, ValueError):
            usage = int((group / ("memory.current" if version == 2 else "memory.usage_in_bytes")).read_text())
            used = max(0, usage - _reclaimable(group))
            for limit in limits:
                with contextlib.suppress(OSError, ValueError):  # "max": no limit
                    found.append((int((group / limit).read_text()) - used, f"{limit} of cgroup {group}"))
    return found


def _reclaimable(group: Path) -> int:
    """Bytes of page cache and slabs that the group and those below it could do without."""
    values: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            values[name] = int(value)
    # Version 1 has "total_" for the group with those below it; version 2 means these anyway.
    return sum(values.get(f"total_{name}", values.get(name, 0)) for name in _RECLAIMABLE)


# --- cores -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CpuShare:
    """Cores of a process.

    Attributes:
        num_cores: on which it may run (affinity, cpusets).
        quota: of how many cores its cgroups give it the time; None: no quota.
    """

    num_cores: int
    quota: float | None

    @property
    def usable_cores(self) -> int:
        """As many threads as can run all the time: with more, the kernel would stop all of them in every period."""
        return self.num_cores if self.quota is None else max(1, min(self.num_cores, int(self.quota)))

    def words(self) -> str:
        """For people."""
        cores = f"{self.num_cores} core{'s' if self.num_cores != 1 else ''}"
        return cores if self.quota is None else f"{cores}, with a CPU quota of {self.quota:g}"


def cpu_share(pid: int | None = None, root: Path = Path("/")) -> CpuShare:
    """What a process (default: this one) may use of the CPU.

    Raises:
        OSError: there is no such process.
    """
    quotas = [quota for version, group in _groups(root, "cpu", pid) if (quota := _quota(version, group)) is not None]
    return CpuShare(num_cores=len(os.sched_getaffinity(pid or 0)), quota=min(quotas, default=None))


def usable_cores() -> int:
    """Threads that this process can run at once all the time."""
    return cpu_share().usable_cores


def _quota(version: int, group: Path) -> float | None:
    try:
        if version == 2:
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 and int(period) > 0 else None
    except (OSError, ValueError):  # no such controller here; "max": no limit
        return None


# --- cgroups -----------------------------------------------------------------------------------------------


def _groups(root: Path, controller: str, pid: int | None = None) -> Iterator[tuple[int, Path]]:
    """(version, directory) of a process's cgroups that may limit what `controller` does, from its own upwards."""
    mounts = list(_mounts(root, controller))
    with contextlib.suppress(OSError, ValueError):
        for line in (root / f"proc/{pid or 'self'}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            version = 2 if controllers == "" else 1
            if version == 1 and controller not in controllers.split(","):
                continue
            for mounted_version, top, mount in mounts:
                if mounted_version == version:
                    # A container may see only the part of the tree below its own group.
                    inside = path.removeprefix(top) if f"{path}/".startswith(f"{top}/") else ""
                    directory = mount / inside.lstrip("/")
                    while directory != mount.parent:
                        yield version, directory
                        directory = directory.parent


def _mounts(root: Path, controller: str) -> Iterator[tuple[int, str, Path]]:
    """(version, group that is mounted, where) of each mounted hierarchy that has the controller."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
            head, _, tail = line.partition(" - ")
            fields, (kind, _, options) = head.split(), (*tail.split(), "", "", "")[:3]
            if len(fields) < 5 or not (kind == "cgroup2" or (kind == "cgroup" and controller in options.split(","))):
                continue
            yield 2 if kind == "cgroup2" else 1, fields[3].rstrip("/"), root / fields[4].lstrip("/")


# --- shared memory -----------------------------------------------------------------------------------------


def shm_available() -> int | None:
    """Bytes that are free in /dev/shm; None: it has no limit of its own.

    Raises:
        CapacityError: there is none, or what is there is no memory.
    """
    try:
        found = os.statvfs(SHM_DIR)
    except OSError as error:
        raise no_shm(error.strerror) from error
    if (kind := file_system(SHM_DIR)) not in (_TMPFS, _RAMFS):
        raise no_shm(f"no tmpfs, but a file system of kind {kind:#x}")
    # A tmpfs that was mounted with size=0 has no limit, and says that it has no blocks.
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def no_shm(why: str | None) -> CapacityError:
    """What to tell where /dev/shm cannot be used."""
    return CapacityError(f"shared memory: {SHM_DIR}: {why}", hint=_SHM_REMEDY)


def file_system(path: Path) -> int:
    """The number that statfs(2) has for the kind of file system that a path is on; 0 if it does not say."""
    answer = (ctypes.c_long * 32)()
    if ctypes.CDLL(None).statfs(os.fsencode(path), answer) != 0:
        return 0
    return int(answer[0]) & 0xFFFFFFFF

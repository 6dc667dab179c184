"""What the kernel lets a process have: read from cgroups of both versions, laid out as the kernel lays them out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdctl.transport import machine
from pdctl.transport import mapping as mapping_module
from pdctl.transport.errors import CapacityError
from pdctl.transport.machine import CpuShare, cpu_share, memory_limits, shm_available

GIB = 1 << 30
V2 = "30 23 0:26 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 30 0:27 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
    "32 30 0:28 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "33 30 0:29 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)


def machine_of(root: Path, mounts: str, own: str, files: dict[str, object]) -> Path:
    """A tree with /proc and /sys of a process in the cgroups `own`."""
    for path, text in {"proc/self/mountinfo": mounts, "proc/self/cgroup": own, **files}.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n" if "\n" not in str(text) else str(text))
    return root


def group(path: str, version: int, **values: object) -> dict[str, object]:
    """A cgroup's files: max, high, usage and stat of its memory."""
    names = {"max": "memory.max", "high": "memory.high", "usage": "memory.current", "cpu": "cpu.max"}
    if version == 1:
        names = {"max": "memory.limit_in_bytes", "usage": "memory.usage_in_bytes"}
        names |= {"quota": "cpu.cfs_quota_us", "period": "cpu.cfs_period_us"}
    return {f"{path}/{names.get(name, 'memory.stat')}": value for name, value in values.items()}


def test_page_cache_that_can_be_taken_back_is_not_used(tmp_path: Path) -> None:
    """4.2 GB in use, 3.9 GB of them inactive file pages, a limit of 4 GiB: there is room for more than 3 GiB."""
    stat = "anon 200000000\nfile 3950000000\nshmem 0\ninactive_file 3900000000\nactive_file 0\nslab_reclaimable 7\n"
    own = group("sys/fs/cgroup/job", 2, max=4 * GIB, high="max", usage=4_200_000_000, stat=stat)
    root = machine_of(tmp_path, V2, "0::/job\n", own)
    assert memory_limits(root) == [
        (4 * GIB - 4_200_000_000 + 3_900_000_007, f"memory.max of cgroup {root}/sys/fs/cgroup/job")
    ]


def test_shared_memory_is_no_page_cache(tmp_path: Path) -> None:
    """Pages of tmpfs count as `file` and `shmem`; nothing takes them back."""
    stat = "anon 5\nfile 1000\nshmem 1000\ninactive_file 30\nactive_file 4\nslab_reclaimable 0\n"
    own = group("sys/fs/cgroup/job", 2, max=10_000, usage=9_000, stat=stat)
    assert [left for left, _ in memory_limits(machine_of(tmp_path, V2, "0::/job\n", own))] == [10_000 - 9_000 + 34]


def test_every_level_counts_and_so_does_the_brake(tmp_path: Path) -> None:
    """memory.high stops a group before memory.max kills it; a limit further up is one as well."""
    inner = group("sys/fs/cgroup/a/b", 2, max="max", high=600, usage=100, stat="inactive_file 0\n")
    outer = group("sys/fs/cgroup/a", 2, max=1000, high="max", usage=900, stat="inactive_file 300\n")
    root = machine_of(tmp_path, V2, "0::/a/b\n", {**inner, **outer})
    at = f"of cgroup {root}/sys/fs/cgroup/a"
    assert memory_limits(root) == [(500, f"memory.high {at}/b"), (400, f"memory.max {at}")]


def test_version_1(tmp_path: Path) -> None:
    """`total_` is the group with those below it; no limit is a number that no memory reaches."""
    stat = "inactive_file 1\nactive_file 2\ntotal_inactive_file 40\ntotal_active_file 50\n"
    inner = group("sys/fs/cgroup/memory/a/b", 1, max=500, usage=480, stat=stat)
    outer = group("sys/fs/cgroup/memory/a", 1, max=9223372036854771712, usage=480, stat=stat)
    own = "5:cpu,cpuacct:/a\n4:memory:/a/b\n1:name=systemd:/\n0::/\n"
    left = [left for left, _ in memory_limits(machine_of(tmp_path, V1, own, {**inner, **outer}))]
    assert left == [500 - 480 + 90, 9223372036854771712 - 390]


@pytest.mark.parametrize("own", ["0::/docker/0a1b\n", "0::/docker/0a1b/inner\n", "0::/elsewhere\n"])
def test_a_container_sees_its_part_of_the_tree(tmp_path: Path, own: str) -> None:
    mounts = "30 23 0:26 /docker/0a1b /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw\n"
    files = group("sys/fs/cgroup", 2, max=1000, usage=400, stat="inactive_file 100\n", cpu="50000 100000")
    root = machine_of(tmp_path, mounts, own, files)
    assert [left for left, _ in memory_limits(root)] == [700]
    assert cpu_share(root=root).quota == 0.5


@pytest.mark.parametrize("mounts", ["", "garbage\n", V2, V1, "1 2 3\n - cgroup2\n"])
@pytest.mark.parametrize("own", ["", "x\n", "0::/../../up\n", "0::/gone\n4:memory:/gone\n"])
def test_without_cgroups_there_is_no_limit(tmp_path: Path, mounts: str, own: str) -> None:
    root = machine_of(tmp_path, mounts, own, {})
    assert memory_limits(root) == []
    assert cpu_share(root=root).quota is None
    assert memory_limits(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("levels", "quota"),
    [
        ({"a": "200000 100000"}, 2.0),
        ({"a": "max 100000"}, None),
        ({"a": "400000 100000", "a/b": "150000 100000"}, 1.5),
        ({"a": "150000 100000", "a/b": "max 100000"}, 1.5),
        ({"a": "0 100000"}, None),
        ({"a": "x"}, None),
    ],
)
def test_a_cpu_quota_at_any_level(tmp_path: Path, levels: dict[str, str], quota: float | None) -> None:
    files = {f"sys/fs/cgroup/{path}/cpu.max": text for path, text in levels.items()}
    assert cpu_share(root=machine_of(tmp_path, V2, "0::/a/b\n", files)).quota == quota


def test_a_cpu_quota_of_version_1(tmp_path: Path) -> None:
    top = "sys/fs/cgroup/cpu,cpuacct"
    files = {**group(top, 1, quota=-1, period=100_000), **group(f"{top}/a", 1, quota=250_000, period=100_000)}
    assert cpu_share(root=machine_of(tmp_path, V1, "5:cpu,cpuacct:/a\n", files)).quota == 2.5


@pytest.mark.parametrize(
    ("cores", "quota", "usable"), [(8, None, 8), (8, 2.5, 2), (8, 0.3, 1), (2, 6.0, 2), (1, 1.0, 1)]
)
def test_threads_are_as_many_as_can_run_all_the_time(cores: int, quota: float | None, usable: int) -> None:
    share = CpuShare(num_cores=cores, quota=quota)
    assert share.usable_cores == usable
    assert (f"quota of {quota:g}" in share.words()) if quota else "quota" not in share.words()


def test_the_share_of_another_process() -> None:
    """Of one that may run on one core only; of one that is gone: an error that says so."""
    core = min(os.sched_getaffinity(0))
    sleeper = subprocess.Popen(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert sleeper.stdout is not None
        sleeper.stdout.readline()
        assert cpu_share(sleeper.pid).num_cores == 1
    finally:
        sleeper.communicate(b"\n", timeout=60)
    with pytest.raises(ProcessLookupError):
        cpu_share(sleeper.pid)


# --- shared memory -----------------------------------------------------------------------------------------


class _Unlimited:
    """What statvfs says of a tmpfs that was mounted with size=0."""

    f_blocks, f_bavail, f_bfree, f_frsize = 0, 0, 0, 4096


def test_a_tmpfs_without_size_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "statvfs", lambda path: _Unlimited())
    assert shm_available() is None
    available, limit = mapping_module.available_bytes()
    assert available > 0 and limit != "/dev/shm"


@pytest.mark.parametrize("kind", ["missing", "file", "disk"])
def test_without_shared_memory_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    directory = tmp_path / "shm"
    if kind == "file":
        directory.touch()
    elif kind == "disk":
        directory = Path("/proc")
    monkeypatch.setattr(machine, "SHM_DIR", directory)
    with pytest.raises(CapacityError, match=str(directory)) as caught:
        mapping_module.available_bytes()
    assert "mount -t tmpfs" in (caught.value.hint or "") and "--ipc" in (caught.value.hint or "")


def test_the_memory_limit_is_what_a_segment_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less what is left for everybody else."""
    reserve = mapping_module.MEMORY_RESERVE_BYTES
    monkeypatch.setattr(mapping_module, "memory_limits", lambda: [(reserve + 1000, "memory.max of cgroup /x")])
    assert mapping_module.available_bytes() == (1000, "memory.max of cgroup /x")

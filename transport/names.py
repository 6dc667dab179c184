"""Every name pdctl gives to something outside its processes: built here, parsed here, nowhere else.

Segments are `/dev/shm/pdctl-<uid>-<cluster>-<nonce>`; a cluster's files lie in `<state dir>/<cluster>/`.
Knows nothing of what is inside a segment.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pdctl.transport.errors import UsageError

SHM_DIR = Path("/dev/shm")
DEFAULT_CLUSTER = "default"
# sun_path is 108 bytes with its NUL.
MAX_SOCKET_PATH_BYTES = 107
_CLUSTER = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,30}[a-z0-9])?")
_SEGMENT = re.compile(r"pdctl-(0|[1-9][0-9]*)-([a-z0-9](?:[a-z0-9_-]{0,30}[a-z0-9])?)-([0-9a-f]{12})")


def check_cluster(name: str) -> str:
    """Return `name` if it can name a cluster.

    Raises:
        UsageError: it is not 1–32 of `a-z 0-9 _ -`, beginning and ending with a letter or digit.
    """
    if _CLUSTER.fullmatch(name) is None or name == "logs":
        raise UsageError(
            f"cluster name {name!r}: expected 1 to 32 of a-z, 0-9, '_' and '-', "
            "beginning and ending with a letter or digit (and not 'logs')",
            hint="--name mine",
        )
    return name


@dataclass(frozen=True, kw_only=True)
class SegmentName:
    """A segment's file name in /dev/shm, in its parts."""

    uid: int
    cluster: str
    nonce: str

    def __str__(self) -> str:
        return f"pdctl-{self.uid}-{self.cluster}-{self.nonce}"

    @property
    def path(self) -> Path:
        return SHM_DIR / str(self)


def new_segment_name(cluster: str) -> SegmentName:
    """A name that no segment has had before (48 random bits)."""
    return SegmentName(uid=os.getuid(), cluster=check_cluster(cluster), nonce=secrets.token_hex(6))


def parse_segment_name(text: str) -> SegmentName | None:
    """The parts of a segment's file name; None if it is not one of ours."""
    found = _SEGMENT.fullmatch(text)
    if found is None:
        return None
    return SegmentName(uid=int(found[1]), cluster=found[2], nonce=found[3])


def all_segments(uid: int | None = None) -> list[SegmentName]:
    """All segments of a user (default: this one) that lie in /dev/shm, in use or not.

    None where there is no /dev/shm. Anybody may make a file there by a name that says it is ours: only one that
    belongs to that user counts.
    """
    uid = os.getuid() if uid is None else uid
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(SHM_DIR):
            name = parse_segment_name(entry.name)
            if name is not None and name.uid == uid:
                with contextlib.suppress(OSError):  # it went meanwhile
                    if entry.stat(follow_symlinks=False).st_uid == uid:
                        found.append(name)
    return found


def segments_of(cluster: str, uid: int | None = None) -> list[SegmentName]:
    """All segments of a cluster that lie in /dev/shm, whoever left them there."""
    return [name for name in all_segments(uid) if name.cluster == cluster]


def default_state_dir() -> Path:
    """`$PDCTL_STATE_DIR`, else `.local/state/pdctl` in the home directory that the system has for this user.

    Not $HOME and not $XDG_STATE_HOME or $XDG_RUNTIME_DIR: a login shell, cron and sudo set them differently, and
    each would have clusters of its own. Not a runtime directory: it is removed when the user logs out.

    Raises:
        UsageError: there is no home directory.
    """
    if given := os.environ.get("PDCTL_STATE_DIR"):
        return Path(given).absolute()
    return home_dir() / ".local/state/pdctl"


def home_dir() -> Path:
    """The home directory of this user by the password database; where that does not know the user, $HOME.

    Raises:
        UsageError: neither says one.
    """
    try:
        home = pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:  # a container that runs as some number
        home = os.environ.get("HOME", "")
    if not home.startswith("/"):
        raise UsageError(
            f"user {os.geteuid()} has no home directory: no place for the files of a cluster",
            hint="set PDCTL_STATE_DIR or --state-dir to a directory of your own",
        )
    return Path(home)


def cluster_dir(state_dir: Path, cluster: str) -> Path:
    return state_dir / check_cluster(cluster)


def log_dir(state_dir: Path, cluster: str) -> Path:
    return state_dir / "logs" / check_cluster(cluster)


def bell_path(run_dir: Path, slot: int) -> Path:
    return run_dir / f"bell-{slot}"


def control_path(run_dir: Path) -> Path:
    return run_dir / "control"


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """What to give to bind, connect or sendto for the socket `path`, however long it is.

    A socket address has room for 107 bytes. A longer path goes through a descriptor of its directory, which the
    kernel follows; the socket lies at `path` all the same.

    Raises:
        OSError: the directory of a long path cannot be opened.
    """
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)

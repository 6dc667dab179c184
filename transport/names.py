"""Every name pdctl gives to something outside its processes: built here, parsed here, nowhere else.

Segments are `/dev/shm/pdctl-<uid>-<cluster>-<nonce>`; a cluster's files lie in `<state dir>/<cluster>/`.
Knows nothing of what is inside a segment.
"""

from __future__ import annotations

import os
import re
import secrets
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
            hint="pdctl up --name mine",
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
    """All segments of a user (default: this one) that lie in /dev/shm, in use or not."""
    uid = os.getuid() if uid is None else uid
    names = (parse_segment_name(entry.name) for entry in SHM_DIR.iterdir())
    return [name for name in names if name is not None and name.uid == uid]


def segments_of(cluster: str, uid: int | None = None) -> list[SegmentName]:
    """All segments of a cluster that lie in /dev/shm, whoever left them there."""
    return [name for name in all_segments(uid) if name.cluster == cluster]


def default_state_dir() -> Path:
    """`$PDCTL_STATE_DIR`, else `$XDG_RUNTIME_DIR/pdctl`, else `/tmp/pdctl-<uid>`."""
    if given := os.environ.get("PDCTL_STATE_DIR"):
        return Path(given).absolute()
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "pdctl"
    return Path(f"/tmp/pdctl-{os.getuid()}")


def cluster_dir(state_dir: Path, cluster: str) -> Path:
    return state_dir / check_cluster(cluster)


def log_dir(state_dir: Path, cluster: str) -> Path:
    return state_dir / "logs" / check_cluster(cluster)


def bell_path(run_dir: Path, slot: int) -> Path:
    return run_dir / f"bell-{slot}"


def control_path(run_dir: Path) -> Path:
    return run_dir / "control"


def check_socket_room(state_dir: Path, cluster: str) -> None:
    """Raise UsageError if a socket of this cluster would not fit in a socket address."""
    run_dir = cluster_dir(state_dir, cluster)
    longest = max((os.fsencode(path) for path in (bell_path(run_dir, 999), control_path(run_dir))), key=len)
    if len(longest) > MAX_SOCKET_PATH_BYTES:
        raise UsageError(
            f"state directory {state_dir}: its sockets' paths would be {len(longest)} bytes long, "
            f"the system allows {MAX_SOCKET_PATH_BYTES}",
            hint=f"pdctl up --state-dir /tmp/pdctl-{os.getuid()}",
        )

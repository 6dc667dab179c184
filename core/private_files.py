"""Files that only this user may write: made so, and believed only if they are.

A state directory may lie where anybody could have made it first, or planted something in it. So whatever a cluster
keeps on disk is opened here: its directory and the file itself must be this user's and closed to writers of any
other, and no symbolic link leads elsewhere. What fails that is an `UntrustedError`, an OSError: whoever looks for a
file has not found one. `check_private` and `private_directory` say it to people.

Knows nothing of what the files hold. Called by cluster.py and by all that read a cluster's specification.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from pdctl.transport.errors import UsageError
from pdctl.transport.machine import file_system

# O_NONBLOCK: opening a FIFO must not wait for its other end.
LOOK = os.O_RDONLY | os.O_NONBLOCK
_CLOSED = os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MAX_FILE_BYTES = 1 << 20
_ANOTHER = "set PDCTL_STATE_DIR or --state-dir to a directory of your own"
# f_type of statfs(2). Their locks are shared with other machines, or none; sockets there are only names.
_NETWORK_FILE_SYSTEMS = {
    0x6969: "NFS",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x517B: "SMB",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x7461636F: "OCFS2",
    0x01161970: "GFS2",
}


class UntrustedError(PermissionError):
    """It belongs to another user, or others may write it."""


def _check(found: os.stat_result, path: Path) -> None:
    if found.st_uid != os.geteuid():
        raise UntrustedError(errno.EPERM, f"belongs to user {found.st_uid}, not {os.geteuid()}", str(path))
    if stat.S_ISLNK(found.st_mode):
        raise UntrustedError(errno.EPERM, "is a symbolic link, which is not followed", str(path))
    if found.st_mode & _OTHERS_WRITE:
        raise UntrustedError(errno.EPERM, f"other users may write it (mode {found.st_mode & 0o7777:04o})", str(path))


def open_directory(path: Path) -> int:
    """A descriptor of a directory that only this user may write.

    Raises:
        UntrustedError: others may write it, or it is theirs.
        OSError: it is missing, or no directory.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _CLOSED)
    try:
        _check(os.fstat(fd), path)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_file(path: Path, flags: int = LOOK) -> int:
    """A descriptor of a file that only this user may write, in such a directory; O_CREAT makes it mode 0600.

    Raises:
        UntrustedError: others may write one of them, or it is theirs.
        OSError: one of them is missing or cannot be opened.
    """
    directory = open_directory(path.parent)
    try:
        fd = os.open(path.name, flags | _CLOSED, 0o600, dir_fd=directory)
    finally:
        os.close(directory)
    try:
        _check(os.fstat(fd), path)
    except OSError:
        os.close(fd)
        raise
    return fd


def read_private(path: Path) -> str:
    """The text of a file that `write_private` wrote, whatever stands there now: waits for nobody, reads not forever.

    Raises:
        OSError: it is missing, cannot be read, or is not to be trusted.
        ValueError: it is no regular file, too large, or no text.
    """
    with open(open_file(path), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path}: not a regular file")
        data = file.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        raise ValueError(f"{path}: larger than {_MAX_FILE_BYTES} bytes")
    return data.decode()


def write_private(path: Path, text: str) -> None:
    """Write a file that is seen whole or not at all, mode 0600; if that fails, nothing is left of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def private_directory(path: Path) -> None:
    """Make a directory that only this user can enter, or check that it is one.

    Raises:
        UsageError: it cannot be made, belongs to somebody else, or is open to others.
    """
    try:
        # Parents that are missing become private as well, whatever the umask.
        for parent in reversed([parent for parent in path.parents if not parent.exists()]):
            parent.mkdir(mode=0o700, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except FileExistsError as error:
        raise UsageError(f"state directory {path}: is not a directory", hint=_ANOTHER) from error
    except OSError as error:
        raise UsageError(f"state directory {path}: {error.strerror}", hint=_ANOTHER) from error
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"state directory {path}: is not a directory", hint=_ANOTHER)
    if found.st_mode & stat.S_ISVTX:
        # As /tmp: making it private would take it away from everybody else.
        raise UsageError(f"state directory {path}: is shared by all users", hint=_ANOTHER)
    if found.st_uid != os.geteuid():
        raise UsageError(f"state directory {path}: belongs to user {found.st_uid}, not {os.geteuid()}", hint=_ANOTHER)
    if found.st_mode & 0o077:
        try:
            path.chmod(0o700)
        except OSError as error:
            raise UsageError(
                f"state directory {path}: open to other users ({error.strerror})", hint=_ANOTHER
            ) from error


def check_private(directory: Path, *whole: Path) -> None:
    """Refuse a state directory that somebody else may have made or filled. What is missing is no fault.

    Args:
        whole: directories below it in which everything counts, not only the directory itself.

    Raises:
        UsageError: names the first that belongs to another user, or that others may write.
    """
    paths = [directory]
    for one in whole:
        paths.append(one)
        with contextlib.suppress(OSError):
            paths += one.iterdir()
    for path in paths:
        try:
            found = path.lstat()
            _check(found, path)
        except UntrustedError as error:
            ours = found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode)
            hint = f"chmod go-w {path}" if ours else _ANOTHER
            raise UsageError(
                f"{'state directory' if path == directory else 'file'} {path}: {error.strerror}", hint=hint
            ) from error
        except OSError:
            continue


def check_local(path: Path) -> None:
    """Refuse a directory on a file system that other machines share.

    Its locks would count for them too, though this machine's processes and memory are nobody else's, or would
    be lost with the connection.

    Raises:
        UsageError: it is on one; names which.
    """
    kind = _NETWORK_FILE_SYSTEMS.get(file_system(path))
    if kind is not None:
        raise UsageError(
            f"state directory {path}: is on a network file system ({kind}), where locks are not this machine's alone",
            hint=f"set PDCTL_STATE_DIR or --state-dir to a local directory, e.g. /var/tmp/pdctl-{os.geteuid()}",
        )

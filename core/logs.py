"""Logs: one file a process, a size limit, everything that a process prints included.

Each process writes `<log dir>/<role>.log` through its own stderr, so that tracebacks and messages of libraries
stand beside ours. A file that is full becomes `<role>.log.1` and replaces the one before.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

MAX_LOG_BYTES = 4 << 20
# What a supervisor says first, once the name is its own; log_files.py tells runs apart by it.
RUN_BEGINS = "the run begins"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_FORMAT = "%(asctime)s %(levelname).1s %(name)s %(message)s"
_WRITE = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
_STAMP = re.compile(r"\d{4}-\d\d-\d\d \S+Z [A-Z] \S+ ")


class _RotatingStderr(logging.Handler):
    """Writes records to this process's stderr, which is the log file, as long as that can be.

    A record is one write, so that those of several processes stand in one file side by side. Whatever became of the
    file or its directory, nobody who logs is disturbed: until there is a file again, records go into the one that is
    still open, whose name may be gone. supervisor.py makes the directory again.
    """

    def __init__(self, path: Path, *, stdout: bool) -> None:
        super().__init__()
        self._path = path
        self._stdout = stdout
        self._num_lost = 0
        with contextlib.suppress(OSError):
            self._open(path.name)

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            self._keep()
        try:
            text = self.format(record)
        except Exception:  # our own mistake: say so
            self.handleError(record)
            return
        if self._num_lost:
            text = f"(before this, {self._num_lost} lines could not be written)\n{text}"
        try:
            _write_all(2, f"{text}\n".encode(errors="backslashreplace"))
            self._num_lost = 0
        except OSError:  # the disk is full
            self._num_lost += 1

    def _keep(self) -> None:
        """Go on in the file of our name: a new one if it is full, was removed, or is another by now."""
        mine = os.fstat(2)
        try:
            in_place = os.path.samestat(mine, self._path.lstat())
        except FileNotFoundError:
            in_place = False
        if not in_place:
            self._open(self._path.name)
        elif mine.st_size > MAX_LOG_BYTES:
            self._rotate()

    def _rotate(self) -> None:
        """Put the full file aside and begin another; if that cannot be had, go on in the full one."""
        name = self._path.name
        with _private(self._path.parent) as directory:
            # One writer at a time, and only the file that it has open: another one may just have done it.
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(2), os.stat(name, dir_fd=directory, follow_symlinks=False)):
                return
            os.rename(name, f"{name}.1", src_dir_fd=directory, dst_dir_fd=directory)
            try:
                fd = os.open(name, _WRITE, 0o600, dir_fd=directory)
            except OSError:
                os.rename(f"{name}.1", name, src_dir_fd=directory, dst_dir_fd=directory)
                raise
        self._become(fd)

    def _open(self, name: str) -> None:
        with _private(self._path.parent) as directory:
            fd = os.open(name, _WRITE, 0o600, dir_fd=directory)
        self._become(fd)

    def _become(self, fd: int) -> None:
        """Let stderr, and stdout if it is to go along, be this file."""
        os.dup2(fd, 2)
        if self._stdout:
            os.dup2(fd, 1)
        if fd > 2:
            os.close(fd)


@contextlib.contextmanager
def _private(directory: Path) -> Iterator[int]:
    """Open a directory that only this user can enter: what is there by now may be somebody else's."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(errno.EACCES, "not this user's alone", str(directory))
        yield fd
    finally:
        os.close(fd)


def open_log(directory: Path, role: str) -> int:
    """A descriptor to append to a process's log, for what it prints before its own logging stands.

    Raises:
        OSError: there is no such directory, or it is not this user's alone.
    """
    with _private(directory) as fd:
        return os.open(f"{role}.log", _WRITE | os.O_CLOEXEC, 0o600, dir_fd=fd)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def setup(directory: Path, role: str, *, stdout: bool = True) -> None:
    """Send stderr and logging of this process, and its stdout, to `<directory>/<role>.log`, as soon as that can be.

    Args:
        stdout: False: it goes on to where it went before.
    """
    with contextlib.suppress(OSError):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    handler = _RotatingStderr(directory / f"{role}.log", stdout=stdout)
    formatter = logging.Formatter(_FORMAT)
    formatter.converter = time.gmtime
    formatter.default_msec_format = "%s.%03dZ"
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    if (given := os.environ.get("PDCTL_LOG_LEVEL", "").upper()) in _LEVELS:
        root.setLevel(given)
    elif given:
        root.warning("PDCTL_LOG_LEVEL %s: expected %s; INFO is taken", ascii(given[:40]), ", ".join(_LEVELS))


def begin_run() -> None:
    """Say that a cluster's run begins, whatever level is logged: without it, runs could not be told apart."""
    log = logging.getLogger("supervisor")
    log.handle(log.makeRecord(log.name, logging.INFO, __file__, 0, RUN_BEGINS, (), None))


def last_error(directory: Path, role: str, start: int = 0) -> str | None:
    """The last line of a role's log that looks like a cause: a traceback's last line, else the last line.

    Time stamp and level are left out.

    Args:
        start: where in the file to begin, in bytes; what an earlier process wrote comes before.
    """
    try:
        with (directory / f"{role}.log").open("rb") as file:
            file.seek(start if start <= os.fstat(file.fileno()).st_size else 0)
            lines = file.read().decode(errors="replace").splitlines()[-200:]
    except OSError:
        return None
    lines = [line for line in lines if line.strip()]
    for line in reversed(lines):
        if line[:1].isalpha() and ("Error" in line.split(":")[0] or "Exception" in line.split(":")[0]):
            return line
    return _STAMP.sub("", lines[-1]) if lines else None

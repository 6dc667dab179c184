"""Logs: one file a process, a size limit, everything that a process prints included.

Each process writes `<log dir>/<role>.log` through its own stderr, so that tracebacks and messages of libraries
stand beside ours. A file that is full becomes `<role>.log.1` and replaces the one before.
"""

from __future__ import annotations

import logging
import os
import re
import time
from pathlib import Path

MAX_LOG_BYTES = 4 << 20
# What a supervisor says first, once the name is its own; log_files.py tells runs apart by it.
RUN_BEGINS = "the run begins"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_FORMAT = "%(asctime)s %(levelname).1s %(name)s %(message)s"
_STAMP = re.compile(r"\d{4}-\d\d-\d\d \S+Z [A-Z] \S+ ")


class _RotatingStderr(logging.StreamHandler):  # type: ignore[type-arg]
    def __init__(self, path: Path) -> None:
        self._path = path
        self._open()
        super().__init__()

    def _open(self) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        if fd > 2:
            os.close(fd)

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        try:
            if os.fstat(2).st_size > MAX_LOG_BYTES:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
                self._open()
        except OSError:
            pass  # The log directory was removed: go on into the file that is still open.


def setup(directory: Path, role: str) -> None:
    """Send stdout, stderr and logging of this process to `<directory>/<role>.log`."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    handler = _RotatingStderr(directory / f"{role}.log")
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

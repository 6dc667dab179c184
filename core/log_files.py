"""Reading what logs.py writes: lines of a cluster's processes, whole across rotations, and told apart by run.

Knows the two files that a process's log has (`router.log`, and `router.log.1` before it) and the line that a
supervisor begins each run with. Never prints; called by cli/logs.py.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from pdctl.core.logs import RUN_BEGINS

_STAMP_CHARS = len("2026-01-02 03:04:05.678Z")
# A rotation between two looks is looked at again; one that is rotated faster than it can be opened loses lines.
_TRIES = 10


class Line(NamedTuple):
    """A line, in the order in which lines of several processes are to be shown.

    Attributes:
        stamp: its own time, else that of the line before: a traceback stays with what it follows.
        number: its place among the process's lines.
    """

    stamp: str
    process: str
    number: int
    text: str


def begins_run(text: str) -> bool:
    return text.endswith(f"I supervisor {RUN_BEGINS}")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The latest run of a cluster: the one that runs, else the last one, however it ended.

    Attributes:
        since: the stamp of its first line; "": no begin is known, so all there is belongs to it.
    """

    since: str = ""

    @classmethod
    def of(cls, directory: Path) -> Run:
        lines = Log(directory / "supervisor.log").read()
        return cls(since=next((line.stamp for line in reversed(lines) if begins_run(line.text)), ""))

    def cut(self, lines: Sequence[Line], written: float) -> list[Line]:
        """Of a process's lines those of this run.

        Args:
            written: when its log was last written to, in seconds since the epoch.
        """
        if not self.since:
            return [*lines]
        stamped = [_is_stamped(line.text) for line in lines]
        for number, line in enumerate(lines):
            if stamped[number] and line.stamp >= self.since:
                return [*lines[number:]]
        # A process that ended before it could stamp anything: what stands after the last stamp may be its words.
        began = datetime.strptime(self.since, "%Y-%m-%d %H:%M:%S.%fZ").replace(tzinfo=UTC).timestamp()
        last = max((number for number, has_stamp in enumerate(stamped) if has_stamp), default=-1)
        return [*lines[last + 1 :]] if written >= began else []


def _is_stamped(text: str) -> bool:
    return text[:4].isdigit() and text[_STAMP_CHARS - 1 : _STAMP_CHARS] == "Z"


class Log:
    """One process's log, read from its beginning, or from where it ends now, to wherever it ends next time.

    A file stays open until its last line is read: neither a new name nor losing its name takes a line away. So lines
    are lost only where a file is filled and replaced twice between two looks, and its successor as well.
    """

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._partial = b""
        self._num_lines = 0
        self._stamp = ""
        # Open, even if it was read long ago: its number must not become another file's.
        self._before: io.FileIO | None = None
        self._file: io.FileIO | None = None
        if from_end:
            for file in self._newer():
                file.seek(0, os.SEEK_END)
                self._go_on_with(file)

    @property
    def written(self) -> float:
        """When it was last written to; 0 if it is not there."""
        return os.fstat(self._file.fileno()).st_mtime if self._file is not None else 0.0

    def read(self) -> list[Line]:
        """The lines that have become whole since the last time."""
        data = self._partial + self._rest()
        for file in self._newer():
            # What came before it got another name.
            data += self._rest()
            data += b"\n" if data and not data.endswith(b"\n") else b""
            self._go_on_with(file)
            data += self._rest()
        whole, newline, self._partial = data.rpartition(b"\n")
        return [self._line(one) for one in (whole + newline).splitlines()]

    def _line(self, data: bytes) -> Line:
        text = data.decode(errors="replace")
        if _is_stamped(text):
            self._stamp = text[:_STAMP_CHARS]
        self._num_lines += 1
        return Line(self._stamp, self._path.stem, self._num_lines, text)

    def _rest(self) -> bytes:
        if self._file is None:
            return b""
        if self._file.tell() > os.fstat(self._file.fileno()).st_size:
            self._file.seek(0)  # cut off, and begun anew
        return self._file.read() or b""

    def _go_on_with(self, file: io.FileIO) -> None:
        if self._before is not None:
            self._before.close()
        self._before, self._file = self._file, file

    def _newer(self) -> list[io.FileIO]:
        """Files that came after the one that is read, in their order."""
        for _ in range(_TRIES):
            last = _opened(self._path)
            if last is None:
                return []  # between two renames, or removed
            older = None if self._is_known(last) else _opened(self._path.with_name(f"{self._path.name}.1"))
            found = [file for file in (older, last) if file is not None]
            # Rotated meanwhile, the older one may not be the one before it.
            is_still_last = _is_at(self._path, last)
            new = [file for file in found if is_still_last and not self._is_known(file)]
            for file in found:
                if file not in new:
                    file.close()
            if is_still_last:
                return new
        return []

    def _is_known(self, file: io.FileIO) -> bool:
        known = [os.fstat(one.fileno()) for one in (self._before, self._file) if one is not None]
        return any(os.path.samestat(os.fstat(file.fileno()), one) for one in known)


def _is_at(path: Path, file: io.FileIO) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(file.fileno()))
    except OSError:
        return False


def _opened(path: Path) -> io.FileIO | None:
    """A regular file; None: there is none."""
    with contextlib.suppress(OSError):
        file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file
        file.close()
    return None


class Logs:
    """The logs of a cluster's processes, those that start later included.

    Args:
        process: only this one's; None: all.
        from_end: only what is written from now on.
    """

    def __init__(self, directory: Path, process: str | None = None, *, from_end: bool = False) -> None:
        self._directory = directory
        self._pattern = f"{process or '*'}.log"
        self._logs = {path.stem: Log(path, from_end=from_end) for path in self._paths()}

    def _paths(self) -> list[Path]:
        return sorted(self._directory.glob(self._pattern))

    @property
    def processes(self) -> list[str]:
        return sorted(self._logs)

    def read(self) -> list[Line]:
        """The new lines of all, in the order of their times."""
        return sorted(line for log in self._all() for line in log.read())

    def read_run(self, run: Run, grep: str | None, tail: int) -> list[Line]:
        """The same, but of each process only the last `tail` lines of a run that have a text."""
        found: list[Line] = []
        for log in self._all():
            lines = log.read()
            cut = run.cut(lines, log.written)
            found += [line for line in cut if grep is None or grep in line.text][-tail:]
        return sorted(found)

    def _all(self) -> list[Log]:
        for path in self._paths():
            if path.stem not in self._logs:
                self._logs[path.stem] = Log(path)
        return [self._logs[process] for process in self.processes]

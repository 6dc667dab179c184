"""`pdctl logs`: what the processes of a cluster wrote, in one stream; also after `down`."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from pdctl.cli.options import DEFAULT_CLUSTER, NameOption, StateDirOption, place_of
from pdctl.cli.output import remark
from pdctl.transport.errors import NotFoundError, UsageError
from pdctl.transport.names import log_dir

POLL_S = 0.25


def logs(
    process: Annotated[
        str | None,
        typer.Argument(help="supervisor, router, zygote, prefill-0, decode-0, …; default: all.", show_default=False),
    ] = None,
    tail: Annotated[int, typer.Option("--tail", "-n", min=1, help="Lines of each process.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    grep: Annotated[
        str | None, typer.Option("--grep", help="Only lines with this text, e.g. a request's id.")
    ] = None,
    name: NameOption = DEFAULT_CLUSTER,
    state_dir: StateDirOption = None,
) -> None:
    """Show the logs of a cluster; they stay after `down`.

    With --grep, exit code 1 if no line has the text.
    """
    from pdctl.core.cluster import command

    if process is not None and not process.replace("-", "").isalnum():
        raise UsageError(f"process {process!r}: expected one of supervisor, router, zygote, prefill-0, decode-0, …")
    root = place_of(state_dir, name)
    directory = log_dir(root, name)
    files = sorted(directory.glob(f"{process or '*'}.log")) if directory.is_dir() else []
    if not files:
        what = f"process {process!r} of cluster {name!r}" if process else f"cluster {name!r}"
        others = process and any(directory.glob("*.log"))
        raise NotFoundError(f"no logs of {what} in {directory}", hint=command("logs" if others else "up", name, root))
    follower = Follower(directory, f"{process or '*'}.log", grep)
    lines: list[tuple[str, str, int, str]] = []
    for file in files:
        last: deque[str] = deque(maxlen=tail)
        for part in (file.with_name(file.name + ".1"), file):
            if part.exists():
                with part.open(errors="replace") as text:
                    last.extend(line.rstrip("\n") for line in text if grep is None or grep in line)
        lines += _stamped(file.stem, last)
    follower.print(lines)
    if grep is not None and not lines and not follow:
        remark(f"no line of {', '.join(file.stem for file in files)} has {grep!r}")
        raise typer.Exit(1)
    while follow:
        follower.print_new()
        time.sleep(POLL_S)


def _stamped(stem: str, lines: Iterable[str]) -> list[tuple[str, str, int, str]]:
    """(time, process, place, line) of a process's lines; a traceback's lines stay with the line that they follow."""
    stamp, found = "", []
    for number, line in enumerate(lines):
        stamp = line[:24] if line[:4].isdigit() else stamp
        found.append((stamp, stem, number, line))
    return found


class Follower:
    """What a cluster's processes write from now on, those that start later included.

    Args:
        pattern: which files of the directory.
        grep: only lines with this text.
    """

    def __init__(self, directory: Path, pattern: str = "*.log", grep: str | None = None) -> None:
        self._directory = directory
        self._pattern = pattern
        self._grep = grep
        self._width = 0
        self._places = {file: file.stat().st_size for file in self._files()}

    def _files(self) -> list[Path]:
        files = sorted(self._directory.glob(self._pattern))
        self._width = max((len(file.stem) for file in files), default=0)
        return files

    def print_new(self) -> None:
        """Print the lines that have become whole since the last time."""
        found: list[tuple[str, str, int, str]] = []
        for file in self._files():
            place = self._places.get(file, 0)
            with contextlib.suppress(FileNotFoundError), file.open("rb") as log:
                # Full, and begun anew.
                place = place if place <= os.fstat(log.fileno()).st_size else 0
                log.seek(place)
                lines = log.read().splitlines(keepends=True)
                while lines and not lines[-1].endswith(b"\n"):
                    lines.pop()
                self._places[file] = place + sum(map(len, lines))
                texts = [line.decode(errors="replace").rstrip("\n") for line in lines]
                found += _stamped(file.stem, [text for text in texts if self._grep is None or self._grep in text])
        self.print(found)

    def print(self, lines: list[tuple[str, str, int, str]]) -> None:
        """Print lines of several processes, as `_stamped` gives them, in the order of their times."""
        for _, stem, _, line in sorted(lines, key=lambda one: one[:3]):
            sys.stdout.write(f"{stem:{self._width}} | {line}\n")
        sys.stdout.flush()

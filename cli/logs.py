"""`pdctl logs`: what the processes of a cluster wrote, in one stream; also after `down`."""

from __future__ import annotations

import sys
import time
from collections import deque
from pathlib import Path
from typing import Annotated

import typer

from pdctl.cli.options import DEFAULT_CLUSTER, NameOption, StateDirOption, state_dir_of
from pdctl.transport.errors import NotFoundError, UsageError
from pdctl.transport.names import log_dir

_POLL_S = 0.25


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
    """Show the logs of a cluster; they stay after `down`."""
    from pdctl.core.cluster import command

    if process is not None and not process.replace("-", "").isalnum():
        raise UsageError(f"process {process!r}: expected one of supervisor, router, zygote, prefill-0, decode-0, …")
    directory = log_dir(state_dir_of(state_dir), name)
    files = sorted(directory.glob(f"{process or '*'}.log")) if directory.is_dir() else []
    if not files:
        what = f"process {process!r} of cluster {name!r}" if process else f"cluster {name!r}"
        others = process and any(directory.glob("*.log"))
        raise NotFoundError(f"no logs of {what} in {directory}", hint=command("logs" if others else "up", name))
    width = max(len(file.stem) for file in files)
    lines: list[tuple[str, str, int, str]] = []
    for file in files:
        last: deque[str] = deque(maxlen=tail)
        for part in (file.with_name(file.name + ".1"), file):
            if part.exists():
                with part.open(errors="replace") as text:
                    last.extend(line.rstrip("\n") for line in text if grep is None or grep in line)
        stamp = ""
        for number, line in enumerate(last):
            # A traceback's lines stay with the line that they follow.
            stamp = line[:24] if line[:4].isdigit() else stamp
            lines.append((stamp, file.stem, number, line))
    for _, stem, _, line in sorted(lines, key=lambda one: one[:3]):
        _print(stem, width, line)
    sys.stdout.flush()
    if follow:
        _follow(files, width, grep)


def _print(stem: str, width: int, line: str) -> None:
    sys.stdout.write(f"{stem:{width}} | {line}\n")


def _follow(files: list[Path], width: int, grep: str | None) -> None:
    places = {file: file.stat().st_size for file in files}
    while True:
        for file, place in places.items():
            try:
                size = file.stat().st_size
                with file.open(errors="replace") as text:
                    text.seek(place if size >= place else 0)
                    for line in text:
                        if grep is None or grep in line:
                            _print(file.stem, width, line.rstrip("\n"))
                    places[file] = text.tell()
            except FileNotFoundError:
                places[file] = 0
        sys.stdout.flush()
        time.sleep(_POLL_S)

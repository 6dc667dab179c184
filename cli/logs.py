"""`pdctl logs`: what the processes of a cluster wrote, in one stream; also after `down`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from pdctl.cli.options import DEFAULT_CLUSTER, NameOption, StateDirOption, place_of
from pdctl.cli.output import remark
from pdctl.transport.errors import NotFoundError, UsageError
from pdctl.transport.names import log_dir

if TYPE_CHECKING:
    from pdctl.core.log_files import Line

POLL_S = 0.25


def logs(
    process: Annotated[
        str | None,
        typer.Argument(help="supervisor, router, zygote, prefill-0, decode-0, …; default: all.", show_default=False),
    ] = None,
    tail: Annotated[int, typer.Option("--tail", "-n", min=1, help="Last lines to show of each process.")] = 50,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new lines until the cluster ends.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also show what earlier runs left.")] = False,
    grep: Annotated[
        str | None, typer.Option("--grep", help="Show only lines with this text, e.g. a request's id.")
    ] = None,
    name: NameOption = DEFAULT_CLUSTER,
    state_dir: StateDirOption = None,
) -> None:
    """Show the logs of a cluster's current run; after `down` or a crash, those of its last run.

    With --grep, the exit code is 1 if no line has the text.
    """
    from pdctl.core.cluster import command, find_supervisor, is_locked, was_left
    from pdctl.core.log_files import Logs, Run

    if process is not None and not process.replace("-", "").isalnum():
        raise UsageError(f"process {process!r}: expected one of supervisor, router, zygote, prefill-0, decode-0, …")
    root = place_of(state_dir, name)
    directory = log_dir(root, name)
    written = Logs(directory, process)
    if not written.processes:
        what = f"process {process!r} of cluster {name!r}" if process else f"cluster {name!r}"
        others = process is not None and any(directory.glob("*.log"))
        raise NotFoundError(f"no logs of {what} in {directory}", hint=command("logs" if others else "up", name, root))
    printer = Printer(grep)
    lines = written.read_run(Run() if everything else Run.of(directory), grep, tail)
    printer.print(lines, written.processes)
    if grep is not None and not lines and not follow:
        told = ", ".join(written.processes)
        where = "" if everything else " in this run (with --all: in any)"
        remark(f"no line of {told} has {grep!r}{where}")
        raise typer.Exit(1)
    # The process, not its lock: that may have been removed, and be there again in a second.
    supervisor = find_supervisor(root, name) if follow else None
    while follow:
        # First the question, then the last lines: what ends says so before it is gone.
        is_over = not is_locked(root, name) if supervisor is None else supervisor.is_gone(0)
        printer.print(written.read())
        if is_over:
            how = "has crashed" if was_left(root, name) else "does not run"
            remark(f"cluster {name!r} {how}: its logs end here")
            return
        time.sleep(POLL_S)


class Printer:
    """Prints lines, each with its process's name.

    Args:
        grep: only lines with this text.
    """

    def __init__(self, grep: str | None = None) -> None:
        self._grep = grep
        self._width = 0

    def print(self, lines: Sequence[Line], processes: Sequence[str] = ()) -> None:
        """Print them in their order; `processes`: names that lines may have later."""
        self._width = max([self._width, *map(len, processes), *(len(line.process) for line in lines)])
        for line in lines:
            if self._grep is None or self._grep in line.text:
                sys.stdout.write(f"{line.process:{self._width}} | {line.text}\n")
        sys.stdout.flush()

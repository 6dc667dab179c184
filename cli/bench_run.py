"""What the bench commands have in common: a bar while they run, an end that tidies, a file that keeps the results."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from pdctl.cli.output import remark, stderr_console
from pdctl.transport.errors import UsageError

OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="Keep all that was measured in a file.", show_default=False)
]


def numbers(flag: str, given: str, most: int = 1 << 20) -> tuple[int, ...]:
    """The numbers of "16,256", ascending, each once.

    Raises:
        UsageError: not such a list.
    """
    parts = [part.strip().replace("_", "") for part in given.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= most for part in parts):
        raise UsageError(f"{flag} {given!r}: expected numbers from 1 to {most}, with commas between them")
    return tuple(sorted({int(part) for part in parts}))


@contextlib.contextmanager
def bar(words: str) -> Iterator[Callable[..., None]]:
    """A progress bar on a terminal, nothing elsewhere; yields what is told (done, total, words)."""
    if not sys.stderr.isatty():
        yield lambda done, total, words=None: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(24), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=stderr_console(), transient=True) as progress:
        task = progress.add_task(words, total=None)

        def show(done: int, total: int, words: str | None = None) -> None:
            progress.update(task, completed=done, total=total, description=words)

        yield show


@contextlib.contextmanager
def tidy_end() -> Iterator[None]:
    """SIGTERM and SIGHUP end the bench as Ctrl-C does: helpers, sockets and memory go first."""

    def leave(number: int, _: Any) -> None:
        sys.exit(128 + number)

    # Ignored by whoever started us (nohup): stays so.
    wanted = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def keep(document: dict[str, Any], output: Path | None) -> None:
    """Write results to `--output`, and say what can be done with them."""
    from pdctl.core.bench.results import save

    if output is not None:
        save(document, output)
        remark(f"{output}: all of it; pdctl bench report {output} draws it")

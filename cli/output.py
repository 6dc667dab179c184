"""Where words go: answers to stdout, everything else to stderr; escape codes only to a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from typing import IO, TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from rich.console import Console


def open_missing_streams() -> None:
    """Give whoever started us without stdin, stdout or stderr (`2>&-`) an empty or silent one.

    Before anything else is opened: a file or socket that got number 2 would be written into by every complaint.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            nobody = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(nobody, True)
        if getattr(sys, name) is None:
            # Nobody reads it, so nothing about it may fail; it is open as long as the process lives.
            stream = open(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def complain(text: str) -> None:
    """`remark`, where a stderr that is gone (its terminal was closed) must change nothing."""
    with contextlib.suppress(OSError, ValueError):
        remark(text)


def stdout_console() -> Console:
    """For tables. 80 columns when piped, as on a plain terminal, and no blanks at the ends of lines."""
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(width=80, highlight=False, file=cast("IO[str]", _Piped()))


class _Piped:
    """stdout, for whole lines."""

    encoding = property(lambda self: sys.stdout.encoding)

    def write(self, text: str) -> int:
        return sys.stdout.write(re.sub(r" +$", "", text, flags=re.MULTILINE))

    def flush(self) -> None:
        sys.stdout.flush()


def stderr_console() -> Console:
    """For progress and remarks."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def remark(text: str) -> None:
    """One line on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()

"""Where words go: answers to stdout, everything else to stderr; escape codes only to a terminal."""

from __future__ import annotations

import json
import re
import sys
from typing import IO, TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from rich.console import Console


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

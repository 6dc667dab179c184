"""Where words go: answers to stdout, everything else to stderr; escape codes only to a terminal."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def stdout_console() -> Console:
    """For tables. 80 columns when piped, as on a plain terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 80, highlight=False)


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

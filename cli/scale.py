"""`pdctl scale`: have more or fewer daemons, under load."""

from __future__ import annotations

from typing import Annotated

import typer

from pdctl.cli.options import (
    DEFAULT_CLUSTER,
    DEFAULT_TIMEOUT_S,
    JsonOption,
    NameOption,
    StateDirOption,
    TimeoutOption,
    place_of,
)
from pdctl.cli.output import print_json, remark
from pdctl.transport.errors import UsageError

_EXAMPLE = "scale decode=2 prefill=1"


def complete_role(incomplete: str) -> list[str]:
    return [word for word in ("prefill=", "decode=") if word.startswith(incomplete)]


def scale(
    numbers: Annotated[
        list[str],
        typer.Argument(
            metavar="ROLE=N",
            help="decode=2, prefill=1, or both.",
            autocompletion=complete_role,
            show_default=False,
        ),
    ],
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
    name: NameOption = DEFAULT_CLUSTER,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have N daemons of a role; returns when they are ready, or gone.

    The highest-numbered leave first. What they work on goes on with the others
    where it stands: nothing is computed again.
    """
    from pdctl.core.cluster import command
    from pdctl.core.control_client import ask

    directory = place_of(state_dir, name)
    request = {"operation": "scale", "numbers": _parse(numbers, command(_EXAMPLE, name, directory))}
    done = ask(directory, name, request, timeout_s=timeout, on_progress=remark)
    if as_json:
        print_json(done)
    else:
        same = "" if done["started"] or done["stopped"] else ", as before"
        remark(f"cluster {name!r}: prefill={done['prefill']} decode={done['decode']}{same}")


def _parse(words: list[str], example: str) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for word in words:
        role, equals, number = word.partition("=")
        if not (equals and number.isascii() and number.isdecimal()):
            raise UsageError(f"scale {word}: expected ROLE=N", hint=example)
        if role in numbers:
            raise UsageError(f"scale {word}: {role} is given twice", hint=example)
        numbers[role] = int(number)
    return numbers

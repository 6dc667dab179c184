"""`pdctl drain`: let a daemon put its rows back and stand idle."""

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
    complete_process,
    place_of,
)
from pdctl.cli.output import print_json, remark


def drain(
    daemon: Annotated[
        str,
        typer.Argument(help="prefill-0, decode-0, …", autocompletion=complete_process, show_default=False),
    ],
    undo: Annotated[bool, typer.Option("--undo", help="Let it serve again.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also the last one of its role: nobody works then.")] = False,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
    name: NameOption = DEFAULT_CLUSTER,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a daemon stand idle: the others take its requests over as they are.

    It stays drained, also when it is restarted, until --undo or until it is
    scaled away.
    """
    from pdctl.core.control_client import ask

    request = {"operation": "drain", "name": daemon, "undo": undo, "force": force}
    done = ask(place_of(state_dir, name), name, request, timeout_s=timeout, on_progress=remark)
    if as_json:
        print_json(done)

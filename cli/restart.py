"""`pdctl restart`: replace processes of a running cluster, one after the other."""

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


def restart(
    processes: Annotated[
        list[str] | None,
        typer.Argument(
            help="prefill-0, decode-0, router, …; none: all daemons.",
            autocompletion=complete_process,
            show_default=False,
        ),
    ] = None,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
    name: NameOption = DEFAULT_CLUSTER,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replace processes, each when the one before is ready; also one that gave up after too many deaths.

    Streams go on: what a daemon works on is taken up where it stands. Only the
    router's end cuts them, so it is restarted by name alone.
    """
    from pdctl.core.control_client import ask

    request = {"operation": "restart", "names": processes or []}
    done = ask(place_of(state_dir, name), name, request, timeout_s=timeout, on_progress=remark)
    if as_json:
        print_json(done)

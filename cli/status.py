"""`pdctl status`: is the cluster well, who is in it, and what is it doing."""

from __future__ import annotations

import typer

from pdctl.cli.options import DEFAULT_CLUSTER, JsonOption, NameOption, StateDirOption, place_of
from pdctl.cli.output import print_json, stdout_console
from pdctl.transport.errors import NotFoundError

DEGRADED_EXIT_CODE = 8
EXIT_CODES = {"healthy": 0, "starting": NotFoundError.exit_code, "degraded": DEGRADED_EXIT_CODE}


def status(name: NameOption = DEFAULT_CLUSTER, state_dir: StateDirOption = None, as_json: JsonOption = False) -> None:
    """Show a cluster's processes, rows, pool and counters.

    Exit code 0: healthy; 8: degraded, the causes are shown; 3: not running, or
    still starting, and what is missing is shown.
    """
    from pdctl.core.status import cluster_status, to_dict

    found = cluster_status(place_of(state_dir, name), name)
    if as_json:
        print_json(to_dict(found))
    else:
        from pdctl.cli.tables import status_view

        console = stdout_console()
        console.print(status_view(found, console.width))
    if code := EXIT_CODES[found.health]:
        raise typer.Exit(code)

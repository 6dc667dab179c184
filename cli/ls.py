"""`pdctl ls`: which clusters there are."""

from __future__ import annotations

from pdctl.cli.options import DEFAULT_CLUSTER, JsonOption, StateDirOption, state_dir_of
from pdctl.cli.output import print_json, remark, stdout_console


def ls(state_dir: StateDirOption = None, as_json: JsonOption = False) -> None:
    """List this user's clusters: running, crashed, and those of other state directories (foreign)."""
    import dataclasses

    from pdctl.core.cluster import command
    from pdctl.core.private_files import check_private
    from pdctl.core.survey import survey

    directory = state_dir_of(state_dir)
    check_private(directory)
    found = survey(directory)
    if as_json:
        print_json({"schema": 1, "clusters": [dataclasses.asdict(one) for one in found]})
    elif found:
        from pdctl.cli.tables import clusters_view

        console = stdout_console()
        console.print(clusters_view(found, console.width, command("gc", DEFAULT_CLUSTER, directory)))
    else:
        remark(f"no clusters in {directory}, and no segments of yours")

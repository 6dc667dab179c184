"""`pdctl gc`: remove what dead clusters left."""

from __future__ import annotations

from typing import Annotated

import typer

from pdctl.cli.options import JsonOption, StateDirOption, state_dir_of
from pdctl.cli.output import print_json, remark


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    logs: Annotated[bool, typer.Option("--logs", help="Also the logs of clusters that do not run.")] = False,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove what crashed clusters left: segments in shared memory, state files, with --logs also logs.

    Looks at all of this user's segments, of whatever state directory. Never
    touches what a living process holds.
    """
    import dataclasses

    from pdctl.cli.tables import size
    from pdctl.core.private_files import check_private
    from pdctl.core.survey import collect, leftovers

    directory = state_dir_of(state_dir)
    check_private(directory)
    found = leftovers(directory, logs=logs) if dry_run else collect(directory, logs=logs)
    total = sum(one.num_bytes for one in found if dry_run or one.removed)
    if as_json:
        items = [{**dataclasses.asdict(one), "path": str(one.path)} for one in found]
        print_json({"schema": 1, "dry_run": dry_run, "num_bytes": total, "items": items})
        return
    for one in found:
        verb = "would remove" if dry_run else "removed" if one.removed else "kept"
        why = f" ({one.kept_because})" if one.kept_because else ""
        typer.echo(f"{verb} {one.kind} {one.path}, {size(one.num_bytes)}{why}")
    remark(f"{'would free' if dry_run else 'freed'} {size(total)}" if found else "nothing is left of dead clusters")

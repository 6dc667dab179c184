"""`pdctl inspect shm`: a segment from the inside, of a live cluster, a crashed one, or a copied file.

Looks only: takes no lock, changes nothing, and shows no prompt text and no token ids.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdctl.cli.options import DEFAULT_CLUSTER, JsonOption, NameOption, StateDirOption, place_of
from pdctl.cli.output import print_json, remark, stdout_console
from pdctl.transport.errors import CorruptSegmentError, DeadlineError
from pdctl.transport.names import SegmentName

if TYPE_CHECKING:
    from pdctl.core.status import Verification

app = typer.Typer(no_args_is_help=True, help="Look inside the shared memory.")


@app.callback()
def _inspect() -> None:
    """Look inside the shared memory."""


@app.command()
def shm(
    name: NameOption = DEFAULT_CLUSTER,
    state_dir: StateDirOption = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", help="A segment's file, or a copy of one, instead of a cluster.", show_default=False),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Recount everything, compare sealed KV; exit code 4 if wrong.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a segment's header, participants, blocks and rows; never prompts or tokens.

    Works on a running cluster, on what a crashed one left in shared memory, and with --file on a copy.
    """
    from pdctl.core import status as core_status

    note = None
    target: SegmentName | Path | int
    if file is None:
        found = core_status.find_segment(place_of(state_dir, name), name)
        target, path, note = found.target, found.name.path, found.note
    else:
        target = path = file.absolute()
    snapshot = core_status.look(target)
    status = core_status.describe(snapshot, path)
    checked = None
    if verify:
        if status.torn and (status.section is None or status.section.holder_alive):
            raise DeadlineError(
                f"segment {path}: changes too fast for a copy that can be verified", hint="run it again"
            )
        checked = core_status.verify(snapshot, target)
    if note is not None:
        remark(note)
    if as_json:
        values: dict[str, Any] = {**core_status.to_dict(status), "note": note}
        if checked is not None:
            values["verification"] = core_status.to_dict(checked)
        print_json(values)
    else:
        from pdctl.cli.tables import segment_view

        console = stdout_console()
        created = datetime.fromtimestamp(min(status.created_unix_ns / 1e9, _LATEST_S)).astimezone()
        console.print(segment_view(status, console.width, created.isoformat(sep=" ", timespec="seconds")))
        if checked is not None:
            console.print()
            for line in _verification_lines(checked):
                console.print(line, markup=False, soft_wrap=True)
    if checked is not None and checked.problems:
        raise typer.Exit(CorruptSegmentError.exit_code)


# The last second of the year 9998: a broken header may hold any number.
_LATEST_S = 253370764799


def _verification_lines(checked: Verification) -> list[str]:
    from pdctl.cli.tables import number_of

    lines = []
    if checked.undone is not None:
        lines.append(f"undone before the recount, in the copy only: {checked.undone}, which was cut off")
    sealed = f", KV of {number_of(checked.num_sealed, 'sealed block')}" if checked.num_sealed else ""
    recounted = f"{number_of(checked.num_blocks, 'block')}, {number_of(checked.num_rows, 'row')}{sealed} verified"
    if not checked.problems:
        return [*lines, f"{recounted}: clean"]
    lines += [f"problem: {problem}" for problem in checked.problems]
    return [*lines, f"{recounted}: {number_of(len(checked.problems), 'problem')}"]

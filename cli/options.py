"""Options that several commands share: one definition, one help text, one completion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdctl.cli.output import remark
from pdctl.transport.errors import PdctlError, UsageError
from pdctl.transport.names import DEFAULT_CLUSTER, check_cluster, default_state_dir


def complete_cluster(incomplete: str) -> list[str]:
    """Names of clusters that exist now, for the shell."""
    from pdctl.core.cluster import list_clusters

    try:
        names = list_clusters(state_dir_of(None))
    except UsageError:  # no home directory
        return []
    return [name for name in names if name.startswith(incomplete)]


NameOption = Annotated[
    str,
    typer.Option("--name", envvar="PDCTL_NAME", help="Which cluster.", autocompletion=complete_cluster),
]
StateDirOption = Annotated[
    Path | None,
    # Not with `envvar`: a place given on the command line is meant; one of the environment is where to look first.
    typer.Option(
        "--state-dir",
        help="Where clusters keep their files.",
        show_default="PDCTL_STATE_DIR, else ~/.local/state/pdctl",
    ),
]
DEFAULT_TIMEOUT_S = 120.0
TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.1, max=86400, help="Seconds until this command stops waiting.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output, units in the keys.")]


def complete_process(context: typer.Context, incomplete: str) -> list[str]:
    """Names of a running cluster's daemons and router, for the shell."""
    from pdctl.core.cluster import read_state

    given = context.params.get("state_dir")
    try:
        state = read_state(state_dir_of(given and Path(given)), context.params.get("name") or DEFAULT_CLUSTER)
    except UsageError:
        state = None
    if state is None:
        return []
    numbers = {"prefill": state.spec.num_prefill, "decode": state.spec.num_decode}
    if state.spec.colocated:
        numbers = {"colocated": 1}
    daemons = [f"{role}-{index}" for role, number in numbers.items() for index in range(number)]
    return [name for name in ["router", *daemons] if name.startswith(incomplete)]


def state_dir_of(given: Path | None) -> Path:
    """The state directory as an absolute path: commands work from any directory."""
    return (given or default_state_dir()).absolute()


def place_of(given: Path | None, name: str) -> Path:
    """The state directory of a cluster that a command is about.

    Given none, and with nothing of the cluster in the default one: where the only cluster of its name runs, which
    is said.

    Raises:
        UsageError: the name cannot be one; or somebody else may have written what is there.
    """
    from pdctl.core import cluster

    check_cluster(name)
    here = state_dir_of(given)
    cluster.check_trust(here, name)
    place = here if given is not None else cluster.place_of(here, name)
    if place != here:
        remark(f"cluster {name!r}: nothing of it in {here}; it runs in {place}")
    concerning(name, place)
    return place


_concerned: tuple[str, Path] | None = None


def concerning(name: str, place: Path) -> None:
    """Note which cluster this process's command is about, for `hint_of`."""
    global _concerned
    _concerned = (name, place)


def hint_of(error: PdctlError) -> str | None:
    """What to try next, in terms of the cluster that the command is about."""
    if error.hint is not None or _concerned is None:
        return error.hint
    from pdctl.core.cluster import advice

    return advice(error, *_concerned)


def look_hint() -> str | None:
    """How to look at the cluster that the command is about; None: it is about none of ours."""
    if _concerned is None:
        return None
    from pdctl.core.cluster import command

    return f"{command('status', *_concerned)}; {command('logs', *_concerned)}"


__all__ = [
    "DEFAULT_CLUSTER",
    "DEFAULT_TIMEOUT_S",
    "JsonOption",
    "NameOption",
    "StateDirOption",
    "TimeoutOption",
    "complete_cluster",
    "complete_process",
    "concerning",
    "hint_of",
    "look_hint",
    "place_of",
    "state_dir_of",
]

"""Options that several commands share: one definition, one help text, one completion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdctl.transport.names import DEFAULT_CLUSTER, default_state_dir


def complete_cluster(incomplete: str) -> list[str]:
    """Names of clusters that exist now, for the shell."""
    from pdctl.core.cluster import list_clusters

    return [name for name in list_clusters(default_state_dir()) if name.startswith(incomplete)]


NameOption = Annotated[
    str,
    typer.Option("--name", envvar="PDCTL_NAME", help="Which cluster.", autocompletion=complete_cluster),
]
StateDirOption = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        envvar="PDCTL_STATE_DIR",
        help="Where clusters keep their files. Default: $XDG_RUNTIME_DIR/pdctl or /tmp/pdctl-<uid>.",
        show_default=False,
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
    state = read_state(state_dir_of(given and Path(given)), context.params.get("name") or DEFAULT_CLUSTER)
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


__all__ = [
    "DEFAULT_CLUSTER",
    "DEFAULT_TIMEOUT_S",
    "JsonOption",
    "NameOption",
    "StateDirOption",
    "TimeoutOption",
    "complete_cluster",
    "complete_process",
    "state_dir_of",
]

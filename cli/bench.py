"""`pdctl bench`: alone, a small table about the running cluster; its sub-commands are mounted here."""

from __future__ import annotations

import secrets
from typing import Annotated

import typer

from pdctl.cli import bench_compare, bench_engine, bench_handoff, bench_report, bench_serve
from pdctl.cli.bench_options import SeedOption
from pdctl.cli.options import DEFAULT_CLUSTER, JsonOption, NameOption, StateDirOption, place_of
from pdctl.cli.output import print_json, remark, stdout_console
from pdctl.transport.errors import PdctlError, UsageError

app = typer.Typer()


@app.callback(invoke_without_command=True)
def bench(
    ctx: typer.Context,
    requests: Annotated[int, typer.Option("--requests", "-n", min=1, max=10000, help="Of each kind.")] = 8,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=2, max=1 << 20)] = 256,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, max=1 << 20)] = 32,
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", min=1, max=256)] = 4,
    seed: SeedOption = None,
    as_json: JsonOption = False,
    name: NameOption = DEFAULT_CLUSTER,
    state_dir: StateDirOption = None,
) -> None:
    """Measure the running cluster: one request at a time, then several at once."""
    if ctx.invoked_subcommand is not None:
        _refuse_options(ctx)
        return
    from pdctl.cli.bench_serve import server_of, watching
    from pdctl.core.cluster import command

    server = server_of(None, None, None, name, state_dir)
    from pdctl.core.bench.quick import Plan, run

    plan = Plan(
        num_requests=requests,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        concurrency=concurrency,
        seed=secrets.randbits(31) if seed is None else seed,
        vocab_size=server.vocab_size or 0,
    )
    with watching(plan.num_requests * len(plan.steps)) as on_sample:
        result = run(server, plan, on_sample)
    if as_json:
        print_json(result.to_json())
    else:
        from pdctl.cli.bench_table import render

        stdout_console().print(render(result))
        remark(f"Random prompts (--seed {plan.seed}). Medians, 99th percentile in brackets.")
        remark("More: pdctl bench serve, compare, handoff, engine, report (each with --help).")
    if result.num_failed:
        hint = command("logs", name, place_of(state_dir, name))
        raise PdctlError(f"{result.num_failed} requests failed: {result.first_error}", hint=hint)


def _refuse_options(ctx: typer.Context) -> None:
    """Raise UsageError if an option stands before the sub-command: it would not reach it."""
    for key in ctx.params:
        source = ctx.get_parameter_source(key)
        if source is not None and source.name == "COMMANDLINE":
            flag = f"--{key.replace('_', '-')}"
            raise UsageError(f"{flag} before {ctx.invoked_subcommand}: expected after it")


app.command("serve")(bench_serve.serve)
app.command("compare")(bench_compare.compare)
app.command("handoff")(bench_handoff.handoff)
app.command("engine")(bench_engine.engine)
app.command("report")(bench_report.report)

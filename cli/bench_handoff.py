"""`pdctl bench handoff`: the KV of a prompt from one process to another, pdctl's way and others' ways."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pdctl.cli.bench_run import OutputOption, bar, keep, numbers, tidy_end
from pdctl.cli.options import JsonOption
from pdctl.cli.output import print_json, remark, stdout_console
from pdctl.transport.errors import PdctlError, UsageError

if TYPE_CHECKING:
    from pdctl.core.bench.handoff import Kind


def handoff(
    tokens: Annotated[
        str, typer.Option("--tokens", help="Lengths of prompts, with commas; rounded up to whole blocks.")
    ] = "16,256,1024,4096,16384",
    transports: Annotated[
        str | None,
        typer.Option("--transports", help="Which, with commas; pdctl is the measure.", show_default="all"),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=1000, help="After one to warm up.")] = 7,
    load: Annotated[
        bool, typer.Option("--load/--no-load", help="Also beside a process that keeps the memory busy.")
    ] = True,
    model: Annotated[
        str | None,
        typer.Option("--model", envvar="PDCTL_MODEL", help="Whose KV's shape.", show_default="smollm2"),
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="float32, bfloat16, or auto: what this CPU is good at.")
    ] = "auto",
    kv_bytes_per_token: Annotated[
        int | None, typer.Option("--kv-bytes-per-token", help="Instead of a model's.", show_default="the model's")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, max=86400, help="Seconds until a hand-over has failed.")
    ] = 30.0,
    as_json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Measure handing over the KV of a prompt, and what copies it.

    Needs no cluster. NIXL and Mooncake are measured where they are installed.
    """
    from pdctl.core.bench import handoff as measuring
    from pdctl.core.bench import results
    from pdctl.core.bench.machine import await_quiet, describe, doubts
    from pdctl.core.config import DTYPES

    if dtype not in ("auto", *DTYPES):
        raise UsageError(f"--dtype {dtype}: expected one of auto, {', '.join(DTYPES)}")
    if kv_bytes_per_token is not None and (model is not None or dtype != "auto"):
        raise UsageError("--kv-bytes-per-token: says it all; leave out --model and --dtype")
    results.check_writable(output)
    machine = describe()
    if kv_bytes_per_token is not None:
        geometry = measuring.geometry_for(kv_bytes_per_token)
    elif model is not None:
        geometry = measuring.geometry_of(model, dtype)
    else:
        geometry = measuring.embedded_geometry(dtype)
    plan = measuring.Plan(
        geometry=geometry,
        tokens=measuring.whole_blocks(numbers("--tokens", tokens), geometry.block_tokens),
        kinds=_chosen(transports),
        rounds=rounds,
        load=load,
        timeout_s=timeout,
    )
    done = 0
    busy = [await_quiet(0.0)]
    with tidy_end(), bar("handing over") as show:

        def advance() -> None:
            nonlocal done
            done += 1
            show(done, plan.num_steps)

        result = measuring.run(plan, advance)
    configuration = {"tokens": plan.tokens, "rounds": rounds, "timeout_s": timeout}
    document = results.document("handoff", configuration, {**result.to_json(), "busy_share": busy}, machine)
    keep(document, output)
    if as_json:
        print_json(document)
    else:
        from pdctl.cli.bench_micro_tables import handoff_tables

        for table in handoff_tables(result):
            stdout_console().print(table)
        remark("Median and, in brackets, 99th percentile in ms; below it, times pdctl's median.")
    for line in doubts(busy):
        remark(line)
    for name, how in result.not_installed.items():
        remark(f"{name}: not installed ({how})")
    if result.failed:
        first, *others = result.failed.items()
        for name, error in others:
            remark(f"{name} failed: {error}")
        raise PdctlError(f"{first[0]} failed: {first[1]}")


def _chosen(given: str | None) -> tuple[Kind, ...]:
    """The transports of `--transports`, in their usual order."""
    from pdctl.core.bench.handoff import KINDS

    if given is None:
        return KINDS
    names = {name.strip() for name in given.split(",")}
    if unknown := names - {kind.name for kind in KINDS}:
        known = ", ".join(kind.name for kind in KINDS)
        raise UsageError(f"--transports {', '.join(sorted(unknown))}: expected some of {known}")
    return tuple(kind for kind in KINDS if kind.name in names)

"""`pdctl bench engine`: the daemons' engines without a cluster, against what the machine can do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdctl.cli.bench_run import OutputOption, bar, keep, numbers, tidy_end
from pdctl.cli.options import JsonOption
from pdctl.cli.output import print_json, remark, stdout_console
from pdctl.transport.errors import CapacityError, UsageError

_GRIDS = {
    False: ("1,4,8,16,32", "16,256,1024,4096", "16,128,512,1024,4096", 5),
    True: ("1,8", "16,256", "128,512", 3),
}


def engine(
    model: Annotated[
        str,
        typer.Option("--model", envvar="PDCTL_MODEL", help="smollm2 (embedded), a directory, or a Hugging Face id."),
    ] = "smollm2",
    dtype: Annotated[
        str, typer.Option("--dtype", help="float32, bfloat16, or auto: what this CPU is good at.")
    ] = "auto",
    batches: Annotated[
        str | None,
        typer.Option("--batches", help="Rows of a decode step, with commas.", show_default=_GRIDS[False][0]),
    ] = None,
    contexts: Annotated[
        str | None, typer.Option("--contexts", help="Keys that each row sees.", show_default=_GRIDS[False][1])
    ] = None,
    prompts: Annotated[
        str | None, typer.Option("--prompts", help="Tokens to prefill.", show_default=_GRIDS[False][2])
    ] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, max=1000, help="After one to warm up.", show_default="5")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small grid, three rounds.")] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            envvar="PDCTL_THREADS",
            help="Compute threads: all of them for prefill, one less for decode.",
            show_default="OMP_NUM_THREADS, else all cores",
        ),
    ] = None,
    chunk_tokens: Annotated[
        int, typer.Option("--chunk-tokens", min=1, max=1 << 16, help="Prompt tokens of one prefill step.")
    ] = 256,
    max_context: Annotated[
        int | None, typer.Option("--max-context", help="Tokens of one row.", show_default="the model's, at most 8192")
    ] = None,
    kv_gib: Annotated[float, typer.Option("--kv-gib", help="Memory for KV: larger cells are left out.")] = 2.0,
    as_json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Measure decode steps and prefill against the limits of this machine.

    Needs no cluster: loads the model and steps the daemons' engines.
    """
    import psutil

    from pdctl.cli.models import pull_progress
    from pdctl.core import config, models
    from pdctl.core.bench import engine as measuring
    from pdctl.core.bench import results
    from pdctl.core.bench.machine import await_quiet, describe, doubts
    from pdctl.core.numerics import default_dtype

    if dtype not in ("auto", *config.DTYPES):
        raise UsageError(f"--dtype {dtype}: expected one of auto, {', '.join(config.DTYPES)}")
    if threads is not None and not 1 <= threads <= 1024:
        raise UsageError(f"--threads {threads}: expected 1 to 1024")
    if not 0 < kv_gib <= 1 << 20:
        raise UsageError(f"--kv-gib {kv_gib:g}: expected more than 0, at most {1 << 20}")
    max_kv_bytes, available = int(kv_gib * (1 << 30)), psutil.virtual_memory().available
    if max_kv_bytes > available:
        raise CapacityError(
            f"--kv-gib {kv_gib:g}: wants {max_kv_bytes} bytes, memory has {available} bytes",
            hint=f"pdctl bench engine --kv-gib {available / 2 / (1 << 30):.1f}",
        )
    grid = _GRIDS[quick]
    chosen_batches = numbers("--batches", batches or grid[0], most=1024)
    chosen_contexts = numbers("--contexts", contexts or grid[1])
    chosen_prompts = numbers("--prompts", prompts or grid[2])
    results.check_writable(output)
    machine = describe()
    with pull_progress() as told:
        resolved = models.resolve(model, told)
    of_model = resolved.config
    threads_prefill, threads_decode = config.default_threads(threads)
    spec = config.ClusterSpec(
        name="bench",
        state_dir=Path("/tmp"),
        model_path=resolved.path,
        model_name=resolved.name,
        fingerprint=0,
        num_layers=of_model.num_layers,
        num_kv_heads=of_model.num_kv_heads,
        head_dim=of_model.head_dim,
        vocab_size=of_model.vocab_size,
        eos_token_ids=(),
        dtype=default_dtype(of_model.dtype) if dtype == "auto" else dtype,
        max_context=config.context_of(of_model, max_context),
        threads_prefill=threads_prefill,
        threads_decode=threads_decode,
        chunk_tokens=chunk_tokens,
    )
    plan = measuring.Plan(
        spec=spec,
        batches=chosen_batches,
        contexts=chosen_contexts,
        prompts=chosen_prompts,
        rounds=rounds or grid[3],
        max_kv_bytes=max_kv_bytes,
    )
    if not plan.decode_cells() and not plan.prefill_cells():
        raise UsageError(f"nothing to measure: {plan.skipped()[0]['reason']}")
    busy = [await_quiet(0.0)]
    with tidy_end(), bar("measuring") as show:
        result = measuring.run(plan, show)
    configuration = {
        "model": resolved.name,
        "dtype": spec.dtype,
        "threads_prefill": threads_prefill,
        "threads_decode": threads_decode,
        "chunk_tokens": chunk_tokens,
        "rounds": plan.rounds,
    }
    document = results.document("engine", configuration, {**result.to_json(), "busy_share": busy}, machine)
    keep(document, output)
    if as_json:
        print_json(document)
        return
    from pdctl.cli.bench_micro_tables import engine_tables

    for table in engine_tables(result):
        stdout_console().print(table)
    remark("Median and, in brackets, 99th percentile. Limit: reading weights and KV once, or multiplying them.")
    for line in doubts(busy):
        remark(line)
    for one in plan.skipped():
        what = " ".join(f"{key.replace('_', ' ')} {value}" for key, value in one.items() if key != "reason")
        remark(f"left out: {what}: {one['reason']}")

"""`pdctl bench serve`: a workload on our cluster, or on any OpenAI-compatible server."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdctl.cli import bench_options as options
from pdctl.cli.bench_run import OutputOption, keep
from pdctl.cli.options import DEFAULT_CLUSTER, JsonOption, NameOption, StateDirOption, state_dir_of
from pdctl.cli.output import print_json, remark, stderr_console, stdout_console
from pdctl.transport.errors import PdctlError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from pdctl.core.bench.client import Server
    from pdctl.core.bench.samples import Sample

_ATTAINMENT = 0.99


def serve(
    base_url: Annotated[
        str | None, typer.Option("--base-url", help="Any OpenAI-compatible server.", show_default="our cluster")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="As it names it.", show_default="its first")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="Else $PDCTL_API_KEY.", show_default=False)
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option("--vocab-size", min=1, max=1 << 24, help="Of random ids.", show_default="the model's"),
    ] = None,
    workload: options.WorkloadOption = "random",
    num_prompts: options.NumPromptsOption = None,
    input_len: options.InputLenOption = None,
    output_len: options.OutputLenOption = None,
    prefix_len: options.PrefixLenOption = 512,
    num_prefixes: options.NumPrefixesOption = 1,
    turns: options.TurnsOption = 4,
    streams: options.StreamsOption = 4,
    stream_input_len: options.StreamInputLenOption = 64,
    dataset: options.DatasetOption = None,
    request_rate: options.RequestRateOption = math.inf,
    arrivals: options.ArrivalsOption = "poisson",
    burst_size: options.BurstSizeOption = 4,
    max_concurrency: options.ConcurrencyOption = None,
    num_warmups: options.WarmupsOption = 1,
    seed: options.SeedOption = None,
    goodput: options.GoodputOption = None,
    find_rate: Annotated[
        bool, typer.Option("--find-rate", help="Find the highest rate that meets --goodput; tries several.")
    ] = False,
    attainment: Annotated[
        float,
        typer.Option("--attainment", min=0.01, max=1.0, help="--find-rate: share of requests that must meet it."),
    ] = _ATTAINMENT,
    timeout_s: options.RequestTimeoutOption = 600.0,
    as_json: JsonOption = False,
    output: OutputOption = None,
    name: NameOption = DEFAULT_CLUSTER,
    state_dir: StateDirOption = None,
) -> None:
    """Measure a server under a workload, in the definitions of `vllm bench serve`.

    Exit code 1 if a request failed; failed requests are counted and in no other figure.
    """
    given = dict(locals())
    from pdctl.core.bench import results
    from pdctl.core.bench.figures import parse_goodput
    from pdctl.core.bench.serve import serve as measure

    objectives = parse_goodput(goodput or [])
    if find_rate and not objectives:
        raise UsageError(
            "--find-rate: needs an objective to meet", hint="pdctl bench serve --find-rate --goodput ttft:500"
        )
    if find_rate and not math.isinf(request_rate):
        raise UsageError(f"--request-rate {request_rate:g}: --find-rate chooses the rates")
    results.check_writable(output)
    server = server_of(base_url, model, api_key_file, name, state_dir)
    vocabulary = vocab_size or server.vocab_size
    if vocabulary is None:
        raise UsageError(f"{server.url}: does not tell its vocabulary", hint="--vocab-size N, as in its config.json")
    if find_rate:
        from pdctl.cli.bench_rates import find

        find(server, vocabulary, given, objectives)
        return
    load = options.workload_of(workload, given, vocab_size=vocabulary)
    with watching(len(load.requests)) as on_sample:
        measured = measure(
            server,
            load,
            objectives=objectives,
            vocab_size=vocabulary,
            num_warmups=num_warmups,
            timeout_s=timeout_s,
            on_sample=on_sample,
        )
    document = results.document("serve", {**load.configuration, "goodput_ms": objectives}, measured)
    keep(document, output)
    if as_json:
        shown = {key: value for key, value in document["results"].items() if key != "samples"}
        print_json({**document, "results": shown})
    else:
        from pdctl.cli.bench_serve_table import render

        stdout_console().print(render(document))
        remark(f"--seed {load.configuration['seed']} asks the same again.")
    fail_if_any_failed(measured["summary"], len(load.requests))


def server_of(
    base_url: str | None, model: str | None, api_key_file: Path | None, name: str, state_dir: Path | None
) -> Server:
    """The server to be asked: our cluster, unless a URL is given."""
    import asyncio

    from pdctl.core.bench.client import find_server
    from pdctl.core.cluster import running
    from pdctl.core.keys import given_key

    key = given_key(api_key_file)
    if base_url is not None:
        return asyncio.run(find_server(base_url, key, model))
    state = running(state_dir_of(state_dir), name)
    return asyncio.run(find_server(state.url, key or state.spec.api_key, model))


def watching(total: int) -> AbstractContextManager[Callable[[Sample], None]]:
    """A progress bar with the last figures, on a terminal; what to call at the end of each request."""
    from contextlib import contextmanager

    @contextmanager
    def bar() -> Iterator[Callable[[Sample], None]]:
        if not sys.stderr.isatty():
            yield lambda sample: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from pdctl.core.bench.figures import percentile

        columns = (BarColumn(24), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        with Progress(*columns, console=stderr_console(), transient=True) as progress:
            task = progress.add_task("", total=total)
            ttfts: list[float] = []
            itls: list[float] = []
            failed = 0

            def on_sample(sample: Sample) -> None:
                nonlocal failed
                failed += not sample.ok
                if sample.ok and sample.ttft_ms is not None:
                    ttfts.append(sample.ttft_ms)
                    itls.extend(sample.itls_ms)
                words = [f"{len(ttfts)} ok"] + [f"{failed} failed"] * bool(failed)
                words += [f"TTFT {percentile(ttfts, 50):.0f} ms"] * bool(ttfts)
                words += [f"ITL {percentile(itls[-1000:], 50):.1f} ms"] * bool(itls)
                progress.update(task, advance=1, description=", ".join(words))

            yield on_sample

    return bar()


def fail_if_any_failed(summary: dict[str, Any], expected: int) -> None:
    """End with exit code 1 and the first cause, if requests failed or were never sent."""
    missing = expected - summary["completed"] - summary["failed"]
    if summary["failed"] or missing:
        first = summary["errors"][0]
        unsent = f", {missing} that continue them were not sent" if missing else ""
        raise PdctlError(
            f"{summary['failed']} of {expected} requests failed{unsent}; {first['kind']}: {first['first']}",
            hint="pdctl status; pdctl logs",
        )

"""`pdctl bench serve`: a workload on our cluster, or on any OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdctl.cli import bench_options as options
from pdctl.cli.bench_run import OutputOption, bar, keep
from pdctl.cli.options import DEFAULT_CLUSTER, JsonOption, NameOption, StateDirOption, look_hint, place_of
from pdctl.cli.output import print_json, remark, stdout_console
from pdctl.transport.errors import PdctlError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdctl.core.bench.client import Server
    from pdctl.core.bench.samples import Sample

_LATEST_GAPS = 1000


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
    ] = 0.95,
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
    from pdctl.core.bench.machine import describe
    from pdctl.core.bench.serve import serve as measure

    objectives = parse_goodput(goodput or [])
    if find_rate and not objectives:
        raise UsageError(
            "--find-rate: needs an objective to meet", hint="pdctl bench serve --find-rate --goodput ttft:500"
        )
    if find_rate:
        _check_rates(workload, request_rate, max_concurrency)
    results.check_writable(output)
    machine = describe()
    server = server_of(base_url, model, api_key_file, name, state_dir)
    vocabulary = vocab_size or server.vocab_size
    if find_rate:
        from pdctl.cli.bench_rates import find

        find(server, vocabulary, given, objectives, machine)
        return
    load = options.workload_of(workload, given, vocab_size=vocabulary)
    with watching(len(load.requests)) as on_sample:
        measured = measure(
            server,
            load,
            objectives=objectives,
            num_warmups=num_warmups,
            timeout_s=timeout_s,
            on_sample=on_sample,
        )
    configuration = {
        **load.configuration,
        "num_warmups": num_warmups,
        "timeout_s": timeout_s,
        "goodput_ms": objectives,
    }
    document = results.document("serve", configuration, measured, machine)
    keep(document, output)
    if as_json:
        shown = {key: value for key, value in document["results"].items() if key != "samples"}
        print_json({**document, "results": shown})
    else:
        from pdctl.cli.bench_serve_table import render

        stdout_console().print(render(document))
        remark(f"--seed {load.configuration['seed']} asks the same again.")
    fail_if_any_failed(measured["summary"], len(load.requests))


def _check_rates(workload: str, request_rate: float, max_concurrency: int | None) -> None:
    """Raise UsageError where --find-rate would find something else than it says."""
    if not math.isinf(request_rate):
        raise UsageError(f"--request-rate {request_rate:g}: --find-rate chooses the rates")
    if max_concurrency is not None:
        raise UsageError(
            f"--max-concurrency {max_concurrency}: with --find-rate, what waits in the client is not seen"
        )
    if workload not in ("random", "shared-prefix"):
        raise UsageError(
            f"--workload {workload}: --find-rate needs requests that can be new at every rate",
            hint="--workload random, or shared-prefix",
        )


def server_of(
    base_url: str | None, model: str | None, api_key_file: Path | None, name: str, state_dir: Path | None
) -> Server:
    """The server to be asked: our cluster, unless a URL is given."""
    from pdctl.core.cluster import running
    from pdctl.core.keys import given_key

    key = given_key(api_key_file)
    if base_url is None:
        state = running(place_of(state_dir, name), name)
        base_url, key = state.url, key or state.spec.api_key
    # Only now what is slow to import.
    import asyncio

    from pdctl.core.bench.client import find_server

    return asyncio.run(find_server(base_url, key, model))


@contextlib.contextmanager
def watching(total: int) -> Iterator[Callable[[Sample], None]]:
    """A progress bar with the last figures; yields what to call at the end of each request."""
    from pdctl.core.bench.figures import digits, percentile

    ttfts: list[float] = []
    itls: list[float] = []
    done = failed = 0
    with bar("") as show:

        def on_sample(sample: Sample) -> None:
            nonlocal done, failed
            done += 1
            failed += not sample.ok
            if sample.ok and sample.ttft_ms is not None:
                ttfts.append(sample.ttft_ms)
                itls[:] = [*itls, *sample.itls_ms][-_LATEST_GAPS:]
            words = f"{failed} failed " if failed else ""
            for name, values in (("TTFT", ttfts), ("ITL", itls)):
                words += f"{name} {digits(percentile(values, 50), 'ms')} " if values else ""
            show(done, total, words)

        yield on_sample


def fail_if_any_failed(summary: dict[str, Any], expected: int) -> None:
    """End with exit code 1 and the first cause, if requests failed or were never sent."""
    missing = expected - summary["completed"] - summary["failed"]
    if summary["failed"] or missing:
        first = summary["errors_by_kind"][0]
        unsent = f", {missing} that continue them were not sent" if missing else ""
        raise PdctlError(
            f"{summary['failed']} of {expected} requests failed{unsent}; {first['kind']}: {first['first']}",
            hint=look_hint(),
        )

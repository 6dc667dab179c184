"""`pdctl bench compare`: our disaggregated and colocated selves, and any URLs, on the same requests and cores."""

from __future__ import annotations

import contextlib
import math
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdctl.cli import bench_options as options
from pdctl.cli.bench_run import OutputOption, keep, tidy_end
from pdctl.cli.options import JsonOption, StateDirOption, state_dir_of
from pdctl.cli.output import print_json, remark, stdout_console
from pdctl.transport.errors import PdctlError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdctl.core.bench.compare import System
    from pdctl.core.bench.workloads import Workload

_CHUNKS = (64, 128, 256, 512)
_KINDS = ("mixed", "random")
_UP_DEADLINE_S = 900.0


def compare(
    up_options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- UP OPTIONS]", help="For both clusters: see pdctl up --help.", show_default=False),
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option("--url", help="NAME=URL of one more server. Repeat for more.", show_default=False),
    ] = None,
    prefill: Annotated[int, typer.Option("--prefill", min=1, max=16, help="Daemons of the disaggregated one.")] = 1,
    decode: Annotated[int, typer.Option("--decode", min=1, max=16, help="Daemons of the disaggregated one.")] = 1,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(
            "--chunk-tokens", min=1, max=1 << 16, help="Of the colocated one.", show_default="the best of a sweep"
        ),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=1000)] = 5,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            "--workload",
            "-w",
            help="Repeat for more.",
            show_default="mixed, random",
            autocompletion=lambda: [*_KINDS],
        ),
    ] = None,
    num_prompts: options.NumPromptsOption = None,
    input_len: options.InputLenOption = None,
    output_len: options.OutputLenOption = None,
    streams: options.StreamsOption = 4,
    stream_input_len: options.StreamInputLenOption = 64,
    request_rate: options.RequestRateOption = math.inf,
    max_concurrency: options.ConcurrencyOption = None,
    seed: options.SeedOption = None,
    timeout_s: options.RequestTimeoutOption = 600.0,
    as_json: JsonOption = False,
    output: OutputOption = None,
    state_dir: StateDirOption = None,
) -> None:
    """Should this machine serve with prefill and decode apart? Measure both ways, and other servers beside.

    Starts two clusters of its own, bench-disaggregated and bench-colocated, and takes them down. Every round asks all
    systems the same requests, one system after the other: the others are idle then.
    """
    given = dict(locals())
    from pdctl.core.bench import compare as comparing
    from pdctl.core.bench import results

    kinds = workload or list(_KINDS)
    others = [_named_url(text) for text in url or []]
    results.check_writable(output)
    first_seed = secrets.randbits(32) if seed is None else seed
    directory = state_dir_of(state_dir)
    watch = _Watch(rounds, kinds, 2 + len(others))

    def workloads(number: int, only: Sequence[str] = kinds) -> list[Workload]:
        return [
            options.workload_of(
                kind, _of_kind(kind, {**given, "seed": first_seed + number}), vocab_size=watch.vocab_size
            )
            for kind in only
        ]

    apart = ["--prefill", str(prefill), "--decode", str(decode), *(up_options or [])]
    with tidy_end(), contextlib.ExitStack() as clusters:
        ours = clusters.enter_context(_cluster(comparing.DISAGGREGATED, apart, directory))
        watch.vocab_size = ours.server.vocab_size or 0
        sweep: list[dict[str, Any]] = []
        if chunk_tokens is None:
            sweep = _sweep(up_options or [], directory, lambda: workloads(-1, ["mixed"])[0], watch, timeout_s)
            chunk_tokens = next(point["chunk_tokens"] for point in sweep if point["chosen"])
        together = ["--colocated", "--chunk-tokens", str(chunk_tokens), *(up_options or [])]
        baseline = clusters.enter_context(_cluster(comparing.COLOCATED, together, directory))
        systems = [ours, baseline, *(_foreign(name, address) for name, address in others)]
        with watch:
            measured = comparing.compare(
                systems,
                workloads,
                rounds=rounds,
                vocab_size=watch.vocab_size,
                timeout_s=timeout_s,
                on_begin=watch.begin,
            )
    configuration = {
        "rounds": rounds,
        "seed": first_seed,
        "workloads": [one.configuration for one in workloads(0)],
        "up_options": up_options or [],
    }
    document = results.document("compare", configuration, {**measured, "chunk_sweep": sweep})
    keep(document, output)
    if as_json:
        print_json(_without_samples(document))
    else:
        from pdctl.cli.bench_compare_table import render

        stdout_console().print(render(document))
    _fail_if_wrong(document["results"])


# --- systems -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _cluster(name: str, up_options: list[str], state_dir: Path) -> Iterator[System]:
    """A cluster of our own, up for the block, as a person would start it."""
    from pdctl.cli.bench_serve import server_of
    from pdctl.core.bench.compare import System

    where = ["--name", f"bench-{name}", "--state-dir", str(state_dir)]
    try:
        _pdctl(["up", "--port", "0", *where, *up_options])
    except (KeyboardInterrupt, SystemExit):
        _pdctl(["down", *where])
        raise
    try:
        server = server_of(None, None, None, f"bench-{name}", state_dir)
        yield System(name=name, server=server, configuration={"up": up_options})
    finally:
        _pdctl(["down", *where])


def _pdctl(arguments: list[str]) -> None:
    """Run one of our own commands to its end; its errors are ours."""
    remark(f"pdctl {' '.join(arguments)}")
    done = subprocess.run(
        [sys.executable, "-m", "pdctl.cli", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=_UP_DEADLINE_S,
        check=False,
    )
    if done.returncode:
        error = PdctlError(done.stderr.strip().removeprefix("pdctl: ") or f"exit code {done.returncode}")
        error.exit_code = done.returncode
        raise error


def _named_url(text: str) -> tuple[str, str]:
    name, equals, address = text.partition("=")
    if not name or not equals or not address.startswith(("http://", "https://")):
        raise UsageError(f"--url {text}: expected NAME=http://…")
    return name, address


def _foreign(name: str, address: str) -> System:
    from pdctl.cli.bench_serve import server_of
    from pdctl.core.bench.compare import System

    return System(name=name, server=server_of(address, None, None, "", None), configuration={"url": address})


def _sweep(
    up_options: list[str], state_dir: Path, workload: Any, watch: _Watch, timeout_s: float
) -> list[dict[str, Any]]:
    """The colocated cluster at several chunk sizes, each under the mixed workload once; the best is chosen.

    The best: the smallest product of the streams' p99 ITL and the prompts' TTFT. Smaller chunks give the one, larger
    chunks the other; a factor won in one must not cost more in the other.
    """
    from pdctl.core.bench.compare import COLOCATED, figures_of
    from pdctl.core.bench.serve import serve

    points = []
    for chunk in _CHUNKS:
        with _cluster(COLOCATED, ["--colocated", "--chunk-tokens", str(chunk), *up_options], state_dir) as system:
            measured = serve(
                system.server, workload(), objectives={}, vocab_size=watch.vocab_size, timeout_s=timeout_s
            )
        values = {figure.key: figure.of(measured) for figure in figures_of("mixed")}
        points.append({"chunk_tokens": chunk, **values, "chosen": False})

    def cost(point: dict[str, Any]) -> float:
        tail, ttft = point["p99_itl_under_prompts_ms"], point["median_prompt_ttft_ms"]
        return math.inf if tail is None or ttft is None else tail * ttft

    min(points, key=cost)["chosen"] = True
    return points


def _of_kind(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """The options of one workload: 8 streams of random prompts, unless said otherwise."""
    fixed = {
        "arrivals": "poisson",
        "burst_size": 4,
        "prefix_len": 512,
        "num_prefixes": 1,
        "turns": 4,
        "dataset": None,
    }
    given = {**fixed, **given}
    if kind != "mixed" and given["max_concurrency"] is None:
        given["max_concurrency"] = 8
    if kind == "random":
        given["num_prompts"] = given["num_prompts"] or 16
        given["input_len"] = given["input_len"] or 128
    return given


# --- what a person sees --------------------------------------------------------------------------------------


class _Watch:
    """A progress bar over rounds, workloads and systems, on a terminal; lines elsewhere."""

    def __init__(self, rounds: int, kinds: list[str], num_systems: int) -> None:
        self.vocab_size = 0
        self._rounds = rounds
        self._total = rounds * len(kinds) * num_systems
        self._progress: Any = None
        self._task: Any = None
        self._begun = 0

    def __enter__(self) -> None:
        if sys.stderr.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            from pdctl.cli.output import stderr_console

            columns = (BarColumn(24), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._progress = Progress(*columns, console=stderr_console(), transient=True)
            self._task = self._progress.add_task("", total=self._total)
            self._progress.start()

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def begin(self, number: int, system: str, workload: Workload) -> None:
        words = f"round {number + 1} of {self._rounds}: {workload.kind}, {system}"
        if self._progress is not None:
            self._progress.update(self._task, completed=self._begun, description=words)
        else:
            remark(words)
        self._begun += 1


def _without_samples(document: dict[str, Any]) -> dict[str, Any]:
    systems = [
        {
            **system,
            "workloads": {
                kind: {
                    "rounds": [
                        {key: value for key, value in one.items() if key != "samples"} for one in entry["rounds"]
                    ]
                }
                for kind, entry in system["workloads"].items()
            },
        }
        for system in document["results"]["systems"]
    ]
    return {**document, "results": {**document["results"], "systems": systems}}


def _fail_if_wrong(results: dict[str, Any]) -> None:
    """End with exit code 1 if requests failed, or if our two systems gave different tokens."""
    for system in results["systems"]:
        rounds = [one for entry in system["workloads"].values() for one in entry["rounds"]]
        failed = sum(one["summary"]["failed"] for one in rounds)
        if failed:
            first = next(error for one in rounds for error in one["summary"]["errors"])
            raise PdctlError(f"{system['name']}: {failed} requests failed; {first['kind']}: {first['first']}")
    equality = results["token_equality"]
    if equality["equal"] != equality["compared"]:
        where = equality["first_difference"]
        differing = equality["compared"] - equality["equal"]
        raise PdctlError(
            f"{differing} of {equality['compared']} answers differ between the two; the first: "
            f"{where['workload']}, round {where['round'] + 1}, request {where['index']}"
        )

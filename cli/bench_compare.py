"""`pdctl bench compare`: our disaggregated and colocated selves, and any URLs, on the same requests and cores."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from pdctl.cli import bench_options as options
from pdctl.cli.bench_run import OutputOption, bar, keep, tidy_end
from pdctl.cli.options import JsonOption, StateDirOption, state_dir_of
from pdctl.cli.output import print_json, remark, stdout_console
from pdctl.transport.errors import DeadlineError, PdctlError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdctl.core.bench.compare import System
    from pdctl.core.bench.workloads import Workload

_CHUNKS = (64, 128, 256, 512)
_KINDS = ("mixed", "random")
_COMPARABLE = ("mixed", "random", "shared-prefix", "multi-turn")
_UP_DEADLINE_S = 900.0
_DOWN_DEADLINE_S = 60.0
_ENDS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
# What may not stand after `--`, and why.
_OURS = {
    **dict.fromkeys(
        ("--name", "--state-dir", "--port", "--host", "--foreground"), "the clusters are the comparison's own"
    ),
    **dict.fromkeys(("--prefill", "--decode"), "of the disaggregated one, before the --"),
    **dict.fromkeys(("--colocated", "--chunk-tokens"), "of the colocated one: --chunk-tokens before the --"),
    "--api-key-file": "the clusters are the comparison's own",
}


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
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, max=1000, help="A multiple of the number of systems is fairest.")
    ] = 6,
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
    quiet_wait_s: Annotated[
        float,
        typer.Option("--quiet-wait", min=0, max=3600, help="Seconds to wait for a quiet machine before each turn."),
    ] = 15.0,
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
    from pdctl.core.bench import descriptors, results
    from pdctl.core.bench.machine import describe

    kinds = list(dict.fromkeys(workload or _KINDS))
    first_seed = secrets.randbits(31) if seed is None else seed
    directory = state_dir_of(state_dir)
    shared = _up_options(up_options or [])

    def workloads(number: int, vocab_size: int, only: Sequence[str] = kinds) -> list[Workload]:
        return [
            options.workload_of(kind, _of_kind(kind, {**given, "seed": first_seed + number}), vocab_size=vocab_size)
            for kind in only
        ]

    # All that can be wrong with what was asked is found before minutes of measuring.
    _check_kinds(kinds)
    planned = workloads(0, 1 << 10)
    descriptors.allow(max(one.num_at_once for one in planned))
    results.check_writable(output)
    others = [_foreign(text) for text in url or []]
    _check_names([comparing.DISAGGREGATED, comparing.COLOCATED, *(other.name for other in others)])
    machine = describe()
    apart = [*shared, "--prefill", str(prefill), "--decode", str(decode)]
    with tidy_end(), contextlib.ExitStack() as clusters:
        ours = clusters.enter_context(_cluster(comparing.DISAGGREGATED, apart, directory))
        vocab_size = ours.server.vocab_size or 0
        sweep: list[dict[str, Any]] = []
        if chunk_tokens is None:
            sweep = _sweep(shared, directory, workloads(-1, vocab_size, ["mixed"])[0], timeout_s)
            chunk_tokens = next(point["chunk_tokens"] for point in sweep if point["chosen"])
        together = [*shared, "--colocated", "--chunk-tokens", str(chunk_tokens)]
        baseline = clusters.enter_context(_cluster(comparing.COLOCATED, together, directory))
        systems = [ours, baseline, *others]
        with _watching(rounds, len(kinds) * len(systems)) as on_begin:
            measured = comparing.compare(
                systems,
                lambda number: workloads(number, vocab_size),
                rounds=rounds,
                timeout_s=timeout_s,
                quiet_wait_s=quiet_wait_s,
                on_begin=on_begin,
            )
    configuration = {
        "rounds": rounds,
        "seed": first_seed,
        "workloads": [one.configuration for one in planned],
        "up_options": shared,
    }
    document = results.document("compare", configuration, {**measured, "chunk_sweep": sweep}, machine)
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
    """A cluster of our own, up for the block; it goes down with us, whatever ends us."""
    from pdctl.cli.bench_serve import server_of
    from pdctl.core.bench.compare import System
    from pdctl.core.process import die_with_parent

    own = f"bench-{name}"
    shown = ["up", "--name", own, *up_options]
    remark(f"pdctl {' '.join(shown)}")
    command = [
        sys.executable,
        "-m",
        "pdctl.cli",
        *shown,
        "--foreground",
        "--port",
        "0",
        "--state-dir",
        str(state_dir),
    ]
    us = os.getpid()

    def begin() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        die_with_parent(us)

    with tempfile.TemporaryFile() as said:
        # Until it is ours to take down, nothing may end us: an exception amid a fork is lost, or loses the process.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            # Ctrl-C is ours: we take it down when we have stopped asking.
            start_new_session=True,
            preexec_fn=begin,
        )
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
            _await_ready(own, process, said, state_dir)
            server = server_of(None, None, None, own, state_dir)
            yield System(name=name, server=server, configuration={"up": up_options})
        finally:
            process.terminate()
            try:
                process.wait(_DOWN_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_ready(name: str, process: subprocess.Popen[bytes], said: IO[bytes], state_dir: Path) -> None:
    """Wait until a cluster answers; its errors are ours."""
    from pdctl.core.cluster import command, read_state

    deadline = time.monotonic() + _UP_DEADLINE_S
    while time.monotonic() < deadline:
        if (code := process.poll()) is not None:
            said.seek(0)
            lines = said.read().decode(errors="replace").splitlines()
            found = [at for at, line in enumerate(lines) if line.startswith("pdctl: ")]
            text = "\n".join(lines[found[-1] :]).removeprefix("pdctl: ") if found else f"exit code {code}"
            error = PdctlError(f"{name}: {text}")
            error.exit_code = max(code, 1)
            raise error
        state = read_state(state_dir, name)
        if state is not None and state.phase == "running":
            return
        time.sleep(0.05)
    raise DeadlineError(f"{name}: not up after {_UP_DEADLINE_S:.0f} s", hint=command("logs", name, state_dir))


def _up_options(given: list[str]) -> list[str]:
    """The options for both clusters.

    Raises:
        UsageError: one of them is for the comparison to set.
    """
    for word in given:
        if (flag := word.partition("=")[0]) in _OURS:
            raise UsageError(f"{flag} after --: {_OURS[flag]}", hint="pdctl bench compare --help")
    return given


def _check_kinds(kinds: list[str]) -> None:
    for kind in kinds:
        if kind not in _COMPARABLE:
            raise UsageError(f"--workload {kind}: expected some of {', '.join(_COMPARABLE)}")


def _check_names(names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--url {name}=…: that name is taken")


def _foreign(text: str) -> System:
    """A server that is not ours: NAME=URL. Our key is not for it."""
    import asyncio

    from pdctl.core.bench.client import find_server
    from pdctl.core.bench.compare import System

    name, equals, address = text.partition("=")
    if not name.isprintable() or not name or not equals or not address.startswith(("http://", "https://")):
        raise UsageError(f"--url {text}: expected NAME=http://…")
    server = asyncio.run(find_server(address, None, None))
    return System(name=name, server=server, configuration={"url": address})


def _sweep(up_options: list[str], state_dir: Path, workload: Workload, timeout_s: float) -> list[dict[str, Any]]:
    """The colocated cluster at several chunk sizes, each under the mixed workload once; the best is chosen.

    The best: the smallest product of the streams' p99 ITL and the prompts' TTFT. Smaller chunks give the one, larger
    chunks the other; a factor won in one must not cost more in the other.
    """
    from pdctl.core.bench.compare import COLOCATED, figures_of
    from pdctl.core.bench.serve import serve

    points: list[dict[str, Any]] = []
    for chunk in _CHUNKS:
        with _cluster(COLOCATED, [*up_options, "--colocated", "--chunk-tokens", str(chunk)], state_dir) as system:
            measured = serve(system.server, workload, objectives={}, timeout_s=timeout_s)
        _fail_if_any_failed(f"colocated, chunks of {chunk} tokens", [measured])
        values = {figure.key: figure.of(measured) for figure in figures_of("mixed")}
        points.append({"chunk_tokens": chunk, **values, "chosen": False})

    def cost(point: dict[str, Any]) -> float:
        tail, ttft = point["p99_itl_under_prompts_ms"], point["median_prompt_ttft_ms"]
        return math.inf if tail is None or ttft is None else tail * ttft

    best = min(points, key=cost)
    if math.isinf(cost(best)):
        raise PdctlError(
            "no stream had a token while a prompt was computed", hint="more --output-len, or --input-len"
        )
    best["chosen"] = True
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


@contextlib.contextmanager
def _watching(rounds: int, turns: int) -> Iterator[Callable[[int, str, Workload], None]]:
    """A progress bar over rounds and turns, on a terminal; lines elsewhere."""
    begun = 0
    with bar("") as show:

        def on_begin(number: int, system: str, workload: Workload) -> None:
            nonlocal begun
            words = f"round {number + 1} of {rounds}: {workload.kind}, {system}"
            show(begun, rounds * turns, words)
            if not sys.stderr.isatty():
                remark(words)
            begun += 1

        yield on_begin


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
        _fail_if_any_failed(
            system["name"], [one for entry in system["workloads"].values() for one in entry["rounds"]]
        )
    equality = results["token_equality"]
    if equality["equal"] != equality["compared"]:
        where = equality["first_difference"]
        differing = equality["compared"] - equality["equal"]
        raise PdctlError(
            f"{differing} of {equality['compared']} answers differ between the two; the first: "
            f"{where['workload']}, round {where['round'] + 1}, request {where['index']}"
        )


def _fail_if_any_failed(name: str, rounds: list[dict[str, Any]]) -> None:
    failed = sum(one["summary"]["failed"] for one in rounds)
    if failed:
        first = next(error for one in rounds for error in one["summary"]["errors_by_kind"])
        raise PdctlError(f"{name}: {failed} requests failed; {first['kind']}: {first['first']}")

"""`pdctl up`: decide everything, start the supervisor, show progress, return when requests are served."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from pdctl.cli.options import DEFAULT_CLUSTER, NameOption, StateDirOption, concerning, state_dir_of
from pdctl.cli.output import remark
from pdctl.transport.errors import AlreadyRunningError, DeadlineError, PdctlError, UsageError
from pdctl.transport.names import check_cluster, log_dir

if TYPE_CHECKING:
    from pdctl.core.config import ClusterSpec
    from pdctl.core.models import ResolvedModel
    from pdctl.core.weights.fingerprint import ModelFile

_STOP_WAIT_S = 15.0
DEFAULT_UP_TIMEOUT_S = 600.0
# What a main thread that can be reached at all needs to notice that the time is over.
_NOTICE_S = 5.0


def up(
    model: Annotated[
        str,
        typer.Option("--model", envvar="PDCTL_MODEL", help="smollm2 (embedded), a directory, or a Hugging Face id."),
    ] = "smollm2",
    name: NameOption = DEFAULT_CLUSTER,
    port: Annotated[
        int, typer.Option("--port", envvar="PDCTL_PORT", help="Of the HTTP API; 0: any free one.")
    ] = 8000,
    host: Annotated[str, typer.Option("--host", envvar="PDCTL_HOST", help="Address to serve on.")] = "127.0.0.1",
    prefill: Annotated[int, typer.Option("--prefill", help="Prefill daemons.")] = 1,
    decode: Annotated[int, typer.Option("--decode", help="Decode daemons.")] = 1,
    colocated: Annotated[
        bool,
        typer.Option(
            "--colocated", help="One process for prefill and decode, to measure what separate ones bring here."
        ),
    ] = False,
    dtype: Annotated[
        str, typer.Option("--dtype", help="float32, bfloat16, or auto: what this CPU is good at.")
    ] = "auto",
    block_size: Annotated[int, typer.Option("--block-size", help="Tokens of a KV block: 8, 16, 32, 64 or 128.")] = 16,
    kv_gib: Annotated[
        float | None, typer.Option("--kv-gib", help="Size of the KV pool in GiB.", show_default="1")
    ] = None,
    kv_blocks: Annotated[
        int | None,
        typer.Option("--kv-blocks", help="Size of the KV pool in blocks.", show_default="from --kv-gib"),
    ] = None,
    max_context: Annotated[
        int | None,
        typer.Option(
            "--max-context",
            help="Tokens of one request, prompt and answer together.",
            show_default="what the model can have, at most 8192",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            envvar="PDCTL_THREADS",
            help="Compute threads: all of them for prefill, one less for decode.",
            show_default="OMP_NUM_THREADS, else all cores",
        ),
    ] = None,
    local_prefill_tokens: Annotated[
        int | None,
        typer.Option(
            "--local-prefill-tokens",
            help="Prompts with at most so many uncached tokens go to decode directly; 0: none.",
            show_default="32",
        ),
    ] = None,
    chunk_tokens: Annotated[
        int, typer.Option("--chunk-tokens", help="Prompt tokens of one prefill step; colocated: of all in a step.")
    ] = 256,
    max_batch: Annotated[int, typer.Option("--max-batch", help="Requests a decode daemon runs at once.")] = 32,
    max_queue: Annotated[
        int,
        typer.Option("--max-queue", help="Requests that may wait for a daemon; beyond it: 429. 0: none waits."),
    ] = 256,
    verify_kv: Annotated[
        str,
        typer.Option(
            "--verify-kv",
            help="Seal KV blocks with checksums: off; recompute or fail what a dead daemon left broken.",
        ),
    ] = "off",
    on_failure: Annotated[
        str,
        typer.Option(
            "--on-failure", help="Requests of a daemon that dies: resume elsewhere, or fail with the cause."
        ),
    ] = "resume",
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            help="File with the key that clients must send.",
            show_default="PDCTL_API_KEY, else no key",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option("--allowed-host", help="A further name that clients may call this server by; repeatable."),
    ] = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay, show the logs; Ctrl-C takes it down.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            min=0.1,
            max=86400,
            help="Seconds until a start that has not come to its end is taken back. Time in which a model arrives "
            "over the network does not count.",
        ),
    ] = DEFAULT_UP_TIMEOUT_S,
    state_dir: StateDirOption = None,
) -> None:
    """Bring a cluster up; returns when it serves requests.

    With --foreground it stays and shows all logs. Ctrl-C then takes it down
    (exit code 0), a second one kills it (130); it does not outlive its terminal.
    """
    from pdctl.cli.models import pull_progress
    from pdctl.core import cluster, config, hosts, keys, models, private_files
    from pdctl.core.weights import fingerprint
    from pdctl.transport.mapping import check_room

    directory = state_dir_of(state_dir)
    check_cluster(name)
    concerning(name, directory)
    if dtype not in ("auto", *config.DTYPES):
        raise UsageError(f"--dtype {dtype}: expected one of auto, {', '.join(config.DTYPES)}")
    if kv_gib is not None and kv_blocks is not None:
        raise UsageError("--kv-gib and --kv-blocks: give one of them")
    if local_prefill_tokens is None:
        local_prefill_tokens = 0 if colocated else config.DEFAULT_LOCAL_PREFILL_TOKENS
    with _Deadline(timeout) as deadline:
        deadline.stage = f"reading the API key of {api_key_file}"
        key = keys.given_key(api_key_file)
        if api_key_file is not None and keys.others_can_read(api_key_file):
            remark(f"warning: other users can read {api_key_file}: chmod 600 {api_key_file}")
        deadline.stage = f"looking at the state directory {directory}"
        private_files.private_directory(directory)
        private_files.check_local(directory)
        cluster.check_trust(directory, name)
        cluster.refuse_if_running(directory, name)
        _look_elsewhere(directory, name, given=state_dir is not None)
        deadline.stage = f"reading the model {model}"
        with pull_progress() as progress:
            report = deadline.restarted_by(progress)
            resolved = models.resolve(model, report)
            files = fingerprint.model_files(resolved.path, report)
        spec = _spec(
            resolved,
            files,
            name=name,
            state_dir=directory,
            host=host,
            port=port,
            num_prefill=prefill,
            num_decode=decode,
            colocated=colocated,
            dtype=dtype,
            block_tokens=block_size,
            kv_gib=kv_gib,
            kv_blocks=kv_blocks,
            max_context=max_context,
            threads=threads,
            local_prefill_tokens=local_prefill_tokens,
            chunk_tokens=chunk_tokens,
            max_batch=max_batch,
            max_queue=max_queue,
            verify_kv=verify_kv,
            on_failure=on_failure,
            max_rows=config.rows_for(prefill, decode, max_batch),
            allowed_hosts=tuple(map(hosts.check_host_name, allowed_host or ())),
            api_key=key,
        )
        if not segments_may_be_reclaimed(name):
            check_room(spec.geometry)
        _supervise(spec, foreground=foreground, deadline=deadline)


def _look_elsewhere(directory: Path, name: str, *, given: bool) -> None:
    """Where a cluster of this name runs in another state directory: say it, or refuse if no place was `given`.

    Raises:
        AlreadyRunningError: whoever did not name a place hardly wants a second one of that name.
    """
    from pdctl.core import cluster

    others = [place for place in cluster.places_in_use(name) if place != directory]
    if not others:
        return
    words = cluster.places_words(others)
    if given:
        remark(f"cluster {name!r}: {words}; this one is another")
        return
    beside = cluster.command("up", name, directory, always_place=True)
    at = "".join(f"{cluster.command('status', name, place)}; " for place in others if place is not None)
    raise AlreadyRunningError(
        f"cluster {name!r}: already running: {words}; a second one here, in {directory}, would have to be asked for",
        hint=f"{at}another --name; or, for a second one: {beside}",
    )


def segments_may_be_reclaimed(name: str) -> bool:
    """Whether an earlier cluster of this name left a segment: its room comes free when the supervisor starts."""
    from pdctl.transport.names import segments_of

    return bool(segments_of(name))


def _spec(
    resolved: ResolvedModel,
    files: tuple[ModelFile, ...],
    *,
    dtype: str,
    kv_gib: float | None,
    kv_blocks: int | None,
    max_context: int | None,
    threads: int | None,
    **given: Any,
) -> ClusterSpec:
    """Everything decided: flags, what the model says, what the machine has."""
    from pdctl.core import cluster, config, numerics
    from pdctl.core.checkpoint import validate
    from pdctl.core.weights.fingerprint import fingerprint
    from pdctl.transport.errors import CapacityError
    from pdctl.transport.machine import cpu_share

    # Read after the digests were taken: if it has changed since, the first to load it will say so.
    of_model = validate(resolved.path)
    for line in of_model.remarks:
        remark(line)
    if dtype == "auto":
        dtype = numerics.default_dtype(of_model.dtype)
    context = config.context_of(of_model, max_context)
    if max_context is None and context < min(config.DEFAULT_MAX_CONTEXT, of_model.max_position_embeddings):
        remark(f"context: {context} tokens, {config.context_limit_words(of_model)}")
    if threads is not None and not 1 <= threads <= 1024:
        raise UsageError(f"--threads {threads}: expected 1 to 1024")
    threads_prefill, threads_decode = config.default_threads(threads)
    if threads_prefill > (share := cpu_share()).usable_cores:
        remark(f"warning: {threads_prefill} threads for prefill, but {share.words()}: they will wait for each other")

    def build(num_blocks: int) -> ClusterSpec:
        return config.ClusterSpec(
            model_path=resolved.path,
            model_name=resolved.name,
            model_files=files,
            fingerprint=fingerprint(files),
            num_layers=of_model.num_layers,
            num_kv_heads=of_model.num_kv_heads,
            head_dim=of_model.head_dim,
            vocab_size=of_model.vocab_size,
            eos_token_ids=of_model.eos_token_ids,
            sampling=of_model.sampling,
            dtype=dtype,
            num_blocks=num_blocks,
            max_context=context,
            threads_prefill=threads_prefill,
            threads_decode=threads_decode,
            **given,
        )

    if kv_blocks is not None:
        return build(kv_blocks)
    block_bytes = build(config.MIN_BLOCKS).geometry.block_bytes
    gib = config.DEFAULT_KV_GIB if kv_gib is None else kv_gib
    number = config.blocks_for(gib, block_bytes)
    if number < config.MIN_BLOCKS:
        raise CapacityError(
            f"--kv-gib {gib:g}: {number} blocks of {block_bytes} bytes; at least {config.MIN_BLOCKS} are needed",
            hint=cluster.command(f"up --kv-blocks {config.MIN_BLOCKS}", given["name"], given["state_dir"]),
        )
    return build(number)


class _Interrupted(BaseException):
    """A signal asks `up` to end before its work is done."""


class _TimedOut(BaseException):
    """`--timeout` is over."""


class _Signals:
    """SIGINT, SIGTERM and SIGHUP as an exception, but only while there is something that catches it.

    Attributes:
        received: the first one; later ones change nothing.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._raising = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Ignored by whoever started us (nohup, a shell's background): stays so.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: object) -> None:
        if self.received is None:
            self.received = number
            if self._raising:
                raise _Interrupted

    def raise_from_now_on(self) -> None:
        self._raising = True
        if self.received is not None:
            raise _Interrupted

    def hold(self) -> None:
        self._raising = False


class _Deadline:
    """The time that a start may take, and what it is at. When it is over, a `DeadlineError` that names that.

    A thread keeps the time: it raises in the main thread, which takes everything back. A main thread that hangs in
    the kernel (a file of a server that does not answer) hears no signal: then the thread itself ends the process.

    Attributes:
        stage: what is under way, in words.
        abandon: takes back what was started, if the main thread cannot.
    """

    def __init__(self, timeout_s: float) -> None:
        self.stage = "starting"
        self.abandon: Callable[[], None] = lambda: None
        self._timeout_s = timeout_s
        self._at = time.monotonic() + timeout_s
        self._heard = threading.Event()
        self._over = threading.Event()

    def __enter__(self) -> _Deadline:
        self._before = signal.signal(signal.SIGALRM, self._on_alarm)
        threading.Thread(target=self._watch, args=(threading.get_ident(),), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop()
        signal.signal(signal.SIGALRM, self._before)
        if kind is _TimedOut:
            raise self.error() from None

    def error(self, more: str = "") -> DeadlineError:
        return DeadlineError(
            f"not up after {self._timeout_s:g} s; under way: {self.stage}{more}",
            hint=f"--timeout {2 * self._timeout_s:g}, if it only needs longer",
        )

    def restart(self) -> None:
        """Count from now."""
        self._at = time.monotonic() + self._timeout_s

    def restarted_by(self, progress: Callable[[str, int, int], None]) -> Callable[[str, int, int], None]:
        """The same report of progress; each starts the time anew."""

        def report(phase: str, done: int, total: int) -> None:
            self.restart()
            progress(phase, done, total)

        return report

    def stop(self) -> None:
        self._over.set()

    def _on_alarm(self, *_: object) -> None:
        if not self._over.is_set() and not self._heard.is_set():
            self._heard.set()
            raise _TimedOut

    def _watch(self, main_thread: int) -> None:
        while (left := self._at - time.monotonic()) > 0:
            if self._over.wait(left):
                return
        signal.pthread_kill(main_thread, signal.SIGALRM)
        if self._heard.wait(_NOTICE_S) or self._over.is_set():
            return
        with contextlib.suppress(Exception):
            self.abandon()
        error = self.error()
        with contextlib.suppress(OSError):
            os.write(2, f"pdctl: {error.message}\n  try: {error.hint}\n".encode(errors="replace"))
        os._exit(error.exit_code)


def _supervise(spec: ClusterSpec, *, foreground: bool, deadline: _Deadline) -> None:
    from pdctl.core import cluster
    from pdctl.core.keys import KEY_VARIABLE

    began = time.monotonic()
    deadline.restart()
    deadline.stage = "the supervisor's start"
    command = [sys.executable, "-m", "pdctl.core.supervisor", "--parent", str(os.getpid())]
    if not foreground:
        command.append("--detach")
    signals = _Signals()
    # The key goes through the pipe, with the rest of the specification: no process needs it in its environment.
    environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    # A session of its own: a closed terminal does not reach it, its children share one scheduling group.
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        cwd="/",
        text=True,
        env=environment,
    )
    deadline.abandon = lambda: _take_back(spec, process)
    try:
        signals.raise_from_now_on()
        _start(spec, process, began, deadline)
        # From here on it is up: a signal that comes after the words below is for what is attended.
        signals.hold()
        deadline.stop()
        if foreground:
            remark("its logs follow; Ctrl-C takes it down")
            _attend(spec, process, signals)
        else:
            ask = cluster.command("generate", spec.name, spec.state_dir)
            remark(f'  {ask} "What is the capital of France?"')
    except (PdctlError, typer.Exit):
        # It said why and is on its way out; return when it is gone.
        deadline.stop()
        signals.hold()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_WAIT_S)
        raise
    except BaseException as error:
        # A signal, the end of the time, or a terminal that is gone, so that there is nobody to tell (and if it was
        # the terminal's end that sent the signal, any word to it fails as well): nothing of it stays.
        if not isinstance(error, _TimedOut):
            deadline.stop()
        signals.hold()
        _take_back(spec, process)
        if isinstance(error, _TimedOut):
            raise deadline.error(f"; cluster {spec.name!r} is down again") from None
        with contextlib.suppress(OSError):
            what = "interrupted" if signals.received is not None else f"{type(error).__name__}: {error}"
            remark(f"{what}: cluster {spec.name!r} is down again")
        if signals.received is not None:
            raise typer.Exit(128 + signals.received) from None
        raise


def _start(spec: ClusterSpec, process: subprocess.Popen[str], began: float, deadline: _Deadline) -> None:
    from pdctl.core import cluster

    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(spec.to_json())
    url = _follow(process.stdout, deadline)
    if url is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_WAIT_S)
        how = "does not end" if process.returncode is None else exit_words(process.returncode)
        raise PdctlError(
            f"the supervisor ended without a word ({how})",
            hint=cluster.command("logs supervisor", spec.name, spec.state_dir),
        )
    remark(f"up in {time.monotonic() - began:.1f} s: {url} serves {spec.model_name}")
    if (warning := exposure_of(spec)) is not None:
        remark(warning)


def _attend(spec: ClusterSpec, process: subprocess.Popen[str], signals: _Signals) -> None:
    """Show the logs until the cluster ends. A signal takes it down in order, a second one at once.

    Raises:
        PdctlError: its supervisor ended by itself, and not well.
        typer.Exit: there was a second signal.
    """
    from pdctl.cli.logs import POLL_S, Printer
    from pdctl.core import cluster
    from pdctl.core.log_files import Logs

    written = Logs(log_dir(spec.state_dir, spec.name), from_end=True)
    printer = Printer()
    told = False
    while process.poll() is None:
        if signals.received is not None:
            if told:
                process.kill()
                process.wait()
                cluster.tidy(spec.state_dir, spec.name)
                remark(f"cluster {spec.name!r}: killed")
                raise typer.Exit(128 + signals.received)
            told, signals.received = True, None
            process.send_signal(signal.SIGTERM)
            remark("taking it down; once more kills it")
        printer.print(written.read())
        time.sleep(POLL_S)
    printer.print(written.read())
    if process.returncode and not told:
        raise PdctlError(
            f"cluster {spec.name!r}: its supervisor ended ({exit_words(process.returncode)})",
            hint=cluster.command("logs supervisor", spec.name, spec.state_dir),
        )
    remark(f"cluster {spec.name!r}: down")


def exposure_of(spec: ClusterSpec) -> str | None:
    """What to warn of: a server that anybody may use who reaches this machine; None: nothing."""
    from pdctl.core.hosts import is_loopback

    if is_loopback(spec.host) or spec.api_key is not None:
        return None
    return (
        f"warning: --host {spec.host} serves everybody who reaches this machine, without a key: "
        "start it with --api-key-file FILE"
    )


def exit_words(code: int) -> str:
    """A return code as `subprocess` gives it, for people."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _take_back(spec: ClusterSpec, process: subprocess.Popen[str]) -> None:
    """What was started is taken down before we return."""
    from pdctl.core import cluster

    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)  # a stopped one could not hear us
    try:
        process.wait(_STOP_WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        # What does not end even now is for `down`.
        with contextlib.suppress(subprocess.TimeoutExpired, PdctlError):
            process.wait(_STOP_WAIT_S)
            cluster.tidy(spec.state_dir, spec.name)


def _follow(events: IO[str], deadline: _Deadline) -> str | None:
    """Show the supervisor's events until it is ready; its URL, or None if it ended.

    Raises:
        PdctlError: the supervisor's error, with its exit code.
    """
    with _Stages() as stages:
        for line in events:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if event["event"] == "error":
                error = PdctlError(event["message"], hint=event["hint"])
                error.exit_code = event["exit_code"]
                raise error
            if event["event"] == "ready":
                return str(event["url"])
            stages.show(event)
            deadline.stage = stages.under_way() or deadline.stage
    return None


class _Stages:
    """One line a stage: with a spinner on a terminal, plain when done elsewhere."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}
        self._unfinished: dict[str, str] = {}
        self._progress: Any = None
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> _Stages:
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            from rich.console import Console
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            self._progress = Progress(
                SpinnerColumn(finished_text="[green]✔[/]"),
                TextColumn("{task.description:<14}"),
                BarColumn(bar_width=24),
                TimeElapsedColumn(),
                TextColumn("[dim]{task.fields[detail]}[/]"),
                console=Console(stderr=True),
            )
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def under_way(self) -> str:
        """Which stages have begun and not ended, in words."""
        return ", ".join(f"{name}{how_far}" for name, how_far in self._unfinished.items())

    def show(self, event: dict[str, Any]) -> None:
        name, done = event["name"], event.get("state") == "done"
        began = self._began.setdefault(name, time.monotonic())
        if done:
            self._unfinished.pop(name, None)
        else:
            self._unfinished[name] = f" ({event['done']} of {event['total']})" if "total" in event else ""
        detail = event.get("detail") or ""
        if self._progress is None:
            if done:
                remark(f"{name}: {detail or f'{time.monotonic() - began:.1f} s'}")
            return
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=None, detail="")
        task = self._tasks[name]
        if event["event"] == "progress":
            self._progress.update(task, completed=event["done"], total=event["total"])
        elif done:
            self._progress.update(task, completed=1, total=1, detail=detail)
        elif detail:
            self._progress.update(task, detail=detail)

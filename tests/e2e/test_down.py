"""`down` during anything: it returns, and then there is no process, port, segment or state file.

Whatever it interrupts ends as well, with a word and not a traceback. S32, S35: the end of both.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdctl.cli import down as down_command
from pdctl.core import cluster as clusters
from pdctl.core.process import ProcessHandle
from pdctl.transport.layout import H, P
from pdctl.transport.names import segments_of
from pdctl.transport.rows import RowState
from pdctl.transport.segment import ParticipantState, Role, open_to_look, take_snapshot

pytestmark = pytest.mark.e2e

WATCHDOG_S = 120
NUM_STREAMS = 50


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + WATCHDOG_S
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.002)
    raise AssertionError(f"{what}: not in {WATCHDOG_S} s")


def options(model: Path, *more: str) -> list[str]:
    small = ["--kv-blocks", "256", "--max-context", "2048", "--threads", "1", "--dtype", "float32"]
    return ["--model", str(model), *small, "--local-prefill-tokens", "0", "--chunk-tokens", "8", *more]


class Commands:
    """Commands on one cluster that run beside each other; each has to end, and without a traceback."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._running: list[tuple[list[str], subprocess.Popen[bytes]]] = []

    def spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        place = ["--name", self._cluster.name, "--state-dir", str(self._cluster.state_dir)]
        command = [sys.executable, "-m", "pdctl.cli", *arguments, *place]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._running.append(([*arguments], process))
        return process

    def ended(self) -> list[tuple[list[str], int, str]]:
        """(arguments, exit code, what it complained of) of all that were not waited for yet."""
        found = []
        for arguments, process in self._running:
            _, err = process.communicate(timeout=WATCHDOG_S)
            assert b"Traceback" not in err, (arguments, err.decode())
            found.append((arguments, process.returncode, err.decode()))
        self._running.clear()
        return found


@pytest.fixture
def cluster(start: Any) -> Any:
    """A name; nothing is started yet, and what is gets taken down."""
    return start("--dtype", "none", expect_up=False)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine what ends in order takes longer than `down` waits elsewhere."""
    monkeypatch.setattr(down_command, "_GRACE_S", float(WATCHDOG_S))


@pytest.fixture
def commands(cluster: Any) -> Iterator[Commands]:
    made = Commands(cluster)
    yield made
    made.ended()


@contextlib.contextmanager
def kept_stopped(pid: int) -> Iterator[None]:
    """Stopped, and again whenever somebody wakes it, until it is dead."""
    over = threading.Event()

    def stop() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.0005)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def words_of(cluster: Any) -> Any:
    return take_snapshot(cluster.state.segment_name).segment


def asked(cluster: Any, seed: int, max_tokens: int = 1900) -> socket.socket:
    """A stream that nobody reads yet."""
    host, _, port = cluster.state.url.removeprefix("http://").rpartition(":")
    source = random.Random(seed)
    prompt = [source.randrange(3, 259) for _ in range(20)]
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection((host, int(port)), timeout=WATCHDOG_S)
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def streams(cluster: Any, number: int = NUM_STREAMS) -> list[socket.socket]:
    """So many; some are being decoded when this returns."""
    made = [asked(cluster, seed) for seed in range(number)]
    wait_for(lambda: words_of(cluster).rows.in_state(RowState.DECODING), "rows under way")
    return made


def assert_told(connections: list[socket.socket]) -> None:
    """Every stream comes to an end, and not to one that looks like success."""
    for connection in connections:
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                data += part
        connection.close()
        assert b"[DONE]" not in data


def assert_nothing_left(cluster: Any, url: str | None = None) -> None:
    cluster.assert_clean()
    assert not clusters.is_locked(cluster.state_dir, cluster.name)
    if url is not None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=10)


# --- before it runs ----------------------------------------------------------------------------------------


def _participants(cluster: Any) -> list[int]:
    """States of daemons in the segment."""
    for name in segments_of(cluster.name):
        with contextlib.suppress(Exception):
            segment = take_snapshot(name).segment
            slots = [*segment.slots(Role.PREFILL), *segment.slots(Role.DECODE)]
            return [segment.participant_word(slot, P.STATE) for slot in slots]
    return []


def _pid_of(cluster: Any, module: str) -> int | None:
    mark = f"{cluster.state_dir / cluster.name}/".encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes()
            if mark in command and module.encode() in command:
                return int(path.parent.name)
    return None


STAGES: dict[str, Callable[[Any], Any]] = {
    "before there is a segment": lambda one: clusters.is_locked(one.state_dir, one.name),
    "before there is a process": lambda one: segments_of(one.name),
    "while the weights load": lambda one: _pid_of(one, "pdctl.core.zygote"),
    "while the daemons prove": lambda one: ParticipantState.STARTING in _participants(one),
}


@pytest.mark.parametrize("stage", STAGES)
def test_down_while_it_starts(
    cluster: Any, commands: Commands, tiny_dir: Path, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.spawn("up", "--port", "0", *options(tiny_dir))
    wait_for(lambda: STAGES[stage](cluster), stage)
    down_command.down(cluster.name, cluster.state_dir)  # at once: a process would need a while to start
    assert_nothing_left(cluster)
    assert capsys.readouterr().err == f"cluster {cluster.name!r}: down\n"
    [(_, code, err)] = commands.ended()
    assert code == 1 and "taken down while it was starting" in err


def test_down_of_a_start_that_does_not_hear(
    cluster: Any, commands: Commands, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor is killed while a process that it made is not bound to its life yet: that one goes as well."""
    monkeypatch.setattr(down_command, "_GRACE_S", 0.2)
    send = ProcessHandle.send
    # Nothing wakes it: it must not even hear that it is to end.
    monkeypatch.setattr(ProcessHandle, "send", lambda one, sent: sent is signal.SIGCONT or send(one, sent))
    commands.spawn("up", "--port", "0", *options(tiny_dir))
    router = wait_for(lambda: _pid_of(cluster, "pdctl.core.router"), "the router")
    os.kill(router, signal.SIGSTOP)
    os.kill(cluster.state.supervisor_pid, signal.SIGSTOP)
    down_command.down(cluster.name, cluster.state_dir)
    assert_nothing_left(cluster)
    [(_, code, err)] = commands.ended()
    assert code == 1 and "signal SIGKILL" in err


# --- while it runs -----------------------------------------------------------------------------------------


def _scaling(cluster: Any, commands: Commands, _: contextlib.ExitStack) -> None:
    commands.spawn("scale", "decode=3", "prefill=2")
    wait_for(lambda: cluster.state.spec.num_decode == 3, "the wish")


def _restarting(cluster: Any, commands: Commands, _: contextlib.ExitStack) -> None:
    before = cluster.pid(Role.PREFILL)
    commands.spawn("restart")
    wait_for(lambda: [pid for _, pid in cluster.slots(Role.PREFILL)] != [before], "the first one's end")


def _draining_what_is_stopped(cluster: Any, commands: Commands, stack: contextlib.ExitStack) -> None:
    stack.callback(assert_told, streams(cluster, 3))
    os.kill(cluster.pid(Role.DECODE), signal.SIGSTOP)
    commands.spawn("drain", "decode-0", "--force")
    segment = stack.enter_context(contextlib.closing(open_to_look(cluster.state.segment_name)))
    [slot] = segment.slots(Role.DECODE)
    wait_for(lambda: segment.participant_word(slot, P.DRAIN), "the wish")
    assert segment.rows.owned_by(slot, segment.participant_word(slot, P.INCARNATION))


def _stopped_supervisor(cluster: Any, commands: Commands, _: contextlib.ExitStack) -> None:
    os.kill(cluster.state.supervisor_pid, signal.SIGSTOP)
    commands.spawn("scale", "decode=2")


def _holder_of_the_lock_hangs(cluster: Any, _: Commands, stack: contextlib.ExitStack) -> None:
    """Fifty streams, and whoever wants to change something waits for a process that nobody can wake."""
    stack.callback(assert_told, streams(cluster))
    segment = stack.enter_context(contextlib.closing(open_to_look(cluster.state.segment_name)))
    pid, source = cluster.pid(Role.DECODE), random.Random(1)

    def caught() -> bool:
        os.kill(pid, signal.SIGSTOP)
        while state_of(pid) != "T":
            time.sleep(0.0001)
        if segment.words[H.LOCK_PID] == pid:
            return True
        os.kill(pid, signal.SIGCONT)
        time.sleep(source.random() * 0.005)
        return False

    wait_for(caught, "a stop inside a section")
    stack.enter_context(kept_stopped(pid))


def _others_look_and_take_down(cluster: Any, commands: Commands, stack: contextlib.ExitStack) -> None:
    """Fifty streams; two more `down`, of which one is killed, and viewers until the end of it."""
    stack.callback(assert_told, streams(cluster))
    over = threading.Event()

    def look(*arguments: str) -> None:
        while not over.is_set():
            result = cluster.cli(*arguments)
            assert "Traceback" not in result.err, result
            assert result.code in (0, 3, 8), result

    viewers = [
        threading.Thread(target=look, args=arguments)
        for arguments in (("status",), ("inspect", "shm", "--verify"), ("inspect", "shm"))
    ]
    for viewer in viewers:
        viewer.start()
        stack.callback(viewer.join)
    stack.callback(over.set)
    commands.spawn("down")
    commands.spawn("down").kill()


# What the commands say that it interrupts.
CODES = {"scale": {1, 3}, "restart": {3}, "drain": {3}, "down": {0, -signal.SIGKILL}}
DISTURBANCES = [
    _scaling,
    _restarting,
    _draining_what_is_stopped,
    _stopped_supervisor,
    _holder_of_the_lock_hangs,
    _others_look_and_take_down,
]


@pytest.mark.parametrize("disturb", DISTURBANCES, ids=[one.__name__.strip("_") for one in DISTURBANCES])
def test_down_during(
    start: Any,
    tiny_dir: Path,
    disturb: Callable[[Any, Commands, contextlib.ExitStack], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = start(*options(tiny_dir))
    commands, url = Commands(cluster), cluster.state.url
    with contextlib.ExitStack() as stack:
        disturb(cluster, commands, stack)
        down_command.down(cluster.name, cluster.state_dir)
        assert_nothing_left(cluster, url)
    assert "did not end" not in capsys.readouterr().err
    for arguments, code, err in commands.ended():
        assert code in CODES[arguments[0]], (arguments, code, err)
    # But for the one that nobody can wake, all ended when they were told.
    log = cluster.cli("logs", "supervisor").out
    assert disturb is _holder_of_the_lock_hangs or "did not stop in" not in log

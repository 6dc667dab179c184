"""What a running cluster can be asked: it changes under streams, and no token of theirs tells.

Tests of one running cluster share it; each leaves it with one daemon of a role, serving.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pdctl.core import cluster as clusters
from pdctl.core import control_client, survey
from pdctl.core.status import DAEMON_ROLES, ParticipantStatus, cluster_status
from pdctl.transport.errors import DeadlineError
from pdctl.transport.layout import H, P, R
from pdctl.transport.names import all_segments, control_path
from pdctl.transport.rows import RowState
from pdctl.transport.segment import ParticipantState, Role, take_snapshot

pytestmark = pytest.mark.e2e

WATCHDOG_S = 120
PROMPTS = [f"{number} tells a story of {'x' * 60 * number}" for number in range(2)]
# Long enough to be under way during three operations.
NUM_TOKENS = 1400
SIZE = ["--port", "0", "--threads", "1", "--dtype", "float32", "--max-context", "2048", "--kv-blocks", "640"]


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + WATCHDOG_S
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"{what}: not in {WATCHDOG_S} s")


@pytest.fixture(scope="module")
def shared(start_shared: Any, tiny_dir: Path) -> Any:
    return start_shared("--model", str(tiny_dir), *SIZE, "--local-prefill-tokens", "0", "--chunk-tokens", "8")


@pytest.fixture(scope="module")
def expected(shared: Any) -> list[list[int]]:
    """What the streams say when nothing happens."""
    return [future.result(WATCHDOG_S) for future in streams(shared)]


def streams(cluster: Any) -> list[Future[list[int]]]:
    """One request a prompt, all at once; their rows are being decoded when this returns."""
    pool = ThreadPoolExecutor(len(PROMPTS))
    futures = [pool.submit(cluster.ids, prompt, NUM_TOKENS) for prompt in PROMPTS]
    pool.shutdown(wait=False)
    wait_for(lambda: len(decoding(cluster)) == len(PROMPTS), "streams under way")
    return futures


def decoding(cluster: Any) -> list[int]:
    """Rows in which tokens are coming."""
    rows = take_snapshot(cluster.state.segment_name).segment.rows
    found = [row for row, state in enumerate(rows.states()) if state == RowState.DECODING]
    return [row for row in found if rows.get(row, R.NUM_TOKENS) > rows.get(row, R.NUM_PROMPT) + 5]


def assert_under_way(running: list[Future[list[int]]]) -> None:
    assert not any(future.done() for future in running), "they ended too soon for this test to mean anything"


def assert_computed_once(rows: Any, found: list[int]) -> None:
    """Whoever took these rows up had nothing of them to compute but the next token."""
    for row in found:
        assert (rows.get(row, R.ADOPTIONS), rows.get(row, R.PREEMPTIONS), rows.get(row, R.LOCAL_TOKENS)) == (0, 0, 0)
        assert rows.get(row, R.PREFILLED_TOKENS) == rows.get(row, R.NUM_PROMPT) - 1 - rows.get(row, R.CACHED_TOKENS)


def operate(cluster: Any, operation: str, **more: Any) -> tuple[dict[str, Any], list[str]]:
    """As a command does, without starting one: its answer, and what it heard on the way."""
    heard: list[str] = []
    request = {"operation": operation, **more}
    answer = control_client.ask(
        cluster.state_dir, cluster.name, request, timeout_s=WATCHDOG_S, on_progress=heard.append
    )
    return answer, heard


def ask(cluster: Any, *arguments: str, code: int = 0) -> Any:
    """The command line, to its end."""
    result = cluster.cli(*arguments)
    assert result.code == code, result
    return result


def processes(cluster: Any) -> list[ParticipantStatus]:
    return [one for one in cluster_status(cluster.state_dir, cluster.name).processes if one.alive]


def names(cluster: Any) -> list[str]:
    """Daemons as `status` has them."""
    return sorted(one.name for one in processes(cluster) if one.role in DAEMON_ROLES)


def pids(cluster: Any) -> dict[str, int]:
    return {one.name: one.pid for one in processes(cluster)}


def counters(cluster: Any) -> tuple[int, int]:
    words = take_snapshot(cluster.state.segment_name).segment.words
    return words[H.ADOPTIONS], words[H.DEATHS]


def test_scaling_under_streams(shared: Any, expected: list[list[int]]) -> None:
    """Up and down while they run: the new ones work, the leaving ones hand over, nobody dies or computes again."""
    before, running = counters(shared), streams(shared)
    up, heard = operate(shared, "scale", numbers={"decode": 3, "prefill": 2})
    assert up == {"started": ["prefill-1", "decode-1", "decode-2"], "stopped": [], "prefill": 2, "decode": 3}
    assert heard == ["prefill-1: ready", "decode-1: ready", "decode-2: ready"]
    # Decode-0 has them all: the others get them when it leaves its place to a successor.
    operate(shared, "restart", names=["decode-0"])
    moved = wait_for(lambda: decoding(shared), "streams under way")
    assert_computed_once(take_snapshot(shared.state.segment_name).segment.rows, moved)
    down, _ = operate(shared, "scale", numbers={"decode": 1, "prefill": 1})
    assert down == {"started": [], "stopped": ["prefill-1", "decode-1", "decode-2"], "prefill": 1, "decode": 1}
    assert_under_way(running)
    assert [future.result(WATCHDOG_S) for future in running] == expected
    assert counters(shared) == before


def test_the_new_numbers_are_known_everywhere(shared: Any) -> None:
    up = ask(shared, "scale", "decode=2")
    assert up.err.splitlines() == ["decode-1: ready", f"cluster {shared.name!r}: prefill=1 decode=2"]
    assert names(shared) == ["decode-0", "decode-1", "prefill-0"]
    spec = json.loads(clusters.spec_path(shared.state_dir, shared.name).read_text())
    assert (shared.state.spec.num_decode, spec["num_decode"]) == (2, 2)
    ask(shared, "status")
    down = json.loads(ask(shared, "scale", "decode=1", "--json").out)
    assert down == {"started": [], "stopped": ["decode-1"], "prefill": 1, "decode": 1}
    assert names(shared) == ["decode-0", "prefill-0"]


def test_draining_under_streams(shared: Any, expected: list[list[int]]) -> None:
    """What the drained daemon had goes on with its peer where it stood; back again with --undo."""
    ask(shared, "scale", "decode=2")
    before, running = counters(shared), streams(shared)
    for name, other in (("decode-0", "decode-1"), ("decode-1", "decode-0")):
        operate(shared, "drain", name=name)
        segment = take_snapshot(shared.state.segment_name).segment
        drained, peer = (slot_of(segment, one) for one in (name, other))
        assert segment.participant_word(drained, P.STATE) == ParticipantState.DRAINED
        assert segment.participant_word(drained, P.LOAD) == 0
        rows = wait_for(lambda: decoding(shared), "streams under way")
        segment = take_snapshot(shared.state.segment_name).segment
        assert {segment.rows.get(row, R.OWNER) - 1 for row in rows} == {peer}
        assert_computed_once(segment.rows, rows)
        operate(shared, "drain", name=name, undo=True)
    assert_under_way(running)
    assert [future.result(WATCHDOG_S) for future in running] == expected
    assert counters(shared) == before


def test_drained_is_shown_and_outlives_the_process(shared: Any) -> None:
    ask(shared, "scale", "decode=2")
    assert ask(shared, "drain", "decode-1").err == "decode-1: drained\n"
    status = ask(shared, "status")
    assert [line.split()[3] for line in status.out.splitlines() if " decode-1 " in line] == ["drained"]
    refused = ask(shared, "drain", "decode-0", code=2)
    assert "drain decode-0: no other decode daemon" in refused.err
    assert "--force" in refused.err and str(shared.state_dir) in refused.err
    os.kill(pids(shared)["decode-1"], signal.SIGKILL)
    wait_for(lambda: state_of(shared, "decode-1") == "drained", "its successor")
    assert ask(shared, "drain", "--undo", "decode-1").err == "decode-1: serves again\n"
    assert state_of(shared, "decode-1") == "ready"
    ask(shared, "scale", "decode=1")


def slot_of(segment: Any, name: str) -> int:
    role, _, index = name.partition("-")
    slots = segment.slots(Role[role.upper()])
    return next(slot for slot in slots if segment.participant_word(slot, P.INDEX) == int(index))


def state_of(cluster: Any, name: str) -> str | None:
    return next((one.state for one in processes(cluster) if one.name == name), None)


def test_drained_by_force_nobody_works_until_it_is_undone(shared: Any) -> None:
    """S42: a role without anybody is told by health and status; by requests: test_requests.py."""
    ask(shared, "drain", "prefill-0", "--force")
    assert shared.get("/health/ready") == 503
    status = ask(shared, "status", code=8)
    assert "no prefill is ready" in status.out
    ask(shared, "drain", "prefill-0", "--undo")
    assert shared.get("/health/ready") == 200
    assert len(shared.ids("not in the cache yet", 3)) == 3


def test_a_rolling_restart_under_streams(shared: Any, expected: list[list[int]]) -> None:
    before, old, running = counters(shared), pids(shared), streams(shared)
    _, heard = operate(shared, "restart")
    assert heard == ["prefill-0: ready", "decode-0: ready"]
    assert_under_way(running)
    new = pids(shared)
    assert {name for name in old if old[name] != new[name]} == {"prefill-0", "decode-0"}
    assert [future.result(WATCHDOG_S) for future in running] == expected
    assert counters(shared) == before
    # One that does not hear is killed in the end, and replaced all the same.
    os.kill(new["decode-0"], signal.SIGSTOP)
    ask(shared, "restart", "decode-0")
    assert len(shared.ids("hello", 4)) == 4


def test_the_router_is_restarted_by_name(shared: Any) -> None:
    old, url = pids(shared), shared.state.url
    ask(shared, "restart", "router")
    new = pids(shared)
    assert {name for name in old if old[name] != new[name]} == {"router"}
    assert shared.state.url == url
    assert len(shared.ids("hello", 4)) == 4


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["scale", "decode=0"], 2, "expected 1 to 16"),
        (["scale", "decode=17"], 2, "expected 1 to 16"),
        (["scale", "decode"], 2, "expected ROLE=N"),
        (["scale", "decode=1", "decode=2"], 2, "given twice"),
        (["scale", "router=2"], 2, "expected one of prefill, decode"),
        (["drain", "decode-9"], 3, "expected one of zygote, router, prefill-0, decode-0"),
        (["drain", "router"], 2, "only prefill and decode daemons"),
        (["restart", "zygote"], 2, "shares the weights"),
        (["restart", "decode-0", "nobody"], 3, "process 'nobody'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_asked(shared: Any, arguments: list[str], code: int, words: str) -> None:
    result = ask(shared, *arguments, code=code)
    assert words in result.err
    assert "Traceback" not in result.err
    assert len(result.err.splitlines()) <= 2


def test_garbage_on_the_control_socket(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else notices, and the supervisor goes on."""
    path = str(control_path(shared.state_dir / shared.name))
    for data in (
        b"\0\xff" * 100_000,
        b"[" * 70_000,
        b"{}\n" * 1000,
        b'{"operation": "scale", "numbers": {"decode": 2}}',
    ):
        with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):
            client.connect(path)
            client.sendall(data)
    silent = [socket.socket(socket.AF_UNIX) for _ in range(20)]
    for client in silent:
        client.connect(path)
    before = pids(shared)
    assert "as before" in ask(shared, "scale", "decode=1").err
    assert pids(shared) == before
    for client in silent:
        client.close()
    os.kill(shared.state.supervisor_pid, signal.SIGSTOP)
    try:
        monkeypatch.setattr(control_client, "_HEARD_S", 0.5)
        with pytest.raises(DeadlineError, match=f"pid {shared.state.supervisor_pid}. does not answer"):
            operate(shared, "scale", numbers={"decode": 1})
        assert len(shared.ids("hello", 4)) == 4
    finally:
        os.kill(shared.state.supervisor_pid, signal.SIGCONT)
    assert len(shared.ids("hello", 4)) == 4


# --- in the foreground, and what the dead leave ------------------------------------------------------------


class Foreground:
    """`pdctl up --foreground`, up and serving."""

    def __init__(self, start: Any, tiny_dir: Path) -> None:
        self.cluster = start("--dtype", "none", expect_up=False)
        place = ["--name", self.cluster.name, "--state-dir", str(self.cluster.state_dir)]
        command = [sys.executable, "-m", "pdctl.cli", "up", "--foreground", "--model", str(tiny_dir), *SIZE, *place]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.first_words = []
        for line in self.process.stderr:
            self.first_words.append(line)
            if "Ctrl-C takes it down" in line:
                return
        raise AssertionError(self.first_words)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=WATCHDOG_S)
        return self.process.returncode, out, err


@pytest.fixture
def foreground(start: Any, tiny_dir: Path) -> Iterator[Foreground]:
    made = Foreground(start, tiny_dir)
    yield made
    made.process.kill()
    made.process.communicate(timeout=WATCHDOG_S)


def test_ctrl_c_takes_a_foreground_cluster_down(foreground: Foreground) -> None:
    ask(foreground.cluster, "scale", "decode=2")
    foreground.process.send_signal(signal.SIGINT)
    code, out, err = foreground.end()
    assert code == 0, err
    assert err.splitlines()[-1] == f"cluster {foreground.cluster.name!r}: down"
    # The logs of all, of one that started later too.
    assert {line.split(" | ")[0].strip() for line in out.splitlines()} >= {"supervisor", "decode-0", "decode-1"}
    foreground.cluster.assert_clean()


def test_ctrl_c_twice_kills_a_foreground_cluster_that_does_not_hear(foreground: Foreground) -> None:
    os.kill(foreground.cluster.state.supervisor_pid, signal.SIGSTOP)
    assert foreground.process.stderr is not None
    foreground.process.send_signal(signal.SIGINT)
    assert "once more kills it" in foreground.process.stderr.readline()
    foreground.process.send_signal(signal.SIGINT)
    code, _, err = foreground.end()
    assert (code, err) == (130, f"cluster {foreground.cluster.name!r}: killed\n")
    foreground.cluster.assert_clean()


def test_a_foreground_cluster_does_not_outlive_its_terminal(foreground: Foreground) -> None:
    foreground.process.kill()
    supervisor = foreground.cluster.state_dir / foreground.cluster.name
    wait_for(lambda: not supervisor.exists(), "its end")
    wait_for(
        lambda: not [one for one in all_segments() if one.cluster == foreground.cluster.name], "its segment's end"
    )


def test_a_killed_cluster_is_listed_and_collected(
    foreground: Foreground, shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A living one, of another state directory, is listed as foreign and not touched."""
    cluster, other = foreground.cluster, shared
    # Other tests on this machine may have dead clusters of their own that they still need.
    ours = (cluster.name, other.name)
    monkeypatch.setattr(survey, "all_segments", lambda: [one for one in all_segments() if one.cluster in ours])

    def listed() -> dict[str, str]:
        return {one.name: one.phase for one in survey.survey(cluster.state_dir)}

    assert listed() == {cluster.name: "running", other.name: "foreign"}
    assert survey.collect(cluster.state_dir, logs=True) == []
    os.kill(cluster.state.supervisor_pid, signal.SIGKILL)
    code, _, err = foreground.end()
    assert code == 1
    assert "its supervisor ended (signal SIGKILL)" in err
    assert listed() == {cluster.name: "crashed", other.name: "foreign"}
    wanted = survey.leftovers(cluster.state_dir, logs=True)
    assert [one.kind for one in wanted] == ["logs", "segment", "state"]
    removed = survey.collect(cluster.state_dir, logs=True)
    assert [(one.kind, one.removed, one.num_bytes) for one in removed] == [
        (one.kind, True, one.num_bytes) for one in wanted
    ]
    cluster.assert_clean()
    assert listed() == {other.name: "foreign"}
    assert survey.collect(cluster.state_dir, logs=True) == []
    assert len(other.ids("hello", 4)) == 4


# --- the end --------------------------------------------------------------------------------------------------


def test_down_under_streams_and_an_idle_connection(shared: Any) -> None:
    """S34: every client hears of it. The last test of this cluster."""
    address = shared.state.url.removeprefix("http://")
    idle = http.client.HTTPConnection(address, timeout=WATCHDOG_S)
    idle.request("GET", "/health")
    assert idle.getresponse().read()
    endings: list[str] = []

    def read() -> None:
        connection = http.client.HTTPConnection(address, timeout=WATCHDOG_S)
        body = {"prompt": "on and on", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        data = b""
        try:
            answer = connection.getresponse()
            while part := answer.read1(65536):
                data += part
            endings.append("error" if b'"error"' in data else "done" if b"[DONE]" in data else "closed")
        except (http.client.HTTPException, OSError):
            endings.append("closed")

    readers = [threading.Thread(target=read, daemon=True) for _ in range(3)]
    for reader in readers:
        reader.start()
    wait_for(lambda: len(decoding(shared)) == 3, "three streams")
    shared.down()
    for reader in readers:
        reader.join(WATCHDOG_S)
    assert len(endings) == 3
    assert set(endings) <= {"error", "closed"}
    assert idle.sock is not None and idle.sock.recv(1) == b""

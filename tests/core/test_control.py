"""The control socket under every kind of client: one that behaves is served, whatever the others do."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdctl.core import control, control_client
from pdctl.core.control import MAX_CLIENTS, MAX_REQUEST_BYTES, ControlClient, ControlServer
from pdctl.core.operations import timeout_of
from pdctl.transport.errors import DeadlineError, NotFoundError, PdctlError, UsageError

WATCHDOG_S = 30


class Server:
    """A ControlServer in a loop as the supervisor's, in a thread; answers a request with itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.selector = selectors.DefaultSelector()
        self.control = ControlServer(path, self.selector, self.answer)
        self.held: list[ControlClient] = []
        self._ends = False
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def answer(self, client: ControlClient, request: dict[str, Any]) -> None:
        kind = request.get("operation")
        if kind == "hold":
            self.held.append(client)
        elif kind == "flood":
            while not client.is_gone:
                client.say(progress="x" * 10_000)
        else:
            client.say(progress="one")
            client.say(progress="two")
            client.finish(done=request)

    def _loop(self) -> None:
        while not self._ends:
            deadline = self.control.next_deadline()
            pause = 0.01 if deadline is None else min(0.01, max(0, deadline - time.monotonic()))
            for key, _ in self.selector.select(pause):
                key.data()
            self.control.expire()

    def close(self) -> None:
        self._ends = True
        self._thread.join(WATCHDOG_S)
        assert not self._thread.is_alive()
        self.control.close()
        self.selector.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "control")
    yield made
    made.close()
    assert not made.path.exists()


def connect(server: Server) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(WATCHDOG_S)
    deadline = time.monotonic() + WATCHDOG_S
    while True:
        try:
            connection.connect(str(server.path))
            return connection
        except BlockingIOError:  # the queue of connections is full
            assert time.monotonic() < deadline
            time.sleep(0.01)


def said(connection: socket.socket) -> list[dict[str, Any]]:
    """Everything up to the end of the conversation."""
    data = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            data += part
    connection.close()
    return [json.loads(line) for line in data.splitlines()]


def send(server: Server, data: bytes) -> list[dict[str, Any]]:
    connection = connect(server)
    # The other end may have had enough before we are through.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(data)
    return said(connection)


def assert_serves(server: Server) -> None:
    request = {"operation": "echo", "text": "ä"}
    answer = send(server, json.dumps(request).encode() + b"\n")
    assert answer == [{"taken": True}, {"progress": "one"}, {"progress": "two"}, {"done": request}]


def test_a_request_is_answered_and_the_socket_is_private(server: Server) -> None:
    assert_serves(server)
    assert stat.S_IMODE(server.path.lstat().st_mode) == 0o600


@pytest.mark.parametrize(
    "data",
    [
        b"\n",
        b"garbage\n",
        b"\0\xff\xfe\n",
        b"[]\n",
        b"5\n",
        b'{"operation": \n',
        b"[" * MAX_REQUEST_BYTES + b"\n",
        b"x" * (MAX_REQUEST_BYTES + 1) + b"\n",
        b"x" * (4 * MAX_REQUEST_BYTES),
        b'{"operation": "echo"}\n{"operation": "echo"}\n',
    ],
    ids=lambda data: repr(data[:12]),
)
def test_what_is_no_request_is_refused(server: Server, data: bytes) -> None:
    (answer,) = send(server, data)
    assert answer["error"]["exit_code"] == UsageError.exit_code
    assert answer["error"]["message"].startswith("control: expected")
    assert_serves(server)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    line=st.one_of(
        st.binary(max_size=300),
        st.recursive(
            st.one_of(st.none(), st.floats(), st.text()),
            lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
        ).map(lambda value: json.dumps(value).encode()),
    )
)
def test_any_line_is_answered_once(server: Server, line: bytes) -> None:
    answers = send(server, line + b"\n")
    assert [next(iter(answer)) for answer in answers] in (["error"], ["taken", "progress", "progress", "done"])


def test_bytes_may_come_one_by_one(server: Server) -> None:
    connection = connect(server)
    for byte in b'{"operation": "echo"}\n':
        connection.send(bytes([byte]))
    assert said(connection)[-1] == {"done": {"operation": "echo"}}


def test_who_says_nothing_is_cut_off_and_others_wait_for_a_place(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "PATIENCE_S", 0.5)
    silent = [connect(server) for _ in range(MAX_CLIENTS + 5)]
    # All places are taken: this one is served when the silent are gone.
    assert_serves(server)
    for connection in silent:
        assert said(connection) == []


def test_who_does_not_read_is_cut_off(server: Server) -> None:
    slow = connect(server)
    slow.sendall(b'{"operation": "flood"}\n')
    # The server's loop came back from the flood: what the client left unread has a limit.
    assert_serves(server)
    lines = slow.makefile("rb").readlines()
    assert json.loads(lines[1]) == {"progress": "x" * 10_000}
    slow.close()


def test_who_leaves_is_noticed(server: Server) -> None:
    first, second = connect(server), connect(server)
    for connection in (first, second):
        connection.sendall(b'{"operation": "hold"}\n')
        assert json.loads(connection.recv(100)) == {"taken": True}
    first.close()
    second.sendall(b"more")  # a request is all there is to say
    assert said(second) == []
    assert_serves(server)
    assert [client.is_gone for client in server.held] == [True, True]
    for client in server.held:
        client.say(progress="nobody hears it")
        client.finish(done={})


# --- the other end -----------------------------------------------------------------------------------------


@pytest.fixture
def asked(cluster: Any) -> Iterator[Any]:
    cluster.run()
    yield cluster


def ask(cluster: Any, operation: str, progress: list[str], timeout_s: float = WATCHDOG_S) -> dict[str, Any]:
    request = {"operation": operation}
    return control_client.ask(
        cluster.state_dir, cluster.name, request, timeout_s=timeout_s, on_progress=progress.append
    )


def test_asking(asked: Any) -> None:
    server, heard = Server(asked.state_dir / asked.name / "control"), list[str]()
    try:
        assert ask(asked, "echo", heard) == {"operation": "echo", "timeout_s": WATCHDOG_S}
        assert heard == ["one", "two"]
        too_long = {"x": "y" * MAX_REQUEST_BYTES}
        with pytest.raises(PdctlError, match="control"):
            control_client.ask(asked.state_dir, asked.name, too_long, timeout_s=1, on_progress=heard.append)
    finally:
        server.close()


def test_asking_nobody(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFoundError, match=r"control socket .*: No such file"):
        ask(asked, "echo", [])
    path = asked.state_dir / asked.name / "control"
    silent = socket.socket(socket.AF_UNIX)
    silent.bind(str(path))
    silent.listen(0)
    monkeypatch.setattr(control_client, "_HEARD_S", 0.2)
    for _ in range(3):  # heard, but not answered; later: not even heard
        with pytest.raises(DeadlineError, match=f"supervisor .pid {os.getpid()}. does not answer"):
            ask(asked, "echo", [])
    silent.close()


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, "5", None, 86401])
def test_a_timeout_that_cannot_be(value: object) -> None:
    with pytest.raises(UsageError, match="--timeout"):
        timeout_of({"timeout_s": value})
    assert timeout_of({"timeout_s": 5}) == 5.0
